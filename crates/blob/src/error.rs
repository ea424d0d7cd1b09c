use std::error::Error;
use std::io;

use crate::{BlobPath, Provider};

/// How much of a store's own words is shown.
const MAX_REASON: usize = 400;

/// Why an object could not be put, read or deleted.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BlobError {
    #[error("{object} exists with other content, and an object is never overwritten; put it under another key")]
    Exists { object: BlobPath },
    #[error("{object} does not exist; check its bucket and key, and that this is the store that it was put in")]
    Missing { object: BlobPath },
    #[error("the store is full, and {object} was not put; free space or raise its quota, then try again")]
    Full { object: BlobPath },
    #[error("the store denies access to {object}: {reason}; check the credentials and what they may do in this bucket")]
    Denied { object: BlobPath, reason: String },
    #[error("{object} has {size} bytes, more than the limit of {limit}")]
    TooLarge { object: BlobPath, size: u64, limit: u64 },
    #[error("{object} gave {got} bytes where it said {expected}; try again")]
    Length { object: BlobPath, expected: u64, got: u64 },
    #[error("{path} is a whole bucket; name an object or a prefix in it")]
    WholeBucket { path: BlobPath },
    #[error("cannot read the file to put as {object}: {reason}")]
    Source { object: BlobPath, reason: String },
    #[error("cannot write {object} to a local file: {reason}")]
    Target { object: BlobPath, reason: String },
    #[error("{object}: {reason}; try again if this may be temporary")]
    Failed { object: BlobPath, reason: String },
    #[error("the object store's setting {key} is not known to {provider:?}; remove or correct it")]
    Setting { provider: Provider, key: String },
    #[error("the object store cannot be opened: {reason}")]
    Open { reason: String },
}

impl BlobError {
    /// For `map_err` where a directory or file of the store itself failed.
    pub(crate) fn disk(object: &BlobPath, doing: &'static str) -> impl Fn(io::Error) -> Self {
        move |error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full { object: object.clone() },
            io::ErrorKind::PermissionDenied => Self::Denied { object: object.clone(), reason: reason(&error) },
            _ => Self::Failed { object: object.clone(), reason: format!("cannot {doing}: {}", reason(&error)) },
        }
    }

    pub(crate) fn remote(object: &BlobPath, error: &object_store::Error) -> Self {
        use object_store::Error as E;
        let (object, reason) = (object.clone(), reason(error));
        match error {
            E::NotFound { .. } => Self::Missing { object },
            E::AlreadyExists { .. } | E::Precondition { .. } => Self::Exists { object },
            E::PermissionDenied { .. } | E::Unauthenticated { .. } => Self::Denied { object, reason },
            // Lists, and some others, keep the status only in their words.
            _ => match reason.split_once("status code: ").map(|(_, status)| status.get(..3)) {
                Some(Some("401" | "403")) => Self::Denied { object, reason },
                Some(Some("404")) => Self::Missing { object },
                Some(Some("507")) => Self::Full { object },
                _ => Self::Failed { object, reason },
            },
        }
    }
}

/// An error with all that lies beneath it, once each and in few words: a server may have chosen them.
pub fn reason(error: &dyn Error) -> String {
    let mut text = error.to_string();
    for cause in std::iter::successors(error.source(), |error| (*error).source()).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text.chars().filter(|char| !char.is_control()).take(MAX_REASON).collect()
}
