use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The text is no uuid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a uuid")]
pub struct UidError;

macro_rules! uid {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// The caller draws the bytes, so that a simulation can draw them from its seed.
            pub fn from_random(bytes: [u8; 16]) -> Self {
                Self(uuid::Builder::from_random_bytes(bytes).into_uuid())
            }

            pub fn parse(text: &str) -> Result<Self, UidError> {
                Uuid::try_parse(text).map(Self).map_err(|_| UidError)
            }

            /// Bytes that [`as_bytes`](Self::as_bytes) gave.
            pub fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(Uuid::from_bytes(bytes))
            }

            pub fn as_bytes(&self) -> &[u8; 16] {
                self.0.as_bytes()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

uid! {
    /// One actor, from its creation to its deletion.
    ActorUid
}
uid! {
    /// One life of one worker process.
    WorkerUid
}
uid! {
    /// One operation on an actor; the key that makes node calls idempotent.
    OpId
}
uid! {
    /// One life of one process of the control plane.
    ReplicaId
}
uid! {
    /// One life of one node, as the control plane knows it.
    SessionId
}
uid! {
    /// One template object; a template deleted and applied anew is another one.
    TemplateUid
}
