use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;

use crate::{BlobError, BlobPath, blocking, error};

/// What is put. A file is read from its start, wherever its cursor is, and must not change meanwhile.
#[derive(Debug)]
pub enum Source {
    Bytes(Bytes),
    File(File),
}

impl From<Bytes> for Source {
    fn from(bytes: Bytes) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<File> for Source {
    fn from(file: File) -> Self {
        Self::File(file)
    }
}

/// A source whose length is known. Any piece of it can be read again, so that a request can be repeated.
#[derive(Clone, Debug)]
pub(crate) struct Body {
    content: Content,
    length: u64,
}

#[derive(Clone, Debug)]
enum Content {
    Bytes(Bytes),
    File(Arc<File>),
}

impl Body {
    pub(crate) fn new(source: Source) -> io::Result<Self> {
        Ok(match source {
            Source::Bytes(bytes) => Self { length: bytes.len() as u64, content: Content::Bytes(bytes) },
            Source::File(file) => Self { length: file.metadata()?.len(), content: Content::File(Arc::new(file)) },
        })
    }

    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Blocks.
    pub(crate) fn read_at(&self, offset: u64, length: usize) -> io::Result<Bytes> {
        match &self.content {
            Content::Bytes(bytes) => {
                let start = usize::try_from(offset).ok().filter(|start| start + length <= bytes.len());
                start.map(|start| bytes.slice(start..start + length)).ok_or(io::ErrorKind::UnexpectedEof.into())
            }
            Content::File(file) => {
                let mut piece = vec![0; length];
                file.read_exact_at(&mut piece, offset)?;
                Ok(piece.into())
            }
        }
    }

    pub(crate) async fn read(&self, object: &BlobPath, offset: u64, length: usize) -> Result<Bytes, BlobError> {
        let body = self.clone();
        let read = blocking(move || body.read_at(offset, length)).await;
        read.map_err(|error| BlobError::Source { object: object.clone(), reason: error::reason(&error) })
    }
}
