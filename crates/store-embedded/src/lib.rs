//! The store on one machine: a directory, one writer, no server.
//!
//! Committers queue; one thread takes all that waits, judges each change against the state left by those before it,
//! and makes the group durable with a single flush. Answers and events leave only after the flush. Reads go straight
//! to a snapshot of the engine and never wait for the writer; those of single records share threads (`reader.rs`).
//!
//! ```text
//!   commit ─┐ bounded                ┌─ one engine transaction ─┐
//!   commit ─┼─ queue ── writer ──────┤ guards, puts, revision   ├─ flush ─ answers ─ feed ─ watchers
//!   commit ─┘           (a group)    └──────────────────────────┘
//!
//!   <directory>/LOCK          held while open; names the process
//!              /FORMAT        "ate-store 1", written once the store is complete
//!              /MARK          the last revision that was acknowledged
//!              /LINE          which opening of the store this was last
//!              /records/      the engine's files
//!   <directory>.mark           both of these once more: an older copy that was put in the place of the directory is refused
//! ```
//!
//! When a write fails (disk full, I/O error) its group is answered [`Fault::Unavailable`] and the engine is opened
//! anew from what the disk holds, so that the store serves again as soon as the disk does.
//! Why fjall, with numbers: `docs/store.md`.

mod codec;
mod directory;
pub mod engine;
mod fjall;
mod outside;
mod reader;
mod whole;
mod writer;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard};
use std::thread::JoinHandle;

use async_trait::async_trait;
use ate_store::{
    Change, CommitError, Committed, Fault, Feed, FeedLimits, Key, Page, PageFiller, Prefix, Queue, Record, Revision,
    Store, Watch, WatchError,
};
use tokio::sync::watch;

pub use crate::directory::OpenError;
pub use crate::fjall::FjallEngine;
pub use crate::whole::{LoadError, Loaded, contents, load};

use crate::directory::Directory;
use crate::engine::{Engine, Opener, Reads};
use crate::writer::{Writer, open_engine};

/// The engine's block cache. It holds the parts of indexes and filters that are in use; the kernel caches the rest.
const CACHE_BYTES: u64 = 64 << 20;

/// What gathers before a sorted file is written. Larger means fewer files to merge, but more memory, and more to replay after a
/// crash.
const MEMORY_BYTES: u64 = 32 << 20;

const RECORDS: &str = "records";

fn usual_engine() -> Opener {
    Box::new(|directory| Ok(Box::new(FjallEngine::open(&directory.join(RECORDS), CACHE_BYTES, MEMORY_BYTES)?)))
}

#[derive(Debug)]
pub struct EmbeddedStore {
    shared: Arc<Shared>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

pub(crate) struct Shared {
    /// Empty while the engine is being reopened, and after the store is closed.
    slot: RwLock<Option<Box<dyn Engine>>>,
    queue: Queue,
    reader: reader::Reader,
    feed: Feed,
    stopped: watch::Sender<bool>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("queue", &self.queue).field("feed", &self.feed).finish_non_exhaustive()
    }
}

impl Shared {
    fn slot(&self) -> RwLockWriteGuard<'_, Option<Box<dyn Engine>>> {
        self.slot.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock is held while `work` runs, so that a reopen waits for the readers of the old engine.
    fn with_engine<T>(&self, work: impl FnOnce(&dyn Engine) -> Result<T, Fault>) -> Result<T, Fault> {
        let slot = self.slot.read().unwrap_or_else(PoisonError::into_inner);
        match &*slot {
            Some(engine) => work(&**engine),
            None => {
                Err(Fault::Unavailable { reason: "the store is closed, or failed and not reopened yet".to_owned() })
            }
        }
    }

    fn read<T>(&self, work: impl FnOnce(&dyn Reads) -> Result<T, Fault>) -> Result<T, Fault> {
        self.with_engine(|engine| {
            let mut work = Some(work);
            let mut result = None;
            engine.read(&mut |reads| {
                if let Some(work) = work.take() {
                    result = Some(work(reads)?);
                }
                Ok(())
            })?;
            Ok(result.expect("an engine runs the work before it returns Ok"))
        })
    }
}

