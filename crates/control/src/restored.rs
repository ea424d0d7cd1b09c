//! What a backup becomes when it is restored.
//!
//! Everything after the backup is unknown: which generations were given out, who runs where, which operations came to
//! their end. The records are rewritten so that none of it matters:
//!
//! ```text
//!   actor        past every generation that can have been given out; holds no worker; an entry in its history
//!   operation    of a wake or a save that held a worker: gone. All others stay, and are taken up:
//!                  a save whose image left its worker   the node has it, or the snapshot it became, or says that it has not
//!                  an upload                            the same
//!                  what nobody refers to                 still nobody does
//!                  a golden snapshot                     begins anew, as after any crash
//!                  a fork                                goes on, past every generation that the fork can have had
//!   worker       gone: nodes tell which there are, and reconciling ends whom nobody knows
//!   replica      gone: those processes are
//!   count        counted anew: the backup may be the remedy of a count that is wrong
//!   unreadable   an actor that this program cannot read is refused, or left out with its past and its place in the index
//!   node         given up: one that comes back is told that its session is over, and ends what it runs before it is heard; what
//!                only one had that does not is given up after a while. It counts as heard more often than it can have been
//!                told: a node that was told more refuses the store
//! ```
//!
//! The commit line goes on past everything that anybody can have seen of it, so that no watcher takes up where it was.

use std::collections::{BTreeMap, BTreeSet};

use ate_actor::{Actor, Event, Phase};
use ate_name::{ActorKey, ActorUid, AtespaceName, Generation};
use ate_store::{Counts, Key, Kind, Mutation, Record, Revision};
use jiff::Timestamp;

use crate::Usage;
use crate::actors::is_golden;
use crate::records::{
    Fork, HISTORY_KEPT, HistoryEntry, Job, NodeRecord, OperationRecord, Read, encode, history_key, operation_key,
};

/// A store makes fewer commits in a second than this, and assigns one actor fewer times. So by a given second neither has
/// counted to that second's number (since 1970) times this, also not from where an earlier restore has put it: restoring the
/// same backup twice gives no number twice. It stays below 2^53, which readers of JSON can count to, until the year 2242.
const MOST_IN_A_SECOND: u64 = 1 << 20;

/// How many commits and assignments there can have been after the last that is known of, if the clock does not tell. A store that
/// makes ten thousand commits in a second has not made so many in three years.
const MOST_UNKNOWN: u64 = 1 << 40;

/// Actors named in the summary; the others are counted.
const NAMED: usize = 10;

/// The clock of whoever restores is wrong, and with it every number that is to be past those of before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this machine's clock says {now}, but the backup was made at {backup}; set the clock right and try again")]
pub struct ClockBehind {
    now: Timestamp,
    backup: Timestamp,
}

/// An actor whose record this program cannot read: it is damaged, or a newer program wrote it. What such an actor holds, and what
/// would become of it in a restore, nobody can say. Records of other kinds are restored as they are, and whoever takes them up says
/// so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} cannot be read: {reason}")]
pub struct Unreadable {
    key: Key,
    reason: String,
    /// What its past goes by, if so much can be read.
    uid: Option<ActorUid>,
}

impl Unreadable {
    pub fn of(record: &Record) -> Option<Self> {
        if record.key.kind() != Kind::Actor {
            return None;
        }
        serde_json::from_slice::<Actor>(&record.value).err().map(|error| Self::new(record, &error))
    }

    fn new(record: &Record, error: &serde_json::Error) -> Self {
        let value = serde_json::from_slice::<serde_json::Value>(&record.value).unwrap_or_default();
        let uid = value["uid"].as_str().and_then(|uid| ActorUid::parse(uid).ok());
        Self { key: record.key.clone(), reason: error.to_string(), uid }
    }
}

