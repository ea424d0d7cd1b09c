use ate_name::{Digest, Generation, NodeName, OpId};
use serde::{Deserialize, Serialize};

use crate::Phase;

/// How much of an actor a snapshot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scope {
    /// Memory and files: it continues where it was.
    Full,
    /// The durable directory only: its processes start anew.
    Data,
}

/// One snapshot, by the place it has or will have in durable storage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotRef {
    pub prefix: String,
    /// The digest of its manifest, known once it is stored: the root of trust of everything a restore will read and run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<Digest>,
    /// Whose state it is: that of the assignment with this number.
    pub generation: Generation,
    pub scope: Scope,
    /// Bytes it occupies; zero until it is stored.
    #[serde(default)]
    pub stored_bytes: u64,
}

/// An actor's newest snapshot on either side of the wire. Watermarks: what is durable is never newer than what exists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshots {
    /// The newest, and the node that has it on its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<(SnapshotRef, NodeName)>,
    /// The newest that would survive the loss of every node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durable: Option<SnapshotRef>,
    /// The save whose snapshot is on its way from the first to the second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uploading: Option<OpId>,
    /// The newest is a pause's: where it lies is where the actor rests.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
}

impl Snapshots {
    /// What an actor is that has no worker and nothing under way.
    pub fn resting(&self) -> Phase {
        if self.paused && self.local.is_some() { Phase::Paused } else { Phase::Suspended }
    }

    /// What the next resume begins with, and the only node that can, if it is not durable yet. `None`: the golden.
    pub fn base(&self) -> Option<(&SnapshotRef, Option<&NodeName>)> {
        match (&self.local, &self.durable) {
            (Some((local, _)), Some(durable)) if local.prefix == durable.prefix => Some((durable, None)),
            (Some((local, node)), _) => Some((local, Some(node))),
            (None, Some(durable)) => Some((durable, None)),
            (None, None) => None,
        }
    }
}
