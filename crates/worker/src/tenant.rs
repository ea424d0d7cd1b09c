//! The actor that a worker hosts: its box, whether it runs or is frozen, who is talking to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ate_orders::{EgressRule, Exit, Hosted, Identity, Phase, chain};
use ate_sandbox::{Sandbox, SandboxError};
use ate_sys::Memory;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::link::{Event, Refusal};

/// An actor that is to be held and does not stop by then is ended: others wait to run it.
const HOLD_WITHIN: Duration = Duration::from_secs(3);

pub(crate) struct Tenant {
    pub(crate) identity: Identity,
    pub(crate) sandbox: Box<dyn Sandbox>,
    pub(crate) ports: Vec<u16>,
    pub(crate) egress: Vec<EgressRule>,
    pub(crate) memo: serde_json::Value,
    /// Held by whoever changes the mode, for as long as the change takes.
    mode: tokio::sync::Mutex<Mode>,
    /// What the mode was last known to be, for those who only look.
    frozen: AtomicBool,
    /// Set while the actor is being saved: newcomers are sent away rather than made to wait.
    leaving: AtomicBool,
    /// Set while nobody may meet the actor; and whether it was running when that began.
    held: AtomicBool,
    stopped_by_hold: AtomicBool,
    connections: AtomicUsize,
    idle_since: Mutex<Instant>,
    /// A connection has ended, or the actor goes on: the idle clock may be running.
    quiet: Notify,
    /// Ends every connection, in and out; renewed if the actor stays after all.
    connected: Mutex<CancellationToken>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Running,
    Frozen,
    Gone,
}

/// A connection to the actor. While one lives the actor is not idle.
pub(crate) struct Visit {
    tenant: Arc<Tenant>,
}

impl Drop for Visit {
    fn drop(&mut self) {
        *self.tenant.idle_since.lock() = Instant::now();
        self.tenant.connections.fetch_sub(1, Ordering::SeqCst);
        self.tenant.quiet.notify_one();
    }
}

impl Tenant {
    pub(crate) fn new(
        identity: Identity,
        sandbox: Box<dyn Sandbox>,
        ports: Vec<u16>,
        egress: Vec<EgressRule>,
        memo: serde_json::Value,
    ) -> Arc<Self> {
        Arc::new(Self {
            identity,
            sandbox,
            ports,
            egress,
            memo,
            mode: tokio::sync::Mutex::new(Mode::Running),
            frozen: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            held: AtomicBool::new(false),
            stopped_by_hold: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            idle_since: Mutex::new(Instant::now()),
            quiet: Notify::new(),
            connected: Mutex::default(),
        })
    }

    /// Lets a connection in, thawing the actor for it. `None`: the actor is about to leave, ask again where it will be.
    pub(crate) async fn enter(self: &Arc<Self>, events: &Events) -> Result<Option<Visit>, SandboxError> {
        // Counted before the mode is looked at: whoever freezes looks at the count after taking the mode.
        self.connections.fetch_add(1, Ordering::SeqCst);
        let visit = Visit { tenant: Arc::clone(self) };
        if self.leaving.load(Ordering::SeqCst) || self.held.load(Ordering::SeqCst) {
            return Ok(None);
        }
        if !self.frozen.load(Ordering::SeqCst) {
            return Ok(Some(visit));
        }
        let mut mode = self.mode.lock().await;
        match *mode {
            Mode::Running => Ok(Some(visit)),
            Mode::Gone => Ok(None),
            Mode::Frozen if self.held.load(Ordering::SeqCst) => Ok(None),
            Mode::Frozen => {
                self.thaw(&mut mode, events).await?;
                Ok(Some(visit))
            }
        }
    }

    async fn thaw(&self, mode: &mut Mode, events: &Events) -> Result<(), SandboxError> {
        self.sandbox.thaw().await?;
        *mode = Mode::Running;
        self.frozen.store(false, Ordering::SeqCst);
        events.send(Event::Thawed(self.identity.clone()));
        Ok(())
    }

