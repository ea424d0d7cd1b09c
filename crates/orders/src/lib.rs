//! What the control plane asks of a node, and what a node tells it: the port between the two.
//!
//! Orders carry everything a node needs, so that a node has no store of its own and no say in what is right. Each is keyed
//! by (actor uid, generation, op): giving one twice is the same as giving it once, and one of an older generation is
//! refused.

mod node;
mod workload;

pub use node::{
    Activate, Activated, Capture, Captured, ExecOrder, Exit, Hosted, Identity, Ingress, LogsOrder, NodeError, NodeEvent,
    NodeReport, Nodes, Output, Phase, Runtime, RuntimeAsset, SnapshotAt, SnapshotOrder, Source, Stored, WorkerReport,
};
pub use workload::{Container, EgressRule, Port, PortProtocol, Readyz, Workload};

/// An error and what is behind it, on one line: it ends up in an answer, or in an actor's history.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
