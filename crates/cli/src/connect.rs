//! How the daemon is reached: its socket on this machine, or TLS. Connections are made when the first call needs one,
//! and again whenever one is lost.

use std::fmt;
use std::io;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use ate_identity::Role;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tonic::transport::{Channel, Uri};

/// A machine that does not answer by then is not there.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// How often a quiet connection is tried, so that a watch notices a peer that vanished without a word.
const PROBE_EVERY: Duration = Duration::from_secs(30);

const HTTPS: u16 = 443;

/// Where the API is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Unix(PathBuf),
    /// `host` without the brackets of an IPv6 address.
    Tls {
        host: String,
        port: u16,
    },
}

/// The text names no endpoint.
#[derive(Debug, thiserror::Error)]
#[error("write unix:///path, https://host:port or host:port")]
pub struct EndpointError;

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.is_empty() { Err(EndpointError) } else { Ok(Self::Unix(path.into())) };
        }
        let (authority, default_port) = match text.split_once("://") {
            Some(("https", authority)) => (authority.strip_suffix('/').unwrap_or(authority), Some(HTTPS)),
            Some(_) => return Err(EndpointError),
            None => (text, None),
        };
        let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((address, port)) => (address.parse::<Ipv6Addr>().map_err(|_| EndpointError)?.to_string(), port),
            None => {
                let (host, port) = authority.split_at(authority.find(':').unwrap_or(authority.len()));
                (host.to_owned(), port)
            }
        };
        // A name without a port is refused: it is as likely a path whose scheme was forgotten.
        let port =
            if port.is_empty() { default_port } else { port.strip_prefix(':').and_then(|port| port.parse().ok()) };
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
        if host.is_empty() || !host.bytes().all(known) {
            return Err(EndpointError);
        }
        Ok(Self::Tls { host, port: port.ok_or(EndpointError)? })
    }
}

impl Endpoint {
    /// What requests name. The scheme stays http with TLS too: for https, tonic would insist on a handshake of its own.
    fn uri(&self) -> Uri {
        let authority = match self {
            Self::Unix(_) => "localhost".to_owned(),
            tls => tls.to_string().split_off("https://".len()),
        };
        let uri = Uri::builder().scheme("http").authority(authority).path_and_query("/").build();
        uri.expect("an endpoint was parsed from an authority")
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Tls { host, port } if host.contains(':') => write!(f, "https://[{host}]:{port}"),
            Self::Tls { host, port } => write!(f, "https://{host}:{port}"),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    /// `data_dir` is whose daemon it would be, unless the person named the socket.
    #[error("no daemon answers at {}", socket.display())]
    NoDaemon { socket: PathBuf, data_dir: Option<PathBuf> },
    #[error("you may not use {}", socket.display())]
    Denied { socket: PathBuf },
    #[error("cannot reach {endpoint}")]
    Unreachable { endpoint: Endpoint, source: io::Error },
    #[error("{endpoint} cannot be trusted")]
    Untrusted { endpoint: Endpoint, authority: PathBuf, source: io::Error },
    #[error("there is no telling whether {endpoint} can be trusted: cannot read {}", authority.display())]
    NoAuthority { endpoint: Endpoint, authority: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("cannot show {endpoint} who asks")]
    NoIdentity { endpoint: Endpoint, source: Box<ate_identity::IdentityError> },
}

impl DialError {
    pub(crate) fn hint(&self) -> String {
        match self {
            Self::NoDaemon { data_dir: Some(data_dir), .. } => {
                format!("start it with: ate dev --data-dir {}", data_dir.display())
            }
            Self::NoDaemon { data_dir: None, .. } => "start the daemon, or correct --endpoint".to_owned(),
            Self::Denied { .. } => "run this as the user who runs the daemon, for example with sudo".to_owned(),
            Self::NoIdentity { .. } => "mend the directory `identity`, or use another with --data-dir".to_owned(),
            Self::Unreachable { .. } => "see whether --endpoint is right and the daemon listens there".to_owned(),
            Self::Untrusted { authority, .. } | Self::NoAuthority { authority, .. } => format!(
                "put its ca.pem at {}, or pass --insecure-skip-verify if nobody can stand in between",
                authority.display()
            ),
        }
    }
}

/// Everything it takes to connect.
#[derive(Clone, Debug)]
pub(crate) struct Dialer {
    pub(crate) endpoint: Endpoint,
    pub(crate) data_dir: PathBuf,
    /// The endpoint is the one that belongs to the data directory.
    pub(crate) is_default: bool,
    pub(crate) skip_verify: bool,
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// The latest reason for which no connection was made. A failed call says only that there is none.
pub(crate) type LastFailure = Arc<Mutex<Option<DialError>>>;

impl Dialer {
    pub(crate) fn channel(self) -> (Channel, LastFailure) {
        let failure = LastFailure::default();
        let uri = self.endpoint.uri();
        let connector = tower::service_fn({
            let failure = Arc::clone(&failure);
            move |_: Uri| {
                let (dialer, failure) = (self.clone(), Arc::clone(&failure));
                async move {
                    dialer.dial().await.map(TokioIo::new).map_err(|error| {
                        let text = io::Error::other(error.to_string());
                        *failure.lock() = Some(error);
                        text
                    })
                }
            }
        });
        let channel = Channel::builder(uri)
            .http2_keep_alive_interval(PROBE_EVERY)
            .keep_alive_while_idle(true)
            .connect_with_connector_lazy(connector);
        (channel, failure)
    }

