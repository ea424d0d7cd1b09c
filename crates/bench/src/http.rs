//! One GET, with the moments that matter. Raw sockets: nothing between the clock and the wire.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// An answer that takes longer is a failure, not a sample.
const PATIENCE: Duration = Duration::from_secs(30);

/// Largest answer taken; those of the benchmarks' servers are a few hundred bytes.
const MAX_ANSWER: usize = 64 << 10;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Answered {
    pub(crate) connected: Instant,
    pub(crate) first_byte: Instant,
    pub(crate) end: Instant,
}

/// A connection on which requests follow one another.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    host: String,
    connected: Instant,
}

impl Connection {
    pub(crate) async fn open(to: SocketAddr, host: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(to).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, host: host.to_owned(), connected: Instant::now() })
    }

    /// Anything but 200 is an error.
    pub(crate) async fn get(&mut self, path: &str) -> io::Result<Answered> {
        tokio::time::timeout(PATIENCE, self.exchange(path)).await.map_err(|_| io::ErrorKind::TimedOut)?
    }

    async fn exchange(&mut self, path: &str) -> io::Result<Answered> {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.host);
        self.stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::with_capacity(1024);
        let mut first_byte = None;
        loop {
            if self.stream.read_buf(&mut answer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            first_byte.get_or_insert_with(Instant::now);
            if answer_length(&answer).is_some_and(|length| answer.len() >= length) {
                break;
            }
            if answer.len() > MAX_ANSWER {
                return Err(io::Error::other("an answer that does not end"));
            }
        }
        if !answer.starts_with(b"HTTP/1.1 200 ") {
            return Err(io::Error::other(String::from_utf8_lossy(&answer).replace("\r\n", " ")));
        }
        let end = Instant::now();
        Ok(Answered { connected: self.connected, first_byte: first_byte.unwrap_or(end), end })
    }
}

/// Length of the whole answer, head included, once the head is there.
pub(crate) fn answer_length(answer: &[u8]) -> Option<usize> {
    let head = answer.windows(4).position(|window| window == b"\r\n\r\n")?;
    let text = std::str::from_utf8(&answer[..head]).ok()?;
    let length = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    Some(head + 4 + length.unwrap_or(0))
}

pub(crate) async fn get(to: SocketAddr, host: &str, path: &str) -> io::Result<Answered> {
    Connection::open(to, host).await?.get(path).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_as_long_as_its_head_says() {
        assert_eq!(answer_length(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel"), Some(43));
        assert_eq!(answer_length(b"HTTP/1.1 200 OK\r\nContent-Length:2\r\n\r\nhi"), Some(39));
        assert_eq!(answer_length(b"HTTP/1.1 204 None\r\n\r\n"), Some(21));
        assert_eq!(answer_length(b"HTTP/1.1 200 OK\r\ncontent-le"), None);
    }
}
