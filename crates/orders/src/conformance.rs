//! What every implementation of [`Nodes`] keeps, whether it has real sandboxes or those of a simulation: a control plane that
//! holds in the one holds in the other.

use std::time::Duration;

use ate_name::{ActorKey, ActorUid, Digest, Generation, NodeName, OpId, WorkerUid};

use crate::{
    Activate, Activated, Capture, Captured, CopyOrder, ForgetOrder, Hosted, Identity, NodeError, NodeReport, Nodes,
    SearchOrder, SnapshotAt, SnapshotOrder, Source, Stored, Workload,
};

/// What has not happened by then never will.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where the suite gets orders that the implementation can carry out.
#[async_trait::async_trait]
pub trait Subject: Send + Sync {
    fn nodes(&self) -> &dyn Nodes;

    /// A node with two workers, both free, and storage beyond its disk.
    fn node(&self) -> NodeName;

    fn workload(&self) -> Workload;

    /// What an actor of the workload starts from.
    fn boot(&self) -> Source;

    fn sealed_key(&self, actor: ActorUid) -> String;

    /// What all snapshots of an actor lie under.
    fn home(&self, identity: &Identity) -> String;

    fn prefix(&self, identity: &Identity, op: OpId) -> String;

    /// From here on the node is heard of, as it was from the beginning, or has not been for so long that it may be given up.
    async fn is_heard(&self, heard: bool);
}

struct Story<'a> {
    subject: &'a dyn Subject,
    nodes: &'a dyn Nodes,
    node: NodeName,
}

/// Lives through what actors live through, with every order given again, given late, and given for what is not there.
pub async fn keeps_its_promises(subject: &dyn Subject) {
    let story = Story { subject, nodes: subject.nodes(), node: subject.node() };
    let report = story.report().await;
    let [one, two] = report.workers.iter().map(|worker| worker.worker).collect::<Vec<_>>()[..] else {
        panic!("two workers: {report:?}")
    };
    let nobody = NodeName::new("nobody");
    // At a distance it may be on its way to be known.
    let unknown = story.nodes.report(&nobody).await.expect_err("there is none");
    assert!(matches!(unknown, NodeError::UnknownNode(_) | NodeError::Unreachable(_)), "{unknown}");

    let first = story.activate_order(one, story.actor(1, 1), op(1), subject.boot());
    story.comes_in_once(&first).await;
    story.only_its_own_generation_leaves(&first, two).await;
    story.stays_if_its_save_is_called_off(&first).await;
    let at = story.leaves_and_is_stored(&first).await;
    story.continues_elsewhere(&first, two, &at).await;
    story.what_is_gone_is_told(one, two).await;
    story.becomes_durable_once(&at).await;
    story.is_copied(&at).await;
    story.is_let_go_of(two).await;
    story.is_not_stored_once_forgotten(two).await;
    story.is_carried_out_though_nobody_waits(two).await;
    story.is_not_durable_while_nobody_hears(two).await;
    story.is_forgotten(one, &at).await;
}

