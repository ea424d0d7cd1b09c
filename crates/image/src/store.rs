use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ate_name::Digest;
use futures::future::{FutureExt, try_join_all};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, RenameFlags, flock, renameat_with, syncfs};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tokio::sync::Semaphore;

use crate::document::{Architecture, Compression, ConfigFile, Document, Kind, select};
use crate::flight::Flights;
use crate::meter::{Allowance, CancelOnDrop};
use crate::source::{Source, blocking};
use crate::tree::is_opaque;
use crate::unpack::{Expected, unpack_layer};
use crate::user::{self, User, UserError};
use crate::{Cause, Credentials, ImageConfig, ImageError, Limits, Reference, StoreError};

/// Layers that are fetched and unpacked at the same time, of all images: unpacking is bound by disk and cores.
const LAYERS_AT_ONCE: usize = 4;

/// An image that is not complete after this long is given up; what was unpacked stays.
const PULL_DEADLINE: Duration = Duration::from_secs(60 * 60);

/// The images of a node, on its disk. Several processes may share one.
pub struct ImageStore {
    disk: Arc<Disk>,
    /// Keyed by credentials too: nobody is refused for the wrong password of somebody else.
    pulls: Flights<(Reference, Option<Credentials>), Result<Image, ImageError>>,
}

impl std::fmt::Debug for ImageStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageStore").field("root", &self.disk.root).finish_non_exhaustive()
    }
}

/// An image that is on this node and stays there while this or a clone of it lives.
#[derive(Clone, Debug)]
pub struct Image {
    /// As asked for: of the index, or of the manifest.
    pub digest: Digest,
    pub config: ImageConfig,
    /// Unpacked layers, topmost first: the `lowerdir` of an overlayfs.
    pub layers: Vec<PathBuf>,
    pub lease: Lease,
}

impl Image {
    /// Who the image's process runs as.
    pub fn user(&self) -> Result<User, UserError> {
        user::resolve(&self.config.user, &self.layers)
    }
}

/// Keeps an image from eviction, in every process. Ends with its last clone, and with its process unless
/// another has a copy of its [descriptor](Lease::descriptor).
#[derive(Clone, Debug)]
pub struct Lease {
    record: Arc<File>,
}

impl Lease {
    /// A lease lasts as long as any copy of this descriptor, in any process: who must outlive this one takes a copy along.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.record.as_fd()
    }
}

/// What an eviction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Eviction {
    pub images: usize,
    pub freed_bytes: u64,
    /// What all layers together still take; above the budget if the rest is leased.
    pub remaining_bytes: u64,
}

impl ImageStore {
    /// Opens the store in `directory`, making it if need be, and removes what processes that died left half done.
    /// Blocks: for use at start.
    pub fn open(directory: &Path, limits: Limits) -> Result<Self, StoreError> {
        if !rustix::process::geteuid().is_root() {
            return Err(StoreError::NotRoot { path: directory.to_owned() });
        }
        let io = StoreError::io::<io::Error>;
        for directory in [directory, &directory.join("images"), &directory.join("layers"), &directory.join("ingest")] {
            // Layers hold setuid files of strangers: no other account of the machine may reach them.
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
            made.map_err(io("create", directory))?;
        }
        let root = directory.canonicalize().map_err(io("resolve", directory))?;
        if root.to_str().is_none_or(|path| path.contains([':', ',', '\\'])) {
            return Err(StoreError::Path { path: root });
        }
        let lock = lock(&root, FlockOperation::LockExclusive)?;
        remove_leftovers(&root.join("ingest"))?;
        let ingest = Ingest::new(&root.join("ingest"))?;
        drop(lock);
        let (permits, layers) = (Semaphore::new(LAYERS_AT_ONCE), Flights::new());
        Ok(Self { disk: Arc::new(Disk { root, limits, ingest, permits, layers }), pulls: Flights::new() })
    }

