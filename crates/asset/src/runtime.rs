//! Assets laid out as gVisor looks for them.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ate_name::Digest;
use aws_lc_rs::digest::{SHA256, digest};
use rustix::fs::{CWD, FlockOperation, RenameFlags, renameat_with};

use crate::store::{Disk, claim, list, lock};
use crate::{AssetFile, RuntimeError, StoreError};

/// The asset that a gVisor runtime is started by.
const RUNSC: &str = "runsc";

/// Where runsc looks for the programs that it starts itself.
const SIDECARS: &str = "gvisor-bin";

/// Longest name of an asset.
const MAX_NAME: usize = 64;

/// Begins the name of a directory that is not laid out yet.
const UNFINISHED: &str = ".unfinished-";

/// A runtime on this node; it and its assets stay there while this or a clone of it lives.
#[derive(Clone, Debug)]
pub struct RuntimeDirectory {
    path: PathBuf,
    digest: Digest,
    assets: Arc<BTreeMap<String, AssetFile>>,
    lease: Arc<File>,
}

impl RuntimeDirectory {
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn runsc(&self) -> PathBuf {
        self.path.join(RUNSC)
    }

    /// The open files whose locks are its lease. A lock lasts as long as any copy of its descriptor, in any process: who
    /// must outlive this one takes copies along.
    pub fn leases(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.lease.as_fd()).chain(self.assets.values().map(|asset| asset.file.as_fd()))
    }

    /// Hash of the names and hashes of its assets: equal sets are equal runtimes, on every node.
    pub fn digest(&self) -> Digest {
        self.digest
    }
}

fn digest_of(assets: &BTreeMap<String, AssetFile>) -> Digest {
    let lines: String = assets.iter().map(|(name, file)| format!("{name} {}\n", file.sha256())).collect();
    Digest::from_bytes(digest(&SHA256, lines.as_bytes()).as_ref().try_into().expect("a sha256 has 32 bytes"))
}

fn place(name: &str) -> PathBuf {
    if name == RUNSC { RUNSC.into() } else { Path::new(SIDECARS).join(name) }
}

pub(crate) fn lay_out(disk: &Disk, assets: BTreeMap<String, AssetFile>) -> Result<RuntimeDirectory, RuntimeError> {
    let is_name = |name: &str| {
        (1..=MAX_NAME).contains(&name.len())
            && !name.starts_with('.')
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    };
    if let Some(name) = assets.keys().find(|name| !is_name(name)) {
        return Err(RuntimeError::Name { name: name.clone() });
    }
    if !assets.contains_key(RUNSC) {
        return Err(RuntimeError::NoRunsc);
    }
    let digest = digest_of(&assets);
    let path = disk.runtimes().join(digest.to_string());
    let _turn = disk.turn()?;
    let lease = || {
        if let Some(lease) = claim(&path)?
            && is_made_of(&path, &assets)
        {
            return Ok(lease);
        }
        make(&disk.runtimes(), &path, &assets)?;
        claim(&path)?.ok_or(io::ErrorKind::NotFound.into())
    };
    let lease = lease().map_err(StoreError::io::<io::Error>("lay out", &path))?;
    Ok(RuntimeDirectory { path, digest, assets: Arc::new(assets), lease: Arc::new(lease) })
}

/// Whether the links are to these very files: an asset that was damaged and fetched anew is another file.
fn is_made_of(path: &Path, assets: &BTreeMap<String, AssetFile>) -> bool {
    let is_linked = |(name, asset): (&String, &AssetFile)| {
        let (link, asset) = (fs::symlink_metadata(path.join(place(name))), asset.file.metadata());
        matches!((link, asset), (Ok(link), Ok(asset)) if link.ino() == asset.ino())
    };
    assets.iter().all(is_linked)
}

/// Nothing is synced: what a crash leaves of it is found out by its links and made anew.
fn make(runtimes: &Path, path: &Path, assets: &BTreeMap<String, AssetFile>) -> io::Result<()> {
    let unfinished = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(runtimes)?;
    let sidecars = unfinished.path().join(SIDECARS);
    fs::create_dir(&sidecars)?;
    for (name, asset) in assets {
        fs::hard_link(asset.path(), unfinished.path().join(place(name)))?;
    }
    for directory in [&sidecars, unfinished.path()] {
        fs::set_permissions(directory, Permissions::from_mode(0o755))?;
    }
    if path.exists() {
        // The old one is removed with the temporary name that it gets.
        renameat_with(CWD, unfinished.path(), CWD, path, RenameFlags::EXCHANGE)?;
        return unfinished.close();
    }
    fs::rename(unfinished.keep(), path)
}

/// Whoever calls has the turn, so no directory with such a name is being laid out.
pub(crate) fn remove_leftovers(runtimes: &Path) -> io::Result<()> {
    let unfinished = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes()))
    };
    list(runtimes)?.iter().filter(|path| unfinished(path)).try_for_each(fs::remove_dir_all)
}

/// Whoever calls has the turn.
pub(crate) fn remove_unused(runtimes: &Path) -> io::Result<()> {
    for path in list(runtimes)? {
        let directory = File::open(&path)?;
        if lock(&directory, FlockOperation::NonBlockingLockExclusive)? {
            fs::remove_dir_all(&path)?;
        }
    }
    Ok(())
}
