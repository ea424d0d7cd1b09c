//! The API on the wire: `ateapi.Control` as public clients know it, `ate.v1.Substrate` beside it, on the same listeners.
//!
//! ```text
//!   TLS  ─┐                     ┌─▶ control.rs     ateapi.Control: validation order, codes and texts of the public API
//!   unix ─┴─▶ elapsed.rs, ─────▶├─▶ substrate.rs   ate.v1.Substrate: objects, watches, history, logs, exec
//!             guard.rs          ├─▶ identity.rs    ateapi.SessionIdentity: not offered yet
//!                               └─▶ reflection
//! ```
//! Requests are checked here; what they mean is the control plane's business.

mod control;
mod convert;
mod elapsed;
mod guard;
mod identity;
mod permission;
mod substrate;

use std::io;
use std::sync::Arc;

use ate_control::Control;
use ate_proto::ate::v1::substrate_server::SubstrateServer;
use ate_proto::ateapi::control_server::ControlServer;
use ate_proto::ateapi::session_identity_server::SessionIdentityServer;
use futures::{Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::transport::server::Connected;

pub use permission::{PERMISSIONS, Permission};

/// Largest request taken. The largest there is carries manifests, which are limited to 4 MiB a file themselves.
const MAX_REQUEST: usize = 8 << 20;

/// Calls at once on one connection; more wait.
const MAX_CALLS: u32 = 256;

/// A TLS handshake that takes longer is given up.
const HANDSHAKE_WITHIN: std::time::Duration = std::time::Duration::from_secs(10);

/// Handshakes under way at once; more connections wait in the kernel's queue.
const MAX_HANDSHAKES: usize = 64;

/// A client that is silent for so long is asked whether it is there, and is gone if it does not answer: one whose machine went away
/// never says so, and what it had running would keep an actor awake.
const PROBE_EVERY: std::time::Duration = std::time::Duration::from_secs(30);
const PROBE_WITHIN: std::time::Duration = std::time::Duration::from_secs(20);

/// What the API says about itself.
#[derive(Clone, Debug)]
pub struct Info {
    pub version: String,
    pub build: String,
    pub instance: String,
    pub router_url: String,
}

/// Where the API is served.
#[derive(Debug)]
pub struct Listeners {
    /// Without encryption: only for a socket that the file system protects.
    pub unix: UnixListener,
    pub tls: Option<Secured>,
}

/// What is for people needs a person's certificate unless it is open to everybody who can connect; what is for parts of the
/// instance always needs the part's.
#[derive(Debug)]
pub struct Secured {
    pub listener: TcpListener,
    pub config: Arc<rustls::ServerConfig>,
    pub authority: Arc<ate_identity::Authority>,
    pub open: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("the API server failed")]
    Transport(#[from] tonic::transport::Error),
    #[error("the descriptors of the API cannot be served")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Serves until `shutdown`; calls under way are finished.
pub async fn serve(
    control: Arc<Control>,
    nodes: Arc<dyn ate_orders::Nodes>,
    info: Info,
    listeners: Listeners,
    shutdown: CancellationToken,
) -> Result<(), ServeError> {
    let secured_by =
        listeners.tls.as_ref().map(|tls| guard::By { authority: Arc::clone(&tls.authority), open: tls.open });
    let routes = || -> Result<_, ServeError> {
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(ate_proto::FILE_DESCRIPTOR_SET)
        };
        let own = substrate::SubstrateService {
            control: Arc::clone(&control),
            nodes: Arc::clone(&nodes),
            info: info.clone(),
            shutdown: shutdown.clone(),
        };
        Ok(Server::builder()
            .concurrency_limit_per_connection(MAX_CALLS as usize)
            .max_concurrent_streams(MAX_CALLS)
            .http2_keepalive_interval(Some(PROBE_EVERY))
            .http2_keepalive_timeout(Some(PROBE_WITHIN))
            .layer(elapsed::ElapsedLayer)
            .layer(guard::GuardLayer(secured_by.clone()))
            .add_service(reflection().build_v1()?)
            // Clients of before 2023 know this one only, and the public server has it too.
            .add_service(reflection().build_v1alpha()?)
            .add_service(
                ControlServer::new(control::ControlService(Arc::clone(&control)))
                    .max_decoding_message_size(MAX_REQUEST),
            )
            .add_service(SessionIdentityServer::new(identity::IdentityService))
            .add_service(SubstrateServer::new(own).max_decoding_message_size(MAX_REQUEST)))
    };
    let unix = tokio_stream::wrappers::UnixListenerStream::new(listeners.unix);
    let on_unix = routes()?.serve_with_incoming_shutdown(unix, shutdown.clone().cancelled_owned());
    let Some(Secured { listener, config, .. }) = listeners.tls else { return Ok(on_unix.await?) };
    let on_tls = routes()?.serve_with_incoming_shutdown(secured(listener, config), shutdown.clone().cancelled_owned());
    tokio::try_join!(on_unix, on_tls)?;
    Ok(())
}

/// Connections that have made their handshake. One that has not, or cannot, is nobody else's trouble.
fn secured(
    listener: TcpListener,
    config: Arc<rustls::ServerConfig>,
) -> impl Stream<Item = io::Result<impl AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static>> {
    let acceptor = tokio_rustls::TlsAcceptor::from(config);
    tokio_stream::wrappers::TcpListenerStream::new(listener)
        .map(move |stream| {
            let acceptor = acceptor.clone();
            async move {
                let stream = stream.ok()?;
                let _ = stream.set_nodelay(true);
                tokio::time::timeout(HANDSHAKE_WITHIN, acceptor.accept(stream)).await.ok()?.ok()
            }
        })
        .buffer_unordered(MAX_HANDSHAKES)
        .filter_map(|stream| std::future::ready(stream.map(Ok)))
}
