//! Nodes, workers and sandboxes that do what orders say and can lose everything they have; and durable storage.
//!
//! What a sandbox holds is a count, raised by each request, and a nonce that it drew when it booted; and another one, that each
//! launch draws anew.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use ate_name::{ActorUid, Digest, Generation, NodeName, ObjectKey, OpId, SessionId, WorkerUid};
use ate_orders::{
    Exit, Hosted, Identity, Ingress, NODE_SERVES_FOR, NodeError, NodeEvent, Recent, SnapshotAt, WorkerReport,
};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::world::World;

mod orders;

/// After so long without a request a sandbox is frozen.
const FROZEN_AFTER: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct App {
    pub(crate) count: u64,
    pub(crate) nonce: u64,
}

#[derive(Clone, Debug)]
struct Sandbox {
    identity: Identity,
    app: App,
    launch: u64,
    /// Requests that have not been answered.
    visitors: usize,
    /// On its way out: nobody may enter.
    leaving: bool,
    idle_since: Instant,
}

#[derive(Clone, Debug)]
struct Snapshot {
    app: App,
    manifest: Digest,
    /// Of one on a disk: it was brought to durable storage, and is a copy.
    uploaded: bool,
}

/// Durable storage, one for all nodes.
#[derive(Debug, Default)]
struct Storage {
    whole: BTreeMap<String, Snapshot>,
    /// Of these something is there, but not yet all: nobody can wake from one.
    begun: BTreeSet<String>,
    away: bool,
}

impl Storage {
    fn reach(&mut self) -> Result<&mut Self, NodeError> {
        match self.away {
            true => Err(NodeError::Hindered("simulated: durable storage is away".into())),
            false => Ok(self),
        }
    }
}

#[derive(Debug)]
struct Worker {
    pod: String,
    sandbox: Option<Sandbox>,
    /// Being filled by an activation, or full.
    taken: bool,
    arriving: Option<Identity>,
    /// It has all it needs, and no longer its node.
    restoring: bool,
    retained: BTreeMap<OpId, App>,
    /// The newest generation of each actor that was here.
    been_here: BTreeMap<ActorUid, Generation>,
    /// The newest generation of each actor that was told to end here, whether it was here or not.
    ended: BTreeMap<ActorUid, Generation>,
}

impl Node {
    /// If it is heard of: how often it was not.
    fn heard(&self) -> Option<u64> {
        (Instant::now() < self.until).then_some(self.silences)
    }

    /// The first bytes of a snapshot are on the disk. That may be as far as it comes.
    fn begins(&mut self, prefix: &str, writes: bool) -> Result<(), NodeError> {
        if writes && !self.forgotten.contains(&prefix.to_owned()) {
            self.begun.insert(prefix.to_owned());
        }
        Ok(())
    }

    /// On its disk, or in durable storage.
    fn find(&self, at: &SnapshotAt, storage: &mut Storage) -> Result<Snapshot, NodeError> {
        let found = match self.disk.get(&at.prefix) {
            Some(here) => Some(here.clone()),
            None => storage.reach()?.whole.get(&at.prefix).cloned(),
        };
        let found = found.filter(|found| found.manifest == at.manifest);
        found.ok_or_else(|| NodeError::NoSnapshot(at.prefix.clone()))
    }
}

impl Worker {
    fn has_ended(&self, identity: &Identity) -> bool {
        self.ended.get(&identity.uid).is_some_and(|ended| *ended >= identity.generation)
    }
}

#[derive(Debug)]
struct Node {
    /// Grows with every start of its process; what an older one began does not end.
    life: u64,
    up: bool,
    session: SessionId,
    /// What it was told last.
    beat: u64,
    /// Serves until then.
    until: Instant,
    /// How often it began to be heard of.
    silences: u64,
    workers: BTreeMap<WorkerUid, Worker>,
    in_hand: BTreeMap<OpId, App>,
    disk: BTreeMap<String, Snapshot>,
    /// Of these something is on the disk, but not all.
    begun: BTreeSet<String>,
    full: bool,
    busy: BTreeSet<String>,
    forgotten: Recent<String>,
    /// Actors that it was told are gone, and so is what they printed here.
    told_gone: BTreeSet<ActorUid>,
    /// Saves that were called off or did not come about, and what was said of them.
    kept: BTreeMap<OpId, NodeError>,
    /// Nobody reaches it, and it reaches nobody.
    cut_off: bool,
    /// It never comes back, and neither does its disk.
    gone: bool,
    /// It takes orders and never carries them out, though it says that it lives and how it is.
    hangs: bool,
}

