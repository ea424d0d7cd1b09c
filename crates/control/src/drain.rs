//! How many workers a node should have, and how those beyond that number go: marked, emptied, ended.
//!
//! The mark is in the worker's record, so that no replica binds an actor to a worker that another is emptying.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ate_actor::{Intent, Phase};
use ate_name::{NodeName, ObjectKey, WorkerUid};
use ate_placement::{State, Worker};
use ate_store::{Change, CommitError};
use tokio::time::Instant;

use crate::records::{Read, WorkerRecord, worker_key};
use crate::{Control, ControlError};

/// Between tries to empty a worker whose actor could not be saved.
const RETRY: Duration = Duration::from_secs(1);

/// A node's part of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    pub pool: ObjectKey,
    pub workers: usize,
    pub memory_limit: Option<u64>,
    pub cpu_limit_millis: Option<u64>,
}

impl Control {
    /// The workers that a node should have: an equal part of every pool, the first nodes by name one more.
    pub fn shares(&self, node: &NodeName) -> Vec<Share> {
        let mut nodes: BTreeSet<NodeName> =
            self.registered_nodes().into_iter().filter(|(_, record)| !record.leaving).map(|(name, _)| name).collect();
        // One that never registers is the only one.
        if nodes.is_empty() && self.known_nodes.last(node).is_none() {
            nodes.insert(node.clone());
        }
        let place = nodes.iter().position(|name| name == node);
        let part =
            |wanted: usize| place.map_or(0, |place| wanted / nodes.len() + usize::from(place < wanted % nodes.len()));
        let share = |pool: &Arc<ate_object::WorkerPool>| Share {
            pool: pool.metadata.key(),
            workers: part(pool.spec.replicas as usize),
            memory_limit: pool.spec.memory_limit_bytes(),
            cpu_limit_millis: pool.spec.cpu_limit_millis(),
        };
        self.pools().iter().map(share).collect()
    }

    /// Takes workers out of service that are more than the node's shares, those first that disturb nobody, and begins to
    /// empty them. Returns those that can be ended: nobody is in them, and nobody will be.
    pub async fn surplus(self: &Arc<Self>, node: &NodeName, shares: &[Share]) -> Result<Vec<WorkerUid>, ControlError> {
        for worker in self.beyond(node, shares) {
            self.mark_draining(worker).await?;
        }
        let mut empty = Vec::new();
        let here: Vec<WorkerUid> = {
            let fleet = self.fleet.lock();
            let goes = |worker: &&Worker| worker.lease.node == *node && worker.state == State::Draining;
            fleet.iter().filter(goes).map(|worker| worker.lease.worker).collect()
        };
        for worker in here {
            // What is known here may be old.
            let Some(record) = self.store.get(&worker_key(worker)).await? else { continue };
            let worker = Read::<WorkerRecord>::decode(record)?.value;
            if !worker.draining {
                continue;
            }
            match worker.assigned {
                None => empty.push(worker.lease.worker),
                Some(_) => self.empty_behind(worker.lease.worker),
            }
        }
        Ok(empty)
    }

    fn beyond(&self, node: &NodeName, shares: &[Share]) -> Vec<WorkerUid> {
        let mut here: BTreeMap<ObjectKey, Vec<(u8, WorkerUid)>> = BTreeMap::new();
        for worker in self.fleet.lock().iter().filter(|worker| worker.lease.node == *node) {
            let disturbs = match worker.state {
                State::Draining => continue,
                State::Free => 0,
                State::Frozen { .. } => 1,
                State::Taken => 2,
            };
            here.entry(worker.lease.pool.clone()).or_default().push((disturbs, worker.lease.worker));
        }
        let mut beyond = Vec::new();
        for (pool, mut workers) in here.into_iter().filter(|(pool, _)| !self.catalog.is_unread(pool)) {
            workers.sort_unstable();
            let keep = shares.iter().find(|share| share.pool == pool).map_or(0, |share| share.workers);
            beyond.extend(workers.iter().take(workers.len().saturating_sub(keep)).map(|(_, worker)| *worker));
        }
        beyond
    }

    async fn mark_draining(&self, worker: WorkerUid) -> Result<(), ControlError> {
        let Some(record) = self.store.get(&worker_key(worker)).await? else { return Ok(()) };
        let read = Read::<WorkerRecord>::decode(record)?;
        let marked = WorkerRecord { draining: true, ..read.value.clone() };
        match self.store.commit(Change::new().replace(&read.record, read.rewritten(&marked))).await {
            Ok(_) => self.look_at_worker(worker).await,
            // Somebody has just taken or left it: the next look decides.
            Err(CommitError::Conflict { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn empty_behind(self: &Arc<Self>, worker: WorkerUid) {
        if !self.emptying.lock().insert(worker) {
            return;
        }
        let control = Arc::clone(self);
        self.tasks.spawn(async move {
            if let Err(error) = control.empty(worker).await {
                tracing::warn!(%worker, %error, "a worker that is to go is not empty yet");
            }
            control.emptying.lock().remove(&worker);
        });
    }

    /// Suspends whoever is in a worker that is out of service.
    async fn empty(self: &Arc<Self>, worker: WorkerUid) -> Result<(), ControlError> {
        loop {
            let Some(record) = self.store.get(&worker_key(worker)).await? else { return Ok(()) };
            let Some(assignee) = Read::<WorkerRecord>::decode(record)?.value.assigned else { return Ok(()) };
            let settled = self.settled(&assignee.key, Instant::now() + self.settings.park).await?;
            if matches!(settled.actor.phase, Phase::Running { .. }) {
                match self.save_because(&assignee.key, Intent::Suspend, "its worker is to go").await {
                    Ok(_) => continue,
                    Err(error) => {
                        tracing::warn!(actor = %assignee.key, %error, "an actor does not leave a worker that is to go");
                    }
                }
            }
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                () = self.stopping.cancelled() => return Ok(()),
            }
        }
    }
}
