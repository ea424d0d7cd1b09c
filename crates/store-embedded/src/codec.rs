//! How a record lies in the engine.
//!
//! ```text
//!   key     kind name '/' path                 actor/demo/counter
//!   value   checksum u32 | version u64 | revision u64 | the caller's bytes          little endian
//!           └ CRC-32 over the key and all that follows
//! ```
//!
//! The checksum is ours because an engine need not verify its pages when it reads them, and because it covers
//! the key: a value that ends up under another key is found out too.

use ate_store::{Fault, Key, Kind, Prefix, Record, Revision};
use bytes::Bytes;

use crate::engine::Reads;

const HEADER: usize = 4 + 8 + 8;

/// Sorts before every record: no kind begins with NUL.
pub(crate) const REVISION_KEY: &[u8] = b"\0revision";

pub(crate) fn key_bytes(kind: Kind, path: &str) -> Vec<u8> {
    [kind.name().as_bytes(), b"/", path.as_bytes()].concat()
}

pub(crate) fn encode(key: &[u8], record: &Record) -> Vec<u8> {
    encode_parts(key, record.version, record.revision, &record.value)
}

fn encode_parts(key: &[u8], version: u64, revision: Revision, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + value.len());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&revision.0.to_le_bytes());
    bytes.extend_from_slice(value);
    let sum = checksum(key, &bytes[4..]);
    bytes[..4].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn checksum(key: &[u8], body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(key);
    hasher.update(body);
    hasher.finalize()
}

fn decode_parts(key: &[u8], bytes: Bytes) -> Option<(u64, Revision, Bytes)> {
    let (sum, body) = bytes.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*sum) != checksum(key, body) {
        return None;
    }
    let (version, rest) = body.split_first_chunk::<8>()?;
    let (revision, _) = rest.split_first_chunk::<8>()?;
    let (version, revision) = (u64::from_le_bytes(*version), u64::from_le_bytes(*revision));
    Some((version, Revision(revision), bytes.slice(HEADER..)))
}

fn corrupt(key: &[u8]) -> Fault {
    Fault::Corrupt { reason: format!("the record {:?} does not match its checksum", String::from_utf8_lossy(key)) }
}

fn decode(key: Key, key_bytes: &[u8], bytes: Bytes) -> Result<Record, Fault> {
    let (version, revision, value) = decode_parts(key_bytes, bytes).ok_or_else(|| corrupt(key_bytes))?;
    Ok(Record { key, version, revision, value })
}

pub(crate) fn encode_revision(revision: Revision) -> Vec<u8> {
    encode_parts(REVISION_KEY, 0, revision, &[])
}

pub(crate) fn read_record(reads: &(impl Reads + ?Sized), key: &Key) -> Result<Option<Record>, Fault> {
    let key_bytes = key_bytes(key.kind(), key.path());
    reads.get(&key_bytes)?.map(|bytes| decode(key.clone(), &key_bytes, bytes.into())).transpose()
}

pub(crate) fn read_revision(reads: &(impl Reads + ?Sized)) -> Result<Revision, Fault> {
    match reads.get(REVISION_KEY)? {
        None => Ok(Revision::ZERO),
        Some(bytes) => Ok(decode_parts(REVISION_KEY, bytes.into()).ok_or_else(|| corrupt(REVISION_KEY))?.1),
    }
}

/// Shows the records below `prefix` in order until `each` says `false`.
pub(crate) fn scan_records(
    reads: &(impl Reads + ?Sized),
    prefix: &Prefix,
    after: Option<&str>,
    each: &mut dyn FnMut(Record) -> bool,
) -> Result<(), Fault> {
    use std::ops::Bound;
    let border = key_bytes(prefix.kind(), prefix.path());
    let after = after.filter(|after| *after >= prefix.path()).map(|after| key_bytes(prefix.kind(), after));
    let start = after.as_deref().map_or(Bound::Included(&border[..]), Bound::Excluded);
    let kind_length = prefix.kind().name().len() + 1;
    reads.scan(start, &mut |key, value| {
        if !key.starts_with(&border) {
            return Ok(false);
        }
        let path = std::str::from_utf8(&key[kind_length..]).map_err(|_| corrupt(key))?;
        let parsed = Key::parse(prefix.kind(), path).map_err(|_| corrupt(key))?;
        Ok(each(decode(parsed, key, Bytes::copy_from_slice(value))?))
    })
}
