//! Durable storage of snapshots: objects in buckets, written once, whole or not at all.
//!
//! A [`BlobPath`] says which object; the [`Backend`] of the instance says where buckets live. Putting is create-only:
//! the same bytes again succeed, so every put may be retried; other bytes are refused, so nobody overwrites what
//! another has acknowledged. What [`Blobs::put_new`] has answered survives the loss of power.
//!
//! ```text
//!   put_new ──▶ Store::create ──▶ Made
//!                            └──▶ Occupied ── equal? ──▶ done, or BlobError::Exists
//!
//!   Directory   <root>/<bucket>/<key>            appears by link(2) after fsync; then its directories are synced
//!               <root>/.unfinished/<process>/    what a process writes or deletes; removed once that process is dead
//!   S3          put, or multipart completed under `If-None-Match: *`
//!   GCS, Azure  put, or multipart to <prefix>/.unfinished-<random>, copied if absent, removed
//! ```
//!
//! An upload that dies between its parts leaves them in the bucket, unseen and billed: give the bucket a lifecycle rule
//! that aborts incomplete multipart uploads. A `.unfinished-` object is listed like any other and goes with its prefix.

mod body;
mod directory;
mod error;
mod path;
mod remote;

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::stream::{BoxStream, StreamExt, TryStreamExt};

use body::Body;
pub use body::Source;
pub use error::{BlobError, reason};
pub use path::{BlobPath, BlobPathError};
pub use remote::{Provider, Settings};

/// How often a put is begun before it is given up, when its answer was lost or its place was emptied in between. The
/// requests that it is made of have retries of their own.
const PUT_ATTEMPTS: u32 = 4;

/// Wait before the second attempt; doubles with each.
const PUT_BACKOFF: Duration = Duration::from_millis(200);

/// Where buckets live.
#[derive(Clone, Debug)]
pub enum Backend {
    /// Below a directory of this machine. Buckets come into being with their first object.
    Directory(PathBuf),
    /// In a service. Buckets must exist.
    Cloud(Provider, Settings),
}

/// An object as a listing shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobInfo {
    pub path: BlobPath,
    pub size: u64,
    pub modified: SystemTime,
}

/// An object that is being read.
pub struct BlobReading {
    pub size: u64,
    /// As many bytes as `size`, or an error.
    pub bytes: BoxStream<'static, Result<Bytes, BlobError>>,
}

impl fmt::Debug for BlobReading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlobReading").field("size", &self.size).finish_non_exhaustive()
    }
}

pub(crate) enum Created {
    Made,
    /// Something is there already, and is durable.
    Occupied,
    /// It is not known whether it was made.
    Unknown(BlobError),
}

#[async_trait]
pub(crate) trait Store: fmt::Debug + Send + Sync {
    async fn create(&self, object: &BlobPath, body: &Body) -> Result<Created, BlobError>;
    async fn read(&self, object: &BlobPath) -> Result<BlobReading, BlobError>;
    async fn size(&self, object: &BlobPath) -> Result<u64, BlobError>;
    fn list(&self, prefix: &BlobPath) -> BoxStream<'static, Result<BlobInfo, BlobError>>;
    async fn delete(&self, path: &BlobPath) -> Result<(), BlobError>;
}

/// The object storage of an instance. Cheap to clone. Its methods must be called within a Tokio runtime.
#[derive(Clone, Debug)]
pub struct Blobs {
    store: Arc<dyn Store>,
}

impl Blobs {
    /// Opens the store. A directory is made and cleaned of what dead processes left in it; a service is not contacted.
    pub async fn open(backend: Backend) -> Result<Self, BlobError> {
        let store: Arc<dyn Store> = match backend {
            Backend::Directory(root) => Arc::new(blocking(move || directory::Directory::open(&root)).await?),
            Backend::Cloud(provider, settings) => Arc::new(remote::Remote::new(provider, settings)?),
        };
        Ok(Self { store })
    }

