//! The control plane: makes an actor's transitions real.
//!
//! The store holds the truth, one record per actor and worker. An operation begins with one durable transaction that says
//! what is intended (and binds actor and worker), then gives the node an order, then settles the result with one more.
//! Whatever is cut off in between is found by its operation record and brought to an end by [`Control::recover`].
//!
//! ```text
//!   ResumeActor, Activate ─▶ resume.rs ─┐                        ┌─▶ store: actor + worker + operation + history
//!   SuspendActor, idle    ─▶ save.rs   ─┼─▶ Actor::apply ─▶ ledger.rs
//!   node events           ─▶ watch.rs  ─┘        (pure)          └─▶ feed ─▶ follow.rs ─▶ assignments, waiters
//!   apply -f              ─▶ catalog.rs ─▶ golden.rs: first snapshot of a template
//! ```

mod actors;
mod assignments;
mod atespaces;
mod catalog;
mod drain;
mod error;
mod follow;
mod golden;
mod idle;
mod ledger;
mod records;
mod recover;
mod resume;
mod save;
mod watch;
mod workers;
mod workload;

use std::sync::Arc;
use std::time::Duration;

use ate_orders::Nodes;
use ate_placement::Fleet;
use ate_store::Store;
use parking_lot::Mutex;

pub use actors::{ActorChange, Changed, MAX_PAGE, Versioned, status_name, usable};
pub use assignments::{Assigned, AssignmentUpdate};
pub use catalog::{Applied, Template, TemplatePhase, TemplateStatus};
pub use error::{Code, ControlError};
pub use records::{Assignee, HistoryEntry, WorkerRecord};

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
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            park: Duration::from_secs(30),
            failed_resume_visible: Duration::from_secs(10),
            golden_warm_up: Duration::from_secs(20),
        }
    }
}

pub struct Control {
    store: Arc<dyn Store>,
    nodes: Arc<dyn Nodes>,
    world: Arc<dyn World>,
    keys: Arc<dyn Keys>,
    settings: Settings,
    catalog: catalog::Catalog,
    fleet: Mutex<Fleet>,
    /// Wakes those who wait for a free worker.
    freed: tokio::sync::Notify,
    /// Actors that were frozen or thawed: nothing that is written down, but watchers want to see it.
    stirred: tokio::sync::broadcast::Sender<ate_name::ActorKey>,
    unwilling: Mutex<idle::Unwilling>,
    /// Wakes that callers have been told of and that are not written down yet.
    told: Mutex<std::collections::HashSet<ate_name::OpId>>,
    follower: follow::Follower,
    assignments: assignments::Assignments,
    /// Operations and watchers under way; awaited on shutdown.
    tasks: tokio_util::task::TaskTracker,
    stopping: tokio_util::sync::CancellationToken,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").finish_non_exhaustive()
    }
}
