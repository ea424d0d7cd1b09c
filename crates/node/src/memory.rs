//! Memory for images, made ahead: faulting in 24 MB costs as much as decoding it.
//!
//! Never used twice. A sandbox that held a descriptor may hold it still, and must not see what another is given.

use std::io;

use ate_sys::Memory;
use parking_lot::Mutex;

/// Kept ready: as many wakes and captures may begin at once without waiting for pages.
const READY: usize = 4;

/// The size of those: most images of small servers fit. Larger ones grow, and pay for what they add.
const SIZE: usize = 32 << 20;

#[derive(Debug, Default)]
pub(crate) struct Memories(Mutex<Vec<Memory>>);

impl Memories {
    /// Memory of at least `capacity` bytes that nobody has seen. Blocks while pages are faulted in.
    pub(crate) fn take(&self, capacity: usize) -> io::Result<Memory> {
        let ready = self.0.lock().pop();
        let mut memory = ready.map_or_else(make, Ok)?;
        memory.reserve(capacity)?;
        Ok(memory)
    }

    /// Makes what the next ones will take, while nobody waits. Blocks.
    pub(crate) fn refill(&self) -> io::Result<()> {
        while self.0.lock().len() < READY {
            let memory = make()?;
            let mut ready = self.0.lock();
            if ready.len() < READY {
                ready.push(memory);
            }
        }
        Ok(())
    }
}

fn make() -> io::Result<Memory> {
    Memory::with_capacity("ate-image", SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn what_a_sandbox_held_is_never_given_to_another() {
        let memories = Memories::default();
        memories.refill().unwrap();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..3 * READY {
            let memory = memories.take(1).unwrap();
            assert!(seen.insert(rustix::fs::fstat(memory.as_fd()).unwrap().st_ino));
            // Whoever holds on to it, as a sandbox might.
            std::mem::forget(memory.as_fd().try_clone_to_owned().unwrap());
            memories.refill().unwrap();
        }
    }

    #[test]
    fn a_large_image_gets_its_room() {
        assert!(Memories::default().take(SIZE + 1).unwrap().capacity() > SIZE);
    }
}
