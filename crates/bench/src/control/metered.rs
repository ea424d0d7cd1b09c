//! A store that remembers what was committed through it, and when it was durable.

use std::sync::Arc;

use async_trait::async_trait;
use ate_store::{
    Change, CommitError, Committed, Fault, Key, Kind, Page, Prefix, Record, Revision, Store, Watch, WatchError,
};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::clock;

/// A commit that changed an actor.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub(crate) change: Change,
    pub(crate) revision: Revision,
    /// When the store had said that it is durable.
    pub(crate) at: u64,
}

#[derive(Debug)]
pub(crate) struct Metered {
    store: Arc<dyn Store>,
    kept: Mutex<Vec<Kept>>,
    more: Notify,
}

impl Metered {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, kept: Mutex::default(), more: Notify::new() }
    }

    /// Forgets what was kept and begins anew.
    pub(crate) fn begin(&self) {
        self.kept.lock().clear();
    }

    /// What was kept, in the order of commits, once there are so many.
    pub(crate) async fn at_least(&self, count: usize) -> Vec<Kept> {
        loop {
            let more = self.more.notified();
            let kept = {
                let kept = self.kept.lock();
                (kept.len() >= count).then(|| kept.clone())
            };
            match kept {
                Some(mut kept) => {
                    kept.sort_by_key(|kept| kept.revision);
                    return kept;
                }
                None => more.await,
            }
        }
    }
}

#[async_trait]
impl Store for Metered {
    async fn commit(&self, change: Change) -> Result<Committed, CommitError> {
        let actor = change.writes.iter().any(|write| write.key().kind() == Kind::Actor);
        let change_kept = actor.then(|| change.clone());
        let committed = self.store.commit(change).await?;
        if let Some(change) = change_kept {
            self.kept.lock().push(Kept { change, revision: committed.revision, at: clock::now() });
            self.more.notify_waiters();
        }
        Ok(committed)
    }

    async fn get(&self, key: &Key) -> Result<Option<Record>, Fault> {
        self.store.get(key).await
    }

    async fn list(&self, prefix: &Prefix, after: Option<&str>, limit: usize) -> Result<Page, Fault> {
        self.store.list(prefix, after, limit).await
    }

    async fn watch(&self, prefix: &Prefix, after: Revision) -> Result<Watch, WatchError> {
        self.store.watch(prefix, after).await
    }

    async fn revision(&self) -> Result<Revision, Fault> {
        self.store.revision().await
    }
}
