//! What an operator does to an actor that nothing else helps. Whatever it waits for, it need not be waited for; who asked
//! and why is written down in the transaction that does it.

use std::sync::Arc;
use std::time::Duration;

use ate_actor::{Actor, Effect, Event, Phase};
use ate_name::{ActorKey, NodeName};
use ate_orders::NodeError;
use ate_store::{Change, CommitError};

use crate::actors::{Versioned, status_name};
use crate::audit::Asked;
use crate::ledger::Note;
use crate::records::{actor_key, made_from_key};
use crate::{Control, ControlError};

/// How long a node is waited for that is to end a sandbox. What it does not end then, the next comparison with it ends.
const ENDED_WITHIN: Duration = Duration::from_secs(5);

impl Control {
    /// Ends what is under way with an actor: it is at rest on its last snapshot, its worker is free. Also tells of a node
    /// that did not answer.
    pub async fn unstick_actor(
        self: &Arc<Self>,
        key: &ActorKey,
        asked: &Asked,
    ) -> Result<(Versioned, Option<NodeName>), ControlError> {
        loop {
            let read = self.actor(key).await?;
            let Some(op) = read.value.phase.operation() else {
                let status = status_name(read.value.phase.status());
                return Err(ControlError::precondition(format!(
                    "Actor {} is not stuck: nothing is under way with it (status: {status})",
                    key.name
                )));
            };
            // First, so that what it still does cannot be taken for the actor that is woken next.
            let silent = self.end_sandbox(&read.value).await;
            let was = format!("was {}, operation {op}{}", doing(&read.value.phase), unheard(silent.as_ref()));
            let (change, entry) = self.with_audit(Change::new(), "UnstickActor", &read.value, asked, was.clone());
            let note = Note::because("Unstuck", format!("{}; {was}", asked.words()));
            match self.transition_with(change, &read, Event::Lost, note).await {
                // It has moved, perhaps by itself.
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(error),
                Ok(unstuck) => {
                    entry.tell();
                    return Ok((unstuck.into(), silent));
                }
            }
        }
    }

    /// Deletes an actor whatever it is doing. Tells of a node that did not answer.
    pub async fn force_delete_actor(
        self: &Arc<Self>,
        key: &ActorKey,
        asked: &Asked,
    ) -> Result<Option<NodeName>, ControlError> {
        loop {
            let read = self.actor(key).await?;
            let actor = &read.value;
            let silent = self.end_sandbox(actor).await;
            let mut change = Change::new()
                .guard(read.record.unchanged())
                .delete(actor_key(key))
                .delete(made_from_key(actor.template_uid, key));
            let lease = actor.lease().cloned();
            if let Some(lease) = lease.clone() {
                (change, _) = self.with_effect(change, actor, Effect::FreeWorker(lease)).await?;
            }
            let was = format!("was {}{}", doing(&actor.phase), unheard(silent.as_ref()));
            let (change, entry) = self.with_audit(change, "ForceDeleteActor", actor, asked, was);
            match self.delete_with(change, actor).await {
                Err(CommitError::Conflict { .. }) => {}
                Err(error) => return Err(error.into()),
                Ok(()) => {
                    entry.tell();
                    if let Some(lease) = lease {
                        self.look_at_worker(lease.worker).await?;
                    }
                    return Ok(silent);
                }
            }
        }
    }

    /// Ends what an actor has in its worker, if its node answers in time; otherwise returns the node.
    async fn end_sandbox(&self, actor: &Actor) -> Option<NodeName> {
        let lease = actor.lease()?;
        let discard = self.nodes.discard(&lease.node, lease.worker, actor.uid, actor.generation);
        match tokio::time::timeout(ENDED_WITHIN, discard).await {
            // Also one that says that there is no such worker, or not this actor in it.
            Ok(Ok(()) | Err(NodeError::WorkerGone | NodeError::Stale)) => None,
            _ => Some(lease.node.clone()),
        }
    }
}

fn doing(phase: &Phase) -> &'static str {
    match phase {
        Phase::Suspended => "suspended",
        Phase::Paused => "paused",
        Phase::Resuming { lease: Some(_), .. } => "being woken",
        Phase::Resuming { lease: None, .. } => "not woken after a failed try",
        Phase::Running { .. } => "running",
        Phase::Suspending { .. } => "being taken out of its worker",
        Phase::Saving { .. } => "being stored",
    }
}

fn unheard(node: Option<&NodeName>) -> String {
    node.map(|node| format!("; node {node} did not say that its sandbox is gone")).unwrap_or_default()
}
