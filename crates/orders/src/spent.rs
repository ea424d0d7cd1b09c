//! What must not be tried again.

use ate_name::{ActorUid, Generation};

use crate::Recent;

/// The newest generation of each actor that had its try here: an order of that or an older one comes late, or twice.
#[derive(Debug, Default)]
pub struct Spent(Recent<ActorUid, Generation>);

impl Spent {
    /// This generation of the actor had its try, and so had all before it.
    pub fn add(&mut self, actor: ActorUid, generation: Generation) {
        let newest = self.0.get(&actor).map_or(generation, |known| generation.max(*known));
        self.0.insert(actor, newest);
    }

    pub fn contains(&self, actor: ActorUid, generation: Generation) -> bool {
        self.0.get(&actor).is_some_and(|newest| *newest >= generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_generation_does_not_take_the_place_of_a_newer_one() {
        let actor = ActorUid::from_random([1; 16]);
        let mut spent = Spent::default();
        spent.add(actor, Generation::new(5));
        spent.add(actor, Generation::new(3));
        assert!(spent.contains(actor, Generation::new(5)));
        assert!(!spent.contains(actor, Generation::new(6)));
    }
}
