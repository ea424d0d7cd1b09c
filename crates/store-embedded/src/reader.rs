use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ate_store::{Fault, Key, Record};
use tokio::sync::oneshot;

use crate::{Shared, codec};

/// Reads that wait for each thread before another one helps. The way to a thread and back costs more than a read that the
/// cache answers, so these are shared; reads that go to the disk take longer, more of them wait, and more threads go there.
const WAITING: usize = 4;

/// Threads that read at once: as deep as the queue of a fast disk.
const THREADS: usize = 64;

type Found = Result<Option<Record>, Fault>;

/// Reads of single records, off the reactor: one that is not cached is a disk access.
#[derive(Default)]
pub(crate) struct Reader(Mutex<State>);

/// Its length is bounded by those who wait for an answer.
#[derive(Default)]
struct State {
    wanted: VecDeque<(Key, oneshot::Sender<Found>)>,
    threads: usize,
}

impl Reader {
    /// Nothing panics while it holds the lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    pub(crate) async fn record(self: &Arc<Self>, key: &Key) -> Found {
        let (answer, answered) = oneshot::channel();
        let another = {
            let mut state = self.reader.state();
            state.wanted.push_back((key.clone(), answer));
            let another = state.wanted.len() > state.threads * WAITING && state.threads < THREADS;
            state.threads += usize::from(another);
            another
        };
        if another {
            let turn = Turn { shared: Arc::clone(self), is_over: false };
            tokio::task::spawn_blocking(move || turn.run());
        }
        answered.await.unwrap_or_else(|_| Err(Fault::Unavailable { reason: "the runtime is shutting down".to_owned() }))
    }

    fn read_one(&self, key: &Key) -> Found {
        // Engines assert what they expect of their own files.
        std::panic::catch_unwind(AssertUnwindSafe(|| self.read(|reads| codec::read_record(reads, key))))
            .unwrap_or_else(|_| Err(Fault::Corrupt { reason: "the engine gave up; see the log for where".to_owned() }))
    }
}

/// A thread's turn: it reads until nothing is wanted any more.
struct Turn {
    shared: Arc<Shared>,
    is_over: bool,
}

impl Turn {
    fn run(mut self) {
        while let Some((key, answer)) = self.next() {
            // Whoever asked may have gone, which it may.
            let _ = answer.send(self.shared.read_one(&key));
        }
    }

    /// Under one lock with the end of the turn: whoever wants something later begins another.
    fn next(&mut self) -> Option<(Key, oneshot::Sender<Found>)> {
        let mut state = self.shared.reader.state();
        let next = state.wanted.pop_front();
        if next.is_none() {
            state.threads -= 1;
            self.is_over = true;
        }
        next
    }
}

/// A runtime that shuts down begins no more turns. Nobody may wait for one that will not be.
impl Drop for Turn {
    fn drop(&mut self) {
        if !self.is_over {
            let mut state = self.shared.reader.state();
            state.threads -= 1;
            if state.threads == 0 {
                state.wanted.clear();
            }
        }
    }
}
