//! The sandbox runtime that `ate dev` ships with: built by the set-up, pinned here by hash.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use ate_name::{Digest, Labels};
use ate_object::{Asset, Meta, SandboxClass, SandboxConfig, SandboxConfigSpec};
use serde::Serialize;

/// What the set-up must have built, as `sha256  architecture/build/file` lines.
const PINS: &str = include_str!("../../../runtime/gvisor/SHA256SUMS");

/// The build that a casual user gets, and the configs that `ate dev` keeps up to date by itself, with their builds.
const DEFAULT_BUILD: &str = "tuned";
const CONFIGS: [(&str, &str); 2] = [("gvisor-default", DEFAULT_BUILD), ("gvisor-stock", "stock")];

/// On a config that is ours to change.
pub(crate) const SHIPPED: &str = "ate.dev/shipped";

/// A config that pins one of the builds for this machine. `directory` is what `runtime/build` prints.
fn shipped_config(directory: &Path, build: &str, name: &str, default: bool) -> anyhow::Result<SandboxConfig> {
    let architecture = architecture();
    let mut assets = BTreeMap::new();
    for (digest, path) in pins(architecture, build)? {
        let file = directory.join(build).join(&path);
        if !file.exists() {
            bail!("the sandbox runtime {} is missing: build it with runtime/build", file.display());
        }
        let asset = path.rsplit('/').next().unwrap_or(&path).to_owned();
        assets.insert(asset, Asset { url: format!("file://{}", file.display()), sha256: digest });
    }
    Ok(SandboxConfig {
        metadata: Meta {
            name: name.to_owned(),
            annotations: Labels::from([(SHIPPED.to_owned(), "true".to_owned())]),
            ..Meta::default()
        },
        spec: SandboxConfigSpec {
            sandbox_class: SandboxClass::Gvisor,
            default,
            assets: BTreeMap::from([(architecture.to_owned(), assets)]),
        },
    })
}

/// The configs that come with this build: the default, and the runtime as its makers build it for those who name it.
pub(crate) fn shipped(directory: Option<&Path>) -> anyhow::Result<Vec<SandboxConfig>> {
    let directory = directory.map_or_else(find, |directory| Ok(directory.to_owned()))?;
    let present = CONFIGS.iter().filter(|(_, build)| *build == DEFAULT_BUILD || directory.join(build).exists());
    present.map(|(name, build)| shipped_config(&directory, build, name, *build == DEFAULT_BUILD)).collect()
}

/// A file of a sandbox runtime that this build knows.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Pin {
    pub(crate) class: &'static str,
    pub(crate) architecture: String,
    pub(crate) build: String,
    pub(crate) file: String,
    pub(crate) sha256: String,
}

/// Every file that is pinned, of every build and architecture.
pub(crate) fn all_pins() -> anyhow::Result<Vec<Pin>> {
    let pin = |line: &str| {
        let (sha256, path) = line.split_once("  ")?;
        let (architecture, path) = path.split_once('/')?;
        let (build, file) = path.split_once('/')?;
        let [architecture, build, file, sha256] = [architecture, build, file, sha256].map(str::to_owned);
        Some(Pin { class: "gvisor", architecture, build, file, sha256 })
    };
    PINS.lines().map(|line| pin(line).with_context(|| format!("not a pin: {line:?}"))).collect()
}

/// Where the runtime of a casual user is, and what its files must be.
pub(crate) fn default_pins(directory: Option<&Path>) -> anyhow::Result<(PathBuf, Vec<(Digest, String)>)> {
    let directory = directory.map_or_else(find, |directory| Ok(directory.to_owned()))?;
    Ok((directory.join(DEFAULT_BUILD), pins(architecture(), DEFAULT_BUILD)?))
}

fn pins(architecture: &str, build: &str) -> anyhow::Result<Vec<(Digest, String)>> {
    let prefix = format!("{architecture}/{build}/");
    let mut pins = Vec::new();
    for line in PINS.lines() {
        let (digest, path) = line.split_once("  ").context("a pin is a digest and a path")?;
        if let Some(path) = path.strip_prefix(&prefix) {
            pins.push((Digest::parse(digest)?, path.to_owned()));
        }
    }
    if pins.is_empty() {
        bail!("no sandbox runtime is pinned for {architecture}: name one in a SandboxConfig of your own");
    }
    Ok(pins)
}

/// Looks where the set-up puts it: in the user's cache, by recipe. Any recipe will do whose files are there; their hashes
/// are checked when they are used.
pub(crate) fn find() -> anyhow::Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let runtimes = cache
        .or(home)
        .context("neither XDG_CACHE_HOME nor HOME is set: name the runtime with --runtime")?
        .join("ate/runtime");
    let wanted = pins(architecture(), DEFAULT_BUILD)?;
    let recipes = std::fs::read_dir(&runtimes).into_iter().flatten().flatten();
    recipes
        .map(|recipe| recipe.path().join(architecture()))
        .filter(|directory| wanted.iter().all(|(_, path)| directory.join(DEFAULT_BUILD).join(path).exists()))
        .max_by_key(|directory| directory.metadata().and_then(|metadata| metadata.modified()).ok())
        .with_context(|| {
            format!(
                "no sandbox runtime in {}: build it with runtime/build, or name it with --runtime",
                runtimes.display()
            )
        })
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Keeps a config that comes with this build up to date, unless somebody has put one of their own in its place.
pub(crate) async fn ship(control: &ate_control::Control, config: ate_object::SandboxConfig) -> anyhow::Result<()> {
    let configs = control.configs();
    let ours = |config: &ate_object::SandboxConfig| config.metadata.annotations.contains_key(SHIPPED);
    let chosen = configs.iter().any(|other| {
        let rivals = config.spec.default && other.spec.default && other.spec.sandbox_class == config.spec.sandbox_class;
        (rivals || other.metadata.name == config.metadata.name) && !ours(other)
    });
    if !chosen {
        control.apply(vec![ate_object::Object::SandboxConfig(config)]).await?;
    }
    Ok(())
}