    /// Freezes the actor each time it has been idle for `after`, for as long as this is polled.
    pub(crate) async fn freeze_when_idle(&self, after: Duration, events: &Events) {
        loop {
            let due = *self.idle_since.lock() + after;
            let busy = self.connections.load(Ordering::SeqCst) > 0 || self.frozen.load(Ordering::SeqCst);
            if busy || Instant::now() < due {
                tokio::select! {
                    () = self.quiet.notified() => {}
                    () = tokio::time::sleep_until(due.into()), if !busy => {}
                }
                continue;
            }
            let mut mode = self.mode.lock().await;
            match *mode {
                Mode::Running => {}
                Mode::Frozen => continue,
                Mode::Gone => return,
            }
            // Said before the last look at the count: a visitor that misses it is seen here, one that sees it waits for
            // the mode.
            self.frozen.store(true, Ordering::SeqCst);
            if self.connections.load(Ordering::SeqCst) > 0 || self.sandbox.freeze().await.is_err() {
                self.frozen.store(false, Ordering::SeqCst);
                continue;
            }
            *mode = Mode::Frozen;
            events.send(Event::Frozen(self.identity.clone()));
        }
    }

    /// Keeps the actor from everybody: connections end, and it stands still. One that cannot be stopped is ended. May be
    /// said again and again, should a save that failed have set it going.
    pub(crate) async fn hold(&self, events: &Events) {
        self.held.store(true, Ordering::SeqCst);
        self.connected.lock().cancel();
        let mut mode = self.mode.lock().await;
        if *mode != Mode::Running {
            return;
        }
        tracing::warn!(actor = %self.identity.key, "held: the node has lost its lease");
        self.frozen.store(true, Ordering::SeqCst);
        self.stopped_by_hold.store(true, Ordering::SeqCst);
        if !matches!(tokio::time::timeout(HOLD_WITHIN, self.sandbox.freeze()).await, Ok(Ok(()))) {
            tracing::warn!("an actor that must not run cannot be stopped, and is ended");
            let _ = self.sandbox.destroy().await;
            return;
        }
        *mode = Mode::Frozen;
        events.send(Event::Frozen(self.identity.clone()));
    }

    /// It may be met again, and goes on with whatever it was doing.
    pub(crate) async fn let_go(&self, events: &Events) {
        if !self.held.load(Ordering::SeqCst) {
            return;
        }
        let mut mode = self.mode.lock().await;
        // One that was frozen before stays so until somebody comes.
        if *mode == Mode::Frozen
            && self.stopped_by_hold.swap(false, Ordering::SeqCst)
            && let Err(error) = self.thaw(&mut mode, events).await
        {
            tracing::warn!(error = chain(&error), "an actor that was held cannot be thawed");
            return;
        }
        *self.connected.lock() = CancellationToken::new();
        *self.idle_since.lock() = Instant::now();
        self.held.store(false, Ordering::SeqCst);
        self.quiet.notify_one();
    }

    /// Stops the actor so that it can be saved. It comes back to life unless [`Leaving::gone`] is called. `if_idle`: not
    /// while somebody is connected, who would be cut off without an answer.
    pub(crate) async fn leave(
        &self,
        if_idle: bool,
        events: &Events,
        phases: &mut Phases,
    ) -> Result<Leaving<'_>, Refusal> {
        let mode = self.mode.lock().await;
        if *mode == Mode::Gone {
            return Err(Refusal::Stale);
        }
        if if_idle {
            // As in `freeze_when_idle`: whoever comes after this waits for the mode, whoever came before is counted.
            self.frozen.store(true, Ordering::SeqCst);
            if self.connections.load(Ordering::SeqCst) > 0 {
                self.frozen.store(*mode == Mode::Frozen, Ordering::SeqCst);
                return Err(Refusal::Aborted);
            }
        }
        self.leaving.store(true, Ordering::SeqCst);
        self.connected.lock().cancel();
        let mut leaving = Leaving { tenant: self, mode };
        if *leaving.mode == Mode::Running {
            if let Err(error) = self.sandbox.freeze().await {
                return Err(leaving.stay(events, Refusal::NotSaved(chain(&error))).await);
            }
            *leaving.mode = Mode::Frozen;
            self.frozen.store(true, Ordering::SeqCst);
            phases.mark("freeze");
        }
        Ok(leaving)
    }

    pub(crate) async fn destroy(&self) -> Result<(), SandboxError> {
        self.destroy_now(&mut *self.mode.lock().await).await
    }

    async fn destroy_now(&self, mode: &mut Mode) -> Result<(), SandboxError> {
        self.leaving.store(true, Ordering::SeqCst);
        self.connected.lock().cancel();
        *mode = Mode::Gone;
        self.sandbox.destroy().await
    }

    /// How the box ended, and nothing is left of it; `None`: by our own hand.
    pub(crate) async fn ended(&self) -> Option<Exit> {
        let exit = self.sandbox.ended().await;
        // A save that is under way may succeed all the same. If it fails there is nobody who could stay.
        let mut mode = self.mode.lock().await;
        if *mode == Mode::Gone {
            return None;
        }
        let _ = self.destroy_now(&mut mode).await;
        Some(exit)
    }

    /// Cancelled when connections must end.
    pub(crate) fn connected(&self) -> CancellationToken {
        self.connected.lock().clone()
    }

    pub(crate) fn hosted(&self) -> Hosted {
        let connections = self.connections.load(Ordering::SeqCst);
        let idle = if connections > 0 { Duration::ZERO } else { self.idle_since.lock().elapsed() };
        Hosted {
            identity: self.identity.clone(),
            frozen: self.frozen.load(Ordering::SeqCst),
            idle,
            memory_bytes: self.sandbox.memory_bytes(),
        }
    }
}

