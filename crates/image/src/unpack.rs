//! One layer, from the bytes of a stranger to a directory in overlayfs form.
//!
//! The archive is read raw: extension headers are parsed here, because they need limits (the `tar` crate reads them
//! whole) and because a capability is binary and may hold a newline.
//!
//! ```text
//!   blob ─ Hashing ─ decompress ─ Metered ─ Hashing ─ tar entries ─> Tree
//!          digest                 limits    diff-id
//! ```

use std::ffi::OsStr;
use std::io::{self, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ate_name::Digest;
use rustix::fs::Timespec;
use rustix::io::Errno;
use tar::{EntryType, Header};

use crate::document::Compression;
use crate::meter::{Allowance, Hashing, Metered};
use crate::tree::{Attributes, EntryPath, MAX_PATH, Tree};

#[cfg(test)]
mod tests;

/// Longest extension header (long names, xattrs); a longer one is refused. They are held in memory.
const MAX_EXTENSION: u64 = 1 << 20;

/// The most memory that zstd may want for its window, as a power of two; a layer that needs more is refused.
const MAX_ZSTD_WINDOW_LOG: u32 = 27;

const WHITEOUT: &[u8] = b".wh.";
/// Names reserved by aufs, where whiteouts come from; all but the opaque marker mean nothing here.
const AUFS: &[u8] = b".wh..wh.";
const OPAQUE_MARKER: &[u8] = b".wh..wh..opq";

#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error("entry {entry:?} {refused}")]
    Entry { entry: String, refused: Refused },
    #[error("cannot write entry {entry:?}")]
    Write { entry: String, source: io::Error },
    #[error("cannot read the archive")]
    Read(#[source] io::Error),
    #[error("its {what} is sha256:{actual}, not sha256:{expected}; the source is damaged or lies")]
    Digest { what: &'static str, expected: Digest, actual: Digest },
    #[error("it has {actual} bytes, not {expected}; the source is damaged or lies")]
    Size { expected: u64, actual: u64 },
}

/// Why an entry is not unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("climbs with \"..\"")]
    Climbs,
    #[error("has a path that is too long, too deep or holds a NUL")]
    Path,
    #[error("lies beyond a symbolic link of the same layer")]
    ThroughSymlink,
    #[error("lies beyond a file of the same layer")]
    ThroughFile,
    #[error("is the root but no directory")]
    RootIsNoDirectory,
    #[error("is a link without a proper target; that of a hard link must be a file of the same layer")]
    LinkTarget,
    #[error("is a device, and a sandbox has its own /dev; leave it out of the image")]
    Device,
    #[error("is a fifo, a sparse file or of another kind that layers do not have; build the layer without it")]
    Kind,
    #[error("is a malformed whiteout")]
    Whiteout,
    #[error("is larger than the limit for one file")]
    FileTooLarge,
    #[error("has data where its kind has none")]
    UnexpectedData,
    #[error("ends before its data does")]
    Truncated,
    #[error("has a malformed or oversized header")]
    Header,
}

/// What stops an entry, before it is known which one it was.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// What a layer must turn out to be.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    pub(crate) diff_id: Digest,
    pub(crate) compression: Compression,
}

/// Unpacks a layer into the empty directory `root` and checks it; returns about what it takes on disk. What stands in
/// `root` after an error is worthless.
pub(crate) fn unpack_layer(
    blob: impl Read,
    expected: &Expected,
    root: &Path,
    allowance: &Allowance,
) -> Result<u64, UnpackError> {
    let mut blob = Hashing::new(blob.take(expected.size.saturating_add(1)));
    let buffered = BufReader::with_capacity(1 << 17, &mut blob);
    let plain: Box<dyn Read + '_> = match expected.compression {
        Compression::None => Box::new(buffered),
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(buffered)),
        Compression::Zstd => {
            let mut decoder = zstd::Decoder::with_buffer(buffered).map_err(UnpackError::Read)?;
            decoder.window_log_max(MAX_ZSTD_WINDOW_LOG).map_err(UnpackError::Read)?;
            Box::new(decoder)
        }
    };
    let mut plain = Hashing::new(Metered::new(plain, allowance, expected.size));
    let disk_bytes = unpack(&mut plain, root, allowance)?;
    let (diff_id, _) = plain.finish().map_err(UnpackError::Read)?;
    let (digest, size) = blob.finish().map_err(UnpackError::Read)?;
    if size != expected.size {
        return Err(UnpackError::Size { expected: expected.size, actual: size });
    }
    for (what, expected, actual) in [("digest", expected.digest, digest), ("diff-id", expected.diff_id, diff_id)] {
        if actual != expected {
            return Err(UnpackError::Digest { what, expected, actual });
        }
    }
    Ok(disk_bytes)
}

