use std::fmt;
use std::str::FromStr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const NANO: u128 = 1_000_000_000;

/// Largest quantity, that of Kubernetes: a signed 64-bit count of whole units.
const MAX_UNITS: u128 = i64::MAX as u128;

const DECIMAL: [(&str, u32); 6] = [("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
const BINARY: [(&str, u32); 6] = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40), ("Pi", 50), ("Ei", 60)];
const SMALL: [(&str, u32); 3] = [("m", 6), ("u", 3), ("n", 0)];

/// An amount of a resource as Kubernetes writes it: cpu `500m` or `2`, memory `256Mi`, `1G` or plain bytes.
/// Exact to a billionth; what is finer is rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Quantity {
    nanos: u128,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseQuantityError {
    #[error("must be a quantity such as \"500m\", \"2\", \"256Mi\" or \"1G\"")]
    Malformed,
    #[error("must not be negative")]
    Negative,
    #[error("must be no more than 9223372036854775807")]
    TooLarge,
}

impl Quantity {
    pub fn from_units(units: u64) -> Self {
        Self { nanos: u128::from(units) * NANO }
    }

    pub fn from_millis(millis: u64) -> Self {
        Self { nanos: u128::from(millis) * (NANO / 1000) }
    }

    /// Whole units, rounded up: the bytes of an amount of memory.
    pub fn units(self) -> u64 {
        self.in_steps_of(NANO)
    }

    /// Thousandths, rounded up: the millicores of an amount of cpu. Saturates.
    pub fn millis(self) -> u64 {
        self.in_steps_of(NANO / 1000)
    }

    fn in_steps_of(self, nanos: u128) -> u64 {
        u64::try_from(self.nanos.div_ceil(nanos)).unwrap_or(u64::MAX)
    }

    pub fn is_zero(self) -> bool {
        self.nanos == 0
    }
}

impl FromStr for Quantity {
    type Err = ParseQuantityError;

    fn from_str(text: &str) -> Result<Self, ParseQuantityError> {
        use ParseQuantityError::{Malformed, Negative, TooLarge};
        if text.starts_with('-') {
            return Err(Negative);
        }
        let text = text.strip_prefix('+').unwrap_or(text);
        let end = text.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count();
        let (number, suffix) = text.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
            return Err(Malformed);
        }
        let (tens, twos) = scale(suffix).ok_or(Malformed)?;
        let digits = format!("{whole}{}", fraction.trim_end_matches('0'));
        let dropped = i32::try_from(digits.len() - whole.len()).map_err(|_| Malformed)?;
        let mantissa: u128 = match digits.trim_start_matches('0') {
            "" => return Ok(Self { nanos: 0 }),
            digits => digits.parse().map_err(|_| TooLarge)?,
        };
        let nanos = mantissa.checked_mul(1 << twos).and_then(|n| times_power_of_ten(n, 9 + tens - dropped));
        nanos.filter(|&nanos| nanos <= MAX_UNITS * NANO).map(|nanos| Self { nanos }).ok_or(TooLarge)
    }
}

/// The powers of ten and two that a suffix stands for.
fn scale(suffix: &str) -> Option<(i32, u32)> {
    let named = |table: &[(&str, u32)]| table.iter().find(|(name, _)| *name == suffix).map(|(_, power)| *power);
    if suffix.is_empty() {
        return Some((0, 0));
    }
    if let Some(power) = named(&BINARY) {
        return Some((0, power));
    }
    if let Some(power) = named(&DECIMAL) {
        return Some((i32::try_from(power).ok()?, 0));
    }
    if let Some(power) = named(&SMALL) {
        return Some((i32::try_from(power).ok()? - 9, 0));
    }
    let exponent = suffix.strip_prefix(['e', 'E'])?;
    let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    // Far beyond either end every exponent says the same: too large, or rounded up to the smallest amount.
    let exponent = exponent.parse::<i32>().unwrap_or(if exponent.starts_with('-') { -1000 } else { 1000 });
    Some((exponent.clamp(-1000, 1000), 0))
}

