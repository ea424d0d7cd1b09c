//! Worker processes: adopted, watched, stopped.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ate_name::{ActorUid, Generation, ObjectKey, OpId, TemplateUid, WorkerUid};
use ate_orders::{Hosted, Identity, Ingress, NodeEvent, WorkerReport, Workload, chain};
use ate_sys::{Cgroup, SocketPath};
use ate_worker::WorkerLink;
use ate_worker::link::{self, Answer, BoxKind};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::boxes::Ran;
use crate::logs::{self, Whereabouts};
use crate::start::last_words;
use crate::{Node, NodeError};

/// How long it may take until a worker that outlived its node is taken over. It first brings to an end what that one had begun: a
/// save of some gigabytes at worst, or a start that has half a minute to be ready. One that is not done then is ended, and its actor
/// goes on from its last snapshot. Longer would cost all the others: no order is taken before it is known who is here, and the
/// control plane shuts out a node that takes none for two minutes, what it runs with it; half of that is left for the restart.
pub const ANSWERS_WITHIN: Duration = Duration::from_secs(60);

/// How often workers are asked how idle they are.
const REPORT_EVERY: Duration = Duration::from_millis(500);

/// A worker that does not say within this how it is has what is known of it reported.
const REPORT_WITHIN: Duration = Duration::from_secs(2);

/// A worker that has not said for this long how it is will never do as it is told either, and is ended. It answers while its
/// sandbox is started or saved, however long that takes: busy is not deaf.
const DEAF_FOR: Duration = Duration::from_secs(20);

/// How often it is looked how much room copies of snapshots take.
const EVICT_EVERY: Duration = Duration::from_secs(30);

/// How often it is looked how old logs are, as one in so many of those times: they grow slowly, and there may be many.
const TIDY_ONE_IN: u32 = 60;

/// How long a worker may take to end its boxes when told to stop.
const STOP_WITHIN: Duration = Duration::from_secs(5);

/// A process that was killed has ended by then, unless the kernel is stuck with it.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// What is written down of a worker, to find it again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Birth {
    pub(crate) uid: WorkerUid,
    pub(crate) pool: ObjectKey,
    pub(crate) pod: String,
    pub(crate) pid: u32,
}

/// What the node must know of an actor to take it out of its worker again. The worker keeps it for the next node.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Memo {
    pub(crate) ran: Ran,
    pub(crate) workload: Workload,
}

#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) birth: Birth,
    pub(crate) directory: PathBuf,
    door: Option<std::net::SocketAddr>,
    pub(crate) link: WorkerLink,
    /// Held while a box is made: two at once would be one too many.
    pub(crate) preparing: tokio::sync::Mutex<()>,
    state: Mutex<HandleState>,
}

/// Who is in a worker, what it runs on, and what it is.
pub(crate) type Resident = (Identity, Ran, Workload);

#[derive(Debug, Default)]
struct HandleState {
    /// Kinds of which a box was made and not used, and for whom, if that is known. It may have ended, or have made room.
    warm: HashMap<BoxKind, Option<TemplateUid>>,
    tenant: Option<Resident>,
    memory_bytes: u64,
    /// Of the activation that is under way here.
    turn: Option<OwnedSemaphorePermit>,
    /// Since when it has not answered.
    deaf_since: Option<std::time::Instant>,
    retiring: bool,
}

impl Handle {
    pub(crate) fn has_box(&self, kind: &BoxKind) -> bool {
        self.state.lock().warm.contains_key(kind)
    }

    pub(crate) fn add_box(&self, kind: &BoxKind, template: Option<TemplateUid>) {
        self.state.lock().warm.insert(kind.clone(), template);
    }

    /// It is used, or the worker says that there is none.
    pub(crate) fn take_box(&self, kind: &BoxKind) {
        self.state.lock().warm.remove(kind);
    }

    /// Held until the one who comes runs: it may take its time to be ready.
    pub(crate) fn take_turn(&self, turn: OwnedSemaphorePermit) {
        self.state.lock().turn = Some(turn);
    }

    pub(crate) fn end_turn(&self) {
        self.state.lock().turn = None;
    }

    /// Says who is here from now on; returns who was.
    pub(crate) fn host(&self, identity: &Identity, ran: &Ran, workload: &Workload) -> Option<Resident> {
        self.state.lock().tenant.replace((identity.clone(), ran.clone(), workload.clone()))
    }

    /// As it was before [`host`](Self::host).
    pub(crate) fn take_over(&self, before: Option<Resident>) {
        self.state.lock().tenant = before;
    }

