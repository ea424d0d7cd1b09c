use ate_name::{ActorKey, ActorUid, Generation, NodeName, ObjectKey, OpId, TemplateUid, WorkerUid};
use proptest::prelude::*;

use super::*;
use crate::{Found, Scope, Start, Status};

fn actor() -> Actor {
    Actor::new(
        ActorUid::from_random([1; 16]),
        ActorKey::parse("space", "a").unwrap(),
        ObjectKey::new("ns", "t"),
        TemplateUid::from_random([2; 16]),
        String::new(),
        jiff::Timestamp::UNIX_EPOCH,
    )
}

fn op(n: u8) -> OpId {
    OpId::from_random([n; 16])
}

fn lease(n: u8) -> Lease {
    Lease {
        worker: WorkerUid::from_random([n; 16]),
        pod: ObjectKey::new("ns", format!("w{n}")),
        pool: ObjectKey::new("ns", "pool"),
        node: NodeName::new(format!("n{}", n % 2)),
    }
}

fn snapshot(n: u8) -> SnapshotRef {
    SnapshotRef {
        prefix: format!("s{n}"),
        manifest: None,
        generation: Generation::new(u64::from(n)),
        scope: Scope::Full,
        stored_bytes: 0,
    }
}

fn walk(actor: Actor, events: impl IntoIterator<Item = Event>) -> Actor {
    events.into_iter().fold(actor, |actor, event| {
        let before = format!("{:?} + {event:?}", actor.phase);
        actor.apply(event).unwrap_or_else(|_| panic!("refused: {before}")).0
    })
}

fn running() -> Actor {
    walk(actor(), [Event::Bind { lease: lease(1), op: op(1), start: Start::Newest }, Event::Started { op: op(1) }])
}

#[test]
fn a_suspend_becomes_the_base_of_the_next_resume() {
    let actor = walk(
        running(),
        [
            Event::Save { op: op(2), intent: Intent::Suspend, snapshot: snapshot(1) },
            Event::Captured { op: op(2) },
            Event::Stored { op: op(2), snapshot: snapshot(1), durable: true },
        ],
    );
    assert_eq!(actor.phase.status(), Status::Suspended);
    assert_eq!(actor.snapshots.base(), Some((&snapshot(1), None)));
}

#[test]
fn a_local_snapshot_binds_to_its_node_until_it_is_uploaded() {
    let saved = walk(
        running(),
        [
            Event::Save { op: op(2), intent: Intent::Idle, snapshot: snapshot(1) },
            Event::Captured { op: op(2) },
            Event::Stored { op: op(2), snapshot: snapshot(1), durable: false },
        ],
    );
    assert_eq!(saved.snapshots.base(), Some((&snapshot(1), Some(&NodeName::new("n1")))));
    let uploaded = walk(saved.clone(), [Event::Uploaded { prefix: "s1".into() }]);
    assert_eq!(uploaded.snapshots.base(), Some((&snapshot(1), None)));
    assert_eq!(saved.clone().apply(Event::Uploaded { prefix: "s0".into() }), Err(Refused), "an upload of the past");
    let fallen_back = walk(saved, [Event::LocalLost { node: NodeName::new("n1") }]);
    assert_eq!(fallen_back.snapshots.base(), None);
}

#[test]
fn a_pause_ends_paused_also_where_the_disk_is_all_the_durable_storage_there_is() {
    for durable in [false, true] {
        let paused = walk(
            running(),
            [
                Event::Save { op: op(2), intent: Intent::Pause, snapshot: snapshot(1) },
                Event::Captured { op: op(2) },
                Event::Stored { op: op(2), snapshot: snapshot(1), durable },
            ],
        );
        assert_eq!((paused.phase.status(), paused.snapshots.uploading), (Status::Paused, (!durable).then_some(op(2))));
        let safe = walk(paused.clone(), (!durable).then(|| Event::Uploaded { prefix: "s1".into() }));
        assert_eq!((safe.phase.status(), safe.snapshots.base()), (Status::Paused, Some((&snapshot(1), None))));
        let elsewhere = walk(safe, [Event::LocalLost { node: NodeName::new("n1") }]);
        assert_eq!(elsewhere.snapshots.base(), Some((&snapshot(1), None)), "it goes on without its node");
    }
}

