//! Durations for people, and colours for terminals.

use std::time::Duration;

/// `850 us`, `12.3 ms`, `1.25 s`, `2m05s`: three figures, the unit that suits.
pub fn duration(duration: Duration) -> String {
    let micros = duration.as_micros();
    match micros {
        0..1000 => format!("{micros} us"),
        1000..999_950 => format!("{:.1} ms", micros as f64 / 1e3),
        999_950..59_995_000 => format!("{:.2} s", micros as f64 / 1e6),
        _ => {
            let seconds = (micros + 500_000) / 1_000_000;
            format!("{}m{:02}s", seconds / 60, seconds % 60)
        }
    }
}

/// What a piece of text means, and so its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    Good,
    Warn,
    Bad,
    /// Stands back: rules, units, what is known already.
    Faint,
    /// Stands out: headings.
    Strong,
    /// A bar.
    Accent,
}

/// Colours, or none: off for pipes and files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Paint(pub bool);

impl Paint {
    pub fn tone(self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Good => 32,
            Tone::Warn => 33,
            Tone::Bad => 31,
            Tone::Faint => 2,
            Tone::Strong => 1,
            Tone::Accent => 36,
        };
        if self.0 && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Text of others must not break a line or move the cursor.
pub(crate) fn on_one_line(text: &str) -> String {
    text.replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_the_unit_that_suits_it_and_never_a_full_unit_too_small() {
        let shown = [0, 850, 12_345, 999_949, 999_950, 1_250_000, 59_994_000, 59_995_000, 125_000_000];
        let shown = shown.map(|micros| duration(Duration::from_micros(micros)));
        assert_eq!(shown, ["0 us", "850 us", "12.3 ms", "999.9 ms", "1.00 s", "1.25 s", "59.99 s", "1m00s", "2m05s"]);
    }

    #[test]
    fn colours_are_written_only_where_they_are_wanted() {
        assert_eq!(Paint(true).tone(Tone::Bad, "lost"), "\x1b[31mlost\x1b[0m");
        assert_eq!(Paint(true).tone(Tone::Bad, ""), "");
        assert_eq!(Paint(false).tone(Tone::Bad, "lost"), "lost");
    }
}