    /// The image, pulled if the node does not have it. Callers that want the same at the same time share one pull,
    /// which goes on while one of them is left.
    pub async fn ensure(&self, reference: &Reference, credentials: Option<&Credentials>) -> Result<Image, ImageError> {
        let failed = |cause| ImageError { reference: reference.clone(), cause };
        let (disk, digest) = (self.disk.clone(), reference.digest());
        if let Some(image) = blocking(move || disk.image(digest)).await.map_err(|error| failed(error.into()))? {
            return Ok(image);
        }
        let key = (reference.clone(), credentials.cloned());
        let (pull, _) = self.pulls.join(key.clone(), || {
            let disk = self.disk.clone();
            let (reference, credentials) = key;
            async move {
                let pull = tokio::time::timeout(PULL_DEADLINE, disk.pull(&reference, credentials.as_ref())).await;
                let minutes = PULL_DEADLINE.as_secs() / 60;
                pull.unwrap_or(Err(Cause::TimedOut { minutes })).map_err(|cause| ImageError { reference, cause })
            }
            .boxed()
        });
        pull.await
    }

    /// Removes images, the longest unused first, until all layers together take at most `budget_bytes`. Never one
    /// that is leased, nor a layer that a remaining image has. Also removes layers of images that were never completed.
    pub async fn evict_to(&self, budget_bytes: u64) -> Result<Eviction, StoreError> {
        let disk = self.disk.clone();
        blocking(move || disk.evict_to(budget_bytes)).await
    }
}

/// The record of an image, in `images/`.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    config: ImageConfig,
    /// Topmost first, each once.
    layers: Vec<Digest>,
}

#[derive(Debug, Serialize, Deserialize)]
struct LayerSize {
    bytes: u64,
}

struct Disk {
    root: PathBuf,
    limits: Limits,
    ingest: Ingest,
    permits: Semaphore,
    layers: Flights<Digest, Result<(), Cause>>,
}

impl Disk {
    fn record_path(&self, digest: Digest) -> PathBuf {
        self.root.join("images").join(digest.to_string())
    }

    fn layer_path(&self, diff_id: Digest) -> PathBuf {
        self.root.join("layers").join(diff_id.to_string())
    }

    /// The image if it is complete, leased and marked as used.
    fn image(&self, digest: Digest) -> Result<Option<Image>, StoreError> {
        let _lock = lock(&self.root, FlockOperation::LockShared)?;
        let path = self.record_path(digest);
        let Some((file, Some(record))) = open_record(&path)? else { return Ok(None) };
        let touched = file.set_modified(SystemTime::now());
        touched.map_err(StoreError::io("mark as used", &path))?;
        let complete = record.layers.iter().all(|diff_id| self.layer_path(*diff_id).exists());
        if complete { self.leased(digest, record, file).map(Some) } else { Ok(None) }
    }

    /// The image of a record whose layers are all there.
    fn leased(&self, digest: Digest, record: Record, file: File) -> Result<Image, StoreError> {
        let mut layers = Vec::new();
        for diff_id in record.layers {
            let layer = self.layer_path(diff_id).join("fs");
            let hides_the_rest = is_opaque(open_directory(&layer)?).map_err(StoreError::io("inspect", &layer))?;
            layers.push(layer);
            // Overlayfs does not look for the mark on the root of a layer.
            if hides_the_rest {
                break;
            }
        }
        Ok(Image { digest, config: record.config, layers, lease: Lease { record: Arc::new(file) } })
    }

    async fn pull(self: Arc<Self>, reference: &Reference, credentials: Option<&Credentials>) -> Result<Image, Cause> {
        let digest = reference.digest();
        let source = Arc::new(Source::open(reference, credentials).await?);
        let (config, layers) = self.resolve(&source, digest).await?;
        // A layer that occurs twice shows only where it is topmost, and overlayfs refuses the same directory twice.
        let mut topmost: Vec<Expected> = Vec::new();
        for layer in layers.into_iter().rev() {
            if topmost.iter().all(|above| above.diff_id != layer.diff_id) {
                topmost.push(layer);
            }
        }
        let record = Record { config, layers: topmost.iter().map(|layer| layer.diff_id).collect() };
        let disk = self.clone();
        let (record, file) = blocking(move || disk.pin(digest, record)).await?;
        let allowance = Arc::new(Allowance::new(&self.limits));
        let _cancel = CancelOnDrop(allowance.clone());
        try_join_all(topmost.into_iter().map(|layer| self.layer(&source, layer, &allowance))).await?;
        tracing::info!(%reference, layers = record.layers.len(), "pulled image");
        Ok(blocking(move || self.leased(digest, record, file)).await?)
    }

