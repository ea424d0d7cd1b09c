//! Sizes, durations and times for people.

use std::time::Duration;

use jiff::Timestamp;

/// `512 B`, `74 KiB`, `4.4 MiB`: two figures at least, in powers of 1024.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    // From 1023.5 on it would be shown as 1024, so it counts as one of the next unit.
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.5 {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = usize::from(value < 9.95);
    format!("{value:.decimals$} {}", UNITS[unit])
}

/// `5s`, `2m3s`, `1h5m`, `3d4h`: the two greatest units.
pub(crate) fn age(age: Duration) -> String {
    let seconds = age.as_secs();
    let pair = |value: u64, unit: char, rest: u64, smaller: char| match rest {
        0 => format!("{value}{unit}"),
        rest => format!("{value}{unit}{rest}{smaller}"),
    };
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => pair(minutes, 'm', seconds % 60, 's'),
        (0, _, _) => pair(hours, 'h', minutes % 60, 'm'),
        _ => pair(days, 'd', hours % 24, 'h'),
    }
}

/// RFC 3339 in UTC, to the millisecond.
pub(crate) fn time(time: Timestamp) -> String {
    format!("{time:.3}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short_and_never_a_full_unit_too_small() {
        let shown = [0, 1023, 1024, 75_776, 1_048_524, 1_048_575, 4_613_734, 1 << 30, u64::MAX].map(bytes);
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "74 KiB", "1.0 MiB", "1.0 MiB", "4.4 MiB", "1.0 GiB", "16 EiB"]);
    }

    #[test]
    fn durations_name_the_unit_that_suits_them() {
        let shown = [0, 59, 60, 123, 3600, 3900, 86_400 * 3 + 3600 * 4].map(|s| age(Duration::from_secs(s)));
        assert_eq!(shown, ["0s", "59s", "1m", "2m3s", "1h", "1h5m", "3d4h"]);
    }

    #[test]
    fn times_are_utc_to_the_millisecond() {
        let at: Timestamp = "2026-06-30T14:00:00.123456789+02:00".parse().unwrap();
        assert_eq!(time(at), "2026-06-30T12:00:00.123Z");
    }
}
