use std::collections::BTreeSet;

use super::{Subject, actor, actors, below, paths, put};
use crate::{Change, FeedLimits, Key, Kind, MAX_PAGE_BYTES, MAX_PAGE_RECORDS, MAX_VALUE, Store};

pub async fn lists_are_ordered_by_path_within_their_prefix(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    // Bytewise: '-' and '.' sort before '/', digits before letters, upper before lower case, é last.
    for path in ["demo/b", "demo/a/1", "demo/a", "demo/a-1", "demo/B", "demo/é", "demo/10", "demo/9", "demo.x/a", "e/a"]
    {
        put(&*store, path, "x").await;
    }
    store.commit(Change::new().put(Key::parse(Kind::Worker, "demo/w").expect("well formed"), "x")).await.expect("put");
    let all = store.list(&actors(), None, 100).await.expect("reads");
    let expected =
        ["demo.x/a", "demo/10", "demo/9", "demo/B", "demo/a", "demo/a-1", "demo/a/1", "demo/b", "demo/é", "e/a"];
    assert_eq!(paths(&all.records), expected);
    assert!(!all.more);
    let demo = store.list(&below("demo"), None, 100).await.expect("reads");
    assert_eq!(paths(&demo.records), expected[1..9]);
    for (after, rest) in [
        ("demo/a-1", &expected[6..9]),
        // Neither a record nor inside the prefix: a page goes on from wherever the last one ended.
        ("demo/aa", &expected[7..9]),
        ("a", &expected[1..9]),
        ("demo/é", &[][..]),
        ("zzz", &[][..]),
    ] {
        let page = store.list(&below("demo"), Some(after), 100).await.expect("reads");
        assert_eq!(paths(&page.records), rest, "after {after}");
    }
}

async fn all_pages(store: &dyn Store, limit: usize, mut between: impl AsyncFnMut()) -> Vec<String> {
    let mut seen = Vec::new();
    loop {
        let page = store.list(&actors(), seen.last().map(String::as_str), limit).await.expect("reads");
        assert!(page.records.len() <= limit);
        seen.extend(page.records.iter().map(|record| record.key.path().to_owned()));
        if !page.more {
            return seen;
        }
        between().await;
    }
}

pub async fn paging_visits_each_stable_record_once_while_others_come_and_go(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    let stable: BTreeSet<String> = (0..200).map(|at| format!("s/{:03}", at * 5)).collect();
    for path in &stable {
        put(&*store, path, "x").await;
    }
    let mut step = 0;
    let seen = all_pages(&*store, 7, async || {
        // Before, at and behind the place where the pages are.
        for at in [step, step * 7, 999 - step] {
            let flicker = actor(&format!("s/{at:03}-flicker"));
            let change = if step % 2 == 0 { Change::new().put(flicker, "x") } else { Change::new().delete(flicker) };
            store.commit(change).await.expect("no guards");
        }
        step += 1;
    })
    .await;
    assert!(seen.is_sorted_by(|one, next| one < next), "a record was shown twice or out of order");
    let seen: BTreeSet<String> = seen.into_iter().filter(|path| !path.ends_with("-flicker")).collect();
    assert_eq!(seen, stable);
}

pub async fn a_page_is_bounded_by_records_and_by_bytes(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    let total = MAX_PAGE_RECORDS + 1;
    for chunk in (0..total).collect::<Vec<_>>().chunks(200) {
        let change = chunk.iter().fold(Change::new(), |change, at| change.put(actor(&format!("n/{at:05}")), "x"));
        store.commit(change).await.expect("no guards");
    }
    for (limit, expected) in [(0, 1), (1, 1), (10, 10), (MAX_PAGE_RECORDS, MAX_PAGE_RECORDS), (usize::MAX, total - 1)] {
        let page = store.list(&actors(), None, limit).await.expect("reads");
        assert_eq!((page.records.len(), page.more), (expected, true), "limit {limit}");
    }
    let exact = store.list(&actors(), Some("n/00000"), MAX_PAGE_RECORDS).await.expect("reads");
    assert_eq!((exact.records.len(), exact.more), (MAX_PAGE_RECORDS, false), "a full last page says so");

    let store = subject.open(FeedLimits::default()).await;
    let large = MAX_PAGE_BYTES / MAX_VALUE;
    for at in 0..large + 2 {
        store.commit(Change::new().put(actor(&format!("{at:02}")), vec![0; MAX_VALUE])).await.expect("no guards");
    }
    let page = store.list(&actors(), None, 100).await.expect("reads");
    assert_eq!((page.records.len(), page.more), (large, true));
    assert_eq!(all_pages(&*store, 100, async || {}).await.len(), large + 2);
}
