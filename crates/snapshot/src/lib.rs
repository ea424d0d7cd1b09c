//! Formats of a snapshot: what its files hold, how they are named, and what must hold before one is restored.
//!
//! Bytes in, bytes out: no paths, no clock, and keys and nonces are arguments. Whoever takes a snapshot writes its files
//! first and the manifest last, so a prefix without a manifest is no snapshot. Whoever restores one reads the manifest
//! against the digest in the actor's record, asks [`Manifest::admit`], opens the files, and decodes the memory image
//! straight into the buffer that the sandbox will read.
//!
//! ```text
//!   <location>/<atespace>/<actor>/<uid>/<generation>-<op>/        SnapshotKey
//!       image        memory ── delta::encode(base) ── seal ──▶     Role::Image
//!       durable.tar  files of the durable directories ── seal ──▶  Role::Durable
//!       manifest.json   names the base and every file with its digest; written last   Manifest
//!
//!   restore:  manifest ── digest, admit ──▶ files ── digest ── open ── delta::decode(base) ──▶ mapped memory
//! ```
//!
//! What guards what, and why the image is not hashed on the way to a wake: a sha256 of 24 MB costs several times what
//! decoding it does, and proves nothing that is not known by then. The *stored* bytes are hashed (a delta is some 70 KB)
//! and, when sealed, authenticated; the base's digest was checked when it was loaded; the codec is a function of those
//! two. What is left is a wrong base in the caller's hands or memory gone bad, and for those each zstd frame carries a
//! checksum of its result. [`Content`] of the decoded image stays in the manifest for audits and for trial restores.
//!
//! **Durable directories** travel as one plain tar (ustar with PAX headers where ustar ends). Names, modes, numeric uid
//! and gid, modification times to the nanosecond, symbolic and hard links, and `user.*` extended attributes must
//! survive; nothing else is promised. Packing needs paths, so the worker does it.

/// A type that is text wherever it is stored or shown, and is parsed when it is read back.
macro_rules! stored_as_text {
    ($type:ident, $error:ident) => {
        impl std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }

        impl TryFrom<String> for $type {
            type Error = $error;
            fn try_from(text: String) -> Result<Self, $error> {
                Self::parse(&text)
            }
        }

        impl From<$type> for String {
            fn from(value: $type) -> String {
                value.to_string()
            }
        }
    };
}

mod admit;
mod content;
pub mod delta;
mod key;
mod location;
mod manifest;
pub mod seal;

pub use admit::{Expectation, Host, Reason, Refused};
pub use content::{Content, Hashing};
pub use key::{DataKey, InstanceKey, KeyId, KeyIdError, UnwrapError, WrappedKey};
pub use location::{
    FileName, FileNameError, Home, Location, LocationError, MANIFEST, SnapshotId, SnapshotKey, SnapshotKeyError,
};
pub use manifest::{
    ActorIdentity, Algorithm, Asset, Base, Encryption, FORMAT, File, MAX_MANIFEST, Manifest, ManifestError, Role,
    Scope, SecretExposure, TemplateIdentity,
};

#[cfg(test)]
mod roundtrip;
