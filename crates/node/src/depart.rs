//! An actor leaves its worker: captured into the node's hands, then stored.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use ate_name::{OpId, WorkerUid};
use ate_orders::{Capture, Captured, NodeError, SnapshotOrder, Stored};
use ate_snapshot::{ActorIdentity, Asset, DataKey, Manifest, Scope, SecretExposure, SnapshotKey, TemplateIdentity};
use ate_sys::Memory;
use ate_worker::LinkError;
use ate_worker::link::{self, Answer, Command, Refusal};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::Node;
use crate::boxes::Ran;
use crate::orders::{PLATFORM, from_link};
use crate::snapshots::{SnapshotError, Unsaved, image_names};
use crate::workers::{Handle, Memo};

/// Room beyond what the sandbox uses, for the parts of an image that are not memory.
const IMAGE_SLACK: usize = 8 << 20;

/// A capture that has begun.
#[derive(Debug, Default)]
pub(crate) struct Save {
    one: tokio::sync::Mutex<()>,
    /// Calls it off.
    pub(crate) abort: CancellationToken,
}

/// What a worker has given up and nobody has stored yet. It counts as held all the while that it is written down: a node that
/// leaves waits for it, and its worker is not ended.
#[derive(Clone, Debug)]
pub(crate) struct InHand {
    taken: Arc<Mutex<Taken>>,
    /// The worker that keeps hold of it too until it is stored.
    worker: Arc<Handle>,
}

#[derive(Debug)]
struct Taken {
    memory: Option<(Memory, usize)>,
    archive: Option<std::fs::File>,
    ran: Ran,
    /// Disk that is set aside for it.
    room: Option<std::fs::File>,
}

impl InHand {
    fn new(taken: Taken, worker: &Arc<Handle>) -> Self {
        Self { taken: Arc::new(Mutex::new(taken)), worker: Arc::clone(worker) }
    }
}

impl Node {
    pub(crate) async fn run_capture(self: &Arc<Self>, order: Capture) -> Result<Captured, NodeError> {
        let op = order.op;
        // One that is asked for twice is done once: the second finds what the first has taken out.
        let save = self.saves.of(&op);
        let _one = save.one.lock().await;
        let captured = self.take_out(order, &save.abort).await;
        if let Err(error @ (NodeError::Aborted | NodeError::NotSaved(_))) = &captured {
            self.kept.lock().insert(op, error.clone());
        }
        captured
    }

    async fn take_out(self: &Arc<Self>, order: Capture, abort: &CancellationToken) -> Result<Captured, NodeError> {
        if self.captured.lock().contains_key(&order.op) {
            return Ok(Captured::default());
        }
        let handle = self.worker(order.worker)?;
        let Some((ran, workload, memory_bytes)) = handle.hosted(order.actor, order.generation) else {
            return self.take_back(&handle, order.op).await.map(|()| Captured::default());
        };
        // It has been told that the actor goes on, and an order that comes late must not take it out.
        if let Some(error) = self.kept.lock().get(&order.op) {
            return Err(error.clone());
        }
        let failed = |error: std::io::Error| NodeError::NotSaved(format!("cannot set room aside: {error}"));
        let room = match self.set_room_aside(memory_bytes).await {
            // What is elsewhere too can be fetched again; an actor that cannot be saved cannot.
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => {
                self.evict_copies(0).await;
                self.set_room_aside(memory_bytes).await
            }
            other => other,
        };
        let room = room.map_err(failed)?;
        let (full, data) = (order.full, workload.durable_bytes.is_some());
        let (node, length) = (Arc::clone(self), usize::try_from(memory_bytes).unwrap_or(0) + IMAGE_SLACK);
        let into = tokio::task::spawn_blocking(move || {
            let memory = full.then(|| node.memories.take(length)).transpose()?;
            Ok((memory, data.then(|| node.snapshots.scratch_file()).transpose()?))
        });
        let (memory, archive) = into.await.map_err(std::io::Error::other).flatten().map_err(failed)?;
        let mut fds = Vec::new();
        fds.extend(memory.as_ref().map(AsFd::as_fd));
        fds.extend(archive.as_ref().map(AsFd::as_fd));
        fds.extend(data.then(|| room.as_fd()));
        let command = Command::Capture(link::Capture {
            op: order.op,
            actor: order.actor,
            generation: order.generation,
            memory: order.full,
            data,
            if_idle: order.if_idle,
        });
        if abort.is_cancelled() {
            return Err(NodeError::Aborted);
        }
        let answer = handle.link.call(command, &fds).await;
        drop(fds);
        match answer {
            Ok(Answer::Captured { image_bytes, phases }) => {
                let length = usize::try_from(image_bytes).unwrap_or(0);
                let memory = memory.map(|memory| (memory, length));
                let in_hand = InHand::new(Taken { memory, archive, ran, room: Some(room) }, &handle);
                self.captured.lock().insert(order.op, in_hand);
                ate_failpoint::reached("node.captured");
                handle.vacate(order.actor, order.generation);
                self.never_again(order.actor, order.generation);
                Ok(Captured { phases })
            }
            Ok(other) => Err(NodeError::Failed(format!("the worker answered {other:?}"))),
            Err(LinkError::Refused(Refusal::Captured)) => {
                self.take_back(&handle, order.op).await.map(|()| Captured::default())
            }
            Err(error) => Err(from_link(error)),
        }
    }

