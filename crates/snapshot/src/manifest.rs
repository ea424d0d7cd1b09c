use std::collections::{BTreeMap, BTreeSet};

use ate_name::{ActorKey, ActorUid, Digest, Generation, ObjectKey, OpId, TemplateUid};
use aws_lc_rs::hmac;
use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize};

use crate::{Content, DataKey, FileName, KeyId, SnapshotId, SnapshotKey};

/// Version of what this crate writes. A reader refuses a later one. What an older reader may ignore is added as a
/// field at the top level, where unknown ones are kept, and does not change the version.
pub const FORMAT: u32 = 1;

/// Longest manifest that is read; ours are about 2 KB. A longer one is refused before it is parsed.
pub const MAX_MANIFEST: usize = 256 << 10;

/// Most files of a snapshot. Drivers write one to five; each is a request to the object store on the wake path.
const MAX_FILES: usize = 64;

/// What a snapshot is, and what it takes to restore it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    pub format: u32,
    pub sandbox_class: String,
    /// The runtime's binaries by name. A restore uses these, never the pool's current ones.
    pub assets: BTreeMap<String, Asset>,
    /// What the runtime calls its own build; it refuses images of any other.
    pub version_label: String,
    pub architecture: String,
    /// Features of the CPU that the memory was taken on: the program may have chosen code paths by them.
    pub cpu_features: BTreeSet<String>,
    pub platform: String,
    pub actor: ActorIdentity,
    pub template: TemplateIdentity,
    pub generation: Generation,
    pub op: OpId,
    pub created: Timestamp,
    pub scope: Scope,
    /// The snapshot whose image the stored one is a delta of; `None` when it is stored full.
    #[serde(deserialize_with = "present")]
    pub base: Option<Base>,
    /// The decoded memory image; `None` in scope Data.
    #[serde(deserialize_with = "present")]
    pub image: Option<Content>,
    /// Digest of the part of the workload's spec that must be equal at restore.
    pub workload: Digest,
    pub files: Vec<File>,
    pub secret_exposure: SecretExposure,
    #[serde(deserialize_with = "present")]
    pub encryption: Option<Encryption>,
    pub golden: bool,
    /// Pinned references of the container images, so that none is collected while a snapshot needs it.
    pub images: BTreeSet<String>,
    /// That whoever wrote all of this had the actor's key: see [`Manifest::read_proven`]. HMAC-SHA256 of the manifest without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<Digest>,
    /// Fields of a later writer, kept as they are.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

/// A field that must be there even when it is null: serde takes a missing `Option` for `None`, and a manifest whose
/// key got damaged must not turn a delta into a full image.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    Option::deserialize(deserializer)
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asset {
    pub url: String,
    pub sha256: Digest,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActorIdentity {
    pub uid: ActorUid,
    #[serde(flatten)]
    pub key: ActorKey,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateIdentity {
    pub uid: TemplateUid,
    #[serde(flatten)]
    pub key: ObjectKey,
}

/// `Full` is memory and files; `Data` is the durable directories only, and a restore boots the program anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scope {
    Full,
    Data,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    pub prefix: SnapshotKey,
    /// The base's decoded image: a base is known by what it holds, wherever it was fetched from.
    #[serde(flatten)]
    pub image: Content,
}

/// A file beside the manifest, as it is stored: compressed, and sealed if the manifest says so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    pub name: FileName,
    pub role: Role,
    #[serde(flatten)]
    pub stored: Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    /// The memory image, by [`crate::delta`].
    Image,
    /// A tar of the durable directories.
    Durable,
    /// A file that only the sandbox runtime can read.
    Runtime,
}