/// An actor that is stopped to be saved.
pub(crate) struct Leaving<'a> {
    tenant: &'a Tenant,
    mode: tokio::sync::MutexGuard<'a, Mode>,
}

impl Leaving<'_> {
    /// The save is safe: ends the box.
    pub(crate) async fn gone(mut self, phases: &mut Phases) {
        *self.mode = Mode::Gone;
        if let Err(error) = self.tenant.sandbox.destroy().await {
            // Saved and killed; what is left over goes with the worker.
            tracing::warn!(error = chain(&error), "a box was not cleaned up");
        }
        phases.mark("kill");
    }

    /// The save failed or was called off: the actor runs on. Gives back `why`, or why even that failed and it was ended.
    pub(crate) async fn stay(mut self, events: &Events, why: Refusal) -> Refusal {
        if *self.mode == Mode::Frozen
            && let Err(error) = self.tenant.thaw(&mut self.mode, events).await
        {
            let _ = self.tenant.destroy_now(&mut self.mode).await;
            return Refusal::Failed(chain(&error));
        }
        // Thawed, or never frozen although it was said to be.
        self.tenant.frozen.store(false, Ordering::SeqCst);
        if !self.tenant.held.load(Ordering::SeqCst) {
            *self.tenant.connected.lock() = CancellationToken::new();
        }
        self.tenant.leaving.store(false, Ordering::SeqCst);
        // Whoever freezes it when idle took it for frozen.
        self.tenant.quiet.notify_one();
        why
    }
}

/// News for the node. Bounded by nature: a tenant changes its mode at most once per call or idle period; what the node
/// misses while it is away it learns from the report.
#[derive(Clone, Debug)]
pub(crate) struct Events(pub(crate) tokio::sync::broadcast::Sender<Event>);

impl Events {
    pub(crate) fn send(&self, event: Event) {
        let _ = self.0.send(event);
    }
}

/// A stopwatch with laps.
#[derive(Debug)]
pub(crate) struct Phases {
    last: Instant,
    pub(crate) laps: Vec<Phase>,
}

impl Phases {
    pub(crate) fn start() -> Self {
        Self { last: Instant::now(), laps: Vec::new() }
    }

    pub(crate) fn mark(&mut self, name: &str) {
        let now = Instant::now();
        let micros = u64::try_from((now - self.last).as_micros()).unwrap_or(u64::MAX);
        self.laps.push(Phase { name: name.to_owned(), micros });
        self.last = now;
    }
}

/// Memory that the node sent, as an image to restore from or to write into.
pub(crate) fn memory(fd: std::os::fd::OwnedFd) -> Result<Memory, Refusal> {
    Memory::from_fd(fd).map_err(|error| Refusal::Failed(format!("cannot use the memory that the node sent: {error}")))
}

#[cfg(test)]
mod tests {
    use ate_name::{ActorKey, ActorUid, Generation, ObjectKey};

    use super::*;
    use crate::still::Still;

    fn tenant() -> (Arc<Tenant>, Events) {
        tenant_in(Still::default())
    }

    fn tenant_in(sandbox: Still) -> (Arc<Tenant>, Events) {
        let identity = Identity {
            uid: ActorUid::from_random([1; 16]),
            key: ActorKey::parse("space", "a").unwrap(),
            template: ObjectKey::new("demo", "counter"),
            generation: Generation::new(1),
        };
        let events = Events(tokio::sync::broadcast::Sender::new(8));
        (Tenant::new(identity, Box::new(sandbox), vec![80], Vec::new(), serde_json::Value::Null), events)
    }

