//! The orders that nodes are given, and how each is carried out: as the node proper does it, with all that can come between.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use ate_name::{ActorUid, Digest, Generation, NodeName, OpId, WorkerUid};
use ate_orders::{
    Activate, Activated, Capture, Captured, CopyOrder, Findings, ForgetOrder, FoundSnapshot, Identity, NodeError,
    NodeReport, SearchOrder, SnapshotAt, SnapshotOrder, Source, Stored,
};
use tokio::time::Instant;

use super::{App, Cluster, Node, Sandbox, Snapshot, Worker};

impl Cluster {
    /// Waits until an order has arrived at a node that is up; tells which life of it.
    async fn arrive(&self, name: &NodeName) -> Result<u64, NodeError> {
        self.world.pass().await;
        let lost = self.world.dice.happens(self.world.weather().lost);
        match self.nodes.lock().get(name) {
            None => Err(NodeError::UnknownNode(name.clone())),
            Some(node) if !node.up || node.cut_off || lost => Err(NodeError::Unreachable("simulated".into())),
            Some(node) => Ok(node.life),
        }
    }

    /// Whether an order of this replica gets there at all.
    pub(crate) fn way(&self, replica: &str, name: &NodeName) -> Result<(), NodeError> {
        match self.cuts.lock().contains(&(replica.to_owned(), name.clone())) {
            true => Err(NodeError::Unreachable("simulated: the way there is cut".into())),
            false => Ok(()),
        }
    }

    pub(crate) fn hangs(&self, name: &NodeName) -> bool {
        self.nodes.lock().get(name).is_some_and(|node| node.hangs)
    }

    /// The way back of an answer.
    async fn answer<T>(&self, name: &NodeName, life: u64, answer: Result<T, NodeError>) -> Result<T, NodeError> {
        self.world.pass().await;
        let lost = self.world.dice.happens(self.world.weather().lost);
        match self.nodes.lock().get(name) {
            Some(node) if node.up && !node.cut_off && node.life == life && !lost => answer,
            _ => Err(NodeError::Unreachable("simulated: the answer did not arrive".into())),
        }
    }

    fn on<T>(
        &self,
        name: &NodeName,
        life: u64,
        what: impl FnOnce(&mut Node) -> Result<T, NodeError>,
    ) -> Result<T, NodeError> {
        match self.nodes.lock().get_mut(name) {
            Some(node) if node.up && node.life == life => what(node),
            _ => Err(NodeError::Unreachable("simulated: it died".into())),
        }
    }

    pub(crate) async fn report(&self, name: &NodeName) -> Result<NodeReport, NodeError> {
        let life = self.arrive(name).await?;
        let only_here = self.only_on(name);
        let workers = self.reports_of(name).ok_or_else(|| NodeError::Unreachable("simulated".into()));
        let holding = self.on(name, life, |node| {
            let retained = node.workers.values().flat_map(|worker| worker.retained.keys());
            Ok(node.in_hand.keys().chain(retained).copied().collect::<BTreeSet<_>>())
        });
        let report =
            workers.and_then(|workers| Ok(NodeReport { workers, holding: holding?.into_iter().collect(), only_here }));
        self.answer(name, life, report).await
    }

    pub(crate) async fn activate(&self, name: &NodeName, order: &Activate) -> Result<Activated, NodeError> {
        let life = self.arrive(name).await?;
        let done = self.activate_there(name, life, order).await;
        self.answer(name, life, done.map(|()| Activated::default())).await
    }

