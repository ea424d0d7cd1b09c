//! The replicas of the control plane, and who of them lives.
//!
//! Each raises the beat in its record; the others watch it with their own clock. No two clocks are ever compared.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ate_name::ReplicaId;
use ate_store::{Change, CommitError, Kind, Record};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::records::{Read, ReplicaRecord, each, encode, replica_key};
use crate::{Control, ControlError};

/// How the replicas of an instance learn of each other's end.
#[derive(Clone, Copy, Debug)]
pub enum Replicas {
    /// There is only this one: the store belongs to one process at a time.
    Alone,
    /// Each raises its beat so often; one whose beat has not moved for a lease is taken for dead.
    Several { beat: Duration, lease: Duration },
}

/// What was last seen of others, and when by this process's own clock.
#[derive(Debug)]
pub(crate) struct Beats<K, B>(Mutex<BTreeMap<K, (B, Instant)>>);

impl<K, B> Default for Beats<K, B> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Ord + Clone, B: PartialEq + Clone> Beats<K, B> {
    pub(crate) fn note(&self, who: K, beat: B) {
        let mut beats = self.0.lock();
        if beats.get(&who).is_none_or(|(known, _)| *known != beat) {
            beats.insert(who, (beat, Instant::now()));
        }
    }

    pub(crate) fn forget(&self, who: &K) {
        self.0.lock().remove(who);
    }

    /// What was last seen, and for how long it has not changed; `None` if nothing was ever seen.
    pub(crate) fn last(&self, who: &K) -> Option<(B, Duration)> {
        self.0.lock().get(who).map(|(beat, since)| (beat.clone(), since.elapsed()))
    }

    pub(crate) fn all(&self) -> Vec<K> {
        self.0.lock().keys().cloned().collect()
    }
}

impl Control {
    /// Whether a replica may still be driving what is its own.
    pub(crate) fn lives(&self, replica: ReplicaId) -> bool {
        match self.settings.replicas {
            _ if replica == self.replica => true,
            Replicas::Alone => false,
            Replicas::Several { lease, .. } => match self.beats.last(&replica) {
                Some((_, silence)) => self.silence(silence) < lease,
                // Its record may be on its way to us: it has a lease from now on.
                None => {
                    self.beats.note(replica, ReplicaRecord::default());
                    true
                }
            },
        }
    }

    /// What the others that live have said of themselves.
    pub(crate) fn other_replicas(&self) -> impl Iterator<Item = ReplicaRecord> {
        let others = self.beats.all().into_iter().filter(|other| *other != self.replica && self.lives(*other));
        others.filter_map(|other| self.beats.last(&other).map(|(record, _)| record))
    }

    /// How long others have been silent while they could have been heard: when the store is away nobody is.
    pub(crate) fn silence(&self, silence: Duration) -> Duration {
        silence.min(self.deaf_until.lock().elapsed())
    }

    /// Takes over what the store says of a replica.
    pub(crate) fn note_replica(&self, record: &Record) -> Result<(), ControlError> {
        if let Ok(replica) = ReplicaId::parse(record.key.path()) {
            self.beats.note(replica, Read::<ReplicaRecord>::decode(record.clone())?.value);
        }
        Ok(())
    }

    pub(crate) fn forget_replica(&self, path: &str) {
        if let Ok(replica) = ReplicaId::parse(path) {
            self.beats.forget(&replica);
        }
    }

    pub(crate) async fn load_replicas(&self) -> Result<(), ControlError> {
        each(&self.all(Kind::Replica).await?, |record| self.note_replica(record));
        Ok(())
    }

    /// Says that this replica lives, again and again; buries those that no longer do.
    pub(crate) async fn keep_beating(self: Arc<Self>) {
        let Replicas::Several { beat, .. } = self.settings.replicas else { return };
        let mut count = 0;
        loop {
            count += 1;
            if let Err(error) = self.beat(count).await {
                tracing::warn!(%error, "this replica could not say that it lives");
                *self.deaf_until.lock() = Instant::now();
            }
            self.bury().await;
            tokio::select! {
                biased;
                () = self.stopping.cancelled() => break,
                () = tokio::time::sleep(beat) => {}
            }
        }
        // Who leaves in order is not waited for.
        if let Err(error) = self.store.commit(Change::new().delete(replica_key(self.replica))).await {
            tracing::debug!(%error, "this replica's record stays until somebody buries it");
        }
    }

    async fn beat(&self, beat: u64) -> Result<(), ControlError> {
        self.store.commit(Change::new().put(replica_key(self.replica), encode(&self.as_replica(beat)))).await?;
        Ok(())
    }

    /// Removes the records of replicas that have been silent for a lease.
    async fn bury(&self) {
        for replica in self.beats.all() {
            if self.lives(replica) {
                continue;
            }
            let buried = match self.store.get(&replica_key(replica)).await {
                Ok(Some(record)) => {
                    // It may have raised its beat while nobody told us. One that cannot be read is a newer build's to judge.
                    if self.note_replica(&record).is_err() || self.lives(replica) {
                        continue;
                    }
                    self.store.commit(Change::new().guard(record.unchanged()).delete(record.key)).await.map(drop)
                }
                Ok(None) => Ok(()),
                Err(fault) => Err(fault.into()),
            };
            match buried {
                Ok(()) => {
                    tracing::warn!(%replica, "a replica has been silent for too long: its operations are taken over");
                    self.beats.forget(&replica);
                }
                Err(CommitError::Conflict { .. }) => {}
                Err(error) => tracing::warn!(%replica, %error, "a dead replica's record could not be removed"),
            }
        }
    }
}
