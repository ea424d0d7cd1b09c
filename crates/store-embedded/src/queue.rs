use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ate_store::{Change, CommitError, Committed};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

pub(crate) type Verdict = Result<Committed, CommitError>;

/// A change on its way to the writer.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) change: Change,
    /// The committer may have gone; the change is carried out all the same.
    pub(crate) answer: oneshot::Sender<Verdict>,
    /// A place in the queue, given back with the answer.
    pub(crate) _place: OwnedSemaphorePermit,
}

/// What waits for the writer thread. Its length is bounded by the permits that requests hold.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct State {
    requests: Vec<Request>,
    closed: bool,
}

impl Queue {
    /// Nothing panics while it holds the lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the request back if the queue is closed.
    pub(crate) fn push(&self, request: Request) -> Result<(), Request> {
        let mut state = self.state();
        if state.closed {
            return Err(request);
        }
        state.requests.push(request);
        drop(state);
        self.filled.notify_one();
        Ok(())
    }

    /// All that waits, as one group; empty when `patience` ran out, `None` once closed and drained.
    pub(crate) fn take(&self, patience: Option<Duration>) -> Option<Vec<Request>> {
        let idle = |state: &mut State| state.requests.is_empty() && !state.closed;
        let mut state = match patience {
            None => self.filled.wait_while(self.state(), idle).unwrap_or_else(PoisonError::into_inner),
            Some(patience) => {
                self.filled.wait_timeout_while(self.state(), patience, idle).unwrap_or_else(PoisonError::into_inner).0
            }
        };
        let requests = std::mem::take(&mut state.requests);
        if requests.is_empty() && state.closed { None } else { Some(requests) }
    }

    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.filled.notify_one();
    }
}
