//! The real engine with a gate in front and failures on demand.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use ate_store::{Fault, FeedLimits};
use ate_store_embedded::engine::{Engine, Finish, Reads, Writes};
use ate_store_embedded::{EmbeddedStore, FjallEngine};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Failure {
    /// Nothing reaches the disk.
    BeforeCommit,
    /// All of it does, but the engine says it failed.
    AfterCommit,
    Panic,
}

#[derive(Debug, Default)]
pub(crate) struct Probe {
    failure: Mutex<Option<Failure>>,
    closed: Mutex<bool>,
    opened: Condvar,
    commits: AtomicUsize,
}

impl Probe {
    pub(crate) fn open(directory: &Path) -> (EmbeddedStore, Arc<Probe>) {
        let probe = Arc::new(Probe::default());
        let shared = probe.clone();
        let opener = move |directory: &Path| -> Result<Box<dyn Engine>, Fault> {
            let engine = FjallEngine::open(&directory.join("records"), 1 << 20, 1 << 20)?;
            Ok(Box::new(Probed { engine, probe: shared.clone() }))
        };
        let store = EmbeddedStore::open_with(&directory.join("store"), FeedLimits::default(), Box::new(opener));
        (store.expect("opens"), probe)
    }

    pub(crate) fn fail_once(&self, failure: Failure) {
        *self.failure.lock().expect("not poisoned") = Some(failure);
    }

    /// No transaction begins while the guard lives.
    pub(crate) fn close_gate(&self) -> Gate<'_> {
        *self.closed.lock().expect("not poisoned") = true;
        Gate(self)
    }

    /// Flushes so far.
    pub(crate) fn commits(&self) -> usize {
        self.commits.load(Ordering::SeqCst)
    }
}

pub(crate) struct Gate<'a>(&'a Probe);

impl Drop for Gate<'_> {
    fn drop(&mut self) {
        *self.0.closed.lock().expect("not poisoned") = false;
        self.0.opened.notify_all();
    }
}

struct Probed {
    engine: FjallEngine,
    probe: Arc<Probe>,
}

impl Engine for Probed {
    fn read(&self, work: &mut dyn FnMut(&dyn Reads) -> Result<(), Fault>) -> Result<(), Fault> {
        self.engine.read(work)
    }

    fn write(&self, work: &mut dyn FnMut(&mut dyn Writes) -> Result<Finish, Fault>) -> Result<(), Fault> {
        let closed = self.probe.closed.lock().expect("not poisoned");
        drop(self.probe.opened.wait_while(closed, |closed| *closed).expect("not poisoned"));
        let failure = self.probe.failure.lock().expect("not poisoned").take();
        let failed = Fault::Unavailable { reason: format!("{failure:?}") };
        match failure {
            Some(Failure::BeforeCommit) => return Err(failed),
            Some(Failure::Panic) => panic!("asked for by the test"),
            Some(Failure::AfterCommit) | None => {}
        }
        self.engine.write(work)?;
        self.probe.commits.fetch_add(1, Ordering::SeqCst);
        if failure.is_some() { Err(failed) } else { Ok(()) }
    }
}
