//! The store for several control-plane replicas: one schema of a PostgreSQL database, 13 or newer.
//!
//! In each replica committers queue for one writer, which takes all that waits, locks the one row of `head`, judges each
//! change against the state left by those before it, and commits the group with one flush: two exchanges with the server,
//! however many changes. Reads go over a pool of other connections and wait for nobody.
//!
//! ```text
//!   replica A   commit ─┐ bounded           lock head, read what guards and writes name ──▶
//!               commit ─┼─ queue ── writer ◀── versions, revisions                           PostgreSQL
//!               commit ─┘           (group)  records, log, head, notify, COMMIT ────────────▶   head
//!                                            ◀── durable ── feed ── answers                     records
//!               watch ◀── feed ◀── follower ◀── notified: others have committed; read the log   log
//!   replica B   the same
//! ```
//!
//! **One line of commits.** The port numbers commits one after the other and judges each against all before it, so there is
//! nothing to gain from transactions side by side; the row lock on `head` *is* the line. Whoever holds it reads in READ
//! COMMITTED, where each statement sees all that was committed before it began, and so all before its turn. SERIALIZABLE or
//! REPEATABLE READ would take their snapshot before the wait for the lock and fail when it ends. With the lock no
//! replica is in another's way, and two of them alternate, group by group; only what strangers at the tables spoil is tried again.
//!
//! **The feed.** A replica publishes its own group itself if it saw everything before it; what others committed comes from
//! the log, by notification and, should one be lost, by a slow poll. Both go through the same gate, which knows the last
//! revision shown and takes only what follows it. The log has no gaps, so a replica that was away for longer than the log is
//! kept notices, and its watchers end with [`WatchError::Lagged`].
//!
//! **When the database is away** commits and reads wait for [`Settings::patience`], then they are answered
//! [`Fault::Unavailable`]. A commit whose connection breaks after it was sent is answered so at once: it may have happened.
//! More, and what each failure looks like: `docs/store.md`.

mod address;
mod error;
mod follower;
mod layout;
mod mark;
mod past;
mod reads;
mod relay;
mod session;
mod tls;
mod whole;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};
use std::{fmt, io};

use async_trait::async_trait;
use ate_store::{
    Change, CommitError, Committed, Fault, Feed, FeedLimits, Key, Page, Prefix, Queue, Record, Revision, Store, Watch,
    WatchError,
};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Row};
use tokio_util::task::AbortOnDropHandle;

pub use address::{Address, AddressError};
pub use error::ConnectError;
pub use layout::{Schema, SchemaError};
pub use session::session;
pub use whole::{LoadError, contents, load};

use error::{Trouble, column, signed, unsigned};
use layout::{KNOWN_LAYOUT, Statements};
use mark::Mark;
use past::Past;
use reads::Reads;
use relay::Relay;
use session::{Connector, check_server, deaf};
use writer::Writer;

/// Connections for reads of one replica. A read takes a millisecond of one, so these serve thousands in a second, and
/// a dozen replicas stay below the hundred connections that a server allows as it is installed.
const POOL: usize = 8;

/// How long callers wait for a database that is away: through a restart or a failover, but not for ever.
const PATIENCE: Duration = Duration::from_secs(10);

/// What to do about a database that lost what it had acknowledged.
const WENT_BACK: &str = "stop every replica, then restore a backup, or save what is left with `ate store backup --accept-loss` and \
                         restore that";

/// Where a store is and how it is used.
#[derive(Clone, Debug)]
pub struct Settings {
    pub address: Address,
    /// All replicas of a control plane name the same one; others in the same database name others.
    pub schema: Schema,
    /// Most connections for reads; the writer and the follower of the feed have one each besides.
    pub pool: usize,
    pub feed: FeedLimits,
    /// How long a commit or a read waits while the database cannot be reached.
    pub patience: Duration,
    /// A file of this replica's machine for what it has seen: the next process notices a database that went back meanwhile.
    pub mark: Option<PathBuf>,
    /// Accept a server with `fsync = off`, which may lose what it acknowledged. For tests of other things.
    pub volatile: bool,
}

impl Settings {
    pub fn new(address: Address) -> Self {
        Self {
            address,
            schema: Schema::default(),
            pool: POOL,
            feed: FeedLimits::default(),
            patience: PATIENCE,
            mark: None,
            volatile: false,
        }
    }
}

/// A store in a schema of a PostgreSQL database, shared with other replicas.
#[derive(Debug)]
pub struct PostgresStore {
    shared: Arc<Shared>,
    reads: Reads,
    writer: Mutex<Option<JoinHandle<()>>>,
    follower: AbortOnDropHandle<()>,
}

/// A commit as it stands in the log. No other line of commits has one of this number from the very same microsecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    revision: Revision,
    entered: SystemTime,
}

