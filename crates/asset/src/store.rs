use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::{self, File, FileTimes, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ate_blob::blocking;
use ate_name::Digest;
use aws_lc_rs::digest::{Context, SHA256};
use futures::future::{BoxFuture, FutureExt, WeakShared};
use futures::stream::TryStreamExt;
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, retry_on_intr};

use crate::fetch::Sources;
use crate::runtime::{self, RuntimeDirectory};
use crate::{Asset, AssetError, AssetUrl, Cause, Fetch, RuntimeError, StoreError};

/// Largest asset, as in the public project; what is longer is refused, at the latest when this much has arrived. The
/// largest in use is a guest image of some hundred MB.
pub const MAX_ASSET: u64 = 8 << 30;

/// An asset that is not complete after this long is given up.
const FETCH_DEADLINE: Duration = Duration::from_secs(60 * 60);

/// How often a source that failed in a way that may pass is asked.
const FETCH_ATTEMPTS: u32 = 3;

/// Wait before the second attempt; doubles with each.
const FETCH_BACKOFF: Duration = Duration::from_millis(500);

/// How often it is looked whether another process has done with an asset. The kernel could wake us, but only a thread
/// that does nothing else and cannot be cancelled.
const PEER_POLL: Duration = Duration::from_millis(50);

/// How much is hashed at a time.
const CHUNK: usize = 1 << 20;

type Flight = WeakShared<BoxFuture<'static, Result<AssetFile, AssetError>>>;

/// The assets of a node, on its disk. Several processes may share one.
pub struct AssetStore {
    disk: Arc<Disk>,
    fetch: Arc<dyn Fetch>,
    /// Keyed by url too: nobody is refused for a dead link of somebody else.
    flights: Mutex<HashMap<Asset, Flight>>,
}

impl fmt::Debug for AssetStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AssetStore").field("root", &self.disk.root).field("budget", &self.disk.budget).finish()
    }
}

/// An asset that is on this node, and stays there while this or a clone of it lives. A lease ends with its process:
/// whoever adopts running sandboxes after a crash must ask for their assets before it asks for others.
#[derive(Clone, Debug)]
pub struct AssetFile {
    path: PathBuf,
    sha256: Digest,
    pub(crate) file: Arc<File>,
}

impl AssetFile {
    /// Whoever starts it and meets `ETXTBSY` just after a fetch tries again: a child that another thread forked has the
    /// file open for writing until it becomes its own program.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn sha256(&self) -> Digest {
        self.sha256
    }
}

impl AssetStore {
    /// Opens the store in `directory`, making it if need be, and removes what processes that died left half done. All
    /// assets together take at most `budget` bytes. Blocks: for use at start.
    pub fn open(directory: &Path, budget: u64) -> Result<Self, StoreError> {
        let sources = Sources::from_environment();
        let sources =
            sources.map_err(|error| StoreError::io("make an https client for", directory)(io::Error::other(error)))?;
        Self::with_sources(directory, budget, Arc::new(sources))
    }

    /// As [`open`](Self::open), with assets from elsewhere.
    pub fn with_sources(directory: &Path, budget: u64, fetch: Arc<dyn Fetch>) -> Result<Self, StoreError> {
        let disk = Arc::new(Disk::open(directory, budget)?);
        Ok(Self { disk, fetch, flights: Mutex::default() })
    }

    /// The asset, fetched if the node does not have it. Callers that want the same at the same time share one fetch,
    /// which goes on while one of them is left.
    pub async fn ensure(&self, asset: &Asset) -> Result<AssetFile, AssetError> {
        let flight = {
            let mut flights = self.flights.lock();
            // One that has landed is not joined: its failure may be over, and a retry must not meet it again.
            let under_way = |flight: &Flight| flight.upgrade().filter(|flight| flight.peek().is_none());
            match flights.get(asset).and_then(under_way) {
                Some(flight) => flight,
                None => {
                    flights.retain(|_, flight| under_way(flight).is_some());
                    let (disk, fetch, wanted) = (self.disk.clone(), self.fetch.clone(), asset.clone());
                    let flight = provide(disk, fetch, wanted).boxed().shared();
                    flights.extend(flight.downgrade().map(|weak| (asset.clone(), weak)));
                    flight
                }
            }
        };
        flight.await
    }

