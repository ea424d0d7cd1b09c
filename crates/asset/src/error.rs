use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ate_name::Digest;

use crate::Asset;

/// Why an asset could not be had. Clone, because every caller that waited for one fetch gets its outcome.
#[derive(Clone, Debug, thiserror::Error)]
#[error("cannot provide asset {asset}")]
pub struct AssetError {
    pub asset: Asset,
    #[source]
    pub cause: Cause,
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum Cause {
    #[error(
        "its url {reason}; write file:///path, https://host/path, s3://bucket/key, gs://bucket/key or \
         oci://host/repository@sha256:digest"
    )]
    Url { reason: &'static str },
    #[error("{place} does not exist; correct the url, or publish the asset there")]
    Missing { place: String },
    #[error("{place} may not be read: {reason}; give this node credentials for it, or make it public")]
    Denied { place: String, reason: String },
    #[error("fetching it failed: {reason}")]
    Fetch { reason: String },
    #[error("it ended after {got} of {expected} bytes; the source is damaged, or try again")]
    Truncated { expected: u64, got: u64 },
    #[error(
        "it has sha256:{actual} ({size} bytes); if the url holds another build now, pin that, else restore the old one"
    )]
    Digest { actual: Digest, size: u64 },
    #[error("it is no artifact of one file: {reason}; name the manifest of an artifact with one layer")]
    Artifact { reason: &'static str },
    #[error(
        "it has more than {limit} bytes, the most that an asset may have here; raise the node's asset budget, if that is it"
    )]
    TooLarge { limit: u64 },
    #[error(
        "it needs {size} bytes, and assets in use take {in_use} of the node's budget of {budget}; raise the budget, \
         or retire actors of older runtimes"
    )]
    OverBudget { size: u64, in_use: u64, budget: u64 },
    #[error("it was not complete after {minutes} minutes; check the connection to its source, and try again")]
    TimedOut { minutes: u64 },
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Cause {
    /// Whether the same request may well succeed in a moment.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, Self::Fetch { .. } | Self::Truncated { .. })
    }
}

/// Why a set of assets makes no runtime.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("a gVisor runtime needs an asset \"runsc\" and has none; add it to the SandboxConfig")]
    NoRunsc,
    #[error("asset {name:?} cannot be a file's name; use 1 to 64 letters, digits, '.', '_' or '-', the first no '.'")]
    Name { name: String },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What is wrong with the store itself, whatever the asset.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the disk of {} is full; free space, or lower the node's asset budget", path.display())]
    Full { path: PathBuf },
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: Arc<io::Error> },
}

impl StoreError {
    /// For `map_err`: says what was done to which path.
    pub(crate) fn io<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> Self {
        move |source| {
            let (path, source) = (path.to_owned(), source.into());
            match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full { path },
                _ => Self::Io { action, path, source: Arc::new(source) },
            }
        }
    }
}
