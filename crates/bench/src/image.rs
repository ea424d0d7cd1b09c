//! The workload of the benchmarks: a Python web server on a minimal Debian, made once and kept in the user's cache.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ate_image::{Architecture, Content, ImageConfig, Recipe};
use rustix::fs::FlockOperation;

use crate::BenchError;

const SERVER: &str = include_str!("server.py");
const SUITE: &str = "bookworm";
const PACKAGES: &str = "python3";

/// No maintainer script is run, and nothing is kept that the server does not read.
const OPTIONS: [&str; 7] = [
    "--mode=root",
    "--variant=extract",
    "--format=directory",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "--quiet",
];

/// Python compiles what it loads, and keeps nothing of it on a root that it cannot write; images keep no times to compare.
const COMPILE: [&str; 7] =
    ["/usr/bin/python3", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "/usr/lib/python3.11"];

pub(crate) const ENTRYPOINT: [&str; 2] = ["/usr/bin/python3", "/server.py"];

/// The same files twice: as the image that `ate` unpacks, and as the root that the baselines run on.
#[derive(Clone, Debug)]
pub(crate) struct PythonImage {
    pub(crate) reference: String,
    pub(crate) rootfs: PathBuf,
}

impl PythonImage {
    /// Finds it in the cache, or makes it; two at once make it one after the other.
    pub(crate) fn ensure() -> Result<Self, BenchError> {
        let directory = cache()?.join("bench").join(recipe());
        let (rootfs, layout) = (directory.join("rootfs"), directory.join("image"));
        let io = |what: &str| BenchError::io(format!("{what} {}", directory.display()));
        std::fs::create_dir_all(&directory).map_err(io("make"))?;
        let lock = std::fs::File::create(directory.join("lock")).map_err(io("lock"))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).map_err(|error| io("lock")(error.into()))?;
        let named = directory.join("reference");
        if let Ok(reference) = std::fs::read_to_string(&named) {
            return Ok(Self { reference, rootfs });
        }
        for leftover in [&rootfs, &layout] {
            let _ = std::fs::remove_dir_all(leftover);
        }
        bootstrap(&rootfs)?;
        let config = ImageConfig { entrypoint: ENTRYPOINT.map(str::to_owned).to_vec(), ..ImageConfig::default() };
        let content = BTreeMap::from([(architecture(), vec![Content::Directory(rootfs.clone())])]);
        let digest = ate_image::pack(&Recipe { config, content }, &layout)
            .map_err(|error| BenchError::refused("pack the benchmark's image", error))?;
        let reference = format!("oci-layout://{}@sha256:{digest}", layout.display());
        // Last: what has a reference is complete.
        std::fs::write(&named, &reference).map_err(io("write to"))?;
        Ok(Self { reference, rootfs })
    }
}

fn bootstrap(rootfs: &Path) -> Result<(), BenchError> {
    eprintln!("making the benchmark's image once: Debian {SUITE} with {PACKAGES}");
    let output = Command::new("mmdebstrap")
        .args(OPTIONS)
        .arg(format!("--include={PACKAGES}"))
        .arg(SUITE)
        .arg(rootfs)
        .stdin(Stdio::null())
        .output()
        .map_err(|_| BenchError::Missing {
            what: "the program mmdebstrap, which makes the benchmark's image,".to_owned(),
            remedy: "run ./setup --bench, or install the package mmdebstrap",
        })?;
    if !output.status.success() {
        return Err(BenchError::refused("make a Debian root", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let compiled = Command::new("chroot").arg(rootfs).args(COMPILE).stdin(Stdio::null()).output();
    let compiled = compiled.map_err(BenchError::io("compile Python's library"))?;
    if !compiled.status.success() {
        return Err(BenchError::refused("compile Python's library", String::from_utf8_lossy(&compiled.stderr).trim()));
    }
    let io = || BenchError::io("trim the Debian root");
    // Device nodes are no part of an image, and lists of packages of no use.
    for directory in ["dev", "var/lib", "var/cache"] {
        std::fs::remove_dir_all(rootfs.join(directory)).map_err(io())?;
        std::fs::create_dir_all(rootfs.join(directory)).map_err(io())?;
    }
    for mount_point in ["proc", "sys", "run/ate", "etc"] {
        std::fs::create_dir_all(rootfs.join(mount_point)).map_err(io())?;
    }
    std::fs::write(rootfs.join("server.py"), SERVER).map_err(io())
}

/// Another recipe, another image.
fn recipe() -> String {
    let text = [&OPTIONS[..], &COMPILE, &[SERVER, SUITE, PACKAGES, &ENTRYPOINT.join(" ")]].concat().join("\n");
    ate_snapshot::Content::of(text.as_bytes()).digest.to_string()[..16].to_owned()
}

fn cache() -> Result<PathBuf, BenchError> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let found = cache.or(home).ok_or(BenchError::Missing {
        what: "a place for the benchmark's image".to_owned(),
        remedy: "set HOME or XDG_CACHE_HOME",
    })?;
    Ok(found.join("ate"))
}

fn architecture() -> Architecture {
    if cfg!(target_arch = "aarch64") { Architecture::Arm64 } else { Architecture::Amd64 }
}
