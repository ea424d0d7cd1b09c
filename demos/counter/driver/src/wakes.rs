//! How each request found its actor: told by the system, not guessed from the time it took.
//!
//! * Its answer carries a newer generation than the one before: the actor was woken from a snapshot, and the history of
//!   that generation says from which (the template's golden one, or its own) and how long each phase took.
//! * Otherwise a watch on the actors tells of every freeze and thaw. A thaw belongs to the oldest request that came after the
//!   freeze; a request that no thaw belongs to found its actor awake.

use std::collections::BTreeMap;
use std::time::Duration;

use ate_proto::ate::v1::{ActorState, HistoryEntry};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    FirstStart,
    Thaw,
    Restore,
    Awake,
}

/// A request, or several at once to the same actor: they share one wake.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) requests: u64,
    /// Sent together with others to other actors, so that it may have waited for a worker.
    pub(crate) in_burst: bool,
    pub(crate) first_byte: Option<Duration>,
    pub(crate) found: Option<Found>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Awake,
    Frozen,
    /// On no worker; woken under this generation.
    Asleep(u64),
}

/// What is known of one actor since the run began.
#[derive(Clone, Debug, Default)]
pub(crate) struct Actor {
    pub(crate) state: ActorState,
    pub(crate) freezes: u32,
    pub(crate) asked: Vec<Asked>,
    /// The newest that an answer has carried.
    generation: u64,
}

/// Every actor by name.
#[derive(Debug, Default)]
pub(crate) struct Wakes {
    actors: BTreeMap<String, Actor>,
    is_listed: bool,
}

impl Wakes {
    pub(crate) fn actors(&self) -> impl Iterator<Item = (&str, &Actor)> {
        self.actors.iter().map(|(name, actor)| (name.as_str(), actor))
    }

    pub(crate) fn actor(&self, name: &str) -> Option<&Actor> {
        self.actors.get(name)
    }

    /// Every actor there was has been told.
    pub(crate) fn listed(&mut self) {
        self.is_listed = true;
    }

    pub(crate) fn is_listed(&self) -> bool {
        self.is_listed
    }

    pub(crate) fn is_frozen(&self, name: &str) -> bool {
        self.actors.get(name).is_some_and(|actor| actor.state.frozen && actor.state.phase == "running")
    }

    pub(crate) fn is_suspended(&self, name: &str) -> bool {
        self.actors.get(name).is_some_and(|actor| actor.state.phase == "suspended")
    }

    /// As the watch tells it.
    pub(crate) fn changed(&mut self, name: &str, state: ActorState) {
        let actor = self.actors.entry(name.to_owned()).or_insert_with(|| Actor {
            generation: state.generation,
            state: state.clone(),
            ..Actor::default()
        });
        let before = std::mem::replace(&mut actor.state, state);
        // Frozen once, a new generation of it is not.
        let was_frozen = before.frozen && before.generation == actor.state.generation;
        match (was_frozen, actor.state.frozen) {
            (false, true) => {
                actor.freezes += 1;
                actor.found_awake();
            }
            (true, false) if actor.state.phase == "running" => {
                let open = actor.asked.iter_mut().find(|asked| asked.found.is_none());
                open.into_iter().for_each(|asked| asked.found = Some(Found::Frozen));
            }
            _ => {}
        }
    }

    /// A request is about to be sent. Returns its number.
    pub(crate) fn asking(&mut self, name: &str, requests: u64, in_burst: bool) -> usize {
        let actor = self.actors.entry(name.to_owned()).or_default();
        actor.asked.push(Asked { requests, in_burst, first_byte: None, found: None });
        actor.asked.len() - 1
    }

    /// Its (first) answer began to arrive, and carried this generation.
    pub(crate) fn answered(&mut self, name: &str, number: usize, first_byte: Duration, generation: u64) {
        let Some(actor) = self.actors.get_mut(name) else { return };
        let is_newer = generation > actor.generation;
        if is_newer {
            actor.generation = generation;
            actor.found_awake();
        }
        let Some(asked) = actor.asked.get_mut(number) else { return };
        asked.first_byte = Some(first_byte);
        if is_newer {
            asked.found = Some(Found::Asleep(generation));
        }
    }
}

impl Actor {
    /// Whatever was answered so far and is not known to have woken it: no later thaw can be its.
    fn found_awake(&mut self) {
        for asked in self.asked.iter_mut().filter(|asked| asked.first_byte.is_some()) {
            asked.found.get_or_insert(Found::Awake);
        }
    }
}

/// Whether a wake under `generation` began from the template's golden snapshot or from the actor's own.
pub(crate) fn origin(history: &[HistoryEntry], generation: u64) -> Kind {
    let begins_at_birth = history.first().is_some_and(|entry| entry.event == "Created");
    let was_saved = history.iter().any(|entry| entry.generation < generation && entry.event == "Captured");
    if begins_at_birth && !was_saved { Kind::FirstStart } else { Kind::Restore }
}

