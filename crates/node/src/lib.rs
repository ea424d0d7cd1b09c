//! A node: one per machine. It owns images, runtimes, snapshots and a set of workers, and carries out orders.
//!
//! ```text
//!   order ─▶ orders.rs ─▶ arrive.rs  ─┬─▶ boxes.rs       image + runtime ─▶ what a box is made of ─▶ worker: prepare
//!                         depart.rs   ├─▶ snapshots.rs   disk, durable storage ⇄ memory images (delta, seal)
//!                         copy.rs     ├─▶ volume.rs      the durable directory of a box: a file system as large as it may become
//!                                     └─▶ workers.rs     adopt, watch, stop worker processes (start.rs starts them)
//! ```
//!
//! It decides nothing: what it finds after a crash it reports, and the control plane says what becomes of it.

mod arrive;
mod bases;
mod boxes;
mod copy;
mod depart;
mod door;
mod egress;
mod evict;
mod host;
mod logs;
mod memory;
mod moving;
mod names;
mod orders;
mod runtime;
mod search;
mod session;
mod snapshots;
mod start;
#[cfg(test)]
mod stub;
mod tier;
mod volume;
mod workers;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use ate_name::{ActorUid, NodeName, ObjectKey, WorkerUid};
use ate_orders::NodeEvent;
use parking_lot::Mutex;
use tokio::sync::mpsc;

pub use orders::LocalNode;
pub use session::{Registry, Renewed};
pub use snapshots::SnapshotError;
pub use volume::{VolumeError, durable_directory};
pub use workers::ANSWERS_WITHIN;

/// News that the control plane has not taken yet. The rest is in the next report.
const EVENT_BUFFER: usize = 1024;

#[derive(Clone, Debug)]
pub struct Config {
    pub name: NodeName,
    /// Everything of the node lies below.
    pub directory: PathBuf,
    /// The program to start workers with, and the arguments that make it one.
    pub worker_program: PathBuf,
    pub build: String,
    /// What the keys of snapshots are sealed with.
    pub instance_key: [u8; 32],
    /// Restores and starts that may run at once; more wait in line. They are bound by processors.
    pub activations_at_once: usize,
    /// Where snapshots are durable; `None`: on this node's disk, which is all there is.
    pub storage: Option<ate_blob::Blobs>,
    /// Bytes that images may take together, and runtimes; what is in use is never evicted.
    pub image_budget: u64,
    /// Bytes that copies of snapshots may take that are in durable storage too.
    pub copy_budget: u64,
    pub asset_budget: u64,
    /// Where routers on other machines find its workers; `None`: they are all on this one.
    pub door: Option<std::net::SocketAddr>,
    /// A docker config with credentials for registries.
    pub registry_config: Option<PathBuf>,
}

/// How many workers a pool should have here, and what each may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    pub key: ObjectKey,
    pub workers: usize,
    pub memory_limit: Option<u64>,
    pub cpu_limit_millis: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error("cannot {what}")]
    Io { what: String, source: std::io::Error },
    #[error("the images of this node cannot be used")]
    Images(#[from] ate_image::StoreError),
    #[error("the runtimes of this node cannot be used")]
    Assets(#[from] ate_asset::StoreError),
    #[error("the worker process did not come up: {0}")]
    Worker(String),
    #[error(
        "the snapshots in {} are copies of those in durable storage, which would not be found\n  start with the --storage that they \
         are in; if nothing was ever kept there, remove {}",
        directory.display(), note.display()
    )]
    NoStorage { directory: PathBuf, note: PathBuf },
    #[error(
        "{left} of the snapshots in {} are on this disk only and could not be brought to durable storage: {reason}\n  see to it that \
         --storage names it and that it can be written to, and start again: those that are there already stay there",
        directory.display()
    )]
    NotMoved { directory: PathBuf, left: usize, reason: String },
}

