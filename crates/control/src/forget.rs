//! What nobody refers to any more is removed: written down with the change that let go of it, done when it can be.

use std::collections::BTreeSet;
use std::sync::Arc;

use ate_actor::Actor;
use ate_name::{ActorUid, NodeName, OpId};
use ate_orders::{ForgetOrder, NodeError};
use ate_snapshot::Home;
use ate_store::Change;

use crate::drive::{Driver, Patience};
use crate::records::{Forget, Job, encode, history_of, operation_key};
use crate::{Control, ControlError};

/// History entries removed per transaction when an actor is deleted.
const HISTORY_STEP: usize = 100;

impl Forget {
    /// What a transition lets go of.
    pub(crate) fn between(before: &Actor, after: &Actor) -> Option<Self> {
        let kept: BTreeSet<&str> = after.references().map(|snapshot| snapshot.prefix.as_str()).collect();
        Self::of(before, |prefix| !kept.contains(prefix))
    }

    /// Everything of an actor that is deleted.
    pub(crate) fn all(actor: &Actor, home: Option<Home>) -> Self {
        let of = Self::of(actor, |_| true).unwrap_or_default();
        Self { gone: Some(actor.uid), home: home.map(|home| home.to_string()), ..of }
    }

    /// Only its history: others may stand on its snapshots.
    pub(crate) fn past(actor: &Actor) -> Self {
        Self { gone: Some(actor.uid), only_past: true, ..Self::default() }
    }

    fn order(&self) -> ForgetOrder {
        ForgetOrder { prefixes: self.prefixes.clone(), gone: self.gone, home: self.home.clone() }
    }

    fn of(actor: &Actor, which: impl Fn(&str) -> bool) -> Option<Self> {
        let prefixes: BTreeSet<String> =
            actor.references().map(|snapshot| snapshot.prefix.clone()).filter(|prefix| which(prefix)).collect();
        let node = actor.snapshots.local.as_ref().map(|(_, node)| node.clone());
        (!prefixes.is_empty()).then(|| Self { node, prefixes: prefixes.into_iter().collect(), ..Self::default() })
    }
}

impl Control {
    /// Adds the operation that removes things to the change that lets go of them.
    pub(crate) fn with_forget(&self, change: Change, op: OpId, forget: Forget) -> Change {
        change.put(operation_key(op), encode(&self.operation(op, Job::Forget(forget))))
    }

    /// Removes things behind whoever let go of them.
    pub(crate) fn forget_behind(self: &Arc<Self>, driver: Driver, forget: Forget) -> tokio::task::JoinHandle<()> {
        let control = Arc::clone(self);
        self.tasks.spawn(async move {
            if let Err(error) = control.forget(&driver, &forget).await {
                tracing::warn!(op = %driver.op, %error, "what nobody refers to is not removed yet");
            }
        })
    }

    pub(crate) async fn forget(self: &Arc<Self>, driver: &Driver, forget: &Forget) -> Result<(), ControlError> {
        ate_failpoint::reached("forget.begun");
        let mut patience = Patience::new();
        let mut node = forget.node.clone();
        while !forget.prefixes.is_empty() || (forget.gone.is_some() && !forget.only_past) {
            let Some(to) = node.clone().or_else(|| self.any_node()) else {
                patience.wait(self).await?;
                continue;
            };
            match self.nodes.forget_snapshots(&to, forget.order()).await {
                Ok(()) => {
                    self.tell_others(&to, forget.gone);
                    break;
                }
                // Its disk is gone with it; what is in durable storage can be removed by any.
                Err(NodeError::UnknownNode(_)) => node = None,
                // Should it come back, what only it has is found there.
                Err(NodeError::Unreachable(_)) if self.is_gone_for_good(&to).await => node = None,
                Err(error) => tracing::warn!(node = %to, %error, "snapshots are not removed yet"),
            }
            patience.wait(self).await?;
        }
        if let Some(gone) = forget.gone {
            self.forget_history(gone).await?;
        }
        self.close(driver.op).await
    }

    /// What an actor has printed is wherever it has been: others are told as well, once. On those that do not hear it, it goes when
    /// it is old.
    fn tell_others(self: &Arc<Self>, told: &NodeName, gone: Option<ActorUid>) {
        let Some(gone) = gone else { return };
        let nodes: BTreeSet<NodeName> = self.fleet.lock().iter().map(|worker| worker.lease.node.clone()).collect();
        let (away, hanging) = self.nodes.too_silent();
        let deaf: BTreeSet<NodeName> = away.into_iter().chain(hanging).chain([told.clone()]).collect();
        for node in &nodes - &deaf {
            let control = Arc::clone(self);
            self.tasks.spawn(async move {
                let order = ForgetOrder { gone: Some(gone), ..ForgetOrder::default() };
                let _ = control.nodes.forget_snapshots(&node, order).await;
            });
        }
    }

    async fn forget_history(&self, uid: ActorUid) -> Result<(), ControlError> {
        loop {
            let page = self.store.list(&history_of(uid), None, HISTORY_STEP).await?;
            if page.records.is_empty() {
                return Ok(());
            }
            let change = page.records.into_iter().fold(Change::new(), |change, record| change.delete(record.key));
            self.store.commit(change).await?;
        }
    }
}
