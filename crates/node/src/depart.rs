//! An actor leaves its worker: captured into the node's hands, then stored.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use ate_name::OpId;
use ate_orders::{Capture, Captured, NodeError, SnapshotOrder, Stored};
use ate_snapshot::{ActorIdentity, Asset, DataKey, Manifest, Scope, SecretExposure, SnapshotKey, TemplateIdentity};
use ate_sys::Memory;
use ate_worker::LinkError;
use ate_worker::link::{self, Answer, Command, Refusal};

use crate::Node;
use crate::boxes::Ran;
use crate::orders::{PLATFORM, from_link};
use crate::snapshots::{SnapshotError, Unsaved, image_names};
use crate::workers::{Handle, Memo};

/// Room beyond what the sandbox uses, for the parts of an image that are not memory.
const IMAGE_SLACK: usize = 8 << 20;

/// What a worker has given up and nobody has stored yet.
#[derive(Debug)]
pub(crate) struct InHand {
    memory: Option<(Memory, usize)>,
    archive: Option<std::fs::File>,
    ran: Ran,
    /// The worker that keeps hold of it too until it is stored.
    worker: Arc<Handle>,
    /// Disk that is set aside for it.
    room: Option<std::fs::File>,
}

impl Node {
    pub(crate) async fn run_capture(self: &Arc<Self>, order: Capture) -> Result<Captured, NodeError> {
        let op = order.op;
        let abort = self.capturing.lock().entry(op).or_default().clone();
        // One that is asked for twice is done once: the second finds what the first has taken out.
        let flight = self.saves.of(&op);
        let captured = {
            let _one = flight.lock().await;
            self.take_out(order, &abort).await
        };
        if let Err(error @ (NodeError::Aborted | NodeError::NotSaved(_))) = &captured {
            self.kept.lock().insert(op, error.clone());
        }
        if Arc::strong_count(&flight) == 1 {
            self.capturing.lock().remove(&op);
        }
        captured
    }

    async fn take_out(
        self: &Arc<Self>,
        order: Capture,
        abort: &tokio_util::sync::CancellationToken,
    ) -> Result<Captured, NodeError> {
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
                let in_hand = InHand { memory, archive, ran, worker: Arc::clone(&handle), room: Some(room) };
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
        let in_hand = InHand { memory, archive, ran, worker: Arc::clone(handle), room: None };
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
            let in_hand = self.captured.lock().remove(&order.op);
            if let Some(in_hand) = in_hand {
                self.release(order.op, in_hand);
            }
            return Ok(Stored { manifest, bytes, durable: !self.snapshots.has_tier() });
        }
        let in_hand = self.captured.lock().remove(&order.op).ok_or(NodeError::NothingCaptured)?;
        let (node, op) = (Arc::clone(self), order.op);
        let stored =
            tokio::task::spawn_blocking(move || node.write_down(&key, &order, in_hand, data_key.as_ref())).await;
        match stored.map_err(|error| NodeError::Failed(error.to_string()))? {
            Ok((manifest, bytes, in_hand)) => {
                ate_failpoint::reached("node.stored");
                self.release(op, in_hand);
                Ok(Stored { manifest, bytes, durable: !self.snapshots.has_tier() })
            }
            Err(failed) => {
                let (error, in_hand) = *failed;
                // Kept: the next try begins with it.
                self.captured.lock().insert(op, in_hand);
                Err(NodeError::Failed(ate_orders::chain(&error)))
            }
        }
    }

    /// Whether something that this worker captured is not stored yet.
    pub(crate) fn holds(&self, handle: &Arc<Handle>) -> bool {
        self.captured.lock().values().any(|in_hand| Arc::ptr_eq(&in_hand.worker, handle))
    }

    /// What was stored need not be held any more, neither here nor in its worker.
    fn release(self: &Arc<Self>, op: OpId, in_hand: InHand) {
        let worker = Arc::clone(&in_hand.worker);
        drop(in_hand);
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
        mut in_hand: InHand,
        data_key: Option<&DataKey>,
    ) -> Result<(ate_name::Digest, u64, InHand), Box<(SnapshotError, InHand)>> {
        in_hand.room = None;
        let base = order.base.as_ref().filter(|_| order.full).and_then(|at| {
            let base = SnapshotKey::parse(&at.prefix).ok()?;
            let manifest = self.snapshots.manifest(&base, &at.manifest).ok()?;
            let loaded = self.snapshots.base(&base, manifest.image?.digest).ok()?;
            Some((base, loaded))
        });
        let manifest = self.new_manifest(order, &in_hand.ran);
        let archive = match in_hand.archive.as_ref().map(std::fs::File::try_clone).transpose() {
            Ok(archive) => archive,
            Err(source) => {
                let error = SnapshotError::Io { what: "read the archive", key: key.to_string(), source };
                return Err(Box::new((error, in_hand)));
            }
        };
        let result = match &mut in_hand.memory {
            Some((memory, length)) => match memory.map(*length) {
                Ok(image) => {
                    self.snapshots.save(key, Unsaved { manifest, image: Some(&image), archive, base, key: data_key })
                }
                Err(source) => Err(SnapshotError::Io { what: "map the image", key: key.to_string(), source }),
            },
            None => self.snapshots.save(key, Unsaved { manifest, image: None, archive, base, key: data_key }),
        };
        match result {
            Ok((manifest, bytes)) => Ok((manifest, bytes, in_hand)),
            Err(error) => Err(Box::new((error, in_hand))),
        }
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
            unknown: Default::default(),
        }
    }
}

/// Whether a snapshot is there cannot be told now: the order is given again.
pub(crate) fn unclear(error: io::Error) -> NodeError {
    NodeError::Failed(format!("cannot tell whether the snapshot is there: {error}"))
}
