//! Waking an actor: bind it to a worker in one transaction, have the node run it, settle.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ate_actor::{Actor, Event, Intent, Lease, Phase, SnapshotRef, Start};
use ate_name::{ActorKey, Generation, NodeName};
use ate_orders::{Activate, Identity, NodeError, SnapshotAt, Source};
use ate_placement::{State, Wish};
use ate_store::Guard;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::actors::{Versioned, is_golden, usable};
use crate::assignments::Assigned;
use crate::catalog::{Template, TemplatePhase};
use crate::drive::{Driver, Patience};
use crate::ledger::Note;
use crate::reach::{GIVEN, Unanswered};
use crate::records::{Read, worker_key};
use crate::{Code, Control, ControlError};

/// Before a wake is tried again because the fault lay with the worker, not with the actor; doubled each time, so often.
const AGAIN: Duration = Duration::from_millis(10);
const DOUBLINGS: u32 = 6;

/// Before the same actor is asked once more to make room.
const PREEMPT_AGAIN: Duration = Duration::from_secs(1);

/// How long a node that was hindered gets nobody whom another can take.
const AVOIDED_FOR: Duration = Duration::from_secs(30);

/// How long a record that says "running" is doubted when the worker has said "not here". The news is on its way.
const DOUBT: Duration = Duration::from_millis(250);

/// A worker that is about to be bound. Dropped without that, it is looked at again.
struct Reserved {
    control: Arc<Control>,
    lease: Lease,
    bound: bool,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let worker = self.lease.worker;
        self.control.reserved.lock().remove(&worker);
        if !self.bound {
            let control = Arc::clone(&self.control);
            self.control.tasks.spawn(async move {
                let mut patience = Patience::new();
                while control.look_at_worker(worker).await.is_err() && patience.wait(&control).await.is_ok() {}
            });
        }
    }
}

impl Control {
    /// The public API's resume: does not queue behind another operation.
    pub async fn resume_actor(self: &Arc<Self>, key: &ActorKey, boot: bool) -> Result<Versioned, ControlError> {
        let deadline = Instant::now() + self.settings.park;
        let start = if boot { Start::Boot } else { Start::Newest };
        let mut tries = 0;
        loop {
            let read = self.actor(key).await?;
            match &read.value.phase {
                Phase::Running { .. } => return Ok(read.into()),
                Phase::Suspended | Phase::Paused | Phase::Resuming { lease: None, .. } => {}
                Phase::Resuming { .. } | Phase::Suspending { .. } | Phase::Saving { .. } => {
                    return Err(ControlError::in_progress());
                }
            }
            match self.wake(read, start, deadline, false).await {
                // Somebody else's operation got in between, or the worker was not what it was taken for: the actor tells.
                Err(error) if error.code == Code::Aborted && again(&mut tries, deadline).await => {}
                Err(error) if error.is_conflict() => return Err(ControlError::in_progress()),
                Err(error) => return Err(error),
                Ok(_) => return self.settled(key, deadline).await,
            }
        }
    }

    /// Where the actor runs, waking it if need be. Requests for the same actor share one wake; a request that finds the
    /// actor on its way out calls that off where it still can. `stale` is the generation that a worker has just denied.
    pub async fn activate(
        self: &Arc<Self>,
        key: &ActorKey,
        stale: Option<Generation>,
        deadline: Instant,
    ) -> Result<Assigned, ControlError> {
        usable(key)?;
        // Whatever it waits for: a store that is away, a node that hangs. What has begun goes on without whoever asked.
        before(deadline, self.activated(key, stale, deadline)).await.unwrap_or_else(|| {
            Err(ControlError::new(
                Code::DeadlineExceeded,
                format!(
                    "Actor {name} did not wake in time\n  what it is waiting for: ate history {name} -a {}",
                    key.atespace,
                    name = key.name
                ),
            ))
        })
    }

