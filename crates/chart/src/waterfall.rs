//! When each part of an operation ran within the whole.

use std::time::Duration;

use crate::text::{duration, on_one_line};

/// A named part of an operation. Parts follow one another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    pub name: String,
    pub lasted: Duration,
}

impl Phase {
    pub fn new(name: impl Into<String>, lasted: Duration) -> Self {
        Self { name: name.into(), lasted }
    }
}

/// A line for each phase, its bar of at most `width` cells where it ran between the start and the end of all, and a last
/// line with their sum. Nothing for no phases.
///
/// ```text
///   claim      1.0 ms  ████
///   restore    9.0 ms      ████████████████████████████████████
///   total     10.0 ms
/// ```
pub fn waterfall(phases: &[Phase], width: usize) -> Vec<String> {
    if phases.is_empty() {
        return Vec::new();
    }
    let total = phases.iter().fold(Duration::ZERO, |sum, phase| sum.saturating_add(phase.lasted));
    let cell = |at: Duration| {
        let cell = at.as_nanos().saturating_mul(width as u128) / total.as_nanos().max(1);
        usize::try_from(cell).unwrap_or(width).min(width)
    };
    let names: Vec<String> = phases.iter().map(|phase| on_one_line(&phase.name)).collect();
    let wide = names.iter().map(|name| name.chars().count()).max().unwrap_or_default().max("total".len());
    let mut begun = Duration::ZERO;
    let mut lines = Vec::new();
    for (name, phase) in names.iter().zip(phases) {
        let ended = begun.saturating_add(phase.lasted);
        // Whatever ran has a bar, however short it was.
        let from = cell(begun).min(width.saturating_sub(1));
        let bar = "█".repeat(cell(ended).saturating_sub(from).max(1));
        lines.push(format!("{name:<wide$}  {:>9}  {}{bar}", duration(phase.lasted), " ".repeat(from)));
        begun = ended;
    }
    lines.push(format!("{:<wide$}  {:>9}", "total", duration(total)));
    lines
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn phase(name: &str, micros: u64) -> Phase {
        Phase::new(name, Duration::from_micros(micros))
    }

    #[test]
    fn a_waterfall_shows_when_each_phase_ran_and_how_long() {
        let phases = [phase("claim", 1000), phase("restore", 8000), phase("settle", 10), phase("ready", 990)];
        let expected = [
            "claim       1.0 ms  ████",
            "restore     8.0 ms      ████████████████████████████████",
            "settle       10 us                                      █",
            "ready       990 us                                      ████",
            "total      10.0 ms",
        ];
        assert_eq!(waterfall(&phases, 40), expected);
        assert!(waterfall(&[], 40).is_empty());
    }

    proptest! {
        #[test]
        fn no_bar_leaves_the_drawing(micros in proptest::collection::vec(any::<u64>(), 1..10), width in 1usize..60) {
            let phases: Vec<_> = micros.iter().map(|micros| phase("p", *micros)).collect();
            for line in &waterfall(&phases, width)[..phases.len()] {
                let bar = line.rsplit_once('s').unwrap().1;
                prop_assert!(bar.contains('█') && bar.chars().count() <= 2 + width, "{line}");
            }
        }
    }
}
