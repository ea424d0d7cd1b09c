//! The worker's side of the link: carries out commands, one task each, and tells news.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ate_name::{ActorUid, Generation, OpId};
use ate_network::Interior;
use ate_sandbox::{Container, Driver, LinkConfig, Mount, Reaper, Sandbox, SandboxError, Workload};
use ate_sandbox_gvisor::GvisorDriver;
use ate_sys::Memory;
use parking_lot::Mutex;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{broadcast, mpsc};
use tokio_util::sync::CancellationToken;

use crate::link::{
    Activate, Answer, BoxKind, Call, Capture, Command, Event, Prepare, Refusal, Report, Said, Source, Writer,
};
use crate::output::{self, Sink};
use crate::root::{BOXES, IMAGES, RUNTIMES, SCRATCH, Sockets};
use crate::tenant::{Events, Phases, Tenant, describe, memory};
use crate::{Config, ORPHANED_AFTER, WorkerError, durable, egress, identity, ingress, ready};

/// News not yet told. A tenant produces one per freeze or thaw; a node that is this far behind asks for a report.
const EVENT_BUFFER: usize = 256;

/// Replies and news on their way to the node.
const OUTBOX: usize = 64;

pub(crate) struct Worker {
    config: Config,
    interior: Interior,
    reaper: Reaper,
    slot: Mutex<Slot>,
    pub(crate) events: Events,
    stop: CancellationToken,
}

#[derive(Default)]
struct Slot {
    next_box: u64,
    warm: HashMap<BoxKind, Vec<WarmBox>>,
    /// Taken by an activation that is under way, or hosting.
    taken: bool,
    tenant: Option<Arc<Tenant>>,
    directories: Option<Directories>,
    sink: Sink,
    captures: HashMap<OpId, CancellationToken>,
}

/// A box that waits for its actor.
struct WarmBox {
    sandbox: Box<dyn Sandbox>,
    directories: Directories,
    sink: Sink,
}

/// What of a box lies in the worker's file system.
#[derive(Clone)]
struct Directories {
    identity: PathBuf,
    volumes: PathBuf,
}

impl Directories {
    fn of(id: &str) -> Self {
        Self { identity: Path::new(BOXES).join(id), volumes: Path::new(SCRATCH).join(id) }
    }

