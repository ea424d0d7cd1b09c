//! A template's golden snapshot: booted once, saved, restored once to see that it can be, then the base of every actor.

use std::sync::Arc;

use ate_actor::{Actor, Intent, Phase, Start};
use ate_name::{ActorKey, ActorName, ActorUid, AtespaceName, GOLDEN_ATESPACE, ObjectKey, OpId, TemplateUid};
use ate_store::{Change, CommitError, Guard};
use tokio::time::Instant;

use crate::catalog::{Template, TemplatePhase};
use crate::drive::{Driver, Patience};
use crate::records::{Forget, Job, OperationRecord, Read, encode, operation_key};
use crate::{Code, Control, ControlError};

/// A golden snapshot is tried so often when what goes wrong is not the template's, within half a minute or so.
const TRIES: usize = 8;

impl Control {
    /// Makes goldens for templates that have none, for as long as this is polled.
    pub(crate) async fn make_goldens(self: &Arc<Self>) {
        let mut changes = self.catalog.changes();
        loop {
            for template in self.catalog.templates() {
                if !is_over(&template)
                    && let Err(error) = self.begin_golden(&template).await
                {
                    tracing::warn!(template = %template.object.metadata.key(), %error, "its golden snapshot cannot be begun yet");
                }
            }
            tokio::select! {
                biased;
                () = changes.changed() => {}
                // What could not be begun is tried again.
                () = tokio::time::sleep(self.settings.sweep) => {}
            }
        }
    }

