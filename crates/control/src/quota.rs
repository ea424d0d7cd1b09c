//! What an atespace may use. Each number is kept by the very changes that it counts, so a limit that is asked there cannot be
//! passed, however many ask at once.
//!
//! ```text
//!   count/<atespace>/actors     one more with each create, one less with each delete
//!                   /running    those that hold a worker
//!                   /bytes      of the snapshots that its actors refer to
//!                   /wakes      when, at the pace that is allowed, all wakes so far will have been
//!                   /limits     which limits hold: grows with each change of them
//! ```
//!
//! What the limits are is remembered by every replica, and whoever asks for room also asks that there are no newer ones: so a limit
//! holds at every replica from the moment that it is acknowledged.
//!
//! A save is never refused: that would cost the actor. What is over its bytes can be saved, but nothing more of it wakes.

use std::collections::{BTreeMap, HashMap, HashSet};

use ate_actor::Actor;
use ate_name::{ActorKey, AtespaceName};
use ate_store::{Change, CommitError, Guard, Key, Kind, Record, number};
use serde::{Deserialize, Serialize};

use crate::actors::is_golden;
use crate::records::{AtespaceRecord, Read, atespace_key, each};
use crate::{Code, Control, ControlError};

/// Limits; `None`: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Quota {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actors: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_bytes: Option<u64>,
    /// That many at once, and from then on at this pace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wakes_per_second: Option<u64>,
}

impl Quota {
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

/// What of it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub actors: u64,
    pub running: u64,
    pub snapshot_bytes: u64,
}

impl Usage {
    /// Takes in one more actor.
    pub(crate) fn add(&mut self, actor: &Actor) {
        self.actors += 1;
        self.running += u64::from(actor.lease().is_some());
        self.snapshot_bytes += snapshot_bytes(actor);
    }

    /// The numbers that are kept of it, where they are not zero.
    pub(crate) fn counts(self, atespace: &AtespaceName) -> impl Iterator<Item = (Key, u64)> {
        let counts = [(ACTORS, self.actors), (RUNNING, self.running), (BYTES, self.snapshot_bytes)];
        counts.into_iter().filter(|(_, count)| *count > 0).map(|(what, count)| (count_key(atespace, what), count))
    }

    pub(crate) fn set(&mut self, what: &str, number: u64) {
        match what {
            ACTORS => self.actors = number,
            RUNNING => self.running = number,
            BYTES => self.snapshot_bytes = number,
            _ => {}
        }
    }
}

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} actors, {} running, {} bytes of snapshots", self.actors, self.running, self.snapshot_bytes)
    }
}

const ACTORS: &str = "actors";
const RUNNING: &str = "running";
const BYTES: &str = "bytes";
const WAKES: &str = "wakes";
const LIMITS: &str = "limits";

const SECOND: u64 = 1_000_000;

/// What a pace can be ahead of any clock that is right, with room for clocks that are nearly so.
const AHEAD: u64 = 5 * SECOND;

pub(crate) fn count_key(atespace: &AtespaceName, what: &str) -> Key {
    Key::new(Kind::Count, [atespace.as_str(), what]).expect("names are segments")
}

/// Bytes of the snapshots that an actor refers to, each once.
pub(crate) fn snapshot_bytes(actor: &Actor) -> u64 {
    let snapshots: BTreeMap<&str, u64> =
        actor.references().map(|snapshot| (snapshot.prefix.as_str(), snapshot.stored_bytes)).collect();
    snapshots.values().sum()
}

fn difference(before: u64, after: u64) -> i64 {
    i64::try_from(i128::from(after) - i128::from(before)).unwrap_or(0)
}

fn add(change: Change, atespace: &AtespaceName, what: &str, by: i64) -> Change {
    if by == 0 { change } else { change.add(count_key(atespace, what), by) }
}

/// Each wake takes its part of a second, from now or from when those before it are through; one that would begin a second
/// ahead has to wait.
fn at_pace(change: Change, atespace: &AtespaceName, rate: u64, now_micros: u64) -> Change {
    let part = SECOND / rate.max(1);
    change.guard(Guard::AtMost(count_key(atespace, WAKES), now_micros + SECOND - part)).add_from(
        count_key(atespace, WAKES),
        i64::try_from(part).unwrap_or(0),
        now_micros,
    )
}

/// The limits of an atespace, and which ones they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    quota: Quota,
    /// As the atespace's record has it, and its count of limits.
    number: u64,
}

/// The atespace whose limits have changed since they were heard of, if that is why a change was refused.
pub(crate) fn outdated(guard: &Guard) -> Option<AtespaceName> {
    let Guard::AtMost(key, _) = guard else { return None };
    let mut segments = key.segments();
    let (atespace, what) = (segments.next()?, segments.next()?);
    (what == LIMITS).then(|| AtespaceName::parse(atespace).ok()).flatten()
}

