//! Stored memory images: zstd, against a base image where there is one.
//!
//! An actor descends from its template's golden snapshot, so most of its memory is somewhere in the golden image, though
//! not at the same offset: pages get inserted. zstd with the base as prefix and long-distance matching finds it there.
//!
//! ```text
//!   image    │ segment 0, 128 MiB │ segment 1, 128 MiB │ rest │
//!   stored   │ frame 0 │ frame 1 │ frame 2 │                       plain zstd frames, nothing around them
//!   prefix   of a frame: the base from 64 MiB before the segment's offset to 64 MiB after its end
//!
//!   every frame: single segment, content size and checksum present, no dictionary id
//! ```
//!
//! A prefix can be referred to only while the frame is no longer than the window, and the window ends at 2^27 because
//! that is what any zstd decoder accepts; hence segments. An image of one segment is what `zstd -d --patch-from=BASE`
//! reads. The checksums tell a wrong base from the right one; that the stored bytes are the ones that were written, in
//! their order, is for the digest or the seal around them to say. Neither direction holds more than one compressed frame, so an image of gigabytes needs no second copy of itself.
//!
//! Measured (`examples/measure.rs`; 24 MiB, 300 pages edited, 12 inserted; best of 40 on two busy 2.8 GHz cores): 75 KB
//! instead of 8.8 MB; encode 50 ms, decode 6.5 ms where memcpy takes 2.5 and sha256 22. Of the 6.5, 2 are the checksum.
//! For 300 MiB, three segments: 139 KB instead of 124 MB; encode 770 ms, decode 90 where memcpy takes 45.
//! Level 1 with zstd's own long-distance parameters is the best of what was tried: other levels and strategies, hash
//! logs, hash rates, match lengths and a larger window cost up to three times the time and gain at most 4 % of the size;
//! worker threads give up most matches at their job borders (169 KB) and are slower at this size.

use std::io::{self, Read, Write};

use zstd::zstd_safe::{CCtx, CParameter, DCtx, compress_bound, get_error_name};

/// How an image is cut, and how far from its own offset a segment looks into the base. Part of the format.
#[derive(Clone, Copy)]
struct Layout {
    segment: usize,
    reach: usize,
}

const LAYOUT: Layout = Layout { segment: 1 << MAX_WINDOW_LOG, reach: 64 << 20 };

/// Largest window that a zstd decoder accepts without being told. As frames are single segments, this is also what
/// bounds them: a frame that announces more than its segment is refused before anything is decoded.
const MAX_WINDOW_LOG: u32 = 27;

/// Smallest window zstd knows.
const MIN_WINDOW_LOG: u32 = 10;

/// zstd's limit for one block; a header that announces more is damaged.
const MAX_BLOCK: usize = 128 << 10;

const MAGIC: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();

