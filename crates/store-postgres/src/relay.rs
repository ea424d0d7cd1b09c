use std::time::Duration;

use ate_store::{Event, Fault, Feed, Revision};
use tokio::sync::watch;

/// The one gate to the feed. Writer and follower both bring commits here, often the same ones; each passes once, in order.
#[derive(Debug)]
pub(crate) struct Relay {
    feed: Feed,
    /// Everything up to here has been shown, or skipped. Its lock is what puts the two in order.
    seen: watch::Sender<Revision>,
}

impl Relay {
    pub(crate) fn new(feed: Feed, start: Revision) -> Self {
        Self { feed, seen: watch::Sender::new(start) }
    }

    pub(crate) fn feed(&self) -> &Feed {
        &self.feed
    }

    pub(crate) fn seen(&self) -> Revision {
        *self.seen.borrow()
    }

    /// Shows `events`, which are all that happened after `from` up to `upto`, as far as they are new. `false` if something
    /// before them is missing.
    pub(crate) fn publish(&self, from: Revision, upto: Revision, mut events: Vec<Event>) -> bool {
        let mut connected = true;
        self.seen.send_if_modified(|seen| {
            connected = from <= *seen;
            if !connected || upto <= *seen {
                return false;
            }
            events.retain(|event| event.revision > *seen);
            self.feed.publish(events);
            *seen = upto;
            true
        });
        connected
    }

    /// Goes on after `revision` without what was before it: watchers that are behind end.
    pub(crate) fn skip_to(&self, revision: Revision) {
        self.seen.send_if_modified(|seen| {
            if revision <= *seen {
                return false;
            }
            self.feed.skip_to(revision);
            *seen = revision;
            true
        });
    }

    /// Waits until `revision` has been shown.
    pub(crate) async fn reach(&self, revision: Revision, patience: Duration) -> Result<(), Fault> {
        let mut seen = self.seen.subscribe();
        let reached = tokio::time::timeout(patience, seen.wait_for(|seen| *seen >= revision)).await;
        match reached {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Fault::Unavailable { reason: format!("the feed has not reached revision {revision}") }),
        }
    }
}

#[cfg(test)]
mod tests {
    use ate_store::{FeedLimits, Key, Kind, Mutation, Prefix, WatchError};
    use futures::{FutureExt, StreamExt};

    use super::*;

    fn events(revisions: impl IntoIterator<Item = u64>) -> Vec<Event> {
        let key = Key::new(Kind::Actor, ["a"]).expect("well formed");
        let event = |at| Event { revision: Revision(at), mutations: vec![Mutation::Deleted(key.clone())] };
        revisions.into_iter().map(event).collect()
    }

    #[test]
    fn each_commit_passes_once_and_in_order_whoever_brings_it() {
        let relay = Relay::new(Feed::new(Revision(5), FeedLimits::default()), Revision(5));
        let mut watch = relay.feed().watch(&[Prefix::all(Kind::Actor)], Revision(5), Revision(5)).expect("starts");
        let mut shown = || std::iter::from_fn(|| watch.next().now_or_never().flatten()).collect::<Vec<_>>();
        let shows = |revisions: &[u64]| events(revisions.iter().copied()).into_iter().map(Ok).collect::<Vec<_>>();
        assert!(!relay.publish(Revision(6), Revision(7), events([7])), "revision 6 is missing");
        assert_eq!(shown(), shows(&[]));
        assert!(relay.publish(Revision(5), Revision(7), events([6, 7])));
        assert!(relay.publish(Revision(6), Revision(7), events([7])), "known already");
        assert!(relay.publish(Revision(6), Revision(9), events([7, 8, 9])), "known in part");
        assert_eq!(shown(), shows(&[6, 7, 8, 9]));
        assert!(relay.publish(Revision(9), Revision(10), vec![]), "a commit that changed nothing");
        relay.skip_to(Revision(8));
        assert!(relay.publish(Revision(10), Revision(11), events([11])));
        assert_eq!(shown(), shows(&[11]));
        relay.skip_to(Revision(20));
        let lagged = WatchError::Lagged { seen: Revision(11), floor: Revision(20) };
        assert_eq!(shown(), [Err(lagged)]);
    }
}
