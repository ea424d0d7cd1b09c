//! The control plane: makes an actor's transitions real.
//!
//! The store holds the truth, one record per actor and worker. An operation begins with one durable transaction that says
//! what is intended (and binds actor and worker), then gives the node an order, then settles the result with one more.
//! Whatever is cut off in between is found by its operation record and brought to an end, by whichever replica finds it
//! (`drive.rs`).
//!
//! ```text
//!   ResumeActor, Activate ─▶ resume.rs ─┐                        ┌─▶ store: actor + worker + operation + history
//!   SuspendActor, idle    ─▶ save.rs   ─┼─▶ Actor::apply ─▶ ledger.rs
//!   node events           ─▶ watch.rs  ─┘        (pure)          └─▶ feed ─▶ follow.rs ─▶ assignments, waiters
//!   RestartActor, ForkActor ─▶ restart.rs, fork.rs: a save and a wake, a copy and a new actor
//!   UnstickActor, ForceDeleteActor ─▶ force.rs, with audit.rs: whatever is under way
//!   apply -f              ─▶ catalog.rs ─▶ golden.rs: first snapshot of a template
//!   WatchActors           ─▶ changes.rs: the list, then the feed
//!   first wake of an actor whose record is from a backup ─▶ catch_up.rs: what was saved since
//! ```

mod actors;
mod assignments;
mod atespaces;
mod audit;
mod catalog;
mod catch_up;
mod changes;
mod check;
mod counters;
mod crashes;
mod drain;
mod drive;
mod error;
mod follow;
mod force;
mod forget;
mod fork;
mod golden;
mod idle;
mod ledger;
mod nodes;
mod quota;
mod reach;
mod reconcile;
mod records;
mod replicas;
mod restart;
mod restored;
mod resume;
mod save;
mod watch;
mod workers;
mod workload;

use std::sync::Arc;
use std::time::Duration;

use ate_placement::Fleet;
use ate_store::Store;
use parking_lot::Mutex;

pub use actors::{MAX_PAGE, Versioned, status_name, usable};
pub use assignments::{Assigned, AssignmentUpdate};
pub use audit::{Asked, AuditEntry};
pub use catalog::{Applied, Template, TemplatePhase, TemplateStatus};
pub use changes::{ActorChange, Changed};
pub use check::{Check, Finding, Findings};
pub use counters::Sample;
pub use drain::Share;
pub use error::{Code, ControlError};
pub use nodes::{Registration, Renewal};
pub use quota::{Quota, Usage};
pub use records::{Assignee, HistoryEntry, NodeRecord, WorkerRecord};
pub use replicas::Replicas;
pub use restored::{ClockBehind, Named, Restoring, Summary, Unreadable};

/// What the outside world gives: time and chance. A simulation gives its own.
pub trait World: Send + Sync {
    fn now(&self) -> jiff::Timestamp;
    fn random(&self) -> [u8; 16];
}

/// Makes and seals the keys of snapshots; unsealing is the node's.
pub trait Keys: Send + Sync {
    /// A fresh key for an actor, sealed so that only nodes can use it.
    fn sealed(&self, actor: ate_name::ActorUid) -> String;
}

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How long a request may wait for a worker and its actor.
    pub park: Duration,
    /// How long a failed resume stays visible before the actor is simply suspended again.
    pub failed_resume_visible: Duration,
    /// How long a template without readiness probes runs before its golden snapshot is taken.
    pub golden_warm_up: Duration,
    /// How long a node may fail to store an image before its actor goes on from the last snapshot instead.
    pub store_within: Duration,
    /// How often operations that nobody drives are looked for.
    pub sweep: Duration,
    /// How often a node's workers are compared with the store.
    pub reconcile: Duration,
    /// A node that registered and has been silent for so long is given up: its actors go on elsewhere. Nodes stop serving
    /// sooner.
    pub node_lease: Duration,
    /// How long after that what only the node has, a snapshot that is not durable yet, is waited for.
    pub node_grace: Duration,
    /// A node that has not answered for so long is out of this replica's reach, however well it renews its lease.
    pub reach_within: Duration,
    /// How long a node may take for one order before it is given once more. The longest fetch images.
    pub answer_within: Duration,
    pub replicas: Replicas,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            park: Duration::from_secs(30),
            failed_resume_visible: Duration::from_secs(10),
            golden_warm_up: Duration::from_secs(20),
            // Room was set aside before it was captured, so this is a disk that fails: time to mend it, and an end.
            store_within: Duration::from_secs(900),
            sweep: Duration::from_secs(1),
            reconcile: Duration::from_secs(10),
            // The rest is for a clock that runs slow, and for actors that take a moment to be held.
            node_lease: ate_orders::NODE_SERVES_FOR * 3 / 2,
            node_grace: Duration::from_secs(60),
            // Longer than it takes to mend a way that is cut for a moment: all that the node runs is lost.
            reach_within: Duration::from_secs(120),
            answer_within: Duration::from_secs(900),
            replicas: Replicas::Alone,
        }
    }
}

pub struct Control {
    store: Arc<dyn Store>,
    nodes: reach::Reach,
    world: Arc<dyn World>,
    keys: Arc<dyn Keys>,
    settings: Settings,
    /// This process among those of the control plane.
    replica: ate_name::ReplicaId,
    beats: replicas::Beats<ate_name::ReplicaId, records::ReplicaRecord>,
    known_nodes: replicas::Beats<ate_name::NodeName, NodeRecord>,
    /// When this process was started, or last could not reach the store: it has heard nobody of before.
    deaf_until: Mutex<tokio::time::Instant>,
    counters: counters::Counters,
    driving: drive::Driving,
    emptying: Mutex<std::collections::BTreeSet<ate_name::WorkerUid>>,
    catalog: catalog::Catalog,
    /// Of those atespaces that have limits.
    limits: parking_lot::RwLock<std::collections::HashMap<ate_name::AtespaceName, quota::Limits>>,
    fleet: Mutex<Fleet>,
    /// Workers that this process is about to bind.
    reserved: Mutex<std::collections::BTreeSet<ate_name::WorkerUid>>,
    /// Wakes those who wait for a free worker.
    freed: tokio::sync::Notify,
    /// Actors that were frozen or thawed: nothing that is written down, but watchers want to see it.
    stirred: tokio::sync::broadcast::Sender<ate_name::ActorKey>,
    unwilling: Mutex<idle::Unwilling>,
    /// Nodes whose disk or storage was in the way of a wake, or that do not answer, and until when they are avoided.
    hindered: Mutex<std::collections::BTreeMap<ate_name::NodeName, tokio::time::Instant>>,
    follower: follow::Follower,
    /// Snapshots that nobody refers to: a node was told to remove them, or it is found out whose they are.
    removing: Mutex<std::collections::BTreeSet<(ate_name::NodeName, String)>>,
    assignments: assignments::Assignments,
    /// Operations and watchers under way; awaited on shutdown.
    tasks: tokio_util::task::TaskTracker,
    stopping: tokio_util::sync::CancellationToken,
    /// Whether actors are bound to workers. Held through each binding: who closes it has all that there will be before them.
    binds: tokio::sync::RwLock<bool>,
    failed: tokio_util::sync::CancellationToken,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").finish_non_exhaustive()
    }
}
