//! Putting an actor to rest: say so, have the node take it out of its worker, free the worker, have it stored, settle.

use std::sync::Arc;
use std::time::Duration;

use ate_actor::{Actor, Event, Intent, Lease, Phase, Scope, SnapshotRef};
use ate_name::{ActorKey, GOLDEN_ATESPACE, NodeName, OpId, WorkerUid};
use ate_object::ActorTemplate;
use ate_orders::{Capture, Captured, ForgetOrder, Identity, NodeError, SnapshotAt, SnapshotOrder, Stored};
use ate_snapshot::{Home, Location, SnapshotId, SnapshotKey};
use ate_store::Guard;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::actors::{Versioned, is_golden};
use crate::catalog::Template;
use crate::drive::{Driver, Patience};
use crate::ledger::Note;
use crate::reach::{GIVEN, Unanswered};
use crate::records::Read;
use crate::resume::identity;
use crate::{Code, Control, ControlError};

/// A sandbox that its node cannot end by then is left to the comparisons.
const DISCARDED_WITHIN: Duration = Duration::from_secs(30);

/// So long a server that stops waits for durable storage; what is not there by then is uploaded by the next start.
const DURABLE_WITHIN: Duration = Duration::from_secs(10);

/// So often a node that is fine is told to store an image, a quarter of an hour each, and does not say that it is done. The
/// largest take hours; a disk that never comes to an end must not keep the actor for ever.
const STORES_GIVEN: u32 = 16;

/// Why an actor that was to be saved is not.
struct Loss {
    why: String,
    /// Only for as long as this holds: its node is gone.
    gone: Option<Guard>,
}

impl From<String> for Loss {
    fn from(why: String) -> Self {
        Self { why, gone: None }
    }
}

/// An actor at rest: its snapshot is on its node's disk, or in durable storage too.
pub(crate) struct Saved {
    read: Read<Actor>,
    /// What brings it to durable storage, whoever waits for that.
    upload: Option<JoinHandle<Result<(), ControlError>>>,
}

impl Saved {
    /// Waits until the snapshot is durable.
    async fn durable(self, control: &Control) -> Result<Read<Actor>, ControlError> {
        let Self { read, upload: Some(upload) } = self else { return Ok(self.read) };
        let wanted = read.value.snapshots.local.as_ref().map(|(snapshot, _)| snapshot.prefix.as_str());
        upload.await.map_err(|_| ControlError::stopping())??;
        let now = control.actor(&read.value.key).await?;
        match &now.value.snapshots.durable {
            Some(durable) if Some(durable.prefix.as_str()) == wanted => Ok(now),
            _ => Err(ControlError::new(
                Code::Aborted,
                format!("actor {} was woken before its snapshot was durable: suspend it again", now.value.key.name),
            )),
        }
    }
}

impl Control {
    /// Suspends (durable) or pauses (on the node) an actor and waits until that is so.
    pub async fn save_actor(self: &Arc<Self>, key: &ActorKey, intent: Intent) -> Result<Versioned, ControlError> {
        self.save_because(key, intent, "asked for").await
    }

    /// The same for a reason of the control plane's own, which its history tells.
    pub(crate) async fn save_because(
        self: &Arc<Self>,
        key: &ActorKey,
        intent: Intent,
        why: &'static str,
    ) -> Result<Versioned, ControlError> {
        let mut read = self.actor(key).await?;
        if matches!(read.value.phase, Phase::Resuming { lease: Some(_), .. }) {
            // Whoever asks may have had an answer from the actor already: to them it runs.
            self.settled(key, Instant::now() + self.settings.park).await?;
            read = self.actor(key).await?;
        }
        let (resting, verb) = match intent {
            Intent::Pause => (Phase::Paused, "PAUSING"),
            Intent::Suspend | Intent::Idle => (Phase::Suspended, "SUSPENDING"),
        };
        loop {
            match &read.value.phase {
                phase if *phase == resting && intent == Intent::Suspend => return self.made_durable(key).await,
                phase if *phase == resting => return Ok(read.into()),
                Phase::Suspended | Phase::Paused => {
                    let text = format!("internal server error: actor is in {verb} state but has no active worker");
                    return Err(ControlError::new(Code::Internal, text));
                }
                Phase::Running { .. } => {}
                Phase::Resuming { .. } | Phase::Suspending { .. } | Phase::Saving { .. } => {
                    return Err(ControlError::in_progress());
                }
            }
            let (control, generation) = (Arc::clone(self), read.value.generation);
            let (tell, told) = tokio::sync::oneshot::channel();
            self.tasks.spawn(async move {
                let saved = match control.save(read, intent, why).await {
                    // Whoever asks for a suspend is promised a durable one. Meanwhile the actor can be woken from what is there.
                    Ok(saved) if intent == Intent::Suspend => saved.durable(&control).await,
                    saved => saved.map(|saved| saved.read),
                };
                let _ = tell.send(saved);
            });
            match told.await.map_err(|_| ControlError::stopping())? {
                Err(error) if error.is_conflict() => read = self.actor(key).await?,
                saved => return Ok(saved?.into()),
            }
            // It may only be known by now that an earlier snapshot is durable. If it is not as it was asked for, whoever asked must
            // know: what they saw of it may be lost.
            if read.value.generation != generation || !matches!(read.value.phase, Phase::Running { .. }) {
                return Err(ControlError::in_progress());
            }
        }
    }

