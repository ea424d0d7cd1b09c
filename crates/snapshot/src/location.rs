//! Names of snapshots in object storage.

use std::fmt;

use ate_name::{ActorKey, ActorUid, Generation, OpId};
use serde::{Deserialize, Serialize};

/// Name of the manifest's object. It is written last: a prefix without it is an attempt that failed, and may be collected.
pub const MANIFEST: &str = "manifest.json";

/// Longest location. Object stores end a key at 1,024 bytes, and what we append to a location takes up to 287.
const MAX_LOCATION: usize = 700;

/// Longest name of a file in a snapshot.
const MAX_FILE_NAME: usize = 64;

/// Why a text is no location. Names the template's field, because that is where a person wrote it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("spec.snapshotsConfig.location {location:?} {reason}; write it as scheme://bucket/path")]
pub struct LocationError {
    location: String,
    reason: &'static str,
}

/// Where a template keeps its snapshots: `scheme://bucket/path`, without a trailing slash.
/// Only the scheme `file` has no bucket. Which schemes can be reached is the business of the object store adapter.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Location {
    scheme: String,
    bucket: String,
    path: String,
}

impl Location {
    pub fn parse(text: &str) -> Result<Self, LocationError> {
        let error = |reason| Err(LocationError { location: text.chars().take(MAX_LOCATION).collect(), reason });
        if text.len() > MAX_LOCATION {
            return error("is longer than 700 bytes");
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return error("has no scheme");
        };
        let scheme_byte = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+.-".contains(&b);
        if !scheme.starts_with(|c: char| c.is_ascii_lowercase()) || !scheme.bytes().all(scheme_byte) {
            return error("has a malformed scheme");
        }
        let (bucket, path) = rest.split_once('/').unwrap_or((rest, ""));
        let path = path.trim_end_matches('/');
        match (scheme, bucket, path) {
            ("file", "", "") => return error("names no directory"),
            ("file", "", _) => {}
            ("file", ..) => return error("names a host, which a file cannot have"),
            (_, "", _) => return error("has no bucket"),
            _ => {}
        }
        let begins_well = bucket.is_empty() || bucket.starts_with(|c: char| c.is_ascii_alphanumeric());
        if !begins_well || !bucket.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)) {
            return error("has a malformed bucket (user, port, query and fragment are not allowed)");
        }
        if !path.is_empty() && !path.split('/').all(is_path_segment) {
            return error("has an empty, relative or unprintable path segment");
        }
        Ok(Self { scheme: scheme.into(), bucket: bucket.into(), path: path.into() })
    }

    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// Empty for `file`.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// The key prefix in the bucket (for `file`: the absolute path without its first slash); may be empty.
    pub fn path(&self) -> &str {
        &self.path
    }
}

/// Refuses what an object store or a file system would read as something else.
fn is_path_segment(segment: &str) -> bool {
    !matches!(segment, "" | "." | "..") && segment.bytes().all(|b| b.is_ascii_graphic() && !b"?#%\\".contains(&b))
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.bucket)?;
        if self.path.is_empty() { Ok(()) } else { write!(f, "/{}", self.path) }
    }
}

stored_as_text!(Location, LocationError);

/// What all snapshots of an actor's life lie under.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    pub location: Location,
    pub actor: ActorKey,
    pub uid: ActorUid,
}

impl Home {
    pub fn parse(text: &str) -> Result<Self, SnapshotKeyError> {
        // Any name of a snapshot will do: it is checked with the rest, and forgotten.
        let any = SnapshotId {
            actor: ActorUid::from_bytes([0; 16]),
            generation: Generation::NONE,
            op: OpId::from_bytes([0; 16]),
        };
        let key = SnapshotKey::parse(&format!("{text}/{any}"))?;
        Ok(Self { location: key.location, actor: key.actor, uid: key.id.actor })
    }

    /// The snapshot of this name, the last segment of its key, if it is one.
    pub fn snapshot(&self, name: &str) -> Result<SnapshotKey, SnapshotKeyError> {
        SnapshotKey::parse(&format!("{self}/{name}"))
    }
}

impl fmt::Display for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.location, self.actor, self.uid)
    }
}

/// One snapshot. Two attempts in one generation have different operations, so their files can never mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotId {
    pub actor: ActorUid,
    pub generation: Generation,
    pub op: OpId,
}

