//! Starting and stopping: the loops that run beside the requests.

use std::sync::Arc;

use ate_name::ReplicaId;
use ate_orders::{NodeEvent, Nodes};
use ate_store::{Kind, Revision, Store};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::{Control, ControlError, Keys, Settings, World, assignments, catalog, drive, follow, replicas};

/// Freezes and thaws that a watcher may be behind; it misses those beyond, and sees the next.
const STIRRED: usize = 1024;

impl Control {
    pub fn new(
        store: Arc<dyn Store>,
        nodes: Arc<dyn Nodes>,
        world: Arc<dyn World>,
        keys: Arc<dyn Keys>,
        settings: Settings,
    ) -> Arc<Self> {
        Arc::new(Self {
            replica: ReplicaId::from_random(world.random()),
            beats: replicas::Beats::default(),
            known_nodes: replicas::Beats::default(),
            deaf_until: Mutex::default(),
            counters: Default::default(),
            driving: drive::Driving::default(),
            emptying: Mutex::default(),
            store,
            nodes,
            world,
            keys,
            settings,
            catalog: catalog::Catalog::new(),
            quotas: Default::default(),
            fleet: Mutex::default(),
            reserved: Mutex::default(),
            freed: tokio::sync::Notify::new(),
            stirred: tokio::sync::broadcast::Sender::new(STIRRED),
            unwilling: Mutex::default(),
            follower: follow::Follower::default(),
            assignments: assignments::Assignments::new(),
            tasks: tokio_util::task::TaskTracker::new(),
            stopping: tokio_util::sync::CancellationToken::new(),
        })
    }

    /// Loads what is needed at every turn and begins to follow the store.
    pub async fn start(self: &Arc<Self>) -> Result<(), ControlError> {
        let since = self.store.revision().await?;
        self.load().await?;
        let kinds = [Kind::Actor, Kind::Worker, Kind::Atespace, Kind::Template, Kind::Pool, Kind::Config];
        for kind in kinds.into_iter().chain([Kind::Replica, Kind::Node]) {
            self.tasks.spawn(Arc::clone(self).keep_following(kind, since));
        }
        self.tasks.spawn(Arc::clone(self).keep_beating());
        Ok(())
    }

    async fn load(&self) -> Result<(), ControlError> {
        self.load_catalog().await?;
        self.load_quotas().await?;
        self.load_workers().await?;
        self.load_replicas().await?;
        self.load_nodes().await
    }

    async fn keep_following(self: Arc<Self>, kind: Kind, mut since: Revision) {
        loop {
            tokio::select! {
                biased;
                () = self.stopping.cancelled() => return,
                ended = self.follow(kind, since) => {
                    tracing::warn!(%kind, error = ended.err().map(|error| error.text), "following the store anew");
                }
            }
            let mut patience = drive::Patience::new();
            // What changed meanwhile is not told: all of it is looked at again.
            since = loop {
                let revision = self.store.revision().await;
                if let (Ok(revision), Ok(())) = (revision, self.load().await) {
                    break revision;
                }
                if patience.wait(&self).await.is_err() {
                    return;
                }
            };
            self.follower.all_changed();
        }
    }

    /// Begins the work that nobody asked for: operations that are left over, goldens for templates. Nodes must be known
    /// by now.
    pub fn start_controllers(self: &Arc<Self>) {
        self.tasks.spawn(Arc::clone(self).sweep_regularly());
        self.tasks.spawn(Arc::clone(self).watch_nodes());
        let control = Arc::clone(self);
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = control.stopping.cancelled() => {}
                () = control.make_goldens() => {}
            }
        });
    }

    /// Takes in a node's news for as long as it tells them.
    pub async fn listen(self: &Arc<Self>, node: ate_name::NodeName, mut events: mpsc::Receiver<NodeEvent>) {
        while let Some(event) = events.recv().await {
            self.take_news(&node, event).await;
        }
    }

    /// What cannot be taken in now is found by the next comparison.
    pub async fn take_news(self: &Arc<Self>, node: &ate_name::NodeName, event: NodeEvent) {
        if let NodeEvent::Report(reports) = &event {
            self.apply_idle_policy(reports);
        }
        if let Err(error) = self.node_event(node, event).await {
            tracing::warn!(%node, %error, "news from a node could not be taken in");
        }
    }

    /// Begins nothing new and waits for what is under way.
    pub async fn stop(&self) {
        self.stopping.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
