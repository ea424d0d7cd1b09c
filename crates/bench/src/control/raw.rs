//! What the store commits by itself: the very changes that wakes have made, once more, without anybody around them.
//!
//! ```text
//!   kept from a burst     actor a: bind, settle    actor b: bind, settle    …
//!   before the clock      read what they are guarded by: actor and worker of each, as they are now
//!   on the clock          bind ─▶ durable ─▶ settle ─▶ durable, so many binds at once, as many settles as there are
//!   after the last burst  actors and workers as they were
//! ```
//! Guards, keys, values and the number of commits are the same; only the revisions that the guards name are those of today.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ate_store::{Change, CommitError, Guard, Key, Kind, MAX_CHANGE_ITEMS, Record, Revision, Store, Write};
use tokio::task::JoinSet;

use super::clock;
use super::metered::Kept;

/// The changes of one actor, one after the other.
struct Chain {
    changes: Vec<Change>,
    /// When each record that is guarded was last written.
    revisions: HashMap<Key, Revision>,
}

pub(crate) struct Replayed {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) commits: usize,
    /// Of values.
    pub(crate) bytes: usize,
    /// Processor time.
    pub(crate) busy: u64,
}

/// `clients`: how many actors at once. `before` gets what is not there yet.
pub(crate) async fn replay(
    store: &Arc<dyn Store>,
    kept: Vec<Kept>,
    clients: usize,
    before: &mut BTreeMap<Key, Record>,
) -> Result<Replayed, CommitError> {
    let chains = prepare(store, kept, before).await?;
    let commits = chains.iter().map(|chain| chain.changes.len()).sum();
    let bytes = chains.iter().flat_map(|chain| &chain.changes).map(Change::bytes).sum();
    let (chains, next) = (Arc::new(chains), Arc::new(AtomicUsize::new(0)));
    let (start, busy) = (clock::now(), clock::busy());
    let mut working = JoinSet::new();
    for _ in 0..clients {
        let (store, chains, next) = (Arc::clone(store), Arc::clone(&chains), Arc::clone(&next));
        working.spawn(async move {
            let mut settling = JoinSet::new();
            while let Some(at) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|at| *at < chains.len()) {
                let mut revisions = chains[at].revisions.clone();
                commit(&store, &chains[at].changes[0], &mut revisions).await?;
                // As the control plane does it: nobody waits for what follows.
                let (store, chains) = (Arc::clone(&store), Arc::clone(&chains));
                settling.spawn(async move {
                    for change in &chains[at].changes[1..] {
                        commit(&store, change, &mut revisions).await?;
                    }
                    Ok::<_, CommitError>(())
                });
            }
            settling.join_all().await.into_iter().collect::<Result<(), CommitError>>()
        });
    }
    working.join_all().await.into_iter().collect::<Result<(), CommitError>>()?;
    let (end, busy) = (clock::now(), clock::busy() - busy);
    Ok(Replayed { start, end, commits, bytes, busy })
}

/// In the order in which the actors were first changed.
async fn prepare(
    store: &Arc<dyn Store>,
    kept: Vec<Kept>,
    before: &mut BTreeMap<Key, Record>,
) -> Result<Vec<Chain>, CommitError> {
    let (mut chains, mut by_actor) = (Vec::<Chain>::new(), HashMap::<Key, usize>::new());
    for Kept { change, .. } in kept {
        if let Some(actor) = change.writes.iter().map(Write::key).find(|key| key.kind() == Kind::Actor) {
            let at = *by_actor.entry(actor.clone()).or_insert(chains.len());
            if at == chains.len() {
                chains.push(Chain { changes: Vec::new(), revisions: HashMap::new() });
            }
            chains[at].changes.push(change);
        }
    }
    for Chain { changes, revisions } in &mut chains {
        for key in changes.iter().flat_map(|change| &change.guards).filter_map(guarded) {
            if !revisions.contains_key(key)
                && let Some(record) = store.get(key).await?
            {
                revisions.insert(key.clone(), record.revision);
                before.entry(key.clone()).or_insert(record);
            }
        }
    }
    Ok(chains)
}

fn guarded(guard: &Guard) -> Option<&Key> {
    match guard {
        Guard::Revision(key, _) => Some(key),
        _ => None,
    }
}

async fn commit(
    store: &Arc<dyn Store>,
    change: &Change,
    revisions: &mut HashMap<Key, Revision>,
) -> Result<(), CommitError> {
    let guards = change.guards.iter().map(|guard| match guarded(guard) {
        Some(key) => Guard::Revision(key.clone(), revisions.get(key).copied().unwrap_or_default()),
        None => guard.clone(),
    });
    let change = Change { guards: guards.collect(), writes: change.writes.clone() };
    let written: Vec<Key> = change.writes.iter().map(|write| write.key().clone()).collect();
    let committed = store.commit(change).await?;
    for key in written {
        if let Some(revision) = revisions.get_mut(&key) {
            *revision = committed.revision;
        }
    }
    Ok(())
}

pub(crate) async fn put_back(store: &Arc<dyn Store>, before: BTreeMap<Key, Record>) -> Result<(), CommitError> {
    let before: Vec<Record> = before.into_values().collect();
    for records in before.chunks(MAX_CHANGE_ITEMS) {
        let change =
            records.iter().fold(Change::new(), |change, record| change.put(record.key.clone(), record.value.clone()));
        store.commit(change).await?;
    }
    Ok(())
}