#[derive(Debug)]
pub(crate) struct Cluster {
    world: Arc<World>,
    nodes: Mutex<BTreeMap<NodeName, Node>>,
    storage: Mutex<Storage>,
    pub(crate) pool: ObjectKey,
    /// That each node should have.
    workers: usize,
    /// Ways there that are cut; the ways back are open.
    cuts: Mutex<BTreeSet<(String, NodeName)>>,
    news: Mutex<Vec<tokio::sync::mpsc::Sender<(NodeName, NodeEvent)>>>,
    pub(crate) store: std::sync::OnceLock<Arc<crate::store::Shared>>,
    /// What actors run ends while it starts.
    pub(crate) crashes: AtomicBool,
}

/// What a request meets at a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Met {
    Counted {
        app: App,
        launch: u64,
    },
    /// The worker does not have exactly this actor, or is not there at all: nothing was done.
    Stale,
    /// The answer never came: it may have been counted.
    Nothing,
}

impl Cluster {
    pub(crate) fn new(world: Arc<World>, nodes: usize, workers: usize) -> Arc<Self> {
        let pool = ObjectKey::new("sim", "pool");
        let cluster = Self {
            world,
            nodes: Mutex::default(),
            storage: Mutex::default(),
            pool,
            workers,
            cuts: Mutex::default(),
            news: Mutex::default(),
            store: std::sync::OnceLock::new(),
            crashes: AtomicBool::new(false),
        };
        for n in 0..nodes {
            let node = Node {
                life: 0,
                up: true,
                session: SessionId::from_random(cluster.world.dice.bytes()),
                beat: 0,
                until: Instant::now(),
                silences: 0,
                workers: (0..workers).map(|_| cluster.new_worker()).collect(),
                in_hand: BTreeMap::new(),
                disk: BTreeMap::new(),
                begun: BTreeSet::new(),
                full: false,
                busy: BTreeSet::new(),
                forgotten: Recent::default(),
                told_gone: BTreeSet::new(),
                kept: BTreeMap::new(),
                cut_off: false,
                gone: false,
                hangs: false,
            };
            cluster.nodes.lock().insert(NodeName::new(format!("node-{n}")), node);
        }
        Arc::new(cluster)
    }

    fn new_worker(&self) -> (WorkerUid, Worker) {
        let uid = WorkerUid::from_random(self.world.dice.bytes());
        let pod = format!("pool-{}", &uid.to_string()[..8]);
        (
            uid,
            Worker {
                pod,
                sandbox: None,
                taken: false,
                arriving: None,
                restoring: false,
                retained: BTreeMap::new(),
                been_here: BTreeMap::new(),
                ended: BTreeMap::new(),
            },
        )
    }

    pub(crate) fn names(&self) -> Vec<NodeName> {
        self.nodes.lock().keys().cloned().collect()
    }

    /// Those that were told that an actor is gone.
    pub(crate) fn told_gone(&self, actor: ActorUid) -> Vec<NodeName> {
        let nodes = self.nodes.lock();
        nodes.iter().filter(|(_, node)| node.told_gone.contains(&actor)).map(|(name, _)| name.clone()).collect()
    }

    /// News from every node from here on.
    pub(crate) fn subscribe(&self) -> tokio::sync::mpsc::Receiver<(NodeName, NodeEvent)> {
        let (news, told) = tokio::sync::mpsc::channel(1000);
        self.news.lock().push(news);
        told
    }

    fn tell(&self, node: &NodeName, event: &NodeEvent) {
        self.news.lock().retain(|news| !news.is_closed());
        for news in self.news.lock().iter() {
            // What is missed is made good by the next comparison; what is told twice was told before.
            let times = match self.world.dice.happens(self.world.weather().lost) {
                true => 0,
                false => 1 + usize::from(self.world.dice.happens(self.world.weather().doubled)),
            };
            for _ in 0..times {
                let _ = news.try_send((node.clone(), event.clone()));
            }
        }
    }

    pub(crate) fn is_durable(&self, prefix: &str) -> bool {
        self.storage.lock().whole.contains_key(prefix)
    }

    /// Also if nobody can ask it now.
    pub(crate) fn has_on_disk(&self, node: &NodeName, prefix: &str) -> bool {
        self.nodes.lock().get(node).is_some_and(|node| node.disk.contains_key(prefix))
    }

