//! Waking an actor: bind it to a worker in one transaction, have the node run it, settle.

use std::sync::Arc;
use std::time::Duration;

use ate_actor::{Actor, Event, Intent, Lease, Phase};
use ate_name::{ActorKey, Generation, OpId};
use ate_orders::{Activate, Identity, NodeError, SnapshotAt, Source};
use ate_placement::{State, Wish};
use tokio::time::Instant;

use crate::actors::Versioned;
use crate::actors::usable;
use crate::assignments::Assigned;
use crate::catalog::{Template, TemplatePhase};
use crate::ledger::Note;
use crate::records::Read;
use crate::{Code, Control, ControlError};

/// Workers tried for one wake when the fault lies with the worker, not with the actor.
const ATTEMPTS: usize = 3;

/// How long a record that says "running" is doubted when the worker has said "not here". The news is on its way.
const DOUBT: Duration = Duration::from_millis(250);

/// Where a wake may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    /// The newest snapshot, else the golden.
    Newest,
    /// Nothing, unless the actor has a snapshot of its own.
    Boot,
    /// As `Newest`, but the workload is asked whether it is up: the trial of a golden snapshot.
    Trial,
}

/// What an operation in flight tells whoever began it.
struct Woken {
    read: Read<Actor>,
    node: Result<Vec<ate_orders::Phase>, NodeError>,
}