/// Where and how a wake under `generation` ran.
pub(crate) fn wake(history: &[HistoryEntry], generation: u64) -> Option<&HistoryEntry> {
    history.iter().find(|entry| entry.event == "Running" && entry.generation == generation && !entry.phases.is_empty())
}

/// How often a wake since then was on another worker than the one before it.
pub(crate) fn moves(history: &[HistoryEntry], since: i64) -> usize {
    let mut moves = 0;
    let mut last: Option<&HistoryEntry> = None;
    for entry in history.iter().filter(|entry| entry.event == "Running") {
        let is_new = last.is_none_or(|last| last.generation != entry.generation);
        if is_new && begins(entry) >= since && last.is_some_and(|last| last.worker != entry.worker) {
            moves += 1;
        }
        last = Some(entry);
    }
    moves
}

/// How often it was put to sleep since then.
pub(crate) fn suspends(history: &[HistoryEntry], since: i64) -> usize {
    history.iter().filter(|entry| entry.event == "Captured" && begins(entry) >= since).count()
}

/// Since 1970, in seconds.
pub(crate) fn begins(entry: &HistoryEntry) -> i64 {
    entry.time.map_or(0, |time| time.seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(generation: u64, frozen: bool) -> ActorState {
        ActorState { generation, frozen, phase: "running".to_owned(), ..ActorState::default() }
    }

    fn ask(wakes: &mut Wakes, generation: u64) {
        let number = wakes.asking("a", 1, false);
        wakes.answered("a", number, Duration::from_millis(5), generation);
    }

    fn found(wakes: &Wakes) -> Vec<Option<Found>> {
        wakes.actor("a").unwrap().asked.iter().map(|asked| asked.found).collect()
    }

    fn entry(event: &str, generation: u64, worker: &str, seconds: i64) -> HistoryEntry {
        let time = Some((std::time::UNIX_EPOCH + Duration::from_secs(seconds.unsigned_abs())).into());
        HistoryEntry { event: event.to_owned(), generation, worker: worker.to_owned(), time, ..HistoryEntry::default() }
    }

    #[test]
    fn a_thaw_belongs_to_the_first_request_after_the_freeze() {
        let mut wakes = Wakes::default();
        wakes.changed("a", state(1, false));
        ask(&mut wakes, 1);
        wakes.changed("a", state(1, true));
        ask(&mut wakes, 1);
        ask(&mut wakes, 1);
        wakes.changed("a", state(1, false));
        assert_eq!(found(&wakes), [Some(Found::Awake), Some(Found::Frozen), None]);
        assert_eq!(wakes.actor("a").unwrap().freezes, 1);
    }

    #[test]
    fn a_thaw_that_is_told_before_the_answer_belongs_to_the_request_under_way() {
        let mut wakes = Wakes::default();
        wakes.changed("a", state(1, true));
        let number = wakes.asking("a", 1, false);
        wakes.changed("a", state(1, false));
        wakes.answered("a", number, Duration::from_millis(5), 1);
        assert_eq!(found(&wakes), [Some(Found::Frozen)]);
    }

    #[test]
    fn a_newer_generation_in_the_answer_is_a_wake_from_a_snapshot() {
        let mut wakes = Wakes::default();
        wakes.changed("a", state(4, true));
        ask(&mut wakes, 5);
        // A freeze of the generation before, forgotten with it, is no thaw of this one.
        wakes.changed("a", state(5, false));
        ask(&mut wakes, 5);
        ask(&mut wakes, 6);
        assert_eq!(found(&wakes), [Some(Found::Asleep(5)), Some(Found::Awake), Some(Found::Asleep(6))]);
    }

    #[test]
    fn the_history_tells_first_starts_from_restores() {
        let mut history = vec![entry("Created", 0, "", 1), entry("Running", 1, "w-0", 1), entry("Lost", 1, "w-0", 2)];
        assert_eq!(origin(&history, 2), Kind::FirstStart, "it never was saved");
        history.push(entry("Captured", 2, "w-0", 3));
        assert_eq!(origin(&history, 2), Kind::FirstStart);
        assert_eq!(origin(&history, 3), Kind::Restore);
        history.remove(0);
        assert_eq!(origin(&history, 2), Kind::Restore, "its beginning is forgotten, so it is old");
    }

    #[test]
    fn only_what_happened_since_is_counted_and_a_first_worker_is_no_move() {
        let history = [
            entry("Running", 1, "w-0", 1),
            entry("Captured", 1, "w-0", 2),
            entry("Running", 2, "w-1", 3),
            entry("Running", 2, "w-1", 4),
            entry("Captured", 2, "w-1", 5),
            entry("Running", 3, "w-1", 6),
            entry("Captured", 3, "w-1", 7),
            entry("Running", 4, "w-0", 8),
        ];
        assert_eq!([0, 4, 9].map(|since| moves(&history, since)), [2, 1, 0]);
        assert_eq!([0, 5, 9].map(|since| suspends(&history, since)), [3, 2, 0]);
    }
}
