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
    /// `None` while nobody wants to know.
    kept: Mutex<Option<Vec<Kept>>>,
    more: Notify,
}

impl Metered {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, kept: Mutex::default(), more: Notify::new() }
    }

    pub(crate) fn begin(&self) {
        *self.kept.lock() = Some(Vec::new());
    }

    /// What was kept since [`begin`](Self::begin), in the order of commits, once there are so many. Nothing is kept from then on.
    pub(crate) async fn at_least(&self, count: usize) -> Vec<Kept> {
        loop {
            let more = self.more.notified();
            let kept = {
                let mut kept = self.kept.lock();
                kept.take_if(|kept| kept.len() >= count)
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
        let actor = || change.writes.iter().any(|write| write.key().kind() == Kind::Actor);
        let change_kept = (self.kept.lock().is_some() && actor()).then(|| change.clone());
        let committed = self.store.commit(change).await?;
        if let (Some(change), Some(kept)) = (change_kept, self.kept.lock().as_mut()) {
            kept.push(Kept { change, revision: committed.revision, at: clock::now() });
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

    async fn watch(&self, prefixes: &[Prefix], after: Revision) -> Result<Watch, WatchError> {
        self.store.watch(prefixes, after).await
    }

    async fn revision(&self) -> Result<Revision, Fault> {
        self.store.revision().await
    }
}
