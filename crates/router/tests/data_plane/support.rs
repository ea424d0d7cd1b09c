//! A worker, an activator, a running router and a client, each as small as the tests allow.

use std::collections::HashMap;
use std::convert::Infallible;
pub use std::fmt::Error as HangUp;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use ate_name::{ActorKey, ActorUid, Generation, ObjectKey};
use ate_preface::Verdict;
use ate_router::{ActivateError, Activator, Assignment, Endpoint, Port, Protocol, RouterConfig, Stats, Update, serve};
use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub type Body = UnsyncBoxBody<Bytes, Infallible>;

pub fn body(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).boxed_unsync()
}

pub fn empty() -> Body {
    Empty::new().boxed_unsync()
}

pub fn key(name: &str) -> ActorKey {
    ActorKey::parse("space", name).unwrap()
}

pub fn host(name: &str) -> String {
    format!("{name}.space.localhost")
}

/// An actor of this name at this generation, wherever; its uid follows from its name.
pub fn assignment(name: &str, generation: u64, endpoint: &Endpoint) -> Assignment {
    let mut uid = [0; 16];
    uid[..name.len().min(16)].copy_from_slice(&name.as_bytes()[..name.len().min(16)]);
    Assignment {
        key: key(name),
        uid: ActorUid::from_random(uid),
        generation: Generation::new(generation),
        endpoint: endpoint.clone(),
        ports: vec![port(80, Protocol::Http)],
        template: ObjectKey::new("demo", "template"),
    }
}

pub fn port(number: u16, protocol: Protocol) -> Port {
    Port { number, protocol }
}

/// Waits for something to become true. There is no event to wait for in what another task counts.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// What a workload is to a request: the request, and whom it reached.
pub struct Visit {
    pub request: Request<Incoming>,
    pub actor: Assignment,
    pub port: u16,
    /// How many requests came before it on its connection.
    pub earlier: u64,
}

/// `Err` hangs up without an answer.
pub type Workload = Arc<dyn Fn(Visit) -> BoxFuture<'static, Result<Response<Body>, HangUp>> + Send + Sync>;