#[test]
fn a_save_that_failed_changes_nothing() {
    let before = running();
    let after = walk(
        before.clone(),
        [Event::Save { op: op(2), intent: Intent::Suspend, snapshot: snapshot(1) }, Event::Kept { op: op(2) }],
    );
    assert_eq!(before, after);
}

#[test]
fn a_failed_start_stays_visible_without_holding_a_worker() {
    let (failed, effects) = actor()
        .apply(Event::Bind { lease: lease(1), op: op(1), start: Start::Newest })
        .unwrap()
        .0
        .apply(Event::Failed { op: op(1), reason: "no".into(), crashed: None })
        .unwrap();
    assert_eq!(failed.phase.status(), Status::Resuming);
    assert_eq!(failed.lease(), None);
    assert_eq!(effects, [Effect::FreeWorker(lease(1))]);
    assert_eq!(walk(failed, [Event::GaveUp { op: op(1) }]).phase, Phase::Suspended);
}

#[test]
fn a_restart_is_wished_for_until_a_wake_has_fulfilled_it() {
    let bind = |n| Event::Bind { lease: lease(n), op: op(n), start: Start::Newest };
    let start = |actor: &Actor| match &actor.phase {
        Phase::Resuming { start, .. } => Some(*start),
        _ => None,
    };
    let wished = walk(running(), [Event::Restart, Event::Lost, bind(2)]);
    assert_eq!((start(&wished), wished.fresh), (Some(Start::Fresh), true));
    // A wake that fails has not fulfilled it; the next one does.
    let failed = walk(wished, [Event::Failed { op: op(2), reason: "no".into(), crashed: None }, bind(3)]);
    assert_eq!((start(&failed), failed.fresh), (Some(Start::Fresh), true));
    let done = walk(failed, [Event::Started { op: op(3) }]);
    assert!(!done.fresh);
    assert_eq!(start(&walk(done, [Event::Lost, bind(4)])), Some(Start::Newest));
    // What was on its way before the wish does not fulfil it.
    let late = walk(actor(), [bind(1), Event::Restart, Event::Started { op: op(1) }]);
    assert!(late.fresh);
    assert!(!serde_json::to_string(&actor()).unwrap().contains("fresh"), "nothing is written that is not wished for");
}

#[test]
fn crashes_in_a_row_are_counted_until_a_snapshot_or_a_restart() {
    let crash =
        |second| Event::Crashed { at: jiff::Timestamp::from_second(second).unwrap(), reason: format!("exit {second}") };
    let wake = |n| [Event::Bind { lease: lease(n), op: op(n), start: Start::Newest }, Event::Started { op: op(n) }];
    let (once, effects) = running().apply(crash(1)).unwrap();
    assert_eq!((once.phase.status(), effects), (Status::Suspended, vec![Effect::FreeWorker(lease(1))]));
    let twice = walk(walk(once, wake(2)), [crash(2)]);
    let crashes = twice.crashes.clone().unwrap();
    assert_eq!((crashes.count, crashes.reason.as_str()), (2, "exit 2"));
    assert_eq!(twice.clone().apply(crash(3)), Err(Refused), "nothing runs that could");
    assert_eq!(walk(twice.clone(), [Event::Restart]).crashes, None);
    let lost = walk(walk(twice, wake(3)), [Event::Lost]);
    assert_eq!(lost.crashes.clone().map(|crashes| crashes.count), Some(2), "the loss of a worker says nothing");
    let failed = |crashed| Event::Failed { op: op(3), reason: "not ready".into(), crashed };
    let bound = walk(lost.clone(), [wake(3)[0].clone()]);
    let counted = |event| walk(bound.clone(), [event]).crashes.map(|crashes| (crashes.count, crashes.reason));
    assert_eq!(counted(failed(Some(jiff::Timestamp::UNIX_EPOCH))), Some((3, "not ready".into())), "at its start, too");
    assert_eq!(counted(failed(None)), Some((2, "exit 2".into())), "what the node could not do says nothing");
    let saved = walk(
        walk(lost, wake(4)),
        [
            Event::Save { op: op(5), intent: Intent::Idle, snapshot: snapshot(1) },
            Event::Captured { op: op(5) },
            Event::Stored { op: op(5), snapshot: snapshot(1), durable: false },
        ],
    );
    assert_eq!(saved.crashes, None);
}

