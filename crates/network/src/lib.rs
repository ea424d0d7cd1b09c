//! A worker's network: its own namespace, and inside it a second one that holds only the sandbox's end of a link.
//!
//! ```text
//!   worker's namespace                          interior namespace
//!   ate0  169.254.17.1/30, fd61:7465::1/64 ═════ act0   no address, no stack of the kernel's in use
//!     │   every TCP connection from the actor           │
//!     │   is redirected to the worker's egress port     └── raw socket ── the sandbox's own network stack
//!     │   and everything else dropped                       169.254.17.2, fd61:7465::2
//!   the worker dials the actor from here
//! ```
//!
//! Addresses and hardware addresses are the same in every worker, so a snapshot wakes anywhere without noticing. Nothing
//! is forwarded: what leaves goes through the worker, which knows the actor's policy. Nothing exists outside the worker's
//! namespaces, so nothing is left on the host when it ends.

use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

pub const ACTOR_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 17, 2);
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 17, 1);
pub const ACTOR_V6: Ipv6Addr = Ipv6Addr::new(0xfd61, 0x7465, 0, 0, 0, 0, 0, 2);
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd61, 0x7465, 0, 0, 0, 0, 0, 1);
pub const V4_PREFIX: u8 = 30;
pub const V6_PREFIX: u8 = 64;
pub const ACTOR_MAC: [u8; 6] = [0x02, 0xa8, 0x1e, 0, 0, 2];
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0xa8, 0x1e, 0, 0, 1];
pub const MTU: u32 = 1500;

/// Where the worker takes the actor's outgoing connections.
pub const EGRESS_PORT: u16 = 15001;

const OUTSIDE: &str = "ate0";
const INSIDE: &str = "act0";

#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    #[error("cannot run {tool:?}; install the package {package}")]
    Missing { tool: &'static str, package: &'static str, source: io::Error },
    #[error("{tool:?} refused to set up the worker's network: {message}")]
    Refused { tool: &'static str, message: String },
    #[error("cannot {what}")]
    Io { what: &'static str, source: io::Error },
}

/// The interior namespace. Dropping it (with the worker) removes the link.
#[derive(Debug)]
pub struct Interior {
    namespace: OwnedFd,
}

impl Interior {
    /// Builds the link and the rules in the calling process's network namespace, which must be its own and fresh, with
    /// `/proc` showing its own pid namespace.
    pub fn set_up() -> Result<Self, NetworkError> {
        let outside = format!("/proc/{}/ns/net", std::process::id());
        let namespace = in_thread(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
                .map_err(|e| NetworkError::Io { what: "make the interior namespace", source: e.into() })?;
            ip(&format!(
                "link add {INSIDE} address {} mtu {MTU} type veth peer name {OUTSIDE} address {} mtu {MTU} netns {outside}\n",
                mac(ACTOR_MAC),
                mac(GATEWAY_MAC),
            ))?;
            // Without an address of its own the kernel never answers for the actor, also while it is suspended.
            std::fs::write(format!("/proc/sys/net/ipv6/conf/{INSIDE}/disable_ipv6"), "1").ok();
            ip(&format!("link set {INSIDE} up\n"))?;
            std::fs::File::open("/proc/thread-self/ns/net")
                .map(OwnedFd::from)
                .map_err(|source| NetworkError::Io { what: "keep the interior namespace", source })
        })?;
        ip(&format!(
            "link set lo up\n\
             addr add {GATEWAY_V4}/{V4_PREFIX} dev {OUTSIDE}\n\
             addr add {GATEWAY_V6}/{V6_PREFIX} dev {OUTSIDE} nodad\n\
             link set {OUTSIDE} up\n\
             neigh add {ACTOR_V4} lladdr {mac} dev {OUTSIDE} nud permanent\n\
             neigh add {ACTOR_V6} lladdr {mac} dev {OUTSIDE} nud permanent\n",
            mac = mac(ACTOR_MAC),
        ))?;
        run("nft", "nftables", &["-f", "-"], &rules())?;
        Ok(Self { namespace })
    }

    /// A fresh end of the link for one sandbox. It carries traffic until its last holder closes it.
    pub fn link_socket(&self) -> io::Result<OwnedFd> {
        in_thread(|| {
            nix::sched::setns(&self.namespace, nix::sched::CloneFlags::CLONE_NEWNET)?;
            ate_sys::packet_socket(INSIDE)
        })
    }
}

/// The addresses of the actor's interface.
pub fn actor_addresses() -> Vec<(IpAddr, u8)> {
    vec![(ACTOR_V4.into(), V4_PREFIX), (ACTOR_V6.into(), V6_PREFIX)]
}

fn rules() -> String {
    format!(
        "table inet ate {{
            chain prerouting {{
                type nat hook prerouting priority dstnat; policy accept;
                iifname {OUTSIDE} meta l4proto tcp redirect to :{EGRESS_PORT}
            }}
            chain input {{
                type filter hook input priority filter; policy drop;
                iifname lo accept
                ct state established accept
                iifname {OUTSIDE} tcp dport {EGRESS_PORT} accept
                iifname {OUTSIDE} udp dport 53 accept
                iifname {OUTSIDE} icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
            }}
            chain forward {{ type filter hook forward priority filter; policy drop; }}
        }}\n"
    )
}

/// Namespaces belong to threads: one that is made for the purpose can enter any, and takes it along when it ends.
fn in_thread<T: Send, E: Send>(work: impl FnOnce() -> Result<T, E> + Send) -> Result<T, E> {
    std::thread::scope(|scope| scope.spawn(work).join().expect("the worker of a scope does not panic"))
}

fn ip(batch: &str) -> Result<(), NetworkError> {
    run("ip", "iproute2", &["-batch", "-"], batch)
}

fn run(tool: &'static str, package: &'static str, args: &[&str], input: &str) -> Result<(), NetworkError> {
    let mut child = Command::new(tool)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| NetworkError::Missing { tool, package, source })?;
    let written = child.stdin.take().expect("stdin is piped").write_all(input.as_bytes());
    let output = child.wait_with_output().map_err(|source| NetworkError::Io { what: "wait for a tool", source })?;
    if output.status.success() && written.is_ok() {
        return Ok(());
    }
    Err(NetworkError::Refused { tool, message: String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ") })
}

fn mac(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}
