use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ate_name::{ActorKey, ActorUid, Digest, Generation, NodeName, ObjectKey, OpId, WorkerUid};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::Workload;

/// Who an actor is, as the actor itself can read it under `/run/ate`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub uid: ActorUid,
    pub key: ActorKey,
    pub template: ObjectKey,
    pub generation: Generation,
}

/// Put an actor into a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Activate {
    pub op: OpId,
    pub worker: WorkerUid,
    pub identity: Identity,
    pub workload: Workload,
    pub source: Source,
    /// The key that the actor's snapshots are sealed with, sealed itself.
    pub sealed_key: String,
    /// Ask the readiness probes also after a restore; a fresh start is always asked.
    pub probe: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Source {
    /// Start from nothing, on the runtime that the pool's config names.
    Boot { runtime: Runtime },
    /// Continue from a snapshot, on the runtime that its manifest names.
    Snapshot {
        at: SnapshotAt,
        golden: bool,
        /// Of its files only: the processes start anew.
        #[serde(default)]
        fresh: bool,
    },
}

/// A snapshot that exists, and how to tell that it is the one that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotAt {
    pub prefix: String,
    pub manifest: Digest,
}

/// The binaries of a sandbox class, per architecture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runtime {
    /// The SandboxConfig they come from, for error texts.
    pub config: String,
    pub class: String,
    pub assets: BTreeMap<String, BTreeMap<String, RuntimeAsset>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeAsset {
    pub url: String,
    pub sha256: Digest,
}

/// Stop an actor and take its image out of the sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Capture {
    pub op: OpId,
    pub worker: WorkerUid,
    pub actor: ActorUid,
    pub generation: Generation,
    /// Memory and files, or the durable directory only.
    pub full: bool,
    /// Only while nobody is connected to it: whoever is has not been answered yet.
    pub if_idle: bool,
}

/// Store what a capture took.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SnapshotOrder {
    pub op: OpId,
    pub identity: Identity,
    pub workload: Workload,
    pub prefix: String,
    pub full: bool,
    /// The golden snapshot, against which an image is stored as the difference.
    pub base: Option<SnapshotAt>,
    /// This is the golden itself: anyone of the template may restore it.
    pub golden: bool,
    pub sealed_key: String,
}

/// Make what a snapshot of one actor holds the first snapshot of another.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CopyOrder {
    pub from: SnapshotAt,
    /// Whose it is, and the key that it is sealed with, sealed itself.
    pub from_actor: ActorUid,
    pub from_key: String,
    /// Where the copy is to be, which says whose it is, and the key for it.
    pub prefix: String,
    pub sealed_key: String,
}

/// Look for snapshots of an actor that nobody may know of.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SearchOrder {
    /// What all of them lie under.
    pub home: String,
    /// The key that they are sealed with, sealed itself: what was not written with it is none of the actor's.
    pub sealed_key: String,
    /// In durable storage, not on the node's disk. If the disk is all there is, that is the same.
    pub durable: bool,
}

/// What there is of an actor in one place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Findings {
    /// The newest, newest first; a few, if there are many.
    pub snapshots: Vec<FoundSnapshot>,
    /// Prefixes of which something is there, but not all: an upload that is under way, or was cut off.
    pub remains: Vec<String>,
}

/// A snapshot that is whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundSnapshot {
    pub at: SnapshotAt,
    /// Memory and files, or the durable directory only.
    pub full: bool,
    pub bytes: u64,
}

/// Remove snapshots wherever they are, and what is left of an actor that is no more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgetOrder {
    pub prefixes: Vec<String>,
    /// All there is of this actor on the node's disk, its log too.
    #[serde(default)]
    pub gone: Option<ActorUid>,
    /// What its snapshots lie under, also those that nobody knows of: all of that, in durable storage.
    #[serde(default)]
    pub home: Option<String>,
}

impl ForgetOrder {
    pub fn snapshots(prefixes: impl IntoIterator<Item = String>) -> Self {
        Self { prefixes: prefixes.into_iter().collect(), ..Self::default() }
    }
}

