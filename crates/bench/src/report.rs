//! What a person reads at the end of a run.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use ate_chart::{Cell, Column, Paint, Phase, Samples, Table, Tone, bar, duration, waterfall};

use crate::target::{Limit, Target};
use crate::{BenchError, Rows};

const BAR: usize = 24;
const WATERFALL: usize = 48;

/// A line of a table of latencies: whose, what (both as in the rows), and what it is called for a reader.
pub(crate) type Line<'a> = (&'a str, &'a str, &'a str);

pub(crate) struct Report {
    out: io::Stdout,
    paint: Paint,
}

impl Report {
    pub(crate) fn new() -> Self {
        let out = io::stdout();
        let paint = Paint(out.is_terminal() && std::env::var_os("NO_COLOR").is_none());
        Self { out, paint }
    }

    pub(crate) fn say(&mut self, line: &str) -> Result<(), BenchError> {
        writeln!(self.out, "{line}").map_err(BenchError::io("print"))
    }

    pub(crate) fn heading(&mut self, text: &str) -> Result<(), BenchError> {
        let text = self.paint.tone(Tone::Strong, text);
        self.say(&format!("\n{text}"))
    }

    pub(crate) fn table(&mut self, table: &Table) -> Result<(), BenchError> {
        table.write(&mut self.out, self.paint, "  ").map_err(BenchError::io("print"))
    }

    /// One line per way and kind, with bars as long as their medians.
    pub(crate) fn latencies(&mut self, rows: &Rows, lines: &[Line<'_>]) -> Result<(), BenchError> {
        let samples: Vec<Samples> = lines.iter().map(|(way, kind, _)| rows.samples(way, kind)).collect();
        let longest = samples.iter().filter_map(Samples::summary).map(|summary| summary.p50).max().unwrap_or_default();
        let mut table = Table::new([
            Column::left("WHAT"),
            Column::right("N"),
            Column::right("P50"),
            Column::right("P95"),
            Column::right("P99"),
            Column::right("MAX"),
            Column::left(""),
        ]);
        for ((way, kind, name), samples) in lines.iter().zip(&samples) {
            let Some(summary) = samples.summary() else {
                table.row([Cell::new(name), Cell::new(0)]);
                continue;
            };
            let length = bar(summary.p50.as_secs_f64(), longest.as_secs_f64(), BAR);
            let failures = rows.failures(way, kind);
            let failed = if failures > 0 { format!("{length} {failures} failed") } else { length };
            let tone = if failures > 0 { Tone::Bad } else { Tone::Accent };
            let times = [summary.p50, summary.p95, summary.p99, summary.max].map(|time| Cell::new(duration(time)));
            let cells = [Cell::new(name), Cell::new(summary.n)].into_iter().chain(times);
            table.row(cells.chain([Cell::new(failed).tone(tone)]));
        }
        self.table(&table)
    }

    /// The median of each step of an operation, one below the other.
    pub(crate) fn phases(&mut self, rows: &Rows, way: &str, kind: &str, name: &str) -> Result<(), BenchError> {
        let mut order = Vec::new();
        let mut lasted: BTreeMap<&str, Samples> = BTreeMap::new();
        for row in rows.of(way, kind).filter(|row| row.error.is_none()) {
            for (phase, micros) in &row.phases {
                if !order.contains(&phase.as_str()) {
                    order.push(phase);
                }
                lasted.entry(phase).or_default().push(Duration::from_micros(*micros));
            }
        }
        let median = |name: &&str| lasted.get(name).and_then(|samples| samples.percentile(50.0)).unwrap_or_default();
        let phases: Vec<Phase> = order.iter().map(|name| Phase::new(*name, median(name))).collect();
        self.say(&format!("  {}", self.paint.tone(Tone::Faint, &format!("{name}, medians of each step"))))?;
        waterfall(&phases, WATERFALL).iter().try_for_each(|line| self.say(&format!("    {line}")))
    }

    /// Each target with what was measured; a missed one is an error if `check` says so.
    pub(crate) fn targets(&mut self, targets: &[Target], check: bool) -> Result<(), BenchError> {
        if targets.is_empty() {
            return Ok(());
        }
        self.heading("Targets, as ratios in this run")?;
        let columns = [Column::left("RATIO"), Column::right("TARGET"), Column::right("MEASURED"), Column::left("")];
        let mut table = Table::new(columns);
        for target in targets {
            let limit = match target.limit {
                Limit::AtMost(limit) => format!("<= {limit}"),
                Limit::AtLeast(limit) => format!(">= {limit}"),
            };
            let measured = target.ratio.map_or_else(|| "none".to_owned(), |ratio| format!("{ratio:.3}"));
            let verdict = match target.is_met() {
                true => Cell::new("met").tone(Tone::Good),
                false => Cell::new("not met").tone(Tone::Bad),
            };
            table.row([Cell::new(&target.name), Cell::new(limit), Cell::new(measured), verdict]);
        }
        self.table(&table)?;
        let missed = targets.iter().filter(|target| !target.is_met()).count();
        if check && missed > 0 { Err(BenchError::Missed { missed, of: targets.len() }) } else { Ok(()) }
    }

    /// On what it was measured: numbers without it say nothing.
    pub(crate) fn machine(&mut self) -> Result<(), BenchError> {
        let name = rustix::system::uname();
        let processors = crate::pin::processors()?.len();
        let pages = |kind: &str| {
            let file = format!("/sys/kernel/mm/transparent_hugepage/hugepages-64kB/{kind}");
            let text = std::fs::read_to_string(file).unwrap_or_default();
            text.split(['[', ']']).nth(1).unwrap_or("not known").to_owned()
        };
        self.say(&format!(
            "{processors} processors, Linux {}, 64 KiB pages: anonymous {}, shared {}",
            name.release().to_string_lossy(),
            pages("enabled"),
            pages("shmem_enabled"),
        ))?;
        if cfg!(debug_assertions) {
            let warning = "this is a debug build: its figures say nothing; build with --release";
            self.say(&self.paint.tone(Tone::Warn, warning))?;
        }
        Ok(())
    }
}
