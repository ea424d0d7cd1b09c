//! The whole control plane on simulated ground: one thread, one clock that jumps, one seed.
//!
//! ```text
//!   clients ──▶ replicas of the real Control ──▶ store (in memory, the real port)      everything between them is slow,
//!      │                    └──────▶ nodes, workers, sandboxes, durable storage         lost, doubled, dead, full or
//!      └──────────── requests ─────▶ at their workers' doors                            away, as the seed has it
//! ```
//!
//! After every commit the records are checked against each other; whoever serves a request is checked against the store;
//! in the end all is healed, all must come to rest, and what clients saw must be explained ([`ate_witness`]).

mod clients;
mod cluster;
mod dice;
mod lives;
mod panics;
mod process;
mod replica;
mod restore;
pub mod scenario;
mod store;
mod world;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ate_actor::Phase;
use ate_control::{Quota, Settings, Template, TemplatePhase};
use ate_name::ObjectKey;
use ate_object::read_manifests;
use ate_store::Kind;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use ate_orders::{Exit, NODE_SERVES_FOR};
use clients::{Clients, PATIENCE, SPACE};
use cluster::Cluster;
use replica::Replica;
pub use restore::Backup;
use store::Shared;
pub use world::Broken;
use world::{Weather, World};

/// How long things go wrong.
const STORM: Duration = Duration::from_secs(120);

/// Everything must have come to rest within this after all is healed: longer than every lease and grace together.
const CALM: Duration = Duration::from_secs(240);

/// How often it is looked whether it has.
const LOOK_EVERY: Duration = Duration::from_secs(15);

const MANIFESTS: &str = r#"
apiVersion: ate.dev/v1alpha1
kind: SandboxConfig
metadata: { name: sim }
spec:
  sandboxClass: gvisor
  default: true
  assets:
    amd64:
      runsc: { url: "file:///runsc", sha256: "0000000000000000000000000000000000000000000000000000000000000000" }
---
apiVersion: ate.dev/v1alpha1
kind: WorkerPool
metadata: { name: pool, namespace: sim }
spec: { replicas: 4, ateomImage: none }
"#;

fn template(name: &str) -> String {
    format!(
        r#"
apiVersion: ate.dev/v1alpha1
kind: ActorTemplate
metadata: {{ name: {name}, namespace: sim }}
spec:
  containers:
    - name: main
      image: "example/app@sha256:0000000000000000000000000000000000000000000000000000000000000000"
      readyz: {{ httpGet: {{ port: 80 }} }}
  snapshotsConfig: {{ location: "gs://sim/snapshots" }}
  idle: {{ freezeAfter: 2s, suspendAfter: 6s }}
"#
    )
}

fn objects(manifests: &str) -> Vec<ate_object::Object> {
    read_manifests("sim", manifests.as_bytes(), "sim").expect("constant manifests").objects
}

/// How a run went.
#[derive(Debug)]
pub struct Outcome {
    pub seed: u64,
    pub broken: Option<Broken>,
    pub trace: String,
    pub examined: ate_witness::Examined,
    /// What passed on the simulated clock.
    pub lasted: Duration,
}

/// Runs one seed from beginning to end.
pub fn run(seed: u64) -> Outcome {
    simulated(simulate(seed))
}

pub(crate) struct Simulation {
    world: Arc<World>,
    store: Arc<Shared>,
    cluster: Arc<Cluster>,
    clients: Arc<Clients>,
    settings: Settings,
    started: Mutex<u32>,
    /// What snapshots of those lie under whom a restored store never knew: nobody will remove them.
    strangers: Mutex<BTreeSet<String>>,
}

async fn simulate(seed: u64) -> Outcome {
    let simulation = Simulation::new(seed, 6);
    simulation.weather_and_life().await;
    simulation.rest().await;
    simulation.outcome(seed)
}

