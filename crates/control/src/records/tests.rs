use ate_actor::{Event, Start};
use ate_object::{SandboxConfig, WorkerPool};
use ate_store::Revision;
use serde_json::json;

use super::*;
use crate::catalog::{Template, TemplatePhase};

/// Puts a field that this build does not know at each place, has the record read, changed and written again, and tells
/// at which of the places it still is.
fn kept<T>(known: &Value, places: &[&'static str], change: impl FnOnce(&mut T)) -> Vec<&'static str>
where
    T: DeserializeOwned + Serialize + Clone,
{
    let mut stored = known.clone();
    for place in places {
        stored.pointer_mut(place).unwrap_or_else(|| panic!("no {place}"))["fromTheFuture"] = json!({"x": [1]});
    }
    let key = Key::parse(Kind::Meta, "any").unwrap();
    let record = Record { key, version: 1, revision: Revision(1), value: stored.to_string().into_bytes().into() };
    let read = Read::<T>::decode(record).unwrap();
    let mut after = read.value.clone();
    change(&mut after);
    let written: Value = serde_json::from_slice(&read.rewritten(&after)).unwrap();
    // Nothing but the foreign fields differs from what this build alone would have written.
    let mut stripped = written.clone();
    strip(&mut stripped);
    let stripped = serde_json::to_value(serde_json::from_value::<T>(stripped).unwrap()).unwrap();
    let mut own = serde_json::to_value(&after).unwrap();
    strip(&mut own);
    assert_eq!(stripped, own);
    let is_kept =
        |place: &&&str| written.pointer(place).is_some_and(|object| object["fromTheFuture"]["x"] == json!([1]));
    places.iter().filter(is_kept).copied().collect()
}

fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("fromTheFuture");
            fields.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => {}
    }
}

fn lease() -> Value {
    let pod = ObjectKey::new("ns", "w");
    json!({"worker": WorkerUid::from_random([7; 16]), "pod": pod, "pool": pod, "node": "n"})
}

fn snapshot(prefix: &str) -> Value {
    json!({"prefix": prefix, "generation": 1, "scope": "Full", "storedBytes": 1})
}

fn actor() -> Value {
    json!({
        "uid": ActorUid::from_random([1; 16]),
        "key": ActorKey::parse("space", "a").unwrap(),
        "template": ObjectKey::new("ns", "t"),
        "templateUid": TemplateUid::from_random([2; 16]),
        "generation": 1,
        "phase": {"phase": "running", "lease": lease()},
        "snapshots": {"durable": snapshot("s")},
        "sealedKey": "sealed",
        "created": "2026-05-01T10:00:00Z",
    })
}

#[test]
fn what_a_newer_program_wrote_into_an_actor_stays_with_what_it_belongs_to() {
    let places = ["", "/phase", "/phase/lease", "/snapshots", "/snapshots/durable"];
    let label = |actor: &mut Actor| drop(actor.selector.insert("a".into(), "b".into()));
    assert_eq!(kept::<Actor>(&actor(), &places, label), places);
    let apply = |event: Event| move |actor: &mut Actor| *actor = actor.clone().apply(event).unwrap().0;
    // What it said of this phase and of this lease goes with them, what it said of the snapshot does not.
    let lost = kept::<Actor>(&actor(), &places, apply(Event::Lost));
    assert_eq!(lost, ["", "/snapshots", "/snapshots/durable"]);
    let mut resting = actor();
    resting["phase"] = json!({"phase": "suspended"});
    let bind = Event::Bind {
        lease: serde_json::from_value(lease()).unwrap(),
        op: OpId::from_random([3; 16]),
        start: Start::Newest,
    };
    let bound = kept::<Actor>(&resting, &["", "/phase", "/snapshots/durable"], apply(bind));
    assert_eq!(bound, ["", "/snapshots/durable"]);
    let mut saved = actor();
    saved["snapshots"]["local"] = json!([snapshot("t"), "n"]);
    let uploaded = apply(Event::Uploaded { prefix: "t".into() });
    let places = ["", "/phase", "/snapshots", "/snapshots/durable", "/snapshots/local/0"];
    assert_eq!(kept::<Actor>(&saved, &places, uploaded), ["", "/phase", "/snapshots/local/0"]);
}

