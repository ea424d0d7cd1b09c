//! A template's golden snapshot: booted once, saved, restored once to see that it can be, then the base of every actor.

use std::sync::Arc;

use ate_actor::{Actor, Intent, Phase, Start};
use ate_name::{ActorKey, ActorName, AtespaceName, GOLDEN_ATESPACE, ObjectKey, OpId, TemplateUid};
use ate_store::{Change, CommitError};
use tokio::time::Instant;

use crate::catalog::{Template, TemplatePhase};
use crate::drive::Driver;
use crate::records::{Job, Read, encode, operation_key};
use crate::{Code, Control, ControlError};

/// A golden snapshot is tried so often when what goes wrong is not the template's.
const TRIES: usize = 3;

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
        let Some(template) = self.catalog.template_by_uid(uid) else { return self.close(driver.op).await };
        if is_over(&template) {
            return self.close(driver.op).await;
        }
        let mut tries = 0;
        let made = loop {
            let made = tokio::select! {
                biased;
                () = self.stopping.cancelled() => return Ok(()),
                made = self.golden(&template) => made,
            };
            tries += 1;
            match made {
                // The driver ends, the operation stays: whoever finds it begins anew.
                Err(error) if error.is_store_away() => return Err(error),
                // A worker that went away says nothing about the template.
                Err(error) if error.code == Code::Aborted && tries < TRIES => {
                    tracing::warn!(template = %key, %error, "making the golden snapshot anew");
                }
                other => break other,
            }
        };
        match made {
            Ok(()) => {}
            // Deleted meanwhile.
            Err(error) if error.code == Code::NotFound => {}
            Err(error) => {
                self.counters.goldens_failed.one();
                tracing::warn!(template = %key, %error, "the golden snapshot could not be made");
                let output = format!("its output: ate logs {} -a {GOLDEN_ATESPACE}", golden_actor(&template).name);
                self.set_status(key, uid, [], |status| {
                    status.phase = TemplatePhase::Failed;
                    status.reason = format!("{}\n  {output}", error.text);
                })
                .await?;
            }
        }
        self.close(driver.op).await
    }

    async fn golden(self: &Arc<Self>, template: &Arc<Template>) -> Result<(), ControlError> {
        let (name, uid) = (template.object.metadata.key(), template.uid);
        let actor = golden_actor(template);
        let phase = |phase| self.set_status(&name, uid, [], move |status| status.phase = phase);
        phase(TemplatePhase::ResumeGoldenActor).await?;
        self.start_over(&actor, template).await?;
        let read = self.actor(&actor).await?;
        self.wake(read, Start::Boot, far_away(), true).await?;
        phase(TemplatePhase::WaitGoldenActor).await?;
        if !template.tells_readiness() {
            tokio::time::sleep(self.settings.golden_warm_up).await;
        }
        let saved = self.save_settled(&actor).await?;
        let golden = saved.snapshots.durable.clone();
        phase(TemplatePhase::TrialGoldenActor).await?;
        let read = self.actor(&actor).await?;
        self.wake(read, Start::Trial, far_away(), true).await.map_err(|error| {
            ControlError::new(error.code, format!("its snapshot does not come back to life: {}", error.text))
        })?;
        let generation = self.actor(&actor).await?.value.generation;
        self.end_trial(&actor, generation).await?;
        // Only together with the very actor whose snapshot it is: somebody else may be making it anew.
        let made = self.actor(&actor).await?;
        if made.value.snapshots.durable != golden {
            return Err(ControlError::conflict());
        }
        self.set_status(&name, uid, [made.record.unchanged()], move |status| {
            status.phase = TemplatePhase::Ready;
            status.reason.clear();
            status.golden = golden;
        })
        .await
    }

    /// Whatever an earlier try has left is taken away; the golden actor is made anew under the same name.
    async fn start_over(self: &Arc<Self>, actor: &ActorKey, template: &Template) -> Result<(), ControlError> {
        if self.catalog.template_by_uid(template.uid).is_none_or(|template| is_over(&template)) {
            return Err(ControlError::conflict());
        }
        match self.create_atespace(&actor.atespace).await {
            Err(error) if error.code != Code::AlreadyExists => return Err(error),
            _ => {}
        }
        self.remove_actor(actor).await?;
        self.create_actor(actor, &template.object.metadata.key(), Default::default()).await.map(drop)
    }

    async fn save_settled(self: &Arc<Self>, key: &ActorKey) -> Result<ate_actor::Actor, ControlError> {
        loop {
            let notify = self.follower.of(key);
            let changed = notify.notified();
            let read = self.actor(key).await?;
            match read.value.phase {
                Phase::Running { .. } => return Ok(self.save_actor(key, Intent::Suspend).await?.actor),
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

    async fn end_trial(self: &Arc<Self>, key: &ActorKey, generation: ate_name::Generation) -> Result<(), ControlError> {
        let read = self.actor(key).await?;
        if let Some(lease) = read.value.lease() {
            let _ = self.nodes.discard(&lease.node, lease.worker, read.value.uid, generation).await;
        }
        self.lost(key, generation, "the trial of the golden snapshot is over").await
    }

    /// The golden actor, if there is one and nothing is being done with it.
    pub(crate) async fn golden_at_rest(&self, template: &Template) -> Result<Option<Read<Actor>>, ControlError> {
        let actor = golden_actor(template);
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
    async fn remove_actor(self: &Arc<Self>, key: &ActorKey) -> Result<(), ControlError> {
        while let Some(read) = self.actor_if_any(key).await? {
            if let Some(lease) = read.value.lease() {
                let _ = self.nodes.discard(&lease.node, lease.worker, read.value.uid, read.value.generation).await;
                self.lost(key, read.value.generation, "removed").await?;
                continue;
            }
            let change = Change::new().guard(read.record.unchanged()).delete(read.record.key.clone());
            match self.delete_with(change, &read.value).await {
                Err(CommitError::Conflict { .. }) => {}
                other => return Ok(other?),
            }
        }
        Ok(())
    }
}

fn is_over(template: &Template) -> bool {
    matches!(template.status.phase, TemplatePhase::Ready | TemplatePhase::Failed)
}

/// One name per template, so that a try that was cut off is found again.
fn golden_actor(template: &Template) -> ActorKey {
    ActorKey::new(
        AtespaceName::parse(GOLDEN_ATESPACE).expect("a constant name"),
        ActorName::parse(template.uid.to_string()).expect("a uuid is a DNS label"),
    )
}

/// A golden waits for a worker as long as it takes.
fn far_away() -> Instant {
    Instant::now() + std::time::Duration::from_secs(24 * 3600)
}
