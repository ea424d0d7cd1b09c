//! Snapshots in durable storage, beyond this node's disk.
//!
//! The disk is a cache of it: what is here is read here, what is not is fetched, and what turns out to be damaged is
//! fetched once more. A snapshot is complete where its manifest is, on either side.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use ate_blob::{BlobError, BlobPath, Blobs};
use ate_name::Digest;
use ate_snapshot::{MANIFEST, Manifest, SnapshotKey};
use bytes::Bytes;
use parking_lot::Mutex;

use crate::snapshots::{SnapshotError, Snapshots};

/// Longest manifest that is read. One of a snapshot with a hundred images and all features is a tenth of this.
const MAX_MANIFEST: u64 = 1 << 20;

/// What is fetched, and when it need not be.
#[derive(Clone, Copy)]
enum Wanted<'a> {
    /// Nothing, if a snapshot is here.
    Any,
    /// Nothing, if the one with this manifest is here.
    With(&'a Digest),
    /// Everything: what is here has turned out to be damaged.
    Again,
}

/// One thing at a time is done to a snapshot, or to an actor: a hundred actors of a template want the same golden, an order
/// is given twice, and what is being uploaded is to be removed.
#[derive(Debug)]
pub(crate) struct Flights<K, F = tokio::sync::Mutex<()>>(Mutex<HashMap<K, Weak<F>>>);

impl<K, F> Default for Flights<K, F> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Clone + Eq + std::hash::Hash, F: Default> Flights<K, F> {
    pub(crate) fn of(&self, key: &K) -> Arc<F> {
        let mut flights = self.0.lock();
        flights.retain(|_, flight| flight.strong_count() > 0);
        if let Some(flight) = flights.get(key).and_then(Weak::upgrade) {
            return flight;
        }
        let flight = Arc::<F>::default();
        flights.insert(key.clone(), Arc::downgrade(&flight));
        flight
    }

    /// If it has begun, and somebody still waits for it.
    pub(crate) fn find(&self, key: &K) -> Option<Arc<F>> {
        self.0.lock().get(key).and_then(Weak::upgrade)
    }
}

fn object(key: &SnapshotKey, name: &str) -> Result<BlobPath, SnapshotError> {
    BlobPath::parse(&format!("{key}/{name}"))
        .map_err(|error| SnapshotError::Unusable { key: key.to_string(), reason: error.to_string() })
}

fn storage(key: &SnapshotKey) -> impl Fn(BlobError) -> SnapshotError {
    move |error| match error {
        BlobError::Missing { .. } => {
            SnapshotError::Missing { key: key.to_string(), whence: "durable storage".to_owned() }
        }
        error => SnapshotError::Storage { key: key.to_string(), source: Box::new(error) },
    }
}

