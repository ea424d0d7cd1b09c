use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use base64::Engine as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PublicKeyData as _, SanType,
};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime};
use x509_parser::prelude::{ASN1Time, FromDer as _, GeneralName, X509Certificate};
use zeroize::Zeroizing;

use crate::leaf::{Leaf, Purpose};
use crate::{IdentityError, PeerError, Role, SpiffeId};

/// An authority outlives the data directory it is in; nothing renews it.
const AUTHORITY_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Short, so that a stolen certificate is soon worthless without revocation lists.
pub(crate) const LEAF_LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// How far the clocks of two machines may be apart.
pub(crate) const CLOCK_SKEW: Duration = Duration::from_secs(5 * 60);

/// Signs certificates for the roles of one instance, and tells whom a certificate was signed for.
pub struct Authority {
    instance: String,
    ca_pem: String,
    roots: Arc<RootCertStore>,
    not_after: UnixTime,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// The random name of the instance: the trust domain of its SPIFFE ids.
    pub fn instance(&self) -> &str {
        &self.instance
    }

    pub fn ca_pem(&self) -> &str {
        &self.ca_pem
    }

    pub fn spiffe_id(&self, role: Role) -> SpiffeId {
        SpiffeId::new(&self.instance, role).expect("the instance's name was checked when the authority was read")
    }

    /// The role of whoever showed `chain` in a handshake that [`Identity::server_config`](crate::Identity::server_config)
    /// has verified: what is looked at here is the name in the certificate, not its signature.
    pub fn role_of(&self, chain: &[CertificateDer<'_>]) -> Result<Role, PeerError> {
        let leaf = chain.first().ok_or(PeerError::Anonymous)?;
        let (_, leaf) = X509Certificate::from_der(leaf).map_err(|_| PeerError::Unreadable)?;
        let uris = uri_names(&leaf).ok_or(PeerError::Unreadable)?;
        let [uri] = uris[..] else { return Err(PeerError::NotOneId(uris.len())) };
        let id: SpiffeId = uri.parse()?;
        if id.instance() != self.instance {
            return Err(PeerError::OtherInstance(id.instance().to_owned()));
        }
        Ok(id.role())
    }

    #[cfg(test)]
    pub(crate) fn private_key(&self) -> &[u8] {
        self.issuer.key().serialized_der()
    }

    pub(crate) fn roots(&self) -> Arc<RootCertStore> {
        self.roots.clone()
    }

    /// A new authority of a new instance: private key and certificate as PEM.
    pub(crate) fn generate(now: UnixTime) -> Result<Zeroizing<String>, IdentityError> {
        let mut random = [0; 8];
        aws_lc_rs::rand::fill(&mut random).expect("the kernel gives random bytes");
        let instance = format!("ate-{:016x}", u64::from_be_bytes(random));

        let key = new_key()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, format!("Agent Substrate {instance}"));
        params.subject_alt_names = vec![uri(&format!("spiffe://{instance}"))?];
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        set_validity(&mut params, now, secs(now) + AUTHORITY_LIFETIME);
        let certificate = params.self_signed(&key).map_err(IdentityError::Issue)?;
        Ok(Zeroizing::new(format!("{}{}", *Zeroizing::new(key.serialize_pem()), certificate.pem())))
    }