impl Story<'_> {
    /// An order that is given twice is carried out once, and a worker hosts one actor.
    async fn comes_in_once(&self, first: &Activate) {
        self.activate(first).await.expect("it comes up");
        self.activate(first).await.expect("it is there");
        assert_eq!(self.hosted(first.worker).await.as_ref(), Some(&first.identity));
        let other = self.activate_order(first.worker, self.actor(2, 1), op(2), self.subject.boot());
        assert_eq!(self.activate(&other).await.err(), Some(NodeError::Busy));
        let nowhere =
            self.activate_order(WorkerUid::from_random([9; 16]), self.actor(3, 1), op(3), self.subject.boot());
        assert_eq!(self.activate(&nowhere).await.err(), Some(NodeError::WorkerGone));
    }

    /// Neither an order for another generation nor one to another worker touches it. A generation that is ended before it has
    /// come does not come.
    async fn only_its_own_generation_leaves(&self, first: &Activate, two: WorkerUid) {
        let uid = first.identity.uid;
        let later = Generation::new(2);
        for (worker, generation) in [(first.worker, later), (two, first.identity.generation)] {
            let order = Capture { op: op(4), worker, actor: uid, generation, full: true, if_idle: false };
            assert_eq!(self.nodes.capture(&self.node, order).await.err(), Some(NodeError::Stale));
            let _ = self.nodes.discard(&self.node, worker, uid, generation).await;
        }
        assert_eq!(self.hosted(first.worker).await.as_ref(), Some(&first.identity));
    }

    /// A save that is called off stays so, also for an order that comes late: its actor goes on.
    async fn stays_if_its_save_is_called_off(&self, first: &Activate) {
        let _ = self.nodes.abort(&self.node, first.worker, op(28)).await;
        for _ in 0..2 {
            assert_eq!(self.capture(first.worker, &first.identity, op(28)).await.err(), Some(NodeError::Aborted));
            assert_eq!(self.hosted(first.worker).await.as_ref(), Some(&first.identity));
        }
    }

    /// Its worker is free at once, its image is kept until it is stored, and the order it came by does not bring it back.
    async fn leaves_and_is_stored(&self, first: &Activate) -> SnapshotAt {
        let nothing = self.store(&first.identity, op(5)).await;
        assert_eq!(nothing.err(), Some(NodeError::NothingCaptured));
        for _ in 0..2 {
            self.capture(first.worker, &first.identity, op(6)).await.expect("it is captured");
            assert_eq!(self.hosted(first.worker).await, None);
            assert!(self.report().await.holding.contains(&op(6)));
        }
        assert_eq!(self.activate(first).await.err(), Some(NodeError::Stale), "it is of the past");
        let ended = self.activate_order(first.worker, self.actor(1, 2), op(16), self.subject.boot());
        assert_eq!(self.activate(&ended).await.err(), Some(NodeError::Stale), "it was ended before it came");

        // Somebody else drives the same save, and has it captured again while it is being written.
        let meanwhile = async {
            loop {
                let _ = self.capture(first.worker, &first.identity, op(6)).await;
                tokio::task::yield_now().await;
            }
        };
        let stored = tokio::select! {
            stored = self.store(&first.identity, op(6)) => stored.expect("it is stored"),
            () = meanwhile => unreachable!("it goes on"),
        };
        let again = self.store(&first.identity, op(6)).await.expect("it is there, and not written anew");
        assert_eq!((stored.manifest, stored.durable), (again.manifest, false));
        let prefix = self.subject.prefix(&first.identity, op(6));
        assert!(self.report().await.only_here.contains(&prefix));
        self.lets_go_of(op(6)).await;
        let at = SnapshotAt { prefix, manifest: stored.manifest };
        self.is_found(&first.identity, &[&at], &[]).await;
        self.is_found(&self.actor(9, 1), &[], &[]).await;
        at
    }

    async fn continues_elsewhere(&self, first: &Activate, two: WorkerUid, at: &SnapshotAt) {
        let second = self.activate_order(two, self.actor(1, 3), op(7), snapshot(at));
        self.activate(&second).await.expect("it continues");
        assert_eq!(self.hosted(two).await, Some(second.identity));
        assert_eq!(self.activate(first).await.err(), Some(NodeError::Stale));
        assert_eq!(self.hosted(first.worker).await, None);
    }

    /// A wake that failed leaves its worker free, and a copy of its order that comes late does nothing.
    async fn what_is_gone_is_told(&self, one: WorkerUid, two: WorkerUid) {
        let lost =
            SnapshotAt { prefix: self.subject.prefix(&self.actor(4, 1), op(8)), manifest: Digest::from_bytes([1; 32]) };
        let order = self.activate_order(one, self.actor(4, 1), op(9), snapshot(&lost));
        assert_eq!(self.activate(&order).await.err(), Some(NodeError::NoSnapshot(lost.prefix.clone())));
        assert_eq!(self.activate(&order).await.err(), Some(NodeError::Stale));
        assert_eq!(self.nodes.upload(&self.node, &lost.prefix).await, Err(NodeError::NoSnapshot(lost.prefix)));
        let order = self.activate_order(one, self.actor(4, 2), op(10), self.subject.boot());
        self.activate(&order).await.expect("the worker is free");
        let Identity { uid, generation, .. } = order.identity;
        assert_eq!(self.nodes.discard(&self.node, one, uid, generation).await, Ok(()));
        let _ = self.nodes.discard(&self.node, one, uid, generation).await;
        assert_eq!(self.hosted(one).await, None);
        assert!(self.hosted(two).await.is_some(), "the other is as it was");
    }

    async fn becomes_durable_once(&self, at: &SnapshotAt) {
        for _ in 0..2 {
            assert_eq!(self.nodes.upload(&self.node, &at.prefix).await, Ok(()));
            assert!(!self.report().await.only_here.contains(&at.prefix));
        }
        self.is_found(&self.actor(1, 1), &[at], &[at]).await;
    }

    async fn is_copied(&self, at: &SnapshotAt) {
        let to = self.actor(5, 1);
        let order = CopyOrder {
            from: at.clone(),
            from_actor: self.actor(1, 1).uid,
            from_key: self.subject.sealed_key(self.actor(1, 1).uid),
            prefix: self.subject.prefix(&to, op(11)),
            sealed_key: self.subject.sealed_key(to.uid),
        };
        let copied = self.nodes.copy(&self.node, order.clone()).await.expect("it is copied");
        let again = self.nodes.copy(&self.node, order.clone()).await.expect("it is there");
        assert_eq!(copied.manifest, again.manifest);
        assert!(self.report().await.only_here.contains(&order.prefix));
        let copy = SnapshotAt { prefix: order.prefix.clone(), manifest: copied.manifest };
        self.is_found(&to, &[&copy], &[]).await;
        assert_eq!(self.nodes.upload(&self.node, &copy.prefix).await, Ok(()));
        self.is_found(&to, &[&copy], &[&copy]).await;
        let behind = CopyOrder { prefix: self.subject.prefix(&to, op(18)), ..order.clone() };
        nobody_waits(self.nodes.copy(&self.node, behind.clone())).await;
        self.until("the copy is made", async || self.is_only_here(&behind.prefix).await).await;
        assert_eq!(self.forget([behind.prefix]).await, Ok(()));
        let gone = SnapshotAt { prefix: self.subject.prefix(&to, op(12)), manifest: at.manifest };
        let (from, prefix) = (gone.clone(), self.subject.prefix(&to, op(13)));
        let refused = self.nodes.copy(&self.node, CopyOrder { from, prefix, ..order.clone() }).await;
        assert_eq!(refused.err(), Some(NodeError::NoSnapshot(gone.prefix)));
        // Though nobody names it.
        for _ in 0..2 {
            assert_eq!(self.forget_actor(&to).await, Ok(()));
        }
        self.is_found(&to, &[], &[]).await;
        assert_eq!(self.forget([order.prefix.clone()]).await, Ok(()));
        // One that never came is removed, too, and the order that would have made it is late.
        let never = CopyOrder { prefix: self.subject.prefix(&to, op(17)), ..order.clone() };
        assert_eq!(self.forget([never.prefix.clone()]).await, Ok(()));
        for late in [order, never] {
            assert_eq!(
                self.nodes.copy(&self.node, late.clone()).await.err(),
                Some(NodeError::Stale),
                "it is of the past"
            );
            assert!(!self.report().await.only_here.contains(&late.prefix));
            let gone = self.nodes.upload(&self.node, &late.prefix).await;
            assert_eq!(gone, Err(NodeError::NoSnapshot(late.prefix)));
        }
    }

    async fn is_let_go_of(&self, two: WorkerUid) {
        self.capture(two, &self.actor(1, 3), op(14)).await.expect("it is captured");
        for _ in 0..2 {
            assert_eq!(self.nodes.release(&self.node, op(14)).await, Ok(()));
            self.lets_go_of(op(14)).await;
        }
        assert_eq!(self.store(&self.actor(1, 3), op(14)).await.err(), Some(NodeError::NothingCaptured));
    }

    async fn is_not_stored_once_forgotten(&self, two: WorkerUid) {
        let order = self.activate_order(two, self.actor(6, 1), op(19), self.subject.boot());
        self.activate(&order).await.expect("the worker is free");
        self.capture(two, &order.identity, op(20)).await.expect("it is captured");
        let prefix = self.subject.prefix(&order.identity, op(20));
        assert_eq!(self.forget([prefix.clone()]).await, Ok(()));
        assert_eq!(self.store(&order.identity, op(20)).await.err(), Some(NodeError::Stale));
        assert!(!self.is_only_here(&prefix).await);
        assert_eq!(self.nodes.release(&self.node, op(20)).await, Ok(()));
        self.lets_go_of(op(20)).await;
    }

    async fn is_carried_out_though_nobody_waits(&self, two: WorkerUid) {
        let order = self.activate_order(two, self.actor(7, 1), op(21), self.subject.boot());
        nobody_waits(self.activate(&order)).await;
        self.until("it comes in", async || self.hosted(two).await.as_ref() == Some(&order.identity)).await;
        nobody_waits(self.capture(two, &order.identity, op(22))).await;
        let is_captured = async || self.hosted(two).await.is_none() && self.report().await.holding.contains(&op(22));
        self.until("it is captured", is_captured).await;
        nobody_waits(self.store(&order.identity, op(22))).await;
        let prefix = self.subject.prefix(&order.identity, op(22));
        self.until("it is stored", async || self.is_only_here(&prefix).await).await;
        nobody_waits(self.nodes.upload(&self.node, &prefix)).await;
        self.until("it is durable", async || !self.is_only_here(&prefix).await).await;
        nobody_waits(self.forget([prefix.clone()])).await;
        let is_gone =
            async || self.nodes.upload(&self.node, &prefix).await == Err(NodeError::NoSnapshot(prefix.clone()));
        self.until("it is removed", is_gone).await;

        let order = self.activate_order(two, self.actor(7, 2), op(23), self.subject.boot());
        self.activate(&order).await.expect("the worker is free");
        self.capture(two, &order.identity, op(24)).await.expect("it is captured");
        nobody_waits(self.nodes.release(&self.node, op(24))).await;
        self.lets_go_of(op(24)).await;
        let order = self.activate_order(two, self.actor(7, 3), op(25), self.subject.boot());
        self.activate(&order).await.expect("the worker is free");
        let Identity { uid, generation, .. } = order.identity;
        nobody_waits(self.nodes.discard(&self.node, two, uid, generation)).await;
        self.until("it is ended", async || self.hosted(two).await.is_none()).await;
    }

    /// Whoever gave the node up meanwhile may have removed it from durable storage: it counts as brought there when somebody
    /// hears of that.
    async fn is_not_durable_while_nobody_hears(&self, two: WorkerUid) {
        let order = self.activate_order(two, self.actor(8, 1), op(26), self.subject.boot());
        self.activate(&order).await.expect("the worker is free");
        self.capture(two, &order.identity, op(27)).await.expect("it is captured");
        self.store(&order.identity, op(27)).await.expect("it is stored");
        let prefix = self.subject.prefix(&order.identity, op(27));
        self.subject.is_heard(false).await;
        let uploaded = self.nodes.upload(&self.node, &prefix).await;
        assert!(matches!(uploaded, Err(NodeError::Failed(_))), "{uploaded:?}");
        assert!(self.is_only_here(&prefix).await);
        self.subject.is_heard(true).await;
        assert_eq!(self.nodes.upload(&self.node, &prefix).await, Ok(()));
        assert!(!self.is_only_here(&prefix).await);
    }

    /// Wherever it is; and what is not there is no error.
    async fn is_forgotten(&self, one: WorkerUid, at: &SnapshotAt) {
        for _ in 0..2 {
            assert_eq!(self.forget([at.prefix.clone()]).await, Ok(()));
        }
        self.is_found(&self.actor(1, 1), &[], &[]).await;
        let order = self.activate_order(one, self.actor(1, 4), op(15), snapshot(at));
        assert_eq!(self.activate(&order).await.err(), Some(NodeError::NoSnapshot(at.prefix.clone())));
        assert_eq!(self.nodes.upload(&self.node, &at.prefix).await, Err(NodeError::NoSnapshot(at.prefix.clone())));
    }

    fn actor(&self, number: u8, generation: u64) -> Identity {
        Identity {
            uid: ActorUid::from_random([number; 16]),
            key: ActorKey::parse("space", &format!("a{number}")).expect("a name"),
            template: self.subject.workload().template,
            generation: Generation::new(generation),
        }
    }

    fn activate_order(&self, worker: WorkerUid, identity: Identity, op: OpId, source: Source) -> Activate {
        let sealed_key = self.subject.sealed_key(identity.uid);
        Activate { op, worker, identity, workload: self.subject.workload(), source, sealed_key, probe: false }
    }

    /// Soon: its worker is told, too.
    async fn lets_go_of(&self, op: OpId) {
        self.until("the image is let go of", async || !self.report().await.holding.contains(&op)).await;
    }

    async fn is_only_here(&self, prefix: &str) -> bool {
        self.report().await.only_here.iter().any(|only| only == prefix)
    }

    async fn until(&self, what: &str, is_so: impl AsyncFn() -> bool) {
        let begun = tokio::time::Instant::now();
        while !is_so().await {
            assert!(begun.elapsed() < PATIENCE, "{what}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn report(&self) -> NodeReport {
        self.nodes.report(&self.node).await.expect("it answers")
    }

    async fn hosted(&self, worker: WorkerUid) -> Option<Identity> {
        let report = self.report().await;
        let found = report.workers.into_iter().find(|report| report.worker == worker).expect("the worker is there");
        found.hosted.map(|Hosted { identity, .. }| identity)
    }

    async fn forget(&self, prefixes: impl IntoIterator<Item = String>) -> Result<(), NodeError> {
        self.nodes.forget(&self.node, ForgetOrder::snapshots(prefixes)).await
    }

    async fn forget_actor(&self, identity: &Identity) -> Result<(), NodeError> {
        let (gone, home) = (Some(identity.uid), Some(self.subject.home(identity)));
        self.nodes.forget(&self.node, ForgetOrder { prefixes: Vec::new(), gone, home }).await
    }

    /// What is on disk is found there, and what is durable in storage; newest first, each with what it takes to restore it.
    async fn is_found(&self, identity: &Identity, on_disk: &[&SnapshotAt], durable: &[&SnapshotAt]) {
        for (durable, expected) in [(false, on_disk), (true, durable)] {
            let (home, sealed_key) = (self.subject.home(identity), self.subject.sealed_key(identity.uid));
            let order = SearchOrder { home, sealed_key, durable };
            let found = self.nodes.search(&self.node, order).await.expect("it can be looked for");
            let snapshots = &found.snapshots;
            assert_eq!(snapshots.iter().map(|found| &found.at).collect::<Vec<_>>(), expected, "durable: {durable}");
            assert!(snapshots.iter().all(|found| found.full && found.bytes > 0), "{found:?}");
            assert!(found.remains.is_empty(), "{found:?}");
        }
    }

    async fn activate(&self, order: &Activate) -> Result<Activated, NodeError> {
        self.nodes.activate(&self.node, order.clone()).await
    }

    async fn capture(&self, worker: WorkerUid, identity: &Identity, op: OpId) -> Result<Captured, NodeError> {
        let Identity { uid: actor, generation, .. } = *identity;
        self.nodes.capture(&self.node, Capture { op, worker, actor, generation, full: true, if_idle: false }).await
    }

    async fn store(&self, identity: &Identity, op: OpId) -> Result<Stored, NodeError> {
        let order = SnapshotOrder {
            op,
            identity: identity.clone(),
            workload: self.subject.workload(),
            prefix: self.subject.prefix(identity, op),
            full: true,
            base: None,
            golden: false,
            sealed_key: self.subject.sealed_key(identity.uid),
        };
        self.nodes.store(&self.node, order).await
    }
}

/// Whoever gave the order goes away as soon as it is given.
async fn nobody_waits<T>(order: impl Future<Output = T>) {
    let _ = tokio::time::timeout(Duration::ZERO, order).await;
}

fn op(number: u8) -> OpId {
    OpId::from_random([number; 16])
}

fn snapshot(at: &SnapshotAt) -> Source {
    Source::Snapshot { at: at.clone(), golden: false, fresh: false }
}
