//! Chance, all of it from one seed.

use std::time::Duration;

use parking_lot::Mutex;

/// SplitMix64: small, and the same on every machine and in every version, so that a seed stays what it is.
#[derive(Debug)]
pub(crate) struct Dice(Mutex<u64>);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Mutex::new(seed))
    }

    pub(crate) fn draw(&self) -> u64 {
        let mut state = self.0.lock();
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.draw().to_le_bytes());
        bytes[8..].copy_from_slice(&self.draw().to_le_bytes());
        bytes
    }

    /// One of `0..n`.
    pub(crate) fn below(&self, n: usize) -> usize {
        usize::try_from(self.draw() % n.max(1) as u64).unwrap_or(0)
    }

    /// So often out of a thousand.
    pub(crate) fn happens(&self, per_mille: u32) -> bool {
        self.draw() % 1000 < u64::from(per_mille)
    }

    pub(crate) fn between(&self, least: Duration, most: Duration) -> Duration {
        let span = u64::try_from((most - least).as_micros()).unwrap_or(u64::MAX).max(1);
        least + Duration::from_micros(self.draw() % span)
    }

    pub(crate) fn pick<'a, T>(&self, of: &'a [T]) -> Option<&'a T> {
        of.get(self.below(of.len()))
    }
}
