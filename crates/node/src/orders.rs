//! Orders carried out.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ate_name::{ActorUid, Generation, NodeName, OpId, WorkerUid};
use ate_orders::{
    Activate, Activated, Capture, Captured, CopyOrder, ExecOrder, Exit, LogsOrder, NodeError, NodeReport, Nodes,
    Output, Phase, SnapshotOrder, Source, Stored,
};
use ate_snapshot::{
    ActorIdentity, Asset, DataKey, Expectation, Host, InstanceKey, Manifest, Scope, SecretExposure, SnapshotKey,
    TemplateIdentity, WrappedKey,
};
use ate_sys::Memory;
use ate_worker::LinkError;
use ate_worker::link::{self, Answer, Command, Refusal};
use base64::Engine as _;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::mpsc;

use crate::Node;
use crate::boxes::{Blueprint, Ran};
use crate::snapshots::{SnapshotError, Unsaved, image_names};
use crate::workers::{Handle, Memo};

/// The only platform there is; it is written down because a snapshot depends on it.
const PLATFORM: &str = "systrap";

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

struct Laps {
    last: Instant,
    phases: Vec<Phase>,
}

impl Laps {
    fn start() -> Self {
        Self { last: Instant::now(), phases: Vec::new() }
    }

    fn mark(&mut self, name: &str) {
        let now = Instant::now();
        let micros = u64::try_from((now - self.last).as_micros()).unwrap_or(u64::MAX);
        self.phases.push(Phase { name: name.to_owned(), micros });
        self.last = now;
    }
}

/// What an activation begins with, in memory.
struct Loaded {
    source: link::Source,
    memory: Option<Memory>,
    archive: Option<std::fs::File>,
}

impl Node {
    /// An order that is given twice is carried out once, and one that failed is not tried again by a copy that comes late:
    /// whoever gave it has gone on to another generation.
    async fn run_activate(self: &Arc<Self>, order: Activate) -> Result<Activated, NodeError> {
        let (actor, generation) = (order.identity.uid, order.identity.generation);
        let flight = self.arrivals.of(&actor);
        let _one = flight.lock().await;
        if self.is_spent(actor, generation) {
            return Err(NodeError::Stale);
        }
        if self.worker(order.worker)?.hosted(actor, generation).is_some() {
            // Asked twice: the first answer was lost on its way.
            return Ok(Activated::default());
        }
        let worker = order.worker;
        let mut activated = self.bring_in(order).await;
        if activated.is_ok() && self.is_spent(actor, generation) {
            // It was ended before it had begun.
            let handle = self.worker(worker)?;
            handle.link.call(Command::Discard { actor, generation }, &[]).await.map_err(from_link)?;
            handle.vacate(actor, generation);
            activated = Err(NodeError::Stale);
        }
        if activated.is_err() {
            self.never_again(actor, generation);
        }
        activated
    }

    /// This generation of the actor is over here, and all before it.
    fn never_again(&self, actor: ActorUid, generation: Generation) {
        self.spent.lock().add(actor, generation);
    }

    fn is_spent(&self, actor: ActorUid, generation: Generation) -> bool {
        self.spent.lock().contains(actor, generation)
    }

