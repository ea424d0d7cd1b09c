//! One fault at one named point, and then: does the actor come through?
//!
//! Two replicas, calm weather. The first does what is asked and dies where the scenario says; the second is all that is
//! left. [`Stage`] says what is done; each test of `tests/windows.rs` is one row of `docs/faults.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ate_actor::{Actor, Event, Intent, Phase};
use ate_control::{
    ActorChange, Asked, Assigned, Assignee, AuditEntry, ControlError, NodeRecord, Quota, Replicas, Settings,
    WorkerRecord,
};
use ate_name::{ActorKey, ActorUid, Generation, NodeName};
use ate_orders::ForgetOrder;
use ate_store::{Change, Key, Kind, Record, Store};
use futures::StreamExt;
use futures::stream::BoxStream;

use crate::clients::SPACE;
use crate::cluster::Met;
use crate::replica::{Replica, SETTINGS};
use crate::{Backup, CALM, Outcome, Simulation};

/// A calm simulation with one actor that has counted once.
pub struct Stage {
    simulation: Simulation,
    first: Arc<Replica>,
    actor: ActorKey,
}

/// Sets the stage, plays, heals and looks whether everything is at rest and explained. Returns what the play returned.
pub fn play<T>(what: impl AsyncFnOnce(&Stage) -> T) -> T {
    play_on(1, SETTINGS, what)
}

/// The same with so many actors; the first has counted once.
pub fn play_with<T>(actors: usize, what: impl AsyncFnOnce(&Stage) -> T) -> T {
    play_on(actors, SETTINGS, what)
}

/// The same with one replica, which knows that there is no other.
pub fn play_alone<T>(actors: usize, what: impl AsyncFnOnce(&Stage) -> T) -> T {
    play_on(actors, Settings { replicas: Replicas::Alone, ..SETTINGS }, what)
}