    /// Who is here.
    fn actor(&self) -> Option<ActorUid> {
        self.state.lock().tenant.as_ref().map(|(identity, ..)| identity.uid)
    }

    /// What the actor runs on, if it is the one at the generation.
    pub(crate) fn hosted(&self, actor: ActorUid, generation: Generation) -> Option<(Ran, Workload, u64)> {
        let state = self.state.lock();
        let (identity, ran, workload) = state.tenant.as_ref()?;
        (identity.uid == actor && identity.generation == generation)
            .then(|| (ran.clone(), workload.clone(), state.memory_bytes))
    }

    /// Somebody else may have come meanwhile.
    pub(crate) fn vacate(&self, actor: ActorUid, generation: Generation) {
        let is_it = |(tenant, ..): &mut Resident| tenant.uid == actor && tenant.generation == generation;
        drop(self.state.lock().tenant.take_if(is_it));
    }

    /// Whether the actor that is here now may connect there.
    pub(crate) fn may_connect(&self, to: std::net::SocketAddr) -> bool {
        let state = self.state.lock();
        state.tenant.as_ref().is_some_and(|(_, _, workload)| workload.egress.iter().any(|rule| rule.allows(to)))
    }

    /// Whether the actor that is here now may ask for names.
    pub(crate) fn may_ask(&self) -> bool {
        let state = self.state.lock();
        state.tenant.as_ref().is_some_and(|(_, _, workload)| ate_worker::may_ask(&workload.egress))
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join("link").join(ate_worker::INGRESS_SOCKET)
    }

    /// As the worker itself says; `None` if it is gone.
    pub(crate) async fn report(&self) -> Option<(WorkerReport, Vec<OpId>)> {
        let Ok(Answer::Report(report)) = self.link.call(link::Command::Report, &[]).await else { return None };
        let report = *report;
        let mut state = self.state.lock();
        state.memory_bytes = report.hosted.as_ref().map_or(0, |hosted| hosted.memory_bytes);
        let warm: BTreeSet<TemplateUid> = report.warm.iter().filter_map(|kind| *state.warm.get(kind)?).collect();
        drop(state);
        Some((self.reported(report.hosted, warm), report.retained))
    }

    /// Notes whether it answered; how long it has not.
    fn heard(&self, answered: bool) -> Duration {
        let mut state = self.state.lock();
        match answered {
            true => state.deaf_since = None,
            false => drop(state.deaf_since.get_or_insert_with(std::time::Instant::now)),
        }
        state.deaf_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// What the node itself knows.
    fn presumed(&self) -> WorkerReport {
        let state = self.state.lock();
        let hosted = state.tenant.as_ref().map(|(identity, _, _)| Hosted {
            identity: identity.clone(),
            frozen: false,
            idle: Duration::ZERO,
            memory_bytes: state.memory_bytes,
        });
        drop(state);
        self.reported(hosted, BTreeSet::new())
    }

    fn reported(&self, hosted: Option<Hosted>, warm: BTreeSet<TemplateUid>) -> WorkerReport {
        WorkerReport {
            worker: self.birth.uid,
            pool: self.birth.pool.clone(),
            pod: self.birth.pod.clone(),
            ingress: self.door.map_or_else(|| Ingress::Socket(self.socket()), Ingress::Door),
            hosted,
            warm: warm.into_iter().collect(),
        }
    }
}

impl Node {
    /// Of the worker whose directory this is.
    pub(crate) fn cgroup(&self, directory: &Path) -> Cgroup {
        let worker = directory.file_name().expect("below the node's own directory");
        self.instance_cgroup().child(&worker.to_string_lossy())
    }

    /// One group per data directory: two instances on a machine never meet.
    pub(crate) fn instance_cgroup(&self) -> Cgroup {
        let instance =
            ate_snapshot::Content::of(self.config.directory.as_os_str().as_encoded_bytes()).digest.to_string();
        Cgroup::at(&format!("ate-{}", &instance[..12]))
    }

