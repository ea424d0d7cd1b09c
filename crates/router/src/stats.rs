//! Plain atomics, for whoever exports metrics.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ate_name::ObjectKey;
use tokio::time::Instant;

/// Upper bounds of the buckets of `atenet.router.route.duration`, in microseconds; one more bucket holds the rest.
pub const ROUTE_DURATION_BOUNDS: [u64; 18] = [
    1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 75_000, 100_000, 150_000, 200_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000, 15_000_000, 30_000_000,
];

/// Counts of durations, by [`ROUTE_DURATION_BOUNDS`].
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; ROUTE_DURATION_BOUNDS.len() + 1],
    sum_micros: AtomicU64,
}

impl Histogram {
    pub(crate) fn record(&self, duration: Duration) {
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let bucket = ROUTE_DURATION_BOUNDS.partition_point(|bound| *bound < micros);
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.sum_micros.fetch_add(micros, Relaxed);
    }

    /// One count per bucket, not cumulated.
    pub fn buckets(&self) -> [u64; ROUTE_DURATION_BOUNDS.len() + 1] {
        std::array::from_fn(|bucket| self.buckets[bucket].load(Relaxed))
    }

    pub fn count(&self) -> u64 {
        self.buckets().iter().sum()
    }

    pub fn sum(&self) -> Duration {
        Duration::from_micros(self.sum_micros.load(Relaxed))
    }
}

/// What the router did. Every request ends in exactly one of the four histograms, timed from its head to the moment its
/// actor's endpoint is known.
#[derive(Debug, Default)]
pub struct Stats {
    routed: Mutex<HashMap<ObjectKey, Arc<Histogram>>>,
    /// No such actor, no such name, no such port.
    pub not_found: Histogram,
    /// The client left, or the deadline passed.
    pub cancelled: Histogram,
    pub error: Histogram,
    /// Requests waiting for their actor now, and the bytes of their heads.
    pub parked: AtomicU64,
    pub parked_bytes: AtomicU64,
    /// Requests turned away because too many were waiting.
    pub park_refusals: AtomicU64,
    /// Calls of the activator.
    pub activations: AtomicU64,
    /// Workers that disowned an actor the router asked for, or were letting it go.
    pub stale_answers: AtomicU64,
    /// Connections that a worker accepted, and requests sent over one of them again.
    pub connects: AtomicU64,
    pub reuses: AtomicU64,
    /// Unused connections to workers now.
    pub idle_connections: AtomicU64,
    /// Requests lost because a worker's connection failed after they were sent.
    pub lost: AtomicU64,
}

impl Stats {
    /// Requests whose actor was found, by template.
    pub fn routed(&self) -> Vec<(ObjectKey, Arc<Histogram>)> {
        let routed = self.routed.lock().unwrap_or_else(PoisonError::into_inner);
        routed.iter().map(|(template, histogram)| (template.clone(), histogram.clone())).collect()
    }

    /// Looked up once per assignment, so that a request touches atomics only.
    pub(crate) fn routed_for(&self, template: &ObjectKey) -> Arc<Histogram> {
        let mut routed = self.routed.lock().unwrap_or_else(PoisonError::into_inner);
        routed.entry(template.clone()).or_default().clone()
    }
}

/// Times one request until its route is known. Dropped before that, the client has left.
pub(crate) struct Timing<'a> {
    stats: &'a Stats,
    pub(crate) start: Instant,
    settled: bool,
}

impl<'a> Timing<'a> {
    pub(crate) fn start(stats: &'a Stats) -> Self {
        Self { stats, start: Instant::now(), settled: false }
    }

    pub(crate) fn settle(&mut self, histogram: &Histogram) {
        if !std::mem::replace(&mut self.settled, true) {
            histogram.record(self.start.elapsed());
        }
    }
}

impl Drop for Timing<'_> {
    fn drop(&mut self) {
        let stats = self.stats;
        self.settle(&stats.cancelled);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_on_a_bound_belongs_below_it() {
        let histogram = Histogram::default();
        for micros in [0, 1_000, 1_001, 30_000_000, 30_000_001] {
            histogram.record(Duration::from_micros(micros));
        }
        let buckets = histogram.buckets();
        assert_eq!((buckets[0], buckets[1], buckets[17], buckets[18]), (2, 1, 1, 1));
        assert_eq!(histogram.count(), 5);
        assert_eq!(histogram.sum(), Duration::from_micros(60_002_002));
    }
}
