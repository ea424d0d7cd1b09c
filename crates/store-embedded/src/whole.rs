//! A directory read as a whole, and written as a whole.
//!
//! ```text
//!   <directory>.restoring/FORMAT   "ate-store restore not finished": nobody opens it
//!                        /records  filled, flushed
//!                        /FORMAT   "ate-store 1", written last
//!   ──▶ takes the place of <directory> in one step; what was there is <directory>.replaced-<seconds> from then on, and
//!       <directory>.mark no longer takes it for the store that belongs there
//! ```

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ate_store::{
    Contents, Counts, Entry, Fault, IfOccupied, LostTail, MAX_CHANGE_BYTES, Mutation, Replacement, Revision,
};
use futures::{StreamExt, stream};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinError;

use crate::codec;
use crate::directory::{Directory, OpenError};
use crate::engine::{Engine, Finish, Reads};
use crate::outside::{self, Outside, beside, sync_parent};
use crate::usual_engine;
use crate::writer::{open_engine, open_what_is_left};

/// Entries between the engine and whoever takes them; values are a KiB or so.
const ON_THE_WAY: usize = 256;

/// Mutations in one transaction of a load, which also ends at [`MAX_CHANGE_BYTES`] of values.
const BATCH: usize = 1000;

/// Reads the store in `directory`, which stays locked until the contents are dropped. Nothing is written.
pub async fn contents(directory: &Path, tail: LostTail) -> Result<Contents, OpenError> {
    let directory = &*outside::resolve(directory);
    let path = directory.to_owned();
    let (tell, told) = oneshot::channel();
    let (entries, arriving) = mpsc::channel(ON_THE_WAY);
    let reading = tokio::task::spawn_blocking(move || {
        let opened = Directory::lock_store(&path).and_then(|directory| {
            let opened = match tail {
                LostTail::Refuse => open_engine(&usual_engine(), &directory),
                LostTail::Accept => open_what_is_left(&usual_engine(), &directory),
            };
            let (engine, revision) = opened.map_err(|source| OpenError::Fault { directory: path, source })?;
            if tail == LostTail::Refuse {
                directory.check_outside(revision)?;
            }
            let seen = Outside::said(directory.path())?.map_or(Revision::ZERO, |said| said.revision);
            let acknowledged = directory.acknowledged().max(seen);
            Ok((directory, engine, revision, acknowledged))
        });
        let (_directory, engine) = match opened {
            Ok((directory, engine, revision, acknowledged)) => {
                let _ = tell.send(Ok((revision, (acknowledged > revision).then_some(acknowledged))));
                (directory, engine)
            }
            Err(error) => return drop(tell.send(Err(error))),
        };
        let scanned = engine
            .read(&mut |reads| codec::scan_everything(reads, &mut |entry| entries.blocking_send(Ok(entry)).is_ok()));
        if let Err(fault) = scanned {
            let _ = entries.blocking_send(Err(fault));
        }
    });
    let gave_up = || Fault::Corrupt { reason: "the engine gave up on its files".to_owned() };
    let Ok(opened) = told.await else {
        return Err(OpenError::Fault { directory: directory.to_owned(), source: gave_up() });
    };
    let (revision, lost) = opened?;
    let state = (arriving, Some(reading));
    let entries = stream::unfold(state, move |(mut arriving, mut reading)| async move {
        if let Some(entry) = arriving.recv().await {
            return Some((entry, (arriving, reading)));
        }
        // A reader that panicked has not shown everything.
        let ended: Result<(), JoinError> = reading.take()?.await;
        ended.err().map(|_| (Err(gave_up()), (arriving, None)))
    });
    Ok(Contents { revision, lost, entries: entries.boxed() })
}

