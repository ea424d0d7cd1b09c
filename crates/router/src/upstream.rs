//! Connections to one assignment's worker.
//!
//! They belong to their [`Route`], and a route is one actor at one generation: when another takes its place, its
//! connections go with it, and no lookup by address can ever find them again.
//!
//! ```text
//!   Route (uid, generation) ─┬─ Lane port 80 ──┬─ unused HTTP/1.1 connections, newest last
//!                            │                 └─ one shared HTTP/2 connection
//!                            └─ Lane port 8080 …
//! ```

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ate_preface::{Preface, PrefaceError, offer};
use ate_sys::SocketPath;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_util::task::TaskTracker;

use crate::assignment::{Assignment, Endpoint, Port, Protocol};
use crate::body::Upload;
use crate::config::RouterConfig;
use crate::front::prepare;
use crate::head::is_idempotent;
use crate::stats::{Histogram, Stats};

/// Unused connections kept per port of an actor. More come from a burst; what returns beyond this is closed.
const MAX_IDLE_PER_LANE: usize = 128;

/// HTTP/2 windows towards workers: what a slow client can make us hold of one answer, and of all answers of one actor.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 4 << 20;

/// What all routes share: the budget of unused connections, and the tasks that drive connections.
pub(crate) struct Pool {
    pub(crate) config: RouterConfig,
    pub(crate) stats: Arc<Stats>,
    pub(crate) drivers: TaskTracker,
    /// Told when the budget is spent.
    pub(crate) crowded: Notify,
}

pub(crate) struct Route {
    pub(crate) assignment: Assignment,
    pub(crate) durations: Arc<Histogram>,
    pool: Arc<Pool>,
    lanes: Vec<Lane>,
    connections: Arc<Semaphore>,
    retired: AtomicBool,
}

struct Lane {
    port: Port,
    idle: Mutex<Vec<Idle>>,
    shared: Mutex<Option<Shared>>,
    /// One dials for all who want the shared connection.
    dialling: Semaphore,
}

struct Idle {
    connection: Exclusive,
    since: Instant,
    _place: Place,
}

struct Shared {
    sender: http2::SendRequest<Upload>,
    used: Instant,
    _permit: OwnedSemaphorePermit,
}

/// One HTTP/1.1 connection, which carries one request at a time.
pub(crate) struct Exclusive {
    sender: http1::SendRequest<Upload>,
    /// Ends with the task that drives the connection.
    gone: oneshot::Receiver<Infallible>,
    _permit: OwnedSemaphorePermit,
}

/// One unused connection's share of the budget.
struct Place(Arc<Pool>);

enum Connection {
    Http1(Exclusive),
    Http2(http2::SendRequest<Upload>),
}

