//! The control plane under test: in a process of its own, so that its memory is its own.
//!
//! ```text
//!   benchmark ── Order, one JSON line ──▶ plane ── Serve ──▶ Control, fake nodes, the API on a socket
//!             ◀── Done, one JSON line ──        ── Retire, Replay ──▶ the same store, and nobody else at it
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ate_control::{Control, Keys, Replicas, Settings, World};
use ate_name::ActorUid;
use ate_store::{FeedLimits, Key, Record, Store};
use ate_store_embedded::EmbeddedStore;
use ate_store_postgres::{Address, PostgresStore, Schema};
use futures::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use super::metered::{Kept, Metered};
use super::nodes::FakeNodes;
use super::shape::Shape;
use super::{NODES, clock, fill, raw};
use crate::{BenchError, Setup, pipe};

/// Holds the address, which has a password in it: arguments can be read by everybody on a machine.
pub(crate) const POSTGRES: &str = "ATE_BENCH_POSTGRES";

/// Commits that do not come by then never will.
const SETTLED_WITHIN: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, clap::Args)]
pub struct PlaneArgs {
    /// The directory of an embedded store
    #[arg(long, conflicts_with = "schema")]
    embedded: Option<PathBuf>,
    /// A schema of the database whose address is in the environment
    #[arg(long)]
    schema: Option<String>,
    /// Where to serve the API
    #[arg(long)]
    socket: PathBuf,
    /// How many workers there are, on all nodes together
    #[arg(long)]
    workers: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Start the control plane and its API.
    Serve,
    /// Stop both; the store stays open.
    Retire,
    /// Make so many actors of the one that there is.
    Fill { actors: u32 },
    /// Remember the commits that change an actor, from now on.
    Record,
    /// Wait until there were so many of them, and keep them for later or not.
    Settled { commits: usize, keep: bool },
    /// Commit those that were kept first once more, without a control plane. With the last, all is as it was before.
    Replay { clients: usize },
    /// How much the store takes: in the cache of its engine, and on the disk.
    Size,
}

/// Times by [`super::clock`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) commits: u64,
    pub(crate) bytes: u64,
    pub(crate) cached: u64,
    /// Processor time of the plane, in microseconds.
    pub(crate) busy: u64,
    /// When each commit was durable, by its revision.
    pub(crate) durable: Vec<(u64, u64)>,
    pub(crate) error: Option<String>,
}

enum Adapter {
    Embedded(Arc<EmbeddedStore>),
    Postgres(Arc<PostgresStore>, String, Schema),
}

impl Adapter {
    async fn open(args: &PlaneArgs) -> Result<Self, BenchError> {
        match (&args.embedded, &args.schema) {
            (Some(directory), _) => {
                let store = EmbeddedStore::open(directory, FeedLimits::default());
                Ok(Self::Embedded(Arc::new(store.map_err(|error| BenchError::refused("open a store", error))?)))
            }
            (None, Some(schema)) => {
                let url = std::env::var(POSTGRES).map_err(|error| BenchError::refused("read the address", error))?;
                let address: Address =
                    url.parse().map_err(|error| BenchError::refused("read the database's address", error))?;
                let schema: Schema = schema.parse().map_err(|error| BenchError::refused("name a schema", error))?;
                let settings = ate_store_postgres::Settings {
                    schema: schema.clone(),
                    ..ate_store_postgres::Settings::new(address)
                };
                let store = PostgresStore::connect(settings).await;
                let store = store.map_err(|error| BenchError::refused("open a store", error))?;
                Ok(Self::Postgres(Arc::new(store), url, schema))
            }
            (None, None) => Err(BenchError::refused("open a store", "neither --embedded nor --schema is given")),
        }
    }

    fn store(&self) -> Arc<dyn Store> {
        match self {
            Self::Embedded(store) => Arc::clone(store) as Arc<dyn Store>,
            Self::Postgres(store, ..) => Arc::clone(store) as Arc<dyn Store>,
        }
    }

    /// As it is set up where it is used: an embedded store belongs to one process, a database to several.
    fn replicas(&self, several: Replicas) -> Replicas {
        match self {
            Self::Embedded(_) => Replicas::Alone,
            Self::Postgres(..) => several,
        }
    }

    async fn fill(&self, shape: &Shape, actors: u32) -> Result<(), BenchError> {
        match self {
            Self::Embedded(store) => fill::through_port(store.as_ref(), shape, actors).await,
            Self::Postgres(_, url, schema) => fill::by_copy(url, schema, shape, actors).await,
        }
    }

    async fn close(self) {
        match self {
            Self::Embedded(store) => drop(tokio::task::spawn_blocking(move || store.close()).await),
            Self::Postgres(store, ..) => store.close().await,
        }
    }
}

struct Clock;

impl World for Clock {
    fn now(&self) -> jiff::Timestamp {
        jiff::Timestamp::now()
    }

    fn random(&self) -> [u8; 16] {
        rand::random()
    }
}

/// No snapshot is ever opened here; only the length counts.
struct NoKeys;

impl Keys for NoKeys {
    fn sealed(&self, actor: ActorUid) -> String {
        // A sealed key is 60 bytes in base64.
        format!("{:0<80}", actor.to_string())
    }
}

struct Serving {
    control: Arc<Control>,
    shutdown: CancellationToken,
    api: JoinHandle<Result<(), ate_apiserver::ServeError>>,
    /// Those who look after nodes; they end with it.
    _looking: JoinSet<()>,
}

struct Plane {
    args: PlaneArgs,
    replicas: Replicas,
    adapter: Adapter,
    metered: Arc<Metered>,
    nodes: Arc<FakeNodes>,
    serving: Option<Serving>,
    kept: VecDeque<Vec<Kept>>,
    /// As they were before they were committed once more.
    before: BTreeMap<Key, Record>,
    /// Its processor time when it began to remember.
    busy_before: u64,
}

