//! Requests that wait.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ate_name::ActorKey;
use ate_router::{ActivateError, Assignment, RouterConfig};
use futures::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::support::*;

/// Answers after as many permits as there are calls.
fn gated(answer: impl Fn(&ActorKey) -> Assignment + Send + Sync + 'static) -> (Arc<Semaphore>, Arc<Control>) {
    let gate = Arc::new(Semaphore::new(0));
    let held = gate.clone();
    let control = Control::new(move |key, _| {
        let (held, answer) = (held.clone(), answer(&key));
        async move {
            held.acquire().await.unwrap().forget();
            Ok(answer)
        }
    });
    (gate, control)
}

async fn parked(router: &Router, count: u64) {
    until("parked", || router.stats.parked.load(Ordering::SeqCst) == count).await;
}

#[tokio::test]
async fn however_many_wait_one_activation_runs() {
    let worker = Worker::tcp(whoami()).await;
    let actor = worker.host("a", 1);
    let (gate, control) = gated(move |_| actor.clone());
    let router = Router::start(control.clone()).await;
    let requests = async { join_all((0..200).map(|_| router.get("a", "/"))).await };
    let open = async {
        parked(&router, 200).await;
        gate.add_permits(200);
    };
    let (answers, ()) = tokio::join!(requests, open);
    answers.iter().for_each(|answer| answer.is(200, "a 1"));
    assert_eq!(control.count(), 1);
    assert_eq!(router.stats.parked.load(Ordering::SeqCst), 0);
    assert_eq!(router.stats.parked_bytes.load(Ordering::SeqCst), 0);
    let routed = router.stats.routed();
    assert_eq!((routed.len(), routed[0].1.count()), (1, 200));
}

#[tokio::test]
async fn who_leaves_does_not_cancel_it_for_those_who_stay() {
    let worker = Worker::tcp(whoami()).await;
    let actor = worker.host("a", 1);
    let (gate, control) = gated(move |_| actor.clone());
    let router = Router::start(control.clone()).await;
    let mut leaver = TcpStream::connect(router.address).await.unwrap();
    leaver.write_all(b"GET / HTTP/1.1\r\nhost: a.space.localhost\r\n\r\n").await.unwrap();
    parked(&router, 1).await;
    drop(leaver);
    parked(&router, 0).await;
    assert_eq!(router.stats.cancelled.count(), 1);

    let open = async {
        parked(&router, 1).await;
        gate.add_permits(1);
    };
    let (answer, ()) = tokio::join!(router.get("a", "/"), open);
    answer.is(200, "a 1");
    assert_eq!(control.count(), 1);
}

