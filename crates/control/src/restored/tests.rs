use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use ate_actor::{Intent, Lease, Scope, SnapshotRef, Start};
use ate_name::{ActorUid, NodeName, ObjectKey, OpId, TemplateUid, WorkerUid};
use ate_orders::{
    Activate, Activated, Capture, Captured, ExecOrder, Exit, Findings, ForgetOrder, Hosted, Identity, LogsOrder,
    NodeError, NodeReport, Nodes, Output, SearchOrder, SnapshotOrder, Stored, WorkerReport,
};
use ate_store::{Change, Key, MemoryStore, Store};
use tokio::sync::mpsc;

use super::*;
use crate::records::{actor_key, made_from_key, node_key, replica_key, worker_key};
use crate::{Control, Keys, Settings, World};

fn op(n: u8) -> OpId {
    OpId::from_random([n; 16])
}

fn lease() -> Lease {
    Lease {
        worker: WorkerUid::from_random([7; 16]),
        pod: ObjectKey::new("ns", "w"),
        pool: ObjectKey::new("ns", "pool"),
        node: NodeName::new("n"),
    }
}

fn snapshot(prefix: &str) -> SnapshotRef {
    SnapshotRef {
        prefix: prefix.to_owned(),
        manifest: None,
        generation: Generation::new(1),
        scope: Scope::Full,
        stored_bytes: 1,
    }
}

fn actor(name: &str, events: impl IntoIterator<Item = Event>) -> Actor {
    let key = ActorKey::parse("space", name).unwrap();
    let uid = ActorUid::from_random([name.as_bytes()[0]; 16]);
    let template = TemplateUid::from_random([2; 16]);
    let actor = Actor::new(uid, key, ObjectKey::new("ns", "t"), template, "sealed".into(), Timestamp::UNIX_EPOCH);
    events.into_iter().fold(actor, |actor, event| actor.apply(event).expect("fits").0)
}

fn bind() -> Event {
    Event::Bind { lease: lease(), op: op(1), start: Start::Newest }
}

fn save(intent: Intent) -> Event {
    Event::Save { op: op(2), intent, snapshot: snapshot("s") }
}

fn record(key: Key, version: u64, value: Vec<u8>) -> Record {
    Record { key, version, revision: Revision(40), value: value.into() }
}

fn of(actor: &Actor, version: u64) -> Record {
    record(actor_key(&actor.key), version, encode(actor))
}

const BACKUP: &str = "2026-05-01T10:00:00Z";

fn restoring() -> Restoring {
    Restoring::new(BACKUP.parse().unwrap(), Revision(41), "2026-05-01T12:00:00Z".parse().unwrap()).unwrap()
}

fn put(mutation: &Mutation) -> &Record {
    match mutation {
        Mutation::Put(record) => record,
        Mutation::Deleted(key) => panic!("{key} is deleted"),
    }
}

fn restored(actor: &Actor) -> (Actor, Vec<Mutation>) {
    let mut written = restoring().take(of(actor, 3)).unwrap();
    let after = serde_json::from_slice(&put(&written[0]).value).unwrap();
    written.remove(0);
    (after, written)
}

#[test]
fn whoever_held_a_worker_falls_back_and_its_history_says_why() {
    for events in [vec![bind()], vec![bind(), Event::Started { op: op(1) }]] {
        let before = actor("a", events);
        let mut restoring = restoring();
        let written = restoring.take(of(&before, 3)).unwrap();
        let after: Actor = serde_json::from_slice(&put(&written[0]).value).unwrap();
        assert_eq!((&after.phase, after.lease()), (&Phase::Suspended, None));
        assert_eq!((put(&written[0]).version, put(&written[0]).revision), (4, restoring.revision()));
        let entry: HistoryEntry = serde_json::from_slice(&put(&written[1]).value).unwrap();
        assert_eq!(put(&written[1]).key, history_key(before.uid, 4));
        assert!(entry.detail.contains("restored from a backup of 2026-05-01T10:00:00Z"), "{}", entry.detail);
        assert_eq!((entry.worker, entry.generation), (Some(lease().pod), after.generation));
        assert_eq!(restoring.summary().fell_back.first, [before.key]);
    }
}

