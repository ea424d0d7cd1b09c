//! The node's side of the link.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use ate_sys::SocketPath;
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use crate::LINK_SOCKET;
use crate::link::{Answer, Call, Command, Event, Reader, Refusal, Said, Writer, split};

/// News the node has not looked at yet. A worker says little; a node this far behind reads the report instead.
const EVENT_BUFFER: usize = 256;

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("the worker is gone")]
    Gone,
    #[error("the link to the worker failed")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Refused(#[from] Refusal),
}

type Told = (Result<Answer, Refusal>, Vec<OwnedFd>);
type Waiting = Mutex<Option<HashMap<u64, oneshot::Sender<Told>>>>;

/// A connection to one worker. Calls may overlap; each gets its own answer.
#[derive(Debug)]
pub struct WorkerLink {
    writer: tokio::sync::Mutex<(Writer, u64)>,
    waiting: Arc<Waiting>,
}

impl WorkerLink {
    /// Connects to the worker whose sockets are in `directory`. News ends when the worker does.
    pub async fn connect(directory: &Path) -> io::Result<(Self, mpsc::Receiver<Event>)> {
        let stream = UnixStream::connect(SocketPath::of(&directory.join(LINK_SOCKET))?.path()).await?;
        let (reader, writer) = split(stream);
        let waiting: Arc<Waiting> = Arc::new(Mutex::new(Some(HashMap::new())));
        let (news, events) = mpsc::channel(EVENT_BUFFER);
        tokio::spawn(listen(reader, Arc::clone(&waiting), news));
        Ok((Self { writer: tokio::sync::Mutex::new((writer, 0)), waiting }, events))
    }

    pub async fn call(&self, command: Command, fds: &[BorrowedFd<'_>]) -> Result<Answer, LinkError> {
        Ok(self.exchange(command, fds).await?.0)
    }

    /// As [`call`](Self::call), with the descriptors that came with the answer.
    pub async fn exchange(
        &self,
        command: Command,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Answer, Vec<OwnedFd>), LinkError> {
        self.begin(command, fds).await?.await
    }

    /// Returns when the command is on its way, with what is to be waited for: the descriptors may be closed by then.
    pub async fn begin(
        &self,
        command: Command,
        fds: &[BorrowedFd<'_>],
    ) -> Result<impl Future<Output = Result<(Answer, Vec<OwnedFd>), LinkError>> + use<>, LinkError> {
        let (sender, answer) = oneshot::channel();
        {
            let mut writer = self.writer.lock().await;
            writer.1 += 1;
            let id = writer.1;
            self.waiting.lock().as_mut().ok_or(LinkError::Gone)?.insert(id, sender);
            if let Err(error) = writer.0.send(&Call { id, command }, fds).await {
                if let Some(waiting) = self.waiting.lock().as_mut() {
                    waiting.remove(&id);
                }
                return Err(error.into());
            }
        }
        Ok(async move {
            let (answer, fds) = answer.await.map_err(|_| LinkError::Gone)?;
            Ok((answer?, fds))
        })
    }
}

async fn listen(mut reader: Reader, waiting: Arc<Waiting>, news: mpsc::Sender<Event>) {
    loop {
        match reader.next::<Said>().await {
            Ok(Some((Said::Reply { id, result }, fds))) => {
                let asker = waiting.lock().as_mut().and_then(|waiting| waiting.remove(&id));
                if let Some(asker) = asker {
                    let _ = asker.send((result, fds));
                }
            }
            Ok(Some((Said::Event(event), _))) => {
                // Whoever no longer listens may still wait for an answer.
                let _ = news.send(event).await;
            }
            Ok(None) => break,
            Err(error) => {
                tracing::warn!(%error, "a worker's link is broken");
                break;
            }
        }
    }
    // Whoever waits learns that no answer will come, and nobody can begin to wait any more.
    *waiting.lock() = None;
}
