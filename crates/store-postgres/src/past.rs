//! A watch that begins further back than the feed's ring holds, but not further than the log.
//!
//! ```text
//!   log   | event  event  event  event  event  event |        kept for minutes, in the database
//!   ring                  | event  event  event  event |      kept for seconds, in memory
//!              ^ after        ^ from here on the feed's own watch
//! ```
//!
//! Whoever loads all there is and then watches from where it began takes as long as there is much to load. If the ring alone
//! decided, a replica that takes longer than the ring lasts would begin anew for ever, and follow never.

use std::collections::VecDeque;
use std::sync::Arc;

use ate_store::{Event, Prefix, Revision, Watch, WatchError};
use futures::{StreamExt, stream};

use crate::Shared;
use crate::follower::read_entry;
use crate::reads::Reads;

/// Where such a watch is.
enum At {
    Log(Box<Past>),
    Feed(Watch),
    Ended,
}

pub(crate) struct Past {
    shared: Arc<Shared>,
    reads: Reads,
    prefixes: Vec<Prefix>,
    seen: Revision,
    ready: VecDeque<Event>,
}

impl Past {
    /// Refused with what the feed says if the log does not have it either.
    pub(crate) async fn watch(
        shared: Arc<Shared>,
        reads: Reads,
        prefixes: &[Prefix],
        after: Revision,
        refused: WatchError,
    ) -> Result<Watch, WatchError> {
        let mut past = Self { shared, reads, prefixes: prefixes.to_vec(), seen: after, ready: VecDeque::new() };
        match past.read().await {
            Err(WatchError::Lagged { .. }) => return Err(refused),
            read => read?,
        }
        Ok(stream::unfold(At::Log(Box::new(past)), |mut at| async move {
            loop {
                at = match at {
                    At::Log(past) => match past.next().await {
                        Ok(Next::Event(event, past)) => return Some((Ok(event), At::Log(past))),
                        Ok(Next::Feed(feed)) => At::Feed(feed),
                        Err(ended) => return Some((Err(ended), At::Ended)),
                    },
                    At::Feed(mut feed) => return feed.next().await.map(|item| (item, At::Feed(feed))),
                    At::Ended => return None,
                };
            }
        })
        .boxed())
    }

    async fn next(mut self: Box<Self>) -> Result<Next, WatchError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Next::Event(event, self));
            }
            let relay = &self.shared.relay;
            match relay.feed().watch(&self.prefixes, self.seen, relay.seen()) {
                Ok(feed) => return Ok(Next::Feed(feed)),
                Err(WatchError::Compacted { .. }) => self.read().await?,
                Err(other) => return Err(other),
            }
        }
    }

    /// Takes the next commits from the log, as far as the feed has shown any.
    async fn read(&mut self) -> Result<(), WatchError> {
        self.shared.check()?;
        let upto = self.shared.relay.seen();
        let rows = self.reads.log(&self.shared.statements, self.seen, upto).await?;
        let lagged = |seen, floor| Err(WatchError::Lagged { seen, floor });
        if rows.is_empty() {
            return lagged(self.seen, upto);
        }
        for row in &rows {
            let (entry, event) = read_entry(row)?;
            // Every commit has its row: some were removed meanwhile.
            if entry.revision != self.seen.next() {
                return lagged(self.seen, Revision(entry.revision.0 - 1));
            }
            self.seen = entry.revision;
            self.ready.extend(event.and_then(|event| event.below(&self.prefixes)));
        }
        Ok(())
    }
}

enum Next {
    Event(Event, Box<Past>),
    Feed(Watch),
}
