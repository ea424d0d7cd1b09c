//! What the control plane asks of a node, and what a node tells it: the port between the two.
//!
//! Orders carry everything a node needs, so that a node has no store of its own and no say in what is right. Each is keyed
//! by (actor uid, generation, op): giving one twice is the same as giving it once, and one of an older generation is
//! refused.

#[cfg(feature = "conformance")]
pub mod conformance;
mod node;
mod recent;
mod spent;
mod workload;

pub use node::{
    Activate, Activated, Capture, Captured, CopyOrder, ExecOrder, Exit, Findings, ForgetOrder, FoundSnapshot, Hosted,
    Identity, Ingress, LogsOrder, NodeError, NodeEvent, NodeReport, Nodes, Output, Phase, Runtime, RuntimeAsset,
    SearchOrder, SnapshotAt, SnapshotOrder, Source, Stored, WorkerReport,
};
pub use recent::Recent;
pub use spent::Spent;
pub use workload::{Container, EgressRule, Port, PortProtocol, Readyz, Workload};

/// A node serves for so long after it asked to have its lease renewed, and then holds its actors. The control plane waits
/// longer before it gives them to others.
pub const NODE_SERVES_FOR: std::time::Duration = std::time::Duration::from_secs(10);

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
