//! Follows the store's feed, so that every replica knows of every change, whoever made it.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;

use ate_actor::Actor;
use ate_name::{ActorKey, ActorUid, Generation, NodeName, WorkerUid};
use ate_orders::Ingress;
use ate_store::{Key, Kind, Mutation, Prefix, Revision};
use futures::StreamExt;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::records::{Read, WorkerRecord};
use crate::{Control, ControlError};

#[derive(Default)]
pub(crate) struct Follower {
    /// Those who wait for news of an actor, and how many they are.
    waiting: Mutex<BTreeMap<ActorKey, (usize, Arc<Notify>)>>,
    /// The newest that is known of each worker.
    workers: Mutex<BTreeMap<WorkerUid, Read<WorkerRecord>>>,
}

/// Somebody waits for news of an actor. The last of them takes the entry along: there are far more actors than waiters.
pub(crate) struct Waiting<'a> {
    follower: &'a Follower,
    key: &'a ActorKey,
    notify: Arc<Notify>,
}

impl Deref for Waiting<'_> {
    type Target = Notify;

    fn deref(&self) -> &Notify {
        &self.notify
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waiting = self.follower.waiting.lock();
        if let Some((many, _)) = waiting.get_mut(self.key) {
            *many -= 1;
            if *many == 0 {
                waiting.remove(self.key);
            }
        }
    }
}

impl Follower {
    /// Told when the actor's record changes. Make the notification before reading the record: what changes from then on wakes it.
    pub(crate) fn of<'a>(&'a self, key: &'a ActorKey) -> Waiting<'a> {
        let mut waiting = self.waiting.lock();
        let (many, notify) = waiting.entry(key.clone()).or_default();
        *many += 1;
        Waiting { follower: self, key, notify: Arc::clone(notify) }
    }

    pub(crate) fn changed(&self, key: &ActorKey) {
        if let Some((_, notify)) = self.waiting.lock().get(key) {
            notify.notify_waiters();
        }
    }

    /// Something may have changed that nobody was told of.
    pub(crate) fn all_changed(&self) {
        self.waiting.lock().values().for_each(|(_, notify)| notify.notify_waiters());
    }

    pub(crate) fn ingress(&self, worker: WorkerUid) -> Option<Ingress> {
        self.workers.lock().get(&worker).map(|read| read.value.ingress.clone())
    }

    /// As it was when it was last heard of, which may be a moment ago.
    pub(crate) fn worker(&self, worker: WorkerUid) -> Option<Read<WorkerRecord>> {
        self.workers.lock().get(&worker).cloned()
    }

    /// The workers of a node, and who is in each.
    pub(crate) fn workers_of(&self, node: &NodeName) -> BTreeMap<WorkerUid, Option<(ActorUid, Generation)>> {
        let assigned = |worker: &WorkerRecord| worker.assigned.as_ref().map(|by| (by.uid, by.generation));
        let workers = self.workers.lock();
        let here = workers.iter().filter(|(_, read)| read.value.lease.node == *node);
        here.map(|(worker, read)| (*worker, assigned(&read.value))).collect()
    }

    /// `false`: something newer is known.
    pub(crate) fn know_worker(&self, read: &Read<WorkerRecord>) -> bool {
        let mut workers = self.workers.lock();
        let newer = |known: &Read<WorkerRecord>| known.record.revision > read.record.revision;
        if workers.get(&read.value.lease.worker).is_some_and(newer) {
            return false;
        }
        workers.insert(read.value.lease.worker, read.clone());
        true
    }

    pub(crate) fn forget_worker(&self, worker: WorkerUid) {
        self.workers.lock().remove(&worker);
    }
}

impl Control {
    /// Follows changes after `since` until the store ends the feed. The caller loads anew and follows again.
    pub(crate) async fn follow(self: &Arc<Self>, what: &[Prefix], since: Revision) -> Result<(), ControlError> {
        let mut feed = self.store.watch(what, since).await.map_err(|error| {
            tracing::warn!(%error, "the feed cannot be followed from here");
            ControlError::conflict()
        })?;
        while let Some(event) = feed.next().await {
            let event = event.map_err(|error| {
                tracing::warn!(%error, "the feed has ended");
                ControlError::conflict()
            })?;
            for mutation in event.mutations {
                // One that cannot be read, as a newer build may write it, is in the log, and keeps nobody from hearing of the rest.
                let _ = self.note(&mutation);
            }
        }
        Ok(())
    }

    fn note(&self, mutation: &Mutation) -> Result<(), ControlError> {
        let (key, record) = match mutation {
            Mutation::Put(record) => (&record.key, Some(record)),
            Mutation::Deleted(key) => (key, None),
        };
        match key.kind() {
            Kind::Actor => {
                let actor = record.map(|record| Read::<Actor>::decode(record.clone())).transpose();
                if let Some(name) = actor_name(key) {
                    // One that cannot be read is nowhere: whoever waits for it looks, and is told so.
                    self.note_actor(&name, actor.as_ref().ok().and_then(Option::as_ref).map(|read| &read.value));
                }
                actor?;
            }
            Kind::Worker => {
                if let Some(record) = record {
                    self.note_worker(&Read::decode(record.clone())?);
                } else if let Ok(worker) = WorkerUid::parse(key.path()) {
                    self.forget_worker(worker);
                }
            }
            Kind::Atespace => self.note_atespace(key, record)?,
            Kind::Template | Kind::Pool | Kind::Config => self.catalog.take(key, record)?,
            Kind::Node => match record {
                Some(record) => self.note_node(record)?,
                None => self.known_nodes.forget(&NodeName::new(key.path())),
            },
            Kind::Replica => match record {
                Some(record) => self.note_replica(record)?,
                None => self.forget_replica(key.path()),
            },
            _ => {}
        }
        Ok(())
    }
}

pub(crate) fn actor_name(key: &Key) -> Option<ActorKey> {
    let (atespace, name) = key.path().split_once('/')?;
    ActorKey::parse(atespace, name).ok()
}

#[cfg(test)]
mod tests {
    use ate_actor::Lease;
    use ate_name::ObjectKey;
    use ate_store::Record;

    use super::*;
    use crate::records::worker_key;

    #[test]
    fn nothing_is_kept_of_those_who_no_longer_wait() {
        let follower = Follower::default();
        let key = ActorKey::parse("space", "one").unwrap();
        let first = follower.of(&key);
        let second = follower.of(&key);
        drop(first);
        assert_eq!(follower.waiting.lock().len(), 1, "the second still waits");
        drop(second);
        assert!(follower.waiting.lock().is_empty());
    }

    #[test]
    fn older_news_of_a_worker_never_replaces_newer() {
        let key = ObjectKey::new("space", "worker");
        let worker = WorkerRecord {
            lease: Lease {
                worker: WorkerUid::from_random([7; 16]),
                pod: key.clone(),
                pool: key,
                node: NodeName::new("node"),
            },
            ingress: Ingress::Socket("socket".into()),
            assigned: None,
            draining: false,
        };
        let news = |revision, draining| {
            let value = WorkerRecord { draining, ..worker.clone() };
            let key = worker_key(worker.lease.worker);
            Read { record: Record { key, version: 1, revision, value: Vec::new().into() }, value }
        };
        let follower = Follower::default();
        let drains = || follower.worker(worker.lease.worker).unwrap().value.draining;
        assert!(follower.know_worker(&news(Revision(7), true)));
        assert!(!follower.know_worker(&news(Revision(6), false)));
        assert!(drains(), "what was known is newer");
        assert!(follower.know_worker(&news(Revision(8), false)));
        assert!(!drains());
    }
}
