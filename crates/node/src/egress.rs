//! Connections out of actors. A worker has no way out of its namespace; it asks here, and the node dials.
//!
//! ```text
//!   worker → node   "203.0.113.7:443\n"        node → worker   1 connected, 0 not;  then bytes both ways
//!                   "names\n"                                  1 allowed, 0 not;    then questions and answers
//! ```
//! The worker has checked the template's rules. The node checks them again, for it alone knows which actor is there, and
//! refuses what no rule may allow: the host itself, and what only the host can see.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, copy_bidirectional};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::task::JoinSet;

use crate::workers::Handle;

/// An address is far shorter.
const MAX_REQUEST: u64 = 128;

/// The worker asks at once; whoever does not is no worker.
const ASK_WITHIN: Duration = Duration::from_secs(5);

/// A peer that has not answered by then is not there.
const DIAL_WITHIN: Duration = Duration::from_secs(20);

/// Connections and questions of one worker at once, so that no actor takes the node's descriptors from the others; more are closed.
/// A worker itself lets its actor have a thousand connections and 64 questions.
const MAX_CONNECTIONS: usize = 1_100;

/// How often it is looked whether the worker has let go of a connection, and how long what it had sent may then take to its peer.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// A peer whose machine has vanished says no goodbye: after so long a silence it is asked whether it is there, so often.
const QUIET_FOR: Duration = Duration::from_secs(60);
const ASK_EVERY: Duration = Duration::from_secs(20);
const ASK_TIMES: u32 = 3;

/// Serves one worker for as long as it is polled; its connections end with that.
pub(crate) async fn serve(handle: Arc<Handle>, listener: UnixListener) {
    let mut connections = JoinSet::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                while connections.try_join_next().is_some() {}
                if connections.len() < MAX_CONNECTIONS {
                    let handle = Arc::clone(&handle);
                    connections.spawn(async move {
                        let _ = connection(&handle, stream).await;
                    });
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot take a worker's connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn connection(handle: &Handle, stream: UnixStream) -> io::Result<()> {
    let mut worker = BufReader::new(stream);
    let mut line = String::new();
    let mut first = (&mut worker).take(MAX_REQUEST);
    tokio::time::timeout(ASK_WITHIN, first.read_line(&mut line)).await.map_err(io::Error::other)??;
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
    match peer {
        Some(peer) => pass_on(worker, peer, LOOK_EVERY).await,
        None => Ok(()),
    }
}

/// Bytes both ways until both sides have said their last, or the worker is no longer there to hear it: a peer that an actor has
/// made common cause with may be silent for ever.
async fn pass_on(mut worker: BufReader<UnixStream>, mut peer: TcpStream, look_every: Duration) -> io::Result<()> {
    keep_alive(&peer)?;
    let stream = worker.get_ref().as_fd().try_clone_to_owned()?;
    let let_go = async {
        while !is_let_go(&stream) {
            tokio::time::sleep(look_every).await;
        }
        tokio::time::sleep(look_every).await;
    };
    tokio::select! {
        done = copy_bidirectional(&mut worker, &mut peer) => done.map(drop),
        () = let_go => Ok(()),
    }
}

/// Not by somebody who has only finished speaking: they still listen.
fn is_let_go(stream: &OwnedFd) -> bool {
    let mut looked = [PollFd::new(stream, PollFlags::empty())];
    let _ = poll(&mut looked, Some(&Timespec::default()));
    looked[0].revents().contains(PollFlags::HUP)
}

fn keep_alive(peer: &TcpStream) -> io::Result<()> {
    sockopt::set_tcp_keepidle(peer, QUIET_FOR)?;
    sockopt::set_tcp_keepintvl(peer, ASK_EVERY)?;
    sockopt::set_tcp_keepcnt(peer, ASK_TIMES)?;
    Ok(sockopt::set_socket_keepalive(peer, true)?)
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
    use std::collections::HashMap;

    use ate_orders::{EgressRule, Workload};
    use tokio::net::TcpListener;

    use super::*;
    use crate::stub::{self, Stub};

    /// A worker's end and a peer's end of a connection that is passed on.
    async fn connected(look_every: Duration) -> (UnixStream, TcpStream, tokio::task::JoinHandle<io::Result<()>>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (peer, _) = listener.accept().await.unwrap();
        let (worker, stream) = UnixStream::pair().unwrap();
        let passing = tokio::spawn(pass_on(BufReader::new(stream), dialled, look_every));
        (worker, peer, passing)
    }

    #[tokio::test]
    async fn a_silent_peer_keeps_nothing_open_that_the_worker_has_let_go_of() {
        let (mut worker, mut peer, passing) = connected(Duration::from_millis(100)).await;
        worker.write_all(b"last words").await.unwrap();
        drop(worker);
        passing.await.unwrap().unwrap();
        let mut heard = String::new();
        peer.read_to_string(&mut heard).await.unwrap();
        assert_eq!(heard, "last words");
    }

    #[tokio::test]
    async fn a_peer_that_does_not_listen_keeps_nothing_open_either() {
        let (mut worker, _peer, passing) = connected(Duration::from_millis(1)).await;
        let block = vec![0; 1 << 20];
        // Until nobody takes any more.
        while tokio::time::timeout(Duration::from_millis(100), worker.write(&block)).await.is_ok() {}
        drop(worker);
        passing.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn whoever_has_only_finished_speaking_still_listens() {
        let (mut worker, mut peer, passing) = connected(Duration::from_millis(1)).await;
        worker.shutdown().await.unwrap();
        assert_eq!(peer.read(&mut [0; 1]).await.unwrap(), 0);
        peer.write_all(b"an answer").await.unwrap();
        drop(peer);
        let mut heard = String::new();
        worker.read_to_string(&mut heard).await.unwrap();
        assert_eq!(heard, "an answer");
        passing.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_worker_has_so_many_connections_and_none_outlives_it() {
        let limit = rustix::process::Resource::Nofile;
        let most = rustix::process::getrlimit(limit).maximum;
        rustix::process::setrlimit(limit, rustix::process::Rlimit { current: most, maximum: most }).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let node = stub::node(directory.path());
        let worker = Arc::new(Stub::new(HashMap::new()));
        let handle = worker.join(&node).await.unwrap();
        // One that may ask for names.
        let rule = EgressRule { network: Ipv4Addr::UNSPECIFIED.into(), prefix: 0, ports: vec![53] };
        let workload = Workload { egress: vec![rule], ..stub::workload() };
        handle.host(&stub::identity(), &stub::ran(), &workload);
        let socket = handle.directory.join("link").join(ate_worker::EGRESS_SOCKET);
        let socket = ate_sys::SocketPath::of(&socket).unwrap();
        let mut streams = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            let mut stream = UnixStream::connect(socket.path()).await.unwrap();
            stream.write_all(format!("{}\n", ate_worker::QUESTIONS).as_bytes()).await.unwrap();
            assert_eq!(stream.read_u8().await.unwrap(), 1);
            // The rest of the question is waited for.
            stream.write_u16(20).await.unwrap();
            streams.push(stream);
        }
        let mut one_more = UnixStream::connect(socket.path()).await.unwrap();
        assert_eq!(one_more.read(&mut [0; 1]).await.unwrap(), 0, "it is closed");
        assert!(streams.iter().all(|stream| stream.try_read(&mut [0; 1]).is_err()), "the others are not");

        handle.link.call(ate_worker::link::Command::Stop, &[]).await.unwrap();
        for mut stream in streams {
            assert_eq!(stream.read(&mut [0; 1]).await.unwrap(), 0);
        }
    }

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
