//! Follows the store's feed, so that every replica knows of every change, whoever made it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use ate_actor::Actor;
use ate_name::{ActorKey, WorkerUid};
use ate_store::{Key, Kind, Mutation, Prefix, Revision};
use futures::StreamExt;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::records::{Read, WorkerRecord};
use crate::{Control, ControlError};

#[derive(Default)]
pub(crate) struct Follower {
    waiting: Mutex<BTreeMap<ActorKey, Arc<Notify>>>,
    ingress: Mutex<BTreeMap<WorkerUid, PathBuf>>,
}

impl Follower {
    /// Told when the actor's record changes. Enable the notification before reading the record.
    pub(crate) fn of(&self, key: &ActorKey) -> Waiting<'_> {
        let notify = Arc::clone(self.waiting.lock().entry(key.clone()).or_default());
        Waiting { follower: self, key: key.clone(), notify: Some(notify) }
    }

    pub(crate) fn changed(&self, key: &ActorKey) {
        if let Some(notify) = self.waiting.lock().get(key) {
            notify.notify_waiters();
        }
    }

    /// Something may have changed that nobody was told of.
    pub(crate) fn all_changed(&self) {
        self.waiting.lock().values().for_each(|notify| notify.notify_waiters());
    }

    pub(crate) fn ingress(&self, worker: WorkerUid) -> Option<PathBuf> {
        self.ingress.lock().get(&worker).cloned()
    }

    pub(crate) fn set_ingress(&self, worker: WorkerUid, path: Option<PathBuf>) {
        match path {
            Some(path) => drop(self.ingress.lock().insert(worker, path)),
            None => drop(self.ingress.lock().remove(&worker)),
        }
    }
}

/// Somebody waits for news of an actor. The last one to go takes the entry along: names that nobody waits for, be they of
/// actors that never were, take no memory.
pub(crate) struct Waiting<'a> {
    follower: &'a Follower,
    key: ActorKey,
    notify: Option<Arc<Notify>>,
}

impl Waiting<'_> {
    pub(crate) fn notified(&self) -> tokio::sync::futures::Notified<'_> {
        self.notify.as_ref().expect("given up only when dropped").notified()
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waiting = self.follower.waiting.lock();
        // Under the lock, or two that go at once would each leave it to the other.
        drop(self.notify.take());
        if waiting.get(&self.key).is_some_and(|notify| Arc::strong_count(notify) == 1) {
            waiting.remove(&self.key);
        }
    }
}

impl Control {
    /// Follows changes after `since` until the store ends the feed. The caller loads anew and follows again.
    pub(crate) async fn follow(self: &Arc<Self>, kind: Kind, since: Revision) -> Result<(), ControlError> {
        let mut feed = self.store.watch(&Prefix::all(kind), since).await.map_err(|error| {
            tracing::warn!(%error, "the feed cannot be followed from here");
            ControlError::conflict()
        })?;
        while let Some(event) = feed.next().await {
            let event = event.map_err(|error| {
                tracing::warn!(%error, "the feed has ended");
                ControlError::conflict()
            })?;
            for mutation in event.mutations {
                self.note(&mutation)?;
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
                let actor = record.map(|record| Read::<Actor>::decode(record.clone())).transpose()?;
                if let Some(name) = actor_name(key) {
                    self.note_actor(&name, actor.as_ref().map(|read| &read.value));
                }
            }
            Kind::Worker => {
                if let Some(record) = record {
                    self.note_worker(&Read::<WorkerRecord>::decode(record.clone())?.value);
                } else if let Ok(worker) = WorkerUid::parse(key.path()) {
                    self.forget_worker(worker);
                }
            }
            Kind::Template | Kind::Pool | Kind::Config => self.catalog.take(key, record)?,
            Kind::Node => match record {
                Some(record) => self.note_node(record)?,
                None => self.known_nodes.forget(&ate_name::NodeName::new(key.path())),
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

fn actor_name(key: &Key) -> Option<ActorKey> {
    let (atespace, name) = key.path().split_once('/')?;
    ActorKey::parse(atespace, name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_is_waited_for_is_told_of_and_then_forgotten() {
        let (follower, key) = (Follower::default(), ActorKey::parse("space", "actor").unwrap());
        let (first, second) = (follower.of(&key), follower.of(&key));
        let told = [first.notified(), second.notified()];
        follower.changed(&key);
        futures::future::join_all(told).await;
        drop(first);
        assert_eq!(follower.waiting.lock().len(), 1);
        drop(second);
        assert_eq!(follower.waiting.lock().len(), 0);
    }
}
