//! Memory for images, kept for the next one: faulting in 24 MB anew costs as much as decoding it.

use std::io;

use ate_sys::Memory;
use parking_lot::Mutex;

/// Kept ready at most; more are given back to the system.
const KEPT: usize = 4;

/// Larger ones are given back at once: they are rare, and memory is dear.
const KEPT_SIZE: usize = 256 << 20;

/// Room that is always there: most images of small servers fit.
const SMALLEST: usize = 32 << 20;

#[derive(Debug, Default)]
pub(crate) struct Memories(Mutex<Vec<Memory>>);

impl Memories {
    /// Memory of at least `capacity` bytes. Blocks while pages are faulted in.
    pub(crate) fn take(&self, capacity: usize) -> io::Result<Memory> {
        let kept = {
            let mut kept = self.0.lock();
            let fits = kept.iter().position(|memory| memory.capacity() >= capacity);
            fits.or(kept.len().checked_sub(1)).map(|index| kept.swap_remove(index))
        };
        let mut memory = match kept {
            Some(memory) => memory,
            None => Memory::with_capacity("ate-image", capacity.max(SMALLEST))?,
        };
        memory.reserve(capacity)?;
        memory.rewind()?;
        Ok(memory)
    }

    pub(crate) fn give_back(&self, memory: Memory) {
        let mut kept = self.0.lock();
        if kept.len() < KEPT && memory.capacity() <= KEPT_SIZE {
            kept.push(memory);
        }
    }
}
