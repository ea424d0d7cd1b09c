//! Buckets below a directory of this machine.
//!
//! Every path is walked segment by segment from the root's descriptor, and no step follows a symbolic link: whatever
//! lies in the directory, nothing outside of it is read or written.

use std::ffi::CStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use futures::stream::{BoxStream, StreamExt};
use rustix::fs::{self as sys, AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use tempfile::{NamedTempFile, TempDir};
use tokio::sync::mpsc;

use crate::{BlobError, BlobInfo, BlobPath, BlobReading, Body, Created, Store, blocking, error};

/// How much is read or copied at a time.
const CHUNK: usize = 1 << 20;

/// Entries that a listing reads ahead of whoever consumes it.
const LIST_AHEAD: usize = 256;

/// Name of the directory for what is not finished; no bucket begins with a dot.
const UNFINISHED: &str = ".unfinished";

/// Held while `.unfinished` is looked through, and in each process's own directory while it lives.
const LOCK: &str = "lock";

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);
const REGULAR: OFlags = OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

#[derive(Clone, Debug)]
pub(crate) struct Directory {
    root: Arc<Root>,
}

#[derive(Debug)]
struct Root {
    descriptor: OwnedFd,
    /// Removed with this value; by the next process that opens the root if this one dies.
    unfinished: TempDir,
    _lock: File,
}

impl Directory {
    pub(crate) fn open(root: &Path) -> Result<Self, BlobError> {
        let open = || {
            // Snapshots are the memory of programs: nobody else on the machine may read them.
            DirBuilder::new().recursive(true).mode(0o700).create(root)?;
            let unfinished = root.join(UNFINISHED);
            DirBuilder::new().recursive(true).mode(0o700).create(&unfinished)?;
            File::open(root)?.sync_all()?;
            // Those that were there before need no sync, and may not be ours to open.
            for above in root.canonicalize()?.ancestors().skip(1) {
                let _ = File::open(above).and_then(|above| above.sync_all());
            }
            let turn = lock(&unfinished)?;
            sys::flock(&turn, FlockOperation::LockExclusive)?;
            remove_leftovers(&unfinished)?;
            let own = TempDir::new_in(&unfinished)?;
            let alive = lock(own.path())?;
            sys::flock(&alive, FlockOperation::LockExclusive)?;
            Ok(Root { descriptor: sys::openat(CWD, root, DIRECTORY, Mode::empty())?, unfinished: own, _lock: alive })
        };
        let failed = |error: io::Error| BlobError::Open { reason: format!("{}: {}", root.display(), error) };
        Ok(Self { root: Arc::new(open().map_err(failed)?) })
    }
}

fn lock(directory: &Path) -> io::Result<File> {
    File::options().create(true).append(true).open(directory.join(LOCK))
}

/// Removes what processes that are dead were working on: their locks are free.
fn remove_leftovers(unfinished: &Path) -> io::Result<()> {
    for entry in fs::read_dir(unfinished)? {
        let path = entry?.path();
        if path.is_dir() && sys::flock(lock(&path)?, FlockOperation::NonBlockingLockExclusive).is_ok() {
            fs::remove_dir_all(&path)?;
        }
    }
    Ok(())
}

/// The directories of an object, from its bucket down, and its own name.
struct Place<'a> {
    directories: Vec<OwnedFd>,
    segments: Vec<&'a str>,
    name: &'a str,
    /// Depth of the first directory that was not there before.
    made: Option<usize>,
}

impl Place<'_> {
    fn parent(&self) -> &OwnedFd {
        self.directories.last().expect("the bucket's directory at least")
    }
}

