//! What the store says of a node's workers, and what the node says: made one again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ate_actor::{Actor, Event, Phase};
use ate_name::{NodeName, OpId, WorkerUid};
use ate_orders::{ForgetOrder, Hosted, Identity, NodeError, NodeReport, WorkerReport};
use ate_snapshot::SnapshotKey;
use ate_store::{Change, CommitError, Guard};

use crate::actors::is_golden;
use crate::ledger::Note;
use crate::records::{Read, WorkerRecord, actor_key, operation_key, readable, worker_key};
use crate::workers::is_held;
use crate::{Code, Control, ControlError};

/// How long the news of an end may take.
const NEWS_WITHIN: Duration = Duration::from_secs(1);

impl Control {
    /// Compares a node's workers with the store: takes in who is new, gives up who is gone, and ends what has no right to
    /// be there. May be done at any time and by anyone. `Ok(false)`: the node did not answer.
    pub async fn reconcile(self: &Arc<Self>, node: &NodeName) -> Result<bool, ControlError> {
        self.compare(node, None).await
    }

    /// The same at less cost: looks only at those of whom the node says something else than what was heard of the store. That may
    /// be old, and decides nothing but where to look.
    pub(crate) async fn glance(self: &Arc<Self>, node: &NodeName) -> Result<bool, ControlError> {
        let Some(NodeReport { workers, holding, .. }) = self.ask(node).await? else { return Ok(false) };
        let differing = self.differing(node, &workers);
        // What is on its disk only may be much, while storage is away, and waits for the next look at everything.
        if differing.is_empty() && holding.is_empty() {
            self.take_reports(&workers);
            return Ok(true);
        }
        self.compare(node, Some(&differing)).await
    }

    /// Workers that only one of the two knows, or in which they see somebody else.
    fn differing(&self, node: &NodeName, reports: &[WorkerReport]) -> BTreeSet<WorkerUid> {
        let heard = self.follower.workers_of(node);
        let hosted = |report: &WorkerReport| {
            report.hosted.as_ref().map(|hosted| (hosted.identity.uid, hosted.identity.generation))
        };
        let said: BTreeMap<_, _> = reports.iter().map(|report| (report.worker, hosted(report))).collect();
        heard.keys().chain(said.keys()).filter(|worker| heard.get(worker) != said.get(worker)).copied().collect()
    }

    /// `None`: it does not answer.
    async fn ask(&self, node: &NodeName) -> Result<Option<NodeReport>, ControlError> {
        match self.nodes.report(node).await {
            Ok(report) => Ok(Some(report)),
            Err(error @ (NodeError::Unreachable(_) | NodeError::UnknownNode(_))) => {
                tracing::debug!(%node, %error, "a node cannot be asked");
                Ok(None)
            }
            Err(error) => Err(ControlError::new(Code::Unavailable, error.to_string())),
        }
    }