#[test]
fn news_of_another_operation_is_refused() {
    let resuming = walk(actor(), [Event::Bind { lease: lease(1), op: op(1), start: Start::Newest }]);
    for late in [Event::Started { op: op(9) }, Event::Failed { op: op(9), reason: String::new(), crashed: None }] {
        assert_eq!(resuming.clone().apply(late), Err(Refused));
    }
    let suspending = walk(running(), [Event::Save { op: op(2), intent: Intent::Suspend, snapshot: snapshot(1) }]);
    for late in [Event::Captured { op: op(9) }, Event::Kept { op: op(9) }, Event::Started { op: op(1) }] {
        assert_eq!(suspending.clone().apply(late), Err(Refused));
    }
    // Lost meanwhile: what the old worker still says no longer fits.
    let lost = walk(suspending, [Event::Lost]);
    assert_eq!(lost.apply(Event::Captured { op: op(2) }), Err(Refused));
}

#[test]
fn a_restored_actor_holds_no_worker_and_is_past_every_generation_of_before() {
    let past = Generation::new(1000);
    let resuming = walk(actor(), [Event::Bind { lease: lease(1), op: op(1), start: Start::Newest }]);
    let suspending = walk(running(), [Event::Save { op: op(2), intent: Intent::Pause, snapshot: snapshot(1) }]);
    for before in [resuming, running(), suspending.clone()] {
        let (after, effects) = before.apply(Event::Restored { past }).unwrap();
        assert_eq!((after.phase, after.generation), (Phase::Suspended, past));
        assert_eq!(effects, [Effect::FreeWorker(lease(1))]);
    }
    let saving = walk(suspending, [Event::Captured { op: op(2) }]);
    let restored = walk(saving.clone(), [Event::Restored { past }]);
    assert_eq!((&restored.phase, restored.generation), (&saving.phase, past), "its image may still be there");
    let paused = walk(restored, [Event::Stored { op: op(2), snapshot: snapshot(1), durable: false }]);
    let again = walk(paused, [Event::Restored { past }]);
    assert_eq!((again.phase, again.generation), (Phase::Paused, past.next()), "never the same generation twice");
}

fn found(n: u8, on: Option<&str>) -> Found {
    Found { snapshot: snapshot(n), on: on.map(NodeName::new) }
}

