//! Names and ids: the words that every other crate uses to point at something.
//!
//! A value of one of these types has been checked. Text from a user, a disk or a network is parsed
//! into one at the edge, once, and never looked at again. Nothing here does I/O.
//!
//! ```text
//!   names   chosen by people, unique in a scope      ActorKey = atespace / name,  ObjectKey = namespace / name
//!   uids    chosen by us, never reused               ActorUid, WorkerUid, OpId
//!   fences  grow, never fall                         Generation
//!   digests say which bytes                          Digest
//! ```

mod digest;
mod generation;
mod label;
mod names;
mod uid;

pub use digest::{Digest, DigestError};
pub use generation::Generation;
pub use label::{LabelError, Labels, MAX_LABEL_VALUE, MAX_SELECTOR_LABELS, check_label_key, check_label_value};
pub use names::{
    ActorKey, ActorName, AtespaceName, MAX_NAME, NameError, NodeName, ObjectKey, check_dns_label, check_dns_subdomain,
};
pub use uid::{ActorUid, OpId, ReplicaId, SessionId, TemplateUid, UidError, WorkerUid};

/// Golden actors live here. Reserved by convention of the public API: it can be listed like any other.
pub const GOLDEN_ATESPACE: &str = "ate-golden";

/// What follows `<actor>.<atespace>` in the stable name of an actor.
pub const ACTOR_ZONE: &str = "actors.resources.substrate.ate.dev";
