use ate_actor::{Event, Lease, Start};
use ate_name::{NodeName, ReplicaId};
use ate_store::Key;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::records::{Forget, encode, history_key, made_from_key, node_key, replica_key};

/// A store in which everything agrees, to be spoilt in one place each.
struct Sound(BTreeMap<Key, Value>);

fn uid() -> ActorUid {
    ActorUid::from_random([1; 16])
}

fn op() -> OpId {
    OpId::from_random([3; 16])
}

fn template() -> TemplateUid {
    TemplateUid::from_random([2; 16])
}

fn key() -> ActorKey {
    ActorKey::parse("space", "a").unwrap()
}

fn lease() -> Lease {
    Lease {
        worker: WorkerUid::from_random([7; 16]),
        pod: ObjectKey::new("ns", "w"),
        pool: ObjectKey::new("ns", "pool"),
        node: NodeName::new("n"),
    }
}

fn operation(op: OpId, job: Job) -> Value {
    let owner = ReplicaId::from_random([5; 16]);
    let started = Timestamp::UNIX_EPOCH;
    let record = OperationRecord { op, job, owner, started, taken_over: 0 };
    serde_json::to_value(record).unwrap()
}

impl Sound {
    fn new() -> Self {
        let actor = Actor::new(uid(), key(), ObjectKey::new("ns", "t"), template(), "".into(), Timestamp::UNIX_EPOCH);
        let (actor, _) = actor.apply(Event::Bind { lease: lease(), op: op(), start: Start::Newest }).unwrap();
        let worker = json!({"lease": lease(), "ingress": "/w", "assigned": Assignee::of(&actor)});
        let template = json!({
            "uid": template(), "created": Timestamp::UNIX_EPOCH, "status": {"phase": "Ready"},
            "object": {"metadata": {"name": "t", "namespace": "ns"}, "spec": {"snapshotsConfig": {"location": "gs://a/b"}}},
        });
        let entry = json!({"time": Timestamp::UNIX_EPOCH, "event": "Created", "generation": 0});
        let going = Forget { gone: Some(ActorUid::from_random([8; 16])), ..Forget::default() };
        let forgetting = OpId::from_random([4; 16]);
        Self(BTreeMap::from([
            (actor_key(&key()), serde_json::to_value(actor).unwrap()),
            (worker_key(lease().worker), worker),
            (atespace_key(&key().atespace), json!({"name": "space"})),
            (operation_key(op()), operation(op(), Job::Actor(key()))),
            (operation_key(forgetting), operation(forgetting, Job::Forget(going))),
            (object_key(Kind::Template, &ObjectKey::new("ns", "t")), template),
            (
                object_key(Kind::Pool, &ObjectKey::new("ns", "p")),
                json!({"metadata": {"name": "p", "namespace": "ns"}, "spec": {"replicas": 1}}),
            ),
            (
                object_key(Kind::Config, &ObjectKey::new("", "c")),
                json!({"metadata": {"name": "c"}, "spec": {"assets": {}}}),
            ),
            (history_key(uid(), 1), entry.clone()),
            (history_key(ActorUid::from_random([8; 16]), 1), entry),
            (node_key(&NodeName::new("n")), json!({"session": uid(), "beat": 1, "endpoint": "e"})),
            (replica_key(ReplicaId::from_random([5; 16])), json!({"beat": 1})),
            (made_from_key(self::template(), &key()), json!(null)),
            (Key::parse(Kind::Count, "space/actors").unwrap(), json!(1)),
            (Key::parse(Kind::Count, "space/running").unwrap(), json!(1)),
            (Key::parse(Kind::Meta, "what/ever").unwrap(), json!("of the future")),
        ]))
    }

    fn findings(&self) -> Vec<Finding> {
        let mut check = Check::new(Revision(9));
        for (key, value) in &self.0 {
            let value = if key.path().starts_with("made-from") { Vec::new() } else { encode(value) };
            let record = Record { key: key.clone(), version: 1, revision: Revision(9), value: value.into() };
            check.take(&Entry::Record(record));
        }
        check.finish().findings
    }
}

