//! Nodes that register, and what becomes of those that fall silent.
//!
//! ```text
//!   node     asked ──── renewed until asked + its lease ───▶ | stops serving
//!   replica        saw ─────────── silent for node_lease ──────────▶ | given up: its actors are others' now
//!                                                                    ├─ node_grace ─▶ | what only it had is lost
//! ```
//!
//! Each counts with its own clock, the node from the earlier moment and for the shorter time: so it has stopped serving
//! before anybody else may run its actors.

use std::collections::BTreeSet;
use std::sync::Arc;

use ate_name::{NodeName, SessionId};
use ate_store::{Change, CommitError, Guard, Kind, Record};
use tokio::time::Instant;

use crate::records::{NodeRecord, Read, each, encode, node_key, registrations_key};
use crate::{Control, ControlError, Replicas};

/// A node says that it lives, and how it is reached.
#[derive(Clone, Copy, Debug)]
pub struct Registration<'a> {
    /// Drawn when it has nothing running of before, and kept until it is told that it is [over](Renewal::Over).
    pub session: SessionId,
    pub endpoint: &'a str,
    pub leaving: bool,
    /// What it was told last by [`Renewal::Renewed`]; zero if it was told nothing.
    pub beat: u64,
}

/// What a node is told when it says that it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// It was heard so often, which is written down.
    Renewed { beat: u64 },
    /// It was given up: whatever it runs is of the past. It ends all of it and registers with a new session.
    Over,
}

/// One comparison with a node of so many looks at everything, also at what differs from nothing that was heard.
const GLANCES: u32 = 30;

/// A look at the nodes that comes so much too late is no look at the nodes.
const STOOD_STILL: std::time::Duration = std::time::Duration::from_secs(2);

/// Sessions remembered that are over. A node comes back with one of them when it was away for long; not with the last but so
/// many.
const ENDED_KEPT: usize = 32;

impl NodeRecord {
    fn is_over(&self, session: SessionId) -> bool {
        (self.session == session && (self.given_up || self.shut_out)) || self.ended.contains(&session)
    }

    /// The sessions that are over once this one begins.
    fn ended_by(&self, session: SessionId) -> Vec<SessionId> {
        let mut ended = self.ended.clone();
        if self.session != session {
            ended.push(self.session);
        }
        let beyond = ended.len().saturating_sub(ENDED_KEPT);
        ended.split_off(beyond)
    }
}

impl Control {
    /// A node says that it lives. The first time of a session registers it.
    pub async fn renew_node(&self, node: &NodeName, registration: Registration<'_>) -> Result<Renewal, ControlError> {
        let renewed = self.renew(node, registration).await;
        // Several find out by their own beat; one alone has none, and nobody else whom a node could tell that it lives.
        if matches!(self.settings.replicas, Replicas::Alone) && renewed.as_ref().is_err_and(ControlError::is_store_away)
        {
            *self.deaf_until.lock() = Instant::now();
        }
        renewed
    }

