//! A worker: one process tree, one slot, at most one actor at a time.
//!
//! It is pid 1 of its own namespaces and lives in a root of its own making, which holds only what the node has handed
//! over as descriptors. Whatever it starts dies with it. It keeps its actor when the node goes away and waits to be
//! adopted; after [`ORPHANED_AFTER`] without a node it gives up.
//!
//! ```text
//!   node ──link──▶ prepare, activate, capture…       router ──ingress──▶ preface ──▶ splice ──▶ the actor's port
//!                        │                                                 │ wakes it if it is frozen
//!                        ▼                                                 ▼
//!                     Tenant { box, mode: running ⇄ frozen → captured, connections, idle clock }
//! ```

mod boxes;
mod client;
mod durable;
mod egress;
mod identity;
mod ingress;
pub mod link;
mod names;
mod output;
mod ready;
mod root;
mod serve;
#[cfg(test)]
mod still;
mod tenant;

use std::path::PathBuf;
use std::time::Duration;

use ate_name::WorkerUid;

pub use client::{LinkError, WorkerLink};
pub use names::{QUESTIONS, may_ask};

/// How long a worker without a node keeps its actor. Long enough for an upgrade of the node, short enough that a machine
/// whose node never comes back is not left with sandboxes that nobody knows.
pub const ORPHANED_AFTER: Duration = Duration::from_secs(300);

/// The names of a worker's sockets in its link directory.
pub const LINK_SOCKET: &str = "link.sock";
pub const INGRESS_SOCKET: &str = "ingress.sock";
/// The node's socket there: it dials for the actor where policy allows.
pub const EGRESS_SOCKET: &str = "egress.sock";

/// How a worker is started.
#[derive(Clone, Debug)]
pub struct Config {
    pub uid: WorkerUid,
    /// Sockets, shared with the node.
    pub link_directory: PathBuf,
    /// An empty directory to build the worker's root on.
    pub root_directory: PathBuf,
    /// The control group whose children the boxes become.
    pub cgroup: String,
    /// Says which build the node and the worker are of; a node adopts only its own kind.
    pub build: String,
}

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error("cannot {what}")]
    Io { what: &'static str, source: std::io::Error },
    #[error("the worker's network could not be set up")]
    Network(#[from] ate_network::NetworkError),
}

impl WorkerError {
    fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// Runs a worker until it is told to stop. The process must be pid 1 of fresh namespaces and still single-threaded:
/// see [`ate_sys::in_new_namespaces`].
pub fn run(config: &Config) -> Result<(), WorkerError> {
    let sockets = root::bind_sockets(config)?;
    root::private_mounts()?;
    let interior = ate_network::Interior::set_up()?;
    root::enter(config)?;
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(WorkerError::io("start the runtime"))?
        .block_on(serve::serve(config, sockets, interior))
}
