//! A stand-in for a sandbox, for tests.

use std::os::fd::{BorrowedFd, OwnedFd};

use ate_sandbox::{Exec, Exit, LinkConfig, Sandbox, SandboxError};
use ate_sys::Memory;
use tokio_util::sync::CancellationToken;

/// A box in which nothing happens but its end.
#[derive(Default)]
pub(crate) struct Still {
    pub(crate) ended: CancellationToken,
    pub(crate) ends_when_stopped: bool,
}

#[async_trait::async_trait]
impl Sandbox for Still {
    async fn run(&self, _: &LinkConfig, _: BorrowedFd<'_>) -> Result<(), SandboxError> {
        Ok(())
    }
    async fn restore(&self, _: &Memory, _: &LinkConfig, _: BorrowedFd<'_>) -> Result<(), SandboxError> {
        Ok(())
    }
    async fn freeze(&self) -> Result<(), SandboxError> {
        if !self.ends_when_stopped {
            return Ok(());
        }
        self.ended.cancel();
        tokio::task::yield_now().await;
        Err(SandboxError::Ended(Exit::Code(3)))
    }
    async fn thaw(&self) -> Result<(), SandboxError> {
        Ok(())
    }
    async fn checkpoint(&self, _: &mut Memory) -> Result<usize, SandboxError> {
        Ok(0)
    }
    async fn exec(&self, _: &Exec, _: [OwnedFd; 3]) -> Result<Exit, SandboxError> {
        std::future::pending().await
    }
    async fn ended(&self) -> Exit {
        self.ended.cancelled().await;
        Exit::Code(3)
    }
    fn memory_bytes(&self) -> u64 {
        0
    }
    async fn destroy(&self) -> Result<(), SandboxError> {
        Ok(())
    }
}
