//! What the store needs of a storage engine: ordered bytes, atomic durable transactions, snapshots to read from.
//!
//! It is public so that the comparison in `examples/compare` and fault-injecting tests drive the very code that ships.

use std::ops::Bound;

use ate_store::Fault;

/// Looks at a key and its value, and says whether it wants more.
pub type Each<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> Result<bool, Fault>;

/// A consistent state to read from.
pub trait Reads {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Fault>;

    /// Shows entries from `start` on, in key order, until `each` says `false`.
    fn scan(&self, start: Bound<&[u8]>, each: Each<'_>) -> Result<(), Fault>;
}

/// A transaction; it reads its own writes.
pub trait Writes: Reads {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), Fault>;
    fn remove(&mut self, key: &[u8]) -> Result<(), Fault>;
}

/// Whether a transaction is worth a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    Commit,
    Abandon,
}

/// After any `Err` of `write` the engine is not used again; the store opens a new one.
pub trait Engine: Send + Sync {
    fn read(&self, work: &mut dyn FnMut(&dyn Reads) -> Result<(), Fault>) -> Result<(), Fault>;

    /// When this returns `Ok` after [`Finish::Commit`], the writes are on the disk and visible to reads.
    fn write(&self, work: &mut dyn FnMut(&mut dyn Writes) -> Result<Finish, Fault>) -> Result<(), Fault>;

    /// Bytes of its files that it keeps in memory, besides what the kernel does.
    fn cached_bytes(&self) -> u64 {
        0
    }
}

/// Opens, or creates, the engine in a directory that the caller has locked.
pub type Opener = Box<dyn Fn(&std::path::Path) -> Result<Box<dyn Engine>, Fault> + Send + Sync>;
