use std::fmt;
use std::str::FromStr;

use ate_name::ObjectKey;
use serde::{Deserialize, Serialize, Serializer};

use crate::path::Problems;
use crate::{ActorTemplate, FieldPath, Invalid, Meta, Problem, SandboxConfig, WorkerPool};

/// The version of every kind of ours.
pub const API_VERSION: &str = "ate.dev/v1alpha1";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    ActorTemplate,
    WorkerPool,
    SandboxConfig,
}

/// The text names no kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown kind \"{}\": use one of actortemplates, workerpools, sandboxconfigs", .0.escape_debug())]
pub struct UnknownKind(pub String);

impl Kind {
    pub const ALL: [Self; 3] = [Self::ActorTemplate, Self::WorkerPool, Self::SandboxConfig];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::ActorTemplate => "ActorTemplate",
            Self::WorkerPool => "WorkerPool",
            Self::SandboxConfig => "SandboxConfig",
        }
    }

    /// What a person types on a command line, and the last part of the resource's path in Kubernetes.
    pub fn plural(self) -> &'static str {
        match self {
            Self::ActorTemplate => "actortemplates",
            Self::WorkerPool => "workerpools",
            Self::SandboxConfig => "sandboxconfigs",
        }
    }

    pub fn is_namespaced(self) -> bool {
        self != Self::SandboxConfig
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Kind {
    type Err = UnknownKind;

    /// Takes the kind, its plural and its short name (which is the singular), in any case, with or without the group.
    fn from_str(text: &str) -> Result<Self, UnknownKind> {
        let lower = text.to_ascii_lowercase();
        let name = lower.strip_suffix(".ate.dev").unwrap_or(&lower);
        let plural = |kind: &Kind| name == kind.plural() || kind.plural().strip_suffix('s') == Some(name);
        Self::ALL.into_iter().find(plural).ok_or_else(|| UnknownKind(text.to_owned()))
    }
}

/// Any declared object. Serialises with its `apiVersion` and `kind`, as it would stand in a file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind")]
pub enum Object {
    ActorTemplate(ActorTemplate),
    WorkerPool(WorkerPool),
    SandboxConfig(SandboxConfig),
}

impl Object {
    pub fn kind(&self) -> Kind {
        match self {
            Self::ActorTemplate(_) => Kind::ActorTemplate,
            Self::WorkerPool(_) => Kind::WorkerPool,
            Self::SandboxConfig(_) => Kind::SandboxConfig,
        }
    }

    pub fn metadata(&self) -> &Meta {
        match self {
            Self::ActorTemplate(template) => &template.metadata,
            Self::WorkerPool(pool) => &pool.metadata,
            Self::SandboxConfig(config) => &config.metadata,
        }
    }

    pub(crate) fn metadata_mut(&mut self) -> &mut Meta {
        match self {
            Self::ActorTemplate(template) => &mut template.metadata,
            Self::WorkerPool(pool) => &mut pool.metadata,
            Self::SandboxConfig(config) => &mut config.metadata,
        }
    }

    pub fn key(&self) -> ObjectKey {
        self.metadata().key()
    }

    /// Checks every rule that needs no other object, and reports all that are broken.
    pub fn validate(&self) -> Result<(), Invalid> {
        let mut problems = Problems::default();
        self.metadata().check(self.kind(), &mut problems);
        match self {
            Self::ActorTemplate(template) => template.spec.check(&mut problems),
            Self::WorkerPool(pool) => pool.spec.check(&mut problems),
            Self::SandboxConfig(config) => config.spec.check(&mut problems),
        }
        if problems.0.is_empty() {
            return Ok(());
        }
        Err(Invalid { kind: self.kind(), key: self.key(), problems: problems.0 })
    }

    /// One YAML document, without the `---` that would separate it from another.
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).expect("strings, numbers, lists and maps with text keys are all YAML")
    }
}

impl Serialize for Object {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Document<'a, Spec> {
            api_version: &'static str,
            kind: &'static str,
            metadata: &'a Meta,
            spec: &'a Spec,
        }
        let (api_version, kind) = (API_VERSION, self.kind().as_str());
        match self {
            Self::ActorTemplate(ActorTemplate { metadata, spec }) => {
                Document { api_version, kind, metadata, spec }.serialize(serializer)
            }
            Self::WorkerPool(WorkerPool { metadata, spec }) => {
                Document { api_version, kind, metadata, spec }.serialize(serializer)
            }
            Self::SandboxConfig(SandboxConfig { metadata, spec }) => {
                Document { api_version, kind, metadata, spec }.serialize(serializer)
            }
        }
    }
}

/// Whether `new` may take the place of `old`, the stored object of the same kind and key.
/// A template's spec never changes: snapshots were taken of what it said.
pub fn check_update(old: &Object, new: &Object) -> Result<(), Invalid> {
    match (old, new) {
        (Object::ActorTemplate(before), Object::ActorTemplate(after)) if before.spec != after.spec => Err(Invalid {
            kind: Kind::ActorTemplate,
            key: new.key(),
            problems: vec![Problem { path: FieldPath::new("spec"), message: "Spec is immutable".to_owned() }],
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_known_by_every_name_people_type() {
        for kind in Kind::ALL {
            for name in [kind.as_str(), kind.plural(), &format!("{}.ate.dev", kind.plural())] {
                assert_eq!(name.parse(), Ok(kind));
            }
        }
        assert_eq!("WorkerPools".parse(), Ok(Kind::WorkerPool));
        for bad in ["", "pod", "workerpool.apps", "workerpoolss"] {
            assert_eq!(bad.parse::<Kind>(), Err(UnknownKind(bad.into())));
        }
    }
}