/// A step of a wake or a suspend and how long it took, for the waterfall.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    pub name: String,
    pub micros: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Activated {
    pub phases: Vec<Phase>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Captured {
    pub phases: Vec<Phase>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stored {
    pub manifest: Digest,
    pub bytes: u64,
    /// The node's disk is all the durable storage there is; otherwise [`Nodes::upload`] makes it durable.
    pub durable: bool,
}

/// How a sandbox or a command in it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// The workload's first process returned.
    Code(i32),
    /// It was ended by a signal.
    Signal(i32),
    /// The kernel killed the sandbox for want of memory.
    OutOfMemory,
    /// The sandbox process itself went away.
    Killed,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "the workload exited with code {code}"),
            Self::Signal(signal) => write!(f, "the workload was ended by signal {signal}"),
            Self::OutOfMemory => f.write_str("out of memory: the kernel killed the sandbox at its memory limit"),
            Self::Killed => f.write_str("the sandbox process was killed"),
        }
    }
}

/// Where routers find a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Ingress {
    /// A socket, for routers on the same machine.
    Socket(PathBuf),
    /// The door of its node, by TLS.
    Door(SocketAddr),
}

const DOOR: &str = "tls://";

impl From<String> for Ingress {
    fn from(text: String) -> Self {
        match text.strip_prefix(DOOR).and_then(|address| address.parse().ok()) {
            Some(address) => Self::Door(address),
            None => Self::Socket(text.into()),
        }
    }
}

impl From<Ingress> for String {
    fn from(ingress: Ingress) -> Self {
        match ingress {
            Ingress::Socket(path) => path.to_string_lossy().into_owned(),
            Ingress::Door(address) => format!("{DOOR}{address}"),
        }
    }
}

/// A worker and what it hosts, as its node sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    pub worker: WorkerUid,
    pub pool: ObjectKey,
    pub pod: String,
    pub ingress: Ingress,
    pub hosted: Option<Hosted>,
    /// Templates for which a box stands ready.
    pub warm: Vec<ate_name::TemplateUid>,
}

/// What a node has, as it sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeReport {
    pub workers: Vec<WorkerReport>,
    /// Operations whose images it keeps until they are stored.
    pub holding: Vec<OpId>,
    /// Snapshots that are on its disk and not in durable storage. What is in both is only a copy, the node's to keep or
    /// to drop. None where the disk is all the durable storage there is.
    pub only_here: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hosted {
    pub identity: Identity,
    pub frozen: bool,
    /// How long no request has been under way.
    pub idle: Duration,
    pub memory_bytes: u64,
}

/// News from a node. What is missed is made good by the next report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum NodeEvent {
    WorkerUp(WorkerReport),
    WorkerGone {
        worker: WorkerUid,
    },
    Frozen {
        worker: WorkerUid,
        identity: Identity,
    },
    Thawed {
        worker: WorkerUid,
        identity: Identity,
    },
    /// A sandbox ended without being told to.
    Ended {
        worker: WorkerUid,
        actor: ActorUid,
        generation: Generation,
        exit: Exit,
    },
    /// Every worker of the node, with how long each actor has been idle.
    Report(Vec<WorkerReport>),
}

/// Run a command inside an actor's sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExecOrder {
    pub worker: WorkerUid,
    pub actor: ActorUid,
    pub generation: Generation,
    /// Empty: the first one.
    pub container: String,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
}

/// What a command prints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
}

/// Which part of an actor's log.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct LogsOrder {
    /// Go on with what is printed from now.
    pub follow: bool,
    /// Begin so many lines before the end; `None`: at the beginning.
    pub tail: Option<usize>,
}

