//! SandboxConfig: the pinned binaries of a runtime family, and which config a pool uses.

use std::collections::BTreeMap;
use std::fmt;

use ate_name::{Digest, ObjectKey};
use serde::{Deserialize, Serialize};

use crate::path::Problems;
use crate::{FieldPath, Invalid, Kind, Meta, Problem, WorkerPool};

/// Where assets can be fetched from; a url of another scheme is refused. Plain http is missing on purpose: the hash
/// protects the bytes, but not the fetching itself.
pub const ASSET_SCHEMES: [&str; 5] = ["file", "https", "oci", "s3", "gs"];

/// A family of sandbox runtimes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxClass {
    #[default]
    Gvisor,
    Microvm,
}

impl SandboxClass {
    /// The assets that every architecture of a config of this class must have.
    pub fn required_assets(self) -> &'static [&'static str] {
        match self {
            Self::Gvisor => &["runsc"],
            Self::Microvm => &["cloud-hypervisor", "virtiofsd", "kata-kernel", "kata-image", "kata-config"],
        }
    }
}

impl fmt::Display for SandboxClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gvisor => "gvisor",
            Self::Microvm => "microvm",
        })
    }
}

/// Which binaries a sandbox class runs, for each architecture. Belongs to no namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxConfig {
    pub metadata: Meta,
    pub spec: SandboxConfigSpec,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxConfigSpec {
    #[serde(default)]
    pub sandbox_class: SandboxClass,
    /// The config of every pool of the class that names none. At most one config of a class may say so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub default: bool,
    /// By architecture (`amd64`, `arm64`), then by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub assets: BTreeMap<String, BTreeMap<String, Asset>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asset {
    pub url: String,
    pub sha256: Digest,
}

impl SandboxConfigSpec {
    pub(crate) fn check(&self, problems: &mut Problems) {
        let path = FieldPath::new("spec").field("assets");
        let required = self.sandbox_class.required_assets();
        let complete = |assets: &BTreeMap<String, Asset>| required.iter().all(|name| assets.contains_key(*name));
        let incomplete = self.assets.iter().find(|(_, assets)| !complete(assets));
        if self.assets.is_empty() || incomplete.is_some() {
            let path = incomplete.map_or_else(|| path.clone(), |(architecture, _)| path.field(architecture));
            problems.add(
                path,
                match self.sandbox_class {
                    SandboxClass::Gvisor => {
                        "a gvisor SandboxConfig must define a 'runsc' asset for every architecture under spec.assets"
                    }
                    SandboxClass::Microvm => {
                        "a microvm SandboxConfig must define 'cloud-hypervisor', 'virtiofsd', 'kata-kernel', \
                         'kata-image' and 'kata-config' assets for every architecture under spec.assets"
                    }
                },
            );
        }
        for (architecture, assets) in &self.assets {
            for (name, asset) in assets {
                if let Err(message) = check_url(&asset.url) {
                    problems.add(path.field(architecture).field(name).field("url"), message);
                }
            }
        }
    }
}

fn check_url(url: &str) -> Result<(), String> {
    let known = ASSET_SCHEMES.join(", ");
    match url.split_once("://") {
        Some((scheme, rest)) if ASSET_SCHEMES.contains(&scheme) => {
            if rest.is_empty() {
                Err(format!("must name something behind \"{scheme}://\""))
            } else {
                Ok(())
            }
        }
        Some((scheme, _)) => Err(format!("unknown scheme \"{}\": use one of {known}", scheme.escape_debug())),
        None => Err(format!("must be a url of one of the schemes {known}")),
    }
}