    async fn activate_there(&self, name: &NodeName, life: u64, order: &Activate) -> Result<(), NodeError> {
        // The same order given twice is carried out once.
        while self.on(name, life, |node| {
            let worker = node.workers.get(&order.worker).ok_or(NodeError::WorkerGone)?;
            Ok(worker.arriving.as_ref() == Some(&order.identity))
        })? {
            self.world.pass().await;
        }
        let already = self.on(name, life, |node| {
            let worker = node.workers.get_mut(&order.worker).ok_or(NodeError::WorkerGone)?;
            match &worker.sandbox {
                Some(sandbox) if sandbox.identity == order.identity => return Ok(true),
                _ if worker.taken => return Err(NodeError::Busy),
                _ => {}
            }
            let Identity { uid, generation, .. } = order.identity;
            if worker.been_here.get(&uid).is_some_and(|been| *been >= generation) || worker.has_ended(&order.identity) {
                return Err(NodeError::Stale);
            }
            worker.taken = true;
            worker.arriving = Some(order.identity.clone());
            worker.been_here.insert(uid, generation);
            Ok(false)
        })?;
        if already {
            return Ok(());
        }
        self.world.pass().await;
        let app = self.on(name, life, |node| {
            let app = self.load(node, &order.source);
            let worker = node.workers.get_mut(&order.worker).ok_or(NodeError::WorkerGone)?;
            match &app {
                Ok(_) => worker.restoring = true,
                Err(_) => (worker.taken, worker.arriving) = (false, None),
            }
            app
        })?;
        self.world.pass().await;
        let fails = self.world.dice.happens(self.world.weather().fails);
        let launch = self.world.dice.draw();
        self.in_worker(name, order.worker, |worker| {
            (worker.taken, worker.arriving, worker.restoring) = (false, None, false);
            if worker.has_ended(&order.identity) {
                return Err(NodeError::Stale);
            }
            if self.crashes.load(Ordering::Relaxed) {
                return Err(NodeError::Crashed("simulated: it ended before it was ready".into()));
            }
            if fails {
                return Err(NodeError::Failed("simulated".into()));
            }
            worker.taken = true;
            worker.sandbox = Some(Sandbox {
                identity: order.identity.clone(),
                app,
                launch,
                visitors: 0,
                leaving: false,
                idle_since: Instant::now(),
            });
            Ok(())
        })
    }

    fn load(&self, node: &Node, source: &Source) -> Result<App, NodeError> {
        if self.world.dice.happens(self.world.weather().fails) {
            return Err(NodeError::Hindered("simulated: the disk cannot be read".into()));
        }
        match source {
            Source::Boot { .. } => Ok(App { count: 0, nonce: self.world.dice.draw() }),
            Source::Snapshot { at, fresh, .. } => {
                let Snapshot { app, .. } = node.find(at, &mut self.storage.lock())?;
                // The count is in its files, the nonce in its memory.
                Ok(if *fresh { App { nonce: self.world.dice.draw(), ..app } } else { app })
            }
        }
    }

    /// What a worker has begun it brings to its end, whether or not its node lives.
    fn in_worker<T>(
        &self,
        name: &NodeName,
        worker: WorkerUid,
        what: impl FnOnce(&mut Worker) -> Result<T, NodeError>,
    ) -> Result<T, NodeError> {
        let mut nodes = self.nodes.lock();
        let worker = nodes.get_mut(name).and_then(|node| node.workers.get_mut(&worker));
        what(worker.ok_or(NodeError::WorkerGone)?)
    }

    pub(crate) async fn capture(&self, name: &NodeName, order: &Capture) -> Result<Captured, NodeError> {
        let life = self.arrive(name).await?;
        let done = self.capture_there(name, life, order).await;
        self.answer(name, life, done.map(|()| Captured::default())).await
    }