/// Why a worker did not take a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("too many connections to this actor")]
    Full,
    #[error("worker cannot be reached")]
    Unreachable(#[from] io::Error),
    #[error("no verdict in time")]
    Late,
    #[error("preface failed")]
    Preface(#[from] PrefaceError),
    #[error("worker hung up at once")]
    HungUp(#[from] hyper::Error),
}

pub(crate) enum SendError {
    /// Nothing of the request has left; it may go elsewhere.
    NotSent(Box<Request<Upload>>, DialError),
    /// It was sent, and may have had its effect.
    Lost(hyper::Error),
}

/// A connection in use. It goes back to its lane when its response has ended.
pub(crate) struct Lease {
    connection: Exclusive,
    route: Arc<Route>,
    lane: usize,
}

impl Route {
    pub(crate) fn new(mut assignment: Assignment, pool: Arc<Pool>) -> Self {
        if assignment.ports.is_empty() {
            assignment.ports.push(Port { number: 80, protocol: Protocol::Http });
        }
        let lanes = assignment.ports.iter().map(|port| Lane {
            port: *port,
            idle: Mutex::default(),
            shared: Mutex::default(),
            dialling: Semaphore::new(1),
        });
        Self {
            lanes: lanes.collect(),
            durations: pool.stats.routed_for(&assignment.template),
            connections: Arc::new(Semaphore::new(pool.config.max_connections_per_actor)),
            retired: AtomicBool::new(false),
            assignment,
            pool,
        }
    }

    /// Whether requests may still be sent this way.
    pub(crate) fn is_live(&self) -> bool {
        !self.retired.load(Ordering::Acquire)
    }

    /// No request goes this way again. Those under way are the worker's to end.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
        for lane in &self.lanes {
            lock(&lane.idle).clear();
            *lock(&lane.shared) = None;
        }
    }

    /// The lane of the wanted port; without a wish, of port 80 or else of the only one. `Err` is the port that is missing.
    pub(crate) fn lane(&self, wanted: Option<u16>) -> Result<(usize, Port), u16> {
        let number = match (wanted, self.lanes.as_slice()) {
            (Some(number), _) => number,
            (None, [only]) => only.port.number,
            (None, _) => 80,
        };
        let lane = self.lanes.iter().position(|lane| lane.port.number == number).ok_or(number)?;
        Ok((lane, self.lanes[lane].port))
    }

    /// Sends a request on an unused connection if there is one, and on a new one otherwise. A request on a connection
    /// that turns out to be closed goes out again if it was never written, or if a second time does no harm.
    pub(crate) async fn send(
        self: &Arc<Self>,
        lane: usize,
        protocol: Protocol,
        mut request: Request<Upload>,
        deadline: Instant,
    ) -> Result<(Response<Incoming>, Option<Lease>), SendError> {
        let mut unused = self.lanes[lane].unused(protocol);
        loop {
            let (connection, used) = match unused.take() {
                Some(connection) => (connection, true),
                None => match Box::pin(self.dial(lane, protocol, deadline)).await {
                    Ok(dialled) => dialled,
                    Err(reason) => return Err(SendError::NotSent(Box::new(request), reason)),
                },
            };
            if used {
                self.pool.stats.reuses.fetch_add(1, Ordering::Relaxed);
            }
            let copy = if used { repeatable(&request) } else { None };
            let sent = match connection {
                Connection::Http1(connection) => connection.send(request).await.map(|(response, connection)| {
                    (response, connection.map(|connection| Lease { connection, route: self.clone(), lane }))
                }),
                Connection::Http2(mut sender) => {
                    let answer = sender.try_send_request(request);
                    // For the reason given in `Exclusive::send`. The lane lets go of a closed connection by itself.
                    drop(sender);
                    answer.await.map(|response| (response, None))
                }
            };
            match sent {
                Ok(answered) => return Ok(answered),
                // Connections die together: where one was closed, the next is a new one.
                Err(error) => request = unsent(error, copy, used)?,
            }
        }
    }

    /// A connection past its preface: whatever is sent over it reaches this actor at this generation, or no one. Tells
    /// whether it has been used before.
    async fn dial(&self, lane: usize, protocol: Protocol, deadline: Instant) -> Result<(Connection, bool), DialError> {
        let lane = &self.lanes[lane];
        let _turn = match protocol {
            Protocol::Http => None,
            Protocol::H2c => {
                let turn = timeout_at(deadline, lane.dialling.acquire()).await.map_err(|_| DialError::Late)?;
                if let Some(shared) = lane.unused(protocol) {
                    return Ok((shared, true));
                }
                Some(turn)
            }
        };
        let permit = self.connections.clone().try_acquire_owned().map_err(|_| DialError::Full)?;
        let preface =
            Preface { uid: self.assignment.uid, generation: self.assignment.generation, port: lane.port.number };
        let connect = async {
            match &self.assignment.endpoint {
                Endpoint::Unix(path) => {
                    self.open(UnixStream::connect(SocketPath::of(path)?.path()).await?, preface, protocol, permit, lane)
                        .await
                }
                Endpoint::Tcp(address) => {
                    let stream = TcpStream::connect(address).await?;
                    prepare(&stream)?;
                    let Some(door) = &self.pool.config.door else {
                        return self.open(stream, preface, protocol, permit, lane).await;
                    };
                    let name = ServerName::from(address.ip());
                    let stream = TlsConnector::from(Arc::clone(door)).connect(name, stream).await?;
                    self.open(stream, preface, protocol, permit, lane).await
                }
            }
        };
        let limit = deadline.min(Instant::now() + self.pool.config.connect_timeout);
        Ok((timeout_at(limit, connect).await.unwrap_or(Err(DialError::Late))?, false))
    }

    async fn open<S>(
        &self,
        mut stream: S,
        preface: Preface,
        protocol: Protocol,
        permit: OwnedSemaphorePermit,
        lane: &Lane,
    ) -> Result<Connection, DialError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        offer(&mut stream, &preface).await?;
        self.pool.stats.connects.fetch_add(1, Ordering::Relaxed);
        let stream = TokioIo::new(stream);
        let max_head = self.pool.config.max_head_bytes;
        match protocol {
            Protocol::Http => {
                let (sender, driver) =
                    http1::Builder::new().max_buf_size(max_head).writev(false).handshake(stream).await?;
                let (going, gone) = oneshot::channel();
                self.pool.drivers.spawn(async move {
                    let _ = driver.with_upgrades().await;
                    drop(going);
                });
                Ok(Connection::Http1(Exclusive { sender, gone, _permit: permit }))
            }
            Protocol::H2c => {
                let (sender, driver) = http2::Builder::new(TokioExecutor::new())
                    .initial_stream_window_size(STREAM_WINDOW)
                    .initial_connection_window_size(CONNECTION_WINDOW)
                    .max_header_list_size(u32::try_from(max_head).unwrap_or(u32::MAX))
                    .handshake(stream)
                    .await?;
                self.pool.drivers.spawn(driver);
                let mut shared = lock(&lane.shared);
                if self.is_live() {
                    *shared = Some(Shared { sender: sender.clone(), used: Instant::now(), _permit: permit });
                }
                Ok(Connection::Http2(sender))
            }
        }
    }

    /// When each unused connection became so.
    pub(crate) fn idle_since(&self) -> Vec<Instant> {
        self.lanes.iter().flat_map(|lane| lock(&lane.idle).iter().map(|idle| idle.since).collect::<Vec<_>>()).collect()
    }

    /// Closes what has not been used since.
    pub(crate) fn close_idle(&self, since: Instant) {
        for lane in &self.lanes {
            lock(&lane.idle).retain(|idle| idle.since > since && !idle.connection.sender.is_closed());
            lock(&lane.shared).take_if(|shared| shared.used <= since || shared.sender.is_closed());
        }
    }
}

