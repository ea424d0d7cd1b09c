use std::io::{self, Read, Write};

use ate_name::Digest;
use aws_lc_rs::digest;
use serde::{Deserialize, Serialize};

/// Which bytes, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    pub digest: Digest,
    pub length: u64,
}

impl Content {
    pub fn of(bytes: &[u8]) -> Self {
        let mut hashing = Hashing::new(io::sink());
        hashing.update(bytes);
        hashing.finish().1
    }
}

/// Passes bytes through, either way, and tells at the end what passed.
pub struct Hashing<T> {
    inner: T,
    context: digest::Context,
    length: u64,
}

impl<T> Hashing<T> {
    pub fn new(inner: T) -> Self {
        Self { inner, context: digest::Context::new(&digest::SHA256), length: 0 }
    }

    pub fn finish(self) -> (T, Content) {
        let digest = self.context.finish();
        let digest = digest.as_ref().try_into().expect("a sha256 has 32 bytes");
        (self.inner, Content { digest: Digest::from_bytes(digest), length: self.length })
    }

    fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
        self.length += bytes.len() as u64;
    }
}

impl<T> std::fmt::Debug for Hashing<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hashing").field("length", &self.length).finish_non_exhaustive()
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.update(&buffer[..read]);
        Ok(read)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_writing_and_hashing_at_once_agree() {
        let content = Content::of(b"abc");
        assert_eq!(content.digest.to_string(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(content.length, 3);

        let mut reader = Hashing::new(&b"abc"[..]);
        let mut writer = Hashing::new(Vec::new());
        io::copy(&mut reader, &mut writer).unwrap();
        assert_eq!(reader.finish().1, content);
        assert_eq!(writer.finish(), (b"abc".to_vec(), content));
    }
}