/// Says what a refusal of a limit means; `None` if it is another refusal.
pub(crate) fn exceeded(guard: &Guard) -> Option<ControlError> {
    let Guard::AtMost(key, _) = guard else { return None };
    let mut segments = key.segments();
    let (atespace, what) = (segments.next().unwrap_or_default(), segments.next().unwrap_or_default());
    let (what, flag, remedy) = match what {
        LIMITS => return None,
        ACTORS => ("actors", "actors", "delete some"),
        RUNNING => ("running actors", "running", "suspend some"),
        BYTES => ("bytes of snapshots", "snapshot-bytes", "delete actors that are not needed"),
        _ => ("wakes per second", "wakes-per-second", "try again in a moment"),
    };
    Some(ControlError::new(
        Code::ResourceExhausted,
        format!(
            "Atespace {atespace} has reached its quota of {what}\n  {remedy}, or raise it: ate quota {atespace} --{flag} N"
        ),
    ))
}

impl Control {
    /// Guards what adds one.
    fn room_for_one(
        &self,
        change: Change,
        atespace: &AtespaceName,
        what: &str,
        most: Option<u64>,
    ) -> Result<Change, ControlError> {
        match most {
            // Not even one: a number is never below zero, so no guard could say this.
            Some(0) => Err(self.refuse(&Guard::AtMost(count_key(atespace, what), 0))),
            Some(most) => Ok(change.guard(Guard::AtMost(count_key(atespace, what), most - 1))),
            None => Ok(change),
        }
    }

    /// A limit that is known to be reached without asking the store.
    fn refuse(&self, guard: &Guard) -> ControlError {
        let refused = exceeded(guard).unwrap_or_else(ControlError::conflict);
        self.note_refusal(&refused);
        refused
    }

    /// Counts an actor that is created.
    pub(crate) fn count_created(&self, change: Change, actor: &Actor) -> Result<Change, ControlError> {
        let atespace = &actor.key.atespace;
        if is_golden(&actor.key) {
            return Ok(change);
        }
        let (change, quota) = self.limited(change, atespace);
        let change = add(change, atespace, ACTORS, 1);
        let bytes = snapshot_bytes(actor);
        let mut change = add(change, atespace, BYTES, difference(0, bytes));
        if let (1.., Some(most)) = (bytes, quota.snapshot_bytes) {
            let key = count_key(atespace, BYTES);
            let Some(left) = most.checked_sub(bytes) else { return Err(self.refuse(&Guard::AtMost(key, most))) };
            change = change.guard(Guard::AtMost(key, left));
        }
        self.room_for_one(change, atespace, ACTORS, quota.actors)
    }

    /// Whether another actor like this one could be made in an atespace now; the change that makes it asks again.
    pub(crate) async fn check_room(&self, atespace: &AtespaceName, like: &Actor) -> Result<(), ControlError> {
        let (quota, usage) = self.quota(atespace).await.map_err(|error| match error.code {
            Code::NotFound => ControlError::precondition(error.text),
            _ => error,
        })?;
        // It has a snapshot by then, if it has none yet.
        let bytes = snapshot_bytes(like).max(1);
        let wanted =
            [(ACTORS, quota.actors, usage.actors, 1), (BYTES, quota.snapshot_bytes, usage.snapshot_bytes, bytes)];
        for (what, most, used, more) in wanted {
            if most.is_some_and(|most| used.saturating_add(more) > most) {
                return Err(self.refuse(&Guard::AtMost(count_key(atespace, what), used)));
            }
        }
        Ok(())
    }

    /// Counts an actor that is deleted.
    pub(crate) fn count_deleted(&self, change: Change, actor: &Actor) -> Change {
        let atespace = &actor.key.atespace;
        if is_golden(&actor.key) {
            return change;
        }
        let change = add(change, atespace, ACTORS, -1);
        let change = add(change, atespace, RUNNING, -i64::from(actor.lease().is_some()));
        add(change, atespace, BYTES, difference(snapshot_bytes(actor), 0))
    }

    /// Counts what a transition changes, and asks for room where it needs more.
    pub(crate) fn count_between(&self, change: Change, before: &Actor, after: &Actor) -> Result<Change, ControlError> {
        let atespace = &after.key.atespace;
        if is_golden(&after.key) {
            return Ok(change);
        }
        let running = |actor: &Actor| u64::from(actor.lease().is_some());
        let wakes = running(before) < running(after);
        let change = add(change, atespace, RUNNING, difference(running(before), running(after)));
        let change = add(change, atespace, BYTES, difference(snapshot_bytes(before), snapshot_bytes(after)));
        if wakes { self.ask_to_wake(change, atespace) } else { Ok(change) }
    }

