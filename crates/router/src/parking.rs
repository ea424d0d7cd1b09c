//! Requests that wait for their actor.
//!
//! A request parks with its head only; its body stays in the client's socket. All requests for one actor wait for one
//! [flight](Flights): a single call of the activator, which goes on when they leave and answers whoever is left.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ate_name::{ActorKey, Generation};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::assignment::{ActivateError, Activator};
use crate::failure::Failure;
use crate::routes::{Routes, Source};
use crate::stats::Stats;
use crate::upstream::{Pool, Route, lock};

/// A parked request's share of the limits.
pub(crate) struct Ticket<'a> {
    stats: &'a Stats,
    bytes: u64,
}

impl<'a> Ticket<'a> {
    pub(crate) fn take(pool: &'a Pool, bytes: usize) -> Result<Self, Failure> {
        let (stats, bytes) = (&*pool.stats, bytes as u64);
        let ticket = Self { stats, bytes };
        let within = |gauge: &AtomicU64, more: u64, limit: usize| {
            gauge.fetch_add(more, Ordering::Relaxed).saturating_add(more) <= limit as u64
        };
        let fits = within(&stats.parked, 1, pool.config.max_parked)
            & within(&stats.parked_bytes, bytes, pool.config.max_parked_bytes);
        if fits {
            return Ok(ticket);
        }
        stats.park_refusals.fetch_add(1, Ordering::Relaxed);
        Err(Failure::TooManyWaiting)
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.stats.parked.fetch_sub(1, Ordering::Relaxed);
        self.stats.parked_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

type Landing = Result<Arc<Route>, Failure>;
type Aloft = HashMap<ActorKey, watch::Receiver<Option<Landing>>>;

pub(crate) struct Flights {
    pub(crate) activator: Arc<dyn Activator>,
    pub(crate) routes: Arc<Routes>,
    pub(crate) pool: Arc<Pool>,
    /// Ends all flights.
    pub(crate) kill: CancellationToken,
    pub(crate) aloft: Mutex<Aloft>,
}

impl Flights {
    /// The route to an actor that has none, or only one that its worker disowned. `denied`: the last one that the caller has
    /// seen disowned, which may have been forgotten since.
    pub(crate) async fn route(
        self: &Arc<Self>,
        key: &ActorKey,
        denied: Option<Generation>,
        deadline: Instant,
    ) -> Landing {
        loop {
            let stale = match self.routes.get(key) {
                Some(route) if route.is_live() => return Ok(route),
                Some(route) => Some(route.assignment.generation),
                None => denied,
            };
            let (mut flight, boarded) = self.board(key, stale, deadline)?;
            let landed = match timeout_at(deadline, flight.wait_for(Option::is_some)).await {
                Err(_) => return Err(Failure::Activate(ActivateError::DeadlineExceeded)),
                // The activator panicked.
                Ok(Err(_)) => Err(Failure::Activate(ActivateError::Internal)),
                Ok(Ok(landing)) => landing.clone().expect("waited for"),
            };
            match landed {
                // It was somebody else's deadline, earlier than ours.
                Err(Failure::Activate(ActivateError::DeadlineExceeded)) if boarded => continue,
                landed => return landed,
            }
        }
    }

    /// Joins the flight for an actor, or starts one. Tells whether it was there.
    fn board(
        self: &Arc<Self>,
        key: &ActorKey,
        stale: Option<Generation>,
        deadline: Instant,
    ) -> Result<(watch::Receiver<Option<Landing>>, bool), Failure> {
        let mut aloft = lock(&self.aloft);
        if let Some(flight) = aloft.get(key) {
            return Ok((flight.clone(), true));
        }
        // Flights outlive those who left them, so they are bounded by themselves.
        if aloft.len() >= self.pool.config.max_parked {
            self.pool.stats.park_refusals.fetch_add(1, Ordering::Relaxed);
            return Err(Failure::TooManyWaiting);
        }
        let (landing, flight) = watch::channel(None);
        aloft.insert(key.clone(), flight.clone());
        let (flights, key) = (self.clone(), key.clone());
        self.pool.drivers.spawn(async move {
            let slot = Slot { flights: &flights, key: &key };
            let landed = flights.fly(&key, stale, deadline).await;
            // The route is known by now: whoever comes after this finds it, whoever came before is told.
            drop(slot);
            landing.send_replace(Some(landed));
        });
        Ok((flight, false))
    }

    async fn fly(&self, key: &ActorKey, stale: Option<Generation>, deadline: Instant) -> Landing {
        self.pool.stats.activations.fetch_add(1, Ordering::Relaxed);
        let activated = timeout_at(deadline, self.activator.activate(key, stale, deadline));
        let assignment = match self.kill.run_until_cancelled(activated).await {
            None => Err(ActivateError::Unavailable),
            Some(Err(_)) => Err(ActivateError::DeadlineExceeded),
            Some(Ok(activated)) => activated,
        };
        let assignment = assignment.map_err(|error| {
            tracing::debug!(actor = %key, %error, "activation failed");
            Failure::Activate(error)
        })?;
        if assignment.key != *key {
            tracing::error!(actor = %key, answered = %assignment.key, "activator answered for another actor");
            return Err(Failure::Misrouted);
        }
        Ok(self.routes.learn(assignment, Source::Activation))
    }
}

/// An actor's place among the flights, given up even if the activator panics.
struct Slot<'a> {
    flights: &'a Flights,
    key: &'a ActorKey,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        lock(&self.flights.aloft).remove(self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ate_name::{ActorUid, ObjectKey};
    use tokio::sync::Notify;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::assignment::{Assignment, Endpoint};
    use crate::config::RouterConfig;

    /// Silent the first time.
    struct Slow;

    #[async_trait::async_trait]
    impl Activator for Slow {
        async fn activate(
            &self,
            key: &ActorKey,
            stale: Option<Generation>,
            deadline: Instant,
        ) -> Result<Assignment, ActivateError> {
            assert_eq!(stale, None);
            if deadline < Instant::now() + Duration::from_secs(15) {
                std::future::pending::<()>().await;
            }
            Ok(Assignment {
                key: key.clone(),
                uid: ActorUid::from_random([1; 16]),
                generation: Generation::new(1),
                endpoint: Endpoint::Unix("/nowhere".into()),
                ports: Vec::new(),
                template: ObjectKey::new("demo", "slow"),
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_flight_that_ends_at_anothers_deadline_does_not_end_ours() {
        let stats = Arc::<Stats>::default();
        let drivers = TaskTracker::new();
        let pool = Arc::new(Pool { config: RouterConfig::default(), stats, drivers, crowded: Notify::new() });
        let routes = Arc::new(Routes::new(pool.clone()));
        let (activator, kill) = (Arc::new(Slow), CancellationToken::new());
        let flights = Arc::new(Flights { activator, routes, pool: pool.clone(), kill, aloft: Mutex::default() });
        let key = ActorKey::parse("space", "a").unwrap();
        let now = Instant::now();
        let (hasty, patient) = tokio::join!(
            flights.route(&key, None, now + Duration::from_secs(10)),
            flights.route(&key, None, now + Duration::from_secs(30)),
        );
        assert_eq!(hasty.err(), Some(Failure::Activate(ActivateError::DeadlineExceeded)));
        assert!(patient.is_ok());
        assert_eq!(pool.stats.activations.load(Ordering::Relaxed), 2);
    }
}