    async fn activated(
        self: &Arc<Self>,
        key: &ActorKey,
        stale: Option<Generation>,
        deadline: Instant,
    ) -> Result<Assigned, ControlError> {
        let (mut tries, mut doubted) = (0, false);
        loop {
            let notify = self.follower.of(key);
            let changed = notify.notified();
            let read = self.actor(key).await?;
            match &read.value.phase {
                Phase::Running { lease } => {
                    let denied = stale == Some(read.value.generation);
                    if denied && self.is_lost(lease).await? {
                        Box::pin(self.lost(key, read.value.generation, "its worker no longer has it")).await?;
                        continue;
                    }
                    if denied && !doubted {
                        // Its worker has just said no: it is about to change, or was about to and stays after all.
                        doubted = true;
                        let _ = before(Instant::now() + DOUBT, changed).await;
                        continue;
                    }
                    if let Some(assigned) = self.assignment(&read.value) {
                        return Ok(assigned);
                    }
                }
                Phase::Suspending { lease, op, intent: Intent::Idle, .. } => {
                    let _ = self.nodes.abort(&lease.node, lease.worker, *op).await;
                }
                Phase::Suspended | Phase::Paused | Phase::Resuming { lease: None, .. } => {
                    match self.wake(read, Start::Newest, deadline, true).await {
                        Ok(assigned) => return Ok(assigned),
                        Err(error) if error.is_conflict() => continue,
                        Err(error) if error.code == Code::Aborted && again(&mut tries, deadline).await => continue,
                        Err(error) => return Err(error),
                    }
                }
                Phase::Resuming { .. } | Phase::Suspending { .. } | Phase::Saving { .. } => {}
            }
            changed.await;
        }
    }

    /// Binds and runs an actor that has no worker. `patient`: wait for a worker rather than fail.
    pub(crate) async fn wake(
        self: &Arc<Self>,
        read: Read<Actor>,
        start: Start,
        deadline: Instant,
        patient: bool,
    ) -> Result<Assigned, ControlError> {
        let read = self.caught_up(read).await?;
        self.check_crashes(&read.value)?;
        let read = self.without_lost_copy(read).await?;
        let template = self.template_of(&read.value)?;
        self.await_golden(&read.value, &template, start, deadline).await?;
        self.room_to_wake(&read.value.key).await?;
        let mut reserved = self.reserve(&read.value, &template, deadline, patient).await?;
        let binds = self.binds.read().await;
        if !*binds {
            return Err(ControlError::stopping());
        }
        let driver = self.new_operation();
        let event = Event::Bind { lease: reserved.lease.clone(), op: driver.op, start };
        let bound = self.transition(&read, event, Note::new("Resuming")).await?;
        reserved.bound = true;
        drop((reserved, binds));
        ate_failpoint::reached("wake.bound");
        self.finish_wake(driver, bound).await
    }

    /// An actor whose newest snapshot is on a node that is gone for good falls back to its last durable one.
    async fn without_lost_copy(self: &Arc<Self>, read: Read<Actor>) -> Result<Read<Actor>, ControlError> {
        let only = read.value.snapshots.base().and_then(|(_, node)| node.cloned());
        let Some(node) = only else { return Ok(read) };
        match self.gone_for_good(&node).await {
            Some(gone) => Box::pin(self.fall_back(read, node, Some(&gone))).await,
            None => Ok(read),
        }
    }

    /// Its newest snapshot is gone: the last durable one is what it continues from. `gone`: for as long as its node is.
    pub(crate) async fn fall_back(
        self: &Arc<Self>,
        read: Read<Actor>,
        node: NodeName,
        gone: Option<&Guard>,
    ) -> Result<Read<Actor>, ControlError> {
        let note = Note::because("FellBack", format!("its newest snapshot was on node {node} only, and is gone"));
        self.settle_while(gone, read, Event::LocalLost { node }, note).await
    }

    /// From the binding on; also where a wake that was cut off is taken up. Answers when the sandbox runs, and goes on by
    /// itself: whoever asked may go away, the operation does not.
    pub(crate) async fn finish_wake(
        self: &Arc<Self>,
        driver: Driver,
        bound: Read<Actor>,
    ) -> Result<Assigned, ControlError> {
        let (tell, told) = oneshot::channel();
        let control = Arc::clone(self);
        self.tasks.spawn(async move {
            let started = match control.start_sandbox(&bound).await {
                Ok(started) => started,
                // Stopping, or the operation is over: nothing is to be written down.
                Err(error) => return drop(tell.send(Err(error))),
            };
            match started {
                Ok(phases) => {
                    ate_failpoint::reached("wake.started");
                    // The sandbox runs: the caller need not wait until that is written down.
                    let _ = tell.send(control.assignment(&bound.value).ok_or_else(ControlError::conflict));
                    control.settle_started(&driver, bound, phases).await;
                }
                // In a box: it is rare, and every wake would be as large as it.
                Err(error) => Box::pin(control.fail_wake(driver, bound, error, tell)).await,
            }
        });
        told.await.map_err(|_| ControlError::stopping())?
    }