    /// Takes over workers that outlived an earlier node and cleans up after those that did not. Returns those alive.
    pub async fn adopt(self: &Arc<Self>) {
        let directory = self.config.directory.join("workers");
        let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
        // All at once: one that is busy must not keep the others waiting.
        let adopted = entries.map(|entry| async move {
            let path = entry.path();
            let birth = std::fs::read(path.join("worker.json"))
                .ok()
                .and_then(|bytes| serde_json::from_slice::<Birth>(&bytes).ok());
            let alive = match &birth {
                Some(birth) => self.connect_within(ANSWERS_WITHIN, birth, &path).await,
                None => Err(NodeError::Worker("it was never up".into())),
            };
            if let Err(error) = alive {
                let pod = birth.as_ref().map(|birth| format!("{} of {}", birth.pod, birth.pool));
                tracing::info!(worker = %path.display(), pod, error = chain(&error), "cleaning up after a worker");
                match birth.as_ref().and_then(|birth| self.second_hands(birth.uid)) {
                    Some(handle) => self.clean_up_once_stored(handle),
                    None => self.clean_up(birth, path).await,
                }
            }
        });
        futures::future::join_all(adopted).await;
        self.adopted.cancel();
    }

    /// All of it, whichever of the questions is not answered.
    async fn connect_within(
        self: &Arc<Self>,
        within: Duration,
        birth: &Birth,
        directory: &Path,
    ) -> Result<Arc<Handle>, NodeError> {
        let connected = tokio::time::timeout(within, self.connect(birth, directory)).await;
        connected.unwrap_or_else(|_| Err(NodeError::Worker("it does not answer".into())))
    }

    pub(crate) async fn connect(self: &Arc<Self>, birth: &Birth, directory: &Path) -> Result<Arc<Handle>, NodeError> {
        let (link, events) =
            WorkerLink::connect(&directory.join("link")).await.map_err(NodeError::io("reach the worker"))?;
        let deaf = || NodeError::Worker("it does not answer".into());
        let Ok(Answer::Report(report)) = link.call(link::Command::Report, &[]).await else { return Err(deaf()) };
        let Ok(Answer::Memo(memo)) = link.call(link::Command::Memo, &[]).await else { return Err(deaf()) };
        let handle = Arc::new(Handle {
            birth: birth.clone(),
            directory: directory.to_owned(),
            door: self.config.door,
            link,
            preparing: tokio::sync::Mutex::default(),
            state: Mutex::default(),
        });
        for kind in &report.warm {
            handle.add_box(kind, None);
        }
        if let (Some(hosted), Ok(memo)) = (&report.hosted, serde_json::from_value::<Memo>(memo)) {
            handle.host(&hosted.identity, &memo.ran, &memo.workload);
        }
        for op in &report.retained {
            // Another build may have written of one what cannot be read here: that is no reason to lose the others.
            if let Err(error) = self.take_back(&handle, *op).await {
                tracing::warn!(worker = %birth.uid, %op, %error, "what a worker has captured cannot be taken over");
            }
        }
        // Its actor cannot be followed, but what it has captured has been taken from it: that is stored here as any other.
        if report.build != self.config.build {
            return Err(NodeError::Worker(format!("it is of build {}", report.build)));
        }
        let egress = directory.join("link").join(ate_worker::EGRESS_SOCKET);
        let _ = std::fs::remove_file(&egress);
        let egress = SocketPath::of(&egress)
            .and_then(|egress| tokio::net::UnixListener::bind(egress.path()))
            .map_err(NodeError::io("listen for a worker's connections"))?;
        // Before anybody can reach it: without a lease it would serve for as long as it lives.
        self.tell_lease(&handle).await?;
        self.workers.lock().insert(birth.uid, Arc::clone(&handle));
        let (node, followed) = (Arc::clone(self), Arc::clone(&handle));
        self.tasks.spawn(async move {
            tokio::select! {
                () = Arc::clone(&node).follow(Arc::clone(&followed), events) => {}
                () = crate::egress::serve(followed, egress) => {}
            }
        });
        Ok(handle)
    }

