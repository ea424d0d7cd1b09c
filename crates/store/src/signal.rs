use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// Says again and again that something has changed.
///
/// Those who wait are woken in the order in which they began to, so that a simulation goes the same way every time; a
/// `tokio::sync::watch` wakes them in any order.
#[derive(Debug, Default)]
pub struct Signal(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    changes: AtomicU64,
    notify: Notify,
}

/// Waits for what changes after it was made, or after the last time that it told.
#[derive(Clone, Debug)]
pub struct Waiter {
    inner: Arc<Inner>,
    seen: u64,
}

impl Signal {
    pub fn raise(&self) {
        self.0.changes.fetch_add(1, Ordering::Release);
        self.0.notify.notify_waiters();
    }

    pub fn waiter(&self) -> Waiter {
        Waiter { inner: Arc::clone(&self.0), seen: self.0.changes.load(Ordering::Acquire) }
    }
}

impl Waiter {
    /// What has changed until now has been seen to.
    pub fn mark(&mut self) {
        self.seen = self.inner.changes.load(Ordering::Acquire);
    }

    pub async fn changed(&mut self) {
        loop {
            let notified = self.inner.notify.notified();
            let now = self.inner.changes.load(Ordering::Acquire);
            if now != self.seen {
                self.seen = now;
                return;
            }
            notified.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_change_before_the_wait_is_not_missed() {
        let signal = Signal::default();
        let mut waiter = signal.waiter();
        signal.raise();
        waiter.changed().await;
        let waiting = tokio::spawn(async move { waiter.changed().await });
        tokio::task::yield_now().await;
        signal.raise();
        waiting.await.unwrap();
    }
}