    async fn capture_there(&self, name: &NodeName, life: u64, order: &Capture) -> Result<(), NodeError> {
        let already = self.on(name, life, |node| {
            if node.in_hand.contains_key(&order.op) {
                return Ok(true);
            }
            let worker = node.workers.get_mut(&order.worker).ok_or(NodeError::WorkerGone)?;
            if let Some(app) = worker.retained.get(&order.op) {
                node.in_hand.insert(order.op, *app);
                return Ok(true);
            }
            let sandbox = worker.sandbox.as_mut().filter(|sandbox| is(sandbox, order)).ok_or(NodeError::Stale)?;
            if let Some(error) = node.kept.get(&order.op) {
                return Err(error.clone());
            }
            if order.if_idle && sandbox.visitors > 0 {
                node.kept.insert(order.op, NodeError::Aborted);
                return Err(NodeError::Aborted);
            }
            sandbox.leaving = true;
            Ok(false)
        })?;
        if already {
            return Ok(());
        }
        // Whoever is inside is answered first.
        loop {
            self.world.pass().await;
            let visitors = self.on(name, life, |node| {
                let worker = node.workers.get(&order.worker).ok_or(NodeError::WorkerGone)?;
                // Done meanwhile, for the same order given twice.
                if worker.retained.contains_key(&order.op) || node.in_hand.contains_key(&order.op) {
                    return Ok(None);
                }
                let sandbox = worker.sandbox.as_ref().filter(|sandbox| is(sandbox, order)).ok_or(NodeError::Stale)?;
                Ok(Some(sandbox.visitors))
            })?;
            match visitors {
                None => return Ok(()),
                Some(0) => break,
                Some(_) => {}
            }
        }
        let fails = self.world.dice.happens(self.world.weather().fails);
        let dies = self.world.dice.happens(self.world.weather().fails / 4);
        self.on(name, life, |node| {
            let worker = node.workers.get_mut(&order.worker).ok_or(NodeError::WorkerGone)?;
            if worker.retained.contains_key(&order.op) {
                return Ok(());
            }
            let sandbox = worker.sandbox.as_mut().filter(|sandbox| is(sandbox, order)).ok_or(NodeError::Stale)?;
            if fails {
                node.kept.entry(order.op).or_insert(NodeError::NotSaved("simulated".into()));
            }
            if let Some(error) = node.kept.get(&order.op) {
                sandbox.leaving = false;
                return Err(error.clone());
            }
            if dies {
                (worker.sandbox, worker.taken) = (None, false);
                return Err(NodeError::Failed("simulated: it did not survive".into()));
            }
            let app = sandbox.app;
            (worker.sandbox, worker.taken) = (None, false);
            worker.retained.insert(order.op, app);
            node.in_hand.insert(order.op, app);
            Ok(())
        })
    }

    pub(crate) async fn abort(&self, name: &NodeName, op: OpId) -> Result<(), NodeError> {
        let life = self.arrive(name).await?;
        self.on(name, life, |node| {
            node.kept.insert(op, NodeError::Aborted);
            Ok(())
        })
    }

    pub(crate) async fn store(&self, name: &NodeName, order: &SnapshotOrder) -> Result<Stored, NodeError> {
        let life = self.arrive(name).await?;
        // One at a time, for each snapshot.
        while !self.on(name, life, |node| Ok(node.busy.insert(order.prefix.clone())))? {
            self.world.pass().await;
        }
        self.on(name, life, |node| {
            let writes = node.in_hand.contains_key(&order.op) && !node.disk.contains_key(&order.prefix);
            node.begins(&order.prefix, writes)
        })?;
        self.world.pass().await;
        let fails = self.world.dice.happens(self.world.weather().fails);
        let done = self.on(name, life, |node| {
            node.busy.remove(&order.prefix);
            // A try that fails removes what it has written; one whose process ends does not.
            node.begun.remove(&order.prefix);
            if node.forgotten.contains(&order.prefix) {
                return Err(NodeError::Stale);
            }
            let manifest = match (node.disk.get(&order.prefix), node.in_hand.get(&order.op).copied()) {
                (Some(there), _) => there.manifest,
                (None, None) => return Err(NodeError::NothingCaptured),
                (None, Some(_)) if node.full || fails => {
                    return Err(NodeError::Failed("simulated: no space left".into()));
                }
                (None, Some(app)) => {
                    // Written once more it would be another.
                    let manifest = Digest::from_bytes([self.world.dice.bytes(); 2].concat().try_into().expect("32"));
                    node.disk.insert(order.prefix.clone(), Snapshot { app, manifest, uploaded: false });
                    manifest
                }
            };
            node.in_hand.remove(&order.op);
            for worker in node.workers.values_mut() {
                worker.retained.remove(&order.op);
            }
            Ok(Stored { manifest, bytes: 1000, durable: false })
        });
        self.answer(name, life, done).await
    }

