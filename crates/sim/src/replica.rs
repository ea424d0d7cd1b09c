//! Replicas of the real control plane, on simulated ground.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use ate_control::{Control, Keys, Replicas, Settings};
use ate_name::{ActorUid, Generation, NodeName, OpId, WorkerUid};
use ate_orders::{
    Activate, Activated, Capture, Captured, CopyOrder, ExecOrder, Exit, Findings, ForgetOrder, LogsOrder, NodeError,
    NodeReport, Nodes, Output, SearchOrder, SnapshotOrder, Stored,
};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::cluster::Cluster;
use crate::process::Process;
use crate::store::{Shared, StoreWire};
use crate::world::{World, short};

pub(crate) const SETTINGS: Settings = Settings {
    park: Duration::from_secs(30),
    failed_resume_visible: Duration::from_secs(5),
    golden_warm_up: Duration::from_secs(1),
    store_within: Duration::from_secs(50),
    sweep: Duration::from_secs(1),
    reconcile: Duration::from_secs(5),
    node_lease: Duration::from_secs(20),
    node_grace: Duration::from_secs(40),
    reach_within: Duration::from_secs(25),
    answer_within: Duration::from_secs(30),
    replicas: Replicas::Several { beat: Duration::from_secs(1), lease: Duration::from_secs(6) },
};

pub(crate) struct Replica {
    pub(crate) control: Arc<Control>,
    pub(crate) process: Arc<Process>,
    pub(crate) name: String,
    /// It has read what it needs, and serves.
    pub(crate) serves: AtomicBool,
    skew: Arc<Mutex<jiff::SignedDuration>>,
}

/// Its own clock, off by some minutes.
struct ItsWorld {
    world: Arc<World>,
    skew: Arc<Mutex<jiff::SignedDuration>>,
}

impl ate_control::World for ItsWorld {
    fn now(&self) -> jiff::Timestamp {
        self.world.date() + *self.skew.lock()
    }

    fn random(&self) -> [u8; 16] {
        self.world.dice.bytes()
    }
}

/// A few, ahead or behind.
pub(crate) fn some_minutes(world: &World) -> jiff::SignedDuration {
    jiff::SignedDuration::from_mins(i64::try_from(world.dice.below(10)).unwrap_or(0) - 5)
}

struct NoKeys;

impl Keys for NoKeys {
    fn sealed(&self, actor: ActorUid) -> String {
        actor.to_string()
    }
}

impl Replica {
    pub(crate) fn start(
        name: String,
        settings: Settings,
        world: &Arc<World>,
        store: &Arc<Shared>,
        cluster: &Arc<Cluster>,
    ) -> Arc<Self> {
        let process = Arc::new(Process::default());
        let wire = StoreWire {
            shared: Arc::clone(store),
            cluster: Arc::clone(cluster),
            world: Arc::clone(world),
            process: Arc::clone(&process),
        };
        let nodes = NodesWire {
            cluster: Arc::clone(cluster),
            store: Arc::clone(store),
            world: Arc::clone(world),
            process: Arc::clone(&process),
            replica: name.clone(),
        };
        let skew = Arc::new(Mutex::new(some_minutes(world)));
        let own = ItsWorld { world: Arc::clone(world), skew: Arc::clone(&skew) };
        let control = Control::new(Arc::new(wire), Arc::new(nodes), Arc::new(own), Arc::new(NoKeys), settings);
        world.say(format_args!("{name} starts"));
        let replica = Arc::new(Self { control, process, name, serves: AtomicBool::new(false), skew });
        tokio::spawn(Arc::clone(&replica).run(Arc::clone(world), Arc::clone(cluster)));
        replica
    }

    /// Somebody sets its clock.
    pub(crate) fn set_clock(&self, world: &World, skew: jiff::SignedDuration) {
        world.say(format_args!("the clock of {} is off by {skew:?}", self.name));
        *self.skew.lock() = skew;
    }

