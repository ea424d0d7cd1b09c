//! `ate bench control`: the control plane with fake nodes, a real store and the real API, while ever more actors sleep.
//!
//! ```text
//!   for each store, with 1,000 … 5,000,000 suspended actors side by side, each a process of its own:
//!     list and watch, then in turn, round by round:
//!     open     wakes at a fixed rate, a quarter of what the slowest can
//!     alone    one wake after the other
//!     memory
//!     and then, round by round:
//!     wakes    so many at once, until all of it is durable      ─┐ the same changes
//!     raw      the store alone commits them once more           ─┘
//! ```
//! A wake is two commits: the binding, which the caller waits for, and that it runs, which nobody waits for. Both are counted.

mod client;
mod clock;
mod course;
mod fill;
mod metered;
mod nodes;
mod plane;
mod raw;
mod report;
mod shape;

use std::path::PathBuf;

use ate_testkit_postgres::Server;

use crate::{BenchError, Output, Setup};

use client::Home;
use course::Course;
use fill::Schemas;
pub(crate) use plane::{PlaneArgs, serve as plane};

const ATESPACE: &str = "bench";
const NAMESPACE: &str = "bench";
const POOL: &str = "bench";
const TEMPLATE: &str = "bench";

/// Fake ones. A handful: the control plane compares each with the store every few seconds, and looks at every worker for it.
const NODES: u8 = 4;

/// Workers beyond those that a burst of wakes takes: a worker is free again only when the store says so.
const SPARE_WORKERS: u32 = 64;

/// Numbers have seven digits, so that all names are of one length.
const MOST_ACTORS: u32 = 9_999_999;

/// The schema for so many actors.
fn schema(actors: u32) -> String {
    format!("ate_bench_{actors}")
}

fn actor_name(number: u32) -> String {
    format!("a{number:07}")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum StoreKind {
    Embedded,
    Postgres,
}

impl StoreKind {
    fn name(self) -> &'static str {
        match self {
            Self::Embedded => "embedded",
            Self::Postgres => "postgres",
        }
    }
}

#[derive(Clone, Debug, clap::Args)]
pub struct ControlArgs {
    /// Suspended actors; each number is measured, and the last compared with the first
    #[arg(long, value_delimiter = ',', default_values_t = [1000, 100_000], value_name = "N,N,…")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_ACTORS)))]
    actors: Vec<u32>,
    /// Only with these stores [default: embedded, and postgres if it is installed]
    #[arg(long, value_delimiter = ',', value_name = "STORE,…")]
    store: Vec<StoreKind>,
    /// A database to use, instead of starting a server; schemas ate_bench_… are made in it, and dropped. Arguments can be read
    /// by everybody on a machine: put an address with a password in it into the environment
    #[arg(long, env = plane::POSTGRES, value_name = "URL", hide_env_values = true)]
    postgres: Option<String>,
    /// Measured rounds
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Wakes of one burst, or all actors if there are fewer; so many workers there are
    #[arg(long, default_value_t = 4000, value_parser = clap::value_parser!(u32).range(1..))]
    burst: u32,
    /// Callers at once
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    clients: u32,
    /// Where embedded stores are made, and removed [default: the system's temporary directory]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// What wakes touch of each actor that sleeps: its record, and its place in the index.
const TOUCHED_BYTES: u64 = 3000;

/// What `docs/store.md` says of a server for so many actors: memory for what wakes touch, at least a quarter of what there is and at
/// most most of it; and a log for pages that change for the first time, which are logged in whole.
fn server_settings(actors: u32) -> String {
    let memory = rustix::system::sysinfo();
    let memory = (memory.totalram as u64).saturating_mul(u64::from(memory.mem_unit)) >> 20;
    let buffers = ((u64::from(actors) * TOUCHED_BYTES) >> 20).min(memory * 3 / 5).max(memory / 4).max(128);
    format!("shared_buffers = {buffers}MB\nmax_wal_size = 8GB\nwal_compression = lz4\n")
}

/// A database, what is made in it, and the server if it is ours: gone in this order.
struct Database {
    schemas: Schemas,
    _server: Option<Server>,
}

impl Database {
    async fn of(args: &ControlArgs) -> Result<Self, BenchError> {
        let schemas = |url| Schemas { url, names: args.actors.iter().map(|actors| schema(*actors)).collect() };
        if let Some(url) = &args.postgres {
            return Ok(Self { schemas: schemas(url.clone()), _server: None });
        }
        let settings = server_settings(args.actors.iter().copied().max().unwrap_or(0));
        let started = tokio::task::spawn_blocking(move || Server::start(&settings, &[])).await;
        let server = started.map_err(|_| BenchError::refused("start PostgreSQL", "see above"))?;
        Ok(Self { schemas: schemas(server.url()), _server: Some(server) })
    }
}

/// The stores to measure with. One that was not asked for and is not here is left out, aloud.
fn stores(args: &ControlArgs) -> Result<Vec<StoreKind>, BenchError> {
    const REMEDY: &str = "run ./setup --test, install the package postgresql, or name a database with --postgres";
    let here = args.postgres.is_some() || ate_testkit_postgres::is_installed();
    match (args.store.is_empty(), here) {
        (true, true) => Ok(vec![StoreKind::Embedded, StoreKind::Postgres]),
        (true, false) => {
            eprintln!("PostgreSQL is not installed: only the embedded store is measured\n  {REMEDY}");
            Ok(vec![StoreKind::Embedded])
        }
        (false, false) if args.store.contains(&StoreKind::Postgres) => {
            Err(BenchError::Missing { what: "PostgreSQL".to_owned(), remedy: REMEDY })
        }
        (false, _) => Ok(args.store.clone()),
    }
}

pub(crate) async fn run(args: &ControlArgs, setup: &Setup) -> Result<(), BenchError> {
    let stores = stores(args)?;
    let mut rows = args.output.rows("control")?;
    let mut course = Course::new(args, setup);
    for &kind in &stores {
        let mut builder = tempfile::Builder::new();
        let builder = builder.prefix("ate-bench-");
        let made = args.directory.as_ref().map_or_else(|| builder.tempdir(), |parent| builder.tempdir_in(parent));
        let directory = made.map_err(BenchError::io("make a temporary directory"))?;
        let database = match kind {
            StoreKind::Embedded => None,
            StoreKind::Postgres => Some(Database::of(args).await?),
        };
        let home = |actors: u32| match &database {
            None => Home::Embedded(directory.path().join(format!("store-{actors}"))),
            Some(Database { schemas, .. }) => Home::Postgres { url: schemas.url.clone(), schema: schema(actors) },
        };
        course.run(kind, directory.path(), home, &mut rows).await?;
    }
    rows.flush()?;
    report::report(&rows, args, &stores)
}
