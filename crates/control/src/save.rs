//! Putting an actor to rest: say so, have the node take it out of its worker, free the worker, have it stored, settle.

use std::sync::Arc;
use std::time::Duration;

use ate_actor::{Actor, Event, Intent, Phase, Scope, SnapshotRef};
use ate_name::{ActorKey, GOLDEN_ATESPACE, OpId, WorkerUid};
use ate_orders::{Capture, NodeError, SnapshotAt, SnapshotOrder, Stored};
use ate_snapshot::{Location, SnapshotId, SnapshotKey};

use crate::actors::{Versioned, is_golden};
use crate::catalog::Template;
use crate::ledger::Note;
use crate::records::Read;
use crate::resume::identity;
use crate::{Code, Control, ControlError};

/// Between tries to store an image that the node still holds; doubles up to the last.
const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_LAST: Duration = Duration::from_secs(30);

impl Control {
    /// Suspends (durable) or pauses (on the node) an actor and waits until that is so.
    pub async fn save_actor(self: &Arc<Self>, key: &ActorKey, intent: Intent) -> Result<Versioned, ControlError> {
        let mut read = self.actor(key).await?;
        if read.value.phase.operation().is_some_and(|op| self.told.lock().contains(&op)) {
            // Whoever asks may have had an answer from the actor already: to them it runs.
            self.settled(key, tokio::time::Instant::now() + self.settings.park).await?;
            read = self.actor(key).await?;
        }
        let (resting, verb) = match intent {
            Intent::Pause => (Phase::Paused, "PAUSING"),
            Intent::Suspend | Intent::Idle => (Phase::Suspended, "SUSPENDING"),
        };
        match &read.value.phase {
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
        let control = Arc::clone(self);
        let (tell, told) = tokio::sync::oneshot::channel();
        self.tasks.spawn(async move {
            let _ = tell.send(control.save(read, intent, "asked for").await);
        });
        let saved = told.await.map_err(|_| ControlError::new(Code::Unavailable, "the server is stopping"))?;
        match saved {
            Err(error) if error.is_conflict() => Err(ControlError::in_progress()),
            other => Ok(other?.into()),
        }
    }

    /// Suspends every actor that holds a worker, one after the other; those that could not be are named with their worker
    /// and the reason.
    pub async fn suspend_all(self: &Arc<Self>) -> Result<Vec<(ActorKey, WorkerUid, ControlError)>, ControlError> {
        let mut failed = Vec::new();
        for (worker, _) in self.list_workers().await? {
            let Some(assignee) = worker.assigned else { continue };
            let deadline = tokio::time::Instant::now() + self.settings.park;
            // Whatever it is in the middle of comes to its end first.
            let saved = match self.settled(&assignee.key, deadline).await {
                Ok(settled) if matches!(settled.actor.phase, Phase::Running { .. }) => {
                    self.save_actor(&assignee.key, Intent::Suspend).await.map(drop)
                }
                other => other.map(drop),
            };
            if let Err(error) = saved {
                failed.push((assignee.key, worker.lease.worker, error));
            }
        }
        Ok(failed)
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
                Ok(_) => control.unwilling.lock().forget(&key),
                // Called off by a request, or somebody was faster: nothing is wrong with it.
                Err(error) if error.code == Code::Aborted => {}
                Err(error) => {
                    tracing::info!(actor = %key, %error, "an idle actor was not put to rest");
                    control.unwilling.lock().note(&key, tokio::time::Instant::now());
                }
            }
        });
    }

    pub(crate) async fn save(
        self: &Arc<Self>,
        read: Read<Actor>,
        intent: Intent,
        why: &'static str,
    ) -> Result<Read<Actor>, ControlError> {
        let template = self.template_of(&read.value)?;
        let op = OpId::from_random(self.world.random());
        let snapshot = self.snapshot_name(&read.value, &template, intent, op)?;
        let event = Event::Save { op, intent, snapshot };
        let note = Note::because(if intent == Intent::Pause { "Pausing" } else { "Suspending" }, why);
        let read = self.transition(&read, event, note).await?;
        self.finish_save(read).await
    }

    /// From the intention on; also where a crashed save is taken up.
    pub(crate) async fn finish_save(self: &Arc<Self>, mut read: Read<Actor>) -> Result<Read<Actor>, ControlError> {
        if let Phase::Suspending { lease, op, snapshot, intent, .. } = read.value.phase.clone() {
            let order = Capture {
                op,
                worker: lease.worker,
                actor: read.value.uid,
                generation: read.value.generation,
                full: snapshot.scope == Scope::Full,
                if_idle: intent == Intent::Idle,
            };
            match self.nodes.capture(&lease.node, order).await {
                Ok(captured) => {
                    let note = Note::new("Captured").phases(captured.phases);
                    read = self.settle(read, Event::Captured { op }, note).await?;
                    self.free(&lease);
                }
                Err(error @ (NodeError::Aborted | NodeError::NotSaved(_))) => {
                    let code = if error == NodeError::Aborted { Code::Aborted } else { Code::Unavailable };
                    self.settle(read, Event::Kept { op }, Note::because("Kept", error.to_string())).await?;
                    return Err(ControlError::new(code, error.to_string()));
                }
                Err(error) => {
                    // Whatever is left of it must not keep its worker from others.
                    let (uid, generation) = (read.value.uid, read.value.generation);
                    let _ = self.nodes.discard(&lease.node, lease.worker, uid, generation).await;
                    return self.lose(read, &error.to_string()).await;
                }
            }
        }
        let Phase::Saving { node, op, intent, snapshot } = read.value.phase.clone() else {
            return Err(ControlError::conflict());
        };
        let order = self.snapshot_order(&read.value, op, &snapshot)?;
        let mut wait = RETRY_FIRST;
        let stored = loop {
            match self.nodes.store(&node, order.clone()).await {
                Ok(stored) => break stored,
                Err(NodeError::NothingCaptured) => return self.lose(read, "its node no longer has its image").await,
                Err(error) => {
                    tracing::warn!(actor = %read.value.key, %error, "a snapshot is not stored yet");
                    tokio::select! {
                        () = tokio::time::sleep(wait) => wait = (wait * 2).min(RETRY_LAST),
                        () = self.stopping.cancelled() => return Err(ControlError::new(Code::Unavailable, "the server is stopping")),
                    }
                }
            }
        };
        let Stored { manifest, bytes, durable } = stored;
        let settled = SnapshotRef { manifest: Some(manifest), stored_bytes: bytes, ..snapshot.clone() };
        let superseded = read.value.snapshots.clone();
        let mut note = Note::new(if intent == Intent::Pause { "Paused" } else { "Suspended" });
        note.snapshot_bytes = bytes;
        let prefix = settled.prefix.clone();
        let read = self.settle(read, Event::Stored { op, snapshot: settled, durable }, note).await?;
        let upload = self.after_save(&read.value, &superseded);
        if intent != Intent::Suspend || durable {
            return Ok(read);
        }
        // Whoever asked for a suspend was promised a durable one. Meanwhile the actor can be woken from what is here.
        upload.await;
        let read = self.actor(&read.value.key).await?;
        match &read.value.snapshots.durable {
            Some(durable) if durable.prefix == prefix => Ok(read),
            _ => Err(ControlError::new(
                Code::Aborted,
                format!("actor {} was woken before its snapshot was durable: suspend it again", read.value.key.name),
            )),
        }
    }

    /// What follows a save without anyone waiting: bring it to durable storage, then drop what it supersedes.
    pub(crate) fn after_save(
        self: &Arc<Self>,
        actor: &Actor,
        superseded: &ate_actor::Snapshots,
    ) -> impl Future<Output = ()> + use<> {
        let (done, wait) = tokio::sync::oneshot::channel::<()>();
        let wait = async move { drop(wait.await) };
        let Some((newest, node)) = actor.snapshots.local.clone() else { return wait };
        let old: Vec<String> = superseded
            .local
            .iter()
            .map(|(snapshot, _)| snapshot)
            .chain(&superseded.durable)
            .map(|snapshot| snapshot.prefix.clone())
            .filter(|prefix| *prefix != newest.prefix)
            .collect();
        let (control, key, uid, upload) =
            (Arc::clone(self), actor.key.clone(), actor.uid, actor.snapshots.uploading.is_some());
        self.tasks.spawn(async move {
            if upload && !matches!(control.upload(&key, uid, &newest.prefix, &node).await, Ok(true)) {
                return;
            }
            drop(done);
            if let (false, Err(error)) = (old.is_empty(), control.nodes.forget(&node, None, old.clone()).await) {
                tracing::warn!(actor = %key, %error, "an old snapshot was not removed");
            }
        });
        wait
    }

    /// Makes a snapshot durable, however long that takes. `false`: a later one has taken its place meanwhile.
    async fn upload(
        &self,
        key: &ActorKey,
        uid: ate_name::ActorUid,
        prefix: &str,
        node: &ate_name::NodeName,
    ) -> Result<bool, ControlError> {
        let mut wait = RETRY_FIRST;
        loop {
            let uploaded = self.nodes.upload(node, prefix).await;
            let read = self.actor(key).await?;
            let newest = read.value.snapshots.local.as_ref().is_some_and(|(local, _)| local.prefix == prefix);
            if read.value.uid != uid || !newest {
                return Ok(false);
            }
            let Err(error) = uploaded else {
                match self.transition(&read, Event::Uploaded { prefix: prefix.to_owned() }, Note::new("Durable")).await
                {
                    Err(error) if error.is_conflict() => continue,
                    other => return other.map(|_| true),
                }
            };
            tracing::warn!(actor = %key, %error, "a snapshot is not durable yet");
            tokio::select! {
                () = tokio::time::sleep(wait) => wait = (wait * 2).min(RETRY_LAST),
                () = self.stopping.cancelled() => return Err(ControlError::new(Code::Unavailable, "the server is stopping")),
            }
        }
    }

    /// Writes down a step of an operation; tries again when something else about the record changed meanwhile.
    pub(crate) async fn settle(
        &self,
        mut read: Read<Actor>,
        event: Event,
        note: Note,
    ) -> Result<Read<Actor>, ControlError> {
        let op = read.value.phase.operation();
        loop {
            match self.transition(&read, event.clone(), note.clone()).await {
                Err(error) if error.is_conflict() => {
                    let again = self.actor(&read.value.key).await?;
                    if again.value.phase.operation() != op || again.record.revision == read.record.revision {
                        return Err(error);
                    }
                    read = again;
                }
                Err(error) if error.code == Code::Unavailable => {
                    tracing::warn!(actor = %read.value.key, %error, "a step cannot be written down yet");
                    tokio::time::sleep(RETRY_FIRST).await;
                }
                other => return other,
            }
        }
    }

    /// The actor falls back to its last snapshot; the reason stands in its history.
    async fn lose(self: &Arc<Self>, read: Read<Actor>, why: &str) -> Result<Read<Actor>, ControlError> {
        let lease = read.value.lease().cloned();
        let key = read.value.key.clone();
        self.settle(read, Event::Lost, Note::because("Lost", why)).await?;
        if let Some(lease) = lease {
            self.free(&lease);
        }
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
        let location =
            Location::parse(&config.location).map_err(|error| ControlError::precondition(error.to_string()))?;
        let id = SnapshotId { actor: actor.uid, generation: actor.generation, op };
        let scope = match (intent, config.on_pause, config.on_commit) {
            (Intent::Pause, ate_object::Scope::Data, _)
            | (Intent::Suspend | Intent::Idle, _, ate_object::Scope::Data) => Scope::Data,
            _ => Scope::Full,
        };
        let prefix = SnapshotKey { location, actor: actor.key.clone(), id }.to_string();
        Ok(SnapshotRef { prefix, manifest: None, generation: actor.generation, scope, stored_bytes: 0 })
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
            identity: identity(actor),
            workload: template.workload()?,
            prefix: snapshot.prefix.clone(),
            full: snapshot.scope == Scope::Full,
            base,
            golden,
            sealed_key: actor.sealed_key.clone(),
        })
    }
}