    /// What a durable snapshot has counted.
    pub(crate) fn durable_count(&self, prefix: &str) -> Option<u64> {
        self.storage.lock().whole.get(prefix).map(|snapshot| snapshot.app.count)
    }

    // What goes wrong.

    pub(crate) fn set_storage_away(&self, away: bool) {
        self.world.say(format_args!("durable storage is {}", if away { "away" } else { "back" }));
        self.storage.lock().away = away;
    }

    pub(crate) fn set_full(&self, name: &NodeName, full: bool) {
        if let Some(node) = self.nodes.lock().get_mut(name) {
            self.world.say(format_args!("the disk of {name} is {}", if full { "full" } else { "free again" }));
            node.full = full;
        }
    }

    pub(crate) fn set_cut_off(&self, name: &NodeName, cut_off: bool) {
        if let Some(node) = self.nodes.lock().get_mut(name) {
            self.world.say(format_args!("{name} is {}", if cut_off { "cut off" } else { "reached again" }));
            node.cut_off = cut_off;
        }
    }

    pub(crate) fn set_hangs(&self, name: &NodeName, hangs: bool) {
        if let Some(node) = self.nodes.lock().get_mut(name) {
            self.world.say(format_args!("{name} {}", if hangs { "hangs" } else { "hangs no more" }));
            node.hangs = hangs;
        }
    }

    /// The way from a replica to a node, not the way back.
    pub(crate) fn cut(&self, replica: &str, name: &NodeName) {
        self.world.say(format_args!("{replica} does not reach {name}"));
        self.cuts.lock().insert((replica.to_owned(), name.clone()));
    }

    pub(crate) fn mend_ways_to(&self, name: &NodeName) {
        self.world.say(format_args!("every way to {name} is open"));
        self.cuts.lock().retain(|(_, cut)| cut != name);
    }

    /// The node's process dies; its workers live on.
    pub(crate) fn kill_node(&self, name: &NodeName) {
        if let Some(node) = self.nodes.lock().get_mut(name) {
            self.world.say(format_args!("{name} is killed"));
            node.up = false;
            node.life += 1;
            node.in_hand.clear();
            node.busy.clear();
            node.forgotten = Recent::default();
            node.kept.clear();
            for worker in node.workers.values_mut() {
                (worker.taken, worker.arriving) = (worker.sandbox.is_some() || worker.restoring, None);
                // What the node was told, the worker was not.
                worker.ended.clear();
            }
        }
    }

    /// The machine loses power: everything but its disk is gone.
    pub(crate) fn power_off(&self, name: &NodeName) {
        self.kill_node(name);
        if let Some(node) = self.nodes.lock().get_mut(name) {
            self.world.say(format_args!("{name} loses its power"));
            node.workers.clear();
        }
    }

    pub(crate) fn wipe_disk(&self, name: &NodeName) {
        if let Some(node) = self.nodes.lock().get_mut(name) {
            self.world.say(format_args!("{name} loses its disk"));
            node.disk.clear();
            node.begun.clear();
        }
    }

    /// Destroys a machine, unless it would be the second: those that are left must be enough for everybody.
    pub(crate) fn destroy(&self, name: &NodeName) {
        if self.nodes.lock().values().any(|node| node.gone) {
            return;
        }
        self.power_off(name);
        self.wipe_disk(name);
        if let Some(node) = self.nodes.lock().get_mut(name) {
            self.world.say(format_args!("{name} will not come back"));
            node.gone = true;
        }
    }

    pub(crate) fn start_node(&self, name: &NodeName) {
        if let Some(node) = self.nodes.lock().get_mut(name).filter(|node| !node.gone) {
            self.world.say(format_args!("{name} starts"));
            node.up = true;
            node.hangs = false;
            node.begun.clear();
            // It has what its workers kept for it.
            node.in_hand =
                node.workers.values().flat_map(|worker| worker.retained.iter().map(|(op, app)| (*op, *app))).collect();
        }
    }

    pub(crate) fn kill_worker(&self, name: &NodeName) {
        let nodes = self.nodes.lock();
        let Some(node) = nodes.get(name) else { return };
        let workers: Vec<_> = node.workers.keys().copied().collect();
        let picked = self.world.dice.pick(&workers).copied();
        drop(nodes);
        if let Some(worker) = picked {
            self.kill_this_worker(name, worker);
        }
    }

