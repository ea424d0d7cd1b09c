//! Orders, as the control plane gives them. What each is about stands in files of its own: arriving, departing, copies.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ate_blob::BlobError;
use ate_name::{ActorUid, Generation, NodeName, OpId, WorkerUid};
use ate_orders::{
    Activate, Activated, Capture, Captured, CopyOrder, ExecOrder, Exit, Findings, ForgetOrder, LogsOrder, NodeError,
    NodeReport, Nodes, Output, SearchOrder, SnapshotOrder, Stored,
};
use ate_snapshot::{Home, SnapshotKey};
use ate_worker::LinkError;
use ate_worker::link::{self, Answer, Command, Refusal};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::mpsc;

use crate::Node;
use crate::snapshots::SnapshotError;
use crate::workers::Handle;

/// The only platform there is; it is written down because a snapshot depends on it.
pub(crate) const PLATFORM: &str = "systrap";

impl Node {
    async fn run_exec(
        self: &Arc<Self>,
        order: ExecOrder,
        mut stdin: mpsc::Receiver<Vec<u8>>,
        output: mpsc::Sender<Output>,
    ) -> Result<Exit, NodeError> {
        let handle = self.worker(order.worker)?;
        let (_, workload, _) = handle.hosted(order.actor, order.generation).ok_or(NodeError::Stale)?;
        let names: Vec<&str> = workload.containers.iter().map(|container| container.name.as_str()).collect();
        let container =
            names.iter().position(|name| order.container.is_empty() || *name == order.container).ok_or_else(|| {
                NodeError::Refused(format!(
                    "the actor has no container {:?}; it has: {}",
                    order.container,
                    names.join(", ")
                ))
            })?;
        let failed = |error: std::io::Error| NodeError::Failed(format!("cannot make a pipe: {error}"));
        let (stdin_read, stdin_write) = std::io::pipe().map_err(failed)?;
        let (stdout_read, stdout_write) = std::io::pipe().map_err(failed)?;
        let (stderr_read, stderr_write) = std::io::pipe().map_err(failed)?;
        let mut writer = pipe::Sender::from_owned_fd(stdin_write.into()).map_err(failed)?;
        tokio::spawn(async move {
            while let Some(bytes) = stdin.recv().await {
                if writer.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        });
        let pumps = [
            tokio::spawn(pump(stdout_read.into(), output.clone(), Output::Stdout)),
            tokio::spawn(pump(stderr_read.into(), output, Output::Stderr)),
        ];
        let exec = ate_sandbox::Exec {
            container,
            args: order.args,
            env: order.env.into_iter().map(|(name, value)| format!("{name}={value}")).collect(),
            cwd: None,
        };
        let command = Command::Exec { actor: order.actor, generation: order.generation, exec };
        let fds: [OwnedFd; 3] = [stdin_read.into(), stdout_write.into(), stderr_write.into()];
        let begun = handle.link.begin(command, &link::borrowed(&fds)).await;
        // Its ends are the command's alone: it may run for long, and may close them.
        drop(fds);
        let answer = match begun {
            Ok(ended) => ended.await,
            Err(error) => Err(error),
        };
        for pump in pumps {
            let _ = pump.await;
        }
        match answer.map_err(from_link)?.0 {
            Answer::Exited(exit) => Ok(exit),
            other => Err(NodeError::Failed(format!("the worker answered {other:?}"))),
        }
    }

    pub(crate) fn worker(&self, worker: WorkerUid) -> Result<Arc<Handle>, NodeError> {
        self.workers.lock().get(&worker).cloned().ok_or(NodeError::WorkerGone)
    }
}

/// Passes on what comes out of a pipe until every writer has closed it, or until nobody listens.
async fn pump(pipe: OwnedFd, output: mpsc::Sender<Output>, kind: fn(Vec<u8>) -> Output) {
    let Ok(mut reader) = pipe::Receiver::from_owned_fd(pipe) else { return };
    let mut buffer = vec![0; 32 << 10];
    loop {
        let read = tokio::select! {
            read = reader.read(&mut buffer) => read,
            // The worker sees the pipe closed, and lets the actor sleep.
            () = output.closed() => return,
        };
        let Ok(read @ 1..) = read else { return };
        if output.send(kind(buffer[..read].to_vec())).await.is_err() {
            return;
        }
    }
}

pub(crate) fn from_link(error: LinkError) -> NodeError {
    match error {
        LinkError::Gone | LinkError::Io(_) => NodeError::WorkerGone,
        LinkError::Refused(refusal) => match refusal {
            Refusal::Stale => NodeError::Stale,
            Refusal::Busy => NodeError::Busy,
            Refusal::Aborted => NodeError::Aborted,
            Refusal::NotSaved(why) => NodeError::NotSaved(why),
            // The next attempt finds one: see `run_activate`.
            Refusal::NotPrepared => NodeError::Busy,
            Refusal::Captured => NodeError::Failed(refusal.to_string()),
            Refusal::Crashed(why) => NodeError::Crashed(why),
            Refusal::Failed(why) => NodeError::Failed(why),
        },
    }
}

pub(crate) fn unusable(error: SnapshotError) -> NodeError {
    match error {
        SnapshotError::Missing { key, .. } => NodeError::NoSnapshot(key),
        error @ (SnapshotError::Io { .. } | SnapshotError::Storage { .. } | SnapshotError::Unheard { .. }) => {
            NodeError::Hindered(ate_orders::chain(&error))
        }
        error @ SnapshotError::Unusable { .. } => NodeError::Refused(ate_orders::chain(&error)),
    }
}

pub(crate) fn from_upload(error: SnapshotError) -> NodeError {
    match error {
        SnapshotError::Missing { key, .. } => NodeError::NoSnapshot(key),
        // It was brought there before, as another: by an order that a restored store knows nothing of.
        SnapshotError::Storage { source, .. } if matches!(*source, BlobError::Exists { .. }) => NodeError::Stale,
        error => NodeError::Failed(ate_orders::chain(&error)),
    }
}

/// The one node of a lone machine, as the control plane sees nodes.
#[derive(Debug)]
pub struct LocalNode(pub Arc<Node>);

impl LocalNode {
    fn check(&self, node: &NodeName) -> Result<&Arc<Node>, NodeError> {
        if *node == self.0.config.name { Ok(&self.0) } else { Err(NodeError::UnknownNode(node.clone())) }
    }

