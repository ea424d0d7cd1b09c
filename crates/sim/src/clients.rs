//! Clients: they ask actors to count, put them to rest, delete and make them, and write down what they saw.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ate_actor::Intent;
use ate_control::{Asked, Assigned, Code, ControlError};
use ate_name::{ActorKey, Generation, ObjectKey};
use ate_witness::{Seen, What};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::cluster::{Cluster, Met};
use crate::replica::Replica;
use crate::world::World;

/// How long a client waits for one call.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

/// The atespace of everybody.
pub(crate) const SPACE: &str = "space";

/// Tries of one request, as a router does them.
const TRIES: usize = 5;

pub(crate) struct Clients {
    pub(crate) world: Arc<World>,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) replicas: Mutex<Vec<Arc<Replica>>>,
    pub(crate) template: ObjectKey,
    pub(crate) actors: Vec<ActorKey>,
    /// Names that forks have.
    copies: Vec<ActorKey>,
    pub(crate) seen: Mutex<Vec<Seen>>,
    /// Where a router believes an actor to be.
    routes: Mutex<BTreeMap<ActorKey, Assigned>>,
}

impl Clients {
    pub(crate) fn new(world: Arc<World>, cluster: Arc<Cluster>, template: ObjectKey, actors: usize) -> Arc<Self> {
        let named = |prefix: char, n: usize| ActorKey::parse(SPACE, &format!("{prefix}{n}")).expect("a name");
        let actors = (0..actors).map(|n| named('a', n)).collect();
        Arc::new(Self {
            world,
            cluster,
            replicas: Mutex::default(),
            template,
            actors,
            copies: (0..2).map(|n| named('c', n)).collect(),
            seen: Mutex::default(),
            routes: Mutex::default(),
        })
    }

    /// The replicas that live.
    pub(crate) fn living(&self) -> Vec<Arc<Replica>> {
        self.replicas.lock().iter().filter(|replica| !replica.process.is_dead()).cloned().collect()
    }

    fn replica(&self) -> Option<Arc<Replica>> {
        let serving: Vec<_> = self.living().into_iter().filter(|replica| replica.serves.load(Relaxed)).collect();
        self.world.dice.pick(&serving).cloned()
    }

    /// A call to some replica; `None` if it dies, does not answer in time, or one of the two messages is lost.
    pub(crate) async fn call<T>(
        &self,
        what: impl AsyncFnOnce(Arc<Replica>) -> Result<T, ControlError>,
    ) -> Option<Result<T, ControlError>> {
        let Some(replica) = self.replica() else {
            tokio::time::sleep(Duration::from_secs(1)).await;
            return None;
        };
        self.world.pass().await;
        if self.world.dice.happens(self.world.weather().lost) {
            return None;
        }
        let answer = tokio::select! {
            biased;
            () = replica.process.died() => None,
            () = tokio::time::sleep(PATIENCE) => None,
            answer = what(Arc::clone(&replica)) => Some(answer),
        };
        answer.filter(|_| !self.world.dice.happens(self.world.weather().lost))
    }

    /// One client, until it is told to stop.
    pub(crate) async fn live(self: Arc<Self>, stop: tokio_util::sync::CancellationToken) {
        while !stop.is_cancelled() {
            let key = self.actors[self.world.dice.below(self.actors.len())].clone();
            match self.world.dice.below(21) {
                0..=11 => drop(self.request(&key).await),
                12..=14 => self.suspend(&key).await,
                15 => drop(self.call(async |replica| replica.control.save_actor(&key, Intent::Pause).await).await),
                16 => drop(self.call(async |replica| replica.control.resume_actor(&key, false).await).await),
                17 if self.world.dice.happens(300) => {
                    drop(self.call(async |replica| replica.control.delete_actor(&key).await).await);
                }
                18 if self.world.dice.happens(300) => {
                    let force = self.world.dice.happens(300);
                    drop(self.call(async |replica| replica.control.restart_actor(&key, force).await).await);
                }
                // Nobody asks a copy to count: it begins with what others have counted.
                19 if self.world.dice.happens(300) => {
                    let copy = self.copies[self.world.dice.below(self.copies.len())].clone();
                    match self.world.dice.happens(500) {
                        true => drop(self.call(async |replica| replica.control.fork_actor(&key, &copy).await).await),
                        false => drop(self.call(async |replica| replica.control.delete_actor(&copy).await).await),
                    }
                }
                20 if self.world.dice.happens(50) => self.by_force(&key).await,
                _ => tokio::time::sleep(self.world.dice.between(Duration::ZERO, Duration::from_secs(4))).await,
            }
        }
    }

