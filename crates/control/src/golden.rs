//! A template's golden snapshot: booted once, saved, restored once to see that it can be, then the base of every actor.

use std::sync::Arc;

use ate_actor::{Actor, Intent, Phase};
use ate_name::{ActorKey, ActorName, AtespaceName, GOLDEN_ATESPACE};
use tokio::time::Instant;

use crate::catalog::{Template, TemplatePhase};
use crate::records::Read;
use crate::resume::From;
use crate::{Code, Control, ControlError};

impl Control {
    /// Makes goldens for templates that have none, for as long as this is polled.
    pub(crate) async fn make_goldens(self: Arc<Self>) {
        let mut changes = self.catalog.changes();
        let mut begun = std::collections::HashSet::new();
        loop {
            for template in self.catalog.templates() {
                let over = matches!(template.status.phase, TemplatePhase::Ready | TemplatePhase::Failed);
                if !over && begun.insert(template.uid) {
                    let control = Arc::clone(&self);
                    self.tasks.spawn(async move { control.make_golden(template).await });
                }
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    async fn make_golden(self: Arc<Self>, template: Arc<Template>) {
        let (key, uid) = (template.object.metadata.key(), template.uid);
        let made = tokio::select! {
            made = self.golden(&template) => made,
            () = self.stopping.cancelled() => return,
        };
        let written = match made {
            Ok(()) => Ok(()),
            Err(error) if error.code == Code::NotFound => return,
            Err(error) => {
                tracing::warn!(template = %key, %error, "the golden snapshot could not be made");
                self.set_status(&key, uid, |status| {
                    status.phase = TemplatePhase::Failed;
                    status.reason = error.text.clone();
                })
                .await
            }
        };
        if let Err(error) = written {
            tracing::warn!(template = %key, %error, "a template's status could not be written");
        }
    }

    async fn golden(self: &Arc<Self>, template: &Arc<Template>) -> Result<(), ControlError> {
        let (name, uid) = (template.object.metadata.key(), template.uid);
        let actor = golden_actor(template);
        let phase = |phase| self.set_status(&name, uid, move |status| status.phase = phase);
        phase(TemplatePhase::ResumeGoldenActor).await?;
        self.start_over(&actor, template).await?;
        let read = self.actor(&actor).await?;
        self.wake(read, From::Boot, far_away(), true).await?;
        phase(TemplatePhase::WaitGoldenActor).await?;
        if !template.tells_readiness() {
            tokio::time::sleep(self.settings.golden_warm_up).await;
        }
        let saved = self.save_settled(&actor).await?;
        let golden = saved.snapshots.durable.clone();
        phase(TemplatePhase::TrialGoldenActor).await?;
        let read = self.actor(&actor).await?;
        self.wake(read, From::Trial, far_away(), true).await.map_err(|error| {
            ControlError::new(error.code, format!("its snapshot does not come back to life: {}", error.text))
        })?;
        let generation = self.actor(&actor).await?.value.generation;
        self.end_trial(&actor, generation).await?;
        self.set_status(&name, uid, move |status| {
            status.phase = TemplatePhase::Ready;
            status.reason.clear();
            status.golden = golden;
        })
        .await
    }

    /// Whatever an earlier try has left is taken away; the golden actor is made anew under the same name.
    async fn start_over(self: &Arc<Self>, actor: &ActorKey, template: &Template) -> Result<(), ControlError> {
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
            tokio::pin!(changed);
            changed.as_mut().enable();
            let read = self.actor(key).await?;
            match read.value.phase {
                Phase::Running { .. } => return Ok(self.save_actor(key, Intent::Suspend).await?.actor),
                Phase::Resuming { lease: Some(_), .. } => changed.await,
                _ => {
                    return Err(ControlError::new(
                        Code::Unavailable,
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
        match self.actor(key).await {
            Ok(read) => {
                if let Some(lease) = read.value.lease() {
                    let _ = self.nodes.discard(&lease.node, lease.worker, read.value.uid, read.value.generation).await;
                    self.lost(key, read.value.generation, "removed").await?;
                }
                self.delete_actor(key).await
            }
            Err(error) if error.code == Code::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }
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
