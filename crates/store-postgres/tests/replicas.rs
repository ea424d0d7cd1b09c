//! Several replicas on one schema: they never lose or mix up each other's commits, and see all of them.

mod common;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use ate_store::conformance::Subject;
use ate_store::{
    Change, CommitError, Committed, Fault, FeedLimits, Key, Kind, LostTail, Page, Prefix, Record, Revision, Store,
    Watch, WatchError,
};
use ate_store_postgres::{ConnectError, PostgresStore, Schema, Settings, contents};
use futures::StreamExt;
use futures::future::join_all;

use common::{connect, forget_the_log, new_schema, server, settings};

/// Two replicas behind one face: each call goes to the other one than the call before.
#[derive(Debug)]
struct Pair {
    replicas: [PostgresStore; 2],
    calls: AtomicUsize,
}

impl Pair {
    fn next(&self) -> &PostgresStore {
        &self.replicas[self.calls.fetch_add(1, Ordering::Relaxed) % 2]
    }
}

#[async_trait]
impl Store for Pair {
    async fn commit(&self, change: Change) -> Result<Committed, CommitError> {
        self.next().commit(change).await
    }

    async fn get(&self, key: &Key) -> Result<Option<Record>, Fault> {
        self.next().get(key).await
    }

    async fn list(&self, prefix: &Prefix, after: Option<&str>, limit: usize) -> Result<Page, Fault> {
        self.next().list(prefix, after, limit).await
    }

    async fn watch(&self, prefixes: &[Prefix], after: Revision) -> Result<Watch, WatchError> {
        self.next().watch(prefixes, after).await
    }

    async fn revision(&self) -> Result<Revision, Fault> {
        self.next().revision().await
    }
}

#[derive(Default)]
struct Pairs {
    schema: Mutex<Option<Schema>>,
}

#[async_trait]
impl Subject for Pairs {
    async fn open(&self, feed: FeedLimits) -> Arc<dyn Store> {
        let schema = new_schema();
        let settings = Settings { feed, ..settings(server(), &schema) };
        *self.schema.lock().expect("no panics") = Some(schema);
        let replicas = [connect(settings.clone()).await, connect(settings).await];
        Arc::new(Pair { replicas, calls: AtomicUsize::new(0) })
    }

    async fn reopen(&self, _store: Arc<dyn Store>) -> Option<Arc<dyn Store>> {
        None
    }

    async fn forget(&self, store: &dyn Store) {
        let schema = self.schema.lock().expect("no panics").clone().expect("opened before");
        forget_the_log(store, &schema, 2).await;
    }
}

// All promises of the port but what is about one process: what it shows when it is opened again or closed, and how fast its feed
// forgets, as another replica's is a moment behind.
ate_store::conformance_tests! { Pairs::default();
    a_record_counts_its_writes_and_names_its_commit
    a_record_created_again_starts_at_version_one
    each_guard_refuses_exactly_what_it_names
    a_refused_change_writes_nothing
    guards_are_judged_before_the_writes
    an_unchanged_guard_is_not_fooled_by_a_namesake
    a_change_without_writes_only_checks
    a_change_beyond_the_limits_is_refused
    deleting_what_is_absent_is_no_error_and_no_event
    kinds_do_not_mix
    lists_are_ordered_by_path_within_their_prefix
    paging_visits_each_stable_record_once_while_others_come_and_go
    a_page_is_bounded_by_records_and_by_bytes
    a_watch_shows_each_commit_once_whole_and_in_order
    a_watch_resumes_after_any_revision_still_kept
    a_list_and_a_watch_from_its_revision_miss_nothing
    a_watch_from_too_long_ago_is_refused
    a_watch_from_the_future_is_refused
    concurrent_increments_lose_no_update
    what_is_added_at_once_adds_up_and_never_passes_its_limit
    a_number_is_added_to_from_where_it_is_or_from_where_it_should_be
    concurrent_binds_never_share_a_worker
    a_dropped_commit_happens_whole_or_not_at_all
}

fn actor(name: &str) -> Key {
    Key::new(Kind::Actor, [name]).expect("well formed")
}

fn put(name: &str) -> Change {
    Change::new().put(actor(name), name.to_owned())
}