    /// Of all workers, or of these.
    async fn compare(
        self: &Arc<Self>,
        node: &NodeName,
        only: Option<&BTreeSet<WorkerUid>>,
    ) -> Result<bool, ControlError> {
        // In this order: an actor that was said to run before the node was asked must be found there, and whoever was
        // told to leave or to come meanwhile has changed the record that the verdict is guarded by.
        let mut expected = BTreeMap::new();
        for worker in self.workers_among(only).await?.into_iter().filter(|worker| worker.lease.node == *node) {
            let actor = match &worker.assigned {
                Some(assignee) => match readable(self.actor_if_any(&assignee.key).await)? {
                    Some(actor) => actor,
                    // Whose it is cannot be told: it is left as it is, and keeps nobody else there.
                    None => continue,
                },
                None => None,
            };
            expected.insert(worker.lease.worker, (worker, actor));
        }
        let answer = self.ask(node).await?;
        let Some(NodeReport { workers: reports, holding, only_here }) = answer else { return Ok(false) };
        let looked_at = |worker: &WorkerUid| only.is_none_or(|only| only.contains(worker));
        let found: BTreeMap<WorkerUid, &WorkerReport> = reports.iter().map(|report| (report.worker, report)).collect();
        for report in &reports {
            // Of those that are known all that changes is heard; which boxes are warm is taken in below.
            let in_store = match expected.get(&report.worker) {
                // A node that came back may have another address.
                Some((worker, _)) => worker.ingress == report.ingress,
                None => !looked_at(&report.worker),
            };
            if !in_store || self.follower.worker(report.worker).is_none() {
                readable(self.worker_up(node, report).await)?;
            }
        }
        // Neither of the two knows them: what was heard is old.
        let known = |worker: &&WorkerUid| expected.contains_key(worker) || found.contains_key(worker);
        for worker in only.into_iter().flatten().filter(|worker| !known(worker)) {
            readable(self.look_at_worker(*worker).await)?;
        }
        let mut missing = Vec::new();
        for (uid, (worker, actor)) in expected {
            let held = worker
                .assigned
                .as_ref()
                .is_none_or(|assignee| actor.as_ref().is_some_and(|actor| is_held(uid, assignee, &actor.value)));
            match found.get(&uid) {
                None => self.worker_gone(uid, "its worker is gone").await?,
                // Or it has just come or gone: both are read again.
                Some(_) if !held => self.check_assigned(uid).await?,
                Some(report) => missing.extend(actor.filter(|actor| is_missing(&worker, &actor.value, report))),
            }
        }
        self.lose_missing(missing).await?;
        for report in reports.iter().filter(|report| looked_at(&report.worker)) {
            if let Some(Hosted { identity, .. }) = &report.hosted {
                self.check_right(node, report.worker, identity).await?;
            }
        }
        for op in holding {
            self.check_image(node, op).await?;
        }
        for prefix in only_here.into_iter().filter(|_| only.is_none()) {
            self.check_snapshot(node, prefix).await?;
        }
        self.take_reports(&reports);
        Ok(true)
    }

    async fn workers_among(&self, only: Option<&BTreeSet<WorkerUid>>) -> Result<Vec<WorkerRecord>, ControlError> {
        let Some(only) = only else {
            return Ok(self.list_workers().await?.into_iter().map(|(worker, _)| worker).collect());
        };
        let mut workers = Vec::new();
        for worker in only {
            if let Some(record) = self.store.get(&worker_key(*worker)).await? {
                workers.extend(readable(Read::<WorkerRecord>::decode(record))?.map(|read| read.value));
            }
        }
        Ok(workers)
    }

    /// A worker that is assigned to somebody who does not hold it would never be free again. No transition leaves one; what
    /// was lost or written by hand may.
    async fn check_assigned(&self, worker: WorkerUid) -> Result<(), ControlError> {
        let Some(record) = self.store.get(&worker_key(worker)).await? else { return Ok(()) };
        let read = Read::<WorkerRecord>::decode(record)?;
        let Some(assignee) = &read.value.assigned else { return Ok(()) };
        let actor = self.actor_if_any(&assignee.key).await?;
        if actor.as_ref().is_some_and(|actor| is_held(worker, assignee, &actor.value)) {
            return Ok(());
        }
        tracing::warn!(%worker, actor = %assignee.key, "a worker that is assigned to an actor that does not hold it is freed");
        let guard = actor.map_or_else(|| Guard::Absent(actor_key(&assignee.key)), |actor| actor.record.unchanged());
        let free = WorkerRecord { assigned: None, ..read.value.clone() };
        let change = Change::new().guard(guard).replace(&read.record, read.rewritten(&free));
        match self.store.commit(change).await {
            // It has changed since: the next look decides.
            Err(CommitError::Conflict { .. }) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => {
                self.counters.workers_freed.one();
                self.look_at_worker(worker).await
            }
        }
    }