    /// The config and the layers, lowest first, of what `digest` means on this machine.
    async fn resolve(&self, source: &Source, digest: Digest) -> Result<(ImageConfig, Vec<Expected>), Cause> {
        let mut document = Document::parse(&source.manifest(digest).await?)?;
        if let Kind::Index(manifests) = document {
            let chosen = select(manifests, Architecture::HOST)?;
            document = Document::parse(&source.manifest(chosen.digest.0).await?)?;
        }
        let Kind::Manifest { config, layers } = document else {
            let reason = "the entry of the index for this machine is an index again".to_owned();
            return Err(Cause::Malformed { what: "index", reason });
        };
        let (count, size) =
            (layers.len() as u64, layers.iter().fold(0, |sum: u64, layer| sum.saturating_add(layer.size)));
        for (what, amount, limit) in
            [("number of layers", count, self.limits.layers), ("compressed size", size, self.limits.image_bytes)]
        {
            if amount > limit {
                return Err(Cause::TooLarge { what, limit });
            }
        }
        let config = source.config(&config, self.ingest.path()).await?;
        let config = ConfigFile::parse(&config, layers.len(), Architecture::HOST)?;
        let layers = layers.iter().zip(&config.rootfs.diff_ids).map(|(layer, diff_id)| {
            let compression = Compression::of_layer(&layer.media_type)?;
            Ok(Expected { digest: layer.digest.0, size: layer.size, diff_id: diff_id.0, compression })
        });
        let layers = layers.collect::<Result<_, Cause>>()?;
        Ok((config.config, layers))
    }

    /// Writes the record of an image whose layers may still be missing, under a lease from the start.
    fn pin(&self, digest: Digest, record: Record) -> Result<(Record, File), StoreError> {
        let _lock = lock(&self.root, FlockOperation::LockExclusive)?;
        let path = self.record_path(digest);
        if let Some((file, Some(_))) = open_record(&path)? {
            return Ok((record, file));
        }
        let io = StoreError::io::<io::Error>;
        let new = tempfile::NamedTempFile::new_in(self.ingest.path());
        let mut new = new.map_err(io("write to", self.ingest.path()))?;
        flock(&new, FlockOperation::LockShared).map_err(StoreError::io("lock", new.path()))?;
        let json = serde_json::to_vec(&record).expect("a record has no keys but strings");
        new.write_all(&json).and_then(|()| new.as_file().sync_all()).map_err(io("write", new.path()))?;
        let file = new.persist(&path).map_err(|error| io("write", &path)(error.error))?;
        sync_directory(&self.root.join("images"))?;
        Ok((record, file))
    }

    /// Sees to it that a layer is there, together with all other images that want it now.
    async fn layer(
        self: &Arc<Self>,
        source: &Arc<Source>,
        layer: Expected,
        allowance: &Arc<Allowance>,
    ) -> Result<(), Cause> {
        loop {
            if tokio::fs::try_exists(self.layer_path(layer.diff_id)).await.unwrap_or(false) {
                return Ok(());
            }
            let (fetch, is_ours) = self.layers.join(layer.diff_id, || {
                self.clone().fetch_layer(source.clone(), layer.clone(), allowance.clone()).boxed()
            });
            match fetch.await {
                // It failed with the source, the credentials or the cancellation of another image.
                Err(_) if !is_ours => continue,
                result => return result,
            }
        }
    }

    async fn fetch_layer(
        self: Arc<Self>,
        source: Arc<Source>,
        layer: Expected,
        allowance: Arc<Allowance>,
    ) -> Result<(), Cause> {
        let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
        let blob = source.blob(layer.digest, layer.size, self.ingest.path()).await?;
        let disk = self.clone();
        blocking(move || disk.unpack(blob, &layer, &allowance)).await
    }

