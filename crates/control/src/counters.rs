//! What the control plane has seen of its own promises, for whoever exports metrics. Plain atomics: nothing is written down,
//! and each replica counts for itself.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ate_placement::State;

use crate::Control;

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn one(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) woken: Counter,
    pub(crate) stored: Counter,
    pub(crate) lost: Counter,
    pub(crate) crashed: Counter,
    pub(crate) fenced: Counter,
    pub(crate) snapshots_missing: Counter,
    pub(crate) fell_back: Counter,
    pub(crate) caught_up: Counter,
    pub(crate) taken_over: Counter,
    pub(crate) not_in_worker: Counter,
    pub(crate) workers_freed: Counter,
    pub(crate) nodes_given_up: Counter,
    pub(crate) nodes_shut_out: Counter,
    pub(crate) nodes_ahead: Counter,
    pub(crate) goldens_failed: Counter,
    pub(crate) over_quota: Counter,
    /// As of the last look.
    pub(crate) operations: Counter,
    pub(crate) oldest_operation_seconds: Counter,
    pub(crate) forgets: Counter,
}

/// One number, as it is exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    pub name: &'static str,
    pub help: &'static str,
    /// It only grows; otherwise it is how things are.
    pub counts: bool,
    pub value: u64,
}

impl Control {
    /// What has been counted, and how things are.
    pub fn samples(&self) -> Vec<Sample> {
        let counted = |name, help, counter: &Counter| Sample { name, help, counts: true, value: counter.get() };
        let is = |name, help, value| Sample { name, help, counts: false, value };
        let counters = &self.counters;
        let (mut workers, mut taken, mut draining) = (0, 0, 0);
        for worker in self.fleet.lock().iter() {
            workers += 1;
            taken += u64::from(matches!(worker.state, State::Taken | State::Frozen { .. }));
            draining += u64::from(worker.state == State::Draining);
        }
        vec![
            counted("ate_actors_woken_total", "Wakes that came to an end.", &counters.woken),
            counted("ate_snapshots_stored_total", "Saves that came to an end.", &counters.stored),
            counted(
                "ate_actors_lost_total",
                "Actors whose sandbox, worker or node was gone: they continue from their last snapshot.",
                &counters.lost,
            ),
            counted(
                "ate_actors_crashed_total",
                "Actors that ended by themselves, or were killed at their memory limit.",
                &counters.crashed,
            ),
            counted(
                "ate_fenced_total",
                "Sandboxes, answers and nodes of the past that were refused or ended.",
                &counters.fenced,
            ),
            counted(
                "ate_snapshots_missing_total",
                "Wakes that did not find the snapshot they were to continue from.",
                &counters.snapshots_missing,
            ),
            counted(
                "ate_actors_fell_back_total",
                "Actors whose newest snapshot was on one node only, and is gone.",
                &counters.fell_back,
            ),
            counted(
                "ate_actors_caught_up_total",
                "Actors of a restored backup that had been saved after it, and continue from there.",
                &counters.caught_up,
            ),
            counted(
                "ate_operations_taken_over_total",
                "Operations that another replica had begun.",
                &counters.taken_over,
            ),
            is("ate_operations", "Operations under way, of all replicas.", counters.operations.get()),
            is(
                "ate_operation_oldest_seconds",
                "How long the oldest of them has been under way.",
                counters.oldest_operation_seconds.get(),
            ),
            is("ate_forgets", "Removals of what nobody refers to that are not done yet.", counters.forgets.get()),
            is("ate_workers", "Workers.", workers),
            is("ate_workers_taken", "Workers that an actor holds.", taken),
            is("ate_workers_draining", "Workers that are to go.", draining),
            counted(
                "ate_actors_not_in_worker_total",
                "Actors that were not in the worker they held.",
                &counters.not_in_worker,
            ),
            counted(
                "ate_workers_freed_total",
                "Workers that were assigned to an actor which did not hold them.",
                &counters.workers_freed,
            ),
            counted("ate_orders_refused_total", "Orders of the past that nodes refused.", &self.nodes.refused),
            counted("ate_nodes_given_up_total", "Nodes that were silent for too long.", &counters.nodes_given_up),
            counted(
                "ate_nodes_shut_out_total",
                "Nodes that said that they live, and took orders from nobody.",
                &counters.nodes_shut_out,
            ),
            counted(
                "ate_nodes_ahead_total",
                "Renewals of nodes that were told more than the store knows: it has lost commits.",
                &counters.nodes_ahead,
            ),
            counted(
                "ate_goldens_failed_total",
                "Templates whose golden snapshot could not be made, or not be restored.",
                &counters.goldens_failed,
            ),
            counted("ate_quota_refusals_total", "Creates and wakes that a quota refused.", &counters.over_quota),
        ]
    }
}
