//! Snapshots in durable storage, beyond this node's disk.
//!
//! The disk is a cache of it: what is here is read here, what is not is fetched, and what turns out to be damaged is
//! fetched once more. A snapshot is complete where its manifest is, on either side.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use ate_blob::{BlobError, BlobPath, Blobs};
use ate_name::Digest;
use ate_snapshot::{Content, Home, MANIFEST, Manifest, SnapshotKey};
use bytes::Bytes;
use futures::TryStreamExt;
use parking_lot::Mutex;
use tokio::fs::File;

use crate::snapshots::{SnapshotError, Snapshots, write_durably};

/// Longest manifest that is read. One of a snapshot with a hundred images and all features is a tenth of this.
pub(crate) const MAX_MANIFEST: u64 = 1 << 20;

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

pub(crate) fn object(key: &SnapshotKey, name: &str) -> Result<BlobPath, SnapshotError> {
    BlobPath::parse(&format!("{key}/{name}"))
        .map_err(|error| SnapshotError::Unusable { key: key.to_string(), reason: error.to_string() })
}

pub(crate) fn storage(key: &SnapshotKey) -> impl Fn(BlobError) -> SnapshotError {
    move |error| match error {
        BlobError::Missing { .. } => {
            SnapshotError::Missing { key: key.to_string(), whence: "durable storage".to_owned() }
        }
        error => SnapshotError::Storage { key: key.to_string(), source: Box::new(error) },
    }
}

impl Snapshots {
    /// Brings a snapshot of this disk to durable storage: its files, then its manifest, and none of it unless it is as it was
    /// written, because the one before it is removed then. If `heard` says something else by then,
    /// the node may have been given up meanwhile, and the snapshot removed there by another: it stays marked, and so it is found.
    pub(crate) async fn upload(
        self: &Arc<Self>,
        key: &SnapshotKey,
        heard: impl Fn() -> Option<u64>,
    ) -> Result<(), SnapshotError> {
        let Some(blobs) = &self.blobs else { return Ok(()) };
        let flight = self.flights.of(key);
        let _one = flight.lock().await;
        // Brought there before. It may have been removed there since then, and must not come back.
        if self.is_here(key) && !self.is_only_here(key) {
            return Ok(());
        }
        let directory = self.path(key);
        let io = |what| move |source| SnapshotError::Io { what, key: key.to_string(), source };
        let bytes = match tokio::fs::read(directory.join(MANIFEST)).await {
            // Brought there before, and then evicted here.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return blobs.get_bytes(&object(key, MANIFEST)?, MAX_MANIFEST).await.map(drop).map_err(storage(key));
            }
            read => read.map_err(io("read the manifest"))?,
        };
        let manifest = Manifest::read_unverified(&bytes)
            .map_err(|error| SnapshotError::Unusable { key: key.to_string(), reason: error.to_string() })?;
        let digest = Content::of(&bytes).digest;
        self.off_reactor("read the mark", key, move |snapshots, key| snapshots.is_as_marked(key, &digest)).await?;
        let unheard = || SnapshotError::Unheard { key: key.to_string() };
        let before = heard().ok_or_else(unheard)?;
        for file in &manifest.files {
            let described = file.clone();
            let source = self
                .off_reactor("read a file", key, move |snapshots, key| snapshots.open_whole(key, &described))
                .await?;
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
    pub(crate) async fn ensure(
        self: &Arc<Self>,
        key: &SnapshotKey,
        digest: &Digest,
    ) -> Result<Manifest, SnapshotError> {
        let manifest = match self.used(key, digest).await {
            Err(SnapshotError::Missing { .. } | SnapshotError::Unusable { .. }) if self.blobs.is_some() => {
                self.fetch(key, Wanted::With(digest)).await?;
                self.used(key, digest).await?
            }
            other => other?,
        };
        if let Some(base) = &manifest.base
            && !self.is_here(&base.prefix)
        {
            self.fetch(&base.prefix, Wanted::Any).await?;
        }
        Ok(manifest)
    }

    /// The snapshot's manifest; that it and what it is a difference to are used now is noted.
    async fn used(self: &Arc<Self>, key: &SnapshotKey, digest: &Digest) -> Result<Manifest, SnapshotError> {
        let digest = *digest;
        self.off_reactor("read the manifest", key, move |snapshots, key| {
            let manifest = snapshots.manifest(key, &digest)?;
            for used in manifest.base.iter().map(|base| &base.prefix).chain([key]) {
                snapshots.touch(&snapshots.path(used));
            }
            Ok(manifest)
        })
        .await
    }

    /// A disk may make whoever asks it wait.
    async fn off_reactor<T: Send + 'static>(
        self: &Arc<Self>,
        what: &'static str,
        key: &SnapshotKey,
        work: impl FnOnce(&Self, &SnapshotKey) -> Result<T, SnapshotError> + Send + 'static,
    ) -> Result<T, SnapshotError> {
        let (snapshots, at) = (Arc::clone(self), key.clone());
        let done = tokio::task::spawn_blocking(move || work(&snapshots, &at)).await;
        done.unwrap_or_else(|panic| {
            Err(SnapshotError::Io { what, key: key.to_string(), source: std::io::Error::other(panic) })
        })
    }

