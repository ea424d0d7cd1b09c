//! The store as one replica reaches it: over a network that loses answers, and not at all once the replica is dead.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use ate_actor::{Actor, Lease, Phase};
use ate_control::{Check, Finding, HistoryEntry, NodeRecord, Quota, Template, WorkerRecord};
use ate_name::{ActorKey, ActorUid, Generation, NodeName};
use ate_orders::NODE_SERVES_FOR;
use ate_store::{
    Change, CommitError, Committed, Contents, Entry, Fault, FeedLimits, Key, Kind, MemoryStore, Mutation, Page, Prefix,
    Record, Revision, Store, Watch, WatchError, Write, number,
};
use futures::StreamExt as _;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::clients::SPACE;
use crate::cluster::Cluster;
use crate::process::Process;
use crate::world::{World, short};

/// What a hand writes that nobody can read, as a record of a newer build, or damage.
pub(crate) const UNREADABLE: &str = "{}";

/// The store itself, and what must hold after every commit.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) memory: MemoryStore,
    world: Arc<World>,
    /// Nobody is answered.
    pub(crate) away: Mutex<bool>,
    generations: Mutex<BTreeMap<String, Generation>>,
    /// Of each actor whose newest snapshot is on one disk only: its prefix, and whose disk.
    only_copies: Mutex<BTreeMap<String, (String, NodeName)>>,
    /// What may not be passed.
    pub(crate) quota: Mutex<Quota>,
    /// How often it was restored. What is on its way to what was there before never arrives.
    restored: AtomicU64,
    /// And when last.
    restored_at: Mutex<Option<Instant>>,
    /// Who was deleted before, and is back: its snapshots may be gone.
    pub(crate) zombies: Mutex<BTreeSet<ActorUid>>,
}

impl Shared {
    pub(crate) fn new(world: Arc<World>) -> Arc<Self> {
        Arc::new(Self {
            // Small, so that replicas fall behind now and then.
            memory: MemoryStore::new(FeedLimits { events: 64, bytes: 1 << 20 }),
            world,
            away: Mutex::new(false),
            generations: Mutex::default(),
            only_copies: Mutex::default(),
            quota: Mutex::default(),
            restored: AtomicU64::new(0),
            restored_at: Mutex::default(),
            zombies: Mutex::default(),
        })
    }

    pub(crate) async fn get<T: serde::de::DeserializeOwned>(&self, key: &Key) -> Option<T> {
        let record = self.memory.get(key).await.ok().flatten()?;
        serde_json::from_slice(&record.value).ok()
    }

    pub(crate) async fn actor(&self, key: &ActorKey) -> Option<Actor> {
        self.get(&Key::new(Kind::Actor, [key.atespace.as_str(), key.name.as_str()]).expect("names are segments")).await
    }

    /// Every snapshot that some actor or template stands on.
    pub(crate) async fn referred(&self) -> BTreeSet<String> {
        let actors = self.actors().await;
        let own = actors.iter().flat_map(|actor| actor.references().map(|snapshot| snapshot.prefix.clone()));
        let mut referred: BTreeSet<String> = own.collect();
        // What an actor has is a difference to its template's golden, whatever has become of the actor that was made from.
        let templates = self.all(Kind::Template).await;
        referred.extend(templates.iter().filter_map(|record| golden_of(&record.value)));
        referred
    }

    /// What `ate store check` would say.
    pub(crate) async fn findings(&self) -> Vec<Finding> {
        let mut check = Check::new(self.memory.revision().await.expect("memory does not fail"));
        for kind in Kind::ALL {
            self.all(kind).await.into_iter().for_each(|record| check.take(&Entry::Record(record)));
        }
        check.finish().findings
    }

    pub(crate) async fn all(&self, kind: Kind) -> Vec<Record> {
        let (mut records, mut after) = (Vec::new(), None::<String>);
        loop {
            let page =
                self.memory.list(&Prefix::all(kind), after.as_deref(), 1000).await.expect("memory does not fail");
            after = page.records.last().map(|record| record.key.path().to_owned());
            records.extend(page.records);
            if !page.more {
                return records;
            }
        }
    }

