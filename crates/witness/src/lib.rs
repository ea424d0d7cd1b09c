//! What clients saw of actors, and whether it can be so.
//!
//! Every client writes down when it asked, when it was answered and what the answer said: the generation that gave it, a
//! nonce that each launch draws anew, one that is in memory and survives sleep, and a count that each request raises by one. [`examine`] then looks for an
//! explanation: one activation at a time, each standing on a snapshot of an earlier one, none older than the last suspend
//! that was acknowledged. It knows nothing of how the system works, so it believes nothing but what clients saw.
//!
//! ```text
//!   time ─────────────────────────────────────────────────────────▶
//!   a  ├─asked── 1 ─┤             generation 7, counts 1, 2
//!   b      ├──── 2 ──────┤        (overlapping requests may be counted in either order)
//!   c                      ├ suspend ┤   acknowledged: whatever was answered before it was asked for is safe
//!   d                                  ├── 3 ─┤   generation 8: must be above 2
//! ```

mod suspend;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use suspend::{Ask, Asks, Line, Told, covers};

/// One thing that a client did and how it ended. Times are of one clock, in any unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    pub actor: String,
    pub begun: u64,
    pub ended: u64,
    pub what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// A request was counted.
    Answered { generation: u64, launch: u64, nonce: u64, count: u64 },
    /// A request that got no answer: it may have been counted, once, or not.
    Unanswered,
    /// A suspend that covers this generation was acknowledged as durable: see [`covers`].
    Suspended { generation: u64 },
    /// A restart was asked for: its memory begins anew, some time from then on. Once that is `done` no more comes of it.
    Restarted { done: bool },
}

/// What cannot be explained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contradiction {
    pub actor: String,
    pub rule: Rule,
    /// What it is seen by: the earlier observation and the one that does not go with it.
    pub by: Box<(Seen, Seen)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// One generation has one memory.
    OneMemory,
    /// No request is counted twice, and no count is given twice.
    CountedOnce,
    /// Within a generation, what was answered before a request began has a smaller count.
    InOrder,
    /// Once a generation has answered, no older one answers a request that begins later.
    OneAtATime,
    /// Once a suspend of a generation was acknowledged, it answers no request that begins later.
    OverWhenSuspended,
    /// A generation stands on at least what an acknowledged suspend had.
    NothingLost,
    /// And on its memory, unless somebody restarts it.
    MemoryKept,
    /// Nobody counts more than was asked.
    NothingInvented,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneMemory => "two memories answered for one generation",
            Self::CountedOnce => "one count was given to two requests",
            Self::InOrder => "a request that began later was counted earlier",
            Self::OneAtATime => "an older generation answered after a newer one had",
            Self::OverWhenSuspended => "a generation answered after its suspend was acknowledged",
            Self::NothingLost => "what an acknowledged suspend had is gone",
            Self::MemoryKept => "the memory that an acknowledged suspend had is gone",
            Self::NothingInvented => "more was counted than was asked for",
        })
    }
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (one, other) = &*self.by;
        write!(f, "actor {}: {}\n  {one}\n  {other}", self.actor, self.rule)
    }
}

impl std::error::Error for Contradiction {}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "from {} to {}: ", self.begun, self.ended)?;
        match self.what {
            What::Answered { generation, launch, nonce, count } => {
                write!(f, "count {count} by generation {generation} (launch {launch:x}, memory {nonce:x})")
            }
            What::Unanswered => f.write_str("no answer"),
            What::Suspended { generation } => write!(f, "suspend of generation {generation} acknowledged"),
            What::Restarted { done: true } => f.write_str("restarted"),
            What::Restarted { done: false } => f.write_str("restart asked for"),
        }
    }
}

/// How much was looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Examined {
    pub actors: usize,
    pub answers: usize,
    pub unanswered: usize,
    pub suspends: usize,
    pub generations: usize,
}

