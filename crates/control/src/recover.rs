//! After a start: what was under way is brought to an end, whoever began it.

use std::sync::Arc;

use ate_actor::{Event, Phase};
use ate_name::NodeName;
use ate_orders::{Hosted, WorkerReport};
use ate_store::{Kind, Prefix};

use crate::ledger::Note;
use crate::records::{Assignee, OperationRecord, Read, operation_key, worker_key};
use crate::{Control, ControlError};

/// Records read per step.
const STEP: usize = 500;

impl Control {
    /// Compares what the store says with what the node has. `reports` are all workers that are alive on the node.
    pub async fn recover(self: &Arc<Self>, node: &NodeName, reports: &[WorkerReport]) -> Result<(), ControlError> {
        for report in reports {
            self.worker_up(node, report).await?;
        }
        self.drop_dead_workers(node, reports).await?;
        self.end_operations().await?;
        for report in reports {
            self.reconcile_worker(node, report).await?;
        }
        Ok(())
    }

    async fn drop_dead_workers(self: &Arc<Self>, node: &NodeName, alive: &[WorkerReport]) -> Result<(), ControlError> {
        for (worker, _) in self.list_workers().await? {
            let uid = worker.lease.worker;
            if worker.lease.node == *node && !alive.iter().any(|report| report.worker == uid) {
                self.worker_gone(uid, "its worker did not survive").await?;
            }
        }
        Ok(())
    }

    async fn end_operations(self: &Arc<Self>) -> Result<(), ControlError> {
        let mut after = None::<String>;
        loop {
            let page = self.store.list(&Prefix::all(Kind::Operation), after.as_deref(), STEP).await?;
            after = page.records.last().map(|record| record.key.path().to_owned());
            for record in page.records {
                let operation = Read::<OperationRecord>::decode(record)?.value;
                self.end_operation(&operation).await?;
            }
            if !page.more {
                return Ok(());
            }
        }
    }

    async fn end_operation(self: &Arc<Self>, operation: &OperationRecord) -> Result<(), ControlError> {
        let read = match self.actor(&operation.actor).await {
            Ok(read) if read.value.phase.operation() == Some(operation.op) => read,
            Ok(read) if read.value.snapshots.uploading == Some(operation.op) => {
                let superseded = ate_actor::Snapshots { local: None, ..read.value.snapshots.clone() };
                drop(self.after_save(&read.value, &superseded));
                return Ok(());
            }
            _ => {
                self.store.commit(ate_store::Change::new().delete(operation_key(operation.op))).await?;
                return Ok(());
            }
        };
        match read.value.phase.clone() {
            // An attempt that failed; nobody waits for it any more.
            Phase::Resuming { lease: None, op, .. } => {
                self.transition(&read, Event::GaveUp { op }, Note::new("Suspended")).await.map(drop)
            }
            // Whether the sandbox came up is for the worker to say; see `reconcile_worker`.
            Phase::Resuming { .. } => Ok(()),
            Phase::Suspending { .. } | Phase::Saving { .. } => {
                let (control, key) = (Arc::clone(self), read.value.key.clone());
                self.tasks.spawn(async move {
                    if let Err(error) = control.finish_save(read).await {
                        tracing::warn!(actor = %key, %error, "a save that was cut off could not be completed");
                    }
                });
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The store says who belongs into a worker; the worker says who is there.
    async fn reconcile_worker(self: &Arc<Self>, node: &NodeName, report: &WorkerReport) -> Result<(), ControlError> {
        let record = self.store.get(&worker_key(report.worker)).await?;
        let assigned =
            record.map(Read::<crate::WorkerRecord>::decode).transpose()?.and_then(|read| read.value.assigned);
        let hosted = report.hosted.as_ref().map(|Hosted { identity, .. }| identity);
        match (assigned, hosted) {
            (Some(assignee), Some(identity))
                if assignee.uid == identity.uid && assignee.generation == identity.generation =>
            {
                let read = self.actor(&assignee.key).await?;
                if let Phase::Resuming { op, .. } = read.value.phase {
                    self.transition(
                        &read,
                        Event::Started { op },
                        Note::because("Running", "found running after a restart"),
                    )
                    .await?;
                } else {
                    self.note_actor(&assignee.key, Some(&read.value));
                }
                Ok(())
            }
            (assigned, hosted) => {
                if let Some(identity) = hosted {
                    let _ = self.nodes.discard(node, report.worker, identity.uid, identity.generation).await;
                }
                match assigned {
                    // Captured, or about to be: the save that was taken up again knows.
                    Some(assignee) if self.is_suspending(&assignee).await? => Ok(()),
                    Some(assignee) => {
                        self.lost(&assignee.key, assignee.generation, "it was not found in its worker after a restart")
                            .await
                    }
                    None => Ok(()),
                }
            }
        }
    }

    async fn is_suspending(&self, assignee: &Assignee) -> Result<bool, ControlError> {
        let actor = self.actor(&assignee.key).await?.value;
        Ok(actor.generation == assignee.generation && matches!(actor.phase, Phase::Suspending { .. }))
    }
}
