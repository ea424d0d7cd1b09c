use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest DNS label, and so the longest name of an actor or atespace: both become labels of a host name.
pub const MAX_NAME: usize = 63;

/// Longest DNS subdomain, the limit Kubernetes puts on the names of most objects.
const MAX_SUBDOMAIN: usize = 253;

/// Why a text is no name. The texts are part of the public API: clients compare them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("must be no more than 63 characters")]
    TooLong,
    #[error(
        "must start and end with a lower case alphanumeric character, and consist only of lower case alphanumeric characters or '-'"
    )]
    Malformed,
}

/// A lower-case DNS label: letters, digits and inner hyphens, at most 63.
pub fn check_dns_label(text: &str) -> Result<(), NameError> {
    if text.len() > MAX_NAME {
        return Err(NameError::TooLong);
    }
    let alnum = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    match (bytes.first(), bytes.last()) {
        (Some(&first), Some(&last)) if alnum(first) && alnum(last) => {}
        _ => return Err(NameError::Malformed),
    }
    if bytes.iter().all(|&b| alnum(b) || b == b'-') { Ok(()) } else { Err(NameError::Malformed) }
}

/// Labels joined by dots, at most 253 in all: what Kubernetes calls an RFC 1123 subdomain.
pub fn check_dns_subdomain(text: &str) -> bool {
    text.len() <= MAX_SUBDOMAIN && text.split('.').all(|label| check_dns_label(label).is_ok())
}

macro_rules! label_name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String")]
        pub struct $name(String);

        impl $name {
            pub fn parse(text: impl Into<String>) -> Result<Self, NameError> {
                let text = text.into();
                check_dns_label(&text)?;
                Ok(Self(text))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;
            fn try_from(text: String) -> Result<Self, NameError> {
                Self::parse(text)
            }
        }
    };
}

label_name! {
    /// An actor's name, unique in its atespace.
    ActorName
}
label_name! {
    /// The isolation boundary that actors live in; not a Kubernetes namespace.
    AtespaceName
}

/// What a person calls an actor: `atespace/name`. Outlives the actor: a later one may bear the same key, with another uid.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ActorKey {
    pub atespace: AtespaceName,
    pub name: ActorName,
}

impl ActorKey {
    pub fn new(atespace: AtespaceName, name: ActorName) -> Self {
        Self { atespace, name }
    }

    pub fn parse(atespace: &str, name: &str) -> Result<Self, NameError> {
        Ok(Self { atespace: AtespaceName::parse(atespace)?, name: ActorName::parse(name)? })
    }
}

impl fmt::Display for ActorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.atespace, self.name)
    }
}

impl fmt::Debug for ActorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a person calls a template, pool or config: `namespace/name`, the namespace empty for cluster-scoped kinds.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectKey {
    pub namespace: String,
    pub name: String,
}

impl ObjectKey {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() { f.write_str(&self.name) } else { write!(f, "{}/{}", self.namespace, self.name) }
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A machine that runs workers. Kubernetes names nodes by subdomain; a lone machine uses its host name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeName(String);

impl NodeName {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_dns_labels() {
        for good in ["a", "0", "a-b", "a--b", &"x".repeat(63)] {
            assert!(ActorName::parse(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a_b", "a/b", "ä", " a", "a\n"] {
            assert_eq!(ActorName::parse(bad).unwrap_err(), NameError::Malformed, "{bad:?}");
        }
        assert_eq!(ActorName::parse("x".repeat(64)).unwrap_err(), NameError::TooLong);
    }

    #[test]
    fn a_name_from_json_is_checked_too() {
        assert!(serde_json::from_str::<ActorName>("\"../etc\"").is_err());
        assert_eq!(serde_json::to_string(&ActorName::parse("a").unwrap()).unwrap(), "\"a\"");
    }
}
