use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use crate::{
    Change, CommitError, Committed, Event, Fault, Feed, FeedLimits, Key, Kind, Mutation, Page, PageFiller, Prefix,
    Record, Revision, Store, View, Watch, WatchError, judge,
};

/// The reference adapter: sorted maps under one lock. No clock, no thread, no randomness, and its calls never wait,
/// so a simulation on one thread replays exactly. Nothing survives the process.
#[derive(Debug)]
pub struct MemoryStore {
    state: Mutex<State>,
    feed: Feed,
}

#[derive(Debug, Default)]
struct State {
    records: BTreeMap<Kind, BTreeMap<String, Record>>,
    revision: Revision,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new(FeedLimits::default())
    }
}

impl MemoryStore {
    pub fn new(feed: FeedLimits) -> Self {
        Self { state: Mutex::default(), feed: Feed::new(Revision::ZERO, feed) }
    }

    /// Puts what a restore writes in the place of everything; watchers list again.
    pub fn replace(&self, revision: Revision, mutations: &[Mutation]) {
        let mut state = self.state();
        *state = State { revision, ..State::default() };
        mutations.iter().for_each(|mutation| state.apply(mutation));
        self.feed.skip_to(revision);
    }

    /// No code panics while it holds the lock with the state half changed, so a poisoned one is as good as any.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn below<'a>(&'a self, prefix: &'a Prefix, after: Option<&str>) -> impl Iterator<Item = &'a Record> {
        let start = match after {
            Some(after) if after >= prefix.path() => Bound::Excluded(after),
            _ => Bound::Included(prefix.path()),
        };
        let records =
            self.records.get(&prefix.kind()).map(|records| records.range::<str, _>((start, Bound::Unbounded)));
        let records = records.into_iter().flatten().map(|(_, record)| record);
        records.take_while(|record| prefix.contains(&record.key))
    }

    fn apply(&mut self, mutation: &Mutation) {
        let records = self.records.entry(mutation.key().kind()).or_default();
        match mutation {
            Mutation::Put(record) => drop(records.insert(record.key.path().to_owned(), record.clone())),
            Mutation::Deleted(key) => drop(records.remove(key.path())),
        }
    }
}

impl View for State {
    fn record(&self, key: &Key) -> Result<Option<Record>, Fault> {
        Ok(self.records.get(&key.kind()).and_then(|records| records.get(key.path())).cloned())
    }

    fn is_empty(&self, prefix: &Prefix) -> Result<bool, Fault> {
        Ok(self.below(prefix, None).next().is_none())
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn commit(&self, change: Change) -> Result<Committed, CommitError> {
        change.check()?;
        let mut state = self.state();
        let revision = if change.writes.is_empty() { state.revision } else { state.revision.next() };
        let (versions, mutations) = judge(&*state, &change, revision)?;
        state.revision = revision;
        mutations.iter().for_each(|mutation| state.apply(mutation));
        // Under the lock, so that events come in the order of revisions.
        if !mutations.is_empty() {
            self.feed.publish([Event { revision, mutations }]);
        }
        Ok(Committed { revision, versions })
    }

    async fn get(&self, key: &Key) -> Result<Option<Record>, Fault> {
        self.state().record(key)
    }

    async fn list(&self, prefix: &Prefix, after: Option<&str>, limit: usize) -> Result<Page, Fault> {
        let state = self.state();
        let mut filler = PageFiller::new(state.revision, limit);
        // `all` stops at the first record that the page has no room for.
        state.below(prefix, after).all(|record| filler.push(record.clone()));
        Ok(filler.page())
    }

    async fn watch(&self, prefixes: &[Prefix], after: Revision) -> Result<Watch, WatchError> {
        let current = self.state().revision;
        self.feed.watch(prefixes, after, current)
    }

    async fn revision(&self) -> Result<Revision, Fault> {
        Ok(self.state().revision)
    }
}
