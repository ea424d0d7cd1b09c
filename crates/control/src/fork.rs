//! A new actor that continues from another's newest snapshot, with an identity and a key of its own.
//!
//! ```text
//!   fork ─▶ operation ─▶ a node copies the snapshot ─▶ durable ─▶ the actor, and no operation, in one commit
//!               └─ what is copied is gone meanwhile: another operation, with what there is now
//! ```
//! Until the last commit nobody knows of the actor; should its name be taken by then, the copy is removed.

use std::sync::Arc;

use ate_actor::{Actor, Intent, Phase, SnapshotRef};
use ate_name::{ActorKey, ActorUid, Generation, OpId};
use ate_orders::{CopyOrder, NodeError, SnapshotAt, Stored};
use ate_snapshot::{SnapshotId, SnapshotKey};
use ate_store::{Change, CommitError, Guard, Kind};

use crate::actors::Versioned;
use crate::drive::{Driver, Patience};
use crate::ledger::Note;
use crate::quota::outdated;
use crate::records::{Forget, Fork, Job, actor_key, atespace_key, encode, made_from_key, object_key, operation_key};
use crate::resume::again;
use crate::{Code, Control, ControlError};

/// How far a copy has come.
enum Copying {
    Done(SnapshotRef),
    /// It cannot be made: of this source, by this node, or, if the copy itself was removed, under this operation.
    Hopeless {
        source_is_gone: bool,
    },
}

fn exists(to: &ActorKey) -> ControlError {
    ControlError::new(Code::AlreadyExists, format!("Actor {} already exists", to.name))
}

impl Control {
    /// Makes `to` from what `from` is now: one that runs is suspended for it.
    pub async fn fork_actor(self: &Arc<Self>, from: &ActorKey, to: &ActorKey) -> Result<Versioned, ControlError> {
        if self.actor_if_any(to).await?.is_some() {
            return Err(exists(to));
        }
        // The source is put to rest for it: not for a fork that cannot be.
        self.check_room(&to.atespace, &self.actor(from).await?.value).await?;
        let (control, from, to) = (Arc::clone(self), from.clone(), to.clone());
        // Whoever asks may go away.
        let forked = self.tasks.spawn(async move {
            let source = control.saved(&from).await?;
            let uid = ActorUid::from_random(control.world.random());
            let fork = control.plan(&source, &to, uid, control.keys.sealed(uid)).await?;
            let driver = control.new_operation();
            let begun = control.with_fork(Change::new(), driver.op, &fork);
            match control.store.commit(begun).await {
                Ok(_) => control.finish_fork(driver, fork).await,
                Err(error) => Err(fork.refusal(error)),
            }
        });
        forked.await.map_err(|_| ControlError::stopping())?
    }

    /// The actor once it has come to rest, put to rest if it runs. Should it be woken at once, what was saved is still there.
    async fn saved(self: &Arc<Self>, key: &ActorKey) -> Result<Actor, ControlError> {
        let deadline = tokio::time::Instant::now() + self.settings.park;
        let (mut settled, mut tries) = (self.settled(key, deadline).await?, 0);
        while settled.actor.behind.is_some() {
            match self.caught_up(self.actor(key).await?).await {
                Err(error) if error.code == Code::Aborted && again(&mut tries, deadline).await => {}
                caught_up => settled = caught_up?.into(),
            }
        }
        match settled.actor.phase {
            Phase::Running { .. } => Ok(self.save_because(key, Intent::Suspend, "to be forked").await?.actor),
            Phase::Suspended | Phase::Paused => Ok(settled.actor),
            Phase::Resuming { .. } | Phase::Suspending { .. } | Phase::Saving { .. } => {
                Err(ControlError::in_progress())
            }
        }
    }

    async fn plan(&self, from: &Actor, to: &ActorKey, uid: ActorUid, sealed_key: String) -> Result<Fork, ControlError> {
        let Some((source, only)) = from.snapshots.base() else {
            return Err(ControlError::precondition(format!(
                "Actor {name} has no snapshot yet that another could continue from\n  \
                 let it run once, or make one of its template: ate create actor {to} -t {template} -a {atespace}",
                name = from.key.name,
                to = to.name,
                template = from.template,
                atespace = to.atespace
            )));
        };
        let mut local = from.snapshots.local.as_ref().map(|(_, node)| node);
        if let Some(node) = local
            && self.is_gone_for_good(node).await
        {
            local = None;
        }
        let node = only.or(local).cloned().or_else(|| self.any_node());
        Ok(Fork {
            from: from.key.clone(),
            from_uid: from.uid,
            from_key: from.sealed_key.clone(),
            source: source.clone(),
            node: node.ok_or_else(|| {
                let text =
                    format!("no node is there to copy the snapshot of actor {}: start one, or wait", from.key.name);
                ControlError::new(Code::Unavailable, text)
            })?,
            to: to.clone(),
            uid,
            sealed_key,
            template: from.template.clone(),
            template_uid: from.template_uid,
            selector: from.selector.clone(),
            past: Generation::NONE,
        })
    }

