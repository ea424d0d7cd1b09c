//! The bytes that open every connection from a router to a worker.
//!
//! A router's idea of where an actor runs may be old. So it says whom it wants before it says anything else, and the
//! worker, which knows whom it hosts, answers with one byte. Only after [`Verdict::Accepted`] does the connection carry
//! the workload's own protocol, spliced both ways; after any other verdict the worker closes. No byte of a request can
//! reach an actor other than the one it was sent to.
//!
//! ```text
//!   router → worker, 32 bytes, integers big-endian
//!
//!   0         5   6      8                16                              32
//!   ┌─────────┬───┬──────┬────────────────┬───────────────────────────────┐
//!   │ ATE\r\n │ 1 │ port │   generation   │           actor uid           │
//!   └─────────┴───┴──────┴────────────────┴───────────────────────────────┘
//!     magic  version
//!
//!   worker → router, 1 byte          1 accepted   2 stale   3 refused   4 draining
//! ```
//!
//! The line break in the magic makes an HTTP server that is dialled by mistake give up after five bytes.

use std::io;

use ate_name::{ActorUid, Generation};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout_at};

/// Bytes of an encoded preface.
pub const PREFACE_LEN: usize = 32;

/// What a router and the door of a node agree on when they meet by TLS: prefaces, and not orders.
pub const ALPN: &[u8] = b"ate-preface/1";

const MAGIC: [u8; 5] = *b"ATE\r\n";
const VERSION: u8 = 1;

/// Whom a connection is for: one port of one actor at one generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preface {
    pub uid: ActorUid,
    pub generation: Generation,
    pub port: u16,
}

/// What a worker says to a preface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Verdict {
    /// Every byte from here on is the workload's.
    Accepted = 1,
    /// The worker does not host exactly that actor at exactly that generation.
    Stale = 2,
    /// The worker hosts it, but the port is not declared or nothing listens there.
    Refused = 3,
    /// The worker hosts it still, but is about to let it go: ask again where it will be.
    Draining = 4,
}

/// Why bytes are no preface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("not a preface")]
    Magic,
    #[error("preface version {0} is not known here")]
    Version(u8),
}