pub fn workload<F>(handler: impl Fn(Visit) -> F + Send + Sync + 'static) -> Workload
where
    F: Future<Output = Result<Response<Body>, HangUp>> + Send + 'static,
{
    Arc::new(move |visit| Box::pin(handler(visit)))
}

/// Answers with the name and generation of the actor that was reached.
pub fn whoami() -> Workload {
    workload(
        |visit| async move { Ok(Response::new(body(format!("{} {}", visit.actor.key.name, visit.actor.generation)))) },
    )
}

struct Hosted {
    actor: Assignment,
    /// Cuts its connections, as the end of a sandbox does.
    end: CancellationToken,
}

/// Hosts at most one actor, and answers prefaces by that alone.
pub struct Worker {
    pub endpoint: Endpoint,
    hosted: Mutex<Option<Hosted>>,
    workload: Workload,
    /// Instead of accepting.
    pub refuse: Mutex<Option<Verdict>>,
    /// Connections accepted, and those of them still open.
    pub accepted: AtomicU64,
    pub open: AtomicU64,
}

impl Worker {
    pub async fn tcp(workload: Workload) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let worker = Self::new(Endpoint::Tcp(listener.local_addr().unwrap()), workload);
        let this = worker.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(this.clone().converse(stream));
            }
        });
        worker
    }

    pub async fn unix(path: &Path, workload: Workload) -> Arc<Self> {
        let listener = UnixListener::bind(path).unwrap();
        let worker = Self::new(Endpoint::Unix(path.into()), workload);
        let this = worker.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(this.clone().converse(stream));
            }
        });
        worker
    }

    fn new(endpoint: Endpoint, workload: Workload) -> Arc<Self> {
        let (accepted, open) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { endpoint, workload, hosted: Mutex::default(), refuse: Mutex::default(), accepted, open })
    }

    /// Hosts this actor from now on, and nobody else: whoever was here is gone, connections and all.
    pub fn host(&self, name: &str, generation: u64) -> Assignment {
        self.take_in(assignment(name, generation, &self.endpoint))
    }

    pub fn take_in(&self, actor: Assignment) -> Assignment {
        let hosted = Hosted { actor: actor.clone(), end: CancellationToken::new() };
        if let Some(gone) = self.hosted.lock().unwrap().replace(hosted) {
            gone.end.cancel();
        }
        actor
    }

    async fn converse(self: Arc<Self>, mut stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let Ok(preface) = ate_preface::accept(&mut stream, Instant::now() + Duration::from_secs(60)).await else {
            return;
        };
        let hosted = {
            let hosted = self.hosted.lock().unwrap();
            let fits =
                |hosted: &&Hosted| (hosted.actor.uid, hosted.actor.generation) == (preface.uid, preface.generation);
            hosted.as_ref().filter(fits).map(|hosted| (hosted.actor.clone(), hosted.end.clone()))
        };
        let Some((actor, end)) = hosted else { return drop(Verdict::Stale.send(&mut stream).await) };
        let refusal = *self.refuse.lock().unwrap();
        if Verdict::send(refusal.unwrap_or(Verdict::Accepted), &mut stream).await.is_err() || refusal.is_some() {
            return;
        }
        self.accepted.fetch_add(1, Ordering::SeqCst);
        self.open.fetch_add(1, Ordering::SeqCst);
        let (served, workload, sandbox) = (AtomicU64::new(0), self.workload.clone(), end.clone());
        let service = service_fn(move |request| {
            let earlier = served.fetch_add(1, Ordering::SeqCst);
            let visit = Visit { request, actor: actor.clone(), port: preface.port, earlier };
            // A sandbox that has ended answers no one.
            let (answer, sandbox) = (workload(visit), sandbox.clone());
            async move { sandbox.run_until_cancelled_owned(answer).await.unwrap_or(Err(HangUp)) }
        });
        let builder = auto::Builder::new(TokioExecutor::new());
        tokio::select! {
            _ = builder.serve_connection_with_upgrades(TokioIo::new(stream), service) => {}
            () = end.cancelled() => {}
        }
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

type Act = dyn Fn(ActorKey, Option<Generation>) -> BoxFuture<'static, Result<Assignment, ActivateError>> + Send + Sync;

/// Does as it is told, and remembers what it was asked.
pub struct Control {
    act: Box<Act>,
    pub calls: Mutex<Vec<(ActorKey, Option<Generation>)>>,
}

impl Control {
    pub fn new<F>(act: impl Fn(ActorKey, Option<Generation>) -> F + Send + Sync + 'static) -> Arc<Self>
    where
        F: Future<Output = Result<Assignment, ActivateError>> + Send + 'static,
    {
        Arc::new(Self { act: Box::new(move |key, stale| Box::pin(act(key, stale))), calls: Mutex::default() })
    }

    /// Always the same answer, per actor.
    pub fn fixed(answers: impl IntoIterator<Item = Assignment>) -> Arc<Self> {
        let answers: HashMap<_, _> = answers.into_iter().map(|answer| (answer.key.clone(), answer)).collect();
        Self::new(move |key, _| {
            let answer = answers.get(&key).cloned().ok_or(ActivateError::NotFound);
            async move { answer }
        })
    }

    /// For routers that are not expected to ask.
    pub fn never() -> Arc<Self> {
        Self::fixed([])
    }

    pub fn count(&self) -> usize {
        self.calls.lock().unwrap().len()
    }
}

#[async_trait::async_trait]
impl Activator for Control {
    async fn activate(
        &self,
        key: &ActorKey,
        stale: Option<Generation>,
        _: Instant,
    ) -> Result<Assignment, ActivateError> {
        self.calls.lock().unwrap().push((key.clone(), stale));
        (self.act)(key.clone(), stale).await
    }
}

/// A running router.
pub struct Router {
    pub address: SocketAddr,
    pub stats: Arc<Stats>,
    pub shutdown: CancellationToken,
    pub serving: JoinHandle<()>,
    feed: mpsc::Sender<Update>,
}

impl Router {
    pub async fn start(control: Arc<Control>) -> Self {
        Self::with(control, RouterConfig::default()).await
    }

    pub async fn with(control: Arc<Control>, config: RouterConfig) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (feed, updates) = mpsc::channel(1);
        let (stats, shutdown) = (Arc::new(Stats::default()), CancellationToken::new());
        let serving = tokio::spawn(serve(vec![listener], config, control, updates, stats.clone(), shutdown.clone()));
        Self { address, stats, shutdown, serving, feed }
    }

    /// Returns when the update has been taken in: the channel holds one message, so that the second of the two that
    /// follow is not sent before the router has asked for more.
    pub async fn tell(&self, update: Update) {
        let nothing = || assignment("nobody", 0, &Endpoint::Unix("/nowhere".into()));
        self.feed.send(update).await.unwrap();
        for _ in 0..2 {
            let Assignment { key, uid, generation, .. } = nothing();
            self.feed.send(Update::Released { key, uid, generation }).await.unwrap();
        }
    }

    pub async fn get(&self, name: &str, path: &str) -> Answer {
        Client::connect(self.address).await.get(name, path).await
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl Answer {
    async fn of(response: Response<Incoming>) -> Self {
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        Self { status: parts.status, headers: parts.headers, text: String::from_utf8(bytes.into()).unwrap() }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    #[track_caller]
    pub fn is(&self, status: u16, text: &str) {
        assert_eq!((self.status.as_u16(), self.text.as_str()), (status, text));
    }
}

/// One HTTP/1.1 connection.
pub struct Client {
    pub sender: http1::SendRequest<Body>,
}

impl Client {
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        Self { sender }
    }

    pub async fn send(&mut self, request: Request<Body>) -> hyper::Result<Response<Incoming>> {
        self.sender.ready().await?;
        self.sender.send_request(request).await
    }

    pub async fn answer(&mut self, request: Request<Body>) -> Answer {
        Answer::of(self.send(request).await.unwrap()).await
    }

    pub async fn get(&mut self, name: &str, path: &str) -> Answer {
        self.answer(request("GET", name, path).body(empty()).unwrap()).await
    }
}

pub fn request(method: &str, name: &str, path: &str) -> http::request::Builder {
    Request::builder().method(method).uri(path).header("host", host(name))
}

/// One HTTP/2 connection.
pub async fn http2_client(address: SocketAddr) -> http2::SendRequest<Body> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

type Frame = Result<http_body::Frame<Bytes>, Infallible>;

/// A body fed by a channel.
struct Piped(mpsc::Receiver<Frame>);

pub fn piped() -> (mpsc::Sender<Frame>, Body) {
    let (sender, receiver) = mpsc::channel(1);
    (sender, Piped(receiver).boxed_unsync())
}

impl http_body::Body for Piped {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Frame>> {
        self.0.poll_recv(cx)
    }
}
