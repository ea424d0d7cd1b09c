//! What a hand in the store would write, past every replica.

use std::collections::BTreeMap;

use ate_actor::{Actor, Event};
use ate_control::{Assignee, NodeRecord, Template, TemplateStatus, WorkerRecord};
use ate_name::{ActorKey, ActorUid, Generation, TemplateUid};
use ate_orders::Ingress;
use ate_store::{Change, Key, Kind, Record, Store};

use super::Stage;
use crate::clients::SPACE;
use crate::store::UNREADABLE;

impl Stage {
    /// Writes, as a hand in the store would, that a free worker is some actor's that was never there.
    pub async fn assign_a_worker_to_nobody(&self) {
        let records = self.simulation.store.all(Kind::Worker).await;
        let workers = records.into_iter().map(|record| {
            let worker: WorkerRecord = serde_json::from_slice(&record.value).expect("a worker");
            (record, worker)
        });
        let (record, free) = workers.into_iter().find(|(_, worker)| worker.assigned.is_none()).expect("one is free");
        let nobody = Assignee {
            key: ActorKey::parse(SPACE, "nobody").expect("a name"),
            uid: ActorUid::from_random([7; 16]),
            generation: Generation::new(1),
            template: self.actor().await.expect("it is there").template,
        };
        let assigned = WorkerRecord { assigned: Some(nobody), ..free };
        let value = serde_json::to_vec(&assigned).expect("a worker is JSON");
        let change = Change::new().replace(&record, value);
        self.simulation.store.memory.commit(change).await.expect("memory does not fail");
    }

    /// Writes, as a replica would whose commit was late and who is gone, that the wake under way has failed.
    pub async fn fail_its_wake(&self) {
        let store = &self.simulation.store;
        let parsed = |record: Record| (serde_json::from_slice::<Actor>(&record.value).expect("an actor"), record);
        let actors = store.all(Kind::Actor).await.into_iter().map(parsed);
        let (actor, record) = actors.into_iter().find(|(actor, _)| actor.key == self.actor).expect("it is there");
        let op = actor.phase.operation().expect("it is being woken");
        let failed = Event::Failed { op, reason: "simulated".to_owned(), crashed: None };
        let (failed, _) = actor.apply(failed).expect("it is being woken");
        let parsed =
            |record: Record| (serde_json::from_slice::<WorkerRecord>(&record.value).expect("a worker"), record);
        let workers = store.all(Kind::Worker).await.into_iter().map(parsed);
        let its = |worker: &WorkerRecord| worker.assigned.as_ref().is_some_and(|by| by.key == self.actor);
        let (worker, held) = workers.into_iter().find(|(worker, _)| its(worker)).expect("it has one");
        let freed = WorkerRecord { assigned: None, ..worker };
        let json = |value: serde_json::Result<Vec<u8>>| value.expect("records are JSON");
        let change = Change::new()
            .replace(&record, json(serde_json::to_vec(&failed)))
            .replace(&held, json(serde_json::to_vec(&freed)))
            .add(Key::parse(Kind::Count, &format!("{SPACE}/running")).expect("a number"), -1);
        store.memory.commit(change).await.expect("memory does not fail");
    }

    /// Writes records that no replica can read, as a newer build might, or takes them away again.
    pub async fn write_what_nobody_can_read(&self, there: bool) {
        let worker = ate_name::WorkerUid::from_random([9; 16]).to_string();
        for (kind, path) in [
            (Kind::Pool, "sim/of-another-time"),
            (Kind::Worker, &worker),
            (Kind::Actor, "space/of-another-time"),
            (Kind::Replica, "of-another-time"),
        ] {
            let key = Key::parse(kind, path).expect("a key");
            let change = if there { Change::new().put(key, UNREADABLE) } else { Change::new().delete(key) };
            self.simulation.store.memory.commit(change).await.expect("memory does not fail");
        }
        self.sleep(5).await;
    }

    /// Writes over a record of whoever is in the first worker of the actor's node what nobody can read. Gives back what it was, and
    /// who else is there.
    pub async fn damage_the_first_beside_it(&self) -> (Record, Vec<ActorKey>) {
        let node = self.node().await;
        let store = &self.simulation.store;
        let here = store.workers().await.into_iter().filter(|worker| worker.lease.node == node);
        let mut here: Vec<_> = here.filter_map(|worker| Some((worker.lease.worker, worker.assigned?.key))).collect();
        here.sort();
        let mut keys = here.into_iter().map(|(_, key)| key);
        let first = keys.next().expect("the actor is there");
        let path = format!("{}/{}", first.atespace, first.name);
        let record = store.all(Kind::Actor).await.into_iter().find(|record| record.key.path() == path);
        let record = record.expect("it is there");
        store.memory.commit(Change::new().put(record.key.clone(), UNREADABLE)).await.expect("memory does not fail");
        (record, keys.collect())
    }

    pub async fn mend(&self, record: Record) {
        let change = Change::new().put(record.key, record.value);
        self.simulation.store.memory.commit(change).await.expect("memory does not fail");
    }