    pub(crate) async fn actors(&self) -> Vec<Actor> {
        let records = self.all(Kind::Actor).await;
        let readable = records.iter().filter(|record| record.value != UNREADABLE);
        readable.map(|record| serde_json::from_slice(&record.value).expect("an actor")).collect()
    }

    pub(crate) async fn workers(&self) -> Vec<WorkerRecord> {
        let records = self.all(Kind::Worker).await;
        records.iter().map(|record| serde_json::from_slice(&record.value).expect("a worker")).collect()
    }

    /// What was written of an actor, oldest first, and with which version of its record.
    pub(crate) async fn history(&self, uid: ActorUid) -> Vec<(u64, HistoryEntry)> {
        let prefix = Prefix::below(Kind::History, [uid.to_string()]).expect("a uid is a segment");
        let page = self.memory.list(&prefix, None, 1000).await.expect("memory does not fail");
        let entry = |record: &Record| {
            let version = record.key.segments().last().and_then(|version| version.parse().ok()).expect("a version");
            (version, serde_json::from_slice(&record.value).expect("an entry"))
        };
        page.records.iter().map(entry).collect()
    }

    /// Whether sandboxes of before that may still serve: nobody has told their nodes yet, and nobody else runs.
    pub(crate) fn is_just_restored(&self) -> bool {
        self.restored_at.lock().is_some_and(|at| at.elapsed() <= NODE_SERVES_FOR)
    }

    /// Everything in it.
    pub(crate) async fn contents(&self) -> Vec<Record> {
        let mut records = Vec::new();
        for kind in Contents::ORDER {
            records.extend(self.all(kind).await);
        }
        records
    }

    /// What is in it becomes this.
    pub(crate) fn replace(&self, revision: Revision, mutations: &[Mutation]) {
        self.restored.fetch_add(1, Relaxed);
        *self.restored_at.lock() = Some(Instant::now());
        self.only_copies.lock().clear();
        for mutation in mutations {
            if let Mutation::Put(record) = mutation
                && record.key.kind() == Kind::Actor
            {
                let actor: Actor = serde_json::from_slice(&record.value).expect("an actor");
                self.generations.lock().insert(actor.uid.to_string(), actor.generation);
            }
        }
        self.memory.replace(revision, mutations);
    }

    pub(crate) async fn commit(&self, cluster: &Cluster, change: Change) -> Result<Committed, CommitError> {
        let writes = change.writes.clone();
        let committed = self.memory.commit(change).await?;
        self.check_quota(&writes).await;
        for write in &writes {
            let (key, value) = match write {
                Write::Put(key, value) => (key, value),
                Write::Delete(key) => {
                    self.check_deleted(key).await;
                    continue;
                }
                Write::Add { .. } => continue,
            };
            match key.kind() {
                Kind::Actor => self.check_actor(cluster, &serde_json::from_slice(value).expect("an actor")).await,
                Kind::Worker => self.check_worker(&serde_json::from_slice(value).expect("a worker")).await,
                Kind::History => {
                    let entry: HistoryEntry = serde_json::from_slice(value).expect("an entry");
                    if !entry.detail.is_empty() {
                        self.world.say(format_args!("  because: {} ({})", entry.detail, entry.event));
                    }
                }
                _ => {}
            }
        }
        Ok(committed)
    }

