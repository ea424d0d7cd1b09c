//! Clients' connections: accepted, bounded, spoken with, cut.

use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use http::header::HeaderValue;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::config::RouterConfig;
use crate::exchange::Router;

/// Requests that one HTTP/2 connection may have in flight; more wait in the client.
const MAX_STREAMS: u32 = 256;

/// HTTP/2 windows towards clients: what a slow worker can make us hold of one upload, and of all uploads of one connection.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;

/// How often a silent HTTP/2 client with requests in flight is asked whether it is there.
const PING_INTERVAL: Duration = Duration::from_secs(30);

/// What an idle connection gets to end in good order, once told to.
const FAREWELL: Duration = Duration::from_secs(1);

/// Pause after a failed accept: most often the process has no descriptor left, and one must be freed first.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// One client's connection. Lives as long as the connection, or the tunnel it became.
#[derive(Debug)]
pub(crate) struct Client {
    /// As it goes into `x-forwarded-for`.
    pub(crate) address: HeaderValue,
    opened: Instant,
    /// Requests in flight, and when there was last one: milliseconds since `opened`.
    busy: AtomicUsize,
    last: AtomicU64,
    _permit: OwnedSemaphorePermit,
}

/// A request in flight.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Client>);

impl Client {
    fn new(address: IpAddr, permit: OwnedSemaphorePermit) -> Self {
        Self {
            address: HeaderValue::try_from(address.to_canonical().to_string()).expect("an address is header text"),
            opened: Instant::now(),
            busy: AtomicUsize::new(0),
            last: AtomicU64::new(0),
            _permit: permit,
        }
    }

    fn busy(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::Relaxed);
        Busy(self.clone())
    }

    /// Whether no request of it has ended yet.
    fn is_new(&self) -> bool {
        self.last.load(Ordering::Relaxed) == 0
    }

    /// When the connection has been without a request for too long, if none comes: a client gets less time for its
    /// first. In HTTP/1.1 this is also what cuts one that sends its head byte by byte.
    fn overdue(&self, config: &RouterConfig) -> Instant {
        let idle = if self.is_new() { config.head_timeout } else { config.client_idle_timeout };
        if self.busy.load(Ordering::Relaxed) > 0 {
            return Instant::now() + idle;
        }
        self.opened + Duration::from_millis(self.last.load(Ordering::Relaxed)) + idle
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let since = u64::try_from(self.0.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.last.store(since.max(1), Ordering::Relaxed);
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Accepts from one listener. Never returns.
pub(crate) async fn accept(
    router: &Arc<Router>,
    listener: TcpListener,
    permits: &Arc<Semaphore>,
    shutdown: &CancellationToken,
) {
    let builder = Arc::new(builder(&router.pool.config));
    loop {
        let permit = permits.clone().acquire_owned().await.expect("never closed");
        match listener.accept().await {
            Ok((stream, address)) => {
                let client = Arc::new(Client::new(address.ip(), permit));
                let (router, builder, shutdown) = (router.clone(), builder.clone(), shutdown.clone());
                let clients = router.clients.clone();
                clients.spawn(converse(router, builder, stream, client, shutdown));
            }
            // The client's own doing; the next one is not to wait for it.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// No waiting for more to send, and a peer that vanished without a word is noticed in a minute, not never.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, Duration::from_secs(30))?;
    set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    Ok(set_tcp_keepcnt(stream, 3)?)
}

fn builder(config: &RouterConfig) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    // Most messages are small: one buffer costs less than a vector of them, here and towards workers.
    builder.http1().max_buf_size(config.max_head_bytes).writev(false);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(config.max_head_bytes).unwrap_or(u32::MAX))
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .keep_alive_interval(PING_INTERVAL);
    builder
}

async fn converse(
    router: Arc<Router>,
    builder: Arc<auto::Builder<TokioExecutor>>,
    stream: TcpStream,
    client: Arc<Client>,
    shutdown: CancellationToken,
) {
    if prepare(&stream).is_err() {
        return;
    }
    let service = service_fn(|request| {
        let (router, client) = (router.clone(), client.clone());
        async move {
            let busy = client.busy();
            let mut response = router.handle(&client, request).await;
            response.body_mut().keep(busy);
            Ok::<_, Infallible>(response)
        }
    });
    let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let mut overdue = pin!(tokio::time::sleep_until(client.overdue(&router.pool.config)));
    // Told to close first, cut later: one of the two is awaited at a time, for this is polled with every request.
    let (mut closing, mut told) = (false, pin!(shutdown.cancelled()));
    loop {
        tokio::select! {
            biased;
            // Errors here are the client's: bytes that are no HTTP, a reset, a disappearance.
            _ = connection.as_mut() => return,
            () = told.as_mut() => {
                if closing {
                    return;
                }
                closing = true;
                connection.as_mut().graceful_shutdown();
                told.set(router.kill.cancelled());
            }
            () = overdue.as_mut() => {
                let next = client.overdue(&router.pool.config);
                if next > Instant::now() {
                    overdue.as_mut().reset(next);
                } else if closing || client.is_new() {
                    return;
                } else {
                    closing = true;
                    connection.as_mut().graceful_shutdown();
                    told.set(router.kill.cancelled());
                    overdue.as_mut().reset(Instant::now() + FAREWELL);
                }
            }
        }
    }
}
