//! The control socket of a gVisor sandbox.
//!
//! ```text
//!   request   {"method":"containerManager.X","arg":…}   + descriptors on the first byte
//!   reply     {"success":bool,"err":"…","result":…}
//! ```
//! One JSON value each way with nothing between messages, one call at a time per connection: the server's decoder reads
//! ahead, so a second call sent early would be lost. Calls that wait for long get a connection of their own.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::sync::Mutex;

/// Largest reply taken. Replies are small; a process list of a busy sandbox is the largest we ask for.
const MAX_REPLY: usize = 4 << 20;

#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("the control socket failed")]
    Io(#[from] io::Error),
    /// The sandbox heard and refused, or tried and failed.
    #[error("{0}")]
    Refused(String),
    #[error("the control socket answered something that is no reply")]
    Garbled(#[source] serde_json::Error),
}

#[derive(Serialize)]
struct Request<'a, A> {
    method: &'a str,
    arg: &'a A,
}

#[derive(serde::Deserialize)]
struct Reply {
    success: bool,
    #[serde(default)]
    err: String,
    #[serde(default)]
    result: serde_json::Value,
}

/// One connection, opened at the first call and again when the sandbox has closed it (a restore closes them all).
#[derive(Debug)]
pub(crate) struct Control {
    socket: PathBuf,
    stream: Mutex<Option<UnixStream>>,
}

impl Control {
    pub(crate) fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), stream: Mutex::new(None) }
    }

    /// The server drops its connections when it restores; the next call must not be sent into the old one.
    pub(crate) async fn reconnect(&self) {
        *self.stream.lock().await = None;
    }

    pub(crate) async fn call<A: Serialize, R: DeserializeOwned>(
        &self,
        method: &str,
        arg: &A,
        fds: &[BorrowedFd<'_>],
    ) -> Result<R, CallError> {
        // Taken out while in use: a call that is dropped half way leaves no connection with half an answer in it.
        let mut slot = self.stream.lock().await;
        let mut stream = match slot.take() {
            Some(stream) => stream,
            None => UnixStream::connect(&self.socket).await?,
        };
        let request = serde_json::to_vec(&Request { method, arg }).map_err(CallError::Garbled)?;
        send(&mut stream, &request, fds).await?;
        let reply = receive(&mut stream).await?;
        *slot = Some(stream);
        drop(slot);
        if !reply.success {
            return Err(CallError::Refused(reply.err));
        }
        serde_json::from_value(reply.result).map_err(CallError::Garbled)
    }
}

async fn send(stream: &mut UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let sent = loop {
        stream.writable().await?;
        match stream.try_io(Interest::WRITABLE, || ate_sys::message::send(&*stream, bytes, fds)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            done => break done?,
        }
    };
    stream.write_all(&bytes[sent..]).await
}

async fn receive(stream: &mut UnixStream) -> Result<Reply, CallError> {
    let mut bytes = Vec::with_capacity(4096);
    loop {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        match serde_json::Deserializer::from_slice(&bytes).into_iter::<Reply>().next() {
            Some(Ok(reply)) => return Ok(reply),
            Some(Err(error)) if !error.is_eof() => return Err(CallError::Garbled(error)),
            _ if bytes.len() > MAX_REPLY => return Err(io::Error::other("a reply larger than any we ask for").into()),
            _ => {}
        }
    }
}