    async fn set_room_aside(self: &Arc<Self>, memory_bytes: u64) -> std::io::Result<std::fs::File> {
        let node = Arc::clone(self);
        let room = tokio::task::spawn_blocking(move || node.snapshots.reserve(memory_bytes + IMAGE_SLACK as u64)).await;
        room.map_err(std::io::Error::other).flatten()
    }

    /// Takes into the node's hands what a worker captured for an earlier one.
    pub(crate) async fn take_back(&self, handle: &Arc<Handle>, op: OpId) -> Result<(), NodeError> {
        let (answer, fds) = handle.link.exchange(Command::Recall { op }, &[]).await.map_err(from_link)?;
        let Answer::Recalled(recalled) = answer else {
            return Err(NodeError::Failed(format!("the worker answered {answer:?}")));
        };
        let unclear =
            |error: &dyn std::fmt::Display| NodeError::Failed(format!("what was captured is unclear: {error}"));
        let Memo { ran, .. } = serde_json::from_value(recalled.memo).map_err(|error| unclear(&error))?;
        let mut fds = fds.into_iter();
        let mut next =
            |wanted: bool| if wanted { fds.next().map(Some).ok_or("a descriptor is missing") } else { Ok(None) };
        let memory = next(recalled.memory).map_err(|error| unclear(&error))?;
        let archive = next(recalled.data).map_err(|error| unclear(&error))?.map(std::fs::File::from);
        let length = usize::try_from(recalled.image_bytes).map_err(|error| unclear(&error))?;
        let memory = memory.map(Memory::from_fd).transpose().map_err(|error| unclear(&error))?;
        let memory = memory.map(|memory| (memory, length));
        let in_hand = InHand::new(Taken { memory, archive, ran, room: None }, handle);
        self.captured.lock().insert(op, in_hand);
        Ok(())
    }

    pub(crate) async fn run_store(self: &Arc<Self>, order: SnapshotOrder) -> Result<Stored, NodeError> {
        let key = SnapshotKey::parse(&order.prefix).map_err(|error| NodeError::Refused(error.to_string()))?;
        let data_key = match order.golden {
            true => None,
            false => Some(self.unseal(&order.sealed_key, order.identity.uid)?),
        };
        let flight = self.snapshots.flights.of(&key);
        let _one = flight.lock().await;
        if self.snapshots.is_forgotten(&key) {
            return Err(NodeError::Stale);
        }
        let (node, at) = (Arc::clone(self), key.clone());
        let there = tokio::task::spawn_blocking(move || node.snapshots.stored(&at)).await;
        // Asked twice, or after a restart. What is there may have been settled: written once more it would be another.
        if let Some((manifest, bytes)) = there.map_err(io::Error::other).flatten().map_err(unclear)? {
            self.let_go(order.op);
            return Ok(Stored { manifest, bytes, durable: !self.snapshots.has_tier() });
        }
        let in_hand = self.captured.lock().get(&order.op).cloned().ok_or(NodeError::NothingCaptured)?;
        let (node, op) = (Arc::clone(self), order.op);
        let stored = tokio::task::spawn_blocking(move || {
            node.write_down(&key, &order, &mut in_hand.taken.lock(), data_key.as_ref())
        });
        // If it fails the next try begins with it.
        let (manifest, bytes) = stored
            .await
            .map_err(|error| NodeError::Failed(error.to_string()))?
            .map_err(|error| NodeError::Failed(ate_orders::chain(&error)))?;
        ate_failpoint::reached("node.stored");
        self.let_go(op);
        Ok(Stored { manifest, bytes, durable: !self.snapshots.has_tier() })
    }

    /// Whether something that this worker captured is not stored yet.
    pub(crate) fn holds(&self, handle: &Arc<Handle>) -> bool {
        self.captured.lock().values().any(|in_hand| Arc::ptr_eq(&in_hand.worker, handle))
    }

