//! A process that can die at any step. Its tasks are not torn down: they stand still for ever at their next step, which to
//! everybody else is the same.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio_util::sync::CancellationToken;

#[derive(Debug, Default)]
pub(crate) struct Process {
    dead: CancellationToken,
    steps: AtomicU64,
    /// Dies when it has taken so many steps; zero: not by itself.
    dies_at: AtomicU64,
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
