//! The fleet as the control plane knows it, and what becomes of actors whose worker is gone.

use std::collections::BTreeSet;
use std::sync::Arc;

use ate_actor::{Actor, Event, Lease};
use ate_name::{ActorKey, Generation, NodeName, ObjectKey, WorkerUid};
use ate_orders::{Exit, Identity, NodeEvent, WorkerReport};
use ate_placement::{Resident, State, Worker};
use ate_store::{Change, CommitError, Guard, Kind};
use futures::StreamExt;

use crate::ledger::Note;
use crate::records::{Assignee, Read, WorkerRecord, encode, worker_key};
use crate::watch::several_at_once;
use crate::{Control, ControlError};

impl Control {
    /// A worker has come up, or is still there after we were away.
    pub(crate) async fn worker_up(
        self: &Arc<Self>,
        node: &NodeName,
        report: &WorkerReport,
    ) -> Result<(), ControlError> {
        let lease = Lease {
            worker: report.worker,
            pod: ObjectKey::new(report.pool.namespace.clone(), report.pod.clone()),
            pool: report.pool.clone(),
            node: node.clone(),
        };
        let key = worker_key(report.worker);
        let ingress = report.ingress.clone();
        let change = match self.store.get(&key).await? {
            None => {
                let record = WorkerRecord { lease, ingress, assigned: None, draining: false };
                Some(Change::new().create(key, encode(&record)))
            }
            Some(record) => {
                let read = Read::<WorkerRecord>::decode(record)?;
                let moved = WorkerRecord { ingress, ..read.value.clone() };
                (moved != read.value).then(|| Change::new().replace(&read.record, read.rewritten(&moved)))
            }
        };
        if let Some(change) = change {
            match self.store.commit(change).await {
                // Another replica was told as well, or somebody has just taken or left it: the next look decides.
                Ok(_) | Err(CommitError::Conflict { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.look_at_worker(report.worker).await?;
        self.fleet.lock().set_warm(report.worker, report.warm.iter().copied().collect());
        Ok(())
    }

    /// Takes over what the store says of a worker.
    pub(crate) fn note_worker(&self, read: &Read<WorkerRecord>) {
        if !self.follower.know_worker(read) {
            return;
        }
        let record = &read.value;
        let worker = record.lease.worker;
        if let Some(assignee) = &record.assigned {
            self.assignments.moved(assignee, &record.ingress);
        }
        let reserved = self.reserved.lock().contains(&worker);
        let mut fleet = self.fleet.lock();
        let known = fleet.get(worker).cloned();
        let state = match (known.as_ref().map(|known| &known.state), &record.assigned) {
            _ if record.draining => State::Draining,
            (Some(frozen @ State::Frozen { resident, .. }), Some(assignee))
                if resident.uid == assignee.uid && resident.generation == assignee.generation =>
            {
                frozen.clone()
            }
            (_, Some(_)) => State::Taken,
            (_, None) if reserved => State::Taken,
            (_, None) => State::Free,
        };
        if known.as_ref().is_none_or(|known| known.state != state) {
            let warm = known.map(|known| known.warm).unwrap_or_default();
            fleet.insert(Worker { lease: record.lease.clone(), warm, state });
            drop(fleet);
            self.freed.notify_waiters();
        }
    }

    pub(crate) fn forget_worker(&self, worker: WorkerUid) {
        self.fleet.lock().remove(worker);
        self.follower.forget_worker(worker);
    }

    /// Looks at a worker's record again, after a guess about it was wrong.
    pub(crate) async fn look_at_worker(&self, worker: WorkerUid) -> Result<(), ControlError> {
        match self.store.get(&worker_key(worker)).await? {
            Some(record) => self.note_worker(&Read::decode(record)?),
            None => self.forget_worker(worker),
        }
        Ok(())
    }

    /// Every worker and who is in it, anew.
    pub(crate) async fn load_workers(&self) -> Result<(), ControlError> {
        let records = self.all(Kind::Worker).await?;
        let there: BTreeSet<_> = records.iter().filter_map(|record| WorkerUid::parse(record.key.path()).ok()).collect();
        let mut assigned = Vec::new();
        for record in records {
            let Ok(read) = Read::<WorkerRecord>::decode(record) else { continue };
            self.note_worker(&read);
            assigned.extend(read.value.assigned.map(|assignee| assignee.key));
        }
        let mut running = BTreeSet::new();
        let mut actors = std::pin::pin!(several_at_once(assigned, async |key| (self.actor(&key).await, key)));
        while let Some((read, key)) = actors.next().await {
            match read {
                Ok(read) => {
                    self.note_actor(&key, Some(&read.value));
                    running.insert(key);
                }
                Err(error) if error.is_store_away() => return Err(error),
                Err(_) => {}
            }
        }
        self.assignments.keep_only(&running);
        let known: Vec<_> = self.fleet.lock().iter().map(|worker| worker.lease.worker).collect();
        known.into_iter().filter(|known| !there.contains(known)).for_each(|worker| self.forget_worker(worker));
        Ok(())
    }

    /// A worker is gone, and with it what it ran.
    pub(crate) async fn worker_gone(self: &Arc<Self>, worker: WorkerUid, why: &str) -> Result<(), ControlError> {
        self.worker_gone_while(None, worker, why).await
    }

    /// The same, if what the verdict rests on is still so when it is written down. If not, whoever judged judges again.
    pub(crate) async fn worker_gone_while(
        self: &Arc<Self>,
        still: Option<&Guard>,
        worker: WorkerUid,
        why: &str,
    ) -> Result<(), ControlError> {
        // Nobody new comes. It is forgotten when the store says so too: until then whoever looks for it sees that it is missing.
        self.fleet.lock().set_state(worker, State::Draining);
        loop {
            let Some(record) = self.store.get(&worker_key(worker)).await? else {
                self.forget_worker(worker);
                return Ok(());
            };
            let read = Read::<WorkerRecord>::decode(record)?;
            let held = match &read.value.assigned {
                Some(by) => self.actor_if_any(&by.key).await?.filter(|actor| is_held(worker, by, &actor.value)),
                None => None,
            };
            // In one step: if its worker were free for a moment, somebody would take it.
            let guards = still.into_iter().cloned();
            let gone =
                guards.fold(Change::new(), Change::guard).guard(read.record.unchanged()).delete(worker_key(worker));
            let committed = match held {
                Some(actor) => {
                    self.transition_with(gone, &actor, Event::Lost, Note::because("Lost", why)).await.map(drop)
                }
                None => self.store.commit(gone).await.map(drop).map_err(ControlError::from),
            };
            match committed {
                Err(error) if error.is_conflict() && still.is_some() => return self.look_at_worker(worker).await,
                // Somebody has just taken or left it: they lose it the same way.
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(error),
                Ok(()) => {
                    self.forget_worker(worker);
                    return Ok(());
                }
            }
        }
    }

    /// The sandbox of this generation is gone: the actor falls back to its last snapshot and can be woken at once.
    pub(crate) async fn lost(
        self: &Arc<Self>,
        key: &ActorKey,
        generation: Generation,
        why: &str,
    ) -> Result<(), ControlError> {
        self.without_sandbox(key, generation, Event::Lost, Note::because("Lost", why)).await
    }

    /// The sandbox of this generation has ended without being told to. What ended it from outside is not its own fault.
    async fn ended(self: &Arc<Self>, key: &ActorKey, generation: Generation, exit: &Exit) -> Result<(), ControlError> {
        let reason = exit.to_string();
        match exit {
            Exit::Killed => self.lost(key, generation, &reason).await,
            Exit::Code(_) | Exit::Signal(_) | Exit::OutOfMemory => {
                let note = Note::because("Crashed", reason.clone());
                let event = Event::Crashed { at: self.world.now(), reason };
                self.without_sandbox(key, generation, event, note).await
            }
        }
    }

    async fn without_sandbox(
        self: &Arc<Self>,
        key: &ActorKey,
        generation: Generation,
        event: Event,
        note: Note,
    ) -> Result<(), ControlError> {
        loop {
            let Some(read) = self.actor_if_any(key).await? else { return Ok(()) };
            if read.value.lease().is_none() || read.value.generation != generation {
                if read.value.generation > generation {
                    self.counters.fenced.one();
                }
                return Ok(());
            }
            match self.transition(&read, event.clone(), note.clone()).await {
                Err(error) if error.is_conflict() => {}
                other => return other.map(drop),
            }
        }
    }

    /// Some node, for what any of them can do; one that answers, if there is one.
    pub fn any_node(&self) -> Option<NodeName> {
        let fleet = self.fleet.lock();
        let nodes = || fleet.iter().map(|worker| &worker.lease.node);
        nodes().find(|node| self.nodes.answers(node)).or_else(|| nodes().next()).cloned()
    }

    /// Every worker there is, for lists.
    pub async fn list_workers(&self) -> Result<Vec<(WorkerRecord, u64)>, ControlError> {
        Ok(self.workers().await?.into_iter().map(|read| (read.value, read.record.version)).collect())
    }

    /// Those that can be read.
    async fn workers(&self) -> Result<Vec<Read<WorkerRecord>>, ControlError> {
        Ok(self.all(Kind::Worker).await?.into_iter().filter_map(|record| Read::decode(record).ok()).collect())
    }

    /// Whether an actor is stopped in memory, and for how long it has had no request.
    pub fn residence(&self, actor: &Actor) -> Option<(bool, i64)> {
        let worker = actor.lease()?.worker;
        match &self.fleet.lock().get(worker)?.state {
            State::Frozen { since, .. } => Some((true, self.world.now().as_millisecond() - since)),
            _ => Some((false, 0)),
        }
    }

    /// Takes in what a node tells.
    pub async fn node_event(self: &Arc<Self>, node: &NodeName, event: NodeEvent) -> Result<(), ControlError> {
        match event {
            NodeEvent::WorkerUp(report) => self.worker_up(node, &report).await,
            NodeEvent::WorkerGone { worker } => self.worker_gone(worker, "its worker is gone").await,
            NodeEvent::Ended { worker, actor, generation, exit } => {
                let record =
                    self.store.get(&worker_key(worker)).await?.map(Read::<WorkerRecord>::decode).transpose()?;
                match record.and_then(|read| read.value.assigned) {
                    Some(assignee) if assignee.uid == actor => self.ended(&assignee.key, generation, &exit).await,
                    Some(_) => {
                        self.counters.fenced.one();
                        Ok(())
                    }
                    None => Ok(()),
                }
            }
            NodeEvent::Frozen { worker, identity } => {
                self.note_frozen(worker, &identity, true);
                Ok(())
            }
            NodeEvent::Thawed { worker, identity } => {
                self.note_frozen(worker, &identity, false);
                Ok(())
            }
            NodeEvent::Report(reports) => {
                self.take_reports(&reports);
                Ok(())
            }
        }
    }

    fn note_frozen(&self, worker: WorkerUid, identity: &Identity, frozen: bool) {
        {
            let mut fleet = self.fleet.lock();
            let state = fleet.get(worker).map(|worker| worker.state.clone());
            match (state, frozen) {
                (Some(State::Taken), true) => {
                    let Identity { uid, key, generation, .. } = identity.clone();
                    let since = self.world.now().as_millisecond();
                    fleet.set_state(worker, State::Frozen { resident: Resident { key, uid, generation }, since });
                }
                (Some(State::Frozen { .. }), false) => fleet.set_state(worker, State::Taken),
                _ => {}
            }
        }
        let _ = self.stirred.send(identity.key.clone());
        self.freed.notify_waiters();
    }

    /// Soft state: which boxes are warm, who is frozen since when.
    pub(crate) fn take_reports(&self, reports: &[WorkerReport]) {
        let now = self.world.now().as_millisecond();
        let mut stirred = Vec::new();
        let mut fleet = self.fleet.lock();
        for report in reports {
            fleet.set_warm(report.worker, report.warm.iter().copied().collect());
            let Some(known) = fleet.get(report.worker).map(|worker| worker.state.clone()) else { continue };
            let frozen = report.hosted.as_ref().filter(|hosted| hosted.frozen).map(|hosted| {
                let idle = i64::try_from(hosted.idle.as_millis()).unwrap_or(i64::MAX);
                let resident = Resident {
                    key: hosted.identity.key.clone(),
                    uid: hosted.identity.uid,
                    generation: hosted.identity.generation,
                };
                (resident, now.saturating_sub(idle))
            });
            match (known, frozen) {
                (State::Taken, Some((resident, since))) => {
                    stirred.push(resident.key.clone());
                    fleet.set_state(report.worker, State::Frozen { resident, since });
                }
                (State::Frozen { resident, .. }, None) => {
                    stirred.push(resident.key);
                    fleet.set_state(report.worker, State::Taken);
                }
                _ => {}
            }
        }
        drop(fleet);
        // The news of it was missed.
        if !stirred.is_empty() {
            self.freed.notify_waiters();
        }
        stirred.into_iter().for_each(|key| drop(self.stirred.send(key)));
    }
}

/// Whether an actor that a worker is assigned to agrees.
pub(crate) fn is_held(worker: WorkerUid, assignee: &Assignee, actor: &Actor) -> bool {
    actor.uid == assignee.uid
        && actor.generation == assignee.generation
        && actor.lease().is_some_and(|lease| lease.worker == worker)
}
