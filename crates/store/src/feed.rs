//! The change feed that adapters share: a bounded ring of recent commits, read by any number of watchers.
//!
//! ```text
//!            floor                                  head
//!   forgotten | event  event  event  event  event  event |      publish appends at the head,
//!             ^          ^                    ^                  evicts at the floor, wakes all
//!             |          watcher's cursor     another's
//!             a cursor left of the floor has lost something: Lagged
//! ```
//!
//! A watcher is a cursor, not a queue: however many there are and however slow, a commit costs the same and
//! memory stays what the ring may hold.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, RwLock};

use futures::stream::{BoxStream, StreamExt, unfold};

use crate::{Event, Mutation, Prefix, Revision, Signal, Waiter, WatchError};

/// Events a watcher looks at per turn. It keeps the ring's lock short when a narrow watcher skips over many.
const TURN: usize = 256;

/// How much the ring keeps. Beyond either bound the oldest commits are forgotten.
#[derive(Clone, Copy, Debug)]
pub struct FeedLimits {
    pub events: usize,
    pub bytes: usize,
}

impl Default for FeedLimits {
    /// About five seconds of 2,000 wakes per second: as long as a client needs to reconnect, and memory a laptop has.
    fn default() -> Self {
        Self { events: 32_768, bytes: 32 << 20 }
    }
}

/// Events in commit order; ends with an error when the watcher must list again, without one when the store closes.
pub type Watch = BoxStream<'static, Result<Event, WatchError>>;

#[derive(Debug)]
pub struct Feed {
    ring: Arc<RwLock<Ring>>,
    /// Only wakes watchers, who then look at the ring.
    changed: Signal,
}

#[derive(Debug)]
struct Ring {
    events: VecDeque<Arc<Event>>,
    bytes: usize,
    /// All commits after this one are in the ring, up to the head.
    floor: Revision,
    head: Revision,
    limits: FeedLimits,
    closed: bool,
}

impl Feed {
    /// A feed that knows nothing up to and including `start`.
    pub fn new(start: Revision, limits: FeedLimits) -> Self {
        let ring = Ring { events: VecDeque::new(), bytes: 0, floor: start, head: start, limits, closed: false };
        Self { ring: Arc::new(RwLock::new(ring)), changed: Signal::default() }
    }

    /// Shows durable commits to watchers. The caller publishes in revision order.
    pub fn publish(&self, events: impl IntoIterator<Item = Event>) {
        let mut ring = self.ring.write().unwrap_or_else(PoisonError::into_inner);
        for event in events {
            ring.head = event.revision;
            ring.push(event);
        }
        drop(ring);
        self.changed.raise();
    }

    /// The store went on to `revision` without knowing what happened in between: every watcher behind it is ended.
    pub fn skip_to(&self, revision: Revision) {
        let mut ring = self.ring.write().unwrap_or_else(PoisonError::into_inner);
        if revision <= ring.head {
            return;
        }
        ring.events.clear();
        ring.bytes = 0;
        (ring.floor, ring.head) = (revision, revision);
        drop(ring);
        self.changed.raise();
    }

    /// Watches show what was published and end. Dropping the feed does the same.
    pub fn close(&self) {
        self.ring.write().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.changed.raise();
    }

    /// `current` is the store's revision; it may run ahead of what is published, and a list may have shown it.
    pub fn watch(&self, prefixes: &[Prefix], after: Revision, current: Revision) -> Result<Watch, WatchError> {
        if after > current {
            return Err(WatchError::Ahead { after, current });
        }
        let floor = self.ring.read().unwrap_or_else(PoisonError::into_inner).floor;
        if after < floor {
            return Err(WatchError::Compacted { after, floor });
        }
        let cursor = Cursor {
            ring: self.ring.clone(),
            changed: self.changed.waiter(),
            prefixes: prefixes.to_vec(),
            seen: after,
            ready: VecDeque::new(),
            ended: false,
        };
        Ok(unfold(cursor, |mut cursor| async move { cursor.next().await.map(|item| (item, cursor)) }).boxed())
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.close();
    }
}

impl Ring {
    fn push(&mut self, event: Event) {
        self.bytes += weight(&event);
        self.events.push_back(Arc::new(event));
        while self.events.len() > self.limits.events || self.bytes > self.limits.bytes {
            let Some(oldest) = self.events.pop_front() else { break };
            self.bytes -= weight(&oldest);
            self.floor = oldest.revision;
        }
    }

    fn after(&self, seen: Revision) -> Result<Vec<Arc<Event>>, WatchError> {
        if seen < self.floor {
            return Err(WatchError::Lagged { seen, floor: self.floor });
        }
        let start = self.events.partition_point(|event| event.revision <= seen);
        Ok(self.events.range(start..).take(TURN).cloned().collect())
    }
}

/// Roughly what an event holds in memory.
fn weight(event: &Event) -> usize {
    const OVERHEAD: usize = 128;
    let bytes = |mutation: &Mutation| match mutation {
        Mutation::Put(record) => record.key.path().len() + record.value.len() + OVERHEAD,
        Mutation::Deleted(key) => key.path().len() + OVERHEAD,
    };
    OVERHEAD + event.mutations.iter().map(bytes).sum::<usize>()
}

struct Cursor {
    ring: Arc<RwLock<Ring>>,
    changed: Waiter,
    prefixes: Vec<Prefix>,
    seen: Revision,
    ready: VecDeque<Event>,
    ended: bool,
}

impl Cursor {
    async fn next(&mut self) -> Option<Result<Event, WatchError>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(Ok(event));
            }
            if self.ended {
                return None;
            }
            // Marked as seen before the look, so that a publish after the look wakes the wait below.
            self.changed.mark();
            match self.look() {
                Err(lagged) => {
                    self.ended = true;
                    return Some(Err(lagged));
                }
                Ok((events, _)) if !events.is_empty() => self.take(&events),
                Ok((_, true)) => self.ended = true,
                Ok((_, false)) => self.changed.changed().await,
            }
        }
    }

    /// What comes next, and whether nothing will follow it.
    fn look(&self) -> Result<(Vec<Arc<Event>>, bool), WatchError> {
        let ring = self.ring.read().unwrap_or_else(PoisonError::into_inner);
        Ok((ring.after(self.seen)?, ring.closed))
    }

    fn take(&mut self, events: &[Arc<Event>]) {
        for event in events {
            self.seen = event.revision;
            self.ready.extend(event.below(&self.prefixes));
        }
    }
}
