//! Starting and stopping: the loops that run beside the requests.

use std::sync::Arc;
use std::time::Duration;

use ate_name::ReplicaId;
use ate_orders::{NodeEvent, Nodes};
use ate_store::{Kind, Prefix, Revision, Store};
use futures::{Stream, StreamExt, stream};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::{
    Control, ControlError, Keys, Replicas, Settings, World, assignments, catalog, drive, follow, reach, replicas,
};

/// Freezes and thaws that a watcher may be behind; it misses those beyond, and sees the next.
const STIRRED: usize = 1024;

/// A server that stops waits no longer for nodes.
const STOPPED_WITHIN: Duration = Duration::from_secs(30);

/// Actors that are read at once while everything is loaded. One after the other, thousands of them would take longer than the feed
/// lasts; more at once than this would only wait for a database's connections, in front of those who are served.
const LOADED_AT_ONCE: usize = 16;

/// What is kept in memory of the store.
const FOLLOWED: [Kind; 8] =
    [Kind::Config, Kind::Pool, Kind::Template, Kind::Atespace, Kind::Worker, Kind::Actor, Kind::Replica, Kind::Node];

/// What is read for each, in whatever order it comes.
pub(crate) fn several_at_once<T, R: Future>(each: Vec<T>, read: impl FnMut(T) -> R) -> impl Stream<Item = R::Output> {
    stream::iter(each).map(read).buffer_unordered(LOADED_AT_ONCE)
}

/// Dropped before the server stops it says so, also by a panic.
struct Kept(Arc<Control>);

impl Drop for Kept {
    fn drop(&mut self) {
        if !self.0.stopping.is_cancelled() {
            tracing::error!("a task that the server cannot do without has ended");
            self.0.failed.cancel();
        }
    }
}

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
            removing: parking_lot::Mutex::default(),
            deaf_until: Mutex::new(tokio::time::Instant::now()),
            counters: Default::default(),
            driving: drive::Driving::default(),
            emptying: Mutex::default(),
            store,
            nodes: reach::Reach::new(nodes, &settings),
            world,
            keys,
            settings,
            catalog: catalog::Catalog::new(),
            limits: Default::default(),
            fleet: Mutex::default(),
            reserved: Mutex::default(),
            freed: tokio::sync::Notify::new(),
            stirred: tokio::sync::broadcast::Sender::new(STIRRED),
            unwilling: Mutex::default(),
            hindered: Mutex::default(),
            follower: follow::Follower::default(),
            assignments: assignments::Assignments::new(),
            tasks: tokio_util::task::TaskTracker::new(),
            stopping: tokio_util::sync::CancellationToken::new(),
            binds: tokio::sync::RwLock::new(true),
            failed: tokio_util::sync::CancellationToken::new(),
        })
    }

    /// Loads what is needed at every turn and begins to follow the store.
    pub async fn start(self: &Arc<Self>) -> Result<(), ControlError> {
        let since = self.store.revision().await?;
        self.load().await?;
        self.keep(Arc::clone(self).keep_following(since));
        if matches!(self.settings.replicas, Replicas::Several { .. }) {
            self.keep(Arc::clone(self).keep_beating());
        }
        Ok(())
    }

    /// Runs what must go on for as long as the server does.
    fn keep(self: &Arc<Self>, what: impl Future<Output = ()> + Send + 'static) {
        let kept = Kept(Arc::clone(self));
        self.tasks.spawn(async move {
            what.await;
            drop(kept);
        });
    }

    /// Returns if something has ended that must go on: nobody would take over what is left, or hear of what changes.
    pub async fn failed(&self) {
        self.failed.cancelled().await;
    }

    /// All that can be read; an error is the store's.
    async fn load(&self) -> Result<(), ControlError> {
        for kind in [Kind::Config, Kind::Pool, Kind::Template] {
            self.load_objects(kind).await?;
        }
        self.load_quotas().await?;
        // With those that they run.
        self.load_workers().await?;
        self.load_replicas().await?;
        self.load_nodes().await
    }

    async fn keep_following(self: Arc<Self>, mut since: Revision) {
        let followed = FOLLOWED.map(Prefix::all);
        loop {
            tokio::select! {
                biased;
                () = self.stopping.cancelled() => return,
                ended = self.follow(&followed, since) => {
                    tracing::warn!(error = ended.err().map(|error| error.text), "following the store anew");
                }
            }
            let mut patience = drive::Patience::new();
            // What changed meanwhile is not told: all of it is looked at again.
            since = loop {
                if let Ok(revision) = self.store.revision().await
                    && self.load().await.is_ok()
                {
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
        self.keep(Arc::clone(self).sweep_regularly());
        self.keep(Arc::clone(self).watch_nodes());
        let control = Arc::clone(self);
        self.keep(async move {
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

    /// Begins nothing new and waits for what is under way; for a while: a node may be slow to answer, and whatever is left has
    /// its record.
    pub async fn stop(&self) {
        self.stopping.cancel();
        self.tasks.close();
        if tokio::time::timeout(STOPPED_WITHIN, self.tasks.wait()).await.is_err() {
            tracing::warn!(
                "operations are still under way: they are taken up by another replica, or by the next start"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn what_is_loaded_is_read_several_at_once_and_no_more_than_so_many() {
        let (reading, most) = (Cell::new(0), Cell::new(0));
        let read = async |number: usize| {
            reading.set(reading.get() + 1);
            most.set(most.get().max(reading.get()));
            // The store takes a while.
            tokio::task::yield_now().await;
            reading.set(reading.get() - 1);
            number
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let read: Vec<_> = runtime.block_on(several_at_once((0..100).collect(), read).collect());
        assert_eq!(read.len(), 100, "each is read");
        assert_eq!(most.get(), LOADED_AT_ONCE);
    }
}