impl Snapshots {
    /// Brings a snapshot of this disk to durable storage: its files, then its manifest. If `heard` says something else by then,
    /// the node may have been given up meanwhile, and the snapshot removed there by another: it stays marked, and so it is found.
    pub(crate) async fn upload(&self, key: &SnapshotKey, heard: impl Fn() -> Option<u64>) -> Result<(), SnapshotError> {
        let Some(blobs) = &self.blobs else { return Ok(()) };
        let flight = self.flights.of(key);
        let _one = flight.lock().await;
        // Brought there before. It may have been removed there since then, and must not come back.
        if self.is_here(key) && !self.is_only_here(key) {
            return Ok(());
        }
        let directory = self.path(key);
        let io = |what| move |source| SnapshotError::Io { what, key: key.to_string(), source };
        let bytes = match read(directory.join(MANIFEST)).await {
            // Brought there before, and then evicted here.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return blobs.get_bytes(&object(key, MANIFEST)?, MAX_MANIFEST).await.map(drop).map_err(storage(key));
            }
            read => read.map_err(io("read the manifest"))?,
        };
        let manifest = Manifest::read_unverified(&bytes)
            .map_err(|error| SnapshotError::Unusable { key: key.to_string(), reason: error.to_string() })?;
        let unheard = || SnapshotError::Unheard { key: key.to_string() };
        let before = heard().ok_or_else(unheard)?;
        for file in &manifest.files {
            let source = File::open(directory.join(file.name.as_str())).map_err(io("open a file"))?;
            blobs.put_new(&object(key, file.name.as_str())?, source).await.map_err(storage(key))?;
        }
        blobs.put_new(&object(key, MANIFEST)?, Bytes::from(bytes)).await.map_err(storage(key))?;
        if heard() != Some(before) {
            return Err(unheard());
        }
        self.is_durable(key);
        Ok(())
    }

    /// The snapshot's manifest, after seeing to it that the snapshot and what it is a difference to are on this disk.
    pub(crate) async fn ensure(&self, key: &SnapshotKey, digest: &Digest) -> Result<Manifest, SnapshotError> {
        let manifest = match self.manifest(key, digest) {
            Err(SnapshotError::Missing { .. } | SnapshotError::Unusable { .. }) if self.blobs.is_some() => {
                self.fetch(key, Wanted::With(digest)).await?;
                self.manifest(key, digest)?
            }
            other => other?,
        };
        self.touch(&self.path(key));
        if let Some(base) = &manifest.base {
            if !self.is_here(&base.prefix) {
                self.fetch(&base.prefix, Wanted::Any).await?;
            }
            self.touch(&self.path(&base.prefix));
        }
        Ok(manifest)
    }

    /// Puts what durable storage has in the place of what is here.
    pub(crate) async fn fetch_again(&self, key: &SnapshotKey, manifest: &Manifest) -> Result<(), SnapshotError> {
        let base = manifest.base.as_ref().map(|base| base.prefix.clone());
        for key in base.iter().chain([key]) {
            self.forget_base(key);
            self.fetch(key, Wanted::Again).await?;
        }
        Ok(())
    }

    pub(crate) fn has_tier(&self) -> bool {
        self.blobs.is_some()
    }

    /// Whether durable storage may have what is to be in the place of what is here.
    pub(crate) fn can_fetch(&self, key: &SnapshotKey) -> bool {
        self.blobs.is_some() && !self.is_only_here(key)
    }

    /// Each file takes its old one's place once it is whole, so that what is here is never less than it was.
    async fn fetch(&self, key: &SnapshotKey, wanted: Wanted<'_>) -> Result<(), SnapshotError> {
        let Some(blobs) = &self.blobs else {
            return Err(SnapshotError::Missing { key: key.to_string(), whence: "this node's disk".to_owned() });
        };
        // Durable storage has nothing to put in its place, and that is no reason to go back to an older one: it is here.
        if self.is_only_here(key) {
            let reason = "it cannot be read, and is on this node's disk only".to_owned();
            return Err(SnapshotError::Unusable { key: key.to_string(), reason });
        }
        let flight = self.flights.of(key);
        let _one = flight.lock().await;
        let done = match wanted {
            Wanted::Any => self.is_here(key),
            Wanted::With(digest) => self.manifest(key, digest).is_ok(),
            Wanted::Again => false,
        };
        if done {
            return Ok(());
        }
        self.fetch_files(blobs, key, wanted).await.inspect_err(|_| self.forget_half(key))
    }

    async fn fetch_files(&self, blobs: &Blobs, key: &SnapshotKey, wanted: Wanted<'_>) -> Result<(), SnapshotError> {
        let bytes = blobs.get_bytes(&object(key, MANIFEST)?, MAX_MANIFEST).await.map_err(storage(key))?;
        let unusable =
            |error: &dyn std::fmt::Display| SnapshotError::Unusable { key: key.to_string(), reason: error.to_string() };
        let manifest = match wanted {
            Wanted::With(digest) => Manifest::read(&bytes, digest).map_err(|error| unusable(&error))?,
            Wanted::Any | Wanted::Again => Manifest::read_unverified(&bytes).map_err(|error| unusable(&error))?,
        };
        let io = |what| move |source| SnapshotError::Io { what, key: key.to_string(), source };
        let directory = self.path(key);
        std::fs::create_dir_all(&directory).map_err(io("make the directory"))?;
        for file in &manifest.files {
            // Written beside the final name: a fetch that is cut off leaves nothing that looks like a file of it.
            let temporary = directory.join(format!(".{}", file.name));
            let target = File::create(&temporary).map_err(io("make a file"))?;
            let length = blobs.get_to_file(&object(key, file.name.as_str())?, target).await.map_err(storage(key))?;
            if length != file.stored.length {
                return Err(unusable(&format!(
                    "file {} is {length} bytes long, not {}",
                    file.name, file.stored.length
                )));
            }
            std::fs::rename(&temporary, directory.join(file.name.as_str())).map_err(io("name a file"))?;
        }
        crate::snapshots::write_durably(&directory, MANIFEST, &bytes).map_err(io("write the manifest"))
    }

    /// Removes a snapshot, here and in durable storage.
    pub(crate) async fn forget(&self, key: &SnapshotKey) -> Result<(), SnapshotError> {
        let flight = self.flights.of(key);
        let _one = flight.lock().await;
        self.forget_here(key).map_err(|source| SnapshotError::Io {
            what: "remove the files",
            key: key.to_string(),
            source,
        })?;
        if let Some(blobs) = &self.blobs {
            // Without its manifest it no longer exists, whatever happens next.
            blobs.delete(&object(key, MANIFEST)?).await.map_err(storage(key))?;
            let whole = BlobPath::parse(&key.to_string())
                .map_err(|error| SnapshotError::Unusable { key: key.to_string(), reason: error.to_string() })?;
            blobs.delete(&whole).await.map_err(storage(key))?;
        }
        Ok(())
    }
}

async fn read(path: PathBuf) -> std::io::Result<Vec<u8>> {
    let read = tokio::task::spawn_blocking(move || std::fs::read(Path::new(&path))).await;
    read.map_err(std::io::Error::other).flatten()
}
