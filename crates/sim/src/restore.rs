//! The store is lost and goes on as an older backup of it, while nodes, disks and durable storage are where they are.
//!
//! What is promised then: an actor that the backup knows continues from its last acknowledged suspend, whenever that was. Who was
//! made since is gone; who was deleted since is back, and is deleted again by whoever restores.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ate_actor::{Actor, Phase};
use ate_control::{Asked, Restoring};
use ate_name::{ActorKey, ActorUid, NodeName};
use ate_store::{Kind, Record, Store};
use tokio::time::Instant;

use crate::replica::Replica;
use crate::{CALM, Simulation};

/// Longer than it takes to put another store in the place of one.
const TAKES: Duration = Duration::from_secs(30);

/// The store as it was once.
#[derive(Clone, Debug)]
pub struct Backup {
    taken: jiff::Timestamp,
    revision: ate_store::Revision,
    records: Vec<Record>,
}

impl Backup {
    fn actors(&self) -> impl Iterator<Item = Actor> {
        let records = self.records.iter().filter(|record| record.key.kind() == Kind::Actor);
        records.map(|record| serde_json::from_slice(&record.value).expect("an actor"))
    }

    /// As if this node had come only later.
    pub fn without(mut self, node: &NodeName) -> Self {
        self.records.retain(|record| record.key.kind() != Kind::Node || record.key.path() != node.as_str());
        self
    }

    fn uid(&self, key: &ActorKey) -> Option<ActorUid> {
        self.actors().find(|actor| actor.key == *key).map(|actor| actor.uid)
    }

    /// Everybody that it speaks of: also those that are to be made.
    fn speaks_of(&self, prefix: &str) -> bool {
        let uid = prefix.rsplit('/').nth(1).unwrap_or_default();
        self.records.iter().any(|record| {
            matches!(record.key.kind(), Kind::Actor | Kind::Operation | Kind::Template)
                && String::from_utf8_lossy(&record.value).contains(uid)
        })
    }
}

impl Simulation {
    pub(crate) async fn back_up(&self) -> Backup {
        self.world.say("the store is backed up");
        let revision = self.store.memory.revision().await.expect("memory does not fail");
        Backup { taken: self.world.date(), revision, records: self.store.contents().await }
    }

    /// Every replica is stopped first.
    pub(crate) async fn restore(&self, backup: Backup) {
        self.world.say("every replica is stopped, and the store is restored");
        for replica in self.clients.living() {
            replica.process.die();
        }
        let mut zombies = Vec::new();
        for key in self.clients.actors.iter().chain(&self.clients.copies) {
            let (now, then) = (self.store.actor(key).await.map(|actor| actor.uid), backup.uid(key));
            if now != then {
                let known = self.clients.lives.lock().known(key);
                self.clients.lives.lock().deleting(key);
                self.clients.lives.lock().deleted(key, known, false);
                zombies.extend(then.map(|uid| (key.clone(), uid)));
            }
        }
        let restoring = Restoring::new(backup.taken, backup.revision, self.world.date());
        let mut restoring = restoring.expect("the clock goes on");
        let mut mutations = Vec::new();
        for record in backup.records.clone() {
            mutations.extend(restoring.take(record).expect("it can be read"));
        }
        mutations.extend(restoring.finish());
        self.store.replace(restoring.revision(), &mutations);
        let strangers: BTreeSet<String> =
            self.cluster.snapshots().into_iter().filter(|prefix| !backup.speaks_of(prefix)).collect();
        self.strangers.lock().extend(strangers.iter().filter_map(|prefix| Some(prefix.rsplit_once('/')?.0.to_owned())));
        // A golden that was just being made is made anew, and the one that it had become stays for those who were saved against it.
        for golden in backup.actors().filter(|actor| actor.key.atespace.as_str() == ate_name::GOLDEN_ATESPACE) {
            self.strangers.lock().insert(format!("gs://sim/snapshots/{}/{}", golden.key, golden.uid));
        }
        tokio::time::sleep(self.world.dice.between(Duration::ZERO, TAKES)).await;
        self.start_replica();
        self.start_replica();
        self.store.zombies.lock().extend(zombies.iter().map(|(_, uid)| *uid));
        for (key, uid) in zombies {
            self.delete_again(&key, uid).await;
        }
    }

    /// Whoever was deleted after the backup.
    async fn delete_again(&self, key: &ActorKey, uid: ActorUid) {
        let until = Instant::now() + CALM;
        while self.store.actor(key).await.is_some_and(|actor| actor.uid == uid) {
            if Instant::now() > until {
                return self.world.broken(format!("{key}, who was deleted before, cannot be deleted again"));
            }
            // One that is paused would have to be woken first, which cannot be if its snapshot is gone.
            match self.store.actor(key).await.map(|actor| actor.phase) {
                Some(Phase::Paused) => {
                    let asked = Asked::by("sim", "it was deleted before").expect("a line");
                    let deleted = async |replica: Arc<Replica>| replica.control.force_delete_actor(key, &asked).await;
                    drop(self.clients.call(deleted).await);
                }
                _ => {
                    self.clients.suspend(key).await;
                    self.clients.delete(key).await;
                }
            }
            if self.clients.living().is_empty() {
                self.start_replica();
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// Whoever was not woken since: only then is it known what there is of them.
    pub(crate) async fn catch_up(&self) {
        let until = Instant::now() + CALM;
        for key in self.clients.actors.iter().chain(&self.clients.copies) {
            while self.store.actor(key).await.is_some_and(|actor| actor.behind.is_some()) {
                if Instant::now() > until {
                    return self.world.broken(format!("{key} never catches up with its snapshots"));
                }
                let resumed = self.clients.call(async |replica| replica.control.resume_actor(key, false).await).await;
                if resumed.is_none_or(|resumed| resumed.is_err()) {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }

    /// Whether it was left by somebody of whom no backup that was restored spoke.
    pub(crate) fn is_strangers(&self, prefix: &str) -> bool {
        let home = prefix.rsplit_once('/').map(|(home, _)| home).unwrap_or_default();
        self.strangers.lock().contains(home)
    }
}
