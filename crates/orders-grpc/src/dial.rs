//! Connections between roles: TLS by the instance's own certificates, made when needed and again when lost.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint, Uri};

const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// How often a peer is asked whether it is still there, and how long it may take to say so. A process that was stopped, or a
/// machine that vanished, never ends a connection by itself: without this a call to it would wait for ever.
const PROBE_EVERY: Duration = Duration::from_secs(3);
const PROBE_WITHIN: Duration = Duration::from_secs(5);

/// A channel to `address` (host:port).
pub fn channel(address: &str, tls: Arc<ClientConfig>) -> Result<Channel, String> {
    // http although it is TLS: for https, tonic would insist on a handshake of its own.
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|_| format!("{address:?} is not of the form host:port"))?
        .connect_timeout(CONNECT_WITHIN)
        .http2_keep_alive_interval(PROBE_EVERY)
        .keep_alive_timeout(PROBE_WITHIN)
        .keep_alive_while_idle(true);
    let connector = tower::service_fn(move |uri: Uri| {
        let tls = TlsConnector::from(Arc::clone(&tls));
        async move {
            let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
            let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
            let stream = TcpStream::connect((host, uri.port_u16().unwrap_or(443))).await?;
            stream.set_nodelay(true)?;
            Ok::<_, io::Error>(TokioIo::new(tls.connect(name, stream).await?))
        }
    });
    Ok(endpoint.connect_with_connector_lazy(connector))
}