/// Why a node did not do as told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum NodeError {
    #[error("node {0} is not known")]
    UnknownNode(NodeName),
    /// Whether the order arrived, and what became of it, is not known: repeat it.
    #[error("the node cannot be reached: {0}")]
    Unreachable(String),
    #[error("the worker is gone")]
    WorkerGone,
    #[error("the worker hosts somebody else")]
    Busy,
    /// The order is of the past, or the actor is not there (any more).
    #[error(
        "the order is of the past: the node does not have this actor at this generation, or was told to forget the snapshot"
    )]
    Stale,
    /// The actor lives on.
    #[error("the suspend was called off")]
    Aborted,
    /// The actor lives on.
    #[error("not saved, the actor runs on: {0}")]
    NotSaved(String),
    /// It is neither on the node's disk nor in durable storage.
    #[error("snapshot {0} is gone")]
    NoSnapshot(String),
    /// What stands in the way is the node's disk or durable storage: later or elsewhere it may go well.
    #[error("{0}")]
    Hindered(String),
    /// Nothing of what the order speaks of was captured here.
    #[error("the node holds no image for this operation")]
    NothingCaptured,
    /// The order itself cannot be carried out, here or anywhere: the object and the remedy are in the text.
    #[error("{0}")]
    Refused(String),
    /// What it runs has ended while it started, or was not ready in time.
    #[error("{0}")]
    Crashed(String),
    #[error("{0}")]
    Failed(String),
}

/// The nodes of an instance, reached however they are reached. An order that has arrived is carried out, whether or not whoever
/// gave it still waits.
#[async_trait::async_trait]
pub trait Nodes: Send + Sync {
    /// How the node is, as of now.
    async fn report(&self, node: &NodeName) -> Result<NodeReport, NodeError>;

    async fn activate(&self, node: &NodeName, order: Activate) -> Result<Activated, NodeError>;

    /// Takes the actor out of its worker; the worker is free when this returns `Ok`.
    async fn capture(&self, node: &NodeName, order: Capture) -> Result<Captured, NodeError>;

    /// Asks a capture to stop where it can; its own answer tells whether it could.
    async fn abort(&self, node: &NodeName, worker: WorkerUid, op: OpId) -> Result<(), NodeError>;

    /// Writes what was captured to the node's disk.
    async fn store(&self, node: &NodeName, order: SnapshotOrder) -> Result<Stored, NodeError>;

    /// Nobody will ask for what was captured: it need not be kept.
    async fn release(&self, node: &NodeName, op: OpId) -> Result<(), NodeError>;

    /// Writes a copy of a snapshot, sealed for another actor, to the node's disk. One that is there already is the copy.
    async fn copy(&self, node: &NodeName, order: CopyOrder) -> Result<Stored, NodeError>;

    /// Brings a snapshot that is on the node's disk to durable storage.
    async fn upload(&self, node: &NodeName, prefix: &str) -> Result<(), NodeError>;

    /// What there is of an actor, whether or not anybody knows of it.
    async fn search(&self, node: &NodeName, order: SearchOrder) -> Result<Findings, NodeError>;

    /// Ends an actor's sandbox, saving nothing.
    async fn discard(
        &self,
        node: &NodeName,
        worker: WorkerUid,
        actor: ActorUid,
        generation: Generation,
    ) -> Result<(), NodeError>;

    /// Runs a command inside an actor; returns how it ended, after its last output.
    async fn exec(
        &self,
        node: &NodeName,
        order: ExecOrder,
        stdin: mpsc::Receiver<Vec<u8>>,
        output: mpsc::Sender<Output>,
    ) -> Result<Exit, NodeError>;

    /// Sends lines of an actor's log until there are no more, or until nobody listens.
    async fn logs(
        &self,
        node: &NodeName,
        actor: ActorUid,
        order: LogsOrder,
        lines: mpsc::Sender<String>,
    ) -> Result<(), NodeError>;

    /// What is not there is no error, and does not come back by an order that was given before.
    async fn forget(&self, node: &NodeName, order: ForgetOrder) -> Result<(), NodeError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ingress_is_read_as_it_was_written() {
        for ingress in [
            Ingress::Socket("/run/worker/ingress.sock".into()),
            Ingress::Door("127.0.0.1:8440".parse().unwrap()),
            Ingress::Door("[2001:db8::1]:8440".parse().unwrap()),
        ] {
            assert_eq!(Ingress::from(String::from(ingress.clone())), ingress);
        }
    }
}