    /// What counts is what there is: the numbers that the control plane keeps are its own.
    async fn check_quota(&self, writes: &[Write]) {
        let quota = *self.quota.lock();
        let put: Vec<Actor> = writes
            .iter()
            .filter_map(|write| match write {
                Write::Put(key, value) if key.kind() == Kind::Actor => serde_json::from_slice(value).ok(),
                _ => None,
            })
            .filter(is_limited)
            .collect();
        if put.is_empty() || quota.is_unlimited() {
            return;
        }
        let actors = self.actors().await;
        let (mut count, mut running, mut bytes) = (0, 0, 0);
        for actor in actors.iter().filter(|actor| is_limited(actor)) {
            count += 1;
            running += u64::from(actor.lease().is_some());
            bytes += snapshot_bytes(actor);
        }
        let passed = |most: Option<u64>, count: u64| most.is_some_and(|most| count > most);
        if passed(quota.actors, count) || passed(quota.running, running) {
            self.world.broken(format!("a quota is passed: {count} actors, {running} of them running"));
        }
        let known = |actor: &Actor| self.generations.lock().get(&actor.uid.to_string()).copied();
        let bound = |actor: &Actor| matches!(actor.phase, Phase::Resuming { lease: Some(_), .. });
        let wakes = put.iter().any(|actor| bound(actor) && known(actor).is_some_and(|known| known < actor.generation));
        let forked = put.iter().any(|actor| known(actor).is_none() && snapshot_bytes(actor) > 0);
        // A save is never refused.
        if (wakes || forked) && passed(quota.snapshot_bytes, bytes) {
            self.world.broken(format!("a quota is passed: somebody is woken or forked beside {bytes} bytes"));
        }
        if let Some(rate) = quota.wakes_per_second.filter(|_| wakes) {
            self.check_pace(rate, writes).await;
        }
    }

    /// A wake takes its part of a second, and none is more than a second ahead of the clock of whoever began it. That is as much
    /// as can be said where clocks differ by minutes: a pace that is far ahead of another clock is begun anew.
    async fn check_pace(&self, rate: u64, writes: &[Write]) {
        let key = Key::new(Kind::Count, [SPACE, "wakes"]).expect("names are segments");
        let paced = writes.iter().find_map(|write| match write {
            Write::Add { key: added, by, from } if *added == key => Some((*by, *from)),
            _ => None,
        });
        let Some((by, from)) = paced else {
            return self.world.broken("a quota is passed: a wake is not counted");
        };
        let record = self.memory.get(&key).await.expect("memory does not fail");
        let pace = number(record.as_ref()).expect("a number");
        if u64::try_from(by).ok() != Some(SECOND / rate) || pace > from + SECOND {
            self.world.broken(format!("a quota is passed: wakes are {} µs ahead", pace.saturating_sub(from)));
        }
    }

    /// Nobody refers to what is gone.
    async fn check_deleted(&self, key: &Key) {
        let broken = |what: String| self.world.broken(format!("{what}: {key} is deleted"));
        let named = |of: &dyn std::fmt::Display| of.to_string() == key.path();
        match key.kind() {
            Kind::Actor => {
                for worker in self.workers().await {
                    let assigned = worker.assigned.filter(|assignee| named(&assignee.key));
                    if assigned.is_some() {
                        broken(format!("worker {} is still assigned to it", worker.lease.pod));
                    }
                }
            }
            Kind::Worker => {
                for actor in self.actors().await {
                    if actor.lease().is_some_and(|lease| named(&lease.worker)) {
                        broken(format!("its actor still holds it, {}", describe(&actor)));
                    }
                }
            }
            Kind::Operation => {
                for actor in self.actors().await {
                    if actor.pending().any(|op| named(&op)) {
                        broken(format!("nobody will bring to an end {}", describe(&actor)));
                    }
                }
            }
            _ => {}
        }
    }

