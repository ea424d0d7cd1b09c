//! The JSON of an image: index, manifest, config.
//!
//! ```text
//!   index ──(platform)──> manifest ──> config   entrypoint, env, …, and the diff-ids
//!                                 └──> layers   in the order of the diff-ids, lowest first
//! ```

use std::fmt;

use ate_name::Digest;
use serde::{Deserialize, Deserializer, Serialize};

use crate::Cause;
use crate::reference::parse_digest;

/// Longest index, manifest or config that is read; registries accept no longer manifests either. A longer one is refused.
pub(crate) const MAX_DOCUMENT: u64 = 4 << 20;

pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub(crate) const ACCEPTED: [&str; 4] = [INDEX, MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Architecture {
    Amd64,
    Arm64,
}

impl Architecture {
    /// Of the machine that this runs on.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") { Self::Arm64 } else { Self::Amd64 };

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// A later variant may use instructions that this machine lacks, so only the baseline counts.
    fn is_baseline(self, variant: Option<&str>) -> bool {
        matches!((self, variant), (_, None | Some("")) | (Self::Amd64, Some("v1")) | (Self::Arm64, Some("v8")))
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A digest as OCI writes it, `sha256:<hex>`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct OciDigest(pub(crate) Digest);

impl TryFrom<String> for OciDigest {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        parse_digest(&text).map(Self).ok_or_else(|| format!("{text:?} is no sha256 digest"))
    }
}

impl From<OciDigest> for String {
    fn from(digest: OciDigest) -> String {
        format!("sha256:{}", digest.0)
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    pub(crate) media_type: String,
    pub(crate) digest: OciDigest,
    pub(crate) size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) platform: Option<Platform>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Platform {
    pub(crate) architecture: String,
    pub(crate) os: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) variant: Option<String>,
}

/// An index or a manifest: which of the two is decided by what it holds.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Document {
    pub(crate) schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) media_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) config: Option<Descriptor>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) layers: Option<Vec<Descriptor>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) manifests: Option<Vec<Descriptor>>,
}

#[derive(Debug)]
pub(crate) enum Kind {
    Index(Vec<Descriptor>),
    Manifest { config: Descriptor, layers: Vec<Descriptor> },
}

impl Document {
    pub(crate) fn index(manifests: Vec<Descriptor>) -> Self {
        let media_type = Some(INDEX.to_owned());
        Self { schema_version: 2, media_type, config: None, layers: None, manifests: Some(manifests) }
    }

    pub(crate) fn manifest(config: Descriptor, layers: Vec<Descriptor>) -> Self {
        let media_type = Some(MANIFEST.to_owned());
        Self { schema_version: 2, media_type, config: Some(config), layers: Some(layers), manifests: None }
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Kind, Cause> {
        const WHAT: &str = "manifest";
        let malformed = |reason: String| Cause::Malformed { what: WHAT, reason };
        let document: Self = serde_json::from_slice(bytes).map_err(|error| malformed(error.to_string()))?;
        if document.schema_version != 2 {
            return Err(malformed(format!("schema version {} is not supported, only 2", document.schema_version)));
        }
        let media_type = document.media_type.as_deref();
        match (document.manifests, document.config, document.layers) {
            // A document that is both could be read as one here and as the other by whoever checked it.
            (Some(manifests), None, None) if matches!(media_type, None | Some(INDEX | DOCKER_INDEX)) => {
                Ok(Kind::Index(manifests))
            }
            (None, Some(config), Some(layers)) if matches!(media_type, None | Some(MANIFEST | DOCKER_MANIFEST)) => {
                Ok(Kind::Manifest { config, layers })
            }
            _ => Err(malformed(format!("it is neither an index nor an image manifest (media type {media_type:?})"))),
        }
    }
}

/// The entry of an index for `architecture`.
pub(crate) fn select(manifests: Vec<Descriptor>, architecture: Architecture) -> Result<Descriptor, Cause> {
    let fits = |platform: &Platform| {
        platform.os == "linux"
            && platform.architecture == architecture.as_str()
            && architecture.is_baseline(platform.variant.as_deref())
    };
    let has = manifests.iter().filter_map(|entry| entry.platform.as_ref()).map(|platform| {
        let variant = platform.variant.iter().map(|variant| format!("/{variant}")).collect::<String>();
        format!("{}/{}{variant}", platform.os, platform.architecture)
    });
    let has = has.collect::<Vec<_>>().join(", ");
    manifests
        .into_iter()
        .find(|entry| entry.platform.as_ref().is_some_and(fits))
        .ok_or_else(|| wrong_platform(architecture, if has.is_empty() { "no named platform".to_owned() } else { has }))
}

fn wrong_platform(architecture: Architecture, has: String) -> Cause {
    Cause::Platform { wanted: format!("linux/{architecture}"), has }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    pub(crate) fn of_layer(media_type: &str) -> Result<Self, Cause> {
        let oci = media_type.strip_prefix(LAYER).map(|suffix| suffix.trim_start_matches('+'));
        let docker = || media_type.strip_prefix("application/vnd.docker.image.rootfs.diff.tar");
        match oci.or_else(|| docker().map(|suffix| suffix.trim_start_matches('.'))) {
            Some("") => Ok(Self::None),
            Some("gzip") => Ok(Self::Gzip),
            Some("zstd") => Ok(Self::Zstd),
            _ => Err(Cause::Malformed {
                what: "manifest",
                reason: format!("layer of unknown media type {media_type:?}"),
            }),
        }
    }
}

/// What an image says about the process to start in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct ImageConfig {
    /// As written, `user[:group]`; see [`crate::Image::user`].
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// `NAME=value` each.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// Empty means `/`.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    pub working_dir: String,
}