    /// The worker, if something that it captured is not stored yet.
    pub(crate) fn held_by(&self, worker: WorkerUid) -> Option<Arc<Handle>> {
        let captured = self.captured.lock();
        captured.values().map(|in_hand| &in_hand.worker).find(|handle| handle.birth.uid == worker).cloned()
    }

    /// What was stored need not be held any more, neither here nor in its worker.
    fn let_go(self: &Arc<Self>, op: OpId) {
        let in_hand = self.captured.lock().remove(&op);
        let Some(InHand { taken, worker }) = in_hand else { return };
        drop(taken);
        self.refill_memories();
        self.tasks.spawn(async move {
            if let Err(LinkError::Refused(refusal)) = worker.link.call(Command::Release { op }, &[]).await {
                tracing::warn!(%refusal, "a worker does not let go of what is stored");
            }
        });
    }

    pub(crate) fn refill_memories(self: &Arc<Self>) {
        let node = Arc::clone(self);
        self.tasks.spawn_blocking(move || {
            if let Err(error) = node.memories.refill() {
                tracing::warn!(%error, "no memory for images ahead of need");
            }
        });
    }

    fn write_down(
        &self,
        key: &SnapshotKey,
        order: &SnapshotOrder,
        taken: &mut Taken,
        data_key: Option<&DataKey>,
    ) -> Result<(ate_name::Digest, u64), SnapshotError> {
        taken.room = None;
        let base = order.base.as_ref().filter(|_| order.full).and_then(|at| {
            let base = SnapshotKey::parse(&at.prefix).ok()?;
            let manifest = self.snapshots.manifest(&base, &at.manifest).ok()?;
            let loaded = self.snapshots.base(&base, manifest.image?.digest).ok()?;
            Some((base, loaded))
        });
        let io = |what| move |source| SnapshotError::Io { what, key: key.to_string(), source };
        let manifest = self.new_manifest(order, &taken.ran);
        let archive =
            taken.archive.as_ref().map(std::fs::File::try_clone).transpose().map_err(io("read the archive"))?;
        let image = taken.memory.as_mut().map(|(memory, length)| memory.map(*length)).transpose();
        let image = image.map_err(io("map the image"))?;
        self.snapshots.save(key, Unsaved { manifest, image: image.as_deref(), archive, base, key: data_key })
    }

    fn new_manifest(&self, order: &SnapshotOrder, ran: &Ran) -> Manifest {
        Manifest {
            format: ate_snapshot::FORMAT,
            sandbox_class: "gvisor".to_owned(),
            assets: ran
                .assets
                .iter()
                .map(|(name, asset)| (name.clone(), Asset { url: asset.url.clone(), sha256: asset.sha256 }))
                .collect(),
            version_label: ran.label.clone(),
            architecture: self.host.architecture.to_owned(),
            cpu_features: self.host.cpu_features.clone(),
            platform: PLATFORM.to_owned(),
            actor: ActorIdentity { uid: order.identity.uid, key: order.identity.key.clone() },
            template: TemplateIdentity { uid: order.workload.template_uid, key: order.workload.template.clone() },
            generation: order.identity.generation,
            op: order.op,
            created: jiff::Timestamp::now(),
            scope: if order.full { Scope::Full } else { Scope::Data },
            base: None,
            image: None,
            workload: ran.workload,
            files: Vec::new(),
            secret_exposure: SecretExposure::None,
            encryption: None,
            golden: order.golden,
            images: image_names(&order.workload),
            proof: None,
            unknown: Default::default(),
        }
    }
}

