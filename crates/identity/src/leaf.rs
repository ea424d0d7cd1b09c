use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rcgen::SanType;
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{DnsName, UnixTime};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::time_provider::TimeProvider;

use crate::authority::{Authority, CLOCK_SKEW, LEAF_LIFETIME};
use crate::{IdentityError, Role};

/// A certificate is replaced when a third of its life is left: a failure to do so then has hours to be noticed.
const RENEW_AFTER: Duration = Duration::from_secs(LEAF_LIFETIME.as_secs() / 3 * 2);

/// What a certificate is to say.
#[derive(Clone, Debug)]
pub(crate) struct Leaf {
    pub(crate) role: Role,
    pub(crate) purpose: Purpose,
    pub(crate) names: Vec<SanType>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Server,
    Client,
}

/// The names of this machine, those of the role's service, and `names`.
pub(crate) fn server_names(role: Role, names: &[&str]) -> Result<Vec<SanType>, IdentityError> {
    let mut all = vec![dns_name("localhost")?];
    all.extend([IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)].map(SanType::IpAddress));
    // A machine may be called what no certificate can say; nobody can then dial it by that name either.
    let host = rustix::system::uname();
    all.extend(host.nodename().to_str().ok().and_then(|name| dns_name(name).ok()));
    for name in role.service_name().iter().chain(names) {
        all.push(match name.parse() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) => dns_name(name)?,
        });
    }
    Ok(all)
}

fn dns_name(name: &str) -> Result<SanType, IdentityError> {
    let bad = || IdentityError::BadName(name.to_owned());
    let name = DnsName::try_from(name).map_err(|_| bad())?;
    Ok(SanType::DnsName(name.as_ref().try_into().map_err(|_| bad())?))
}

/// Gives every handshake a certificate that is good for hours, issuing another when the time has come.
pub(crate) struct Rotating {
    authority: Arc<Authority>,
    leaf: Leaf,
    clock: Arc<dyn TimeProvider>,
    provider: Arc<CryptoProvider>,
    current: Mutex<Issued>,
}

struct Issued {
    key: Arc<CertifiedKey>,
    at: Duration,
}

impl Rotating {
    pub(crate) fn new(
        authority: Arc<Authority>,
        leaf: Leaf,
        clock: Arc<dyn TimeProvider>,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, IdentityError> {
        let current = Mutex::new(issue(&authority, &leaf, now(&*clock), &provider)?);
        Ok(Self { authority, leaf, clock, provider, current })
    }

    /// Issuing takes well under a millisecond, so it may happen in a handshake, on the reactor.
    fn current(&self) -> Arc<CertifiedKey> {
        let now = now(&*self.clock);
        let mut current = self.current.lock();
        // Also when the clock was set back to before the certificate's time.
        let good = current.at.saturating_sub(CLOCK_SKEW)..current.at + RENEW_AFTER;
        if !good.contains(&Duration::from_secs(now.as_secs())) {
            match issue(&self.authority, &self.leaf, now, &self.provider) {
                Ok(issued) => *current = issued,
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(role = %self.leaf.role, error, "cannot renew a certificate, the old one stays")
                }
            }
        }
        current.key.clone()
    }
}

fn issue(
    authority: &Authority,
    leaf: &Leaf,
    now: UnixTime,
    provider: &CryptoProvider,
) -> Result<Issued, IdentityError> {
    let (certificate, key) = authority.issue(leaf, now)?;
    let key = CertifiedKey::from_der(vec![certificate], key, provider).map_err(IdentityError::Unusable)?;
    Ok(Issued { key: Arc::new(key), at: Duration::from_secs(now.as_secs()) })
}

/// A clock that does not know counts as the epoch, at which nothing is valid.
pub(crate) fn now(clock: &dyn TimeProvider) -> UnixTime {
    clock.current_time().unwrap_or(UnixTime::since_unix_epoch(Duration::ZERO))
}

impl ResolvesServerCert for Rotating {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

impl ResolvesClientCert for Rotating {
    fn resolve(&self, _root_hints: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl fmt::Debug for Rotating {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rotating").field("authority", &self.authority).field("leaf", &self.leaf).finish_non_exhaustive()
    }
}