impl Control {
    /// The public API's resume: does not queue behind another operation.
    pub async fn resume_actor(self: &Arc<Self>, key: &ActorKey, boot: bool) -> Result<Versioned, ControlError> {
        let read = self.actor(key).await?;
        match &read.value.phase {
            Phase::Running { .. } => return Ok(read.into()),
            Phase::Suspended | Phase::Paused | Phase::Resuming { lease: None, .. } => {}
            Phase::Resuming { .. } | Phase::Suspending { .. } | Phase::Saving { .. } => {
                return Err(ControlError::in_progress());
            }
        }
        let deadline = Instant::now() + self.settings.park;
        let from = if boot { From::Boot } else { From::Newest };
        match self.wake(read, from, deadline, false).await {
            // Somebody else's operation got in between.
            Err(error) if error.is_conflict() => Err(ControlError::in_progress()),
            Err(error) => Err(error),
            Ok(_) => self.settled(key, deadline).await,
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
        let (mut attempts, mut doubted) = (0, false);
        loop {
            let notify = self.follower.of(key);
            let changed = notify.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let read = self.actor(key).await?;
            match &read.value.phase {
                Phase::Running { lease } => {
                    let denied = stale == Some(read.value.generation);
                    if denied && self.is_lost(lease) {
                        self.lost(key, read.value.generation, "its worker no longer has it").await?;
                        continue;
                    }
                    if denied && !doubted {
                        // Its worker has just said no: it is about to change, or was about to and stays after all.
                        doubted = true;
                        let _ = tokio::time::timeout(DOUBT, changed).await;
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
                    match self.wake(read, From::Newest, deadline, true).await {
                        Ok(assigned) => return Ok(assigned),
                        Err(error) if error.is_conflict() => continue,
                        Err(error) if error.code == Code::Aborted && attempts + 1 < ATTEMPTS => {
                            attempts += 1;
                            continue;
                        }
                        Err(error) => return Err(error),
                    }
                }
                Phase::Resuming { .. } | Phase::Suspending { .. } | Phase::Saving { .. } => {}
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Err(ControlError::new(
                    Code::DeadlineExceeded,
                    format!("Actor {} did not wake in time", key.name),
                ));
            }
        }
    }

    /// Binds and runs an actor that has no worker. `patient`: wait for a worker rather than fail.
    pub(crate) async fn wake(
        self: &Arc<Self>,
        read: Read<Actor>,
        from: From,
        deadline: Instant,
        patient: bool,
    ) -> Result<Assigned, ControlError> {
        let template = self.template_of(&read.value)?;
        let golden = self.golden_for(&read.value, &template, from, deadline).await?;
        let lease = self.reserve(&read.value, &template, deadline, patient).await?;
        let op = OpId::from_random(self.world.random());
        let bound = match self.transition(&read, Event::Bind { lease: lease.clone(), op }, Note::new("Resuming")).await
        {
            Ok(bound) => bound,
            Err(error) => {
                self.free(&lease);
                return Err(error);
            }
        };
        let order = match self.order(&bound.value, &template, golden, &lease, op, from == From::Trial) {
            Ok(order) => order,
            Err(error) => {
                self.settle_wake(Woken { read: bound, node: Err(NodeError::Refused(error.text.clone())) }).await;
                return Err(error);
            }
        };
        // On a task of its own: whoever asked may go away, the operation does not.
        let (tell, told) = tokio::sync::oneshot::channel();
        let control = Arc::clone(self);
        self.tasks.spawn(async move {
            let result = control.nodes.activate(&lease.node, order).await.map(|activated| activated.phases);
            let answer = match &result {
                Ok(_) => control.assignment(&bound.value).ok_or_else(ControlError::conflict),
                Err(error) => Err(refusal(&bound.value, error)),
            };
            let failed = answer.is_err();
            let mut tell = Some(tell);
            if !failed && let Some(tell) = tell.take() {
                // The sandbox runs: the caller need not wait until that is written down.
                control.told.lock().insert(op);
                let _ = tell.send(answer.clone());
            }
            control.settle_wake(Woken { read: bound, node: result }).await;
            control.told.lock().remove(&op);
            if let Some(tell) = tell {
                let _ = tell.send(answer);
            }
        });
        told.await.map_err(|_| ControlError::new(Code::Unavailable, "the server is stopping"))?
    }

    /// Writes down how a wake ended. Whatever else happened to the actor meanwhile stands: then this generation is over.
    async fn settle_wake(self: &Arc<Self>, woken: Woken) {
        let Woken { mut read, node } = woken;
        let Some(op) = read.value.phase.operation() else { return };
        let Some(lease) = read.value.lease().cloned() else { return };
        loop {
            let (event, note) = match &node {
                Ok(phases) => (Event::Started { op }, Note::new("Running").phases(phases.clone())),
                Err(error) => {
                    (Event::Failed { op, reason: error.to_string() }, Note::because("ResumeFailed", error.to_string()))
                }
            };
            match self.transition(&read, event, note).await {
                Ok(settled) => {
                    if node.is_err() {
                        self.free(&lease);
                        self.give_up_later(&settled.value.key, op);
                    }
                    return;
                }
                Err(error) if error.is_conflict() => match self.actor(&read.value.key).await {
                    Ok(again) if again.value.phase.operation() == Some(op) => read = again,
                    _ => {
                        let (uid, generation) = (read.value.uid, read.value.generation);
                        let _ = self.nodes.discard(&lease.node, lease.worker, uid, generation).await;
                        return;
                    }
                },
                Err(error) => {
                    tracing::warn!(actor = %read.value.key, %error, "a wake cannot be settled yet");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            }
        }
    }

    /// A failed resume stays visible for a while, then the actor is what it was before.
    fn give_up_later(self: &Arc<Self>, key: &ActorKey, op: OpId) {
        let (control, key) = (Arc::clone(self), key.clone());
        self.tasks.spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(control.settings.failed_resume_visible) => {}
                () = control.stopping.cancelled() => return,
            }
            if let Ok(read) = control.actor(&key).await {
                let _ = control.transition(&read, Event::GaveUp { op }, Note::new("Suspended")).await;
            }
        });
    }

