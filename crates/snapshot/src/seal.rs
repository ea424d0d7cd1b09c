//! Sealed files: encrypted, authenticated, and bound to the place they were written for.
//!
//! The STREAM construction over AES-256-GCM. A reader notices a byte that changed, frames that moved, a file that ends
//! early or late, and a file that belongs to another actor, generation, operation or name; and it never hands out a
//! byte of a frame it has not verified.
//!
//! ```text
//!   0    8   "ATESEAL1"
//!   8    7   nonce prefix, random per file
//!   15   ..  frames: at most 65,536 bytes of ciphertext, then a 16-byte tag; every frame but the last is full
//!
//!   place            = actor uid (16) ‖ generation (8, big endian) ‖ operation (16) ‖ file name
//!   key              = HKDF-SHA256(data key, place)
//!   nonce of frame i = nonce prefix (7) ‖ i (4, big endian) ‖ 1 if last else 0
//!   associated data  = the 15 bytes of header ‖ place
//! ```
//!
//! The key is derived per place because 7 random bytes alone would not keep nonces apart over all files that a
//! long-lived actor's key seals: two equal prefixes under one GCM key give the plaintexts away.

use std::io::{self, Read, Write};

use aws_lc_rs::aead::{Aad, LessSafeKey, MAX_TAG_LEN as TAG, Nonce};

use crate::{DataKey, FileName, SnapshotId};

/// Plaintext of a full frame: small enough to stay in the CPU's cache, large enough that tags cost nothing (0.02 %).
pub const FRAME: usize = 64 << 10;

const MAGIC: &[u8; 8] = b"ATESEAL1";
const PREFIX: usize = 7;
const HEADER: usize = MAGIC.len() + PREFIX;

/// Random bytes that make the nonces of one sealed file its own; the caller draws them.
pub type NoncePrefix = [u8; PREFIX];

/// Where a file belongs.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    pub snapshot: SnapshotId,
    pub file: &'a FileName,
}

impl Place<'_> {
    fn to_bytes(self) -> Vec<u8> {
        let SnapshotId { actor, generation, op } = self.snapshot;
        [actor.as_bytes(), &generation.get().to_be_bytes()[..], op.as_bytes(), self.file.as_str().as_bytes()].concat()
    }
}

/// Seals everything that `source` gives; returns the length of the result.
pub fn seal(
    key: &DataKey,
    place: Place<'_>,
    prefix: NoncePrefix,
    mut source: impl Read,
    out: impl Write,
) -> io::Result<u64> {
    let mut sealer = Sealer::new(key, place, prefix, out)?;
    io::copy(&mut source, &mut sealer)?;
    Ok(sealer.finish()?.1)
}

/// Opens a whole sealed file; returns the length of the result. On an error `out` may have received the verified
/// frames before the bad one: what it holds is then not the file.
pub fn open(key: &DataKey, place: Place<'_>, source: impl Read, mut out: impl Write) -> Result<u64, OpenError> {
    let mut opener = Opener::new(key, place, source)?;
    let mut length = 0;
    while let Some(plaintext) = opener.next_frame()? {
        out.write_all(plaintext).map_err(OpenError::Write)?;
        length += plaintext.len() as u64;
    }
    Ok(length)
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("reading a sealed file failed")]
    Read(#[source] io::Error),
    #[error("writing an opened file failed")]
    Write(#[source] io::Error),
    #[error("{file:?} of a snapshot is not a sealed file of version 1; was it written without encryption?")]
    NotSealed { file: String },
    #[error(
        "frame {frame} of {file:?} is refused: the file was changed or cut, or sealed with another key or for another \
         snapshot; restore an earlier snapshot of the actor"
    )]
    Refused { file: String, frame: u64 },
}

/// The key of one file and the position in it.
struct Frames {
    key: LessSafeKey,
    associated: Vec<u8>,
    prefix: NoncePrefix,
    next: u64,
}

impl Frames {
    fn new(key: &DataKey, place: Place<'_>, header: [u8; HEADER]) -> Self {
        let place = place.to_bytes();
        let prefix = header[MAGIC.len()..].try_into().expect("a header ends in its nonce prefix");
        Self { key: key.for_file(&place), associated: [&header[..], &place].concat(), prefix, next: 0 }
    }

