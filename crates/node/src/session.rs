//! A node among others: it says that it lives, and its actors meet others only while it is heard.
//!
//! ```text
//!   asked ─────── NODE_SERVES_FOR ──────▶ its workers hold their actors        renewed: all of it begins anew
//!   told that it is over: it was given up, its actors run elsewhere ─▶ ends all it has, draws a new session
//! ```

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ate_name::{SessionId, WorkerUid};
use ate_orders::NODE_SERVES_FOR;
use ate_worker::link;

use crate::workers::Handle;
use crate::{Node, NodeError, Pool};

/// How often a node says that it lives, and how long it waits for the answer.
const RENEW_EVERY: Duration = Duration::from_secs(2);
const RENEW_WITHIN: Duration = Duration::from_secs(3);

/// How long a node that leaves waits until its actors are elsewhere.
const LEAVE_WITHIN: Duration = Duration::from_secs(60);

/// What a node is told when it says that it lives.
#[derive(Clone, Debug)]
pub enum Renewed {
    /// What it should have, which workers are to be ended, and how often it has been heard.
    Kept { pools: Vec<Pool>, surplus: Vec<WorkerUid>, beat: u64 },
    /// Whatever it runs is of the past.
    Over,
}

/// The control plane, as a node that is one of several knows it.
#[async_trait::async_trait]
pub trait Registry: Send + Sync {
    /// `beat` is what it was told last: a store that knows less has lost something.
    async fn renew(&self, session: SessionId, leaving: bool, beat: u64) -> Result<Renewed, String>;
}

impl Node {
    /// Says that this node lives, and does what it is told in return, for as long as this is polled.
    pub async fn keep_registered(self: Arc<Self>, registry: Arc<dyn Registry>) -> Result<(), NodeError> {
        self.is_registered.store(true, Ordering::Relaxed);
        let mut session = self.session()?;
        let (mut beat, mut noting) = (self.beat(), None);
        let mut leaving = self.leaving.subscribe();
        loop {
            let leaves = *leaving.borrow_and_update();
            // Counted from before it is asked: whoever answers counts from later.
            let asked = ate_sys::since_boot();
            match tokio::time::timeout(RENEW_WITHIN, registry.renew(session, leaves, beat)).await {
                Ok(Ok(Renewed::Kept { pools, surplus, beat: heard })) => {
                    self.serve_until(asked + NODE_SERVES_FOR);
                    beat = heard;
                    self.note_beat(beat, &mut noting);
                    self.set_pools(pools);
                    self.retire(surplus);
                }
                Ok(Ok(Renewed::Over)) => {
                    tracing::warn!(
                        "this node was silent for too long, or the store was restored: its actors are others' now, and all it runs is ended"
                    );
                    self.set_pools(Vec::new());
                    // Also those that it has not found yet.
                    self.adopted.cancelled().await;
                    self.end_all().await;
                    session = self.new_session()?;
                    continue;
                }
                Ok(Err(error)) => tracing::warn!(error, "the control plane does not hear this node"),
                Err(_) => tracing::warn!("the control plane does not answer this node"),
            }
            tokio::select! {
                () = tokio::time::sleep(RENEW_EVERY) => {}
                changed = leaving.changed() => if changed.is_err() { return Ok(()) },
            }
        }
    }

    /// Has its actors suspended and its workers ended, while [`Node::keep_registered`] goes on. `false`: not all of them in
    /// time.
    pub async fn leave(&self) -> bool {
        self.leaving.send_replace(true);
        let left = async {
            loop {
                if self.handles().is_empty() && !self.owes() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        tokio::time::timeout(LEAVE_WITHIN, left).await.is_ok()
    }

    /// Whether it has what no other could go on with.
    pub(crate) fn owes(&self) -> bool {
        !self.captured.lock().is_empty() || !self.snapshots.only_here().is_empty()
    }

    fn serve_until(self: &Arc<Self>, until: Duration) {
        {
            let mut lease = self.lease.lock();
            if lease.is_none_or(|before| before <= ate_sys::since_boot()) {
                self.silences.fetch_add(1, Ordering::Relaxed);
            }
            *lease = Some(until);
        }
        // Each by itself: one that stands still must not keep the others, nor the next renewal, waiting.
        for handle in self.handles() {
            let node = Arc::clone(self);
            // One that does not answer holds its actor soon, and is ended later.
            self.tasks.spawn(async move { drop(node.tell_lease(&handle).await) });
        }
    }

    /// If it is heard of, or is the only one: how often it was not. Whoever finds the same twice knows that nobody can have given
    /// it up in between.
    pub(crate) fn heard(&self) -> Option<u64> {
        // Held until the end: both change together.
        let lease = self.lease.lock();
        let heard = match *lease {
            Some(until) => ate_sys::since_boot() < until,
            None => !self.is_registered.load(Ordering::Relaxed),
        };
        heard.then(|| self.silences.load(Ordering::Relaxed))
    }

    pub(crate) async fn tell_lease(&self, handle: &Handle) -> Result<(), NodeError> {
        let Some(until) = *self.lease.lock() else { return Ok(()) };
        match tokio::time::timeout(RENEW_WITHIN, handle.link.call(link::Command::Serve { until }, &[])).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(NodeError::Worker("it does not take its lease".to_owned())),
        }
    }

    fn session_file(&self) -> PathBuf {
        self.config.directory.join("session")
    }

    fn beat_file(&self) -> PathBuf {
        self.config.directory.join("beat")
    }

    fn beat(&self) -> u64 {
        let text = std::fs::read_to_string(self.beat_file()).unwrap_or_default();
        // What was told to a node of another name says nothing to this one.
        let told = text.trim().strip_prefix(self.config.name.as_str());
        told.and_then(|beat| beat.trim().parse().ok()).unwrap_or(0)
    }

    /// Without a flush, and not at all while the last one is still being written: no lease may wait for a disk, and an older beat is
    /// as true.
    fn note_beat(&self, beat: u64, noting: &mut Option<tokio::task::JoinHandle<()>>) {
        if noting.as_ref().is_some_and(|noting| !noting.is_finished()) {
            return;
        }
        let (new, file) = (self.beat_file().with_extension("new"), self.beat_file());
        let text = format!("{} {beat}", self.config.name);
        *noting = Some(tokio::task::spawn_blocking(move || {
            let noted = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &file));
            if let Err(error) = noted {
                tracing::warn!(%error, "what this node was told last is not written down");
            }
        }));
    }

    /// The session goes on over a restart, as the workers do.
    fn session(&self) -> Result<SessionId, NodeError> {
        let known = std::fs::read_to_string(self.session_file()).ok();
        match known.and_then(|text| SessionId::parse(text.trim()).ok()) {
            Some(session) => Ok(session),
            None => self.new_session(),
        }
    }

    /// Only when nothing is left of the old one.
    fn new_session(&self) -> Result<SessionId, NodeError> {
        let mut random = [0; 16];
        rand::fill(&mut random);
        let session = SessionId::from_random(random);
        std::fs::write(self.session_file(), session.to_string()).map_err(NodeError::io("write down the session"))?;
        Ok(session)
    }
}