/// Whether secrets were within the actor's reach when the snapshot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SecretExposure {
    None,
    /// Secret values were in the environment, and so are in the image.
    Env,
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Encryption {
    pub algorithm: Algorithm,
    /// The data key that the files are sealed with.
    pub key: KeyId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Algorithm {
    /// [`crate::seal`], version 1.
    #[serde(rename = "AES-256-GCM-STREAM")]
    Aes256GcmStream,
}

#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("a snapshot's manifest of {length} bytes is refused; the limit is {MAX_MANIFEST}")]
    TooLong { length: usize },
    #[error(
        "a snapshot's manifest has digest {found}, and the actor's record says {expected}; it was changed or is of another snapshot"
    )]
    Digest { expected: Digest, found: Digest },
    #[error("a snapshot's manifest has format {found}, and this release reads up to {FORMAT}; upgrade the node")]
    Format { found: u32 },
    #[error("a snapshot's manifest is malformed")]
    Malformed(#[source] serde_json::Error),
    #[error("a snapshot's manifest contradicts itself: {0}")]
    Contradiction(&'static str),
    #[error("a snapshot's manifest was not written by a node of this instance for this actor, or was changed since")]
    Unproven,
}

impl Manifest {
    /// The manifest that the actor's record names. The record is what makes the manifest trustworthy: it says which
    /// binaries the node will run, and whoever can write to the object store could say otherwise.
    pub fn read(bytes: &[u8], expected: &Digest) -> Result<Self, ManifestError> {
        check_length(bytes)?;
        let found = Content::of(bytes).digest;
        if found != *expected {
            return Err(ManifestError::Digest { expected: *expected, found });
        }
        Self::read_unverified(bytes)
    }

    /// The manifest of a snapshot that no record names, as after an older backup of the records was restored. The proof takes the
    /// place of the digest: only the control plane and its nodes have the actor's key.
    pub fn read_proven(bytes: &[u8], key: &DataKey) -> Result<Self, ManifestError> {
        let mut manifest = Self::read_unverified(bytes)?;
        let proof = manifest.proof.take().ok_or(ManifestError::Unproven)?;
        hmac::verify(&key.for_manifests(), &manifest.to_bytes()?, proof.as_bytes())
            .map_err(|_| ManifestError::Unproven)?;
        manifest.proof = Some(proof);
        Ok(manifest)
    }

    /// Proves that this was written by somebody who has the actor's key. Whatever is changed later ends that.
    pub fn prove(&mut self, key: &DataKey) -> Result<(), ManifestError> {
        self.proof = None;
        let tag = hmac::sign(&key.for_manifests(), &self.to_bytes()?);
        self.proof = Some(Digest::from_bytes(tag.as_ref().try_into().expect("SHA-256 has 32 bytes")));
        Ok(())
    }

    /// For listing and collecting; never restore from this.
    pub fn read_unverified(bytes: &[u8]) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        struct Versioned {
            format: u32,
        }
        check_length(bytes)?;
        // First, so that a manifest from the future says so, instead of failing on a field that changed its meaning.
        let Versioned { format } = serde_json::from_slice(bytes).map_err(ManifestError::Malformed)?;
        if format > FORMAT {
            return Err(ManifestError::Format { found: format });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(ManifestError::Malformed)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// The one text of this manifest; its digest belongs into the actor's record.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ManifestError> {
        self.check()?;
        let mut bytes = serde_json::to_vec_pretty(self).map_err(ManifestError::Malformed)?;
        bytes.push(b'\n');
        check_length(&bytes)?;
        Ok(bytes)
    }

    pub fn id(&self) -> SnapshotId {
        SnapshotId { actor: self.actor.uid, generation: self.generation, op: self.op }
    }

    fn check(&self) -> Result<(), ManifestError> {
        let images = self.files.iter().filter(|file| file.role == Role::Image).count();
        let names: BTreeSet<_> = self.files.iter().map(|file| &file.name).collect();
        let rule = |holds, broken| if holds { Ok(()) } else { Err(ManifestError::Contradiction(broken)) };
        rule(self.format == FORMAT, "its format is none that was ever written")?;
        rule(self.files.len() <= MAX_FILES, "it names more than 64 files")?;
        rule(names.len() == self.files.len(), "it names a file twice")?;
        rule(images == usize::from(self.image.is_some()), "image and file of role image do not go together")?;
        rule(
            (self.scope == Scope::Full) == self.image.is_some(),
            "scope Full needs an image, and scope Data has none",
        )?;
        rule(self.base.is_none() || self.image.is_some(), "it has a base but no image")?;
        rule(self.base.is_none() || !self.golden, "a golden snapshot has no base: it is one")
    }
}

fn check_length(bytes: &[u8]) -> Result<(), ManifestError> {
    if bytes.len() > MAX_MANIFEST { Err(ManifestError::TooLong { length: bytes.len() }) } else { Ok(()) }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    pub(crate) fn sample() -> Manifest {
        Manifest {
            format: FORMAT,
            sandbox_class: "gvisor".into(),
            assets: [(
                "runsc".to_owned(),
                Asset { url: "https://example.com/runsc".into(), sha256: Digest::from_bytes([6; 32]) },
            )]
            .into(),
            version_label: "release-20260905.0".into(),
            architecture: "amd64".into(),
            cpu_features: ["avx2", "sse4_2"].map(String::from).into(),
            platform: "systrap".into(),
            actor: ActorIdentity {
                uid: ActorUid::from_random([1; 16]),
                key: ActorKey::parse("team", "counter").unwrap(),
            },
            template: TemplateIdentity {
                uid: TemplateUid::from_random([2; 16]),
                key: ObjectKey::new("demo", "counter"),
            },
            generation: Generation::new(7),
            op: OpId::from_random([3; 16]),
            created: "2026-09-05T03:51:02.5Z".parse().unwrap(),
            scope: Scope::Full,
            base: Some(Base {
                prefix: SnapshotKey {
                    location: crate::Location::parse("s3://snapshots/demo").unwrap(),
                    actor: ActorKey::parse(ate_name::GOLDEN_ATESPACE, "g").unwrap(),
                    id: SnapshotId {
                        actor: ActorUid::from_random([4; 16]),
                        generation: Generation::new(1),
                        op: OpId::from_random([5; 16]),
                    },
                },
                image: Content::of(b"golden"),
            }),
            image: Some(Content::of(b"memory")),
            workload: Digest::from_bytes([7; 32]),
            files: vec![File {
                name: FileName::parse("image").unwrap(),
                role: Role::Image,
                stored: Content::of(b"stored"),
            }],
            secret_exposure: SecretExposure::None,
            encryption: Some(Encryption {
                algorithm: Algorithm::Aes256GcmStream,
                key: crate::DataKey::from_random([8; 32]).id(),
            }),
            golden: false,
            images: ["registry.example/counter@sha256:00".to_owned()].into(),
            proof: None,
            unknown: BTreeMap::new(),
        }
    }

    fn as_json(manifest: &Manifest) -> Value {
        serde_json::to_value(manifest).unwrap()
    }

    fn from_json(value: &Value) -> Result<Manifest, ManifestError> {
        Manifest::read_unverified(&serde_json::to_vec(value).unwrap())
    }

    #[test]
    fn the_text_is_stable_and_comes_back() {
        let bytes = sample().to_bytes().unwrap();
        assert_eq!(str::from_utf8(&bytes).unwrap(), include_str!("manifest.golden.json"));
        assert_eq!(Manifest::read(&bytes, &Content::of(&bytes).digest).unwrap(), sample());
        // Spelled differently, it is written the same.
        assert_eq!(from_json(&as_json(&sample())).unwrap().to_bytes().unwrap(), bytes);
    }

    #[test]
    fn only_who_has_the_key_can_write_what_is_believed_without_a_record() {
        let (key, other) = (DataKey::from_random([8; 32]), DataKey::from_random([9; 32]));
        let mut manifest = sample();
        manifest.unknown.insert("zone".into(), json!("eu"));
        let read = |manifest: &Manifest, key| Manifest::read_proven(&manifest.to_bytes().unwrap(), key);
        assert!(matches!(read(&manifest, &key), Err(ManifestError::Unproven)), "it has no proof");
        manifest.prove(&key).unwrap();
        assert_eq!(read(&manifest, &key).unwrap(), manifest);
        assert!(matches!(read(&manifest, &other), Err(ManifestError::Unproven)));
        for (pointer, changed) in [
            ("/proof", json!("0".repeat(64))),
            ("/generation", json!(8)),
            ("/assets/runsc/url", json!("https://example.com/another")),
            ("/files/0/digest", json!("1".repeat(64))),
            ("/zone", json!("us")),
        ] {
            let mut value = as_json(&manifest);
            *value.pointer_mut(pointer).expect(pointer) = changed;
            let bytes = serde_json::to_vec(&value).unwrap();
            assert!(matches!(Manifest::read_proven(&bytes, &key), Err(ManifestError::Unproven)), "{pointer}");
        }
        // Proven anew for another, as the copy for a fork is.
        manifest.prove(&other).unwrap();
        assert!(read(&manifest, &other).is_ok() && read(&manifest, &key).is_err());
    }

    #[test]
    fn fields_of_a_later_writer_are_kept() {
        let mut value = as_json(&sample());
        value["zone"] = json!({"name": "eu", "ring": [1, 2]});
        let bytes = from_json(&value).unwrap().to_bytes().unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&bytes).unwrap(), value);
    }

    #[test]
    fn a_manifest_from_the_future_says_so() {
        let future = json!({"format": 2, "everything": "else changed"});
        assert!(matches!(from_json(&future), Err(ManifestError::Format { found: 2 })));
        let mut value = as_json(&sample());
        value["format"] = json!(0);
        assert!(matches!(from_json(&value), Err(ManifestError::Contradiction(_))));
    }

    #[test]
    fn every_field_must_be_there() {
        // A damaged key counts as a missing one, so that no flipped letter turns a delta into a full image.
        let value = as_json(&sample());
        for key in value.as_object().unwrap().keys() {
            let mut without = value.clone();
            without.as_object_mut().unwrap().remove(key);
            assert!(matches!(from_json(&without), Err(ManifestError::Malformed(_))), "{key}");
        }
    }

    #[test]
    fn a_manifest_that_contradicts_itself_is_neither_read_nor_written() {
        let file = |n: usize| File { name: FileName::parse(&format!("f{n}")).unwrap(), ..sample().files[0].clone() };
        let break_it: [&dyn Fn(&mut Manifest); 7] = [
            &|m| m.scope = Scope::Data,
            &|m| m.image = None,
            &|m| m.golden = true,
            &|m| (m.scope, m.image, m.files) = (Scope::Data, None, vec![]),
            &|m| m.files.push(file(0)),
            &|m| m.files.extend([0, 0].map(|n| File { role: Role::Durable, ..file(n) })),
            &|m| m.files.extend((0..MAX_FILES).map(|n| File { role: Role::Runtime, ..file(n) })),
        ];
        for (number, break_it) in break_it.into_iter().enumerate() {
            let mut manifest = sample();
            break_it(&mut manifest);
            assert!(matches!(manifest.to_bytes(), Err(ManifestError::Contradiction(_))), "case {number}");
            assert!(matches!(from_json(&as_json(&manifest)), Err(ManifestError::Contradiction(_))), "case {number}");
        }
    }

    #[test]
    fn unsafe_names_are_refused() {
        for (pointer, bad) in [
            ("/files/0/name", "../image"),
            ("/files/0/name", "manifest.json"),
            ("/actor/name", "a/b"),
            ("/base/prefix", "s3://b/../x"),
            ("/image/digest", "ABC"),
            ("/encryption/algorithm", "ROT13"),
            ("/created", "yesterday"),
            ("/scope", "Half"),
        ] {
            let mut value = as_json(&sample());
            *value.pointer_mut(pointer).unwrap() = json!(bad);
            assert!(matches!(from_json(&value), Err(ManifestError::Malformed(_))), "{pointer}");
        }
    }

    #[test]
    fn a_manifest_over_the_limit_is_refused_before_parsing() {
        let long = vec![b' '; MAX_MANIFEST + 1];
        assert!(matches!(Manifest::read_unverified(&long), Err(ManifestError::TooLong { .. })));
        assert!(matches!(Manifest::read(&long, &Content::of(&long).digest), Err(ManifestError::TooLong { .. })));
        let mut manifest = sample();
        manifest.version_label = "x".repeat(MAX_MANIFEST);
        assert!(matches!(manifest.to_bytes(), Err(ManifestError::TooLong { .. })));
        let nested = format!("{{\"format\":1,\"x\":{}", "[".repeat(10_000));
        assert!(matches!(Manifest::read_unverified(nested.as_bytes()), Err(ManifestError::Malformed(_))));
    }

    #[test]
    fn any_change_at_all_is_refused_by_the_digest() {
        let bytes = sample().to_bytes().unwrap();
        let digest = Content::of(&bytes).digest;
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert!(matches!(Manifest::read(&changed, &digest), Err(ManifestError::Digest { .. })), "byte {at}");
            assert!(matches!(Manifest::read(&bytes[..at], &digest), Err(ManifestError::Digest { .. })), "cut {at}");
            // Without the digest, a cut still shows; only the last newline is no loss.
            assert!(at == bytes.len() - 1 || Manifest::read_unverified(&bytes[..at]).is_err(), "cut {at}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(at: prop::sample::Index, with in prop::collection::vec(any::<u8>(), 0..8)) {
            let mut bytes = sample().to_bytes().unwrap();
            let at = at.index(bytes.len());
            bytes.splice(at..(at + with.len()).min(bytes.len()), with);
            if let Ok(manifest) = Manifest::read_unverified(&bytes) {
                let again = Manifest::read_unverified(&manifest.to_bytes().unwrap()).unwrap();
                prop_assert_eq!(again, manifest);
            }
        }
    }
}
