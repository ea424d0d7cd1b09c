//! HTTP/2, gRPC, trailers, upgrades.

use std::sync::atomic::Ordering;

use ate_router::{Protocol, Update};
use bytes::Bytes;
use futures::future::join_all;
use http::{HeaderMap, Response, Version};
use http_body::Frame;
use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy, split};
use tokio::net::TcpStream;

use crate::support::*;

/// Says each message back as it comes, and ends with a status in the trailers.
fn grpc() -> Workload {
    workload(|visit| async move {
        assert_eq!(visit.request.version(), Version::HTTP_2);
        assert_eq!(visit.request.headers()["te"], "trailers");
        assert_eq!(visit.request.uri().authority().unwrap(), "a.space.localhost");
        let (sender, echoed) = piped();
        tokio::spawn(async move {
            let mut incoming = visit.request.into_body();
            while let Some(Ok(frame)) = incoming.frame().await {
                sender.send(Ok(frame)).await.ok()?;
            }
            let mut status = HeaderMap::new();
            status.insert("grpc-status", "0".parse().unwrap());
            sender.send(Ok(Frame::trailers(status))).await.ok()
        });
        Ok(Response::builder().header("content-type", "application/grpc").body(echoed).unwrap())
    })
}

#[tokio::test]
async fn grpc_talks_both_ways_and_ends_with_trailers() {
    let (worker, other) = (Worker::tcp(grpc()).await, Worker::tcp(whoami()).await);
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    let (sender, messages) = piped();
    let call = http::Request::post("http://a.space.localhost/demo.Echo/Talk")
        .header("content-type", "application/grpc+proto")
        .header("te", "trailers")
        .body(messages)
        .unwrap();
    let mut client = http2_client(router.address).await;
    let mut answer = client.send_request(call).await.unwrap().into_body();
    for message in ["one", "two"] {
        sender.send(Ok(Frame::data(Bytes::from(message)))).await.unwrap();
        assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), message);
        // A call under way is the worker's to end, wherever the next one goes.
        router.tell(Update::Assigned(other.host("a", 2))).await;
    }
    drop(sender);
    let trailers = answer.frame().await.unwrap().unwrap().into_trailers().unwrap();
    assert_eq!(trailers["grpc-status"], "0");
    assert!(answer.frame().await.is_none());
    until("its connection is closed", || worker.open.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn calls_share_one_connection_to_the_worker_however_they_arrive() {
    let version = |visit: Visit| async move { Ok(Response::new(body(format!("{:?}", visit.request.version())))) };
    let worker = Worker::tcp(workload(version)).await;
    let mut actor = assignment("a", 1, &worker.endpoint);
    actor.ports = vec![port(80, Protocol::H2c)];
    let router = Router::start(Control::fixed([worker.take_in(actor)])).await;
    let answers = join_all((0..50).map(|_| router.get("a", "/"))).await;
    answers.iter().for_each(|answer| answer.is(200, "HTTP/2.0"));
    assert_eq!(worker.accepted.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_closed_shared_connection_is_replaced() {
    let worker = Worker::tcp(whoami()).await;
    let mut actor = assignment("a", 1, &worker.endpoint);
    actor.ports = vec![port(80, Protocol::H2c)];
    let control = Control::fixed([worker.take_in(actor.clone())]);
    let router = Router::start(control.clone()).await;
    for _ in 0..20 {
        router.get("a", "/").await.is(200, "a 1");
        worker.take_in(actor.clone());
    }
    assert_eq!(control.count(), 1);
}

#[tokio::test]
async fn trailers_pass_over_http1_as_well() {
    let trailing = |_| async {
        let (sender, trailing) = piped();
        tokio::spawn(async move {
            sender.send(Ok(Frame::data(Bytes::from("data")))).await.ok()?;
            let mut trailers = HeaderMap::new();
            trailers.insert("x-checksum", "42".parse().unwrap());
            sender.send(Ok(Frame::trailers(trailers))).await.ok()
        });
        Ok(Response::builder().header("trailer", "x-checksum").body(trailing).unwrap())
    };
    let worker = Worker::tcp(workload(trailing)).await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    let mut client = Client::connect(router.address).await;
    let wanted = request("GET", "a", "/").header("te", "trailers").body(empty()).unwrap();
    let collected = client.send(wanted).await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(collected.trailers().unwrap()["x-checksum"], "42");
    assert_eq!(collected.to_bytes(), "data");
    client.get("a", "/").await.is(200, "data");
    assert_eq!(worker.accepted.load(Ordering::SeqCst), 1, "trailers end a response like any other");
}

/// Switches to a protocol that says everything back, if asked for it by name.
pub fn switching() -> Workload {
    workload(|mut visit| async move {
        if visit.request.headers().get("upgrade").is_none_or(|protocol| protocol != "websocket") {
            return Ok(Response::builder().status(426).body(body("websocket only")).unwrap());
        }
        assert_eq!(visit.request.headers()["sec-websocket-key"], "k");
        let upgrade = hyper::upgrade::on(&mut visit.request);
        tokio::spawn(async move {
            let (mut reading, mut writing) = split(TokioIo::new(upgrade.await.ok()?));
            copy(&mut reading, &mut writing).await.ok()?;
            writing.shutdown().await.ok()
        });
        let switch = Response::builder().status(101).header("connection", "upgrade").header("upgrade", "websocket");
        Ok(switch.header("sec-websocket-accept", "s").body(empty()).unwrap())
    })
}

/// Reads a response head.
pub async fn head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

pub async fn websocket(router: &Router) -> TcpStream {
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    let ask = "GET /ws HTTP/1.1\r\nhost: a.space.localhost\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: k\r\n\r\nearly";
    stream.write_all(ask.as_bytes()).await.unwrap();
    let head = head(&mut stream).await;
    assert!(head.starts_with("HTTP/1.1 101 Switching Protocols\r\n"), "{head}");
    for line in ["\r\nupgrade: websocket\r\n", "\r\nconnection: upgrade\r\n", "\r\nsec-websocket-accept: s\r\n"] {
        assert!(head.contains(line), "{head}");
    }
    let mut early = [0; 5];
    stream.read_exact(&mut early).await.unwrap();
    assert_eq!(&early, b"early", "what came before the switch is not lost");
    stream
}

#[tokio::test]
async fn a_websocket_is_a_pipe_in_both_directions() {
    let worker = Worker::tcp(switching()).await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    let mut stream = websocket(&router).await;
    for message in [&b"ping"[..], &[0x81; 100_000]] {
        let mut back = vec![0; message.len()];
        let (mut reading, mut writing) = stream.split();
        let (sent, read) = tokio::join!(writing.write_all(message), reading.read_exact(&mut back));
        sent.unwrap();
        read.unwrap();
        assert_eq!(back, message);
    }
    stream.shutdown().await.unwrap();
    assert_eq!(stream.read_to_end(&mut Vec::new()).await.unwrap(), 0, "closing one end closes the other");
}

#[tokio::test]
async fn an_upgrade_that_is_declined_is_an_ordinary_answer() {
    let worker = Worker::tcp(switching()).await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    let mut client = Client::connect(router.address).await;
    let other =
        request("GET", "a", "/").header("connection", "upgrade").header("upgrade", "chat").body(empty()).unwrap();
    client.answer(other).await.is(426, "websocket only");
    client.get("a", "/").await.is(426, "websocket only");
    assert_eq!(worker.accepted.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_switch_nobody_asked_for_is_an_error() {
    let unasked = |_| async {
        Ok(Response::builder()
            .status(101)
            .header("connection", "upgrade")
            .header("upgrade", "x")
            .body(empty())
            .unwrap())
    };
    let worker = Worker::tcp(workload(unasked)).await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    router.get("a", "/").await.is(502, "actor \"a\" closed the connection before it answered");
}
