//! Which nodes answer this replica, and what becomes of one that answers nobody.
//!
//! A node that renews its lease need not take orders: the way there may be cut while the way back is open, or it hangs. Whoever
//! waits for such a node would wait for as long as it lives.
//!
//! ```text
//!   this replica has no answer for reach_within ─▶ says so in its record ─▶ who does get answers takes over what waits
//!   no replica has, though others answer,       ─▶ the node is shut out: its lease is not renewed, so it stops serving,
//!   or it hangs, whoever found out                 is given up when that is sure, and comes back with nothing of before
//! ```
//!
//! If no node at all answers, the fault is this side's: nobody is shut out, and what waits goes on when it is mended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ate_actor::{Actor, Phase};
use ate_name::{ActorUid, Generation, NodeName, OpId, WorkerUid};
use ate_orders::{
    Activate, Activated, Capture, Captured, CopyOrder, Findings, ForgetOrder, NodeError, NodeReport, Nodes,
    SearchOrder, SnapshotOrder, Stored,
};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::counters::Counter;
use crate::records::{Job, OperationRecord, Read, ReplicaRecord};
use crate::{Control, ControlError, Settings};

/// So many tries without an answer, at least, before a node is out of reach: one says little, and a replica that stood still has
/// made no more.
const TRIES: u32 = 3;

/// So often an order is given that is not answered.
pub(crate) const GIVEN: u32 = 2;

/// The nodes, and how each answers this replica.
pub(crate) struct Reach {
    nodes: Arc<dyn Nodes>,
    /// What is done at once takes no longer.
    quick: Duration,
    /// What may take long, an image that is fetched, takes no longer.
    long: Duration,
    heard: Mutex<BTreeMap<NodeName, Heard>>,
    /// Orders that came too late: by then the actor was at a later generation, or the snapshot another.
    pub(crate) refused: Counter,
}

#[derive(Clone, Copy, Default)]
struct Heard {
    last: Option<Instant>,
    /// Since then nothing was heard, though it was asked so often.
    silent: Option<(Instant, u32)>,
    /// It took orders that are done at once, and never said that they are. That it can still tell how it is, is no excuse.
    hangs: bool,
}

impl Heard {
    fn is_silent_for(&self, time: Duration) -> bool {
        self.silent.is_some_and(|(since, tries)| since.elapsed() >= time && (self.hangs || tries >= TRIES))
    }
}

impl Reach {
    pub(crate) fn new(nodes: Arc<dyn Nodes>, settings: &Settings) -> Self {
        let (quick, long) = (settings.reach_within, settings.answer_within);
        Self { nodes, quick, long, heard: Mutex::default(), refused: Counter::default() }
    }

    /// Nodes that have not answered for too long: those out of reach, and those that hang.
    pub(crate) fn too_silent(&self) -> (Vec<NodeName>, Vec<NodeName>) {
        let heard = self.heard.lock();
        let too = heard.iter().filter(|(_, heard)| heard.is_silent_for(self.quick));
        let (hanging, away): (Vec<_>, Vec<_>) = too.partition(|(_, heard)| heard.hangs);
        let names = |nodes: Vec<(&NodeName, &Heard)>| nodes.into_iter().map(|(node, _)| node.clone()).collect();
        (names(away), names(hanging))
    }

    /// Whether it has answered of late, and everything it was asked since.
    pub(crate) fn answers(&self, node: &NodeName) -> bool {
        let heard = self.heard.lock().get(node).copied().unwrap_or_default();
        heard.silent.is_none() && heard.last.is_some_and(|last| last.elapsed() < self.quick)
    }

    /// It was given up, or has begun anew: what is known of it is of the past.
    pub(crate) fn forget(&self, node: &NodeName) {
        self.heard.lock().remove(node);
    }

    fn note_silence(&self, node: &NodeName, hangs: bool) {
        let mut heard = self.heard.lock();
        let heard = heard.entry(node.clone()).or_default();
        heard.silent.get_or_insert((Instant::now(), 0)).1 += 1;
        heard.hangs |= hangs;
    }

    fn note_answer(&self, node: &NodeName) {
        let heard = Heard { last: Some(Instant::now()), ..Heard::default() };
        self.heard.lock().insert(node.clone(), heard);
    }

    fn noted<T>(&self, node: &NodeName, answer: Result<T, NodeError>) -> Result<T, NodeError> {
        match &answer {
            Err(NodeError::Unreachable(_)) => self.note_silence(node, false),
            _ => self.note_answer(node),
        }
        answer
    }

    /// What may take long. That there is no answer is no silence of the node: it may be slow, or the order has got lost. Whoever
    /// gave it sees to it that it is still wanted, and gives it again: given twice, it is carried out once.
    async fn in_time<T>(
        &self,
        node: &NodeName,
        answer: impl Future<Output = Result<T, NodeError>>,
    ) -> Result<T, NodeError> {
        match tokio::time::timeout(self.long, answer).await {
            Ok(answer) => {
                if matches!(answer, Err(NodeError::Stale)) {
                    self.refused.one();
                }
                self.noted(node, answer)
            }
            Err(_) => Err(no_answer(self.long)),
        }
    }

    /// What a node does at once. If it does not, it is asked for what takes nothing at all: only one that does not answer that
    /// either hangs, and not a single worker of it.
    async fn at_once<T>(
        &self,
        node: &NodeName,
        answer: impl Future<Output = Result<T, NodeError>>,
    ) -> Result<T, NodeError> {
        let begun = Instant::now();
        let answer = tokio::time::timeout(self.quick, answer).await.unwrap_or_else(|_| Err(no_answer(self.quick)));
        let answer = self.noted(node, answer);
        if answer.is_err() && begun.elapsed() >= self.quick {
            let nothing = OpId::from_bytes([0; 16]);
            match tokio::time::timeout(self.quick, self.nodes.release(node, nothing)).await {
                Err(_) => self.note_silence(node, true),
                Ok(Err(NodeError::Unreachable(_))) => {}
                Ok(_) => self.note_answer(node),
            }
        }
        answer
    }