    async fn bring_in(self: &Arc<Self>, order: Activate) -> Result<Activated, NodeError> {
        let handle = self.worker(order.worker)?;
        let mut laps = Laps::start();
        let _turn = self.turns.acquire().await.map_err(|_| NodeError::WorkerGone)?;
        laps.mark("queue");
        let (assets, snapshot, whence) = match &order.source {
            Source::Boot { runtime } => {
                let assets = runtime.assets.get(self.host.architecture).ok_or_else(|| {
                    NodeError::Refused(format!(
                        "SandboxConfig {:?} has no assets for {arch}, and node {:?} is {arch}\n  add spec.assets.{arch}, or give the pool a sandboxConfigName that has it",
                        runtime.config, self.config.name.as_str(), arch = self.host.architecture
                    ))
                })?;
                (assets.clone(), None, format!("SandboxConfig {:?}", runtime.config))
            }
            Source::Snapshot { at, .. } => {
                let key = SnapshotKey::parse(&at.prefix).map_err(|error| NodeError::Refused(error.to_string()))?;
                let manifest = self.snapshots.ensure(&key, &at.manifest).await.map_err(unusable)?;
                let assets = manifest.assets.iter().map(|(name, Asset { url, sha256 })| {
                    (name.clone(), ate_orders::RuntimeAsset { url: url.clone(), sha256: *sha256 })
                });
                (assets.collect(), Some((key, manifest)), format!("the manifest of snapshot {}", at.prefix))
            }
        };
        let blueprint = self.blueprint(&order.workload, &assets, &whence).await?;
        let loaded = match snapshot {
            Some((key, manifest)) => self.load(&order, key, manifest, &blueprint).await?,
            None => Loaded { source: link::Source::Boot { data: false }, memory: None, archive: None },
        };
        laps.mark("load");
        self.ensure_box(&handle, &blueprint).await?;
        laps.mark("box");
        let (node, actor) = (Arc::clone(self), order.identity.uid);
        let log = tokio::task::spawn_blocking(move || node.logs.append(actor)).await;
        let log = log
            .map_err(std::io::Error::other)
            .flatten()
            .map_err(|error| NodeError::Failed(format!("cannot open the log: {error}")))?;
        let mut fds: Vec<OwnedFd> = vec![log.into()];
        if let Some(memory) = &loaded.memory {
            fds.push(memory.as_fd().try_clone_to_owned().map_err(|error| NodeError::Failed(error.to_string()))?);
        }
        fds.extend(loaded.archive.map(OwnedFd::from));
        let boots = matches!(loaded.source, link::Source::Boot { .. });
        let readyz = order
            .workload
            .containers
            .iter()
            .filter_map(|container| container.readyz.clone())
            .filter(|_| boots || order.probe);
        let command = Command::Activate(Box::new(link::Activate {
            op: order.op,
            identity: order.identity.clone(),
            kind: blueprint.kind.clone(),
            source: loaded.source,
            readyz: readyz.collect(),
            ports: order.workload.ports.iter().map(|port| port.number).collect(),
            egress: order.workload.egress.clone(),
            freeze_after: order.workload.freeze_after,
            memo: serde_json::to_value(Memo { ran: blueprint.ran.clone(), workload: order.workload.clone() })
                .expect("plain data"),
        }));
        // Before the worker agrees: the workload may want to connect while it starts.
        let before = handle.host(&order.identity, &blueprint.ran, &order.workload);
        let answer = handle.link.call(command, &link::borrowed(&fds)).await;
        drop(loaded.memory);
        self.refill_memories();
        match answer {
            Ok(Answer::Activated { phases }) => {
                laps.phases.extend(phases);
                self.prepare_next(handle, blueprint);
                Ok(Activated { phases: laps.phases })
            }
            Ok(other) => Err(NodeError::Failed(format!("the worker answered {other:?}"))),
            Err(error) => {
                handle.take_over(before);
                if matches!(error, LinkError::Refused(Refusal::NotPrepared)) {
                    handle.forget_boxes(&blueprint.kind);
                }
                // A box that did not come up is gone as well; who was refused at the door has used none.
                if !matches!(error, LinkError::Refused(Refusal::Busy | Refusal::Stale)) {
                    self.prepare_next(handle, blueprint);
                }
                Err(from_link(error))
            }
        }
    }

    async fn load(
        self: &Arc<Self>,
        order: &Activate,
        key: SnapshotKey,
        manifest: Manifest,
        blueprint: &Blueprint,
    ) -> Result<Loaded, NodeError> {
        let host = Host {
            node: self.config.name.clone(),
            sandbox_class: "gvisor".to_owned(),
            architecture: self.host.architecture.to_owned(),
            cpu_features: self.host.cpu_features.clone(),
            platform: PLATFORM.to_owned(),
        };
        let scope = match order.source {
            Source::Snapshot { fresh: true, .. } => Scope::Data,
            _ => manifest.scope,
        };
        let expectation = Expectation {
            actor: order.identity.uid,
            template: TemplateIdentity { uid: order.workload.template_uid, key: order.workload.template.clone() },
            scope,
            generation: order.identity.generation,
            workload: blueprint.ran.workload,
        };
        manifest.admit(&host, &expectation).map_err(|refused| NodeError::Refused(refused.to_string()))?;
        let data_key = match manifest.golden {
            true => None,
            false => Some(self.unseal(&order.sealed_key, order.identity.uid)?),
        };
        let (node, data_key) = (Arc::clone(self), Arc::new(data_key));
        match node.clone().read_in(key.clone(), manifest.clone(), data_key.clone(), scope).await {
            Err(SnapshotError::Unusable { reason, .. }) if self.snapshots.can_fetch(&key) => {
                tracing::warn!(snapshot = %key, reason, "the copy on this disk is damaged: fetching it again");
                self.snapshots.fetch_again(&key, &manifest).await.map_err(unusable)?;
                node.read_in(key, manifest, data_key, scope).await.map_err(unusable)
            }
            other => other.map_err(unusable),
        }
    }