/// Builders write `null` for what is not set.
fn null_is_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ConfigFile {
    pub(crate) architecture: String,
    pub(crate) os: String,
    #[serde(default, deserialize_with = "null_is_default")]
    pub(crate) config: ImageConfig,
    pub(crate) rootfs: Rootfs,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Rootfs {
    pub(crate) r#type: String,
    pub(crate) diff_ids: Vec<OciDigest>,
}

impl ConfigFile {
    /// For an image of `layers` layers on `architecture`; any other is refused.
    pub(crate) fn parse(bytes: &[u8], layers: usize, architecture: Architecture) -> Result<Self, Cause> {
        let malformed = |reason: String| Cause::Malformed { what: "config", reason };
        let config: Self = serde_json::from_slice(bytes).map_err(|error| malformed(error.to_string()))?;
        if config.os != "linux" || config.architecture != architecture.as_str() {
            return Err(wrong_platform(architecture, format!("{}/{}", config.os, config.architecture)));
        }
        if config.rootfs.diff_ids.len() != layers {
            return Err(malformed(format!("{} diff-ids for {layers} layers", config.rootfs.diff_ids.len())));
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn descriptor(platform: Option<Value>) -> Value {
        json!({ "mediaType": MANIFEST, "digest": format!("sha256:{}", "a".repeat(64)), "size": 1, "platform": platform })
    }

    #[test]
    fn an_index_gives_the_baseline_of_the_wanted_platform_or_says_what_it_has() {
        let entry = |os, architecture, variant: Option<&str>| {
            descriptor(Some(json!({ "os": os, "architecture": architecture, "variant": variant })))
        };
        let index = json!([
            entry("windows", "amd64", None),
            entry("linux", "amd64", Some("v3")),
            entry("linux", "amd64", None),
            entry("unknown", "unknown", None),
        ]);
        let index = || serde_json::from_value(index.clone()).unwrap();
        let chosen = select(index(), Architecture::Amd64).unwrap().platform.unwrap();
        assert_eq!((chosen.os.as_str(), chosen.variant), ("linux", None));
        let error = select(index(), Architecture::Arm64).unwrap_err().to_string();
        assert!(error.contains("linux/amd64/v3") && error.contains("linux/arm64"), "{error}");
    }

    #[test]
    fn a_document_that_is_index_and_manifest_at_once_is_refused() {
        let parse = |edit: Value| {
            let descriptor = descriptor(None);
            let mut document = json!({ "schemaVersion": 2, "config": descriptor, "layers": [descriptor] });
            document.as_object_mut().unwrap().extend(edit.as_object().unwrap().clone());
            Document::parse(document.to_string().as_bytes())
        };
        assert!(matches!(parse(json!({})), Ok(Kind::Manifest { .. })));
        let index = json!({ "config": null, "layers": null, "manifests": [descriptor(None)] });
        assert!(matches!(parse(index), Ok(Kind::Index(_))));
        for bad in [json!({ "manifests": [] }), json!({ "mediaType": INDEX }), json!({ "schemaVersion": 1 })] {
            assert!(parse(bad.clone()).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_config_with_nulls_is_read_and_one_for_another_machine_refused() {
        let config = json!({
            "architecture": "arm64", "os": "linux", "created": "x",
            "config": { "Cmd": ["a"], "Entrypoint": null, "Env": null, "User": null, "Labels": {} },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", "a".repeat(64))] },
        });
        let parse = |architecture, layers| ConfigFile::parse(config.to_string().as_bytes(), layers, architecture);
        let read = parse(Architecture::Arm64, 1).unwrap().config;
        assert_eq!(read, ImageConfig { cmd: vec!["a".into()], ..Default::default() });
        assert!(matches!(parse(Architecture::Amd64, 1), Err(Cause::Platform { .. })));
        assert!(matches!(parse(Architecture::Arm64, 2), Err(Cause::Malformed { .. })));
    }

    #[test]
    fn layers_of_both_families_are_known() {
        let compression = |suffix: &str| Compression::of_layer(&format!("application/vnd.{suffix}")).ok();
        assert_eq!(compression("oci.image.layer.v1.tar"), Some(Compression::None));
        assert_eq!(compression("oci.image.layer.v1.tar+zstd"), Some(Compression::Zstd));
        assert_eq!(compression("docker.image.rootfs.diff.tar.gzip"), Some(Compression::Gzip));
        assert_eq!(compression("oci.image.layer.v1.tar+lz4"), None);
        assert_eq!(compression("docker.image.rootfs.foreign.diff.tar.gzip"), None);
    }
}