    pub(crate) async fn copy(&self, name: &NodeName, order: &CopyOrder) -> Result<Stored, NodeError> {
        let life = self.arrive(name).await?;
        self.on(name, life, |node| {
            let writes =
                !node.disk.contains_key(&order.prefix) && node.find(&order.from, &mut self.storage.lock()).is_ok();
            node.begins(&order.prefix, writes)
        })?;
        self.world.pass().await;
        let fails = self.world.dice.happens(self.world.weather().fails);
        let done = self.on(name, life, |node| {
            let stored = |manifest| Stored { manifest, bytes: 1000, durable: false };
            node.begun.remove(&order.prefix);
            if node.forgotten.contains(&order.prefix) {
                return Err(NodeError::Stale);
            }
            if let Some(there) = node.disk.get(&order.prefix) {
                return Ok(stored(there.manifest));
            }
            let source = node.find(&order.from, &mut self.storage.lock())?;
            if node.full || fails {
                return Err(NodeError::Failed("simulated: no space left".into()));
            }
            let manifest = Digest::from_bytes([self.world.dice.bytes(); 2].concat().try_into().expect("32"));
            node.disk.insert(order.prefix.clone(), Snapshot { app: source.app, manifest, uploaded: false });
            Ok(stored(manifest))
        });
        self.answer(name, life, done).await
    }

    pub(crate) async fn release(&self, name: &NodeName, op: OpId) -> Result<(), NodeError> {
        let life = self.arrive(name).await?;
        self.on(name, life, |node| {
            node.in_hand.remove(&op);
            for worker in node.workers.values_mut() {
                worker.retained.remove(&op);
            }
            Ok(())
        })
    }

    pub(crate) async fn upload(&self, name: &NodeName, prefix: &str) -> Result<(), NodeError> {
        let life = self.arrive(name).await?;
        while !self.on(name, life, |node| Ok(node.busy.insert(prefix.to_owned())))? {
            self.world.pass().await;
        }
        self.world.pass().await;
        // First what it is made of, then what says that all of it is there. Either may be as far as it comes.
        let heard = self.on(name, life, |node| {
            let sends = node.disk.get(prefix).is_some_and(|snapshot| !snapshot.uploaded);
            if let (true, Ok(storage)) = (sends, self.storage.lock().reach()) {
                storage.begun.insert(prefix.to_owned());
            }
            Ok(node.heard())
        })?;
        self.world.pass().await;
        let fails = self.world.dice.happens(self.world.weather().fails);
        let done = self.on(name, life, |node| {
            node.busy.remove(prefix);
            let mut storage = self.storage.lock();
            let storage = storage.reach()?;
            if fails {
                return Err(NodeError::Failed("simulated".into()));
            }
            let heard = heard.is_some() && node.heard() == heard;
            match node.disk.get_mut(prefix) {
                // It may have been removed there since then, and must not come back.
                Some(snapshot) if snapshot.uploaded => {}
                // What is there is never written over.
                Some(snapshot)
                    if storage.whole.get(prefix).is_some_and(|there| there.manifest != snapshot.manifest) =>
                {
                    return Err(NodeError::Stale);
                }
                Some(snapshot) => {
                    storage.begun.remove(prefix);
                    storage.whole.insert(prefix.to_owned(), Snapshot { uploaded: true, ..snapshot.clone() });
                    // It may have been given up meanwhile, and this removed by another.
                    if !heard {
                        return Err(NodeError::Failed("simulated: nobody has heard of this node".into()));
                    }
                    snapshot.uploaded = true;
                }
                None if storage.whole.contains_key(prefix) => {}
                None => return Err(NodeError::NoSnapshot(prefix.to_owned())),
            }
            Ok(())
        });
        self.answer(name, life, done).await
    }