    fn unpack(&self, blob: impl Read, layer: &Expected, allowance: &Allowance) -> Result<(), Cause> {
        let io = StoreError::io::<io::Error>;
        let work = tempfile::Builder::new().prefix("layer-").tempdir_in(self.ingest.path());
        let work = work.map_err(io("write to", self.ingest.path()))?;
        let root = work.path().join("fs");
        fs::create_dir(&root).map_err(io("create", &root))?;
        let bytes = unpack_layer(blob, layer, &root, allowance)
            .map_err(|source| Cause::Layer { layer: layer.digest, source: Arc::new(source) })?;
        let size = work.path().join("size.json");
        let json = serde_json::to_vec(&LayerSize { bytes }).expect("a number is valid JSON");
        fs::write(&size, json).map_err(io("write", &size))?;
        // One flush of the file system: a layer has thousands of files, and a flush of each takes minutes.
        let directory = open_directory(work.path())?;
        syncfs(&directory).map_err(StoreError::io("flush", work.path()))?;
        let layer = self.layer_path(layer.diff_id);
        match renameat_with(CWD, work.path(), CWD, &layer, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(sync_directory(&self.root.join("layers"))?),
            // Another process was faster.
            Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(StoreError::io("create", &layer)(errno).into()),
        }
    }

    fn evict_to(&self, budget: u64) -> Result<Eviction, StoreError> {
        let lock = lock(&self.root, FlockOperation::LockExclusive)?;
        let mut layers = self.layer_sizes()?;
        let mut images = self.records()?;
        let mut users: HashMap<Digest, usize> = HashMap::new();
        for diff_id in images.iter().flat_map(|(_, _, record)| &record.layers) {
            *users.entry(*diff_id).or_default() += 1;
        }
        let trash = tempfile::tempdir_in(self.ingest.path());
        let trash = trash.map_err(StoreError::io("write to", self.ingest.path()))?;
        let orphans: Vec<_> = layers.keys().filter(|diff_id| !users.contains_key(diff_id)).copied().collect();
        let mut eviction = Eviction { remaining_bytes: layers.values().sum(), ..Eviction::default() };
        let mut discard = |diff_id: Digest, eviction: &mut Eviction| {
            let Some(bytes) = layers.remove(&diff_id) else { return Ok(()) };
            let path = self.layer_path(diff_id);
            let moved = fs::rename(&path, trash.path().join(diff_id.to_string()));
            moved.map_err(StoreError::io("remove", &path))?;
            eviction.freed_bytes += bytes;
            eviction.remaining_bytes -= bytes;
            Ok(())
        };
        orphans.into_iter().try_for_each(|diff_id| discard(diff_id, &mut eviction))?;

        images.sort_by_key(|(_, used, _)| *used);
        for (path, _, record) in images {
            let complete = record.layers.iter().all(|diff_id| self.layer_path(*diff_id).exists());
            if complete && eviction.remaining_bytes <= budget {
                continue;
            }
            let file = File::open(&path).map_err(StoreError::io("open", &path))?;
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                continue;
            }
            fs::remove_file(&path).map_err(StoreError::io("remove", &path))?;
            eviction.images += 1;
            for diff_id in record.layers {
                let count = users.get_mut(&diff_id).expect("counted above");
                *count -= 1;
                if *count == 0 {
                    discard(diff_id, &mut eviction)?;
                }
            }
        }
        drop(lock);
        // Slow, and nobody sees it any more.
        trash.close().map_err(StoreError::io("empty", self.ingest.path()))?;
        Ok(eviction)
    }

    /// Every layer and about what it takes on disk.
    fn layer_sizes(&self) -> Result<HashMap<Digest, u64>, StoreError> {
        let directory = self.root.join("layers");
        let layers = list(&directory)?.into_iter().filter_map(|(name, path)| {
            let bytes = fs::read(path.join("size.json")).ok();
            let size = bytes.and_then(|bytes| serde_json::from_slice::<LayerSize>(&bytes).ok());
            Some((Digest::parse(&name).ok()?, size.map_or(0, |size| size.bytes)))
        });
        Ok(layers.collect())
    }

    fn records(&self) -> Result<Vec<(PathBuf, SystemTime, Record)>, StoreError> {
        let mut records = Vec::new();
        for (_, path) in list(&self.root.join("images"))? {
            // One that cannot be read has no layers that anybody knows.
            let Some((file, Some(record))) = open_record(&path)? else { continue };
            let used = file.metadata().and_then(|metadata| metadata.modified());
            records.push((path.clone(), used.map_err(StoreError::io("inspect", &path))?, record));
        }
        Ok(records)
    }
}

