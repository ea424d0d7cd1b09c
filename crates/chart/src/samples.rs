//! What was measured, and the few numbers that tell it.

use std::time::Duration;

/// Durations of the same thing, measured again and again. Every one is kept: percentiles are exact.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Samples(Vec<Duration>);

/// The few numbers that tell a set of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    pub n: usize,
    pub p50: Duration,
    pub p95: Duration,
    pub p99: Duration,
    pub max: Duration,
}

impl Samples {
    pub fn push(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// By nearest rank: the smallest sample that at least `percent` of all samples do not exceed. It is always one that
    /// was really measured, never a value in between; with few samples the high percentiles are the maximum. None if
    /// there are no samples.
    ///
    /// # Panics
    /// Unless 0 < `percent` <= 100.
    pub fn percentile(&self, percent: f64) -> Option<Duration> {
        nearest_rank(&self.sorted(), percent)
    }

    pub fn summary(&self) -> Option<Summary> {
        let sorted = self.sorted();
        Some(Summary {
            n: sorted.len(),
            p50: nearest_rank(&sorted, 50.0)?,
            p95: nearest_rank(&sorted, 95.0)?,
            p99: nearest_rank(&sorted, 99.0)?,
            max: *sorted.last()?,
        })
    }

    fn sorted(&self) -> Vec<Duration> {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        sorted
    }
}

impl FromIterator<Duration> for Samples {
    fn from_iter<I: IntoIterator<Item = Duration>>(samples: I) -> Self {
        Self(samples.into_iter().collect())
    }
}

impl Extend<Duration> for Samples {
    fn extend<I: IntoIterator<Item = Duration>>(&mut self, samples: I) {
        self.0.extend(samples);
    }
}

fn nearest_rank(sorted: &[Duration], percent: f64) -> Option<Duration> {
    assert!(percent > 0.0 && percent <= 100.0, "a percentile is above 0 and at most 100, not {percent}");
    // The product comes before the quotient: 0.95 * 20 is not 19 in floating point, 95 * 20 / 100 is.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most the length, at least 1")]
    let rank = (percent * sorted.len() as f64 / 100.0).ceil() as usize;
    sorted.get(rank.checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn samples(millis: impl IntoIterator<Item = u64>) -> Samples {
        millis.into_iter().map(Duration::from_millis).collect()
    }

    #[test]
    fn a_percentile_is_the_sample_at_the_nearest_rank() {
        let hundred = samples((1..=100).rev());
        let shown =
            [1.0, 50.0, 95.0, 99.0, 99.5, 100.0].map(|percent| hundred.percentile(percent).unwrap().as_millis());
        assert_eq!(shown, [1, 50, 95, 99, 100, 100]);
        // 95 % of 20 is 19 exactly: neither 18 nor 20.
        assert_eq!(samples(1..=20).percentile(95.0), Some(Duration::from_millis(19)));
        assert_eq!(samples([7, 3]).percentile(50.0), Some(Duration::from_millis(3)));
    }

    #[test]
    fn a_summary_of_nothing_is_none_and_of_one_sample_is_that_sample() {
        assert_eq!(Samples::default().summary(), None);
        let only = Duration::from_millis(5);
        let summary = Summary { n: 1, p50: only, p95: only, p99: only, max: only };
        assert_eq!(samples([5]).summary(), Some(summary));
    }

    proptest! {
        #[test]
        fn as_many_samples_as_promised_are_at_or_below_a_percentile(
            millis in proptest::collection::vec(0u64..50, 1..200),
            percent in 1u32..=100,
        ) {
            let all = samples(millis.iter().copied());
            let at = all.percentile(f64::from(percent)).unwrap();
            let below = |limit: Duration, equal: bool| {
                all.0.iter().filter(|sample| **sample < limit || equal && **sample == limit).count() * 100
            };
            prop_assert!(below(at, true) >= percent as usize * millis.len());
            prop_assert!(below(at, false) < percent as usize * millis.len());
        }
    }
}
