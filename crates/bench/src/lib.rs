//! Benchmarks: what `ate` costs next to doing without it.
//!
//! ```text
//!   schedule ─▶ events, due at fixed times ─┬─▶ ours       an `ate dev` of the benchmark's own
//!                                           ├─▶ floor      the same sandbox without us     (site)
//!                                           └─▶ public     the public project's way        (site)
//!   rows (one JSON line per event) ─▶ tables, bars ─▶ targets: ratios, met or not
//! ```
//!
//! A number is worth something only beside another from the same run on the same machine, so systems and baselines take
//! turns, round by round, and what is promised is a ratio. Load is open loop: an event is due when the schedule says so and
//! its latency counts from then, whether or not the system was ready for it.

mod backend;
mod control;
mod density;
mod dev;
mod error;
mod http;
mod image;
mod load;
mod memory;
mod pin;
mod pipe;
mod proxy;
mod report;
mod router;
mod row;
mod schedule;
mod site;
mod target;
mod wake;

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::runtime::Builder;

pub use error::BenchError;
pub use row::{Row, Rows};

#[derive(Debug, clap::Subcommand)]
pub enum BenchVerb {
    /// How long a wake, a thaw and a suspend take, and how much is stored
    Wake(wake::WakeArgs),
    /// How many requests the router passes on, and how fast
    Router(router::RouterArgs),
    /// How much memory actors take, warm, running and frozen
    Density(density::DensityArgs),
    /// How many actors the control plane wakes, how fast, and what it takes when millions sleep
    Control(control::ControlArgs),
    /// Where sandboxes run without `ate`; started by the benchmarks
    #[command(hide = true)]
    Site(site::SiteArgs),
    /// A router without a control plane; started by the benchmarks
    #[command(hide = true)]
    Proxy(proxy::ProxyArgs),
    /// A control plane with fake nodes; started by the benchmarks
    #[command(hide = true)]
    Plane(control::PlaneArgs),
}

/// What the benchmarks are to be made with.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The `ate` binary.
    pub program: PathBuf,
    /// The sandbox runtimes, as `runtime/build` prints it.
    pub runtime: Option<PathBuf>,
    /// As replicas on one database are set up.
    pub replicas: ate_control::Replicas,
}

impl Setup {
    fn runtime(&self) -> Result<&Path, BenchError> {
        self.runtime.as_deref().ok_or(BenchError::Missing {
            what: "the sandbox runtime".to_owned(),
            remedy: "build it with runtime/build, or name it with ATE_RUNTIME",
        })
    }
}

/// Where rows go, and whether a missed target is a failure.
#[derive(Clone, Debug, clap::Args)]
struct Output {
    /// Write a JSON line for every event to this file [default: bench-<name>.jsonl]
    #[arg(long, value_name = "FILE")]
    rows: Option<PathBuf>,
    /// Fail if a target is not met
    #[arg(long)]
    check: bool,
}

impl Output {
    fn rows(&self, bench: &str) -> Result<Rows, BenchError> {
        Rows::create(&self.rows.clone().unwrap_or_else(|| format!("bench-{bench}.jsonl").into()))
    }
}

/// Runs a benchmark, or a part that a benchmark has started. Must be called before the process has a second thread.
pub fn run(verb: BenchVerb, setup: &Setup) -> Result<(), BenchError> {
    match verb {
        BenchVerb::Wake(args) => in_runtime(wake::run(&args, setup)),
        BenchVerb::Router(args) => in_runtime(router::run(args, setup.clone())),
        BenchVerb::Density(args) => in_runtime(density::run(&args, setup)),
        // Its callers share the processors with those whom they call; on one thread they need the least.
        BenchVerb::Control(args) => until_interrupted(Builder::new_current_thread(), control::run(&args, setup)),
        BenchVerb::Plane(args) => in_runtime(control::plane(&args, setup)),
        BenchVerb::Site(args) => site::serve(&args),
        BenchVerb::Proxy(args) => match in_runtime(proxy::serve(&args)) {
            // That is how it ends.
            Err(BenchError::Interrupted) => Ok(()),
            other => other,
        },
    }
}

fn in_runtime(work: impl Future<Output = Result<(), BenchError>>) -> Result<(), BenchError> {
    until_interrupted(Builder::new_multi_thread(), work)
}

/// To its end, or until somebody has had enough: whatever was started ends with the values that stand for it.
fn until_interrupted(
    mut runtime: Builder,
    work: impl Future<Output = Result<(), BenchError>>,
) -> Result<(), BenchError> {
    use tokio::signal::unix::{SignalKind, signal};
    let io = || BenchError::io("start");
    runtime.enable_all().build().map_err(io())?.block_on(async {
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt()).map_err(io())?, signal(SignalKind::terminate()).map_err(io())?);
        tokio::select! {
            done = work => done,
            _ = interrupt.recv() => Err(BenchError::Interrupted),
            _ = terminate.recv() => Err(BenchError::Interrupted),
        }
    })
}

/// A temporary directory, and what is needed to work with sandboxes at all.
fn workshop() -> Result<tempfile::TempDir, BenchError> {
    if !rustix::process::geteuid().is_root() {
        return Err(BenchError::Missing { what: "the right to make sandboxes".to_owned(), remedy: "run as root" });
    }
    tempfile::Builder::new().prefix("ate-bench-").tempdir().map_err(BenchError::io("make a temporary directory"))
}

/// As the rest of `ate` writes durations: `500ms`, `2s`, `1m`.
fn interval(text: &str) -> Result<Duration, String> {
    match text.parse::<ate_object::Interval>() {
        Ok(interval) if !interval.is_zero() => Ok(interval.get()),
        Ok(_) => Err("must be longer than nothing".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
