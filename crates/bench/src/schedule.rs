//! When each event is due, fixed before the first one begins: a system that falls behind cannot slow down its own exam.

use std::time::Duration;

/// Steps of rounds, one slot each. Every round goes through all of them and begins one step further on, so that no step
/// always follows the same other.
#[derive(Clone, Debug)]
pub(crate) struct Rounds {
    steps: usize,
    slot: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Due {
    pub(crate) round: u32,
    /// Which of the steps.
    pub(crate) step: usize,
    pub(crate) at: Duration,
}

impl Rounds {
    pub(crate) fn new(steps: usize, slot: Duration) -> Self {
        Self { steps, slot }
    }

    /// The events of one round, in their order.
    pub(crate) fn round(&self, round: u32) -> impl Iterator<Item = Due> + use<> {
        let (steps, slot) = (self.steps, self.slot);
        (0..steps).map(move |place| {
            let slots = round.saturating_mul(u32::try_from(steps).unwrap_or(u32::MAX));
            let at = slot * slots.saturating_add(u32::try_from(place).unwrap_or(u32::MAX));
            Due { round, step: (place + round as usize) % steps, at }
        })
    }
}

/// Requests at a constant rate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    per_second: f64,
}

impl Pace {
    /// `None` for no or an endless number of requests.
    pub(crate) fn new(per_second: f64) -> Option<Self> {
        (per_second.is_finite() && per_second > 0.0).then_some(Self { per_second })
    }

    pub(crate) fn at(self, index: u64) -> Duration {
        #[expect(clippy::cast_precision_loss, reason = "exact up to 2^53 requests")]
        Duration::from_secs_f64(index as f64 / self.per_second)
    }

    /// How many are due before `end`.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate and a time are positive")]
    pub(crate) fn count(self, end: Duration) -> u64 {
        (end.as_secs_f64() * self.per_second).ceil() as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn slots_follow_one_another_without_a_gap_over_all_rounds() {
        let rounds = Rounds::new(3, Duration::from_millis(100));
        let due: Vec<Due> = (0..3).flat_map(|round| rounds.round(round)).collect();
        let at: Vec<u128> = due.iter().map(|due| due.at.as_millis()).collect();
        assert_eq!(at, [0, 100, 200, 300, 400, 500, 600, 700, 800]);
        let steps: Vec<usize> = due.iter().map(|due| due.step).collect();
        assert_eq!(steps, [0, 1, 2, 1, 2, 0, 2, 0, 1]);
    }

    #[test]
    fn no_rate_is_no_pace() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Pace::new(rate).is_none());
        }
    }

    proptest! {
        #[test]
        fn each_round_has_every_step_once(steps in 1usize..20, round in 0u32..1000) {
            let mut seen: Vec<usize> = Rounds::new(steps, Duration::from_millis(1)).round(round).map(|due| due.step).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..steps).collect::<Vec<_>>());
        }

        #[test]
        fn what_is_counted_is_due_in_time(rate in 1.0f64..100_000.0, millis in 1u64..10_000) {
            let (pace, end) = (Pace::new(rate).unwrap(), Duration::from_millis(millis));
            let count = pace.count(end);
            prop_assert!(pace.at(count - 1) < end + Duration::from_nanos(1000));
            prop_assert!(pace.at(count) + Duration::from_nanos(1000) >= end);
        }
    }
}
