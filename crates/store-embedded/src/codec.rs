//! How a record lies in the engine.
//!
//! ```text
//!   key     kind name '/' path                 actor/demo/counter
//!   value   version u64 | revision u64 | the caller's bytes          little endian
//! ```
//!
//! Without a checksum: the engine has one over each block and over each entry of its journal, and checks them.

use std::ops::Bound;

use ate_store::{Contents, Entry, Fault, Key, Kind, Prefix, Record, Revision};
use bytes::Bytes;

use crate::engine::Reads;

const HEADER: usize = 8 + 8;

/// Sorts before every record: no kind begins with NUL.
pub(crate) const REVISION_KEY: &[u8] = b"\0revision";

pub(crate) fn key_bytes(kind: Kind, path: &str) -> Vec<u8> {
    [kind.name().as_bytes(), b"/", path.as_bytes()].concat()
}

pub(crate) fn encode(record: &Record) -> Vec<u8> {
    [&record.version.to_le_bytes(), &record.revision.0.to_le_bytes(), &record.value[..]].concat()
}

pub(crate) fn encode_revision(revision: Revision) -> Vec<u8> {
    revision.0.to_le_bytes().to_vec()
}

fn corrupt(key: &[u8]) -> Fault {
    Fault::Corrupt { reason: format!("the record {:?} is not one that was written", String::from_utf8_lossy(key)) }
}

fn decode(key: Key, key_bytes: &[u8], bytes: Bytes) -> Result<Record, Fault> {
    let (version, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| corrupt(key_bytes))?;
    let (revision, _) = rest.split_first_chunk::<8>().ok_or_else(|| corrupt(key_bytes))?;
    let (version, revision) = (u64::from_le_bytes(*version), Revision(u64::from_le_bytes(*revision)));
    Ok(Record { key, version, revision, value: bytes.slice(HEADER..) })
}

pub(crate) fn read_record(reads: &(impl Reads + ?Sized), key: &Key) -> Result<Option<Record>, Fault> {
    let key_bytes = key_bytes(key.kind(), key.path());
    reads.get(&key_bytes)?.map(|bytes| decode(key.clone(), &key_bytes, bytes.into())).transpose()
}

pub(crate) fn read_revision(reads: &(impl Reads + ?Sized)) -> Result<Revision, Fault> {
    let Some(bytes) = reads.get(REVISION_KEY)? else { return Ok(Revision::ZERO) };
    let revision = <[u8; 8]>::try_from(&bytes[..]).map_err(|_| corrupt(REVISION_KEY))?;
    Ok(Revision(u64::from_le_bytes(revision)))
}

/// Shows the records below `prefix` in order until `each` says `false`.
pub(crate) fn scan_records(
    reads: &(impl Reads + ?Sized),
    prefix: &Prefix,
    after: Option<&str>,
    each: &mut dyn FnMut(Record) -> bool,
) -> Result<(), Fault> {
    let border = key_bytes(prefix.kind(), prefix.path());
    let after = after.filter(|after| *after >= prefix.path()).map(|after| key_bytes(prefix.kind(), after));
    let start = after.as_deref().map_or(Bound::Included(&border[..]), Bound::Excluded);
    reads.scan(start, &mut |key, value| {
        if !key.starts_with(&border) {
            return Ok(false);
        }
        Ok(each(entry(prefix.kind(), key, value)?))
    })
}

/// An entry of the engine whose key begins with the kind.
fn entry(kind: Kind, key: &[u8], value: &[u8]) -> Result<Record, Fault> {
    let path = std::str::from_utf8(&key[kind.name().len() + 1..]).map_err(|_| corrupt(key))?;
    let parsed = Key::parse(kind, path).map_err(|_| corrupt(key))?;
    decode(parsed, key, Bytes::copy_from_slice(value))
}

/// Shows everything there is, in the order of [`Contents`], until `each` says `false`.
pub(crate) fn scan_everything(reads: &(impl Reads + ?Sized), each: &mut dyn FnMut(Entry) -> bool) -> Result<(), Fault> {
    let mut wanted = true;
    let foreign =
        |key: &[u8], reason: String| Entry::Foreign { key: String::from_utf8_lossy(key).into_owned(), reason };
    for kind in Contents::ORDER {
        let border = key_bytes(kind, "");
        reads.scan(Bound::Included(&border), &mut |key, value| {
            if !wanted || !key.starts_with(&border) {
                return Ok(false);
            }
            wanted = each(match entry(kind, key, value) {
                Ok(record) => Entry::Record(record),
                Err(fault) => foreign(key, fault.to_string()),
            });
            Ok(wanted)
        })?;
    }
    let known = |key: &[u8]| Kind::ALL.into_iter().find(|kind| key.starts_with(&key_bytes(*kind, "")));
    let mut start = Some(Bound::Excluded(REVISION_KEY.to_vec()));
    while let Some(from) = start.take() {
        reads.scan(from.as_ref().map(|key| &key[..]), &mut |key, _| {
            if let Some(kind) = known(key) {
                // Past all of its keys: '0' follows '/'.
                start = Some(Bound::Included([kind.name().as_bytes(), b"0"].concat()));
                return Ok(false);
            }
            wanted = wanted && each(foreign(key, "no kind of record that this program knows".to_owned()));
            Ok(wanted)
        })?;
    }
    Ok(())
}