    /// Refuses the frame past 256 TiB rather than repeat a nonce.
    fn nonce(&mut self, last: bool) -> Option<Nonce> {
        let counter = u32::try_from(self.next).ok()?;
        self.next += 1;
        let mut nonce = [0; 12];
        nonce[..PREFIX].copy_from_slice(&self.prefix);
        nonce[PREFIX..11].copy_from_slice(&counter.to_be_bytes());
        nonce[11] = last.into();
        Some(Nonce::assume_unique_for_key(nonce))
    }
}

/// Seals what is written to it. Without [`Sealer::finish`] the result lacks its last frame and cannot be opened.
pub struct Sealer<W> {
    out: W,
    frames: Frames,
    buffer: Vec<u8>,
    length: u64,
}

impl<W: Write> Sealer<W> {
    pub fn new(key: &DataKey, place: Place<'_>, prefix: NoncePrefix, mut out: W) -> io::Result<Self> {
        let mut header = [0; HEADER];
        header[..MAGIC.len()].copy_from_slice(MAGIC);
        header[MAGIC.len()..].copy_from_slice(&prefix);
        out.write_all(&header)?;
        let frames = Frames::new(key, place, header);
        Ok(Self { out, frames, buffer: Vec::with_capacity(FRAME + TAG), length: HEADER as u64 })
    }

    /// Writes the last frame; returns the inner writer and the length of the sealed file.
    pub fn finish(mut self) -> io::Result<(W, u64)> {
        self.emit(true)?;
        Ok((self.out, self.length))
    }

    fn emit(&mut self, last: bool) -> io::Result<()> {
        let nonce = self.frames.nonce(last).ok_or(io::ErrorKind::FileTooLarge)?;
        self.frames
            .key
            .seal_in_place_append_tag(nonce, Aad::from(&self.frames.associated), &mut self.buffer)
            .expect("a frame is within what AES-GCM seals");
        self.out.write_all(&self.buffer)?;
        self.length += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

impl<W: Write> Write for Sealer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A full frame waits for the next byte, because only then it is known not to be the last.
        if self.buffer.len() == FRAME && !bytes.is_empty() {
            self.emit(false)?;
        }
        let taken = bytes.len().min(FRAME - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    /// Passes on what is already sealed; a frame that is not full stays here.
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl<W> std::fmt::Debug for Sealer<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sealer").field("length", &self.length).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Reading,
    Ended,
    Refused,
}

/// Reads a sealed file. Its end is verified when `read` returns 0, so a reader that stops earlier has not seen the file whole.
pub struct Opener<R> {
    source: R,
    file: String,
    frames: Frames,
    /// The frame being handed out.
    buffer: Vec<u8>,
    unread: std::ops::Range<usize>,
    /// First byte of the next frame, read to learn whether there is one.
    ahead: Option<u8>,
    state: State,
}

impl<R: Read> Opener<R> {
    pub fn new(key: &DataKey, place: Place<'_>, mut source: R) -> Result<Self, OpenError> {
        let file = place.file.to_string();
        let mut header = [0; HEADER];
        match source.read_exact(&mut header) {
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(OpenError::Read(error)),
            Ok(()) if header.starts_with(MAGIC) => {}
            _ => return Err(OpenError::NotSealed { file }),
        }
        let frames = Frames::new(key, place, header);
        let buffer = Vec::with_capacity(FRAME + TAG + 1);
        Ok(Self { source, file, frames, buffer, unread: 0..0, ahead: None, state: State::Reading })
    }

    /// The plaintext of the next frame, verified; `None` after the last.
    fn next_frame(&mut self) -> Result<Option<&[u8]>, OpenError> {
        match self.state {
            State::Reading => {}
            State::Ended => return Ok(None),
            State::Refused => return Err(self.refused()),
        }
        self.buffer.clear();
        self.buffer.extend(self.ahead.take());
        let missing = (FRAME + TAG + 1 - self.buffer.len()) as u64;
        let read = self.source.by_ref().take(missing).read_to_end(&mut self.buffer).map_err(OpenError::Read);
        if let Err(error) = read {
            self.state = State::Refused;
            return Err(error);
        }
        let last = self.buffer.len() <= FRAME + TAG;
        if !last {
            self.ahead = self.buffer.pop();
        }
        let opened = self.frames.nonce(last).and_then(|nonce| {
            let associated = Aad::from(&self.frames.associated);
            self.frames.key.open_in_place(nonce, associated, &mut self.buffer).ok().map(|plaintext| plaintext.len())
        });
        let Some(length) = opened else {
            self.buffer.clear();
            self.state = State::Refused;
            return Err(self.refused());
        };
        self.state = if last { State::Ended } else { State::Reading };
        Ok(Some(&self.buffer[..length]))
    }

    fn refused(&self) -> OpenError {
        OpenError::Refused { file: self.file.clone(), frame: self.frames.next.saturating_sub(1) }
    }
}

impl<R: Read> Read for Opener<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.unread.is_empty() {
            let length = self.next_frame().map_err(io::Error::other)?.map_or(0, <[u8]>::len);
            self.unread = 0..length;
        }
        let taken = out.len().min(self.unread.len());
        let start = self.unread.start;
        out[..taken].copy_from_slice(&self.buffer[start..start + taken]);
        self.unread.start += taken;
        Ok(taken)
    }
}

