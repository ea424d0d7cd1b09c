//! One transition, one transaction: the actor, the worker it claims or frees, the operation, the history.

use std::collections::BTreeSet;

use ate_actor::{Actor, Effect, Event};
use ate_name::{ActorKey, ObjectKey};
use ate_orders::Phase;
use ate_store::Change;

use crate::records::{
    Assignee, HISTORY_KEPT, HistoryEntry, OperationRecord, Read, WorkerRecord, actor_key, encode, history_key,
    operation_key, worker_key,
};
use crate::{Control, ControlError};

/// What the history says about a transition.
#[derive(Clone, Debug, Default)]
pub(crate) struct Note {
    pub(crate) event: &'static str,
    pub(crate) detail: String,
    pub(crate) phases: Vec<Phase>,
    pub(crate) snapshot_bytes: u64,
}

impl Note {
    pub(crate) fn new(event: &'static str) -> Self {
        Self { event, ..Self::default() }
    }

    pub(crate) fn because(event: &'static str, detail: impl Into<String>) -> Self {
        Self { event, detail: detail.into(), ..Self::default() }
    }

    pub(crate) fn phases(mut self, phases: Vec<Phase>) -> Self {
        self.phases = phases;
        self
    }
}

impl Control {
    pub(crate) async fn actor(&self, key: &ActorKey) -> Result<Read<Actor>, ControlError> {
        match self.store.get(&actor_key(key)).await? {
            Some(record) => Read::decode(record),
            None => Err(ControlError::actor_not_found(key.name.as_str())),
        }
    }

    /// Applies an event to an actor as it was read. `Aborted` means that somebody was faster, or that the event belongs to
    /// the past: read again and decide anew.
    pub(crate) async fn transition(
        &self,
        read: &Read<Actor>,
        event: Event,
        note: Note,
    ) -> Result<Read<Actor>, ControlError> {
        let (actor, effects) = read.value.clone().apply(event).map_err(|_| ControlError::conflict())?;
        let mut change = Change::new().replace(&read.record, encode(&actor));
        for effect in effects {
            change = self.with_effect(change, &actor, effect).await?;
        }
        let (before, after): (BTreeSet<_>, BTreeSet<_>) = (read.value.pending().collect(), actor.pending().collect());
        for &op in before.difference(&after) {
            change = change.delete(operation_key(op));
        }
        for &op in after.difference(&before) {
            let record = OperationRecord {
                op,
                actor: actor.key.clone(),
                started: self.world.now(),
                unknown: Default::default(),
            };
            change = change.put(operation_key(op), encode(&record));
        }
        let worker = actor.lease().or(read.value.lease()).map(|lease| lease.pod.clone());
        change = self.with_history(change, &actor, read.record.version + 1, worker, note);
        let committed = self.store.commit(change).await?;
        let mut record = read.record.clone();
        record.version += 1;
        record.revision = committed.revision;
        record.value = encode(&actor).into();
        Ok(Read { record, value: actor })
    }

    pub(crate) fn with_history(
        &self,
        change: Change,
        actor: &Actor,
        version: u64,
        worker: Option<ObjectKey>,
        note: Note,
    ) -> Change {
        let entry = HistoryEntry {
            time: self.world.now(),
            event: note.event.to_owned(),
            generation: actor.generation,
            detail: note.detail,
            worker,
            phases: note.phases,
            snapshot_bytes: note.snapshot_bytes,
        };
        let change = change.put(history_key(actor.uid, version), encode(&entry));
        match version.checked_sub(HISTORY_KEPT) {
            Some(old) if old > 0 => change.delete(history_key(actor.uid, old)),
            _ => change,
        }
    }

    async fn with_effect(&self, change: Change, actor: &Actor, effect: Effect) -> Result<Change, ControlError> {
        let (lease, claim) = match &effect {
            Effect::ClaimWorker(lease) => (lease, true),
            Effect::FreeWorker(lease) => (lease, false),
        };
        let read = match self.store.get(&worker_key(lease.worker)).await? {
            Some(record) => Read::<WorkerRecord>::decode(record)?,
            // Gone with its record; nothing is left to free, and nothing can be claimed.
            None if claim => return Err(ControlError::conflict()),
            None => return Ok(change),
        };
        let mut worker = read.value;
        let assignee = Assignee::of(actor);
        match (&worker.assigned, claim) {
            (None, true) => worker.assigned = Some(assignee),
            (Some(_), true) => return Err(ControlError::conflict()),
            (Some(holder), false) if holder.uid == actor.uid && holder.generation == actor.generation => {
                worker.assigned = None
            }
            (_, false) => return Ok(change),
        }
        Ok(change.replace(&read.record, encode(&worker)))
    }
}
