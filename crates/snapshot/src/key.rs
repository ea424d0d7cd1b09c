//! Keys: one data key per actor, wrapped by the instance key. Deleting the wrapped key shreds the actor's snapshots.
//!
//! ```text
//!   wrapped key, 69 bytes
//!   0   1    version, 1
//!   1   8    id of the instance key
//!   9   12   nonce, random
//!   21  48   AES-256-GCM of the data key, then its tag; associated data: version ‖ instance key id ‖ actor uid
//! ```
//!
//! No key is used raw: each use derives its own by HKDF-SHA256, so wrapping, sealing, proving and naming a key cannot meet.

use std::fmt;

use ate_name::ActorUid;
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, Salt};
use aws_lc_rs::hmac;
use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

const VERSION: u8 = 1;
const KEY: usize = 32;
const ID: usize = 8;
const WRAPPED: usize = 1 + ID + NONCE_LEN + KEY + 16;

/// 32 secret bytes. Overwritten when dropped, never printed; copies that the compiler makes are out of our hands.
struct Secret([u8; KEY]);

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl Secret {
    fn derive(&self, purpose: &[&[u8]]) -> LessSafeKey {
        let prk = Salt::new(HKDF_SHA256, b"ate").extract(&self.0);
        let okm = prk.expand(purpose, &AES_256_GCM).expect("32 bytes are within what HKDF gives");
        LessSafeKey::new(UnboundKey::from(okm))
    }

    fn expand(&self, purpose: &[u8]) -> [u8; 32] {
        let prk = Salt::new(HKDF_SHA256, b"ate").extract(&self.0);
        let mut okm = [0; 32];
        let purpose = [purpose];
        let expanded = prk.expand(&purpose, HKDF_SHA256).expect("32 bytes are within what HKDF gives");
        expanded.fill(&mut okm).expect("the buffer has the length asked for");
        okm
    }

    fn id(&self) -> KeyId {
        let mut id = [0; ID];
        id.copy_from_slice(&self.expand(b"id")[..ID]);
        KeyId(id)
    }
}

/// The text is no key id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not 16 lower-case hexadecimal digits")]
pub struct KeyIdError;

/// Tells keys apart without telling anything about them; derived one way from the key itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct KeyId([u8; ID]);

impl KeyId {
    pub fn parse(text: &str) -> Result<Self, KeyIdError> {
        let id = Self(u64::from_str_radix(text, 16).map_err(|_| KeyIdError)?.to_be_bytes());
        if id.to_string() == text { Ok(id) } else { Err(KeyIdError) }
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

stored_as_text!(KeyId, KeyIdError);

/// Seals the files of one actor's snapshots.
pub struct DataKey(Secret);

impl DataKey {
    /// The bytes must come from a cryptographic source; the caller draws them.
    pub fn from_random(bytes: [u8; KEY]) -> Self {
        Self(Secret(bytes))
    }

    pub fn id(&self) -> KeyId {
        self.0.id()
    }

    pub(crate) fn for_file(&self, place: &[u8]) -> LessSafeKey {
        self.0.derive(&[b"file", place])
    }

    pub(crate) fn for_manifests(&self) -> hmac::Key {
        let mut secret = self.0.expand(b"manifest");
        let key = hmac::Key::new(hmac::HMAC_SHA256, &secret);
        secret.zeroize();
        key
    }
}

impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DataKey({})", self.id())
    }
}

/// Wraps the data keys of all actors of an instance.
pub struct InstanceKey(Secret);

impl InstanceKey {
    pub fn from_bytes(bytes: [u8; KEY]) -> Self {
        Self(Secret(bytes))
    }

    pub fn id(&self) -> KeyId {
        self.0.id()
    }

    /// Binds the data key to its actor. The nonce must be fresh and random; 2^32 wraps under one instance key are safe.
    pub fn wrap(&self, key: &DataKey, actor: ActorUid, nonce: [u8; NONCE_LEN]) -> WrappedKey {
        let mut bytes = [0; WRAPPED];
        let (head, body) = bytes.split_at_mut(1 + ID);
        head[0] = VERSION;
        head[1..].copy_from_slice(&self.id().0);
        let (clear_nonce, body) = body.split_at_mut(NONCE_LEN);
        clear_nonce.copy_from_slice(&nonce);
        let (secret, tag) = body.split_at_mut(KEY);
        secret.copy_from_slice(&key.0.0);
        let sealed = self
            .0
            .derive(&[b"wrap"])
            .seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), Aad::from(bound(head, actor)), secret)
            .expect("32 bytes are within what AES-GCM seals");
        tag.copy_from_slice(sealed.as_ref());
        WrappedKey(bytes)
    }

    pub fn unwrap(&self, wrapped: &WrappedKey, actor: ActorUid) -> Result<DataKey, UnwrapError> {
        if wrapped.instance_key() != self.id() {
            return Err(UnwrapError::OtherInstanceKey { actor, wrapped_by: wrapped.instance_key(), have: self.id() });
        }
        let mut bytes = wrapped.0;
        let (head, body) = bytes.split_at_mut(1 + ID);
        let (nonce, sealed) = body.split_at_mut(NONCE_LEN);
        let nonce = Nonce::try_assume_unique_for_key(nonce).expect("split at the length of a nonce");
        let opened = self.0.derive(&[b"wrap"]).open_in_place(nonce, Aad::from(bound(head, actor)), sealed);
        let key = opened
            .map_err(|_| UnwrapError::Refused { actor })
            .map(|key| DataKey::from_random((&*key).try_into().expect("48 sealed bytes hold 32")));
        bytes.zeroize();
        key
    }
}

