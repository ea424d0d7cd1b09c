//! The reference adapter keeps the port's promises.

use std::sync::Arc;

use async_trait::async_trait;
use ate_store::conformance::Subject;
use ate_store::{FeedLimits, MemoryStore, Store};

struct Memory;

#[async_trait]
impl Subject for Memory {
    async fn open(&self, feed: FeedLimits) -> Arc<dyn Store> {
        Arc::new(MemoryStore::new(feed))
    }

    async fn reopen(&self, _store: Arc<dyn Store>) -> Option<Arc<dyn Store>> {
        None
    }
}

ate_store::conformance_tests!(Memory);