/// Takes orders until its input ends.
pub(crate) async fn serve(args: &PlaneArgs, setup: &Setup) -> Result<(), BenchError> {
    let adapter = Adapter::open(args).await?;
    let metered = Arc::new(Metered::new(adapter.store()));
    let nodes = Arc::new(FakeNodes::new(NODES, args.workers));
    let mut plane = Plane {
        args: args.clone(),
        replicas: adapter.replicas(setup.replicas),
        adapter,
        metered,
        nodes,
        serving: None,
        kept: VecDeque::new(),
        before: BTreeMap::new(),
        busy_before: 0,
    };
    pipe::take_orders(async |order| match plane.carry_out(order).await {
        Ok(done) => done,
        Err(error) => Done { error: Some(describe(&error)), ..Done::default() },
    })
    .await?;
    plane.retire().await?;
    plane.adapter.close().await;
    Ok(())
}

fn directory_bytes(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let bytes = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(entry_is) if entry_is.is_dir() => directory_bytes(&entry.path()),
        // Files come and go while the engine merges them.
        found => found.map_or(0, |file| file.len()),
    };
    entries.map(bytes).sum()
}

fn describe(error: &BenchError) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

impl Plane {
    async fn carry_out(&mut self, order: Order) -> Result<Done, BenchError> {
        let mut done = Done::default();
        match order {
            Order::Serve => self.serve().await?,
            Order::Retire => self.retire().await?,
            Order::Fill { actors } => {
                let shape = Shape::of_first(self.adapter.store().as_ref()).await?;
                self.adapter.fill(&shape, actors).await?;
                let (records, bytes) = shape.size();
                (done.commits, done.bytes) = (records as u64, bytes as u64);
            }
            Order::Record => {
                self.metered.begin();
                self.busy_before = clock::busy();
            }
            Order::Settled { commits, keep } => {
                let kept = tokio::time::timeout(SETTLED_WITHIN, self.metered.at_least(commits)).await;
                let kept = kept.map_err(|_| BenchError::refused("wait for commits", "they do not come"))?;
                done.busy = clock::busy() - self.busy_before;
                done.durable = kept.iter().map(|kept| (kept.revision.0, kept.at)).collect();
                done.end = kept.iter().map(|kept| kept.at).max().unwrap_or(0);
                done.commits = kept.len() as u64;
                done.bytes = kept.iter().map(|kept| kept.change.bytes() as u64).sum();
                self.kept.extend(keep.then_some(kept));
            }
            Order::Replay { clients } => {
                let failed = |error| BenchError::refused("commit the changes once more", error);
                let (store, kept) = (self.adapter.store(), self.kept.pop_front().unwrap_or_default());
                let replayed = raw::replay(&store, kept, clients, &mut self.before).await.map_err(failed)?;
                if self.kept.is_empty() {
                    raw::put_back(&store, std::mem::take(&mut self.before)).await.map_err(failed)?;
                }
                (done.start, done.end) = (replayed.start, replayed.end);
                (done.commits, done.bytes) = (replayed.commits as u64, replayed.bytes as u64);
                done.busy = replayed.busy;
            }
            Order::Size => match &self.adapter {
                Adapter::Embedded(store) => {
                    done.cached = store.cached_bytes();
                    done.bytes = self.args.embedded.as_deref().map_or(0, directory_bytes);
                }
                Adapter::Postgres(_, url, schema) => done.bytes = fill::table_bytes(url, schema).await?,
            },
        }
        Ok(done)
    }

    async fn serve(&mut self) -> Result<(), BenchError> {
        let failed = |error: ate_control::ControlError| BenchError::refused("start the control plane", error);
        let settings = Settings { replicas: self.replicas, ..Settings::default() };
        let store = Arc::clone(&self.metered) as Arc<dyn Store>;
        let nodes = Arc::clone(&self.nodes) as Arc<dyn ate_orders::Nodes>;
        let control = Control::new(store, Arc::clone(&nodes), Arc::new(Clock), Arc::new(NoKeys), settings);
        control.start().await.map_err(failed)?;
        for compared in join_all(self.nodes.names().map(|node| control.reconcile(node))).await {
            compared.map_err(failed)?;
        }
        // They begin with a comparison, and that has just been made: it would fall into what is measured next.
        let mut looking = JoinSet::new();
        for node in self.nodes.names().cloned() {
            let (control, wait) = (Arc::clone(&control), settings.reconcile);
            looking.spawn(async move {
                tokio::time::sleep(wait).await;
                control.look_after(node).await;
            });
        }
        control.start_controllers();
        // The last one's, if there was one.
        let _ = std::fs::remove_file(&self.args.socket);
        let unix = UnixListener::bind(&self.args.socket).map_err(BenchError::io("listen for the API"))?;
        let info = ate_apiserver::Info {
            version: String::new(),
            build: String::new(),
            instance: "bench".to_owned(),
            router_url: String::new(),
        };
        let shutdown = CancellationToken::new();
        let listeners = ate_apiserver::Listeners { unix, tls: None };
        let api = ate_apiserver::serve(Arc::clone(&control), nodes, info, listeners, shutdown.clone());
        self.serving = Some(Serving { control, shutdown, api: tokio::spawn(api), _looking: looking });
        Ok(())
    }

    async fn retire(&mut self) -> Result<(), BenchError> {
        let Some(serving) = self.serving.take() else { return Ok(()) };
        serving.shutdown.cancel();
        let served = serving.api.await.map_err(|error| BenchError::refused("stop the API", error))?;
        served.map_err(|error| BenchError::refused("stop the API", error))?;
        serving.control.stop().await;
        Ok(())
    }
}
