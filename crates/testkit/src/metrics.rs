//! What a process tells Prometheus.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Every number, by its name.
pub(crate) async fn told(at: SocketAddr) -> BTreeMap<String, u64> {
    let mut stream = TcpStream::connect(at).await.expect("it tells");
    let request = b"GET /metrics HTTP/1.1\r\nhost: metrics\r\nconnection: close\r\n\r\n";
    stream.write_all(request).await.expect("it listens");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("it answers");
    let (_, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    let number = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    body.lines().filter(|line| !line.starts_with('#')).filter_map(number).collect()
}
