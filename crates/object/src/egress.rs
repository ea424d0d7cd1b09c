use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::path::Problems;
use crate::{FieldPath, Port};

/// Most rules of one template; more are refused. Each becomes an entry of the worker's packet filter.
pub const MAX_EGRESS_RULES: usize = 64;

/// Most ports of one rule; more are refused.
pub const MAX_EGRESS_PORTS: usize = 64;

/// Where an actor may open connections to. Everything that no rule allows is denied.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Egress {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<EgressRule>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressRule {
    pub cidr: Cidr,
    /// Every port when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports: Option<Vec<Port>>,
}

impl Egress {
    pub(crate) fn check(&self, path: &FieldPath, problems: &mut Problems) {
        let path = path.field("allow");
        problems.at_most(&path, MAX_EGRESS_RULES, self.allow.len());
        for (index, rule) in self.allow.iter().enumerate() {
            let Some(ports) = &rule.ports else { continue };
            let path = path.index(index).field("ports");
            problems.at_most(&path, MAX_EGRESS_PORTS, ports.len());
            if ports.is_empty() {
                problems.add(path, "must not be empty: leave it out to allow every port");
            }
        }
    }
}

/// A range of addresses: `10.0.0.0/8`, `2001:db8::/32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseCidrError {
    #[error("must be an address range such as \"10.0.0.0/8\" or \"2001:db8::/32\"")]
    Malformed,
    #[error("must have a prefix length: \"{address}/{bits}\" is this one address")]
    NoPrefix { address: IpAddr, bits: u8 },
    #[error("has bits set behind its prefix: the range it lies in is \"{range}\"")]
    HostBits { range: Cidr },
}

impl Cidr {
    pub fn address(self) -> IpAddr {
        self.address
    }

    pub fn prefix(self) -> u8 {
        self.prefix
    }

    pub fn contains(self, address: IpAddr) -> bool {
        address.is_ipv4() == self.address.is_ipv4() && masked(address, self.prefix) == self.address
    }
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn masked(address: IpAddr, prefix: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => IpAddr::V4((v4.to_bits() & u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0)).into()),
        IpAddr::V6(v6) => {
            IpAddr::V6((v6.to_bits() & u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0)).into())
        }
    }
}

impl FromStr for Cidr {
    type Err = ParseCidrError;

    fn from_str(text: &str) -> Result<Self, ParseCidrError> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| ParseCidrError::Malformed)?;
        let prefix = prefix.ok_or(ParseCidrError::NoPrefix { address, bits: bits(address) })?;
        let digits = prefix.bytes().all(|b| b.is_ascii_digit()) && (prefix == "0" || !prefix.starts_with('0'));
        let prefix = prefix.parse().ok().filter(|&prefix| digits && prefix <= bits(address));
        let prefix = prefix.ok_or(ParseCidrError::Malformed)?;
        let range = Self { address: masked(address, prefix), prefix };
        if range.address == address { Ok(range) } else { Err(ParseCidrError::HostBits { range }) }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl TryFrom<String> for Cidr {
    type Error = ParseCidrError;
    fn try_from(text: String) -> Result<Self, ParseCidrError> {
        text.parse()
    }
}

impl From<Cidr> for String {
    fn from(cidr: Cidr) -> String {
        cidr.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_of_both_families_are_read() {
        for text in ["0.0.0.0/0", "10.0.0.0/8", "192.0.2.1/32", "::/0", "2001:db8::/32", "::1/128"] {
            assert_eq!(text.parse::<Cidr>().map(|cidr| cidr.to_string()).as_deref(), Ok(text));
        }
        for text in ["", "10.0.0/8", "10.0.0.0/33", "::/129", "10.0.0.0/", "10.0.0.0/+8", "10.0.0.0/08", "host/8"] {
            assert_eq!(text.parse::<Cidr>(), Err(ParseCidrError::Malformed), "{text:?}");
        }
        let message = |text: &str| text.parse::<Cidr>().unwrap_err().to_string();
        assert_eq!(message("192.0.2.1"), "must have a prefix length: \"192.0.2.1/32\" is this one address");
        assert_eq!(message("10.1.2.3/8"), "has bits set behind its prefix: the range it lies in is \"10.0.0.0/8\"");
    }

    proptest! {
        #[test]
        fn a_range_holds_its_addresses_and_no_neighbour(bits: u32, prefix in 1_u8..=32) {
            let address = IpAddr::V4(bits.into());
            let range = Cidr { address: masked(address, prefix), prefix };
            prop_assert_eq!(range.to_string().parse(), Ok(range));
            prop_assert!(range.contains(address));
            let neighbour = IpAddr::V4((bits ^ 1 << (32 - prefix)).into());
            prop_assert!(!range.contains(neighbour));
        }
    }
}
