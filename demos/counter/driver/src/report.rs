//! What the demo has shown, as tables on stdout.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use ate_chart::{Cell, Column, Paint, Phase, Samples, Table, Tone, bar, duration, waterfall};
use ate_proto::ate::v1::HistoryEntry;

use crate::wakes::{self, Found, Kind, Wakes};

const BAR: usize = 24;
const WATERFALL: usize = 40;

/// What the client waits for besides the phases, which are those of the node.
const AROUND: &str = "the rest: room made on a worker, a commit, the way there and the answer itself";

/// Every actor's line.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) memory: u64,
    pub(crate) file: u64,
    pub(crate) expected: u64,
    pub(crate) asked: u64,
    pub(crate) frozen: u32,
    pub(crate) suspended: usize,
    pub(crate) moved: usize,
}

/// One wake in full.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) kind: Kind,
    pub(crate) actor: String,
    pub(crate) worker: String,
    pub(crate) first_byte: Duration,
    pub(crate) phases: Vec<Phase>,
}

#[derive(Debug, Default)]
pub(crate) struct Measured {
    kinds: BTreeMap<Kind, Samples>,
    /// Those that may have waited for a worker as well.
    crowd: Samples,
    wakes: Vec<Sample>,
}

impl Measured {
    pub(crate) fn of(wakes: &Wakes, histories: &BTreeMap<String, Vec<HistoryEntry>>) -> Self {
        let mut measured = Self::default();
        for (name, actor) in wakes.actors() {
            let history = histories.get(name).map_or(&[][..], Vec::as_slice);
            for asked in &actor.asked {
                let Some(first_byte) = asked.first_byte else { continue };
                if asked.in_burst {
                    measured.crowd.push(first_byte);
                    continue;
                }
                let kind = match asked.found {
                    Some(Found::Asleep(generation)) => wakes::origin(history, generation),
                    Some(Found::Frozen) => Kind::Thaw,
                    Some(Found::Awake) | None => Kind::Awake,
                };
                measured.kinds.entry(kind).or_default().push(first_byte);
                if let Some(Found::Asleep(generation)) = asked.found
                    && let Some(entry) = wakes::wake(history, generation)
                {
                    let phase = |phase: &ate_proto::ate::v1::history_entry::Phase| {
                        Phase::new(&phase.name, Duration::from_micros(phase.micros))
                    };
                    let (actor, worker) = (name.to_owned(), entry.worker.clone());
                    let phases = entry.phases.iter().map(phase).collect();
                    measured.wakes.push(Sample { kind, actor, worker, first_byte, phases });
                }
            }
        }
        measured
    }

    /// The one in the middle, so that it stands for the others; of restores if there were any.
    fn typical(&self) -> Option<&Sample> {
        let of = |kind: Kind| {
            let mut wakes: Vec<&Sample> = self.wakes.iter().filter(|wake| wake.kind == kind).collect();
            wakes.sort_by_key(|wake| wake.first_byte);
            wakes.get(wakes.len().saturating_sub(1) / 2).copied()
        };
        of(Kind::Restore).or_else(|| of(Kind::FirstStart))
    }

    fn rows(&self) -> Vec<(&'static str, Option<&Samples>)> {
        let of = |kind| self.kinds.get(&kind);
        vec![
            ("first start", of(Kind::FirstStart)),
            ("thaw", of(Kind::Thaw)),
            ("restore", of(Kind::Restore)),
            ("(was awake)", of(Kind::Awake)),
            ("(in a crowd)", Some(&self.crowd)),
        ]
    }

    pub(crate) fn write(&self, out: &mut impl Write, paint: Paint) -> io::Result<()> {
        let columns = [Column::left("WAKE"), Column::right("N"), Column::right("P50"), Column::right("P95")];
        let mut table = Table::new(columns.into_iter().chain([Column::left("")]));
        let summaries: Vec<_> =
            self.rows().into_iter().map(|(name, samples)| (name, samples.and_then(Samples::summary))).collect();
        let longest = summaries.iter().flat_map(|(_, summary)| summary).map(|summary| summary.p50).max();
        let longest = longest.unwrap_or_default().as_secs_f64();
        for (name, summary) in summaries {
            let Some(summary) = summary else {
                table.row([Cell::new(name), Cell::new(0), Cell::new("-"), Cell::new("-")]);
                continue;
            };
            let bar = bar(summary.p50.as_secs_f64(), longest, BAR);
            table.row([
                Cell::new(name),
                Cell::new(summary.n),
                Cell::new(duration(summary.p50)),
                Cell::new(duration(summary.p95)),
                Cell::new(bar).tone(Tone::Accent),
            ]);
        }
        table.write(out, paint, "  ")?;
        let Some(wake) = self.typical() else { return Ok(()) };
        let kind = if wake.kind == Kind::Restore { "restore" } else { "first start" };
        writeln!(out)?;
        let title = format!("One {kind}, phase by phase:");
        let about = format!(
            "{} on worker {}, {} to the client's first byte",
            wake.actor,
            wake.worker,
            duration(wake.first_byte)
        );
        writeln!(out, "  {} {about}", paint.tone(Tone::Strong, &title))?;
        for line in waterfall(&wake.phases, WATERFALL) {
            writeln!(out, "    {}", line.trim_end())?;
        }
        writeln!(out, "    {}", paint.tone(Tone::Faint, AROUND))
    }
}

