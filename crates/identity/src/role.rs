use std::fmt;
use std::str::FromStr;

/// Longest name of an instance: what SPIFFE allows a trust domain. Longer ones are no SPIFFE id.
const MAX_INSTANCE: usize = 255;

/// What a process of an instance does, and so what it may ask of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    Api,
    Controller,
    Node,
    Worker,
    Router,
    Dns,
    Gateway,
    /// A person at the command line.
    Cli,
}

impl Role {
    pub const ALL: [Self; 8] =
        [Self::Api, Self::Controller, Self::Node, Self::Worker, Self::Router, Self::Dns, Self::Gateway, Self::Cli];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::Controller => "controller",
            Self::Node => "node",
            Self::Worker => "worker",
            Self::Router => "router",
            Self::Dns => "dns",
            Self::Gateway => "gateway",
            Self::Cli => "cli",
        }
    }

    /// The name that existing clients of the public API dial, for the role that serves it.
    pub(crate) fn service_name(self) -> Option<&'static str> {
        (self == Self::Api).then_some("api.ate-system.svc")
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = SpiffeError;

    fn from_str(text: &str) -> Result<Self, SpiffeError> {
        Self::ALL.into_iter().find(|role| role.as_str() == text).ok_or_else(|| SpiffeError::Role(text.to_owned()))
    }
}

/// `spiffe://<instance>/role/<role>`: one role of one instance. There is one spelling of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SpiffeId {
    instance: String,
    role: Role,
}

/// Why text is no id of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpiffeError {
    #[error("{0:?} is not of the form spiffe://<instance>/role/<role>")]
    Form(String),
    #[error("{0:?} is no name of an instance: 1 to 255 of a-z, 0-9, '.', '-' and '_'")]
    Instance(String),
    #[error("{0:?} is no role")]
    Role(String),
}

impl SpiffeId {
    pub fn new(instance: &str, role: Role) -> Result<Self, SpiffeError> {
        let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' | b'_');
        if !(1..=MAX_INSTANCE).contains(&instance.len()) || !instance.bytes().all(allowed) {
            return Err(SpiffeError::Instance(instance.to_owned()));
        }
        Ok(Self { instance: instance.to_owned(), role })
    }

    pub fn instance(&self) -> &str {
        &self.instance
    }

    pub fn role(&self) -> Role {
        self.role
    }
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "spiffe://{}/role/{}", self.instance, self.role)
    }
}

impl FromStr for SpiffeId {
    type Err = SpiffeError;

    fn from_str(text: &str) -> Result<Self, SpiffeError> {
        let (instance, role) = text
            .strip_prefix("spiffe://")
            .and_then(|rest| rest.split_once("/role/"))
            .ok_or_else(|| SpiffeError::Form(text.to_owned()))?;
        Self::new(instance, role.parse()?)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_id_that_is_written_is_read(instance in "[a-z0-9._-]{1,255}", role in 0..Role::ALL.len()) {
            let id = SpiffeId::new(&instance, Role::ALL[role]).unwrap();
            prop_assert_eq!(id.to_string().parse(), Ok(id));
        }

        #[test]
        fn there_is_one_spelling(text in "(spiffe|SPIFFE)://[a-z/.%A]{0,4}/(role|rolE)?/(api|API|node|cli|x)?[/ ?#]?") {
            if let Ok(id) = text.parse::<SpiffeId>() {
                prop_assert_eq!(id.to_string(), text);
            }
        }

        #[test]
        fn any_text_has_an_answer(text: String) {
            let _ = text.parse::<SpiffeId>();
        }
    }

    #[test]
    fn what_is_not_an_id_is_refused() {
        for text in [
            "",
            "spiffe://",
            "spiffe:///role/api",
            "spiffe://i/role/",
            "spiffe://i/role/root",
            "spiffe://i/role/api/",
            "spiffe://i/role/API",
            "spiffe://I/role/api",
            "spiffe://i:1/role/api",
            "spiffe://a@i/role/api",
            "spiffe://i/x/role/api",
            "spiffe://i/role/node/role/api",
            "https://i/role/api",
        ] {
            assert!(text.parse::<SpiffeId>().is_err(), "{text}");
        }
        assert!(SpiffeId::new(&"i".repeat(256), Role::Api).is_err());
    }
}