    /// A suspended actor once its snapshot is durable: whoever asks for a suspend is promised that.
    async fn made_durable(&self, key: &ActorKey) -> Result<Versioned, ControlError> {
        let deadline = Instant::now() + self.settings.park;
        loop {
            let notify = self.follower.of(key);
            let changed = notify.notified();
            let read = self.actor(key).await?;
            match (&read.value.phase, read.value.snapshots.base()) {
                (Phase::Suspended, Some((_, Some(_)))) => {}
                (Phase::Suspended, _) => return Ok(read.into()),
                _ => return Err(ControlError::in_progress()),
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Err(ControlError::new(
                    Code::Unavailable,
                    format!("actor {} is suspended, but its snapshot is not durable yet: ask again", key.name),
                ));
            }
        }
    }

    /// Suspends every actor that holds a worker, one after the other, and waits a while until that is durable; those that could
    /// not be are named with their worker and the reason. From here on nobody is woken: who waits for a worker that is freed here
    /// would be in it when it ends.
    pub async fn suspend_all(self: &Arc<Self>) -> Result<Vec<(ActorKey, WorkerUid, ControlError)>, ControlError> {
        *self.binds.write().await = false;
        let (mut failed, mut uploading) = (Vec::new(), Vec::new());
        for (worker, _) in self.list_workers().await? {
            let Some(assignee) = worker.assigned else { continue };
            match self.put_to_rest(&assignee.key).await {
                Ok(saved) => uploading.extend(saved),
                Err(error) => failed.push((assignee.key, worker.lease.worker, error)),
            }
        }
        // What is on the disk is safe here.
        let deadline = Instant::now() + DURABLE_WITHIN;
        for saved in uploading {
            let _ = tokio::time::timeout_at(deadline, saved.durable(self)).await;
        }
        Ok(failed)
    }

    /// `None`: it is at rest already.
    async fn put_to_rest(self: &Arc<Self>, key: &ActorKey) -> Result<Option<Saved>, ControlError> {
        let deadline = Instant::now() + self.settings.park;
        loop {
            // Whatever it is in the middle of comes to its end first.
            self.settled(key, deadline).await?;
            let read = self.actor(key).await?;
            match &read.value.phase {
                Phase::Running { .. } => match self.save(read, Intent::Suspend, "the server stops").await {
                    // Say, an earlier snapshot has become durable just now.
                    Err(error) if error.is_conflict() && Instant::now() < deadline => {}
                    saved => return saved.map(Some),
                },
                phase if phase.operation().is_some() => return Err(ControlError::in_progress()),
                _ => return Ok(None),
            }
        }
    }

    /// Begins to put an actor to rest without waiting for it.
    pub(crate) fn begin_save(self: &Arc<Self>, key: &ActorKey, intent: Intent, why: &'static str) {
        // A golden actor is saved by whoever makes the golden, and by nobody else.
        if is_golden(key) {
            return;
        }
        let (control, key) = (Arc::clone(self), key.clone());
        self.tasks.spawn(async move {
            let saved = match control.actor(&key).await {
                Ok(read) if matches!(read.value.phase, Phase::Running { .. }) => control.save(read, intent, why).await,
                _ => return,
            };
            match saved {
                Ok(_) => return control.unwilling.lock().forget(&key),
                // Called off by a request, or somebody was faster: nothing is wrong with it.
                Err(error) if error.code == Code::Aborted => {}
                Err(error) => {
                    tracing::info!(actor = %key, %error, "an idle actor was not put to rest");
                    control.unwilling.lock().note(&key, Instant::now());
                }
            }
            // Whoever waits for its worker must look for another.
            control.freed.notify_waiters();
        });
    }