/// The record under a shared lock; without content if it is damaged or of another version.
fn open_record(path: &Path) -> Result<Option<(File, Option<Record>)>, StoreError> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(StoreError::io("open", path))?,
    };
    flock(&file, FlockOperation::LockShared).map_err(StoreError::io("lock", path))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(StoreError::io("read", path))?;
    Ok(Some((file, serde_json::from_slice(&bytes).ok())))
}

fn list(directory: &Path) -> Result<Vec<(String, PathBuf)>, StoreError> {
    let list = fs::read_dir(directory).and_then(|entries| {
        entries
            .map(|entry| entry.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path())))
            .collect()
    });
    list.map_err(StoreError::io::<io::Error>("list", directory))
}

fn lock(root: &Path, operation: FlockOperation) -> Result<File, StoreError> {
    let path = root.join("lock");
    let lock = File::options().create(true).append(true).open(&path).map_err(StoreError::io("open", &path))?;
    flock(&lock, operation).map_err(StoreError::io("lock", &path))?;
    Ok(lock)
}

fn open_directory(path: &Path) -> Result<OwnedFd, StoreError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(StoreError::io("open", path))
}

fn sync_directory(path: &Path) -> Result<(), StoreError> {
    rustix::fs::fsync(open_directory(path)?).map_err(StoreError::io("flush", path))
}

/// Where a process does what is not done yet. Its lock says that the process lives.
struct Ingest {
    directory: TempDir,
    _lock: OwnedFd,
}

impl Ingest {
    fn new(parent: &Path) -> Result<Self, StoreError> {
        let directory = tempfile::tempdir_in(parent).map_err(StoreError::io("write to", parent))?;
        let lock = open_directory(directory.path())?;
        flock(&lock, FlockOperation::LockShared).map_err(StoreError::io("lock", directory.path()))?;
        Ok(Self { directory, _lock: lock })
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }
}

fn remove_leftovers(ingest: &Path) -> Result<(), StoreError> {
    for (_, path) in list(ingest)? {
        // One that vanishes meanwhile was removed by its owner.
        let Ok(directory) = File::open(&path) else { continue };
        if flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok() {
            match fs::remove_dir_all(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(StoreError::io("remove", &path)(error));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;
    use crate::meter::sha256;

    #[tokio::test]
    async fn the_failed_layer_of_another_image_is_fetched_again_for_ours() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: an image store needs root");
        }
        let directory = tempfile::tempdir().unwrap();
        let disk = ImageStore::open(&directory.path().join("store"), Limits::default()).unwrap().disk;
        let (empty, digest) = ([0; 1024], sha256(&[0; 1024]));
        let blobs = directory.path().join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(digest.to_string()), empty).unwrap();
        let reference = format!("oci-layout://{}@sha256:{digest}", directory.path().display());
        let source = Arc::new(Source::open(&Reference::parse(&reference).unwrap(), None).await.unwrap());

        let (fail, failed) = oneshot::channel();
        let (theirs, _) = disk.layers.join(digest, || async { failed.await.unwrap() }.boxed());
        let layer = Expected { digest, size: 1024, diff_id: digest, compression: Compression::None };
        let (ours, allowance) = (disk.clone(), Arc::new(Allowance::new(&Limits::default())));
        let ours = tokio::spawn(async move { ours.layer(&source, layer, &allowance).await });
        while theirs.strong_count() < Some(2) {
            tokio::task::yield_now().await;
        }
        fail.send(Err(Cause::Relative)).unwrap();
        ours.await.unwrap().unwrap();
        assert!(disk.layer_path(digest).join("fs").is_dir());
    }
}