#[test]
fn an_actor_of_a_backup_is_not_woken_before_it_has_caught_up() {
    let stored = [
        Event::Save { op: op(2), intent: Intent::Pause, snapshot: snapshot(1) },
        Event::Captured { op: op(2) },
        Event::Stored { op: op(2), snapshot: snapshot(1), durable: false },
    ];
    let paused = walk(running(), stored);
    let bind = Event::Bind { lease: lease(2), op: op(3), start: Start::Newest };
    assert_eq!(paused.clone().apply(Event::CaughtUp { more: None }), Err(Refused), "it is not behind");
    let behind = walk(paused, [Event::Restored { past: Generation::new(1000) }]);
    assert_eq!(behind.clone().apply(bind.clone()), Err(Refused));
    assert_eq!(behind.pending().collect::<Vec<_>>(), [op(2)], "its upload");

    let same = walk(behind.clone(), [Event::CaughtUp { more: None }, bind.clone()]);
    assert_eq!(same.snapshots, behind.snapshots);
    let more = behind.snapshots.caught_up(&[found(3, Some("n1")), found(2, None)], op(4));
    let caught_up = walk(behind, [Event::CaughtUp { more }]);
    assert_eq!((&caught_up.phase, caught_up.behind), (&Phase::Suspended, None));
    assert_eq!(caught_up.snapshots.base(), Some((&snapshot(3), Some(&NodeName::new("n1")))));
    assert_eq!(caught_up.pending().collect::<Vec<_>>(), [op(4)], "it is brought to durable storage");
    assert_eq!(walk(caught_up, [bind]).generation, Generation::new(1001));
}

#[test]
fn a_restart_that_was_done_after_the_backup_is_not_done_again() {
    let wished = [Event::Restart, Event::Restored { past: Generation::new(1000) }];
    let behind = walk(running(), wished);
    assert_eq!(behind.behind, Some(Generation::new(1)));
    for (newest, fresh) in [(1, true), (2, false)] {
        let more = behind.snapshots.caught_up(&[found(newest, None)], op(4));
        let caught_up =
            walk(behind.clone(), [Event::Restored { past: Generation::new(2000) }, Event::CaughtUp { more }]);
        assert_eq!(caught_up.fresh, fresh, "saved at {newest}");
    }
    assert!(walk(behind, [Event::CaughtUp { more: None }]).fresh);
    // The wake that starts it anew was under way.
    let begun = [Event::Restart, Event::Lost, Event::Bind { lease: lease(1), op: op(3), start: Start::Newest }];
    let behind = walk(running(), begun.into_iter().chain([Event::Restored { past: Generation::new(1000) }]));
    let more = behind.snapshots.caught_up(&[found(2, None)], op(4));
    assert!(behind.fresh && !walk(behind, [Event::CaughtUp { more }]).fresh);
    // It was wished for while another wake was under way, and is for the next one.
    let begun = [Event::Lost, Event::Bind { lease: lease(1), op: op(3), start: Start::Newest }, Event::Restart];
    let behind = walk(running(), begun.into_iter().chain([Event::Restored { past: Generation::new(1000) }]));
    let more = behind.snapshots.caught_up(&[found(2, None)], op(4));
    assert!(walk(behind, [Event::CaughtUp { more }]).fresh);
}

#[test]
fn what_was_found_counts_only_if_it_is_more_than_what_is_known() {
    let known = Snapshots { durable: Some(snapshot(2)), ..Snapshots::default() };
    for found in [vec![], vec![found(2, None)], vec![found(1, None)], vec![found(1, None), found(2, None)]] {
        assert_eq!(known.caught_up(&found, op(1)), None, "{found:?}");
    }
    // In storage only; also on a disk; on a disk only; and the newest of two disks.
    let local = |n, node| Some((snapshot(n), NodeName::new(node)));
    let durable = |n| Some(snapshot(n));
    for (found, expected) in [
        (vec![found(3, None), found(2, None)], Snapshots { durable: durable(3), ..Snapshots::default() }),
        (
            vec![found(3, Some("n1")), found(3, None)],
            Snapshots { local: local(3, "n1"), durable: durable(3), ..Snapshots::default() },
        ),
        (
            vec![found(4, Some("n0")), found(3, None), found(2, Some("n1"))],
            Snapshots { local: local(4, "n0"), durable: durable(3), uploading: Some(op(1)), paused: false },
        ),
        (
            vec![found(5, Some("n0")), found(6, Some("n1"))],
            Snapshots { local: local(6, "n1"), durable: durable(2), uploading: Some(op(1)), paused: false },
        ),
    ] {
        assert_eq!(known.caught_up(&found, op(1)), Some(expected), "{found:?}");
    }
    // Known, and durable by now; its disk may be gone.
    let uploading = Snapshots { local: local(2, "n1"), durable: durable(1), uploading: Some(op(7)), paused: true };
    assert_eq!(uploading.caught_up(&[found(2, Some("n1")), found(1, None)], op(1)), None);
    let by_now = Snapshots { local: local(2, "n1"), durable: durable(2), uploading: None, paused: true };
    assert_eq!(uploading.caught_up(&[found(2, Some("n0")), found(2, Some("n1")), found(2, None)], op(1)), Some(by_now));
    let elsewhere = Snapshots { local: None, durable: durable(2), uploading: None, paused: true };
    assert_eq!(uploading.caught_up(&[found(2, None)], op(1)), Some(elsewhere));
    let never_saved = Snapshots::default().caught_up(&[found(1, None)], op(1)).unwrap();
    assert_eq!(never_saved, Snapshots { durable: durable(1), ..Snapshots::default() });
}

