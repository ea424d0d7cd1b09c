//! Actors as clients see them: created, read, listed, changed, deleted.

use ate_actor::{Actor, Status};
use ate_name::{ActorKey, ActorUid, AtespaceName, Labels, ObjectKey};
use ate_store::{Change, CommitError, Guard, Kind, Prefix};
use std::sync::Arc;

use crate::golden::golden_actor;
use crate::ledger::Note;
use crate::quota::outdated;
use crate::records::{
    Forget, HistoryEntry, Read, actor_key, actors_of, atespace_key, encode, history_of, made_from_key, operation_key,
};
use crate::{Code, Control, ControlError};

/// Most records a client gets in one page, as the public API has it.
pub const MAX_PAGE: usize = 1000;

/// How long whoever deletes an actor waits to see that nothing is left of it. What is left then goes later.
const SEEN_GONE: std::time::Duration = std::time::Duration::from_secs(5);

/// An actor and how often its record was written.
#[derive(Clone, Debug)]
pub struct Versioned {
    pub actor: Actor,
    pub version: u64,
}

impl From<Read<Actor>> for Versioned {
    fn from(read: Read<Actor>) -> Self {
        Self { version: read.record.version, actor: read.value }
    }
}

/// Whether an actor belongs to its template, and to nobody else.
pub(crate) fn is_golden(key: &ActorKey) -> bool {
    key.atespace.as_str() == ate_name::GOLDEN_ATESPACE
}

/// Refuses what people may not do to the actors that golden snapshots are made with: a snapshot of their own would take
/// the place of the one that every actor of the template stands on.
pub fn usable(key: &ActorKey) -> Result<(), ControlError> {
    match is_golden(key) {
        true => Err(ControlError::precondition(format!(
            "Actor {} belongs to its ActorTemplate and cannot be used: make one of your own in another atespace",
            key.name
        ))),
        false => Ok(()),
    }
}

impl Control {
    pub async fn create_actor(
        &self,
        key: &ActorKey,
        template: &ObjectKey,
        selector: Labels,
    ) -> Result<Versioned, ControlError> {
        let missing = || ControlError::precondition(format!("ActorTemplate {template} not found"));
        let uid = ActorUid::from_random(self.world.random());
        loop {
            let made_from = self.template_named(template).await?.ok_or_else(missing)?;
            let (template_uid, sealed_key) = (made_from.value.uid, self.keys.sealed(uid));
            // It is part of one template, and not of another of the same name.
            if is_golden(key) && golden_actor(template_uid) != *key {
                return Err(missing());
            }
            let mut actor = Actor::new(uid, key.clone(), template.clone(), template_uid, sealed_key, self.world.now());
            actor.selector = selector.clone();
            let mut change = Change::new()
                .guard(made_from.record.unchanged())
                .guard(Guard::Present(atespace_key(&key.atespace)))
                .create(actor_key(key), encode(&actor));
            // The golden actor is part of its template, and goes with it.
            if !is_golden(key) {
                change = change.put(made_from_key(template_uid, key), Vec::new());
            }
            let change = self.count_created(change, &actor)?;
            let change = self.with_history(change, &actor, 1, None, Note::new("Created"));
            return match self.store.commit(change).await {
                Ok(_) => {
                    // It may be newer than what was heard; from now on the actor keeps it.
                    if self.catalog.template_by_uid(template_uid).is_none() {
                        self.catalog.take(&made_from.record.key, Some(&made_from.record))?;
                    }
                    Ok(Versioned { actor, version: 1 })
                }
                Err(CommitError::Conflict { guard }) if outdated(&guard).is_some() => {
                    self.hear_of_limits(&guard).await?;
                    continue;
                }
                // It has changed since it was read.
                Err(CommitError::Conflict { guard: Guard::Revision(key, _) }) if key.kind() == Kind::Template => {
                    continue;
                }
                Err(CommitError::Conflict { guard }) if matches!(guard, Guard::AtMost(..)) => {
                    let refused = CommitError::Conflict { guard }.into();
                    self.note_refusal(&refused);
                    Err(refused)
                }
                Err(CommitError::Conflict { guard: Guard::Present(_) }) => {
                    Err(ControlError::precondition(format!("Atespace {} not found", key.atespace)))
                }
                Err(CommitError::Conflict { .. }) => {
                    Err(ControlError::new(Code::AlreadyExists, format!("Actor {} already exists", key.name)))
                }
                Err(error) => Err(error.into()),
            };
        }
    }