#[test]
fn operations_that_held_a_worker_end_and_those_that_a_node_can_answer_go_on() {
    let ends = |(_, written): (Actor, Vec<Mutation>)| {
        let ended = |mutation| matches!(mutation, Mutation::Deleted(key) if key.kind() == Kind::Operation);
        written.into_iter().filter(|mutation| ended(mutation.clone())).count()
    };
    let running = || vec![bind(), Event::Started { op: op(1) }];
    let captured = || running().into_iter().chain([save(Intent::Suspend), Event::Captured { op: op(2) }]);
    let stored = Event::Stored { op: op(2), snapshot: snapshot("s"), durable: false };
    assert_eq!(ends(restored(&actor("a", [bind()]))), 1);
    assert_eq!(ends(restored(&actor("a", running().into_iter().chain([save(Intent::Idle)])))), 1);
    let (saving, written) = restored(&actor("a", captured()));
    assert!(matches!(saving.phase, Phase::Saving { op: saving, .. } if saving == op(2)));
    assert_eq!(ends((saving, written)), 0);
    let (uploading, written) = restored(&actor("a", captured().chain([stored.clone()])));
    assert_eq!((&uploading.phase, uploading.snapshots.uploading), (&Phase::Suspended, Some(op(2))));
    assert_eq!(ends((uploading, written)), 0);
    // Woken while it was uploaded: the wake ends, the upload goes on.
    let again = Event::Bind { lease: lease(), op: op(3), start: Start::Newest };
    let (woken, written) = restored(&actor("a", captured().chain([stored, again])));
    assert_eq!(woken.snapshots.uploading, Some(op(2)));
    assert_eq!(written.last(), Some(&Mutation::Deleted(operation_key(op(3)))));
}

#[test]
fn workers_and_replicas_go_and_everything_else_stays_as_it_was() {
    let mut restoring = restoring();
    let gone = [worker_key(lease().worker), replica_key(ate_name::ReplicaId::from_random([1; 16]))];
    for key in gone {
        assert_eq!(restoring.take(record(key, 1, Vec::new())).unwrap(), []);
    }
    for key in [node_key(&NodeName::new("n")), operation_key(op(9)), history_key(ActorUid::from_random([1; 16]), 5)] {
        let record = record(key, 6, b"{}".to_vec());
        assert_eq!(restoring.take(record.clone()).unwrap(), [Mutation::Put(record)], "version and revision too");
    }
    assert_eq!(restoring.summary().dropped.to_string(), "1 worker, 1 replica");
}

#[test]
fn what_atespaces_use_is_counted_anew() {
    let mut restoring = restoring();
    let space = AtespaceName::parse("space").unwrap();
    let wrong = Usage { actors: 7, running: 7, snapshot_bytes: 7 };
    for (key, count) in wrong.counts(&space) {
        assert_eq!(restoring.take(record(key, 3, count.to_string().into())).unwrap(), []);
    }
    let running = actor("a", [bind(), Event::Started { op: op(1) }]);
    let stored = Event::Stored { op: op(2), snapshot: snapshot("s"), durable: true };
    let asleep = actor(
        "b",
        [bind(), Event::Started { op: op(1) }, save(Intent::Suspend), Event::Captured { op: op(2) }, stored],
    );
    for actor in [&running, &asleep] {
        restoring.take(of(actor, 3)).unwrap();
    }
    let written = restoring.finish();
    let counted: Vec<_> = written.iter().map(put).map(|record| (record.key.clone(), record.value.to_vec())).collect();
    let right = Usage { actors: 2, running: 0, snapshot_bytes: 1 };
    assert_eq!(
        counted,
        right.counts(&space).map(|(key, count)| (key, count.to_string().into_bytes())).collect::<Vec<_>>()
    );
}

