//! An actor whose record is from a backup may have been saved since. Before it is woken, its newest snapshots are looked for
//! wherever snapshots are: on the disk of every node, and in durable storage.
//!
//! ```text
//!   behind ─▶ every disk, and durable storage ─▶ something newer: its snapshots from now on; the rest is removed
//!                  │                           └▶ nothing newer: what the record says
//!                  └ a node does not answer: asked again, until it does or is gone for good
//! ```
//!
//! A record names the digest of each manifest that it trusts. What it does not know of has to prove that a node of this instance
//! wrote it for this actor ([`ate_snapshot::Manifest::read_proven`]).

use std::collections::BTreeSet;
use std::sync::Arc;

use ate_actor::{Actor, Event, Found, Scope, SnapshotRef};
use ate_name::NodeName;
use ate_orders::{FoundSnapshot, NodeError, SearchOrder};
use ate_snapshot::SnapshotKey;
use ate_store::{Change, Guard, Kind};
use futures::future::join_all;

use crate::ledger::Note;
use crate::records::{Forget, Job, OperationRecord, Read, registrations_key};
use crate::{Code, Control, ControlError};

impl Control {
    /// The actor as it is by all that is left of it. `Aborted`: that cannot be told yet, or somebody else was faster.
    pub(crate) async fn caught_up(self: &Arc<Self>, read: Read<Actor>) -> Result<Read<Actor>, ControlError> {
        if read.value.behind.is_none() {
            return Ok(read);
        }
        Box::pin(self.catch_up(read)).await
    }

    async fn catch_up(self: &Arc<Self>, read: Read<Actor>) -> Result<Read<Actor>, ControlError> {
        let Disks { there, no_other } = self.disks(&read.value).await?;
        // Before the search: what is found while it is being removed must not be taken for what stays.
        let going = self.going().await?;
        let (mut found, remains) = self.search(&read.value, &there).await?;
        found.retain(|found| !going.contains(&found.snapshot.prefix));
        let driver = self.new_operation();
        let more = read.value.snapshots.caught_up(&found, driver.op);
        let newer = more.as_ref().filter(|more| more.is_newer(&read.value.snapshots));
        let is_newer = newer.is_some();
        let detail = match newer.and_then(|newer| newer.base()) {
            Some((newest, on)) => {
                let place = on.map_or_else(|| "in durable storage".to_owned(), |node| format!("on node {node}"));
                format!("it was saved after the backup: it continues at generation {}, {place}", newest.generation)
            }
            None => "it was not saved after the backup".to_owned(),
        };
        // On disks, what nobody refers to is found by comparison, or goes when the newest is read.
        let event = Event::CaughtUp { more };
        let (after, _) = read.value.clone().apply(event.clone()).map_err(|_| ControlError::conflict())?;
        let kept: BTreeSet<&str> = after.references().map(|snapshot| snapshot.prefix.as_str()).collect();
        let durable = found.iter().filter(|found| found.on.is_none()).map(|found| &found.snapshot.prefix);
        let durable = durable.chain(&remains).filter(|prefix| !kept.contains(prefix.as_str()));
        let prefixes: Vec<String> = durable.cloned().collect();
        let rest = (!prefixes.is_empty()).then(|| (self.new_operation(), Forget { prefixes, ..Forget::default() }));
        let mut change = Change::new().guard(no_other);
        if let Some((driver, rest)) = &rest {
            change = self.with_forget(change, driver.op, rest.clone());
        }
        let read = self.transition_with(change, &read, event, Note::because("CaughtUp", detail)).await?;
        if is_newer {
            self.counters.caught_up.one();
        }
        if let Some((driver, rest)) = rest {
            drop(self.forget_behind(driver, rest));
        }
        // If it is not durable yet, whoever looks for operations next goes on with the upload.
        drop(driver);
        Ok(read)
    }