    async fn check_actor(&self, cluster: &Cluster, actor: &Actor) {
        let now = describe(actor);
        let broken = |what: &str| self.world.broken(format!("{what}: {now}"));
        self.world.say(&now);
        let before = self.generations.lock().insert(actor.uid.to_string(), actor.generation);
        if before.is_some_and(|before| before > actor.generation) {
            broken("a generation went back");
        }
        for op in actor.pending() {
            let key = Key::new(Kind::Operation, [op.to_string()]).expect("a uid is a segment");
            if self.memory.get(&key).await.ok().flatten().is_none() {
                broken("nobody will bring it to an end");
            }
        }
        if let Some(lease) = actor.lease() {
            let key = Key::new(Kind::Worker, [lease.worker.to_string()]).expect("a uid is a segment");
            let worker: Option<WorkerRecord> = self.get(&key).await;
            let assigned = worker.and_then(|worker| worker.assigned);
            if !assigned.is_some_and(|assignee| assignee.uid == actor.uid && assignee.generation == actor.generation) {
                broken("it holds a worker that is not assigned to it");
            }
        }
        let held = actor.lease().map(|lease| lease.worker);
        for worker in self.workers().await {
            let assigned = worker.assigned.as_ref().is_some_and(|assignee| assignee.uid == actor.uid);
            if assigned && held != Some(worker.lease.worker) {
                broken("a worker is assigned to it that it does not hold");
            }
        }
        let only = actor.snapshots.base().and_then(|(newest, node)| Some((newest.prefix.clone(), node?.clone())));
        let before = match only {
            Some(only) => self.only_copies.lock().insert(actor.uid.to_string(), only),
            None => self.only_copies.lock().remove(&actor.uid.to_string()),
        };
        if let Some((prefix, node)) = before
            && actor.snapshots.local.is_none()
            && actor.snapshots.durable.as_ref().is_none_or(|durable| durable.prefix != prefix)
            && cluster.has_on_disk(&node, &prefix)
            && !self.is_given_up(&node).await
        {
            broken("it left its newest snapshot, which is where it was");
        }
        if let Some(durable) = &actor.snapshots.durable
            && actor.behind.is_none()
            && !self.zombies.lock().contains(&actor.uid)
            && !cluster.is_durable(&durable.prefix)
        {
            broken("what it takes for durable is not");
        }
    }

    async fn is_given_up(&self, node: &NodeName) -> bool {
        let key = Key::new(Kind::Node, [node.as_str()]).expect("a name is a segment");
        self.get::<NodeRecord>(&key).await.is_none_or(|record| record.given_up)
    }

    async fn check_worker(&self, worker: &WorkerRecord) {
        let Some(assignee) = &worker.assigned else { return };
        let actor = self.actor(&assignee.key).await;
        let held = actor.as_ref().and_then(Actor::lease).is_some_and(|lease| lease.worker == worker.lease.worker);
        if !held {
            self.world
                .broken(format!("worker {} is assigned to {} which does not hold it", worker.lease.pod, assignee.key));
        }
    }
}

const SECOND: u64 = 1_000_000;

/// Whether its atespace has a quota, if one has.
fn is_limited(actor: &Actor) -> bool {
    actor.key.atespace.as_str() == SPACE
}

fn snapshot_bytes(actor: &Actor) -> u64 {
    let snapshots: BTreeMap<_, _> =
        actor.references().map(|snapshot| (&snapshot.prefix, snapshot.stored_bytes)).collect();
    snapshots.values().sum()
}

/// An actor in a line of the trace.
fn describe(actor: &Actor) -> String {
    let lease = |lease: &Lease| format!("in {} on {}", short(lease.worker), lease.node);
    let phase = match &actor.phase {
        Phase::Suspended => "suspended".to_owned(),
        Phase::Paused => "paused".to_owned(),
        Phase::Resuming { lease: Some(held), op, .. } => format!("resuming {} ({})", lease(held), short(op)),
        Phase::Resuming { lease: None, op, failure, .. } => {
            format!("not resumed: {} ({})", failure.as_deref().unwrap_or_default(), short(op))
        }
        Phase::Running { lease: held } => format!("running {}", lease(held)),
        Phase::Suspending { lease: held, op, intent, .. } => {
            format!("suspending {} ({intent:?}, {})", lease(held), short(op))
        }
        Phase::Saving { node, op, .. } => format!("saving on {node} ({})", short(op)),
    };
    let local = actor.snapshots.local.as_ref().map(|(local, node)| format!(", {} on {node}", local.generation));
    let durable = actor.snapshots.durable.as_ref().map(|durable| format!(", {} durable", durable.generation));
    let (local, durable) = (local.unwrap_or_default(), durable.unwrap_or_default());
    format!("actor {} at {} {phase}{local}{durable}", actor.key, actor.generation)
}

/// One replica's way to the store.
#[derive(Debug)]
pub(crate) struct StoreWire {
    pub(crate) shared: Arc<Shared>,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) world: Arc<World>,
    pub(crate) process: Arc<Process>,
}

