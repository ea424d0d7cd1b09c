//! The Store port: where the control plane keeps what it must not forget.
//!
//! Records live under ordered keys. A [`Change`] is the only way to write: conditions on the state before it, and
//! writes that all happen or none, durable once `commit` says so. The commits of a store form one line, numbered by
//! [`Revision`]; a watch replays that line from any recent point, so list-then-watch gives a cache that misses nothing.
//!
//! ```text
//!   commit(Change{guards, writes}) ── guards hold? ── writes durable ── answered ── event to watchers
//!                                          │ no
//!                                          └── Conflict{the guard}, nothing written
//!
//!   revision  1        2                   3            …      one per commit that writes
//!   actor/a   v1 put   v2 put              deleted             a version counts writes of one record
//!   worker/w           v1 put (same commit)
//! ```
//!
//! What each adapter promises, and [`conformance`] checks:
//!
//! * A commit that returned `Ok` survives `kill -9`; one that returned an error other than
//!   [`Fault::Unavailable`] has not happened. Dropping the future of a commit leaves open whether it happens,
//!   never whether it is whole.
//! * Guards are judged against the state before the change, which holds every commit that returned before this one
//!   was called. Reads see every commit that returned before them.
//! * Watchers see a commit only once it is durable, whole, in order, exactly once; a slow watcher is ended with
//!   [`WatchError::Lagged`] and never holds up a commit.
//!
//! The trait uses `async-trait` because it is used as `Arc<dyn Store>`, which native async methods do not allow yet;
//! the boxed future is nothing beside a disk flush. It names no runtime and starts no task.

#[cfg(feature = "conformance")]
pub mod conformance;

mod change;
mod contents;
mod error;
mod feed;
mod group;
mod key;
mod memory;
mod queue;
mod signal;

use async_trait::async_trait;

pub use change::{
    Change, Committed, Event, Guard, MAX_CHANGE_BYTES, MAX_CHANGE_ITEMS, MAX_PAGE_BYTES, MAX_PAGE_RECORDS, MAX_VALUE,
    Mutation, Page, PageFiller, Record, Revision, View, Write, judge, number,
};
pub use contents::{Contents, Counts, Entry, IfOccupied, LostTail, Mutations, Replacement};
pub use error::{CommitError, Fault, WatchError};
pub use feed::{Feed, FeedLimits, Watch};
pub use group::{Group, Stage, Verdict};
pub use key::{Key, KeyError, Kind, MAX_PATH, MAX_SEGMENT, Prefix};
pub use memory::MemoryStore;
pub use queue::{Queue, Request};
pub use signal::{Signal, Waiter};

#[async_trait]
pub trait Store: std::fmt::Debug + Send + Sync {
    /// Applies a change whole, durably, or not at all.
    async fn commit(&self, change: Change) -> Result<Committed, CommitError>;

    async fn get(&self, key: &Key) -> Result<Option<Record>, Fault>;

    /// The records below `prefix` in path order, those after the path `after` only. The cost is that of the page,
    /// whatever the store holds. `limit` is taken between 1 and [`MAX_PAGE_RECORDS`].
    async fn list(&self, prefix: &Prefix, after: Option<&str>, limit: usize) -> Result<Page, Fault>;

    /// Commits after `after` that touch one of the prefixes, then those to come.
    async fn watch(&self, prefixes: &[Prefix], after: Revision) -> Result<Watch, WatchError>;

    /// The last commit.
    async fn revision(&self) -> Result<Revision, Fault>;
}