/// A restore that is under way.
#[derive(Debug)]
pub struct Restoring {
    backup: Timestamp,
    now: Timestamp,
    /// Past every generation and every revision.
    past: u64,
    /// Paths and uids of actors.
    left_out: BTreeSet<String>,
    summary: Summary,
    /// What atespaces use.
    used: BTreeMap<AtespaceName, Usage>,
}

/// What a restore has changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub kept: Counts,
    pub dropped: Counts,
    /// Actors that were on a worker, or on their way: they continue from their last snapshot.
    pub fell_back: Named,
    /// Actors whose save goes on.
    pub saving: Named,
    /// Actors whose newest snapshot goes on to durable storage.
    pub uploading: Named,
}

/// The first few of many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    pub count: u64,
    pub first: Vec<ActorKey>,
}

impl Named {
    fn add(&mut self, key: &ActorKey) {
        self.count += 1;
        if self.first.len() < NAMED {
            self.first.push(key.clone());
        }
    }
}

impl Restoring {
    /// Of a backup that was made at `backup` and holds commits up to `revision`.
    pub fn new(backup: Timestamp, revision: Revision, now: Timestamp) -> Result<Self, ClockBehind> {
        let seconds = u64::try_from(now.as_second()).unwrap_or(0);
        if now < backup || seconds == 0 {
            return Err(ClockBehind { now, backup });
        }
        let past = seconds.saturating_mul(MOST_IN_A_SECOND);
        let new =
            Self { backup, now, past, left_out: BTreeSet::new(), summary: Summary::default(), used: BTreeMap::new() };
        Ok(new.past(revision))
    }

    /// Goes on past `known` too, which some store of this line has reached. The clock's number is past it as a rule; if it is not,
    /// an earlier restore had a clock that was ahead of this one. An assignment is a commit, so no generation is past the commit
    /// line.
    #[must_use]
    pub fn past(self, known: Revision) -> Self {
        let past = if known.0 < self.past { self.past } else { known.0.saturating_add(MOST_UNKNOWN) };
        Self { past, ..self }
    }

    /// Leaves these out, and what would be left of them: their past, and what keeps their templates from being deleted. Their
    /// snapshots stay where they are.
    #[must_use]
    pub fn without(mut self, unreadable: &[Unreadable]) -> Self {
        for Unreadable { key, uid, .. } in unreadable {
            self.left_out.insert(key.path().to_owned());
            self.left_out.extend(uid.map(|uid| uid.to_string()));
        }
        self
    }

    /// The revision of the restored store.
    pub fn revision(&self) -> Revision {
        Revision(self.past)
    }

    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// What is written of one record. Records that it takes back come before it ([`ate_store::Contents::ORDER`]).
    pub fn take(&mut self, record: Record) -> Result<Vec<Mutation>, Unreadable> {
        let kind = record.key.kind();
        match kind {
            Kind::Actor | Kind::Meta | Kind::History if self.is_left_out(&record.key) => {
                self.summary.dropped.add(kind);
                Ok(Vec::new())
            }
            Kind::Worker | Kind::Replica => {
                self.summary.dropped.add(kind);
                Ok(Vec::new())
            }
            Kind::Count => Ok(Vec::new()),
            Kind::Actor => {
                self.summary.kept.add(kind);
                let value = serde_json::from_slice(&record.value).map_err(|error| Unreadable::new(&record, &error))?;
                Ok(self.actor(Read { record, value }))
            }
            Kind::Operation => {
                self.summary.kept.add(kind);
                Ok(vec![Mutation::Put(self.operation(record))])
            }
            Kind::Node => {
                self.summary.kept.add(kind);
                Ok(vec![Mutation::Put(self.node(record))])
            }
            _ => {
                self.summary.kept.add(kind);
                Ok(vec![Mutation::Put(record)])
            }
        }
    }