    async fn run(self: Arc<Self>, world: Arc<World>, cluster: Arc<Cluster>) {
        while let Err(error) = self.control.start().await {
            world.say(format_args!("{} cannot start: {error}", self.name));
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        self.serves.store(true, Relaxed);
        for node in cluster.names() {
            tokio::spawn(Arc::clone(&self.control).look_after(node));
        }
        let mut news = cluster.subscribe();
        let control = Arc::clone(&self.control);
        let process = Arc::clone(&self.process);
        tokio::spawn(async move {
            while let Some((node, event)) = news.recv().await {
                // Each by itself: one may overtake another.
                let (world, process, control) = (Arc::clone(&world), Arc::clone(&process), Arc::clone(&control));
                tokio::spawn(async move {
                    world.pass().await;
                    process.step().await;
                    control.take_news(&node, event).await;
                });
            }
        });
        self.control.start_controllers();
    }
}

struct NodesWire {
    cluster: Arc<Cluster>,
    store: Arc<Shared>,
    world: Arc<World>,
    process: Arc<Process>,
    replica: String,
}

impl NodesWire {
    /// An order on its way: it may not get there, or nobody there may take it up.
    async fn send(&self, node: &NodeName) -> Result<(), NodeError> {
        self.cluster.way(&self.replica, node)?;
        while self.cluster.hangs(node) {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        Ok(())
    }

    /// Carried out where it arrives, whether or not whoever gave it still waits. It may arrive twice, the second time late.
    async fn give<T: Send + 'static, F>(&self, carry_out: impl Fn(Arc<Cluster>) -> F) -> Result<T, NodeError>
    where
        F: Future<Output = Result<T, NodeError>> + Send + 'static,
    {
        if self.world.dice.happens(self.world.weather().doubled) {
            let (world, again) = (Arc::clone(&self.world), carry_out(Arc::clone(&self.cluster)));
            tokio::spawn(async move {
                let late = world.dice.between(Duration::ZERO, Duration::from_secs(10));
                tokio::time::sleep(late).await;
                world.say("an order arrives a second time");
                drop(again.await);
            });
        }
        let done = tokio::spawn(carry_out(Arc::clone(&self.cluster))).await;
        done.unwrap_or_else(|panic| {
            self.world.broken(format!("a node gave up: {panic}"));
            Err(NodeError::Failed(panic.to_string()))
        })
    }
}

#[async_trait]
impl Nodes for NodesWire {
    async fn report(&self, node: &NodeName) -> Result<NodeReport, NodeError> {
        self.process.step().await;
        self.cluster.way(&self.replica, node)?;
        let answer = self.cluster.report(node).await;
        self.process.step().await;
        answer
    }

    async fn activate(&self, node: &NodeName, order: Activate) -> Result<Activated, NodeError> {
        self.process.point("before", "activate").await;
        self.send(node).await?;
        let carry_out = |cluster: Arc<Cluster>| {
            let (node, order) = (node.clone(), order.clone());
            async move { cluster.activate(&node, &order).await }
        };
        let answer = self.give(carry_out).await;
        self.world
            .say(format_args!("activate {} generation {}: {answer:?}", order.identity.key, order.identity.generation));
        self.process.point("after", "activate").await;
        answer
    }

    async fn capture(&self, node: &NodeName, order: Capture) -> Result<Captured, NodeError> {
        self.process.point("before", "capture").await;
        self.send(node).await?;
        let carry_out = |cluster: Arc<Cluster>| {
            let (node, order) = (node.clone(), order.clone());
            async move { cluster.capture(&node, &order).await }
        };
        let answer = self.give(carry_out).await;
        self.world.say(format_args!("capture ({}): {answer:?}", short(order.op)));
        self.process.point("after", "capture").await;
        answer
    }

    async fn abort(&self, node: &NodeName, _: WorkerUid, op: OpId) -> Result<(), NodeError> {
        self.process.step().await;
        self.send(node).await?;
        let carry_out = |cluster: Arc<Cluster>| {
            let node = node.clone();
            async move { cluster.abort(&node, op).await }
        };
        self.give(carry_out).await
    }

    async fn store(&self, node: &NodeName, order: SnapshotOrder) -> Result<Stored, NodeError> {
        self.process.point("before", "store").await;
        self.send(node).await?;
        let carry_out = |cluster: Arc<Cluster>| {
            let (node, order) = (node.clone(), order.clone());
            async move { cluster.store(&node, &order).await }
        };
        let answer = self.give(carry_out).await;
        self.world.say(format_args!("store {}: {answer:?}", order.prefix));
        self.process.point("after", "store").await;
        answer
    }

    async fn release(&self, node: &NodeName, op: OpId) -> Result<(), NodeError> {
        self.process.step().await;
        self.send(node).await?;
        let carry_out = |cluster: Arc<Cluster>| {
            let node = node.clone();
            async move { cluster.release(&node, op).await }
        };
        self.give(carry_out).await
    }

    async fn copy(&self, node: &NodeName, order: CopyOrder) -> Result<Stored, NodeError> {
        self.process.point("before", "copy").await;
        self.send(node).await?;
        let carry_out = |cluster: Arc<Cluster>| {
            let (node, order) = (node.clone(), order.clone());
            async move { cluster.copy(&node, &order).await }
        };
        let answer = self.give(carry_out).await;
        self.world.say(format_args!("copy {} to {}: {answer:?}", order.from.prefix, order.prefix));
        self.process.point("after", "copy").await;
        answer
    }

    async fn upload(&self, node: &NodeName, prefix: &str) -> Result<(), NodeError> {
        self.process.point("before", "upload").await;
        self.send(node).await?;
        let carry_out = |cluster: Arc<Cluster>| {
            let (node, prefix) = (node.clone(), prefix.to_owned());
            async move { cluster.upload(&node, &prefix).await }
        };
        let answer = self.give(carry_out).await;
        self.world.say(format_args!("upload {prefix}: {answer:?}"));
        self.process.point("after", "upload").await;
        answer
    }