impl<R> std::fmt::Debug for Opener<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opener").field("file", &self.file).field("state", &self.state).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use ate_name::{ActorUid, Generation, OpId};
    use proptest::prelude::*;

    use super::*;

    fn key() -> DataKey {
        DataKey::from_random([7; 32])
    }

    fn snapshot() -> SnapshotId {
        SnapshotId {
            actor: ActorUid::from_random([1; 16]),
            generation: Generation::new(5),
            op: OpId::from_random([2; 16]),
        }
    }

    fn name() -> FileName {
        FileName::parse("image").unwrap()
    }

    fn sealed(plaintext: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let length = seal(&key(), Place { snapshot: snapshot(), file: &name() }, [3; 7], plaintext, &mut out).unwrap();
        assert_eq!(length, out.len() as u64);
        out
    }

    /// What came out, and what `open` said.
    fn opened(sealed: &[u8]) -> (Vec<u8>, Result<u64, OpenError>) {
        let mut out = Vec::new();
        let result = open(&key(), Place { snapshot: snapshot(), file: &name() }, sealed, &mut out);
        (out, result)
    }

    /// Bytes that differ from frame to frame, so that frames in another order cannot pass.
    fn plaintext(length: usize) -> Vec<u8> {
        (0..length).map(|i| (i ^ (i >> 8) ^ (i >> 16)).to_le_bytes()[0]).collect()
    }

    #[test]
    fn files_of_every_size_around_a_frame_come_back() {
        for length in [0, 1, FRAME - 1, FRAME, FRAME + 1, 2 * FRAME, 2 * FRAME + 1] {
            let sealed = sealed(&plaintext(length));
            assert_eq!(sealed.len(), HEADER + length + TAG * length.div_ceil(FRAME).max(1));
            let (out, result) = opened(&sealed);
            assert_eq!((result.unwrap(), out), (length as u64, plaintext(length)));
        }
    }

    #[test]
    fn a_changed_byte_anywhere_is_refused_and_gives_no_plaintext() {
        for length in [0, 1, 100] {
            let good = sealed(&plaintext(length));
            for at in 0..good.len() {
                let mut bad = good.clone();
                bad[at] ^= 0x10;
                let (out, result) = opened(&bad);
                assert!(result.is_err() && out.is_empty(), "byte {at} of {length}");
            }
        }
    }

    #[test]
    fn a_file_cut_or_grown_anywhere_is_refused() {
        let good = sealed(&plaintext(2 * FRAME));
        // Frame boundaries are where a weaker format would not notice.
        let boundaries = [HEADER, HEADER + FRAME + TAG, good.len() - TAG].map(|at| at.saturating_sub(2)..at + 3);
        for at in (0..HEADER + 3).chain(boundaries.into_iter().flatten()).filter(|at| *at < good.len()) {
            assert!(opened(&good[..at]).1.is_err(), "cut at {at}");
        }
        for extra in [&[0][..], &good[HEADER..], &[0; TAG]] {
            assert!(opened(&[&good[..], extra].concat()).1.is_err(), "{} bytes more", extra.len());
        }
    }

    #[test]
    fn frames_that_moved_are_refused() {
        let good = sealed(&plaintext(3 * FRAME));
        let (header, frames) = good.split_at(HEADER);
        let frames: Vec<_> = frames.chunks(FRAME + TAG).collect();
        for order in [&[1, 0, 2][..], &[0, 2, 1], &[0, 0, 1, 2], &[0, 2], &[2]] {
            let moved: Vec<u8> = header.iter().chain(order.iter().flat_map(|&i| frames[i])).copied().collect();
            assert!(opened(&moved).1.is_err(), "{order:?}");
        }
    }

    #[test]
    fn a_bad_second_frame_gives_only_the_first() {
        let mut bad = sealed(&plaintext(2 * FRAME));
        bad[HEADER + FRAME + TAG] ^= 1;
        let (out, result) = opened(&bad);
        assert!(matches!(result, Err(OpenError::Refused { frame: 1, .. })));
        assert_eq!(out, plaintext(FRAME));
        // A caller that reads on after the error must not take it for the end.
        let mut opener = Opener::new(&key(), Place { snapshot: snapshot(), file: &name() }, &bad[..]).unwrap();
        assert!(io::copy(&mut opener, &mut io::sink()).is_err());
        assert!(opener.read(&mut [0]).is_err());
    }

    #[test]
    fn a_file_opens_only_with_its_key_and_in_its_place() {
        let good = sealed(b"secret");
        let other_name = FileName::parse("imagf").unwrap();
        let here = snapshot();
        for (snapshot, file) in [
            (SnapshotId { actor: ActorUid::from_random([9; 16]), ..here }, &name()),
            (SnapshotId { generation: Generation::new(6), ..here }, &name()),
            (SnapshotId { op: OpId::from_random([9; 16]), ..here }, &name()),
            (here, &other_name),
        ] {
            let result = open(&key(), Place { snapshot, file }, &good[..], io::sink());
            assert!(matches!(result, Err(OpenError::Refused { frame: 0, .. })), "{snapshot:?} {file}");
        }
        let other_key = DataKey::from_random([8; 32]);
        let result = open(&other_key, Place { snapshot: here, file: &name() }, &good[..], io::sink());
        assert!(matches!(result, Err(OpenError::Refused { .. })));
        let result = open(&key(), Place { snapshot: here, file: &name() }, &b"plain text, not sealed"[..], io::sink());
        assert!(matches!(result, Err(OpenError::NotSealed { .. })));
    }

    #[test]
    fn the_same_prefix_in_two_places_gives_two_keystreams() {
        let [first, second] = ["a", "b"].map(|file| {
            let mut out = Vec::new();
            let place = Place { snapshot: snapshot(), file: &FileName::parse(file).unwrap() };
            seal(&key(), place, [3; 7], &[0; 64][..], &mut out).unwrap();
            out[HEADER..HEADER + 64].to_vec()
        });
        assert!(first != second && first != [0; 64] && second != [0; 64]);
    }

    #[test]
    fn the_counter_ends_before_a_nonce_repeats() {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(MAGIC);
        let mut frames = Frames::new(&key(), Place { snapshot: snapshot(), file: &name() }, header);
        frames.next = u64::from(u32::MAX);
        assert!(frames.nonce(false).is_some());
        assert!(frames.nonce(true).is_none());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn any_split_of_writes_and_reads_gives_the_same_file(
            length in 0..3 * FRAME, write in 1..2 * FRAME, read in 1..2 * FRAME,
        ) {
            let plaintext = plaintext(length);
            let place = Place { snapshot: snapshot(), file: &name() };
            let mut sealer = Sealer::new(&key(), place, [3; 7], Vec::new()).unwrap();
            for part in plaintext.chunks(write) {
                sealer.write_all(part).unwrap();
            }
            let (written, _) = sealer.finish().unwrap();
            prop_assert_eq!(&written, &sealed(&plaintext));

            let mut opener = Opener::new(&key(), place, &written[..]).unwrap();
            let (mut out, mut buffer) = (Vec::new(), vec![0; read]);
            loop {
                match opener.read(&mut buffer).unwrap() {
                    0 => break,
                    read => out.extend_from_slice(&buffer[..read]),
                }
            }
            prop_assert_eq!(out, plaintext);
        }

        #[test]
        fn a_flip_or_a_cut_of_a_long_file_is_refused(
            length in 0..3 * FRAME, at: proptest::sample::Index, bit in 0..8u32, cut: bool,
        ) {
            let mut bytes = sealed(&plaintext(length));
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] ^= 1 << bit }
            let (out, result) = opened(&bytes);
            prop_assert!(result.is_err());
            // Whatever came out before is a true beginning.
            prop_assert_eq!(&out[..], &plaintext(length)[..out.len()]);
        }
    }
}
