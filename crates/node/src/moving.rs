//! A node that had only its disk is given durable storage: what it has is brought there before anybody is served.
//!
//! ```text
//!   disk only    every snapshot is written with its mark
//!      │         opened with storage: each is brought there and loses its mark, the note is written last
//!      ▼
//!   note         what has no mark is a copy, and may go; what has one is brought there when the control plane says so
//! ```
//!
//! There is no way back: with the disk alone nothing of what is in storage would be found.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ate_blob::BlobError;
use ate_orders::chain;
use ate_snapshot::SnapshotKey;
use futures::StreamExt;

use crate::snapshots::{ONLY_HERE, SnapshotError, Snapshots, if_there, write_durably};
use crate::{Node, NodeError};

/// Beside the snapshots. Without it nothing there is taken for a copy.
const NOTE: &str = "copies-of-durable-storage";

/// Uploads under way at once: one waits for the other side most of the time, and more would only be begun together.
const AT_ONCE: usize = 8;

/// How often it is said how far it is: there may be many, and storage may be slow.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// Whether what is in a directory of snapshots can be opened with storage, or without. Blocks.
pub(crate) fn check(directory: &Path, has_storage: bool) -> Result<(), NodeError> {
    let note = directory.join(NOTE);
    let is_noted = note.try_exists().map_err(NodeError::io(format!("look for {}", note.display())))?;
    match (has_storage, is_noted) {
        (false, true) => Err(NodeError::NoStorage { directory: directory.to_owned(), note }),
        (false, false) | (true, true) => Ok(()),
        (true, false) => {
            let noted = || {
                std::fs::create_dir_all(directory)?;
                // Where nothing is, all that will be without a mark is a copy.
                if mark_all(directory)? { Ok(()) } else { write_durably(directory, NOTE, b"") }
            };
            noted().map_err(NodeError::io(format!("write down which snapshots in {} are copies", directory.display())))
        }
    }
}

/// Marks what has no mark, and so was written by a build that knew of none: it may be nowhere else, and nothing says where its place
/// in storage is. It stays until the actor has a newer one. Returns whether there is anything at all.
fn mark_all(directory: &Path) -> io::Result<bool> {
    let (mut any, mut unmarked) = (false, 0);
    for actor in inside(directory)? {
        for snapshot in inside(&actor)? {
            any = true;
            // One that cannot be read now would be left behind, and the note would say that it was not.
            if if_there(std::fs::read(snapshot.join(ONLY_HERE)))?.is_none() {
                write_durably(&snapshot, ONLY_HERE, b"")?;
                unmarked += 1;
            }
        }
    }
    if unmarked > 0 {
        tracing::warn!(
            unmarked,
            directory = %directory.display(),
            "snapshots of an earlier build are kept on this disk: nothing says whether they are in durable storage"
        );
    }
    Ok(any)
}

/// What is in a directory; nothing, if it is none.
fn inside(path: &Path) -> io::Result<Vec<PathBuf>> {
    match std::fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(Vec::new()),
        entries => entries?.map(|entry| Ok(entry?.path())).collect(),
    }
}

impl Snapshots {
    fn note(&self) -> PathBuf {
        self.directory().join(NOTE)
    }

    /// Those that were written when this disk was all there was.
    fn not_moved(&self) -> Vec<SnapshotKey> {
        if self.blobs.is_none() || self.note().exists() {
            return Vec::new();
        }
        self.marked_here()
    }

    /// Brings them to durable storage. Cut off or failed it is begun again by the next start, and does what is left.
    async fn move_to_storage(self: &Arc<Self>) -> Result<(), NodeError> {
        if self.blobs.is_none() || self.note().exists() {
            return Ok(());
        }
        let waiting = self.marked_here();
        let (of, mut done, mut said) = (waiting.len(), 0_usize, Instant::now());
        tracing::info!(of, directory = %self.directory().display(), "bringing snapshots to durable storage");
        let mut moves = futures::stream::iter(waiting)
            .map(async |key| {
                // This node was never one of several with them: nobody can have given it up and removed them there.
                let moved = self.upload(&key, || Some(0)).await;
                (key, moved)
            })
            .buffer_unordered(AT_ONCE);
        while let Some((key, moved)) = moves.next().await {
            match moved {
                Ok(()) => done += 1,
                // As it was before: whoever wants it hears what is wrong with it, and everybody else goes on.
                Err(error) if is_lost(&error) => {
                    tracing::error!(snapshot = %key, error = chain(&error), "a snapshot stays on this disk only");
                }
                Err(error) => {
                    let (directory, reason) = (self.directory().to_owned(), chain(&error));
                    return Err(NodeError::NotMoved { directory, left: of - done, reason });
                }
            }
            if said.elapsed() >= SAID_EVERY {
                said = Instant::now();
                tracing::info!(done, of, "bringing snapshots to durable storage");
            }
        }
        drop(moves);
        let (snapshots, at) = (Arc::clone(self), self.directory().display().to_string());
        let noted = tokio::task::spawn_blocking(move || write_durably(snapshots.directory(), NOTE, b"")).await;
        noted.map_err(io::Error::other).flatten().map_err(NodeError::io(format!("write down what is in {at}")))?;
        tracing::info!(done, of, "snapshots were brought to durable storage");
        Ok(())
    }
}

/// Trying again would change nothing: it is damaged here, or there is another in its place.
fn is_lost(error: &SnapshotError) -> bool {
    match error {
        SnapshotError::Unusable { .. } | SnapshotError::Missing { .. } => true,
        SnapshotError::Storage { source, .. } => matches!(**source, BlobError::Exists { .. }),
        SnapshotError::Io { .. } | SnapshotError::Unheard { .. } => false,
    }
}

