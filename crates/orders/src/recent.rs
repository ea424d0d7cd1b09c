use std::collections::HashMap;
use std::hash::Hash;

/// An order is late by seconds; this many do not come and go within them.
const REMEMBERED: usize = 10_000;

/// The last so many of those that were added, and up to as many before them.
#[derive(Debug)]
pub struct Recent<K, V = ()> {
    newer: HashMap<K, V>,
    /// Forgotten all at once when those after them are as many as are remembered.
    older: HashMap<K, V>,
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self { newer: HashMap::new(), older: HashMap::new() }
    }
}

impl<K: Eq + Hash, V> Recent<K, V> {
    pub fn insert(&mut self, key: K, value: V) {
        if self.newer.len() >= REMEMBERED && !self.newer.contains_key(&key) {
            self.older = std::mem::take(&mut self.newer);
        }
        self.newer.insert(key, value);
    }

    pub fn get(&self, key: &K) -> Option<&V> {
        self.newer.get(key).or_else(|| self.older.get(key))
    }

    pub fn contains(&self, key: &K) -> bool {
        self.get(key).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_remembered_however_many_come() {
        let mut recent = Recent::default();
        for number in 0..5 * REMEMBERED / 2 {
            recent.insert(number, ());
            let since = (number + 1).saturating_sub(REMEMBERED);
            assert!(recent.contains(&number) && recent.contains(&since), "{number}");
        }
        assert!(recent.newer.len() + recent.older.len() <= 2 * REMEMBERED);
        assert!(!recent.contains(&0), "not for ever");
    }

    #[test]
    fn what_was_added_last_counts() {
        let mut recent = Recent::default();
        recent.insert(0, "old");
        (1..=REMEMBERED).for_each(|number| recent.insert(number, "other"));
        recent.insert(0, "new");
        assert_eq!(recent.get(&0), Some(&"new"));
    }
}
