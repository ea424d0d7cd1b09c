//! The binaries that sandboxes are made with: fetched once, checked, laid out as the sandbox wants them.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ate_name::Digest;
use ate_orders::RuntimeAsset;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

#[derive(Debug)]
pub(crate) struct Runtimes {
    directory: PathBuf,
    labels: Mutex<HashMap<PathBuf, String>>,
}

/// A runtime on disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RuntimeDir {
    pub(crate) path: PathBuf,
    /// What the runtime calls its own build.
    pub(crate) label: String,
    pub(crate) assets: BTreeMap<String, RuntimeAsset>,
}

impl Runtimes {
    pub(crate) fn open(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), labels: Mutex::default() }
    }

    pub(crate) fn ensure(&self, assets: &BTreeMap<String, RuntimeAsset>) -> Result<RuntimeDir, String> {
        let identity: String = assets.iter().map(|(name, asset)| format!("{name}={}\n", asset.sha256)).collect();
        let path =
            self.directory.join("runtimes").join(ate_snapshot::Content::of(identity.as_bytes()).digest.to_string());
        if !path.exists() {
            let temporary = self.directory.join(format!("runtime-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&temporary);
            for (name, asset) in assets {
                let file = if name == "runsc" { temporary.join(name) } else { temporary.join("gvisor-bin").join(name) };
                fetch(asset, &file).map_err(|error| format!("asset {name:?} from {}: {error}", asset.url))?;
            }
            let parent = path.parent().expect("joined above");
            std::fs::create_dir_all(parent)
                .and_then(|()| std::fs::rename(&temporary, &path))
                .map_err(|error| error.to_string())?;
        }
        let label = self.label(&path)?;
        Ok(RuntimeDir { path, label, assets: assets.clone() })
    }

    fn label(&self, path: &Path) -> Result<String, String> {
        if let Some(label) = self.labels.lock().get(path) {
            return Ok(label.clone());
        }
        let output = std::process::Command::new(path.join("runsc"))
            .arg("--version")
            .output()
            .map_err(|error| format!("the runtime does not run: {error}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let label = text.lines().next().and_then(|line| line.split_whitespace().last()).unwrap_or_default().to_owned();
        self.labels.lock().insert(path.to_owned(), label.clone());
        Ok(label)
    }
}

fn fetch(asset: &RuntimeAsset, to: &Path) -> io::Result<()> {
    let from = asset.url.strip_prefix("file://").ok_or_else(|| io::Error::other("only file urls for now"))?;
    let bytes = std::fs::read(from)?;
    let found: Digest = ate_snapshot::Content::of(&bytes).digest;
    if found != asset.sha256 {
        return Err(io::Error::other(format!("sha256 is {found}, expected {}", asset.sha256)));
    }
    if let Some(parent) = to.parent() {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(to, bytes)?;
    std::fs::set_permissions(to, std::fs::Permissions::from_mode(0o755))
}