/// Its name among the snapshots of its actor.
impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // 20 digits hold every u64, so the order of texts is the order of generations.
        write!(f, "{:020}-{}", self.generation.get(), self.op)
    }
}

/// The text is no key of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a snapshot: {reason}; expected <location>/<atespace>/<actor>/<uid>/<generation>-<op>")]
pub struct SnapshotKeyError {
    text: String,
    reason: &'static str,
}

/// Where one snapshot lies. Keys of one actor sort by generation.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotKey {
    pub location: Location,
    pub actor: ActorKey,
    pub id: SnapshotId,
}

impl SnapshotKey {
    pub fn parse(text: &str) -> Result<Self, SnapshotKeyError> {
        let fail = |reason| SnapshotKeyError { text: text.chars().take(1024).collect(), reason };
        let mut parts = text.rsplitn(5, '/');
        let (Some(leaf), Some(uid), Some(name), Some(atespace), Some(location)) =
            (parts.next(), parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(fail("too few segments"));
        };
        let (generation, op) = leaf.split_once('-').ok_or(fail("no operation"))?;
        let key = Self {
            location: Location::parse(location).map_err(|_| fail("malformed location"))?,
            actor: ActorKey::parse(atespace, name).map_err(|_| fail("malformed atespace or actor"))?,
            id: SnapshotId {
                actor: ActorUid::parse(uid).map_err(|_| fail("malformed actor uid"))?,
                generation: Generation::new(generation.parse().map_err(|_| fail("malformed generation"))?),
                op: OpId::parse(op).map_err(|_| fail("malformed operation"))?,
            },
        };
        // A uuid has other spellings and a number other paddings; one snapshot has one key.
        if key.to_string() == text { Ok(key) } else { Err(fail("not in canonical form")) }
    }

    pub fn home(&self) -> Home {
        Home { location: self.location.clone(), actor: self.actor.clone(), uid: self.id.actor }
    }

    pub fn file(&self, name: &FileName) -> String {
        format!("{self}/{name}")
    }

    pub fn manifest(&self) -> String {
        format!("{self}/{}", MANIFEST)
    }
}

impl fmt::Display for SnapshotKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}/{}", self.location, self.actor, self.id.actor, self.id)
    }
}

stored_as_text!(SnapshotKey, SnapshotKeyError);

/// The text is no name of a file in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a snapshot's file is named by 1 to 64 letters, digits, '.', '_' or '-', does not start with '.', and is not the manifest"
)]
pub struct FileNameError;

/// Name of a file beside the manifest: one safe path segment, in object storage and on disk.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FileName(String);

