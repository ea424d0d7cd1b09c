//! What the store holds, typed. Each record is JSON, and fields of newer builds are carried along: see [`Read::rewritten`].

use std::cell::RefCell;

use ate_actor::{Actor, Lease, SnapshotRef};
use ate_name::{
    ActorKey, ActorUid, AtespaceName, Generation, Labels, NodeName, ObjectKey, OpId, ReplicaId, SessionId, TemplateUid,
    WorkerUid,
};
use ate_orders::{Ingress, Phase};
use ate_store::{Key, Kind, MAX_PAGE_RECORDS, Prefix, Record};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Code, Control, ControlError, Quota};

/// A record as it was read, and what it says. Whoever changes that makes a copy: see [`Read::rewritten`].
#[derive(Clone, Debug)]
pub(crate) struct Read<T> {
    pub(crate) record: Record,
    pub(crate) value: T,
}

impl<T: DeserializeOwned> Read<T> {
    pub(crate) fn decode(record: Record) -> Result<Self, ControlError> {
        let value = serde_json::from_slice(&record.value).map_err(|error| {
            tracing::error!(key = %record.key, %error, "a record cannot be read");
            let text = format!("record {} cannot be read: see the server's log, and `ate store check`", record.key);
            ControlError::new(Code::Internal, text)
        })?;
        Ok(Self { record, value })
    }
}

impl<T: DeserializeOwned + Serialize> Read<T> {
    /// What to write over the record so that it says `after`, with the fields that a newer build has put there:
    ///
    /// * those of the record itself, always;
    /// * those further in for as long as nothing that is known of the object (or the array) around them changes. They
    ///   belong to that object: to a lease, a snapshot, a template's spec. Another one has its own.
    ///
    /// So what a newer build must not lose to an older one goes on the record itself.
    pub(crate) fn rewritten(&self, after: &T) -> Vec<u8> {
        let known = encode(&self.value);
        debug_assert!(
            serde_json::from_slice::<T>(&self.record.value).is_ok_and(|read| encode(&read) == known),
            "{} was changed where it was read",
            self.record.key
        );
        // As good as always there is nothing that this build does not know.
        if known == self.record.value {
            return encode(after);
        }
        let value = |bytes: &[u8]| serde_json::from_slice(bytes).unwrap_or_default();
        let (stored, known) = (value(&self.record.value), value(&known));
        let mut after = value(&encode(after));
        if let (Value::Object(stored), Value::Object(known), Value::Object(after)) = (&stored, &known, &mut after) {
            for (name, field) in stored.iter().filter(|(name, _)| !known.contains_key(*name)) {
                after.entry(name).or_insert_with(|| field.clone());
            }
        }
        carry(&stored, &known, &mut after);
        // The same text for the same content, whatever the order of its fields: nothing has changed then.
        if after == stored { self.record.value.to_vec() } else { encode(&after) }
    }
}

/// Puts back what was stored wherever what is known of it has not changed.
fn carry(stored: &Value, known: &Value, after: &mut Value) {
    let (Value::Object(stored), Value::Object(known), Value::Object(after)) = (stored, known, after) else { return };
    for (name, after) in after {
        match (stored.get(name), known.get(name)) {
            (Some(stored), Some(known)) if known == after => after.clone_from(stored),
            (Some(stored), Some(known)) => carry(stored, known, after),
            _ => {}
        }
    }
}

pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    thread_local! {
        static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    // Written where there is room already, then copied: no growing, and no spare bytes in what watchers keep for a while.
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.clear();
        serde_json::to_writer(&mut *scratch, value).expect("records are plain data with text keys");
        scratch.clone()
    })
}

/// Takes in all that can be read. What cannot, as a newer build may write it, is in the log, and keeps nobody from the rest.
pub(crate) fn each(records: &[Record], mut take: impl FnMut(&Record) -> Result<(), ControlError>) {
    for record in records {
        let _ = take(record);
    }
}

