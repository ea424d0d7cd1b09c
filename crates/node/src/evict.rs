//! Copies of snapshots that are in durable storage too: kept while there is room, those not used for longest go first.
//!
//! What is only here is never touched, whatever room it takes.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ate_snapshot::MANIFEST;

use crate::snapshots::{ONLY_HERE, Snapshots, below};

/// One that was used so lately may just be being read.
const IN_USE: Duration = Duration::from_secs(60);

/// A copy on this disk.
#[derive(Debug)]
struct Copy {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl Snapshots {
    /// Notes that a snapshot is used now: its manifest was last read then, whatever the file system keeps of that itself.
    pub(crate) fn touch(&self, directory: &Path) {
        let now = std::fs::FileTimes::new().set_accessed(SystemTime::now());
        let _ =
            std::fs::File::options().append(true).open(directory.join(MANIFEST)).and_then(|file| file.set_times(now));
    }

    /// Removes copies until those that are left take no more than `budget`; returns how many went. Blocks.
    pub(crate) fn evict_to(&self, budget: u64, now: SystemTime) -> io::Result<usize> {
        if self.blobs.is_none() {
            return Ok(0);
        }
        let mut copies = copies(self.directory());
        copies.sort_by_key(|copy| copy.used);
        let mut total: u64 = copies.iter().map(|copy| copy.bytes).sum();
        let mut gone = 0;
        for copy in copies {
            if total <= budget || now.duration_since(copy.used).is_ok_and(|idle| idle < IN_USE) {
                break;
            }
            // Out of the way as a whole, then taken apart: nobody finds half of it.
            let aside = self.aside(&copy.path);
            std::fs::rename(&copy.path, &aside)?;
            std::fs::remove_dir_all(&aside)?;
            // Unless others of the same actor are there.
            let _ = copy.path.parent().map(std::fs::remove_dir);
            total = total.saturating_sub(copy.bytes);
            gone += 1;
        }
        Ok(gone)
    }
}

/// Snapshots that are whole, and not only here.
fn copies(directory: &Path) -> Vec<Copy> {
    let copy = |path: PathBuf| {
        // Also if that cannot be told.
        if !matches!(path.join(ONLY_HERE).try_exists(), Ok(false)) {
            return None;
        }
        let used = path.join(MANIFEST).metadata().ok()?.accessed().ok()?;
        let bytes = below(&path).filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum();
        Some(Copy { path, bytes, used })
    };
    below(directory).flat_map(|actor| below(&actor)).filter_map(copy).collect()
}

#[cfg(test)]
mod tests {
    use ate_blob::{Backend, Blobs};

    use super::*;

    fn snapshot(root: &Path, actor: &str, age: u64, marked: bool) -> PathBuf {
        let path = root.join("snapshots").join(actor).join("1-a");
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("memory"), vec![0; 1000]).unwrap();
        std::fs::write(path.join(MANIFEST), []).unwrap();
        if marked {
            std::fs::write(path.join(ONLY_HERE), []).unwrap();
        }
        let used = SystemTime::now() - Duration::from_secs(age);
        let times = std::fs::FileTimes::new().set_accessed(used);
        std::fs::File::options().append(true).open(path.join(MANIFEST)).unwrap().set_times(times).unwrap();
        path
    }

    #[tokio::test]
    async fn copies_go_by_their_last_use_and_what_is_only_here_stays() {
        let root = tempfile::tempdir().unwrap();
        for name in ["scratch", "storage"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        let blobs = Blobs::open(Backend::Directory(root.path().join("storage"))).await.unwrap();
        let snapshots =
            Snapshots::open(&root.path().join("snapshots"), &root.path().join("scratch"), Some(blobs)).unwrap();
        let only = snapshot(root.path(), "only", 9000, true);
        let [oldest, old, lately, now] = [("oldest", 8000), ("old", 7000), ("lately", 600), ("now", 1)]
            .map(|(name, age)| snapshot(root.path(), name, age, false));
        snapshots.touch(&old);
        assert_eq!(snapshots.evict_to(3000, SystemTime::now()).unwrap(), 1);
        assert!(!oldest.exists() && !oldest.parent().unwrap().exists());
        assert!([&only, &old, &lately, &now].iter().all(|path| path.exists()));
        assert_eq!(snapshots.evict_to(0, SystemTime::now()).unwrap(), 1, "those just used stay, whatever the room");
        assert!(only.exists() && old.exists() && now.exists() && !lately.exists());
        assert_eq!(std::fs::read_dir(root.path().join("scratch")).unwrap().count(), 0);
    }
}