impl FileName {
    pub fn parse(text: &str) -> Result<Self, FileNameError> {
        let safe = (1..=MAX_FILE_NAME).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
            && !text.starts_with('.')
            && text != MANIFEST;
        if safe { Ok(Self(text.into())) } else { Err(FileNameError) }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

stored_as_text!(FileName, FileNameError);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_location_keeps_its_parts_and_loses_its_slash() {
        for (text, parts) in [
            ("s3://bucket", ("s3", "bucket", "")),
            ("gs://b.c-d/", ("gs", "b.c-d", "")),
            ("s3://b/a/b//", ("s3", "b", "a/b")),
            ("file:///var/lib/ate/", ("file", "", "var/lib/ate")),
        ] {
            let location = Location::parse(text).unwrap();
            assert_eq!((location.scheme(), location.bucket(), location.path()), parts, "{text}");
            assert_eq!(location.to_string(), text.trim_end_matches('/'));
        }
    }

    #[test]
    fn a_bad_location_names_the_template_field_and_the_reason() {
        for (text, reason) in [
            ("bucket/path", "has no scheme"),
            ("S3://b", "malformed scheme"),
            ("s3:///path", "has no bucket"),
            ("s3://user@b/x", "malformed bucket"),
            ("s3://b?x=1", "malformed bucket"),
            ("s3://b/a//b", "path segment"),
            ("s3://b/../c", "path segment"),
            ("s3://b/a%2f", "path segment"),
            ("s3://b/a b", "path segment"),
            ("s3://b/a\0", "path segment"),
            ("file://", "names no directory"),
            ("file://host/x", "names a host"),
            (&format!("s3://b/{}", "x".repeat(MAX_LOCATION)), "longer than"),
        ] {
            let error = Location::parse(text).unwrap_err().to_string();
            assert!(error.starts_with("spec.snapshotsConfig.location"), "{error}");
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_key_that_is_not_canonical_is_refused() {
        let good = "s3://b/p/team/counter/67e55044-10b1-426f-9247-bb680e5fe0c8/00000000000000000007-\
                    67e55044-10b1-426f-9247-bb680e5fe0c9";
        let key = SnapshotKey::parse(good).unwrap();
        assert_eq!(key.to_string(), good);
        assert_eq!(key.manifest(), format!("{good}/manifest.json"));
        let home = key.home();
        let (below, name) = good.rsplit_once('/').unwrap();
        assert_eq!(
            (home.to_string().as_str(), Home::parse(below), home.snapshot(name)),
            (below, Ok(home.clone()), Ok(key))
        );
        for bad in ["", "s3://b", &good[5..below.len()], &format!("{below}/"), good, &below[..below.len() - 1]] {
            assert!(Home::parse(bad).is_err(), "{bad}");
        }
        for bad in ["", ".", "..", "manifest.json", &name[1..], &format!("x/{name}"), &format!("../{name}")] {
            assert!(home.snapshot(bad).is_err(), "{bad}");
        }
        for (from, to) in [
            ("67e55044-10b1-426f-9247-bb680e5fe0c8", "67E55044-10b1-426f-9247-bb680e5fe0c8"),
            ("67e55044-10b1-426f-9247-bb680e5fe0c8", "67e5504410b1426f9247bb680e5fe0c8"),
            ("00000000000000000007", "7"),
            ("00000000000000000007", "+0000000000000000007"),
            ("00000000000000000007", "99999999999999999999"),
            ("/team/", "/Team/"),
            ("/team/", "/../"),
            ("0007-", "0007"),
            ("s3://b/p", "p"),
            ("s3://b/p", "s3://b/p/"),
        ] {
            let bad = good.replace(from, to);
            assert!(SnapshotKey::parse(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_longest_key_fits_an_object_store() {
        let key = SnapshotKey {
            location: Location::parse(&format!("s3://{}", "b".repeat(MAX_LOCATION - 5))).unwrap(),
            actor: ActorKey::parse(&"a".repeat(63), &"b".repeat(63)).unwrap(),
            id: SnapshotId {
                actor: ActorUid::from_random([1; 16]),
                generation: Generation::new(u64::MAX),
                op: OpId::from_random([2; 16]),
            },
        };
        assert!(key.file(&FileName::parse(&"f".repeat(MAX_FILE_NAME)).unwrap()).len() <= 1024);
        assert_eq!(SnapshotKey::parse(&key.to_string()).unwrap(), key);
    }

    #[test]
    fn file_names_are_safe_segments() {
        for good in ["image", "durable.tar", "a-b_c.1"] {
            assert!(FileName::parse(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", ".hidden", "a/b", "a\\b", "a b", "ä", "manifest.json", &"x".repeat(65)] {
            assert!(FileName::parse(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn keys_survive_their_text_and_sort_by_generation(uid: [u8; 16], op: [u8; 16], a: u64, b: u64) {
            let key = |generation| SnapshotKey {
                location: Location::parse("s3://b/p").unwrap(),
                actor: ActorKey::parse("team", "counter").unwrap(),
                id: SnapshotId {
                    actor: ActorUid::from_random(uid),
                    generation: Generation::new(generation),
                    op: OpId::from_random(op),
                },
            };
            prop_assert_eq!(SnapshotKey::parse(&key(a).to_string()).unwrap(), key(a));
            prop_assert_eq!(key(a).to_string().cmp(&key(b).to_string()), a.cmp(&b));
        }

        #[test]
        fn no_text_makes_a_parser_panic_or_accept_what_it_would_not_write(text in ".{0,80}|[a-z0-9:/.-]{0,120}") {
            if let Ok(key) = SnapshotKey::parse(&text) {
                prop_assert_eq!(key.to_string(), &*text);
            }
            if let Ok(location) = Location::parse(&text) {
                prop_assert_eq!(location.to_string(), text.trim_end_matches('/'));
            }
        }
    }
}
