use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, SeekFrom};
use rustix::mm::{MapFlags, ProtFlags};

/// Anonymous memory with a descriptor: it can be passed to another process, written there and mapped here.
///
/// It can never shrink (sealed), so a mapping of it cannot be cut off under the reader by whoever else holds it.
#[derive(Debug)]
pub struct Memory {
    fd: OwnedFd,
    capacity: usize,
}

impl Memory {
    /// Memory of at least `capacity` bytes, already backed by pages: faulting them in here costs the caller's time and
    /// is charged to the caller's memory cgroup, not to a sandbox that later writes a snapshot into it.
    pub fn with_capacity(name: &str, capacity: usize) -> io::Result<Self> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let mut memory = Self { fd, capacity: 0 };
        memory.reserve(capacity)?;
        rustix::fs::fcntl_add_seals(&memory.fd, SealFlags::SHRINK)?;
        Ok(memory)
    }

    /// Takes over a descriptor that another process sent. Refused if it could shrink under a mapping.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        if !rustix::fs::fcntl_get_seals(&fd)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "memory that is not sealed against shrinking"));
        }
        let capacity = file_size(&fd)?;
        Ok(Self { fd, capacity })
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    pub fn reserve(&mut self, capacity: usize) -> io::Result<()> {
        if capacity > self.capacity {
            let (from, more) = (self.capacity as u64, (capacity - self.capacity) as u64);
            rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), from, more)?;
            self.capacity = capacity;
        }
        Ok(())
    }

    /// The next reader or writer of the descriptor, in whichever process, begins at the first byte.
    pub fn rewind(&self) -> io::Result<()> {
        rustix::fs::seek(&self.fd, SeekFrom::Start(0))?;
        Ok(())
    }

    /// How far whoever shares the descriptor has written since [`rewind`](Self::rewind).
    pub fn written(&mut self) -> io::Result<usize> {
        let written = rustix::fs::tell(&self.fd)?;
        self.capacity = self.capacity.max(file_size(&self.fd)?);
        usize::try_from(written).map_err(io::Error::other)
    }

    /// Maps the first `len` bytes, shared with every holder of the descriptor. The caller must know that none of them
    /// writes meanwhile; `&mut self` rules it out within this process.
    pub fn map(&mut self, len: usize) -> io::Result<Mapping<'_>> {
        if len > self.capacity {
            // Whoever shares the descriptor may have written past what was reserved.
            self.capacity = self.capacity.max(file_size(&self.fd)?);
        }
        if len > self.capacity {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "mapping past the end of the memory"));
        }
        if len == 0 {
            return Ok(Mapping { at: NonNull::dangling(), len: 0, memory: std::marker::PhantomData });
        }
        // SAFETY: the kernel picks the address, so nothing is mapped over. The file is sealed against shrinking and at
        // least `len` long, so every page of the range stays backed for as long as the mapping lives.
        let at = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                &self.fd,
                0,
            )?
        };
        let at = NonNull::new(at.cast()).expect("mmap never returns null without MAP_FIXED");
        Ok(Mapping { at, len, memory: std::marker::PhantomData })
    }
}

impl AsFd for Memory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn file_size(fd: impl AsFd) -> io::Result<usize> {
    usize::try_from(rustix::fs::fstat(fd)?.st_size).map_err(io::Error::other)
}

/// The bytes of a [`Memory`]; unmapped on drop.
#[derive(Debug)]
pub struct Mapping<'a> {
    at: NonNull<u8>,
    len: usize,
    memory: std::marker::PhantomData<&'a mut Memory>,
}

// SAFETY: a mapping is plain memory owned by this value; nothing about it belongs to the thread that made it.
unsafe impl Send for Mapping<'_> {}
// SAFETY: shared access only reads.
unsafe impl Sync for Mapping<'_> {}

impl Deref for Mapping<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `at` is valid for `len` bytes until drop (see `Memory::map`); no one writes meanwhile, which is the
        // contract of `map`; u8 has no invalid values.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl DerefMut for Mapping<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: exactly the range that `map` mapped, and no borrow of it outlives self.
            let _ = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_shows_what_the_descriptor_was_given() {
        let mut memory = Memory::with_capacity("test", 1 << 16).unwrap();
        rustix::io::write(&memory, b"hello").unwrap();
        assert_eq!(memory.written().unwrap(), 5);
        assert_eq!(&memory.map(5).unwrap()[..], b"hello");
        memory.map(5).unwrap()[0] = b'j';
        memory.rewind().unwrap();
        let mut back = [0; 5];
        rustix::io::read(&memory, &mut back).unwrap();
        assert_eq!(&back, b"jello");
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let fd = rustix::fs::memfd_create("bare", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(Memory::from_fd(fd).is_err());
        let memory = Memory::with_capacity("sealed", 4096).unwrap();
        assert!(rustix::fs::ftruncate(&memory, 0).is_err());
    }

    #[test]
    fn a_mapping_past_the_end_is_refused_until_somebody_writes_there() {
        let mut memory = Memory::with_capacity("small", 10).unwrap();
        assert!(memory.map(11).is_err());
        let mut shared = Memory::from_fd(memory.as_fd().try_clone_to_owned().unwrap()).unwrap();
        rustix::io::write(&shared, b"longer than that").unwrap();
        assert_eq!(&memory.map(16).unwrap()[..], b"longer than that");
        assert_eq!(shared.written().unwrap(), 16);
    }
}