/// Refuses a second default of a class. `existing` may hold the object that `new` replaces.
pub fn check_defaults<'a>(
    existing: impl IntoIterator<Item = &'a SandboxConfig>,
    new: &SandboxConfig,
) -> Result<(), Invalid> {
    let class = new.spec.sandbox_class;
    let rival = existing.into_iter().find(|other| {
        other.spec.default && other.spec.sandbox_class == class && other.metadata.name != new.metadata.name
    });
    match rival {
        Some(other) if new.spec.default => Err(Invalid {
            kind: Kind::SandboxConfig,
            key: new.metadata.key(),
            problems: vec![Problem {
                path: FieldPath::new("spec").field("default"),
                message: format!(
                    "SandboxConfig \"{}\" is already the default of class {class}: set its spec.default to false \
                     first, or leave this one's out and name it by sandboxConfigName",
                    other.metadata.name
                ),
            }],
        }),
        _ => Ok(()),
    }
}

/// Why a pool has no config. Each names the objects and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    #[error(
        "pool \"{pool}\" names SandboxConfig \"{config}\", which does not exist\n  apply it, or change \
         spec.sandboxConfigName of the pool"
    )]
    Missing { pool: ObjectKey, config: String },
    #[error(
        "pool \"{pool}\" is of class {pool_class}, but its SandboxConfig \"{config}\" is of class {config_class}\n  \
         name a config of class {pool_class} in spec.sandboxConfigName of the pool"
    )]
    WrongClass { pool: ObjectKey, pool_class: SandboxClass, config: String, config_class: SandboxClass },
    #[error(
        "pool \"{pool}\" names no SandboxConfig, and none is the default of class {class}\n  set spec.default of one \
         to true, or name one in spec.sandboxConfigName of the pool"
    )]
    NoDefault { pool: ObjectKey, class: SandboxClass },
    #[error(
        "pool \"{pool}\" names no SandboxConfig, and several are the default of class {class}: {}\n  set spec.default \
         of all but one to false, or name one in spec.sandboxConfigName of the pool",
        quoted(.configs)
    )]
    SeveralDefaults { pool: ObjectKey, class: SandboxClass, configs: Vec<String> },
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

/// The config a pool uses: the one it names, else the one default of its class.
pub fn resolve_config<'a>(
    pool: &WorkerPool,
    configs: impl IntoIterator<Item = &'a SandboxConfig>,
) -> Result<&'a SandboxConfig, ResolveError> {
    let key = pool.metadata.key();
    let class = pool.spec.sandbox_class;
    let mut configs = configs.into_iter();
    if let Some(name) = &pool.spec.sandbox_config_name {
        let config = configs.find(|config| config.metadata.name == *name);
        let config = config.ok_or_else(|| ResolveError::Missing { pool: key.clone(), config: name.clone() })?;
        if config.spec.sandbox_class != class {
            let config_class = config.spec.sandbox_class;
            return Err(ResolveError::WrongClass { pool: key, pool_class: class, config: name.clone(), config_class });
        }
        return Ok(config);
    }
    let defaults: Vec<_> = configs.filter(|config| config.spec.default && config.spec.sandbox_class == class).collect();
    match defaults[..] {
        [only] => Ok(only),
        [] => Err(ResolveError::NoDefault { pool: key, class }),
        _ => {
            let configs = defaults.iter().map(|config| config.metadata.name.clone()).collect();
            Err(ResolveError::SeveralDefaults { pool: key, class, configs })
        }
    }
}

/// A config that lacks what its class needs on an architecture.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "SandboxConfig \"{config}\" has no asset \"{asset}\" for {architecture}\n  add spec.assets.{architecture}.{asset}, \
     or give the pool a sandboxConfigName that has it"
)]
pub struct AssetError {
    pub config: String,
    pub asset: &'static str,
    pub architecture: String,
}

/// The assets of a config for one architecture, complete for its class.
pub fn assets_for<'a>(
    config: &'a SandboxConfig,
    architecture: &str,
) -> Result<&'a BTreeMap<String, Asset>, AssetError> {
    static NONE: BTreeMap<String, Asset> = BTreeMap::new();
    let assets = config.spec.assets.get(architecture).unwrap_or(&NONE);
    match config.spec.sandbox_class.required_assets().iter().find(|name| !assets.contains_key(**name)) {
        None => Ok(assets),
        Some(asset) => {
            Err(AssetError { config: config.metadata.name.clone(), asset, architecture: architecture.to_owned() })
        }
    }
}
