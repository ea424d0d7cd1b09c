//! The PostgreSQL adapter keeps the port's promises.

mod common;

use std::process::Command;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use ate_store::conformance::{Subject, crash};
use ate_store::{FeedLimits, Store};
use ate_store_postgres::{PostgresStore, Schema, Settings};

use common::{connect, new_schema, server, settings};

/// Gives each store a schema of its own.
#[derive(Default)]
struct Postgres {
    schemas: Mutex<Vec<Schema>>,
}

#[async_trait]
impl Subject for Postgres {
    async fn open(&self, feed: FeedLimits) -> Arc<dyn Store> {
        let schema = new_schema();
        let store = connect(Settings { feed, ..settings(server(), &schema) }).await;
        self.schemas.lock().expect("no panics").push(schema);
        Arc::new(store)
    }

    async fn reopen(&self, store: Arc<dyn Store>) -> Option<Arc<dyn Store>> {
        drop(store);
        let schema = self.schemas.lock().expect("no panics").last().expect("opened before").clone();
        Some(Arc::new(connect(settings(server(), &schema)).await))
    }
}

ate_store::conformance_tests!(Postgres::default());

const CHILD_URL: &str = "ATE_STORE_CRASH_URL";
const CHILD_SCHEMA: &str = "ATE_STORE_CRASH_SCHEMA";

/// Not a test: what the crash test kills.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by acknowledged_commits_survive_kill_9"]
async fn crash_child() {
    let (Ok(url), Ok(schema)) = (std::env::var(CHILD_URL), std::env::var(CHILD_SCHEMA)) else { return };
    let schema = schema.parse().expect("plain");
    let settings = Settings { schema, ..Settings::new(url.parse().expect("well formed")) };
    crash::write_until_killed(Arc::new(PostgresStore::connect(settings).await.expect("connects"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_commits_survive_kill_9() {
    let schema = new_schema();
    for after in [1, 40, 300] {
        let mut child = Command::new(std::env::current_exe().expect("own path"));
        child.args(["--exact", "crash_child", "--ignored", "--nocapture"]);
        child.env(CHILD_URL, server().url()).env(CHILD_SCHEMA, schema.to_string());
        let acknowledged = crash::kill_while_writing(&mut child, after);
        let store = connect(settings(server(), &schema)).await;
        // The server may still be busy with what the dead process sent; it is done when a commit gets its turn.
        store.commit(ate_store::Change::new()).await.expect("has its turn");
        crash::check(&store, &acknowledged).await;
    }
}