impl Simulation {
    fn new(seed: u64, actors: usize) -> Self {
        panics::listen();
        let world = World::new(seed, Weather::default());
        let cluster = Cluster::new(Arc::clone(&world), 2 + world.dice.below(2), 2);
        let store = Shared::new(Arc::clone(&world));
        cluster.store.set(Arc::clone(&store)).expect("set once");
        let template = ObjectKey::new("sim", "template");
        let clients = Clients::new(Arc::clone(&world), Arc::clone(&cluster), template, actors);
        let settings = replica::SETTINGS;
        Self { world, store, cluster, clients, settings, started: Mutex::new(0), strangers: Mutex::default() }
    }

    fn outcome(&self, seed: u64) -> Outcome {
        // Of whom force was used on it is known that it may have run twice.
        let mut seen = self.clients.seen.lock().clone();
        seen.retain(|seen| {
            !self
                .clients
                .actors
                .iter()
                .any(|key| self.world.is_forced(key) && seen.actor.starts_with(&format!("{key} ")))
        });
        // Of who was deleted, and is back, nothing is promised.
        let zombies = self.store.zombies.lock().clone();
        seen.retain(|seen| !zombies.iter().any(|uid| seen.actor.ends_with(&uid.to_string())));
        let examined = ate_witness::examine(&seen).unwrap_or_else(|contradiction| {
            self.world.broken(contradiction.to_string());
            Default::default()
        });
        for panic in panics::heard() {
            self.world.broken(panic);
        }
        let lasted = Duration::from_micros(self.world.micros());
        Outcome { seed, broken: self.world.verdict(), trace: self.world.trace(), examined, lasted }
    }

    fn keep_nodes(&self) {
        for node in self.cluster.names() {
            let (world, cluster, clients) =
                (Arc::clone(&self.world), Arc::clone(&self.cluster), Arc::clone(&self.clients));
            tokio::spawn(keep_node(world, cluster, clients, node));
        }
    }

    fn start_replica(&self) -> Arc<Replica> {
        let name = {
            let mut started = self.started.lock();
            *started += 1;
            format!("replica-{started}")
        };
        let replica = Replica::start(name, self.settings, &self.world, &self.store, &self.cluster);
        self.clients.replicas.lock().push(Arc::clone(&replica));
        replica
    }

    async fn weather_and_life(&self) {
        self.start_replica();
        self.start_replica();
        self.keep_nodes();
        self.furnish().await;
        if self.world.dice.happens(300) {
            self.limit().await;
        }
        let dice = &self.world.dice;
        let often = |most: usize| u32::try_from(dice.below(most)).unwrap_or(0);
        self.world.set_weather(Weather {
            lost: often(60),
            doubled: often(60),
            commit_untold: often(60),
            commit_late: often(30),
            fails: often(100),
            slow: often(40),
        });
        self.world.say(format_args!("{:?}", self.world.weather()));
        let stop = CancellationToken::new();
        let living: Vec<_> = (0..4).map(|_| tokio::spawn(Arc::clone(&self.clients).live(stop.clone()))).collect();
        let until = Instant::now() + STORM;
        let mut backup = None;
        while Instant::now() < until && self.world.verdict().is_none() {
            tokio::time::sleep(self.world.dice.between(Duration::ZERO, Duration::from_secs(10))).await;
            self.mischief();
            match backup.take() {
                None if self.world.dice.happens(10) => backup = Some(self.back_up().await),
                Some(taken) if self.world.dice.happens(200) => self.restore(taken).await,
                other => backup = other,
            }
        }
        stop.cancel();
        for living in living {
            let _ = living.await;
        }
    }

