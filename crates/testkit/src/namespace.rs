//! A network of a test's own: nothing that happens in it can be seen outside.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use tokio::net::{TcpListener, TcpStream, UdpSocket};

/// A network namespace, held by a process that sleeps in it. Gone with this.
#[derive(Debug)]
pub struct Namespace {
    holder: Child,
}

impl Default for Namespace {
    fn default() -> Self {
        Self::new()
    }
}

impl Namespace {
    pub fn new() -> Self {
        // The shell says when it is inside, and then waits for its input to end.
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-c", "ip link set lo up && echo in && cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare starts");
        let mut said = [0; 3];
        let stdout = holder.stdout.as_mut().expect("piped");
        io::Read::read_exact(stdout, &mut said).expect("a network namespace can be made");
        Self { holder }
    }

    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.holder.id()).into()
    }

    /// `ip` inside.
    pub fn ip(&self, args: &str) {
        let status = Command::new("nsenter")
            .arg(format!("--net={}", self.path().display()))
            .arg("ip")
            .args(args.split_whitespace())
            .status();
        assert!(status.is_ok_and(|status| status.success()), "ip {args}");
    }

    /// Joins two namespaces by a cable; each end gets the addresses given.
    pub fn cable(&self, other: &Self, addresses: [&[&str]; 2]) {
        self.ip(&format!("link add cable type veth peer name cable netns {}", other.holder.id()));
        for (namespace, addresses) in [self, other].into_iter().zip(addresses) {
            for address in addresses {
                let nodad = if address.contains(':') { "nodad" } else { "" };
                namespace.ip(&format!("addr add {address} dev cable {nodad}"));
            }
            namespace.ip("link set cable up");
        }
    }

    pub async fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        let stream = self.inside(move || std::net::TcpStream::connect(to)).await?;
        stream.set_nonblocking(true)?;
        TcpStream::from_std(stream)
    }

    pub async fn listen(&self, at: SocketAddr) -> io::Result<TcpListener> {
        let listener = self.inside(move || std::net::TcpListener::bind(at)).await?;
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    }

    pub async fn udp(&self, at: SocketAddr) -> io::Result<UdpSocket> {
        let socket = self.inside(move || std::net::UdpSocket::bind(at)).await?;
        socket.set_nonblocking(true)?;
        UdpSocket::from_std(socket)
    }

    /// A socket belongs to the namespace that it was made in, whoever uses it later.
    async fn inside<T: Send + 'static>(&self, make: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
        let namespace = std::fs::File::open(self.path())?;
        let entered = std::thread::spawn(move || {
            rustix::thread::move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&namespace),
                Some(rustix::thread::LinkNameSpaceType::Network),
            )?;
            make()
        });
        let joined = tokio::task::spawn_blocking(move || entered.join()).await.map_err(io::Error::other)?;
        joined.map_err(|_| io::Error::other("the thread inside panicked"))?
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}