    fn remove(&self) {
        for directory in [&self.identity, &self.volumes] {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}

pub(crate) async fn serve(config: &Config, sockets: Sockets, interior: Interior) -> Result<(), WorkerError> {
    let reaper = Reaper::default();
    let worker = Arc::new(Worker {
        config: config.clone(),
        interior,
        reaper: reaper.clone(),
        slot: Mutex::default(),
        events: Events(broadcast::Sender::new(EVENT_BUFFER)),
        stop: CancellationToken::new(),
    });
    let link = UnixListener::from_std(sockets.link).map_err(WorkerError::io("serve the link"))?;
    let router = UnixListener::from_std(sockets.ingress).map_err(WorkerError::io("serve the ingress"))?;
    let outgoing = TcpListener::bind((std::net::Ipv6Addr::UNSPECIFIED, ate_network::EGRESS_PORT))
        .await
        .map_err(WorkerError::io("listen for the actor's own connections"))?;
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
        .map_err(WorkerError::io("listen for signals"))?;
    tokio::select! {
        reaped = reaper.run() => reaped.map_err(WorkerError::io("follow processes"))?,
        () = ingress::serve(Arc::clone(&worker), router) => {}
        () = egress::serve(Arc::clone(&worker), outgoing) => {}
        () = worker.link(&link) => {}
        _ = terminate.recv() => {}
        () = worker.stop.cancelled() => {}
    }
    // As pid 1 the worker takes every box with it when it returns.
    Ok(())
}

impl Worker {
    /// Serves the node, and the next one after it; gives up when none has come for too long.
    async fn link(self: &Arc<Self>, listener: &UnixListener) {
        while let Ok(Ok((stream, _))) = tokio::time::timeout(ORPHANED_AFTER, listener.accept()).await {
            let (mut reader, writer) = crate::link::split(stream);
            let (outbox, inbox) = mpsc::channel(OUTBOX);
            let telling = tokio::spawn(tell(writer, inbox, self.events.0.subscribe()));
            loop {
                match reader.next::<Call>().await {
                    Ok(Some((call, fds))) => self.begin(call, fds, outbox.clone()),
                    Ok(None) => break,
                    Err(error) => {
                        tracing::warn!(%error, "the link to the node is broken");
                        break;
                    }
                }
            }
            telling.abort();
        }
        tracing::warn!("no node for {} s: ending", ORPHANED_AFTER.as_secs());
    }

    /// A command goes on when the link breaks: what the next node finds is then a result, not a half.
    fn begin(self: &Arc<Self>, call: Call, fds: Vec<OwnedFd>, outbox: mpsc::Sender<(Said, Vec<OwnedFd>)>) {
        let worker = Arc::clone(self);
        tokio::spawn(async move {
            let stop = matches!(call.command, Command::Stop);
            let result = worker.carry_out(call.command, fds).await;
            let _ = outbox.send((Said::Reply { id: call.id, result }, Vec::new())).await;
            if stop {
                // The reply is on its way once the outbox has no room taken by it.
                let _ = outbox.reserve_many(OUTBOX).await;
                worker.stop.cancel();
            }
        });
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
                let visit = tenant.enter(&self.events).await.map_err(failed)?.ok_or(Refusal::Stale)?;
                let exit = tenant.sandbox.exec(&exec, stdio).await.map_err(failed)?;
                drop(visit);
                Ok(Answer::Exited(exit))
            }
            Command::Report => Ok(Answer::Report(self.report())),
            Command::Stop => {
                let (tenant, warm) = {
                    let mut slot = self.slot.lock();
                    (slot.tenant.take(), std::mem::take(&mut slot.warm))
                };
                if let Some(tenant) = tenant {
                    let _ = tenant.destroy().await;
                }
                for warm in warm.into_values().flatten() {
                    let _ = warm.sandbox.destroy().await;
                    warm.directories.remove();
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
            memo: slot.tenant.as_ref().map(|tenant| tenant.memo.clone()).unwrap_or_default(),
            warm: slot.warm.iter().filter(|(_, boxes)| !boxes.is_empty()).map(|(kind, _)| kind.clone()).collect(),
        }
    }

    async fn prepare(&self, prepare: Prepare, fds: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        if fds.len() != 1 + prepare.containers.len() {
            return Err(Refusal::Failed("a box needs one runtime and one root file system per container".into()));
        }
        let id = {
            let mut slot = self.slot.lock();
            slot.next_box += 1;
            format!("b{}", slot.next_box)
        };
        let made = self.make_box(&id, &prepare, &fds).await;
        match made {
            Ok(warm) => {
                self.slot.lock().warm.entry(prepare.kind).or_default().push(warm);
                Ok(Answer::Done)
            }
            Err(error) => {
                Directories::of(&id).remove();
                Err(failed(error))
            }
        }
    }

    async fn make_box(&self, id: &str, prepare: &Prepare, fds: &[OwnedFd]) -> Result<WarmBox, SandboxError> {
        let directories = Directories::of(id);
        identity::blank(&directories.identity).map_err(SandboxError::io("write the identity"))?;
        let runtime = mounted(RUNTIMES, id, &fds[0])?;
        let mut containers = Vec::new();
        for (index, (spec, image)) in prepare.containers.iter().zip(&fds[1..]).enumerate() {
            let rootfs = mounted(IMAGES, &format!("{id}.{index}"), image)?;
            containers.push(Container {
                name: spec.name.clone(),
                rootfs,
                args: spec.args.clone(),
                env: spec.env.clone(),
                cwd: spec.cwd.clone(),
                user: spec.user.clone(),
                mounts: self.mounts(&directories, &spec.volumes)?,
            });
        }
        let workload = Workload {
            containers,
            hostname: "actor".to_owned(),
            cgroup: Some(format!("{}/{id}", self.config.cgroup)),
            memory_limit: prepare.memory_limit,
            cpu_limit_millis: prepare.cpu_limit_millis,
        };
        let sink = Sink::default();
        let mut stdio = Vec::new();
        for spec in &prepare.containers {
            let (reader, writer) = std::io::pipe().map_err(SandboxError::io("make a pipe"))?;
            output::follow(reader.into(), spec.name.clone(), sink.clone());
            stdio.push(OwnedFd::from(writer));
        }
        let driver = GvisorDriver::new(&runtime.join("runsc"), Path::new("/run"), self.reaper.clone());
        let sandbox = driver.prepare(&workload, id, stdio).await?;
        Ok(WarmBox { sandbox, directories, sink })
    }

    fn mounts(
        &self,
        directories: &Directories,
        volumes: &BTreeMap<String, String>,
    ) -> Result<Vec<Mount>, SandboxError> {
        let mut mounts = vec![
            Mount { source: directories.identity.clone(), destination: "/run/ate".into(), writable: false },
            Mount {
                source: directories.identity.join("resolv.conf"),
                destination: "/etc/resolv.conf".into(),
                writable: false,
            },
        ];
        for (volume, destination) in volumes {
            let source = directories.volumes.join(volume);
            std::fs::create_dir_all(&source).map_err(SandboxError::io("make a volume"))?;
            mounts.push(Mount { source, destination: destination.clone(), writable: true });
        }
        Ok(mounts)
    }

    async fn activate(self: &Arc<Self>, activate: Activate, fds: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        let warm = {
            let mut slot = self.slot.lock();
            match &slot.tenant {
                // Asked twice: the first answer was lost on its way.
                Some(tenant) if tenant.identity == activate.identity => {
                    return Ok(Answer::Activated { phases: Vec::new() });
                }
                _ if slot.taken => return Err(Refusal::Busy),
                _ => {}
            }
            let Some(warm) = slot.warm.get_mut(&activate.kind).and_then(Vec::pop) else {
                return Err(Refusal::NotPrepared);
            };
            slot.taken = true;
            warm
        };
        match self.bring_up(&activate, &warm, fds).await {
            Ok(phases) => {
                let tenant =
                    Tenant::new(activate.identity, warm.sandbox, activate.ports, activate.egress, activate.memo);
                let mut slot = self.slot.lock();
                slot.directories = Some(warm.directories);
                slot.sink = warm.sink;
                slot.tenant = Some(Arc::clone(&tenant));
                drop(slot);
                self.look_after(tenant, activate.freeze_after);
                Ok(Answer::Activated { phases: phases.laps })
            }
            Err(error) => {
                let _ = warm.sandbox.destroy().await;
                warm.directories.remove();
                self.slot.lock().taken = false;
                Err(Refusal::Failed(error))
            }
        }
    }

    async fn bring_up(&self, activate: &Activate, warm: &WarmBox, fds: Vec<OwnedFd>) -> Result<Phases, String> {
        let mut phases = Phases::start();
        let mut fds = fds.into_iter();
        let mut next = |what: &str| fds.next().ok_or_else(|| format!("the node sent no {what}"));
        warm.sink.open(File::from(next("log")?), &activate.identity);
        identity::write(&warm.directories.identity, &activate.identity, activate.source, jiff::Timestamp::now())
            .map_err(|error| format!("cannot write the identity: {error}"))?;
        let (image, data) = match activate.source {
            Source::Boot { data } => (None, data),
            Source::Image { data } => (Some(memory(next("image")?).map_err(|error| error.to_string())?), data),
        };
        if data {
            let (file, volumes) = (File::from(next("archive")?), warm.directories.volumes.clone());
            let extracted = tokio::task::spawn_blocking(move || durable::extract(file, &volumes)).await;
            extracted
                .map_err(|error| error.to_string())?
                .map_err(|error| format!("cannot unpack the durable directory: {error}"))?;
        }
        let socket = self.interior.link_socket().map_err(|error| format!("cannot open the network link: {error}"))?;
        let link = link_config();
        phases.mark("prepare");
        match &image {
            Some(image) => {
                warm.sink.lifecycle("Actor restoring");
                warm.sandbox.restore(image, &link, socket.as_fd()).await.map_err(|error| describe(&error))?;
                phases.mark("restore");
                warm.sink.lifecycle("Actor restored");
            }
            None => {
                warm.sink.lifecycle("Actor starting");
                warm.sandbox.run(&link, socket.as_fd()).await.map_err(|error| describe(&error))?;
                phases.mark("start");
                // What was running when it was saved is running again; only a fresh start has to come up.
                tokio::select! {
                    up = ready::all(&activate.readyz) => up?,
                    exit = warm.sandbox.ended() => return Err(format!("it ended before it was ready: {exit}")),
                }
                phases.mark("ready");
                warm.sink.lifecycle("Actor started");
            }
        }
        Ok(phases)
    }

    /// Follows the tenant for as long as it is here: freezes it when idle, notices its end.
    fn look_after(self: &Arc<Self>, tenant: Arc<Tenant>, freeze_after: Option<std::time::Duration>) {
        let worker = Arc::clone(self);
        tokio::spawn(async move {
            let freezing = async {
                match freeze_after {
                    Some(after) => tenant.freeze_when_idle(after, &worker.events).await,
                    None => {}
                }
                std::future::pending::<()>().await;
            };
            let exit = tokio::select! {
                exit = tenant.sandbox.ended() => exit,
                () = freezing => return,
            };
            let (actor, generation) = (tenant.identity.uid, tenant.identity.generation);
            // Gone by our own hand, or by its own?
            if worker.tenant(actor, generation).is_none() || tenant.is_leaving() {
                return;
            }
            let _ = tenant.destroy().await;
            worker.vacate(&tenant);
            worker.events.send(Event::Ended { actor, generation, exit });
        });
    }

    fn vacate(&self, tenant: &Arc<Tenant>) {
        let mut slot = self.slot.lock();
        if slot.tenant.as_ref().is_some_and(|here| Arc::ptr_eq(here, tenant)) {
            slot.tenant = None;
            slot.taken = false;
            if let Some(directories) = slot.directories.take() {
                drop(slot);
                directories.remove();
            }
        }
    }

    async fn capture(&self, capture: Capture, fds: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        let tenant = self.tenant(capture.actor, capture.generation).ok_or(Refusal::Stale)?;
        let (volumes, sink, abort) = {
            let mut slot = self.slot.lock();
            let abort = slot.captures.entry(capture.op).or_default().clone();
            let volumes = slot.directories.as_ref().map(|directories| directories.volumes.clone()).unwrap_or_default();
            (volumes, slot.sink.clone(), abort)
        };
        let mut fds = fds.into_iter();
        let mut image = match capture.memory {
            true => Some(memory(fds.next().ok_or_else(|| Refusal::Failed("the node sent no memory".into()))?)?),
            false => None,
        };
        let archive = match capture.data {
            true => Some(File::from(fds.next().ok_or_else(|| Refusal::Failed("the node sent no file".into()))?)),
            false => None,
        };
        sink.lifecycle("Actor checkpointing");
        let mut phases = Phases::start();
        let saved = self.save(&tenant, image.as_mut(), archive.map(|file| (volumes, file)), &abort, &mut phases).await;
        self.slot.lock().captures.remove(&capture.op);
        let (image_bytes, data_bytes) = saved?;
        sink.lifecycle("Actor checkpointed");
        self.vacate(&tenant);
        Ok(Answer::Captured { image_bytes, data_bytes, phases: phases.laps })
    }

    async fn save(
        &self,
        tenant: &Tenant,
        image: Option<&mut Memory>,
        archive: Option<(PathBuf, File)>,
        abort: &CancellationToken,
        phases: &mut Phases,
    ) -> Result<(u64, u64), Refusal> {
        let leaving = tenant.leave(&self.events, phases).await?;
        let (mut image_bytes, mut data_bytes) = (0, 0);
        if let Some(image) = image {
            match tenant.sandbox.checkpoint(image).await {
                Ok(bytes) => image_bytes = bytes as u64,
                Err(error) => return Err(leaving.stay(&self.events, Refusal::NotSaved(describe(&error))).await),
            }
            phases.mark("checkpoint");
        }
        if let Some((volumes, file)) = archive {
            let written = tokio::task::spawn_blocking(move || durable::archive(&volumes, file)).await;
            match written.map_err(std::io::Error::other).flatten() {
                Ok(bytes) => data_bytes = bytes,
                Err(error) => {
                    let why = Refusal::NotSaved(format!("cannot archive the durable directory: {error}"));
                    return Err(leaving.stay(&self.events, why).await);
                }
            }
            phases.mark("archive");
        }
        if abort.is_cancelled() {
            return Err(leaving.stay(&self.events, Refusal::Aborted).await);
        }
        leaving.gone(phases).await;
        Ok((image_bytes, data_bytes))
    }

    async fn discard(&self, actor: ActorUid, generation: Generation) -> Result<Answer, Refusal> {
        let tenant = self.tenant(actor, generation).ok_or(Refusal::Stale)?;
        tenant.destroy().await.map_err(failed)?;
        self.vacate(&tenant);
        Ok(Answer::Done)
    }
}

fn failed(error: SandboxError) -> Refusal {
    Refusal::Failed(describe(&error))
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

/// Attaches what the node sent below `parent`, once per box: boxes come and go, and their mounts with them.
fn mounted(parent: &str, name: &str, mount: &OwnedFd) -> Result<PathBuf, SandboxError> {
    let at = Path::new(parent).join(name);
    std::fs::create_dir_all(&at).map_err(SandboxError::io("make a mount point"))?;
    ate_sys::attach(mount, &at).map_err(SandboxError::io("attach a mount that the node sent"))?;
    Ok(at)
}

async fn tell(
    mut writer: Writer,
    mut replies: mpsc::Receiver<(Said, Vec<OwnedFd>)>,
    mut news: broadcast::Receiver<Event>,
) {
    loop {
        let said = tokio::select! {
            reply = replies.recv() => match reply { Some((said, _)) => said, None => return },
            event = news.recv() => match event {
                Ok(event) => Said::Event(event),
                Err(broadcast::error::RecvError::Lagged(_)) => continue,
                Err(broadcast::error::RecvError::Closed) => return,
            },
        };
        if writer.send(&said, &[]).await.is_err() {
            return;
        }
    }
}