impl NodeError {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

#[derive(Debug)]
pub struct Node {
    config: Config,
    images: ate_image::ImageStore,
    runtimes: runtime::Runtimes,
    blueprints: boxes::Blueprints,
    snapshots: Arc<snapshots::Snapshots>,
    memories: memory::Memories,
    /// One activation of an actor at a time.
    arrivals: tier::Flights<ActorUid>,
    /// Captures that have begun: one of an operation at a time.
    saves: tier::Flights<ate_name::OpId, depart::Save>,
    /// Activations that failed or were called off here.
    spent: Mutex<ate_orders::Spent>,
    /// Why the last try of an actor failed.
    failures: Mutex<ate_orders::Recent<ate_name::ActorUid, (ate_name::Generation, ate_orders::NodeError)>>,
    /// Saves that were called off or did not come about: their actors go on.
    kept: Mutex<ate_orders::Recent<ate_name::OpId, ate_orders::NodeError>>,
    host: host::HostFacts,
    logs: logs::Logs,
    workers: Mutex<HashMap<WorkerUid, Arc<workers::Handle>>>,
    /// Images that workers have given up and that are not stored yet.
    captured: Mutex<HashMap<ate_name::OpId, depart::InHand>>,
    pools: tokio::sync::watch::Sender<Vec<Pool>>,
    /// Until when its actors may meet others; `None`: always. See [`Node::keep_registered`].
    lease: Mutex<Option<std::time::Duration>>,
    /// It is one of several, or is about to be.
    is_registered: AtomicBool,
    /// How often it began to be heard of.
    silences: AtomicU64,
    leaving: tokio::sync::watch::Sender<bool>,
    /// Whoever outlived an earlier node is known.
    adopted: tokio_util::sync::CancellationToken,
    /// Held while a worker is started.
    starting: tokio::sync::Mutex<()>,
    /// A worker is gone that should be there.
    missing: tokio::sync::Notify,
    turns: Arc<tokio::sync::Semaphore>,
    events: mpsc::Sender<NodeEvent>,
    tasks: tokio_util::task::TaskTracker,
    stopping: tokio_util::sync::CancellationToken,
}

impl Node {
    /// Opens what is on disk. Nothing runs yet: see [`Node::adopt`].
    pub fn open(config: Config) -> Result<(Arc<Self>, mpsc::Receiver<NodeEvent>), NodeError> {
        let directory = |name: &str| config.directory.join(name);
        for name in ["images", "assets", "snapshots", "workers", "logs", "scratch"] {
            std::fs::create_dir_all(directory(name)).map_err(NodeError::io(format!("make the directory {name}")))?;
        }
        let (events, receiver) = mpsc::channel(EVENT_BUFFER);
        let node = Arc::new(Self {
            images: ate_image::ImageStore::open(&directory("images"), ate_image::Limits::default())?,
            runtimes: runtime::Runtimes::open(&directory("assets"), config.asset_budget)?,
            blueprints: boxes::Blueprints::default(),
            snapshots: Arc::new(snapshots::Snapshots::open(
                &directory("snapshots"),
                &directory("scratch"),
                config.storage.clone(),
            )?),
            memories: memory::Memories::default(),
            arrivals: tier::Flights::default(),
            saves: tier::Flights::default(),
            spent: Mutex::default(),
            failures: Mutex::default(),
            kept: Mutex::default(),
            host: host::HostFacts::read(),
            logs: logs::Logs::open(&directory("logs")),
            workers: Mutex::default(),
            captured: Mutex::default(),
            pools: tokio::sync::watch::Sender::new(Vec::new()),
            lease: Mutex::default(),
            is_registered: AtomicBool::new(false),
            silences: AtomicU64::new(0),
            leaving: tokio::sync::watch::Sender::new(false),
            adopted: tokio_util::sync::CancellationToken::new(),
            starting: tokio::sync::Mutex::default(),
            missing: tokio::sync::Notify::new(),
            turns: Arc::new(tokio::sync::Semaphore::new(config.activations_at_once)),
            events,
            tasks: tokio_util::task::TaskTracker::new(),
            stopping: tokio_util::sync::CancellationToken::new(),
            config,
        });
        Ok((node, receiver))
    }

    pub fn name(&self) -> &NodeName {
        &self.config.name
    }
}