    /// Decodes as much of a snapshot of this disk as is wanted.
    async fn read_in(
        self: Arc<Self>,
        key: SnapshotKey,
        manifest: Manifest,
        data_key: Arc<Option<DataKey>>,
        scope: Scope,
    ) -> Result<Loaded, SnapshotError> {
        let name = key.to_string();
        let read = tokio::task::spawn_blocking(move || {
            let data_key = data_key.as_ref().as_ref();
            let archive = self.snapshots.archive(&key, &manifest, data_key)?;
            let data = archive.is_some();
            let loaded = match scope {
                Scope::Data => Loaded { source: link::Source::Boot { data }, memory: None, archive },
                Scope::Full => {
                    let length = manifest.image.map_or(0, |image| usize::try_from(image.length).unwrap_or(usize::MAX));
                    let mut memory = self.memories.take(length).map_err(|source| SnapshotError::Io {
                        what: "make room for the image",
                        key: key.to_string(),
                        source,
                    })?;
                    self.snapshots.image_into(&key, &manifest, data_key, &mut memory)?;
                    Loaded { source: link::Source::Image { data }, memory: Some(memory), archive }
                }
            };
            if !manifest.golden {
                self.snapshots.forget_older(&key);
            }
            Ok(loaded)
        });
        let failed = |error| SnapshotError::Io { what: "read", key: name, source: std::io::Error::other(error) };
        read.await.map_err(failed)?
    }

    pub(crate) fn unseal(&self, sealed: &str, actor: ActorUid) -> Result<DataKey, NodeError> {
        let refused = |error: &dyn std::fmt::Display| {
            NodeError::Refused(format!("the key of the actor's snapshots cannot be used: {error}"))
        };
        let bytes = base64::engine::general_purpose::STANDARD.decode(sealed).map_err(|error| refused(&error))?;
        let wrapped = WrappedKey::parse(&bytes).map_err(|error| refused(&error))?;
        InstanceKey::from_bytes(self.config.instance_key).unwrap(&wrapped, actor).map_err(|error| refused(&error))
    }

    async fn ensure_box(self: &Arc<Self>, handle: &Handle, blueprint: &Arc<Blueprint>) -> Result<(), NodeError> {
        let _one = handle.preparing.lock().await;
        if handle.has_box(&blueprint.kind) {
            return Ok(());
        }
        let (node, plan) = (Arc::clone(self), Arc::clone(blueprint));
        let prepared = tokio::task::spawn_blocking(move || plan.prepare(&node.snapshots)).await;
        let (command, fds) = prepared.map_err(|error| NodeError::Failed(error.to_string()))??;
        handle.link.call(command, &link::borrowed(&fds)).await.map_err(from_link)?;
        handle.add_box(&blueprint.kind, Some(blueprint.template));
        Ok(())
    }

    /// The box is taken; the next one is made while nobody waits for it.
    fn prepare_next(self: &Arc<Self>, handle: Arc<Handle>, blueprint: Arc<Blueprint>) {
        handle.take_box(&blueprint.kind);
        let node = Arc::clone(self);
        self.tasks.spawn(async move {
            if let Err(error) = node.ensure_box(&handle, &blueprint).await {
                tracing::debug!(%error, "no box ahead of need");
            }
        });
    }

