//! An actor's life: the phases it can be in and the events that lead from one to the next. Pure.
//!
//! ```text
//!                 Bind                 Started
//!   Suspended ───────────▶ Resuming ───────────▶ Running ◀─────────┐
//!     ▲  ▲    ◀─ GaveUp ──  │  ▲ └─ Failed        │                │ Kept (not saved, called off)
//!     │  │                  │  └───(no worker)     │ Save           │
//!     │  └── Lost ──────────┴──────────────────────┼────────────────┤
//!     │                                            ▼                │
//!     │◀──────── Stored (suspend) ─── Saving ◀── Suspending ────────┘
//!   Paused ◀──── Stored (pause) ────────┘  Captured: the worker is free again
//!     └──────────── Bind ───────────────▶ Resuming
//! ```
//!
//! Every transition says what else must change with it ([`Effect`]), so that whoever stores the actor can do both in one
//! transaction. An event that does not fit the phase, or speaks for an older generation or another operation, is refused:
//! that is the fence.

mod apply;
mod crashes;
mod phase;
mod snapshot;

pub use apply::{Effect, Event, Refused};
pub use crashes::Crashes;
pub use phase::{Intent, Lease, Phase, Start, Status};
pub use snapshot::{Found, Scope, SnapshotRef, Snapshots};

use ate_name::{ActorKey, ActorUid, Generation, Labels, ObjectKey, OpId, TemplateUid};
use serde::{Deserialize, Serialize};

/// What is known of an actor. Unknown fields are carried along, so an older build does not strip a newer one's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Actor {
    pub uid: ActorUid,
    pub key: ActorKey,
    pub template: ObjectKey,
    /// The very template it was made from: one of the same name applied later is another, and its golden no base.
    pub template_uid: TemplateUid,
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub selector: Labels,
    pub generation: Generation,
    pub phase: Phase,
    #[serde(default)]
    pub snapshots: Snapshots,
    /// Its next wake starts its processes anew: of its newest snapshot only the files count.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fresh: bool,
    /// Its record is from a backup, by which this was the last generation that ran: it may have been saved since, and is not woken
    /// before that was looked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub behind: Option<Generation>,
    /// How its sandbox ended by itself, since its last snapshot or restart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crashes: Option<Crashes>,
    /// The key that its snapshots are sealed with, itself sealed. Gone with the record, and the snapshots' meaning with it.
    pub sealed_key: String,
    pub created: jiff::Timestamp,
}

impl Actor {
    pub fn new(
        uid: ActorUid,
        key: ActorKey,
        template: ObjectKey,
        template_uid: TemplateUid,
        sealed_key: String,
        created: jiff::Timestamp,
    ) -> Self {
        Self {
            uid,
            key,
            template,
            template_uid,
            selector: Labels::new(),
            generation: Generation::NONE,
            phase: Phase::Suspended,
            snapshots: Snapshots::default(),
            fresh: false,
            behind: None,
            crashes: None,
            sealed_key,
            created,
        }
    }

    /// What is under way with it, and must be taken up by somebody if whoever does it goes away.
    pub fn pending(&self) -> impl Iterator<Item = OpId> {
        self.phase.operation().into_iter().chain(self.snapshots.uploading)
    }

    /// The snapshots that must not go away: those it can continue from, and the one that is being written.
    pub fn references(&self) -> impl Iterator<Item = &SnapshotRef> {
        let being_written = match &self.phase {
            Phase::Saving { snapshot, .. } => Some(snapshot),
            _ => None,
        };
        let local = self.snapshots.local.as_ref().map(|(snapshot, _)| snapshot);
        being_written.into_iter().chain(local).chain(&self.snapshots.durable)
    }

    /// The worker it holds, if any.
    pub fn lease(&self) -> Option<&Lease> {
        match &self.phase {
            Phase::Resuming { lease, .. } => lease.as_ref(),
            Phase::Running { lease } | Phase::Suspending { lease, .. } => Some(lease),
            Phase::Suspended | Phase::Saving { .. } | Phase::Paused => None,
        }
    }
}