    /// What is written when all records were taken.
    pub fn finish(&mut self) -> Vec<Mutation> {
        let counts = std::mem::take(&mut self.used)
            .into_iter()
            .flat_map(|(atespace, usage)| usage.counts(&atespace).collect::<Vec<_>>());
        let revision = self.revision();
        let put = |(key, count): (Key, u64)| {
            Mutation::Put(Record { key, version: 1, revision, value: count.to_string().into() })
        };
        counts.map(put).inspect(|_| self.summary.kept.add(Kind::Count)).collect()
    }

    fn is_left_out(&self, key: &Key) -> bool {
        let whose = match (key.kind(), key.path().split_once('/')) {
            (Kind::Actor, _) => Some(key.path()),
            (Kind::History, Some((uid, _))) => Some(uid),
            (Kind::Meta, Some(("made-from", of))) => of.split_once('/').map(|(_, actor)| actor),
            _ => None,
        };
        whose.is_some_and(|whose| self.left_out.contains(whose))
    }

    fn node(&self, record: Record) -> Record {
        let Ok(value) = serde_json::from_slice::<NodeRecord>(&record.value) else { return record };
        let restored = NodeRecord { beat: self.past.max(value.beat), given_up: true, restored: true, ..value.clone() };
        let read = Read { record, value };
        Record { value: read.rewritten(&restored).into(), ..read.record }
    }

    /// An actor that was to be may have been, and have lived, since: it gets no generation twice.
    fn operation(&self, record: Record) -> Record {
        // What cannot be read stays as it is; whoever takes it up says so.
        let Ok(value) = serde_json::from_slice::<OperationRecord>(&record.value) else { return record };
        let Job::Fork(fork) = &value.job else { return record };
        let job = Job::Fork(Box::new(Fork { past: Generation::new(self.past), ..(**fork).clone() }));
        let (restored, read) = (OperationRecord { job, ..value.clone() }, Read { record, value });
        Record { value: read.rewritten(&restored).into(), ..read.record }
    }

    fn actor(&mut self, read: Read<Actor>) -> Vec<Mutation> {
        let before = &read.value;
        let event = Event::Restored { past: Generation::new(self.past) };
        let (after, _) = before.clone().apply(event).expect("it fits every phase");
        if !is_golden(&after.key) {
            self.used.entry(after.key.atespace.clone()).or_default().add(&after);
        }
        let version = read.record.version + 1;
        let put = |key, version, value: Vec<u8>| {
            Mutation::Put(Record { key, version, revision: self.revision(), value: value.into() })
        };
        let mut written = vec![
            put(read.record.key.clone(), version, read.rewritten(&after)),
            put(history_key(after.uid, version), 1, encode(&self.entry(before, &after))),
        ];
        if let Some(old) = version.checked_sub(HISTORY_KEPT).filter(|old| *old > 0) {
            written.push(Mutation::Deleted(history_key(after.uid, old)));
        }
        let pending: BTreeSet<_> = after.pending().collect();
        for op in before.pending().filter(|op| !pending.contains(op)) {
            self.summary.dropped.add(Kind::Operation);
            if let Some(kept) = self.summary.kept.0.get_mut(&Kind::Operation) {
                *kept = kept.saturating_sub(1);
            }
            written.push(Mutation::Deleted(operation_key(op)));
        }
        match &after.phase {
            Phase::Saving { .. } => self.summary.saving.add(&after.key),
            rests if *rests != before.phase => self.summary.fell_back.add(&after.key),
            _ => {}
        }
        if after.snapshots.uploading.is_some() {
            self.summary.uploading.add(&after.key);
        }
        written
    }

    fn entry(&self, before: &Actor, after: &Actor) -> HistoryEntry {
        let mut detail = format!("the store was restored from a backup of {}", self.backup);
        if before.phase != after.phase {
            detail += "; it was on a worker then, and continues from its last snapshot";
        }
        HistoryEntry {
            time: self.now,
            event: "Restored".to_owned(),
            generation: after.generation,
            detail,
            worker: before.lease().map(|lease| lease.pod.clone()),
            phases: Vec::new(),
            snapshot_bytes: 0,
        }
    }
}

#[cfg(test)]
mod tests;
