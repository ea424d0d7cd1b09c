//! What is so on this machine, without judging it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

use ate_name::Digest;

use crate::runtime;

#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) is_root: bool,
    pub(super) kernel: (u32, u32),
    pub(super) kernel_name: String,
    pub(super) cgroups: Cgroups,
    pub(super) tools: BTreeMap<&'static str, PathBuf>,
    /// How many there may be of each kind; none if the kernel does not have the kind.
    pub(super) namespaces: BTreeMap<&'static str, Option<u64>>,
    pub(super) overlay: Result<(), String>,
    pub(super) durable: Result<(), String>,
    pub(super) memfd: Result<(), String>,
    pub(super) anonymous_pages: Knob,
    pub(super) shared_pages: Knob,
    pub(super) runtime: Result<(PathBuf, Vec<RuntimeFile>), String>,
    /// A port, the flag that chooses another, and why it cannot be had.
    pub(super) ports: Vec<(u16, &'static str, Option<String>)>,
    pub(super) disk_free: Option<u64>,
    pub(super) memory_free: Option<u64>,
}

#[derive(Clone, Debug)]
pub(super) struct Cgroups {
    pub(super) version: u8,
    pub(super) controllers: BTreeSet<String>,
}

/// A setting of the kernel's with several values, one of them chosen.
#[derive(Clone, Debug)]
pub(super) struct Knob {
    pub(super) name: &'static str,
    pub(super) path: PathBuf,
    pub(super) setting: Option<String>,
    /// What "inherit" means.
    pub(super) inherited: Option<String>,
}

#[derive(Clone, Debug)]
pub(super) struct RuntimeFile {
    pub(super) name: String,
    pub(super) pinned: Digest,
    pub(super) found: Option<Digest>,
}

impl RuntimeFile {
    pub(super) fn fault(&self) -> Option<String> {
        match &self.found {
            None => Some(format!("{} is not there", self.name)),
            Some(found) if *found != self.pinned => Some(format!("{} is not what is pinned", self.name)),
            Some(_) => None,
        }
    }
}

impl Facts {
    pub(super) fn collect(data: &Path, runtime: Option<&Path>) -> Self {
        let kernel_name = rustix::system::uname().release().to_string_lossy().into_owned();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let tools = ["ip", "nft"].into_iter().filter_map(|tool| Some((tool, super::in_path(tool, &path)?)));
        Self {
            is_root: rustix::process::geteuid().is_root(),
            kernel: release(&kernel_name),
            kernel_name,
            cgroups: cgroups(Path::new("/sys/fs/cgroup")),
            tools: tools.collect(),
            namespaces: ["ipc", "mnt", "net", "pid", "user", "uts"].map(|kind| (kind, namespaces(kind))).into(),
            overlay: overlay().map_err(|error| error.to_string()),
            durable: durable(),
            memfd: ate_sys::Memory::with_capacity("doctor", 4096).map(drop).map_err(|error| error.to_string()),
            anonymous_pages: knob("64K pages", "enabled"),
            shared_pages: knob("64K shared", "shmem_enabled"),
            runtime: runtime_files(runtime).map_err(|error| format!("{error:#}")),
            ports: [(8080, "--listen"), (8443, "--api-listen")].map(|(port, flag)| (port, flag, taken(port))).into(),
            disk_free: disk_free(data),
            memory_free: memory_free(&fs::read_to_string("/proc/meminfo").unwrap_or_default()),
        }
    }
}

/// The first two numbers of a kernel's name.
pub(super) fn release(name: &str) -> (u32, u32) {
    let mut numbers = name.split(|char: char| !char.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn cgroups(root: &Path) -> Cgroups {
    match fs::read_to_string(root.join("cgroup.controllers")) {
        Ok(text) => Cgroups { version: 2, controllers: text.split_whitespace().map(str::to_owned).collect() },
        Err(_) => {
            let hierarchies = fs::read_dir(root).into_iter().flatten().flatten();
            // An empty directory is a place to mount a hierarchy on, not a hierarchy.
            let mounted = hierarchies.filter(|entry| entry.path().join("cgroup.procs").exists());
            let controllers = mounted.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
            Cgroups { version: 1, controllers }
        }
    }
}

fn namespaces(kind: &str) -> Option<u64> {
    fs::metadata(format!("/proc/self/ns/{kind}")).ok()?;
    let limit = fs::read_to_string(format!("/proc/sys/user/max_{kind}_namespaces")).ok();
    // A kernel without the limit has no limit.
    Some(limit.and_then(|limit| limit.trim().parse().ok()).unwrap_or(u64::MAX))
}

/// Stacks two directories as the layers of an image are stacked. The mount is in no namespace, and gone at once.
fn overlay() -> std::io::Result<()> {
    let directory = tempfile::tempdir()?;
    let layers = ["upper", "lower"].map(|name| directory.path().join(name));
    layers.iter().try_for_each(fs::create_dir)?;
    ate_sys::detached_overlay(&layers).map(drop)
}

/// Makes a small durable directory, as a box gets one. It is in no namespace, has no name, and is gone at once.
fn durable() -> Result<(), String> {
    let file = tempfile::tempfile().map_err(|error| error.to_string())?;
    ate_node::durable_directory(file, 16 << 20).map(drop).map_err(|error| ate_orders::chain(&error))
}

fn knob(name: &'static str, file: &str) -> Knob {
    let directory = Path::new("/sys/kernel/mm/transparent_hugepage");
    let read = |path: &Path| chosen(&fs::read_to_string(path).ok()?);
    let path = directory.join("hugepages-64kB").join(file);
    Knob { name, setting: read(&path), path, inherited: read(&directory.join(file)) }
}

/// `always inherit [never]`: the one in brackets.
pub(super) fn chosen(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

fn runtime_files(directory: Option<&Path>) -> anyhow::Result<(PathBuf, Vec<RuntimeFile>)> {
    let (directory, pins) = runtime::default_pins(directory)?;
    let file = |(pinned, name): (Digest, String)| {
        let bytes = fs::read(directory.join(&name)).ok();
        RuntimeFile { name, pinned, found: bytes.map(|bytes| ate_snapshot::Content::of(&bytes).digest) }
    };
    let files = pins.into_iter().map(file).collect();
    Ok((directory, files))
}

fn taken(port: u16) -> Option<String> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).err().map(|error| error.to_string())
}

fn disk_free(data: &Path) -> Option<u64> {
    let there = std::path::absolute(data).ok()?;
    let there = there.ancestors().find(|path| path.exists())?.to_owned();
    let disk = rustix::fs::statvfs(&there).ok()?;
    Some(disk.f_bavail * disk.f_frsize)
}

pub(super) fn memory_free(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}
