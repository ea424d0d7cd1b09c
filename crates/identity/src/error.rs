use std::io;
use std::path::PathBuf;

use crate::SpiffeError;

/// Why a data directory gives no identity. The text names the file and what to do.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },

    #[error("{0} holds a private key that other users can read (mode {mode:03o})\n  run `chmod 600 {0}`", path.display())]
    Exposed { path: PathBuf, mode: u32 },

    #[error(
        "the instance's authority {0} is damaged: {reason}\n  restore it from a backup, or move it away: a new authority \
         is made, and clients of the old one need the new ca.pem",
        path.display()
    )]
    DamagedAuthority { path: PathBuf, reason: String },

    #[error(
        "the instance's authority {0} is valid from {not_before} to {not_after}, and it is {now}\n  if this machine's \
         clock is right, move the file away: a new authority is made, and clients of the old one need the new ca.pem",
        path.display()
    )]
    NotValidNow { path: PathBuf, not_before: String, not_after: String, now: String },

    #[error(
        "the instance key {0} is damaged: it has {length} bytes instead of 32\n  restore it from a backup: without it the \
         snapshots of this instance cannot be read",
        path.display()
    )]
    DamagedKey { path: PathBuf, length: usize },

    #[error(
        "the instance key {0} is gone\n  restore it from a backup: without it the snapshots of this instance cannot be \
         read. To start over without them, move {1} away too",
        path.display(), authority.display()
    )]
    LostKey { path: PathBuf, authority: PathBuf },

    #[error("{0:?} is no DNS name and no address, so no certificate can be issued for it")]
    BadName(String),

    #[error("cannot issue a certificate")]
    Issue(#[source] rcgen::Error),

    #[error("an issued certificate is of no use")]
    Unusable(#[source] rustls::Error),
}

/// Why a peer has no role here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    #[error("the peer gave no certificate")]
    Anonymous,
    #[error("the peer's certificate cannot be parsed")]
    Unreadable,
    #[error("the peer's certificate names {0} URIs instead of one SPIFFE id")]
    NotOneId(usize),
    #[error("the peer's certificate names no role")]
    BadId(#[from] SpiffeError),
    #[error("the peer belongs to instance {0:?}")]
    OtherInstance(String),
}
