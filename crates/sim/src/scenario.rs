//! One fault at one named point, and then: does the actor come through?
//!
//! Two replicas, calm weather. The first does what is asked and dies where the scenario says; the second is all that is
//! left. [`Stage`] says what is done; each test of `tests/windows.rs` is one row of `docs/faults.md`.

use std::sync::Arc;
use std::time::Duration;

use ate_actor::{Actor, Intent, Phase};
use ate_control::{
    ActorChange, Asked, Assigned, AuditEntry, ControlError, Quota, Replicas, Settings, TemplatePhase, WorkerRecord,
};
use ate_name::{ActorKey, ActorUid, NodeName, ObjectKey};
use ate_store::Kind;
use futures::StreamExt;
use futures::stream::BoxStream;

use crate::clients::SPACE;
use crate::cluster::Met;
use crate::replica::{Replica, SETTINGS};
use crate::{CALM, Outcome, Simulation};

mod faults;
mod hand;

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

    pub async fn apply_another_template(&self) {
        let applied = self
            .simulation
            .clients
            .call(async |replica| replica.control.apply(crate::objects(&crate::template("another"))).await);
        applied.await.expect("a replica lives").expect("it is as the first");
    }

    /// Where its golden snapshot is, once it has one.
    pub async fn golden_of_another(&self) -> Option<String> {
        let name = ObjectKey::new("sim", "another");
        let found = self.simulation.clients.call(async |replica| Ok(replica.control.template(&name))).await;
        Some(found?.ok()??.status.golden.as_ref()?.prefix.clone())
    }

    /// Why it has none, and never will.
    pub async fn until_another_has_failed(&self) -> String {
        let until = tokio::time::Instant::now() + CALM;
        let name = ObjectKey::new("sim", "another");
        loop {
            if let Some(template) = self.first.control.template(&name)
                && template.status.phase == TemplatePhase::Failed
            {
                return template.status.reason.clone();
            }
            assert!(tokio::time::Instant::now() < until, "{}\nnever failed", self.trace());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    pub async fn until_another_is_ready(&self) -> String {
        let until = tokio::time::Instant::now() + CALM;
        loop {
            if let Some(golden) = self.golden_of_another().await {
                return golden;
            }
            assert!(tokio::time::Instant::now() < until, "{}\nnever ready", self.simulation.world.trace());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    pub fn trace(&self) -> String {
        self.simulation.world.trace()
    }

    pub fn is_durable(&self, prefix: &str) -> bool {
        self.simulation.cluster.is_durable(prefix)
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

    /// What whoever watches actors at the first replica is told.
    pub async fn watch(&self, after: Option<u64>) -> BoxStream<'static, Result<ActorChange, ControlError>> {
        self.first.control.watch_actors(None, after).await.expect("they can be watched").boxed()
    }

    /// Whoever called goes away once the actor is as it should be, before there is an answer.
    pub async fn abandon(&self, call: impl Future<Output = bool>, what: &str, holds: impl Fn(&Actor) -> bool) {
        tokio::select! {
            biased;
            () = self.until(what, holds) => {}
            _ = call => panic!("it was answered before anybody could go away"),
        }
    }

    /// Whoever forks goes away when it is begun; whoever deletes, when the actor is gone and what it had is not.
    pub async fn abandon_the_fork(&self) {
        let operations = async || self.simulation.store.all(Kind::Operation).await.len();
        while operations().await > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let begun = async {
            while operations().await == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            biased;
            () = begun => {}
            _ = self.fork() => panic!("it was answered before anybody could go away"),
        }
    }

    pub async fn abandon_the_deletion(&self) {
        let gone = async {
            while self.actor().await.is_some() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            biased;
            () = gone => {}
            _ = self.delete() => panic!("it was answered before anybody could go away"),
        }
    }

    /// What the first replica says to a resume.
    pub async fn try_resume(&self) -> Result<(), ControlError> {
        self.first.control.resume_actor(&self.actor, false).await.map(drop)
    }

    /// Waits until none of these is in a worker of this node.
    pub async fn until_they_have_left(&self, those: &[ActorKey], node: &NodeName) {
        let until = tokio::time::Instant::now() + CALM;
        let is_there = |worker: &WorkerRecord| {
            worker.lease.node == *node && worker.assigned.as_ref().is_some_and(|by| those.contains(&by.key))
        };
        while self.simulation.store.workers().await.iter().any(is_there) {
            assert!(tokio::time::Instant::now() < until, "{}\nnever given up", self.simulation.world.trace());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
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

    /// Asks the first replica for a suspend, and does not wait for it.
    pub fn suspend_at_first_behind(&self) {
        let (first, actor) = (Arc::clone(&self.first), self.actor.clone());
        tokio::spawn(async move { first.control.save_actor(&actor, Intent::Suspend).await });
    }

    pub fn resume_at_first_behind(&self) {
        let (first, actor) = (Arc::clone(&self.first), self.actor.clone());
        tokio::spawn(async move { first.control.resume_actor(&actor, false).await });
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

    pub async fn sleep(&self, seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stage").field("actor", &self.actor).finish_non_exhaustive()
    }
}