fn unpack(archive: impl Read, root: &Path, allowance: &Allowance) -> Result<u64, UnpackError> {
    let open = |source| UnpackError::Write { entry: "/".to_owned(), source };
    let mut tree = Tree::new(root, allowance).map_err(open)?;
    let mut archive = tar::Archive::new(archive);
    let mut extensions = Extensions::default();
    for entry in archive.entries().map_err(UnpackError::Read)?.raw(true) {
        let mut entry = entry.map_err(UnpackError::Read)?;
        allowance.take_entry().map_err(UnpackError::Read)?;
        let header = entry.header().clone();
        let path = extensions.path(&header);
        let named = |fault| match fault {
            Fault::Refused(refused) => UnpackError::Entry { entry: path.escape_ascii().to_string(), refused },
            Fault::Io(source) => UnpackError::Write { entry: path.escape_ascii().to_string(), source },
        };
        if !extensions.absorb(&header, &mut entry).map_err(named)? {
            let mut member = Member { header, extensions: std::mem::take(&mut extensions), size: entry.size() };
            member.write(&path, &mut entry, &mut tree).map_err(named)?;
        }
    }
    if extensions.is_empty() {
        Ok(tree.disk_bytes)
    } else {
        Err(UnpackError::Entry { entry: "(end)".to_owned(), refused: Refused::Header })
    }
}

/// Keys and values of PAX extension headers, in the order of the archive.
type Records = Vec<(Vec<u8>, Vec<u8>)>;

/// What the headers before an entry say about it.
#[derive(Default)]
struct Extensions {
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    records: Option<Records>,
}

impl Extensions {
    fn is_empty(&self) -> bool {
        self.long_name.is_none() && self.long_link.is_none() && self.records.is_none()
    }

    /// Takes in an extension header; false if the entry is none.
    fn absorb(&mut self, header: &Header, data: &mut impl Read) -> Result<bool, Fault> {
        let text = |data: Vec<u8>| data.split(|byte| *byte == 0).next().unwrap_or_default().to_vec();
        match header.entry_type() {
            EntryType::GNULongName => set(&mut self.long_name, text(read_extension(header, data)?))?,
            EntryType::GNULongLink => set(&mut self.long_link, text(read_extension(header, data)?))?,
            EntryType::XHeader => set(&mut self.records, parse_records(&read_extension(header, data)?)?)?,
            // Comments of whoever made the archive; no unpacker of images applies them.
            EntryType::XGlobalHeader => {}
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The last record with this key wins, says POSIX.
    fn record(&self, key: &str) -> Option<&[u8]> {
        let records = self.records.as_deref().unwrap_or_default();
        records.iter().rev().find(|(candidate, _)| candidate == key.as_bytes()).map(|(_, value)| value.as_slice())
    }

    fn number(&self, key: &str) -> Result<Option<u64>, Refused> {
        let parse = |value| std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        self.record(key).map(|value| parse(value).ok_or(Refused::Header)).transpose()
    }

    fn path(&self, header: &Header) -> Vec<u8> {
        let named = self.long_name.as_deref().or_else(|| self.record("path"));
        named.map_or_else(|| header.path_bytes().into_owned(), <[u8]>::to_vec)
    }

    fn link(&self, header: &Header) -> Vec<u8> {
        let named = self.long_link.as_deref().or_else(|| self.record("linkpath"));
        named.map_or_else(|| header.link_name_bytes().unwrap_or_default().into_owned(), <[u8]>::to_vec)
    }
}

/// Two headers of one kind before one entry: readers disagree on which counts.
fn set<T>(slot: &mut Option<T>, value: T) -> Result<(), Refused> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(Refused::Header),
    }
}

fn read_extension(header: &Header, data: &mut impl Read) -> Result<Vec<u8>, Fault> {
    let size = header.entry_size()?;
    if size > MAX_EXTENSION {
        return Err(Refused::Header.into());
    }
    let mut bytes = Vec::new();
    data.read_to_end(&mut bytes)?;
    if bytes.len() as u64 == size { Ok(bytes) } else { Err(Refused::Truncated.into()) }
}

/// PAX records, `<length> <key>=<value>\n` each; the length counts all of it.
fn parse_records(mut bytes: &[u8]) -> Result<Records, Refused> {
    let mut records = Vec::new();
    while !bytes.is_empty() {
        let record = (|| {
            let digits = bytes.iter().position(|byte| *byte == b' ')?;
            let length: usize = std::str::from_utf8(&bytes[..digits]).ok()?.parse().ok()?;
            let body = bytes.get(digits + 1..length)?.strip_suffix(b"\n")?;
            let equals = body.iter().position(|byte| *byte == b'=')?;
            bytes = &bytes[length..];
            Some((body[..equals].to_vec(), body[equals + 1..].to_vec()))
        })();
        records.push(record.ok_or(Refused::Header)?);
    }
    Ok(records)
}

/// An entry with all that is said about it.
struct Member {
    header: Header,
    extensions: Extensions,
    size: u64,
}

