//! Who runs where, for routers: the present, and then every change.

use std::collections::BTreeMap;

use ate_actor::{Actor, Phase};
use ate_name::{ActorKey, ActorUid, Generation, ObjectKey};
use ate_orders::{Ingress, Port};
use parking_lot::Mutex;
use tokio::sync::broadcast;

use crate::Control;
use crate::records::Assignee;

/// Changes that a watcher may be behind before it has to begin anew.
const BACKLOG: usize = 4096;

#[derive(Clone, Debug, PartialEq)]
pub struct Assigned {
    pub key: ActorKey,
    pub uid: ActorUid,
    pub generation: Generation,
    pub template: ObjectKey,
    pub ingress: Ingress,
    pub ports: Vec<Port>,
}

#[derive(Clone, Debug)]
pub enum AssignmentUpdate {
    Assigned(Assigned),
    Released { key: ActorKey, uid: ActorUid, generation: Generation },
}

pub(crate) struct Assignments {
    current: Mutex<BTreeMap<ActorKey, Assigned>>,
    changes: broadcast::Sender<AssignmentUpdate>,
}

impl Assignments {
    pub(crate) fn new() -> Self {
        Self { current: Mutex::default(), changes: broadcast::Sender::new(BACKLOG) }
    }

    /// Everything now, and a receiver that misses nothing after it.
    pub(crate) fn watch(&self) -> (Vec<Assigned>, broadcast::Receiver<AssignmentUpdate>) {
        let current = self.current.lock();
        (current.values().cloned().collect(), self.changes.subscribe())
    }

    pub(crate) fn set(&self, assigned: Assigned) {
        let mut current = self.current.lock();
        match current.get(&assigned.key) {
            Some(known) if *known == assigned => return,
            Some(known) if known.uid == assigned.uid && known.generation > assigned.generation => return,
            _ => {}
        }
        current.insert(assigned.key.clone(), assigned.clone());
        let _ = self.changes.send(AssignmentUpdate::Assigned(assigned));
    }

    /// The worker is reached elsewhere now: its node has another address.
    pub(crate) fn moved(&self, by: &Assignee, ingress: &Ingress) {
        let known = self.current.lock().get(&by.key).cloned();
        let here = |known: &Assigned| known.uid == by.uid && known.generation == by.generation;
        if let Some(known) = known.filter(|known| here(known) && known.ingress != *ingress) {
            self.set(Assigned { ingress: ingress.clone(), ..known });
        }
    }

    /// Releases everybody else.
    pub(crate) fn keep_only(&self, keys: &std::collections::BTreeSet<ActorKey>) {
        let others: Vec<_> = self.current.lock().keys().filter(|key| !keys.contains(*key)).cloned().collect();
        others.iter().for_each(|key| self.release(key));
    }

    pub(crate) fn release(&self, key: &ActorKey) {
        let mut current = self.current.lock();
        if let Some(Assigned { key, uid, generation, .. }) = current.remove(key) {
            let _ = self.changes.send(AssignmentUpdate::Released { key, uid, generation });
        }
    }
}

impl Control {
    /// Where a running actor is reached; `None` while its worker or template is unknown here.
    pub(crate) fn assignment(&self, actor: &Actor) -> Option<Assigned> {
        let lease = actor.lease()?;
        let ingress = self.follower.ingress(lease.worker)?;
        let template = self.catalog.template_by_uid(actor.template_uid)?;
        Some(Assigned {
            key: actor.key.clone(),
            uid: actor.uid,
            generation: actor.generation,
            template: actor.template.clone(),
            ingress,
            ports: template.ports(),
        })
    }

    pub(crate) fn note_actor(&self, key: &ActorKey, actor: Option<&Actor>) {
        match actor {
            Some(actor) if matches!(actor.phase, Phase::Running { .. }) => {
                if let Some(assigned) = self.assignment(actor) {
                    self.assignments.set(assigned);
                }
            }
            _ => self.assignments.release(key),
        }
        self.follower.changed(key);
    }

    /// Everything that is assigned now, then each change. A watcher that falls too far behind gets an error and begins anew.
    pub fn watch_assignments(&self) -> (Vec<Assigned>, broadcast::Receiver<AssignmentUpdate>) {
        self.assignments.watch()
    }
}
