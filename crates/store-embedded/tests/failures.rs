//! What the embedded store does when the disk, the directory or the engine does not do its part.

mod probe;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ate_store::{Change, CommitError, Fault, FeedLimits, Key, Kind, Prefix, Revision, Store, WatchError};
use ate_store_embedded::{EmbeddedStore, OpenError};
use futures::StreamExt;
use tempfile::TempDir;

use probe::{Failure, Probe};

fn open(directory: &Path) -> Result<EmbeddedStore, OpenError> {
    EmbeddedStore::open(&directory.join("store"), FeedLimits::default())
}

fn actor(name: &str) -> Key {
    Key::new(Kind::Actor, [name]).expect("well formed")
}

fn put(name: &str) -> Change {
    Change::new().put(actor(name), "x")
}

fn everything() -> Prefix {
    Prefix::all(Kind::Actor)
}

fn is_unavailable<T>(outcome: &Result<T, CommitError>) -> bool {
    matches!(outcome, Err(CommitError::Fault(Fault::Unavailable { .. })))
}

#[tokio::test]
async fn a_second_opener_learns_the_holder_and_waits_for_its_close() {
    let directory = TempDir::new().expect("a temporary directory");
    let store = open(directory.path()).expect("opens");
    let refused = open(directory.path()).expect_err("two writers would destroy each other's work").to_string();
    assert!(refused.contains(&directory.path().display().to_string()), "{refused}");
    assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
    let mut watch = store.watch(&[everything()], Revision::ZERO).await.expect("starts");
    store.commit(put("a")).await.expect("the holder is not disturbed");
    store.close();
    assert_eq!(watch.next().await.expect("shown before the end").expect("kept up").revision, Revision(1));
    assert!(watch.next().await.is_none(), "a watch ends with the store");
    assert!(is_unavailable(&store.commit(put("b")).await), "a closed store takes nothing");
    assert!(matches!(store.get(&actor("a")).await, Err(Fault::Unavailable { .. })));
    let next = open(directory.path()).expect("closing gives the directory free");
    assert_eq!(next.revision().await, Ok(Revision(1)));
}

#[tokio::test]
async fn what_was_queued_before_the_close_is_committed() {
    let directory = TempDir::new().expect("a temporary directory");
    let (store, probe) = Probe::open(directory.path());
    let store = Arc::new(store);
    let gate = probe.close_gate();
    let mut waiting: Vec<_> = (0..10).map(|at| Box::pin(commit(store.clone(), put(&at.to_string())))).collect();
    for commit in &mut waiting {
        assert!(futures::poll!(commit).is_pending());
    }
    let closing = tokio::task::spawn_blocking({
        let store = store.clone();
        move || store.close()
    });
    drop(gate);
    closing.await.expect("closes");
    for outcome in futures::future::join_all(waiting).await {
        outcome.expect("was queued before the close");
    }
    drop(store);
    assert_eq!(open(directory.path()).expect("opens").revision().await, Ok(Revision(10)));
}

async fn commit(store: Arc<EmbeddedStore>, change: Change) -> Result<(), CommitError> {
    store.commit(change).await.map(drop)
}

#[test]
fn a_newer_or_foreign_format_is_refused() {
    let directory = TempDir::new().expect("a temporary directory");
    drop(open(directory.path()).expect("creates"));
    let format = directory.path().join("store/FORMAT");
    assert_eq!(fs::read_to_string(&format).expect("written"), "ate-store 1\n");
    fs::write(&format, "ate-store 2\n").expect("writes");
    assert!(matches!(open(directory.path()), Err(OpenError::TooNew { found: 2, .. })));
    fs::write(&format, "something else").expect("writes");
    assert!(matches!(open(directory.path()), Err(OpenError::NotAStore { .. })));
    fs::write(&format, "ate-store 1\n").expect("writes");
    open(directory.path()).expect("the refusals changed nothing");
}