fn times_power_of_ten(number: u128, power: i32) -> Option<u128> {
    let ten = 10_u128.checked_pow(power.unsigned_abs());
    match (power >= 0, ten) {
        (true, ten) => number.checked_mul(ten?),
        (false, Some(ten)) => Some(number.div_ceil(ten)),
        (false, None) => Some(1),
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.nanos.is_multiple_of(NANO) {
            let fits = |power: u32| self.nanos.is_multiple_of(10_u128.pow(power));
            let (name, power) = SMALL.into_iter().find(|(_, power)| fits(*power)).expect("one divides everything");
            return write!(f, "{}{name}", self.nanos / 10_u128.pow(power));
        }
        let units = self.nanos / NANO;
        let binary = BINARY.into_iter().rev().map(|(name, power)| (name, 1_u128 << power));
        let decimal = DECIMAL.into_iter().rev().map(|(name, power)| (name, 10_u128.pow(power)));
        match binary.chain(decimal).find(|(_, step)| units > 0 && units.is_multiple_of(*step)) {
            Some((name, step)) => write!(f, "{}{name}", units / step),
            None => write!(f, "{units}"),
        }
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    /// Like Kubernetes, takes a bare number too: `cpu: 2` is as good as `cpu: "2"`.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Quantity;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity such as \"500m\", \"2\", \"256Mi\" or \"1G\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Quantity, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Quantity, E> {
                self.visit_str(&number.to_string())
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Quantity, E> {
                self.visit_str(&number.to_string())
            }

            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Quantity, E> {
                self.visit_str(&number.to_string())
            }
        }
        deserializer.deserialize_any(Text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_notation_of_kubernetes_is_understood() {
        for (text, millis) in [
            ("500m", 500),
            ("2", 2000),
            ("0.5", 500),
            (".5", 500),
            ("5.", 5000),
            ("+1", 1000),
            ("1k", 1_000_000),
            ("1e3", 1_000_000),
            ("1E3", 1_000_000),
            ("5e-1", 500),
            ("1Ki", 1_024_000),
            ("1.5Gi", 1_610_612_736_000),
            ("100u", 1),
            ("1n", 1),
            ("1e-999999999999", 1),
            ("0", 0),
            ("0e99", 0),
            ("1.50000000000000000000000000000000000000000000000", 1500),
        ] {
            assert_eq!(text.parse::<Quantity>().map(Quantity::millis), Ok(millis), "{text}");
        }
        for text in ["", ".", "m", "1.2.3", "1KB", "1 Gi", "1e", "1e+", "Gi", "1gi", "٣", "1ee3", "0x10"] {
            assert_eq!(text.parse::<Quantity>(), Err(ParseQuantityError::Malformed), "{text:?}");
        }
        assert_eq!("-1".parse::<Quantity>(), Err(ParseQuantityError::Negative));
        for text in ["9223372036854775808", "8Ei", "1e999999999999", &"9".repeat(60)] {
            assert_eq!(text.parse::<Quantity>(), Err(ParseQuantityError::TooLarge), "{text}");
        }
        assert_eq!("9223372036854775807".parse::<Quantity>().unwrap().units(), 9_223_372_036_854_775_807);
    }

    #[test]
    fn it_prints_in_the_shortest_exact_form() {
        for (text, printed) in [
            ("0.5", "500m"),
            ("2000m", "2"),
            ("268435456", "256Mi"),
            ("1000000000", "1G"),
            ("1.5Gi", "1536Mi"),
            ("0", "0"),
            ("1500", "1500"),
            ("0.0000015", "1500n"),
        ] {
            assert_eq!(text.parse::<Quantity>().unwrap().to_string(), printed);
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back(nanos in 0..=MAX_UNITS * NANO) {
            let quantity = Quantity { nanos };
            prop_assert_eq!(quantity.to_string().parse(), Ok(quantity));
        }

        #[test]
        fn whole_units_read_back_with_every_suffix(units in 0_u64..1 << 40, choice in 0_usize..6) {
            let (name, power) = BINARY[choice];
            let expected = u128::from(units) << power;
            match format!("{units}{name}").parse::<Quantity>() {
                Ok(quantity) => prop_assert_eq!(u128::from(quantity.units()), expected),
                Err(error) => {
                    prop_assert_eq!(error, ParseQuantityError::TooLarge);
                    prop_assert!(expected > MAX_UNITS);
                }
            }
        }

        #[test]
        fn no_text_panics(text in "[-+]?[0-9]{0,60}\\.?[0-9]{0,60}(m|u|n|k|Ki|Ei|[eE][-+]?[0-9]{0,12})?") {
            let _ = text.parse::<Quantity>();
        }
    }
}
