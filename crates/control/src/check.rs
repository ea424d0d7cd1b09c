//! Whether a store's records agree with each other: every one is read, and what it says of others is looked up.
//!
//! Each transition writes all that it touches in one commit, so at every commit all of this holds; whatever does not was
//! lost, written by hand, or is a bug. Memory grows with the number of actors, some two hundred bytes each.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use ate_actor::Actor;
use ate_name::{ActorKey, ActorUid, AtespaceName, Generation, ObjectKey, OpId, TemplateUid, WorkerUid};
use ate_object::{SandboxConfig, WorkerPool};
use ate_store::{Entry, Kind, Record, Revision, number};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Usage;
use crate::actors::is_golden;
use crate::catalog::Template;
use crate::records::{
    Assignee, AtespaceRecord, HistoryEntry, Job, NodeRecord, OperationRecord, ReplicaRecord, WorkerRecord, actor_key,
    atespace_key, object_key, operation_key, worker_key,
};

/// Findings that are kept; the rest is counted.
const KEPT: usize = 1000;

const RESTORE: &str = "restore a backup: ate store restore --replace";
const NEWER: &str =
    "if a newer program wrote it, use that one; otherwise restore a backup: ate store restore --replace";
const RECOUNT: &str =
    "stop the servers, then: ate store backup FILE, and ate store restore FILE --replace, which counts anew";
const BY_ITSELF: &str = "the control plane mends this when it runs; if it stays, restore a backup";

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub object: String,
    pub wrong: String,
    pub remedy: String,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    pub records: u64,
    pub findings: Vec<Finding>,
    /// Findings beyond those that are kept.
    pub more: u64,
}

impl Findings {
    fn add(&mut self, object: impl Display, wrong: impl Into<String>, remedy: impl Into<String>) {
        if self.findings.len() == KEPT {
            self.more += 1;
            return;
        }
        self.findings.push(Finding { object: object.to_string(), wrong: wrong.into(), remedy: remedy.into() });
    }
}

/// What must be known of an actor until all records were seen.
#[derive(Debug)]
struct Known {
    uid: ActorUid,
    template: ObjectKey,
    template_uid: TemplateUid,
    generation: Generation,
    worker: Option<WorkerUid>,
    pending: Vec<OpId>,
}

/// A check that is under way. Takes records in any order.
#[derive(Debug, Default)]
pub struct Check {
    revision: Revision,
    found: Findings,
    actors: BTreeMap<ActorKey, Known>,
    uids: BTreeSet<ActorUid>,
    workers: BTreeMap<WorkerUid, Option<Assignee>>,
    /// Operations of actors.
    operations: BTreeMap<OpId, ActorKey>,
    /// Deleted actors of which something is still to be removed.
    going: BTreeSet<ActorUid>,
    atespaces: BTreeSet<AtespaceName>,
    templates: BTreeSet<TemplateUid>,
    made_from: BTreeSet<(ActorKey, TemplateUid)>,
    /// Actors that have a past.
    remembered: BTreeSet<ActorUid>,
    /// What atespaces use, as it is counted and as it is.
    counted: BTreeMap<AtespaceName, Usage>,
    used: BTreeMap<AtespaceName, Usage>,
}

impl Check {
    pub fn new(revision: Revision) -> Self {
        Self { revision, ..Self::default() }
    }

    pub fn take(&mut self, entry: &Entry) {
        self.found.records += 1;
        match entry {
            Entry::Foreign { key, reason } => self.found.add(key, reason, NEWER),
            Entry::Record(record) => {
                if record.revision > self.revision {
                    let wrong = format!("it is of revision {}, the store is at {}", record.revision, self.revision);
                    self.found.add(&record.key, wrong, RESTORE);
                }
                self.record(record);
            }
        }
    }

