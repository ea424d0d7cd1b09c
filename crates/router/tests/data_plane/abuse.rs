//! Bytes from people who mean no good.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ate_router::RouterConfig;
use http::Response;
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::protocols::head;
use crate::support::*;

/// Sends bytes, and reads all that comes until the router hangs up.
async fn say(router: &Router, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn a_client_that_dawdles_over_its_head_is_cut_while_others_are_served() {
    let worker = Worker::tcp(whoami()).await;
    let config = RouterConfig { head_timeout: Duration::from_millis(500), ..RouterConfig::default() };
    let router = Router::with(Control::fixed([worker.host("a", 1)]), config).await;
    let mut busy = Client::connect(router.address).await;
    // Silent, in the middle of an HTTP/1.1 head, and in the middle of an HTTP/2 preface.
    for start in [&b""[..], b"GET / HTTP/1.1\r\nhost: a.spa", b"PRI * HTTP/2.0\r\n"] {
        let mut slow = TcpStream::connect(router.address).await.unwrap();
        slow.write_all(start).await.unwrap();
        busy.get("a", "/").await.is(200, "a 1");
        let (mut reading, mut writing) = slow.split();
        // A byte now and then buys no time.
        let drip = async {
            while start.is_empty() || writing.write_all(b"x").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let mut rest = Vec::new();
        tokio::select! {
            _ = reading.read_to_end(&mut rest) => {}
            () = drip => {}
        }
        busy.get("a", "/").await.is(200, "a 1");
    }
}

#[tokio::test]
async fn garbage_is_answered_by_hanging_up() {
    let worker = Worker::tcp(whoami()).await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    let garbage: Vec<u8> = (0..4096u32).map(|number| u8::try_from(number * 31 % 256).unwrap()).collect();
    for bytes in [
        &garbage[..],
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nnonsense nonsense nonsense",
        b"\0\0\0\0",
    ] {
        let answer = say(&router, bytes).await;
        assert!(!answer.contains("200"), "{answer:?}");
        router.get("a", "/").await.is(200, "a 1");
    }
}

#[tokio::test]
async fn oversized_heads_are_refused() {
    let worker = Worker::tcp(whoami()).await;
    let config = RouterConfig { max_head_bytes: 16 << 10, ..RouterConfig::default() };
    let router = Router::with(Control::fixed([worker.host("a", 1)]), config).await;
    let wide = format!("GET / HTTP/1.1\r\nhost: a.space.localhost\r\nx: {}\r\n\r\n", "x".repeat(20 << 10));
    let many = format!("GET / HTTP/1.1\r\nhost: a.space.localhost\r\n{}\r\n", "x: y\r\n".repeat(200));
    for bytes in [wide, many] {
        let answer = say(&router, bytes.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    }
    let mut client = http2_client(router.address).await;
    let wide = http::Request::get("http://a.space.localhost/").header("x", "x".repeat(20 << 10)).body(empty()).unwrap();
    match client.send_request(wide).await {
        Ok(response) => assert_eq!(response.status(), 431),
        Err(error) => assert!(!error.is_closed(), "{error}"),
    }
    router.get("a", "/").await.is(200, "a 1");
}

#[tokio::test]
async fn a_workload_cannot_make_the_router_hold_a_head_of_any_size() {
    let wide = |_| async { Ok(Response::builder().header("x", "x".repeat(200 << 10)).body(empty()).unwrap()) };
    let worker = Worker::tcp(workload(wide)).await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    router.get("a", "/").await.is(502, "actor \"a\" closed the connection before it answered");
}

/// Notes what it sees: method, path, body.
fn witness(seen: Arc<Mutex<Vec<String>>>) -> Workload {
    workload(move |visit| {
        let seen = seen.clone();
        async move {
            let (parts, incoming) = visit.request.into_parts();
            let lengths = (
                parts.headers.get_all("content-length").iter().count(),
                parts.headers.contains_key("transfer-encoding"),
            );
            let text = incoming.collect().await.map_err(|_| HangUp)?.to_bytes();
            let text = String::from_utf8_lossy(&text).into_owned();
            seen.lock().unwrap().push(format!("{} {} {text:?} {lengths:?}", parts.method, parts.uri));
            Ok(Response::new(body("seen")))
        }
    })
}

#[tokio::test]
async fn no_request_hides_in_another() {
    let hidden = "GET /hidden HTTP/1.1\r\nhost: a.space.localhost\r\n\r\n";
    let post = "POST /x HTTP/1.1\r\nhost: a.space.localhost\r\n";
    let cases = [
        // Both framings: the chunks count, the length goes, and the connection is not used again.
        (
            format!("{post}content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n{hidden}"),
            "HTTP/1.1 200",
            Some("POST /x \"abc\" (0, true)"),
        ),
        (format!("{post}content-length: 3\r\ncontent-length: 4\r\n\r\nabcd{hidden}"), "HTTP/1.1 400", None),
        (format!("{post}content-length: +3\r\n\r\nabc{hidden}"), "HTTP/1.1 400", None),
        (format!("{post}transfer-encoding: xchunked\r\n\r\n0\r\n\r\n{hidden}"), "HTTP/1.1 400", None),
        (format!("{post}transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n{hidden}"), "HTTP/1.1 400", None),
        (format!("{post}x: a\r\n folded\r\n\r\n{hidden}"), "HTTP/1.1 400", None),
        (format!("{post}transfer-encoding : chunked\r\n\r\n0\r\n\r\n{hidden}"), "HTTP/1.1 400", None),
        // A chunk that lies about its size ends the request, at both ends, without another being read out of it.
        (format!("{post}transfer-encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n{hidden}"), "", None),
        (format!("{post}transfer-encoding: chunked\r\n\r\nzz\r\n{hidden}"), "", None),
        (
            format!("GET / HTTP/1.1\r\nhost: a.space.localhost\r\nhost: b.space.localhost\r\n\r\n{hidden}"),
            "HTTP/1.1 400",
            None,
        ),
    ];
    for (bytes, status, expected) in cases {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let worker = Worker::tcp(witness(seen.clone())).await;
        let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
        let answer = say(&router, bytes.as_bytes()).await;
        assert!(answer.starts_with(status), "{bytes:?}\n{answer:?}");
        let seen = seen.lock().unwrap();
        assert_eq!(seen.iter().map(String::as_str).collect::<Vec<_>>(), Vec::from_iter(expected), "{bytes:?}");
    }
}

#[tokio::test]
async fn what_a_router_says_to_a_workload_is_framed_once() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let worker = Worker::tcp(witness(seen.clone())).await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    // The length is called this hop's: it is this hop's, and the next one has its own.
    let sly = b"POST /x HTTP/1.1\r\nhost: a.space.localhost\r\nconnection: content-length, close\r\ncontent-length: 3\r\n\r\nabc";
    let answer = say(&router, sly).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(*seen.lock().unwrap(), ["POST /x \"abc\" (1, false)"]);
}

#[tokio::test]
async fn connections_beyond_the_limit_wait_their_turn() {
    let worker = Worker::tcp(whoami()).await;
    let config = RouterConfig { max_connections: 1, ..RouterConfig::default() };
    let router = Router::with(Control::fixed([worker.host("a", 1)]), config).await;
    let mut first = Client::connect(router.address).await;
    first.get("a", "/").await.is(200, "a 1");
    let mut second = TcpStream::connect(router.address).await.unwrap();
    second.write_all(b"GET / HTTP/1.1\r\nhost: a.space.localhost\r\n\r\n").await.unwrap();
    first.get("a", "/").await.is(200, "a 1");
    assert_eq!(second.try_read(&mut [0; 1]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    drop(first);
    assert!(head(&mut second).await.starts_with("HTTP/1.1 200 OK"));
}