impl Exclusive {
    /// Sends a request, and gives the connection back with the answer unless it has ended.
    async fn send(
        mut self,
        request: Request<Upload>,
    ) -> Result<(Response<Incoming>, Option<Self>), TrySendError<Request<Upload>>> {
        let mut answer = pin!(self.sender.try_send_request(request));
        let answered = tokio::select! {
            biased;
            answered = answer.as_mut() => Some(answered),
            _ = &mut self.gone => None,
        };
        if let Some(answered) = answered {
            return answered.map(|response| (response, Some(self)));
        }
        // A request that enters the connection's queue just as its reader goes is nobody's, and would be waited for as
        // long as the queue's other end is held: tokio frees what is left in it with the last of its ends.
        drop(self);
        answer.await.map(|response| (response, None))
    }
}

impl Lane {
    fn unused(&self, protocol: Protocol) -> Option<Connection> {
        match protocol {
            Protocol::Http => self.take_idle().map(Connection::Http1),
            Protocol::H2c => self.share().map(Connection::Http2),
        }
    }

    /// The newest that is ready: the others may grow old and be closed.
    fn take_idle(&self) -> Option<Exclusive> {
        let mut idle = lock(&self.idle);
        for place in (0..idle.len()).rev() {
            let sender = &idle[place].connection.sender;
            if sender.is_ready() {
                return Some(idle.remove(place).connection);
            }
            if sender.is_closed() {
                idle.remove(place);
            }
        }
        None
    }

    fn share(&self) -> Option<http2::SendRequest<Upload>> {
        let mut shared = lock(&self.shared);
        shared.take_if(|shared| shared.sender.is_closed());
        let shared = shared.as_mut()?;
        shared.used = Instant::now();
        Some(shared.sender.clone())
    }
}

impl Lease {
    /// Response and connection part ways: it may carry another request. It may not be ready at once, when the request's
    /// own body is still on its way; then it is passed over until it is.
    pub(crate) fn give_back(self) {
        let Self { connection, route, lane } = self;
        let mut idle = lock(&route.lanes[lane].idle);
        // Asked under the lock that retiring takes to clear the lane, after it has made the answer no.
        if connection.sender.is_closed() || !route.is_live() || idle.len() >= MAX_IDLE_PER_LANE {
            return;
        }
        if let Some(place) = Place::take(&route.pool) {
            idle.push(Idle { connection, since: Instant::now(), _place: place });
        }
    }

    /// The connection has become a tunnel, and counts for as long as that lasts.
    pub(crate) fn keep(self) -> Exclusive {
        self.connection
    }
}

impl Place {
    fn take(pool: &Arc<Pool>) -> Option<Self> {
        let before = pool.stats.idle_connections.fetch_add(1, Ordering::Relaxed);
        let place = Self(pool.clone());
        if before < pool.config.max_idle_connections as u64 {
            return Some(place);
        }
        pool.crowded.notify_one();
        None
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.stats.idle_connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A copy of a request that has no body and may be sent twice.
fn repeatable(request: &Request<Upload>) -> Option<Request<Upload>> {
    if !request.body().is_nothing() || !is_idempotent(request.method()) {
        return None;
    }
    let mut copy = Request::new(Upload::NOTHING);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    Some(copy)
}

/// The request, if it may be sent again: because it was never written, or because a second time does no harm.
fn unsent(
    mut error: TrySendError<Request<Upload>>,
    copy: Option<Request<Upload>>,
    used: bool,
) -> Result<Request<Upload>, SendError> {
    match error.take_message().or(copy) {
        Some(request) if used => Ok(request),
        Some(request) => Err(SendError::NotSent(Box::new(request), DialError::HungUp(error.into_error()))),
        None => Err(SendError::Lost(error.into_error())),
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
