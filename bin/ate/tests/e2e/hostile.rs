//! Garbage, slow and oversized input: an error, bounded memory, and nobody else notices.

use std::time::Duration;

use ate_proto::ate::v1::ApplyRequest;
use ate_sys::SocketPath;
use ate_testkit::Machine;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use crate::ATE;

/// What a process keeps in memory, in bytes; not what it has mapped of files.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a size");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

/// More than this beyond what it began with would be a client's doing.
const BOUND: u64 = 64 << 20;

#[tokio::test]
async fn the_router_survives_what_clients_send() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    machine.count("space", "a").await;
    let before = resident(machine.pid());
    let host = "Host: a.space.localhost\r\n";
    let long = "x".repeat(1 << 20);
    let many: String = (0..20_000).map(|n| format!("h{n}: v\r\n")).collect();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![0; 4096], "400"),
        ((0..=255).cycle().take(1 << 16).collect(), "400"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "4"),
        (format!("GET / HTTP/1.1\r\n{host}{host}\r\n").into(), "4"),
        (format!("GET / HTTP/1.1\r\n{host}X: {long}\r\n\r\n").into(), "431"),
        (format!("GET /{long} HTTP/1.1\r\n{host}\r\n").into(), "4"),
        (format!("GET / HTTP/1.1\r\n{host}{many}\r\n").into(), "431"),
        (format!("POST / HTTP/1.1\r\n{host}Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello").into(), "400"),
        (format!("POST / HTTP/1.1\r\n{host}Content-Length: -1\r\n\r\n").into(), "400"),
        (
            format!("POST /echo HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n")
                .into(),
            "",
        ),
        (b"GET / HTTP/1.1\r\nHost: ../../etc.space.localhost\r\nConnection: close\r\n\r\n".to_vec(), "4"),
        (b"GET / HTTP/1.1\r\nHost: nobody.space.localhost\r\nConnection: close\r\n\r\n".to_vec(), "404"),
        (b"GET / HTTP/1.1\r\nHost: a.space.localhost.evil.test\r\nConnection: close\r\n\r\n".to_vec(), "4"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff".to_vec(), ""),
    ];
    for (bytes, status) in cases {
        let mut stream = machine.connect().await;
        // It may answer, and close, before it has read everything.
        let _ = stream.write_all(&bytes).await;
        let sent = String::from_utf8_lossy(&bytes[..bytes.len().min(80)]).into_owned();
        let mut answer = Vec::new();
        let head = async {
            while let Ok(byte) = stream.read_u8().await {
                answer.push(byte);
                if answer.ends_with(b"\r\n\r\n") {
                    return;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(60), head).await.unwrap_or_else(|_| panic!("no answer to {sent:?}"));
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || status.is_empty() || answer[9..].starts_with(status), "{sent:?}: {answer:.200}");
    }
    // Two lengths for one body: it is read in chunks, and what follows on this connection is nobody's request.
    let mut stream = machine.connect().await;
    let two = format!("POST /echo HTTP/1.1\r\n{host}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n");
    let smuggled = format!("POST / HTTP/1.1\r\n{host}Content-Length: 0\r\n\r\n");
    stream.write_all(format!("{two}{smuggled}").as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    let answer = String::from_utf8_lossy(&answer);
    assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
    // Many that never finish, and one that reads nothing.
    let mut slow = Vec::new();
    for _ in 0..500 {
        let mut stream = machine.connect().await;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a.spa").await.expect("sent");
        slow.push(stream);
    }
    let mut deaf = machine.connect().await;
    deaf.write_all(format!("GET /stream?n=1000000 HTTP/1.1\r\n{host}\r\n").as_bytes()).await.expect("sent");
    for _ in 0..20 {
        assert_eq!(machine.get("space", "a", "/peek").await.0, 200);
    }
    let grown = resident(machine.pid()).saturating_sub(before);
    assert!(grown < BOUND, "the server has grown by {grown} bytes");
    drop((slow, deaf));
    assert_eq!(machine.count("space", "a").await.memory, 2);
    machine.stop().await;
}

#[tokio::test]
async fn the_api_survives_what_clients_send() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    let before = resident(machine.pid());
    let garbage: Vec<u8> = (0..=255).cycle().take(1 << 16).collect();
    for _ in 0..20 {
        let mut tls = TcpStream::connect(machine.api()).await.expect("it takes connections");
        let _ = tls.write_all(&garbage).await;
        let _ = tls.read_to_end(&mut Vec::new()).await;
        let mut socket = UnixStream::connect(SocketPath::of(&machine.data().join("api.sock")).expect("there").path())
            .await
            .expect("it takes connections");
        let _ = socket.write_all(&garbage).await;
        let _ = socket.read_to_end(&mut Vec::new()).await;
    }
    // Handshakes that never come.
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(TcpStream::connect(machine.api()).await.expect("it takes connections"));
    }
    let deep = format!("a: {}{}", "[".repeat(100_000), "]".repeat(100_000));
    let bomb: String = std::iter::once("a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned())
        .chain((1..12).map(|n| format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 9].join(", "))))
        .collect();
    let long = format!("metadata: {{name: {}}}", "x".repeat(7 << 20));
    let huge = "x".repeat(9 << 20);
    let unknown = "apiVersion: ate.dev/v1alpha1\nkind: WorkerPool\nmetadata: {name: p, namespace: demo}\nspec: {replicas: 1, replica: 2}\n";
    let kind = "apiVersion: ate.dev/v1alpha1\nkind: Nonsense\nmetadata: {name: p}\n";
    let mistyped = "apiVersion: ate.dev/v1alpha1\nkind: WorkerPool\nmetadata: {name: p, namespace: demo}\nspec: {replicas: many}\n";
    for document in [&deep, &bomb, &long, &huge, unknown, kind, mistyped, "\u{0}", "- - -", ": : :", "{"] {
        let request = ApplyRequest { documents: vec![document.to_owned()], dry_run: false };
        let refused = machine.substrate().apply(request).await;
        let begins: String = document.chars().take(60).collect();
        let error = refused.expect_err(&begins);
        assert!(error.message().len() < 64 << 10, "{begins}: an error of {} bytes", error.message().len());
    }
    // A file is refused as a whole, by name, line and field.
    let file = machine.directory().join("two.yaml");
    let good = ate_testkit::pool("good", 1, "");
    std::fs::write(&file, format!("{good}---\n{unknown}")).expect("written");
    let said = machine.cli(&["apply", "-f", &file.display().to_string()]).await;
    assert!(said.code != 0 && said.stderr.contains("two.yaml") && said.stderr.contains("spec.replica"), "{said:?}");
    assert!(said.stderr.contains("two.yaml:12:21"), "the line is named: {said:?}");
    let listed = machine.ate(&["get", "workerpools", "-n", "demo", "-o", "name"]).await;
    assert!(!listed.contains("good"), "nothing of the file was applied: {listed}");
    let grown = resident(machine.pid()).saturating_sub(before);
    assert!(grown < BOUND, "the server has grown by {grown} bytes");
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 1);
    drop(silent);
    machine.stop().await;
}