    fn record(&mut self, record: &Record) {
        match record.key.kind() {
            Kind::Actor => {
                let Some(actor) = self.decode::<Actor>(record) else { return };
                self.named(record, actor_key(&actor.key));
                self.actor(record, actor);
            }
            Kind::Worker => {
                let Some(worker) = self.decode::<WorkerRecord>(record) else { return };
                self.named(record, worker_key(worker.lease.worker));
                self.workers.insert(worker.lease.worker, worker.assigned);
            }
            Kind::Atespace => {
                let Some(atespace) = self.decode::<AtespaceRecord>(record) else { return };
                self.named(record, atespace_key(&atespace.name));
                self.atespaces.insert(atespace.name);
            }
            Kind::Operation => {
                let Some(operation) = self.decode::<OperationRecord>(record) else { return };
                self.named(record, operation_key(operation.op));
                match operation.job {
                    Job::Actor(key) => drop(self.operations.insert(operation.op, key)),
                    Job::Forget(forget) => self.going.extend(forget.gone),
                    Job::Golden(_) | Job::Fork(_) | Job::Restart(_) => {}
                }
            }
            Kind::Template => {
                let Some(template) = self.decode::<Template>(record) else { return };
                self.named(record, object_key(Kind::Template, &template.object.metadata.key()));
                self.templates.insert(template.uid);
            }
            Kind::Pool => {
                let Some(pool) = self.decode::<WorkerPool>(record) else { return };
                self.named(record, object_key(Kind::Pool, &pool.metadata.key()));
            }
            Kind::Config => {
                let Some(config) = self.decode::<SandboxConfig>(record) else { return };
                self.named(record, object_key(Kind::Config, &config.metadata.key()));
            }
            Kind::History => self.history(record),
            Kind::Replica => drop(self.decode::<ReplicaRecord>(record)),
            Kind::Node => drop(self.decode::<NodeRecord>(record)),
            Kind::Count => self.count(record),
            Kind::Meta => self.meta(record),
        }
    }

    fn decode<T: DeserializeOwned>(&mut self, record: &Record) -> Option<T> {
        let decoded = serde_json::from_slice(&record.value);
        decoded.map_err(|error| self.found.add(&record.key, format!("it cannot be read: {error}"), NEWER)).ok()
    }

    fn named(&mut self, record: &Record, key: ate_store::Key) {
        if record.key != key {
            self.found.add(&record.key, format!("it calls itself {key}"), RESTORE);
        }
    }

    fn actor(&mut self, record: &Record, actor: Actor) {
        if !self.uids.insert(actor.uid) {
            self.found.add(&record.key, format!("another actor has its uid {} too", actor.uid), RESTORE);
        }
        if !is_golden(&actor.key) {
            self.used.entry(actor.key.atespace.clone()).or_default().add(&actor);
        }
        let known = Known {
            uid: actor.uid,
            worker: actor.lease().map(|lease| lease.worker),
            pending: actor.pending().collect(),
            template: actor.template,
            template_uid: actor.template_uid,
            generation: actor.generation,
        };
        self.actors.insert(actor.key, known);
    }

    fn history(&mut self, record: &Record) {
        let mut segments = record.key.segments();
        let uid = segments.next().and_then(|uid| ActorUid::parse(uid).ok());
        let version = segments.next().filter(|version| version.len() == 20).and_then(|it| it.parse::<u64>().ok());
        match (uid, version, segments.next()) {
            (Some(uid), Some(_), None) => drop(self.remembered.insert(uid)),
            _ => self.found.add(&record.key, "it is no key of an actor's history", RESTORE),
        }
        let _ = self.decode::<HistoryEntry>(record);
    }

    fn count(&mut self, record: &Record) {
        let mut segments = record.key.segments();
        let atespace = segments.next().and_then(|name| AtespaceName::parse(name).ok());
        match (atespace, segments.next(), number(Some(record))) {
            (Some(atespace), Some(what), Ok(number)) => self.counted.entry(atespace).or_default().set(what, number),
            (_, _, Err(fault)) => self.found.add(&record.key, fault.to_string(), RESTORE),
            _ => self.found.add(&record.key, "it counts for no atespace", RESTORE),
        }
    }

