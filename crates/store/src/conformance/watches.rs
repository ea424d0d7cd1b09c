use std::collections::BTreeMap;

use futures::StreamExt;

use super::{Subject, actor, actors, below, put};
use crate::{Change, Event, FeedLimits, Key, Kind, Mutation, Prefix, Record, Revision, Store, Watch, WatchError};

async fn next(watch: &mut Watch) -> Event {
    watch.next().await.expect("the watch goes on").expect("the watch keeps up")
}

pub async fn a_watch_shows_each_commit_once_whole_and_in_order(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    let mut demo = store.watch(&[below("demo")], Revision::ZERO).await.expect("starts");
    let mut workers = store.watch(&[Prefix::all(Kind::Worker)], Revision::ZERO).await.expect("starts");
    // One of them twice: what it shows is shown once.
    let several = [below("demo"), Prefix::all(Kind::Worker), below("demo")];
    let mut several = store.watch(&several, Revision::ZERO).await.expect("starts");
    let worker = Key::parse(Kind::Worker, "w").expect("well formed");

    put(&*store, "other/a", "x").await;
    let bind = Change::new().put(actor("demo/a"), "1").put(worker.clone(), "1").put(actor("demo/b"), "1");
    store.commit(bind).await.expect("no guards");
    store.commit(Change::new().delete(actor("demo/a")).put(actor("demo/b"), "2")).await.expect("no guards");

    let record = |key: &Key, version, revision, value: &'static str| {
        Mutation::Put(Record { key: key.clone(), version, revision: Revision(revision), value: value.into() })
    };
    let (a, b) = (actor("demo/a"), actor("demo/b"));
    let bound = Event { revision: Revision(2), mutations: vec![record(&a, 1, 2, "1"), record(&b, 1, 2, "1")] };
    let ended = Event { revision: Revision(3), mutations: vec![Mutation::Deleted(a.clone()), record(&b, 2, 3, "2")] };
    let both = vec![record(&a, 1, 2, "1"), record(&worker, 1, 2, "1"), record(&b, 1, 2, "1")];
    assert_eq!(next(&mut several).await, Event { revision: Revision(2), mutations: both }, "one commit is one event");
    assert_eq!(next(&mut several).await, ended);
    assert_eq!((next(&mut demo).await, next(&mut demo).await), (bound, ended));
    let assigned = Event { revision: Revision(2), mutations: vec![record(&worker, 1, 2, "1")] };
    assert_eq!(next(&mut workers).await, assigned);

    // What follows is the next commit, so nothing was shown twice.
    let last = put(&*store, "demo/c", "1").await;
    assert_eq!(next(&mut demo).await, Event { revision: Revision(4), mutations: vec![Mutation::Put(last)] });
}

pub async fn a_watch_resumes_after_any_revision_still_kept(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    for at in 1..=5 {
        put(&*store, "a", &at.to_string()).await;
    }
    for after in 0..5 {
        let mut watch = store.watch(&[actors()], Revision(after)).await.expect("kept");
        for expected in after + 1..=5 {
            assert_eq!(next(&mut watch).await.revision, Revision(expected));
        }
    }
}

pub async fn a_list_and_a_watch_from_its_revision_miss_nothing(subject: &dyn Subject) {
    const WRITES: u64 = 400;
    let store = subject.open(FeedLimits::default()).await;
    let writer = tokio::spawn({
        let store = store.clone();
        async move {
            for at in 0..WRITES {
                let path = actor(&format!("{}", at % 17));
                let change = if at % 5 == 4 { Change::new().delete(path) } else { Change::new().put(path, "x") };
                // Two keys at once: a cache that saw half a commit would differ in the end.
                store.commit(change.put(actor("last"), at.to_string())).await.expect("no guards");
            }
        }
    });
    // Several caches, each of which starts somewhere in the middle of the writes.
    let mut caches = Vec::new();
    while !writer.is_finished() || caches.is_empty() {
        caches.push(cache(&*store).await);
        tokio::task::yield_now().await;
    }
    writer.await.expect("the writer does not panic");
    let end = store.list(&actors(), None, 100).await.expect("reads");
    let truth: BTreeMap<Key, Record> = end.records.into_iter().map(|record| (record.key.clone(), record)).collect();
    for (mut cache, mut watch, mut at) in caches {
        while at < end.revision {
            let event = next(&mut watch).await;
            assert!(event.revision > at, "revision {} was shown again after {at}", event.revision);
            at = event.revision;
            for mutation in event.mutations {
                match mutation {
                    Mutation::Put(record) => drop(cache.insert(record.key.clone(), record)),
                    Mutation::Deleted(key) => drop(cache.remove(&key)),
                }
            }
        }
        assert_eq!(cache, truth);
    }
}

