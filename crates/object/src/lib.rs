//! Declarative objects: what a person writes in a file and applies.
//!
//! Three kinds, all `ate.dev/v1alpha1`: an [`ActorTemplate`] says what an actor runs, a [`WorkerPool`] how much
//! warm capacity there is, a [`SandboxConfig`] which pinned binaries a runtime family uses. The shapes, rules and
//! messages are those of the public custom resources, plus ours. Bytes in, objects or problems out; no I/O.
//!
//! ```text
//!   bytes ─ yaml ─> tree with positions ─ decode ─> Object ─ validate ─> Object
//!             │              ^                │                 │
//!             │              └── where? ──────┴─ FieldPath ─────┤
//!             └───────────> Fault { line, column, path, message } <──┘   all of a file, or none of it
//! ```
//!
//! Files are read strictly: an unknown field is refused with the nearest known name. The types themselves ignore
//! unknown fields, so that a record stored by a newer release can still be read by an older one.

mod config;
mod decode;
mod egress;
mod interval;
mod manifest;
mod meta;
mod object;
mod path;
mod pool;
mod quantity;
mod selector;
mod template;
mod template_rules;
mod yaml;

pub use config::{
    ASSET_SCHEMES, Asset, AssetError, ResolveError, SandboxClass, SandboxConfig, SandboxConfigSpec, assets_for,
    check_defaults, resolve_config,
};
pub use egress::{Cidr, Egress, EgressRule, MAX_EGRESS_PORTS, MAX_EGRESS_RULES, ParseCidrError};
pub use interval::{Interval, ParseIntervalError};
pub use manifest::{Fault, MAX_DOCUMENTS, MAX_MANIFEST_BYTES, ManifestError, Manifests, read_manifests};
pub use meta::{DEFAULT_NAMESPACE, Meta};
pub use object::{API_VERSION, Kind, Object, UnknownKind, check_update};
pub use path::{FieldPath, Invalid, Problem};
pub use pool::{WorkerPool, WorkerPoolSpec, WorkerResources, WorkerTemplate};
pub use quantity::{ParseQuantityError, Quantity};
pub use selector::{LabelSelector, Operator, Requirement, check_worker_selector};
pub use template::{
    ActorTemplate, ActorTemplateSpec, Container, ContainerPort, DEFAULT_PORT, DurableDir, EnvSource, EnvVar, HttpGet,
    Idle, Limits, LocalSecret, Port, PortError, Protocol, Readyz, Resources, Scope, SecretKey, SnapshotsConfig, Volume,
    VolumeMount,
};
pub use yaml::{MAX_DEPTH, MAX_EXPANDED_BYTES};
