use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ate_name::Digest;

use crate::Reference;
use crate::unpack::UnpackError;

/// Why an image could not be had. Clone, because every caller that waited for one pull gets its outcome.
#[derive(Clone, Debug, thiserror::Error)]
#[error("cannot provide image {reference}")]
pub struct ImageError {
    pub reference: Reference,
    #[source]
    pub cause: Cause,
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum Cause {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("its path is relative to a directory that only the sender knows; write the absolute path")]
    Relative,
    #[error("registry {registry} wants credentials for it; name a pull secret that holds them")]
    NoCredentials { registry: String },
    #[error("registry {registry} does not let these credentials read it; correct the pull secret")]
    WrongCredentials { registry: String },
    #[error("{place} has no {what}; check the name and the digest, or push it")]
    Missing { place: String, what: String },
    #[error("registry {registry} failed: {reason}")]
    Registry { registry: String, reason: String },
    #[error("its {what} is malformed: {reason}; build the image anew")]
    Malformed { what: &'static str, reason: String },
    #[error("it is for {has}, and this machine runs {wanted}; build it for {wanted} too")]
    Platform { wanted: String, has: String },
    #[error("its {what} has sha256:{actual}, not sha256:{expected}; the source is damaged or lies")]
    Digest { what: &'static str, expected: Digest, actual: Digest },
    #[error("its {what} has {actual} bytes, not {expected}; the source is damaged or lies")]
    Size { what: &'static str, expected: u64, actual: u64 },
    #[error("its {what} exceeds the limit of {limit}; make the image smaller or raise the limit of the node")]
    TooLarge { what: &'static str, limit: u64 },
    #[error("its layer sha256:{layer} cannot be unpacked")]
    Layer { layer: Digest, source: Arc<UnpackError> },
    #[error("it was not complete after {minutes} minutes; try again, layers that arrived are kept")]
    TimedOut { minutes: u64 },
}

/// What is wrong with the store itself, whatever the image.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    #[error(
        "the image store {} needs root, to keep the owners of files and to make whiteouts; run the node as root",
        path.display()
    )]
    NotRoot { path: PathBuf },
    #[error(
        "the image store cannot be {}: overlayfs reads ':', ',' and '\\' in a path as its own; choose another directory",
        path.display()
    )]
    Path { path: PathBuf },
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: Arc<io::Error> },
}

impl StoreError {
    /// For `map_err`: says what was done to which path.
    pub(crate) fn io<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source: Arc::new(source.into()) }
    }
}
