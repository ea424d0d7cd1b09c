//! Copies of snapshots that are in durable storage too: kept while there is room, those not used for longest go first.
//!
//! What is only here is never touched, whatever room it takes.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ate_snapshot::MANIFEST;

use crate::snapshots::{ONLY_HERE, Snapshots, below, if_there};

/// One that was used so lately may just be being read.
const IN_USE: Duration = Duration::from_secs(60);

/// How the names begin of what is being taken apart.
const ASIDE: &str = "evicted-";

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
    pub(crate) fn evict_to(&self, budget: u64, now: SystemTime) -> usize {
        if self.blobs.is_none() {
            return 0;
        }
        let mut copies = copies(self.directory());
        copies.sort_by_key(|copy| copy.used);
        let mut total: u64 = copies.iter().map(|copy| copy.bytes).sum();
        let mut gone = 0;
        for copy in copies {
            if total <= budget || now.duration_since(copy.used).is_ok_and(|idle| idle < IN_USE) {
                break;
            }
            // One that cannot go keeps none of the others.
            match self.take_apart(&copy.path) {
                Ok(()) => {
                    total = total.saturating_sub(copy.bytes);
                    gone += 1;
                }
                Err(error) => {
                    tracing::warn!(snapshot = %copy.path.display(), %error, "a copy of a snapshot cannot be removed");
                }
            }
        }
        gone
    }

    /// Out of the way as a whole first: nobody finds half of it.
    fn take_apart(&self, copy: &Path) -> io::Result<()> {
        let aside = self.aside(copy);
        // An earlier copy of it may have been taken apart no further than this.
        if_there(std::fs::remove_dir_all(&aside))?;
        std::fs::rename(copy, &aside)?;
        // Unless others of the same actor are there.
        let _ = copy.parent().map(std::fs::remove_dir);
        std::fs::remove_dir_all(&aside)
    }

    /// A name beside what is kept, for what is about to go.
    fn aside(&self, copy: &Path) -> PathBuf {
        let names: Vec<_> = copy.iter().rev().take(2).map(|name| name.to_string_lossy()).collect();
        self.scratch.join(format!("{ASIDE}{}", names.join("-")))
    }
}

/// What an earlier process had moved out of the way when it ended. Nobody would look for it again, and it takes its room. Blocks.
pub(crate) fn remove_asides(scratch: &Path) {
    let is_aside = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(ASIDE));
    for aside in below(scratch).filter(is_aside) {
        if let Err(error) = std::fs::remove_dir_all(&aside) {
            tracing::warn!(path = %aside.display(), %error, "what is left of a copy of a snapshot cannot be removed");
        }
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

    async fn opened(root: &Path) -> Snapshots {
        for name in ["scratch", "storage"] {
            std::fs::create_dir_all(root.join(name)).unwrap();
        }
        let blobs = Blobs::open(Backend::Directory(root.join("storage"))).await.unwrap();
        Snapshots::open(&root.join("snapshots"), &root.join("scratch"), Some(blobs)).unwrap()
    }

    #[tokio::test]
    async fn an_eviction_that_was_cut_off_is_brought_to_its_end_and_keeps_no_other() {
        let root = tempfile::tempdir().unwrap();
        let snapshots = opened(root.path()).await;
        let half = |path: &Path| {
            let aside = snapshots.aside(path);
            std::fs::create_dir(&aside).unwrap();
            std::fs::write(aside.join("memory"), [0; 1000]).unwrap();
            aside
        };
        let [again, stuck, other] = [("again", 9000), ("stuck", 8000), ("other", 7000)]
            .map(|(name, age)| snapshot(root.path(), name, age, false));
        half(&again);
        // Nothing can be moved over it.
        std::fs::write(snapshots.aside(&stuck), []).unwrap();
        assert_eq!(snapshots.evict_to(0, SystemTime::now()), 2);
        assert!(!again.exists() && stuck.exists() && !other.exists());
        std::fs::remove_file(snapshots.aside(&stuck)).unwrap();
        assert_eq!(snapshots.evict_to(0, SystemTime::now()), 1);

        // It came back from durable storage, or never does: the next process knows nothing of it.
        half(&again);
        opened(root.path()).await;
        assert_eq!(std::fs::read_dir(root.path().join("scratch")).unwrap().count(), 0);
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
        assert_eq!(snapshots.evict_to(3000, SystemTime::now()), 1);
        assert!(!oldest.exists() && !oldest.parent().unwrap().exists());
        assert!([&only, &old, &lately, &now].iter().all(|path| path.exists()));
        assert_eq!(snapshots.evict_to(0, SystemTime::now()), 1, "those just used stay, whatever the room");
        assert!(only.exists() && old.exists() && now.exists() && !lately.exists());
        assert_eq!(std::fs::read_dir(root.path().join("scratch")).unwrap().count(), 0);
    }
}
