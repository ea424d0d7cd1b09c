//! Snapshots that nobody may know of: of an actor whose record is from an older backup.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use ate_blob::BlobPath;
use ate_orders::{Findings, FoundSnapshot, NodeError, SearchOrder, SnapshotAt};
use ate_snapshot::{Content, DataKey, File, Home, MANIFEST, Manifest, Scope, SnapshotKey};
use futures::TryStreamExt;

use crate::Node;
use crate::orders::unusable;
use crate::snapshots::{SnapshotError, Snapshots};
use crate::tier::{MAX_MANIFEST, object, storage};

/// So many are looked into, from the newest on. An actor has one or two.
const MOST_READ: usize = 64;

/// So many are told of.
const MOST_FOUND: usize = 16;

/// So many names are kept in mind, the newest; and of each so many files, more than a manifest may name.
const MOST_NAMES: usize = 4096;
const MOST_FILES: usize = 65;

impl Node {
    pub(crate) async fn run_search(self: &Arc<Self>, order: SearchOrder) -> Result<Findings, NodeError> {
        let home = Home::parse(&order.home).map_err(|error| NodeError::Refused(error.to_string()))?;
        let key = self.unseal(&order.sealed_key, home.uid)?;
        let found = match order.durable && self.snapshots.has_tier() {
            true => self.snapshots.search_storage(&home, &key).await,
            false => {
                let node = Arc::clone(self);
                let searched = tokio::task::spawn_blocking(move || node.snapshots.search_disk(&home, &key)).await;
                searched.map_err(|panic| NodeError::Failed(panic.to_string()))?
            }
        };
        found.map_err(unusable)
    }
}