async fn cache(store: &dyn Store) -> (BTreeMap<Key, Record>, Watch, Revision) {
    let page = store.list(&actors(), None, 100).await.expect("reads");
    let watch = store.watch(&[actors()], page.revision).await.expect("just listed");
    (page.records.into_iter().map(|record| (record.key.clone(), record)).collect(), watch, page.revision)
}

/// Keeps three commits.
const SMALL: FeedLimits = FeedLimits { events: 3, bytes: usize::MAX };

pub async fn a_watch_from_too_long_ago_is_refused(subject: &dyn Subject) {
    let store = subject.open(SMALL).await;
    for at in 1..=5 {
        put(&*store, "a", &at.to_string()).await;
    }
    subject.forget(&*store).await;
    let refused = store.watch(&[actors()], Revision(1)).await.err();
    assert_eq!(refused, Some(WatchError::Compacted { after: Revision(1), floor: Revision(2) }));
    let mut oldest = store.watch(&[actors()], Revision(2)).await.expect("still kept");
    assert_eq!(next(&mut oldest).await.revision, Revision(3));

    let store = subject.open(FeedLimits { events: usize::MAX, bytes: 3000 }).await;
    for _ in 1..=5 {
        put(&*store, "a", &"x".repeat(1000)).await;
    }
    subject.forget(&*store).await;
    let refused = store.watch(&[actors()], Revision(1)).await.err();
    assert!(matches!(refused, Some(WatchError::Compacted { .. })), "bytes bound the feed too: {refused:?}");
}

pub async fn a_watch_from_the_future_is_refused(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    put(&*store, "a", "1").await;
    let refused = store.watch(&[actors()], Revision(2)).await.err();
    assert_eq!(refused, Some(WatchError::Ahead { after: Revision(2), current: Revision(1) }));
}

pub async fn a_watch_of_a_quiet_prefix_survives_a_busy_neighbour(subject: &dyn Subject) {
    let store = subject.open(SMALL).await;
    let mut quiet = store.watch(&[below("quiet")], Revision::ZERO).await.expect("starts");
    for at in 1..=20 {
        put(&*store, "busy/a", &at.to_string()).await;
        // A reader that is polled keeps its place in the feed, though it has nothing to show.
        assert!(futures::poll!(quiet.next()).is_pending());
    }
    let record = put(&*store, "quiet/a", "1").await;
    assert_eq!(next(&mut quiet).await.mutations, [Mutation::Put(record)]);
}

pub async fn a_slow_watcher_is_ended_and_holds_up_nobody(subject: &dyn Subject) {
    let store = subject.open(SMALL).await;
    let mut slow = store.watch(&[actors()], Revision::ZERO).await.expect("starts");
    put(&*store, "a", "1").await;
    assert_eq!(next(&mut slow).await.revision, Revision(1));
    for at in 2..=10 {
        put(&*store, "a", &at.to_string()).await;
    }
    let ended = slow.next().await.expect("says why it ends");
    assert_eq!(ended, Err(WatchError::Lagged { seen: Revision(1), floor: Revision(7) }));
    assert!(slow.next().await.is_none(), "nothing follows the end");
}

pub async fn a_watch_ends_with_its_store(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    let mut watch = store.watch(&[actors()], Revision::ZERO).await.expect("starts");
    put(&*store, "a", "1").await;
    drop(store);
    assert_eq!(next(&mut watch).await.revision, Revision(1), "what was committed is still shown");
    assert!(watch.next().await.is_none());
}