    fn ask_to_wake(&self, change: Change, atespace: &AtespaceName) -> Result<Change, ControlError> {
        let (change, quota) = self.limited(change, atespace);
        let mut change = self.room_for_one(change, atespace, RUNNING, quota.running)?;
        if let Some(most) = quota.snapshot_bytes {
            change = change.guard(Guard::AtMost(count_key(atespace, BYTES), most));
        }
        if let Some(rate) = quota.wakes_per_second {
            change = at_pace(change, atespace, rate, self.now_micros());
        }
        Ok(change)
    }

    /// Says no before anybody is disturbed for a worker. Those who ask at once may all be told yes: the change decides.
    pub(crate) async fn room_to_wake(&self, key: &ActorKey) -> Result<(), ControlError> {
        let atespace = &key.atespace;
        let (_, quota) = self.limited(Change::new(), atespace);
        if quota.is_unlimited() {
            return Ok(());
        }
        if quota.wakes_per_second.is_some() {
            self.mend_pace(atespace).await?;
        }
        for guard in self.ask_to_wake(Change::new(), atespace)?.guards {
            if let Guard::AtMost(key, most) = &guard
                && number(self.store.get(key).await?.as_ref())? > *most
            {
                self.hear_of_limits(&guard).await?;
                return Err(exceeded(&guard).map_or_else(ControlError::conflict, |_| self.refuse(&guard)));
            }
        }
        Ok(())
    }

    /// A change that takes place only under the limits that are known here, and these.
    fn limited(&self, change: Change, atespace: &AtespaceName) -> (Change, Quota) {
        let Limits { quota, number } = self.limits.read().get(atespace).copied().unwrap_or_default();
        (change.guard(Guard::AtMost(count_key(atespace, LIMITS), number)), quota)
    }

    /// If there are newer limits than those known here, they are read.
    pub(crate) async fn hear_of_limits(&self, refused: &Guard) -> Result<(), ControlError> {
        let Some(atespace) = outdated(refused) else { return Ok(()) };
        let key = atespace_key(&atespace);
        let record = self.store.get(&key).await?;
        self.note_atespace(&key, record.as_ref())
    }