fn play_on<T>(actors: usize, settings: Settings, what: impl AsyncFnOnce(&Stage) -> T) -> T {
    crate::simulated(async {
        let simulation = Simulation { settings, ..Simulation::new(1, actors) };
        let first = simulation.start_replica();
        simulation.keep_nodes();
        simulation.furnish().await;
        if !matches!(simulation.settings.replicas, Replicas::Alone) {
            simulation.start_replica();
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        let actor = simulation.clients.actors[0].clone();
        let stage = Stage { simulation, first, actor };
        let played = what(&stage).await;
        come_to_rest(stage.simulation).await;
        played
    })
}

/// Heals, and fails if anything is not at rest or cannot be explained.
async fn come_to_rest(simulation: Simulation) {
    simulation.rest().await;
    let Outcome { broken, trace, .. } = simulation.outcome(1);
    if let Some(broken) = broken {
        panic!("{trace}\n{}", broken.0);
    }
}

/// The first replica dies at the point while it makes a template's golden snapshot; the other makes it.
pub fn golden_survives(point: &str) {
    crate::simulated(async {
        let simulation = Simulation::new(1, 1);
        let first = simulation.start_replica();
        first.process.die_when(point);
        simulation.keep_nodes();
        let second = async {
            first.process.died().await;
            simulation.start_replica();
        };
        tokio::join!(simulation.furnish(), second);
        come_to_rest(simulation).await;
    });
}

/// The first replica stands still at the point until the other has long made the golden snapshot, and goes on.
pub fn golden_is_left_alone(point: &str) {
    crate::simulated(async {
        let simulation = Simulation::new(1, 1);
        let first = simulation.start_replica();
        first.process.stand_still_when(point, CALM / 4);
        simulation.keep_nodes();
        let until = async |what: &dyn Fn() -> bool| {
            let begun = tokio::time::Instant::now();
            while !what() {
                assert!(begun.elapsed() < CALM, "it never came to {point}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        // Not before: it would be the one who makes it.
        let second = async {
            until(&|| first.process.stands_still()).await;
            simulation.start_replica();
        };
        tokio::join!(simulation.furnish(), second);
        until(&|| first.process.has_stood_still()).await;
        come_to_rest(simulation).await;
    });
}

impl Stage {
    /// The first replica dies when it comes to a point: `before` or `after` a `commit of` a phase, or an order.
    pub fn die_when(&self, point: &str) {
        self.simulation.world.say(format_args!("the first replica will die {point}"));
        self.first.process.die_when(point);
    }

    /// The next order of this kind that the first replica gives is never answered: it does not arrive (`before`), or is carried
    /// out and nobody hears of it (`after`). Everything else goes on.
    pub fn never_answered(&self, point: &str) {
        self.simulation.world.say(format_args!("an order will be lost {point}"));
        self.first.process.lose_when(point);
    }

    /// Whether there was such an order.
    pub fn was_never_answered(&self) -> bool {
        self.first.process.has_lost()
    }

    /// Calls the first replica; whoever calls goes away with it.
    async fn at_first<T>(&self, what: impl AsyncFnOnce(&Replica) -> T) -> Option<T> {
        tokio::select! {
            biased;
            () = self.first.process.died() => None,
            answer = what(&self.first) => Some(answer),
        }
    }

    pub async fn resume(&self) -> bool {
        self.at_first(async |first| first.control.resume_actor(&self.actor, false).await.is_ok()).await == Some(true)
    }

    pub async fn suspend(&self) -> bool {
        self.at_first(async |first| first.control.save_actor(&self.actor, Intent::Suspend).await.is_ok()).await
            == Some(true)
    }

    /// At whichever replica lives.
    pub async fn suspend_elsewhere(&self) {
        self.simulation.clients.suspend(&self.actor).await;
    }

    pub async fn pause(&self) -> bool {
        self.at_first(async |first| first.control.save_actor(&self.actor, Intent::Pause).await.is_ok()).await
            == Some(true)
    }

    /// From now on nobody may miss it.
    fn deletes(&self) {
        self.simulation.clients.lives.lock().deleting(&self.actor);
    }

    pub async fn delete(&self) -> bool {
        self.deletes();
        self.at_first(async |first| first.control.delete_actor(&self.actor).await.is_ok()).await == Some(true)
    }

    pub async fn restart(&self, force: bool) -> bool {
        let note = self.simulation.clients.restarts(&self.actor).await;
        let restarted =
            self.at_first(async |first| first.control.restart_actor(&self.actor, force).await.is_ok()).await;
        self.simulation.clients.restarted(&self.actor, note, restarted == Some(true)).await;
        restarted == Some(true)
    }

    /// At whichever replica lives.
    pub async fn restart_elsewhere(&self) -> bool {
        let note = self.simulation.clients.restarts(&self.actor).await;
        let restarted =
            self.simulation.clients.call(async |replica| replica.control.restart_actor(&self.actor, false).await);
        let done = restarted.await.is_some_and(|restarted| restarted.is_ok());
        self.simulation.clients.restarted(&self.actor, note, done).await;
        done
    }

    fn copy(&self) -> ActorKey {
        ActorKey::parse(SPACE, "copy").expect("a name")
    }

    pub async fn fork(&self) -> Option<Result<Actor, ControlError>> {
        let forked = self.at_first(async |first| first.control.fork_actor(&self.actor, &self.copy()).await).await;
        forked.map(|forked| forked.map(|forked| forked.actor))
    }

    /// The other way round: of the actor that has the fork's name.
    pub async fn fork_back(&self) -> Option<Result<Actor, ControlError>> {
        let third = ActorKey::parse(SPACE, "third").expect("a name");
        let forked = self.at_first(async |first| first.control.fork_actor(&self.copy(), &third).await).await;
        forked.map(|forked| forked.map(|forked| forked.actor))
    }

    /// Takes the name that the fork is to have.
    pub async fn create_in_its_place(&self) {
        assert!(self.simulation.clients.create(&self.copy()).await);
    }

    /// The template is deleted and applied anew, at the last replica; the first, which is told nothing of it, makes the actor of it
    /// at once. Returns whether of the new one.
    pub async fn make_it_of_a_new_template(&self) -> bool {
        let Simulation { clients, store, .. } = &self.simulation;
        let last = clients.living().pop().expect("a replica lives");
        let deleted = last.control.delete_object(ate_object::Kind::ActorTemplate, &clients.template).await;
        deleted.expect("it has no actors");
        last.control.apply(crate::objects(&crate::template("template"))).await.expect("it is as before");
        let uid = last.control.template(&clients.template).expect("it was applied").uid;
        let stale = self.first.control.template(&clients.template).is_none_or(|known| known.uid != uid);
        assert!(stale, "it has heard of it already");
        let then = clients.lives.lock().known(&self.actor);
        let made = self.first.control.create_actor(&self.actor, &clients.template, Default::default()).await;
        let made = made.expect("there is a template").actor;
        clients.lives.lock().made(&self.actor, Some(made.uid), then);
        store.actor(&self.actor).await.expect("it was made").template_uid == uid
    }

    /// The fork, and what its snapshot has counted, once no operation is under way.
    pub async fn forked(&self) -> Option<(Actor, u64)> {
        let until = tokio::time::Instant::now() + CALM;
        while !self.simulation.store.all(Kind::Operation).await.is_empty() {
            assert!(tokio::time::Instant::now() < until, "{}\nit never ended", self.simulation.world.trace());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let actor = self.simulation.store.actor(&self.copy()).await?;
        let durable = actor.snapshots.durable.as_ref()?.prefix.clone();
        let count = self.simulation.cluster.durable_count(&durable).expect("what is durable is there");
        Some((actor, count))
    }

    /// Has the copy for the fork removed, as by an order of a time that the store no longer knows of.
    pub async fn remove_the_copy(&self) {
        let Simulation { cluster, .. } = &self.simulation;
        for node in self.nodes() {
            let copies = cluster.only_on(&node).into_iter().filter(|prefix| prefix.contains("/copy/"));
            cluster.forget(&node, &ForgetOrder::snapshots(copies), &BTreeSet::new()).await.expect("it is reached");
        }
    }

    pub async fn unstick(&self) -> Option<Result<Actor, ControlError>> {
        let asked = Asked::by("sim", "it hangs").expect("a line");
        let unstuck = self.at_first(async |first| first.control.unstick_actor(&self.actor, &asked).await).await;
        unstuck.map(|unstuck| unstuck.map(|(unstuck, _)| unstuck.actor))
    }

    pub async fn force_delete(&self) -> bool {
        self.force_delete_one(0).await
    }

    /// Whichever of the actors; the first is the one that everything else is about.
    pub async fn force_delete_one(&self, index: usize) -> bool {
        let asked = Asked::by("sim", "it is in the way").expect("a line");
        let actor = &self.simulation.clients.actors[index];
        self.simulation.clients.lives.lock().deleting(actor);
        self.at_first(async |first| first.control.force_delete_actor(actor, &asked).await.is_ok()).await == Some(true)
    }

    /// Puts all to rest, as a machine does that stops; returns whom it could not.
    pub async fn suspend_all(&self) -> Vec<ActorKey> {
        let suspended = self.at_first(async |first| first.control.suspend_all().await).await;
        let failed = suspended.expect("nobody died").expect("the store is there");
        failed.into_iter().map(|(key, _, _)| key).collect()
    }

    /// What was done by force, as a replica that lives tells it.
    pub async fn audit(&self) -> Vec<AuditEntry> {
        let listed = self.simulation.clients.call(async |replica| replica.control.list_audit(None, 100).await).await;
        listed.expect("a replica lives").expect("the store is there").0
    }

    /// Whether some worker is said to be the actor's.
    pub async fn holds_a_worker(&self) -> bool {
        let workers = self.simulation.store.workers().await;
        workers.iter().filter_map(|worker| worker.assigned.as_ref()).any(|assignee| assignee.key == self.actor)
    }

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
            let change = if there { Change::new().put(key, "{}") } else { Change::new().delete(key) };
            self.simulation.store.memory.commit(change).await.expect("memory does not fail");
        }
        self.sleep(5).await;
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

    /// What whoever watches actors at the first replica is told.
    pub async fn watch(&self, after: Option<u64>) -> BoxStream<'static, Result<ActorChange, ControlError>> {
        self.first.control.watch_actors(None, after).await.expect("they can be watched").boxed()
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

    /// Whoever called goes away once the actor is as it should be, before there is an answer.
    pub async fn abandon(&self, call: impl Future<Output = bool>, what: &str, holds: impl Fn(&Actor) -> bool) {
        tokio::select! {
            biased;
            () = self.until(what, holds) => {}
            _ = call => panic!("it was answered before anybody could go away"),
        }
    }

    /// What the first replica says to a resume.
    pub async fn try_resume(&self) -> Result<(), ControlError> {
        self.first.control.resume_actor(&self.actor, false).await.map(drop)
    }

    /// Everything on its disk is gone.
    pub fn wipe_disk(&self, node: &NodeName) {
        self.simulation.cluster.wipe_disk(node);
    }

    /// Waits until every worker is free or its actor's.
    pub async fn until_no_worker_is_nobodys(&self) {
        let until = tokio::time::Instant::now() + CALM;
        let of_another = |worker: &WorkerRecord| worker.assigned.as_ref().is_some_and(|by| by.key != self.actor);
        while self.simulation.store.workers().await.iter().any(of_another) {
            assert!(tokio::time::Instant::now() < until, "{}\nnever freed", self.simulation.world.trace());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn back_up(&self) -> Backup {
        self.simulation.back_up().await
    }

    /// The store is lost and goes on as this; from here on the first replica is no more.
    pub async fn restore(&self, backup: Backup) {
        self.simulation.restore(backup).await;
    }

    /// At whichever replica lives.
    pub async fn pause_elsewhere(&self) {
        let paused =
            self.simulation.clients.call(async |replica| replica.control.save_actor(&self.actor, Intent::Pause).await);
        paused.await.expect("a replica lives").expect("it runs");
    }

    /// At whichever replica lives; what the fork's snapshot has counted.
    pub async fn fork_elsewhere(&self) -> u64 {
        let forked =
            self.simulation.clients.call(async |replica| replica.control.fork_actor(&self.actor, &self.copy()).await);
        forked.await.expect("a replica lives").expect("it has a snapshot");
        self.forked().await.expect("it was made").1
    }

    /// At whichever replica lives.
    pub async fn delete_elsewhere(&self) {
        self.simulation.clients.delete(&self.actor).await;
        assert!(self.actor().await.is_none(), "{}\nit is still there", self.simulation.world.trace());
    }

    /// Whether the first replica has come to where it dies, or comes there soon.
    pub async fn is_first_dead(&self) -> bool {
        tokio::time::timeout(Duration::from_secs(5), self.first.process.died()).await.is_ok()
    }

    pub fn kill_first(&self) {
        self.first.process.die();
    }

    /// Counts, asking again for as long as a client would; the count.
    pub async fn count(&self) -> u64 {
        let until = tokio::time::Instant::now() + CALM;
        while !self.simulation.clients.request(&self.actor).await {
            assert!(tokio::time::Instant::now() < until, "{}\nit never answered", self.simulation.world.trace());
        }
        let seen = self.simulation.clients.seen.lock();
        seen.iter()
            .rev()
            .find_map(|seen| match seen.what {
                ate_witness::What::Answered { count, .. } => Some(count),
                _ => None,
            })
            .expect("it was answered")
    }

    /// What the processes that answered last drew when they started.
    pub fn nonce(&self) -> u64 {
        let seen = self.simulation.clients.seen.lock();
        let answered = seen.iter().rev().find_map(|seen| match seen.what {
            ate_witness::What::Answered { nonce, .. } => Some(nonce),
            _ => None,
        });
        answered.expect("it was answered")
    }

    /// Counts, and tells how long that took on the simulated clock.
    pub async fn time_to_count(&self) -> Duration {
        let begun = tokio::time::Instant::now();
        self.count().await;
        begun.elapsed()
    }

    pub async fn actor(&self) -> Option<Actor> {
        self.simulation.store.actor(&self.actor).await
    }

    /// Waits until the actor is as it should be.
    pub async fn until(&self, what: &str, holds: impl Fn(&Actor) -> bool) {
        let until = tokio::time::Instant::now() + CALM;
        while !self.actor().await.is_some_and(|actor| holds(&actor)) {
            assert!(tokio::time::Instant::now() < until, "{}\nnever {what}", self.simulation.world.trace());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn until_suspended(&self) {
        self.until("suspended", |actor| actor.phase == Phase::Suspended).await;
    }

    /// The node that runs the actor, or has its newest snapshot.
    pub async fn node(&self) -> NodeName {
        let actor = self.actor().await.expect("it is there");
        let local = actor.snapshots.local.as_ref().map(|(_, node)| node);
        actor.lease().map(|lease| &lease.node).or(local).expect("it is somewhere").clone()
    }

    pub fn nodes(&self) -> Vec<NodeName> {
        self.simulation.cluster.names()
    }

    /// Waits until every node has been told that an actor is gone.
    pub async fn until_all_are_told_gone(&self, actor: ActorUid) {
        let until = tokio::time::Instant::now() + CALM;
        while self.simulation.cluster.told_gone(actor) != self.nodes() {
            assert!(tokio::time::Instant::now() < until, "{}\nnever told", self.simulation.world.trace());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub fn kill_node(&self, node: &NodeName) {
        self.simulation.cluster.kill_node(node);
    }

    pub fn power_off(&self, node: &NodeName) {
        self.simulation.cluster.power_off(node);
    }

    /// The first replica's orders do not get there; what the node says is heard.
    pub fn cut_first_from(&self, node: &NodeName) {
        self.simulation.cluster.cut(&self.first.name, node);
    }

    pub fn cut_everybody_from(&self, node: &NodeName, cut: bool) {
        match cut {
            true => self.simulation.clients.living().iter().for_each(|it| self.simulation.cluster.cut(&it.name, node)),
            false => self.simulation.cluster.mend_ways_to(node),
        }
    }

    /// Asks the first replica for a suspend, and does not wait for it.
    pub fn suspend_at_first_behind(&self) {
        let (first, actor) = (Arc::clone(&self.first), self.actor.clone());
        tokio::spawn(async move { first.control.save_actor(&actor, Intent::Suspend).await });
    }

    pub fn resume_at_first_behind(&self) {
        let (first, actor) = (Arc::clone(&self.first), self.actor.clone());
        tokio::spawn(async move { first.control.resume_actor(&actor, false).await });
    }

    pub fn hang(&self, node: &NodeName, hangs: bool) {
        self.simulation.cluster.set_hangs(node, hangs);
    }

    /// It never comes back.
    pub fn destroy(&self, node: &NodeName) {
        self.simulation.cluster.destroy(node);
    }

    pub fn start_node(&self, node: &NodeName) {
        self.simulation.cluster.start_node(node);
    }

    pub fn cut_off(&self, node: &NodeName, cut_off: bool) {
        self.simulation.cluster.set_cut_off(node, cut_off);
    }

    /// Ends the worker that hosts the actor.
    pub async fn kill_its_worker(&self) {
        let actor = self.actor().await.expect("it is there");
        let lease = actor.lease().expect("it is in a worker");
        self.simulation.cluster.kill_this_worker(&lease.node, lease.worker);
    }

    pub async fn generation(&self) -> u64 {
        self.actor().await.expect("it is there").generation.get()
    }

    /// Until a worker there has all it needs to restore somebody.
    pub async fn until_restoring(&self, node: &NodeName) {
        let until = tokio::time::Instant::now() + CALM;
        while !self.simulation.cluster.is_restoring(node) {
            assert!(tokio::time::Instant::now() < until, "{}\nnever restoring", self.simulation.world.trace());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Whether the actor is in one of its workers, at its generation.
    pub async fn is_hosted(&self, node: &NodeName) -> bool {
        let actor = self.actor().await.expect("it is there");
        let its =
            |identity: &ate_orders::Identity| identity.uid == actor.uid && identity.generation == actor.generation;
        self.simulation.cluster.hosted().iter().any(|(at, _, identity)| at == node && its(identity))
    }

    /// Where a router believes the actor to be.
    pub fn route(&self) -> Assigned {
        self.simulation.clients.route(&self.actor).expect("it was asked")
    }

    /// Until no worker is free.
    pub async fn wake_the_others(&self) {
        let clients = &self.simulation.clients;
        for other in clients.actors.iter().filter(|other| **other != self.actor) {
            let woken = clients.call(async |replica| replica.control.resume_actor(other, false).await).await;
            if woken.expect("nobody died").is_err() {
                return;
            }
        }
    }

    /// Whether whoever follows this route meets nobody, though another actor is there.
    pub async fn is_refused_where_somebody_else_is(&self, route: &Assigned) -> bool {
        let Simulation { cluster, .. } = &self.simulation;
        let path = format!("{:?}", route.ingress);
        let somebody = cluster.hosted().into_iter().find(|(_, worker, _)| path.contains(&worker.to_string()));
        let (_, _, identity) = somebody.expect("somebody is there");
        assert_ne!(identity.uid, route.uid, "somebody else");
        matches!(cluster.request(&route.ingress, route.uid, route.generation).await, Met::Stale)
    }

    /// So many minutes off, each.
    pub fn set_clocks(&self, minutes: [i64; 2]) {
        for (replica, minutes) in self.simulation.clients.living().into_iter().zip(minutes) {
            replica.set_clock(&self.simulation.world, jiff::SignedDuration::from_mins(minutes));
        }
    }

    pub async fn kill_its_sandbox(&self) {
        let node = self.node().await;
        self.simulation.cluster.kill_sandbox(&node);
    }

    /// Its workload exits by itself.
    pub async fn crash(&self) {
        let node = self.node().await;
        self.simulation.cluster.end_sandbox(&node, ate_orders::Exit::Code(1));
        self.until_suspended().await;
    }

    /// From here on whatever is woken ends while it starts, or no longer does.
    pub fn crash_at_start(&self, crashes: bool) {
        self.simulation.cluster.crashes.store(crashes, Ordering::Relaxed);
    }

    /// Limits what its atespace may do.
    pub async fn set_quota(&self, quota: Quota) {
        let set = self
            .simulation
            .clients
            .call(async |replica| replica.control.set_quota(&self.actor.atespace, quota, None).await);
        set.await.expect("a replica lives").expect("the atespace is there");
    }

    /// The same by somebody who has seen other limits.
    pub async fn set_quota_by(&self, quota: Quota, seen: Quota) -> Result<(), ControlError> {
        let space = &self.actor.atespace;
        let set =
            self.simulation.clients.call(async |replica| replica.control.set_quota(space, quota, Some(seen)).await);
        set.await.expect("a replica lives")
    }

    /// What all replicas together have counted.
    pub fn counted(&self, name: &str) -> u64 {
        let samples = self.simulation.clients.living().into_iter().flat_map(|replica| replica.control.samples());
        samples.filter(|sample| sample.name == name).map(|sample| sample.value).sum()
    }

    /// Brings every actor to rest, and resumes all of them at once, at all replicas.
    pub async fn resume_all(&self) -> Vec<Result<(), ControlError>> {
        let clients = &self.simulation.clients;
        for key in &clients.actors {
            clients.suspend(key).await;
        }
        let (replicas, mut resuming) = (clients.living(), tokio::task::JoinSet::new());
        for (key, replica) in clients.actors.clone().into_iter().zip(replicas.into_iter().cycle()) {
            resuming.spawn(async move { replica.control.resume_actor(&key, false).await.map(drop) });
        }
        resuming.join_all().await
    }

    /// Asks the first replica where each actor is, as a router does; the answers come when they come.
    pub fn begin_to_activate_all(&self) -> tokio::task::JoinSet<Result<(), ControlError>> {
        let deadline = tokio::time::Instant::now() + SETTINGS.park;
        let activating = self.simulation.clients.actors.iter().cloned().map(|key| {
            let first = Arc::clone(&self.first);
            async move { first.control.activate(&key, None, deadline).await.map(drop) }
        });
        activating.collect()
    }

    /// The actors that hold a worker and are not on their way out of it.
    pub async fn running(&self) -> Vec<ActorKey> {
        let mut running = Vec::new();
        for key in &self.simulation.clients.actors {
            let actor = self.simulation.store.actor(key).await;
            running.extend(actor.filter(|actor| matches!(actor.phase, Phase::Running { .. })).map(|actor| actor.key));
        }
        running
    }

    /// Resumes an actor that is at rest, at the first replica.
    pub async fn resume_another(&self) -> Result<(), ControlError> {
        let running = self.running().await;
        let another = self.simulation.clients.actors.iter().find(|key| !running.contains(key)).expect("one is at rest");
        self.first.control.resume_actor(another, false).await.map(drop)
    }

    /// Suspends the actor and wakes it again, at each replica in turn.
    pub async fn suspend_and_resume_at_each(&self) -> Vec<Result<(), ControlError>> {
        let mut resumed = Vec::new();
        for replica in self.simulation.clients.living() {
            self.until("at rest or running", |actor| actor.phase.operation().is_none()).await;
            let suspended = replica.control.save_actor(&self.actor, Intent::Suspend).await;
            assert!(suspended.is_ok(), "{:?}", suspended.err());
            resumed.push(replica.control.resume_actor(&self.actor, false).await.map(drop));
        }
        resumed
    }

    /// Why a living replica does not wake it, if it does not.
    pub async fn refusal(&self) -> Option<ControlError> {
        let woken =
            self.simulation.clients.call(async |replica| replica.control.resume_actor(&self.actor, false).await);
        woken.await.expect("a replica lives").err()
    }

    pub fn storage_away(&self, away: bool) {
        self.simulation.cluster.set_storage_away(away);
    }

    pub fn store_away(&self, away: bool) {
        *self.simulation.store.away.lock() = away;
    }

    pub fn disk_full(&self, node: &NodeName, full: bool) {
        self.simulation.cluster.set_full(node, full);
    }

    pub async fn sleep(&self, seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stage").field("actor", &self.actor).finish_non_exhaustive()
    }
}