    /// Whoever waits for it may go away.
    async fn carried_out<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, NodeError>> + Send + 'static,
    ) -> Result<T, NodeError> {
        let done = self.0.tasks.spawn(work).await;
        done.unwrap_or_else(|panic| Err(NodeError::Failed(panic.to_string())))
    }
}

#[async_trait::async_trait]
impl Nodes for LocalNode {
    async fn report(&self, node: &NodeName) -> Result<NodeReport, NodeError> {
        let node = self.check(node)?;
        let (workers, retained) = node.reports().await;
        let mut holding: std::collections::BTreeSet<OpId> = node.captured.lock().keys().copied().collect();
        holding.extend(retained);
        Ok(NodeReport { workers, holding: holding.into_iter().collect(), only_here: node.snapshots.only_here() })
    }

    async fn activate(&self, node: &NodeName, order: Activate) -> Result<Activated, NodeError> {
        let node = Arc::clone(self.check(node)?);
        self.carried_out(async move { node.run_activate(order).await }).await
    }

    async fn capture(&self, node: &NodeName, order: Capture) -> Result<Captured, NodeError> {
        let node = Arc::clone(self.check(node)?);
        self.carried_out(async move { node.run_capture(order).await }).await
    }

    async fn abort(&self, node: &NodeName, worker: WorkerUid, op: OpId) -> Result<(), NodeError> {
        let node = self.check(node)?;
        // Also for the order that has not come yet.
        node.kept.lock().insert(op, NodeError::Aborted);
        if let Some(save) = node.saves.find(&op) {
            save.abort.cancel();
        }
        let handle = node.worker(worker)?;
        let abort = async move { handle.link.call(Command::Abort { op }, &[]).await.map_err(from_link).map(drop) };
        self.carried_out(abort).await
    }

    async fn store(&self, node: &NodeName, order: SnapshotOrder) -> Result<Stored, NodeError> {
        let node = Arc::clone(self.check(node)?);
        self.carried_out(async move { node.run_store(order).await }).await
    }

    async fn release(&self, node: &NodeName, op: OpId) -> Result<(), NodeError> {
        let node = Arc::clone(self.check(node)?);
        let release = async move {
            node.captured.lock().remove(&op);
            for handle in node.handles() {
                // One that is gone holds nothing.
                let _ = handle.link.call(Command::Release { op }, &[]).await;
            }
            Ok(())
        };
        self.carried_out(release).await
    }