    /// No pace is ever further ahead than a second and what clocks of replicas differ by: one that is was set by a clock that
    /// went wrong, and would keep everybody waiting until the others have caught up with it.
    async fn mend_pace(&self, atespace: &AtespaceName) -> Result<(), ControlError> {
        let Some(record) = self.store.get(&count_key(atespace, WAKES)).await? else { return Ok(()) };
        if number(Some(&record))? <= self.now_micros() + AHEAD {
            return Ok(());
        }
        tracing::warn!(%atespace, "its wakes were counted by a clock that is ahead: they are counted anew");
        match self.store.commit(Change::new().guard(record.unchanged()).delete(record.key.clone())).await {
            Err(CommitError::Conflict { .. }) | Ok(_) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn now_micros(&self) -> u64 {
        u64::try_from(self.world.now().as_microsecond()).unwrap_or(0)
    }

    /// Takes over what the store says of an atespace.
    pub(crate) fn note_atespace(&self, key: &Key, record: Option<&Record>) -> Result<(), ControlError> {
        let Ok(name) = AtespaceName::parse(key.path()) else { return Ok(()) };
        let mut limits = self.limits.write();
        let Some(record) = record else {
            limits.remove(&name);
            return Ok(());
        };
        let AtespaceRecord { quota, limits: number, .. } = Read::<AtespaceRecord>::decode(record.clone())?.value;
        note(&mut limits, name, Limits { quota, number });
        Ok(())
    }

    pub(crate) async fn load_quotas(&self) -> Result<(), ControlError> {
        let records = self.all(Kind::Atespace).await?;
        let there: HashSet<&str> = records.iter().map(|record| record.key.path()).collect();
        // The others were deleted while nobody told us.
        self.limits.write().retain(|name, _| there.contains(name.as_str()));
        each(&records, |record| self.note_atespace(&record.key, Some(record)));
        Ok(())
    }

    /// Changes what an atespace may use. What it uses already stays. `seen`: only if that is what it may use now.
    pub async fn set_quota(&self, name: &AtespaceName, quota: Quota, seen: Option<Quota>) -> Result<(), ControlError> {
        loop {
            let record = self.store.get(&atespace_key(name)).await?;
            let record = record.ok_or_else(|| ControlError::atespace_not_found(name))?;
            let read = Read::<AtespaceRecord>::decode(record)?;
            if seen.is_some_and(|seen| seen != read.value.quota) {
                let text = format!("somebody else has changed the quota of Atespace {name}: look at it again");
                return Err(ControlError::new(Code::Aborted, text));
            }
            // By the clock: an atespace of the same name that was made anew has newer ones than any before it.
            let number = (read.value.limits + 1).max(self.now_micros());
            let changed = read.rewritten(&AtespaceRecord { quota, limits: number, ..read.value.clone() });
            let change = Change::new().replace(&read.record, changed.clone());
            match self.store.commit(change.add_from(count_key(name, LIMITS), 1, number - 1)).await {
                Ok(committed) => {
                    let record = Record { value: changed.into(), revision: committed.revision, ..read.record };
                    return self.note_atespace(&record.key.clone(), Some(&record));
                }
                Err(CommitError::Conflict { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub async fn quota(&self, name: &AtespaceName) -> Result<(Quota, Usage), ControlError> {
        let record = self.store.get(&atespace_key(name)).await?;
        let record = record.ok_or_else(|| ControlError::atespace_not_found(name))?;
        let count = async |what| Ok::<_, ControlError>(number(self.store.get(&count_key(name, what)).await?.as_ref())?);
        let usage =
            Usage { actors: count(ACTORS).await?, running: count(RUNNING).await?, snapshot_bytes: count(BYTES).await? };
        Ok((Read::<AtespaceRecord>::decode(record)?.value.quota, usage))
    }

    /// Nothing is left to count.
    pub(crate) fn without_counts(change: Change, name: &AtespaceName) -> Change {
        [ACTORS, RUNNING, BYTES, WAKES, LIMITS].iter().fold(change, |change, what| change.delete(count_key(name, what)))
    }
}

/// Keeps only those that have, or had, limits: there may be very many without. Older news never replace newer; but one that never
/// had any may have been made anew. Should that be the older news, the guard of the next change tells.
fn note(limits: &mut HashMap<AtespaceName, Limits>, name: AtespaceName, news: Limits) {
    let known = limits.get(&name).map_or(0, |known| known.number);
    if news.number == 0 && news.quota.is_unlimited() {
        limits.remove(&name);
    } else if news.number >= known {
        limits.insert(name, news);
    }
}

#[cfg(test)]
mod tests {
    use ate_store::{MemoryStore, Store as _};

    use super::*;

    #[tokio::test]
    async fn wakes_come_at_once_as_many_as_a_second_has_and_then_at_their_pace() {
        let (store, space) = (MemoryStore::default(), AtespaceName::parse("space").unwrap());
        let mut woken = Vec::new();
        // Five at once, then one after each tenth of a second.
        for tenth in [0, 0, 0, 0, 0].into_iter().chain(1..=10) {
            let now = 1_000 * SECOND + tenth * SECOND / 10;
            if store.commit(at_pace(Change::new(), &space, 4, now)).await.is_ok() {
                woken.push(tenth);
            }
        }
        assert_eq!(woken, [0, 0, 0, 0, 3, 5, 8, 10], "four at once, then four a second");
    }

    #[test]
    fn a_limit_that_is_reached_says_whose_it_is_and_what_to_do() {
        let space = AtespaceName::parse("space").unwrap();
        let error = exceeded(&Guard::AtMost(count_key(&space, RUNNING), 3)).unwrap();
        assert_eq!(error.code, Code::ResourceExhausted);
        assert!(error.text.contains("Atespace space") && error.text.contains("ate quota space --running N"));
        assert!(exceeded(&Guard::Present(count_key(&space, RUNNING))).is_none());
    }

    #[test]
    fn older_news_replace_no_limits_and_an_atespace_that_is_made_anew_has_none() {
        let (mut limits, space) = (HashMap::new(), AtespaceName::parse("space").unwrap());
        let of = |number, actors| Limits { quota: Quota { actors, ..Quota::default() }, number };
        let mut told = |news: Limits| {
            note(&mut limits, space.clone(), news);
            limits.get(&space).map(|known| (known.number, known.quota.actors))
        };
        assert_eq!(told(of(0, None)), None);
        assert_eq!(told(of(0, Some(1))), Some((0, Some(1))), "as written before limits were numbered");
        assert_eq!(told(of(7, Some(2))), Some((7, Some(2))));
        assert_eq!(told(of(6, Some(3))), Some((7, Some(2))));
        assert_eq!(told(of(8, None)), Some((8, None)), "had some");
        assert_eq!(told(of(0, None)), None, "made anew");
    }

    #[test]
    fn limits_that_have_changed_are_no_limit_that_is_reached() {
        let space = AtespaceName::parse("space").unwrap();
        let guard = Guard::AtMost(count_key(&space, LIMITS), 3);
        assert_eq!(outdated(&guard), Some(space.clone()));
        assert!(exceeded(&guard).is_none());
        assert_eq!(outdated(&Guard::AtMost(count_key(&space, RUNNING), 3)), None);
    }
}
