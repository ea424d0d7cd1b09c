//! What a person reads of it.

use ate_chart::{Cell, Column, Table, Tone, bar, duration};

use super::course::way;
use super::{ControlArgs, StoreKind};
use crate::report::Report;
use crate::target::{Limit, Target};
use crate::{BenchError, Row, Rows};

const BAR: usize = 24;

pub(crate) fn report(rows: &Rows, args: &ControlArgs, stores: &[StoreKind]) -> Result<(), BenchError> {
    let mut report = Report::new();
    report.machine()?;
    let mut targets = Vec::new();
    for &store in stores {
        let of = Of { rows, store, actors: &args.actors };
        of.throughput(&mut report, args)?;
        of.latency(&mut report)?;
        of.memory(&mut report)?;
        of.lists(&mut report)?;
        targets.extend(of.targets());
    }
    report.targets(&targets, args.output.check)?;
    report.say(&format!("\nevery event: {}", rows.path().display()))
}

/// One store's part.
struct Of<'a> {
    rows: &'a Rows,
    store: StoreKind,
    actors: &'a [u32],
}

impl Of<'_> {
    fn throughput(&self, report: &mut Report, args: &ControlArgs) -> Result<(), BenchError> {
        let (burst, clients) = (args.burst, args.clients);
        report.heading(&format!(
            "{}: durable wakes per second, bursts of {burst} by {clients} callers, all of {} rounds",
            self.store.name(),
            args.rounds
        ))?;
        let each = |row: &Row| count(row, "wakes");
        let columns = ["WAKES/S", "RAW/S", "RATIO", "SUSPENDS/S", "BUSY A WAKE", "RAW"].map(Column::right);
        let mut table = Table::new([Column::right("ACTORS")].into_iter().chain(columns).chain([Column::left("")]));
        let most = self.actors.iter().filter_map(|n| self.rate(*n, "raw", "wakes")).fold(0.0, f64::max);
        for &actors in self.actors {
            let [wakes, raw, suspends] = [("wakes", "wakes"), ("raw", "wakes"), ("suspends", "suspends")]
                .map(|(kind, count)| self.rate(actors, kind, count).unwrap_or(0.0));
            let busy = |kind: &str| {
                let (busy, wakes) =
                    (self.total(actors, kind, |row| count(row, "busy")), self.total(actors, kind, each));
                Cell::new(format!("{:.0} us", ratio(busy, wakes)))
            };
            table.row([
                Cell::new(thousands(actors)),
                Cell::new(format!("{wakes:.0}")),
                Cell::new(format!("{raw:.0}")),
                Cell::new(format!("{:.2}", wakes / raw)),
                Cell::new(format!("{suspends:.0}")),
                busy("wakes"),
                busy("raw"),
                Cell::new(bar(wakes, most, BAR)).tone(Tone::Accent),
            ]);
        }
        report.table(&table)
    }

    fn latency(&self, report: &mut Report) -> Result<(), BenchError> {
        report.heading(&format!("{}: how long a wake takes", self.store.name()))?;
        let kinds = [
            ("alone", "one after the other, as the router asks"),
            ("resume", "one after the other, by the public API"),
            ("open", "open loop, at a quarter of what the slowest can"),
            ("wake", "in a burst"),
        ];
        let ways: Vec<String> = self.actors.iter().map(|actors| way(self.store, *actors)).collect();
        let mut named = Vec::new();
        for (kind, name) in kinds {
            for (way, actors) in ways.iter().zip(self.actors) {
                named.push((way.as_str(), kind, format!("{name}, {} actors", thousands(*actors))));
            }
        }
        let lines: Vec<_> = named.iter().map(|(way, kind, name)| (*way, *kind, name.as_str())).collect();
        report.latencies(self.rows, &lines)
    }

    fn memory(&self, report: &mut Report) -> Result<(), BenchError> {
        report.heading(&format!("{}: memory of the control plane, in MB", self.store.name()))?;
        let columns =
            ["STARTED", "LISTED", "MOST WITH WAKES", "OF IT CACHE", "WITHOUT CACHE", "ON DISK"].map(Column::right);
        let mut table = Table::new([Column::right("ACTORS")].into_iter().chain(columns));
        for &actors in self.actors {
            let cell =
                |bytes: Option<f64>| Cell::new(bytes.map(|bytes| format!("{:.1}", bytes / 1e6)).unwrap_or_default());
            table.row([
                Cell::new(thousands(actors)),
                cell(self.own(actors, "memory before", false)),
                cell(self.own(actors, "memory listed", false)),
                cell(self.own(actors, "memory", false)),
                cell(self.memory_row(actors, "memory").map(|row| as_f64(count(&row, "cached")))),
                cell(self.own(actors, "memory", true)),
                cell(self.memory_row(actors, "memory").map(|row| as_f64(count(&row, "on disk")))),
            ]);
        }
        report.table(&table)?;
        if let (Some(&least), Some(&most)) = (self.actors.iter().min(), self.actors.iter().max())
            && let (Some(small), Some(large)) = (self.own(least, "memory", true), self.own(most, "memory", true))
            && most > least
        {
            let each = (large - small) / f64::from(most - least);
            report.say(&format!("  {each:.1} bytes for each actor that sleeps, without the cache"))?;
        }
        Ok(())
    }

    fn lists(&self, report: &mut Report) -> Result<(), BenchError> {
        report.heading(&format!("{}: lists, 1000 actors a page, and watches", self.store.name()))?;
        let columns =
            ["FIRST PAGE", "MIDDLE", "LAST", "ALL", "FOR EACH ACTOR", "TO A WATCHER", "P99"].map(Column::right);
        let mut table = Table::new([Column::right("ACTORS")].into_iter().chain(columns));
        for &actors in self.actors {
            let way = way(self.store, actors);
            let percentile = |kind: &str, percent: f64| {
                Cell::new(self.rows.samples(&way, kind).percentile(percent).map(duration).unwrap_or_default())
            };
            let list = self.rows.of(&way, "list").next();
            let each = list.map(|row| row.latency().as_secs_f64() * 1e6 / as_f64(count(row, "actors")).max(1.0));
            table.row([
                Cell::new(thousands(actors)),
                percentile("page first", 50.0),
                percentile("page middle", 50.0),
                percentile("page last", 50.0),
                Cell::new(list.map(|row| duration(row.latency())).unwrap_or_default()),
                Cell::new(each.map(|micros| format!("{micros:.1}us")).unwrap_or_default()),
                percentile("watch", 50.0),
                percentile("watch", 99.0),
            ]);
        }
        report.table(&table)
    }

    fn targets(&self) -> Vec<Target> {
        let store = self.store.name();
        let mut targets: Vec<Target> = self
            .actors
            .iter()
            .map(|&actors| {
                let name = format!("{store}: wakes per second / raw commits of the same, {} actors", thousands(actors));
                let (wakes, raw) = (self.rate(actors, "wakes", "wakes"), self.rate(actors, "raw", "wakes"));
                Target::new(name, Limit::AtLeast(0.5), wakes, raw)
            })
            .collect();
        let (Some(&least), Some(&most)) = (self.actors.iter().min(), self.actors.iter().max()) else { return targets };
        if least == most {
            return targets;
        }
        let sizes = format!("{} actors / {}", thousands(most), thousands(least));
        let median = |actors: u32, kind: &str| {
            self.rows.samples(&way(self.store, actors), kind).percentile(50.0).map(|median| median.as_secs_f64())
        };
        for (kind, name) in [("alone", "one after the other"), ("open", "open loop")] {
            let name = format!("{store}: p50 of a wake, {name}, {sizes}");
            targets.push(Target::new(name, Limit::AtMost(1.2), median(most, kind), median(least, kind)));
        }
        let own = |actors: u32| self.own(actors, "memory", true);
        let name = format!("{store}: memory without the cache, {sizes}");
        targets.push(Target::new(name, Limit::AtMost(1.2), own(most), own(least)));
        targets
    }

    /// Over all bursts together: what an engine puts in order behind its commits falls into some of them and not into others,
    /// and a median would leave it out of one side of a ratio.
    fn rate(&self, actors: u32, kind: &str, counted: &str) -> Option<f64> {
        let micros = self.total(actors, kind, |row| row.end - row.start);
        (micros > 0).then(|| 1e6 * ratio(self.total(actors, kind, |row| count(row, counted)), micros))
    }

    fn total(&self, actors: u32, kind: &str, of: impl Fn(&Row) -> u64) -> u64 {
        self.rows.of(&way(self.store, actors), kind).map(of).sum()
    }

    /// When it was most, without the cache: what has been written goes from memory to files in waves.
    fn memory_row(&self, actors: u32, kind: &str) -> Option<Row> {
        let own = |row: &&Row| row.bytes.unwrap_or(0).saturating_sub(count(row, "cached"));
        self.rows.of(&way(self.store, actors), kind).max_by_key(own).cloned()
    }

    fn own(&self, actors: u32, kind: &str, without_cache: bool) -> Option<f64> {
        let row = self.memory_row(actors, kind)?;
        let cached = if without_cache { count(&row, "cached") } else { 0 };
        Some(as_f64(row.bytes?.saturating_sub(cached)))
    }
}

fn count(row: &Row, name: &str) -> u64 {
    row.phases.iter().find(|(phase, _)| phase == name).map_or(0, |(_, count)| *count)
}

fn ratio(part: u64, of: u64) -> f64 {
    as_f64(part) / as_f64(of.max(1))
}

#[expect(clippy::cast_precision_loss, reason = "counts, sizes and microseconds far below 2^52")]
fn as_f64(number: u64) -> f64 {
    number as f64
}

fn thousands(number: u32) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(|group| String::from_utf8_lossy(group).into_owned());
    groups.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_numbers_are_divided_by_thousands() {
        let texts = [0, 999, 1000, 100_000, 5_000_000].map(thousands);
        assert_eq!(texts, ["0", "999", "1,000", "100,000", "5,000,000"]);
    }
}
