//! The embedded adapter keeps the port's promises.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use ate_store::conformance::{Subject, crash};
use ate_store::{FeedLimits, Store};
use ate_store_embedded::EmbeddedStore;
use tempfile::TempDir;

/// Gives each store a directory of its own, all of which go with the test.
#[derive(Default)]
struct Embedded {
    directories: Mutex<Vec<TempDir>>,
}

#[async_trait]
impl Subject for Embedded {
    async fn open(&self, feed: FeedLimits) -> Arc<dyn Store> {
        let directory = TempDir::new().expect("a temporary directory");
        let store = EmbeddedStore::open(&directory.path().join("store"), feed).expect("opens");
        self.directories.lock().expect("no panics").push(directory);
        Arc::new(store)
    }

    async fn reopen(&self, store: Arc<dyn Store>) -> Option<Arc<dyn Store>> {
        drop(store);
        let directories = self.directories.lock().expect("no panics");
        let directory = directories.last().expect("opened before");
        Some(Arc::new(
            EmbeddedStore::open(&directory.path().join("store"), FeedLimits::default()).expect("opens again"),
        ))
    }
}

ate_store::conformance_tests!(Embedded::default());

const CHILD_DIRECTORY: &str = "ATE_STORE_CRASH_DIRECTORY";

/// Not a test: what the crash test kills.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by acknowledged_commits_survive_kill_9"]
async fn crash_child() {
    let Some(directory) = std::env::var_os(CHILD_DIRECTORY) else { return };
    let store = EmbeddedStore::open(&PathBuf::from(directory), FeedLimits::default()).expect("opens");
    crash::write_until_killed(Arc::new(store)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_commits_survive_kill_9() {
    let directory = TempDir::new().expect("a temporary directory");
    // Each round starts from what the last one left, so recovery recovers from recovery.
    for after in [1, 40, 300] {
        let me = std::env::current_exe().expect("own path");
        let mut child = Command::new(me);
        child
            .args(["--exact", "crash_child", "--ignored", "--nocapture"])
            .env(CHILD_DIRECTORY, directory.path().join("store"));
        let acknowledged = crash::kill_while_writing(&mut child, after);
        let store =
            EmbeddedStore::open(&directory.path().join("store"), FeedLimits::default()).expect("opens after the kill");
        crash::check(&store, &acknowledged).await;
    }
}