fn any_event() -> impl Strategy<Value = Event> {
    let intent = prop_oneof![Just(Intent::Suspend), Just(Intent::Pause), Just(Intent::Idle)];
    prop_oneof![
        (0..4u8, 0..4u8).prop_map(|(l, o)| Event::Bind { lease: lease(l), op: op(o), start: Start::Newest }),
        (0..4u8).prop_map(|o| Event::Started { op: op(o) }),
        (0..4u8).prop_map(|o| Event::Failed { op: op(o), reason: "x".into(), crashed: None }),
        (0..4u8).prop_map(|o| Event::GaveUp { op: op(o) }),
        (0..4u8, intent, 0..4u8).prop_map(|(o, intent, s)| Event::Save { op: op(o), intent, snapshot: snapshot(s) }),
        (0..4u8).prop_map(|o| Event::Kept { op: op(o) }),
        (0..4u8).prop_map(|o| Event::Captured { op: op(o) }),
        (0..4u8, 0..4u8, any::<bool>()).prop_map(|(o, s, durable)| Event::Stored {
            op: op(o),
            snapshot: snapshot(s),
            durable
        }),
        (0..4u8).prop_map(|s| Event::Uploaded { prefix: format!("s{s}") }),
        Just(Event::Lost),
        Just(Event::Restart),
        (0..4i64).prop_map(|second| Event::Crashed {
            at: jiff::Timestamp::from_second(second).unwrap(),
            reason: "x".into()
        }),
        (0..2u8).prop_map(|n| Event::LocalLost { node: NodeName::new(format!("n{n}")) }),
        (0..99u64).prop_map(|past| Event::Restored { past: Generation::new(past) }),
        Just(Event::CaughtUp { more: None }),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_workers_are_claimed_and_freed_in_turn(events in prop::collection::vec(any_event(), 0..60)) {
        let mut actor = actor();
        let mut held: Option<Lease> = None;
        for event in events {
            let before = actor.clone();
            let Ok((after, effects)) = actor.clone().apply(event.clone()) else { continue };
            for effect in effects {
                match effect {
                    Effect::ClaimWorker(lease) => { prop_assert!(held.is_none(), "two workers at once"); held = Some(lease); }
                    Effect::FreeWorker(lease) => { prop_assert_eq!(held.take(), Some(lease)); }
                }
            }
            prop_assert_eq!(after.lease(), held.as_ref());
            prop_assert!(after.shows(&event, before.generation), "{:?} does not show in {:?}", event, after.phase);
            prop_assert_eq!(after.generation, match event {
                Event::Bind { .. } => before.generation.next(),
                Event::Restored { past } => past.max(before.generation.next()),
                _ => before.generation,
            });
            // Nothing but the loss of a node takes a snapshot away.
            if !matches!(event, Event::LocalLost { .. }) && before.snapshots.durable.is_some() {
                prop_assert!(after.snapshots.durable.is_some());
            }
            actor = after;
        }
    }
}