    /// A directory with these assets in the places where gVisor looks for them: `runsc` at the top, every other below
    /// `gvisor-bin/`. Made once per set; leased, with its assets, while the answer lives.
    pub async fn runtime_directory(
        &self,
        assets: BTreeMap<String, AssetFile>,
    ) -> Result<RuntimeDirectory, RuntimeError> {
        let disk = self.disk.clone();
        blocking(move || runtime::lay_out(&disk, assets)).await
    }
}

async fn provide(disk: Arc<Disk>, fetch: Arc<dyn Fetch>, asset: Asset) -> Result<AssetFile, AssetError> {
    let provide = async {
        let url = AssetUrl::parse(&asset.url)?;
        let mut told = false;
        loop {
            let (here, digest) = (disk.clone(), asset.sha256);
            match blocking(move || here.locate(digest)).await? {
                Located::Here(file) => return Ok(file),
                Located::Nowhere(incoming) => return download(&disk, &*fetch, &url, incoming).await,
                Located::Coming => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::info!(%asset, "somebody else fetches this asset; waiting for it");
                    }
                    tokio::time::sleep(PEER_POLL).await;
                }
            }
        }
    };
    let provided = tokio::time::timeout(FETCH_DEADLINE, provide).await;
    let provided = provided.unwrap_or(Err(Cause::TimedOut { minutes: FETCH_DEADLINE.as_secs() / 60 }));
    provided.map_err(|cause| AssetError { asset, cause })
}

async fn download(disk: &Arc<Disk>, fetch: &dyn Fetch, url: &AssetUrl, incoming: Incoming) -> Result<AssetFile, Cause> {
    let mut attempt = 0;
    let (actual, size) = loop {
        attempt += 1;
        match receive(disk, fetch, url, &incoming).await {
            Err(cause) if cause.is_passing() && attempt < FETCH_ATTEMPTS => {
                tracing::warn!(%url, %cause, attempt, "fetching an asset failed; trying again");
                tokio::time::sleep(FETCH_BACKOFF * 2u32.pow(attempt - 1)).await;
            }
            received => break received?,
        }
    };
    if actual != incoming.digest {
        return Err(Cause::Digest { actual, size });
    }
    let disk = disk.clone();
    blocking(move || disk.publish(incoming, size)).await
}

/// Writes what the source gives from the beginning of the file; returns its hash and length.
async fn receive(disk: &Disk, fetch: &dyn Fetch, url: &AssetUrl, incoming: &Incoming) -> Result<(Digest, u64), Cause> {
    let limit = MAX_ASSET.min(disk.budget);
    let mut fetching = fetch.fetch(url).await?;
    if fetching.size.is_some_and(|size| size > limit) {
        return Err(Cause::TooLarge { limit });
    }
    let (mut hash, mut length) = (Context::new(&SHA256), 0);
    while let Some(chunk) = fetching.bytes.try_next().await? {
        let (offset, file) = (length, incoming.file.clone());
        length += chunk.len() as u64;
        if length > limit {
            return Err(Cause::TooLarge { limit });
        }
        let write = move || {
            hash.update(&chunk);
            file.write_all_at(&chunk, offset).map(|()| hash)
        };
        hash = blocking(write).await.map_err(StoreError::io("write to", &incoming.path))?;
    }
    let file = incoming.file.clone();
    // An attempt before this one may have written more.
    blocking(move || file.set_len(length)).await.map_err(StoreError::io("write to", &incoming.path))?;
    match fetching.size {
        Some(expected) if expected != length => Err(Cause::Truncated { expected, got: length }),
        _ => Ok((finish(hash), length)),
    }
}

fn finish(hash: Context) -> Digest {
    Digest::from_bytes(hash.finish().as_ref().try_into().expect("a sha256 has 32 bytes"))
}

