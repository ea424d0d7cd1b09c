use ate_store::{CommitError, Fault};

/// The kinds of failure that a client can tell apart; the names are those of gRPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    InvalidArgument,
    NotFound,
    AlreadyExists,
    FailedPrecondition,
    Aborted,
    ResourceExhausted,
    Unavailable,
    DeadlineExceeded,
    OutOfRange,
    Internal,
}

/// What a client is told. The text names the object and, where there is one, the remedy; internals stay in the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ControlError {
    pub code: Code,
    pub text: String,
    /// It would be refused again before this has passed.
    pub retry_after: Option<std::time::Duration>,
    cause: Cause,
}

/// What the control plane itself goes by; a text is for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    Conflict,
    StoreAway,
    Stopping,
    Other,
}

impl ControlError {
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), retry_after: None, cause: Cause::Other }
    }

    /// The same in other words.
    pub(crate) fn saying(self, text: impl Into<String>) -> Self {
        Self { text: text.into(), ..self }
    }

    /// Says when to come again.
    pub(crate) fn after(self, pause: std::time::Duration) -> Self {
        Self { retry_after: Some(pause), ..self }
    }

    pub fn invalid(text: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, text)
    }

    pub fn precondition(text: impl Into<String>) -> Self {
        Self::new(Code::FailedPrecondition, text)
    }

    pub(crate) fn actor_not_found(name: &str) -> Self {
        Self::new(Code::NotFound, format!("Actor {name} not found"))
    }

    pub(crate) fn atespace_not_found(name: &ate_name::AtespaceName) -> Self {
        Self::new(Code::NotFound, format!("Atespace {name} not found"))
    }

    pub(crate) fn conflict() -> Self {
        Self { cause: Cause::Conflict, ..Self::new(Code::Aborted, "concurrent update conflict, please retry") }
    }

    pub(crate) fn in_progress() -> Self {
        Self::new(Code::Aborted, "another operation is in progress for this actor")
    }

    pub(crate) fn stopping() -> Self {
        Self { cause: Cause::Stopping, ..Self::new(Code::Unavailable, "the server is stopping") }
    }

    fn store_away() -> Self {
        Self { cause: Cause::StoreAway, ..Self::new(Code::Unavailable, "the store is unavailable, please retry") }
    }

    /// Nothing is known of how it ended: read to find out.
    pub(crate) fn is_store_away(&self) -> bool {
        self.cause == Cause::StoreAway
    }

    /// It says nothing of what was to be done: whoever finds the operation goes on with it.
    pub(crate) fn is_interruption(&self) -> bool {
        matches!(self.cause, Cause::StoreAway | Cause::Stopping)
    }

    pub(crate) fn is_conflict(&self) -> bool {
        self.cause == Cause::Conflict
    }
}

impl From<Fault> for ControlError {
    fn from(fault: Fault) -> Self {
        match fault {
            // It passes, and whoever meets it says what waits for it.
            Fault::Unavailable { .. } => {
                tracing::debug!(%fault, "the store is away");
                Self::store_away()
            }
            Fault::Corrupt { .. } => {
                tracing::error!(%fault, "the store failed");
                Self::new(Code::Internal, "the store is corrupt: see the server's log")
            }
        }
    }
}

impl From<CommitError> for ControlError {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::Conflict { guard } => crate::quota::exceeded(&guard).unwrap_or_else(Self::conflict),
            CommitError::Fault(fault) => fault.into(),
            CommitError::TooLarge { what, limit, .. } => Self::invalid(format!("too large: at most {limit} {what}")),
            CommitError::WrittenTwice { key } => {
                tracing::error!(%key, "a change wrote a record twice");
                Self::new(Code::Internal, "internal server error")
            }
        }
    }
}