/// Looks for one explanation of all that was seen; tells the first thing that has none.
pub fn examine(seen: &[Seen]) -> Result<Examined, Contradiction> {
    let mut actors = BTreeMap::<&str, Story<'_>>::new();
    for one in seen {
        actors.entry(&one.actor).or_default().take(one);
    }
    let mut examined = Examined { actors: actors.len(), ..Examined::default() };
    for story in actors.values() {
        story.examine()?;
        examined.answers += story.generations.values().map(Vec::len).sum::<usize>();
        examined.unanswered += story.unanswered.len();
        examined.suspends += story.suspends.len();
        examined.generations += story.generations.len();
    }
    Ok(examined)
}

#[derive(Clone, Copy)]
struct Answer<'a> {
    seen: &'a Seen,
    launch: u64,
    nonce: u64,
    count: u64,
}

#[derive(Default)]
struct Story<'a> {
    generations: BTreeMap<u64, Vec<Answer<'a>>>,
    unanswered: Vec<&'a Seen>,
    suspends: Vec<(&'a Seen, u64)>,
    restarts: Vec<(&'a Seen, bool)>,
}

impl<'a> Story<'a> {
    fn take(&mut self, seen: &'a Seen) {
        match seen.what {
            What::Answered { generation, launch, nonce, count } => {
                self.generations.entry(generation).or_default().push(Answer { seen, launch, nonce, count });
            }
            What::Unanswered => self.unanswered.push(seen),
            What::Suspended { generation } => self.suspends.push((seen, generation)),
            What::Restarted { done } => self.restarts.push((seen, done)),
        }
    }

    fn examine(&self) -> Result<(), Contradiction> {
        for answers in self.generations.values() {
            within(answers)?;
        }
        self.one_at_a_time()?;
        self.over_when_suspended()?;
        self.nothing_lost()?;
        self.memory_kept()?;
        self.nothing_invented()?;
        self.nothing_repeated()?;
        self.nothing_brought_back()
    }

    fn one_at_a_time(&self) -> Result<(), Contradiction> {
        let mut newer: Option<&Seen> = None;
        for answers in self.generations.values().rev() {
            let last = answers.iter().map(|answer| answer.seen).max_by_key(|seen| seen.begun);
            if let (Some(newer), Some(last)) = (newer, last)
                && newer.ended < last.begun
            {
                return Err(contradiction(Rule::OneAtATime, newer, last));
            }
            let first = answers.iter().map(|answer| answer.seen).min_by_key(|seen| seen.ended);
            newer = newer.into_iter().chain(first).min_by_key(|seen| seen.ended);
        }
        Ok(())
    }

    fn over_when_suspended(&self) -> Result<(), Contradiction> {
        for &(suspend, generation) in &self.suspends {
            let mut over = self.generations.range(..=generation).flat_map(|(_, answers)| answers);
            if let Some(late) = over.find(|answer| answer.seen.begun > suspend.ended) {
                return Err(contradiction(Rule::OverWhenSuspended, suspend, late.seen));
            }
        }
        Ok(())
    }

    fn nothing_lost(&self) -> Result<(), Contradiction> {
        for &(suspend, generation) in &self.suspends {
            let before = |answer: &&Answer<'_>| answer.seen.ended < suspend.begun;
            let here = self.generations.get(&generation).into_iter().flatten();
            let Some(safe) = here.filter(before).max_by_key(|answer| answer.count) else { continue };
            let later = self.generations.range(generation + 1..).flat_map(|(_, answers)| answers);
            if let Some(less) = later.into_iter().find(|answer| answer.count <= safe.count) {
                return Err(contradiction(Rule::NothingLost, safe.seen, less.seen));
            }
        }
        Ok(())
    }

    /// Nobody falls back behind an acknowledged suspend, so all that follow have its memory until a restart.
    fn memory_kept(&self) -> Result<(), Contradiction> {
        for &(_, generation) in &self.suspends {
            let here = self.generations.get(&generation).into_iter().flatten();
            let Some(kept) = here.max_by_key(|answer| answer.seen.begun) else { continue };
            // One that was done before this memory answered is in it.
            let open = self.restarts.iter().filter(|(restart, done)| !done || restart.ended >= kept.seen.begun);
            let since = open.map(|(restart, _)| restart.begun).min().unwrap_or(u64::MAX);
            let mut later = self.generations.range(generation + 1..).flat_map(|(_, answers)| answers);
            if let Some(anew) = later.find(|answer| answer.nonce != kept.nonce && answer.seen.ended < since) {
                return Err(contradiction(Rule::MemoryKept, kept.seen, anew.seen));
            }
        }
        Ok(())
    }

    fn nothing_invented(&self) -> Result<(), Contradiction> {
        let answers = self.generations.values().flatten();
        let mut begun: Vec<u64> = answers
            .clone()
            .map(|answer| answer.seen)
            .chain(self.unanswered.iter().copied())
            .map(|seen| seen.begun)
            .collect();
        begun.sort_unstable();
        for answer in answers {
            let asked = begun.partition_point(|&begun| begun <= answer.seen.ended);
            if answer.count > asked as u64 {
                return Err(contradiction(Rule::NothingInvented, answer.seen, answer.seen));
            }
        }
        Ok(())
    }

    /// What a generation counted between its answers was asked for by those who had none.
    fn nothing_repeated(&self) -> Result<(), Contradiction> {
        for answers in self.generations.values() {
            let mut answers = answers.clone();
            answers.sort_by_key(|answer| answer.count);
            let (Some(first), Some(last)) = (answers.first(), answers.last()) else { continue };
            let between = last.count - first.count + 1 - answers.len() as u64;
            if between > self.unanswered_until(last.seen.ended) {
                return Err(contradiction(Rule::NothingInvented, first.seen, last.seen));
            }
        }
        Ok(())
    }

    /// What follows an acknowledged suspend stands on it, and not on something else that had counted further.
    fn nothing_brought_back(&self) -> Result<(), Contradiction> {
        for &(_, generation) in &self.suspends {
            let here = self.generations.get(&generation).into_iter().flatten();
            let Some(most) = here.max_by_key(|answer| answer.count) else { continue };
            let later: Vec<_> = self.generations.range(generation + 1..).flat_map(|(_, answers)| answers).collect();
            for answer in &later {
                let until = answer.seen.ended;
                let answered = later.iter().filter(|other| other.seen.begun <= until).count() as u64;
                if answer.count > most.count + answered + self.unanswered_until(until) {
                    return Err(contradiction(Rule::NothingInvented, most.seen, answer.seen));
                }
            }
        }
        Ok(())
    }

    fn unanswered_until(&self, until: u64) -> u64 {
        self.unanswered.iter().filter(|seen| seen.begun <= until).count() as u64
    }
}

/// What must hold among the answers of one generation.
fn within(answers: &[Answer<'_>]) -> Result<(), Contradiction> {
    let mut answers = answers.to_vec();
    answers.sort_by_key(|answer| answer.count);
    let mut latest: Option<Answer<'_>> = None;
    for pair in answers.windows(2) {
        if (pair[0].launch, pair[0].nonce) != (pair[1].launch, pair[1].nonce) {
            return Err(contradiction(Rule::OneMemory, pair[0].seen, pair[1].seen));
        }
        if pair[0].count == pair[1].count {
            return Err(contradiction(Rule::CountedOnce, pair[0].seen, pair[1].seen));
        }
    }
    for answer in answers {
        if let Some(latest) = latest
            && answer.seen.ended < latest.seen.begun
        {
            return Err(contradiction(Rule::InOrder, answer.seen, latest.seen));
        }
        if latest.is_none_or(|latest| latest.seen.begun < answer.seen.begun) {
            latest = Some(answer);
        }
    }
    Ok(())
}

fn contradiction(rule: Rule, one: &Seen, other: &Seen) -> Contradiction {
    Contradiction { actor: one.actor.clone(), rule, by: Box::new((one.clone(), other.clone())) }
}

#[cfg(test)]
mod tests;