    /// Every snapshot of an actor that there is, and the prefixes of what is in durable storage by half.
    async fn search(
        &self,
        actor: &Actor,
        disks: &BTreeSet<NodeName>,
    ) -> Result<(Vec<Found>, Vec<String>), ControlError> {
        let (home, sealed_key) = (self.home(actor)?.to_string(), actor.sealed_key.clone());
        let order = SearchOrder { home, sealed_key, durable: false };
        let mut found = Vec::new();
        let asked = disks.iter().map(async |node| (node, self.nodes.search(node, order.clone()).await));
        for (node, answer) in join_all(asked).await {
            let here = answer.map_err(|error| unknown(actor, node, &error))?;
            found.extend(here.snapshots.into_iter().filter_map(|found| taken_up(found, Some(node))));
        }
        let order = SearchOrder { durable: true, ..order };
        let mut last = None;
        for node in disks {
            match self.nodes.search(node, order.clone()).await {
                Ok(durable) => {
                    found.extend(durable.snapshots.into_iter().filter_map(|found| taken_up(found, None)));
                    return Ok((found, durable.remains));
                }
                Err(error) => last = Some(unknown(actor, node, &error)),
            }
        }
        Err(last.unwrap_or_else(|| waiting(actor, "no node is there that could look for it")))
    }

    /// Snapshots that were let go of before the backup, and are not removed yet.
    async fn going(&self) -> Result<BTreeSet<String>, ControlError> {
        let operations = self.all(Kind::Operation).await?.into_iter();
        let forgets = operations.filter_map(|record| match Read::<OperationRecord>::decode(record).ok()?.value.job {
            Job::Forget(forget) => Some(forget.prefixes),
            _ => None,
        });
        Ok(forgets.flatten().collect())
    }

    /// `Aborted` while some may not have been heard of yet.
    async fn disks(&self, actor: &Actor) -> Result<Disks, ControlError> {
        // Before nodes are read: of one that comes after that nothing is known here.
        let key = registrations_key();
        let last = self.store.get(&key).await?;
        let no_other = last.map_or(Guard::Absent(key), |last| last.unchanged());
        let mut there: BTreeSet<NodeName> = self.fleet.lock().iter().map(|worker| worker.lease.node.clone()).collect();
        let registered = self.all(Kind::Node).await?;
        // Where nodes register, some may be newer than the backup: each has as long as those that are known.
        let long_enough = self.settings.node_lease.max(self.settings.node_grace);
        if !registered.is_empty() && self.deaf_until.lock().elapsed() < long_enough {
            return Err(waiting(actor, "nodes that may have it have a minute to be heard of"));
        }
        for record in registered {
            let node = NodeName::new(record.key.path());
            match self.is_gone_for_good_by(&node, &record) {
                true => there.remove(&node),
                false => there.insert(node),
            };
        }
        Ok(Disks { there, no_other })
    }
}

/// Where an actor's snapshots may be.
struct Disks {
    /// Nodes that are asked: all but those that are gone for good.
    there: BTreeSet<NodeName>,
    /// Holds for as long as none comes that was passed over, or is new. One guard, however many there have ever been.
    no_other: Guard,
}

fn taken_up(found: FoundSnapshot, on: Option<&NodeName>) -> Option<Found> {
    let FoundSnapshot { at, full, bytes } = found;
    let snapshot = SnapshotRef {
        generation: SnapshotKey::parse(&at.prefix).ok()?.id.generation,
        prefix: at.prefix,
        manifest: Some(at.manifest),
        scope: if full { Scope::Full } else { Scope::Data },
        stored_bytes: bytes,
    };
    Some(Found { snapshot, on: on.cloned() })
}

fn unknown(actor: &Actor, node: &NodeName, error: &NodeError) -> ControlError {
    match error {
        NodeError::Refused(text) => ControlError::precondition(text.clone()),
        error => waiting(actor, &format!("node {node} may have it: {error}")),
    }
}

fn waiting(actor: &Actor, why: &str) -> ControlError {
    ControlError::new(
        Code::Aborted,
        format!(
            "actor {}: its newest snapshot is looked for since a backup was restored; {why}\n  try again, and start nodes that are down",
            actor.key.name
        ),
    )
}