    /// The node holds what it took out of it, and starts another.
    pub(crate) fn kill_this_worker(&self, name: &NodeName, worker: WorkerUid) {
        let mut nodes = self.nodes.lock();
        let Some(node) = nodes.get_mut(name) else { return };
        self.world.say(format_args!("worker {worker} of {name} is killed"));
        if node.workers.remove(&worker).is_some() {
            node.workers.extend([self.new_worker()]);
        }
        let up = node.up;
        drop(nodes);
        if up {
            self.tell(name, &NodeEvent::WorkerGone { worker });
        }
    }

    pub(crate) fn kill_sandbox(&self, name: &NodeName) {
        self.end_sandbox(name, Exit::Killed);
    }

    pub(crate) fn end_sandbox(&self, name: &NodeName, exit: Exit) {
        let mut nodes = self.nodes.lock();
        let Some(node) = nodes.get_mut(name) else { return };
        let hosts: Vec<_> =
            node.workers.iter().filter(|(_, worker)| worker.sandbox.is_some()).map(|(uid, _)| *uid).collect();
        let Some(&worker) = self.world.dice.pick(&hosts) else { return };
        let Some(sandbox) = node.workers.get_mut(&worker).and_then(|worker| worker.sandbox.take()) else { return };
        self.world.say(format_args!("the sandbox of {} in {worker} ends", sandbox.identity.key));
        let up = node.up;
        if let Some(worker) = node.workers.get_mut(&worker) {
            worker.taken = false;
        }
        drop(nodes);
        if up {
            let Identity { uid: actor, generation, .. } = sandbox.identity;
            self.tell(name, &NodeEvent::Ended { worker, actor, generation, exit });
        }
    }

    // What nodes do by themselves.

    /// What a node needs to say that it lives; `None` while it is down or cut off.
    pub(crate) fn renewal(&self, name: &NodeName) -> Option<(SessionId, u64)> {
        self.nodes.lock().get(name).filter(|node| node.up && !node.cut_off).map(|node| (node.session, node.beat))
    }

    pub(crate) fn renewed(&self, name: &NodeName, asked: Instant, beat: u64) {
        if let Some(node) = self.nodes.lock().get_mut(name) {
            node.beat = beat;
            // It learns with that how many it should have. Orders for those of before may still be on their way.
            let missing = self.workers.saturating_sub(node.workers.len());
            node.workers.extend((0..missing).map(|_| self.new_worker()));
            node.silences += u64::from(node.until <= Instant::now());
            node.until = node.until.max(asked + NODE_SERVES_FOR);
        }
    }

    /// It was given up: everything it runs is of the past.
    pub(crate) fn session_over(&self, name: &NodeName, session: SessionId) {
        let mut nodes = self.nodes.lock();
        let Some(node) = nodes.get_mut(name).filter(|node| node.session == session) else { return };
        self.world.say(format_args!("{name} ends what it runs and registers anew"));
        node.session = SessionId::from_random(self.world.dice.bytes());
        node.workers.clear();
    }

    fn reports_of(&self, name: &NodeName) -> Option<Vec<WorkerReport>> {
        let nodes = self.nodes.lock();
        let node = nodes.get(name).filter(|node| node.up && !node.cut_off)?;
        let reports = node.workers.iter().map(|(uid, worker)| WorkerReport {
            worker: *uid,
            pool: self.pool.clone(),
            pod: worker.pod.clone(),
            ingress: Ingress::Socket(PathBuf::from(name.as_str()).join(uid.to_string())),
            hosted: worker.sandbox.as_ref().map(|sandbox| Hosted {
                identity: sandbox.identity.clone(),
                frozen: sandbox.visitors == 0 && sandbox.idle_since.elapsed() > FROZEN_AFTER,
                idle: if sandbox.visitors == 0 { sandbox.idle_since.elapsed() } else { Duration::ZERO },
                memory_bytes: 1 << 20,
            }),
            warm: Vec::new(),
        });
        Some(reports.collect())
    }

    /// Tells everybody how its workers are.
    pub(crate) fn tell_report(&self, name: &NodeName) {
        if let Some(reports) = self.reports_of(name) {
            self.tell(name, &NodeEvent::Report(reports));
        }
    }