#[test]
fn history_stays_within_its_bound() {
    let actor = actor("a", []);
    let written = restoring().take(of(&actor, HISTORY_KEPT + 4)).unwrap();
    assert_eq!(written[2], Mutation::Deleted(history_key(actor.uid, 5)));
}

#[test]
fn numbers_are_past_all_that_were_given_out_also_by_an_earlier_restore_of_the_same_backup() {
    let (backup, first) = (BACKUP.parse().unwrap(), "2026-05-01T12:00:00Z".parse::<Timestamp>().unwrap());
    let at = |now| {
        let mut restoring = Restoring::new(backup, Revision(41), now).unwrap();
        let written = restoring.take(of(&actor("a", []), 1)).unwrap();
        let after: Actor = serde_json::from_slice(&put(&written[0]).value).unwrap();
        (after.generation.get(), restoring.revision().0)
    };
    let (generation, revision) = at(first);
    let (again, onwards) = at(first + jiff::SignedDuration::from_secs(1));
    // As many as a second holds, and still below.
    assert_eq!((again - generation, onwards - revision), (MOST_IN_A_SECOND, MOST_IN_A_SECOND));
    assert!(again < 1 << 53, "readers of JSON count to this");
    let behind = Restoring::new(backup, Revision(41), Timestamp::UNIX_EPOCH).unwrap_err().to_string();
    assert!(behind.contains("1970") && behind.contains("set the clock right"), "{behind}");
}

/// As after a restore by a machine whose clock was ahead: neither its backups nor what it left know all that was given out since.
#[test]
fn numbers_never_go_back_whatever_the_clock_says() {
    let (backup, now) = (BACKUP.parse().unwrap(), "2026-05-01T12:00:00Z".parse::<Timestamp>().unwrap());
    let clock = restoring().revision();
    let ahead = Revision(clock.0 + 7);
    let past_both = Revision(ahead.0 + MOST_UNKNOWN);
    assert_eq!(restoring().past(Revision(clock.0 - 1)).revision(), clock, "the clock is past it");
    for mut restoring in [Restoring::new(backup, ahead, now).unwrap(), restoring().past(ahead)] {
        assert_eq!(restoring.revision(), past_both);
        let written = restoring.take(of(&actor("a", []), 1)).unwrap();
        let after: Actor = serde_json::from_slice(&put(&written[0]).value).unwrap();
        assert_eq!(after.generation.get(), past_both.0, "generations as revisions");
    }
    assert_eq!(restoring().past(clock).revision(), Revision(clock.0 + MOST_UNKNOWN), "the same number is not past it");
}

#[test]
fn an_actor_that_cannot_be_read_ends_the_restore_or_is_left_out_with_all_that_is_its_own() {
    let (kept, key) = (actor("b", []), ActorKey::parse("space", "a").unwrap());
    let lost = ActorUid::from_random([9; 16]);
    let newer = record(actor_key(&key), 1, encode(&serde_json::json!({"uid": lost, "phase": "of the future"})));
    let refused = restoring().take(newer.clone()).unwrap_err();
    assert!(refused.to_string().starts_with("actor/space/a cannot be read: "), "{refused}");
    assert_eq!(Unreadable::of(&newer), Some(refused.clone()));
    assert_eq!(Unreadable::of(&of(&kept, 1)), None);
    let made_from = |key: &ActorKey| record(made_from_key(kept.template_uid, key), 1, Vec::new());
    let past = |uid: ActorUid| record(history_key(uid, 1), 1, b"{}".to_vec());
    let mut restoring = restoring().without(&[refused]);
    for gone in [made_from(&key), past(lost), newer] {
        assert_eq!(restoring.take(gone).unwrap(), []);
    }
    for stays in [made_from(&kept.key), past(kept.uid)] {
        assert_eq!(restoring.take(stays.clone()).unwrap(), [Mutation::Put(stays)]);
    }
    assert!(!restoring.take(of(&kept, 1)).unwrap().is_empty());
    assert_eq!(restoring.summary().dropped.to_string(), "1 actor, 1 history, 1 meta");
    // What is no JSON at all has no uid; another that cannot be read is not left out unasked.
    let garbage = record(actor_key(&key), 1, b"{".to_vec());
    assert!(Unreadable::of(&garbage).is_some_and(|garbage| garbage.uid.is_none()));
    assert!(restoring.take(record(actor_key(&ActorKey::parse("space", "c").unwrap()), 1, b"{".to_vec())).is_err());
}

