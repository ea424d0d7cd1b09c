//! What the router knows of the world, and how it asks for more. The control plane implements [`Activator`] and feeds
//! [`Update`]s; nothing else connects the two.

use std::net::SocketAddr;
use std::path::PathBuf;

use ate_name::{ActorKey, ActorUid, Generation, ObjectKey};
use tokio::time::Instant;

/// Where an actor runs, as of one generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    pub key: ActorKey,
    pub uid: ActorUid,
    pub generation: Generation,
    pub endpoint: Endpoint,
    /// What the template declares. Empty means port 80 speaking HTTP, the only port a template without a word about it has.
    pub ports: Vec<Port>,
    pub template: ObjectKey,
}

/// Where a worker listens for connections that open with a preface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Unix(PathBuf),
    /// The door of its node.
    Tcp(SocketAddr),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    pub number: u16,
    pub protocol: Protocol,
}

/// What a workload's port understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1, and HTTP/2 for those who know beforehand (gRPC).
    Http,
    /// HTTP/2 without TLS, and nothing else.
    H2c,
}

/// One message of the assignment watch. In order per actor; a source that lost its place sends a `Reset`.
#[derive(Clone, Debug)]
pub enum Update {
    Assigned(Assignment),
    Released {
        key: ActorKey,
        uid: ActorUid,
        generation: Generation,
    },
    /// All there is: whatever is not listed is not assigned.
    Reset(Vec<Assignment>),
}

/// Wakes an actor and says where it is. The router calls it once per actor at a time, whoever and however many wait.
#[async_trait::async_trait]
pub trait Activator: Send + Sync {
    /// `stale` is the newest generation of this key that a worker disowned. The answer is expected to be newer, but the
    /// same one may be repeated where the caller is mistaken, and an actor created anew under the key starts over.
    async fn activate(
        &self,
        key: &ActorKey,
        stale: Option<Generation>,
        deadline: Instant,
    ) -> Result<Assignment, ActivateError>;
}

/// Why there is no assignment. The codes are those of the control API.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActivateError {
    #[error("actor not found")]
    NotFound,
    /// The text reaches the client, as in the public API.
    #[error("{0}")]
    FailedPrecondition(String),
    #[error("control plane unavailable")]
    Unavailable,
    /// It is not to be tried again before this has passed. The text reaches the client.
    #[error("{text}")]
    Resting { text: String, after: std::time::Duration },
    #[error("not active before the deadline")]
    DeadlineExceeded,
    #[error("permission denied")]
    PermissionDenied,
    #[error("unauthenticated")]
    Unauthenticated,
    /// The text names what is used up and what to do; it reaches the client.
    #[error("rate limited: {0}")]
    ResourceExhausted(String),
    #[error("internal error")]
    Internal,
}