    pub async fn get_actor(&self, key: &ActorKey) -> Result<Versioned, ControlError> {
        Ok(self.actor(key).await?.into())
    }

    /// Replaces the actor's own selector; it counts at the next resume.
    pub async fn update_actor(&self, key: &ActorKey, selector: Labels) -> Result<Versioned, ControlError> {
        let mut read = self.actor(key).await?;
        let updated = Actor { selector, ..read.value.clone() };
        let value = read.rewritten(&updated);
        read.record.version += 1;
        let change = Change::new().replace(&read.record, value);
        // Each version has its entry: the oldest is found by counting back.
        let change = self.with_history(change, &updated, read.record.version, None, Note::new("Updated"));
        self.store.commit(change).await?;
        Ok(Read { value: updated, ..read }.into())
    }

    /// A page of actors in the order of their keys, after the one named. The token is the last key of the page. One that cannot be
    /// read, as a newer build may write it, is in the log, and keeps nobody from seeing the rest.
    pub async fn list_actors(
        &self,
        atespace: Option<&AtespaceName>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<(Vec<Versioned>, Option<String>), ControlError> {
        let prefix = atespace.map_or_else(|| Prefix::all(Kind::Actor), actors_of);
        let page = self.store.list(&prefix, after, limit).await?;
        let token = page.records.last().filter(|_| page.more).map(|record| record.key.path().to_owned());
        let readable = page.records.into_iter().filter_map(|record| Read::<Actor>::decode(record).ok());
        Ok((readable.map(Versioned::from).collect(), token))
    }

    pub async fn delete_actor(self: &Arc<Self>, key: &ActorKey) -> Result<(), ControlError> {
        let read = self.actor(key).await?;
        let actor = &read.value;
        if actor.phase.status() != Status::Suspended {
            let status = status_name(actor.phase.status());
            return Err(ControlError::precondition(format!("Actor {} is not suspended (status: {status})", key.name)));
        }
        let change = Change::new()
            .guard(read.record.unchanged())
            .delete(actor_key(key))
            .delete(made_from_key(actor.template_uid, key));
        self.delete_with(change, actor).await?;
        Ok(())
    }

    /// Deletes an actor's record by the change given. Without it nothing refers to its snapshots any more, and without its
    /// key nothing could be read from them; they are removed right behind.
    pub(crate) async fn delete_with(self: &Arc<Self>, change: Change, actor: &Actor) -> Result<(), CommitError> {
        self.delete_but(change, actor, Forget::all(actor, self.home(actor).ok())).await
    }

    /// Of what the actor has, only this goes with it.
    pub(crate) async fn delete_but(
        self: &Arc<Self>,
        change: Change,
        actor: &Actor,
        forget: Forget,
    ) -> Result<(), CommitError> {
        let driver = self.new_operation();
        let change = self.count_deleted(change, actor);
        let ended = actor.pending().fold(change, |change, op| change.delete(operation_key(op)));
        self.store.commit(self.with_forget(ended, driver.op, forget.clone())).await?;
        let _ = tokio::time::timeout(SEEN_GONE, self.forget_behind(driver, forget)).await;
        Ok(())
    }

    /// What happened to an actor, oldest first.
    pub async fn history(&self, key: &ActorKey) -> Result<Vec<HistoryEntry>, ControlError> {
        let uid = self.actor(key).await?.value.uid;
        let page = self.store.list(&history_of(uid), None, MAX_PAGE).await?;
        page.records.into_iter().map(|record| Ok(Read::<HistoryEntry>::decode(record)?.value)).collect()
    }
}

/// As the public API's enum spells it.
pub fn status_name(status: Status) -> &'static str {
    match status {
        Status::Resuming => "STATUS_RESUMING",
        Status::Running => "STATUS_RUNNING",
        Status::Suspending => "STATUS_SUSPENDING",
        Status::Suspended => "STATUS_SUSPENDED",
        Status::Pausing => "STATUS_PAUSING",
        Status::Paused => "STATUS_PAUSED",
    }
}
