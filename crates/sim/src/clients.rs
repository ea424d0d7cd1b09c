//! Clients: they ask actors to count, put them to rest, delete and make them, and write down what they saw.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ate_actor::Intent;
use ate_control::{Asked, Assigned, Code, ControlError};
use ate_name::{ActorKey, ActorUid, Generation, ObjectKey};
use ate_witness::{Asks, Line, Seen, Told, What, covers};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::cluster::{Cluster, Met};
use crate::lives::Lives;
use crate::replica::Replica;
use crate::world::World;

/// How long a client waits for one call.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

/// How much later than its deadline a wake may be answered: what it has begun before may still read and commit once, and be
/// slow at that.
const OVERRUN: Duration = Duration::from_secs(18);

/// A commit that was given up may be made so much later, and a suspend begin that whoever asked for it has heard no more of.
const BEGUN_LATE: Duration = Duration::from_secs(6);

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
    pub(crate) copies: Vec<ActorKey>,
    pub(crate) seen: Mutex<Vec<Seen>>,
    pub(crate) lives: Mutex<Lives>,
    /// Suspends that were asked for.
    asks: Mutex<Asks>,
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
            lives: Mutex::default(),
            asks: Mutex::default(),
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

    /// A call about an actor, who must be there unless somebody has begun to delete it.
    async fn call_of<T>(
        &self,
        key: &ActorKey,
        what: impl AsyncFnOnce(Arc<Replica>) -> Result<T, ControlError>,
    ) -> Option<Result<T, ControlError>> {
        let then = self.lives.lock().known(key);
        let answer = self.call(what).await;
        if let Some(Err(error)) = &answer
            && error.code == Code::NotFound
            && self.lives.lock().is_missed(key, then)
        {
            self.world.broken(format!("{key} is gone, and nobody has deleted it"));
        }
        answer
    }

    /// One client, until it is told to stop.
    pub(crate) async fn live(self: Arc<Self>, stop: tokio_util::sync::CancellationToken) {
        while !stop.is_cancelled() {
            let key = self.actors[self.world.dice.below(self.actors.len())].clone();
            match self.world.dice.below(22) {
                0..=11 => drop(self.request(&key).await),
                12..=14 => self.suspend(&key).await,
                15 => drop(
                    self.call_of(&key, async |replica| replica.control.save_actor(&key, Intent::Pause).await).await,
                ),
                16 => {
                    drop(self.call_of(&key, async |replica| replica.control.resume_actor(&key, false).await).await);
                }
                17 if self.world.dice.happens(300) => self.delete(&key).await,
                18 if self.world.dice.happens(300) => self.restart(&key).await,
                // Nobody asks a copy to count: it begins with what others have counted.
                19 if self.world.dice.happens(300) => {
                    let copy = self.copies[self.world.dice.below(self.copies.len())].clone();
                    match self.world.dice.happens(500) {
                        true => drop(
                            self.call_of(&key, async |replica| replica.control.fork_actor(&key, &copy).await).await,
                        ),
                        false => self.delete(&copy).await,
                    }
                }
                20 if self.world.dice.happens(50) => self.by_force(&key).await,
                21 if self.world.dice.happens(100) => self.apply_another_template().await,
                _ => tokio::time::sleep(self.world.dice.between(Duration::ZERO, Duration::from_secs(4))).await,
            }
        }
    }

    pub(crate) async fn delete(&self, key: &ActorKey) {
        let then = self.lives.lock().known(key);
        self.lives.lock().deleting(key);
        let deleted = self.call(async |replica| replica.control.delete_actor(key).await).await;
        let refused = matches!(&deleted, Some(Err(error)) if error.code == Code::FailedPrecondition);
        self.lives.lock().deleted(key, then, refused);
    }

    async fn restart(&self, key: &ActorKey) {
        let force = self.world.dice.happens(300);
        let begun = self.restarts(key).await;
        let restarted = self.call_of(key, async |replica| replica.control.restart_actor(key, force).await).await;
        self.restarted(key, begun, matches!(restarted, Some(Ok(_)))).await;
    }

    /// Notes that a restart is asked for, whatever becomes of it; returns which note.
    pub(crate) async fn restarts(&self, key: &ActorKey) -> usize {
        let uid = self.uid(key).await;
        self.saw(key, uid, self.world.micros(), What::Restarted { done: false });
        self.seen.lock().len() - 1
    }

    /// Notes that it was answered, and whether it was done.
    pub(crate) async fn restarted(&self, key: &ActorKey, note: usize, done: bool) {
        let uid = self.uid(key).await;
        let (asked, begun) = {
            let mut seen = self.seen.lock();
            let asked = &mut seen[note];
            asked.ended = self.world.micros();
            asked.what = What::Restarted { done };
            (asked.actor.clone(), asked.begun)
        };
        // Somebody else of that name may have been restarted instead.
        if asked != story(key, uid) {
            self.saw(key, uid, begun, What::Restarted { done: false });
        }
    }

    async fn uid(&self, key: &ActorKey) -> Option<ActorUid> {
        self.cluster.store.get()?.actor(key).await.map(|actor| actor.uid)
    }

    /// An operator who has lost patience.
    async fn by_force(&self, key: &ActorKey) {
        let asked = Asked::by("sim", "it takes too long").expect("a line");
        self.world.force(key);
        let silent = match self.world.dice.happens(700) {
            true => {
                let unstuck = self.call_of(key, async |replica| replica.control.unstick_actor(key, &asked).await).await;
                unstuck.map(|unstuck| unstuck.map(|(_, silent)| silent))
            }
            false => {
                let then = self.lives.lock().known(key);
                self.lives.lock().deleting(key);
                let deleted = self.call(async |replica| replica.control.force_delete_actor(key, &asked).await).await;
                self.lives.lock().deleted(key, then, false);
                deleted
            }
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

    /// One whose golden snapshot is made in whatever weather there is.
    async fn apply_another_template(&self) {
        let manifest = crate::template(&format!("another-{}", self.world.dice.below(3)));
        let objects = crate::objects(&manifest);
        drop(self.call(async |replica| replica.control.apply(objects).await).await);
    }

    pub(crate) async fn create(&self, key: &ActorKey) -> bool {
        let template = self.template.clone();
        let then = self.lives.lock().known(key);
        let created =
            self.call(async |replica| replica.control.create_actor(key, &template, Default::default()).await).await;
        let uid = match created {
            Some(Ok(created)) => Some(created.actor.uid),
            Some(Err(error)) if error.code == Code::AlreadyExists => None,
            _ => return false,
        };
        self.lives.lock().made(key, uid, then);
        true
    }

    pub(crate) fn route(&self, key: &ActorKey) -> Option<Assigned> {
        self.routes.lock().get(key).cloned()
    }

    /// Where an actor runs, woken if need be.
    async fn activate(&self, key: &ActorKey, stale: Option<Generation>) -> Option<Result<Assigned, ControlError>> {
        let then = self.lives.lock().known(key);
        let activated = self.call_of(key, async |replica| {
            let (asked, deadline) = (Instant::now(), Instant::now() + PATIENCE / 2);
            let activated = replica.control.activate(key, stale, deadline);
            match tokio::time::timeout_at(deadline + OVERRUN, activated).await {
                Ok(activated) => activated,
                Err(_) => {
                    if !replica.process.stood_still_since(asked) {
                        self.world.broken(format!("a request for {key} is not answered by its deadline"));
                    }
                    Err(ControlError::new(Code::DeadlineExceeded, "nothing was said"))
                }
            }
        });
        let activated = activated.await;
        if let Some(Ok(route)) = &activated
            && self.lives.lock().is_another(key, route.uid, then)
        {
            self.world.broken(format!("{key} is another than before, and nobody has deleted it"));
        }
        activated
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
                None => match self.activate(key, stale).await {
                    Some(Ok(route)) => {
                        self.routes.lock().insert(key.clone(), route.clone());
                        route
                    }
                    Some(Err(error)) if error.code == Code::NotFound => {
                        self.create(key).await;
                        return false;
                    }
                    _ => break,
                },
            };
            match self.cluster.request(&route.ingress, route.uid, route.generation).await {
                Met::Counted { app, launch } => {
                    let generation = route.generation.get();
                    let what = What::Answered { generation, launch, nonce: app.nonce, count: app.count };
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
        let Some(store) = self.cluster.store.get() else { return };
        let begun = self.world.micros();
        let before = store.actor(key).await;
        let written = match &before {
            Some(actor) => store.history(actor.uid).await.last().map_or(0, |(version, _)| *version),
            None => 0,
        };
        let ask = self.asks.lock().begin(&key.to_string(), begun);
        let saved = self.call_of(key, async |replica| replica.control.save_actor(key, Intent::Suspend).await).await;
        let now = self.world.micros();
        match &saved {
            Some(Ok(_)) => self.asks.lock().over(&ask, now),
            Some(Err(_)) => self.asks.lock().over(&ask, now + micros(BEGUN_LATE)),
            None => {}
        }
        let Some(Ok(saved)) = saved else { return };
        let (uid, snapshots) = (saved.actor.uid, &saved.actor.snapshots);
        // It may have been woken and put to rest again while the answer was on its way.
        let same = before.as_ref().is_some_and(|before| before.generation == saved.actor.generation);
        if same && snapshots.base().is_some_and(|(_, only)| only.is_some()) {
            self.world.broken(format!(
                "a suspend of {key} is acknowledged, but only one node has the snapshot: {snapshots:?}"
            ));
        }
        // What had answered when it was asked for; an older generation if that was lost before it could be saved.
        let alone = self.asks.lock().is_alone(&ask, now);
        let since = |version: u64| before.as_ref().is_none_or(|before| before.uid != uid) || version > written;
        let told: Vec<Line> = store
            .history(uid)
            .await
            .iter()
            .map(|(version, entry)| Line {
                generation: entry.generation.get(),
                told: Told::read(&entry.event, &entry.detail),
                since: since(*version),
            })
            .collect();
        let covered = self.answered(&story(key, Some(uid)), begun).filter(|&answered| covers(answered, &told, alone));
        let durable = snapshots.durable.as_ref().map(|durable| durable.generation.get());
        let noted: BTreeSet<u64> =
            covered.into_iter().chain(durable.filter(|durable| Some(*durable) > covered)).collect();
        for generation in noted {
            self.saw(key, Some(uid), begun, What::Suspended { generation });
        }
    }

    /// The newest generation that had answered by then.
    fn answered(&self, actor: &str, by: u64) -> Option<u64> {
        let seen = self.seen.lock();
        let answered = seen.iter().filter(|seen| seen.actor == actor && seen.ended < by);
        let generations = answered.filter_map(|seen| match seen.what {
            What::Answered { generation, .. } => Some(generation),
            _ => None,
        });
        generations.max()
    }

    fn saw(&self, key: &ActorKey, uid: Option<ActorUid>, begun: u64, what: What) {
        let seen = Seen { actor: story(key, uid), begun, ended: self.world.micros(), what };
        self.world.say(format_args!("client of {key} {seen}"));
        self.seen.lock().push(seen);
    }
}

/// An actor that was made anew under the same name is another one.
fn story(key: &ActorKey, uid: Option<ActorUid>) -> String {
    format!("{key} {}", uid.map(|uid| uid.to_string()).unwrap_or_default())
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
