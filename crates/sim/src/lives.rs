//! Who was made and who was deleted, as clients know it: nobody else may be gone, and nobody may be somebody else.

use std::collections::{BTreeMap, BTreeSet};

use ate_name::{ActorKey, ActorUid};

/// Of one name.
#[derive(Debug, Default)]
struct Life {
    /// Whoever has this name was made, and nobody has begun to delete it since.
    lives: bool,
    /// How often somebody began to, and how many are at it.
    deletes: u64,
    deleting: usize,
    /// Everybody who was known by it.
    uids: BTreeSet<ActorUid>,
}

#[derive(Debug, Default)]
pub(crate) struct Lives(BTreeMap<ActorKey, Life>);

/// What was known of a name when a call began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    lives: bool,
    deletes: u64,
    deleting: usize,
}

impl Lives {
    pub(crate) fn known(&self, key: &ActorKey) -> Known {
        let life = self.0.get(key);
        life.map_or(Known { lives: false, deletes: 0, deleting: 0 }, |life| Known {
            lives: life.lives,
            deletes: life.deletes,
            deleting: life.deleting,
        })
    }

    /// Made by a call that began when so much was known. `None`: it was there already.
    pub(crate) fn made(&mut self, key: &ActorKey, uid: Option<ActorUid>, then: Known) {
        let now = self.known(key);
        let life = self.0.entry(key.clone()).or_default();
        life.uids.extend(uid);
        // One that was there may be the one that somebody is about to delete.
        let is_it = uid.is_some() || now.deletes == 0;
        life.lives |= is_it && now.deletes == then.deletes && now.deleting == 0 && then.deleting == 0;
    }

    /// Somebody begins to delete it.
    pub(crate) fn deleting(&mut self, key: &ActorKey) {
        let life = self.0.entry(key.clone()).or_default();
        (life.lives, life.deletes, life.deleting) = (false, life.deletes + 1, life.deleting + 1);
    }

    /// They have done so, or not; if they were `refused` it is as it was when that began.
    pub(crate) fn deleted(&mut self, key: &ActorKey, then: Known, refused: bool) {
        let Some(life) = self.0.get_mut(key) else { return };
        life.deleting -= 1;
        life.lives |= refused && then.lives && life.deleting == 0 && life.deletes == then.deletes + 1;
    }

    /// Whether it cannot be that nobody has this name, as a call found that began when so much was known.
    pub(crate) fn is_missed(&self, key: &ActorKey, then: Known) -> bool {
        let now = self.known(key);
        then.lives && now.lives && now.deletes == then.deletes
    }

    /// Whether it cannot be that this one has the name.
    pub(crate) fn is_another(&mut self, key: &ActorKey, uid: ActorUid, then: Known) -> bool {
        let is_missed = self.is_missed(key, then);
        let life = self.0.entry(key.clone()).or_default();
        let known_by_name_only = life.uids.is_empty();
        life.uids.insert(uid) && !known_by_name_only && is_missed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_missed_whom_somebody_may_have_deleted() {
        let (mut lives, key) = (Lives::default(), ActorKey::parse("space", "a").expect("a name"));
        let (one, other) = (ActorUid::from_random([1; 16]), ActorUid::from_random([2; 16]));
        let early = lives.known(&key);
        assert!(!lives.is_missed(&key, early), "it was never made");
        lives.made(&key, Some(one), early);
        let then = lives.known(&key);
        assert!(lives.is_missed(&key, then) && !lives.is_missed(&key, early), "that call may have come too early");
        assert!(!lives.is_another(&key, one, then));
        lives.deleting(&key);
        assert!(!lives.is_missed(&key, then), "it is being deleted");
        lives.deleted(&key, then, true);
        assert!(lives.is_missed(&key, lives.known(&key)), "that was refused");
        assert!(!lives.is_missed(&key, then), "but who knows what a call of before has met");
        let then = lives.known(&key);
        lives.deleting(&key);
        let during = lives.known(&key);
        lives.made(&key, Some(other), during);
        assert!(!lives.is_missed(&key, lives.known(&key)), "whoever deletes may mean this one");
        lives.deleted(&key, then, false);
        assert!(!lives.is_missed(&key, lives.known(&key)), "it may be gone");
        let after = lives.known(&key);
        lives.made(&key, Some(other), after);
        let then = lives.known(&key);
        assert!(lives.is_missed(&key, then));
        assert!(!lives.is_another(&key, one, then), "an answer of long ago");
        assert!(lives.is_another(&key, ActorUid::from_random([3; 16]), then));
    }
}
