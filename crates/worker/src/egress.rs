//! Connections that the actor makes: all of them arrive here, whatever address they were meant for, and only those that
//! the template allows go on, dialled by the node.
//!
//! The worker has no way out of its namespace. It asks the node over a socket (`ip:port` and a newline, one byte back),
//! and the node, which knows the same rules and the host's own addresses, dials.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use crate::names;
use crate::serve::Worker;

/// How long the node may take to connect.
const DIAL_WITHIN: Duration = Duration::from_secs(30);

/// Outgoing connections of one actor at once; more are reset.
const MAX_CONNECTIONS: usize = 1_000;

pub(crate) async fn serve(worker: Arc<Worker>, listener: TcpListener) {
    let places = Arc::new(tokio::sync::Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let (worker, place) = (Arc::clone(&worker), Arc::clone(&places).try_acquire_owned());
        tokio::spawn(async move {
            // Reset rather than closed: the actor sees at once that nobody will answer.
            let _ = stream.set_zero_linger();
            if place.is_ok() {
                let _ = connection(&worker, stream).await;
            }
        });
    }
}

async fn connection(worker: &Worker, mut actor: TcpStream) -> std::io::Result<()> {
    let to = meant_for(&actor)?;
    let Some(tenant) = worker.occupant().filter(|_| !worker.is_lease_over()) else { return Ok(()) };
    let connected = tenant.connected();
    let questions = to.port() == 53 && names::is_service(to.ip());
    let allowed =
        if questions { names::may_ask(&tenant.egress) } else { tenant.egress.iter().any(|rule| rule.allows(to)) };
    if !allowed {
        return Ok(());
    }
    let wish = if questions { names::QUESTIONS.to_owned() } else { to.to_string() };
    let mut node = UnixStream::connect(std::path::Path::new(crate::root::LINK).join(crate::EGRESS_SOCKET)).await?;
    let ask = async {
        node.write_all(format!("{wish}\n").as_bytes()).await?;
        node.read_u8().await
    };
    let answer = tokio::time::timeout(DIAL_WITHIN, ask).await.map_err(std::io::Error::other)??;
    if answer != 1 {
        return Ok(());
    }
    tokio::select! {
        biased;
        () = connected.cancelled() => {}
        done = copy_bidirectional(&mut actor, &mut node) => { done?; }
    }
    Ok(())
}

/// Where the connection was going before the worker's rules turned it here.
fn meant_for(stream: &TcpStream) -> std::io::Result<SocketAddr> {
    if stream.local_addr()?.ip().to_canonical().is_ipv4() {
        let address = getsockopt(stream, sockopt::OriginalDst)?;
        let ip = u32::from_be(address.sin_addr.s_addr);
        return Ok(SocketAddr::new(IpAddr::V4(ip.into()), u16::from_be(address.sin_port)));
    }
    let address = getsockopt(stream, sockopt::Ip6tOriginalDst)?;
    Ok(SocketAddr::new(IpAddr::V6(address.sin6_addr.s6_addr.into()), u16::from_be(address.sin6_port)))
}