/// A node that runs what the store has forgotten.
#[derive(Default)]
struct Forgotten {
    hosted: Vec<Identity>,
    discarded: Mutex<Vec<(ActorUid, Generation)>>,
    /// The orders to store an image that it still has.
    stored: Mutex<Vec<SnapshotOrder>>,
}

#[derive(Default)]
struct Nothing(AtomicU8);

impl World for Nothing {
    fn now(&self) -> Timestamp {
        Timestamp::UNIX_EPOCH
    }

    fn random(&self) -> [u8; 16] {
        [100 + self.0.fetch_add(1, Ordering::Relaxed); 16]
    }
}

impl Keys for Nothing {
    fn sealed(&self, _: ActorUid) -> String {
        String::new()
    }
}

#[async_trait::async_trait]
impl Nodes for Forgotten {
    async fn report(&self, _: &NodeName) -> Result<NodeReport, NodeError> {
        let workers = self.hosted.iter().map(|identity| WorkerReport {
            worker: WorkerUid::from_random(*identity.uid.as_bytes()),
            pool: ObjectKey::new("ns", "pool"),
            pod: "w".to_owned(),
            ingress: ate_orders::Ingress::Socket(PathBuf::new()),
            hosted: Some(Hosted {
                identity: identity.clone(),
                frozen: false,
                idle: Default::default(),
                memory_bytes: 0,
            }),
            warm: Vec::new(),
        });
        Ok(NodeReport { workers: workers.collect(), ..Default::default() })
    }

    async fn discard(
        &self,
        _: &NodeName,
        _: WorkerUid,
        actor: ActorUid,
        generation: Generation,
    ) -> Result<(), NodeError> {
        self.discarded.lock().unwrap().push((actor, generation));
        Ok(())
    }

    async fn activate(&self, _: &NodeName, _: Activate) -> Result<Activated, NodeError> {
        Err(NodeError::WorkerGone)
    }
    async fn capture(&self, _: &NodeName, _: Capture) -> Result<Captured, NodeError> {
        Err(NodeError::WorkerGone)
    }
    async fn abort(&self, _: &NodeName, _: WorkerUid, _: OpId) -> Result<(), NodeError> {
        Ok(())
    }
    async fn store(&self, _: &NodeName, order: SnapshotOrder) -> Result<Stored, NodeError> {
        self.stored.lock().unwrap().push(order);
        Ok(Stored { manifest: ate_name::Digest::from_bytes([1; 32]), bytes: 5, durable: true })
    }
    async fn release(&self, _: &NodeName, _: OpId) -> Result<(), NodeError> {
        Ok(())
    }
    async fn copy(&self, _: &NodeName, _: ate_orders::CopyOrder) -> Result<Stored, NodeError> {
        Err(NodeError::WorkerGone)
    }
    async fn upload(&self, _: &NodeName, _: &str) -> Result<(), NodeError> {
        Ok(())
    }
    async fn exec(
        &self,
        _: &NodeName,
        _: ExecOrder,
        _: mpsc::Receiver<Vec<u8>>,
        _: mpsc::Sender<Output>,
    ) -> Result<Exit, NodeError> {
        Err(NodeError::WorkerGone)
    }
    async fn logs(&self, _: &NodeName, _: ActorUid, _: LogsOrder, _: mpsc::Sender<String>) -> Result<(), NodeError> {
        Ok(())
    }
    async fn search(&self, _: &NodeName, _: SearchOrder) -> Result<Findings, NodeError> {
        Ok(Findings::default())
    }
    async fn forget(&self, _: &NodeName, _: ForgetOrder) -> Result<(), NodeError> {
        Ok(())
    }
}

