//! `ate bench router`: requests through our router, through nginx and straight to the backend, in turn.
//!
//! ```text
//!   processors   │ the proxy under test │ client and backend │         round: for each way, closed loop, then open loop
//!                │  ours | nginx | none │                    │
//! ```
//! Both proxies keep their connections, speak to the backend over a unix socket, and add the same headers.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use ate_chart::{Cell, Column, Progress, Table, Tone, bar};
use tokio_util::sync::CancellationToken;

use crate::backend::Backend;
use crate::load::{Event, Kind, Load};
use crate::pin::{pinned, processor_seconds, processors};
use crate::proxy::{HOST, Proxy};
use crate::report::Report;
use crate::schedule::Pace;
use crate::target::{Limit, Target};
use crate::{BenchError, Output, Row, Rows, Setup, interval};

const OURS: &str = "ate";
const NGINX: &str = "nginx";
const DIRECT: &str = "direct";
const WAYS: [&str; 3] = [DIRECT, NGINX, OURS];

/// Without a rate of the caller's: this much of what the slowest way can take, so that none is overloaded.
const SHARE_OF_SLOWEST: f64 = 0.5;

const BAR: usize = 24;

#[derive(Clone, Debug, clap::Args)]
pub struct RouterArgs {
    /// Measured rounds; in each, every way has both kinds of load once
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// How long each load lasts
    #[arg(long, default_value = "2s", value_parser = interval, value_name = "DURATION")]
    duration: Duration,
    /// Connections of the client
    #[arg(long, default_value_t = 32)]
    connections: usize,
    /// Requests per second of the open load [default: half of what the slowest way can take]
    #[arg(long, value_name = "REQUESTS")]
    rate: Option<f64>,
    /// Processors of the proxy under test; client and backend have the rest [default: half of them]
    #[arg(long, value_name = "N")]
    cores: Option<usize>,
    #[command(flatten)]
    output: Output,
}

/// How much came through under a closed load.
struct Through {
    way: &'static str,
    per_second: f64,
    /// Processor time of the proxy per second.
    busy: f64,
}

/// On a thread of its own, since it blocks: told to stop when this is dropped, it does so before its next load.
pub(crate) async fn run(args: RouterArgs, setup: Setup) -> Result<(), BenchError> {
    let stop = CancellationToken::new();
    let _stopped = stop.clone().drop_guard();
    let measured = tokio::task::spawn_blocking(move || measure(&args, &setup, &stop)).await;
    measured.map_err(|error| BenchError::refused("measure", error))?
}

fn measure(args: &RouterArgs, setup: &Setup, stop: &CancellationToken) -> Result<(), BenchError> {
    let mut rows = args.output.rows("router")?;
    let directory =
        tempfile::Builder::new().prefix("ate-bench-").tempdir().map_err(BenchError::io("make a directory"))?;
    let all = processors()?;
    let cores = args.cores.unwrap_or(all.len() / 2).clamp(1, all.len());
    // With one processor everybody shares it.
    let (proxied, rest) = all.split_at(cores);
    let rest = if rest.is_empty() { proxied } else { rest };
    let (backend, _serving) = start_backend(directory.path(), rest)?;
    let (ours, nginx) = pinned(proxied, || {
        Ok((Proxy::ours(setup, &backend.worker)?, Proxy::nginx(&backend.plain, directory.path(), cores)?))
    })?;
    let course = Course { args, stop, backend, ours, nginx };
    let through = pinned(rest, || course.run(&mut rows))?;
    rows.flush()?;
    report(&rows, &through, cores, args.output.check)
}

/// A thread that is pinned and serves until the process ends.
fn start_backend(directory: &std::path::Path, on: &[usize]) -> Result<(Backend, tokio::runtime::Runtime), BenchError> {
    pinned(on, || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(BenchError::io("start the backend"))?;
        let backend = runtime.block_on(Backend::start(directory))?;
        Ok((backend, runtime))
    })
}

struct Course<'a> {
    args: &'a RouterArgs,
    stop: &'a CancellationToken,
    backend: Backend,
    ours: Proxy,
    nginx: Proxy,
}

