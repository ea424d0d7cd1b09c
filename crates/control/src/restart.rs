//! Starting an actor's processes anew, on the files that it has.
//!
//! The wish is in its record first ([`Event::Restart`]), and stays there until a wake has fulfilled it: also if a request comes in
//! between, the next wake is the one that was asked for. With it goes an operation, so that somebody sees to that wake whatever
//! becomes of who was asked.

use std::sync::Arc;

use ate_actor::{Actor, Event, Intent, Phase, Start};
use ate_name::{ActorKey, OpId};
use ate_orders::NodeError;
use ate_store::Change;
use tokio::time::Instant;

use crate::actors::Versioned;
use crate::drive::Driver;
use crate::ledger::Note;
use crate::records::{Job, Read, Restart, encode, operation_key};
use crate::resume::again;
use crate::{Code, Control, ControlError};

impl Control {
    /// Saves the files of an actor, and starts it anew with them. `force`: what it has done since its last snapshot is not
    /// saved, in memory or in files.
    pub async fn restart_actor(self: &Arc<Self>, key: &ActorKey, force: bool) -> Result<Versioned, ControlError> {
        let (control, key) = (Arc::clone(self), key.clone());
        // Whoever asks may go away.
        let restarted = self.tasks.spawn(async move {
            let driver = control.new_operation();
            let restart = control.wish_for_restart(driver.op, key, force).await?;
            control.finish_restart(driver, &restart).await
        });
        restarted.await.map_err(|_| ControlError::stopping())?
    }

    async fn wish_for_restart(self: &Arc<Self>, op: OpId, key: ActorKey, force: bool) -> Result<Restart, ControlError> {
        loop {
            let read = self.actor(&key).await?;
            let restart = Restart { actor: key.clone(), uid: read.value.uid, force };
            let record = encode(&self.operation(op, Job::Restart(restart.clone())));
            let begun = Change::new().create(operation_key(op), record);
            let note = Note::because("Restarting", "asked for");
            match self.transition_with(begun, &read, Event::Restart, note).await {
                Err(error) if error.is_conflict() => {}
                other => return other.map(|_| restart),
            }
        }
    }

    /// From the operation on; also where one that was cut off is taken up.
    pub(crate) async fn finish_restart(
        self: &Arc<Self>,
        driver: Driver,
        restart: &Restart,
    ) -> Result<Versioned, ControlError> {
        let restarted = self.restart(restart).await;
        match &restarted {
            // Whoever looks after operations goes on with it.
            Err(error) if error.is_interruption() || self.stopping.is_cancelled() => {}
            // It cannot be told yet what it is to be started with.
            Err(_) if self.actor(&restart.actor).await.is_ok_and(|read| read.value.behind.is_some()) => {}
            // If it failed whoever asked is told; the wish stays.
            _ => self.close(driver.op).await?,
        }
        restarted
    }

    /// Brings the actor to rest, and wakes it, until somebody has fulfilled the wish.
    async fn restart(self: &Arc<Self>, restart: &Restart) -> Result<Versioned, ControlError> {
        let Restart { actor: key, uid, force } = restart;
        let (mut deadline, mut tries) = (Instant::now() + self.settings.park, 0);
        loop {
            let notify = self.follower.of(key);
            let changed = notify.notified();
            let read = self.actor(key).await?;
            if read.value.uid != *uid {
                return Err(ControlError::actor_not_found(key.name.as_str()));
            }
            if !read.value.fresh {
                return Ok(read.into());
            }
            let step = match &read.value.phase {
                Phase::Running { .. } if *force => self.put_down(&read).await,
                Phase::Running { .. } => {
                    let saved = self.save(read, Intent::Suspend, "to be restarted").await.map(drop);
                    deadline = Instant::now() + self.settings.park;
                    saved
                }
                Phase::Suspended | Phase::Paused | Phase::Resuming { lease: None, .. } => {
                    // Answered before it is written down; the next look waits for that.
                    self.wake(read, Start::Newest, deadline, true).await.map(drop)
                }
                Phase::Resuming { .. } | Phase::Suspending { .. } | Phase::Saving { .. } => {
                    if tokio::time::timeout_at(deadline, changed).await.is_err() {
                        let text = format!("Actor {} is not at rest yet: its next wake starts it anew", key.name);
                        return Err(ControlError::new(Code::DeadlineExceeded, text));
                    }
                    continue;
                }
            };
            match step {
                // Somebody was faster, or a worker failed: it is looked at again.
                Err(error) if error.code == Code::Aborted && again(&mut tries, deadline).await => {}
                Err(error) => return Err(error),
                Ok(()) => {}
            }
        }
    }

    /// Ends what runs without saving it. Only once its node has said so: it might serve on.
    async fn put_down(self: &Arc<Self>, read: &Read<Actor>) -> Result<(), ControlError> {
        let actor = &read.value;
        let Some(lease) = actor.lease() else { return Ok(()) };
        match self.nodes.discard(&lease.node, lease.worker, actor.uid, actor.generation).await {
            Ok(()) | Err(NodeError::WorkerGone | NodeError::Stale) => {
                self.lost(&actor.key, actor.generation, "restarted by force, without saving it").await
            }
            Err(error) => Err(ControlError::new(
                Code::Unavailable,
                format!(
                    "actor {} still runs on node {}: {error}; its next wake starts it anew",
                    actor.key.name, lease.node
                ),
            )),
        }
    }
}
