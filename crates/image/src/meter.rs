//! What a pull may cost, and readers that hash and count what passes.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use ate_name::Digest;
use aws_lc_rs::digest::{Context, SHA256};

/// The most that one image may cost a node. Whatever goes beyond is refused and leaves nothing behind.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Layers of an image. Builders stop at 127; overlayfs takes 500.
    pub layers: u64,
    /// Bytes of all layers of an image, compressed and not: a full disk harms every actor of the node.
    pub image_bytes: u64,
    /// Entries of all layers of an image, directories that are only implied included: inodes run out before bytes do.
    pub entries: u64,
    /// Bytes of one file. The default is the most that a tar header can say without an extension.
    pub file_bytes: u64,
    /// How many bytes one compressed byte may become. Text reaches 20, a bomb 1000 (gzip) or more (zstd).
    /// A layer of up to 64 MiB is never a bomb.
    pub expansion: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { layers: 128, image_bytes: 32 << 30, entries: 1_000_000, file_bytes: (8 << 30) - 1, expansion: 200 }
    }
}

const NEVER_A_BOMB: u64 = 64 << 20;

/// What is left of an image's limits while its layers are unpacked side by side.
#[derive(Debug)]
pub(crate) struct Allowance {
    pub(crate) limits: Limits,
    bytes: AtomicU64,
    entries: AtomicU64,
    cancelled: AtomicBool,
}

impl Allowance {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            bytes: AtomicU64::new(limits.image_bytes),
            entries: AtomicU64::new(limits.entries),
            cancelled: AtomicBool::new(false),
            limits: limits.clone(),
        }
    }

    pub(crate) fn take_entry(&self) -> io::Result<()> {
        take(&self.entries, 1)
            .ok_or_else(|| io::Error::other(format!("the image has more than {} entries", self.limits.entries)))
    }

    fn take_bytes(&self, bytes: u64) -> io::Result<()> {
        if self.cancelled.load(Relaxed) {
            return Err(io::Error::other("nobody waits for this image any more"));
        }
        take(&self.bytes, bytes).ok_or_else(|| {
            io::Error::other(format!("the image unpacks to more than {} bytes", self.limits.image_bytes))
        })
    }
}

fn take(left: &AtomicU64, amount: u64) -> Option<()> {
    left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(amount)).ok().map(drop)
}

/// Ends the unpacking of an image's layers when dropped: a thread, unlike a future, does not end by itself.
#[derive(Debug)]
pub(crate) struct CancelOnDrop(pub(crate) Arc<Allowance>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancelled.store(true, Relaxed);
    }
}

/// Hashes and counts the bytes that are read through it.
pub(crate) struct Hashing<R> {
    inner: R,
    context: Context,
    count: u64,
}

impl<R: Read> Hashing<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self { inner, context: Context::new(&SHA256), count: 0 }
    }

    /// The digest and the length of everything up to the end of the stream.
    pub(crate) fn finish(mut self) -> io::Result<(Digest, u64)> {
        io::copy(&mut self, &mut io::sink())?;
        Ok((finish(self.context), self.count))
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.context.update(&buffer[..count]);
        self.count += count as u64;
        Ok(count)
    }
}

/// Lets through what the allowance and the size of the compressed layer permit.
pub(crate) struct Metered<'a, R> {
    inner: R,
    allowance: &'a Allowance,
    left: u64,
}

impl<'a, R> Metered<'a, R> {
    pub(crate) fn new(inner: R, allowance: &'a Allowance, compressed: u64) -> Self {
        let left = compressed.saturating_mul(allowance.limits.expansion).max(NEVER_A_BOMB);
        Self { inner, allowance, left }
    }
}

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.allowance.take_bytes(count as u64)?;
        self.left = self.left.checked_sub(count as u64).ok_or_else(|| {
            io::Error::other(format!("it expands by more than {} times", self.allowance.limits.expansion))
        })?;
        Ok(count)
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> Digest {
    let mut context = Context::new(&SHA256);
    context.update(bytes);
    finish(context)
}

fn finish(context: Context) -> Digest {
    let digest = context.finish();
    Digest::from_bytes(digest.as_ref().try_into().expect("a sha256 has 32 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_nobody_waits_for_is_not_unpacked_further() {
        let allowance = Arc::new(Allowance::new(&Limits::default()));
        let guard = CancelOnDrop(allowance.clone());
        let mut archive = Metered::new(io::repeat(0), &allowance, 1);
        archive.read_exact(&mut [0; 10]).unwrap();
        drop(guard);
        archive.read_exact(&mut [0; 10]).unwrap_err();
    }
}