impl Node {
    /// How many snapshots are still to be brought to durable storage before this node may serve: see [`Node::move_to_storage`].
    pub fn not_moved(&self) -> usize {
        self.snapshots.not_moved().len()
    }

    /// Before it is registered or serves anybody: those that records call durable must be found by every node.
    pub async fn move_to_storage(&self) -> Result<(), NodeError> {
        self.snapshots.move_to_storage().await
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use ate_blob::{Backend, Blobs};
    use ate_snapshot::{Content, DataKey, MANIFEST};

    use super::*;
    use crate::copy::tests::saved;

    /// What a node finds in `root/here`, with or without the storage in `root/storage`.
    async fn opened(root: &Path, here: &str, has_storage: bool) -> Result<Arc<Snapshots>, NodeError> {
        let (storage, scratch) = (root.join("storage"), root.join(here).join("scratch"));
        for directory in [&storage, &scratch] {
            std::fs::create_dir_all(directory).unwrap();
        }
        let blobs = match has_storage {
            true => Some(Blobs::open(Backend::Directory(storage)).await.unwrap()),
            false => None,
        };
        Snapshots::open(&root.join(here).join("snapshots"), &scratch, blobs).map(Arc::new)
    }

    /// All that may go is made to.
    fn evict(snapshots: &Snapshots) -> usize {
        snapshots.evict_to(0, SystemTime::now() + Duration::from_secs(3600))
    }

    #[tokio::test]
    async fn what_was_written_without_durable_storage_is_brought_there_before_it_may_be_evicted() {
        let root = tempfile::tempdir().unwrap();
        let alone = opened(root.path(), "here", false).await.unwrap();
        let (key, manifest) = saved(&alone, &DataKey::from_random([1; 32]));
        let digest = Content::of(&manifest.to_bytes().unwrap()).digest;
        // Cut off before it was done, or not begun.
        for _ in 0..2 {
            let here = opened(root.path(), "here", true).await.unwrap();
            assert_eq!((here.not_moved(), evict(&here)), (vec![key.clone()], 0));
        }
        let here = opened(root.path(), "here", true).await.unwrap();
        here.move_to_storage().await.unwrap();
        let there = opened(root.path(), "there", true).await.unwrap();
        assert_eq!(there.ensure(&key, &digest).await.unwrap().files, manifest.files, "every node finds it");
        for _ in 0..2 {
            let here = opened(root.path(), "here", true).await.unwrap();
            assert!(here.not_moved().is_empty(), "that is done once");
        }
        assert_eq!(evict(&here), 1, "it is a copy now");
        assert_eq!(here.ensure(&key, &digest).await.unwrap().files, manifest.files);
    }

    #[tokio::test]
    async fn copies_of_durable_storage_are_not_taken_for_all_there_is() {
        let root = tempfile::tempdir().unwrap();
        let here = opened(root.path(), "here", true).await.unwrap();
        let refused = opened(root.path(), "here", false).await.unwrap_err().to_string();
        let directory = here.directory().display().to_string();
        assert!(refused.contains(&directory) && refused.contains("--storage") && refused.contains(NOTE), "{refused}");
    }

    #[tokio::test]
    async fn a_node_does_not_begin_to_serve_while_storage_takes_nothing_and_goes_on_later() {
        let root = tempfile::tempdir().unwrap();
        let (key, _) = saved(&opened(root.path(), "here", false).await.unwrap(), &DataKey::from_random([1; 32]));
        let here = opened(root.path(), "here", true).await.unwrap();
        // Where its bucket would be.
        let bucket = root.path().join("storage").join("bucket");
        std::fs::write(&bucket, "").unwrap();
        let failed = here.move_to_storage().await.unwrap_err().to_string();
        let directory = here.directory().display().to_string();
        let (why, remedy) = failed.split_once('\n').unwrap();
        assert!(why.contains(&directory) && why.contains("1 of") && why.contains("durable storage failed"), "{failed}");
        assert!(remedy.contains("--storage") && remedy.contains("start again"), "{failed}");
        std::fs::remove_file(&bucket).unwrap();
        let here = opened(root.path(), "here", true).await.unwrap();
        assert_eq!((here.not_moved(), evict(&here)), (vec![key], 0));
        here.move_to_storage().await.unwrap();
        assert_eq!(evict(&here), 1);
    }

    #[tokio::test]
    async fn one_that_is_damaged_stays_where_it_is_and_keeps_no_other() {
        let root = tempfile::tempdir().unwrap();
        let (key, _) = saved(&opened(root.path(), "here", false).await.unwrap(), &DataKey::from_random([1; 32]));
        let here = opened(root.path(), "here", true).await.unwrap();
        std::fs::write(here.path(&key).join(MANIFEST), "{").unwrap();
        here.move_to_storage().await.unwrap();
        let here = opened(root.path(), "here", true).await.unwrap();
        assert!(here.not_moved().is_empty() && here.is_only_here(&key));
        assert_eq!(evict(&here), 0);
    }

    #[tokio::test]
    async fn what_an_earlier_build_left_without_a_word_is_not_evicted() {
        let root = tempfile::tempdir().unwrap();
        let alone = opened(root.path(), "here", false).await.unwrap();
        let (key, _) = saved(&alone, &DataKey::from_random([1; 32]));
        std::fs::remove_file(alone.path(&key).join(ONLY_HERE)).unwrap();
        for _ in 0..2 {
            let here = opened(root.path(), "here", true).await.unwrap();
            here.move_to_storage().await.unwrap();
            assert_eq!(evict(&here), 0);
        }
    }
}