    #[tokio::test]
    async fn a_visitor_is_not_cut_off_by_a_save_that_nobody_asked_for() {
        let (tenant, events) = tenant();
        let connected = tenant.connected();
        let visit = tenant.enter(&events).await.unwrap().expect("it runs");
        let left = tenant.leave(true, &events, &mut Phases::start()).await;
        assert!(matches!(left, Err(Refusal::Aborted)));
        assert!(!connected.is_cancelled());
        let second = tenant.enter(&events).await.unwrap();
        assert!(second.is_some(), "and others are let in");

        drop((visit, second));
        let leaving = tenant.leave(true, &events, &mut Phases::start()).await.expect("nobody is here");
        assert!(tenant.enter(&events).await.unwrap().is_none());
        leaving.gone(&mut Phases::start()).await;
    }

    #[tokio::test]
    async fn nobody_meets_an_actor_that_is_held() {
        let (tenant, events) = tenant();
        let connected = tenant.connected();
        let visit = tenant.enter(&events).await.unwrap();
        tenant.hold(&events).await;
        assert!(connected.is_cancelled() && tenant.hosted().frozen, "whoever was there is sent away");
        assert!(tenant.enter(&events).await.unwrap().is_none());
        // A save that fails sets it going, but not for others, and not for long.
        let leaving = tenant.leave(false, &events, &mut Phases::start()).await.expect("it can be saved");
        leaving.stay(&events, Refusal::Aborted).await;
        assert!(tenant.enter(&events).await.unwrap().is_none() && tenant.connected().is_cancelled());
        tenant.hold(&events).await;
        assert!(tenant.hosted().frozen);

        drop(visit);
        tenant.let_go(&events).await;
        assert!(!tenant.hosted().frozen, "it goes on by itself: not every actor waits for requests");
        assert!(tenant.enter(&events).await.unwrap().is_some() && !tenant.connected().is_cancelled());
    }

    #[tokio::test]
    async fn a_suspend_that_was_asked_for_does_not_wait_for_visitors() {
        let (tenant, events) = tenant();
        let connected = tenant.connected();
        let _visit = tenant.enter(&events).await.unwrap();
        let leaving = tenant.leave(false, &events, &mut Phases::start()).await.expect("whoever is here");
        assert!(connected.is_cancelled());
        let why = leaving.stay(&events, Refusal::Aborted).await;
        assert!(matches!(why, Refusal::Aborted));
        assert!(tenant.enter(&events).await.unwrap().is_some(), "it stays after all");
    }

    #[tokio::test]
    async fn an_actor_that_could_not_be_saved_is_frozen_again() {
        let (tenant, events) = tenant();
        let mut news = events.0.subscribe();
        let life = async {
            assert!(matches!(news.recv().await, Ok(Event::Frozen(_))), "nobody is here");
            let leaving = tenant.leave(true, &events, &mut Phases::start()).await.expect("nobody is here");
            // The other looks meanwhile, and waits.
            tokio::task::yield_now().await;
            leaving.stay(&events, Refusal::NotSaved("the disk is full".to_owned())).await;
            assert!(matches!(news.recv().await, Ok(Event::Thawed(_))));
            assert!(matches!(news.recv().await, Ok(Event::Frozen(_))), "and nobody came");
        };
        tokio::select! {
            () = tenant.freeze_when_idle(Duration::ZERO, &events) => unreachable!("it has not gone"),
            lived = tokio::time::timeout(Duration::from_secs(30), life) => lived.expect("it is frozen again"),
        }
    }

    #[tokio::test]
    async fn an_actor_that_ends_while_it_is_being_saved_has_ended() {
        let (tenant, events) = tenant_in(Still { ends_when_stopped: true, ..Still::default() });
        let saving = async { tenant.leave(false, &events, &mut Phases::start()).await.err() };
        let (saved, ended) = tokio::join!(saving, tenant.ended());
        assert!(matches!(saved, Some(Refusal::NotSaved(_))), "{saved:?}");
        assert_eq!(ended, Some(Exit::Code(3)));
        assert!(tenant.enter(&events).await.unwrap().is_none(), "nobody waits for it");
    }

    #[tokio::test]
    async fn an_actor_that_is_ended_has_not_ended_by_itself() {
        let ended = CancellationToken::new();
        let (tenant, events) = tenant_in(Still { ended: ended.clone(), ..Still::default() });
        let leaving = tenant.leave(false, &events, &mut Phases::start()).await.expect("it runs");
        ended.cancel();
        leaving.gone(&mut Phases::start()).await;
        assert_eq!(tenant.ended().await, None);
    }
}
