use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::task::JoinSet;

use super::{Subject, actor, actors, get, key, put};
use crate::{Change, CommitError, FeedLimits, Guard, Kind, MAX_PAGE_RECORDS, Prefix, Revision, Store};

fn number(value: &[u8]) -> u64 {
    std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).expect("the suite wrote a number")
}

pub async fn concurrent_increments_lose_no_update(subject: &dyn Subject) {
    const TASKS: usize = 16;
    const EACH: usize = 25;
    const KEYS: usize = 3;
    let store = subject.open(FeedLimits::default()).await;
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let store = store.clone();
        tasks.spawn(async move {
            for at in 0..EACH {
                increment(&*store, &format!("{}", (task + at) % KEYS)).await;
            }
        });
    }
    tasks.join_all().await;
    let mut total = 0;
    for at in 0..KEYS {
        let record = get(&*store, &at.to_string()).await.expect("incremented");
        assert_eq!(number(&record.value), record.version, "each write was one increment");
        total += record.version;
    }
    assert_eq!(total, (TASKS * EACH) as u64);
    assert_eq!(store.revision().await, Ok(Revision((TASKS * EACH) as u64)), "conflicts take no revision");
}

pub async fn what_is_added_at_once_adds_up_and_never_passes_its_limit(subject: &dyn Subject) {
    const TASKS: usize = 1000;
    const LIMIT: u64 = 700;
    let store = subject.open(FeedLimits::default()).await;
    let count = key(Kind::Count, "space/actors");
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (store, count) = (store.clone(), count.clone());
        tasks.spawn(async move {
            let guard = Guard::AtMost(count.clone(), LIMIT - 1);
            let change = Change::new().guard(guard.clone()).create(actor(&format!("{task:04}")), "").add(count, 1);
            match store.commit(change).await {
                Ok(_) => true,
                Err(CommitError::Conflict { guard: refused }) if refused == guard => false,
                Err(other) => panic!("{other}"),
            }
        });
    }
    let done = tasks.join_all().await.into_iter().filter(|done| *done).count();
    assert_eq!(done as u64, LIMIT, "as many as the limit lets in, and not one more");
    let record = store.get(&count).await.expect("reads").expect("it was added to");
    assert_eq!(crate::number(Some(&record)), Ok(LIMIT));
    let made = store.list(&actors(), None, MAX_PAGE_RECORDS).await.expect("lists");
    assert_eq!(made.records.len() as u64, LIMIT, "a change that is refused makes nothing");
}

pub async fn a_number_is_added_to_from_where_it_is_or_from_where_it_should_be(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    let count = key(Kind::Count, "space/wakes");
    let is = async || crate::number(store.get(&count).await.expect("reads").as_ref());
    assert_eq!(is().await, Ok(0), "one that was never added to is zero");
    for (by, from, then) in [(5, 0, 5), (-2, 0, 3), (10, 100, 110), (1, 50, 111), (-500, 0, 0)] {
        store.commit(Change::new().add_from(count.clone(), by, from)).await.expect("no guards");
        assert_eq!(is().await, Ok(then));
    }
    store.commit(Change::new().guard(Guard::AtMost(count.clone(), 0))).await.expect("it is zero");
    store.commit(Change::new().add(count.clone(), 1)).await.expect("no guards");
    let refused = store.commit(Change::new().guard(Guard::AtMost(count.clone(), 0))).await;
    assert_eq!(refused, Err(CommitError::Conflict { guard: Guard::AtMost(count, 0) }));
}

