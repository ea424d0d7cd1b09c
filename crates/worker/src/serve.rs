//! The worker's side of the link: carries out commands, one task each, and tells news.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ate_name::{ActorUid, Generation, OpId};
use ate_network::Interior;
use ate_orders::{Identity, Spent, chain};
use ate_sandbox::{LinkConfig, Reaper, SandboxError};
use ate_sys::Memory;
use parking_lot::Mutex;
use tokio::io::Interest;
use tokio::net::unix::pipe;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{broadcast, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::boxes::{self, Place, Warm, WarmBox, clear_away};
use crate::durable::Durable;
use crate::link::{
    Activate, Answer, Call, Capture, Command, Event, Prepare, Recalled, Refusal, Report, Said, Source, Writer,
};
use crate::output::Sink;
use crate::root::Sockets;
use crate::tenant::{Events, Leaving, Phases, Tenant, memory};
use crate::{Config, ORPHANED_AFTER, WorkerError, egress, identity, ingress, names, ready};

/// Whoever starts a worker connects to it within ten seconds or ends it. One that was killed in between may not even have written
/// down that there is one: then nobody will ever come.
const FIRST_NODE_WITHIN: Duration = Duration::from_secs(15);

/// News not yet told. A tenant produces one per freeze or thaw; a node that is this far behind asks for a report.
const EVENT_BUFFER: usize = 256;

/// How often a worker looks at its lease, and at its actor when the lease is over.
const LEASE_LOOK: Duration = Duration::from_secs(1);
const LEASE_TICK: Duration = Duration::from_millis(200);

/// Replies and news on their way to the node.
const OUTBOX: usize = 64;

pub(crate) struct Worker {
    config: Config,
    interior: Interior,
    reaper: Reaper,
    slot: Mutex<Slot>,
    /// Held by a capture: one that is asked for twice is done once.
    capturing: tokio::sync::Mutex<()>,
    pub(crate) events: Events,
    /// Until when its actor may meet others; `None`: always.
    lease: watch::Sender<Option<Duration>>,
    stop: CancellationToken,
}

#[derive(Default)]
struct Slot {
    next_box: u64,
    warm: Warm,
    /// Taken by an activation that is under way, or hosting.
    taken: bool,
    tenant: Option<Arc<Tenant>>,
    place: Option<Place>,
    sink: Sink,
    captures: HashMap<OpId, CancellationToken>,
    retained: HashMap<OpId, Retained>,
    /// Who was tried here: an order that comes late, or twice, must not try again.
    been_here: Spent,
}

/// What was captured and is not known to be stored.
struct Retained {
    image: Option<Memory>,
    archive: Option<File>,
    image_bytes: u64,
    memo: serde_json::Value,
}

pub(crate) async fn serve(config: &Config, sockets: Sockets, interior: Interior) -> Result<(), WorkerError> {
    let reaper = Reaper::default();
    let worker = Arc::new(Worker {
        config: config.clone(),
        interior,
        reaper: reaper.clone(),
        slot: Mutex::default(),
        capturing: tokio::sync::Mutex::default(),
        events: Events(broadcast::Sender::new(EVENT_BUFFER)),
        lease: watch::Sender::new(None),
        stop: CancellationToken::new(),
    });
    let link = UnixListener::from_std(sockets.link).map_err(WorkerError::io("serve the link"))?;
    let router = UnixListener::from_std(sockets.ingress).map_err(WorkerError::io("serve the ingress"))?;
    let outgoing = TcpListener::bind((std::net::Ipv6Addr::UNSPECIFIED, ate_network::EGRESS_PORT))
        .await
        .map_err(WorkerError::io("listen for the actor's own connections"))?;
    let questions = tokio::net::UdpSocket::bind((std::net::Ipv6Addr::UNSPECIFIED, 53))
        .await
        .map_err(WorkerError::io("listen for the actor's questions for names"))?;
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
        .map_err(WorkerError::io("listen for signals"))?;
    tokio::select! {
        reaped = reaper.run() => reaped.map_err(WorkerError::io("follow processes"))?,
        () = ingress::serve(Arc::clone(&worker), router) => {}
        () = egress::serve(Arc::clone(&worker), outgoing) => {}
        () = names::serve(Arc::clone(&worker), questions) => {}
        () = worker.link(&link) => {}
        () = worker.keep_lease() => {}
        _ = terminate.recv() => {}
        () = worker.stop.cancelled() => {}
    }
    // As pid 1 the worker takes every box with it when it returns.
    Ok(())
}

impl Worker {
    /// Serves the node, and the next one after it; gives up when none has come for too long.
    async fn link(self: &Arc<Self>, listener: &UnixListener) {
        let mut patience = FIRST_NODE_WITHIN;
        while let Ok(Ok((stream, _))) = tokio::time::timeout(patience, listener.accept()).await {
            patience = ORPHANED_AFTER;
            let (mut reader, writer) = crate::link::split(stream);
            let (outbox, inbox) = mpsc::channel(OUTBOX);
            let telling = tokio::spawn(tell(writer, inbox, self.events.0.subscribe()));
            let under_way = TaskTracker::new();
            loop {
                match reader.next::<Call>().await {
                    Ok(Some((call, fds))) => self.begin(call, fds, outbox.clone(), &under_way),
                    Ok(None) => break,
                    Err(error) => {
                        tracing::warn!(%error, "the link to the node is broken");
                        break;
                    }
                }
            }
            telling.abort();
            // The next node finds results, not halves.
            under_way.close();
            under_way.wait().await;
        }
        tracing::warn!("no node for {} s: ending", patience.as_secs());
    }

    /// Whether its actor may not meet anybody now.
    pub(crate) fn is_lease_over(&self) -> bool {
        self.lease.borrow().is_some_and(|until| until <= ate_sys::since_boot())
    }

    /// Holds the actor whenever the lease has run out: by then the control plane may have given it to another node, and
    /// nobody may meet two of it. Lets it go when the lease is renewed.
    async fn keep_lease(&self) {
        let mut lease = self.lease.subscribe();
        loop {
            let until = *lease.borrow_and_update();
            let left = until.map(|until| until.saturating_sub(ate_sys::since_boot()));
            let over = left == Some(Duration::ZERO);
            if let Some(tenant) = self.occupant() {
                match over {
                    true => tenant.hold(&self.events).await,
                    false => tenant.let_go(&self.events).await,
                }
            }
            tokio::select! {
                changed = lease.changed() => if changed.is_err() { return },
                // Not for all of it: this sleep does not count while the machine is suspended, and the lease does.
                () = tokio::time::sleep(left.unwrap_or_default().clamp(LEASE_TICK, LEASE_LOOK)), if left.is_some() => {}
            }
        }
    }

    /// A command goes on when the link breaks.
    fn begin(
        self: &Arc<Self>,
        call: Call,
        fds: Vec<OwnedFd>,
        outbox: mpsc::Sender<(Said, Vec<OwnedFd>)>,
        under_way: &TaskTracker,
    ) {
        let worker = Arc::clone(self);
        if let Command::Capture(capture) = &call.command {
            // At once, so that an abort that comes right behind it finds it.
            self.slot.lock().captures.entry(capture.op).or_default();
        }
        // Not waited for: a command inside the box may run for as long as it likes.
        let lasting = matches!(call.command, Command::Exec { .. });
        let task = async move {
            let stop = matches!(call.command, Command::Stop);
            let (result, fds) = match call.command {
                Command::Recall { op } => worker.recall(op),
                command => (worker.carry_out(command, fds).await, Vec::new()),
            };
            let _ = outbox.send((Said::Reply { id: call.id, result }, fds)).await;
            if stop {
                // The reply is on its way once the outbox has no room taken by it.
                let _ = outbox.reserve_many(OUTBOX).await;
                worker.stop.cancel();
            }
        };
        if lasting {
            tokio::spawn(task)
        } else {
            under_way.spawn(task)
        };
    }

    async fn carry_out(self: &Arc<Self>, command: Command, fds: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        match command {
            Command::Prepare(prepare) => self.prepare(prepare, fds).await,
            Command::Activate(activate) => self.activate(*activate, fds).await,
            Command::Capture(capture) => self.capture(capture, fds).await,
            Command::Abort { op } => {
                if let Some(abort) = self.slot.lock().captures.get(&op) {
                    abort.cancel();
                }
                Ok(Answer::Done)
            }
            Command::Discard { actor, generation } => self.discard(actor, generation).await,
            Command::Exec { actor, generation, exec } => {
                let tenant = self.tenant(actor, generation).ok_or(Refusal::Stale)?;
                let stdio = <[OwnedFd; 3]>::try_from(fds)
                    .map_err(|_| Refusal::Failed("exec needs three descriptors".into()))?;
                let heard = stdio[1].try_clone().map_err(|error| Refusal::Failed(error.to_string()))?;
                let visit = tenant.enter(&self.events).await.map_err(failed)?.ok_or(Refusal::Stale)?;
                let mut running = pin!(tenant.sandbox.exec(&exec, stdio));
                let exit = tokio::select! {
                    exit = &mut running => exit,
                    // The command goes on, but is nobody's visit: its actor may sleep.
                    () = unheard(heard) => {
                        drop(visit);
                        running.await
                    }
                };
                Ok(Answer::Exited(exit.map_err(failed)?))
            }
            Command::Recall { .. } => unreachable!("answered with descriptors"),
            Command::Release { op } => {
                self.slot.lock().retained.remove(&op);
                Ok(Answer::Done)
            }
            Command::Serve { until } => {
                self.lease.send_replace(Some(until));
                Ok(Answer::Done)
            }
            Command::Report => Ok(Answer::Report(Box::new(self.report()))),
            Command::Memo => Ok(Answer::Memo(self.occupant().map(|tenant| tenant.memo.clone()).unwrap_or_default())),
            Command::Stop => {
                let (tenant, warm) = {
                    let mut slot = self.slot.lock();
                    (slot.tenant.take(), slot.warm.take_all())
                };
                if let Some(tenant) = tenant {
                    let _ = tenant.destroy().await;
                }
                for warm in warm {
                    let _ = warm.sandbox.destroy().await;
                }
                Ok(Answer::Done)
            }
        }
    }

    pub(crate) fn tenant(&self, actor: ActorUid, generation: Generation) -> Option<Arc<Tenant>> {
        self.occupant().filter(|tenant| tenant.identity.uid == actor && tenant.identity.generation == generation)
    }

    pub(crate) fn occupant(&self) -> Option<Arc<Tenant>> {
        self.slot.lock().tenant.clone()
    }

    fn report(&self) -> Report {
        let slot = self.slot.lock();
        Report {
            worker: self.config.uid,
            build: self.config.build.clone(),
            hosted: slot.tenant.as_ref().map(|tenant| tenant.hosted()),
            warm: slot.warm.kinds(),
            retained: slot.retained.keys().copied().collect(),
        }
    }

    fn recall(&self, op: OpId) -> (Result<Answer, Refusal>, Vec<OwnedFd>) {
        let slot = self.slot.lock();
        let Some(retained) = slot.retained.get(&op) else { return (Err(Refusal::Stale), Vec::new()) };
        let image = retained.image.as_ref().map(|image| image.as_fd().try_clone_to_owned());
        let archive = retained.archive.as_ref().map(|archive| archive.as_fd().try_clone_to_owned());
        let answer = Answer::Recalled(Recalled {
            image_bytes: retained.image_bytes,
            memory: image.is_some(),
            data: archive.is_some(),
            memo: retained.memo.clone(),
        });
        match image.into_iter().chain(archive).collect() {
            Ok(fds) => (Ok(answer), fds),
            Err(error) => {
                let error: std::io::Error = error;
                (Err(Refusal::Failed(format!("cannot share what was captured: {error}"))), Vec::new())
            }
        }
    }

    async fn prepare(&self, prepare: Prepare, fds: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        let id = {
            let mut slot = self.slot.lock();
            slot.next_box += 1;
            format!("b{}", slot.next_box)
        };
        let warm = boxes::make(&id, &self.config.cgroup, &prepare, fds, self.reaper.clone()).await.map_err(failed)?;
        let gone = self.slot.lock().warm.put(prepare.kind, warm);
        if let Some(gone) = gone {
            gone.remove().await;
        }
        Ok(Answer::Done)
    }

    async fn activate(self: &Arc<Self>, activate: Activate, fds: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        let (warm, ended) = {
            let mut slot = self.slot.lock();
            match &slot.tenant {
                // Asked twice: the first answer was lost on its way.
                Some(tenant) if tenant.identity == activate.identity => {
                    return Ok(Answer::Activated { phases: Vec::new() });
                }
                _ if slot.taken => return Err(Refusal::Busy),
                _ => {}
            }
            let Identity { uid, generation, .. } = activate.identity;
            if slot.been_here.contains(uid, generation) {
                return Err(Refusal::Stale);
            }
            let (warm, ended) = slot.warm.take(&activate.kind);
            if warm.is_some() {
                slot.taken = true;
                slot.been_here.add(uid, generation);
            }
            (warm, ended)
        };
        for ended in ended {
            ended.remove().await;
        }
        let Some(warm) = warm else { return Err(Refusal::NotPrepared) };
        match self.bring_up(&activate, &warm, fds).await {
            Ok(phases) => {
                ate_failpoint::reached("worker.restored");
                let tenant =
                    Tenant::new(activate.identity, warm.sandbox, activate.ports, activate.egress, activate.memo);
                if self.is_lease_over() {
                    // Before anybody can find it.
                    tenant.hold(&self.events).await;
                }
                let mut slot = self.slot.lock();
                slot.place = Some(warm.place);
                slot.sink = warm.sink;
                slot.tenant = Some(Arc::clone(&tenant));
                drop(slot);
                self.look_after(tenant, activate.freeze_after);
                Ok(Answer::Activated { phases: phases.laps })
            }
            Err(error) => {
                warm.remove().await;
                self.slot.lock().taken = false;
                Err(error)
            }
        }
    }

    async fn bring_up(&self, activate: &Activate, warm: &WarmBox, fds: Vec<OwnedFd>) -> Result<Phases, Refusal> {
        let mut phases = Phases::start();
        let mut fds = fds.into_iter();
        let mut next = |what: &str| fds.next().ok_or_else(|| format!("the node sent no {what}"));
        warm.sink.open(File::from(next("log")?), &activate.identity);
        identity::write(&warm.place.identity, &activate.identity, activate.source, jiff::Timestamp::now())
            .map_err(|error| format!("cannot write the identity: {error}"))?;
        let (image, data) = match activate.source {
            Source::Boot { data } => (None, data),
            Source::Image { data } => (Some(memory(next("image")?).map_err(|error| error.to_string())?), data),
        };
        if data {
            let file = File::from(next("archive")?);
            let durable = warm.place.durable.clone().ok_or_else(|| "the box has no durable directory".to_owned())?;
            let filled = tokio::task::spawn_blocking(move || durable.fill(file)).await;
            filled
                .map_err(|error| error.to_string())?
                .map_err(|error| format!("cannot unpack the durable directory: {error}"))?;
        }
        let socket = self.interior.link_socket().map_err(|error| format!("cannot open the network link: {error}"))?;
        let link = link_config();
        phases.mark("prepare");
        match &image {
            Some(image) => {
                warm.sink.lifecycle("Actor restoring");
                warm.sandbox.restore(image, &link, socket.as_fd()).await.map_err(|error| chain(&error))?;
                phases.mark("restore");
                self.come_up(activate, warm, &mut phases).await?;
                warm.sink.lifecycle("Actor restored");
            }
            None => {
                warm.sink.lifecycle("Actor starting");
                warm.sandbox.run(&link, socket.as_fd()).await.map_err(|error| chain(&error))?;
                phases.mark("start");
                self.come_up(activate, warm, &mut phases).await?;
                warm.sink.lifecycle("Actor started");
            }
        }
        Ok(phases)
    }

    /// Waits for what the node wants to see; that is nothing after a restore, since what was saved was running.
    async fn come_up(&self, activate: &Activate, warm: &WarmBox, phases: &mut Phases) -> Result<(), Refusal> {
        if !activate.readyz.is_empty() {
            self.events.send(Event::Started);
            tokio::select! {
                up = ready::all(&activate.readyz) => up.map_err(Refusal::Crashed)?,
                exit = warm.sandbox.ended() => {
                    return Err(Refusal::Crashed(format!("it ended before it was ready: {exit}")));
                }
            }
            phases.mark("ready");
        }
        Ok(())
    }

    /// Follows the tenant for as long as it is here: freezes it when idle, notices its end.
    fn look_after(self: &Arc<Self>, tenant: Arc<Tenant>, freeze_after: Option<Duration>) {
        let worker = Arc::clone(self);
        tokio::spawn(async move {
            let freezing = async {
                if let Some(after) = freeze_after {
                    tenant.freeze_when_idle(after, &worker.events).await;
                }
                std::future::pending::<()>().await;
            };
            let exit = tokio::select! {
                exit = tenant.ended() => exit,
                () = freezing => return,
            };
            if let Some(exit) = exit {
                worker.vacate(&tenant);
                let Identity { uid: actor, generation, .. } = tenant.identity;
                worker.events.send(Event::Ended { actor, generation, exit });
            }
        });
    }

    fn vacate(&self, tenant: &Arc<Tenant>) {
        let mut slot = self.slot.lock();
        if slot.tenant.as_ref().is_some_and(|here| Arc::ptr_eq(here, tenant)) {
            slot.tenant = None;
            slot.taken = false;
            let place = slot.place.take();
            drop(slot);
            clear_away(place);
        }
    }

    async fn capture(&self, capture: Capture, fds: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        let _one = self.capturing.lock().await;
        let captured = self.capture_alone(&capture, fds).await;
        self.slot.lock().captures.remove(&capture.op);
        captured
    }

    async fn capture_alone(&self, capture: &Capture, fds: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        if self.slot.lock().retained.contains_key(&capture.op) {
            return Err(Refusal::Captured);
        }
        let tenant = self.tenant(capture.actor, capture.generation).ok_or(Refusal::Stale)?;
        let (durable, sink, abort) = {
            let mut slot = self.slot.lock();
            let abort = slot.captures.entry(capture.op).or_default().clone();
            (slot.place.as_ref().and_then(|place| place.durable.clone()), slot.sink.clone(), abort)
        };
        let mut fds = fds.into_iter();
        let mut next = |what: &str| fds.next().ok_or_else(|| Refusal::Failed(format!("the node sent no {what}")));
        let mut image = if capture.memory { Some(memory(next("memory")?)?) } else { None };
        let (mut archive, mut to) = (None, None);
        if capture.data {
            let (file, room) = (File::from(next("file")?), File::from(next("room")?));
            let durable = durable.ok_or_else(|| Refusal::Failed("the box has no durable directory".to_owned()))?;
            to = Some((durable, file.try_clone().map_err(|error| Refusal::Failed(error.to_string()))?, room));
            archive = Some(file);
        }
        sink.lifecycle("Actor checkpointing");
        let mut phases = Phases::start();
        if abort.is_cancelled() {
            return Err(Refusal::Aborted);
        }
        let leaving = tenant.leave(capture.if_idle, &self.events, &mut phases).await?;
        let image_bytes = match self.save(&tenant, leaving, image.as_mut(), to, &abort, &mut phases).await {
            Ok(bytes) => bytes,
            // Not saved and not alive: what is left of it must not keep the worker from others.
            Err(refusal @ Refusal::Failed(_)) => {
                self.vacate(&tenant);
                return Err(refusal);
            }
            Err(refusal) => return Err(refusal),
        };
        let retained = Retained { image, archive, image_bytes, memo: tenant.memo.clone() };
        self.slot.lock().retained.insert(capture.op, retained);
        sink.lifecycle("Actor checkpointed");
        self.vacate(&tenant);
        Ok(Answer::Captured { image_bytes, phases: phases.laps })
    }

    async fn save(
        &self,
        tenant: &Tenant,
        leaving: Leaving<'_>,
        image: Option<&mut Memory>,
        archive: Option<(Durable, File, File)>,
        abort: &CancellationToken,
        phases: &mut Phases,
    ) -> Result<u64, Refusal> {
        let mut image_bytes = 0;
        if let Some(image) = image {
            match tenant.sandbox.checkpoint(image).await {
                Ok(bytes) => image_bytes = bytes as u64,
                Err(error) => return Err(leaving.stay(&self.events, Refusal::NotSaved(chain(&error))).await),
            }
            phases.mark("checkpoint");
        }
        if let Some((durable, file, room)) = archive {
            let written = tokio::task::spawn_blocking(move || durable.save(file, &room)).await;
            if let Err(error) = written.map_err(std::io::Error::other).flatten() {
                let why = Refusal::NotSaved(format!("cannot archive the durable directory: {error}"));
                return Err(leaving.stay(&self.events, why).await);
            }
            phases.mark("archive");
        }
        ate_failpoint::reached("worker.checkpointed");
        if abort.is_cancelled() {
            return Err(leaving.stay(&self.events, Refusal::Aborted).await);
        }
        leaving.gone(phases).await;
        Ok(image_bytes)
    }

    async fn discard(&self, actor: ActorUid, generation: Generation) -> Result<Answer, Refusal> {
        let tenant = self.tenant(actor, generation).ok_or(Refusal::Stale)?;
        tenant.destroy().await.map_err(failed)?;
        self.vacate(&tenant);
        Ok(Answer::Done)
    }
}

fn failed(error: SandboxError) -> Refusal {
    Refusal::Failed(chain(&error))
}

/// Until nobody reads any more what is written into a pipe.
async fn unheard(pipe: OwnedFd) {
    // Unchecked: it stays as it is for whoever writes into it, who may count on being blocked.
    match pipe::Sender::from_owned_fd_unchecked(pipe) {
        Ok(pipe) => drop(pipe.ready(Interest::ERROR).await),
        Err(error) => {
            tracing::warn!(%error, "nobody can tell whether a command is listened to");
            std::future::pending().await
        }
    }
}

fn link_config() -> LinkConfig {
    LinkConfig {
        mac: ate_network::ACTOR_MAC,
        mtu: ate_network::MTU,
        addresses: ate_network::actor_addresses(),
        gateways: vec![ate_network::GATEWAY_V4.into(), ate_network::GATEWAY_V6.into()],
        gateway_mac: ate_network::GATEWAY_MAC,
    }
}

async fn tell(
    mut writer: Writer,
    mut replies: mpsc::Receiver<(Said, Vec<OwnedFd>)>,
    mut news: broadcast::Receiver<Event>,
) {
    loop {
        let (said, fds) = tokio::select! {
            reply = replies.recv() => match reply { Some(reply) => reply, None => return },
            event = news.recv() => match event {
                Ok(event) => (Said::Event(event), Vec::new()),
                Err(broadcast::error::RecvError::Lagged(_)) => continue,
                Err(broadcast::error::RecvError::Closed) => return,
            },
        };
        if writer.send(&said, &crate::link::borrowed(&fds)).await.is_err() {
            return;
        }
    }
}
