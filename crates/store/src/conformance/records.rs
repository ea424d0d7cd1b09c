use super::{Subject, actor, actors, below, get, key, put};
use crate::{
    Change, CommitError, FeedLimits, Guard, Kind, MAX_CHANGE_BYTES, MAX_CHANGE_ITEMS, MAX_VALUE, Prefix, Revision,
    WatchError,
};

pub async fn a_record_counts_its_writes_and_names_its_commit(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    assert_eq!(store.revision().await, Ok(Revision::ZERO));
    assert_eq!(get(&*store, "demo/a").await, None);
    for write in 1..=3u64 {
        let change = Change::new().put(actor("demo/a"), format!("{write}")).put(actor(&format!("demo/{write}")), "x");
        let committed = store.commit(change).await.expect("no guards");
        assert_eq!((committed.revision, committed.versions), (Revision(write), vec![write, 1]));
        let record = get(&*store, "demo/a").await.expect("written");
        assert_eq!((record.version, record.revision), (write, Revision(write)));
        assert_eq!(record.value, format!("{write}"));
        assert_eq!(store.revision().await, Ok(Revision(write)));
    }
    let untouched = get(&*store, "demo/1").await.expect("written");
    assert_eq!((untouched.version, untouched.revision), (1, Revision(1)));
}

pub async fn a_record_created_again_starts_at_version_one(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    put(&*store, "a", "1").await;
    put(&*store, "a", "2").await;
    store.commit(Change::new().delete(actor("a"))).await.expect("no guards");
    assert_eq!(get(&*store, "a").await, None);
    let again = put(&*store, "a", "3").await;
    assert_eq!((again.version, again.revision), (1, Revision(4)));
}

pub async fn each_guard_refuses_exactly_what_it_names(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    put(&*store, "demo/a", "1").await;
    let record = put(&*store, "demo/a", "2").await;
    let (present, absent) = (actor("demo/a"), actor("demo/b"));
    let cases = [
        (Guard::Version(present.clone(), 2), true),
        (Guard::Version(present.clone(), 1), false),
        (Guard::Version(present.clone(), 3), false),
        (Guard::Version(absent.clone(), 0), false),
        (record.unchanged(), true),
        (Guard::Revision(present.clone(), Revision(1)), false),
        (Guard::Revision(absent.clone(), Revision(2)), false),
        (Guard::Present(present.clone()), true),
        (Guard::Present(absent.clone()), false),
        (Guard::Absent(present.clone()), false),
        (Guard::Absent(absent.clone()), true),
        (Guard::Empty(below("demo")), false),
        (Guard::Empty(actors()), false),
        // Only a text prefix of `demo/a`, and the path of a record itself, which is not below itself.
        (Guard::Empty(below("dem")), true),
        (Guard::Empty(Prefix::below(Kind::Actor, ["demo", "a"]).expect("well formed")), true),
        (Guard::Empty(Prefix::all(Kind::Worker)), true),
    ];
    for (guard, holds) in cases {
        let outcome = store.commit(Change::new().guard(guard.clone())).await;
        match holds {
            true => assert!(outcome.is_ok(), "{guard} should hold: {outcome:?}"),
            false => assert_eq!(outcome, Err(CommitError::Conflict { guard })),
        }
    }
}

pub async fn a_refused_change_writes_nothing(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    let before = put(&*store, "a", "1").await;
    let failing = Guard::Absent(before.key.clone());
    // The guard that fails is the last of three, beside a put, a create and a delete.
    let change = Change::new()
        .guard(before.unchanged())
        .guard(Guard::Absent(actor("b")))
        .guard(failing.clone())
        .put(actor("c"), "x")
        .put(actor("b"), "x")
        .delete(actor("a"));
    assert_eq!(store.commit(change).await, Err(CommitError::Conflict { guard: failing }));
    assert_eq!(get(&*store, "a").await, Some(before));
    assert_eq!((get(&*store, "b").await, get(&*store, "c").await), (None, None));
    assert_eq!(store.revision().await, Ok(Revision(1)), "a refused change takes no revision");
}

pub async fn guards_are_judged_before_the_writes(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    let create = Change::new().guard(Guard::Empty(below("demo"))).create(actor("demo/a"), "1");
    store.commit(create.clone()).await.expect("the prefix is empty before the change");
    assert!(matches!(store.commit(create).await, Err(CommitError::Conflict { guard: Guard::Empty(_) })));
    let delete = Change::new().guard(Guard::Version(actor("demo/a"), 1)).delete(actor("demo/a"));
    store.commit(delete).await.expect("the record exists before the change");
    store.commit(Change::new().guard(Guard::Empty(actors()))).await.expect("the delete emptied the kind");
}

