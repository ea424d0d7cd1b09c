//! The binaries that sandboxes are made with, as the asset store keeps them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use ate_asset::{Asset, AssetStore, RuntimeDirectory};
use ate_orders::{RuntimeAsset, chain};

/// How often a binary that was just written is tried before it is given up as busy.
const BUSY_TRIES: u32 = 20;
const BUSY_WAIT: std::time::Duration = std::time::Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Runtimes(AssetStore);

/// A runtime on disk, there for as long as somebody holds this.
#[derive(Debug)]
pub(crate) struct Runtime {
    directory: RuntimeDirectory,
    /// What the runtime calls its own build.
    pub(crate) label: String,
}

impl Runtime {
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// What keeps the runtime from eviction; a box takes it along, so that it holds when this process is gone.
    pub(crate) fn leases(&self) -> io::Result<Vec<OwnedFd>> {
        self.directory.leases().map(|lease| lease.as_fd().try_clone_to_owned()).collect()
    }
}

impl Runtimes {
    pub(crate) fn open(directory: &Path, budget: u64) -> Result<Self, ate_asset::StoreError> {
        Ok(Self(AssetStore::open(directory, budget)?))
    }

    pub(crate) async fn ensure(&self, assets: &BTreeMap<String, RuntimeAsset>) -> Result<Runtime, String> {
        let mut files = BTreeMap::new();
        for (name, RuntimeAsset { url, sha256 }) in assets {
            let asset = Asset { url: url.clone(), sha256: *sha256 };
            let file = self.0.ensure(&asset).await.map_err(|error| format!("asset {name:?}: {}", chain(&error)))?;
            files.insert(name.clone(), file);
        }
        let directory = self.0.runtime_directory(files).await.map_err(|error| chain(&error))?;
        let label = label(directory.runsc()).await?;
        Ok(Runtime { directory, label })
    }
}

async fn label(runsc: PathBuf) -> Result<String, String> {
    let mut tries = 0;
    let output = loop {
        match tokio::process::Command::new(&runsc).arg("--version").output().await {
            // Another thread's child may still have it open for writing, until it becomes its own program.
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && tries < BUSY_TRIES => {
                tries += 1;
                tokio::time::sleep(BUSY_WAIT).await;
            }
            Err(error) => return Err(format!("the runtime does not run: {error}")),
            Ok(output) => break output,
        }
    };
    let text = String::from_utf8_lossy(&output.stdout);
    match text.lines().next().and_then(|line| line.split_whitespace().last()) {
        Some(label) if output.status.success() => Ok(label.to_owned()),
        _ => Err(format!("the runtime does not say its version ({}); is asset \"runsc\" a runsc?", output.status)),
    }
}