    pub(crate) async fn save(
        self: &Arc<Self>,
        read: Read<Actor>,
        intent: Intent,
        why: &'static str,
    ) -> Result<Saved, ControlError> {
        let template = self.template_of(&read.value)?;
        let driver = self.new_operation();
        let snapshot = self.snapshot_name(&read.value, &template, intent, driver.op)?;
        let event = Event::Save { op: driver.op, intent, snapshot };
        let note = Note::because(if intent == Intent::Pause { "Pausing" } else { "Suspending" }, why);
        let read = self.transition(&read, event, note).await?;
        ate_failpoint::reached("save.begun");
        self.finish_save(driver, read).await
    }

    /// From the intention on; also where a save that was cut off is taken up.
    pub(crate) async fn finish_save(
        self: &Arc<Self>,
        driver: Driver,
        mut read: Read<Actor>,
    ) -> Result<Saved, ControlError> {
        if let Phase::Suspending { lease, op, snapshot, intent, .. } = read.value.phase.clone() {
            let order = Capture {
                op,
                worker: lease.worker,
                actor: read.value.uid,
                generation: read.value.generation,
                full: snapshot.scope == Scope::Full,
                if_idle: intent == Intent::Idle,
            };
            match self.capture(&read, &lease, order).await? {
                Ok(captured) => {
                    let note = Note::new("Captured").phases(captured.phases);
                    read = self.settle(read, Event::Captured { op }, note).await?;
                    ate_failpoint::reached("save.captured");
                }
                Err(error @ (NodeError::Aborted | NodeError::NotSaved(_))) => {
                    let code = if error == NodeError::Aborted { Code::Aborted } else { Code::Unavailable };
                    self.settle(read, Event::Kept { op }, Note::because("Kept", error.to_string())).await?;
                    return Err(ControlError::new(code, error.to_string()));
                }
                Err(error) => {
                    self.discard(&read, &lease).await?;
                    return self.lose(read, error.to_string().into()).await;
                }
            }
        }
        let Phase::Saving { node, op, intent, snapshot } = read.value.phase.clone() else {
            return Err(ControlError::conflict());
        };
        let order = self.snapshot_order(&read.value, op, &snapshot)?;
        let stored = match self.store_image(&read, &node, order).await? {
            Ok(stored) => stored,
            Err(loss) => return self.lose(read, loss).await,
        };
        ate_failpoint::reached("save.stored");
        let Stored { manifest, bytes, durable } = stored;
        let settled = SnapshotRef { manifest: Some(manifest), stored_bytes: bytes, ..snapshot.clone() };
        let mut note = Note::new(if intent == Intent::Pause { "Paused" } else { "Suspended" });
        note.snapshot_bytes = bytes;
        let read = self.settle(read, Event::Stored { op, snapshot: settled, durable }, note).await?;
        if read.value.snapshots.uploading != Some(op) {
            return Ok(Saved { read, upload: None });
        }
        let (control, actor) = (Arc::clone(self), read.value.clone());
        let upload = self.tasks.spawn(async move { control.finish_upload(driver, &actor).await });
        Ok(Saved { read, upload: Some(upload) })
    }

    /// Has the node store what it took out of a worker. `Ok(Err)`: it never will, and why.
    async fn store_image(
        &self,
        read: &Read<Actor>,
        node: &NodeName,
        order: SnapshotOrder,
    ) -> Result<Result<Stored, Loss>, ControlError> {
        let (mut patience, mut unanswered, mut failing) = (Patience::new(), Unanswered::times(STORES_GIVEN), None);
        loop {
            let begun = Instant::now();
            let error = match self.nodes.store(node, order.clone()).await {
                Ok(stored) => return Ok(Ok(stored)),
                Err(error) => error,
            };
            let gone = match &error {
                NodeError::Unreachable(_) => self.gone_for_good(node).await,
                _ => None,
            };
            let never = match &error {
                // Stale: the store is of an earlier time, and knows nothing of its removal.
                NodeError::NothingCaptured | NodeError::Stale | NodeError::UnknownNode(_) => {
                    Some("its node no longer has its image".to_owned())
                }
                NodeError::Unreachable(_) if gone.is_some() => {
                    Some("its node is gone, and its image with it".to_owned())
                }
                // A way that is cut is no failure of the disk: the image is there when it is mended.
                NodeError::Unreachable(_) => {
                    let hopeless = unanswered.is_hopeless(begun, &self.settings);
                    hopeless.then(|| "its node has it, and never said that it is stored".to_owned())
                }
                // Its image is let go of by the next comparison: nobody will store it.
                error => {
                    let since = *failing.get_or_insert_with(Instant::now);
                    let minutes = self.settings.store_within.as_secs().div_ceil(60);
                    (since.elapsed() > self.settings.store_within)
                        .then(|| format!("its image could not be stored for {minutes} min: {error}"))
                }
            };
            if let Some(why) = never {
                return Ok(Err(Loss { why, gone }));
            }
            tracing::warn!(actor = %read.value.key, %error, "a snapshot is not stored yet");
            patience.wait(self).await?;
            self.still(read).await?;
        }
    }

