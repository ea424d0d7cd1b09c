//! A snapshot of one actor, written anew as another's.
//!
//! What lies under the seal is the same, a difference to the golden included: it is only sealed with the other actor's key,
//! for its place, and described by a manifest that names the other actor. Nothing is decoded.

use std::io;
use std::sync::Arc;

use ate_name::Digest;
use ate_orders::{CopyOrder, NodeError, Stored};
use ate_snapshot::{ActorIdentity, DataKey, MANIFEST, Manifest, SnapshotKey};

use crate::Node;
use crate::depart::unclear;
use crate::orders::unusable;
use crate::snapshots::{SnapshotError, Snapshots};

impl Node {
    pub(crate) async fn run_copy(self: &Arc<Self>, order: CopyOrder) -> Result<Stored, NodeError> {
        let parse = |text: &str| SnapshotKey::parse(text).map_err(|error| NodeError::Refused(error.to_string()));
        let (from, to) = (parse(&order.from.prefix)?, parse(&order.prefix)?);
        let opens = Arc::new(self.unseal(&order.from_key, order.from_actor)?);
        let seals = Arc::new(self.unseal(&order.sealed_key, to.id.actor)?);
        let flight = self.snapshots.flights.of(&to);
        let _one = flight.lock().await;
        if self.snapshots.is_forgotten(&to) {
            return Err(NodeError::Stale);
        }
        let durable = !self.snapshots.has_tier();
        let (node, at) = (Arc::clone(self), to.clone());
        let there = tokio::task::spawn_blocking(move || node.snapshots.stored(&at)).await;
        if let Some((manifest, bytes)) = there.map_err(io::Error::other).flatten().map_err(unclear)? {
            return Ok(Stored { manifest, bytes, durable });
        }
        let manifest = self.snapshots.ensure(&from, &order.from.manifest).await.map_err(unusable)?;
        if manifest.golden || manifest.actor.uid != order.from_actor {
            return Err(NodeError::Refused(format!("snapshot {from} is not one of actor {}", order.from_actor)));
        }
        let again = (from.clone(), manifest.clone());
        let write = |from: SnapshotKey, manifest: Manifest| {
            let (node, to) = (Arc::clone(self), to.clone());
            let (opens, seals) = (Arc::clone(&opens), Arc::clone(&seals));
            tokio::task::spawn_blocking(move || {
                node.snapshots.copy((&from, &manifest, &opens), (&to, of(&manifest, &to), &seals))
            })
        };
        let joined = |error: tokio::task::JoinError| NodeError::Failed(error.to_string());
        let written = match write(from, manifest).await.map_err(joined)? {
            Err(SnapshotError::Unusable { key, reason }) if self.snapshots.can_fetch(&again.0) => {
                tracing::warn!(snapshot = key, reason, "the copy on this disk is damaged: fetching it again");
                let (from, manifest) = again;
                self.snapshots.fetch_again(&from, &manifest).await.map_err(unusable)?;
                write(from, manifest).await.map_err(joined)?
            }
            other => other,
        };
        let (manifest, bytes) = written.map_err(|error| match error {
            SnapshotError::Io { .. } => NodeError::Failed(ate_orders::chain(&error)),
            error => unusable(error),
        })?;
        Ok(Stored { manifest, bytes, durable })
    }
}

/// The manifest of a copy, without its files.
fn of(manifest: &Manifest, to: &SnapshotKey) -> Manifest {
    Manifest {
        actor: ActorIdentity { uid: to.id.actor, key: to.actor.clone() },
        generation: to.id.generation,
        op: to.id.op,
        created: jiff::Timestamp::now(),
        files: Vec::new(),
        ..manifest.clone()
    }
}

impl Snapshots {
    /// Writes a snapshot that holds what another does, sealed with another key. Blocks.
    pub(crate) fn copy(
        &self,
        from: (&SnapshotKey, &Manifest, &DataKey),
        to: (&SnapshotKey, Manifest, &DataKey),
    ) -> Result<(Digest, u64), SnapshotError> {
        let key = to.0;
        self.copy_files(from, to).inspect_err(|_| self.forget_half(key))
    }