    /// Actors that were not where they run. That they have ended, and how, may be on its way: it is waited for, because it says
    /// more than this.
    async fn lose_missing(self: &Arc<Self>, missing: Vec<Read<Actor>>) -> Result<(), ControlError> {
        if !missing.is_empty() {
            tokio::time::sleep(NEWS_WITHIN).await;
        }
        for read in missing {
            let note = Note::because("Lost", "it was not found in its worker");
            match self.transition(&read, Event::Lost, note).await {
                Ok(_) => self.counters.not_in_worker.one(),
                // It has changed since: the next look decides.
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// An image is kept for the operation that will store it, and for nobody else.
    async fn check_image(&self, node: &NodeName, op: OpId) -> Result<(), ControlError> {
        if self.store.get(&operation_key(op)).await?.is_none() {
            tracing::info!(%op, %node, "an image that nobody will store is let go");
            let _ = self.nodes.release(node, op).await;
        }
        Ok(())
    }

    /// A snapshot that is nowhere else is kept for the actor that refers to it.
    async fn check_snapshot(self: &Arc<Self>, node: &NodeName, prefix: String) -> Result<(), ControlError> {
        let Ok(key) = SnapshotKey::parse(&prefix) else { return Ok(()) };
        // Or for the actor that is being made from it. In this order: the one commit that ends the operation makes the actor.
        if self.store.get(&operation_key(key.id.op)).await?.is_some() {
            return Ok(());
        }
        let Some(actor) = readable(self.actor_if_any(&key.actor).await)? else { return Ok(()) };
        let Some(read) = actor.filter(|read| read.value.uid == key.id.actor) else {
            self.remove_behind(node, prefix);
            return Ok(());
        };
        if read.value.references().any(|snapshot| snapshot.prefix == prefix) {
            return Ok(());
        }
        match read.value.behind {
            None => self.remove_behind(node, prefix),
            // A golden that its record does not know is what actors were saved against since.
            Some(_) if is_golden(&read.value.key) => {}
            // It may be its newest, and is nowhere else.
            Some(_) => self.catch_up_behind(node, prefix, read),
        }
        Ok(())
    }

    /// Behind the comparison: every other node is asked.
    fn catch_up_behind(self: &Arc<Self>, node: &NodeName, prefix: String, read: Read<Actor>) {
        let what = (node.clone(), prefix);
        if !self.removing.lock().insert(what.clone()) {
            return;
        }
        let control = Arc::clone(self);
        self.tasks.spawn(async move {
            if let Err(error) = control.caught_up(read).await {
                tracing::info!(node = %what.0, prefix = %what.1, %error, "whether this is its newest cannot be told yet");
            }
            control.removing.lock().remove(&what);
        });
    }

    /// Behind the comparison: it may have to wait until what is on its way to durable storage is there.
    fn remove_behind(self: &Arc<Self>, node: &NodeName, prefix: String) {
        let what = (node.clone(), prefix);
        if !self.removing.lock().insert(what.clone()) {
            return;
        }
        let control = Arc::clone(self);
        self.tasks.spawn(async move {
            let (node, prefix) = &what;
            tracing::info!(%prefix, %node, "a snapshot that nobody refers to is removed");
            let _ = control.nodes.forget_snapshots(node, ForgetOrder::snapshots([prefix.clone()])).await;
            control.removing.lock().remove(&what);
        });
    }

    /// A sandbox whose generation is over, or of an actor that is no more, is ended: it has no right to be there.
    pub(crate) async fn check_right(
        self: &Arc<Self>,
        node: &NodeName,
        worker: WorkerUid,
        identity: &Identity,
    ) -> Result<(), ControlError> {
        // After the report: an order that was given since then has raised the generation or set the lease.
        let Some(actor) = readable(self.actor_if_any(&identity.key).await)? else { return Ok(()) };
        let has_right = actor.as_ref().is_some_and(|read| {
            read.value.uid == identity.uid
                && read.value.generation == identity.generation
                && read.value.lease().is_some_and(|lease| lease.worker == worker)
        });
        if !has_right {
            let known = actor.map(|read| read.value.generation);
            tracing::warn!(actor = %identity.key, generation = %identity.generation, ?known, %worker, "ending a sandbox that has no right to be there");
            if self.nodes.discard(node, worker, identity.uid, identity.generation).await.is_ok() {
                self.counters.fenced.one();
            }
        }
        Ok(())
    }
}

/// Whoever runs in a worker by the record must be there. Those on their way in or out are their operation's business.
fn is_missing(worker: &WorkerRecord, actor: &Actor, report: &WorkerReport) -> bool {
    let Some(assignee) = &worker.assigned else { return false };
    let here = report.hosted.as_ref().is_some_and(|Hosted { identity, .. }| {
        identity.uid == assignee.uid && identity.generation == assignee.generation
    });
    let runs = matches!(&actor.phase, Phase::Running { lease } if lease.worker == worker.lease.worker);
    !here && runs && actor.generation == assignee.generation
}
