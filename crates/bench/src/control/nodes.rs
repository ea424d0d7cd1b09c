//! Nodes that do at once what they are told, and remember just enough to tell who is where.

use std::collections::BTreeMap;

use ate_name::{ActorUid, Digest, Generation, NodeName, ObjectKey, OpId, WorkerUid};
use ate_orders::{
    Activate, Activated, Capture, Captured, CopyOrder, ExecOrder, Exit, Findings, ForgetOrder, Hosted, Identity,
    LogsOrder, NodeError, NodeReport, Nodes, Output, Phase, SearchOrder, SnapshotOrder, Stored, WorkerReport,
};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::{NAMESPACE, POOL};

/// The steps that a real node tells of a wake and of a save; the history keeps them, and so they are part of what is written.
const WAKE_STEPS: [&str; 5] = ["queue", "load", "decode", "hand over", "restore"];
const SAVE_STEPS: [&str; 3] = ["freeze", "checkpoint", "kill"];

/// What a snapshot of a small server comes to.
const STORED_BYTES: u64 = 74_000;

/// Every worker by its node and number: the same in every process that opens the same store.
pub(crate) struct FakeNodes {
    workers: BTreeMap<NodeName, Vec<WorkerUid>>,
    hosted: Mutex<BTreeMap<WorkerUid, Identity>>,
}

impl FakeNodes {
    pub(crate) fn new(nodes: u8, workers: u32) -> Self {
        let worker = |node: u8, number: u32| {
            let [a, b, c, d] = number.to_be_bytes();
            WorkerUid::from_random([node, a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
        };
        let numbers = |node: u8| (0..workers).filter(move |number| number % u32::from(nodes) == u32::from(node));
        let named = (0..nodes).map(|node| {
            (NodeName::new(format!("node-{node}")), numbers(node).map(|number| worker(node, number)).collect())
        });
        Self { workers: named.collect(), hosted: Mutex::default() }
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &NodeName> {
        self.workers.keys()
    }
}

fn steps(names: &[&str]) -> Vec<Phase> {
    names.iter().map(|name| Phase { name: (*name).to_owned(), micros: 1000 }).collect()
}

#[async_trait::async_trait]
impl Nodes for FakeNodes {
    async fn report(&self, node: &NodeName) -> Result<NodeReport, NodeError> {
        let workers = self.workers.get(node).ok_or_else(|| NodeError::UnknownNode(node.clone()))?;
        let hosted = self.hosted.lock();
        let report = |worker: &WorkerUid| WorkerReport {
            worker: *worker,
            pool: ObjectKey::new(NAMESPACE, POOL),
            pod: format!("{POOL}-{worker}"),
            ingress: format!("/run/ate/workers/{worker}/ingress.sock").into(),
            hosted: hosted.get(worker).map(|identity| Hosted {
                identity: identity.clone(),
                frozen: false,
                idle: std::time::Duration::ZERO,
                memory_bytes: 0,
            }),
            warm: Vec::new(),
        };
        Ok(NodeReport { workers: workers.iter().map(report).collect(), ..NodeReport::default() })
    }

    async fn activate(&self, _: &NodeName, order: Activate) -> Result<Activated, NodeError> {
        self.hosted.lock().insert(order.worker, order.identity);
        Ok(Activated { phases: steps(&WAKE_STEPS) })
    }

    async fn capture(&self, _: &NodeName, order: Capture) -> Result<Captured, NodeError> {
        self.hosted.lock().remove(&order.worker);
        Ok(Captured { phases: steps(&SAVE_STEPS) })
    }

    async fn abort(&self, _: &NodeName, _: WorkerUid, _: OpId) -> Result<(), NodeError> {
        Ok(())
    }

    async fn store(&self, _: &NodeName, order: SnapshotOrder) -> Result<Stored, NodeError> {
        let mut manifest = [0; 32];
        manifest[..16].copy_from_slice(order.op.as_bytes());
        Ok(Stored { manifest: Digest::from_bytes(manifest), bytes: STORED_BYTES, durable: true })
    }

    async fn copy(&self, _: &NodeName, _: CopyOrder) -> Result<Stored, NodeError> {
        Err(NodeError::Refused("nothing is forked here".to_owned()))
    }

    async fn release(&self, _: &NodeName, _: OpId) -> Result<(), NodeError> {
        Ok(())
    }

    async fn upload(&self, _: &NodeName, _: &str) -> Result<(), NodeError> {
        Ok(())
    }

    async fn discard(&self, _: &NodeName, worker: WorkerUid, _: ActorUid, _: Generation) -> Result<(), NodeError> {
        self.hosted.lock().remove(&worker);
        Ok(())
    }

    async fn exec(
        &self,
        _: &NodeName,
        _: ExecOrder,
        _: mpsc::Receiver<Vec<u8>>,
        _: mpsc::Sender<Output>,
    ) -> Result<Exit, NodeError> {
        Err(NodeError::Refused("nothing can be executed here".to_owned()))
    }

    async fn logs(&self, _: &NodeName, _: ActorUid, _: LogsOrder, _: mpsc::Sender<String>) -> Result<(), NodeError> {
        Ok(())
    }

    async fn search(&self, _: &NodeName, _: SearchOrder) -> Result<Findings, NodeError> {
        Ok(Findings::default())
    }

    async fn forget(&self, _: &NodeName, _: ForgetOrder) -> Result<(), NodeError> {
        Ok(())
    }
}
