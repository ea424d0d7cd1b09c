use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};

use futures::future::{BoxFuture, FutureExt, Shared, WeakShared};

/// Work that several callers want and one does.
///
/// The work belongs to those who wait for it: it runs when any of them is polled, goes on while one is left, and is
/// dropped with the last. There is no task that nobody owns.
pub(crate) struct Flights<K, T: Clone> {
    flights: Mutex<HashMap<K, WeakShared<BoxFuture<'static, T>>>>,
}

impl<K: Eq + Hash, T: Clone> Flights<K, T> {
    pub(crate) fn new() -> Self {
        Self { flights: Mutex::new(HashMap::new()) }
    }

    /// The flight under way for `key`, or else a new one; and whether it is new.
    pub(crate) fn join(
        &self,
        key: K,
        start: impl FnOnce() -> BoxFuture<'static, T>,
    ) -> (Shared<BoxFuture<'static, T>>, bool) {
        let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        // One that has landed is not joined: its failure may be over, and a retry must not meet it again.
        let under_way = |flight: &WeakShared<_>| flight.upgrade().filter(|flight| flight.peek().is_none());
        if let Some(flight) = flights.get(&key).and_then(under_way) {
            return (flight, false);
        }
        flights.retain(|_, flight| under_way(flight).is_some());
        let flight = start().shared();
        flights.extend(flight.downgrade().map(|weak| (key, weak)));
        (flight, true)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn callers_share_one_run_and_a_cancelled_one_does_not_stop_it() {
        let flights = Flights::<&str, u32>::new();
        let runs = Arc::new(AtomicUsize::new(0));
        let (finish, finished) = oneshot::channel();
        let counter = runs.clone();
        let (first, led) = flights.join("a", || {
            async move {
                counter.fetch_add(1, Relaxed);
                finished.await.unwrap()
            }
            .boxed()
        });
        assert!(led);
        let (second, led) = flights.join("a", || panic!("a second run of the same work"));
        assert!(!led);
        // The first has begun the work when it goes away.
        assert!(first.now_or_never().is_none());
        finish.send(7).unwrap();
        assert_eq!(second.await, 7);
        assert_eq!(runs.load(Relaxed), 1);
    }

    #[tokio::test]
    async fn work_that_nobody_waits_for_is_dropped_and_ended_work_is_not_joined() {
        let flights = Flights::<&str, u32>::new();
        let (guard, dropped) = oneshot::channel::<()>();
        let (flight, _) = flights.join("a", || {
            async move {
                let _guard = guard;
                std::future::pending().await
            }
            .boxed()
        });
        assert!(flight.clone().now_or_never().is_none());
        drop(flight);
        assert!(dropped.await.is_err());

        let (ended, _) = flights.join("a", || async { 1 }.boxed());
        assert_eq!(ended.clone().await, 1);
        let (next, led) = flights.join("a", || async { 2 }.boxed());
        assert!(led);
        assert_eq!(next.await, 2);
        assert_eq!(ended.await, 1);
    }
}