fn bound(head: &[u8], actor: ActorUid) -> Vec<u8> {
    [head, actor.as_bytes()].concat()
}

impl fmt::Debug for InstanceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InstanceKey({})", self.id())
    }
}

/// A data key as it may be stored.
#[derive(Clone, PartialEq, Eq)]
pub struct WrappedKey([u8; WRAPPED]);

impl WrappedKey {
    pub fn parse(bytes: &[u8]) -> Result<Self, UnwrapError> {
        let bytes: [u8; WRAPPED] = bytes.try_into().map_err(|_| UnwrapError::Malformed)?;
        if bytes[0] == VERSION { Ok(Self(bytes)) } else { Err(UnwrapError::Malformed) }
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Which instance key opens it; tells what is left to rewrap when that one is rotated.
    pub fn instance_key(&self) -> KeyId {
        let mut id = [0; ID];
        id.copy_from_slice(&self.0[1..=ID]);
        KeyId(id)
    }
}

impl fmt::Debug for WrappedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WrappedKey(by {})", self.instance_key())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnwrapError {
    #[error("not a wrapped data key of version 1; restore the actor's record from a backup")]
    Malformed,
    #[error(
        "the data key of actor {actor} is wrapped by instance key {wrapped_by}, and this instance has {have}; \
         configure the instance key that was in use when the actor was created"
    )]
    OtherInstanceKey { actor: ActorUid, wrapped_by: KeyId, have: KeyId },
    #[error("the wrapped data key of actor {actor} is damaged or belongs to another actor; restore it from a backup")]
    Refused { actor: ActorUid },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn actor(n: u8) -> ActorUid {
        ActorUid::from_random([n; 16])
    }

    #[test]
    fn a_wrapped_key_opens_for_its_actor_and_instance_only() {
        let (instance, other) = (InstanceKey::from_bytes([1; 32]), InstanceKey::from_bytes([2; 32]));
        let wrapped = instance.wrap(&DataKey::from_random([3; 32]), actor(1), [4; 12]);
        let stored = WrappedKey::parse(wrapped.as_bytes()).unwrap();
        assert_eq!(instance.unwrap(&stored, actor(1)).unwrap().0.0, [3; 32]);
        assert_eq!(instance.unwrap(&stored, actor(2)).unwrap_err(), UnwrapError::Refused { actor: actor(2) });
        assert!(matches!(other.unwrap(&stored, actor(1)), Err(UnwrapError::OtherInstanceKey { .. })));
    }

    #[test]
    fn any_changed_or_missing_byte_of_a_wrapped_key_is_refused() {
        let instance = InstanceKey::from_bytes([1; 32]);
        let wrapped = instance.wrap(&DataKey::from_random([3; 32]), actor(1), [4; 12]);
        for at in 0..WRAPPED {
            let mut bytes = wrapped.as_bytes().to_vec();
            bytes[at] ^= 1;
            let opened = WrappedKey::parse(&bytes).and_then(|key| instance.unwrap(&key, actor(1)));
            assert_eq!(opened.unwrap_err() == UnwrapError::Malformed, at == 0, "byte {at}");
            assert_eq!(WrappedKey::parse(&wrapped.as_bytes()[..at]), Err(UnwrapError::Malformed));
        }
    }

    #[test]
    fn keys_show_their_id_and_nothing_else() {
        let key = DataKey::from_random([0xab; 32]);
        assert_eq!(format!("{key:?}"), format!("DataKey({})", key.id()));
        assert!(!format!("{key:?}{:?}", InstanceKey::from_bytes([0xab; 32])).contains("abab"));
        let id = key.id().to_string();
        assert_eq!(KeyId::parse(&id), Ok(key.id()));
        assert_ne!(key.id(), DataKey::from_random([0xac; 32]).id());
        for bad in ["", &id[1..], &id.to_uppercase(), "+123456789abcdef", &format!("0{id}")] {
            assert_eq!(KeyId::parse(bad), Err(KeyIdError), "{bad}");
        }
    }
}