impl Course<'_> {
    fn run(&self, rows: &mut Rows) -> Result<Vec<Through>, BenchError> {
        let mut progress = Progress::new(std::io::stderr(), std::io::stderr().is_terminal());
        progress.begin(Instant::now(), "measuring the router");
        let begun = Instant::now();
        // Not counted: connections are made, caches filled, and the pace of the open load found.
        let mut slowest = f64::INFINITY;
        for way in WAYS {
            let (events, _) = self.load(way, Kind::Closed, self.args.duration / 2)?;
            if !events.iter().any(|event| event.ok) {
                return Err(BenchError::refused(format!("send requests ({way})"), "no answer is a good one"));
            }
            slowest = slowest.min(rate(&events));
        }
        let rate = self.args.rate.unwrap_or(slowest * SHARE_OF_SLOWEST);
        let pace = Pace::new(rate)
            .ok_or_else(|| BenchError::refused("choose a rate", format!("{rate} requests per second is none")))?;
        let mut through = Vec::new();
        for round in 0..self.args.rounds {
            for place in 0..WAYS.len() {
                let way = WAYS[(place + round as usize) % WAYS.len()];
                progress.tick(Instant::now(), &format!("round {} of {}, {way}", round + 1, self.args.rounds));
                for (kind, name) in [(Kind::Closed, "closed"), (Kind::Open(pace), "open")] {
                    let offset = begun.elapsed();
                    let (events, busy) = self.load(way, kind, self.args.duration)?;
                    if matches!(kind, Kind::Closed) {
                        through.push(Through { way, per_second: self::rate(&events), busy });
                    }
                    events.iter().try_for_each(|event| rows.push(row(event, offset, round, way, name)))?;
                }
            }
        }
        progress.end(Instant::now());
        Ok(through)
    }

    fn load(&self, way: &str, kind: Kind, duration: Duration) -> Result<(Vec<Event>, f64), BenchError> {
        if self.stop.is_cancelled() {
            return Err(BenchError::Interrupted);
        }
        let (to, pid) = match way {
            OURS => (self.ours.at, Some(self.ours.pid())),
            NGINX => (self.nginx.at, Some(self.nginx.pid())),
            _ => (self.backend.direct, None),
        };
        let load = Load { to, host: HOST.to_owned(), connections: self.args.connections, duration };
        let before = pid.map(processor_seconds);
        let events = load.run(kind).map_err(BenchError::io(format!("send requests ({way})")))?;
        let used = pid.map(processor_seconds).zip(before).map_or(0.0, |(after, before)| after - before);
        Ok((events, used / duration.as_secs_f64()))
    }
}

/// Good answers per second, from the first request to the last answer.
fn rate(events: &[Event]) -> f64 {
    let lasted = events.iter().map(|event| event.end).max().unwrap_or_default().as_secs_f64();
    let good = events.iter().filter(|event| event.ok).count();
    #[expect(clippy::cast_precision_loss, reason = "a count of requests")]
    if lasted > 0.0 { good as f64 / lasted } else { 0.0 }
}

fn row(event: &Event, offset: Duration, round: u32, way: &str, kind: &str) -> Row {
    let micros = |at: Duration| u64::try_from((offset + at).as_micros()).unwrap_or(u64::MAX);
    Row {
        round,
        way: way.to_owned(),
        kind: kind.to_owned(),
        scheduled: micros(event.scheduled),
        start: micros(event.start),
        first_byte: micros(event.first_byte),
        end: micros(event.end),
        error: (!event.ok).then(|| "no good answer".to_owned()),
        ..Row::default()
    }
}

fn report(rows: &Rows, through: &[Through], cores: usize, check: bool) -> Result<(), BenchError> {
    let mut report = Report::new();
    report.machine()?;
    report.heading(&format!("Requests per second, closed loop, {cores} processor(s) for the proxy"))?;
    let median = |way: &str, of: fn(&Through) -> f64| {
        let mut values: Vec<f64> = through.iter().filter(|through| through.way == way).map(of).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    let most = WAYS.iter().filter_map(|way| median(way, |through| through.per_second)).fold(0.0, f64::max);
    let columns =
        [Column::right("REQUESTS/S"), Column::right("BUSY"), Column::right("REQUESTS/BUSY S"), Column::left("")];
    let mut table = Table::new([Column::left("WAY")].into_iter().chain(columns));
    for way in WAYS {
        let per_second = median(way, |through| through.per_second).unwrap_or(0.0);
        let busy = median(way, |through| through.busy).filter(|busy| *busy > 0.0);
        let cell = |value: Option<f64>| Cell::new(value.map(|value| format!("{value:.0}")).unwrap_or_default());
        table.row([
            Cell::new(way),
            cell(Some(per_second)),
            Cell::new(busy.map(|busy| format!("{:.0} %", busy * 100.0)).unwrap_or_default()),
            cell(median(way, per_busy_second).filter(|_| busy.is_some())),
            Cell::new(bar(per_second, most, BAR)).tone(Tone::Accent),
        ]);
    }
    report.table(&table)?;
    report.heading("Latency from the scheduled time, open loop at a constant rate")?;
    report.latencies(
        rows,
        &[(DIRECT, "open", "direct"), (NGINX, "open", "through nginx"), (OURS, "open", "through ate")],
    )?;
    let ratio = |of: fn(&Through) -> f64| (median(OURS, of), median(NGINX, of));
    let (ours, nginx) = ratio(|through| through.per_second);
    let target = Target::new("router's requests per second / nginx's", Limit::AtLeast(0.7), ours, nginx);
    report.targets(&[target], check)?;
    report.say(&format!("\nevery request: {}", rows.path().display()))
}

fn per_busy_second(through: &Through) -> f64 {
    if through.busy > 0.0 { through.per_second / through.busy } else { 0.0 }
}