    /// Reads what [`Self::generate`] wrote. Damage of any kind is found: the certificate signs itself.
    pub(crate) fn parse(path: &Path, pem: &[u8], now: UnixTime) -> Result<Self, IdentityError> {
        let damaged =
            |reason: &str| IdentityError::DamagedAuthority { path: path.to_owned(), reason: reason.to_owned() };
        let key = PrivatePkcs8KeyDer::from_pem_slice(pem).map_err(|_| damaged("it has no private key"))?;
        let key = KeyPair::try_from(&key).map_err(|_| damaged("its private key is not valid"))?;
        let der = CertificateDer::from_pem_slice(pem).map_err(|_| damaged("it has no certificate"))?.into_owned();
        let (rest, certificate) =
            X509Certificate::from_der(&der).map_err(|_| damaged("its certificate cannot be parsed"))?;
        if !rest.is_empty() || certificate.verify_signature(None).is_err() {
            return Err(damaged("its certificate has been altered"));
        }
        if certificate.public_key().raw != key.subject_public_key_info() {
            return Err(damaged("its certificate is for another private key"));
        }
        if !certificate.is_ca() {
            return Err(damaged("its certificate is not one of an authority"));
        }
        let instance = match uri_names(&certificate).as_deref() {
            Some([uri]) => uri.strip_prefix("spiffe://").filter(|name| SpiffeId::new(name, Role::Api).is_ok()),
            _ => None,
        };
        let instance = instance.ok_or_else(|| damaged("its certificate does not name an instance"))?.to_owned();

        let validity = certificate.validity();
        let (not_before, not_after) = (validity.not_before.timestamp(), validity.not_after.timestamp());
        let seconds = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        if !(not_before..=not_after).contains(&seconds) {
            return Err(IdentityError::NotValidNow {
                path: path.to_owned(),
                not_before: validity.not_before.to_string(),
                not_after: validity.not_after.to_string(),
                now: ASN1Time::from_timestamp(seconds).map_or_else(|_| seconds.to_string(), |now| now.to_string()),
            });
        }
        let not_after = UnixTime::since_unix_epoch(Duration::from_secs(not_after.unsigned_abs()));

        let mut roots = RootCertStore::empty();
        roots.add(der.clone()).map_err(|_| damaged("its certificate cannot be trusted"))?;
        let issuer = Issuer::from_ca_cert_der(&der, key).map_err(IdentityError::Issue)?;
        Ok(Self { instance, ca_pem: pem_of(&der), roots: Arc::new(roots), not_after, issuer })
    }

    /// A certificate with a key of its own, valid from a little before `now` until [`LEAF_LIFETIME`] after.
    pub(crate) fn issue(
        &self,
        leaf: &Leaf,
        now: UnixTime,
    ) -> Result<(CertificateDer<'static>, PrivateKeyDer<'static>), IdentityError> {
        let id = self.spiffe_id(leaf.role).to_string();
        let key = new_key()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, leaf.role.as_str());
        params.subject_alt_names = leaf.names.clone();
        params.subject_alt_names.push(uri(&id)?);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // A client's certificate is no server's: a worker cannot pose as the API to others.
        params.extended_key_usages = vec![match leaf.purpose {
            Purpose::Server => ExtendedKeyUsagePurpose::ServerAuth,
            Purpose::Client => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, now, (secs(now) + LEAF_LIFETIME).min(secs(self.not_after)));
        let certificate = params.signed_by(&key, &self.issuer).map_err(IdentityError::Issue)?;
        Ok((certificate.into(), PrivatePkcs8KeyDer::from(key.serialize_der()).into()))
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("instance", &self.instance).finish_non_exhaustive()
    }
}

fn new_key() -> Result<KeyPair, IdentityError> {
    KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map_err(IdentityError::Issue)
}

fn uri(text: &str) -> Result<SanType, IdentityError> {
    Ok(SanType::URI(text.try_into().map_err(IdentityError::Issue)?))
}

fn secs(time: UnixTime) -> Duration {
    Duration::from_secs(time.as_secs())
}

fn set_validity(params: &mut CertificateParams, now: UnixTime, until: Duration) {
    params.not_before = (UNIX_EPOCH + secs(now).saturating_sub(CLOCK_SKEW)).into();
    params.not_after = (UNIX_EPOCH + until).into();
}

/// The URIs among the names of a certificate; none if its names cannot be read.
fn uri_names<'a>(certificate: &'a X509Certificate<'a>) -> Option<Vec<&'a str>> {
    let names = certificate.subject_alternative_name().ok()?;
    let names = names.map(|extension| extension.value.general_names.iter()).into_iter().flatten();
    Some(names.filter_map(|name| if let GeneralName::URI(uri) = name { Some(*uri) } else { None }).collect())
}

/// Encoded anew, and not cut out of the file: what is published can then hold nothing else that is in there.
fn pem_of(der: &[u8]) -> String {
    let text = base64::prelude::BASE64_STANDARD.encode(der);
    let lines: Vec<&str> =
        text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).expect("base64 is ASCII")).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}
