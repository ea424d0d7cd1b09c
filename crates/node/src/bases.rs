//! Golden images, decoded: what snapshots are differences to.
//!
//! Each is decoded by one at a time and shared by all that use it meanwhile. Those that nobody uses are kept while there is room.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use ate_name::Digest;
use ate_snapshot::{Content, SnapshotKey};
use parking_lot::Mutex;

use crate::tier::Flights;

/// Bytes of those that nobody may be using. A golden image of a small server has some 30 MB, and a node runs few templates at a time: a
/// dozen and more of them fit. One for which there is no room is decoded again by the next save or wake, at about a second a gigabyte.
const KEPT_BYTES: u64 = 512 << 20;

/// A golden image, decoded.
#[derive(Debug)]
pub(crate) struct LoadedBase {
    pub(crate) content: Content,
    pub(crate) stored: u64,
    pub(crate) bytes: Vec<u8>,
}

#[derive(Debug, Default)]
pub(crate) struct Bases {
    loaded: Mutex<Loaded>,
    decoding: Flights<SnapshotKey, Mutex<()>>,
}

#[derive(Debug, Default)]
struct Loaded {
    /// All that somebody uses, or that are kept.
    known: HashMap<SnapshotKey, Weak<LoadedBase>>,
    /// Used last is last.
    kept: VecDeque<(SnapshotKey, Arc<LoadedBase>)>,
}

impl Bases {
    /// The one with this image; decoded by whoever comes first, while the others wait. Blocks.
    pub(crate) fn get<E>(
        &self,
        key: &SnapshotKey,
        image: Digest,
        decode: impl FnOnce() -> Result<LoadedBase, E>,
    ) -> Result<Arc<LoadedBase>, E> {
        if let Some(base) = self.find(key, image) {
            return Ok(base);
        }
        let flight = self.decoding.of(key);
        let _one = flight.lock();
        if let Some(base) = self.find(key, image) {
            return Ok(base);
        }
        let base = Arc::new(decode()?);
        self.keep(key, &base);
        Ok(base)
    }

    fn find(&self, key: &SnapshotKey, image: Digest) -> Option<Arc<LoadedBase>> {
        let mut loaded = self.loaded.lock();
        let base = loaded.known.get(key)?.upgrade().filter(|base| base.content.digest == image)?;
        loaded.put_last(key, &base);
        Some(base)
    }

    pub(crate) fn keep(&self, key: &SnapshotKey, base: &Arc<LoadedBase>) {
        let mut loaded = self.loaded.lock();
        loaded.known.retain(|_, base| base.strong_count() > 0);
        loaded.known.insert(key.clone(), Arc::downgrade(base));
        loaded.put_last(key, base);
    }

    pub(crate) fn forget(&self, key: &SnapshotKey) {
        let mut loaded = self.loaded.lock();
        loaded.known.remove(key);
        loaded.kept.retain(|(other, _)| other != key);
    }
}

impl Loaded {
    fn put_last(&mut self, key: &SnapshotKey, base: &Arc<LoadedBase>) {
        self.kept.retain(|(other, _)| other != key);
        if base.content.length > KEPT_BYTES {
            return;
        }
        self.kept.push_back((key.clone(), Arc::clone(base)));
        let mut bytes: u64 = self.kept.iter().map(|(_, base)| base.content.length).sum();
        while bytes > KEPT_BYTES
            && let Some((_, gone)) = self.kept.pop_front()
        {
            bytes -= gone.content.length;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use ate_name::{ActorKey, ActorUid, Generation, OpId};
    use ate_snapshot::{Location, SnapshotId};

    use super::*;

    fn key(n: u8) -> SnapshotKey {
        let id = SnapshotId {
            actor: ActorUid::from_random([n; 16]),
            generation: Generation::new(1),
            op: OpId::from_random([n; 16]),
        };
        let location = Location::parse("gs://bucket/here").unwrap();
        SnapshotKey { location, actor: ActorKey::parse("space", "golden").unwrap(), id }
    }

    const IMAGE: Digest = Digest::from_bytes([1; 32]);

    /// One that says that it has so many bytes.
    fn base(length: u64) -> LoadedBase {
        LoadedBase { content: Content { digest: IMAGE, length }, stored: length, bytes: Vec::new() }
    }

    /// Whether it had to be decoded.
    fn is_decoded(bases: &Bases, n: u8, length: u64) -> (Arc<LoadedBase>, bool) {
        let mut decoded = false;
        let base = bases.get(&key(n), IMAGE, || {
            decoded = true;
            Ok::<_, Infallible>(base(length))
        });
        (base.unwrap(), decoded)
    }

    #[test]
    fn however_many_want_a_golden_at_once_it_is_decoded_once() {
        let (bases, decoded) = (Bases::default(), AtomicUsize::new(0));
        let all_want_it = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    all_want_it.wait();
                    let got = bases.get(&key(1), IMAGE, || {
                        decoded.fetch_add(1, Ordering::Relaxed);
                        // Until the others wait for it, or would decode it, too.
                        for _ in 0..1000 {
                            std::thread::yield_now();
                        }
                        Ok::<_, Infallible>(base(1))
                    });
                    got.unwrap();
                });
            }
        });
        assert_eq!(decoded.into_inner(), 1);
    }

    #[test]
    fn goldens_that_nobody_uses_take_no_more_than_their_room_and_the_last_used_stay() {
        let bases = Bases::default();
        let half = KEPT_BYTES / 2;
        assert!(is_decoded(&bases, 1, half).1 && is_decoded(&bases, 2, half).1);
        assert!(!is_decoded(&bases, 1, half).1, "there is room for both");
        assert!(is_decoded(&bases, 3, half).1);
        assert!(!is_decoded(&bases, 1, half).1 && is_decoded(&bases, 2, half).1, "the second was not used for longest");
        let kept = || bases.loaded.lock().kept.iter().map(|(_, base)| base.content.length).sum::<u64>();
        assert_eq!(kept(), KEPT_BYTES);
        let (large, _) = is_decoded(&bases, 4, KEPT_BYTES + 1);
        assert!(!is_decoded(&bases, 4, KEPT_BYTES + 1).1, "somebody uses it");
        drop(large);
        assert!(is_decoded(&bases, 4, KEPT_BYTES + 1).1 && kept() == KEPT_BYTES);
        bases.forget(&key(2));
        assert!(is_decoded(&bases, 2, half).1, "it is not to be relied on");
    }
}