    async fn copy(&self, node: &NodeName, order: CopyOrder) -> Result<Stored, NodeError> {
        let node = Arc::clone(self.check(node)?);
        self.carried_out(async move { node.run_copy(order).await }).await
    }

    async fn upload(&self, node: &NodeName, prefix: &str) -> Result<(), NodeError> {
        let key = SnapshotKey::parse(prefix).map_err(|error| NodeError::Refused(error.to_string()))?;
        let node = Arc::clone(self.check(node)?);
        let upload = async move { node.snapshots.upload(&key, || node.heard()).await.map_err(from_upload) };
        self.carried_out(upload).await
    }

    async fn discard(
        &self,
        node: &NodeName,
        worker: WorkerUid,
        actor: ActorUid,
        generation: Generation,
    ) -> Result<(), NodeError> {
        let handle = self.check(node)?.worker(worker)?;
        // First: one that is still on its way in must not come.
        self.0.never_again(actor, generation);
        let discard = async move {
            handle.link.call(Command::Discard { actor, generation }, &[]).await.map_err(from_link)?;
            handle.vacate(actor, generation);
            Ok(())
        };
        self.carried_out(discard).await
    }

    async fn exec(
        &self,
        node: &NodeName,
        order: ExecOrder,
        stdin: mpsc::Receiver<Vec<u8>>,
        output: mpsc::Sender<Output>,
    ) -> Result<Exit, NodeError> {
        self.check(node)?.run_exec(order, stdin, output).await
    }

    async fn logs(
        &self,
        node: &NodeName,
        actor: ActorUid,
        order: LogsOrder,
        lines: mpsc::Sender<String>,
    ) -> Result<(), NodeError> {
        let read = self.check(node)?.logs.read(actor, &order, lines).await;
        read.map_err(|error| NodeError::Failed(format!("cannot read the log of actor {actor}: {error}")))
    }

    async fn search(&self, node: &NodeName, order: SearchOrder) -> Result<Findings, NodeError> {
        let node = Arc::clone(self.check(node)?);
        self.carried_out(async move { node.run_search(order).await }).await
    }

    async fn forget(&self, node: &NodeName, order: ForgetOrder) -> Result<(), NodeError> {
        let node = Arc::clone(self.check(node)?);
        let forget = async move {
            let failed = |error: SnapshotError| NodeError::Failed(ate_orders::chain(&error));
            for prefix in order.prefixes {
                let key = SnapshotKey::parse(&prefix).map_err(|error| NodeError::Refused(error.to_string()))?;
                node.snapshots.forget(&key).await.map_err(failed)?;
            }
            let Some(actor) = order.gone else { return Ok(()) };
            if let Some(home) = order.home {
                let home = Home::parse(&home).map_err(|error| NodeError::Refused(error.to_string()))?;
                if home.uid != actor {
                    return Err(NodeError::Refused(format!("{home} is not where snapshots of actor {actor} are")));
                }
                node.snapshots.forget_home(&home).await.map_err(failed)?;
            }
            let removed = tokio::task::spawn_blocking(move || {
                node.logs.remove(actor);
                node.snapshots.forget_actor(actor)
            });
            let removed = removed.await.map_err(std::io::Error::other).flatten();
            removed.map_err(|error| NodeError::Failed(format!("cannot remove the files of actor {actor}: {error}")))
        };
        self.carried_out(forget).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stub;

    #[tokio::test]
    async fn nothing_is_left_of_an_actor_that_is_no_more_not_even_what_nobody_knows_of() {
        let directory = tempfile::tempdir().unwrap();
        let node = LocalNode(stub::node(directory.path()));
        let [gone, other] = [1, 2].map(|n| ActorUid::from_random([n; 16]));
        for actor in [gone, other] {
            let snapshot = node.0.snapshots.directory().join(actor.to_string()).join("of-another-time");
            std::fs::create_dir_all(snapshot).unwrap();
            node.0.logs.append(actor).unwrap();
        }
        let name = node.0.config.name.clone();
        for _ in 0..2 {
            node.forget(&name, ForgetOrder { gone: Some(gone), ..ForgetOrder::default() }).await.unwrap();
        }
        assert!(!node.0.snapshots.is_any_here(gone) && node.0.snapshots.is_any_here(other));
    }
}