    /// Puts what durable storage has in the place of what is here.
    pub(crate) async fn fetch_again(
        self: &Arc<Self>,
        key: &SnapshotKey,
        manifest: &Manifest,
    ) -> Result<(), SnapshotError> {
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
    async fn fetch(self: &Arc<Self>, key: &SnapshotKey, wanted: Wanted<'_>) -> Result<(), SnapshotError> {
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
            Wanted::With(digest) => self.used(key, digest).await.is_ok(),
            Wanted::Again => false,
        };
        if done {
            return Ok(());
        }
        let fetched = self.fetch_files(blobs, key, wanted).await;
        if fetched.is_err() {
            let (snapshots, half) = (Arc::clone(self), key.clone());
            let _ = tokio::task::spawn_blocking(move || snapshots.forget_half(&half)).await;
        }
        fetched
    }

    async fn fetch_files(
        self: &Arc<Self>,
        blobs: &Blobs,
        key: &SnapshotKey,
        wanted: Wanted<'_>,
    ) -> Result<(), SnapshotError> {
        let bytes = blobs.get_bytes(&object(key, MANIFEST)?, MAX_MANIFEST).await.map_err(storage(key))?;
        let unusable =
            |error: &dyn std::fmt::Display| SnapshotError::Unusable { key: key.to_string(), reason: error.to_string() };
        let manifest = match wanted {
            Wanted::With(digest) => Manifest::read(&bytes, digest).map_err(|error| unusable(&error))?,
            Wanted::Any | Wanted::Again => Manifest::read_unverified(&bytes).map_err(|error| unusable(&error))?,
        };
        let io = |what| move |source| SnapshotError::Io { what, key: key.to_string(), source };
        let directory = self.path(key);
        tokio::fs::create_dir_all(&directory).await.map_err(io("make the directory"))?;
        for file in &manifest.files {
            // Written beside the final name: a fetch that is cut off leaves nothing that looks like a file of it.
            let temporary = directory.join(format!(".{}", file.name));
            let target = File::create(&temporary).await.map_err(io("make a file"))?.into_std().await;
            let length = blobs.get_to_file(&object(key, file.name.as_str())?, target).await.map_err(storage(key))?;
            if length != file.stored.length {
                return Err(unusable(&format!(
                    "file {} is {length} bytes long, not {}",
                    file.name, file.stored.length
                )));
            }
            let whole = directory.join(file.name.as_str());
            tokio::fs::rename(&temporary, whole).await.map_err(io("name a file"))?;
        }
        let what = "write the manifest";
        self.off_reactor(what, key, move |snapshots, key| {
            let written = write_durably(&snapshots.path(key), MANIFEST, &bytes);
            written.map_err(|source| SnapshotError::Io { what, key: key.to_string(), source })
        })
        .await
    }

    /// Removes a snapshot, here and in durable storage.
    pub(crate) async fn forget(self: &Arc<Self>, key: &SnapshotKey) -> Result<(), SnapshotError> {
        let flight = self.flights.of(key);
        let _one = flight.lock().await;
        let what = "remove the files";
        self.off_reactor(what, key, move |snapshots, key| {
            snapshots.forget_here(key).map_err(|source| SnapshotError::Io { what, key: key.to_string(), source })
        })
        .await?;
        if let Some(blobs) = &self.blobs {
            // Without its manifest it no longer exists, whatever happens next.
            blobs.delete(&object(key, MANIFEST)?).await.map_err(storage(key))?;
            let whole = BlobPath::parse(&key.to_string())
                .map_err(|error| SnapshotError::Unusable { key: key.to_string(), reason: error.to_string() })?;
            blobs.delete(&whole).await.map_err(storage(key))?;
        }
        Ok(())
    }