    fn copy_files(
        &self,
        (from, manifest, opens): (&SnapshotKey, &Manifest, &DataKey),
        (to, mut copy, seals): (&SnapshotKey, Manifest, &DataKey),
    ) -> Result<(Digest, u64), SnapshotError> {
        let io = |source| SnapshotError::Io { what: "write the files", key: to.to_string(), source };
        let directory = self.path(to);
        std::fs::create_dir_all(&directory).map_err(io)?;
        // A copy that was cut off is written over.
        let _ = std::fs::remove_file(directory.join(MANIFEST));
        for file in &manifest.files {
            let mut written = None;
            let read = self.read(from, manifest, file.role, Some(opens), |content| {
                let stored =
                    self.write(to, &directory, &file.name, Some(seals), |out| io::copy(content, out).map(drop));
                written = Some(stored);
                Ok(())
            });
            // What cannot be read ends in either; what cannot be written is no fault of what is read.
            read?;
            let stored = written.expect("what was read was taken").map_err(io)?;
            copy.files.push(ate_snapshot::File { name: file.name.clone(), role: file.role, stored });
        }
        self.complete(to, &mut copy, Some(seals))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::io::{Read as _, Write as _};

    use ate_name::{ActorKey, ActorUid, Generation, ObjectKey, OpId, TemplateUid};
    use ate_snapshot::{Location, Scope, SecretExposure, SnapshotId, TemplateIdentity};

    use super::*;
    use crate::snapshots::Unsaved;

    fn key(n: u8, name: &str) -> SnapshotKey {
        let id = SnapshotId {
            actor: ActorUid::from_random([n; 16]),
            generation: Generation::new(3),
            op: OpId::from_random([n; 16]),
        };
        let location = Location::parse("gs://bucket/here").unwrap();
        SnapshotKey { location, actor: ActorKey::parse("space", name).unwrap(), id }
    }

    fn manifest(key: &SnapshotKey) -> Manifest {
        Manifest {
            format: ate_snapshot::FORMAT,
            sandbox_class: "gvisor".to_owned(),
            assets: BTreeMap::new(),
            version_label: String::new(),
            architecture: "amd64".to_owned(),
            cpu_features: BTreeSet::new(),
            platform: "systrap".to_owned(),
            actor: ActorIdentity { uid: key.id.actor, key: key.actor.clone() },
            template: TemplateIdentity { uid: TemplateUid::from_random([7; 16]), key: ObjectKey::new("ns", "t") },
            generation: key.id.generation,
            op: key.id.op,
            created: jiff::Timestamp::UNIX_EPOCH,
            scope: Scope::Full,
            base: None,
            image: None,
            workload: Digest::from_bytes([0; 32]),
            files: Vec::new(),
            secret_exposure: SecretExposure::None,
            encryption: None,
            golden: false,
            images: BTreeSet::new(),
            proof: None,
            unknown: BTreeMap::new(),
        }
    }

    /// A snapshot with an image and files.
    pub(crate) fn saved(snapshots: &Snapshots, seal: &DataKey) -> (SnapshotKey, Manifest) {
        let from = key(1, "from");
        let mut archive = snapshots.scratch_file().unwrap();
        archive.write_all(b"its files").unwrap();
        let image = vec![42; 100_000];
        let unsaved = Unsaved {
            manifest: manifest(&from),
            image: Some(&image),
            archive: Some(archive),
            base: None,
            key: Some(seal),
        };
        let (digest, _) = snapshots.save(&from, unsaved).unwrap();
        let manifest = snapshots.manifest(&from, &digest).unwrap();
        (from, manifest)
    }

    fn opened() -> (tempfile::TempDir, Snapshots) {
        let directory = tempfile::tempdir().unwrap();
        let snapshots = Snapshots::open(&directory.path().join("snapshots"), directory.path(), None).unwrap();
        (directory, snapshots)
    }

    #[test]
    fn a_copy_holds_the_same_and_opens_with_its_own_key_only() {
        let (_directory, snapshots) = opened();
        let (first, second) = (DataKey::from_random([1; 32]), DataKey::from_random([2; 32]));
        let (from, original) = saved(&snapshots, &first);
        let to = key(2, "to");
        let (digest, bytes) = snapshots.copy((&from, &original, &first), (&to, of(&original, &to), &second)).unwrap();
        assert_eq!(snapshots.stored(&to).unwrap(), Some((digest, bytes)));
        let copy = snapshots.manifest(&to, &digest).unwrap();
        let mut text = String::new();
        snapshots.archive(&to, &copy, Some(&second)).unwrap().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "its files");
        let mut memory = ate_sys::Memory::with_capacity("copy", 100_000).unwrap();
        let length = snapshots.image_into(&to, &copy, Some(&second), &mut memory).unwrap();
        assert!(length == 100_000 && memory.map(length).unwrap().iter().all(|byte| *byte == 42));
        assert!(snapshots.archive(&to, &copy, Some(&first)).is_err(), "the other's key does not open it");
    }

    #[test]
    fn what_is_damaged_is_not_copied() {
        let (_directory, snapshots) = opened();
        let (first, second) = (DataKey::from_random([1; 32]), DataKey::from_random([2; 32]));
        let (from, original) = saved(&snapshots, &first);
        let file = snapshots.path(&from).join("data");
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, bytes).unwrap();
        let to = key(2, "to");
        let copied = snapshots.copy((&from, &original, &first), (&to, of(&original, &to), &second));
        assert!(matches!(copied, Err(SnapshotError::Unusable { .. })), "{copied:?}");
        assert_eq!(snapshots.stored(&to).unwrap(), None);
        assert!(!snapshots.path(&to).exists(), "no half of it is left");
    }

    #[test]
    fn what_was_being_written_when_a_process_ended_is_gone_with_the_next_one() {
        let (directory, snapshots) = opened();
        let seal = DataKey::from_random([1; 32]);
        let (whole, manifest) = saved(&snapshots, &seal);
        let half = key(2, "half");
        std::fs::create_dir_all(snapshots.path(&half)).unwrap();
        std::fs::write(snapshots.path(&half).join("memory"), [1; 1000]).unwrap();
        let next = Snapshots::open(&directory.path().join("snapshots"), directory.path(), None).unwrap();
        assert!(!next.path(&half).exists() && !next.path(&half).parent().unwrap().exists());
        assert!(next.archive(&whole, &manifest, Some(&seal)).unwrap().is_some(), "the others are as they were");
    }
}
