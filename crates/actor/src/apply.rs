use ate_name::{Generation, NodeName, OpId};

use crate::{Actor, Crashes, Intent, Lease, Phase, SnapshotRef, Snapshots, Start};

/// What happens to an actor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A worker is claimed for it: a new generation.
    Bind { lease: Lease, op: OpId, start: Start },
    /// The worker runs it.
    Started { op: OpId },
    /// The worker could not. The attempt is over, the wish is not. `crashed`: then what it runs has ended by itself, or did not
    /// come up, and that is counted.
    Failed { op: OpId, reason: String, crashed: Option<jiff::Timestamp> },
    /// Nobody wishes any more: back to where it was.
    GaveUp { op: OpId },
    /// It is to be saved under the name given.
    Save { op: OpId, intent: Intent, snapshot: SnapshotRef },
    /// It could not be, or it was called off: it runs on.
    Kept { op: OpId },
    /// The node holds its image, its sandbox is gone.
    Captured { op: OpId },
    /// The image is on the node's disk, and in durable storage too if so said.
    Stored { op: OpId, snapshot: SnapshotRef, durable: bool },
    /// What was on the node's disk is now durable as well.
    Uploaded { prefix: String },
    /// Its worker, its sandbox or the node with its image is gone: it falls back to its last snapshot.
    Lost,
    /// Its sandbox has ended by itself: it falls back to its last snapshot, and that is counted.
    Crashed { at: jiff::Timestamp, reason: String },
    /// Its processes are to start anew when it is woken next.
    Restart,
    /// The node that held its newest snapshot is gone for good: it falls back to the last durable one.
    LocalLost { node: NodeName },
    /// Its record is an old one, from a backup: whatever was done with it since is unknown, and anything with a generation
    /// below `past` may still be out there. It holds no worker any more.
    Restored { past: Generation },
    /// After that it was looked for wherever snapshots are: this is what it has, if that is more than its record knew of.
    CaughtUp { more: Option<Snapshots> },
}

/// What must change together with the actor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    ClaimWorker(Lease),
    FreeWorker(Lease),
}

/// The event does not fit. Either it comes from the past, which is what fences are for, or the caller is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the event does not fit the actor's phase")]
pub struct Refused;