impl Snapshots {
    /// Blocks.
    fn search_disk(&self, home: &Home, key: &DataKey) -> Result<Findings, SnapshotError> {
        let io = |source| SnapshotError::Io { what: "look for the files", key: home.to_string(), source };
        let entries = match std::fs::read_dir(self.directory().join(home.uid.to_string())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Findings::default()),
            entries => entries.map_err(io)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.push(entry.map_err(io)?.file_name().to_string_lossy().into_owned());
        }
        let mut found = Found::new(home, key);
        for at in newest(home, names) {
            let bytes = match std::fs::read(self.path(&at).join(MANIFEST)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                bytes => bytes.map_err(io)?,
            };
            // Also that its files are there.
            let is_whole = self.stored(&at).map_err(io)?.is_some();
            found.take(&at, &bytes, |_| is_whole)?;
        }
        Ok(found.findings)
    }

    async fn search_storage(&self, home: &Home, key: &DataKey) -> Result<Findings, SnapshotError> {
        let Some(blobs) = &self.blobs else { return Ok(Findings::default()) };
        let failed = |source| SnapshotError::Storage { key: home.to_string(), source: Box::new(source) };
        let below = BlobPath::parse(&home.to_string())
            .map_err(|error| SnapshotError::Unusable { key: home.to_string(), reason: error.to_string() })?;
        let mut there = BTreeMap::<SnapshotKey, BTreeMap<String, u64>>::new();
        let mut objects = blobs.list(&below);
        while let Some(object) = objects.try_next().await.map_err(failed)? {
            let path = object.path.to_string();
            let mut segments = path.rsplit('/');
            let (Some(file), Some(name)) = (segments.next(), segments.next()) else { continue };
            let Ok(at) = home.snapshot(name) else { continue };
            let files = there.entry(at).or_default();
            if files.len() < MOST_FILES || file == MANIFEST {
                files.insert(file.to_owned(), object.size);
            }
            if there.len() > MOST_NAMES {
                there.pop_first();
            }
        }
        let mut found = Found::new(home, key);
        for (at, files) in there.iter().rev() {
            // A snapshot is where its manifest is.
            let Some(length) = files.get(MANIFEST) else {
                found.findings.remains.push(at.to_string());
                continue;
            };
            if *length > MAX_MANIFEST {
                continue;
            }
            match blobs.get_bytes(&object(at, MANIFEST)?, MAX_MANIFEST).await.map_err(storage(at)) {
                Ok(bytes) => {
                    let there = |file: &File| files.get(file.name.as_str()) == Some(&file.stored.length);
                    found.take(at, &bytes, |manifest| manifest.files.iter().all(there))?;
                }
                // Removed just now.
                Err(SnapshotError::Missing { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found.findings)
    }
}

/// What was found so far, and how much of what was looked at was nothing.
struct Found<'a> {
    home: &'a Home,
    key: &'a DataKey,
    read: usize,
    findings: Findings,
}

impl<'a> Found<'a> {
    fn new(home: &'a Home, key: &'a DataKey) -> Self {
        Self { home, key, read: 0, findings: Findings::default() }
    }

    /// What was not written for this actor and this place, by who has the actor's key, is no snapshot of it. Too much of that is an
    /// error: the newest may lie below it.
    fn take(
        &mut self,
        at: &SnapshotKey,
        bytes: &[u8],
        is_whole: impl Fn(&Manifest) -> bool,
    ) -> Result<(), SnapshotError> {
        if self.findings.snapshots.len() >= MOST_FOUND {
            return Ok(());
        }
        self.read += 1;
        if self.read > MOST_READ {
            let reason = format!("{MOST_READ} things newer than it are no snapshots of the actor: remove them");
            return Err(SnapshotError::Unusable { key: self.home.to_string(), reason });
        }
        match Manifest::read_proven(bytes, self.key) {
            Ok(manifest) if manifest.id() == at.id && is_whole(&manifest) => {
                self.findings.snapshots.push(FoundSnapshot {
                    at: SnapshotAt { prefix: at.to_string(), manifest: Content::of(bytes).digest },
                    full: manifest.scope == Scope::Full,
                    bytes: manifest.files.iter().map(|file| file.stored.length).sum(),
                });
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(snapshot = %at, %error, "what lies among an actor's snapshots is left alone");
            }
        }
        Ok(())
    }
}

/// Which of these names are snapshots, newest first.
fn newest(home: &Home, names: Vec<String>) -> Vec<SnapshotKey> {
    let mut keys: Vec<_> = names.iter().filter_map(|name| home.snapshot(name).ok()).collect();
    keys.sort_by(|one, other| other.cmp(one));
    keys
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ate_blob::{Backend, Blobs};
    use ate_name::Generation;
    use ate_snapshot::SnapshotId;

    use super::*;
    use crate::copy::tests::saved;

    fn of(key: &SnapshotKey, generation: u64) -> SnapshotKey {
        let id = SnapshotId { generation: Generation::new(generation), ..key.id };
        SnapshotKey { id, ..key.clone() }
    }

    /// Puts the manifest of one snapshot, and its files, where another would be.
    fn plant(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }

    #[tokio::test]
    async fn only_whole_snapshots_that_were_written_for_the_actor_and_the_place_are_found() {
        let root = tempfile::tempdir().unwrap();
        let (storage, scratch) = (root.path().join("storage"), root.path().join("scratch"));
        for directory in [&storage, &scratch] {
            std::fs::create_dir(directory).unwrap();
        }
        let blobs = Blobs::open(Backend::Directory(storage)).await.unwrap();
        let snapshots = Arc::new(Snapshots::open(&root.path().join("snapshots"), &scratch, Some(blobs)).unwrap());
        let (seal, other) = (DataKey::from_random([1; 32]), DataKey::from_random([2; 32]));
        let (key, manifest) = saved(&snapshots, &seal);
        let home = key.home();
        snapshots.upload(&key, || Some(1)).await.unwrap();

        // Newer by its name: of another time, without its files, half of one, nothing like one.
        plant(&snapshots.path(&key), &snapshots.path(&of(&key, 9)));
        std::fs::create_dir_all(snapshots.path(&of(&key, 8))).unwrap();
        std::fs::write(snapshots.path(&of(&key, 8)).join("memory"), "half").unwrap();
        std::fs::create_dir_all(snapshots.path(&key).with_file_name("..9-x")).unwrap();
        let at = SnapshotAt { prefix: key.to_string(), manifest: Content::of(&manifest.to_bytes().unwrap()).digest };
        let bytes = manifest.files.iter().map(|file| file.stored.length).sum();
        let expected = Findings { snapshots: vec![FoundSnapshot { at, full: true, bytes }], remains: Vec::new() };
        let nothing = Findings::default();
        assert_eq!(snapshots.search_disk(&home, &seal).unwrap(), expected);
        assert_eq!(snapshots.search_storage(&home, &seal).await.unwrap(), expected);
        assert_eq!(snapshots.search_disk(&home, &other).unwrap(), nothing);
        assert_eq!(snapshots.search_storage(&home, &other).await.unwrap(), nothing);

        // Written by somebody who can write to the storage and has no key: it names what nodes would run.
        let mut forged = manifest.clone();
        forged.generation = Generation::new(10);
        let blobs = snapshots.blobs.clone().unwrap();
        blobs
            .put_new(&object(&of(&key, 10), MANIFEST).unwrap(), bytes::Bytes::from(forged.to_bytes().unwrap()))
            .await
            .unwrap();
        blobs.put_new(&object(&of(&key, 11), MANIFEST).unwrap(), bytes::Bytes::from("{")).await.unwrap();
        assert_eq!(snapshots.search_storage(&home, &seal).await.unwrap(), expected);

        // Too long for one; and so much that the newest might lie below it.
        let long = bytes::Bytes::from(vec![b' '; usize::try_from(MAX_MANIFEST).unwrap() + 1]);
        blobs.put_new(&object(&of(&key, 13), MANIFEST).unwrap(), long).await.unwrap();
        assert_eq!(snapshots.search_storage(&home, &seal).await.unwrap(), expected);
        for generation in 100..100 + MOST_READ as u64 {
            blobs.put_new(&object(&of(&key, generation), MANIFEST).unwrap(), bytes::Bytes::from("{}")).await.unwrap();
        }
        assert!(snapshots.search_storage(&home, &seal).await.unwrap_err().to_string().contains("remove them"));
        for generation in 100..100 + MOST_READ as u64 {
            blobs.delete(&object(&of(&key, generation), MANIFEST).unwrap()).await.unwrap();
        }

        std::fs::remove_file(snapshots.path(&key).join("memory")).unwrap();
        assert_eq!(snapshots.search_disk(&home, &seal).unwrap(), nothing, "one of its files is gone");
        let half = of(&key, 12);
        blobs.put_new(&object(&half, "memory").unwrap(), bytes::Bytes::from("half")).await.unwrap();
        let remains = vec![half.to_string()];
        assert_eq!(snapshots.search_storage(&home, &seal).await.unwrap(), Findings { remains, ..expected });
        blobs.delete(&object(&key, "memory").unwrap()).await.unwrap();
        let found = snapshots.search_storage(&home, &seal).await.unwrap();
        assert_eq!(found.snapshots, [], "one of its files is gone there, too");
        snapshots.forget_home(&home).await.unwrap();
        assert_eq!(snapshots.search_storage(&home, &seal).await.unwrap(), nothing);
    }
}
