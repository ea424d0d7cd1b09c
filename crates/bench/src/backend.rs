//! What answers in the router's benchmark: the least that is a web server, so that whoever stands before it is measured.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use ate_preface::{PREFACE_LEN, Verdict};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};

use crate::BenchError;

const ANSWER: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 64\r\n\r\n0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

const END_OF_HEAD: &[u8] = b"\r\n\r\n";

/// Where it is reached.
#[derive(Clone, Debug)]
pub(crate) struct Backend {
    pub(crate) direct: SocketAddr,
    /// HTTP at once, for nginx.
    pub(crate) plain: PathBuf,
    /// HTTP after a preface, as a worker has it.
    pub(crate) worker: PathBuf,
}

impl Backend {
    /// Listens and serves, for as long as the runtime it is called in lives.
    pub(crate) async fn start(directory: &Path) -> Result<Self, BenchError> {
        let io = || BenchError::io("start the backend");
        let tcp = TcpListener::bind("127.0.0.1:0").await.map_err(io())?;
        let backend = Self {
            direct: tcp.local_addr().map_err(io())?,
            plain: directory.join("plain.sock"),
            worker: directory.join("worker.sock"),
        };
        let plain = UnixListener::bind(&backend.plain).map_err(io())?;
        let worker = UnixListener::bind(&backend.worker).map_err(io())?;
        tokio::spawn(async move {
            while let Ok((stream, _)) = tcp.accept().await {
                let _ = stream.set_nodelay(true);
                tokio::spawn(serve(stream));
            }
        });
        tokio::spawn(async move {
            while let Ok((stream, _)) = plain.accept().await {
                tokio::spawn(serve(stream));
            }
        });
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = worker.accept().await {
                tokio::spawn(async move {
                    let mut preface = [0; PREFACE_LEN];
                    stream.read_exact(&mut preface).await?;
                    Verdict::Accepted.send(&mut stream).await?;
                    serve(stream).await
                });
            }
        });
        Ok(backend)
    }
}

/// Answers every head. Requests have no bodies here.
async fn serve(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<()> {
    let mut buffer = Vec::with_capacity(16 << 10);
    loop {
        if stream.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
        while let Some(head) = buffer.windows(END_OF_HEAD.len()).position(|window| window == END_OF_HEAD) {
            buffer.drain(..head + END_OF_HEAD.len());
            stream.write_all(ANSWER).await?;
        }
    }
}
