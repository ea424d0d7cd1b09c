use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error as TlsError, HandshakeKind, SignatureScheme};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;
const YEAR: u64 = 365 * DAY;
const START: u64 = 1_800_000_000;

#[derive(Debug)]
struct ManualClock(AtomicU64);

impl ManualClock {
    fn at(seconds: u64) -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(seconds)))
    }

    fn set(&self, seconds: u64) {
        self.0.store(seconds, Ordering::Relaxed);
    }
}

impl TimeProvider for ManualClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(std::time::Duration::from_secs(self.0.load(Ordering::Relaxed))))
    }
}

fn instance() -> (TempDir, Identity) {
    let dir = tempfile::tempdir().unwrap();
    let identity = Identity::open(dir.path()).unwrap();
    (dir, identity)
}

/// What each side saw of the other, over a connection that has carried a byte.
#[derive(Debug)]
struct Met {
    client_chain: Vec<CertificateDer<'static>>,
    server_chain: Vec<CertificateDer<'static>>,
    alpn: Option<Vec<u8>>,
    handshake: Option<HandshakeKind>,
}

#[derive(Debug)]
enum NotMet {
    Server(TlsError),
    Client(TlsError),
}

async fn meet(server: &ServerConfig, client: &ClientConfig, name: &str) -> Result<Met, NotMet> {
    let (near, far) = tokio::io::duplex(64 << 10);
    let serve = async {
        let mut stream = TlsAcceptor::from(Arc::new(server.clone())).accept(far).await?;
        stream.write_u8(7).await?;
        stream.flush().await?;
        std::io::Result::Ok(stream)
    };
    let call = async {
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let mut stream = TlsConnector::from(Arc::new(client.clone())).connect(name, near).await?;
        assert_eq!(stream.read_u8().await?, 7);
        std::io::Result::Ok(stream)
    };
    let (served, called) = tokio::join!(serve, call);
    let chain = |certificates: Option<&[CertificateDer<'static>]>| certificates.unwrap_or_default().to_vec();
    match (served, called) {
        (Ok(served), Ok(called)) => Ok(Met {
            client_chain: chain(served.get_ref().1.peer_certificates()),
            server_chain: chain(called.get_ref().1.peer_certificates()),
            alpn: called.get_ref().1.alpn_protocol().map(<[u8]>::to_vec),
            handshake: called.get_ref().1.handshake_kind(),
        }),
        // The other side then sees an alert or a closed stream; the one with a reason of its own is the one that refused.
        (served, called) => {
            let reason = |error: std::io::Error| error.downcast::<TlsError>().ok();
            let own = |error: &TlsError| !matches!(error, TlsError::AlertReceived(_));
            let refused_by_server = served.err().and_then(reason).filter(own).map(NotMet::Server);
            let refused_by_client = called.err().and_then(reason).filter(own).map(NotMet::Client);
            Err(refused_by_server.or(refused_by_client).expect("one side has a reason"))
        }
    }
}

/// Takes any certificate of any server, as existing command lines do.
#[derive(Debug)]
struct Unverifying(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverifying {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

fn unverifying(mut config: ClientConfig) -> ClientConfig {
    let verifier = Unverifying(config.crypto_provider().clone());
    config.dangerous().set_certificate_verifier(Arc::new(verifier));
    config
}

fn anonymous(identity: &Identity) -> ClientConfig {
    ClientConfig::builder_with_details(identity.provider.clone(), identity.clock.clone())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(identity.authority.roots())
        .with_no_client_auth()
}

fn api(identity: &Identity) -> ServerConfig {
    identity.server_config(Role::Api, &["10.1.2.3", "ate.example"], ClientCertificates::VerifiedIfGiven).unwrap()
}

#[tokio::test]
async fn roles_of_an_instance_meet_and_know_each_other() {
    let (_dir, identity) = instance();
    for role in Role::ALL {
        let met = meet(&api(&identity), &identity.client_config(role, Role::Api).unwrap(), "localhost").await.unwrap();
        assert_eq!(identity.authority().role_of(&met.client_chain), Ok(role));
        assert_eq!(identity.authority().role_of(&met.server_chain), Ok(Role::Api));
        assert_eq!(met.alpn.as_deref(), Some(&b"h2"[..]));
    }
}

#[tokio::test]
async fn the_api_answers_to_its_names_and_to_no_other() {
    let (_dir, identity) = instance();
    let client = identity.client_config(Role::Cli, Role::Api).unwrap();
    let host = rustix::system::uname().nodename().to_str().unwrap().to_owned();
    let mut names = vec!["localhost", "127.0.0.1", "::1", "api.ate-system.svc", "10.1.2.3", "ate.example"];
    names.extend(ServerName::try_from(host.as_str()).is_ok().then_some(host.as_str()));
    for name in names {
        meet(&api(&identity), &client, name).await.unwrap_or_else(|error| panic!("{name}: {error:?}"));
    }
    let other = meet(&api(&identity), &client, "other.example").await.unwrap_err();
    assert!(matches!(
        other,
        NotMet::Client(TlsError::InvalidCertificate(CertificateError::NotValidForNameContext { .. }))
    ));
    let router = identity.server_config(Role::Router, &[], ClientCertificates::VerifiedIfGiven).unwrap();
    meet(&router, &client, "api.ate-system.svc").await.expect_err("a router is not the API");
    let bad = identity.server_config(Role::Api, &["a b"], ClientCertificates::VerifiedIfGiven).unwrap_err();
    assert!(matches!(bad, IdentityError::BadName(name) if name == "a b"));
}

#[tokio::test]
async fn callers_without_a_certificate_pass_and_have_no_role() {
    let (_dir, identity) = instance();
    for client in [anonymous(&identity), unverifying(anonymous(&identity))] {
        let met = meet(&api(&identity), &client, "localhost").await.unwrap();
        assert_eq!(identity.authority().role_of(&met.client_chain), Err(PeerError::Anonymous));
    }
    // One that verifies nothing may call us what it likes.
    meet(&api(&identity), &unverifying(anonymous(&identity)), "other.example").await.unwrap();
}

#[tokio::test]
async fn a_listener_that_does_not_ask_learns_nothing() {
    let (_dir, identity) = instance();
    let server = identity.server_config(Role::Api, &[], ClientCertificates::NotAskedFor).unwrap();
    let met = meet(&server, &identity.client_config(Role::Node, Role::Api).unwrap(), "localhost").await.unwrap();
    assert!(met.client_chain.is_empty());
}

#[tokio::test]
async fn another_instance_is_refused_by_either_side() {
    let ((_dir, identity), (_other_dir, other)) = (instance(), instance());
    let unknown = |error: &TlsError| matches!(error, TlsError::InvalidCertificate(CertificateError::UnknownIssuer));

    let foreign_server =
        meet(&api(&other), &identity.client_config(Role::Router, Role::Api).unwrap(), "localhost").await;
    assert!(matches!(foreign_server, Err(NotMet::Client(error)) if unknown(&error)));

    let foreign_client = unverifying(other.client_config(Role::Router, Role::Api).unwrap());
    let refused = meet(&api(&identity), &foreign_client, "localhost").await;
    assert!(matches!(refused, Err(NotMet::Server(error)) if unknown(&error)));
}

#[tokio::test]
async fn a_clients_certificate_is_no_servers() {
    let (_dir, identity) = instance();
    let serving_with = |purpose| {
        let names = leaf::server_names(Role::Api, &[]).unwrap();
        ServerConfig::builder_with_details(identity.provider.clone(), identity.clock.clone())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(identity.rotating(Leaf { role: Role::Api, purpose, names }).unwrap())
    };
    let client = identity.client_config(Role::Router, Role::Api).unwrap();
    meet(&serving_with(Purpose::Server), &client, "localhost").await.unwrap();
    let refused = meet(&serving_with(Purpose::Client), &client, "localhost").await;
    assert!(matches!(refused, Err(NotMet::Client(TlsError::InvalidCertificate(_)))), "{refused:?}");
}

#[tokio::test]
async fn a_server_of_another_role_is_not_trusted() {
    let (_dir, identity) = instance();
    let node = identity.server_config(Role::Node, &[], ClientCertificates::Required).unwrap();
    let (to_node, to_api) =
        (identity.client_config(Role::Api, Role::Node), identity.client_config(Role::Api, Role::Api));
    meet(&node, &to_node.unwrap(), "localhost").await.unwrap();
    let refused = meet(&node, &to_api.unwrap(), "localhost").await;
    assert!(matches!(refused, Err(NotMet::Client(TlsError::InvalidCertificate(_)))), "{refused:?}");
}

#[tokio::test]
async fn a_listener_for_roles_only_does_not_hear_others() {
    let (_dir, identity) = instance();
    let node = identity.server_config(Role::Node, &[], ClientCertificates::Required).unwrap();
    let refused = meet(&node, &anonymous(&identity), "localhost").await;
    assert!(matches!(refused, Err(NotMet::Server(TlsError::NoCertificatesPresented))), "{refused:?}");
}

#[tokio::test]
async fn certificates_are_replaced_before_they_end() {
    let (dir, clock) = (tempfile::tempdir().unwrap(), ManualClock::at(START));
    let identity = Identity::open_at(dir.path(), clock.clone()).unwrap();
    let (server, client) = (api(&identity), identity.client_config(Role::Node, Role::Api).unwrap());
    let seen_at = async |seconds| {
        clock.set(seconds);
        let met = meet(&server, &client, "localhost").await.unwrap();
        assert_eq!(identity.authority().role_of(&met.client_chain), Ok(Role::Node));
        (met.client_chain, met.server_chain)
    };
    let first = seen_at(START).await;
    assert_eq!(seen_at(START + 15 * HOUR).await, first);
    let second = seen_at(START + 17 * HOUR).await;
    assert!(second.0 != first.0 && second.1 != first.1, "both sides have new ones with hours to spare");
    assert_eq!(seen_at(START + 18 * HOUR).await, second);
    let after_a_pause = seen_at(START + 100 * DAY).await;
    assert_ne!(after_a_pause, second);
    assert_ne!(seen_at(START + DAY).await, after_a_pause, "a clock that was set back makes the newer ones useless");
}

#[tokio::test]
async fn a_certificate_that_has_ended_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let now = Identity::open_at(dir.path(), ManualClock::at(START)).unwrap();
    let client = unverifying(now.client_config(Role::Node, Role::Api).unwrap());
    let at = |seconds| Identity::open_at(dir.path(), ManualClock::at(seconds)).unwrap();
    meet(&api(&at(START + DAY - 1)), &client, "localhost").await.unwrap();
    let refused = meet(&api(&at(START + DAY + 1)), &client, "localhost").await;
    let expired =
        |error: &TlsError| matches!(error, TlsError::InvalidCertificate(CertificateError::ExpiredContext { .. }));
    assert!(matches!(refused, Err(NotMet::Server(error)) if expired(&error)));
}

#[tokio::test]
async fn every_connection_is_checked_anew() {
    let (_dir, identity) = instance();
    let (server, client) = (api(&identity), identity.client_config(Role::Node, Role::Api).unwrap());
    for _ in 0..3 {
        assert_eq!(meet(&server, &client, "localhost").await.unwrap().handshake, Some(HandshakeKind::Full));
    }
}

#[test]
fn a_certificate_that_names_no_role_here_gives_none() {
    let ((_dir, identity), (_other_dir, other)) = (instance(), instance());
    let issued = |from: &Identity, names| {
        let leaf = Leaf { role: Role::Node, purpose: Purpose::Client, names };
        [from.authority.issue(&leaf, UnixTime::now()).unwrap().0]
    };
    let role_of = |chain: &[CertificateDer<'_>]| identity.authority().role_of(chain);
    assert_eq!(role_of(&issued(&identity, vec![])), Ok(Role::Node));
    let elsewhere = other.authority().instance().to_owned();
    assert_eq!(role_of(&issued(&other, vec![])), Err(PeerError::OtherInstance(elsewhere)));
    let second = identity.authority().spiffe_id(Role::Api).to_string();
    let two = issued(&identity, vec![rcgen::SanType::URI(second.as_str().try_into().unwrap())]);
    assert_eq!(role_of(&two), Err(PeerError::NotOneId(2)));
    assert_eq!(role_of(&[CertificateDer::from(vec![1, 2, 3])]), Err(PeerError::Unreadable));
    let authority = rustls::pki_types::pem::PemObject::from_pem_slice(identity.ca_pem().as_bytes()).unwrap();
    assert!(matches!(role_of(&[authority]), Err(PeerError::BadId(_))));
}

#[test]
fn a_directory_holds_one_identity_for_good() {
    let (dir, first) = instance();
    let again = Identity::open(dir.path()).unwrap();
    assert_eq!(again.ca_pem(), first.ca_pem());
    assert_eq!(again.instance_key(), first.instance_key());
    assert_eq!(again.authority().instance(), first.authority().instance());
    let (_other_dir, other) = instance();
    assert_ne!(other.ca_pem(), first.ca_pem());
    assert_ne!(other.instance_key(), first.instance_key());
    assert_ne!(other.authority().instance(), first.authority().instance());
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn keys_are_for_their_owner_only() {
    let (dir, identity) = instance();
    let mut names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["authority.pem", "ca.pem", "instance.key"]);
    assert_eq!(mode(&dir.path().join("authority.pem")), 0o600);
    assert_eq!(mode(&dir.path().join("instance.key")), 0o600);
    assert_eq!(mode(&dir.path().join("ca.pem")), 0o644);
    let public = fs::read_to_string(dir.path().join("ca.pem")).unwrap();
    assert_eq!(public, identity.ca_pem());
    assert!(!public.contains("PRIVATE"));
    for file in ["authority.pem", "instance.key"] {
        let path = dir.path().join(file);
        for exposed in [0o640, 0o604, 0o620] {
            fs::set_permissions(&path, fs::Permissions::from_mode(exposed)).unwrap();
            let error = Identity::open(dir.path()).unwrap_err();
            assert!(matches!(&error, IdentityError::Exposed { mode, .. } if *mode == exposed));
            assert!(error.to_string().contains(&format!("chmod 600 {}", path.display())), "{error}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }
    Identity::open(dir.path()).unwrap();
}

#[test]
fn the_public_copy_follows_the_authority() {
    let (dir, identity) = instance();
    let copy = dir.path().join("ca.pem");
    fs::write(&copy, "stale").unwrap();
    Identity::open(dir.path()).unwrap();
    assert_eq!(fs::read_to_string(&copy).unwrap(), identity.ca_pem());

    // Certificate first and key last, as somebody may have put them: still only the certificate is published.
    let bundle = dir.path().join("authority.pem");
    let text = fs::read_to_string(&bundle).unwrap();
    let (key, certificate) = text.split_at(text.find("-----BEGIN CERTIFICATE-----").unwrap());
    fs::write(&bundle, format!("{certificate}{key}")).unwrap();
    assert_eq!(Identity::open(dir.path()).unwrap().ca_pem(), identity.ca_pem());
    assert_eq!(identity.ca_pem(), certificate, "the usual spelling of PEM");
}

#[test]
fn a_damaged_authority_is_refused_and_left_alone() {
    let ((dir, _), (other_dir, _)) = (instance(), instance());
    let path = dir.path().join("authority.pem");
    let read = |dir: &TempDir| fs::read_to_string(dir.path().join("authority.pem")).unwrap();
    let (text, other) = (read(&dir), read(&other_dir));
    let split = |text: &str| text.find("-----BEGIN CERTIFICATE-----").unwrap();
    let foreign_certificate = format!("{}{}", &text[..split(&text)], &other[split(&other)..]);
    for damaged in ["", &text[..text.len() / 2], &text[split(&text)..], &foreign_certificate] {
        fs::write(&path, damaged).unwrap();
        let error = Identity::open(dir.path()).unwrap_err();
        assert!(matches!(error, IdentityError::DamagedAuthority { .. }), "{error:?}");
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), damaged);
    }
}

#[test]
fn no_flipped_bit_makes_another_authority() {
    let (dir, identity) = instance();
    let (path, now) = (dir.path().join("authority.pem"), UnixTime::now());
    let bytes = fs::read(&path).unwrap();
    let key = identity.authority.private_key();
    for at in 0..bytes.len() {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1;
        if let Ok(authority) = Authority::parse(&path, &flipped, now) {
            assert!(authority.ca_pem() == identity.ca_pem() && authority.private_key() == key, "byte {at}");
        }
    }
}

#[test]
fn an_authority_out_of_its_time_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let at = |seconds| Identity::open_at(dir.path(), ManualClock::at(seconds));
    at(START).unwrap();
    at(START + 10 * YEAR - DAY).unwrap();
    for wrong in [START + 10 * YEAR + 1, START - HOUR] {
        let error = at(wrong).unwrap_err();
        assert!(matches!(error, IdentityError::NotValidNow { .. }));
        let text = error.to_string();
        assert!(text.contains("authority.pem is valid from Jan 15") && text.contains("2037"), "{text}");
    }
}

#[tokio::test]
async fn no_certificate_outlives_the_authority() {
    let dir = tempfile::tempdir().unwrap();
    let end = START + 10 * YEAR;
    let at = |seconds| Identity::open_at(dir.path(), ManualClock::at(seconds));
    at(START).unwrap();
    let client = at(end - HOUR).unwrap().client_config(Role::Node, Role::Api).unwrap();
    let server = api(&at(end - HOUR).unwrap());
    let met = meet(&server, &client, "localhost").await.unwrap();
    let (_, leaf) = x509_parser::parse_x509_certificate(&met.server_chain[0]).unwrap();
    assert_eq!(leaf.validity().not_after.timestamp().unsigned_abs(), end);
}

#[test]
fn an_instance_key_is_never_replaced_unasked() {
    let (dir, identity) = instance();
    let path = dir.path().join("instance.key");
    fs::write(&path, [1; 31]).unwrap();
    let error = Identity::open(dir.path()).unwrap_err();
    assert!(matches!(error, IdentityError::DamagedKey { length: 31, .. }));
    fs::remove_file(&path).unwrap();
    let error = Identity::open(dir.path()).unwrap_err();
    assert!(matches!(error, IdentityError::LostKey { .. }));
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    assert!(!path.exists());

    fs::remove_file(dir.path().join("authority.pem")).unwrap();
    let anew = Identity::open(dir.path()).unwrap();
    assert_ne!(anew.instance_key(), identity.instance_key());
    fs::remove_file(dir.path().join("authority.pem")).unwrap();
    let renewed = Identity::open(dir.path()).unwrap();
    assert_eq!(renewed.instance_key(), anew.instance_key(), "a new authority does not cost the snapshots");
    assert_ne!(renewed.ca_pem(), anew.ca_pem());
}

#[test]
fn nothing_shows_a_key() {
    let (dir, identity) = instance();
    let bundle = fs::read_to_string(dir.path().join("authority.pem")).unwrap();
    let private_line = bundle.lines().nth(1).unwrap();
    let shown = format!("{identity:?} {:?} {:?}", identity.authority(), api(&identity));
    assert!(shown.contains(identity.authority().instance()));
    assert!(!shown.contains(private_line));
    assert!(!shown.contains(&format!("{:?}", identity.instance_key()).trim_matches(['[', ']'])[..20]));
}