    /// Has the node take the actor out of its worker. The outer error means that there is nothing more to do.
    async fn capture(
        &self,
        read: &Read<Actor>,
        lease: &Lease,
        order: Capture,
    ) -> Result<Result<Captured, NodeError>, ControlError> {
        let (mut patience, mut unanswered) = (Patience::new(), Unanswered::times(GIVEN));
        loop {
            let begun = Instant::now();
            match self.nodes.capture(&lease.node, order.clone()).await {
                Err(error @ NodeError::Unreachable(_)) => {
                    tracing::warn!(actor = %read.value.key, node = %lease.node, %error, "a save waits for its node");
                    let is_hopeless = unanswered.is_hopeless(begun, &self.settings);
                    if !is_hopeless {
                        patience.wait(self).await?;
                    }
                    self.still(read).await?;
                    // What is left of it is ended next, if the node does so much as that.
                    if is_hopeless {
                        return Ok(Err(error));
                    }
                }
                other => return Ok(other),
            }
        }
    }

    /// Ends what is left of an actor in its worker. Until the node has said so the actor is not lost: it may still run.
    async fn discard(&self, read: &Read<Actor>, lease: &Lease) -> Result<(), ControlError> {
        let (uid, generation) = (read.value.uid, read.value.generation);
        let (mut patience, begun) = (Patience::new(), Instant::now());
        loop {
            match self.nodes.discard(&lease.node, lease.worker, uid, generation).await {
                Ok(()) | Err(NodeError::Stale | NodeError::WorkerGone | NodeError::UnknownNode(_)) => return Ok(()),
                // A node that answers is asked again by every comparison.
                Err(error) if !matches!(error, NodeError::Unreachable(_)) && begun.elapsed() > DISCARDED_WITHIN => {
                    tracing::error!(actor = %read.value.key, node = %lease.node, %error, "a sandbox could not be ended");
                    return Ok(());
                }
                Err(error) => {
                    tracing::warn!(actor = %read.value.key, node = %lease.node, %error, "a sandbox is not ended yet");
                    patience.wait(self).await?;
                    self.still(read).await?;
                }
            }
        }
    }