impl Member {
    fn write(&mut self, raw_path: &[u8], data: &mut impl Read, tree: &mut Tree<'_>) -> Result<(), Fault> {
        let path = EntryPath::parse(raw_path)?;
        match Whiteout::of(&path)? {
            None => {}
            Some(Whiteout::Ignored) => return Ok(()),
            Some(_) if !self.header.entry_type().is_file() => return Err(Refused::Whiteout.into()),
            Some(Whiteout::Opaque) => return tree.opaque(path.parent()),
            Some(Whiteout::Hides(name)) => return tree.whiteout(path.parent(), name),
        }
        self.check_size(tree)?;
        let kind = match self.header.entry_type() {
            // Before there was a kind for directories, they were files with a slash at the end.
            EntryType::Regular if raw_path.ends_with(b"/") => EntryType::Directory,
            kind => kind,
        };
        if kind != EntryType::Regular && self.size != 0 {
            return Err(Refused::UnexpectedData.into());
        }
        match kind {
            EntryType::Regular => {
                let written = tree.file(&path, &self.attributes()?, data)?;
                if written == self.size { Ok(()) } else { Err(Refused::Truncated.into()) }
            }
            EntryType::Directory => tree.directory(&path, &self.attributes()?),
            EntryType::Symlink => {
                let target = self.extensions.link(&self.header);
                if target.is_empty() || target.len() > MAX_PATH || target.contains(&0) {
                    return Err(Refused::LinkTarget.into());
                }
                tree.symlink(&path, &self.attributes()?, &target)
            }
            EntryType::Link => {
                let target = EntryPath::parse(&self.extensions.link(&self.header))?;
                tree.hard_link(&path, &target)
            }
            EntryType::Char | EntryType::Block => Err(Refused::Device.into()),
            _ => Err(Refused::Kind.into()),
        }
    }

    /// The size in the header is the one by which the archive is read. An extension may only repeat it: readers that
    /// disagree on where the next entry begins see different archives.
    fn check_size(&self, tree: &Tree<'_>) -> Result<(), Refused> {
        let records = self.extensions.records.as_deref().unwrap_or_default();
        if records.iter().any(|(key, _)| key.starts_with(b"GNU.sparse.")) {
            return Err(Refused::Kind);
        }
        let claimed = self.extensions.number("size")?.unwrap_or(self.size);
        if claimed > tree.limits().file_bytes || self.size > tree.limits().file_bytes {
            Err(Refused::FileTooLarge)
        } else if claimed != self.size {
            Err(Refused::Header)
        } else {
            Ok(())
        }
    }

    fn attributes(&self) -> Result<Attributes, Refused> {
        let owner = |key, field: io::Result<u64>| {
            let number = self.extensions.number(key)?.map_or(field.map_err(|_| Refused::Header), Ok)?;
            // The last one means "leave as it is" to the kernel.
            u32::try_from(number).ok().filter(|id| *id != u32::MAX).ok_or(Refused::Header)
        };
        let is_file = self.header.entry_type() == EntryType::Regular;
        let capability = self.extensions.record("SCHILY.xattr.security.capability").filter(|_| is_file);
        Ok(Attributes {
            mode: self.header.mode().map_err(|_| Refused::Header)? & 0o7777,
            uid: owner("uid", self.header.uid())?,
            gid: owner("gid", self.header.gid())?,
            modified: self.modified().ok_or(Refused::Header)?,
            capability: capability.map(<[u8]>::to_vec),
        })
    }

    fn modified(&self) -> Option<Timespec> {
        let Some(value) = self.extensions.record("mtime") else {
            return Some(Timespec { tv_sec: self.header.mtime().ok()?.try_into().ok()?, tv_nsec: 0 });
        };
        let text = std::str::from_utf8(value).ok()?;
        let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
        let nanoseconds = format!("{fraction:0<9.9}").parse::<u32>().ok()?;
        Some(Timespec { tv_sec: seconds.parse().ok()?, tv_nsec: nanoseconds.into() })
    }
}

enum Whiteout<'a> {
    Hides(&'a OsStr),
    Opaque,
    Ignored,
}

impl<'a> Whiteout<'a> {
    fn of(path: &'a EntryPath) -> Result<Option<Self>, Refused> {
        for directory in path.parent() {
            if directory.as_bytes().starts_with(AUFS) {
                return Ok(Some(Self::Ignored));
            }
            if directory.as_bytes().starts_with(WHITEOUT) {
                return Err(Refused::Whiteout);
            }
        }
        let name = path.name().unwrap_or_default().as_bytes();
        match name.strip_prefix(WHITEOUT) {
            None => Ok(None),
            Some(_) if name == OPAQUE_MARKER => Ok(Some(Self::Opaque)),
            Some(_) if name.starts_with(AUFS) => Ok(Some(Self::Ignored)),
            Some(b"" | b"." | b"..") => Err(Refused::Whiteout),
            Some(hidden) => Ok(Some(Self::Hides(OsStr::from_bytes(hidden)))),
        }
    }
}
