use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};

use ate_store::{Fault, Revision};

use crate::outside::Outside;

/// The layout this code writes. One that is newer is refused: an older program would read it wrongly.
const FORMAT: u32 = 1;
const FORMAT_NAME: &str = "ate-store";
const FORMAT_FILE: &str = "FORMAT";
const LOCK_FILE: &str = "LOCK";
const MARK_FILE: &str = "MARK";

/// Why a directory could not be opened as a store.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("the store in {directory} is in use by process {holder}; stop it, or choose another directory")]
    InUse { directory: PathBuf, holder: String },
    #[error("the store in {directory} has format {found}, this program knows formats up to {FORMAT}; use a newer one")]
    TooNew { directory: PathBuf, found: u32 },
    #[error("there is no store in {directory}")]
    Missing { directory: PathBuf },
    #[error(
        "{directory} is not a store: {reason}; choose another directory, or remove this one if a restore was cut off in it"
    )]
    NotAStore { directory: PathBuf, reason: String },
    #[error(
        "the store in {directory}, at revision {found}, is not the one that was last used there, at revision {seen} by what {mark} says: an older copy was put in its place, or another store"
    )]
    Another { directory: PathBuf, mark: PathBuf, seen: Revision, found: Revision },
    #[error("there is no store in {directory}, but there was one, at revision {seen} by what {mark} says")]
    Gone { directory: PathBuf, mark: PathBuf, seen: Revision },
    #[error("cannot open the store in {directory}")]
    Fault { directory: PathBuf, source: Fault },
    #[error("cannot {action} {path}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

/// Whoever gave the lock back may have forked just before: until the child has become its program, it holds all we have open.
fn try_for_a_moment(lock: &File) -> Result<(), TryLockError> {
    for _ in 0..50 {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(std::time::Duration::from_millis(10)),
            tried => return tried,
        }
    }
    lock.try_lock()
}

fn has_format(directory: &Path) -> Result<bool, OpenError> {
    let file = directory.join(FORMAT_FILE);
    file.try_exists().map_err(|source| OpenError::Io { action: "look for", path: file, source })
}

/// A directory that this process alone may use until the value is dropped.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// Held, not read: the kernel releases the lock with the last descriptor, however the process ends.
    _lock: File,
    mark: File,
    /// Only whoever writes to the store says so outside.
    outside: Option<Outside>,
}