pub async fn an_unchanged_guard_is_not_fooled_by_a_namesake(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    let read = put(&*store, "a", "first").await;
    store.commit(Change::new().delete(actor("a"))).await.expect("no guards");
    let namesake = put(&*store, "a", "second").await;
    assert_eq!(read.version, namesake.version);
    let stale = store.commit(Change::new().replace(&read, "from the first")).await;
    assert_eq!(stale, Err(CommitError::Conflict { guard: read.unchanged() }));
    store.commit(Change::new().replace(&namesake, "from the second")).await.expect("nobody wrote in between");
}

pub async fn a_change_without_writes_only_checks(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    let record = put(&*store, "a", "1").await;
    for change in [Change::new(), Change::new().guard(record.unchanged())] {
        let checked = store.commit(change).await.expect("the guard holds");
        assert_eq!((checked.revision, checked.versions), (Revision(1), vec![]));
    }
    assert_eq!(store.revision().await, Ok(Revision(1)));
}

pub async fn a_change_beyond_the_limits_is_refused(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    let puts = |count: usize, size: usize| {
        (0..count).fold(Change::new(), |change, at| change.put(actor(&format!("a/{at:03}")), vec![b'x'; size]))
    };
    let guards = |count| (0..count).fold(Change::new(), |change, _| change.guard(Guard::Absent(actor("none"))));
    let largest = MAX_CHANGE_BYTES / MAX_VALUE;
    for fits in [puts(MAX_CHANGE_ITEMS, 1), puts(largest, MAX_VALUE), guards(MAX_CHANGE_ITEMS)] {
        store.commit(fits).await.expect("exactly at the limit");
    }
    let revision = store.revision().await;
    let one_more = [
        puts(MAX_CHANGE_ITEMS + 1, 1),
        puts(1, MAX_VALUE + 1),
        puts(largest, MAX_VALUE).put(actor("b"), "x"),
        guards(MAX_CHANGE_ITEMS + 1),
    ];
    for change in one_more {
        assert!(matches!(store.commit(change).await, Err(CommitError::TooLarge { .. })));
    }
    let twice = store.commit(Change::new().put(actor("b"), "x").delete(actor("b"))).await;
    assert_eq!(twice, Err(CommitError::WrittenTwice { key: actor("b") }));
    assert_eq!((get(&*store, "b").await, store.revision().await), (None, revision));
}

pub async fn deleting_what_is_absent_is_no_error_and_no_event(subject: &dyn Subject) {
    use futures::StreamExt;
    let store = subject.open(FeedLimits::default()).await;
    let mut watch = store.watch(&[actors()], Revision::ZERO).await.expect("nothing is compacted yet");
    store.commit(Change::new().delete(actor("a"))).await.expect("no guards");
    let record = put(&*store, "b", "1").await;
    let first = watch.next().await.expect("open").expect("not lagging");
    assert_eq!(first.revision, record.revision, "the delete of nothing was shown");
}

pub async fn kinds_do_not_mix(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    let all = Kind::ALL.into_iter().fold(Change::new(), |change, kind| change.put(key(kind, "same"), kind.name()));
    store.commit(all).await.expect("different keys");
    for kind in Kind::ALL {
        let page = store.list(&Prefix::all(kind), None, 10).await.expect("reads");
        assert_eq!(page.records.len(), 1, "{kind}");
        assert_eq!((&page.records[0].key, &page.records[0].value[..]), (&key(kind, "same"), kind.name().as_bytes()));
    }
}

pub async fn what_was_committed_is_there_after_reopening(subject: &dyn Subject) {
    let store = subject.open(FeedLimits::default()).await;
    put(&*store, "a", "1").await;
    let kept = put(&*store, "a", "2").await;
    put(&*store, "b", "1").await;
    store.commit(Change::new().delete(actor("b"))).await.expect("no guards");
    let Some(store) = subject.reopen(store).await else { return };
    assert_eq!(get(&*store, "a").await, Some(kept.clone()));
    assert_eq!(get(&*store, "b").await, None);
    assert_eq!(store.revision().await, Ok(Revision(4)));
    subject.forget(&*store).await;
    let refused = store.watch(&[actors()], Revision(3)).await.err();
    assert_eq!(refused, Some(WatchError::Compacted { after: Revision(3), floor: Revision(4) }));
    drop(store.watch(&[actors()], Revision(4)).await.expect("nothing has happened since"));
    let next = store.commit(Change::new().replace(&kept, "3")).await.expect("unchanged over the reopening");
    assert_eq!((next.revision, next.versions), (Revision(5), vec![3]), "revisions go on where they were");
}