/// What is found when the store is spoilt this way. What refers to the spoilt thing may be found as well.
fn found(spoil: impl FnOnce(&mut BTreeMap<Key, Value>)) -> String {
    let mut store = Sound::new();
    spoil(&mut store.0);
    let findings = store.findings();
    assert!(findings.iter().all(|finding| !finding.remedy.is_empty() && !finding.object.is_empty()), "{findings:?}");
    findings.iter().map(|finding| format!("{}: {}\n", finding.object, finding.wrong)).collect()
}

#[test]
fn a_sound_store_has_no_findings() {
    assert_eq!(Sound::new().findings(), []);
}

#[test]
fn each_thing_that_does_not_agree_is_found_and_named() {
    let actor = actor_key(&key());
    let rest = |store: &mut BTreeMap<Key, Value>| {
        let actor = store.get_mut(&actor_key(&key())).unwrap();
        actor["phase"] = json!({"phase": "suspended"});
    };
    let cases: [(&str, String); 15] = [
        ("cannot be read", found(|store| drop(store.insert(operation_key(op()), json!({"op": 1}))))),
        ("calls itself", found(|store| store.get_mut(&actor).unwrap()["key"]["name"] = json!("b"))),
        ("does not hold it", found(|store| store.get_mut(&actor).unwrap()["generation"] = json!(2))),
        (
            "which is not its own",
            found(|store| store.get_mut(&worker_key(lease().worker)).unwrap()["assigned"] = json!(null)),
        ),
        ("it would never end", found(|store| drop(store.remove(&operation_key(op()))))),
        ("nothing of it is left", {
            found(|store| {
                rest(store);
                store.remove(&worker_key(lease().worker));
            })
        }),
        ("which does not hold it", {
            found(|store| {
                rest(store);
                store.remove(&operation_key(op()));
            })
        }),
        ("its atespace space does not exist", found(|store| drop(store.remove(&atespace_key(&key().atespace))))),
        ("does not exist", found(|store| drop(store.remove(&object_key(Kind::Template, &ObjectKey::new("ns", "t")))))),
        ("no record keeps its template", found(|store| drop(store.remove(&made_from_key(template(), &key()))))),
        ("was made from template", {
            let other = ActorKey::parse("space", "other").unwrap();
            found(|store| drop(store.insert(made_from_key(template(), &other), json!(null))))
        }),
        ("its actor is gone, and nothing will remove it", {
            found(|store| drop(store.remove(&operation_key(OpId::from_random([4; 16])))))
        }),
        ("its quota does not hold", {
            found(|store| drop(store.insert(Key::parse(Kind::Count, "space/actors").unwrap(), json!(2))))
        }),
        ("is not a number", {
            found(|store| drop(store.insert(Key::parse(Kind::Count, "space/actors").unwrap(), json!("many"))))
        }),
        ("no key of an actor's history", {
            let entry = json!({"time": Timestamp::UNIX_EPOCH, "event": "Created", "generation": 0});
            found(|store| drop(store.insert(Key::parse(Kind::History, "x/1").unwrap(), entry)))
        }),
    ];
    for (expected, found) in cases {
        assert!(found.contains(expected), "{found:?} does not say {expected:?}");
    }
}

#[test]
fn foreign_entries_and_records_of_the_future_are_found() {
    let mut check = Check::new(Revision(1));
    check.take(&Entry::Foreign { key: "gateway/x".into(), reason: "no kind".into() });
    let value = encode(&json!({"name": "space"})).into();
    let key = atespace_key(&key().atespace);
    check.take(&Entry::Record(Record { key, version: 1, revision: Revision(2), value }));
    let objects: Vec<_> = check.finish().findings.into_iter().map(|finding| finding.object).collect();
    assert_eq!(objects, ["gateway/x", "atespace/space"]);
}

#[test]
fn findings_without_end_are_counted() {
    let mut check = Check::new(Revision(1));
    for n in 0..KEPT + 5 {
        check.take(&Entry::Foreign { key: n.to_string(), reason: String::new() });
    }
    let found = check.finish();
    assert_eq!((found.findings.len(), found.more), (KEPT, 5));
}