fn control(store: Arc<MemoryStore>, nodes: Arc<Forgotten>) -> Arc<Control> {
    Control::new(store, nodes, Arc::<Nothing>::default(), Arc::<Nothing>::default(), Settings::default())
}

async fn load(store: &MemoryStore, mutations: Vec<Mutation>) {
    for mutation in mutations {
        let Mutation::Put(record) = mutation else { continue };
        store.commit(Change::new().put(record.key, record.value)).await.unwrap();
    }
}

/// After the backup `a` was woken a thousand times, `b` still runs as it did, and `c` did not exist yet: to the restored
/// store all of them are of the past.
#[tokio::test]
async fn a_sandbox_from_before_the_restore_is_ended_whatever_its_generation() {
    let (sleeping, running) = (actor("a", []), actor("b", [bind(), Event::Started { op: op(1) }]));
    let store = Arc::new(MemoryStore::default());
    let mut restoring = restoring();
    for before in [&sleeping, &running] {
        load(&store, restoring.take(of(before, 1)).unwrap()).await;
    }
    let out_there = |actor: &Actor, generation| Identity {
        uid: actor.uid,
        key: actor.key.clone(),
        template: actor.template.clone(),
        generation,
    };
    let later = Generation::new(sleeping.generation.get() + 1000);
    let nodes = Arc::new(Forgotten {
        hosted: vec![
            out_there(&sleeping, later),
            out_there(&running, running.generation),
            out_there(&actor("c", []), Generation::new(1)),
        ],
        ..Default::default()
    });
    let control = control(store, nodes.clone());
    control.start().await.unwrap();
    assert!(control.reconcile(&NodeName::new("n")).await.unwrap());
    let ended: BTreeMap<_, _> = nodes.discarded.lock().unwrap().iter().copied().collect();
    let expected = [(sleeping.uid, later), (running.uid, running.generation), (actor("c", []).uid, Generation::new(1))];
    assert_eq!(ended, BTreeMap::from(expected));
    // And what they may still say of themselves changes nothing.
    for before in [&sleeping, &running] {
        let now = control.actor(&before.key).await.unwrap().value;
        control.lost(&before.key, later, "old news").await.unwrap();
        assert_eq!(control.actor(&before.key).await.unwrap().value, now);
        assert!(now.generation > later);
    }
    for (worker, _) in control.list_workers().await.unwrap() {
        assert_eq!(worker.assigned, None, "nobody has a right to be there");
    }
    control.stop().await;
}

/// The image is of the assignment that it was captured in, whatever the actor's generation is by now.
#[tokio::test]
async fn a_save_that_was_under_way_is_brought_to_its_end() {
    let saving = [bind(), Event::Started { op: op(1) }, save(Intent::Suspend), Event::Captured { op: op(2) }];
    let before = actor("a", saving);
    let store = Arc::new(MemoryStore::default());
    let operation = crate::records::OperationRecord {
        op: op(2),
        job: crate::records::Job::Actor(before.key.clone()),
        owner: ate_name::ReplicaId::from_random([1; 16]),
        started: Timestamp::UNIX_EPOCH,
        taken_over: 0,
    };
    let template = serde_json::json!({
        "uid": before.template_uid, "created": Timestamp::UNIX_EPOCH, "status": {"phase": "Ready"},
        "object": {"metadata": {"name": "t", "namespace": "ns"}, "spec": {"snapshotsConfig": {"location": "gs://a/b"}}},
    });
    let mut restoring = restoring();
    for record in [
        record(crate::records::object_key(Kind::Template, &before.template), 1, encode(&template)),
        record(operation_key(op(2)), 1, encode(&operation)),
        of(&before, 5),
    ] {
        load(&store, restoring.take(record).unwrap()).await;
    }
    let nodes = Arc::new(Forgotten::default());
    let control = control(store.clone(), nodes.clone());
    control.start().await.unwrap();
    control.start_controllers();
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(60);
    let after = control.settled(&before.key, deadline).await.unwrap().actor;
    assert_eq!((&after.phase, after.generation), (&Phase::Suspended, Generation::new(restoring.past)));
    assert_eq!(after.snapshots.durable.map(|durable| durable.prefix), Some("s".to_owned()));
    let order = nodes.stored.lock().unwrap()[0].clone();
    assert_eq!((order.op, order.identity.generation), (op(2), snapshot("s").generation));
    assert_eq!(store.get(&operation_key(op(2))).await.unwrap(), None, "nothing is left to be done");
    control.stop().await;
}

