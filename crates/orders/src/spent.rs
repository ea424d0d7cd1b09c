//! What must not be tried again.

use std::collections::HashMap;

use ate_name::{ActorUid, Generation};

/// The last so many actors are remembered, and up to as many before them. An order is late by seconds; this many do not come
/// and go within them.
const REMEMBERED: usize = 10_000;

/// The newest generation of each actor that had its try here: an order of that or an older one comes late, or twice.
#[derive(Debug, Default)]
pub struct Spent {
    newer: HashMap<ActorUid, Generation>,
    /// Forgotten all at once when those after them are as many as are remembered.
    older: HashMap<ActorUid, Generation>,
}

impl Spent {
    /// This generation of the actor had its try, and so had all before it.
    pub fn add(&mut self, actor: ActorUid, generation: Generation) {
        let newest = self.newest(actor).map_or(generation, |known| known.max(generation));
        if self.newer.len() >= REMEMBERED && !self.newer.contains_key(&actor) {
            self.older = std::mem::take(&mut self.newer);
        }
        self.newer.insert(actor, newest);
    }

    pub fn contains(&self, actor: ActorUid, generation: Generation) -> bool {
        self.newest(actor).is_some_and(|newest| newest >= generation)
    }

    fn newest(&self, actor: ActorUid) -> Option<Generation> {
        self.newer.get(&actor).or_else(|| self.older.get(&actor)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn actor(number: usize) -> ActorUid {
        ActorUid::from_random((number as u128).to_be_bytes())
    }

    const FIRST: Generation = Generation::new(1);

    #[test]
    fn the_last_ones_are_remembered_however_many_come() {
        let mut spent = Spent::default();
        for number in 0..5 * REMEMBERED / 2 {
            spent.add(actor(number), FIRST);
            let since = (number + 1).saturating_sub(REMEMBERED);
            assert!(spent.contains(actor(number), FIRST) && spent.contains(actor(since), FIRST), "{number}");
        }
        assert!(spent.newer.len() + spent.older.len() <= 2 * REMEMBERED);
        assert!(!spent.contains(actor(0), FIRST), "not for ever");
    }

    #[test]
    fn an_older_generation_does_not_take_the_place_of_a_newer_one() {
        let mut spent = Spent::default();
        spent.add(actor(0), Generation::new(5));
        (1..=REMEMBERED).for_each(|number| spent.add(actor(number), FIRST));
        spent.add(actor(0), Generation::new(3));
        assert!(spent.contains(actor(0), Generation::new(5)));
        assert!(!spent.contains(actor(0), Generation::new(6)));
    }
}
