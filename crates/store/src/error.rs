use crate::{Guard, Key, Revision};

/// The store itself is in trouble; nothing is wrong with the request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Try again later. A commit that ends so may or may not have happened, but never by half: read to find out.
    #[error("the store is unavailable: {reason}")]
    Unavailable { reason: String },
    /// What is stored cannot be what was written. Trying again does not help; a person must look.
    #[error("the store is corrupt: {reason}")]
    Corrupt { reason: String },
}

/// Why a change was not committed. Of these only [`Fault::Unavailable`] leaves open whether it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// The first guard that did not hold.
    #[error("conflict: expected {guard}")]
    Conflict { guard: Guard },
    #[error("the change has {actual} {what}, the limit is {limit}")]
    TooLarge { what: &'static str, actual: usize, limit: usize },
    #[error("the change writes {key} twice")]
    WrittenTwice { key: Key },
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// Why a watch did not start, or ended. Except for a fault, the way on is to list again and watch from there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WatchError {
    #[error("changes after revision {after} are asked for, those up to {floor} are no longer kept")]
    Compacted { after: Revision, floor: Revision },
    /// The revision comes from another store, or from this one before it was restored from a backup.
    #[error("changes after revision {after} are asked for, the store is only at {current}")]
    Ahead { after: Revision, current: Revision },
    #[error("the watcher stopped reading at revision {seen}, changes up to {floor} are no longer kept")]
    Lagged { seen: Revision, floor: Revision },
    #[error(transparent)]
    Fault(#[from] Fault),
}
