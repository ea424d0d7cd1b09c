//! One line for what takes long.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::text::{duration, on_one_line};

/// What ends sooner shows nothing.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// Between two lines where none can be drawn over: a log wants to know that it goes on, not each step.
const EVERY: Duration = Duration::from_secs(5);

const SPINNER: [char; 10] = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];

/// A step of the spinner.
const STEP: Duration = Duration::from_millis(100);

/// Says what is under way, once it takes longer than a second: on a terminal as one line drawn over and over, elsewhere as
/// a plain line every few seconds. Nothing depends on its being read, so a writer that fails is not heard of.
#[derive(Debug)]
pub struct Progress<W: Write> {
    writer: W,
    is_terminal: bool,
    under_way: Option<UnderWay>,
    is_drawn: bool,
}

#[derive(Debug)]
struct UnderWay {
    what: String,
    begun: Instant,
    said: Option<Instant>,
}

impl<W: Write> Progress<W> {
    pub fn new(writer: W, is_terminal: bool) -> Self {
        Self { writer, is_terminal, under_way: None, is_drawn: false }
    }

    /// Something begins; what was under way has ended.
    pub fn begin(&mut self, now: Instant, what: &str) {
        self.clear();
        self.under_way = Some(UnderWay { what: on_one_line(what), begun: now, said: None });
    }

    /// It goes on: to be called several times a second. `detail` may be empty: how far it has come.
    pub fn tick(&mut self, now: Instant, detail: &str) {
        let Some(under_way) = &mut self.under_way else { return };
        let elapsed = now.saturating_duration_since(under_way.begun);
        if elapsed < PATIENCE {
            return;
        }
        let what = &under_way.what;
        let detail = if detail.is_empty() { String::new() } else { format!("  {}", on_one_line(detail)) };
        if self.is_terminal {
            let frame = (elapsed.as_millis() / STEP.as_millis()) % SPINNER.len() as u128;
            let spinner = SPINNER[usize::try_from(frame).unwrap_or_default()];
            // Without line wrap, which would leave a trail on a narrow terminal.
            let _ = write!(self.writer, "\r\x1b[2K\x1b[?7l{spinner} {what}{detail}  {}s\x1b[?7h", elapsed.as_secs());
            self.is_drawn = true;
        } else if under_way.said.is_none_or(|said| now.saturating_duration_since(said) >= EVERY) {
            under_way.said = Some(now);
            let _ = writeln!(self.writer, "{what}{detail}  {}s", elapsed.as_secs());
        }
        let _ = self.writer.flush();
    }

    /// A line that stays, above whatever is under way.
    pub fn say(&mut self, line: &str) {
        self.clear();
        let _ = writeln!(self.writer, "{line}").and_then(|()| self.writer.flush());
    }

    /// It has ended. How long it took is told only if it was told that it was under way.
    pub fn end(&mut self, now: Instant) {
        self.clear();
        let Some(under_way) = self.under_way.take() else { return };
        let elapsed = now.saturating_duration_since(under_way.begun);
        if elapsed >= PATIENCE {
            self.say(&format!("{}  {}", under_way.what, duration(elapsed)));
        }
    }

    /// Takes the drawn line away.
    fn clear(&mut self) {
        if std::mem::take(&mut self.is_drawn) {
            let _ = write!(self.writer, "\r\x1b[2K").and_then(|()| self.writer.flush());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: Instant, millis: u64) -> Instant {
        start + Duration::from_millis(millis)
    }

    fn shown(progress: &Progress<Vec<u8>>) -> &str {
        std::str::from_utf8(&progress.writer).unwrap()
    }

    #[test]
    fn what_ends_within_a_second_shows_nothing() {
        for is_terminal in [false, true] {
            let (start, mut progress) = (Instant::now(), Progress::new(Vec::new(), is_terminal));
            progress.begin(start, "building");
            progress.tick(at(start, 999), "");
            progress.end(at(start, 999));
            assert_eq!(shown(&progress), "");
        }
    }

    #[test]
    fn a_terminal_gets_one_line_that_is_drawn_over_and_taken_away() {
        let (start, mut progress) = (Instant::now(), Progress::new(Vec::new(), true));
        progress.begin(start, "building");
        progress.tick(at(start, 1000), "1 of 2");
        progress.tick(at(start, 2100), "2 of 2");
        progress.end(at(start, 2200));
        let drawn = "\r\x1b[2K\x1b[?7l⠋ building  1 of 2  1s\x1b[?7h\r\x1b[2K\x1b[?7l⠙ building  2 of 2  2s\x1b[?7h";
        assert_eq!(shown(&progress), format!("{drawn}\r\x1b[2Kbuilding  2.20 s\n"));
    }

    #[test]
    fn elsewhere_a_plain_line_comes_every_few_seconds() {
        let (start, mut progress) = (Instant::now(), Progress::new(Vec::new(), false));
        progress.begin(start, "building");
        for millis in (0..=7000).step_by(100) {
            progress.tick(at(start, millis), "");
        }
        assert_eq!(shown(&progress), "building  1s\nbuilding  6s\n");
    }

    #[test]
    fn a_line_said_in_between_stays_whole() {
        let (start, mut progress) = (Instant::now(), Progress::new(Vec::new(), true));
        progress.begin(start, "building");
        progress.tick(at(start, 1000), "");
        progress.say("a warning");
        assert!(shown(&progress).ends_with("\x1b[?7h\r\x1b[2Ka warning\n"), "{:?}", shown(&progress));
    }
}