impl Directory {
    pub(crate) fn lock(path: &Path) -> Result<Self, OpenError> {
        let io = |action, path: &Path| {
            let path = path.to_owned();
            move |source| OpenError::Io { action, path, source }
        };
        // Records name tenants and their workloads: nobody's business but the owner's.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(io("create", path))?;
        let file = path.join(LOCK_FILE);
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&file)
            .map_err(io("open", &file))?;
        match try_for_a_moment(&lock) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // Only for the message; the lock is held whatever the file says.
                let _ = lock.read_to_string(&mut holder);
                let holder = if holder.is_empty() { "unknown".to_owned() } else { holder.trim().to_owned() };
                return Err(OpenError::InUse { directory: path.to_owned(), holder });
            }
            Err(TryLockError::Error(source)) => return Err(io("lock", &file)(source)),
        }
        let write_pid = |lock: &mut File| {
            lock.set_len(0)?;
            lock.rewind()?;
            writeln!(lock, "{}", std::process::id())
        };
        write_pid(&mut lock).map_err(io("write", &file))?;
        let file = path.join(MARK_FILE);
        let mark = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&file);
        let mark = mark.map_err(io("open", &file))?;
        Ok(Self { path: path.to_owned(), _lock: lock, mark, outside: None })
    }

    /// As [`Directory::lock`], to write to the store there, or to a new one where there was none. Nothing is made if there was.
    pub(crate) fn lock_or_begin(path: &Path) -> Result<Self, OpenError> {
        if !has_format(path)? {
            Outside::check_nothing_was_in(path)?;
        }
        Self::lock(path)
    }

    /// As [`Directory::lock`], but makes nothing where there is no store.
    pub(crate) fn lock_store(path: &Path) -> Result<Self, OpenError> {
        if !has_format(path)? {
            return Err(OpenError::Missing { directory: path.to_owned() });
        }
        let directory = Self::lock(path)?;
        directory.is_store()?;
        Ok(directory)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a store was ever completed here. The format file is written last, so without it there is either
    /// nothing or a creation that a crash cut short.
    pub(crate) fn is_store(&self) -> Result<bool, OpenError> {
        let file = self.path.join(FORMAT_FILE);
        let text = match fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(source) => return Err(OpenError::Io { action: "read", path: file, source }),
        };
        let not_a_store = |reason| OpenError::NotAStore { directory: self.path.clone(), reason };
        let found = text.trim().strip_prefix(FORMAT_NAME).and_then(|rest| rest.trim().parse::<u32>().ok());
        match found {
            Some(found) if found > FORMAT => Err(OpenError::TooNew { directory: self.path.clone(), found }),
            Some(_) => Ok(true),
            None => Err(not_a_store(format!("its {FORMAT_FILE} file reads {:?}", text.trim()))),
        }
    }

    pub(crate) fn mark_as_store(&self) -> Result<(), OpenError> {
        self.write_format(&FORMAT.to_string())
    }

    /// Nobody takes it for a store, nor for one whose creation was cut short, until it is marked as one.
    pub(crate) fn mark_as_unfinished(&self) -> Result<(), OpenError> {
        self.write_format("restore not finished")
    }

    fn write_format(&self, format: &str) -> Result<(), OpenError> {
        let (file, temporary) = (self.path.join(FORMAT_FILE), self.path.join("FORMAT.new"));
        let write = || {
            let mut new = File::create(&temporary)?;
            writeln!(new, "{FORMAT_NAME} {format}")?;
            new.sync_all()?;
            fs::rename(&temporary, &file)?;
            File::open(&self.path)?.sync_all()
        };
        write().map_err(|source| OpenError::Io { action: "write", path: file.clone(), source })
    }

    /// Notes that everything up to `revision` was durable. Not flushed itself: it survives the process, and after a
    /// power cut it may lag, but it never runs ahead.
    pub(crate) fn mark(&self, revision: Revision) -> io::Result<()> {
        // Twice, so that half a write is no mark.
        self.mark.write_all_at(&[revision.0.to_le_bytes(); 2].concat(), 0)?;
        self.outside.as_ref().map_or(Ok(()), |outside| outside.note(revision))
    }

    /// Whether it is the directory that was last used as this store, now that it turns out to be at `revision`.
    pub(crate) fn check_outside(&self, revision: Revision) -> Result<(), OpenError> {
        Outside::check(&self.path, revision)
    }

    /// Says outside, from now on, what is acknowledged.
    pub(crate) fn say_outside(&mut self, revision: Revision) -> Result<(), OpenError> {
        self.outside = Some(Outside::begin(&self.path, revision)?);
        Ok(())
    }

    /// Everything up to there was acknowledged, by what the mark says.
    pub(crate) fn acknowledged(&self) -> Revision {
        let (mut once, mut again) = ([0; 8], [0; 8]);
        let read = self.mark.read_exact_at(&mut once, 0).and_then(|()| self.mark.read_exact_at(&mut again, 8));
        // Never written, or cut short: then it claims nothing.
        if read.is_err() || once != again {
            return Revision::ZERO;
        }
        Revision(u64::from_le_bytes(once))
    }

    /// Refuses an engine that came back with less than was acknowledged. An engine may take damage in the middle of
    /// its journal for the torn end that a power cut leaves, and drop all that follows without a word.
    pub(crate) fn check_mark(&self, revision: Revision) -> Result<(), Fault> {
        let marked = self.acknowledged();
        if revision < marked {
            let reason = format!(
                "revision {marked} was acknowledged, but only {revision} is left; restore a backup, or save what is left with `ate store backup --accept-loss` and restore that"
            );
            return Err(Fault::Corrupt { reason });
        }
        Ok(())
    }
}