    /// Passes on a worker's news, and the last: that it is gone.
    async fn follow(self: Arc<Self>, handle: Arc<Handle>, mut events: mpsc::Receiver<link::Event>) {
        let worker = handle.birth.uid;
        loop {
            let event = tokio::select! {
                // What goes on in a worker that is kept is told to the next node.
                () = self.stopping.cancelled() => return,
                event = events.recv() => event,
            };
            let Some(event) = event else { break };
            let news = match event {
                link::Event::Started => {
                    handle.end_turn();
                    continue;
                }
                link::Event::Frozen(identity) => NodeEvent::Frozen { worker, identity },
                link::Event::Thawed(identity) => NodeEvent::Thawed { worker, identity },
                link::Event::Ended { actor, generation, exit } => {
                    handle.vacate(actor, generation);
                    self.never_again(actor, generation);
                    NodeEvent::Ended { worker, actor, generation, exit }
                }
            };
            let _ = self.events.send(news).await;
        }
        // It may only have stopped answering: nobody is told that it is gone while anything of it runs. Then at once, because its
        // actor is waited for; and what else is left of it is removed before it is no longer known here.
        let ended = Arc::clone(&handle);
        let said = tokio::task::spawn_blocking(move || {
            end(&ended.birth);
            last_words(&ended.directory)
        });
        let said = said.await.unwrap_or_default();
        let _ = self.events.send(NodeEvent::WorkerGone { worker }).await;
        if !handle.state.lock().retiring {
            let Birth { pool, pod, .. } = &handle.birth;
            tracing::warn!(%worker, %pool, pod, said, "a worker is gone that was not to go");
        }
        self.clean_up(Some(handle.birth.clone()), handle.directory.clone()).await;
        self.workers.lock().remove(&worker);
        self.missing.notify_one();
    }

    /// A worker that is nobody's any more but as the second pair of hands on what it captured.
    fn second_hands(&self, worker: WorkerUid) -> Option<Arc<Handle>> {
        let handle = self.held_by(worker)?;
        handle.actor().is_none().then_some(handle)
    }

    /// Unless the node stops before: then the next one finds the worker as this one did.
    fn clean_up_once_stored(self: &Arc<Self>, handle: Arc<Handle>) {
        let node = Arc::clone(self);
        self.tasks.spawn(async move {
            if node.until_stored(&handle).await {
                node.clean_up(Some(handle.birth.clone()), handle.directory.clone()).await;
            }
        });
    }

    /// Whether all that a worker captured is stored; not if the node stops before.
    async fn until_stored(&self, handle: &Arc<Handle>) -> bool {
        while self.holds(handle) {
            tokio::select! {
                () = tokio::time::sleep(REPORT_EVERY) => {}
                () = self.stopping.cancelled() => return false,
            }
        }
        true
    }

    /// Removes what a worker has left, off the reactor.
    pub(crate) async fn clean_up(self: &Arc<Self>, birth: Option<Birth>, directory: PathBuf) {
        let node = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || node.clean_up_now(birth.as_ref(), &directory)).await;
    }

