//! The PostgreSQL adapter keeps the port's promises.

mod common;

use std::process::Command;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use ate_store::conformance::{Subject, crash};
use ate_store::{Change, FeedLimits, Key, Kind, Prefix, Revision, Store, WatchError};
use ate_store_postgres::{PostgresStore, Schema, Settings};
use futures::StreamExt;
use futures::future::try_join_all;

use common::{connect, forget_the_log, new_schema, server, settings};

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

    async fn forget(&self, store: &dyn Store) {
        let schema = self.schemas.lock().expect("no panics").last().expect("opened before").clone();
        forget_the_log(store, &schema, 1).await;
    }
}

ate_store::conformance_tests!(Postgres::default());

/// As of a replica that takes longer to load all there is than its feed lasts, while others go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_from_further_back_than_the_feed_holds_misses_nothing_that_is_in_the_log() {
    // More than the log is asked for at once.
    const COMMITS: u64 = 1200;
    let schema = new_schema();
    let feed = FeedLimits { events: 10, ..FeedLimits::default() };
    let store = connect(Settings { feed, ..settings(server(), &schema) }).await;
    let key = |at: u64| match at % 100 {
        0 => Key::new(Kind::Worker, [at.to_string()]).expect("well formed"),
        _ => Key::new(Kind::Actor, [at.to_string()]).expect("well formed"),
    };
    let commit = |at: u64| store.commit(Change::new().put(key(at), "x"));
    try_join_all((1..=COMMITS).map(commit)).await.expect("no guards");
    let (actors, workers) = (Prefix::all(Kind::Actor), Prefix::all(Kind::Worker));
    let both = [actors, workers.clone()];
    let (mut all, mut few) = (
        store.watch(&both, Revision::ZERO).await.expect("it is in the log"),
        store.watch(&[workers], Revision(1)).await.expect("it is in the log"),
    );
    let mut left_behind = store.watch(&both, Revision(1)).await.expect("it is in the log");
    // In the log, then in the feed, then as it happens.
    for revision in 1..=COMMITS + 30 {
        if revision > COMMITS - 20 {
            commit(revision + 100_000).await.expect("no guards");
        }
        let event = all.next().await.expect("open").expect("nothing missed");
        assert_eq!(event.revision, Revision(revision), "once each, in order");
    }
    let seen: Vec<_> = few.by_ref().take(12).map(|event| event.expect("nothing missed").mutations).collect().await;
    assert!(seen.iter().all(|mutations| mutations[0].key().kind() == Kind::Worker), "{seen:?}");
    // What is gone from the log, too, is missed, and said so.
    forget_the_log(&store, &schema, 1).await;
    let ended = left_behind.by_ref().skip_while(|event| std::future::ready(event.is_ok())).next().await;
    assert!(matches!(ended, Some(Err(WatchError::Lagged { .. }))), "{ended:?}");
    assert!(left_behind.next().await.is_none());
    let refused = store.watch(&both, Revision(1)).await.err();
    assert!(matches!(refused, Some(WatchError::Compacted { after: Revision(1), .. })), "{refused:?}");
}

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
