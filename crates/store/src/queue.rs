use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

use crate::{Change, Fault, Verdict};

/// Places in the queue; above them `commit` waits. Enough to fill a flush of a slow disk, and with [`PLACE_BYTES`]
/// a bound on memory and on the size of a group.
const PLACES: usize = 1024;

/// A change takes one place, and one more for each of these many bytes.
const PLACE_BYTES: usize = 64 << 10;

/// A change on its way to the writer.
#[derive(Debug)]
pub struct Request {
    pub change: Change,
    answer: oneshot::Sender<Verdict>,
    /// A place in the queue, given back with the answer.
    _place: OwnedSemaphorePermit,
}

impl Request {
    /// The committer may have gone, which it may: its change is carried out all the same.
    pub fn answer(self, verdict: Verdict) {
        let _ = self.answer.send(verdict);
    }
}

/// What waits for the one writer of an adapter that commits in groups, be it a thread or a task.
#[derive(Debug)]
pub struct Queue {
    places: Arc<Semaphore>,
    state: Mutex<State>,
    /// Wakes a writer that is a thread, and one that is a task.
    filled: (Condvar, Notify),
}

/// Its length is bounded by the permits that requests hold.
#[derive(Debug, Default)]
struct State {
    requests: Vec<Request>,
    closed: bool,
}

impl State {
    fn is_idle(&mut self) -> bool {
        self.requests.is_empty() && !self.closed
    }

    fn take(&mut self) -> Option<Vec<Request>> {
        let requests = std::mem::take(&mut self.requests);
        if requests.is_empty() && self.closed { None } else { Some(requests) }
    }
}

impl Default for Queue {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(PLACES)), state: Mutex::default(), filled: Default::default() }
    }
}

impl Queue {
    /// Nothing panics while it holds the lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place, then for the writer's answer. Once it has its place the change is carried out, whether or not
    /// this future is still polled.
    pub async fn commit(&self, change: Change) -> Verdict {
        change.check()?;
        let stopped = || Fault::Unavailable { reason: "the store has stopped".to_owned() };
        let places = u32::try_from(1 + change.bytes() / PLACE_BYTES).expect("a checked change is small");
        let place = self.places.clone().acquire_many_owned(places).await.map_err(|_| stopped())?;
        let (answer, answered) = oneshot::channel();
        self.push(Request { change, answer, _place: place }).map_err(|_| stopped())?;
        answered.await.unwrap_or_else(|_| Err(stopped().into()))
    }

    /// Gives the request back if the queue is closed.
    fn push(&self, request: Request) -> Result<(), Request> {
        let mut state = self.state();
        if state.closed {
            return Err(request);
        }
        state.requests.push(request);
        drop(state);
        self.wake();
        Ok(())
    }

    fn wake(&self) {
        self.filled.0.notify_one();
        self.filled.1.notify_one();
    }

    /// All that waits, as one group; `None` once closed and drained.
    pub async fn take(&self) -> Option<Vec<Request>> {
        while self.state().is_idle() {
            self.filled.1.notified().await;
        }
        self.state().take()
    }

    /// As [`Queue::take`], for a thread; empty when `patience` ran out.
    pub fn take_blocking(&self, patience: Option<Duration>) -> Option<Vec<Request>> {
        let mut state = match patience {
            None => self.filled.0.wait_while(self.state(), State::is_idle).unwrap_or_else(PoisonError::into_inner),
            Some(patience) => {
                let waited = self.filled.0.wait_timeout_while(self.state(), patience, State::is_idle);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        state.take()
    }

    /// Later commits are refused; the writer still gets those that are here.
    pub fn close(&self) {
        self.state().closed = true;
        self.wake();
    }
}