/// Why a store was not put in a directory. What was there is there still.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(
        "{directory} holds a store already ({counts}); choose another directory, or say --replace to move it aside"
    )]
    Occupied { directory: PathBuf, counts: Counts },
    #[error("{directory} holds a store already ({found}); choose another directory, or say --replace to move it aside")]
    Unreadable { directory: PathBuf, found: String },
    #[error("{directory} holds files that are no store; choose another directory, or move them away")]
    NoStore { directory: PathBuf },
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("cannot write the records into {directory}")]
    Fault { directory: PathBuf, source: Fault },
    #[error("what is to be loaded cannot be read")]
    Source(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("cannot {action} {path}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Where what was there before is now.
    pub moved_aside: Option<PathBuf>,
}

/// Makes a store in `directory` that holds what the replacement's mutations come to; all of it, or nothing that could be taken
/// for a store. `replacement` is told what was acknowledged of the store that was there.
pub async fn load(
    directory: &Path,
    occupied: IfOccupied,
    replacement: impl FnOnce(Revision) -> Replacement + Send + 'static,
) -> Result<Loaded, LoadError> {
    let directory = outside::resolve(directory);
    let handle = Handle::current();
    let loading = tokio::task::spawn_blocking(move || Load::new(directory).run(occupied, &handle, replacement));
    loading.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

struct Load {
    directory: PathBuf,
    staging: PathBuf,
}

/// What is where a store is to be.
enum There {
    Nothing,
    /// To be moved out of the way, and not used by anybody meanwhile.
    Something {
        lock: Directory,
        worth_keeping: bool,
    },
}

impl There {
    fn acknowledged(&self) -> Revision {
        match self {
            Self::Nothing => Revision::ZERO,
            // The mark, not the engine, which may have lost its end, or be the damage that the restore is the remedy of.
            Self::Something { lock, .. } => lock.acknowledged(),
        }
    }
}

impl Load {
    fn new(directory: PathBuf) -> Self {
        let staging = beside(&directory, "restoring");
        Self { directory, staging }
    }

    fn run(
        &self,
        occupied: IfOccupied,
        handle: &Handle,
        replacement: impl FnOnce(Revision) -> Replacement,
    ) -> Result<Loaded, LoadError> {
        let there = self.look(occupied)?;
        // What is there may be an older copy, or nothing, where more was acknowledged.
        let seen = Outside::said(&self.directory)?.map_or(Revision::ZERO, |said| said.revision);
        let staged = self.stage()?;
        let replacement = replacement(there.acknowledged().max(seen));
        let revision = replacement.revision;
        if let Err(error) = self.fill(&staged, handle, replacement) {
            // Of no use to anybody; and if it cannot be removed, nobody opens it.
            let _ = fs::remove_dir_all(&self.staging);
            return Err(error);
        }
        self.put_in_place(&there, revision)
    }

    fn look(&self, occupied: IfOccupied) -> Result<There, LoadError> {
        let io = |source| LoadError::Io { action: "look into", path: self.directory.clone(), source };
        match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(There::Nothing),
            Err(source) => return Err(io(source)),
            Ok(mut entries) => {
                if entries.next().is_none() {
                    return Ok(There::Nothing);
                }
            }
        }
        // What is no store, or one of a newer program, is not moved, whatever is asked for.
        let lock = match Directory::lock_store(&self.directory) {
            Err(OpenError::Missing { directory }) => return Err(LoadError::NoStore { directory }),
            other => other?,
        };
        if occupied == IfOccupied::Replace {
            return Ok(There::Something { lock, worth_keeping: true });
        }
        let refused = |found: String| LoadError::Unreadable { directory: self.directory.clone(), found };
        let (engine, _) = open_engine(&usual_engine(), &lock).map_err(|fault| refused(fault.to_string()))?;
        let mut counts = Counts::default();
        let counted = engine.read(&mut |reads: &dyn Reads| {
            codec::scan_everything(reads, &mut |entry| {
                if let Entry::Record(record) = entry {
                    counts.add(record.key.kind());
                }
                true
            })
        });
        counted.map_err(|fault| refused(fault.to_string()))?;
        match counts.total() {
            0 => Ok(There::Something { lock, worth_keeping: false }),
            _ => Err(LoadError::Occupied { directory: self.directory.clone(), counts }),
        }
    }

    /// A new directory beside the one that it will replace, hence on the same file system.
    fn stage(&self) -> Result<Directory, LoadError> {
        if self.staging.exists() {
            // What a restore that was cut off has left, unless one is under way.
            let left = Directory::lock(&self.staging)?;
            match left.is_store() {
                // Cut off at its very end: this may be what was there before.
                Ok(true) => drop(self.move_aside()?),
                _ => fs::remove_dir_all(&self.staging).map_err(|source| LoadError::Io {
                    action: "remove",
                    path: self.staging.clone(),
                    source,
                })?,
            }
        }
        let staged = Directory::lock(&self.staging)?;
        staged.mark_as_unfinished()?;
        Ok(staged)
    }

    fn fill(&self, staged: &Directory, handle: &Handle, replacement: Replacement) -> Result<(), LoadError> {
        let Replacement { revision, mut mutations } = replacement;
        let fault = |source| LoadError::Fault { directory: self.staging.clone(), source };
        let (engine, _) = open_engine(&usual_engine(), staged).map_err(fault)?;
        let mut batch = Vec::new();
        let mut bytes = 0;
        while let Some(mutation) = handle.block_on(mutations.next()) {
            let mutation = mutation.map_err(LoadError::Source)?;
            bytes += if let Mutation::Put(record) = &mutation { record.value.len() } else { 0 };
            batch.push(mutation);
            if batch.len() == BATCH || bytes >= MAX_CHANGE_BYTES {
                write(&*engine, &batch, None).map_err(fault)?;
                (batch, bytes) = (Vec::new(), 0);
            }
        }
        write(&*engine, &batch, Some(revision)).map_err(fault)?;
        drop(engine);
        let mark = |source| LoadError::Io { action: "mark", path: self.staging.clone(), source };
        staged.mark(revision).map_err(mark)?;
        Ok(staged.mark_as_store()?)
    }

    fn put_in_place(&self, there: &There, revision: Revision) -> Result<Loaded, LoadError> {
        let io = |source| LoadError::Io { action: "put the new store at", path: self.directory.clone(), source };
        Outside::replace(&self.directory, &self.staging, revision, || {
            match there {
                There::Nothing => fs::rename(&self.staging, &self.directory).map_err(io)?,
                // In one step, so that nobody finds no store here and makes an empty one.
                There::Something { .. } => {
                    renameat_with(CWD, &self.staging, CWD, &self.directory, RenameFlags::EXCHANGE)
                        .map_err(|error| io(error.into()))?;
                }
            }
            sync_parent(&self.directory).map_err(io)
        })?;
        let moved_aside = match there {
            There::Nothing => None,
            There::Something { worth_keeping: true, .. } => Some(self.move_aside()?),
            There::Something { worth_keeping: false, .. } => {
                fs::remove_dir_all(&self.staging).map_err(io)?;
                None
            }
        };
        sync_parent(&self.directory).map_err(io)?;
        Ok(Loaded { moved_aside })
    }

    /// Keeps what is in the staging directory under a name that nobody uses again.
    fn move_aside(&self) -> Result<PathBuf, LoadError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut names = (now..).map(|second| beside(&self.directory, &format!("replaced-{second}")));
        let aside = names.find(|name| !name.exists()).expect("there are more seconds than directories");
        fs::rename(&self.staging, &aside).map_err(|source| LoadError::Io {
            action: "move aside",
            path: self.staging.clone(),
            source,
        })?;
        Ok(aside)
    }
}

fn write(engine: &dyn Engine, mutations: &[Mutation], revision: Option<Revision>) -> Result<(), Fault> {
    engine.write(&mut |writes| {
        for mutation in mutations {
            let key = mutation.key();
            let key = codec::key_bytes(key.kind(), key.path());
            match mutation {
                Mutation::Put(record) => writes.put(&key, &codec::encode(record))?,
                Mutation::Deleted(_) => writes.remove(&key)?,
            }
        }
        if let Some(revision) = revision {
            writes.put(codec::REVISION_KEY, &codec::encode_revision(revision))?;
        }
        Ok(Finish::Commit)
    })
}