    pub(crate) async fn discard(
        &self,
        name: &NodeName,
        worker: WorkerUid,
        actor: ActorUid,
        generation: Generation,
    ) -> Result<(), NodeError> {
        let life = self.arrive(name).await?;
        let done = self.on(name, life, |node| {
            let worker = node.workers.get_mut(&worker).ok_or(NodeError::WorkerGone)?;
            let last = worker.ended.entry(actor).or_insert(generation);
            *last = generation.max(*last);
            match &worker.sandbox {
                Some(here) if here.identity.uid == actor && here.identity.generation == generation => {
                    (worker.sandbox, worker.taken) = (None, false);
                    Ok(())
                }
                _ => Err(NodeError::Stale),
            }
        });
        self.answer(name, life, done).await
    }

    pub(crate) async fn search(&self, name: &NodeName, order: &SearchOrder) -> Result<Findings, NodeError> {
        let life = self.arrive(name).await?;
        let fails = self.world.dice.happens(self.world.weather().fails);
        let done = self.on(name, life, |node| {
            if fails {
                return Err(NodeError::Hindered("simulated".into()));
            }
            let mut storage = self.storage.lock();
            let nothing = BTreeSet::new();
            let (whole, begun) = match order.durable {
                true => storage.reach().map(|storage| (&storage.whole, &storage.begun))?,
                false => (&node.disk, &nothing),
            };
            let found = whole.iter().rev().filter(|(prefix, _)| is_below(prefix, &order.home));
            let found = found.map(|(prefix, Snapshot { manifest, .. })| FoundSnapshot {
                at: SnapshotAt { prefix: prefix.clone(), manifest: *manifest },
                full: true,
                bytes: 1000,
            });
            let remains = begun.iter().filter(|prefix| is_below(prefix, &order.home)).cloned();
            Ok(Findings { snapshots: found.collect(), remains: remains.collect() })
        });
        self.answer(name, life, done).await
    }

    pub(crate) async fn forget(
        &self,
        name: &NodeName,
        order: &ForgetOrder,
        referred: &BTreeSet<String>,
    ) -> Result<(), NodeError> {
        let life = self.arrive(name).await?;
        self.on(name, life, |node| {
            let Some(gone) = order.gone else { return Ok(()) };
            node.told_gone.insert(gone);
            let segment = format!("/{gone}/");
            if let Some(still) = referred.iter().find(|prefix| prefix.contains(&segment)) {
                self.world.broken(format!("all of {gone} is removed although somebody refers to {still}"));
            }
            node.disk.retain(|prefix, _| !prefix.contains(&segment));
            let Some(home) = &order.home else { return Ok(()) };
            let mut storage = self.storage.lock();
            let storage = storage.reach()?;
            storage.whole.retain(|prefix, _| !is_below(prefix, home));
            storage.begun.retain(|prefix| !is_below(prefix, home));
            Ok(())
        })?;
        for prefix in &order.prefixes {
            while !self.on(name, life, |node| Ok(node.busy.insert(prefix.clone())))? {
                self.world.pass().await;
            }
            if referred.contains(prefix) {
                self.world.broken(format!("snapshot {prefix} is removed although somebody refers to it"));
            }
            self.world.say(format_args!("{name} removes {prefix}"));
            self.on(name, life, |node| {
                node.busy.remove(prefix);
                node.forgotten.insert(prefix.clone(), ());
                node.disk.remove(prefix);
                node.begun.remove(prefix);
                let mut storage = self.storage.lock();
                let storage = storage.reach()?;
                storage.whole.remove(prefix);
                storage.begun.remove(prefix);
                Ok(())
            })?;
        }
        self.answer(name, life, Ok(())).await
    }
}

fn is_below(prefix: &str, home: &str) -> bool {
    prefix.strip_prefix(home).is_some_and(|rest| rest.starts_with('/'))
}

fn is(sandbox: &Sandbox, order: &Capture) -> bool {
    sandbox.identity.uid == order.actor && sandbox.identity.generation == order.generation
}
