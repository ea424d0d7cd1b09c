//! The OCI spec of a box, and the arguments of its network.
//!
//! What stands here is part of a snapshot: restoring compares args, user, capabilities, mounts and more with those at the
//! save, so a change of this file makes older snapshots unusable. `FORMAT` must then grow; it is part of the workload's
//! identity.

use std::net::IpAddr;
use std::path::Path;

use ate_sandbox::{Container, LinkConfig, Mount, Workload};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// Grows with every change to the spec that a restore would refuse.
pub const FORMAT: u32 = 1;

/// What a container engine grants by default. Inside a sandbox they reach only the sandbox's own kernel.
const CAPABILITIES: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// Open files per process, as a container engine's default.
const MAX_OPEN_FILES: u64 = 1 << 20;

pub(crate) fn oci(workload: &Workload, container: &Container, root: bool, root_id: &str) -> Value {
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc"}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}),
        json!({"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]}),
    ];
    mounts.extend(container.mounts.iter().map(bind));
    let mut linux = json!({
        "namespaces": [{"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}],
    });
    if let (Some(cgroup), true) = (&workload.cgroup, root) {
        linux["cgroupsPath"] = json!(cgroup);
        let mut resources = serde_json::Map::new();
        if let Some(bytes) = workload.memory_limit {
            resources.insert("memory".into(), json!({"limit": bytes}));
        }
        if let Some(millis) = workload.cpu_limit_millis {
            resources.insert("cpu".into(), json!({"quota": millis * 100, "period": 100_000}));
        }
        linux["resources"] = Value::Object(resources);
    }
    let mut annotations = serde_json::Map::new();
    if workload.containers.len() > 1 {
        let kind = if root { "sandbox" } else { "container" };
        annotations.insert("io.kubernetes.cri.container-type".into(), json!(kind));
        annotations.insert("io.kubernetes.cri.container-name".into(), json!(container.name));
        if !root {
            annotations.insert("io.kubernetes.cri.sandbox-id".into(), json!(root_id));
        }
    }
    let mut user = json!({"uid": container.user.uid, "gid": container.user.gid});
    if !container.user.additional_gids.is_empty() {
        // Left out when empty: a snapshot forgets the difference between none and an empty list, the check does not.
        user["additionalGids"] = json!(container.user.additional_gids);
    }
    json!({
        "ociVersion": "1.2.0",
        "hostname": workload.hostname,
        "root": {"path": container.rootfs, "readonly": false},
        "process": {
            "args": container.args,
            "env": container.env,
            "cwd": container.cwd,
            "user": user,
            "capabilities": {
                "bounding": CAPABILITIES,
                "effective": CAPABILITIES,
                "inheritable": CAPABILITIES,
                "permitted": CAPABILITIES,
            },
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": MAX_OPEN_FILES, "soft": MAX_OPEN_FILES}],
        },
        "mounts": mounts,
        "linux": linux,
        "annotations": annotations,
    })
}

fn bind(mount: &Mount) -> Value {
    let access = if mount.writable { "rw" } else { "ro" };
    json!({
        "destination": mount.destination,
        "type": "bind",
        "source": mount.source,
        "options": ["rbind", access],
    })
}

/// The network of a box: loopback, and one Ethernet link on a raw socket of the worker's.
///
/// The host segments and merges large frames (`GSOMaxSize`), never the sandbox's own software: that one divides by zero
/// on TCP connections that came out of a snapshot.
pub(crate) fn network(link: &LinkConfig) -> Value {
    let gateway = |v4: bool| {
        let Some(address) = link.gateways.iter().find(|address| address.is_ipv4() == v4) else { return json!({}) };
        let any = if v4 { "0.0.0.0" } else { "::" };
        json!({"Name": "eth0", "Route": {"Destination": {"IP": any, "Mask": mask(0, v4)}, "Gateway": address}})
    };
    let neighbours: Vec<Value> = link
        .gateways
        .iter()
        .map(|address| json!({"IP": address, "HardwareAddr": STANDARD.encode(link.gateway_mac)}))
        .collect();
    let addresses: Vec<Value> =
        link.addresses.iter().map(|(address, prefix)| json!({"Address": address, "PrefixLen": prefix})).collect();
    let routes: Vec<Value> = link
        .addresses
        .iter()
        .map(|(address, prefix)| json!({"Destination": {"IP": network_of(*address, *prefix), "Mask": mask(*prefix, address.is_ipv4())}}))
        .collect();
    json!({
        "LoopbackLinks": [{
            "Name": "lo",
            "Addresses": [{"Address": "127.0.0.1", "PrefixLen": 8}, {"Address": "::1", "PrefixLen": 128}],
            "Routes": [
                {"Destination": {"IP": "127.0.0.0", "Mask": mask(8, true)}},
                {"Destination": {"IP": "::1", "Mask": mask(128, false)}},
            ],
        }],
        "FDBasedLinks": [{
            "Name": "eth0",
            "MTU": link.mtu,
            "Addresses": addresses,
            "Routes": routes,
            "Neighbors": neighbours,
            "LinkAddress": STANDARD.encode(link.mac),
            "GSOMaxSize": 65536,
            "GVisorGSOEnabled": false,
            "TXChecksumOffload": false,
            "RXChecksumOffload": true,
            "QDisc": 1,
            "NumChannels": 1,
        }],
        "Defaultv4Gateway": gateway(true),
        "Defaultv6Gateway": gateway(false),
    })
}

fn mask(prefix: u8, v4: bool) -> String {
    let bytes = if v4 { 4 } else { 16 };
    let mask: Vec<u8> =
        (0..bytes).map(|i| !(0xff_u16 >> u16::from(prefix).saturating_sub(8 * i).min(8)).to_be_bytes()[1]).collect();
    STANDARD.encode(mask)
}

fn network_of(address: IpAddr, prefix: u8) -> IpAddr {
    match address {
        IpAddr::V4(a) => IpAddr::V4((a.to_bits() & u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0)).into()),
        IpAddr::V6(a) => IpAddr::V6((a.to_bits() & u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0)).into()),
    }
}

/// The bundle that `create` reads.
pub(crate) fn write_bundle(directory: &Path, spec: &Value) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    std::fs::write(directory.join("config.json"), serde_json::to_vec(spec)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_and_networks() {
        assert_eq!(mask(8, true), STANDARD.encode([255, 0, 0, 0]));
        assert_eq!(mask(30, true), STANDARD.encode([255, 255, 255, 252]));
        assert_eq!(mask(0, true), STANDARD.encode([0; 4]));
        assert_eq!(mask(64, false), STANDARD.encode([[255; 8], [0; 8]].concat()));
        assert_eq!(network_of("169.254.17.2".parse().unwrap(), 30).to_string(), "169.254.17.0");
        assert_eq!(network_of("fd00::2".parse().unwrap(), 64).to_string(), "fd00::");
        assert_eq!(network_of("1.2.3.4".parse().unwrap(), 0).to_string(), "0.0.0.0");
    }
}
