//! What goes over the wire, as JSON.

use ate_name::{ActorUid, Generation, OpId, WorkerUid};
use ate_orders::{
    Activate, Activated, Capture, Captured, CopyOrder, Findings, ForgetOrder, LogsOrder, NodeError, NodeReport,
    SearchOrder, SnapshotOrder, Stored,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tonic::Status;

/// Largest message. The largest order carries a workload with its environment, the largest report some hundred workers.
pub(crate) const MAX_MESSAGE: usize = 16 << 20;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    Report,
    Activate(Activate),
    Capture(Capture),
    Abort { worker: WorkerUid, op: OpId },
    Store(SnapshotOrder),
    Release { op: OpId },
    Copy(Box<CopyOrder>),
    Upload { prefix: String },
    Discard { worker: WorkerUid, actor: ActorUid, generation: Generation },
    Search(SearchOrder),
    Forget(ForgetOrder),
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Report(NodeReport),
    Activated(Activated),
    Captured(Captured),
    Stored(Stored),
    Found(Findings),
    Done,
}

pub(crate) type Outcome = Result<Answer, NodeError>;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ReadOrder {
    pub(crate) actor: ActorUid,
    pub(crate) order: LogsOrder,
}

pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("orders and answers are plain data with text keys")
}

pub(crate) fn decode<T: DeserializeOwned>(json: &[u8]) -> Result<T, Status> {
    serde_json::from_slice(json)
        .map_err(|error| Status::invalid_argument(format!("not what this version understands: {error}")))
}
