//! What the store holds, typed. Each record is JSON; fields of newer builds are carried along.

use std::cell::RefCell;
use std::collections::BTreeMap;

use ate_actor::{Actor, Lease};
use ate_name::{
    ActorKey, ActorUid, AtespaceName, Generation, NodeName, ObjectKey, OpId, ReplicaId, SessionId, TemplateUid,
    WorkerUid,
};
use ate_orders::Phase;
use ate_store::{Key, Kind, Prefix, Record};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Code, ControlError};

type Unknown = BTreeMap<String, serde_json::Value>;

/// A record as it was read, and what it says.
#[derive(Clone, Debug)]
pub(crate) struct Read<T> {
    pub(crate) record: Record,
    pub(crate) value: T,
}

impl<T: DeserializeOwned> Read<T> {
    pub(crate) fn decode(record: Record) -> Result<Self, ControlError> {
        let value = serde_json::from_slice(&record.value).map_err(|error| {
            tracing::error!(key = %record.key, %error, "a record cannot be read");
            ControlError::new(Code::Internal, format!("record {} cannot be read: see the server's log", record.key))
        })?;
        Ok(Self { record, value })
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

/// A worker: who it is, and whose it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerRecord {
    pub lease: Lease,
    pub ingress: std::path::PathBuf,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assigned: Option<Assignee>,
    #[serde(flatten)]
    pub unknown: Unknown,
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
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
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
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
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
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Forget {
    /// The actor itself is gone: its history and its log go too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gone: Option<ActorUid>,
    /// The node that has them on its disk, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) node: Option<NodeName>,
    pub(crate) prefixes: Vec<String>,
}

/// A process of the control plane, and how often it has said that it lives.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ReplicaRecord {
    pub(crate) beat: u64,
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
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
    #[serde(flatten)]
    pub unknown: Unknown,
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

fn named<S: AsRef<str>>(kind: Kind, segments: impl IntoIterator<Item = S>) -> Key {
    Key::new(kind, segments).expect("names and uids are segments")
}

impl Assignee {
    pub(crate) fn of(actor: &Actor) -> Self {
        Self { key: actor.key.clone(), uid: actor.uid, generation: actor.generation, template: actor.template.clone() }
    }
}