/// Single segment and checksum set; no dictionary id, no reserved bit.
const DESCRIPTOR: u8 = 0b0010_0100;
const DESCRIPTOR_MASK: u8 = 0b0011_1111;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded {
    pub image: u64,
    pub stored: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    #[error("writing a stored image failed")]
    Write(#[source] io::Error),
    #[error("zstd could not encode an image: {0}")]
    Codec(&'static str),
}

#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    #[error("reading a stored image failed")]
    Read(#[source] io::Error),
    #[error("the stored image ends early; fetch it again, or restore an earlier snapshot")]
    Truncated,
    #[error("the stored image goes on after its end; fetch it again, or restore an earlier snapshot")]
    TooLong,
    #[error(
        "the manifest promises an image of {promised} bytes and the stored one has {found}; the two do not belong together"
    )]
    Length { promised: u64, found: u64 },
    #[error("the stored image is malformed: {0}; fetch it again, or restore an earlier snapshot")]
    Malformed(&'static str),
    #[error("the stored image does not decode ({0}): it is damaged, or the base is not the one it was encoded against")]
    Codec(&'static str),
}

/// Stores `image` against `base`. The same `base`, to the byte, is needed to decode it. The two must not overlap in
/// memory: zstd then takes the base for overwritten and finds nothing in it.
pub fn encode(base: Option<&[u8]>, image: &[u8], out: impl Write) -> Result<Encoded, EncodeError> {
    LAYOUT.encode(base, image, out)
}

/// Fills `image` from what [`encode`] stored. `image` has the length that the manifest names and is usually a mapped
/// memfd: zstd writes into it directly, and after an error it holds anything.
pub fn decode(base: Option<&[u8]>, stored: impl Read, image: &mut [u8]) -> Result<(), DecodeError> {
    LAYOUT.decode(base, stored, image)
}

/// Whether a delta should be kept rather than an image stored full. A delta pins its base in storage and on every node
/// that wakes the actor, so saving less than half does not pay. Both are stored lengths; that of the base itself serves
/// as an estimate for the full image, so that nothing is compressed twice to find out.
pub fn worth_it(delta: u64, full: u64) -> bool {
    delta <= full / 2
}

impl Layout {
    /// What the segment at `start` may refer to; empty is as good as none.
    fn prefix(self, base: Option<&[u8]>, start: usize, length: usize) -> &[u8] {
        let base = base.unwrap_or_default();
        let from = start.saturating_sub(self.reach).min(base.len());
        let to = start.saturating_add(length).saturating_add(self.reach).min(base.len());
        &base[from..to]
    }

    fn encode(self, base: Option<&[u8]>, image: &[u8], mut out: impl Write) -> Result<Encoded, EncodeError> {
        let codec = |code| EncodeError::Codec(get_error_name(code));
        let longest = image.len().min(self.segment);
        let window_log = longest.next_power_of_two().ilog2().clamp(MIN_WINDOW_LOG, MAX_WINDOW_LOG);
        let mut context = CCtx::create();
        for parameter in [
            CParameter::CompressionLevel(1),
            CParameter::EnableLongDistanceMatching(true),
            CParameter::WindowLog(window_log),
            CParameter::ContentSizeFlag(true),
            CParameter::ChecksumFlag(true),
        ] {
            context.set_parameter(parameter).map_err(codec)?;
        }
        // Reserved for the worst case; the kernel gives pages only to what is written.
        let mut frame = Vec::with_capacity(compress_bound(longest));
        let mut stored = 0;
        for (index, segment) in image.chunks(self.segment).enumerate() {
            context.ref_prefix(self.prefix(base, index * self.segment, segment.len())).map_err(codec)?;
            context.compress2(&mut frame, segment).map_err(codec)?;
            out.write_all(&frame).map_err(EncodeError::Write)?;
            stored += frame.len() as u64;
        }
        Ok(Encoded { image: image.len() as u64, stored })
    }

    fn decode(self, base: Option<&[u8]>, mut stored: impl Read, image: &mut [u8]) -> Result<(), DecodeError> {
        let codec = |code| DecodeError::Codec(get_error_name(code));
        let promised = image.len() as u64;
        let mut context = DCtx::create();
        let mut frame = Vec::new();
        for (index, segment) in image.chunks_mut(self.segment).enumerate() {
            let start = index * self.segment;
            let found = read_frame(&mut stored, segment.len(), &mut frame)?;
            if found != segment.len() as u64 {
                return Err(DecodeError::Length { promised, found: found.saturating_add(start as u64) });
            }
            context.ref_prefix(self.prefix(base, start, segment.len())).map_err(codec)?;
            // In one call, because only then does zstd write to its destination without a window of its own.
            let written = context.decompress(segment, &frame).map_err(codec)?;
            debug_assert_eq!(written, segment.len(), "zstd checks the content size that the header announced");
        }
        match take(&mut stored, 1, &mut frame) {
            Err(DecodeError::Truncated) => Ok(()),
            Ok(_) => Err(DecodeError::TooLong),
            Err(error) => Err(error),
        }
    }
}

/// Reads exactly one frame into `frame` and returns the content size it announces. zstd frames do not carry their own
/// length; it is found by walking the block headers.
fn read_frame(stored: &mut impl Read, expected: usize, frame: &mut Vec<u8>) -> Result<u64, DecodeError> {
    frame.clear();
    take(stored, 5, frame)?;
    if frame[..4] != MAGIC || frame[4] & DESCRIPTOR_MASK != DESCRIPTOR {
        return Err(DecodeError::Malformed("not a zstd frame of the kind that is stored"));
    }
    let content = match frame[4] >> 6 {
        0 => u64::from(take(stored, 1, frame)?[0]),
        1 => little_endian(take(stored, 2, frame)?) + 256,
        2 => little_endian(take(stored, 4, frame)?),
        _ => little_endian(take(stored, 8, frame)?),
    };
    if content != expected as u64 {
        return Ok(content);
    }
    loop {
        let header = little_endian(take(stored, 3, frame)?);
        let size = usize::try_from(header >> 3).expect("21 bits");
        let raw_length = if header >> 1 & 3 == 1 { 1 } else { size };
        if size > MAX_BLOCK || frame.len() + raw_length > compress_bound(expected) {
            return Err(DecodeError::Malformed("a block is longer than zstd makes one"));
        }
        take(stored, raw_length, frame)?;
        if header & 1 == 1 {
            take(stored, 4, frame)?;
            return Ok(content);
        }
    }
}

/// Appends `length` bytes to `frame` and returns them.
fn take<'f>(stored: &mut impl Read, length: usize, frame: &'f mut Vec<u8>) -> Result<&'f [u8], DecodeError> {
    let start = frame.len();
    frame.resize(start + length, 0);
    stored.read_exact(&mut frame[start..]).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => DecodeError::Truncated,
        _ => DecodeError::Read(error),
    })?;
    Ok(&frame[start..])
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: usize = 4096;
    const SMALL: Layout = Layout { segment: 16 * PAGE, reach: 4 * PAGE };

    /// Pages that do not compress and do not resemble each other: what shrinks, shrinks because of the base.
    fn noise(pages: usize, seed: u64) -> Vec<u8> {
        let mut state = seed | 1;
        let mut word = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        };
        (0..pages * PAGE / 8).flat_map(|_| word()).collect()
    }

    fn stored(layout: Layout, base: Option<&[u8]>, image: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let encoded = layout.encode(base, image, &mut out).unwrap();
        assert_eq!(encoded, Encoded { image: image.len() as u64, stored: out.len() as u64 });
        out
    }

    fn decoded(layout: Layout, base: Option<&[u8]>, stored: &[u8], length: usize) -> Result<Vec<u8>, DecodeError> {
        let mut image = vec![0xaa; length];
        layout.decode(base, stored, &mut image).map(|()| image)
    }

    #[test]
    fn a_delta_holds_only_what_is_new_also_when_pages_moved() {
        let base = noise(100, 1);
        let mut image = base.clone();
        image[5 * PAGE] ^= 1;
        image.splice(50 * PAGE..50 * PAGE, noise(2, 9));
        for layout in [LAYOUT, SMALL] {
            let delta = stored(layout, Some(&base), &image);
            assert!(delta.len() < 3 * PAGE, "{} bytes", delta.len());
            assert_eq!(decoded(layout, Some(&base), &delta, image.len()).unwrap(), image);
        }
        assert!(stored(LAYOUT, None, &image).len() > 100 * PAGE);
    }

    #[test]
    fn a_segment_finds_what_drifted_within_its_reach_and_not_beyond() {
        let base = noise(64, 1);
        let drifted = |pages| [noise(pages, 5), base.clone()].concat();
        let delta = stored(SMALL, Some(&base), &drifted(4));
        assert!(delta.len() < 6 * PAGE, "{} bytes", delta.len());
        assert_eq!(decoded(SMALL, Some(&base), &delta, 68 * PAGE).unwrap(), drifted(4));
        let delta = stored(SMALL, Some(&base), &drifted(40));
        assert!(delta.len() > 100 * PAGE, "{} bytes", delta.len());
        assert_eq!(decoded(SMALL, Some(&base), &delta, 104 * PAGE).unwrap(), drifted(40));
    }

    #[test]
    fn another_base_or_none_is_refused() {
        let (base, image) = (noise(20, 1), noise(20, 1));
        let mut other = base.clone();
        // One bit, in bytes that the image is copied from: only the checksum of the result can tell.
        other[7 * PAGE] ^= 1;
        let delta = stored(LAYOUT, Some(&base), &image);
        assert!(matches!(decoded(LAYOUT, Some(&other), &delta, image.len()), Err(DecodeError::Codec(_))));
        assert!(matches!(decoded(LAYOUT, Some(&base[PAGE..]), &delta, image.len()), Err(DecodeError::Codec(_))));
        assert!(matches!(decoded(LAYOUT, None, &delta, image.len()), Err(DecodeError::Codec(_))));
    }

    #[test]
    fn a_stored_image_of_another_length_is_refused() {
        let image = noise(20, 1);
        for layout in [LAYOUT, SMALL] {
            let full = stored(layout, None, &image);
            for length in [0, 1, image.len() - 1, image.len() + 1] {
                let result = decoded(layout, None, &full, length);
                assert!(
                    matches!(result, Err(DecodeError::Length { .. } | DecodeError::TooLong)),
                    "{length}: {:?}",
                    result.map(|image| image.len())
                );
            }
            for cut in 0..64 {
                let cut = full.len() * cut / 64;
                assert!(matches!(decoded(layout, None, &full[..cut], image.len()), Err(DecodeError::Truncated)));
            }
            let longer = [&full[..], &[0]].concat();
            assert!(matches!(decoded(layout, None, &longer, image.len()), Err(DecodeError::TooLong)));
        }
    }

    #[test]
    fn frames_of_another_kind_are_refused() {
        let image = vec![1; 10_000];
        let frame = |parameters: &[CParameter]| {
            let (mut context, mut out) = (CCtx::create(), Vec::with_capacity(20_000));
            for parameter in parameters {
                context.set_parameter(*parameter).unwrap();
            }
            context.compress2(&mut out, &image).unwrap();
            out
        };
        let checksum = CParameter::ChecksumFlag(true);
        assert!(decoded(LAYOUT, None, &frame(&[checksum]), image.len()).is_ok());
        for other in [
            frame(&[]),
            frame(&[checksum, CParameter::ContentSizeFlag(false)]),
            frame(&[checksum, CParameter::WindowLog(10)]),
            b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd and so on".to_vec(),
        ] {
            assert!(matches!(decoded(LAYOUT, None, &other, image.len()), Err(DecodeError::Malformed(_))));
        }
        // A block header that announces 2 MB in a frame of 10 kB.
        let mut large = frame(&[checksum]);
        large[7..10].copy_from_slice(&[0xfc, 0xff, 0xff]);
        assert!(matches!(decoded(LAYOUT, None, &large, image.len()), Err(DecodeError::Malformed(_))));
    }

    #[test]
    fn an_empty_image_is_stored_as_nothing() {
        assert!(stored(LAYOUT, Some(&noise(1, 1)), &[]).is_empty());
        assert!(decoded(LAYOUT, None, &[], 0).is_ok());
    }

    #[test]
    fn a_delta_is_kept_when_it_saves_half() {
        assert!(worth_it(74_000, 4_400_000) && worth_it(0, 0) && worth_it(50, 100));
        assert!(!worth_it(51, 100) && !worth_it(1, 1));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_image_comes_back_against_any_base(
            base_pages in 0..80usize, tail in 0..PAGE, seed: u64,
            edits in prop::collection::vec((any::<prop::sample::Index>(), 0..3usize, 0..3usize), 0..8), small: bool,
        ) {
            let layout = if small { SMALL } else { LAYOUT };
            let base = noise(base_pages, 1);
            let mut image = base.clone();
            for (at, removed, inserted) in edits {
                let at = at.index(image.len() + 1);
                let end = (at + removed * PAGE).min(image.len());
                image.splice(at..end, noise(inserted, seed));
            }
            image.extend(vec![0; tail]);
            for base in [Some(&base[..]), None] {
                let stored = stored(layout, base, &image);
                prop_assert!(decoded(layout, base, &stored, image.len()).unwrap() == image);
            }
        }

        #[test]
        fn a_flipped_bit_never_gives_another_image(at: prop::sample::Index, bit in 0..8u32, small: bool) {
            let layout = if small { SMALL } else { LAYOUT };
            let base = noise(40, 1);
            let mut image = base.clone();
            image.splice(9 * PAGE..10 * PAGE, (0..3 * PAGE).map(|i| (i % 7).to_le_bytes()[0]));
            let mut stored = stored(layout, Some(&base), &image);
            let at = at.index(stored.len());
            stored[at] ^= 1 << bit;
            if let Ok(other) = decoded(layout, Some(&base), &stored, image.len()) {
                prop_assert!(other == image, "byte {} bit {}", at, bit);
            }
        }

        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), length in 0..1000usize) {
            let framed = [&MAGIC[..], &bytes].concat();
            let _ = decoded(LAYOUT, None, &bytes, length);
            let _ = decoded(LAYOUT, None, &framed, length);
        }
    }
}