/// The same for one of many: `None` if it cannot be read. That the store is away is for all of them.
pub(crate) fn readable<T>(read: Result<T, ControlError>) -> Result<Option<T>, ControlError> {
    match read {
        Err(error) if error.code == Code::Internal && !error.is_store_away() => Ok(None),
        read => read.map(Some),
    }
}

impl Control {
    /// Every record of a kind, of which there are few: not for actors and their histories.
    pub(crate) async fn all(&self, kind: Kind) -> Result<Vec<Record>, ControlError> {
        let (mut records, mut after) = (Vec::new(), None::<String>);
        loop {
            let page = self.store.list(&Prefix::all(kind), after.as_deref(), MAX_PAGE_RECORDS).await?;
            records.extend(page.records);
            if !page.more {
                return Ok(records);
            }
            after = records.last().map(|record| record.key.path().to_owned());
        }
    }
}

/// A worker: who it is, and whose it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerRecord {
    pub lease: Lease,
    pub ingress: Ingress,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assigned: Option<Assignee>,
    /// It is to go: whoever is in it leaves, and nobody else comes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Assignee {
    pub key: ActorKey,
    pub uid: ActorUid,
    pub generation: Generation,
    pub template: ObjectKey,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AtespaceRecord {
    pub(crate) name: AtespaceName,
    #[serde(default, skip_serializing_if = "Quota::is_unlimited")]
    pub(crate) quota: Quota,
    /// Which limits these are; zero if there were never any.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) limits: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Something is under way. Whoever finds one that nobody drives brings it to an end.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct OperationRecord {
    pub(crate) op: OpId,
    pub(crate) job: Job,
    /// Who drives it.
    pub(crate) owner: ReplicaId,
    pub(crate) started: jiff::Timestamp,
    /// How often somebody else went on with it.
    #[serde(default)]
    pub(crate) taken_over: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Job {
    /// What the phase of an actor, or its upload, says.
    Actor(ActorKey),
    /// Remove what nobody refers to any more.
    Forget(Forget),
    /// Make the golden snapshot of a template.
    Golden(ObjectKey),
    /// Make an actor that continues from what another has.
    Fork(Box<Fork>),
    /// Start an actor's processes anew.
    Restart(Restart),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Restart {
    pub(crate) actor: ActorKey,
    /// The very actor: one that is made later under the name is another.
    pub(crate) uid: ActorUid,
    pub(crate) force: bool,
}

/// An actor to be, and the snapshot that its first one is copied from. The copy is named after the operation.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Fork {
    pub(crate) from: ActorKey,
    /// The very actor: one that is made later under the name is another.
    pub(crate) from_uid: ActorUid,
    pub(crate) from_key: String,
    pub(crate) source: SnapshotRef,
    /// Who copies it.
    pub(crate) node: NodeName,
    pub(crate) to: ActorKey,
    pub(crate) uid: ActorUid,
    pub(crate) sealed_key: String,
    pub(crate) template: ObjectKey,
    pub(crate) template_uid: TemplateUid,
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub(crate) selector: Labels,
    /// It begins at no smaller one: it may have lived before its operation was restored from a backup.
    #[serde(default, skip_serializing_if = "is_none")]
    pub(crate) past: Generation,
}

fn is_none(generation: &Generation) -> bool {
    *generation == Generation::NONE
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Forget {
    /// The actor itself is gone: its history and its log go too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gone: Option<ActorUid>,
    /// Only its history goes: others may stand on its snapshots.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) only_past: bool,
    /// What all its snapshots lie under, also those that are not known here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) home: Option<String>,
    /// The node that has them on its disk, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) node: Option<NodeName>,
    pub(crate) prefixes: Vec<String>,
}

/// A process of the control plane, and how often it has said that it lives.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ReplicaRecord {
    pub(crate) beat: u64,
    /// Nodes that have not answered it for too long: others take over what waits for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) out_of_reach: Vec<NodeName>,
    /// Nodes that took an order from it and never answered, though they can be reached.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) hanging: Vec<NodeName>,
}

/// One thing that happened to an actor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryEntry {
    pub time: jiff::Timestamp,
    pub event: String,
    pub generation: Generation,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<ObjectKey>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<Phase>,
    #[serde(default)]
    pub snapshot_bytes: u64,
}