    /// One operation per template, whichever replica is first; those that are cut off are taken over like any other.
    async fn begin_golden(self: &Arc<Self>, template: &Template) -> Result<(), ControlError> {
        let op = OpId::from_bytes(*template.uid.as_bytes());
        let Some(driver) = self.driver(op) else { return Ok(()) };
        let key = template.object.metadata.key();
        let record = self.operation(op, Job::Golden(key.clone()));
        match self.store.commit(Change::new().create(operation_key(op), encode(&record))).await {
            Ok(_) => {}
            Err(CommitError::Conflict { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let control = Arc::clone(self);
        self.tasks.spawn(async move {
            if let Err(error) = control.drive_golden(&driver, &key).await {
                tracing::warn!(template = %key, %error, "the golden snapshot is not made yet");
            }
        });
        Ok(())
    }

    pub(crate) async fn drive_golden(self: &Arc<Self>, driver: &Driver, key: &ObjectKey) -> Result<(), ControlError> {
        let uid = TemplateUid::from_bytes(*driver.op.as_bytes());
        let (mut tries, mut patience) = (0, Patience::new());
        let (ours, made) = loop {
            // By what the store says now: what is known here may be old, and a golden that is made must never be removed.
            let Some(ours) = self.ours(driver.op).await? else { return Ok(()) };
            let template = match self.stored_template(key, uid).await {
                Ok(read) if !is_over(&read.value) => read.value,
                Err(error) if error.code != Code::NotFound => return Err(error),
                _ => return self.close_golden(driver.op, ours).await,
            };
            let made = tokio::select! {
                biased;
                () = self.stopping.cancelled() => return Ok(()),
                made = self.golden(&template, &ours) => made,
            };
            tries += 1;
            match made {
                // The driver ends, the operation stays: whoever finds it begins anew.
                Err(error) if error.is_interruption() => return Err(error),
                // A worker that went away says nothing about the template.
                Err(error) if error.code == Code::Aborted && tries < TRIES => {
                    tracing::warn!(template = %key, %error, "making the golden snapshot anew");
                    patience.wait(self).await?;
                }
                made => break (ours, made),
            }
        };
        match made {
            Ok(()) => {}
            // Deleted meanwhile.
            Err(error) if error.code == Code::NotFound => {}
            Err(error) => {
                tracing::warn!(template = %key, %error, "the golden snapshot could not be made");
                if self.ours(driver.op).await?.is_none() {
                    return Ok(());
                }
                // One that could not be saved still runs: its worker is for others.
                let golden = golden_actor(uid);
                if let Some(read) = self.actor_if_any(&golden).await? {
                    self.end_golden(&golden, read.value.generation, "its golden snapshot could not be made").await?;
                }
                let output = format!("what it printed, if anything: ate logs {} -a {GOLDEN_ATESPACE}", golden.name);
                self.set_status(key, uid, [ours.clone()], |status| {
                    status.phase = TemplatePhase::Failed;
                    status.reason = format!("{}\n  {output}", error.text);
                })
                .await?;
                self.counters.goldens_failed.one();
            }
        }
        self.close_golden(driver.op, ours).await
    }

    /// Ends the operation, unless somebody has taken it over.
    async fn close_golden(&self, op: OpId, ours: Guard) -> Result<(), ControlError> {
        match self.store.commit(Change::new().guard(ours).delete(operation_key(op))).await {
            Err(CommitError::Conflict { .. }) | Ok(_) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Guards a write against a replica that has taken the operation over; `None` if one has, or if it is over.
    async fn ours(&self, op: OpId) -> Result<Option<Guard>, ControlError> {
        let record = self.store.get(&operation_key(op)).await?;
        let read = record.map(Read::<OperationRecord>::decode).transpose()?;
        Ok(read.filter(|read| read.value.owner == self.replica).map(|read| read.record.unchanged()))
    }

    /// `ours` guards whatever could do harm: a golden that somebody else has made meanwhile is what actors stand on.
    async fn golden(self: &Arc<Self>, template: &Template, ours: &Guard) -> Result<(), ControlError> {
        let (name, uid) = (template.object.metadata.key(), template.uid);
        let actor = golden_actor(template.uid);
        let phase = |phase| self.set_status(&name, uid, [ours.clone()], move |status| status.phase = phase);
        phase(TemplatePhase::ResumeGoldenActor).await?;
        let made = self.start_over(&actor, template, ours).await?;
        // One that is not this one is somebody else's, and perhaps in use.
        let read = || async {
            let read = self.actor_if_any(&actor).await?;
            read.filter(|read| read.value.uid == made).ok_or_else(ControlError::conflict)
        };
        self.wake(read().await?, Start::Boot, far_away(), true).await?;
        phase(TemplatePhase::WaitGoldenActor).await?;
        if !template.tells_readiness() {
            tokio::time::sleep(self.settings.golden_warm_up).await;
        }
        let golden = self.save_settled(&actor).await?.snapshots.durable;
        if golden.is_none() {
            // Lost before it was saved: it is at rest, as was asked for, but there is nothing to try, and its wake would wait for the
            // golden that it is to become.
            return Err(ControlError::new(Code::Aborted, "the golden actor was lost before its snapshot was taken"));
        }
        phase(TemplatePhase::TrialGoldenActor).await?;
        self.wake(read().await?, Start::Trial, far_away(), true).await.map_err(|error| {
            let text = format!("its snapshot does not come back to life: {}", error.text);
            error.saying(text)
        })?;
        let generation = read().await?.value.generation;
        self.end_golden(&actor, generation, "the trial of the golden snapshot is over").await?;
        // Only together with the very actor whose snapshot it is: somebody else may be making it anew.
        let made = read().await?;
        if made.value.snapshots.durable != golden {
            return Err(ControlError::conflict());
        }
        self.set_status(&name, uid, [ours.clone(), made.record.unchanged()], move |status| {
            status.phase = TemplatePhase::Ready;
            status.reason.clear();
            status.golden = golden;
        })
        .await
    }

    /// Whatever an earlier try has left is taken away; the golden actor is made anew under the same name.
    async fn start_over(
        self: &Arc<Self>,
        actor: &ActorKey,
        template: &Template,
        ours: &Guard,
    ) -> Result<ActorUid, ControlError> {
        match self.create_atespace(&actor.atespace).await {
            Err(error) if error.code != Code::AlreadyExists => return Err(error),
            _ => {}
        }
        self.remove_actor(actor, ours).await?;
        let created = self.create_actor(actor, &template.object.metadata.key(), Default::default()).await?;
        Ok(created.actor.uid)
    }

    async fn save_settled(self: &Arc<Self>, key: &ActorKey) -> Result<ate_actor::Actor, ControlError> {
        loop {
            let notify = self.follower.of(key);
            let changed = notify.notified();
            let read = self.actor(key).await?;
            match read.value.phase {
                Phase::Running { .. } => {
                    let saved = self.save_actor(key, Intent::Suspend).await;
                    return saved.map(|saved| saved.actor).map_err(|error| match error.code {
                        // Of its worker, or of a disk.
                        Code::Unavailable if !error.is_store_away() => ControlError::new(Code::Aborted, error.text),
                        _ => error,
                    });
                }
                Phase::Resuming { lease: Some(_), .. } => changed.await,
                _ => {
                    return Err(ControlError::new(
                        Code::Aborted,
                        "the golden actor ended before its snapshot could be taken",
                    ));
                }
            }
        }
    }

    async fn end_golden(
        self: &Arc<Self>,
        key: &ActorKey,
        generation: ate_name::Generation,
        why: &str,
    ) -> Result<(), ControlError> {
        let read = self.actor(key).await?;
        if let Some(lease) = read.value.lease() {
            let _ = self.nodes.discard(&lease.node, lease.worker, read.value.uid, generation).await;
        }
        self.lost(key, generation, why).await
    }

    /// The golden actor, if there is one and nothing is being done with it.
    pub(crate) async fn golden_at_rest(&self, template: &Template) -> Result<Option<Read<Actor>>, ControlError> {
        let actor = golden_actor(template.uid);
        match self.actor(&actor).await {
            // Of one that failed only the failure is still to be seen.
            Ok(read) if read.value.lease().is_none() && template.status.phase == TemplatePhase::Failed => {
                Ok(Some(read))
            }
            Ok(read) if matches!(read.value.phase, Phase::Suspended) => Ok(Some(read)),
            Ok(_) => Err(ControlError::precondition(format!(
                "ActorTemplate {} is just making its golden snapshot: try again in a moment",
                template.object.metadata.key()
            ))),
            Err(error) if error.code == Code::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Deletes an actor whatever it is doing.
    async fn remove_actor(self: &Arc<Self>, key: &ActorKey, ours: &Guard) -> Result<(), ControlError> {
        loop {
            let notify = self.follower.of(key);
            let changed = notify.notified();
            let Some(read) = self.actor_if_any(key).await? else { return Ok(()) };
            let is_behind = read.value.behind.is_some();
            if is_behind && read.value.pending().next().is_some() {
                // Whoever saves it or uploads it would remove what then is nobody's.
                changed.await;
                continue;
            }
            if let Some(lease) = read.value.lease() {
                let _ = self.nodes.discard(&lease.node, lease.worker, read.value.uid, read.value.generation).await;
                self.lost(key, read.value.generation, "removed").await?;
                continue;
            }
            let change =
                Change::new().guard(ours.clone()).guard(read.record.unchanged()).delete(read.record.key.clone());
            // Actors that a restored store knows of may have been saved against what it does not know that this has become.
            let deleted = match is_behind {
                true => self.delete_but(change, &read.value, Forget::past(&read.value)).await,
                false => self.delete_with(change, &read.value).await,
            };
            match deleted {
                Err(CommitError::Conflict { guard }) if guard != *ours => {}
                other => return Ok(other?),
            }
        }
    }
}

pub(crate) fn is_over(template: &Template) -> bool {
    matches!(template.status.phase, TemplatePhase::Ready | TemplatePhase::Failed)
}

/// One name per template, so that a try that was cut off is found again.
pub(crate) fn golden_actor(template: TemplateUid) -> ActorKey {
    ActorKey::new(
        AtespaceName::parse(GOLDEN_ATESPACE).expect("a constant name"),
        ActorName::parse(template.to_string()).expect("a uuid is a DNS label"),
    )
}

/// A golden waits for a worker as long as it takes.
fn far_away() -> Instant {
    Instant::now() + std::time::Duration::from_secs(24 * 3600)
}