#[tokio::test]
async fn one_request_too_many_is_told_to_come_back() {
    let worker = Worker::tcp(whoami()).await;
    let (gate, control) = gated({
        let worker = worker.clone();
        move |_| worker.host("a", 1)
    });
    let router = Router::with(control, RouterConfig { max_parked: 3, ..RouterConfig::default() }).await;
    let waiting = async { join_all((0..3).map(|_| router.get("a", "/"))).await };
    let surplus = async {
        parked(&router, 3).await;
        let answer = router.get("a", "/").await;
        answer.is(503, "actor \"a\" unavailable: too many requests are waiting");
        assert_eq!(answer.header("retry-after"), Some("1"));
        gate.add_permits(1);
    };
    let (answers, ()) = tokio::join!(waiting, surplus);
    answers.iter().for_each(|answer| answer.is(200, "a 1"));
    assert_eq!(router.stats.park_refusals.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn heads_that_wait_are_bounded_by_their_bytes() {
    let worker = Worker::tcp(whoami()).await;
    let config = RouterConfig { max_parked_bytes: 4 << 10, ..RouterConfig::default() };
    let router = Router::with(Control::fixed([worker.host("a", 1)]), config).await;
    let mut client = Client::connect(router.address).await;
    let large = request("GET", "a", "/").header("x-large", "x".repeat(5 << 10)).body(empty()).unwrap();
    client.answer(large).await.is(503, "actor \"a\" unavailable: too many requests are waiting");
    client.get("a", "/").await.is(200, "a 1");
}

#[tokio::test]
async fn abandoned_activations_are_bounded_too() {
    let (_gate, control) =
        gated(|key| assignment(key.name.as_str(), 1, &ate_router::Endpoint::Unix("/nowhere".into())));
    let router = Router::with(control.clone(), RouterConfig { max_parked: 2, ..RouterConfig::default() }).await;
    for name in ["a", "b"] {
        let mut leaver = TcpStream::connect(router.address).await.unwrap();
        leaver.write_all(format!("GET / HTTP/1.1\r\nhost: {}\r\n\r\n", host(name)).as_bytes()).await.unwrap();
        parked(&router, 1).await;
        drop(leaver);
        parked(&router, 0).await;
    }
    router.get("c", "/").await.is(503, "actor \"c\" unavailable: too many requests are waiting");
    assert_eq!(control.count(), 2);
}

#[tokio::test]
async fn a_wait_ends_at_its_deadline() {
    let control = Control::new(|_, _| std::future::pending::<Result<Assignment, ActivateError>>());
    let config = RouterConfig { park_timeout: Duration::from_millis(50), ..RouterConfig::default() };
    let router = Router::with(control, config).await;
    let answer = router.get("a", "/").await;
    answer.is(504, "actor \"a\" request timed out");
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(router.stats.cancelled.count(), 1);
}

#[tokio::test]
async fn an_activator_that_panics_blocks_nobody_after() {
    let worker = Worker::tcp(whoami()).await;
    let (actor, calm) = (worker.host("a", 1), std::sync::atomic::AtomicBool::new(false));
    let control = Control::new(move |_, _| {
        let (actor, calm) = (actor.clone(), calm.swap(true, Ordering::SeqCst));
        async move { if calm { Ok(actor) } else { panic!("on purpose") } }
    });
    let router = Router::start(control).await;
    router.get("a", "/").await.is(500, "error resuming actor \"a\"");
    router.get("a", "/").await.is(200, "a 1");
}

#[tokio::test]
async fn a_body_is_not_read_while_its_request_waits() {
    const SIZE: usize = 64 << 20;
    let count = |visit: Visit| async move {
        let mut incoming = visit.request.into_body();
        let mut total = 0;
        while let Some(frame) = http_body_util::BodyExt::frame(&mut incoming).await {
            total += frame.map_err(|_| HangUp)?.data_ref().map_or(0, bytes::Bytes::len);
        }
        Ok(http::Response::new(body(total.to_string())))
    };
    let worker = Worker::tcp(workload(count)).await;
    let actor = worker.host("a", 1);
    let (gate, control) = gated(move |_| actor.clone());
    let router = Router::start(control).await;

    let mut client = TcpStream::connect(router.address).await.unwrap();
    let head = format!(
        "POST / HTTP/1.1\r\nhost: {}\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: {SIZE}\r\n\r\n",
        host("a")
    );
    client.write_all(head.as_bytes()).await.unwrap();
    parked(&router, 1).await;
    let mut early = [0; 64];
    assert_eq!(client.try_read(&mut early).unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "no 100 Continue yet");
    // Sent all the same, the body fills the sockets' buffers and no more.
    let (chunk, mut sent) = (vec![b'x'; 1 << 20], 0);
    loop {
        match client.try_write(&chunk[..chunk.len().min(SIZE - sent)]) {
            Ok(written) => sent += written,
            Err(_) if tokio::time::timeout(Duration::from_millis(200), client.writable()).await.is_err() => break,
            Err(_) => {}
        }
        assert!(sent < SIZE, "somebody read the body");
    }

    gate.add_permits(1);
    let (mut reading, mut writing) = client.split();
    let rest = async {
        while sent < SIZE {
            sent += writing.write(&chunk[..chunk.len().min(SIZE - sent)]).await.unwrap();
        }
    };
    let mut answer = String::new();
    let (read, ()) = tokio::join!(reading.read_to_string(&mut answer), rest);
    read.unwrap();
    assert!(answer.starts_with("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.ends_with(&format!("\r\n\r\n{SIZE}")), "{answer}");
}
