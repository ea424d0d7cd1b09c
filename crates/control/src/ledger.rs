//! One transition, one transaction: the actor, the worker it claims or frees, the operation, the history.

use std::collections::BTreeSet;

use ate_actor::{Actor, Effect, Event};
use std::sync::Arc;

use ate_name::{ActorKey, ObjectKey};
use ate_orders::Phase;
use ate_store::{Change, CommitError, Guard, Record, Write};

use crate::actors::is_golden;
use crate::drive::Patience;
use crate::records::{
    Assignee, Forget, HISTORY_KEPT, HistoryEntry, Job, Read, WorkerRecord, actor_key, encode, history_key,
    operation_key, worker_key,
};
use crate::{Code, Control, ControlError};

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

    pub(crate) async fn actor_if_any(&self, key: &ActorKey) -> Result<Option<Read<Actor>>, ControlError> {
        self.store.get(&actor_key(key)).await?.map(Read::decode).transpose()
    }

    /// Applies an event to an actor as it was read. `Aborted` means that somebody was faster, or that the event belongs to
    /// the past: read again and decide anew.
    pub(crate) async fn transition(
        self: &Arc<Self>,
        read: &Read<Actor>,
        event: Event,
        note: Note,
    ) -> Result<Read<Actor>, ControlError> {
        self.transition_with(Change::new(), read, event, note).await
    }

    /// The same together with another change: both happen, or none.
    pub(crate) async fn transition_with(
        self: &Arc<Self>,
        change: Change,
        read: &Read<Actor>,
        event: Event,
        note: Note,
    ) -> Result<Read<Actor>, ControlError> {
        let applied = read.value.clone().apply(event.clone()).map_err(|_| ControlError::conflict())?;
        self.write(change, read, applied, &event, note).await
    }

    /// What an event has made of an actor, and all that goes with it.
    async fn write(
        self: &Arc<Self>,
        change: Change,
        read: &Read<Actor>,
        (actor, effects): (Actor, Vec<Effect>),
        event: &Event,
        note: Note,
    ) -> Result<Read<Actor>, ControlError> {
        let mut record = read.record.clone();
        record.value = read.rewritten(&actor).into();
        let mut change = change.replace(&read.record, record.value.clone());
        let mut workers = Vec::new();
        for effect in effects {
            let worker;
            (change, worker) = self.with_effect(change, &actor, effect).await?;
            workers.extend(worker);
        }
        let (before, after): (BTreeSet<_>, BTreeSet<_>) = (read.value.pending().collect(), actor.pending().collect());
        for &op in before.difference(&after) {
            change = change.delete(operation_key(op));
        }
        for &op in after.difference(&before) {
            let record = self.operation(op, Job::Actor(actor.key.clone()));
            change = change.put(operation_key(op), encode(&record));
        }
        // Whoever is behind may be wrong about what is its newest: nothing is let go of before that is known.
        let forget = if actor.behind.is_some() { None } else { Forget::between(&read.value, &actor) };
        let forget = forget.map(|forget| (self.new_operation(), forget));
        if let Some((driver, forget)) = &forget {
            change = self.with_forget(change, driver.op, forget.clone());
        }
        change = self.count_between(change, &read.value, &actor)?;
        let worker = actor.lease().or(read.value.lease()).map(|lease| lease.pod.clone());
        change = self.with_history(change, &actor, read.record.version + 1, worker, note);
        let committed = match self.store.commit(change).await {
            Ok(committed) => committed,
            Err(error) => {
                if let CommitError::Conflict { guard } = &error {
                    self.hear_of_limits(guard).await?;
                }
                let error = ControlError::from(error);
                self.note_refusal(&error);
                return Err(error);
            }
        };
        // At once: whoever asks next finds a worker free that was given back for them. Not one that is gone and was forgotten.
        for mut worker in workers {
            worker.record.version += 1;
            worker.record.revision = committed.revision;
            if self.follower.worker(worker.value.lease.worker).is_some() {
                self.note_worker(&worker);
            }
        }
        match event {
            Event::Started { .. } => self.counters.woken.one(),
            Event::Stored { .. } => self.counters.stored.one(),
            // The trial of a golden ends so, and nothing is lost by it.
            Event::Lost if !is_golden(&read.value.key) => self.counters.lost.one(),
            Event::Crashed { .. } | Event::Failed { crashed: Some(_), .. } if !is_golden(&read.value.key) => {
                self.counters.crashed.one();
            }
            Event::LocalLost { .. } => self.counters.fell_back.one(),
            _ => {}
        }
        if let Some((driver, forget)) = forget {
            drop(self.forget_behind(driver, forget));
        }
        record.version += 1;
        record.revision = committed.revision;
        Ok(Read { record, value: actor })
    }

    pub(crate) fn note_refusal(&self, refused: &ControlError) {
        if refused.code == Code::ResourceExhausted {
            self.counters.over_quota.one();
        }
    }

    /// Writes down a step of an operation, however often that takes. A conflict means that the operation is over: somebody
    /// else brought it to its end, or the actor has moved on.
    pub(crate) async fn settle(
        self: &Arc<Self>,
        read: Read<Actor>,
        event: Event,
        note: Note,
    ) -> Result<Read<Actor>, ControlError> {
        self.settle_while(None, read, event, note).await
    }

    /// The same only while something holds; a conflict may also mean that it no longer does.
    pub(crate) async fn settle_while(
        self: &Arc<Self>,
        holds: Option<&Guard>,
        mut read: Read<Actor>,
        event: Event,
        note: Note,
    ) -> Result<Read<Actor>, ControlError> {
        let (uid, generation) = (read.value.uid, read.value.generation);
        let judged = read.value.phase.clone();
        let mut patience = Patience::new();
        loop {
            let applied = read.value.clone().apply(event.clone()).map_err(|_| ControlError::conflict())?;
            let change = holds.into_iter().fold(Change::new(), |change, guard| change.guard(guard.clone()));
            match self.write(change, &read, applied, &event, note.clone()).await {
                Err(error) if error.is_conflict() && holds.is_some() => return Err(error),
                Err(error) if error.is_conflict() => {}
                Err(error) if error.is_store_away() => patience.wait(self).await?,
                other => return other,
            }
            read = loop {
                match self.actor(&read.value.key).await {
                    Err(error) if error.is_store_away() => patience.wait(self).await?,
                    other => break other?,
                }
            };
            if read.value.uid != uid {
                return Err(ControlError::conflict());
            }
            if read.value.shows(&event, generation) {
                return Ok(read);
            }
            // What is lost was judged in one phase, and is not lost if somebody else has brought it to the next.
            let moved_on = event == Event::Lost && read.value.phase != judged;
            if read.value.generation != generation || moved_on {
                if read.value.generation > generation {
                    self.counters.fenced.one();
                }
                return Err(ControlError::conflict());
            }
        }
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

    pub(crate) async fn with_effect(
        &self,
        change: Change,
        actor: &Actor,
        effect: Effect,
    ) -> Result<(Change, Option<Read<WorkerRecord>>), ControlError> {
        let (lease, claim) = match &effect {
            Effect::ClaimWorker(lease) => (lease, true),
            Effect::FreeWorker(lease) => (lease, false),
        };
        let key = worker_key(lease.worker);
        if change.writes.iter().any(|write| matches!(write, Write::Delete(gone) if *gone == key)) {
            return Ok((change, None));
        }
        // Whoever claims one that has changed since is refused by the commit, and looks at it again.
        let free = |read: &Read<WorkerRecord>| claim && read.value.assigned.is_none() && !read.value.draining;
        let read = match self.follower.worker(lease.worker).filter(free) {
            Some(read) => read,
            None => match self.store.get(&key).await? {
                Some(record) => Read::<WorkerRecord>::decode(record)?,
                // Gone with its record; nothing is left to free, and nothing can be claimed.
                None if claim => return Err(ControlError::conflict()),
                None => return Ok((change, None)),
            },
        };
        let mut worker = read.value.clone();
        let assignee = Assignee::of(actor);
        match (&worker.assigned, claim) {
            (None, true) if !worker.draining => worker.assigned = Some(assignee),
            (_, true) => return Err(ControlError::conflict()),
            (Some(holder), false) if holder.uid == actor.uid && holder.generation == actor.generation => {
                worker.assigned = None
            }
            (_, false) => return Ok((change, None)),
        }
        let value = read.rewritten(&worker);
        let change = change.replace(&read.record, value.clone());
        Ok((change, Some(Read { record: Record { value: value.into(), ..read.record }, value: worker })))
    }
}
