use ate_name::{NodeName, ObjectKey, OpId, WorkerUid};
use serde::{Deserialize, Serialize};

use crate::SnapshotRef;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "camelCase")]
pub enum Phase {
    /// Its state is in its snapshots, or it has none yet.
    Suspended,
    /// A worker is to run it. Without a lease an attempt has failed and the next has not begun.
    Resuming {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lease: Option<Lease>,
        op: OpId,
        #[serde(default)]
        start: Start,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<String>,
    },
    Running {
        lease: Lease,
    },
    /// Being saved; its sandbox still lives and takes over again if that fails.
    Suspending {
        lease: Lease,
        op: OpId,
        intent: Intent,
        snapshot: SnapshotRef,
    },
    /// Out of its sandbox, the image in the node's hands until it is stored. The worker is free.
    Saving {
        node: NodeName,
        op: OpId,
        intent: Intent,
        snapshot: SnapshotRef,
    },
    /// At rest on a node; nobody waits for its newest state to be anywhere else.
    Paused,
}

/// Where a wake begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Start {
    /// At the newest snapshot, else at the golden.
    #[default]
    Newest,
    /// At nothing, unless the actor has a snapshot of its own.
    Boot,
    /// As `Newest`, but the workload is asked whether it is up: the trial of a golden snapshot.
    Trial,
    /// At the files of the newest snapshot, else of the golden; its processes start anew.
    Fresh,
}

/// Why an actor is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Intent {
    /// Somebody asked: done when it is durable, and never called off.
    Suspend,
    /// Somebody asked for the quick kind: done when it is on the node.
    Pause,
    /// Nobody has called for a while, or somebody else needs the worker. A request calls it off while that is possible.
    Idle,
}

/// The right to run an actor on a worker, for as long as the generation stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    pub worker: WorkerUid,
    /// The worker as people and the public API name it.
    pub pod: ObjectKey,
    pub pool: ObjectKey,
    pub node: NodeName,
}

/// The states of the public API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Resuming,
    Running,
    Suspending,
    Suspended,
    Pausing,
    Paused,
}

impl Phase {
    pub fn status(&self) -> Status {
        match self {
            Self::Suspended => Status::Suspended,
            Self::Resuming { .. } => Status::Resuming,
            Self::Running { .. } => Status::Running,
            Self::Suspending { intent, .. } | Self::Saving { intent, .. } => match intent {
                Intent::Pause => Status::Pausing,
                Intent::Suspend | Intent::Idle => Status::Suspending,
            },
            Self::Paused => Status::Paused,
        }
    }

    /// The operation that must lead out of this phase; phases without one may last.
    pub fn operation(&self) -> Option<OpId> {
        match self {
            Self::Resuming { op, .. } | Self::Suspending { op, .. } | Self::Saving { op, .. } => Some(*op),
            Self::Suspended | Self::Running { .. } | Self::Paused => None,
        }
    }
}
