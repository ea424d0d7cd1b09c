//! A process that can die or stand still at any step. When it dies its tasks are not torn down: they stand still for ever at
//! their next step, which to everybody else is the same.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

#[derive(Debug, Default)]
pub(crate) struct Process {
    dead: CancellationToken,
    steps: AtomicU64,
    /// Dies when it has taken so many steps; zero: not by itself.
    dies_at: AtomicU64,
    /// Dies when it comes to this point.
    dies_when: Mutex<Option<String>>,
    /// Stands still for so long when it comes to this point, once.
    stands_when: Mutex<Option<(String, Duration)>>,
    /// Whoever comes to this point next stays there, while all else goes on.
    lost_when: Mutex<Option<String>>,
    still_until: Mutex<Option<Instant>>,
}

fn is(point: &str, when: &str, what: &str) -> bool {
    point.strip_prefix(when).is_some_and(|rest| rest.trim_start() == what)
}

impl Process {
    /// To be passed before and after everything that others can see.
    pub(crate) async fn step(&self) {
        let steps = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        if self.dies_at.load(Ordering::Relaxed) == steps {
            self.dead.cancel();
        }
        let still = *self.still_until.lock();
        if let Some(until) = still.filter(|_| !self.dead.is_cancelled()) {
            tokio::time::sleep_until(until).await;
        }
        // Also while it stood still.
        if self.dead.is_cancelled() {
            std::future::pending::<()>().await;
        }
    }

    /// A step that has a name.
    pub(crate) async fn point(&self, when: &str, what: &str) {
        if self.dies_when.lock().as_ref().is_some_and(|point| is(point, when, what)) {
            self.dead.cancel();
        }
        if self.lost_when.lock().take_if(|point| is(point, when, what)).is_some() {
            std::future::pending::<()>().await;
        }
        let stands = self.stands_when.lock().take_if(|(point, _)| is(point, when, what));
        if let Some((_, time)) = stands {
            self.stand_still(time);
        }
        self.step().await;
    }

    pub(crate) fn die_when(&self, point: &str) {
        *self.dies_when.lock() = Some(point.to_owned());
    }

    pub(crate) fn stand_still_when(&self, point: &str, time: Duration) {
        *self.stands_when.lock() = Some((point.to_owned(), time));
    }

    pub(crate) fn lose_when(&self, point: &str) {
        *self.lost_when.lock() = Some(point.to_owned());
    }

    /// Whether somebody has come to the point that they do not leave.
    pub(crate) fn has_lost(&self) -> bool {
        self.lost_when.lock().is_none()
    }

    /// It does nothing that others can see, and then goes on as if nothing had been.
    pub(crate) fn stand_still(&self, time: Duration) {
        *self.still_until.lock() = Some(Instant::now() + time);
    }

    /// Now, or before.
    pub(crate) fn stands_still(&self) -> bool {
        self.still_until.lock().is_some()
    }

    pub(crate) fn has_stood_still(&self) -> bool {
        self.still_until.lock().is_some_and(|until| until <= Instant::now())
    }

    /// Whether it did at any time from then on.
    pub(crate) fn stood_still_since(&self, then: Instant) -> bool {
        self.still_until.lock().is_some_and(|until| until > then)
    }

    pub(crate) fn die(&self) {
        self.dead.cancel();
    }

    pub(crate) fn die_after(&self, steps: u64) {
        self.dies_at.store(self.steps.load(Ordering::Relaxed) + steps.max(1), Ordering::Relaxed);
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.is_cancelled()
    }

    pub(crate) async fn died(&self) {
        self.dead.cancelled().await;
    }
}