/// What the tasks of a store have in common.
pub(crate) struct Shared {
    settings: Settings,
    connector: Connector,
    statements: Statements,
    queue: Queue,
    relay: Relay,
    mark: Option<Mark>,
    /// The newest that was seen, by which the line of commits is known again.
    last: Mutex<Option<Entry>>,
    /// Wakes the follower: there is something in the log that the feed has not shown.
    news: Notify,
    /// The server's name for the writer's session; what it notifies of needs no look into the log.
    writer_session: AtomicI32,
    /// Why this replica must not go on.
    wrong: OnceLock<Fault>,
    stopped: watch::Sender<bool>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("settings", &self.settings).field("relay", &self.relay).finish_non_exhaustive()
    }
}

impl Shared {
    /// Looks at what the database says of itself. A schema that was moved on by a newer program must not be written by this
    /// one, and a database that knows less than was seen of it (restored from a backup, or failed over to a standby that
    /// had not got everything) contradicts every cache that was filled from it. Both end this replica, and a new process that knows
    /// of it by its [`Mark`] does not begin: it would give out generations a second time; a restore does not. `seen` is from before
    /// the head was asked for: the feed moves on meanwhile.
    fn check_head(&self, head: &Row, seen: Revision) -> Result<Revision, Trouble> {
        let layout: i32 = column(head, 0).map_err(Trouble::Wrong)?;
        let revision = Revision(unsigned(head, 1).map_err(Trouble::Wrong)?);
        let reason = if layout != KNOWN_LAYOUT {
            format!("the schema was moved on to layout {layout}, this program knows {KNOWN_LAYOUT}; use a newer one")
        } else if revision < seen {
            format!(
                "revision {seen} was seen, but the database is only at {revision}: what was acknowledged in between is lost; \
                 {WENT_BACK}"
            )
        } else {
            return Ok(revision);
        };
        Err(self.stop(reason))
    }

    /// Asked of each server that commits go to or come from. One that went back may have been brought past what was seen by others
    /// meanwhile: then the numbers say nothing, but what was seen last is not what stands there. An entry that is no longer kept
    /// leaves it at the numbers.
    async fn check_line(&self, client: &Client) -> Result<(), Trouble> {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Entry { revision, entered }) = last else { return Ok(()) };
        let Some(row) = client.query_opt(&self.statements.entered, &[&signed(revision.0)]).await? else {
            return Ok(());
        };
        if column::<SystemTime>(&row, 0).map_err(Trouble::Wrong)? == entered {
            return Ok(());
        }
        Err(self.stop(format!(
            "revision {revision} is not the one that was seen: the database went back and was gone on with, and what was \
             acknowledged is lost; {WENT_BACK}"
        )))
    }

    /// The newest commit that is known here: of the feed, or this replica's own, which the feed may not have come to yet.
    fn seen(&self) -> Revision {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        self.relay.seen().max(last.map_or(Revision(0), |last| last.revision))
    }

    fn remember(&self, entry: Entry) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.revision < entry.revision) {
            *last = Some(entry);
        }
    }

    /// Everything is refused from here on.
    fn stop(&self, reason: String) -> Trouble {
        let fault = Fault::Corrupt { reason };
        tracing::error!(address = %self.settings.address, %fault, "the store stops");
        let _ = self.wrong.set(fault.clone());
        self.queue.close();
        Trouble::Wrong(fault)
    }

    /// Everything up to there is in the database.
    fn saw(&self, revision: Revision) {
        if let Some(mark) = &self.mark {
            mark.note(revision);
        }
    }

    fn is_writer(&self, session: i32) -> bool {
        self.writer_session.load(Ordering::Relaxed) == session
    }

    fn check(&self) -> Result<(), Fault> {
        self.wrong.get().map_or(Ok(()), |fault| Err(fault.clone()))
    }
}

impl PostgresStore {
    /// Connects, brings the schema to the layout that this program knows, and starts to follow the feed.
    pub async fn connect(settings: Settings) -> Result<Self, ConnectError> {
        let address = settings.address.clone();
        let failed = |trouble: Trouble| trouble.at(&address);
        let connector = tokio::task::spawn_blocking({
            let address = address.clone();
            move || Connector::new(&address)
        });
        let connector = connector.await.expect("reading certificates does not panic")?;
        let statements = Statements::new(&settings.schema);
        let mut session = connector.session("opener", deaf()).await.map_err(&failed)?;
        check_server(&session, &address, settings.volatile).await.map_err(&failed)?;
        let found = settings.schema.move_on(&mut session).await.map_err(|error| failed(error.into()))?;
        if found > KNOWN_LAYOUT {
            return Err(ConnectError::TooNew { address, schema: settings.schema, found });
        }
        let head = session.query_one(&statements.head, &[]).await.map_err(|error| failed(error.into()))?;
        let revision = Revision(unsigned(&head, 1).map_err(|fault| failed(Trouble::Wrong(fault)))?);
        let entered = session.query_opt(&statements.entered, &[&signed(revision.0)]).await;
        let entered = entered.and_then(|row| row.map(|row| row.try_get(0)).transpose());
        let entered = entered.map_err(|error| failed(error.into()))?;
        drop(session);
        let mark = open_mark(&settings, revision).await?;

        let reads = Reads::new(&settings, connector.clone());
        let shared = Arc::new(Shared {
            relay: Relay::new(Feed::new(revision, settings.feed), revision),
            mark,
            last: Mutex::new(entered.map(|entered| Entry { revision, entered })),
            settings,
            connector,
            statements,
            queue: Queue::default(),
            news: Notify::new(),
            writer_session: AtomicI32::new(0),
            wrong: OnceLock::new(),
            stopped: watch::Sender::new(false),
        });
        let writer = tokio::spawn(Writer::new(shared.clone()).run());
        let follower = AbortOnDropHandle::new(tokio::spawn(follower::follow(shared.clone())));
        Ok(Self { shared, reads, writer: Mutex::new(Some(writer)), follower })
    }

