//! Questions for names that actors ask, passed on to the resolver of this machine.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

/// A resolver that has not answered by then is asked no longer; the actor's own asks again.
const ANSWER_WITHIN: Duration = Duration::from_secs(4);

/// How long a stream of questions may be silent.
const NEXT_WITHIN: Duration = Duration::from_secs(30);

/// Longest message there is.
const MAX_MESSAGE: usize = 65_535;

/// The fixed part of every message.
const HEADER: usize = 12;

/// Answers questions, framed as DNS over TCP is, until the stream ends.
pub(crate) async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
    loop {
        let Ok(length) = tokio::time::timeout(NEXT_WITHIN, stream.read_u16()).await else { return Ok(()) };
        let mut question = vec![0; usize::from(length?)];
        stream.read_exact(&mut question).await?;
        if question.len() < HEADER {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let answer = match tokio::time::timeout(ANSWER_WITHIN, resolve(&question)).await {
            Ok(Ok(answer)) => answer,
            // "Server failure": the actor hears at once that there is no use in waiting.
            _ => failure(question),
        };
        stream.write_u16(u16::try_from(answer.len()).map_err(io::Error::other)?).await?;
        stream.write_all(&answer).await?;
    }
}

async fn resolve(question: &[u8]) -> io::Result<Vec<u8>> {
    let resolver = resolver(&std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default());
    let any: SocketAddr = if resolver.is_ipv4() { ([0; 4], 0).into() } else { ([0; 16], 0).into() };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(resolver).await?;
    socket.send(question).await?;
    let mut answer = vec![0; MAX_MESSAGE];
    let length = loop {
        let length = socket.recv(&mut answer).await?;
        // Whatever else comes to this port is not for us.
        if length >= HEADER && answer[..2] == question[..2] {
            break length;
        }
    };
    answer.truncate(length);
    if answer[2] & 0x02 == 0 {
        return Ok(answer);
    }
    let mut stream = TcpStream::connect(resolver).await?;
    stream.write_u16(u16::try_from(question.len()).map_err(io::Error::other)?).await?;
    stream.write_all(question).await?;
    let mut whole = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut whole).await?;
    Ok(whole)
}

/// The first name server of a resolv.conf; without one the resolver is taken to be on this machine, as libc does.
fn resolver(text: &str) -> SocketAddr {
    let servers = text.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
    let first = servers.filter_map(|server| server.trim().parse::<IpAddr>().ok()).next();
    SocketAddr::new(first.unwrap_or(Ipv4Addr::LOCALHOST.into()), 53)
}

fn failure(mut question: Vec<u8>) -> Vec<u8> {
    question[2] |= 0x80;
    question[3] = (question[3] & 0xf0) | 2;
    question
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_name_server_is_asked() {
        assert_eq!(
            resolver("# x\nsearch a b\nnameserver 192.0.2.1\nnameserver 192.0.2.2\n"),
            ([192, 0, 2, 1], 53).into()
        );
        assert_eq!(resolver("nameserver\t2001:db8::1\n"), "[2001:db8::1]:53".parse().unwrap());
        assert_eq!(resolver("nameserver nonsense\n"), ([127, 0, 0, 1], 53).into());
    }
}