    async fn discard(
        &self,
        node: &NodeName,
        worker: WorkerUid,
        actor: ActorUid,
        generation: Generation,
    ) -> Result<(), NodeError> {
        self.process.point("before", "discard").await;
        self.send(node).await?;
        let carry_out = |cluster: Arc<Cluster>| {
            let node = node.clone();
            async move { cluster.discard(&node, worker, actor, generation).await }
        };
        let answer = self.give(carry_out).await;
        self.world.say(format_args!("discard {} at {generation}: {answer:?}", short(actor)));
        self.process.point("after", "discard").await;
        answer
    }

    async fn exec(
        &self,
        _: &NodeName,
        _: ExecOrder,
        _: mpsc::Receiver<Vec<u8>>,
        _: mpsc::Sender<Output>,
    ) -> Result<Exit, NodeError> {
        Err(NodeError::Refused("nothing can be executed here".into()))
    }

    async fn logs(&self, _: &NodeName, _: ActorUid, _: LogsOrder, _: mpsc::Sender<String>) -> Result<(), NodeError> {
        Ok(())
    }

    async fn search(&self, node: &NodeName, order: SearchOrder) -> Result<Findings, NodeError> {
        self.process.point("before", "search").await;
        self.send(node).await?;
        let carry_out = |cluster: Arc<Cluster>| {
            let (node, order) = (node.clone(), order.clone());
            async move { cluster.search(&node, &order).await }
        };
        let answer = self.give(carry_out).await;
        self.world.say(format_args!("search {} on {node}, durable {}: {answer:?}", order.home, order.durable));
        self.process.point("after", "search").await;
        answer
    }

    async fn forget(&self, node: &NodeName, order: ForgetOrder) -> Result<(), NodeError> {
        self.process.point("before", "forget").await;
        // As of now: it may be on its way for longer than whoever gave it lives, and the store be another by then.
        let referred = self.store.referred().await;
        self.send(node).await?;
        let carry_out = |cluster: Arc<Cluster>| {
            let (node, order, referred) = (node.clone(), order.clone(), referred.clone());
            async move { cluster.forget(&node, &order, &referred).await }
        };
        let answer = self.give(carry_out).await;
        self.process.point("after", "forget").await;
        answer
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ate_name::{ObjectKey, TemplateUid};
    use ate_orders::conformance::{Subject, keeps_its_promises};
    use ate_orders::{Identity, Runtime, Source, Workload};

    use super::*;
    use crate::world::Weather;

    struct Simulated(NodesWire);

    /// Longer than all of it takes.
    const HEARD_FOR: Duration = Duration::from_secs(600);

    #[async_trait::async_trait]
    impl Subject for Simulated {
        fn nodes(&self) -> &dyn Nodes {
            &self.0
        }

        fn node(&self) -> NodeName {
            self.0.cluster.names().remove(0)
        }

        fn workload(&self) -> Workload {
            Workload {
                template: ObjectKey::new("sim", "template"),
                template_uid: TemplateUid::from_random([1; 16]),
                containers: Vec::new(),
                ports: Vec::new(),
                egress: Vec::new(),
                memory_limit: None,
                cpu_limit_millis: None,
                durable_bytes: None,
                freeze_after: None,
            }
        }

        fn boot(&self) -> Source {
            Source::Boot {
                runtime: Runtime { config: "sim".to_owned(), class: "gvisor".to_owned(), assets: BTreeMap::new() },
            }
        }

        fn sealed_key(&self, actor: ActorUid) -> String {
            actor.to_string()
        }

        fn home(&self, identity: &Identity) -> String {
            format!("gs://sim/{}", identity.uid)
        }

        fn prefix(&self, identity: &Identity, op: OpId) -> String {
            format!("gs://sim/{}/{op}", identity.uid)
        }

        async fn is_heard(&self, heard: bool) {
            if heard {
                self.0.cluster.renewed(&self.node(), tokio::time::Instant::now() + HEARD_FOR, 1);
            } else {
                tokio::time::sleep(2 * HEARD_FOR).await;
            }
        }
    }

    #[test]
    fn simulated_nodes_keep_the_promises_of_real_ones() {
        crate::simulated(async {
            let world = World::new(1, Weather::default());
            let cluster = Cluster::new(Arc::clone(&world), 1, 2);
            let store = Shared::new(Arc::clone(&world));
            cluster.store.set(Arc::clone(&store)).expect("set once");
            let process = Arc::new(Process::default());
            let replica = "replica".to_owned();
            let simulated = Simulated(NodesWire { cluster, store, world, process, replica });
            simulated.is_heard(true).await;
            keeps_its_promises(&simulated).await;
        });
    }
}