impl Actor {
    /// The only way from one phase to another. Pure: same inputs, same answer.
    pub fn apply(mut self, event: Event) -> Result<(Self, Vec<Effect>), Refused> {
        use Event as E;
        use Phase as P;
        let mut effects = Vec::new();
        self.phase = match (self.phase, event) {
            (P::Suspended | P::Paused | P::Resuming { lease: None, .. }, E::Bind { lease, op, start })
                if self.behind.is_none() =>
            {
                self.generation = self.generation.next();
                effects.push(Effect::ClaimWorker(lease.clone()));
                let start = if self.fresh { Start::Fresh } else { start };
                P::Resuming { lease: Some(lease), op, start, failure: None }
            }
            (P::Resuming { lease: Some(lease), op, start, .. }, E::Started { op: done }) if op == done => {
                // A wish of after this wake began is for the next one.
                self.fresh &= start != Start::Fresh;
                P::Running { lease }
            }
            (phase, E::Restart) => {
                self.fresh = true;
                // Whoever restarts it has looked after it: it need not wait.
                self.crashes = None;
                phase
            }
            (P::Resuming { lease: Some(lease), op, start, .. }, E::Failed { op: failed, reason, crashed })
                if op == failed =>
            {
                if let Some(at) = crashed {
                    self.crashes = Some(Crashes::after(self.crashes, at, reason.clone()));
                }
                effects.push(Effect::FreeWorker(lease));
                P::Resuming { lease: None, op, start, failure: Some(reason) }
            }
            (P::Resuming { lease: None, op, .. }, E::GaveUp { op: given_up }) if op == given_up => {
                self.snapshots.resting()
            }
            (P::Running { lease }, E::Save { op, intent, snapshot }) => P::Suspending { lease, op, intent, snapshot },
            (P::Suspending { lease, op, .. }, E::Kept { op: kept }) if op == kept => P::Running { lease },
            (P::Suspending { lease, op, intent, snapshot }, E::Captured { op: captured }) if op == captured => {
                let node = lease.node.clone();
                effects.push(Effect::FreeWorker(lease));
                P::Saving { node, op, intent, snapshot }
            }
            (P::Saving { node, op, intent, snapshot }, E::Stored { op: stored, snapshot: settled, durable })
                if op == stored && snapshot.prefix == settled.prefix =>
            {
                if durable {
                    self.snapshots.durable = Some(settled.clone());
                }
                self.snapshots.local = Some((settled, node));
                // Also a pause: it is answered when the node has it, but must not be lost with the node.
                self.snapshots.uploading = (!durable).then_some(op);
                self.snapshots.paused = intent == Intent::Pause;
                self.crashes = None;
                self.snapshots.resting()
            }
            (phase, E::Uploaded { prefix }) => {
                match &self.snapshots.local {
                    Some((local, _)) if local.prefix == prefix => self.snapshots.durable = Some(local.clone()),
                    _ => return Err(Refused),
                }
                self.snapshots.uploading = None;
                phase
            }
            (
                P::Resuming { lease: Some(lease), .. } | P::Running { lease } | P::Suspending { lease, .. },
                event @ (E::Lost | E::Crashed { .. }),
            ) => {
                if let E::Crashed { at, reason } = event {
                    self.crashes = Some(Crashes::after(self.crashes, at, reason));
                }
                effects.push(Effect::FreeWorker(lease));
                self.snapshots.resting()
            }
            (P::Resuming { lease: None, .. } | P::Saving { .. }, E::Lost) => self.snapshots.resting(),
            // Not while it is behind: what is lost by its record may be in durable storage by now.
            (phase @ (P::Suspended | P::Paused | P::Resuming { lease: None, .. }), E::LocalLost { node })
                if self.behind.is_none() =>
            {
                match &self.snapshots.local {
                    Some((_, holder)) if *holder == node => {
                        (self.snapshots.local, self.snapshots.uploading) = (None, None);
                        if phase == P::Paused { P::Suspended } else { phase }
                    }
                    _ => phase,
                }
            }
            (phase, E::Restored { past }) => {
                // One that is just being started anew has yet to be.
                let anew = matches!(phase, P::Resuming { lease: Some(_), start: Start::Fresh, .. });
                let lived = self.generation.get().saturating_sub(u64::from(anew));
                self.behind.get_or_insert(Generation::new(lived));
                self.generation = past.max(self.generation.next());
                match phase {
                    // The node may still have the image, or what became of it: it is known by its operation. If it has
                    // neither, the save ends as any does whose image is gone.
                    saving @ P::Saving { .. } => saving,
                    P::Resuming { lease: Some(lease), .. } | P::Running { lease } | P::Suspending { lease, .. } => {
                        effects.push(Effect::FreeWorker(lease));
                        self.snapshots.resting()
                    }
                    P::Resuming { lease: None, .. } | P::Suspended | P::Paused => self.snapshots.resting(),
                }
            }
            (P::Suspended | P::Paused, E::CaughtUp { more }) if self.behind.is_some() => {
                let then = self.behind.take();
                if let Some(more) = more {
                    if more.is_newer(&self.snapshots) {
                        self.crashes = None;
                    }
                    self.snapshots = more;
                    // Whoever was saved by a later one has started anew, if that was wished for.
                    self.fresh &= self.snapshots.base().map(|(newest, _)| newest.generation) <= then;
                }
                self.snapshots.resting()
            }
            _ => return Err(Refused),
        };
        Ok((self, effects))
    }

    /// Whether an event that was to be applied at `generation` shows in the actor: so that whoever did not hear how a
    /// write ended can look. `true` also if somebody else applied it.
    pub fn shows(&self, event: &Event, generation: Generation) -> bool {
        use Event as E;
        use Phase as P;
        match (event, &self.phase) {
            (E::Bind { op, .. }, P::Resuming { op: shown, .. }) => op == shown,
            (E::Started { .. } | E::Kept { .. }, P::Running { .. }) => self.generation == generation,
            (E::Failed { op, .. }, P::Resuming { lease: None, op: shown, .. }) => op == shown,
            (E::Save { op, .. }, P::Suspending { op: shown, .. }) => op == shown,
            (E::Captured { op }, P::Saving { op: shown, .. }) => op == shown,
            (E::Stored { snapshot, .. }, _) => {
                self.snapshots.local.as_ref().is_some_and(|(local, _)| local.prefix == snapshot.prefix)
            }
            (E::Uploaded { prefix }, _) => {
                self.snapshots.durable.as_ref().is_some_and(|durable| durable.prefix == *prefix)
            }
            (E::Lost | E::GaveUp { .. }, P::Suspended | P::Paused) => true,
            (E::Restart, _) => self.fresh,
            (E::Crashed { at, .. }, _) => self.crashes.as_ref().is_some_and(|crashes| crashes.last == *at),
            (E::Lost, _) => self.generation > generation,
            (E::Restored { past }, _) => self.generation >= *past,
            (E::CaughtUp { .. }, _) => self.behind.is_none(),
            (E::LocalLost { node }, _) => self.snapshots.local.as_ref().is_none_or(|(_, holder)| holder != node),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
