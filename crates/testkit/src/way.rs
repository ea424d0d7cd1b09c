//! A way between two processes that can be cut: nothing gets through any more, and neither end is told.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

#[derive(Debug)]
pub(crate) struct Way {
    at: SocketAddr,
    passable: watch::Sender<bool>,
    _accepting: AbortOnDropHandle<()>,
}

impl Way {
    pub(crate) async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let at = listener.local_addr().expect("a bound listener has an address");
        let (passable, passing) = watch::channel(true);
        let accepting = tokio::spawn(async move {
            // Each ends with its own ends, or with the test's runtime.
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(lead(stream, target, passing.clone()));
            }
        });
        Self { at, passable, _accepting: AbortOnDropHandle::new(accepting) }
    }

    pub(crate) fn at(&self) -> SocketAddr {
        self.at
    }

    pub(crate) fn set_cut(&self, cut: bool) {
        self.passable.send_replace(!cut);
    }
}

async fn lead(from: TcpStream, target: SocketAddr, mut passing: watch::Receiver<bool>) -> std::io::Result<()> {
    pass(&mut passing).await?;
    let to = TcpStream::connect(target).await?;
    from.set_nodelay(true)?;
    to.set_nodelay(true)?;
    let ((from_read, from_write), (to_read, to_write)) = (from.into_split(), to.into_split());
    tokio::try_join!(carry(from_read, to_write, passing.clone()), carry(to_read, from_write, passing))?;
    Ok(())
}

async fn carry(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut passing: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let mut bytes = vec![0; 16 << 10];
    loop {
        let read = from.read(&mut bytes).await?;
        pass(&mut passing).await?;
        if read == 0 {
            return to.shutdown().await;
        }
        to.write_all(&bytes[..read]).await?;
    }
}

/// Waits while the way is cut.
async fn pass(passing: &mut watch::Receiver<bool>) -> std::io::Result<()> {
    passing.wait_for(|passable| *passable).await.map(drop).map_err(std::io::Error::other)
}