fn hash_file(file: &File) -> io::Result<Digest> {
    let (mut hash, mut chunk, mut offset) = (Context::new(&SHA256), vec![0; CHUNK], 0);
    loop {
        let length = file.read_at(&mut chunk, offset)?;
        if length == 0 {
            return Ok(finish(hash));
        }
        hash.update(&chunk[..length]);
        offset += length as u64;
    }
}

enum Located {
    Here(AssetFile),
    Coming,
    Nowhere(Incoming),
}

/// An asset that this process is fetching. Dropped, it is gone.
struct Incoming {
    digest: Digest,
    path: PathBuf,
    file: Arc<File>,
}

impl Drop for Incoming {
    fn drop(&mut self) {
        // Published, it has another name. Else it is ours to remove: the lock ends after this.
        if is_at(&self.file, &self.path).unwrap_or(false) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// What a file is taken to be unchanged by. Not the change time: links and uses move it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Fingerprint {
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl Fingerprint {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        Ok(Self { inode: metadata.ino(), size: metadata.len(), modified })
    }
}

pub(crate) struct Disk {
    pub(crate) root: PathBuf,
    budget: u64,
    /// What this process has hashed and found right.
    checked: Mutex<HashMap<Digest, Fingerprint>>,
}

impl Disk {
    fn open(root: &Path, budget: u64) -> Result<Self, StoreError> {
        let disk = Self { root: root.to_owned(), budget, checked: Mutex::default() };
        for directory in [root, &disk.assets(), &disk.fetches(), &disk.runtimes()] {
            let make = || {
                fs::create_dir_all(directory)?;
                // Sandboxes are started by other accounts than the node's.
                fs::set_permissions(directory, Permissions::from_mode(0o755))
            };
            make().map_err(StoreError::io("make", directory))?;
        }
        let turn = disk.turn()?;
        let leftovers = || {
            for path in list(&disk.fetches())? {
                // One that somebody is about to fetch to may vanish, and is looked for again by them if it does.
                if let Ok(file) = File::open(&path)
                    && lock(&file, FlockOperation::NonBlockingLockExclusive)?
                    && is_at(&file, &path)?
                {
                    fs::remove_file(&path)?;
                }
            }
            runtime::remove_leftovers(&disk.runtimes())
        };
        leftovers().map_err(StoreError::io("clean", root))?;
        drop(turn);
        Ok(disk)
    }

    fn assets(&self) -> PathBuf {
        self.root.join("sha256")
    }

    fn fetches(&self) -> PathBuf {
        self.root.join("fetch")
    }

    pub(crate) fn runtimes(&self) -> PathBuf {
        self.root.join("runtimes")
    }

    /// Waits until no other publishes, evicts or lays out; none of them takes long.
    pub(crate) fn turn(&self) -> Result<File, StoreError> {
        let path = self.root.join("lock");
        let turn = || {
            let file = File::options().create(true).append(true).open(&path)?;
            lock(&file, FlockOperation::LockExclusive)?;
            Ok::<_, io::Error>(file)
        };
        turn().map_err(StoreError::io("lock", &path))
    }

    fn locate(&self, digest: Digest) -> Result<Located, StoreError> {
        if let Some(file) = self.find(digest)? {
            return Ok(Located::Here(file));
        }
        let Some(incoming) = self.begin(digest)? else { return Ok(Located::Coming) };
        // Who held the lock before us may have brought it.
        Ok(self.find(digest)?.map_or(Located::Nowhere(incoming), Located::Here))
    }

    fn find(&self, digest: Digest) -> Result<Option<AssetFile>, StoreError> {
        let path = self.assets().join(digest.to_string());
        let find = || {
            let Some(file) = claim(&path)? else { return Ok(None) };
            let fingerprint = Fingerprint::of(&file)?;
            if self.checked.lock().get(&digest) != Some(&fingerprint) {
                // A disk that cannot read it has damaged it too.
                let actual = hash_file(&file);
                if !matches!(actual, Ok(actual) if actual == digest) {
                    tracing::warn!(path = %path.display(), ?actual, "an asset was damaged on disk; fetching it anew");
                    return Ok(None);
                }
                self.checked.lock().insert(digest, fingerprint);
            }
            file.set_times(FileTimes::new().set_accessed(SystemTime::now()))?;
            Ok::<_, io::Error>(Some(file))
        };
        let found = find().map_err(StoreError::io("read", &path))?;
        Ok(found.map(|file| AssetFile { path, sha256: digest, file: Arc::new(file) }))
    }

