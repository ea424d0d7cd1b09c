//! Who is who inside one instance: its certificate authority, the certificates of its roles, and its sealing key.
//!
//! An [`Identity`] is a directory. The first process to open it makes what is in it, every later one finds the same.
//! Certificates of roles are issued in memory, live a day and are replaced before they end; only the authority lasts.
//!
//! ```text
//!   instance.key   0600   32 random bytes that wrap the keys of all snapshots. Made first: where there is an authority
//!                         but no key, the key has been lost, and no new one takes its place unasked.
//!   authority.pem  0600   private key and certificate of the authority, in one file so that one rename makes both
//!   ca.pem         0644   its certificate alone, for whoever is to trust the instance; a copy, rewritten when it differs
//!
//!   spiffe://<instance>/role/<role>   names every role; <instance> is drawn at random with the authority
//! ```

mod authority;
mod directory;
mod error;
mod leaf;
mod role;
mod verify;

#[cfg(test)]
mod tests;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::client::ClientConfig;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::server::{ClientCertVerifierBuilder, NoServerSessionStorage, ServerConfig, WebPkiClientVerifier};
use rustls::time_provider::{DefaultTimeProvider, TimeProvider};
use zeroize::Zeroizing;

pub use authority::Authority;
pub use error::{IdentityError, PeerError};
pub use role::{Role, SpiffeError, SpiffeId};

use directory::Directory;
use leaf::{Leaf, Purpose, Rotating};
use verify::RoleVerifier;

/// Every listener and client speaks gRPC, and so HTTP/2 and nothing else.
const ALPN: &[u8] = b"h2";

const INSTANCE_KEY_BYTES: usize = 32;

/// The identity of an instance, as kept in its data directory. Cheap to share; never shows a key.
#[derive(Clone)]
pub struct Identity {
    authority: Arc<Authority>,
    instance_key: Arc<Zeroizing<[u8; INSTANCE_KEY_BYTES]>>,
    clock: Arc<dyn TimeProvider>,
    provider: Arc<CryptoProvider>,
}

/// What a listener asks of those who connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    NotAskedFor,
    /// Anonymous callers pass. A certificate, if there is one, must be of this instance.
    VerifiedIfGiven,
    /// Only this instance's own roles are heard at all.
    Required,
}

impl Identity {
    /// Finds the identity in `dir`, or makes it. Blocks on the disk.
    pub fn open(dir: &Path) -> Result<Self, IdentityError> {
        Self::open_at(dir, Arc::new(DefaultTimeProvider))
    }

    fn open_at(dir: &Path, clock: Arc<dyn TimeProvider>) -> Result<Self, IdentityError> {
        let now = leaf::now(&*clock);
        let (authority, instance_key) = Directory::new(dir).open(now)?;
        Ok(Self {
            authority: Arc::new(authority),
            instance_key: Arc::new(instance_key),
            clock,
            provider: Arc::new(aws_lc_rs::default_provider()),
        })
    }

    /// Names the instance and tells its roles apart.
    pub fn authority(&self) -> &Arc<Authority> {
        &self.authority
    }

    /// What clients need to trust this instance.
    pub fn ca_pem(&self) -> &str {
        self.authority.ca_pem()
    }

    /// Wraps the keys that snapshots are sealed with. The caller keeps it from logs.
    pub fn instance_key(&self) -> [u8; INSTANCE_KEY_BYTES] {
        **self.instance_key
    }

    /// For a listener that answers as `role` to the machine's own names, to the role's service name and to `names`
    /// (DNS names and addresses).
    pub fn server_config(
        &self,
        role: Role,
        names: &[&str],
        clients: ClientCertificates,
    ) -> Result<ServerConfig, IdentityError> {
        let builder = ServerConfig::builder_with_details(self.provider.clone(), self.clock.clone())
            .with_safe_default_protocol_versions()
            .expect("the provider has suites for TLS 1.2 and 1.3");
        let builder = match clients {
            ClientCertificates::NotAskedFor => builder.with_no_client_auth(),
            ClientCertificates::VerifiedIfGiven => builder.with_client_cert_verifier(
                self.client_verifier()
                    .allow_unauthenticated()
                    .build()
                    .expect("the roots are not empty and there are no revocation lists"),
            ),
            ClientCertificates::Required => builder.with_client_cert_verifier(
                self.client_verifier().build().expect("the roots are not empty and there are no revocation lists"),
            ),
        };
        let leaf = self.rotating(Leaf { role, purpose: Purpose::Server, names: leaf::server_names(role, names)? })?;
        let mut config = builder.with_cert_resolver(leaf);
        config.alpn_protocols = vec![ALPN.to_vec()];
        // A resumed session carries over a certificate that was checked when the first one began. Connections are few
        // and long, so each may as well be checked anew.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(config)
    }

    fn client_verifier(&self) -> ClientCertVerifierBuilder {
        WebPkiClientVerifier::builder_with_provider(self.authority.roots(), self.provider.clone())
    }

    /// For a client that shows itself as `role` if asked, and trusts `server` of this instance only.
    pub fn client_config(&self, role: Role, server: Role) -> Result<ClientConfig, IdentityError> {
        let verifier = RoleVerifier::new(self.authority.clone(), self.provider.clone(), server);
        let leaf = self.rotating(Leaf { role, purpose: Purpose::Client, names: Vec::new() })?;
        let mut config = ClientConfig::builder_with_details(self.provider.clone(), self.clock.clone())
            .with_safe_default_protocol_versions()
            .expect("the provider has suites for TLS 1.2 and 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(leaf);
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(config)
    }

    fn rotating(&self, leaf: Leaf) -> Result<Arc<Rotating>, IdentityError> {
        Rotating::new(self.authority.clone(), leaf, self.clock.clone(), self.provider.clone()).map(Arc::new)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("instance", &self.authority.instance()).finish_non_exhaustive()
    }
}
