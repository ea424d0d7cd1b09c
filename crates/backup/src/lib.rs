//! The file that a backup of a store is: the same for every adapter, so that one can be restored into another.
//!
//! Lines of JSON. The first says what it is, the last that it is whole; between them a line per record, in the order of
//! [`ate_store::Contents`]. Anything else is refused before anything is written: a file that was cut, changed, put together
//! or made by a later program.
//!
//! ```text
//!   {"format":"ate-store-backup","version":1,"revision":97,"time":"2026-…Z","writer":"ate 0.1.0"}
//!   {"kind":"atespace","path":"demo","version":1,"revision":3,"value":"{\"name\":\"demo\"}"}
//!   …                                                         or "base64":"…" for a value that is no text
//!   {"records":412,"sha256":"…"}                              of every byte before this line
//! ```
//!
//! Both ways are streams: memory does not grow with the store.

mod line;
mod read;
mod write;

use std::io;
use std::path::PathBuf;

use ate_store::{Fault, Revision};

pub use read::{Backup, Records};
pub use write::save;

/// The format that this program writes, and the newest that it reads.
pub const VERSION: u32 = 1;

/// What a backup says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The last commit that is in it.
    pub revision: Revision,
    pub time: jiff::Timestamp,
    /// The program that wrote it.
    pub writer: String,
}

/// Why a backup was not written, or is not believed.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    #[error("{path} is no backup of a store")]
    NoBackup { path: PathBuf },
    #[error("{path} has format {found}, this program reads formats up to {VERSION}; use a newer program")]
    TooNew { path: PathBuf, found: u32 },
    #[error("{path} is not whole: it ends after line {line}; use another backup")]
    Cut { path: PathBuf, line: u64 },
    #[error("{path} is damaged: {reason} (line {line}); use another backup")]
    Damaged { path: PathBuf, line: u64, reason: String },
    #[error("{path} is there already; choose another name, or remove it first")]
    Exists { path: PathBuf },
    #[error("the store holds {key}, which is {reason}; `ate store check` tells more")]
    Foreign { key: String, reason: String },
    #[error("the store cannot be read")]
    Store(#[from] Fault),
    #[error("cannot {action} {path}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}