/// Why a connection did not get past its preface.
#[derive(Debug, thiserror::Error)]
pub enum PrefaceError {
    #[error("connection failed during the preface")]
    Io(#[from] io::Error),
    #[error("no preface before the deadline")]
    Deadline,
    #[error("bad preface")]
    Decode(#[from] DecodeError),
    #[error("worker does not host this actor at this generation")]
    Stale,
    #[error("actor does not serve this port")]
    Refused,
    #[error("worker is letting this actor go")]
    Draining,
    #[error("worker answered with unknown verdict {0}")]
    UnknownVerdict(u8),
}

impl Preface {
    pub fn encode(&self) -> [u8; PREFACE_LEN] {
        let mut bytes = [0; PREFACE_LEN];
        bytes[..5].copy_from_slice(&MAGIC);
        bytes[5] = VERSION;
        bytes[6..8].copy_from_slice(&self.port.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.generation.get().to_be_bytes());
        bytes[16..].copy_from_slice(self.uid.as_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; PREFACE_LEN]) -> Result<Self, DecodeError> {
        let (magic, version) = (field(bytes, 0), bytes[5]);
        if magic != MAGIC {
            return Err(DecodeError::Magic);
        }
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let port = u16::from_be_bytes(field(bytes, 6));
        let generation = Generation::new(u64::from_be_bytes(field(bytes, 8)));
        let uid = ActorUid::from_bytes(field(bytes, 16));
        Ok(Self { uid, generation, port })
    }
}

fn field<const N: usize>(bytes: &[u8; PREFACE_LEN], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

impl Verdict {
    /// The worker's side: tells the router. The caller closes the connection unless it accepted.
    pub async fn send(self, stream: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        stream.write_u8(self as u8).await?;
        stream.flush().await
    }
}

/// The router's side: names the actor and waits for the worker's word. `Ok` means accepted; the caller sets the deadline.
pub async fn offer(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), preface: &Preface) -> Result<(), PrefaceError> {
    stream.write_all(&preface.encode()).await?;
    stream.flush().await?;
    match stream.read_u8().await? {
        verdict if verdict == Verdict::Accepted as u8 => Ok(()),
        verdict if verdict == Verdict::Stale as u8 => Err(PrefaceError::Stale),
        verdict if verdict == Verdict::Refused as u8 => Err(PrefaceError::Refused),
        verdict if verdict == Verdict::Draining as u8 => Err(PrefaceError::Draining),
        unknown => Err(PrefaceError::UnknownVerdict(unknown)),
    }
}

/// The worker's side: reads whom the connection is for, and not one byte more. A [`Verdict`] must follow.
pub async fn accept(stream: &mut (impl AsyncRead + Unpin), deadline: Instant) -> Result<Preface, PrefaceError> {
    let mut bytes = [0; PREFACE_LEN];
    timeout_at(deadline, stream.read_exact(&mut bytes)).await.map_err(|_| PrefaceError::Deadline)??;
    Ok(Preface::decode(&bytes)?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn preface(uid: [u8; 16], generation: u64, port: u16) -> Preface {
        let uid = ActorUid::parse(&format!("{:032x}", u128::from_be_bytes(uid))).unwrap();
        Preface { uid, generation: Generation::new(generation), port }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(uid: [u8; 16], generation: u64, port: u16) {
            let preface = preface(uid, generation, port);
            prop_assert_eq!(Preface::decode(&preface.encode()), Ok(preface));
        }

        #[test]
        fn only_the_encoding_of_a_preface_is_one(mut bytes: [u8; PREFACE_LEN], lead in 0..=6usize) {
            let valid = preface([7; 16], 7, 7).encode();
            bytes[..lead].copy_from_slice(&valid[..lead]);
            match Preface::decode(&bytes) {
                Ok(preface) => prop_assert_eq!(preface.encode(), bytes),
                Err(_) => prop_assert_ne!(&bytes[..6], &valid[..6]),
            }
        }
    }

    #[test]
    fn the_layout_is_fixed() {
        let bytes = preface([0xab; 16], 0x0102, 0x1f90).encode();
        assert_eq!(&bytes[..16], b"ATE\r\n\x01\x1f\x90\0\0\0\0\0\0\x01\x02");
        assert_eq!(&bytes[16..], [0xab; 16]);
        let mut newer = bytes;
        newer[5] = 2;
        assert_eq!(Preface::decode(&newer), Err(DecodeError::Version(2)));
    }

    #[tokio::test]
    async fn each_verdict_reaches_the_router() {
        let wanted = preface([1; 16], 9, 80);
        for verdict in [Verdict::Accepted, Verdict::Stale, Verdict::Refused, Verdict::Draining] {
            let (mut router, mut worker) = tokio::io::duplex(64);
            let host = async {
                assert_eq!(accept(&mut worker, soon()).await.unwrap(), wanted);
                verdict.send(&mut worker).await.unwrap();
            };
            let (answer, ()) = tokio::join!(offer(&mut router, &wanted), host);
            match verdict {
                Verdict::Accepted => answer.unwrap(),
                Verdict::Stale => assert!(matches!(answer, Err(PrefaceError::Stale))),
                Verdict::Refused => assert!(matches!(answer, Err(PrefaceError::Refused))),
                Verdict::Draining => assert!(matches!(answer, Err(PrefaceError::Draining))),
            }
        }
    }

    #[tokio::test]
    async fn a_worker_that_hangs_up_or_babbles_is_no_acceptance() {
        let wanted = preface([1; 16], 9, 80);
        let (mut router, mut worker) = tokio::io::duplex(64);
        worker.write_u8(b'H').await.unwrap();
        assert!(matches!(offer(&mut router, &wanted).await, Err(PrefaceError::UnknownVerdict(b'H'))));
        drop(worker);
        assert!(matches!(offer(&mut router, &wanted).await, Err(PrefaceError::Io(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_router_is_given_up_at_the_deadline() {
        let (_router, mut worker) = tokio::io::duplex(64);
        assert!(matches!(accept(&mut worker, soon()).await, Err(PrefaceError::Deadline)));
    }

    #[tokio::test]
    async fn the_workloads_first_byte_is_left_in_the_stream() {
        let (mut router, mut worker) = tokio::io::duplex(64);
        router.write_all(&preface([1; 16], 9, 80).encode()).await.unwrap();
        router.write_all(b"G").await.unwrap();
        accept(&mut worker, soon()).await.unwrap();
        assert_eq!(worker.read_u8().await.unwrap(), b'G');
    }
}