impl Root {
    fn place<'a>(&self, path: &'a BlobPath, make: bool) -> io::Result<Place<'a>> {
        let mut segments: Vec<_> = std::iter::once(path.bucket()).chain(path.key().split('/')).collect();
        let name = segments.pop().expect("a bucket and a key");
        let mut directories: Vec<OwnedFd> = Vec::with_capacity(segments.len());
        let mut made = None;
        for (depth, segment) in segments.iter().enumerate() {
            let parent = directories.last().unwrap_or(&self.descriptor);
            if make {
                match sys::mkdirat(parent, *segment, Mode::RWXU) {
                    Ok(()) => made = made.or(Some(depth)),
                    Err(Errno::EXIST) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            directories.push(sys::openat(parent, *segment, DIRECTORY, Mode::empty())?);
        }
        Ok(Place { directories, segments, name, made })
    }

    /// Makes an entry outlive the loss of power: its directory, and each that was made for it. A directory that another
    /// process made a moment ago may be unsynced; file systems with a journal write it before what came after it.
    fn sync(&self, place: &Place<'_>) -> io::Result<()> {
        let first = match place.made {
            Some(0) => sys::fsync(&self.descriptor).map(|()| 0)?,
            Some(made) => made - 1,
            None => place.directories.len() - 1,
        };
        place.directories[first..].iter().try_for_each(|directory| Ok(sys::fsync(directory)?))
    }

    fn object(&self, object: &BlobPath) -> Result<(File, u64), BlobError> {
        let open = || {
            let place = self.place(object, false)?;
            let file = File::from(sys::openat(place.parent(), place.name, REGULAR, Mode::empty())?);
            let metadata = file.metadata()?;
            if metadata.is_file() { Ok((file, metadata.len())) } else { Err(io::ErrorKind::NotFound.into()) }
        };
        open().map_err(|error| match is_absence(&error) {
            true => BlobError::Missing { object: object.clone() },
            false => BlobError::disk(object, "open it")(error),
        })
    }

    fn create(&self, object: &BlobPath, body: &Body) -> Result<Created, BlobError> {
        let disk = BlobError::disk(object, "write it");
        let mut file = None;
        loop {
            if self.is_occupied(object).map_err(&disk)? {
                return Ok(Created::Occupied);
            }
            let file = match &mut file {
                Some(file) => file,
                none => none.insert(self.write(object, body)?),
            };
            let link = || {
                let place = self.place(object, true)?;
                sys::linkat(CWD, file.path(), place.parent(), place.name, AtFlags::empty())?;
                self.sync(&place)
            };
            match link() {
                Ok(()) => return Ok(Created::Made),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                // A deletion took a directory, which was empty until now.
                Err(error) if error.kind() == io::ErrorKind::NotFound && file.path().exists() => {}
                Err(error) => return Err(disk(error)),
            }
        }
    }

    /// Whether an object is there. If so, it is durable when this returns, whoever put it.
    fn is_occupied(&self, object: &BlobPath) -> io::Result<bool> {
        let look = || {
            let place = self.place(object, false)?;
            let stat = sys::statat(place.parent(), place.name, AtFlags::SYMLINK_NOFOLLOW)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                return Err(io::Error::other("there is something at its name that is no object"));
            }
            self.sync(&place)
        };
        match look() {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn write(&self, object: &BlobPath, body: &Body) -> Result<NamedTempFile, BlobError> {
        let disk = BlobError::disk(object, "write it");
        let mut file = NamedTempFile::new_in(self.unfinished.path()).map_err(&disk)?;
        let mut offset = 0;
        while offset < body.length() {
            let length = usize::try_from(body.length() - offset).map_or(CHUNK, |rest| rest.min(CHUNK));
            let piece = body.read_at(offset, length);
            let piece =
                piece.map_err(|error| BlobError::Source { object: object.clone(), reason: error::reason(&error) })?;
            file.write_all(&piece).map_err(&disk)?;
            offset += length as u64;
        }
        file.as_file().sync_all().map_err(disk)?;
        Ok(file)
    }

    fn delete(&self, path: &BlobPath) -> io::Result<()> {
        let place = self.place(path, false)?;
        // A tree leaves its name at once, and is taken apart afterwards.
        let grave = TempDir::new_in(self.unfinished.path())?;
        sys::renameat(place.parent(), place.name, CWD, grave.path().join("it"))?;
        sys::fsync(place.parent())?;
        grave.close()?;
        for depth in (1..place.directories.len()).rev() {
            if sys::unlinkat(&place.directories[depth - 1], place.segments[depth], AtFlags::REMOVEDIR).is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Calls `found` for every object below `prefix` until it says no.
    fn visit(&self, prefix: &BlobPath, found: &mut dyn FnMut(BlobInfo) -> bool) -> io::Result<()> {
        let mut top = self.descriptor.as_fd().try_clone_to_owned()?;
        for segment in std::iter::once(prefix.bucket()).chain(prefix.key().split('/').filter(|key| !key.is_empty())) {
            top = sys::openat(&top, segment, DIRECTORY, Mode::empty())?;
        }
        let mut stack = vec![(Dir::new(top)?, prefix.clone())];
        while let Some((directory, path)) = stack.last_mut() {
            let Some(entry) = directory.read() else {
                stack.pop();
                continue;
            };
            let entry = entry?;
            let Some(child) = child(path, entry.file_name()) else { continue };
            let stat = match sys::statat(directory.fd()?, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            };
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => {
                    match sys::openat(directory.fd()?, entry.file_name(), DIRECTORY, Mode::empty()) {
                        Ok(below) => stack.push((Dir::new(below)?, child)),
                        Err(Errno::NOENT) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                FileType::RegularFile => {
                    let seconds = Duration::from_secs(u64::try_from(stat.st_mtime).unwrap_or_default());
                    let size = u64::try_from(stat.st_size).unwrap_or_default();
                    if !found(BlobInfo { path: child, size, modified: UNIX_EPOCH + seconds }) {
                        return Ok(());
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Nothing is there; neither is there anything below an object.
fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn child(path: &BlobPath, name: &CStr) -> Option<BlobPath> {
    let name = name.to_str().ok()?;
    path.with_key(&if path.key().is_empty() { name.to_owned() } else { format!("{}/{name}", path.key()) })
}

#[async_trait]
impl Store for Directory {
    async fn create(&self, object: &BlobPath, body: &Body) -> Result<Created, BlobError> {
        let (root, object, body) = (self.root.clone(), object.clone(), body.clone());
        blocking(move || root.create(&object, &body)).await
    }

    async fn read(&self, object: &BlobPath) -> Result<BlobReading, BlobError> {
        let (root, path) = (self.root.clone(), object.clone());
        let (file, size) = blocking(move || root.object(&path)).await?;
        let (file, object) = (Arc::new(file), object.clone());
        let bytes = futures::stream::try_unfold(0, move |offset| {
            let (file, object) = (file.clone(), object.clone());
            async move {
                let read = move || {
                    let mut chunk = vec![0; CHUNK];
                    let length = file.read_at(&mut chunk, offset)?;
                    chunk.truncate(length);
                    Ok(chunk)
                };
                let chunk = blocking(read).await.map_err(BlobError::disk(&object, "read it"))?;
                let next = offset + chunk.len() as u64;
                Ok((!chunk.is_empty()).then(|| (chunk.into(), next)))
            }
        });
        Ok(BlobReading { size, bytes: bytes.boxed() })
    }

    async fn size(&self, object: &BlobPath) -> Result<u64, BlobError> {
        let (root, path) = (self.root.clone(), object.clone());
        Ok(blocking(move || root.object(&path)).await?.1)
    }

    fn list(&self, prefix: &BlobPath) -> BoxStream<'static, Result<BlobInfo, BlobError>> {
        let (root, prefix) = (self.root.clone(), prefix.clone());
        let (sender, receiver) = mpsc::channel(LIST_AHEAD);
        tokio::task::spawn_blocking(move || {
            match root.visit(&prefix, &mut |info| sender.blocking_send(Ok(info)).is_ok()) {
                Err(error) if !is_absence(&error) => {
                    let _ = sender.blocking_send(Err(BlobError::disk(&prefix, "list it")(error)));
                }
                _ => {}
            }
        });
        futures::stream::unfold(receiver, |mut receiver| async { Some((receiver.recv().await?, receiver)) }).boxed()
    }

    async fn delete(&self, path: &BlobPath) -> Result<(), BlobError> {
        let (root, target) = (self.root.clone(), path.clone());
        match blocking(move || root.delete(&target)).await {
            Err(error) if !is_absence(&error) => Err(BlobError::disk(path, "delete it")(error)),
            _ => Ok(()),
        }
    }
}