pub(crate) fn write_actors(out: &mut impl Write, paint: Paint, lines: &[Line]) -> io::Result<()> {
    let numbers = ["RAM", "FILE", "ASKED", "FROZEN", "SUSPENDED", "MOVED"].map(Column::right);
    let mut table = Table::new([Column::left("ACTOR")].into_iter().chain(numbers).chain([Column::left("")]));
    for line in lines {
        let count = |count: u64| {
            let tone = if count == line.expected { Tone::Good } else { Tone::Bad };
            Cell::new(count).tone(tone)
        };
        table.row([
            Cell::new(&line.name),
            count(line.memory),
            count(line.file),
            Cell::new(line.asked),
            Cell::new(line.frozen),
            Cell::new(line.suspended),
            Cell::new(line.moved),
        ]);
    }
    let sum = |of: fn(&Line) -> u64| Cell::new(lines.iter().map(of).sum::<u64>()).tone(Tone::Strong);
    table.row([
        Cell::new("all").tone(Tone::Strong),
        sum(|line| line.memory),
        sum(|line| line.file),
        sum(|line| line.asked),
        sum(|line| line.frozen.into()),
        sum(|line| line.suspended as u64),
        sum(|line| line.moved as u64),
    ]);
    table.write(out, paint, "  ")
}

#[cfg(test)]
mod tests {
    use ate_proto::ate::v1::{ActorState, history_entry};

    use super::*;

    fn line(name: &str, memory: u64) -> Line {
        let name = name.to_owned();
        Line { name, memory, file: 5, expected: 5, asked: 2, frozen: 1, suspended: 1, moved: 0 }
    }

    #[test]
    fn a_count_that_is_not_the_expected_one_stands_out() {
        let mut out = Vec::new();
        write_actors(&mut out, Paint(true), &[line("a", 5), line("b", 4)]).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("\x1b[31m4\x1b[0m") && text.contains("\x1b[32m5\x1b[0m"), "{text}");
        let mut out = Vec::new();
        write_actors(&mut out, Paint(false), &[line("a", 5), line("b", 4)]).unwrap();
        let expected = "  ACTOR  RAM  FILE  ASKED  FROZEN  SUSPENDED  MOVED\n  \
                        a        5     5      2       1          1      0\n  \
                        b        4     5      2       1          1      0\n  \
                        all      9    10      4       2          2      0\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn each_request_is_measured_as_the_kind_that_the_system_told() {
        let mut wakes = Wakes::default();
        let state =
            |generation, frozen| ActorState { generation, frozen, phase: "running".into(), ..Default::default() };
        wakes.changed("a", ActorState::default());
        for (generation, millis) in [(1, 60), (1, 1), (2, 70)] {
            let number = wakes.asking("a", 1, false);
            wakes.answered("a", number, Duration::from_millis(millis), generation);
        }
        wakes.changed("a", state(2, true));
        let number = wakes.asking("a", 1, false);
        wakes.changed("a", state(2, false));
        wakes.answered("a", number, Duration::from_millis(7), 2);
        let phases = vec![history_entry::Phase { name: "restore".into(), micros: 40_000 }];
        let entry = |event: &str, generation, phases| HistoryEntry {
            event: event.into(),
            generation,
            phases,
            worker: "demo/counter-1".into(),
            ..Default::default()
        };
        let history = vec![
            entry("Created", 0, Vec::new()),
            entry("Running", 1, phases.clone()),
            entry("Captured", 1, Vec::new()),
            entry("Running", 2, phases),
        ];
        let measured = Measured::of(&wakes, &BTreeMap::from([("a".to_owned(), history)]));
        let mut out = Vec::new();
        measured.write(&mut out, Paint(false)).unwrap();
        let text = String::from_utf8(out).unwrap();
        let expected = "  WAKE          N      P50      P95
  first start   1  60.0 ms  60.0 ms  ████████████████████▋
  thaw          1   7.0 ms   7.0 ms  ██▍
  restore       1  70.0 ms  70.0 ms  ████████████████████████
  (was awake)   1   1.0 ms   1.0 ms  ▍
  (in a crowd)  0        -        -

  One restore, phase by phase: a on worker demo/counter-1, 70.0 ms to the client's first byte
    restore    40.0 ms  ████████████████████████████████████████
    total      40.0 ms
    the rest: room made on a worker, a commit, the way there and the answer itself
";
        assert_eq!(text, expected);
    }
}
