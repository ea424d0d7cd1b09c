//! Actors as they are, then as they change, for whoever watches them.
//!
//! ```text
//!   list     page ─ page ─ page ─ Listed │ news ───────────▶
//!   feed        what changed behind the list is told, what is ahead of it will be listed
//!   version  0      0      0      where the feed is        never falls
//! ```
//!
//! The feed is taken in between pages: however many actors there are, it does not run away from the list.

use std::collections::VecDeque;
use std::sync::Arc;

use ate_actor::Actor;
use ate_name::{ActorKey, AtespaceName};
use ate_store::{Event, Kind, Mutation, Prefix, Revision, Watch as Feed, WatchError};
use futures::{FutureExt as _, Stream, StreamExt};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::actors::{MAX_PAGE, Versioned};
use crate::follow::actor_name;
use crate::records::{Read, actors_of};
use crate::{Code, Control, ControlError};

/// One message of a watch.
#[derive(Clone, Debug)]
pub struct ActorChange {
    /// Where to go on after it; zero within the list, which cannot be gone on with halfway.
    pub revision: u64,
    pub change: Changed,
}

#[derive(Clone, Debug)]
pub enum Changed {
    Put(Box<Versioned>),
    Deleted(ActorKey),
    /// Everything there was has been told; from here on it is news.
    Listed,
}

impl Changed {
    /// `None`: it cannot be read, as a newer build may write it. That is in the log, and keeps nobody from hearing of the rest.
    fn of(mutation: &Mutation) -> Option<Self> {
        match mutation {
            Mutation::Put(record) => Some(Self::put(Read::<Actor>::decode(record.clone()).ok()?)),
            Mutation::Deleted(key) => actor_name(key).map(Self::Deleted),
        }
    }

    fn put(read: Read<Actor>) -> Self {
        Self::Put(Box::new(read.into()))
    }
}

/// How far a watch has come.
struct Watch {
    control: Arc<Control>,
    prefix: Prefix,
    atespace: Option<AtespaceName>,
    feed: futures::stream::Fuse<Feed>,
    /// Of the feed everything up to here was taken in.
    at: Revision,
    listing: Listing,
    stirred: broadcast::Receiver<ActorKey>,
    waiting: VecDeque<ActorChange>,
}

enum Listing {
    /// Everything up to this path was listed.
    After(Option<String>),
    Done,
}

impl Control {
    /// Actors as they are, then as they change. `after` a revision that a change was seen at: only what came later.
    pub async fn watch_actors(
        self: &Arc<Self>,
        atespace: Option<&AtespaceName>,
        after: Option<u64>,
    ) -> Result<impl Stream<Item = Result<ActorChange, ControlError>> + Send + use<>, ControlError> {
        let prefix = atespace.map_or_else(|| Prefix::all(Kind::Actor), actors_of);
        let (at, listing) = match after {
            Some(revision) => (Revision(revision), Listing::Done),
            None => (self.store.revision().await?, Listing::After(None)),
        };
        let feed = self.store.watch(std::slice::from_ref(&prefix), at).await.map_err(ended)?;
        let watch = Watch {
            control: Arc::clone(self),
            prefix,
            atespace: atespace.cloned(),
            feed: feed.fuse(),
            at,
            listing,
            stirred: self.stirred.subscribe(),
            waiting: VecDeque::new(),
        };
        Ok(futures::stream::unfold(Some(watch), async |watch| {
            let mut watch = watch?;
            match watch.next().await {
                Ok(Some(change)) => Some((Ok(change), Some(watch))),
                Ok(None) => None,
                // It is over with an error.
                Err(error) => Some((Err(error), None)),
            }
        }))
    }
}

impl Watch {
    async fn next(&mut self) -> Result<Option<ActorChange>, ControlError> {
        loop {
            if let Some(change) = self.waiting.pop_front() {
                return Ok(Some(change));
            }
            if let Listing::After(path) = &self.listing {
                let path = path.clone();
                self.catch_up(path.as_deref())?;
                self.list(path).await?;
                continue;
            }
            tokio::select! {
                biased;
                event = self.feed.next() => match event {
                    Some(event) => self.take(event.map_err(ended)?, |_| true, true),
                    None => return Ok(None),
                },
                stirred = self.stirred.recv() => match stirred {
                    Ok(key) => self.look_at(&key).await,
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return Ok(None),
                },
            }
        }
    }

    /// Takes in what the feed has by now: what is ahead of the list will be listed as it is then.
    fn catch_up(&mut self, listed: Option<&str>) -> Result<(), ControlError> {
        while let Some(Some(event)) = self.feed.next().now_or_never() {
            self.take(event.map_err(ended)?, |path| listed.is_some_and(|listed| path <= listed), false);
        }
        Ok(())
    }

    fn take(&mut self, event: Event, wanted: impl Fn(&str) -> bool, is_news: bool) {
        self.at = event.revision;
        let revision = if is_news { event.revision.0 } else { 0 };
        let wanted = event.mutations.iter().filter(|mutation| match mutation {
            Mutation::Put(record) => wanted(record.key.path()),
            Mutation::Deleted(key) => wanted(key.path()),
        });
        self.waiting.extend(wanted.filter_map(Changed::of).map(|change| ActorChange { revision, change }));
    }

    async fn list(&mut self, after: Option<String>) -> Result<(), ControlError> {
        let page = self.control.store.list(&self.prefix, after.as_deref(), MAX_PAGE).await?;
        self.listing = match page.records.last().filter(|_| page.more) {
            Some(last) => Listing::After(Some(last.key.path().to_owned())),
            None => Listing::Done,
        };
        let readable = page.records.into_iter().filter_map(|record| Read::<Actor>::decode(record).ok());
        self.waiting.extend(readable.map(|read| ActorChange { revision: 0, change: Changed::put(read) }));
        if matches!(self.listing, Listing::Done) {
            self.waiting.push_back(ActorChange { revision: self.at.0, change: Changed::Listed });
        }
        Ok(())
    }

    /// Actors as they are each time they are frozen or thawed. That is no news of the store's, so the version does not move.
    async fn look_at(&mut self, key: &ActorKey) {
        if self.atespace.as_ref().is_some_and(|atespace| *atespace != key.atespace) {
            return;
        }
        if let Ok(read) = self.control.actor(key).await {
            self.waiting.push_back(ActorChange { revision: self.at.0, change: Changed::put(read) });
        }
    }
}

fn ended(error: WatchError) -> ControlError {
    match error {
        WatchError::Fault(fault) => fault.into(),
        error => ControlError::new(Code::OutOfRange, format!("{error}: list again and watch from there")),
    }
}
