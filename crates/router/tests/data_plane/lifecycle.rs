//! Idle clients, shutting down, and what is left in the logs.

use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ate_router::{ActivateError, RouterConfig};
use http::Response;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::protocols::{head, switching, websocket};
use crate::support::*;

/// A workload that answers when told, and how to tell it, and how to know that it was asked.
fn gated() -> (Arc<Semaphore>, Arc<Semaphore>, Workload) {
    let (gate, asked) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let (held, notice) = (gate.clone(), asked.clone());
    let workload = workload(move |_| {
        let (held, notice) = (held.clone(), notice.clone());
        async move {
            notice.add_permits(1);
            held.acquire().await.unwrap().forget();
            Ok(Response::new(body("done")))
        }
    });
    (gate, asked, workload)
}

#[tokio::test]
async fn shutting_down_finishes_what_is_in_flight_and_takes_nothing_new() {
    let (gate, asked, workload) = gated();
    let worker = Worker::tcp(workload).await;
    let mut router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    let mut idle = TcpStream::connect(router.address).await.unwrap();
    let mut client = Client::connect(router.address).await;
    let finish = async {
        asked.acquire().await.unwrap().forget();
        router.shutdown.cancel();
        assert_eq!(idle.read(&mut [0; 1]).await.unwrap(), 0, "idle connections are closed at once");
        assert!(TcpStream::connect(router.address).await.is_err(), "nobody listens");
        gate.add_permits(1);
    };
    let (answer, ()) = tokio::join!(client.get("a", "/"), finish);
    answer.is(200, "done");
    (&mut router.serving).await.unwrap();
    until("nothing is left open", || worker.open.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn a_parked_request_is_served_in_the_grace() {
    let worker = Worker::tcp(whoami()).await;
    let (gate, actor) = (Arc::new(Semaphore::new(0)), worker.host("a", 1));
    let held = gate.clone();
    let control = Control::new(move |_, _| {
        let (held, actor) = (held.clone(), actor.clone());
        async move {
            held.acquire().await.unwrap().forget();
            Ok(actor)
        }
    });
    let router = Router::start(control).await;
    let wake = async {
        until("parked", || router.stats.parked.load(Ordering::SeqCst) == 1).await;
        router.shutdown.cancel();
        gate.add_permits(1);
    };
    let (answer, ()) = tokio::join!(router.get("a", "/"), wake);
    answer.is(200, "a 1");
}

#[tokio::test]
async fn after_the_grace_everything_is_cut() {
    let (_gate, asked, stuck) = gated();
    let (worker, talker) = (Worker::tcp(stuck).await, Worker::tcp(switching()).await);
    let config = RouterConfig { shutdown_grace: Duration::from_millis(20), ..RouterConfig::default() };
    let mut router = Router::with(Control::fixed([worker.host("b", 1), talker.host("a", 1)]), config).await;
    let mut tunnel = websocket(&router).await;
    let mut waiting = TcpStream::connect(router.address).await.unwrap();
    waiting.write_all(b"GET / HTTP/1.1\r\nhost: b.space.localhost\r\n\r\n").await.unwrap();
    asked.acquire().await.unwrap().forget();

    router.shutdown.cancel();
    (&mut router.serving).await.unwrap();
    let mut rest = Vec::new();
    let _ = waiting.read_to_end(&mut rest).await;
    let _ = tunnel.read_to_end(&mut rest).await;
    assert!(rest.is_empty());
    until("nothing is left open", || {
        worker.open.load(Ordering::SeqCst) == 0 && talker.open.load(Ordering::SeqCst) == 0
    })
    .await;
}

#[tokio::test]
async fn a_client_without_requests_is_closed_after_a_while() {
    let worker = Worker::tcp(whoami()).await;
    let brief = Duration::from_millis(500);
    let config = RouterConfig { head_timeout: brief, client_idle_timeout: brief, ..RouterConfig::default() };
    let router = Router::with(Control::fixed([worker.host("a", 1)]), config).await;
    let mut client = TcpStream::connect(router.address).await.unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nhost: a.space.localhost\r\n\r\n").await.unwrap();
    assert!(head(&mut client).await.starts_with("HTTP/1.1 200 OK"));
    let mut rest = String::new();
    client.read_to_string(&mut rest).await.unwrap();
    assert_eq!(rest, "a 1");

    let mut http2 = http2_client(router.address).await;
    let get = || http::Request::get("http://a.space.localhost/").body(empty()).unwrap();
    assert_eq!(http2.send_request(get()).await.unwrap().status(), 200);
    until("the HTTP/2 connection is closed", || http2.is_closed()).await;
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn logs_hold_no_header_values_and_no_query_strings() {
    let log = Log::default();
    let writer = log.clone();
    let filter = tracing_subscriber::EnvFilter::new("ate_router=trace,ate_preface=trace");
    let subscriber =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(move || writer.clone()).with_ansi(false).finish();
    let _guard = tracing::subscriber::set_default(subscriber);

    let hang_up = workload(|visit: Visit| async move {
        if visit.request.method() == "POST" { Err(HangUp) } else { Ok(Response::new(body("ok"))) }
    });
    let worker = Worker::tcp(hang_up).await;
    let actor = worker.host("a", 1);
    let control = Control::new(move |key, _| {
        let answer = if key.name.as_str() == "a" { Ok(actor.clone()) } else { Err(ActivateError::Internal) };
        async move { answer }
    });
    let router = Router::start(control).await;
    for (method, name, status) in
        [("GET", "a", 200), ("POST", "a", 502), ("GET", "b", 500), ("GET", "secret-host.x", 404)]
    {
        let request = request(method, name, "/path?token=secret-query").header("authorization", "secret-header");
        let answer = Client::connect(router.address).await.answer(request.body(empty()).unwrap()).await;
        assert_eq!(answer.status.as_u16(), status);
    }
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(text.contains("connection to worker lost") && text.contains("activation failed"), "{text}");
    assert!(!text.contains("secret"), "{text}");
}
