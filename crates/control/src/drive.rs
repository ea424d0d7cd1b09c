//! Operations and who drives them. Whatever is begun has a record, and a record that nobody drives finds somebody.
//!
//! Two drivers of one operation do no harm: every write is guarded and every order can be repeated. So nothing here is a
//! lock; it only decides who begins to help, and when.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ate_actor::{Event, Phase};
use ate_name::{ActorKey, OpId};
use ate_store::{Change, CommitError, Kind};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::ledger::Note;
use crate::records::{Job, OperationRecord, Read, operation_key};
use crate::{Code, Control, ControlError};

/// Between tries of something that must succeed in the end; doubles up to the last.
const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_LAST: Duration = Duration::from_secs(30);

/// Looking for operations takes at most one part of so many of the time, unless that would make it wait for longer than this.
const SWEEP_SHARE: u32 = 30;
const SWEEP_LAST: Duration = Duration::from_secs(5);

/// The operations that this process drives.
#[derive(Debug, Default)]
pub(crate) struct Driving(Mutex<BTreeSet<OpId>>);

/// The right of one task to drive an operation; given up when it is dropped, however the task ends.
pub(crate) struct Driver {
    control: Arc<Control>,
    pub(crate) op: OpId,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.control.driving.0.lock().remove(&self.op);
    }
}

/// Waits longer each time.
pub(crate) struct Patience(Duration);

impl Patience {
    pub(crate) fn new() -> Self {
        Self(RETRY_FIRST)
    }

    /// An error when the server stops: what is left to do has a record.
    pub(crate) async fn wait(&mut self, control: &Control) -> Result<(), ControlError> {
        let wait = self.0;
        self.0 = (wait * 2).min(RETRY_LAST);
        tokio::select! {
            biased;
            () = control.stopping.cancelled() => Err(ControlError::stopping()),
            () = tokio::time::sleep(wait) => Ok(()),
        }
    }
}

impl Control {
    /// A new operation, driven from before it is written down: so a record without a driver is one that needs one.
    pub(crate) fn new_operation(self: &Arc<Self>) -> Driver {
        let op = OpId::from_random(self.world.random());
        self.driver(op).expect("an id that was just drawn is nobody's")
    }

    /// `None` if a task of this process drives it already.
    pub(crate) fn driver(self: &Arc<Self>, op: OpId) -> Option<Driver> {
        self.driving.0.lock().insert(op).then(|| Driver { control: Arc::clone(self), op })
    }

    pub(crate) fn operation(&self, op: OpId, job: Job) -> OperationRecord {
        OperationRecord { op, job, owner: self.replica, started: self.world.now(), taken_over: 0 }
    }

    /// Looks for operations that nobody drives, for as long as this is polled.
    pub(crate) async fn sweep_regularly(self: Arc<Self>) {
        loop {
            let begun = Instant::now();
            if let Err(error) = self.sweep().await {
                tracing::warn!(%error, "operations could not be looked after");
            }
            // A list steps over all that came and went since the engine last put its files in order.
            let pause = (begun.elapsed() * SWEEP_SHARE).min(SWEEP_LAST).max(self.settings.sweep);
            tokio::select! {
                biased;
                () = self.stopping.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    async fn sweep(self: &Arc<Self>) -> Result<(), ControlError> {
        let now = self.world.now();
        let (mut count, mut forgets, mut oldest) = (0, 0, now);
        for record in self.all(Kind::Operation).await? {
            let read = match Read::<OperationRecord>::decode(record) {
                Ok(read) => read,
                // What a newer build has begun, a newer build ends; the others are not kept waiting.
                Err(_) => continue,
            };
            count += 1;
            forgets += u64::from(matches!(read.value.job, Job::Forget(_)));
            oldest = oldest.min(read.value.started);
            match self.take_over(read).await {
                Err(error) if error.is_store_away() => return Err(error),
                Err(error) => tracing::warn!(%error, "an operation could not be taken over"),
                Ok(()) => {}
            }
        }
        self.counters.operations.set(count);
        self.counters.forgets.set(forgets);
        self.counters.oldest_operation_seconds.set(u64::try_from(now.duration_since(oldest).as_secs()).unwrap_or(0));
        Ok(())
    }

    /// Drives an operation from here on, unless somebody does.
    async fn take_over(self: &Arc<Self>, read: Read<OperationRecord>) -> Result<(), ControlError> {
        let operation = &read.value;
        if operation.owner != self.replica && self.lives(operation.owner) && !self.can_help(operation).await? {
            return Ok(());
        }
        let Some(driver) = self.driver(operation.op) else { return Ok(()) };
        if operation.owner != self.replica {
            let ours =
                OperationRecord { owner: self.replica, taken_over: operation.taken_over + 1, ..operation.clone() };
            match self.store.commit(Change::new().replace(&read.record, read.rewritten(&ours))).await {
                Ok(_) => {
                    self.counters.taken_over.one();
                    tracing::info!(op = %operation.op, from = %operation.owner, "taking over an operation");
                }
                // Somebody else was faster, or it has come to its end.
                Err(CommitError::Conflict { .. }) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        let (control, job) = (Arc::clone(self), operation.job.clone());
        self.tasks.spawn(async move {
            let op = driver.op;
            if let Err(error) = control.drive(driver, job).await {
                tracing::info!(%op, %error, "an operation that was taken up has ended");
            }
        });
        Ok(())
    }

    async fn drive(self: &Arc<Self>, driver: Driver, job: Job) -> Result<(), ControlError> {
        match job {
            Job::Actor(key) => self.drive_actor(driver, &key).await,
            Job::Forget(forget) => self.forget(&driver, &forget).await,
            Job::Golden(template) => self.drive_golden(&driver, &template).await,
            Job::Fork(fork) => self.finish_fork(driver, *fork).await.map(drop),
            Job::Restart(restart) => self.finish_restart(driver, &restart).await.map(drop),
        }
    }

    /// Goes on from what the actor's record says.
    async fn drive_actor(self: &Arc<Self>, driver: Driver, key: &ActorKey) -> Result<(), ControlError> {
        let op = driver.op;
        let read = match self.actor(key).await {
            Ok(read) => read,
            Err(error) if error.code == Code::NotFound => return self.close(op).await,
            Err(error) => return Err(error),
        };
        match &read.value.phase {
            phase if phase.operation() == Some(op) => match phase {
                Phase::Resuming { lease: Some(_), .. } => self.finish_wake(driver, read).await.map(drop),
                Phase::Resuming { lease: None, .. } => self.give_up(driver, read).await,
                _ => self.finish_save(driver, read).await.map(drop),
            },
            _ if read.value.snapshots.uploading == Some(op) => self.finish_upload(driver, &read.value).await.map(drop),
            // Its last step was written without it: the record is a leftover.
            _ => self.close(op).await,
        }
    }

    /// Nothing is left to be done.
    pub(crate) async fn close(&self, op: OpId) -> Result<(), ControlError> {
        self.store.commit(Change::new().delete(operation_key(op))).await?;
        Ok(())
    }

    /// A failed wake stays visible for a while, then the actor is what it was before.
    pub(crate) async fn give_up(
        self: &Arc<Self>,
        driver: Driver,
        read: Read<ate_actor::Actor>,
    ) -> Result<(), ControlError> {
        tokio::select! {
            biased;
            () = self.stopping.cancelled() => return Ok(()),
            () = tokio::time::sleep(self.settings.failed_resume_visible) => {}
        }
        self.settle(read, Event::GaveUp { op: driver.op }, Note::new("GaveUp")).await.map(drop)
    }
}
