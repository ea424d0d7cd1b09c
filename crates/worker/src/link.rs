//! How the node and a worker talk: one unix socket, frames of JSON, open descriptors beside them.
//!
//! ```text
//!   0        4     5
//!   ┌────────┬─────┬──────────────────────┐
//!   │ length │ fds │ JSON, `length` bytes │      the descriptors arrive with the first byte
//!   └────────┴─────┴──────────────────────┘
//!   node → worker   Call  { id, command }
//!   worker → node   Said::Reply { id, … } in any order,  Said::Event { … } at any time
//! ```
//!
//! What the node prepared (root file systems, binaries, images) comes as descriptors, so a worker shares no path with
//! another and sees only its own actor.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use ate_name::{ActorUid, Generation, OpId, WorkerUid};
use ate_orders::{EgressRule, Exit, Hosted, Identity, Phase, Readyz};
use ate_sandbox::{Exec, User};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// Largest frame. The largest command carries a workload with its environment; a template is limited far below this.
const MAX_FRAME: usize = 4 << 20;

#[derive(Debug, Serialize, Deserialize)]
pub struct Call {
    pub id: u64,
    pub command: Command,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Command {
    /// Make a box ready for whoever of this workload comes first. Descriptors: the runtime's directory, then one root
    /// file system per container, then the durable directory if there is one, as detached mounts; then whatever must
    /// stay open for as long as the box is there.
    Prepare(Prepare),
    /// Put an actor into the prepared box. Descriptors: its log file; then, if the source names them, the image and the
    /// archive of the durable directory.
    Activate(Box<Activate>),
    /// Stop the actor, save it, end its box. Descriptors: memory for the image; a file for the archive, and one that room
    /// on the disk is set aside in. The worker keeps hold of image and archive until it is told to
    /// [release](Command::Release) them: the node may die before they are stored.
    Capture(Capture),
    /// Give back what was captured. Descriptors of the answer: as those of the capture.
    Recall { op: OpId },
    /// What was captured is stored.
    Release { op: OpId },
    /// Let a capture that has not ended its box yet go no further; the actor runs on.
    Abort { op: OpId },
    /// End the actor's box, saving nothing.
    Discard { actor: ActorUid, generation: Generation },
    /// Run a command inside the actor's box. Descriptors: its stdin, stdout and stderr.
    Exec { actor: ActorUid, generation: Generation, exec: Exec },
    /// Let the actor meet others until then, as [`ate_sys::since_boot`] counts; afterwards it is held still, until told
    /// anew. A worker that is never told lets it for as long as it lives.
    Serve { until: Duration },
    /// Say what is here.
    Report,
    /// Say again what the node said about whoever is hosted.
    Memo,
    /// End everything, then exit.
    Stop,
}

/// Identifies boxes that can stand in for each other: same workload, same runtime.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BoxKind(pub String);

#[derive(Debug, Serialize, Deserialize)]
pub struct Prepare {
    pub kind: BoxKind,
    pub containers: Vec<ContainerSpec>,
    pub memory_limit: Option<u64>,
    pub cpu_limit_millis: Option<u64>,
    /// Whether a durable directory comes along.
    pub durable: bool,
}

/// A container before it has a place: root file system and mounts are the worker's to choose.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContainerSpec {
    pub name: String,
    pub args: Vec<String>,
    pub env: Vec<String>,
    pub cwd: String,
    pub user: User,
    /// Volume name → where the container sees it.
    pub volumes: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Activate {
    pub op: OpId,
    pub identity: Identity,
    pub kind: BoxKind,
    pub source: Source,
    pub readyz: Vec<Readyz>,
    pub ports: Vec<u16>,
    pub egress: Vec<EgressRule>,
    pub freeze_after: Option<Duration>,
    /// What the node wants to be told again if it comes back after a crash; nothing to the worker.
    pub memo: serde_json::Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// Start afresh; `data` if a durable directory comes along.
    Boot { data: bool },
    /// Continue from an image; `data` as above.
    Image { data: bool },
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Capture {
    pub op: OpId,
    pub actor: ActorUid,
    pub generation: Generation,
    /// Memory too, or only the durable directory.
    pub memory: bool,
    pub data: bool,
    /// Only while nobody is connected to it; [`Refusal::Aborted`] otherwise.
    pub if_idle: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Said {
    Reply { id: u64, result: Result<Answer, Refusal> },
    Event(Event),
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    Done,
    Activated {
        phases: Vec<Phase>,
    },
    Captured {
        image_bytes: u64,
        phases: Vec<Phase>,
    },
    Recalled(Recalled),
    Exited(Exit),
    Report(Box<Report>),
    /// The node's own words; null if nobody is hosted.
    Memo(serde_json::Value),
}

/// Why a worker did not do as told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    #[error("the worker does not host this actor at this generation")]
    Stale,
    #[error("the worker is taken")]
    Busy,
    #[error("no box of this kind is ready")]
    NotPrepared,
    #[error("it has been captured already")]
    Captured,
    #[error("the capture was called off")]
    Aborted,
    /// The actor is alive and well, it only could not be saved.
    #[error("the actor could not be saved and runs on: {0}")]
    NotSaved(String),
    /// What it runs has ended, or was not ready in time.
    #[error("{0}")]
    Crashed(String),
    #[error("{0}")]
    Failed(String),
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub worker: WorkerUid,
    pub build: String,
    pub hosted: Option<Hosted>,
    pub warm: Vec<BoxKind>,
    /// Captures that nobody has said are stored.
    pub retained: Vec<OpId>,
}

/// What a capture was; its descriptors come along.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recalled {
    pub image_bytes: u64,
    pub memory: bool,
    pub data: bool,
    /// The node's own words about whoever was captured.
    pub memo: serde_json::Value,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Event {
    /// Whoever is being activated runs, and is waited for until it is ready.
    Started,
    Frozen(Identity),
    Thawed(Identity),
    /// The box ended without being told to.
    Ended {
        actor: ActorUid,
        generation: Generation,
        exit: Exit,
    },
}

/// The reading half of a link.
#[derive(Debug)]
pub struct Reader(OwnedReadHalf);

/// The writing half of a link.
#[derive(Debug)]
pub struct Writer(OwnedWriteHalf);

pub fn split(stream: UnixStream) -> (Reader, Writer) {
    let (read, write) = stream.into_split();
    (Reader(read), Writer(write))
}

impl Writer {
    pub async fn send(&mut self, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let body = serde_json::to_vec(message)?;
        let length = u32::try_from(body.len()).ok().filter(|&length| length as usize <= MAX_FRAME);
        let length = length.ok_or_else(|| io::Error::other("a frame larger than the other side would take"))?;
        let mut frame = Vec::with_capacity(5 + body.len());
        frame.extend_from_slice(&length.to_be_bytes());
        frame.push(u8::try_from(fds.len()).map_err(io::Error::other)?);
        frame.extend_from_slice(&body);
        let stream: &UnixStream = self.0.as_ref();
        let sent = loop {
            stream.writable().await?;
            match stream.try_io(Interest::WRITABLE, || ate_sys::message::send(stream, &frame, fds)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => break done?,
            }
        };
        self.0.write_all(&frame[sent..]).await
    }
}

impl Reader {
    /// The next message and its descriptors; `None` when the other side has closed between messages.
    pub async fn next<M: DeserializeOwned>(&mut self) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        let (mut header, mut filled, mut fds) = ([0; 5], 0, Vec::new());
        while filled < header.len() {
            let stream: &UnixStream = self.0.as_ref();
            stream.readable().await?;
            let received = stream
                .try_io(Interest::READABLE, || ate_sys::message::receive(stream, &mut header[filled..], &mut fds));
            match received {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(more) => filled += more,
                Err(error) => return Err(error),
            }
        }
        let length = u32::from_be_bytes([header[0], header[1], header[2], header[3]]) as usize;
        if length > MAX_FRAME || fds.len() != usize::from(header[4]) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a frame of this link"));
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).await?;
        Ok(Some((serde_json::from_slice(&body)?, fds)))
    }
}

/// Borrows a list of descriptors the way `send` wants them.
pub fn borrowed(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_carry_their_descriptors() {
        let (a, b) = UnixStream::pair().unwrap();
        let ((_, mut writer), (mut reader, _)) = (split(a), split(b));
        let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        writer.send(&Call { id: 7, command: Command::Report }, &[file.as_fd(), file.as_fd()]).await.unwrap();
        writer.send(&Call { id: 8, command: Command::Stop }, &[]).await.unwrap();
        let (first, fds) = reader.next::<Call>().await.unwrap().unwrap();
        assert_eq!((first.id, fds.len()), (7, 2));
        let (second, fds) = reader.next::<Call>().await.unwrap().unwrap();
        assert_eq!((second.id, fds.len()), (8, 0));
        drop(writer);
        assert!(reader.next::<Call>().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_frame_that_claims_too_much_is_refused() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let (mut reader, _keep) = split(b);
        a.write_all(&[0xff, 0xff, 0xff, 0xff, 0]).await.unwrap();
        assert!(reader.next::<Call>().await.is_err());
    }
}