    /// Adds an operation to a change: only if the actor could be made now.
    fn with_fork(&self, change: Change, op: OpId, fork: &Fork) -> Change {
        let record = self.operation(op, Job::Fork(Box::new(fork.clone())));
        fork.guarded(change).create(operation_key(op), encode(&record))
    }

    /// From the operation on; also where one that was cut off is taken up.
    pub(crate) async fn finish_fork(
        self: &Arc<Self>,
        mut driver: Driver,
        mut fork: Fork,
    ) -> Result<Versioned, ControlError> {
        loop {
            match self.copy_durably(driver.op, &fork).await {
                Ok(Copying::Done(copy)) => return self.make_forked(&driver, &fork, copy).await,
                Ok(Copying::Hopeless { source_is_gone }) => {
                    (driver, fork) = self.begin_again(driver, fork, source_is_gone).await?;
                }
                // Whatever is left to be done has a record.
                Err(error) if error.code == Code::FailedPrecondition => {
                    return self.abandon(&driver, &fork, error).await;
                }
                Err(error) if error.is_conflict() => {
                    return match self.forked(&fork, error).await {
                        Err(error) if error.is_conflict() => self.abandon(&driver, &fork, error).await,
                        other => other,
                    };
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Has the snapshot copied and the copy made durable.
    async fn copy_durably(&self, op: OpId, fork: &Fork) -> Result<Copying, ControlError> {
        let order = self.copy_order(op, fork)?;
        let mut patience = Patience::new();
        let Stored { manifest, bytes, mut durable } = loop {
            match self.nodes.copy(&fork.node, order.clone()).await {
                Ok(stored) => break stored,
                Err(NodeError::Refused(text)) => return Err(ControlError::precondition(text)),
                Err(error) if self.is_hopeless(fork, &error).await => {
                    return self.give_up_copying(op, &order.prefix, &error).await;
                }
                Err(error) => self.wait_for(op, fork, &error, &mut patience).await?,
            }
        };
        while !durable {
            match self.nodes.upload(&fork.node, &order.prefix).await {
                Ok(()) => durable = true,
                Err(error) if self.is_hopeless(fork, &error).await => {
                    return self.give_up_copying(op, &order.prefix, &error).await;
                }
                Err(error) => self.wait_for(op, fork, &error, &mut patience).await?,
            }
        }
        Ok(Copying::Done(SnapshotRef {
            prefix: order.prefix,
            manifest: Some(manifest),
            stored_bytes: bytes,
            ..fork.source.clone()
        }))
    }

    /// Unless somebody else has brought the operation to its end: then that is why.
    async fn give_up_copying(&self, op: OpId, copy: &str, error: &NodeError) -> Result<Copying, ControlError> {
        self.is_under_way(op).await?;
        // Stale: this very copy was removed before, by an order of a later time than the store is of now.
        let copy_is_gone = match error {
            NodeError::NoSnapshot(gone) => gone == copy,
            error => *error == NodeError::Stale,
        };
        Ok(Copying::Hopeless { source_is_gone: !copy_is_gone })
    }

    async fn is_hopeless(&self, fork: &Fork, error: &NodeError) -> bool {
        match error {
            NodeError::NoSnapshot(_) | NodeError::Stale | NodeError::UnknownNode(_) => true,
            NodeError::Unreachable(_) => self.is_gone_for_good(&fork.node).await,
            _ => false,
        }
    }

    async fn wait_for(
        &self,
        op: OpId,
        fork: &Fork,
        error: &NodeError,
        patience: &mut Patience,
    ) -> Result<(), ControlError> {
        tracing::warn!(from = %fork.from, to = %fork.to, node = %fork.node, %error, "a fork is not made yet");
        patience.wait(self).await?;
        self.is_under_way(op).await
    }

    /// A conflict once it is over. A store that is away says nothing of it.
    async fn is_under_way(&self, op: OpId) -> Result<(), ControlError> {
        match self.store.get(&operation_key(op)).await {
            Ok(None) => Err(ControlError::conflict()),
            _ => Ok(()),
        }
    }

    fn copy_order(&self, op: OpId, fork: &Fork) -> Result<CopyOrder, ControlError> {
        let refused = |text: String| ControlError::precondition(text);
        // Beside the one that is copied: both actors are of one template, which may be gone when the copy has to go.
        let source = SnapshotKey::parse(&fork.source.prefix).map_err(|error| refused(error.to_string()))?;
        let manifest =
            fork.source.manifest.ok_or_else(|| refused(format!("snapshot {} is not stored", fork.source.prefix)))?;
        // It counts on from where the other was: a program that looks at its generation sees it grow.
        let generation = fork.source.generation;
        let id = SnapshotId { actor: fork.uid, generation, op };
        Ok(CopyOrder {
            from: SnapshotAt { prefix: fork.source.prefix.clone(), manifest },
            from_actor: fork.from_uid,
            from_key: fork.from_key.clone(),
            prefix: SnapshotKey { location: source.location, actor: fork.to.clone(), id }.to_string(),
            sealed_key: fork.sealed_key.clone(),
        })
    }

    /// The actor takes the operation's place.
    async fn make_forked(
        self: &Arc<Self>,
        driver: &Driver,
        fork: &Fork,
        copy: SnapshotRef,
    ) -> Result<Versioned, ControlError> {
        let Fork { uid, to, template, template_uid, .. } = fork;
        let sealed_key = fork.sealed_key.clone();
        let mut actor = Actor::new(*uid, to.clone(), template.clone(), *template_uid, sealed_key, self.world.now());
        actor.selector = fork.selector.clone();
        actor.generation = copy.generation.max(fork.past);
        // It may have been before, and saved anew since.
        actor.behind = (fork.past != Generation::NONE).then_some(copy.generation);
        actor.snapshots.local = Some((copy.clone(), fork.node.clone()));
        actor.snapshots.durable = Some(copy);
        let mut patience = Patience::new();
        loop {
            let made_from = match self.stored_template(template, *template_uid).await {
                Err(error) if error.is_store_away() => {
                    patience.wait(self).await?;
                    continue;
                }
                Err(error) if error.code == Code::NotFound => {
                    return self.made_or(driver, fork, fork.template_not_found()).await;
                }
                stored => stored?,
            };
            let change = fork
                .guarded(Change::new())
                .guard(made_from.record.unchanged())
                .guard(Guard::Present(operation_key(driver.op)))
                .put(actor_key(to), encode(&actor))
                .put(made_from_key(*template_uid, to), Vec::new())
                .delete(operation_key(driver.op));
            let note = Note::because("Created", format!("continues from {} at {}", fork.from, fork.source.generation));
            let change = self.with_history(change, &actor, 1, None, note);
            let change = match self.count_created(change, &actor) {
                Ok(change) => change,
                Err(refusal) => return self.abandon(driver, fork, refusal).await,
            };
            let refused = match self.store.commit(change).await {
                Ok(_) => return Ok(Versioned { actor, version: 1 }),
                Err(CommitError::Conflict { guard }) if outdated(&guard).is_some() => {
                    match self.hear_of_limits(&guard).await {
                        Err(error) if error.is_store_away() => patience.wait(self).await?,
                        heard => heard?,
                    }
                    continue;
                }
                // It has changed since it was read.
                Err(CommitError::Conflict { guard: Guard::Revision(key, _) }) if key.kind() == Kind::Template => {
                    continue;
                }
                Err(error) => error,
            };
            let refusal = fork.refusal(refused);
            if refusal.is_store_away() {
                patience.wait(self).await?;
                continue;
            }
            return self.made_or(driver, fork, refusal).await;
        }
    }

    /// Perhaps made already, by a commit of which nobody was told; otherwise given up.
    async fn made_or(
        self: &Arc<Self>,
        driver: &Driver,
        fork: &Fork,
        refusal: ControlError,
    ) -> Result<Versioned, ControlError> {
        match self.forked(fork, refusal).await {
            Err(refusal) => self.abandon(driver, fork, refusal).await,
            made => made,
        }
    }

    /// The actor, if somebody else has brought the operation to its end; otherwise the error.
    async fn forked(&self, fork: &Fork, otherwise: ControlError) -> Result<Versioned, ControlError> {
        match self.actor_if_any(&fork.to).await? {
            Some(read) if read.value.uid == fork.uid => Ok(read.into()),
            _ => Err(otherwise),
        }
    }

    /// What was to be copied is gone, or its copy was removed: another operation, with what there is now.
    async fn begin_again(
        self: &Arc<Self>,
        driver: Driver,
        fork: Fork,
        source_is_gone: bool,
    ) -> Result<(Driver, Fork), ControlError> {
        let mut from = self.actor_if_any(&fork.from).await?.filter(|read| read.value.uid == fork.from_uid);
        // What it knows of may be gone because it was saved anew since.
        if let Some(behind) = from.take_if(|read| read.value.behind.is_some()) {
            from = Some(self.caught_up(behind).await?);
        }
        let planned = match &from {
            Some(read) => self.plan(&read.value, &fork.to, fork.uid, fork.sealed_key.clone()).await,
            None => Err(ControlError::actor_not_found(fork.from.name.as_str())),
        };
        let next = match planned {
            Ok(next) if source_is_gone && next.source == fork.source && next.node == fork.node => {
                let ActorKey { atespace, name } = &fork.from;
                let text = format!(
                    "actor {name}: snapshot {} is gone\n  go on from what is left of it, then fork: ate resume {name} -a {atespace}",
                    fork.source.prefix
                );
                return self.abandon(&driver, &fork, ControlError::precondition(text)).await;
            }
            Ok(next) => Fork { past: fork.past, ..next },
            Err(error) if error.code == Code::Unavailable => return Err(error),
            Err(error) => return self.abandon(&driver, &fork, error).await,
        };
        let (begun, forgetting) = (self.new_operation(), self.new_operation());
        let forget = self.forgotten(&driver, &fork)?;
        let change = Change::new().guard(Guard::Present(operation_key(driver.op))).delete(operation_key(driver.op));
        let change = self.with_forget(change, forgetting.op, forget.clone());
        match self.store.commit(self.with_fork(change, begun.op, &next)).await {
            Ok(_) => {
                tracing::info!(from = %fork.from, to = %fork.to, "a fork begins anew");
                drop(self.forget_behind(forgetting, forget));
                Ok((begun, next))
            }
            Err(error) => {
                let refusal = fork.refusal(error);
                self.abandon(&driver, &fork, refusal).await
            }
        }
    }

    /// It cannot be made: what was copied goes, and the operation with it.
    async fn abandon<T>(self: &Arc<Self>, driver: &Driver, fork: &Fork, why: ControlError) -> Result<T, ControlError> {
        let Ok(forget) = self.forgotten(driver, fork) else {
            self.close(driver.op).await?;
            return Err(why);
        };
        let forgetting = self.new_operation();
        let change = Change::new().guard(Guard::Present(operation_key(driver.op))).delete(operation_key(driver.op));
        match self.store.commit(self.with_forget(change, forgetting.op, forget.clone())).await {
            Ok(_) => drop(self.forget_behind(forgetting, forget)),
            // Somebody else has brought it to its end, and removed what there was; this copy may have come after that.
            Err(CommitError::Conflict { .. }) => {
                let unmade = self.forked(fork, ControlError::conflict()).await;
                if unmade.is_err_and(|error| error.is_conflict()) {
                    self.store.commit(self.with_forget(Change::new(), forgetting.op, forget.clone())).await?;
                    drop(self.forget_behind(forgetting, forget));
                }
            }
            Err(error) => return Err(error.into()),
        }
        Err(why)
    }

    fn forgotten(&self, driver: &Driver, fork: &Fork) -> Result<Forget, ControlError> {
        let prefix = self.copy_order(driver.op, fork)?.prefix;
        Ok(Forget { node: Some(fork.node.clone()), prefixes: vec![prefix], ..Forget::default() })
    }
}

impl Fork {
    /// The actor can be made: its name is free, and what it needs is there.
    fn guarded(&self, change: Change) -> Change {
        change
            .guard(Guard::Absent(actor_key(&self.to)))
            .guard(Guard::Present(object_key(Kind::Template, &self.template)))
            .guard(Guard::Present(atespace_key(&self.to.atespace)))
    }

    fn template_not_found(&self) -> ControlError {
        ControlError::precondition(format!("ActorTemplate {} not found", self.template))
    }

    /// What a client hears when it cannot.
    fn refusal(&self, error: CommitError) -> ControlError {
        match error {
            CommitError::Conflict { guard: Guard::Absent(key) } if key.kind() == Kind::Actor => exists(&self.to),
            CommitError::Conflict { guard: Guard::Present(key) } if key.kind() == Kind::Template => {
                self.template_not_found()
            }
            CommitError::Conflict { guard: Guard::Present(key) } if key.kind() == Kind::Atespace => {
                ControlError::precondition(format!("Atespace {} not found", self.to.atespace))
            }
            error => error.into(),
        }
    }
}
