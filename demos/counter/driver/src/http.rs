//! One request to an actor, timed as its client sees it.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Longer than the router lets a request wait for a worker: an answer comes by then, or none does.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// An answer of a counter is some hundred bytes.
const MAX_ANSWER: u64 = 1 << 20;

/// What a counter says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) actor: String,
    pub(crate) memory: u64,
    pub(crate) file: u64,
    pub(crate) generation: u64,
    /// From before the connection was made.
    pub(crate) first_byte: Duration,
}

/// `GET /` of an actor, over a connection of its own.
pub(crate) async fn count(port: u16, host: &str) -> anyhow::Result<Reply> {
    let begun = Instant::now();
    let exchange = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.context("the router does not answer")?;
        let request = format!("GET / HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = vec![0; 1];
        stream.read_exact(&mut answer).await.context("the connection ended without an answer")?;
        let first_byte = begun.elapsed();
        stream.take(MAX_ANSWER).read_to_end(&mut answer).await?;
        parse(&String::from_utf8_lossy(&answer), first_byte)
    };
    match tokio::time::timeout(ANSWER_WITHIN, exchange).await {
        Ok(answer) => answer,
        Err(_) => bail!("no answer within {} s", ANSWER_WITHIN.as_secs()),
    }
}

fn parse(answer: &str, first_byte: Duration) -> anyhow::Result<Reply> {
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer is not HTTP")?;
    let status = head.lines().next().and_then(|line| line.split(' ').nth(1)).unwrap_or_default();
    if status != "200" {
        bail!("the answer was {status} {}", body.trim());
    }
    let json: serde_json::Value = serde_json::from_str(body).with_context(|| format!("not a counter's: {body:?}"))?;
    let number = |name: &str| json[name].as_u64().with_context(|| format!("no {name:?} in {body:?}"));
    Ok(Reply {
        actor: json["actor"].as_str().unwrap_or_default().to_owned(),
        memory: number("memory")?,
        file: number("file")?,
        generation: number("generation")?,
        first_byte,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_counters_answer_is_one() {
        let body = r#"{"actor":"a","memory":3,"file":2,"nonce":"x","generation":4,"host":"h"}"#;
        let first_byte = Duration::from_millis(1);
        let reply = Reply { actor: "a".into(), memory: 3, file: 2, generation: 4, first_byte };
        assert_eq!(parse(&format!("HTTP/1.1 200 OK\r\nA: b\r\n\r\n{body}"), first_byte).unwrap(), reply);
        for (answer, why) in [
            (format!("HTTP/1.1 503 Service Unavailable\r\n\r\n{body}"), "503"),
            ("HTTP/1.1 200 OK\r\n\r\n{\"memory\":1,\"file\":-1}".to_owned(), "file"),
            ("HTTP/1.1 200 OK\r\n\r\nhello".to_owned(), "hello"),
            (String::new(), "HTTP"),
        ] {
            let error = format!("{:#}", parse(&answer, first_byte).unwrap_err());
            assert!(error.contains(why), "{answer:?}: {error}");
        }
    }
}
