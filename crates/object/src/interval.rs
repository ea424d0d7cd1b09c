use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// Longest interval, that of the notation's home: a signed 64-bit count of nanoseconds, about 292 years.
const MAX_NANOS: u64 = i64::MAX as u64;

/// A length of time as Kubernetes and Go write it: `30s`, `5m`, `1h30m`, `500ms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Interval(Duration);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseIntervalError {
    #[error("must be a duration such as \"30s\", \"5m\", \"1h30m\" or \"500ms\"")]
    Malformed,
    #[error("must not be negative")]
    Negative,
    #[error("must be no longer than 292 years")]
    TooLong,
}

impl Interval {
    /// `None` for more than 292 years.
    pub fn new(duration: Duration) -> Option<Self> {
        (duration.as_nanos() <= u128::from(MAX_NANOS)).then_some(Self(duration))
    }

    pub(crate) const fn from_secs(seconds: u32) -> Self {
        Self(Duration::from_secs(seconds as u64))
    }

    pub fn get(self) -> Duration {
        self.0
    }

    pub fn is_zero(self) -> bool {
        self.0.is_zero()
    }

    /// Reads an optional field, where zero says the same as its absence.
    pub(crate) fn nonzero<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Self>, D::Error> {
        Ok(Option::<Self>::deserialize(deserializer)?.filter(|interval| !interval.is_zero()))
    }
}

impl FromStr for Interval {
    type Err = ParseIntervalError;

    fn from_str(text: &str) -> Result<Self, ParseIntervalError> {
        use ParseIntervalError::{Malformed, Negative, TooLong};
        if text.starts_with('-') {
            return Err(Negative);
        }
        let mut rest = text.strip_prefix('+').unwrap_or(text);
        if rest == "0" {
            return Ok(Self(Duration::ZERO));
        }
        if rest.is_empty() {
            return Err(Malformed);
        }
        let mut nanos: u64 = 0;
        while !rest.is_empty() {
            let (whole, after) = split_digits(rest);
            let (fraction, after) = after.strip_prefix('.').map_or(("", after), split_digits);
            if whole.is_empty() && fraction.is_empty() {
                return Err(Malformed);
            }
            let (unit, after) = split_unit(after).ok_or(Malformed)?;
            let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| TooLong)? };
            nanos = whole
                .checked_mul(unit)
                .and_then(|part| part.checked_add(fraction_of(unit, fraction)))
                .and_then(|part| part.checked_add(nanos))
                .filter(|&sum| sum <= MAX_NANOS)
                .ok_or(TooLong)?;
            rest = after;
        }
        Ok(Self(Duration::from_nanos(nanos)))
    }
}

fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

fn split_unit(text: &str) -> Option<(u64, &str)> {
    // `m` is a prefix of `ms`, so the longer units come first.
    const UNITS: [(&str, u64); 8] = [
        ("ns", 1),
        ("us", 1_000),
        ("\u{b5}s", 1_000),
        ("\u{3bc}s", 1_000),
        ("ms", 1_000_000),
        ("s", NANOS_PER_SECOND),
        ("m", 60 * NANOS_PER_SECOND),
        ("h", 3600 * NANOS_PER_SECOND),
    ];
    UNITS.iter().find_map(|(unit, nanos)| Some((*nanos, text.strip_prefix(unit)?)))
}

/// What follows the decimal point, in nanoseconds; what is finer than one is dropped.
fn fraction_of(unit: u64, digits: &str) -> u64 {
    // An hour has 13 digits of nanoseconds, and this product fits 128 bits up to 25.
    let (value, scale) = digits
        .bytes()
        .take(18)
        .fold((0, 1), |(value, scale), digit| (value * 10 + u128::from(digit - b'0'), scale * 10));
    u64::try_from(u128::from(unit) * value / scale).expect("a part of a unit is smaller than the unit")
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        let (unit, name) = match nanos {
            0 => return f.write_str("0s"),
            1..1_000 => (1, "ns"),
            1_000..1_000_000 => (1_000, "us"),
            1_000_000..1_000_000_000 => (1_000_000, "ms"),
            _ => (u128::from(NANOS_PER_SECOND), "s"),
        };
        let (mut whole, fraction) = (nanos / unit, nanos % unit);
        if name == "s" {
            let (hours, minutes) = (whole / 3600, whole / 60 % 60);
            if hours > 0 {
                write!(f, "{hours}h")?;
            }
            if hours > 0 || minutes > 0 {
                write!(f, "{minutes}m")?;
            }
            whole %= 60;
        }
        write!(f, "{whole}")?;
        if fraction > 0 {
            let width = unit.ilog10() as usize;
            let digits = format!("{fraction:0width$}");
            write!(f, ".{}", digits.trim_end_matches('0'))?;
        }
        f.write_str(name)
    }
}

impl Serialize for Interval {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Interval {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_notation_of_go_is_understood() {
        for (text, nanos) in [
            ("30s", 30_000_000_000),
            ("5m", 300_000_000_000),
            ("1h30m", 5_400_000_000_000),
            ("500ms", 500_000_000),
            ("1.5h", 5_400_000_000_000),
            (".5s", 500_000_000),
            ("+1m1s", 61_000_000_000),
            ("7us", 7_000),
            ("7µs", 7_000),
            ("0", 0),
            ("0s", 0),
            ("0.0000000001s", 0),
            ("0.3333333333333333333h", 1_200_000_000_000 - 1),
        ] {
            assert_eq!(text.parse::<Interval>().map(|i| i.get().as_nanos()), Ok(nanos), "{text}");
        }
        for text in ["", "5", "s", "1x", "1 s", "1s ", ".s", "1.s.", "٣s", "+", "1d"] {
            assert_eq!(text.parse::<Interval>(), Err(ParseIntervalError::Malformed), "{text:?}");
        }
        assert_eq!("-1s".parse::<Interval>(), Err(ParseIntervalError::Negative));
        for text in ["9999999h", "99999999999999999999s", "2562047h47m16.854775808s"] {
            assert_eq!(text.parse::<Interval>(), Err(ParseIntervalError::TooLong), "{text}");
        }
    }

    #[test]
    fn it_prints_as_go_does() {
        for (text, printed) in
            [("90m", "1h30m0s"), ("1h", "1h0m0s"), ("1500ms", "1.5s"), ("60500ms", "1m0.5s"), ("1500us", "1.5ms")]
        {
            assert_eq!(text.parse::<Interval>().unwrap().to_string(), printed);
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back(nanos in 0..=MAX_NANOS) {
            let interval = Interval(Duration::from_nanos(nanos));
            prop_assert_eq!(interval.to_string().parse(), Ok(interval));
        }

        #[test]
        fn no_text_panics(text in "[-+]?([0-9]{0,25}\\.?[0-9]{0,30}(ns|us|ms|s|m|h|x)?){0,4}") {
            let _ = text.parse::<Interval>();
        }
    }
}