fn actors() -> Prefix {
    Prefix::all(Kind::Actor)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_sees_all_commits_in_order_though_its_connections_are_cut() {
    const EACH: usize = 150;
    let mut settings = settings(server(), &new_schema());
    settings.address = format!("{}?application_name=cut", server().url()).parse().expect("well formed");
    let replicas = [connect(settings.clone()).await, connect(settings.clone()).await];
    let watches = join_all(replicas.iter().map(async |replica| replica.watch(&[actors()], Revision::ZERO).await)).await;
    let done = Arc::new(AtomicBool::new(false));
    let cutter = tokio::task::spawn_blocking({
        let done = done.clone();
        move || {
            let mut cuts = 0;
            while !done.load(Ordering::Relaxed) || cuts == 0 {
                let cut = server().sql(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                    WHERE application_name IN ('cut follower', 'cut reader')",
                );
                cuts += cut.parse::<usize>().expect("a count");
            }
            cuts
        }
    });
    let commits = replicas.iter().enumerate().flat_map(|(at, replica)| {
        (0..EACH).map(move |number| async move {
            replica.commit(put(&format!("{at}-{number}"))).await.expect("the writer is not cut").revision
        })
    });
    let written = join_all(commits).await;
    done.store(true, Ordering::Relaxed);
    assert!(cutter.await.expect("cuts") > 0);
    assert_eq!(written.len(), 2 * EACH);
    for watch in watches {
        let events: Vec<_> = watch.expect("starts").take(2 * EACH).collect().await;
        let revisions: Vec<_> = events.into_iter().map(|event| event.expect("nothing was lost").revision.0).collect();
        assert_eq!(revisions, (1..=2 * EACH as u64).collect::<Vec<_>>(), "once each, in order");
    }
    for replica in &replicas {
        assert_eq!(replica.revision().await, Ok(Revision(2 * EACH as u64)), "reads find another connection");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_that_wait_together_share_a_transaction_and_nothing_else() {
    let mut settings = settings(server(), &new_schema());
    settings.address = format!("{}?application_name=waiting", server().url()).parse().expect("well formed");
    let store = connect(settings.clone()).await;
    store.commit(put("last").put(actor("kept"), "x")).await.expect("no guards");

    // While a stranger has the lock, the first commit waits for it and the others for the first.
    let (stranger, connection) =
        tokio_postgres::connect(&server().url(), tokio_postgres::NoTls).await.expect("connects");
    tokio::spawn(connection);
    let lock = format!("BEGIN; SELECT FROM {}.head FOR UPDATE", settings.schema);
    stranger.batch_execute(&lock).await.expect("locks");
    let mut first = store.commit(put("first"));
    assert!(futures::poll!(&mut first).is_pending());
    let waiting = "SELECT FROM pg_stat_activity WHERE application_name = 'waiting writer' AND wait_event_type = 'Lock'";
    while server().sql(&format!("SELECT EXISTS ({waiting})")) == "f" {}
    let conflict = Change::new().create(actor("kept"), "y").put(actor("beside"), "x");
    let twice = Change::new().create(actor("first"), "again").put(actor("twice"), "x");
    let nothing = Change::new().delete(actor("none"));
    let delete = ["last", "kept", "first", "second"].into_iter().fold(Change::new(), |all, it| all.delete(actor(it)));
    let alone = Change::new().guard(ate_store::Guard::Empty(actors())).put(actor("new"), "x");
    let changes = [put("second"), conflict, twice, nothing, delete, alone];
    let mut waiting: Vec<_> = changes.into_iter().map(|change| store.commit(change)).collect();
    for commit in &mut waiting {
        assert!(futures::poll!(commit).is_pending());
    }
    stranger.batch_execute("ROLLBACK").await.expect("unlocks");

    let outcomes = join_all(std::iter::once(first).chain(waiting)).await;
    let revisions: Vec<_> = outcomes.iter().map(|outcome| outcome.as_ref().ok().map(|done| done.revision.0)).collect();
    assert_eq!(revisions, [Some(2), Some(3), None, None, Some(4), Some(5), Some(6)]);
    assert!(
        matches!(outcomes[2], Err(CommitError::Conflict { .. }))
            && matches!(outcomes[3], Err(CommitError::Conflict { .. }))
    );
    let left = store.list(&actors(), None, 10).await.expect("reads");
    assert_eq!(left.records.iter().map(|record| record.key.path()).collect::<Vec<_>>(), ["new"]);
    // The last one asks for what the deletes before it leave, and so comes in a group of its own.
    let groups = format!(
        "SELECT array_agg(revision ORDER BY revision) FROM {}.log GROUP BY xmin::text ORDER BY 1",
        settings.schema
    );
    assert_eq!(server().sql(&groups), "{1}\n{2}\n{3,4,5}\n{6}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_that_start_together_make_one_schema() {
    let settings = settings(server(), &new_schema());
    let replicas = join_all((0..6).map(|_| connect(settings.clone()))).await;
    let commits = replicas.iter().enumerate().map(|(at, replica)| replica.commit(put(&at.to_string())));
    let revisions = join_all(commits).await.into_iter().map(|done| done.expect("no guards").revision.0);
    assert_eq!(revisions.collect::<BTreeSet<_>>(), (1..=6).collect());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_later_layout_is_refused_and_ends_those_who_do_not_know_it() {
    let settings = settings(server(), &new_schema());
    let store = connect(settings.clone()).await;
    store.commit(put("a")).await.expect("no guards");
    server().sql(&format!("UPDATE {}.head SET layout = 7", settings.schema));
    let refused = PostgresStore::connect(settings.clone()).await.expect_err("it is newer");
    assert!(matches!(refused, ConnectError::TooNew { found: 7, .. }), "{refused}");
    let text = refused.to_string();
    assert!(text.contains("layout 7") && text.contains("up to 1") && text.contains("newer program"), "{text}");
    let stopped = store.commit(put("b")).await.expect_err("it would be written wrongly");
    assert!(matches!(stopped, CommitError::Fault(Fault::Corrupt { .. })), "{stopped}");
    assert!(matches!(store.stopped().await, Some(Fault::Corrupt { reason }) if reason.contains("layout 7")));
    assert!(matches!(store.get(&actor("a")).await, Err(Fault::Corrupt { .. })));
    assert_eq!(server().sql(&format!("SELECT revision FROM {}.head", settings.schema)), "1", "nothing was written");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_went_back_is_not_believed() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let settings = Settings { mark: Some(directory.path().join("mark")), ..settings(server(), &new_schema()) };
    let store = connect(settings.clone()).await;
    for name in ["a", "b"] {
        store.commit(put(name)).await.expect("no guards");
    }
    server().sql(&format!("UPDATE {0}.head SET revision = 1; DELETE FROM {0}.log WHERE revision = 2", settings.schema));
    let refused = store.commit(put("c")).await.expect_err("revision 2 was acknowledged").to_string();
    assert!(refused.contains("revision 2 was seen, but the database is only at 1"), "{refused}");
    let told = store.stopped().await.expect("it was not closed").to_string();
    assert!(refused.contains(&told) && told.contains("restore"), "{told}");
    // Nor by the next process of this machine, though the first was not told to stop; one of another machine has seen nothing.
    let refused = PostgresStore::connect(settings.clone()).await.expect_err("it knows of revision 2");
    assert!(matches!(refused, ConnectError::WentBack { seen: Revision(2), revision: Revision(1), .. }), "{refused}");
    assert!(refused.to_string().contains("restore a backup"), "{refused}");
    // Nor by whoever checks it or saves it, unless they say that they know.
    let refused = contents(&settings, LostTail::Refuse).await.expect_err("it knows of revision 2");
    assert!(matches!(refused, ConnectError::WentBack { seen: Revision(2), revision: Revision(1), .. }), "{refused}");
    let left = contents(&settings, LostTail::Accept).await.expect("asked for");
    assert_eq!((left.revision, left.lost), (Revision(1), Some(Revision(2))));
    drop(left);
    let next = connect(Settings { mark: None, ..settings.clone() }).await;
    assert_eq!(next.commit(put("c")).await.expect("begins from what is there").revision, Revision(2));
    next.close().await;
    let whole = contents(&settings, LostTail::Refuse).await.expect("as far as it was seen");
    assert_eq!((whole.revision, whole.lost), (Revision(2), None));
    connect(settings).await.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_fell_behind_the_log_ends_its_watches() {
    let settings = settings(server(), &new_schema());
    let store = connect(settings.clone()).await;
    store.commit(put("a")).await.expect("no guards");
    let mut watch = store.watch(&[actors()], Revision(1)).await.expect("starts");
    // As if others had committed three times while this one was away, and the log had been cut since.
    let schema = &settings.schema;
    server().sql(&format!("UPDATE {schema}.head SET revision = 4; SELECT pg_notify('ate-store:{schema}', '')"));
    let ended = watch.next().await.expect("says why");
    assert_eq!(ended, Err(WatchError::Lagged { seen: Revision(1), floor: Revision(4) }));
    let mut next = store.watch(&[actors()], Revision(4)).await.expect("goes on from here");
    store.commit(put("b")).await.expect("no guards");
    assert_eq!(next.next().await.expect("open").expect("keeps up").revision, Revision(5));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_entries_of_the_log_are_removed() {
    let settings = settings(server(), &new_schema());
    let log = format!("{}.log", settings.schema);
    let store = connect(settings.clone()).await;
    for name in ["a", "b", "c"] {
        store.commit(put(name)).await.expect("no guards");
    }
    drop(store);
    server().sql(&format!("UPDATE {log} SET committed_at = committed_at - interval '1 hour' WHERE revision < 3"));
    let _store = connect(settings).await;
    while server().sql(&format!("SELECT array_agg(revision) FROM {log}")) != "{3}" {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schemas_of_one_database_do_not_mix() {
    let stores = [connect(settings(server(), &new_schema())).await, connect(settings(server(), &new_schema())).await];
    let mut watch = stores[1].watch(&[actors()], Revision::ZERO).await.expect("starts");
    stores[0].commit(put("a")).await.expect("no guards");
    stores[1].commit(put("b")).await.expect("no guards");
    for (store, name) in stores.iter().zip(["a", "b"]) {
        let page = store.list(&actors(), None, 10).await.expect("reads");
        assert_eq!(page.records.iter().map(|record| record.key.path()).collect::<Vec<_>>(), [name]);
    }
    assert_eq!(watch.next().await.expect("open").expect("keeps up").mutations[0].key(), &actor("b"));
}