    pub(crate) async fn report(&self, node: &NodeName) -> Result<NodeReport, NodeError> {
        let report = tokio::time::timeout(self.quick, self.nodes.report(node)).await;
        let report = report.unwrap_or_else(|_| Err(NodeError::Unreachable("it does not say how it is".to_owned())));
        match &report {
            Err(NodeError::Unreachable(_)) => self.note_silence(node, false),
            _ if self.heard.lock().get(node).is_some_and(|heard| heard.hangs) => {}
            _ => self.note_answer(node),
        }
        report
    }

    pub(crate) async fn activate(&self, node: &NodeName, order: Activate) -> Result<Activated, NodeError> {
        self.in_time(node, self.nodes.activate(node, order)).await
    }

    pub(crate) async fn capture(&self, node: &NodeName, order: Capture) -> Result<Captured, NodeError> {
        self.in_time(node, self.nodes.capture(node, order)).await
    }

    pub(crate) async fn abort(&self, node: &NodeName, worker: WorkerUid, op: OpId) -> Result<(), NodeError> {
        self.at_once(node, self.nodes.abort(node, worker, op)).await
    }

    pub(crate) async fn store(&self, node: &NodeName, order: SnapshotOrder) -> Result<Stored, NodeError> {
        self.in_time(node, self.nodes.store(node, order)).await
    }

    pub(crate) async fn release(&self, node: &NodeName, op: OpId) -> Result<(), NodeError> {
        self.at_once(node, self.nodes.release(node, op)).await
    }

    pub(crate) async fn copy(&self, node: &NodeName, order: CopyOrder) -> Result<Stored, NodeError> {
        self.in_time(node, self.nodes.copy(node, order)).await
    }

    pub(crate) async fn upload(&self, node: &NodeName, prefix: &str) -> Result<(), NodeError> {
        self.in_time(node, self.nodes.upload(node, prefix)).await
    }

    pub(crate) async fn discard(
        &self,
        node: &NodeName,
        worker: WorkerUid,
        actor: ActorUid,
        generation: Generation,
    ) -> Result<(), NodeError> {
        self.at_once(node, self.nodes.discard(node, worker, actor, generation)).await
    }

    pub(crate) async fn forget_snapshots(&self, node: &NodeName, order: ForgetOrder) -> Result<(), NodeError> {
        self.in_time(node, self.nodes.forget(node, order)).await
    }

    pub(crate) async fn search(&self, node: &NodeName, order: SearchOrder) -> Result<Findings, NodeError> {
        self.at_once(node, self.nodes.search(node, order)).await
    }
}

impl Control {
    /// What this replica says of itself.
    pub(crate) fn as_replica(&self, beat: u64) -> ReplicaRecord {
        let (out_of_reach, hanging) = self.nodes.too_silent();
        ReplicaRecord { beat, out_of_reach, hanging }
    }

    /// Whether a node takes orders from no replica, though other nodes do.
    pub(crate) fn is_out_of_everybodys_reach(&self, node: &NodeName) -> bool {
        let replicas: Vec<ReplicaRecord> = self.other_replicas().chain([self.as_replica(0)]).collect();
        let out_of_reach = replicas.iter().all(|replica| replica.out_of_reach.contains(node));
        let hangs = replicas.iter().any(|replica| replica.hanging.contains(node));
        let answers = |(other, _)| other != *node && self.nodes.answers(&other);
        (out_of_reach || hangs) && self.registered_nodes().into_iter().any(answers)
    }

    /// Whether an operation waits for a node that its owner does not reach, and this replica does.
    pub(crate) async fn can_help(&self, operation: &OperationRecord) -> Result<bool, ControlError> {
        let Some((owner, _)) = self.beats.last(&operation.owner) else { return Ok(false) };
        if owner.out_of_reach.is_empty() {
            return Ok(false);
        }
        let node = match &operation.job {
            Job::Actor(key) => self.actor_if_any(key).await?.and_then(|read: Read<Actor>| waits_for(&read.value)),
            Job::Forget(forget) => forget.node.clone(),
            Job::Fork(fork) => Some(fork.node.clone()),
            // Made of operations of their actor.
            Job::Golden(_) | Job::Restart(_) => None,
        };
        Ok(node.is_some_and(|node| owner.out_of_reach.contains(&node) && self.nodes.answers(&node)))
    }
}

fn no_answer(within: Duration) -> NodeError {
    NodeError::Unreachable(format!("no answer for {} s", within.as_secs()))
}

/// An order that was given again and again, and never answered by a node that is fine.
#[derive(Debug)]
pub(crate) struct Unanswered {
    left: u32,
}

impl Unanswered {
    /// It is given so often.
    pub(crate) fn times(given: u32) -> Self {
        Self { left: given }
    }

    /// Counts a try that was begun then; says whether there is no point in another.
    pub(crate) fn is_hopeless(&mut self, begun: Instant, settings: &Settings) -> bool {
        self.left -= u32::from(self.left > 0 && begun.elapsed() >= settings.answer_within);
        self.left == 0
    }
}

/// The node that has to do something before an actor can go on.
fn waits_for(actor: &Actor) -> Option<NodeName> {
    match &actor.phase {
        Phase::Saving { node, .. } => Some(node.clone()),
        _ => match actor.lease() {
            Some(lease) => Some(lease.node.clone()),
            None => actor.snapshots.local.as_ref().map(|(_, node)| node.clone()),
        },
    }
}