    /// Writes records of nodes that have been here, and are gone.
    pub async fn bury_nodes(&self, many: usize) {
        let records = self.simulation.store.all(Kind::Node).await;
        let node: NodeRecord = serde_json::from_slice(&records[0].value).expect("a node");
        let gone = serde_json::to_vec(&NodeRecord { given_up: true, ..node }).expect("a node is JSON");
        for index in 0..many {
            let key = Key::parse(Kind::Node, &format!("gone-{index}")).expect("a key");
            let change = Change::new().put(key, gone.clone());
            self.simulation.store.memory.commit(change).await.expect("memory does not fail");
        }
    }

    /// Writes that the actor's worker is reached where nobody is, as of a node that has another address since.
    pub async fn misplace_its_worker(&self) {
        let lease = self.actor().await.expect("it is there").lease().expect("it is in a worker").clone();
        let records = self.simulation.store.all(Kind::Worker).await;
        let record = records.into_iter().find(|record| record.key.path() == lease.worker.to_string());
        let record = record.expect("it is there");
        let worker: WorkerRecord = serde_json::from_slice(&record.value).expect("a worker");
        let value = serde_json::to_vec(&WorkerRecord { ingress: Ingress::Socket("nowhere".into()), ..worker });
        let change = Change::new().replace(&record, value.expect("a worker is JSON"));
        self.simulation.store.memory.commit(change).await.expect("memory does not fail");
    }

    /// Writes a template as an earlier build would have taken it, whose golden actor cannot be saved.
    pub async fn write_a_template_without_a_place(&self) {
        let record = self.simulation.store.all(Kind::Template).await.into_iter().next().expect("there is one");
        let mut template: Template = serde_json::from_slice(&record.value).expect("a template");
        template.uid = TemplateUid::from_random([8; 16]);
        template.object.metadata.name = "another".to_owned();
        template.object.spec.snapshots_config.location = "nowhere".to_owned();
        template.status = TemplateStatus::default();
        let key = Key::parse(Kind::Template, "sim/another").expect("a key");
        let change = Change::new().put(key, serde_json::to_vec(&template).expect("a template is JSON"));
        self.simulation.store.memory.commit(change).await.expect("memory does not fail");
    }

    fn copied(index: usize) -> Key {
        Key::parse(Kind::Actor, &format!("{SPACE}/copied-{index:05}")).expect("a key")
    }

    /// Writes as many more records of actors, each like the actor's own. To be removed before it comes to rest.
    pub async fn copy_records(&self, many: usize) {
        let actor = self.actor().await.expect("it is there");
        for index in 0..many {
            let name =
                Self::copied(index).path().split_once('/').map(|(_, name)| name.to_owned()).expect("two segments");
            let key = ActorKey::parse(SPACE, &name).expect("a name");
            let copy = serde_json::to_vec(&Actor { key, ..actor.clone() }).expect("an actor is JSON");
            let change = Change::new().put(Self::copied(index), copy);
            self.simulation.store.memory.commit(change).await.expect("memory does not fail");
        }
    }

    /// Writes one of them again.
    pub async fn touch_copy(&self, index: usize) {
        let memory = &self.simulation.store.memory;
        let record = memory.get(&Self::copied(index)).await.expect("memory does not fail").expect("it is there");
        memory.commit(Change::new().put(record.key, record.value)).await.expect("memory does not fail");
    }

    pub async fn remove_copy(&self, index: usize) {
        let change = Change::new().delete(Self::copied(index));
        self.simulation.store.memory.commit(change).await.expect("memory does not fail");
    }

    /// Every actor, and how often its record was written.
    pub async fn versions(&self) -> BTreeMap<ActorKey, u64> {
        let records = self.simulation.store.all(Kind::Actor).await.into_iter();
        let versions = records.map(|record| {
            let actor: Actor = serde_json::from_slice(&record.value).expect("an actor");
            (actor.key, record.version)
        });
        versions.collect()
    }

    /// All feeds of the store end, while it is away for a while, and one more replica comes.
    pub async fn begin_anew(&self) {
        self.store_away(true);
        let key = Key::parse(Kind::Config, "of-another-time").expect("a key");
        // More at once than a feed keeps.
        for _ in 0..200 {
            let change = Change::new().put(key.clone(), "{}");
            self.simulation.store.memory.commit(change).await.expect("memory does not fail");
        }
        let change = Change::new().delete(key);
        self.simulation.store.memory.commit(change).await.expect("memory does not fail");
        self.sleep(5).await;
        self.store_away(false);
        self.simulation.start_replica();
        self.sleep(5).await;
    }

    /// Writes how often nodes were heard, as a store would have it that went back, or was restored.
    pub async fn set_beats(&self, beat: impl Fn(u64) -> u64) {
        for record in self.simulation.store.all(Kind::Node).await {
            let node: NodeRecord = serde_json::from_slice(&record.value).expect("a node");
            let set = NodeRecord { beat: beat(node.beat), ..node };
            let value = serde_json::to_vec(&set).expect("a node is JSON");
            self.simulation
                .store
                .memory
                .commit(Change::new().put(record.key, value))
                .await
                .expect("memory does not fail");
        }
    }
}