    /// A template with its golden snapshot, and actors, in fair weather.
    async fn furnish(&self) {
        let objects = objects(&format!("{MANIFESTS}---{}", template("template")));
        loop {
            let applied = self.clients.call(async |replica| replica.control.apply(objects.clone()).await).await;
            let space = ate_name::AtespaceName::parse(SPACE).expect("a name");
            let made = self.clients.call(async |replica| replica.control.create_atespace(&space).await).await;
            if matches!(applied, Some(Ok(_))) && made.is_some() {
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        for key in self.clients.actors.clone() {
            while !self.clients.create(&key).await {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
        let first = self.clients.actors[0].clone();
        let begun = Instant::now();
        while !self.clients.request(&first).await {
            if begun.elapsed() > CALM {
                return self.world.broken("no actor ever answered");
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        self.until_nodes_are_registered().await;
    }

    /// One that nobody has heard of cannot be missed.
    async fn until_nodes_are_registered(&self) {
        let begun = Instant::now();
        while self.store.all(Kind::Node).await.len() < self.cluster.names().len() {
            if begun.elapsed() > CALM {
                return self.world.broken("a node never registered");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// A quota, which is passed at no commit from here on.
    async fn limit(&self) {
        let few = |least: usize, more: usize| Some((least + self.world.dice.below(more)) as u64);
        let quota = Quota {
            actors: few(self.clients.actors.len(), 3),
            running: few(1, 4),
            // More than everybody at rest has, who must be able to wake.
            snapshot_bytes: if self.world.dice.happens(500) { few(9_000, 6_000) } else { None },
            wakes_per_second: if self.world.dice.happens(500) { few(1, 4) } else { None },
        };
        let space = &self.clients.actors[0].atespace;
        let limited = self.clients.call(async |replica| replica.control.set_quota(space, quota, None).await).await;
        if matches!(limited, Some(Ok(()))) {
            self.world.say(format_args!("{quota:?}"));
            *self.store.quota.lock() = quota;
        }
    }

    /// Something goes wrong.
    fn mischief(&self) {
        let dice = &self.world.dice;
        let nodes = self.cluster.names();
        let Some(node) = dice.pick(&nodes).cloned() else { return };
        match dice.below(20) {
            0 | 1 => self.cluster.kill_worker(&node),
            2 => self.cluster.kill_sandbox(&node),
            3 => {
                let exit = if dice.happens(500) { Exit::Code(1) } else { Exit::OutOfMemory };
                self.cluster.end_sandbox(&node, exit);
            }
            4 => {
                self.cluster.kill_node(&node);
                self.later(20, move |cluster| cluster.start_node(&node));
            }
            5 => {
                self.cluster.power_off(&node);
                if dice.happens(200) {
                    self.cluster.wipe_disk(&node);
                }
                self.later(60, move |cluster| cluster.start_node(&node));
            }
            6 => {
                self.cluster.set_cut_off(&node, true);
                self.later(60, move |cluster| cluster.set_cut_off(&node, false));
            }
            7 => {
                self.cluster.set_full(&node, true);
                self.later(30, move |cluster| cluster.set_full(&node, false));
            }
            8 => {
                self.cluster.set_storage_away(true);
                self.later(30, |cluster| cluster.set_storage_away(false));
            }
            9 => {
                *self.store.away.lock() = true;
                self.world.say("the store is away");
                let (store, world) = (Arc::clone(&self.store), Arc::clone(&self.world));
                let after = dice.between(Duration::ZERO, Duration::from_secs(8));
                tokio::spawn(async move {
                    tokio::time::sleep(after).await;
                    *store.away.lock() = false;
                    world.say("the store is back");
                });
            }
            10 if dice.happens(300) => self.cluster.destroy(&node),
            11 => {
                let living = self.clients.living();
                let cut: Vec<_> = match dice.happens(500) {
                    true => living.iter().collect(),
                    false => dice.pick(&living).into_iter().collect(),
                };
                cut.into_iter().for_each(|replica| self.cluster.cut(&replica.name, &node));
                self.later(90, move |cluster| cluster.mend_ways_to(&node));
            }
            12 if dice.happens(500) => {
                self.cluster.set_hangs(&node, true);
                self.later(90, move |cluster| cluster.set_hangs(&node, false));
            }
            13 => {
                if let Some(replica) = dice.pick(&self.clients.living()) {
                    replica.set_clock(&self.world, replica::some_minutes(&self.world));
                }
            }
            14 | 15 => {
                let living = self.clients.living();
                if let Some(replica) = dice.pick(&living) {
                    let time = dice.between(Duration::from_secs(1), Duration::from_secs(20));
                    self.world.say(format_args!("{} stands still for {time:?}", replica.name));
                    replica.process.stand_still(time);
                }
            }
            _ => self.kill_replica(),
        }
    }

    fn later(&self, seconds: u64, then: impl FnOnce(&Cluster) + Send + 'static) {
        let after = self.world.dice.between(Duration::from_millis(100), Duration::from_secs(seconds));
        let cluster = Arc::clone(&self.cluster);
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            then(&cluster);
        });
    }

    /// At its next step, or in the middle of something a few steps on; another one is started, now or later.
    fn kill_replica(&self) {
        let living = self.clients.living();
        if let Some(replica) = self.world.dice.pick(&living) {
            let steps = 1 + self.world.dice.draw() % 40;
            self.world.say(format_args!("{} will die after {steps} steps", replica.name));
            replica.process.die_after(steps);
        }
        if living.len() < 3 {
            self.start_replica();
        }
    }

    /// All is healed; everything must come to rest, by itself.
    async fn rest(&self) {
        self.world.say("all is healed");
        self.world.set_weather(Weather::default());
        *self.store.away.lock() = false;
        self.cluster.set_storage_away(false);
        for node in self.cluster.names() {
            self.cluster.set_full(&node, false);
            self.cluster.set_cut_off(&node, false);
            self.cluster.mend_ways_to(&node);
            self.cluster.set_hangs(&node, false);
        }
        if self.clients.living().is_empty() {
            self.start_replica();
        }
        self.catch_up().await;
        let until = Instant::now() + CALM;
        // Twice: what looks like rest may be the moment before something is taken up.
        let (mut unrest, mut rests) = (Vec::new(), 0);
        while rests < 2 && Instant::now() < until {
            tokio::time::sleep(LOOK_EVERY).await;
            unrest = self.unrest().await;
            rests = if unrest.is_empty() { rests + 1 } else { 0 };
        }
        unrest.into_iter().for_each(|what| self.world.broken(format!("not at rest: {what}")));
        for key in self.clients.actors.clone() {
            let lives = self.clients.lives.lock().known(&key);
            if self.store.actor(&key).await.is_none() && self.clients.lives.lock().is_missed(&key, lives) {
                self.world.broken(format!("{key} is gone, and nobody has deleted it"));
            }
            while self.store.actor(&key).await.is_some() && !self.clients.request(&key).await {
                if Instant::now() > until + PATIENCE {
                    self.world.broken(format!("{key} does not answer"));
                    break;
                }
            }
        }
    }

    /// What is still under way, or left over.
    async fn unrest(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut broken = |what: String| found.push(what);
        let (actors, workers) = (self.store.actors().await, self.store.workers().await);
        for actor in &actors {
            if actor.phase.operation().is_some() || actor.snapshots.uploading.is_some() {
                broken(format!("actor {} is {:?}", actor.key, actor.phase));
            }
        }
        for worker in &workers {
            if let Some(assignee) = &worker.assigned
                && !actors.iter().any(|actor| {
                    actor.uid == assignee.uid
                        && matches!(&actor.phase, Phase::Running { lease } if lease.worker == worker.lease.worker)
                })
            {
                broken(format!("worker {} is assigned to {} for nothing", worker.lease.pod, assignee.key));
            }
        }
        for (node, worker, identity) in self.cluster.hosted() {
            if !actors.iter().any(|actor| {
                actor.uid == identity.uid
                    && actor.generation == identity.generation
                    && actor.lease().is_some_and(|lease| lease.worker == worker)
            }) {
                broken(format!("a sandbox of {} generation {} is left on {node}", identity.key, identity.generation));
            }
        }
        for record in self.store.all(Kind::Template).await {
            let Template { object, status, .. } = serde_json::from_slice(&record.value).expect("a template");
            let settled = match (status.phase, &status.golden) {
                (TemplatePhase::Ready, Some(golden)) => self.cluster.is_durable(&golden.prefix),
                (TemplatePhase::Failed, golden) => golden.is_none(),
                _ => false,
            };
            if !settled {
                broken(format!("template {} is {:?}", object.metadata.key(), status));
            }
        }
        for record in self.store.all(Kind::Operation).await {
            broken(format!("operation {}: {}", record.key, String::from_utf8_lossy(&record.value)));
        }
        for finding in self.store.findings().await {
            broken(format!("{}: {}", finding.object, finding.wrong));
        }
        if self.cluster.images_in_hand() > 0 {
            broken("images that nobody stored".to_owned());
        }
        let referred = self.store.referred().await;
        for left in self.cluster.snapshots().difference(&referred).filter(|left| !self.is_strangers(left)) {
            broken(format!("snapshot {left} is left although nobody refers to it"));
        }
        found
    }
}

/// What a node's own process does: says that it lives, and how its workers are.
async fn keep_node(world: Arc<World>, cluster: Arc<Cluster>, clients: Arc<Clients>, node: ate_name::NodeName) {
    loop {
        if let Some((session, beat)) = cluster.renewal(&node) {
            let asked = Instant::now();
            let registration = ate_control::Registration { session, endpoint: "simulated", leaving: false, beat };
            let renewed = clients.call(async |replica| replica.control.renew_node(&node, registration).await).await;
            match renewed {
                _ if cluster.renewal(&node).is_none() => {}
                Some(Ok(ate_control::Renewal::Renewed { beat })) => cluster.renewed(&node, asked, beat),
                Some(Ok(ate_control::Renewal::Over)) => cluster.session_over(&node, session),
                _ => {}
            }
            cluster.tell_report(&node);
        }
        tokio::time::sleep(world.dice.between(NODE_SERVES_FOR / 10, NODE_SERVES_FOR / 5)).await;
    }
}

/// Runs on one thread, with a clock that jumps when everybody waits.
fn simulated<T>(what: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime needs nothing").block_on(what)
}

#[cfg(test)]
mod tests {
    use ate_name::ActorKey;
    use ate_store::{Change, Key, Store};

    use super::*;

    /// What is found if something is done that the control plane never does, to one running actor.
    fn found(what: impl AsyncFnOnce(&Simulation, &ActorKey)) -> String {
        simulated(async {
            let simulation = Simulation::new(1, 1);
            simulation.start_replica();
            simulation.keep_nodes();
            simulation.furnish().await;
            what(&simulation, &simulation.clients.actors[0]).await;
            simulation.outcome(1).broken.expect("it is found").0
        })
    }

    fn key_of(actor: &ActorKey) -> Key {
        Key::new(Kind::Actor, [actor.atespace.as_str(), actor.name.as_str()]).expect("names are segments")
    }

    #[test]
    fn a_task_that_panics_is_found() {
        let found = found(async |_, _| drop(tokio::spawn(async { panic!("simulated") }).await));
        assert!(found.contains("simulated"), "{found}");
    }

    #[test]
    fn what_is_deleted_while_somebody_refers_to_it_is_found() {
        let worker = found(async |simulation, actor| {
            let change = Change::new().delete(key_of(actor));
            simulation.store.commit(&simulation.cluster, change).await.expect("memory does not fail");
        });
        assert!(worker.contains("still assigned to it"), "{worker}");
        let holder = found(async |simulation, actor| {
            let actor = simulation.store.actor(actor).await.expect("it is there");
            let worker = actor.lease().expect("it runs").worker.to_string();
            let change = Change::new().delete(Key::new(Kind::Worker, [worker]).expect("a uid is a segment"));
            simulation.store.commit(&simulation.cluster, change).await.expect("memory does not fail");
        });
        assert!(holder.contains("still holds it"), "{holder}");
        let under_way = found(async |simulation, actor| {
            simulation.clients.living()[0].control.save_actor(actor, ate_actor::Intent::Pause).await.expect("paused");
            let actor = simulation.store.actor(actor).await.expect("it is there");
            let op = actor.pending().next().expect("it is being uploaded").to_string();
            let change = Change::new().delete(Key::new(Kind::Operation, [op]).expect("a uid is a segment"));
            simulation.store.commit(&simulation.cluster, change).await.expect("memory does not fail");
        });
        assert!(under_way.contains("nobody will bring to an end"), "{under_way}");
    }

    #[test]
    fn an_actor_that_vanishes_is_missed() {
        let missed = found(async |simulation, actor| {
            // Past everything that looks at commits.
            let change = Change::new().delete(key_of(actor));
            simulation.store.memory.commit(change).await.expect("memory does not fail");
            simulation.clients.suspend(actor).await;
        });
        assert!(missed.contains("is gone, and nobody has deleted it"), "{missed}");
    }
}