    /// An operator who has lost patience.
    async fn by_force(&self, key: &ActorKey) {
        let asked = Asked::by("sim", "it takes too long").expect("a line");
        self.world.force(key);
        let silent = match self.world.dice.happens(700) {
            true => {
                let unstuck = self.call(async |replica| replica.control.unstick_actor(key, &asked).await).await;
                unstuck.map(|unstuck| unstuck.map(|(_, silent)| silent))
            }
            false => self.call(async |replica| replica.control.force_delete_actor(key, &asked).await).await,
        };
        self.world.say(format_args!("force on {key}: {silent:?}"));
        let harmless = match silent {
            Some(Ok(silent)) => silent.is_none(),
            Some(Err(error)) => matches!(error.code, Code::NotFound | Code::FailedPrecondition),
            None => false,
        };
        if harmless {
            self.world.unforce(key);
        }
    }

    pub(crate) async fn create(&self, key: &ActorKey) -> bool {
        let template = self.template.clone();
        let created =
            self.call(async |replica| replica.control.create_actor(key, &template, Default::default()).await).await;
        match created {
            Some(Ok(_)) => true,
            Some(Err(error)) => error.code == Code::AlreadyExists,
            None => false,
        }
    }

    pub(crate) fn route(&self, key: &ActorKey) -> Option<Assigned> {
        self.routes.lock().get(key).cloned()
    }

    /// Counts once; `true` if it was answered.
    pub(crate) async fn request(&self, key: &ActorKey) -> bool {
        let begun = self.world.micros();
        let mut reached = None;
        let mut stale: Option<Generation> = None;
        for _ in 0..TRIES {
            let cached = self.routes.lock().get(key).filter(|route| Some(route.generation) != stale).cloned();
            let route = match cached {
                Some(route) => route,
                None => {
                    let deadline = Instant::now() + PATIENCE / 2;
                    match self.call(async |replica| replica.control.activate(key, stale, deadline).await).await {
                        Some(Ok(route)) => {
                            self.routes.lock().insert(key.clone(), route.clone());
                            route
                        }
                        Some(Err(error)) if error.code == Code::NotFound => {
                            self.create(key).await;
                            return false;
                        }
                        _ => break,
                    }
                }
            };
            match self.cluster.request(&route.ingress, route.uid, route.generation).await {
                Met::Counted(app) => {
                    let what =
                        What::Answered { generation: route.generation.get(), nonce: app.nonce, count: app.count };
                    self.saw(key, Some(route.uid), begun, what);
                    return true;
                }
                Met::Stale => {
                    self.routes.lock().remove(key);
                    stale = Some(route.generation);
                }
                Met::Nothing => {
                    self.routes.lock().remove(key);
                    reached = Some(route.uid);
                    break;
                }
            }
        }
        if reached.is_some() {
            self.saw(key, reached, begun, What::Unanswered);
        }
        false
    }

    pub(crate) async fn suspend(&self, key: &ActorKey) {
        let begun = self.world.micros();
        let before = match self.cluster.store.get() {
            Some(store) => store.actor(key).await.map(|actor| actor.generation),
            None => None,
        };
        if let Some(Ok(saved)) = self.call(async |replica| replica.control.save_actor(key, Intent::Suspend).await).await
        {
            let snapshots = &saved.actor.snapshots;
            // It may have been woken and put to rest again while the answer was on its way.
            if before == Some(saved.actor.generation) && snapshots.base().is_some_and(|(_, only)| only.is_some()) {
                self.world.broken(format!(
                    "a suspend of {key} is acknowledged, but only one node has the snapshot: {snapshots:?}"
                ));
            }
            // What was saved; that is an older generation if the last one was lost before it could be.
            if let Some(durable) = &snapshots.durable {
                let what = What::Suspended { generation: durable.generation.get() };
                self.saw(key, Some(saved.actor.uid), begun, what);
            }
        }
    }

    /// An actor that was made anew under the same name is another one.
    fn saw(&self, key: &ActorKey, uid: Option<ate_name::ActorUid>, begun: u64, what: What) {
        let actor = format!("{key} {}", uid.map(|uid| uid.to_string()).unwrap_or_default());
        let seen = Seen { actor, begun, ended: self.world.micros(), what };
        self.world.say(format_args!("client of {key} {seen}"));
        self.seen.lock().push(seen);
    }
}