    /// A request at a worker's door.
    pub(crate) async fn request(&self, ingress: &Ingress, actor: ActorUid, generation: Generation) -> Met {
        let Ingress::Socket(path) = ingress else { return Met::Nothing };
        let mut parts = path.iter().filter_map(|part| part.to_str());
        let (Some(name), Some(worker)) = (parts.next().map(NodeName::new), parts.next()) else { return Met::Nothing };
        let Ok(worker) = WorkerUid::parse(worker) else { return Met::Nothing };
        self.world.pass().await;
        if self.world.dice.happens(self.world.weather().lost) {
            return Met::Nothing;
        }
        {
            let mut nodes = self.nodes.lock();
            let Some(node) = nodes.get_mut(&name) else { return Met::Nothing };
            if node.until < Instant::now() {
                return Met::Stale;
            }
            let Some(sandbox) = node.workers.get_mut(&worker).map(|worker| &mut worker.sandbox) else {
                return Met::Stale;
            };
            match sandbox {
                Some(here) if here.identity.uid == actor && here.identity.generation == generation && !here.leaving => {
                    here.visitors += 1;
                }
                _ => return Met::Stale,
            }
        }
        self.world.pass().await;
        let counted = {
            let mut nodes = self.nodes.lock();
            let Some(node) = nodes.get_mut(&name) else { return Met::Nothing };
            let until = node.until;
            let sandbox = node.workers.get_mut(&worker).and_then(|worker| worker.sandbox.as_mut());
            match sandbox {
                Some(here) if here.identity.uid == actor && here.identity.generation == generation => {
                    here.visitors -= 1;
                    here.idle_since = Instant::now();
                    // Its connections are cut when it must no longer serve.
                    if until < Instant::now() {
                        return Met::Nothing;
                    }
                    here.app.count += 1;
                    (here.app, here.launch, here.identity.clone())
                }
                _ => return Met::Nothing,
            }
        };
        let (app, launch, identity) = counted;
        self.check_served(&identity).await;
        self.world.pass().await;
        match self.world.dice.happens(self.world.weather().lost) {
            true => Met::Nothing,
            false => Met::Counted { app, launch },
        }
    }

    /// Only the sandbox at the actor's current generation gets requests.
    async fn check_served(&self, identity: &Identity) {
        let Some(store) = self.store.get() else { return };
        let Identity { key, uid, generation, .. } = identity;
        match store.actor(key).await {
            Some(actor) if actor.uid == *uid && actor.generation == *generation => {}
            _ if self.world.is_forced(key) || store.is_just_restored() => {}
            now => {
                let now = now.map(|actor| actor.generation);
                self.world.broken(format!("generation {generation} of {key} was served, but it is at {now:?}"));
            }
        }
    }

    pub(crate) fn is_restoring(&self, name: &NodeName) -> bool {
        self.nodes.lock().get(name).is_some_and(|node| node.workers.values().any(|worker| worker.restoring))
    }

    pub(crate) fn only_on(&self, name: &NodeName) -> Vec<String> {
        let nodes = self.nodes.lock();
        let disk = nodes.get(name).into_iter().flat_map(|node| &node.disk);
        disk.filter(|(_, snapshot)| !snapshot.uploaded).map(|(prefix, _)| prefix.clone()).collect()
    }

    // What is looked at when all is quiet.

    /// Sandboxes and images that are there, by node.
    pub(crate) fn hosted(&self) -> Vec<(NodeName, WorkerUid, Identity)> {
        let nodes = self.nodes.lock();
        let all = nodes.iter().flat_map(|(name, node)| {
            node.workers.iter().filter_map(move |(uid, worker)| {
                worker.sandbox.as_ref().map(|sandbox| (name.clone(), *uid, sandbox.identity.clone()))
            })
        });
        all.collect()
    }

    pub(crate) fn images_in_hand(&self) -> usize {
        let nodes = self.nodes.lock();
        nodes
            .values()
            .map(|node| node.in_hand.len() + node.workers.values().map(|worker| worker.retained.len()).sum::<usize>())
            .sum()
    }

    pub(crate) fn snapshots(&self) -> BTreeSet<String> {
        let mut only = self.names().into_iter().flat_map(|name| self.only_on(&name)).collect::<Vec<_>>();
        only.extend(self.nodes.lock().values().flat_map(|node| node.begun.iter().cloned()));
        let storage = self.storage.lock();
        only.into_iter().chain(storage.whole.keys().cloned()).chain(storage.begun.iter().cloned()).collect()
    }
}