impl StoreWire {
    async fn reach(&self) -> Result<(), Fault> {
        self.process.step().await;
        self.world.pass().await;
        self.process.step().await;
        if *self.shared.away.lock() || self.world.dice.happens(self.world.weather().lost) {
            return Err(unavailable());
        }
        Ok(())
    }
}

/// What a change is for, as scenarios name it.
fn purpose(change: &Change) -> &'static str {
    let actor = change.writes.iter().find_map(|write| match write {
        Write::Put(key, value) if key.kind() == Kind::Actor => serde_json::from_slice::<Actor>(value).ok(),
        _ => None,
    });
    let deletes = |kind| change.writes.iter().any(|write| matches!(write, Write::Delete(key) if key.kind() == kind));
    match actor.map(|actor| actor.phase) {
        Some(Phase::Resuming { lease: Some(_), .. }) => "resuming",
        Some(Phase::Resuming { lease: None, .. }) => "failed",
        Some(Phase::Running { .. }) => "running",
        Some(Phase::Suspending { .. }) => "suspending",
        Some(Phase::Saving { .. }) => "saving",
        Some(Phase::Suspended) => "suspended",
        Some(Phase::Paused) => "paused",
        None if deletes(Kind::Actor) => "deleted",
        None => match change.writes.iter().find(|write| write.key().kind() == Kind::Template) {
            Some(Write::Put(_, value)) if golden_of(value).is_some() => "ready",
            Some(_) => "template",
            None => "something else",
        },
    }
}

/// The prefix of the golden that a template has.
fn golden_of(template: &[u8]) -> Option<String> {
    let template: Template = serde_json::from_slice(template).ok()?;
    template.status.golden.map(|golden| golden.prefix)
}

fn unavailable() -> Fault {
    Fault::Unavailable { reason: "simulated".into() }
}

#[async_trait]
impl Store for StoreWire {
    async fn commit(&self, change: Change) -> Result<Committed, CommitError> {
        self.reach().await?;
        let what = purpose(&change);
        self.process.point("before commit of", what).await;
        if self.world.dice.happens(self.world.weather().commit_late) {
            let (shared, cluster, world) =
                (Arc::clone(&self.shared), Arc::clone(&self.cluster), Arc::clone(&self.world));
            let restored = shared.restored.load(Relaxed);
            tokio::spawn(async move {
                tokio::time::sleep(world.dice.between(Duration::ZERO, Duration::from_secs(5))).await;
                if shared.restored.load(Relaxed) == restored {
                    world.say("a commit that was given up is made");
                    let _ = shared.commit(&cluster, change).await;
                }
            });
            return Err(unavailable().into());
        }
        let committed = self.shared.commit(&self.cluster, change).await;
        self.world.pass().await;
        self.process.point("after commit of", what).await;
        if self.world.dice.happens(self.world.weather().commit_untold) {
            self.world.say("a commit's outcome is not told");
            return Err(unavailable().into());
        }
        committed
    }

    async fn get(&self, key: &Key) -> Result<Option<Record>, Fault> {
        self.reach().await?;
        let got = self.shared.memory.get(key).await;
        self.process.step().await;
        got
    }

    async fn list(&self, prefix: &Prefix, after: Option<&str>, limit: usize) -> Result<Page, Fault> {
        self.reach().await?;
        let page = self.shared.memory.list(prefix, after, limit).await;
        self.process.step().await;
        page
    }

    async fn watch(&self, prefixes: &[Prefix], after: Revision) -> Result<Watch, WatchError> {
        self.reach().await?;
        let watch = self.shared.memory.watch(prefixes, after).await?;
        let world = Arc::clone(&self.world);
        // In order, and late.
        Ok(watch
            .then(move |event| {
                let world = Arc::clone(&world);
                async move {
                    world.pass().await;
                    event
                }
            })
            .boxed())
    }

    async fn revision(&self) -> Result<Revision, Fault> {
        self.reach().await?;
        self.shared.memory.revision().await
    }
}
