use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How long after its second crash in a row an actor is left alone; doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// However often it crashes, it is tried again after so long.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// How far apart clocks are that are kept in step. One that is further behind would keep an actor asleep for as much longer.
const CLOCKS_DIFFER: Duration = Duration::from_secs(5);

/// An actor's sandbox has ended without being told to, so often in a row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Crashes {
    pub count: u32,
    pub last: jiff::Timestamp,
    /// How it ended, the last time.
    pub reason: String,
}

impl Crashes {
    pub(crate) fn after(before: Option<Self>, at: jiff::Timestamp, reason: String) -> Self {
        Self { count: before.map_or(0, |before| before.count).saturating_add(1), last: at, reason }
    }

    /// How much longer it is not to be woken. One crash may happen to anybody; from the second in a row on it is a loop.
    ///
    /// `now` may be of another clock than the crash: one that is far behind is not believed.
    pub fn pause_left(&self, now: jiff::Timestamp) -> Duration {
        let doublings = match self.count {
            0 | 1 => return Duration::ZERO,
            count => count - 2,
        };
        let pause = 2_u32.checked_pow(doublings).map_or(LONGEST_PAUSE, |times| FIRST_PAUSE.saturating_mul(times));
        let (pause, passed) = (pause.min(LONGEST_PAUSE), now.duration_since(self.last));
        let left = jiff::SignedDuration::try_from(pause).unwrap_or_default().saturating_sub(passed);
        Duration::try_from(left).ok().filter(|left| *left <= pause + CLOCKS_DIFFER).unwrap_or(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(count: u32, passed_millis: i64) -> Duration {
        let last = jiff::Timestamp::from_second(1_800_000_000).unwrap();
        let crashes = Crashes { count, last, reason: String::new() };
        crashes.pause_left(last + jiff::SignedDuration::from_millis(passed_millis))
    }

    #[test]
    fn the_first_crash_costs_nothing_and_each_further_one_twice_as_much_up_to_a_limit() {
        assert_eq!(left(1, 0), Duration::ZERO);
        for (count, seconds) in [(2, 1), (3, 2), (4, 4), (10, 256), (11, 300), (40, 300), (u32::MAX, 300)] {
            assert_eq!(left(count, 0), Duration::from_secs(seconds), "{count}");
            assert_eq!(left(count, i64::try_from(seconds * 1000).unwrap()), Duration::ZERO, "{count}");
        }
        assert_eq!(left(3, 1500), Duration::from_millis(500));
    }

    #[test]
    fn a_clock_that_is_far_behind_keeps_nobody_asleep() {
        assert_eq!(left(2, -1000), Duration::from_secs(2), "a little");
        assert_eq!(left(2, -10_000), Duration::ZERO, "more than clocks differ");
        assert_eq!(left(11, -10_000), Duration::ZERO, "however long the pause is");
    }
}