/// Whether a snapshot is there cannot be told now: the order is given again.
pub(crate) fn unclear(error: io::Error) -> NodeError {
    NodeError::Failed(format!("cannot tell whether the snapshot is there: {error}"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::path::Path;
    use std::time::Duration;

    use ate_snapshot::{InstanceKey, Location, MANIFEST, SnapshotId};
    use base64::Engine as _;

    use super::*;
    use crate::stub::{self, Stub};

    fn order() -> (SnapshotKey, SnapshotOrder) {
        let (op, identity) = (OpId::from_random([2; 16]), stub::identity());
        let id = SnapshotId { actor: identity.uid, generation: identity.generation, op };
        let location = Location::parse("gs://bucket/here").unwrap();
        let key = SnapshotKey { location, actor: identity.key.clone(), id };
        let data_key = DataKey::from_random([1; 32]);
        let wrapped = InstanceKey::from_bytes([7; 32]).wrap(&data_key, identity.uid, [1; 12]);
        let order = SnapshotOrder {
            op,
            identity,
            workload: stub::workload(),
            prefix: key.to_string(),
            full: false,
            base: None,
            golden: false,
            sealed_key: base64::engine::general_purpose::STANDARD.encode(wrapped.as_bytes()),
        };
        (key, order)
    }

    /// Lets the snapshot be written as far as its first file. Returns the file that goes when the writing has begun, and the
    /// one that has to be opened for it to go on; it fails then.
    fn obstructed(directory: &Path) -> (std::path::PathBuf, std::path::PathBuf) {
        std::fs::create_dir_all(directory).unwrap();
        let (half, pipe) = (directory.join(MANIFEST), directory.join("data"));
        std::fs::write(&half, "not a manifest").unwrap();
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        (half, pipe)
    }

    #[tokio::test]
    async fn what_is_being_written_down_is_held_until_it_is_stored() {
        let directory = tempfile::tempdir().unwrap();
        let node = stub::node(directory.path());
        let (key, order) = order();
        let archive = tempfile::tempfile().unwrap();
        let worker = Arc::new(Stub::new(HashMap::from([(order.op, archive)])));
        let handle = worker.join(&node).await.unwrap();
        let (half, pipe) = obstructed(&node.snapshots.path(&key));
        let storing = tokio::spawn({
            let (node, order) = (Arc::clone(&node), order.clone());
            async move { node.run_store(order).await }
        });
        while half.exists() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }

        let (held, owed) = (node.holds(&handle), node.owes());
        node.retire(vec![handle.birth.uid]);
        drop(std::fs::File::open(pipe).unwrap());
        assert!(held, "its worker is not ended");
        assert!(owed, "and the node does not leave");
        assert!(storing.await.unwrap().is_err(), "a pipe is no file");
        assert!(node.holds(&handle) && !worker.stopped.is_cancelled(), "the next try begins with it");

        node.run_store(order).await.unwrap();
        assert!(!node.holds(&handle) && !node.owes());
        worker.stopped.cancelled().await;
        assert!(worker.retained.lock().is_empty(), "it was told that it need not keep it");
    }

    #[tokio::test]
    async fn nothing_is_left_of_captures_however_many_asked_for_one() {
        let directory = tempfile::tempdir().unwrap();
        let node = stub::node(directory.path());
        let op = OpId::from_random([1; 16]);
        let capture = || {
            let (worker, identity) = (ate_name::WorkerUid::from_random([1; 16]), stub::identity());
            let (actor, generation) = (identity.uid, identity.generation);
            node.run_capture(Capture { op, worker, actor, generation, full: true, if_idle: false })
        };
        let asked = node.saves.of(&op);
        let (first, second) = tokio::join!(capture(), capture());
        assert!(first.is_err() && second.is_err(), "there is no such worker");
        assert!(node.saves.find(&op).is_some(), "somebody else still waits");
        drop(asked);
        assert!(node.saves.find(&op).is_none());
    }

    #[tokio::test]
    async fn what_a_worker_of_another_build_holds_is_taken_from_it_and_stored() {
        let directory = tempfile::tempdir().unwrap();
        let node = stub::node(directory.path());
        let (key, order) = order();
        let retained = HashMap::from([(order.op, tempfile::tempfile().unwrap())]);
        let worker = Arc::new(Stub { build: "another".to_owned(), ..Stub::new(retained) });
        worker.join(&node).await.expect_err("a node adopts only its own kind");
        worker.dies.notify_one();
        assert!(node.handles().is_empty() && node.owes());
        node.run_store(order).await.unwrap();
        assert!(node.snapshots.is_here(&key) && !node.owes());
    }

    #[tokio::test]
    async fn a_worker_of_another_build_goes_when_what_it_holds_is_stored_and_not_before() {
        let directory = tempfile::tempdir().unwrap();
        let node = stub::node(directory.path());
        let order = order().1;
        let retained = HashMap::from([(order.op, tempfile::tempfile().unwrap())]);
        let worker = Arc::new(Stub { build: "another".to_owned(), ..Stub::new(retained) });
        let (_, place) = worker.settle(&node);
        node.adopt().await;
        assert!(node.handles().is_empty() && place.exists(), "if this node ends now, the next one finds it");
        node.run_store(order).await.unwrap();
        node.tasks.close();
        node.tasks.wait().await;
        assert!(!place.exists() && worker.retained.lock().is_empty());
    }

    #[tokio::test]
    async fn a_worker_that_is_to_go_outlives_a_node_that_stops_before_all_is_stored() {
        let directory = tempfile::tempdir().unwrap();
        let node = stub::node(directory.path());
        let worker = Arc::new(Stub::new(HashMap::from([(order().1.op, tempfile::tempfile().unwrap())])));
        let handle = worker.join(&node).await.unwrap();
        node.retire(vec![handle.birth.uid]);
        assert_eq!(node.stop(&[]).await, [handle.birth.uid]);
        assert!(!worker.stopped.is_cancelled(), "it waits for the next node");
    }
}