    /// Whatever else a newer program keeps here is its own.
    fn meta(&mut self, record: &Record) {
        let segments: Vec<_> = record.key.segments().collect();
        let [index, template, atespace, name] = segments[..] else { return };
        if index != "made-from" {
            return;
        }
        match (TemplateUid::parse(template), ActorKey::parse(atespace, name)) {
            (Ok(template), Ok(actor)) => drop(self.made_from.insert((actor, template))),
            _ => self.found.add(&record.key, "it names no template or no actor", RESTORE),
        }
    }

    /// What only shows when all records were seen.
    pub fn finish(mut self) -> Findings {
        let mut found = std::mem::take(&mut self.found);
        for (key, actor) in &self.actors {
            self.check_actor(&mut found, key, actor);
        }
        for (worker, assignee) in &self.workers {
            let Some(Assignee { key, uid, generation, .. }) = assignee else { continue };
            let agrees = self.actors.get(key).is_some_and(|actor| {
                actor.uid == *uid && actor.generation == *generation && actor.worker == Some(*worker)
            });
            if !agrees {
                let wrong = format!("it is assigned to actor {key} at generation {generation}, which does not hold it");
                found.add(worker_key(*worker), wrong, BY_ITSELF);
            }
        }
        for (op, key) in &self.operations {
            if !self.actors.get(key).is_some_and(|actor| actor.pending.contains(op)) {
                let wrong = format!("nothing of it is left to be done for actor {key}");
                found.add(operation_key(*op), wrong, BY_ITSELF);
            }
        }
        for (key, template) in &self.made_from {
            if self.actors.get(key).is_none_or(|actor| actor.template_uid != *template) {
                let wrong = format!("it says that actor {key} was made from template {template}, and it was not");
                found.add(format_args!("meta/made-from/{template}/{key}"), wrong, RESTORE);
            }
        }
        for atespace in &self.atespaces {
            let of = |usages: &BTreeMap<AtespaceName, Usage>| usages.get(atespace).copied().unwrap_or_default();
            let (counted, used) = (of(&self.counted), of(&self.used));
            if counted != used {
                let wrong = format!("{counted} are counted, and there are {used}: its quota does not hold");
                found.add(atespace_key(atespace), wrong, RECOUNT);
            }
        }
        for uid in self.remembered.difference(&self.uids).filter(|uid| !self.going.contains(uid)) {
            found.add(format_args!("history/{uid}"), "its actor is gone, and nothing will remove it", RESTORE);
        }
        found
    }

    fn check_actor(&self, found: &mut Findings, key: &ActorKey, actor: &Known) {
        let name = actor_key(key);
        if let Some(worker) = actor.worker {
            let held = match self.workers.get(&worker) {
                Some(Some(assignee)) => assignee.uid == actor.uid && assignee.generation == actor.generation,
                _ => false,
            };
            if !held {
                let wrong =
                    format!("it holds worker {worker} at generation {}, which is not its own", actor.generation);
                found.add(&name, wrong, RESTORE);
            }
        }
        for op in actor.pending.iter().filter(|op| self.operations.get(*op) != Some(key)) {
            let wrong = format!("operation {op} is under way with it and not written down: it would never end");
            found.add(&name, wrong, RESTORE);
        }
        if !self.atespaces.contains(&key.atespace) {
            let remedy = format!("ate create atespace {}", key.atespace);
            found.add(&name, format!("its atespace {} does not exist", key.atespace), remedy);
        }
        if !self.templates.contains(&actor.template_uid) {
            let wrong = format!(
                "the template it was made from, {} (uid {}), does not exist",
                actor.template, actor.template_uid
            );
            let remedy = format!("it cannot be woken; delete it: ate delete actor {} -a {}", key.name, key.atespace);
            found.add(&name, wrong, remedy);
        }
        if !is_golden(key) && !self.made_from.contains(&(key.clone(), actor.template_uid)) {
            let wrong = "no record keeps its template from being deleted under it";
            found.add(&name, wrong, RESTORE);
        }
    }
}

#[cfg(test)]
mod tests;
