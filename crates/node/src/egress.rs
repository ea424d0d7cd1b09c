//! Connections out of actors. A worker has no way out of its namespace; it asks here, and the node dials.
//!
//! ```text
//!   worker → node   "203.0.113.7:443\n"        node → worker   1 connected, 0 not;  then bytes both ways
//!                   "names\n"                                  1 allowed, 0 not;    then questions and answers
//! ```
//! The worker has checked the template's rules. The node checks them again, for it alone knows which actor is there, and
//! refuses what no rule may allow: the host itself, and what only the host can see.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, copy_bidirectional};
use tokio::net::{TcpStream, UnixListener, UnixStream};

use crate::workers::Handle;

/// An address is far shorter.
const MAX_REQUEST: u64 = 128;

/// The worker asks at once; whoever does not is no worker.
const ASK_WITHIN: Duration = Duration::from_secs(5);

/// A peer that has not answered by then is not there.
const DIAL_WITHIN: Duration = Duration::from_secs(20);

/// Serves one worker for as long as it is polled.
pub(crate) async fn serve(handle: Arc<Handle>, listener: UnixListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let handle = Arc::clone(&handle);
                tokio::spawn(async move {
                    let _ = connection(&handle, stream).await;
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot take a worker's connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn connection(handle: &Handle, stream: UnixStream) -> std::io::Result<()> {
    let mut worker = BufReader::new(stream);
    let mut line = String::new();
    let mut first = (&mut worker).take(MAX_REQUEST);
    tokio::time::timeout(ASK_WITHIN, first.read_line(&mut line)).await.map_err(std::io::Error::other)??;
    if line.trim_end() == ate_worker::QUESTIONS {
        let allowed = handle.may_ask();
        worker.get_mut().write_u8(allowed.into()).await?;
        return if allowed { crate::names::answer(worker).await } else { Ok(()) };
    }
    let allowed = line.trim_end().parse::<SocketAddr>().ok().filter(|to| handle.may_connect(*to) && !is_own(to.ip()));
    let peer = match allowed {
        Some(to) => tokio::time::timeout(DIAL_WITHIN, TcpStream::connect(to)).await.ok().and_then(Result::ok),
        None => None,
    };
    worker.get_mut().write_u8(peer.is_some().into()).await?;
    if let Some(mut peer) = peer {
        copy_bidirectional(&mut worker, &mut peer).await?;
    }
    Ok(())
}

/// The host itself, its neighbours by link (the metadata service is one), and addresses that mean nobody in particular.
fn is_own(address: IpAddr) -> bool {
    let address = embedded_v4(address.to_canonical());
    let special = match address {
        IpAddr::V4(a) => {
            a.is_loopback() || a.is_link_local() || a.is_unspecified() || a.is_multicast() || a.is_broadcast()
        }
        IpAddr::V6(a) => a.is_loopback() || a.is_unicast_link_local() || a.is_unspecified() || a.is_multicast(),
    };
    special || METADATA.contains(&address) || host_addresses().contains(&address)
}

/// Services that tell a machine its secrets, beside the one at 169.254.169.254: Azure's, Alibaba's, Amazon's by IPv6.
const METADATA: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
];

/// The IPv4 address that a translator (RFC 6052) would make of an IPv6 one.
fn embedded_v4(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(v6) if v6.segments()[..6] == [0x64, 0xff9b, 0, 0, 0, 0] => {
            let [.., a, b, c, d] = v6.octets();
            Ipv4Addr::new(a, b, c, d).into()
        }
        other => other,
    }
}

/// Read each time: addresses come and go, and connections are rare.
fn host_addresses() -> HashSet<IpAddr> {
    let interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
    let address = |storage: nix::sys::socket::SockaddrStorage| {
        let v4 = storage.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        v4.or_else(|| storage.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
    };
    interfaces.filter_map(|interface| address(interface.address?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_out_of_reach() {
        for own in [
            "127.0.0.1",
            "127.8.9.10",
            "::1",
            "169.254.169.254",
            "fe80::1",
            "0.0.0.0",
            "::",
            "224.0.0.1",
            "::ffff:127.0.0.1",
            "168.63.129.16",
            "100.100.100.200",
            "fd00:ec2::254",
            "64:ff9b::127.0.0.1",
            "64:ff9b::a9fe:a9fe",
        ] {
            assert!(is_own(own.parse().unwrap()), "{own}");
        }
        for address in host_addresses() {
            assert!(is_own(address), "{address}");
        }
        for other in ["203.0.113.7", "2001:db8::1"] {
            assert!(!is_own(other.parse().unwrap()), "{other}");
        }
    }
}