    /// The actor once its present operation is written down.
    pub(crate) async fn settled(&self, key: &ActorKey, deadline: Instant) -> Result<Versioned, ControlError> {
        loop {
            let notify = self.follower.of(key);
            let changed = notify.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
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

    /// The golden to start from, waiting for one that is being made: an actor that boots by itself shares no pages with
    /// the others, and its snapshots would be fifty times as large.
    async fn golden_for(
        &self,
        actor: &Actor,
        template: &Template,
        from: From,
        deadline: Instant,
    ) -> Result<Option<SnapshotAt>, ControlError> {
        if from == From::Boot || actor.snapshots.base().is_some() {
            return Ok(None);
        }
        let key = template.object.metadata.key();
        let mut changes = self.catalog.changes();
        loop {
            let template = self
                .catalog
                .template(&key)
                .ok_or_else(|| ControlError::precondition(format!("ActorTemplate {key} not found")))?;
            match (template.status.phase, &template.status.golden) {
                (TemplatePhase::Ready, Some(golden)) => {
                    return Ok(golden.manifest.map(|manifest| SnapshotAt { prefix: golden.prefix.clone(), manifest }));
                }
                (TemplatePhase::Failed, _) => {
                    return Err(ControlError::precondition(format!(
                        "ActorTemplate {key} has failed: {}",
                        template.status.reason
                    )));
                }
                _ => {}
            }
            if tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
                return Err(ControlError::new(
                    Code::DeadlineExceeded,
                    format!("ActorTemplate {key} has no golden snapshot yet"),
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
    ) -> Result<Lease, ControlError> {
        let pools = self.eligible_pools(template, &actor.selector);
        if pools.is_empty() {
            return Err(ControlError::precondition(
                "no worker pool matches the template's sandboxClass and the template/actor selectors",
            ));
        }
        let required = actor.snapshots.base().and_then(|(_, node)| node.cloned());
        let preferred = actor.snapshots.local.as_ref().map(|(_, node)| node.clone());
        let wish = Wish {
            pools: &pools,
            template: template.uid,
            required_node: required.as_ref(),
            preferred_node: preferred.as_ref(),
        };
        let mut preempted = None::<ActorKey>;
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            let idlest = {
                let mut fleet = self.fleet.lock();
                if let Some(lease) = fleet.choose(&wish) {
                    fleet.set_state(lease.worker, State::Taken);
                    return Ok(lease);
                }
                fleet.idlest(&wish).map(|resident| resident.key.clone())
            };
            match idlest {
                Some(idlest) if preempted.as_ref() != Some(&idlest) => {
                    self.begin_save(&idlest, Intent::Idle, "room for another actor");
                    preempted = Some(idlest);
                }
                None if !patient && preempted.is_none() => {
                    return Err(ControlError::precondition("no free workers available"));
                }
                _ => {}
            }
            if tokio::time::timeout_at(deadline, freed).await.is_err() {
                return Err(ControlError::precondition("no free workers available"));
            }
        }
    }

    fn order(
        &self,
        actor: &Actor,
        template: &Template,
        golden: Option<SnapshotAt>,
        lease: &Lease,
        op: OpId,
        probe: bool,
    ) -> Result<Activate, ControlError> {
        let own = actor.snapshots.base().and_then(|(snapshot, _)| {
            Some(SnapshotAt { prefix: snapshot.prefix.clone(), manifest: snapshot.manifest? })
        });
        let source = match (own, golden) {
            // The golden actor's own snapshot is the golden.
            (Some(at), _) => Source::Snapshot { golden: actor.key.atespace.as_str() == ate_name::GOLDEN_ATESPACE, at },
            (None, Some(at)) => Source::Snapshot { golden: true, at },
            (None, None) => Source::Boot { runtime: self.runtime(&lease.pool)? },
        };
        Ok(Activate {
            op,
            worker: lease.worker,
            identity: identity(actor),
            workload: template.workload()?,
            source,
            sealed_key: actor.sealed_key.clone(),
            probe,
        })
    }

    /// Whether the worker itself is gone.
    fn is_lost(&self, lease: &Lease) -> bool {
        self.fleet.lock().get(lease.worker).is_none()
    }
}

pub(crate) fn identity(actor: &Actor) -> Identity {
    Identity { uid: actor.uid, key: actor.key.clone(), template: actor.template.clone(), generation: actor.generation }
}

/// What a client hears of a node's refusal.
fn refusal(actor: &Actor, error: &NodeError) -> ControlError {
    match error {
        NodeError::WorkerGone | NodeError::Busy | NodeError::Stale | NodeError::UnknownNode(_) => {
            ControlError::new(Code::Aborted, format!("the worker of actor {} failed: {error}", actor.key.name))
        }
        NodeError::Refused(text) => ControlError::precondition(text.clone()),
        other => {
            ControlError::new(Code::Unavailable, format!("actor {} could not be started: {other}", actor.key.name))
        }
    }
}
