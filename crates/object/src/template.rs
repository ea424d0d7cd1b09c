//! The shape of an ActorTemplate. Its rules are in `template_rules`.

use std::fmt;
use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};

use crate::{Egress, Interval, LabelSelector, Meta, Quantity, SandboxClass};

/// Where an actor is reached when its template names no port.
pub const DEFAULT_PORT: Port = Port(NonZeroU16::new(80).expect("80 is not zero"));

/// The immutable recipe of an actor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActorTemplate {
    pub metadata: Meta,
    pub spec: ActorTemplateSpec,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ActorTemplateSpec {
    /// Required by the public schema and unused here: the sandbox needs no container of its own to hold namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_image: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<Container>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Volume>,
    pub snapshots_config: SnapshotsConfig,
    #[serde(default)]
    pub sandbox_class: SandboxClass,
    /// Chooses pools by their labels; absent, any pool of the class will do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_selector: Option<LabelSelector>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<Idle>,
    /// Absent, the actor may open no connection at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<LocalSecret>,
}

impl ActorTemplateSpec {
    /// The durable directory that some container sees; there is at most one.
    pub fn durable_dir(&self) -> Option<DurableDir> {
        let seen = |name: &str| self.containers.iter().flat_map(|c| &c.volume_mounts).any(|mount| mount.name == name);
        self.volumes.iter().filter(|volume| seen(&volume.name)).find_map(|volume| volume.durable_dir)
    }

    /// Where actors of this template are reached: the named ports of all containers, or port 80 when there is none.
    pub fn ports(&self) -> Vec<ContainerPort> {
        let named: Vec<_> = self.containers.iter().flat_map(|container| container.ports.iter().cloned()).collect();
        if named.is_empty() {
            return vec![ContainerPort { port: DEFAULT_PORT, name: None, protocol: Protocol::Http }];
        }
        named
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    pub name: String,
    pub image: String,
    /// Empty, the image says what to run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readyz: Option<Readyz>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<VolumeMount>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<ContainerPort>,
}

/// Exactly one of `value` and `value_from` is set in a valid template. Values are taken literally, `$(VAR)` included.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvVar {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_from: Option<EnvSource>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EnvSource {
    SecretKeyRef(SecretKey),
}

/// One key of a secret in the template's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretKey {
    pub name: String,
    pub key: String,
    /// The variable is left out when the secret or its key is missing, instead of failing the start.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub optional: bool,
}

/// An actor counts as started when every container that has one answers it with 200.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Readyz {
    pub http_get: HttpGet,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpGet {
    #[serde(default = "default_readyz_path")]
    pub path: String,
    pub port: Port,
}

fn default_readyz_path() -> String {
    "/readyz".to_owned()
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeMount {
    pub name: String,
    pub mount_path: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerPort {
    pub port: Port,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default)]
    pub protocol: Protocol,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    #[default]
    Http,
    /// HTTP/2 without TLS and without an upgrade, as gRPC servers speak it.
    H2c,
}

/// Has exactly one source in a valid template; `durable_dir` is the only one there is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durable_dir: Option<DurableDir>,
}

/// What a durable directory may hold when its template does not say: room for the sources and packages of a small project,
/// and a hundred actors of a node together do not fill a common disk.
const DEFAULT_DURABLE_BYTES: u64 = 1 << 30;

/// A directory that is part of every snapshot, whatever its scope.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DurableDir {
    /// The size of the file system that it is, of which less than a tenth is the file system's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_limit: Option<Quantity>,
}

impl DurableDir {
    pub fn bytes(&self) -> u64 {
        self.size_limit.map_or(DEFAULT_DURABLE_BYTES, Quantity::units)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotsConfig {
    /// Where durable snapshots go: a URL whose path is a prefix.
    pub location: String,
    #[serde(default)]
    pub on_pause: Scope,
    #[serde(default)]
    pub on_commit: Scope,
}

/// What a snapshot holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scope {
    /// Memory, the changed files of the root, and durable directories.
    #[default]
    Full,
    /// Durable directories only; waking starts the processes anew.
    Data,
}

/// When an actor without traffic is set aside. A template that says nothing of it gets [`Idle::USUAL`]; one that says
/// something gets that and no more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Idle {
    #[serde(default, deserialize_with = "Interval::nonzero", skip_serializing_if = "Option::is_none")]
    pub freeze_after: Option<Interval>,
    #[serde(default, deserialize_with = "Interval::nonzero", skip_serializing_if = "Option::is_none")]
    pub suspend_after: Option<Interval>,
}

impl ActorTemplateSpec {
    /// What holds for its actors, said or not.
    pub fn idle(&self) -> Idle {
        self.idle.unwrap_or(Idle::USUAL)
    }
}

impl Idle {
    /// Soon enough that a few workers serve many, late enough that whoever talks to an actor does not notice.
    pub const USUAL: Self =
        Self { freeze_after: Some(Interval::from_secs(10)), suspend_after: Some(Interval::from_secs(300)) };
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    #[serde(default)]
    pub limits: Limits,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Quantity>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Quantity>,
}

impl Limits {
    pub fn cpu_millis(&self) -> Option<u64> {
        self.cpu.map(Quantity::millis)
    }

    pub fn memory_bytes(&self) -> Option<u64> {
        self.memory.map(Quantity::units)
    }
}

/// A secret in the template's namespace that holds credentials of a registry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalSecret {
    pub name: String,
}

/// A TCP port, 1 to 65535.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "u16")]
pub struct Port(NonZeroU16);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be a port from 1 to 65535")]
pub struct PortError;

impl Port {
    pub fn new(number: u16) -> Option<Self> {
        NonZeroU16::new(number).map(Self)
    }

    pub fn get(self) -> u16 {
        self.0.get()
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl TryFrom<i64> for Port {
    type Error = PortError;
    fn try_from(number: i64) -> Result<Self, PortError> {
        u16::try_from(number).ok().and_then(Self::new).ok_or(PortError)
    }
}

impl From<Port> for u16 {
    fn from(port: Port) -> u16 {
        port.get()
    }
}
