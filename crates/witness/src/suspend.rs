//! What an acknowledged suspend covers, as far as those who asked for it can know.
//!
//! It covers what was answered before it was asked for. What the system says of it is no evidence: one that acknowledges what
//! it has just lost names an older generation, and all would seem well. So it counts for the newest generation that has
//! answered, unless the actor's history tells that this one was lost by something else than the save that is acknowledged. That much
//! of what the system says is believed: one that makes up a loss in its history is not found out here.

use std::collections::BTreeMap;

/// What an actor's history tells that matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// A client's suspend begins to put it to rest.
    Begun,
    /// What was begun is durable, or was called off.
    Ended,
    /// It goes on from an older snapshot.
    Lost,
    Other,
}

impl Told {
    /// As the system's history words it.
    pub fn read(event: &str, detail: &str) -> Self {
        match event {
            "Suspending" if detail == "asked for" => Self::Begun,
            "Durable" | "Kept" => Self::Ended,
            // A wake may have answered before it is known that it failed after all.
            "Lost" | "Crashed" | "FellBack" | "Unstuck" | "ResumeFailed" | "Restored" => Self::Lost,
            _ => Self::Other,
        }
    }
}

/// One entry of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    pub generation: u64,
    pub told: Told,
    /// Written after the suspend was asked for.
    pub since: bool,
}

/// Whether an acknowledged suspend covers the generation that had answered last when it was asked for. `alone`: nobody else
/// can have begun a suspend meanwhile.
pub fn covers(answered: u64, history: &[Line], alone: bool) -> bool {
    // A history that begins later does not tell what became of it.
    if history.first().is_none_or(|first| first.generation > answered) {
        return false;
    }
    let mut ours = None;
    for line in history {
        match line.told {
            Told::Begun if alone && line.since => ours = Some(line.generation),
            Told::Ended => ours = None,
            // Lost by the save itself: whoever acknowledges that says what is not so.
            Told::Lost if ours == Some(line.generation) => ours = None,
            Told::Lost if line.generation >= answered => return false,
            _ => {}
        }
    }
    true
}

/// Who asks for suspends, and for how long one of them may begin to put the actor to rest.
#[derive(Debug, Default)]
pub struct Asks(BTreeMap<String, Vec<(u64, u64)>>);

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    actor: String,
    index: usize,
}

impl Asks {
    pub fn begin(&mut self, actor: &str, now: u64) -> Ask {
        let asks = self.0.entry(actor.to_owned()).or_default();
        asks.push((now, u64::MAX));
        Ask { actor: actor.to_owned(), index: asks.len() - 1 }
    }

    /// Nothing begins because of it after this time.
    pub fn over(&mut self, ask: &Ask, until: u64) {
        if let Some((_, end)) = self.0.get_mut(&ask.actor).and_then(|asks| asks.get_mut(ask.index)) {
            *end = until;
        }
    }

    /// Whether nobody else asked while this one did, until now.
    pub fn is_alone(&self, ask: &Ask, now: u64) -> bool {
        let asks = self.0.get(&ask.actor).map(Vec::as_slice).unwrap_or_default();
        let Some(&(begun, _)) = asks.get(ask.index) else { return false };
        let meanwhile = |&(other, until): &(u64, u64)| other <= now && until >= begun;
        asks.iter().enumerate().all(|(index, other)| index == ask.index || !meanwhile(other))
    }
}