    /// Removes whatever durable storage has of an actor, also what nobody knows of.
    pub(crate) async fn forget_home(&self, home: &Home) -> Result<(), SnapshotError> {
        let Some(blobs) = &self.blobs else { return Ok(()) };
        let failed = |reason: String| SnapshotError::Unusable { key: home.to_string(), reason };
        let whole = BlobPath::parse(&home.to_string()).map_err(|error| failed(error.to_string()))?;
        let source = |source| SnapshotError::Storage { key: home.to_string(), source: Box::new(source) };
        // First what makes each of them a snapshot: cut off, no half of one is taken for whole.
        let mut objects = blobs.list(&whole);
        while let Some(object) = objects.try_next().await.map_err(source)? {
            if object.path.to_string().ends_with(&format!("/{MANIFEST}")) {
                blobs.delete(&object.path).await.map_err(source)?;
            }
        }
        blobs.delete(&whole).await.map_err(source)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use ate_blob::Backend;
    use ate_snapshot::DataKey;

    use super::*;

    async fn opened(root: &std::path::Path, name: &str) -> Arc<Snapshots> {
        let (storage, scratch) = (root.join("storage"), root.join(name).join("scratch"));
        std::fs::create_dir_all(&storage).unwrap();
        std::fs::create_dir_all(&scratch).unwrap();
        let blobs = Blobs::open(Backend::Directory(storage)).await.unwrap();
        Arc::new(Snapshots::open(&root.join(name).join("snapshots"), &scratch, Some(blobs)).unwrap())
    }

    #[tokio::test]
    async fn what_is_in_storage_as_another_is_not_written_over() {
        let root = tempfile::tempdir().unwrap();
        let (here, there) = (opened(root.path(), "here").await, opened(root.path(), "there").await);
        let seal = DataKey::from_random([1; 32]);
        let (key, manifest) = crate::copy::tests::saved(&here, &seal);
        let (same, other) = crate::copy::tests::saved(&there, &seal);
        assert!(key == same && manifest != other, "each write of a snapshot is sealed anew");
        here.upload(&key, || Some(1)).await.unwrap();
        let refused = there.upload(&key, || Some(1)).await.unwrap_err();
        assert_eq!(crate::orders::from_upload(refused), ate_orders::NodeError::Stale);
        let digest = Content::of(&manifest.to_bytes().unwrap()).digest;
        let third = opened(root.path(), "third").await;
        assert_eq!(third.ensure(&key, &digest).await.unwrap().files, manifest.files, "it is as it was");
    }

    #[tokio::test]
    async fn what_is_damaged_does_not_become_durable() {
        let root = tempfile::tempdir().unwrap();
        let here = opened(root.path(), "here").await;
        let (key, manifest) = crate::copy::tests::saved(&here, &DataKey::from_random([1; 32]));
        let digest = Content::of(&manifest.to_bytes().unwrap()).digest;
        let there = opened(root.path(), "there").await;
        // Still a manifest, of which the actor's record knows nothing.
        let another = |bytes: &[u8]| {
            let text = std::str::from_utf8(bytes).unwrap();
            assert!(text.contains("systrap"));
            text.replace("systrap", "systram").into_bytes()
        };
        let changed = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            *bytes.last_mut().unwrap() ^= 1;
            bytes
        };
        type Damage = fn(&[u8]) -> Vec<u8>;
        let damages: [(&str, Damage); 4] = [
            ("memory", changed),
            ("data", changed),
            ("data", |bytes| bytes[..bytes.len() - 1].to_vec()),
            (MANIFEST, another),
        ];
        for (name, damage) in damages {
            let file = here.path(&key).join(name);
            let whole = std::fs::read(&file).unwrap();
            std::fs::write(&file, damage(&whole)).unwrap();
            let refused = here.upload(&key, || Some(1)).await;
            assert!(matches!(refused, Err(SnapshotError::Unusable { .. })), "{name}: {refused:?}");
            std::fs::remove_file(&file).unwrap();
            if name != MANIFEST {
                let refused = here.upload(&key, || Some(1)).await;
                assert!(matches!(refused, Err(SnapshotError::Unusable { .. })), "{name}: {refused:?}");
            }
            let found = there.ensure(&key, &digest).await;
            assert!(matches!(found, Err(SnapshotError::Missing { .. })), "{name}: {found:?}");
            std::fs::write(&file, whole).unwrap();
        }
        here.upload(&key, || Some(1)).await.unwrap();
        assert_eq!(there.ensure(&key, &digest).await.unwrap().files, manifest.files);
    }

    #[tokio::test]
    async fn a_disk_that_makes_a_fetch_wait_makes_nobody_else_wait() {
        let root = tempfile::tempdir().unwrap();
        let here = opened(root.path(), "here").await;
        let (key, manifest) = crate::copy::tests::saved(&here, &DataKey::from_random([1; 32]));
        let digest = Content::of(&manifest.to_bytes().unwrap()).digest;
        here.upload(&key, || Some(1)).await.unwrap();

        let there = opened(root.path(), "there").await;
        let directory = there.path(&key);
        std::fs::create_dir_all(&directory).unwrap();
        // It cannot be opened for writing until somebody reads, and cannot be flushed then.
        let pipe = directory.join(format!(".{MANIFEST}"));
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let (says, hears) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            let others_go_on = hears.recv_timeout(Duration::from_secs(30)).is_ok();
            std::fs::File::open(pipe).map(|_| others_go_on).unwrap()
        });
        let fetching = tokio::spawn({
            let (there, key) = (Arc::clone(&there), key.clone());
            async move { there.ensure(&key, &digest).await }
        });
        while !manifest.files.iter().all(|file| directory.join(file.name.as_str()).exists()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        says.send(()).unwrap();
        assert!(fetching.await.unwrap().is_err(), "a pipe is no file");
        assert!(reader.join().unwrap(), "this one, for example");
        assert!(!directory.exists(), "no half of it is left");

        assert_eq!(there.ensure(&key, &digest).await.unwrap().files, manifest.files);
        there.forget(&key).await.unwrap();
        assert!(matches!(there.ensure(&key, &digest).await, Err(SnapshotError::Missing { .. })));
    }
}