    /// A node could not run a bound actor: its worker is given back, and whoever asked hears why.
    async fn fail_wake(
        self: &Arc<Self>,
        driver: Driver,
        bound: Read<Actor>,
        error: NodeError,
        tell: oneshot::Sender<Result<Assigned, ControlError>>,
    ) {
        let only = bound.value.snapshots.base().and_then(|(newest, node)| Some((newest.prefix.clone(), node?.clone())));
        // Not if what it is a difference to is missing: that may be found elsewhere, and the newest is where it is.
        let missing = |newest: &str| matches!(&error, NodeError::NoSnapshot(missing) if missing == newest);
        let gone_from = only.filter(|(newest, _)| missing(newest)).map(|(_, node)| node);
        let refusal = refusal(&bound.value, &error, gone_from.is_some());
        if matches!(error, NodeError::NoSnapshot(_)) {
            self.counters.snapshots_missing.one();
        }
        if let (NodeError::Hindered(_), Some(lease)) = (&error, bound.value.lease()) {
            self.avoid(&lease.node, AVOIDED_FOR);
        }
        if let (NodeError::WorkerGone, Some(lease)) = (&error, bound.value.lease()) {
            // The news is on its way; until it is here the same worker would be chosen again.
            if self.worker_gone(lease.worker, "its worker is gone").await.is_ok() {
                return drop(tell.send(Err(refusal)));
            }
        }
        let crashed = matches!(error, NodeError::Crashed(_)).then(|| self.world.now());
        let event = Event::Failed { op: driver.op, reason: error.to_string(), crashed };
        let mut settled = self.settle(bound, event, Note::because("ResumeFailed", error.to_string())).await;
        if let (Some(node), Ok(failed)) = (gone_from, &settled) {
            settled = self.fall_back(failed.clone(), node, None).await;
        }
        let _ = tell.send(Err(refusal));
        if let Ok(failed) = settled {
            let _ = self.give_up(driver, failed).await;
        }
    }

    /// Has the node run a bound actor. The outer error means that there is nothing more to do for this operation.
    async fn start_sandbox(
        self: &Arc<Self>,
        bound: &Read<Actor>,
    ) -> Result<Result<Vec<ate_orders::Phase>, NodeError>, ControlError> {
        let (node, order) = match self.order(&bound.value) {
            Ok(order) => order,
            Err(error) => return Ok(Err(NodeError::Refused(error.text))),
        };
        let (mut patience, mut unanswered) = (Patience::new(), Unanswered::times(GIVEN));
        loop {
            let begun = Instant::now();
            match self.nodes.activate(&node, order.clone()).await {
                Err(error @ NodeError::Unreachable(_)) => {
                    tracing::warn!(actor = %bound.value.key, %node, %error, "a wake waits for its node");
                    self.avoid(&node, AVOIDED_FOR);
                    if unanswered.is_hopeless(begun, &self.settings) {
                        // Somebody else may have gone on with it meanwhile.
                        self.still(bound).await?;
                        if self.has_not_come(&node, &order).await {
                            return Ok(Err(NodeError::Hindered(error.to_string())));
                        }
                    }
                    patience.wait(self).await?;
                    self.still(bound).await?;
                }
                other => return Ok(other.map(|activated| activated.phases)),
            }
        }
    }

    /// Whether a node says that what it was to run does not run, and will not.
    async fn has_not_come(&self, node: &NodeName, order: &Activate) -> bool {
        let Identity { uid, generation, .. } = order.identity;
        let ended = self.nodes.discard(node, order.worker, uid, generation).await;
        matches!(ended, Ok(()) | Err(NodeError::Stale | NodeError::WorkerGone))
    }

    /// An error once the actor has left the step of its operation that it was read in: somebody else has brought it further, or
    /// to its end. What is left of it, if anything, is taken up from there.
    pub(crate) async fn still(&self, read: &Read<Actor>) -> Result<(), ControlError> {
        match self.actor(&read.value.key).await {
            Ok(now) if now.value.phase != read.value.phase => Err(ControlError::conflict()),
            Err(error) if error.is_store_away() => Ok(()),
            other => other.map(drop),
        }
    }

