use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What runs in a box, resolved to the last path. A snapshot can be restored only into a box of an equal workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// The first one is the root container; the others join its sandbox.
    pub containers: Vec<Container>,
    pub hostname: String,
    /// Where the kernel accounts and limits the box; `None` leaves it in the worker's own group.
    pub cgroup: Option<String>,
    pub memory_limit: Option<u64>,
    pub cpu_limit_millis: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    pub name: String,
    /// A read-only root; what the workload writes over it is kept in the sandbox's memory.
    pub rootfs: PathBuf,
    pub args: Vec<String>,
    pub env: Vec<String>,
    pub cwd: String,
    pub user: User,
    pub mounts: Vec<Mount>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    pub additional_gids: Vec<u32>,
}

/// A host directory or file seen inside. Its contents are read live, so they may differ between save and restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    pub source: PathBuf,
    pub destination: String,
    pub writable: bool,
}

/// The one network interface of a box.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkConfig {
    pub mac: [u8; 6],
    pub mtu: u32,
    pub addresses: Vec<(IpAddr, u8)>,
    /// The next hop for everything else, per family, with its (fixed) hardware address.
    pub gateways: Vec<IpAddr>,
    pub gateway_mac: [u8; 6],
}
