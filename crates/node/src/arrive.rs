//! An actor comes into a worker: from its snapshot, from its template's golden, or by booting.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ate_name::{ActorUid, Generation};
use ate_orders::{Activate, Activated, NodeError, Phase, Source};
use ate_snapshot::{
    Asset, DataKey, Expectation, Host, InstanceKey, Manifest, Scope, SnapshotKey, TemplateIdentity, WrappedKey,
};
use ate_sys::Memory;
use ate_worker::LinkError;
use ate_worker::link::{self, Answer, Command, Refusal};
use base64::Engine as _;

use crate::Node;
use crate::boxes::Blueprint;
use crate::orders::{PLATFORM, from_link, unusable};
use crate::snapshots::SnapshotError;
use crate::workers::{Handle, Memo};

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
    pub(crate) async fn run_activate(self: &Arc<Self>, order: Activate) -> Result<Activated, NodeError> {
        let (actor, generation) = (order.identity.uid, order.identity.generation);
        let flight = self.arrivals.of(&actor);
        let waits = flight.try_lock().is_err();
        let _one = flight.lock().await;
        if self.is_spent(actor, generation) {
            // Whoever gave it may have waited in vain for the first answer, and hears the reason from this one.
            let failure = self.failures.lock().get(&actor).filter(|_| waits).cloned();
            return Err(failure
                .filter(|(failed, _)| *failed == generation)
                .map_or(NodeError::Stale, |(_, error)| error));
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
        if let Err(error) = &activated {
            self.failures.lock().insert(actor, (generation, error.clone()));
            self.never_again(actor, generation);
        }
        activated
    }

    /// This generation of the actor is over here, and all before it.
    pub(crate) fn never_again(&self, actor: ActorUid, generation: Generation) {
        self.spent.lock().add(actor, generation);
    }

    fn is_spent(&self, actor: ActorUid, generation: Generation) -> bool {
        self.spent.lock().contains(actor, generation)
    }

    async fn bring_in(self: &Arc<Self>, order: Activate) -> Result<Activated, NodeError> {
        let handle = self.worker(order.worker)?;
        let mut laps = Laps::start();
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
        laps.mark("fetch");
        // Not before all is here: whoever waits for a slow registry keeps no processor from the others.
        let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(|_| NodeError::WorkerGone)?;
        laps.mark("queue");
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
            .map_err(|error| NodeError::Hindered(format!("cannot open the log: {error}")))?;
        let mut fds: Vec<OwnedFd> = vec![log.into()];
        if let Some(memory) = &loaded.memory {
            fds.push(memory.as_fd().try_clone_to_owned().map_err(|error| NodeError::Failed(error.to_string()))?);
        }
        fds.extend(loaded.archive.map(OwnedFd::from));
        let command = || command(&order, &blueprint, loaded.source);
        // Before the worker agrees: the workload may want to connect while it starts.
        let before = handle.host(&order.identity, &blueprint.ran, &order.workload);
        handle.take_turn(turn);
        let mut answer = handle.link.call(command(), &link::borrowed(&fds)).await;
        if matches!(answer, Err(LinkError::Refused(Refusal::NotPrepared))) {
            // The box that waited has ended, or has made room for another.
            handle.take_box(&blueprint.kind);
            if self.ensure_box(&handle, &blueprint).await.is_ok() {
                answer = handle.link.call(command(), &link::borrowed(&fds)).await;
            }
        }
        handle.end_turn();
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
            // Damaged, or removed while the wake waited for its turn.
            Err(error @ (SnapshotError::Unusable { .. } | SnapshotError::Missing { .. }))
                if self.snapshots.can_fetch(&key) =>
            {
                tracing::warn!(snapshot = %key, %error, "the copy on this disk is of no use: fetching it again");
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
}

/// What the worker is told.
fn command(order: &Activate, blueprint: &Blueprint, source: link::Source) -> Command {
    let workload = &order.workload;
    // Whoever comes back from a snapshot was ready when it was taken.
    let asked = order.probe || matches!(source, link::Source::Boot { .. });
    let readyz = workload.containers.iter().filter_map(|container| container.readyz.clone()).filter(|_| asked);
    Command::Activate(Box::new(link::Activate {
        op: order.op,
        identity: order.identity.clone(),
        kind: blueprint.kind.clone(),
        source,
        readyz: readyz.collect(),
        ports: workload.ports.iter().map(|port| port.number).collect(),
        egress: workload.egress.clone(),
        freeze_after: workload.freeze_after,
        memo: serde_json::to_value(Memo { ran: blueprint.ran.clone(), workload: workload.clone() })
            .expect("plain data"),
    }))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashMap};

    use ate_name::{Digest, OpId};
    use ate_orders::{Identity, Runtime, RuntimeAsset};

    use super::*;
    use crate::stub::{self, Stub};

    fn order(node: &Node, handle: &Handle, runsc: RuntimeAsset, generation: u64) -> Activate {
        let runsc = BTreeMap::from([("runsc".to_owned(), runsc)]);
        let assets = BTreeMap::from([(node.host.architecture.to_owned(), runsc)]);
        Activate {
            op: OpId::from_random([1; 16]),
            worker: handle.birth.uid,
            identity: Identity { generation: Generation::new(generation), ..stub::identity() },
            workload: stub::workload(),
            source: Source::Boot { runtime: Runtime { config: "c".to_owned(), class: "gvisor".to_owned(), assets } },
            sealed_key: String::new(),
            probe: false,
        }
    }

    #[tokio::test]
    async fn whoever_waits_for_a_registry_takes_no_turn_from_others() {
        let directory = tempfile::tempdir().unwrap();
        let node = stub::node(directory.path());
        let handle = Arc::new(Stub::new(HashMap::new())).join(&node).await.unwrap();
        // It answers nobody.
        let registry = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url = format!("https://{}/runsc", registry.local_addr().unwrap());
        let asset = RuntimeAsset { url, sha256: Digest::from_bytes([0; 32]) };
        let order = order(&node, &handle, asset, 1);
        let waits = tokio::spawn({
            let node = Arc::clone(&node);
            async move { node.run_activate(order).await }
        });
        let _asked = registry.accept().await.unwrap();
        assert_eq!(node.turns.available_permits(), 1);
        waits.abort();
    }

    /// The next box is made behind whoever has taken one.
    async fn made(worker: &Stub, handle: &Handle) {
        while !worker.boxes.lock().first().is_some_and(|kind| handle.has_box(kind)) {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn a_box_that_ended_while_it_waited_fails_no_wake() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let node = stub::node(directory.path());
        let worker = Arc::new(Stub::new(HashMap::new()));
        let handle = worker.join(&node).await.unwrap();
        let runsc = b"#!/bin/sh\necho runsc version test\n";
        std::fs::write(directory.path().join("runsc"), runsc).unwrap();
        let url = format!("file://{}", directory.path().join("runsc").display());
        let asset = RuntimeAsset { url, sha256: ate_snapshot::Content::of(runsc).digest };
        node.run_activate(order(&node, &handle, asset.clone(), 1)).await.unwrap();
        made(&worker, &handle).await;
        worker.boxes.lock().clear();
        node.run_activate(order(&node, &handle, asset, 2)).await.unwrap();
    }

    #[tokio::test]
    async fn whoever_runs_and_is_not_ready_takes_no_turn_from_others() {
        let directory = tempfile::tempdir().unwrap();
        let node = stub::node(directory.path());
        let worker = Arc::new(Stub::new(HashMap::new()));
        let handle = worker.join(&node).await.unwrap();
        handle.take_turn(Arc::clone(&node.turns).acquire_owned().await.unwrap());
        assert_eq!(node.turns.available_permits(), 0);
        worker.news.send(link::Event::Started).unwrap();
        let _next = node.turns.acquire().await.unwrap();
    }
}