    /// Whatever else happened to the actor meanwhile stands: then this generation is over, and so is its sandbox.
    async fn settle_started(self: &Arc<Self>, driver: &Driver, bound: Read<Actor>, phases: Vec<ate_orders::Phase>) {
        let Some(lease) = bound.value.lease().cloned() else { return };
        let identity = identity(&bound.value);
        let settled = self.settle(bound, Event::Started { op: driver.op }, Note::new("Running").phases(phases)).await;
        if settled.is_err_and(|error| error.is_conflict() || error.code == Code::NotFound) {
            // Or it was told already, and somebody has gone on from there: then it stays.
            let _ = self.check_right(&lease.node, lease.worker, &identity).await;
        }
    }

    /// The actor once its present operation is written down.
    pub(crate) async fn settled(&self, key: &ActorKey, deadline: Instant) -> Result<Versioned, ControlError> {
        loop {
            let notify = self.follower.of(key);
            let changed = notify.notified();
            let read = self.actor(key).await?;
            if read.value.phase.operation().is_none() {
                return Ok(read.into());
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Ok(read.into());
            }
        }
    }

    pub(crate) fn template_of(&self, actor: &Actor) -> Result<Arc<Template>, ControlError> {
        self.catalog.template_by_uid(actor.template_uid).ok_or_else(|| {
            ControlError::precondition(format!(
                "ActorTemplate {} of actor {} not found",
                actor.template, actor.key.name
            ))
        })
    }

    /// Waits for a golden that is being made: an actor that boots by itself shares no pages with the others, and its
    /// snapshots would be fifty times as large.
    async fn await_golden(
        &self,
        actor: &Actor,
        template: &Template,
        start: Start,
        deadline: Instant,
    ) -> Result<(), ControlError> {
        if start == Start::Boot || actor.snapshots.base().is_some() {
            return Ok(());
        }
        let key = template.object.metadata.key();
        let mut changes = self.catalog.changes();
        loop {
            let template = self
                .catalog
                .template(&key)
                .ok_or_else(|| ControlError::precondition(format!("ActorTemplate {key} not found")))?;
            match (template.status.phase, &template.status.golden) {
                (TemplatePhase::Ready, Some(_)) => return Ok(()),
                (TemplatePhase::Failed, _) => {
                    return Err(ControlError::precondition(format!(
                        "ActorTemplate {key} has failed: {}",
                        template.status.reason
                    )));
                }
                _ => {}
            }
            if before(deadline, changes.changed()).await.is_none() {
                return Err(ControlError::new(
                    Code::DeadlineExceeded,
                    format!("ActorTemplate {key} has no golden snapshot yet\n  how far it is: ate get templates"),
                ));
            }
        }
    }

    /// Takes a free worker out of the fleet, making room if policy allows.
    async fn reserve(
        self: &Arc<Self>,
        actor: &Actor,
        template: &Template,
        deadline: Instant,
        patient: bool,
    ) -> Result<Reserved, ControlError> {
        let pools = self.eligible_pools(template, &actor.selector);
        if pools.is_empty() {
            return Err(ControlError::precondition(
                "no worker pool matches the template's sandboxClass and the template/actor selectors",
            ));
        }
        let required = actor.snapshots.base().and_then(|(_, node)| node.cloned());
        let preferred = actor.snapshots.local.as_ref().map(|(_, node)| node.clone());
        let avoided = self.hindered_nodes();
        let wish = Wish {
            pools: &pools,
            template: template.uid,
            required_node: required.as_ref(),
            preferred_node: preferred.as_ref(),
            avoided_nodes: &avoided,
        };
        let mut preempted = None::<(ActorKey, Instant)>;
        loop {
            let freed = self.freed.notified();
            let idlest = {
                let mut fleet = self.fleet.lock();
                if let Some(lease) = fleet.choose(&wish) {
                    fleet.set_state(lease.worker, State::Taken);
                    self.reserved.lock().insert(lease.worker);
                    return Ok(Reserved { control: Arc::clone(self), lease, bound: false });
                }
                let (unwilling, now) = (self.unwilling.lock(), Instant::now());
                let may_be = |key: &ActorKey| !is_golden(key) && !unwilling.spares(key, now);
                fleet.idlest(&wish, may_be).map(|resident| resident.key.clone())
            };
            match idlest {
                // The same one again after a while: its save may have been called off, and it idle again since.
                Some(idlest)
                    if preempted.as_ref().is_none_or(|(key, at)| *key != idlest || at.elapsed() > PREEMPT_AGAIN) =>
                {
                    self.begin_save(&idlest, Intent::Idle, "room for another actor");
                    preempted = Some((idlest, Instant::now()));
                }
                None if !patient && preempted.is_none() => {
                    return Err(ControlError::precondition("no free workers available"));
                }
                _ => {}
            }
            // Also without news: whoever was not willing to make room may be by then.
            if before(deadline.min(Instant::now() + PREEMPT_AGAIN), freed).await.is_none() && Instant::now() >= deadline
            {
                return Err(ControlError::precondition("no free workers available"));
            }
        }
    }