    async fn dial(&self) -> Result<Box<dyn Stream>, DialError> {
        match &self.endpoint {
            Endpoint::Unix(socket) => match reach(socket).await {
                Ok(stream) => Ok(Box::new(stream)),
                Err(error) => Err(self.unix_error(socket, error)),
            },
            Endpoint::Tls { host, port } => self.dial_tls(host, *port).await,
        }
    }

    fn unix_error(&self, socket: &Path, source: io::Error) -> DialError {
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => DialError::NoDaemon {
                socket: socket.to_owned(),
                data_dir: self.is_default.then(|| self.data_dir.clone()),
            },
            io::ErrorKind::PermissionDenied => DialError::Denied { socket: socket.to_owned() },
            _ => DialError::Unreachable { endpoint: self.endpoint.clone(), source },
        }
    }

    async fn dial_tls(&self, host: &str, port: u16) -> Result<Box<dyn Stream>, DialError> {
        let unreachable = |source| DialError::Unreachable { endpoint: self.endpoint.clone(), source };
        let config = Arc::new(self.tls_config()?);
        let name = ServerName::try_from(host.to_owned()).map_err(|error| unreachable(io::Error::other(error)))?;
        let secured = async {
            let stream = TcpStream::connect((host, port)).await?;
            stream.set_nodelay(true)?;
            tokio_rustls::TlsConnector::from(config).connect(name, stream).await
        };
        let late = |_| Err(io::Error::new(io::ErrorKind::TimedOut, "it did not answer in time"));
        let secured = tokio::time::timeout(CONNECT_WITHIN, secured).await.unwrap_or_else(late);
        Ok(Box::new(secured.map_err(|source| match source.get_ref().and_then(|error| error.downcast_ref()) {
            Some(rustls::Error::InvalidCertificate(_)) => {
                DialError::Untrusted { endpoint: self.endpoint.clone(), authority: self.authority(), source }
            }
            _ => unreachable(source),
        })?))
    }

    fn authority(&self) -> PathBuf {
        self.data_dir.join("identity/ca.pem")
    }

    /// Whoever has the instance's identity shows it; everybody else is a stranger, as which one may ask, too.
    fn tls_config(&self) -> Result<ClientConfig, DialError> {
        let directory = self.data_dir.join("identity");
        if !self.skip_verify && std::fs::File::open(directory.join("authority.pem")).is_ok() {
            let identity = ate_identity::Identity::open(&directory);
            return identity
                .and_then(|identity| identity.client_config(Role::Cli, Role::Api))
                .map_err(|source| DialError::NoIdentity { endpoint: self.endpoint.clone(), source: Box::new(source) });
        }
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("the provider has suites for TLS 1.2 and 1.3");
        let mut config = if self.skip_verify {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(Trusting(provider))).with_no_client_auth()
        } else {
            builder.with_root_certificates(self.roots()?).with_no_client_auth()
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }

    fn roots(&self) -> Result<RootCertStore, DialError> {
        let authority = self.authority();
        let mut roots = RootCertStore::empty();
        let read = CertificateDer::from_pem_file(&authority);
        let read = read.map_err(|source| DialError::NoAuthority { endpoint: self.endpoint.clone(), authority, source });
        // One that does not parse is not added, and then nothing is trusted.
        roots.add_parsable_certificates([read?]);
        Ok(roots)
    }
}

async fn reach(socket: &Path) -> io::Result<UnixStream> {
    UnixStream::connect(ate_sys::SocketPath::of(socket)?.path()).await
}

/// Believes whoever answers. Signatures are still checked, so that it is at least the owner of the certificate.
#[derive(Debug)]
struct Trusting(Arc<CryptoProvider>);

impl ServerCertVerifier for Trusting {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_endpoint_is_a_socket_or_a_host_with_a_port() {
        let tls = |host: &str, port| Endpoint::Tls { host: host.to_owned(), port };
        for (text, expected) in [
            ("unix:///var/lib/ate/api.sock", Endpoint::Unix("/var/lib/ate/api.sock".into())),
            ("unix:api.sock", Endpoint::Unix("api.sock".into())),
            ("https://api.example", tls("api.example", 443)),
            ("https://api.example:8443/", tls("api.example", 8443)),
            ("localhost:8443", tls("localhost", 8443)),
            ("[::1]:8443", tls("::1", 8443)),
            ("https://[::1]", tls("::1", 443)),
        ] {
            assert_eq!(text.parse::<Endpoint>().ok(), Some(expected), "{text}");
        }
        for text in [
            "",
            "unix:",
            "unix://",
            "localhost",
            "/a/b",
            "http://a:1",
            "a:b",
            "a:99999",
            ":1",
            "u@a:1",
            "a:1/x",
            "https://[]",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }

    #[test]
    fn each_way_to_miss_a_socket_has_its_own_remedy() {
        let endpoint = Endpoint::Unix("/x/api.sock".into());
        let dialer = Dialer { endpoint, data_dir: "/x".into(), is_default: true, skip_verify: false };
        let hint = |kind: io::ErrorKind| dialer.unix_error(Path::new("/x/api.sock"), kind.into()).hint();
        for absent in [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused] {
            assert_eq!(hint(absent), "start it with: ate dev --data-dir /x");
        }
        assert!(hint(io::ErrorKind::PermissionDenied).contains("sudo"));
        assert!(hint(io::ErrorKind::TimedOut).contains("--endpoint"));
    }

    proptest! {
        #[test]
        fn an_endpoint_reads_back_as_it_is_shown(text in "(unix://|https://)?[a-z0-9:.\\[\\]/@-]{0,20}") {
            if let Ok(endpoint) = text.parse::<Endpoint>() {
                endpoint.uri();
                prop_assert_eq!(endpoint.to_string().parse::<Endpoint>().ok(), Some(endpoint));
            }
        }
    }
}
