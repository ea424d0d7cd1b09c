//! Runtime binaries on a node.
//!
//! An asset is a url and a sha256. It is fetched once, checked while it streams in, and kept under its hash; whoever
//! needs it holds an [`AssetFile`], which keeps it from eviction in every process. A *runtime* is a directory of hard
//! links that lays several assets out as gVisor wants them.
//!
//! ```text
//!   <dir>/sha256/<hash>          an asset: whole, executable. Shared flock: a lease. Access time: the last use
//!   <dir>/fetch/<hash>           one that is coming in, under the exclusive flock of who fetches it
//!   <dir>/runtimes/<hash>/       hash of the names and hashes of a set. Shared flock: a lease
//!       runsc
//!       gvisor-bin/<name>        every other asset
//!   <dir>/lock                   exclusive flock: publish, evict, lay out
//! ```
//!
//! Whoever waited for a lock looks whether the file is still at its name before it believes in it; so a rename or an
//! unlink needs no more than the lock of the file itself.
//!
//! **What is checked when.** An asset that the disk holds is hashed the first time that a process asks for it, and
//! again if its inode, size or modification time changed. That finds what rotted on the disk or was cut by a crash
//! before a sandbox runs it, for the price of one read of the file (a runsc of 36 MB: some 100 ms) per life of the node.
//! Hashing on every activation would cost more than the rest of a wake and would check the page cache, not the disk.

mod error;
mod fetch;
mod runtime;
mod store;
mod url;

use std::fmt;

use ate_name::Digest;

pub use error::{AssetError, Cause, RuntimeError, StoreError};
pub use fetch::{Fetch, Fetching};
pub use runtime::RuntimeDirectory;
pub use store::{AssetFile, AssetStore, MAX_ASSET};
pub use url::AssetUrl;

/// A binary of a runtime, as a SandboxConfig or a snapshot's manifest names it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Asset {
    pub url: String,
    pub sha256: Digest,
}

/// Leaves out what of a url may let its bearer in: a user with a password, a signature in the query.
impl fmt::Display for Asset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.url.split(['?', '#']).next().unwrap_or_default();
        let (scheme, rest) = shown.split_once("://").unwrap_or(("", shown));
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        let colon = if scheme.is_empty() { "" } else { "://" };
        write!(f, "{scheme}{colon}{host}{path} (sha256:{})", self.sha256)
    }
}

impl fmt::Debug for Asset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