impl EmbeddedStore {
    /// Opens the store in `directory`, or creates one there. Blocks on the disk; call it off the reactor.
    pub fn open(directory: &Path, feed: FeedLimits) -> Result<Self, OpenError> {
        Self::open_with(directory, feed, usual_engine())
    }

    /// As [`EmbeddedStore::open`], on another engine.
    pub fn open_with(directory: &Path, feed: FeedLimits, opener: Opener) -> Result<Self, OpenError> {
        let mut directory = Directory::lock_or_begin(&outside::resolve(directory))?;
        let path = directory.path().to_owned();
        let complete = directory.is_store()?;
        let opened = open_engine(&opener, &directory);
        let (engine, revision) = opened.map_err(|source| OpenError::Fault { directory: path.clone(), source })?;
        if complete {
            directory.check_outside(revision)?;
        } else {
            directory.mark_as_store()?;
        }
        directory.say_outside(revision)?;
        let shared = Arc::new(Shared {
            slot: RwLock::new(Some(engine)),
            queue: Queue::default(),
            reader: reader::Reader::default(),
            feed: Feed::new(revision, feed),
            stopped: watch::Sender::new(false),
        });
        let writer = Writer { shared: shared.clone(), opener, directory };
        let writer = std::thread::Builder::new()
            .name("ate-store-writer".to_owned())
            .spawn(|| writer.run())
            .map_err(|source| OpenError::Io { action: "start the writer of", path, source })?;
        Ok(Self { shared, writer: Mutex::new(Some(writer)) })
    }

    /// Commits what is queued, closes the engine and unlocks the directory; later calls are refused. Watches end.
    /// Blocks for at most the flushes under way. Dropping the store does the same.
    pub fn close(&self) {
        self.shared.queue.close();
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(writer) = writer {
            // A panic of the engine has been reported by the panic hook; there is nothing to add.
            let _ = writer.join();
        }
    }

    /// Resolves once nothing can be committed any more: the store was closed, or its engine panicked. The owner of a
    /// store that it did not close ends the process then; a new one recovers from the disk.
    pub async fn stopped(&self) {
        // An error would mean that the sender is gone, but this very store holds it.
        let _ = self.shared.stopped.subscribe().wait_for(|stopped| *stopped).await;
    }

    /// What the engine's block cache holds now. Nothing while no engine is open.
    pub fn cached_bytes(&self) -> u64 {
        self.shared.with_engine(|engine| Ok(engine.cached_bytes())).unwrap_or(0)
    }

    /// Reads off the reactor: a page that is not cached is a disk access.
    async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Reads) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Fault> {
        let shared = self.shared.clone();
        match tokio::task::spawn_blocking(move || shared.read(work)).await {
            Ok(result) => result,
            // Engines assert what they expect of their own files.
            Err(error) if error.is_panic() => Err(Fault::Corrupt { reason: format!("the engine gave up: {error}") }),
            Err(_) => Err(Fault::Unavailable { reason: "the runtime is shutting down".to_owned() }),
        }
    }
}

impl Drop for EmbeddedStore {
    fn drop(&mut self) {
        self.close();
    }
}

#[async_trait]
impl Store for EmbeddedStore {
    async fn commit(&self, change: Change) -> Result<Committed, CommitError> {
        self.shared.queue.commit(change).await
    }

    async fn get(&self, key: &Key) -> Result<Option<Record>, Fault> {
        self.shared.record(key).await
    }

    async fn list(&self, prefix: &Prefix, after: Option<&str>, limit: usize) -> Result<Page, Fault> {
        let (prefix, after) = (prefix.clone(), after.map(str::to_owned));
        self.read(move |reads| {
            let mut filler = PageFiller::new(codec::read_revision(reads)?, limit);
            codec::scan_records(reads, &prefix, after.as_deref(), &mut |record| filler.push(record))?;
            Ok(filler.page())
        })
        .await
    }

    async fn watch(&self, prefixes: &[Prefix], after: Revision) -> Result<Watch, WatchError> {
        let current = self.revision().await?;
        self.shared.feed.watch(prefixes, after, current)
    }

    async fn revision(&self) -> Result<Revision, Fault> {
        self.read(|reads| codec::read_revision(reads)).await
    }
}