/// A node that registered, and how often it has said that it lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeRecord {
    pub session: SessionId,
    pub beat: u64,
    /// Where it takes orders.
    pub endpoint: String,
    /// It was silent for too long. Its actors are others' now, and this session is over.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub given_up: bool,
    /// It answers nobody, though it renews its lease, which is renewed no longer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shut_out: bool,
    /// It wants to go, and gets no workers any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    /// The record is from a backup: whichever session it comes with next began before that was restored, and is over.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restored: bool,
    /// Earlier sessions, oldest first: whoever comes with one of them runs what is others' by now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ended: Vec<SessionId>,
}

/// How much of an actor's past is kept; older entries go when newer ones come.
pub(crate) const HISTORY_KEPT: u64 = 200;

pub(crate) fn actor_key(key: &ActorKey) -> Key {
    named(Kind::Actor, [key.atespace.as_str(), key.name.as_str()])
}

pub(crate) fn actors_of(atespace: &AtespaceName) -> Prefix {
    Prefix::below(Kind::Actor, [atespace.as_str()]).expect("a name is a segment")
}

pub(crate) fn worker_key(worker: WorkerUid) -> Key {
    named(Kind::Worker, [worker.to_string()])
}

pub(crate) fn atespace_key(name: &AtespaceName) -> Key {
    named(Kind::Atespace, [name.as_str()])
}

pub(crate) fn operation_key(op: OpId) -> Key {
    named(Kind::Operation, [op.to_string()])
}

pub(crate) fn replica_key(replica: ReplicaId) -> Key {
    named(Kind::Replica, [replica.to_string()])
}

pub(crate) fn node_key(node: &NodeName) -> Key {
    named(Kind::Node, [node.as_str()])
}

/// Written by every node that comes, or comes back: whoever has asked all nodes there are, and guards this, has missed none.
pub(crate) fn registrations_key() -> Key {
    named(Kind::Meta, ["registrations"])
}

pub(crate) fn history_key(actor: ActorUid, version: u64) -> Key {
    named(Kind::History, [actor.to_string(), format!("{version:020}")])
}

pub(crate) fn history_of(actor: ActorUid) -> Prefix {
    Prefix::below(Kind::History, [actor.to_string()]).expect("a uid is a segment")
}

/// Says that an actor was made from a template, so that nobody has to look at all actors to know that none was.
pub(crate) fn made_from_key(template: TemplateUid, actor: &ActorKey) -> Key {
    named(Kind::Meta, ["made-from", &template.to_string(), actor.atespace.as_str(), actor.name.as_str()])
}

pub(crate) fn made_from(template: TemplateUid) -> Prefix {
    Prefix::below(Kind::Meta, ["made-from", &template.to_string()]).expect("a uid is a segment")
}

pub(crate) fn object_key(kind: Kind, key: &ObjectKey) -> Key {
    // The namespace of a cluster-scoped object is empty, which no segment may be.
    let namespace = if key.namespace.is_empty() { "-" } else { &key.namespace };
    named(kind, [namespace, key.name.as_str()])
}

pub(crate) fn object_name(key: &Key) -> ObjectKey {
    let mut segments = key.segments();
    let namespace = segments.next().filter(|&namespace| namespace != "-").unwrap_or_default();
    ObjectKey::new(namespace, segments.next().unwrap_or_default())
}

fn named<S: AsRef<str>>(kind: Kind, segments: impl IntoIterator<Item = S>) -> Key {
    Key::new(kind, segments).expect("names and uids are segments")
}

impl Assignee {
    pub(crate) fn of(actor: &Actor) -> Self {
        Self { key: actor.key.clone(), uid: actor.uid, generation: actor.generation, template: actor.template.clone() }
    }
}

#[cfg(test)]
mod tests;