async fn increment(store: &dyn Store, path: &str) {
    loop {
        let change = match get(store, path).await {
            None => Change::new().create(actor(path), "1"),
            Some(record) => Change::new().replace(&record, (number(&record.value) + 1).to_string()),
        };
        match store.commit(change).await {
            Ok(_) => return,
            Err(CommitError::Conflict { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}

pub async fn concurrent_binds_never_share_a_worker(subject: &dyn Subject) {
    const ACTORS: usize = 1000;
    const WORKERS: usize = 300;
    let store = subject.open(FeedLimits::default()).await;
    for first in (0..ACTORS).step_by(200) {
        let all = (first..first + 200).fold(Change::new(), |change, at| change.put(actor(&format!("{at:04}")), ""));
        store.commit(all).await.expect("no guards");
    }
    for first in (0..WORKERS).step_by(100) {
        let all = (first..first + 100)
            .fold(Change::new(), |change, at| change.put(key(Kind::Worker, &format!("{at:04}")), ""));
        store.commit(all).await.expect("no guards");
    }
    let mut tasks = JoinSet::new();
    for at in 0..ACTORS {
        let store = store.clone();
        tasks.spawn(async move { bind(store, at).await });
    }
    let bound = tasks.join_all().await.into_iter().filter(|bound| *bound).count();
    assert_eq!(bound, WORKERS, "every worker found an actor, and no more actors than workers were told they have one");

    let workers = store.list(&Prefix::all(Kind::Worker), None, MAX_PAGE_RECORDS).await.expect("reads").records;
    let actors = store.list(&actors(), None, MAX_PAGE_RECORDS).await.expect("reads").records;
    let by_worker: BTreeMap<_, _> = workers.iter().map(|worker| (worker.key.path(), &worker.value[..])).collect();
    let by_actor: BTreeMap<_, _> = actors
        .iter()
        .filter(|actor| !actor.value.is_empty())
        .map(|actor| (&actor.value[..], actor.key.path()))
        .collect();
    assert_eq!(by_actor.len(), WORKERS, "two actors name one worker");
    for (worker, actor) in by_worker {
        assert_eq!(by_actor[worker.as_bytes()].as_bytes(), actor, "worker {worker} and its actor disagree");
    }
    assert!(workers.iter().all(|worker| worker.version == 2), "a worker was bound twice");
}

/// Claims the first free worker it sees; all begin at the same one, so that nearly all collide.
async fn bind(store: Arc<dyn Store>, at: usize) -> bool {
    let actor = store.get(&actor(&format!("{at:04}"))).await.expect("reads").expect("created");
    let workers = Prefix::all(Kind::Worker);
    let mut from = None;
    loop {
        let page = store.list(&workers, from.as_deref(), 16).await.expect("reads");
        for worker in page.records.iter().filter(|worker| worker.value.is_empty()) {
            let change = Change::new()
                .replace(&actor, worker.key.path().to_owned())
                .replace(worker, actor.key.path().to_owned());
            match store.commit(change).await {
                Ok(_) => return true,
                Err(CommitError::Conflict { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        match page.records.last() {
            Some(last) if page.more => from = Some(last.key.path().to_owned()),
            _ => return false,
        }
    }
}

pub async fn a_dropped_commit_happens_whole_or_not_at_all(subject: &dyn Subject) {
    const COMMITS: usize = 200;
    let store = subject.open(FeedLimits::default()).await;
    for at in 0..COMMITS {
        let pair = Change::new().put(actor(&format!("left/{at}")), "x").put(actor(&format!("right/{at}")), "x");
        let mut commit = Box::pin(store.commit(pair));
        // Polled a little, then dropped: some before the change is on its way, some while it is, some after.
        for _ in 0..at % 4 {
            if futures::poll!(&mut commit).is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
    // Behind all of them in the queue, so what they do is done.
    put(&*store, "end", "x").await;
    let page = store.list(&actors(), None, MAX_PAGE_RECORDS).await.expect("reads");
    let side = |side: &str| -> BTreeSet<&str> {
        page.records.iter().filter_map(|record| record.key.path().strip_prefix(side)).collect()
    };
    assert_eq!(side("left/"), side("right/"));
    assert_eq!(page.revision, Revision(1 + side("left/").len() as u64));
}
