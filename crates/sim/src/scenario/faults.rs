//! What goes wrong on a stage.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ate_name::NodeName;
use ate_orders::ForgetOrder;

use super::Stage;
use crate::{Backup, Simulation};

impl Stage {
    /// The first replica dies when it comes to a point: `before` or `after` a `commit of` a phase, or an order.
    pub fn die_when(&self, point: &str) {
        self.simulation.world.say(format_args!("the first replica will die {point}"));
        self.first.process.die_when(point);
    }

    /// The next order of this kind that the first replica gives is never answered: it does not arrive (`before`), or is carried
    /// out and nobody hears of it (`after`). Everything else goes on.
    pub fn never_answered(&self, point: &str) {
        self.simulation.world.say(format_args!("an order will be lost {point}"));
        self.first.process.lose_when(point);
    }

    /// The first replica stands still when it comes to a point, for so many seconds; waits until it does.
    pub async fn until_first_stands_still(&self, point: &str, seconds: u64) {
        self.first.process.stand_still_when(point, Duration::from_secs(seconds));
        let until = tokio::time::Instant::now() + crate::CALM;
        while !self.first.process.stands_still() {
            assert!(tokio::time::Instant::now() < until, "{}\nnever came to it", self.trace());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Whether there was such an order.
    pub fn was_never_answered(&self) -> bool {
        self.first.process.has_lost()
    }

    /// Has the copy for the fork removed, as by an order of a time that the store no longer knows of.
    pub async fn remove_the_copy(&self) {
        let Simulation { cluster, .. } = &self.simulation;
        for node in self.nodes() {
            let copies = cluster.only_on(&node).into_iter().filter(|prefix| prefix.contains("/copy/"));
            cluster.forget(&node, &ForgetOrder::snapshots(copies), &BTreeSet::new()).await.expect("it is reached");
        }
    }

    /// Everything on its disk is gone.
    pub fn wipe_disk(&self, node: &NodeName) {
        self.simulation.cluster.wipe_disk(node);
    }

    pub async fn back_up(&self) -> Backup {
        self.simulation.back_up().await
    }

    /// The store is lost and goes on as this; from here on the first replica is no more.
    pub async fn restore(&self, backup: Backup) {
        self.simulation.restore(backup).await;
    }

    /// Whether the first replica has come to where it dies, or comes there soon.
    pub async fn is_first_dead(&self) -> bool {
        tokio::time::timeout(Duration::from_secs(5), self.first.process.died()).await.is_ok()
    }

    pub fn kill_first(&self) {
        self.first.process.die();
    }

    pub fn kill_node(&self, node: &NodeName) {
        self.simulation.cluster.kill_node(node);
    }

    pub fn power_off(&self, node: &NodeName) {
        self.simulation.cluster.power_off(node);
    }

    /// The first replica's orders do not get there; what the node says is heard.
    pub fn cut_first_from(&self, node: &NodeName) {
        self.simulation.cluster.cut(&self.first.name, node);
    }

    pub fn cut_everybody_from(&self, node: &NodeName, cut: bool) {
        match cut {
            true => self.simulation.clients.living().iter().for_each(|it| self.simulation.cluster.cut(&it.name, node)),
            false => self.simulation.cluster.mend_ways_to(node),
        }
    }

    pub fn hang(&self, node: &NodeName, hangs: bool) {
        self.simulation.cluster.set_hangs(node, hangs);
    }

    /// It never comes back.
    pub fn destroy(&self, node: &NodeName) {
        self.simulation.cluster.destroy(node);
    }

    pub fn start_node(&self, node: &NodeName) {
        self.simulation.cluster.start_node(node);
    }

    pub fn cut_off(&self, node: &NodeName, cut_off: bool) {
        self.simulation.cluster.set_cut_off(node, cut_off);
    }

    /// Ends the worker that hosts the actor.
    pub async fn kill_its_worker(&self) {
        let actor = self.actor().await.expect("it is there");
        let lease = actor.lease().expect("it is in a worker");
        self.simulation.cluster.kill_this_worker(&lease.node, lease.worker);
    }

    /// So many minutes off, each.
    pub fn set_clocks(&self, minutes: [i64; 2]) {
        for (replica, minutes) in self.simulation.clients.living().into_iter().zip(minutes) {
            replica.set_clock(&self.simulation.world, jiff::SignedDuration::from_mins(minutes));
        }
    }

    pub async fn kill_its_sandbox(&self) {
        let node = self.node().await;
        self.simulation.cluster.kill_sandbox(&node);
    }

    /// Its workload exits by itself.
    pub async fn crash(&self) {
        let node = self.node().await;
        self.simulation.cluster.end_sandbox(&node, ate_orders::Exit::Code(1));
        self.until_suspended().await;
    }

    /// From here on whatever is woken ends while it starts, or no longer does.
    pub fn crash_at_start(&self, crashes: bool) {
        self.simulation.cluster.crashes.store(crashes, Ordering::Relaxed);
    }

    pub fn storage_away(&self, away: bool) {
        self.simulation.cluster.set_storage_away(away);
    }

    pub fn store_away(&self, away: bool) {
        *self.simulation.store.away.lock() = away;
    }

    pub fn disk_full(&self, node: &NodeName, full: bool) {
        self.simulation.cluster.set_full(node, full);
    }
}
