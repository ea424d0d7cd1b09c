//! Starting and stopping: the loops that run beside the requests.

use std::sync::Arc;

use ate_orders::{NodeEvent, Nodes};
use ate_store::{Kind, Store};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::{Control, ControlError, Keys, Settings, World, assignments, catalog, follow};

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
            store,
            nodes,
            world,
            keys,
            settings,
            catalog: catalog::Catalog::new(),
            fleet: Mutex::default(),
            freed: tokio::sync::Notify::new(),
            stirred: tokio::sync::broadcast::Sender::new(STIRRED),
            told: Mutex::default(),
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
        self.load_catalog().await?;
        for kind in [Kind::Actor, Kind::Worker, Kind::Template, Kind::Pool, Kind::Config] {
            let control = Arc::clone(self);
            self.tasks.spawn(async move {
                let mut since = since;
                loop {
                    tokio::select! {
                        ended = control.follow(kind, since) => {
                            tracing::warn!(%kind, error = ended.err().map(|error| error.text), "following the store anew");
                            if let Ok(now) = control.store.revision().await { since = now; }
                            let _ = control.load_catalog().await;
                        }
                        () = control.stopping.cancelled() => return,
                    }
                }
            });
        }
        Ok(())
    }

    /// Begins the work that nobody asked for: goldens for templates. Nodes must be known by now.
    pub fn start_controllers(self: &Arc<Self>) {
        let control = Arc::clone(self);
        self.tasks.spawn(async move {
            let stopping = control.stopping.clone();
            tokio::select! {
                () = Arc::clone(&control).make_goldens() => {}
                () = stopping.cancelled() => {}
            }
        });
    }

    /// Takes in a node's news for as long as it tells them.
    pub async fn listen(self: &Arc<Self>, node: ate_name::NodeName, mut events: mpsc::Receiver<NodeEvent>) {
        while let Some(event) = events.recv().await {
            if let NodeEvent::Report(reports) = &event {
                self.apply_idle_policy(reports);
            }
            if let Err(error) = self.node_event(&node, event).await {
                tracing::warn!(%node, %error, "news from a node could not be taken in");
            }
        }
    }

    /// Begins nothing new and waits for what is under way.
    pub async fn stop(&self) {
        self.stopping.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