#[tokio::test]
async fn records_that_are_gone_are_missed() {
    let directory = TempDir::new().expect("a temporary directory");
    let store = open(directory.path()).expect("creates");
    store.commit(put("a")).await.expect("no guards");
    drop(store);
    fs::remove_dir_all(directory.path().join("store/records")).expect("removes");
    let refused = open(directory.path()).expect_err("an empty store would be a lie");
    let OpenError::Fault { source: Fault::Corrupt { reason }, .. } = refused else { panic!("{refused}") };
    assert!(reason.contains("revision 1 was acknowledged, but only 0 is left"), "{reason}");
}

#[tokio::test]
async fn commits_that_wait_together_share_a_flush_up_to_a_bound() {
    const PLACES: u64 = 1024;
    let directory = TempDir::new().expect("a temporary directory");
    let (store, probe) = Probe::open(directory.path());
    let store = Arc::new(store);
    let gate = probe.close_gate();
    // The runtime would turn back a task that polls so much at once.
    let start = |at: u64| Box::pin(tokio::task::unconstrained(commit(store.clone(), put(&at.to_string()))));
    let mut waiting: Vec<_> = (0..PLACES + 500).map(start).collect();
    for commit in &mut waiting {
        assert!(futures::poll!(commit).is_pending());
    }
    drop(gate);
    // Nobody polls the commits, so only those that found a place are carried out.
    let mut revision = Revision::ZERO;
    while revision < Revision(PLACES) {
        revision = store.revision().await.expect("reads");
    }
    assert_eq!(revision, Revision(PLACES));
    assert!(probe.commits() <= 2, "one group before the gate closed and one behind it, not {}", probe.commits());
    for outcome in futures::future::join_all(waiting).await {
        outcome.expect("no guards");
    }
    assert_eq!(store.revision().await, Ok(Revision(PLACES + 500)));
}

#[tokio::test]
async fn a_failed_write_is_unavailable_and_the_next_one_works() {
    let directory = TempDir::new().expect("a temporary directory");
    let (store, probe) = Probe::open(directory.path());
    store.commit(put("before")).await.expect("works");
    let mut watch = store.watch(&[everything()], Revision(1)).await.expect("starts");
    probe.fail_once(Failure::BeforeCommit);
    assert!(is_unavailable(&store.commit(put("lost")).await));
    assert!(store.get(&actor("before")).await.expect("reads go on").is_some());
    let after = store.commit(put("after")).await.expect("a new engine takes it");
    assert_eq!(after.revision, Revision(2));
    assert_eq!(store.get(&actor("lost")).await, Ok(None));
    let event = watch.next().await.expect("open").expect("nothing was missed, so the watch goes on");
    assert_eq!(event.revision, Revision(2));
}

#[tokio::test]
async fn a_commit_that_failed_only_in_its_answer_is_kept_and_ends_the_watches() {
    let directory = TempDir::new().expect("a temporary directory");
    let (store, probe) = Probe::open(directory.path());
    let mut watch = store.watch(&[everything()], Revision::ZERO).await.expect("starts");
    probe.fail_once(Failure::AfterCommit);
    assert!(is_unavailable(&store.commit(put("kept")).await));
    assert_eq!(store.commit(put("after")).await.expect("works").revision, Revision(2));
    assert!(store.get(&actor("kept")).await.expect("reads").is_some());
    let ended = watch.next().await.expect("says why");
    assert_eq!(ended, Err(WatchError::Lagged { seen: Revision::ZERO, floor: Revision(1) }));
}

#[tokio::test]
async fn an_engine_that_panics_leaves_nobody_waiting() {
    let directory = TempDir::new().expect("a temporary directory");
    let (store, probe) = Probe::open(directory.path());
    store.commit(put("before")).await.expect("works");
    probe.fail_once(Failure::Panic);
    assert!(is_unavailable(&store.commit(put("a")).await));
    store.stopped().await;
    assert!(is_unavailable(&store.commit(put("b")).await));
    drop(store);
    assert_eq!(open(directory.path()).expect("the directory is free").revision().await, Ok(Revision(1)));
}
