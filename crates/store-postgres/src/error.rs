use std::path::PathBuf;
use std::time::Duration;

use ate_store::{Fault, Revision};
use deadpool_postgres::PoolError;
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::FromSql;

use crate::address::Address;
use crate::layout::{KNOWN_LAYOUT, Schema};
use crate::session::CONNECT;

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("cannot use the database at {address}: {reason}")]
    Database { address: Address, reason: String },
    #[error("the server at {address} is PostgreSQL {found}; 13 or newer is needed")]
    TooOld { address: Address, found: String },
    #[error("the database at {address} is encoded in {found}; create one with ENCODING 'UTF8'")]
    Encoding { address: Address, found: String },
    #[error(
        "the server at {address} runs with fsync = off, so that what it acknowledges may be gone after a crash; switch fsync on, or allow this for a store that may be lost"
    )]
    NotDurable { address: Address },
    #[error(
        "schema \"{schema}\" at {address} has layout {found}, this program knows layouts up to {KNOWN_LAYOUT}; run the newer program that made it, or use another schema"
    )]
    TooNew { address: Address, schema: Schema, found: i32 },
    #[error(
        "schema \"{schema}\" at {address} holds no store of this program's layout; is that the right one? Starting the control plane makes it, or moves an older one on"
    )]
    NoStore { address: Address, schema: Schema },
    #[error(
        "revision {seen} was seen of schema \"{schema}\" at {address}, but it is only at {revision}: what was acknowledged in between is lost; stop every replica, then restore a backup, or save what is left with `ate store backup --accept-loss` and restore that (or, if it was made anew on purpose, remove {path})"
    )]
    WentBack { address: Address, schema: Schema, seen: Revision, revision: Revision, path: PathBuf },
    #[error("cannot keep what was seen of the database in {path}")]
    Mark { path: PathBuf, source: std::io::Error },
    #[error("cannot read the roots of trust in {path}")]
    Roots { path: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("{place} holds no certificate to trust")]
    NoRoots { place: String },
}

/// What a server or the way to it said, on one line. The driver's own text is only the kind of trouble.
pub(crate) fn reason(error: &tokio_postgres::Error) -> String {
    if let Some(said) = error.as_db_error() {
        return format!("{} ({})", said.message(), said.code().code());
    }
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text
}

/// What can come between the store and its database.
#[derive(Debug)]
pub(crate) enum Trouble {
    Database(tokio_postgres::Error),
    Silent(Duration),
    /// The server that answers now is not one for a store.
    Unfit(ConnectError),
    /// What the database holds cannot be what this replica has seen.
    Wrong(Fault),
}

impl From<tokio_postgres::Error> for Trouble {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Database(error)
    }
}

impl From<PoolError> for Trouble {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Backend(error) => Self::Database(error),
            PoolError::Timeout(_) => Self::Silent(CONNECT),
            other => Self::Wrong(Fault::Unavailable { reason: other.to_string() }),
        }
    }
}

impl From<Trouble> for Fault {
    /// What contradicts what was written is corrupt; everything else may pass with time.
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Database(error) => {
                let reason = reason(&error);
                match error.code() {
                    Some(code) if CORRUPT.contains(&code) => Fault::Corrupt { reason },
                    _ => Fault::Unavailable { reason },
                }
            }
            Trouble::Silent(limit) => {
                Fault::Unavailable { reason: format!("the database did not answer within {} s", limit.as_secs()) }
            }
            Trouble::Unfit(unfit) => Fault::Unavailable { reason: unfit.to_string() },
            Trouble::Wrong(fault) => fault,
        }
    }
}

const CORRUPT: [&SqlState; 4] =
    [&SqlState::DATA_CORRUPTED, &SqlState::INDEX_CORRUPTED, &SqlState::UNDEFINED_TABLE, &SqlState::UNDEFINED_COLUMN];

impl Trouble {
    /// As what keeps a store at this address from being opened.
    pub(crate) fn at(self, address: &Address) -> ConnectError {
        match self {
            Trouble::Unfit(unfit) => unfit,
            other => {
                let (Fault::Unavailable { reason } | Fault::Corrupt { reason }) = other.into();
                ConnectError::Database { address: address.clone(), reason }
            }
        }
    }

    /// Whether it is with the connection, so that another one may have more luck.
    pub(crate) fn is_passing(&self) -> bool {
        // Class 08 is about connections, 53300 is a server with too many, 55P03 a lock that was held too long,
        // 57P0x a server that goes down or comes up.
        let passing =
            |code: &str| code.starts_with("08") || matches!(code, "53300" | "55P03") || code.starts_with("57P0");
        match self {
            Trouble::Database(error) => error.code().is_none_or(|state| passing(state.code())) || self.is_rolled_back(),
            Trouble::Silent(_) => true,
            Trouble::Unfit(_) | Trouble::Wrong(_) => false,
        }
    }

    /// Whether the server says that it has taken the transaction back, for somebody else's sake: a deadlock, or a conflict. Our own
    /// transactions stand in one line and meet neither, but others may be at the database, or it may be another that speaks the same
    /// protocol. Class 40, but for 40003, which does not know.
    pub(crate) fn is_rolled_back(&self) -> bool {
        let Trouble::Database(error) = self else { return false };
        error.code().is_some_and(|state| state.code().starts_with("40") && state.code() != "40003")
    }
}

/// Gives up on a server that does not answer in time.
pub(crate) async fn within<T, E>(limit: Duration, work: impl Future<Output = Result<T, E>>) -> Result<T, Trouble>
where
    Trouble: From<E>,
{
    Ok(tokio::time::timeout(limit, work).await.map_err(|_| Trouble::Silent(limit))??)
}

/// A column of a row. The schema says what is in it, but a schema can be tampered with.
pub(crate) fn column<'a, T: FromSql<'a>>(row: &'a Row, at: usize) -> Result<T, Fault> {
    row.try_get(at).map_err(|error| Fault::Corrupt { reason: reason(&error) })
}

pub(crate) fn corrupt(what: &str) -> Fault {
    Fault::Corrupt { reason: format!("{what} is not one that was written") }
}

/// PostgreSQL has no unsigned numbers, and none of ours gets near the end of its signed ones.
pub(crate) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(crate) fn unsigned(row: &Row, at: usize) -> Result<u64, Fault> {
    let number: i64 = column(row, at)?;
    u64::try_from(number).map_err(|_| corrupt(&format!("the number {number}")))
}