    /// Makes the newest snapshot durable, however long that takes, unless a later one takes its place meanwhile.
    pub(crate) async fn finish_upload(self: &Arc<Self>, driver: Driver, actor: &Actor) -> Result<(), ControlError> {
        let Some((newest, node)) = actor.snapshots.local.clone() else { return Ok(()) };
        let mut patience = Patience::new();
        loop {
            let uploaded = self.nodes.upload(&node, &newest.prefix).await;
            let read = match self.actor(&actor.key).await {
                Ok(read) if read.value.uid == actor.uid => Some(read),
                Ok(_) => None,
                Err(error) if error.code == Code::NotFound => None,
                Err(error) if error.is_store_away() => {
                    patience.wait(self).await?;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let refers = |read: &Read<Actor>| read.value.references().any(|other| other.prefix == newest.prefix);
            let Some(read) = read.filter(refers) else {
                // Let go of while it was on its way: what removed it may have come too early.
                if uploaded.is_ok() {
                    let _ = self.nodes.forget_snapshots(&node, ForgetOrder::snapshots([newest.prefix])).await;
                }
                return Ok(());
            };
            if read.value.snapshots.uploading != Some(driver.op) {
                return Ok(());
            }
            match uploaded {
                Ok(()) => {
                    ate_failpoint::reached("upload.done");
                    let event = Event::Uploaded { prefix: newest.prefix.clone() };
                    match self.transition(&read, event, Note::new("Durable")).await {
                        Err(error) if error.is_conflict() => {}
                        Err(error) if error.is_store_away() => patience.wait(self).await?,
                        other => return other.map(drop),
                    }
                }
                Err(error) => match self.without(read, &node, &error).await {
                    // It came back in between, or somebody else has gone on with the actor.
                    Err(error) if error.code == Code::Aborted => patience.wait(self).await?,
                    Ok(false) => {
                        tracing::warn!(actor = %actor.key, %error, "a snapshot is not durable yet");
                        patience.wait(self).await?;
                    }
                    gone => return gone.map(drop),
                },
            }
        }
    }

    /// Goes on without a newest snapshot that was on one node only, if that node says, or its end, that it is gone. `false`: not so.
    async fn without(
        self: &Arc<Self>,
        read: Read<Actor>,
        node: &NodeName,
        error: &NodeError,
    ) -> Result<bool, ControlError> {
        let gone = match error {
            NodeError::NoSnapshot(_) => None,
            NodeError::Unreachable(_) => match self.gone_for_good(node).await {
                None => return Ok(false),
                gone => gone,
            },
            _ => return Ok(false),
        };
        match &read.value.phase {
            Phase::Suspended | Phase::Paused if read.value.behind.is_some() => drop(self.caught_up(read).await?),
            Phase::Suspended | Phase::Paused | Phase::Resuming { lease: None, .. } => {
                self.fall_back(read, node.clone(), gone.as_ref()).await?;
            }
            // What it does now decides.
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The actor falls back to its last snapshot; the reason stands in its history. `gone`: for as long as its node is.
    async fn lose(self: &Arc<Self>, read: Read<Actor>, Loss { why, gone }: Loss) -> Result<Saved, ControlError> {
        let key = read.value.key.clone();
        self.settle_while(gone.as_ref(), read, Event::Lost, Note::because("Lost", why.clone())).await?;
        Err(ControlError::new(
            Code::Unavailable,
            format!("actor {} was lost while it was saved ({why}): it continues from its last snapshot", key.name),
        ))
    }

    fn snapshot_name(
        &self,
        actor: &Actor,
        template: &Template,
        intent: Intent,
        op: OpId,
    ) -> Result<SnapshotRef, ControlError> {
        let config = &template.object.spec.snapshots_config;
        let Home { location, .. } = home(actor, template)?;
        let id = SnapshotId { actor: actor.uid, generation: actor.generation, op };
        let scope = match (intent, config.on_pause, config.on_commit) {
            (Intent::Pause, ate_object::Scope::Data, _)
            | (Intent::Suspend | Intent::Idle, _, ate_object::Scope::Data) => Scope::Data,
            // Nobody will want its memory.
            _ if actor.fresh && template.object.spec.durable_dir().is_some() => Scope::Data,
            _ => Scope::Full,
        };
        let prefix = SnapshotKey { location, actor: actor.key.clone(), id }.to_string();
        Ok(SnapshotRef { prefix, manifest: None, generation: actor.generation, scope, stored_bytes: 0 })
    }

    /// What an actor's snapshots lie under.
    pub(crate) fn home(&self, actor: &Actor) -> Result<Home, ControlError> {
        home(actor, &*self.template_of(actor)?)
    }

    fn snapshot_order(&self, actor: &Actor, op: OpId, snapshot: &SnapshotRef) -> Result<SnapshotOrder, ControlError> {
        let template = self.template_of(actor)?;
        let golden = actor.key.atespace.as_str() == GOLDEN_ATESPACE;
        let base = template
            .status
            .golden
            .as_ref()
            .filter(|_| !golden)
            .and_then(|golden| Some(SnapshotAt { prefix: golden.prefix.clone(), manifest: golden.manifest? }));
        Ok(SnapshotOrder {
            op,
            // Whose state it is; the actor itself may be past that, if its record was restored from a backup.
            identity: Identity { generation: snapshot.generation, ..identity(actor) },
            workload: template.workload()?,
            prefix: snapshot.prefix.clone(),
            full: snapshot.scope == Scope::Full,
            base,
            golden,
            sealed_key: actor.sealed_key.clone(),
        })
    }
}

fn home(actor: &Actor, template: &Template) -> Result<Home, ControlError> {
    Ok(Home { location: location(&template.object)?, actor: actor.key.clone(), uid: actor.uid })
}

/// Where a template's snapshots go.
pub(crate) fn location(template: &ActorTemplate) -> Result<Location, ControlError> {
    Location::parse(&template.spec.snapshots_config.location)
        .map_err(|error| ControlError::invalid(format!("ActorTemplate {}: {error}", template.metadata.key())))
}