    /// Puts an object that does not exist yet. Success if it exists with the same content, [`BlobError::Exists`] if with
    /// another. Takes a bounded amount of memory, whatever the size.
    pub async fn put_new(&self, object: &BlobPath, source: impl Into<Source>) -> Result<(), BlobError> {
        check_key(object)?;
        let source = source.into();
        let body = blocking(move || Body::new(source)).await;
        let body = body.map_err(|error| BlobError::Source { object: object.clone(), reason: error::reason(&error) })?;
        let mut last = BlobError::Failed { object: object.clone(), reason: "deleted while it was put".to_owned() };
        for attempt in 0..PUT_ATTEMPTS {
            if attempt > 0 {
                tokio::time::sleep(PUT_BACKOFF * 2u32.pow(attempt - 1)).await;
            }
            match self.store.create(object, &body).await? {
                Created::Made => return Ok(()),
                Created::Unknown(error) => last = error,
                Created::Occupied => match self.holds(object, &body).await {
                    Ok(true) => return Ok(()),
                    Ok(false) => return Err(BlobError::Exists { object: object.clone() }),
                    Err(BlobError::Missing { .. }) => {}
                    Err(error) => return Err(error),
                },
            }
        }
        Err(last)
    }

    async fn holds(&self, object: &BlobPath, body: &Body) -> Result<bool, BlobError> {
        let mut reading = self.store.read(object).await?;
        if reading.size != body.length() {
            return Ok(false);
        }
        let mut offset = 0;
        while let Some(there) = reading.bytes.try_next().await? {
            let ours = body.read(object, offset, there.len()).await?;
            if ours != there {
                return Ok(false);
            }
            offset += there.len() as u64;
        }
        Ok(offset == body.length())
    }

    /// The object's bytes as they come.
    pub async fn read(&self, object: &BlobPath) -> Result<BlobReading, BlobError> {
        check_key(object)?;
        let BlobReading { size, bytes } = self.store.read(object).await?;
        let (object, got) = (object.clone(), 0);
        let bytes = futures::stream::try_unfold((bytes, object, got), move |(mut bytes, object, got)| async move {
            let chunk = bytes.try_next().await?;
            let got = got + chunk.as_ref().map_or(0, Bytes::len) as u64;
            match chunk {
                Some(chunk) if got <= size => Ok(Some((chunk, (bytes, object, got)))),
                None if got == size => Ok(None),
                _ => Err(BlobError::Length { object, expected: size, got }),
            }
        });
        Ok(BlobReading { size, bytes: bytes.boxed() })
    }

    /// All of an object; refused if it is longer than `limit`.
    pub async fn get_bytes(&self, object: &BlobPath, limit: u64) -> Result<Bytes, BlobError> {
        let mut reading = self.read(object).await?;
        if reading.size > limit {
            return Err(BlobError::TooLarge { object: object.clone(), size: reading.size, limit });
        }
        let mut all = BytesMut::with_capacity(usize::try_from(reading.size).unwrap_or_default());
        while let Some(chunk) = reading.bytes.try_next().await? {
            all.extend_from_slice(&chunk);
        }
        Ok(all.freeze())
    }

    /// Writes an object to `target` from its start, which may be a memfd; returns how long it is. Nothing is synced.
    pub async fn get_to_file(&self, object: &BlobPath, target: File) -> Result<u64, BlobError> {
        let BlobReading { size, mut bytes } = self.read(object).await?;
        let (target, mut offset) = (Arc::new(target), 0);
        while let Some(chunk) = bytes.try_next().await? {
            let (target, length) = (target.clone(), chunk.len() as u64);
            let written = blocking(move || target.write_all_at(&chunk, offset)).await;
            written.map_err(|error| BlobError::Target { object: object.clone(), reason: error::reason(&error) })?;
            offset += length;
        }
        Ok(size)
    }

    /// How long the object is; `None` if there is none.
    pub async fn size(&self, object: &BlobPath) -> Result<Option<u64>, BlobError> {
        check_key(object)?;
        match self.store.size(object).await {
            Ok(size) => Ok(Some(size)),
            Err(BlobError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Every object below a prefix, in no promised order, fetched page by page as the stream is read. Leaves out names
    /// that no [`BlobPath`] can have: nobody put them through here.
    pub fn list(&self, prefix: &BlobPath) -> BoxStream<'static, Result<BlobInfo, BlobError>> {
        self.store.list(prefix)
    }

    /// Removes the object at `path` and all that lies below it. Nothing there is success. A snapshot's manifest should go
    /// first, by a call of its own: an interrupted deletion must not leave a manifest without its files.
    pub async fn delete(&self, path: &BlobPath) -> Result<(), BlobError> {
        check_key(path)?;
        self.store.delete(path).await
    }
}

fn check_key(path: &BlobPath) -> Result<(), BlobError> {
    if path.key().is_empty() { Err(BlobError::WholeBucket { path: path.clone() }) } else { Ok(()) }
}

/// Runs what may block off the reactor.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is going away and will not poll this again.
            Err(_) => std::future::pending().await,
        },
    }
}
