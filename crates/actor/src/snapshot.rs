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

/// A snapshot of an actor that is there, whether or not anybody knows of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub snapshot: SnapshotRef,
    /// The node that has it on its disk; `None`: it is in durable storage.
    pub on: Option<NodeName>,
}

impl Snapshots {
    /// What an actor has by all that was found of it, if that is more than what is known here. What is not durable yet is uploaded by
    /// the operation given.
    pub fn caught_up(&self, found: &[Found], op: OpId) -> Option<Self> {
        let newest = &found.iter().max_by_key(|found| found.snapshot.generation)?.snapshot;
        let known = self.base().map(|(known, _)| known);
        if known.is_some_and(|known| known.generation > newest.generation) {
            return None;
        }
        let is_known = known.is_some_and(|known| known.prefix == newest.prefix);
        let durable = found.iter().filter(|found| found.on.is_none()).map(|found| &found.snapshot);
        // One that was durable once stays so until the next one is: none is found only if none was known, or storage has lost it.
        let durable = durable.max_by_key(|snapshot| snapshot.generation).or(self.durable.as_ref()).cloned();
        let copies = found.iter().filter(|found| found.snapshot.prefix == newest.prefix);
        let disks: Vec<&NodeName> = copies.filter_map(|copy| copy.on.as_ref()).collect();
        let before = self.local.as_ref().map(|(_, node)| node).filter(|node| disks.contains(node));
        let local = before.or(disks.first().copied()).map(|node| (newest.clone(), node.clone()));
        let is_durable = durable.as_ref().is_some_and(|durable| durable.prefix == newest.prefix);
        let uploading = (!is_durable).then(|| self.uploading.filter(|_| is_known).unwrap_or(op));
        let after = Self { local, durable, uploading, paused: self.paused && is_known };
        (after != *self).then_some(after)
    }

    /// Whether its newest is another than the newest of these.
    pub fn is_newer(&self, than: &Self) -> bool {
        let newest = |snapshots: &Self| snapshots.base().map(|(newest, _)| newest.prefix.clone());
        newest(self) != newest(than)
    }

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