    async fn renew(&self, node: &NodeName, registration: Registration<'_>) -> Result<Renewal, ControlError> {
        let Registration { session, endpoint, leaving, beat: told } = registration;
        loop {
            let known = self.store.get(&node_key(node)).await?.map(Read::<NodeRecord>::decode).transpose()?;
            // Only this node's renewals raise it, each a commit, and the node was told of none that was not written down. One that is
            // not known here may have been known to the store that this one was restored from.
            let heard = match &known {
                Some(read) => read.value.beat,
                None if told > 0 => self.store.revision().await?.0,
                None => 0,
            };
            if heard < told {
                self.counters.nodes_ahead.one();
                // Nothing is judged by such a store, and nobody given up.
                *self.deaf_until.lock() = Instant::now();
                tracing::error!(%node, told, heard, "the store has lost commits that were acknowledged");
                return Err(ControlError::precondition(format!(
                    "the store has lost commits: it heard node {node} {heard} times, and has told it of {told}\n  stop every replica, then go on with what is left as with a backup: ate store backup --accept-loss, ate store restore --replace\n  if the store is a new one, start the node on a new data directory"
                )));
            }
            // What it runs may be of a time that the store knows nothing of: its record is from a backup, or was not even in that.
            let restored = known.as_ref().map_or(told > 0, |read| read.value.restored);
            let record = match &known {
                Some(read) if !restored && read.value.is_over(session) => {
                    self.counters.fenced.one();
                    return Ok(Renewal::Over);
                }
                // Whose workers are whose could not be told.
                Some(read) if read.value.session != session && !read.value.given_up => {
                    return Err(ControlError::precondition(format!(
                        "another node called {node} is registered: give this one another name, or wait until the other is given up"
                    )));
                }
                known => NodeRecord {
                    session,
                    beat: known.as_ref().map_or(told, |read| read.value.beat) + 1,
                    endpoint: endpoint.to_owned(),
                    given_up: restored,
                    shut_out: false,
                    leaving,
                    restored: false,
                    ended: known.as_ref().map(|read| read.value.ended_by(session)).unwrap_or_default(),
                },
            };
            let change = match &known {
                Some(read) => Change::new().replace(&read.record, read.rewritten(&record)),
                None => Change::new().create(node_key(node), encode(&record)),
            };
            let change = match known.as_ref().is_some_and(|read| read.value.session == session) {
                true => change,
                false => change.put(registrations_key(), "{}"),
            };
            match self.store.commit(change).await {
                Ok(_) => {
                    let beat = record.beat;
                    self.know_node(node.clone(), record);
                    if restored {
                        self.counters.fenced.one();
                        return Ok(Renewal::Over);
                    }
                    return Ok(Renewal::Renewed { beat });
                }
                Err(CommitError::Conflict { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The nodes that registered and are not given up.
    pub fn registered_nodes(&self) -> Vec<(NodeName, NodeRecord)> {
        let known = |node: NodeName| self.known_nodes.last(&node).map(|(record, _)| (node, record));
        self.known_nodes.all().into_iter().filter_map(known).filter(|(_, record)| !record.given_up).collect()
    }

    pub(crate) fn note_node(&self, record: &Record) -> Result<(), ControlError> {
        let node = Read::<NodeRecord>::decode(record.clone())?.value;
        self.know_node(NodeName::new(record.key.path()), node);
        Ok(())
    }

    /// How one answered that has begun anew since, or was given up, says nothing of it.
    fn know_node(&self, node: NodeName, record: NodeRecord) {
        let same = self.known_nodes.last(&node).is_some_and(|(known, _)| known.session == record.session);
        if !same || record.given_up {
            self.nodes.forget(&node);
        }
        // Its workers are taken out of the fleet one by one; and one that was shut out comes back, but perhaps no better.
        match (record.shut_out, record.given_up) {
            (true, _) => self.avoid(&node, self.settings.answer_within),
            (_, true) => self.avoid(&node, self.settings.node_lease),
            _ => {}
        }
        self.known_nodes.note(node, record);
    }

    pub(crate) async fn load_nodes(&self) -> Result<(), ControlError> {
        each(&self.all(Kind::Node).await?, |record| self.note_node(record));
        Ok(())
    }

    pub(crate) async fn is_gone_for_good(&self, node: &NodeName) -> bool {
        self.gone_for_good(node).await.is_some()
    }

    /// Whether what only this node has must be given up too, and for as long as what: it may come back before that is written down.
    pub(crate) async fn gone_for_good(&self, node: &NodeName) -> Option<Guard> {
        self.has_been_given_up_for_long(node)?;
        // What is known here may be old: it may have come back, with all it has.
        let record = self.store.get(&node_key(node)).await.ok().flatten()?;
        self.is_gone_for_good_by(node, &record).then(|| record.unchanged())
    }

    /// The same, by its record as it is now.
    pub(crate) fn is_gone_for_good_by(&self, node: &NodeName, record: &Record) -> bool {
        let known = self.has_been_given_up_for_long(node);
        let now = Read::<NodeRecord>::decode(record.clone());
        let _ = self.note_node(record);
        now.is_ok_and(|now| Some(now.value) == known)
    }

    fn has_been_given_up_for_long(&self, node: &NodeName) -> Option<NodeRecord> {
        let (known, since) = self.known_nodes.last(node)?;
        (known.given_up && self.silence(since) >= self.settings.node_grace).then_some(known)
    }

    /// Gives up nodes that are silent, and sees to it that none of their workers is left.
    pub(crate) async fn watch_nodes(self: Arc<Self>) {
        let mut looked = Instant::now();
        loop {
            // This process itself stood still: whoever spoke meanwhile is heard first.
            if looked.elapsed() > self.settings.sweep * 3 + STOOD_STILL {
                *self.deaf_until.lock() = Instant::now();
            }
            looked = Instant::now();
            // Most of those that were ever known may be gone, and have nothing left.
            let populated: BTreeSet<NodeName> =
                self.fleet.lock().iter().map(|worker| worker.lease.node.clone()).collect();
            for node in self.known_nodes.all() {
                if let Err(error) = self.judge_node(&node, populated.contains(&node)).await {
                    tracing::warn!(%node, %error, "a silent node could not be given up yet");
                }
            }
            tokio::select! {
                biased;
                () = self.stopping.cancelled() => return,
                () = tokio::time::sleep(self.settings.sweep) => {}
            }
        }
    }

    async fn judge_node(self: &Arc<Self>, node: &NodeName, has_workers: bool) -> Result<(), ControlError> {
        let Some((known, silence)) = self.known_nodes.last(node) else { return Ok(()) };
        if known.given_up && !has_workers {
            return Ok(());
        }
        if !known.given_up {
            if self.silence(silence) < self.settings.node_lease {
                if !known.shut_out && self.is_out_of_everybodys_reach(node) {
                    self.shut_out(node, known.session).await?;
                }
                return Ok(());
            }
            let Some(record) = self.store.get(&node_key(node)).await? else { return Ok(()) };
            self.note_node(&record)?;
            let read = Read::<NodeRecord>::decode(record)?;
            // It may have spoken while nobody told us.
            if read.value != known {
                return Ok(());
            }
            let given_up = NodeRecord { given_up: true, ..read.value.clone() };
            match self.store.commit(Change::new().replace(&read.record, read.rewritten(&given_up))).await {
                Ok(_) if given_up.leaving => tracing::info!(%node, "a node has left"),
                Ok(_) => {
                    self.counters.nodes_given_up.one();
                    tracing::warn!(%node, "a node has been silent for too long and is given up");
                }
                Err(CommitError::Conflict { .. }) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        let workers: Vec<_> = self
            .fleet
            .lock()
            .iter()
            .filter(|worker| worker.lease.node == *node)
            .map(|worker| worker.lease.worker)
            .collect();
        if workers.is_empty() {
            return Ok(());
        }
        // What is known here may be old: it may have come back, with workers that are new.
        let now = self.store.get(&node_key(node)).await?.map(Read::<NodeRecord>::decode).transpose()?;
        let Some(now) = now.filter(|read| read.value.given_up) else { return Ok(()) };
        // And it may come back while this is being written down.
        let still = now.record.unchanged();
        // Whose record cannot be read keeps nobody else there.
        let mut failed = Ok(());
        for worker in workers {
            let gone = self.worker_gone_while(Some(&still), worker, "its node has been silent for too long").await;
            failed = failed.and(gone);
        }
        failed
    }

    /// Renews its lease no longer, so that it stops serving by itself, and is given up when it has.
    async fn shut_out(&self, node: &NodeName, session: SessionId) -> Result<(), ControlError> {
        let Some(record) = self.store.get(&node_key(node)).await? else { return Ok(()) };
        let read = Read::<NodeRecord>::decode(record)?;
        if read.value.session != session || read.value.given_up || read.value.shut_out {
            return Ok(());
        }
        let shut_out = NodeRecord { shut_out: true, ..read.value.clone() };
        match self.store.commit(Change::new().replace(&read.record, read.rewritten(&shut_out))).await {
            // It renewed its lease in between: the next look decides.
            Err(CommitError::Conflict { .. }) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => {
                self.counters.nodes_shut_out.one();
                tracing::warn!(%node, "a node says that it lives, but takes orders from nobody: it is shut out");
                Ok(())
            }
        }
    }

    /// Compares a node's workers with the store, at once and from time to time, until the server stops.
    pub async fn look_after(self: Arc<Self>, node: NodeName) {
        for turn in 0_u32.. {
            let given_up = self.known_nodes.last(&node).is_some_and(|(record, _)| record.given_up);
            let compared = match turn % GLANCES {
                _ if given_up => Ok(true),
                0 => self.reconcile(&node).await,
                _ => self.glance(&node).await,
            };
            if let Err(error) = compared {
                tracing::warn!(%node, %error, "a node could not be compared with the store");
            }
            tokio::select! {
                biased;
                () = self.stopping.cancelled() => return,
                () = tokio::time::sleep(self.settings.reconcile) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    /// What a clock that is off by one in a thousand, a slow answer and the holding of an actor can take together.
    const MARGIN: Duration = Duration::from_secs(4);

    #[test]
    fn a_node_has_stopped_serving_before_it_is_given_up() {
        assert!(crate::Settings::default().node_lease >= ate_orders::NODE_SERVES_FOR + MARGIN);
    }
}
