//! `ate dev` as a child of the demo: started once, stopped once, waited for.
//!
//! It is in a process group of its own, so that Ctrl-C in a terminal reaches only the demo, which then stops it in order. One
//! demo at a time has a directory: it holds a lock there that the kernel releases however it ends. The file also names
//! the server, so that the next demo finds and stops one whose demo was killed.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use ate_proto::ate::v1::GetInfoRequest;
use ate_proto::ate::v1::substrate_client::SubstrateClient;
use hyper_util::rt::TokioIo;
use rustix::process::{Pid, Signal};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tonic::transport::{Channel, Endpoint, Uri};

/// Lines of the server's own words that are shown when it ended by itself.
const LAST_LINES: usize = 20;

/// How often it is looked at while it starts, and while one of a killed demo ends.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The directory, for this demo alone.
#[derive(Debug)]
pub(crate) struct Directory {
    pub(crate) path: PathBuf,
    lock: File,
}

impl Directory {
    pub(crate) fn lock(path: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
        let path = path.canonicalize()?;
        let file = path.join("demo.lock");
        let lock = File::options().read(true).write(true).create(true).truncate(false).open(&file);
        let lock = lock.with_context(|| format!("cannot open {}", file.display()))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path, lock }),
            Err(TryLockError::WouldBlock) => bail!(
                "a demo already runs in {}: use that one, stop it with Ctrl-C, or choose another directory (make demo DATA=...)",
                path.display()
            ),
            Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", file.display())),
        }
    }

    /// The server of a demo that was killed, if it still runs.
    pub(crate) fn orphan(&mut self) -> Option<Pid> {
        let mut text = String::new();
        self.lock.rewind().and_then(|()| self.lock.read_to_string(&mut text)).ok()?;
        let (pid, birth) = text.trim().split_once(' ')?;
        let pid = Pid::from_raw(pid.parse().ok()?)?;
        (born(pid).as_deref() == Some(birth)).then_some(pid)
    }

    /// Ends it as its own demo would have.
    pub(crate) async fn stop_orphan(pid: Pid) -> anyhow::Result<()> {
        let birth = born(pid);
        rustix::process::kill_process(pid, Signal::INT).context("cannot stop the server of a killed demo")?;
        while birth.is_some() && born(pid) == birth {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    fn remember(&mut self, pid: Pid) -> std::io::Result<()> {
        self.lock.set_len(0)?;
        self.lock.rewind()?;
        write!(self.lock, "{} {}", pid.as_raw_nonzero(), born(pid).unwrap_or_default())
    }
}

/// When a process began, as the kernel counts; with its pid it names a process for good. None if it has ended.
fn born(pid: Pid) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The name in parentheses may hold anything; after it come the state (field 3) and, as field 22, the time.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    (*fields.first()? != "Z").then(|| fields.get(19).map(|time| (*time).to_owned()))?
}

/// A port of this machine and why it is not the one that was asked for.
pub(crate) fn free_port(wanted: u16) -> (SocketAddr, Option<String>) {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, wanted));
    match TcpListener::bind(address) {
        Ok(_) => (address, None),
        Err(error) => {
            let note = format!("port {wanted} is taken ({error}); another one was chosen");
            (SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), Some(note))
        }
    }
}

#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    log: PathBuf,
    socket: PathBuf,
}

impl Server {
    pub(crate) fn start(
        program: &Path,
        directory: &mut Directory,
        router: SocketAddr,
        api: SocketAddr,
    ) -> anyhow::Result<Self> {
        let log = directory.path.join("ate-dev.log");
        let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = Command::new(program);
        command
            .args(["dev", "--listen", &router.to_string(), "--api-listen", &api.to_string(), "--data-dir"])
            .arg(&directory.path)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .process_group(0);
        if std::env::var_os("ATE_LOG").is_none() {
            command.env("ATE_LOG", "info");
        }
        let child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let server = Self { child, log, socket: directory.path.join("api.sock") };
        server.pid().map(|pid| directory.remember(pid)).transpose().context("cannot write demo.lock")?;
        Ok(server)
    }

    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(i32::try_from(self.child.id()?).ok()?)
    }

    /// Waits until it answers; where actors are reached and a channel to its API.
    pub(crate) async fn up(&mut self) -> anyhow::Result<(u16, Channel)> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!(self.ended(status));
            }
            if let Ok(channel) = self.connect().await
                && let Ok(info) = SubstrateClient::new(channel.clone()).get_info(GetInfoRequest {}).await
            {
                let url = info.into_inner().router_url;
                let port = url.rsplit(':').next().and_then(|port| port.parse().ok());
                return Ok((port.with_context(|| format!("the server's router has no port: {url:?}"))?, channel));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn connect(&self) -> Result<Channel, tonic::transport::Error> {
        let path = self.socket.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
        });
        Endpoint::from_static("http://ate").connect_with_connector(connector).await
    }

    /// Returns only if it ends by itself, which it should not.
    pub(crate) async fn died(&mut self) -> anyhow::Error {
        match self.child.wait().await {
            Ok(status) => anyhow::anyhow!(self.ended(status)),
            Err(error) => error.into(),
        }
    }

    fn ended(&self, status: ExitStatus) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n  ");
        format!("`ate dev` ended by itself ({status}). It said at last:\n  {last}\n  all of it: {}", self.log.display())
    }

    /// Asks it to stop, once.
    pub(crate) fn stop(&self) {
        // No pid: it has ended already.
        if let Some(pid) = self.pid() {
            let _ = rustix::process::kill_process(pid, Signal::INT);
        }
    }

    /// How it ended: nothing if it was in order.
    pub(crate) async fn wait(&mut self) -> anyhow::Result<()> {
        let status = self.child.wait().await?;
        if status.success() { Ok(()) } else { bail!(self.ended(status)) }
    }

    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        Ok(self.child.kill().await?)
    }
}
