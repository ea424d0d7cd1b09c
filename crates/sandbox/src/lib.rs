//! The sandbox port: how a worker runs one workload in isolation, whatever the technology.
//!
//! ```text
//!            prepare                run | restore
//!   Driver ───────────▶ Warm box ───────────────▶ running ◀──freeze/thaw──▶ frozen ──checkpoint──▶ image
//!                     (no actor yet)                 └────────────── destroy ◀──────────┘
//! ```
//!
//! A box is prepared ahead of need, bound to a workload but to no actor: it has seen no one's data. Running or restoring
//! makes it somebody's. A checkpoint never ends the box: it stays frozen, to be thawed if the save failed and destroyed
//! if it is safe.

mod process;
mod workload;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use ate_sys::Memory;

pub use ate_orders::Exit;
pub use process::{Exited, Reaper, Spawned};
pub use workload::{Container, LinkConfig, Mount, User, Workload};

/// Why a box did not do as told. Texts end up in an actor's history, so they name what failed.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("cannot {what}")]
    Io { what: String, source: std::io::Error },
    #[error("{what}: the runtime says: {message}")]
    Runtime { what: String, message: String },
    #[error("{what} did not finish within {} s", after.as_secs())]
    Timeout { what: String, after: Duration },
    #[error("the sandbox has ended: {0}")]
    Ended(Exit),
}

impl SandboxError {
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// A command to run inside a running box, on descriptors of the caller's.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Exec {
    pub container: usize,
    pub args: Vec<String>,
    pub env: Vec<String>,
    pub cwd: Option<String>,
}

#[async_trait::async_trait]
pub trait Driver: Send + Sync {
    /// A box that waits for its actor. `stdio` are the write ends that each container's output goes to.
    async fn prepare(
        &self,
        workload: &Workload,
        id: &str,
        stdio: Vec<OwnedFd>,
    ) -> Result<Box<dyn Sandbox>, SandboxError>;
}

#[async_trait::async_trait]
pub trait Sandbox: Send + Sync {
    /// Starts the workload from nothing, on the network link given.
    async fn run(&self, link: &LinkConfig, socket: BorrowedFd<'_>) -> Result<(), SandboxError>;

    /// Continues the workload from an image that a box of the same workload and build has written.
    async fn restore(&self, image: &Memory, link: &LinkConfig, socket: BorrowedFd<'_>) -> Result<(), SandboxError>;

    /// Stops every task; memory stays. Nothing else about the box changes.
    async fn freeze(&self) -> Result<(), SandboxError>;

    async fn thaw(&self) -> Result<(), SandboxError>;

    /// Writes the image of a frozen box into `image` from its first byte; returns the length. The box stays frozen,
    /// whether this succeeds or fails.
    async fn checkpoint(&self, image: &mut Memory) -> Result<usize, SandboxError>;

    /// Runs a command inside and returns how it ended.
    async fn exec(&self, exec: &Exec, stdio: [OwnedFd; 3]) -> Result<Exit, SandboxError>;

    /// Resolves once the box has ended, by itself or by the kernel; never because of `destroy`.
    async fn ended(&self) -> Exit;

    /// Memory of the whole box, in bytes, for sizing a snapshot and for the books.
    fn memory_bytes(&self) -> u64;

    /// Kills the box and waits until nothing of it is left. Idempotent.
    async fn destroy(&self) -> Result<(), SandboxError>;
}