    fn hindered_nodes(&self) -> BTreeSet<NodeName> {
        let mut hindered = self.hindered.lock();
        hindered.retain(|_, until| *until > Instant::now());
        hindered.keys().cloned().collect()
    }

    /// For so long a node gets nobody whom another can take.
    pub(crate) fn avoid(&self, node: &NodeName, time: Duration) {
        let mut hindered = self.hindered.lock();
        let until = hindered.entry(node.clone()).or_insert_with(Instant::now);
        *until = (*until).max(Instant::now() + time);
    }

    /// What a bound actor's node is told to do: the same whoever asks, so that it can be asked again.
    fn order(&self, actor: &Actor) -> Result<(NodeName, Activate), ControlError> {
        let Phase::Resuming { lease: Some(lease), op, start, .. } = &actor.phase else {
            return Err(ControlError::conflict());
        };
        let template = self.template_of(actor)?;
        let at =
            |snapshot: &SnapshotRef| Some(SnapshotAt { prefix: snapshot.prefix.clone(), manifest: snapshot.manifest? });
        let own = actor.snapshots.base().and_then(|(snapshot, _)| at(snapshot));
        let golden = template.status.golden.as_ref().filter(|_| *start != Start::Boot).and_then(at);
        let fresh = *start == Start::Fresh;
        let source = match (own, golden) {
            // The golden actor's own snapshot is the golden.
            (Some(at), _) => Source::Snapshot { golden: is_golden(&actor.key), at, fresh },
            (None, Some(at)) => Source::Snapshot { golden: true, at, fresh },
            (None, None) => Source::Boot { runtime: self.runtime(&lease.pool)? },
        };
        let order = Activate {
            op: *op,
            worker: lease.worker,
            identity: identity(actor),
            workload: template.workload()?,
            source,
            sealed_key: actor.sealed_key.clone(),
            probe: *start == Start::Trial,
        };
        Ok((lease.node.clone(), order))
    }

    /// Whether the worker itself is gone.
    async fn is_lost(&self, lease: &Lease) -> Result<bool, ControlError> {
        // What is known here may be old, and a verdict must not be.
        let known = self.fleet.lock().get(lease.worker).is_some();
        Ok(!known && self.store.get(&worker_key(lease.worker)).await?.is_none())
    }
}

/// Waits a little before another try, longer each time; `false`: there is no time for one.
pub(crate) async fn again(tries: &mut u32, deadline: Instant) -> bool {
    let pause = AGAIN * 2_u32.pow((*tries).min(DOUBLINGS));
    *tries += 1;
    if Instant::now() + pause >= deadline {
        return false;
    }
    Box::pin(tokio::time::sleep(pause)).await;
    true
}

/// What comes before the deadline. In a box: a timer is large, and as good as no wake waits for one.
async fn before<T>(deadline: Instant, what: impl Future<Output = T>) -> Option<T> {
    Box::pin(tokio::time::timeout_at(deadline, what)).await.ok()
}

pub(crate) fn identity(actor: &Actor) -> Identity {
    Identity { uid: actor.uid, key: actor.key.clone(), template: actor.template.clone(), generation: actor.generation }
}

/// What a client hears of a node's refusal. `older`: without its newest snapshot the actor can fall back to an older one.
fn refusal(actor: &Actor, error: &NodeError, older: bool) -> ControlError {
    match error {
        NodeError::NoSnapshot(_) if !older => ControlError::precondition(format!(
            "actor {}: {error}, and no other is known\n  bring it back from a backup of the storage, or delete the actor",
            actor.key.name
        )),
        NodeError::WorkerGone
        | NodeError::Busy
        | NodeError::Stale
        | NodeError::UnknownNode(_)
        | NodeError::NoSnapshot(_)
        | NodeError::Hindered(_)
        | NodeError::Unreachable(_) => {
            ControlError::new(Code::Aborted, format!("the worker of actor {} failed: {error}", actor.key.name))
        }
        NodeError::Refused(text) => ControlError::precondition(text.clone()),
        other => {
            ControlError::new(Code::Unavailable, format!("actor {} could not be started: {other}", actor.key.name))
        }
    }
}
