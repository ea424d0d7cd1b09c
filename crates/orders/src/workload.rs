use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ate_name::{ObjectKey, TemplateUid};
use serde::{Deserialize, Serialize};

/// A template made concrete: environment resolved, nothing left to look up but images and binaries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    pub template: ObjectKey,
    pub template_uid: TemplateUid,
    pub containers: Vec<Container>,
    pub ports: Vec<Port>,
    pub egress: Vec<EgressRule>,
    pub memory_limit: Option<u64>,
    pub cpu_limit_millis: Option<u64>,
    /// The size of the durable directory in bytes; `None` if nothing of it lives outside the sandbox's memory.
    pub durable_bytes: Option<u64>,
    pub freeze_after: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    pub name: String,
    pub image: String,
    /// Empty: what the image says.
    pub command: Vec<String>,
    pub env: Vec<(String, String)>,
    /// Volume name → where the container sees it.
    pub volumes: BTreeMap<String, String>,
    pub readyz: Option<Readyz>,
}

/// A workload is up when `GET path` on `port` answers 200.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readyz {
    pub path: String,
    pub port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    pub number: u16,
    pub protocol: PortProtocol,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PortProtocol {
    Http,
    /// HTTP/2 without TLS and without being asked.
    H2c,
}

/// Where an actor may connect to: a network and, unless empty, its ports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressRule {
    pub network: IpAddr,
    pub prefix: u8,
    pub ports: Vec<u16>,
}

impl EgressRule {
    pub fn allows(&self, to: SocketAddr) -> bool {
        (self.ports.is_empty() || self.ports.contains(&to.port())) && self.contains(to.ip())
    }

    fn contains(&self, address: IpAddr) -> bool {
        let shift = |bits: u8| u32::from(bits.saturating_sub(self.prefix));
        match (self.network, address) {
            (IpAddr::V4(n), IpAddr::V4(a)) => (n.to_bits() ^ a.to_bits()).checked_shr(shift(32)).unwrap_or(0) == 0,
            (IpAddr::V6(n), IpAddr::V6(a)) => (n.to_bits() ^ a.to_bits()).checked_shr(shift(128)).unwrap_or(0) == 0,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_networks_and_ports() {
        let rule = |network: &str, prefix, ports: &[u16]| EgressRule {
            network: network.parse().unwrap(),
            prefix,
            ports: ports.to_vec(),
        };
        let to = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert!(rule("10.1.0.0", 16, &[]).allows(to("10.1.2.3:443")));
        assert!(!rule("10.1.0.0", 16, &[]).allows(to("10.2.2.3:443")));
        assert!(rule("0.0.0.0", 0, &[443]).allows(to("8.8.8.8:443")));
        assert!(!rule("0.0.0.0", 0, &[443]).allows(to("8.8.8.8:80")));
        assert!(!rule("0.0.0.0", 0, &[]).allows(to("[2001:db8::1]:80")));
        assert!(rule("::", 0, &[]).allows(to("[2001:db8::1]:80")));
        assert!(rule("2001:db8::", 32, &[]).allows(to("[2001:db8:1::1]:80")));
        assert!(rule("10.1.2.3", 32, &[]).allows(to("10.1.2.3:1")));
        assert!(!rule("10.1.2.3", 32, &[]).allows(to("10.1.2.4:1")));
    }
}