    /// Commits what is queued and closes the connections; later calls are refused. Watches end. Dropping the store does
    /// the same behind the caller's back.
    pub async fn close(&self) {
        self.shared.queue.close();
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(writer) = writer {
            // A panic has been reported by the panic hook; there is nothing to add.
            let _ = writer.await;
        }
        self.follower.abort();
        self.reads.close();
    }

    /// Resolves once nothing can be committed any more: the store was closed, or what the database holds contradicts what
    /// this replica has seen of it, which is told. The owner of a store that it did not close ends the process then.
    pub async fn stopped(&self) -> Option<Fault> {
        // An error would mean that the sender is gone, but this very store holds it.
        let _ = self.shared.stopped.subscribe().wait_for(|stopped| *stopped).await;
        self.shared.wrong.get().cloned()
    }
}

/// An error if the database knows less than its mark.
async fn open_mark(settings: &Settings, revision: Revision) -> Result<Option<Mark>, ConnectError> {
    let Some(mark) = with_mark(settings, Mark::open).await? else { return Ok(None) };
    check_seen(settings, mark.last(), revision)?;
    Ok(Some(mark))
}

/// What was last seen of the store from here.
async fn seen(settings: &Settings) -> Result<Revision, ConnectError> {
    Ok(with_mark(settings, Mark::read).await?.unwrap_or(Revision::ZERO))
}

async fn with_mark<T: Send + 'static>(
    settings: &Settings,
    work: fn(&Path, String) -> io::Result<T>,
) -> Result<Option<T>, ConnectError> {
    let Some(path) = settings.mark.clone() else { return Ok(None) };
    let (file, of) = (path.clone(), format!("{} {}", settings.address, settings.schema));
    let done = tokio::task::spawn_blocking(move || work(&file, of)).await.expect("reading a file does not panic");
    done.map(Some).map_err(|source| ConnectError::Mark { path, source })
}

fn check_seen(settings: &Settings, seen: Revision, revision: Revision) -> Result<(), ConnectError> {
    match &settings.mark {
        Some(path) if seen > revision => Err(ConnectError::WentBack {
            address: settings.address.clone(),
            schema: settings.schema.clone(),
            seen,
            revision,
            path: path.clone(),
        }),
        _ => Ok(()),
    }
}

impl Drop for PostgresStore {
    fn drop(&mut self) {
        self.shared.queue.close();
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn commit(&self, change: Change) -> Result<Committed, CommitError> {
        self.shared.check()?;
        self.shared.queue.commit(change).await
    }

    async fn get(&self, key: &Key) -> Result<Option<Record>, Fault> {
        self.shared.check()?;
        self.reads.get(&self.shared.statements, key).await
    }

    async fn list(&self, prefix: &Prefix, after: Option<&str>, limit: usize) -> Result<Page, Fault> {
        self.shared.check()?;
        self.reads.list(&self.shared.statements, prefix, after, limit).await
    }

    /// From any revision after which all is in this replica's feed, or else in the log.
    async fn watch(&self, prefixes: &[Prefix], after: Revision) -> Result<Watch, WatchError> {
        let current = self.revision().await?;
        // Otherwise it would depend on the follower's haste what is refused and what is shown.
        if self.shared.relay.seen() < current {
            self.shared.news.notify_one();
            self.shared.relay.reach(current, self.shared.settings.patience).await?;
        }
        match self.shared.relay.feed().watch(prefixes, after, current) {
            Err(refused @ WatchError::Compacted { .. }) => {
                Past::watch(self.shared.clone(), self.reads.clone(), prefixes, after, refused).await
            }
            other => other,
        }
    }

    async fn revision(&self) -> Result<Revision, Fault> {
        self.shared.check()?;
        self.reads.revision(&self.shared.statements).await
    }
}