    /// Its processes first: it may only have stopped answering.
    fn clean_up_now(&self, birth: Option<&Birth>, directory: &Path) {
        let cgroup = self.cgroup(directory);
        match birth {
            Some(birth) => end(birth),
            // Nobody wrote down who it is: what is in its group is.
            None => cgroup.processes().into_iter().for_each(kill_process),
        }
        for _ in 0..100 {
            if cgroup.remove().is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = std::fs::remove_dir_all(directory);
    }

    /// Ends workers that nobody needs any more; the control plane has seen to it that nobody is in them. Those that are
    /// named again are ended once.
    pub fn retire(self: &Arc<Self>, workers: Vec<WorkerUid>) {
        for worker in workers {
            let handle = self.workers.lock().get(&worker).cloned();
            if let Some(handle) = handle.filter(|handle| !std::mem::replace(&mut handle.state.lock().retiring, true)) {
                let node = Arc::clone(self);
                self.tasks.spawn(async move { node.end_worker(&handle).await });
            }
        }
    }

    async fn end_worker(&self, handle: &Arc<Handle>) {
        // It is the second pair of hands on what is not stored yet; if need be, for the next node.
        if !self.until_stored(handle).await {
            return;
        }
        // Its link ends with it, and the rest follows from that.
        let _ = tokio::time::timeout(STOP_WITHIN, handle.link.call(link::Command::Stop, &[])).await;
    }

    /// Tells the control plane how idle everyone is, again and again.
    pub async fn report_regularly(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(REPORT_EVERY) => {}
                () = self.stopping.cancelled() => return,
            }
            let (reports, _) = self.reports().await;
            if self.events.send(NodeEvent::Report(reports)).await.is_err() {
                return;
            }
        }
    }

    /// Keeps copies of snapshots and logs of actors that are elsewhere within their budgets, again and again.
    pub async fn evict_regularly(self: Arc<Self>) {
        for time in 0_u32.. {
            self.evict_copies(self.config.copy_budget).await;
            // Not before it is known who is here.
            if time % TIDY_ONE_IN == 1 && self.adopted.is_cancelled() {
                self.tidy_logs().await;
            }
            tokio::select! {
                () = tokio::time::sleep(EVICT_EVERY) => {}
                () = self.stopping.cancelled() => return,
            }
        }
    }

    pub(crate) async fn evict_copies(self: &Arc<Self>, budget: u64) {
        let node = Arc::clone(self);
        let evicted =
            tokio::task::spawn_blocking(move || node.snapshots.evict_to(budget, std::time::SystemTime::now())).await;
        match evicted {
            Ok(0) => {}
            Ok(gone) => tracing::info!(gone, "copies of snapshots were removed from this disk"),
            Err(error) => tracing::warn!(%error, "copies of snapshots could not be removed"),
        }
    }

    async fn tidy_logs(self: &Arc<Self>) {
        let node = Arc::clone(self);
        let tidied = tokio::task::spawn_blocking(move || {
            let here: HashSet<ActorUid> = node.handles().iter().filter_map(|handle| handle.actor()).collect();
            let whereabouts = |actor| match here.contains(&actor) {
                true => Whereabouts::Running,
                false if node.snapshots.is_any_here(actor) => Whereabouts::Asleep,
                false => Whereabouts::Elsewhere,
            };
            node.logs.tidy(whereabouts, logs::KEPT_BYTES, std::time::SystemTime::now())
        });
        match tidied.await.map_err(std::io::Error::other).flatten() {
            Ok(0) => {}
            Ok(gone) => tracing::info!(gone, "logs of actors that are elsewhere were removed"),
            Err(error) => tracing::warn!(%error, "logs could not be removed"),
        }
    }

    pub(crate) fn handles(&self) -> Vec<Arc<Handle>> {
        self.workers.lock().values().cloned().collect()
    }

    /// Every worker, side by side, and not for long: one that is stuck must not silence the others. And the operations
    /// whose images they keep.
    pub(crate) async fn reports(&self) -> (Vec<WorkerReport>, Vec<OpId>) {
        let handles = self.handles();
        let asked = handles.iter().map(async |handle| {
            let report = tokio::time::timeout(REPORT_WITHIN, handle.report()).await;
            if handle.heard(report.is_ok()) > DEAF_FOR {
                tracing::warn!(worker = %handle.birth.uid, "a worker does not answer and is ended");
                // Its link ends with it, and the rest follows from that.
                kill(&handle.birth);
            }
            report.unwrap_or_else(|_| Some((handle.presumed(), Vec::new())))
        });
        let (reports, retained): (Vec<_>, Vec<_>) =
            futures::future::join_all(asked).await.into_iter().flatten().unzip();
        (reports, retained.concat())
    }

    pub fn workers(&self) -> Vec<WorkerUid> {
        self.workers.lock().keys().copied().collect()
    }

    /// Ends every worker and whatever is in it, saving nothing, and waits until all of that is gone.
    pub(crate) async fn end_all(&self) {
        loop {
            let handles = self.handles();
            if handles.is_empty() {
                return;
            }
            for handle in handles {
                handle.state.lock().retiring = true;
                // Its link ends with it, and the rest follows from that.
                kill(&handle.birth);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Ends every worker but those named and those that hold what is not stored yet, and removes what is left of them. The
    /// others wait for the next node; those that were not named are returned.
    pub async fn stop(self: &Arc<Self>, kept: &[WorkerUid]) -> Vec<WorkerUid> {
        self.stopping.cancel();
        // From here on none is started, and one that was about to be is known or gone.
        drop(self.starting.lock().await);
        let (holding, handles): (Vec<_>, Vec<_>) = self
            .handles()
            .into_iter()
            .filter(|handle| !kept.contains(&handle.birth.uid))
            .partition(|handle| self.holds(handle));
        // Those that stay are still told of: nobody must take them for gone.
        self.workers.lock().retain(|uid, _| !handles.iter().any(|handle| handle.birth.uid == *uid));
        for handle in &handles {
            let _ = tokio::time::timeout(STOP_WITHIN, handle.link.call(link::Command::Stop, &[])).await;
        }
        let node = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || {
            for handle in handles {
                node.clean_up_now(Some(&handle.birth), &handle.directory);
            }
            let _ = node.instance_cgroup().remove();
        })
        .await;
        self.tasks.close();
        if tokio::time::timeout(STOP_WITHIN, self.tasks.wait()).await.is_err() {
            tracing::warn!("the node still waits for a worker that is gone, or for an order that is not carried out");
        }
        holding.iter().map(|handle| handle.birth.uid).collect()
    }
}

/// Kills a worker and with it all it started. The pid may have become somebody else's: the command line tells. What is returned
/// can be waited for; one that is ending already has no command line any more.
pub(crate) fn kill(birth: &Birth) -> Option<OwnedFd> {
    let pid = i32::try_from(birth.pid).ok().and_then(rustix::process::Pid::from_raw)?;
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()?;
    let cmdline = cmdline(birth.pid);
    let is_it = String::from_utf8_lossy(&cmdline).contains(&birth.uid.to_string());
    if is_it {
        let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
    }
    (is_it || cmdline.is_empty()).then_some(pidfd)
}

/// None if it is ending. One that is just becoming its program has none for a moment either.
fn cmdline(pid: u32) -> Vec<u8> {
    for _ in 0..20 {
        match std::fs::read(format!("/proc/{pid}/cmdline")) {
            Ok(cmdline) if cmdline.is_empty() => std::thread::sleep(Duration::from_millis(1)),
            read => return read.unwrap_or_default(),
        }
    }
    Vec::new()
}

fn kill_process(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Kills a worker and waits until it has ended: the first process of a namespace ends after all others in it.
fn end(birth: &Birth) {
    let Some(pidfd) = kill(birth) else { return };
    let within = rustix::time::Timespec { tv_sec: ENDS_WITHIN.as_secs().cast_signed(), tv_nsec: 0 };
    let mut ended = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
    if rustix::event::poll(&mut ended, Some(&within)) == Ok(0) {
        tracing::warn!(worker = %birth.uid, pid = birth.pid, "a worker was killed and has not ended yet");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stub::{self, Said, Stub};

    /// What the node says of a worker whose log says "panicked", when its link ends.
    async fn said_of_the_end(of: impl AsyncFnOnce(&Arc<Node>, &Stub, &Handle)) -> String {
        let directory = tempfile::tempdir().unwrap();
        let said = Said::default();
        let _listening = tracing::subscriber::set_default(said.clone());
        let node = stub::node(directory.path());
        let worker = Arc::new(Stub::new(HashMap::new()));
        let handle = worker.join(&node).await.unwrap();
        std::fs::write(handle.directory.join("worker.log"), "first\nit panicked").unwrap();
        of(&node, &worker, &handle).await;
        while !node.workers().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(!handle.directory.exists());
        said.text()
    }

    #[tokio::test]
    async fn the_log_of_an_actor_that_is_here_stays_however_quiet_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let node = stub::node(directory.path());
        let handle = Arc::new(Stub::new(HashMap::new())).join(&node).await.unwrap();
        handle.host(&stub::identity(), &stub::ran(), &stub::workload());
        let log = |actor| {
            let file = node.logs.append(actor).unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
            node.config.directory.join("logs").join(format!("{actor}.jsonl"))
        };
        let [here, elsewhere] = [log(stub::identity().uid), log(ActorUid::from_random([9; 16]))];
        node.tidy_logs().await;
        assert!(here.exists() && !elsewhere.exists());
    }

    #[tokio::test]
    async fn a_worker_that_does_not_answer_keeps_a_node_waiting_for_so_long_and_no_longer() {
        let directory = tempfile::tempdir().unwrap();
        let node = stub::node(directory.path());
        let silences: [fn(&link::Command) -> bool; 3] = [
            |command| matches!(command, link::Command::Report),
            |command| matches!(command, link::Command::Memo),
            |command| matches!(command, link::Command::Recall { .. }),
        ];
        for is_deaf_to in silences {
            let retained = HashMap::from([(OpId::from_random([1; 16]), node.snapshots.scratch_file().unwrap())]);
            let (birth, at) = Arc::new(Stub { is_deaf_to, ..Stub::new(retained) }).settle(&node);
            let refused = node.connect_within(Duration::from_millis(50), &birth, &at).await.unwrap_err();
            assert!(refused.to_string().contains("does not answer"), "{refused}");
            assert!(node.workers().is_empty());
        }
    }

    #[tokio::test]
    async fn a_worker_that_ends_by_itself_leaves_its_last_words() {
        let said = said_of_the_end(async |_, worker, _| worker.dies.notify_one()).await;
        assert!(said.contains("not to go") && said.contains("it panicked"), "{said}");
    }

    #[tokio::test]
    async fn a_worker_that_is_told_to_go_has_nothing_to_say() {
        let said = said_of_the_end(async |node, _, handle| node.retire(vec![handle.birth.uid])).await;
        assert!(!said.contains("panicked"), "{said}");
    }
}