#[test]
fn what_a_newer_program_wrote_is_still_there() {
    let mut value = serde_json::to_value(actor("a", [bind(), Event::Started { op: op(1) }])).unwrap();
    value["fromTheFuture"] = 1.into();
    let record = record(actor_key(&ActorKey::parse("space", "a").unwrap()), 1, value.to_string().into_bytes());
    let written = restoring().take(record).unwrap();
    let after: serde_json::Value = serde_json::from_slice(&put(&written[0]).value).unwrap();
    assert_eq!(after["fromTheFuture"], 1);
}

/// What the backup shows as under way may have been done, and the fork have lived, before it was restored.
#[test]
fn a_fork_that_was_under_way_gets_no_generation_twice() {
    let from = actor("a", []);
    let snapshot = SnapshotRef {
        prefix: "gs://a/b".into(),
        generation: Generation::new(3),
        ..serde_json::from_value(serde_json::json!({"prefix": "", "generation": 0, "scope": "Full", "storedBytes": 1}))
            .unwrap()
    };
    let fork = crate::records::Fork {
        from: from.key.clone(),
        from_uid: from.uid,
        from_key: "sealed".into(),
        source: snapshot,
        node: NodeName::new("n"),
        to: ActorKey::parse("space", "b").unwrap(),
        uid: ActorUid::from_random([8; 16]),
        sealed_key: "sealed".into(),
        template: from.template.clone(),
        template_uid: from.template_uid,
        selector: Default::default(),
        past: Generation::NONE,
    };
    let operation = crate::records::OperationRecord {
        op: op(3),
        job: crate::records::Job::Fork(Box::new(fork)),
        owner: ate_name::ReplicaId::from_random([1; 16]),
        started: Timestamp::UNIX_EPOCH,
        taken_over: 0,
    };
    let written = restoring().take(record(operation_key(op(3)), 1, encode(&operation))).unwrap();
    let restored: crate::records::OperationRecord = serde_json::from_slice(&put(&written[0]).value).unwrap();
    let crate::records::Job::Fork(fork) = restored.job else { panic!("it is still to be made") };
    let restored = restoring().take(of(&from, 1)).unwrap();
    let other: Actor = serde_json::from_slice(&put(&restored[0]).value).unwrap();
    assert_eq!(fork.past, other.generation, "as far as everybody else");
}

#[test]
fn a_node_is_told_of_more_beats_than_it_can_have_been_told_of_before() {
    let before =
        serde_json::json!({"session": ate_name::SessionId::from_random([3; 16]), "beat": 7, "endpoint": "n:1"});
    let node = record(node_key(&NodeName::new("n")), 3, encode(&before));
    let mut restoring = restoring();
    let written = restoring.take(node).unwrap();
    let after: NodeRecord = serde_json::from_slice(&put(&written[0]).value).unwrap();
    assert_eq!((after.beat, after.endpoint.as_str()), (restoring.past, "n:1"));
}
