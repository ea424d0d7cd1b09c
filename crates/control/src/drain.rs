//! Pools that shrink or go away: workers beyond their number are emptied, then ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ate_actor::{Intent, Phase};
use ate_name::{NodeName, ObjectKey, WorkerUid};
use ate_placement::State;
use tokio::time::Instant;

use crate::records::{Read, WorkerRecord, worker_key};
use crate::{Control, ControlError};

/// Between tries to empty a worker whose actor could not be saved.
const RETRY: Duration = Duration::from_secs(1);

impl Control {
    /// Takes workers out of service that are more than their pools want, those first that disturb nobody. They get no
    /// new actor from here on; [`Control::empty`] says when they can be ended.
    pub fn take_surplus(&self, node: &NodeName) -> Vec<WorkerUid> {
        let wanted: BTreeMap<ObjectKey, usize> =
            self.pools().iter().map(|pool| (pool.metadata.key(), pool.spec.replicas as usize)).collect();
        let mut fleet = self.fleet.lock();
        let mut here: BTreeMap<ObjectKey, Vec<(u8, WorkerUid)>> = BTreeMap::new();
        for worker in fleet.iter().filter(|worker| worker.lease.node == *node) {
            let disturbs = match worker.state {
                State::Draining => continue,
                State::Free => 0,
                State::Frozen { .. } => 1,
                State::Taken => 2,
            };
            here.entry(worker.lease.pool.clone()).or_default().push((disturbs, worker.lease.worker));
        }
        let mut surplus = Vec::new();
        for (pool, mut workers) in here {
            workers.sort_unstable();
            let keep = wanted.get(&pool).copied().unwrap_or(0);
            surplus.extend(workers.iter().take(workers.len().saturating_sub(keep)).map(|(_, worker)| *worker));
        }
        for worker in &surplus {
            fleet.set_state(*worker, State::Draining);
        }
        surplus
    }

    /// Waits until nobody is in a worker that is out of service; suspends who is.
    pub async fn empty(self: &Arc<Self>, worker: WorkerUid) -> Result<(), ControlError> {
        loop {
            let Some(record) = self.store.get(&worker_key(worker)).await? else { return Ok(()) };
            let Some(assignee) = Read::<WorkerRecord>::decode(record)?.value.assigned else { return Ok(()) };
            let settled = self.settled(&assignee.key, Instant::now() + self.settings.park).await?;
            if !matches!(settled.actor.phase, Phase::Running { .. }) {
                continue;
            }
            if let Err(error) = self.save_actor(&assignee.key, Intent::Suspend).await {
                tracing::warn!(actor = %assignee.key, %error, "an actor does not leave a worker that is to go");
                tokio::select! {
                    () = tokio::time::sleep(RETRY) => {}
                    () = self.stopping.cancelled() => return Ok(()),
                }
            }
        }
    }
}