    async fn run_capture(self: &Arc<Self>, order: Capture) -> Result<Captured, NodeError> {
        let op = order.op;
        let abort = self.capturing.lock().entry(op).or_default().clone();
        // One that is asked for twice is done once: the second finds what the first has taken out.
        let flight = self.saves.of(&op);
        let captured = {
            let _one = flight.lock().await;
            self.take_out(order, &abort).await
        };
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

    async fn run_store(self: &Arc<Self>, order: SnapshotOrder) -> Result<Stored, NodeError> {
        let key = SnapshotKey::parse(&order.prefix).map_err(|error| NodeError::Refused(error.to_string()))?;
        let data_key = match order.golden {
            true => None,
            false => Some(self.unseal(&order.sealed_key, order.identity.uid)?),
        };
        let flight = self.snapshots.flights.of(&key);
        let _one = flight.lock().await;
        let (node, at) = (Arc::clone(self), key.clone());
        let there = tokio::task::spawn_blocking(move || node.snapshots.stored(&at)).await;
        let in_hand = self.captured.lock().remove(&order.op);
        // Asked twice, or after a restart. What is there may have been settled: written once more it would be another.
        if let Some((manifest, bytes)) = there.map_err(|error| NodeError::Failed(error.to_string()))? {
            if let Some(in_hand) = in_hand {
                self.release(order.op, in_hand);
            }
            return Ok(Stored { manifest, bytes, durable: !self.snapshots.has_tier() });
        }
        let in_hand = in_hand.ok_or(NodeError::NothingCaptured)?;
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

    fn refill_memories(self: &Arc<Self>) {
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

    async fn run_exec(
        self: &Arc<Self>,
        order: ExecOrder,
        mut stdin: mpsc::Receiver<Vec<u8>>,
        output: mpsc::Sender<Output>,
    ) -> Result<Exit, NodeError> {
        let handle = self.worker(order.worker)?;
        let (_, workload, _) = handle.hosted(order.actor, order.generation).ok_or(NodeError::Stale)?;
        let names: Vec<&str> = workload.containers.iter().map(|container| container.name.as_str()).collect();
        let container =
            names.iter().position(|name| order.container.is_empty() || *name == order.container).ok_or_else(|| {
                NodeError::Refused(format!(
                    "the actor has no container {:?}; it has: {}",
                    order.container,
                    names.join(", ")
                ))
            })?;
        let failed = |error: std::io::Error| NodeError::Failed(format!("cannot make a pipe: {error}"));
        let (stdin_read, stdin_write) = std::io::pipe().map_err(failed)?;
        let (stdout_read, stdout_write) = std::io::pipe().map_err(failed)?;
        let (stderr_read, stderr_write) = std::io::pipe().map_err(failed)?;
        let mut writer = pipe::Sender::from_owned_fd(stdin_write.into()).map_err(failed)?;
        tokio::spawn(async move {
            while let Some(bytes) = stdin.recv().await {
                if writer.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        });
        let pumps = [
            tokio::spawn(pump(stdout_read.into(), output.clone(), Output::Stdout)),
            tokio::spawn(pump(stderr_read.into(), output, Output::Stderr)),
        ];
        let exec = ate_sandbox::Exec {
            container,
            args: order.args,
            env: order.env.into_iter().map(|(name, value)| format!("{name}={value}")).collect(),
            cwd: None,
        };
        let command = Command::Exec { actor: order.actor, generation: order.generation, exec };
        let fds: [OwnedFd; 3] = [stdin_read.into(), stdout_write.into(), stderr_write.into()];
        let answer = handle.link.call(command, &link::borrowed(&fds)).await;
        drop(fds);
        for pump in pumps {
            let _ = pump.await;
        }
        match answer.map_err(from_link)? {
            Answer::Exited(exit) => Ok(exit),
            other => Err(NodeError::Failed(format!("the worker answered {other:?}"))),
        }
    }

    fn worker(&self, worker: WorkerUid) -> Result<Arc<Handle>, NodeError> {
        self.workers.lock().get(&worker).cloned().ok_or(NodeError::WorkerGone)
    }
}

/// Passes on what comes out of a pipe until every writer has closed it.
async fn pump(pipe: OwnedFd, output: mpsc::Sender<Output>, kind: fn(Vec<u8>) -> Output) {
    let Ok(mut reader) = pipe::Receiver::from_owned_fd(pipe) else { return };
    let mut buffer = vec![0; 32 << 10];
    while let Ok(read @ 1..) = reader.read(&mut buffer).await {
        if output.send(kind(buffer[..read].to_vec())).await.is_err() {
            return;
        }
    }
}

fn from_link(error: LinkError) -> NodeError {
    match error {
        LinkError::Gone | LinkError::Io(_) => NodeError::WorkerGone,
        LinkError::Refused(refusal) => match refusal {
            Refusal::Stale => NodeError::Stale,
            Refusal::Busy => NodeError::Busy,
            Refusal::Aborted => NodeError::Aborted,
            Refusal::NotSaved(why) => NodeError::NotSaved(why),
            // The next attempt finds one: see `run_activate`.
            Refusal::NotPrepared => NodeError::Busy,
            Refusal::Captured => NodeError::Failed(refusal.to_string()),
            Refusal::Failed(why) => NodeError::Failed(why),
        },
    }
}

pub(crate) fn unusable(error: SnapshotError) -> NodeError {
    match error {
        SnapshotError::Missing { key, .. } => NodeError::NoSnapshot(key),
        error @ (SnapshotError::Io { .. } | SnapshotError::Storage { .. }) => {
            NodeError::Hindered(ate_orders::chain(&error))
        }
        error @ SnapshotError::Unusable { .. } => NodeError::Refused(ate_orders::chain(&error)),
    }
}

/// The one node of a lone machine, as the control plane sees nodes.
#[derive(Debug)]
pub struct LocalNode(pub Arc<Node>);

impl LocalNode {
    fn check(&self, node: &NodeName) -> Result<&Arc<Node>, NodeError> {
        if *node == self.0.config.name { Ok(&self.0) } else { Err(NodeError::UnknownNode(node.clone())) }
    }
}

#[async_trait::async_trait]
impl Nodes for LocalNode {
    async fn report(&self, node: &NodeName) -> Result<NodeReport, NodeError> {
        let node = self.check(node)?;
        let (workers, retained) = node.reports().await;
        let mut holding: std::collections::BTreeSet<OpId> = node.captured.lock().keys().copied().collect();
        holding.extend(retained);
        Ok(NodeReport { workers, holding: holding.into_iter().collect(), only_here: node.snapshots.only_here() })
    }

    async fn activate(&self, node: &NodeName, order: Activate) -> Result<Activated, NodeError> {
        self.check(node)?.run_activate(order).await
    }

    async fn capture(&self, node: &NodeName, order: Capture) -> Result<Captured, NodeError> {
        self.check(node)?.run_capture(order).await
    }

    async fn abort(&self, node: &NodeName, worker: WorkerUid, op: OpId) -> Result<(), NodeError> {
        let node = self.check(node)?;
        if let Some(capturing) = node.capturing.lock().get(&op) {
            capturing.cancel();
        }
        let handle = node.worker(worker)?;
        handle.link.call(Command::Abort { op }, &[]).await.map_err(from_link).map(drop)
    }

    async fn store(&self, node: &NodeName, order: SnapshotOrder) -> Result<Stored, NodeError> {
        self.check(node)?.run_store(order).await
    }

    async fn release(&self, node: &NodeName, op: OpId) -> Result<(), NodeError> {
        let node = self.check(node)?;
        node.captured.lock().remove(&op);
        for handle in node.handles() {
            // One that is gone holds nothing.
            let _ = handle.link.call(Command::Release { op }, &[]).await;
        }
        Ok(())
    }

    async fn copy(&self, node: &NodeName, order: CopyOrder) -> Result<Stored, NodeError> {
        self.check(node)?.run_copy(order).await
    }

    async fn upload(&self, node: &NodeName, prefix: &str) -> Result<(), NodeError> {
        let key = SnapshotKey::parse(prefix).map_err(|error| NodeError::Refused(error.to_string()))?;
        let uploaded = self.check(node)?.snapshots.upload(&key).await;
        uploaded.map_err(|error| match error {
            SnapshotError::Missing { key, .. } => NodeError::NoSnapshot(key),
            error => NodeError::Failed(ate_orders::chain(&error)),
        })
    }

    async fn discard(
        &self,
        node: &NodeName,
        worker: WorkerUid,
        actor: ActorUid,
        generation: Generation,
    ) -> Result<(), NodeError> {
        let handle = self.check(node)?.worker(worker)?;
        // First: one that is still on its way in must not come.
        self.0.never_again(actor, generation);
        handle.link.call(Command::Discard { actor, generation }, &[]).await.map_err(from_link)?;
        handle.vacate(actor, generation);
        Ok(())
    }

    async fn exec(
        &self,
        node: &NodeName,
        order: ExecOrder,
        stdin: mpsc::Receiver<Vec<u8>>,
        output: mpsc::Sender<Output>,
    ) -> Result<Exit, NodeError> {
        self.check(node)?.run_exec(order, stdin, output).await
    }

    async fn logs(
        &self,
        node: &NodeName,
        actor: ActorUid,
        order: LogsOrder,
        lines: mpsc::Sender<String>,
    ) -> Result<(), NodeError> {
        let read = self.check(node)?.logs.read(actor, &order, lines).await;
        read.map_err(|error| NodeError::Failed(format!("cannot read the log of actor {actor}: {error}")))
    }

    async fn forget(&self, node: &NodeName, gone: Option<ActorUid>, prefixes: Vec<String>) -> Result<(), NodeError> {
        let node = self.check(node)?;
        if let Some(actor) = gone {
            node.logs.remove(actor);
        }
        for prefix in prefixes {
            let key = SnapshotKey::parse(&prefix).map_err(|error| NodeError::Refused(error.to_string()))?;
            let forgotten = node.snapshots.forget(&key).await;
            forgotten.map_err(|error| NodeError::Failed(ate_orders::chain(&error)))?;
        }
        Ok(())
    }
}
