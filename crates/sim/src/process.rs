//! A process that can die at any step. Its tasks are not torn down: they stand still for ever at their next step, which to
//! everybody else is the same.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

#[derive(Debug, Default)]
pub(crate) struct Process {
    dead: CancellationToken,
    steps: AtomicU64,
    /// Dies when it has taken so many steps; zero: not by itself.
    dies_at: AtomicU64,
    /// Dies when it comes to this point.
    dies_when: Mutex<Option<String>>,
}

impl Process {
    /// To be passed before and after everything that others can see.
    pub(crate) async fn step(&self) {
        let steps = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        if self.dies_at.load(Ordering::Relaxed) == steps {
            self.dead.cancel();
        }
        if self.dead.is_cancelled() {
            std::future::pending::<()>().await;
        }
    }

    /// A step that has a name.
    pub(crate) async fn point(&self, when: &str, what: &str) {
        let here = |point: &String| point.strip_prefix(when).is_some_and(|rest| rest.trim_start() == what);
        if self.dies_when.lock().as_ref().is_some_and(here) {
            self.dead.cancel();
        }
        self.step().await;
    }

    pub(crate) fn die_when(&self, point: &str) {
        *self.dies_when.lock() = Some(point.to_owned());
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