#[test]
fn what_a_newer_program_wrote_into_a_worker_stays() {
    let assignee = json!({
        "key": ActorKey::parse("space", "a").unwrap(), "uid": ActorUid::from_random([1; 16]),
        "generation": 1, "template": ObjectKey::new("ns", "t"),
    });
    let worker = json!({"lease": lease(), "ingress": "/w", "assigned": assignee});
    let free = |worker: &mut WorkerRecord| worker.assigned = None;
    assert_eq!(kept(&worker, &["", "/lease", "/assigned"], free), ["", "/lease"]);
}

#[test]
fn what_a_newer_program_wrote_into_an_operation_stays() {
    let forget = json!({"forget": {"prefixes": ["a"]}});
    let operation = json!({
        "op": OpId::from_random([3; 16]), "job": forget, "owner": ReplicaId::from_random([4; 16]),
        "started": "2026-05-01T10:00:00Z", "takenOver": 0,
    });
    let take_over = |operation: &mut OperationRecord| operation.taken_over += 1;
    assert_eq!(kept(&operation, &["", "/job/forget"], take_over), ["", "/job/forget"]);
}

#[test]
fn what_a_newer_program_wrote_into_the_smaller_records_stays() {
    let node = json!({"session": SessionId::from_random([5; 16]), "beat": 1, "endpoint": "e"});
    assert_eq!(kept(&node, &[""], |node: &mut NodeRecord| node.beat += 1), [""]);
    assert_eq!(kept(&json!({"beat": 1}), &[""], |replica: &mut ReplicaRecord| replica.beat += 1), [""]);
    let rename = |space: &mut AtespaceRecord| space.name = AtespaceName::parse("other").unwrap();
    assert_eq!(kept(&json!({"name": "space"}), &[""], rename), [""]);
    // Written once and never again; it is read all the same.
    let entry = json!({"time": "2026-05-01T10:00:00Z", "event": "Created", "generation": 0, "fromTheFuture": 1});
    assert_eq!(serde_json::from_value::<HistoryEntry>(entry).unwrap().event, "Created");
}

#[test]
fn what_a_newer_program_wrote_into_the_catalog_stays_until_another_object_is_applied() {
    let spec = json!({
        "containers": [{"name": "main", "image": "i"}],
        "snapshotsConfig": {"location": "gs://a/b"},
    });
    let object = json!({"metadata": {"name": "t", "namespace": "ns"}, "spec": spec});
    let template = json!({
        "uid": TemplateUid::from_random([2; 16]), "created": "2026-05-01T10:00:00Z", "object": object,
        "status": {"phase": "Pending", "golden": snapshot("g")},
    });
    let places =
        ["", "/object", "/object/metadata", "/object/spec", "/object/spec/containers/0", "/status", "/status/golden"];
    let ready = |template: &mut Template| template.status.phase = TemplatePhase::Ready;
    let expected: Vec<_> = places.into_iter().filter(|place| *place != "/status").collect();
    assert_eq!(kept(&template, &places, ready), expected, "an older replica sets the status");

    let pool = json!({"metadata": {"name": "p", "namespace": "ns"}, "spec": {"replicas": 1}});
    let places = ["", "/metadata", "/spec"];
    assert_eq!(kept(&pool, &places, |_: &mut WorkerPool| {}), places, "applied again as it is");
    assert_eq!(kept(&pool, &places, |pool: &mut WorkerPool| pool.spec.replicas = 2), ["", "/metadata"]);
    let config = json!({"metadata": {"name": "c"}, "spec": {"assets": {}}});
    assert_eq!(kept(&config, &places, |_: &mut SandboxConfig| {}), places);
    assert_eq!(kept(&config, &places, |config: &mut SandboxConfig| config.spec.default = true), ["", "/metadata"]);
}

#[test]
fn a_record_that_says_the_same_is_the_same_text() {
    let text = r#"{"metadata":{"name":"p","namespace":"ns"},"spec":{"replicas":1,"fromTheFuture":2}}"#;
    let key = Key::parse(Kind::Pool, "ns/p").unwrap();
    let record = Record { key, version: 1, revision: Revision(1), value: text.into() };
    let read = Read::<WorkerPool>::decode(record).unwrap();
    assert_eq!(read.rewritten(&read.value.clone()), text.as_bytes());
}