    /// The file to fetch to; `None` while another fetches.
    fn begin(&self, digest: Digest) -> Result<Option<Incoming>, StoreError> {
        let path = self.fetches().join(digest.to_string());
        let begin = || {
            loop {
                let file =
                    File::options().read(true).write(true).create(true).truncate(false).mode(0o700).open(&path)?;
                if !lock(&file, FlockOperation::NonBlockingLockExclusive)? {
                    return Ok(None);
                }
                if is_at(&file, &path)? {
                    return Ok::<_, io::Error>(Some(file));
                }
            }
        };
        let file = begin().map_err(StoreError::io("write to", &path))?;
        Ok(file.map(|file| Incoming { digest, path, file: Arc::new(file) }))
    }

    fn publish(&self, incoming: Incoming, size: u64) -> Result<AssetFile, Cause> {
        let write = StoreError::io::<io::Error>;
        let ready = || {
            incoming.file.set_permissions(Permissions::from_mode(0o755))?;
            incoming.file.sync_all()
        };
        ready().map_err(write("write to", &incoming.path))?;
        let turn = self.turn()?;
        let digest = incoming.digest;
        let path = self.assets().join(digest.to_string());
        self.make_room(size, &path)?;
        let publish = || {
            self.checked.lock().insert(digest, Fingerprint::of(&incoming.file)?);
            fs::rename(&incoming.path, &path)?;
            File::open(self.assets())?.sync_all()
        };
        publish().map_err(write("write to", &path))?;
        // A program cannot be started while its file is open for writing.
        drop(incoming);
        let file = claim(&path).map_err(write("read", &path))?;
        drop(turn);
        let gone = || write("read", &path)(io::ErrorKind::NotFound.into());
        Ok(AssetFile { file: Arc::new(file.ok_or_else(gone)?), path, sha256: digest })
    }

    /// Evicts what is not leased, the longest unused first, until `size` more bytes fit. Whoever calls has the turn.
    fn make_room(&self, size: u64, but_for: &Path) -> Result<(), Cause> {
        let evict = || {
            let mut assets = Vec::new();
            for path in list(&self.assets())?.into_iter().filter(|path| path != but_for) {
                let metadata = fs::metadata(&path)?;
                assets.push((metadata.accessed()?, metadata.len(), path));
            }
            assets.sort();
            let mut total: u64 = assets.iter().map(|(_, size, _)| size).sum();
            if total + size <= self.budget {
                return Ok(total);
            }
            // Their links would keep the space of what is evicted, and they are made anew in no time.
            runtime::remove_unused(&self.runtimes())?;
            for (_, length, path) in assets {
                if total + size <= self.budget {
                    break;
                }
                if lock(&File::open(&path)?, FlockOperation::NonBlockingLockExclusive)? {
                    fs::remove_file(&path)?;
                    tracing::info!(path = %path.display(), "evicted an asset");
                    total -= length;
                }
            }
            Ok::<_, io::Error>(total)
        };
        let in_use = evict().map_err(StoreError::io("evict from", &self.root))?;
        if in_use + size <= self.budget { Ok(()) } else { Err(Cause::OverBudget { size, in_use, budget: self.budget }) }
    }
}

pub(crate) fn list(directory: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect()
}

/// Whether the lock was had; only a non-blocking one may not be.
pub(crate) fn lock(file: &File, operation: FlockOperation) -> io::Result<bool> {
    match retry_on_intr(|| flock(file, operation)) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Leases the file or directory that is at `path`, if one is.
pub(crate) fn claim(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        // Held exclusively only by who is removing or has just published it.
        lock(&file, FlockOperation::LockShared)?;
        if is_at(&file, path)? {
            return Ok(Some(file));
        }
    }
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(there) => Ok(there.ino() == file.metadata()?.ino()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
