//! A site: a process in namespaces of its own in which sandboxes are run without `ate`, for comparison.
//!
//! ```text
//!   benchmark ── Order, one JSON line ──▶ site (pid 1 of its namespaces) ── runsc ──▶ sandbox
//!             ◀── Done, one JSON line ──   takes the time itself: the pipe between the two is not part of it
//! ```
//! The site ends with its input, and takes every process, mount and network link along.

mod floor;
mod public;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ate_sandbox::Reaper;
use ate_sys::Cgroup;
use serde::{Deserialize, Serialize};

use crate::pipe::{self, Pipe};
use crate::{BenchError, Setup, http};

/// Between two tries to reach a server that is coming up.
const TRY_EVERY: Duration = Duration::from_millis(1);

/// A server that does not answer by then will not.
const UP_WITHIN: Duration = Duration::from_secs(30);

/// Who works at a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SiteKind {
    /// The least that a restore can take: the same build as ours, driven over its control socket, image in memory.
    Floor,
    /// The public project's way: a pause and an application container, every step a command, images in files.
    Public,
}

impl SiteKind {
    fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Public => "public",
        }
    }
}

#[derive(Clone, Debug, clap::Args)]
pub struct SiteArgs {
    #[arg(long)]
    pub kind: SiteKind,
    /// What `runtime/build` prints
    #[arg(long)]
    pub runtime: PathBuf,
    #[arg(long)]
    pub rootfs: PathBuf,
    /// For everything that is written
    #[arg(long)]
    pub directory: PathBuf,
    #[arg(long)]
    pub cgroup: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Whatever may be done ahead of the next start or restore.
    Prepare,
    /// Start the server from nothing; done when it answers.
    Boot,
    /// Continue from what the last suspend saved; done when it answers.
    Restore,
    /// Save and end it.
    Suspend,
    /// End it, saving nothing.
    Discard,
    /// A request on a new connection.
    Request,
    /// Stop it, in memory.
    Freeze,
    /// Compress the last image as it is, with the codec of our snapshots.
    Compress,
}

/// Times in microseconds since the order was read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) first_byte: u64,
    pub(crate) end: u64,
    pub(crate) phases: Vec<(String, u64)>,
    pub(crate) bytes: Option<u64>,
    pub(crate) error: Option<String>,
}

/// The benchmark's end of a site.
#[derive(Debug)]
pub(crate) struct Site {
    child: Child,
    pipe: Pipe,
    log: PathBuf,
    cgroup: Cgroup,
}

impl Site {
    pub(crate) fn start(setup: &Setup, kind: SiteKind, rootfs: &Path, directory: &Path) -> Result<Self, BenchError> {
        let cgroup = Cgroup::at(&format!("ate-bench-{}", std::process::id())).child(kind.name());
        let own = directory.join(kind.name());
        std::fs::create_dir_all(&own).map_err(BenchError::io("make a site's directory"))?;
        let log = own.join("site.log");
        let stderr = std::fs::File::create(&log).map_err(BenchError::io("make a site's log"))?;
        let mut command = Command::new(&setup.program);
        command
            .args(["bench", "site", "--kind", kind.name(), "--cgroup", cgroup.path(), "--runtime"])
            .arg(setup.runtime()?)
            .arg("--rootfs")
            .arg(rootfs)
            .arg("--directory")
            .arg(&own)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr);
        let mut child = ate_sys::in_new_namespaces(command).map_err(BenchError::io("start a site"))?;
        let pipe = Pipe::to(&mut child);
        Ok(Self { child, pipe, log, cgroup })
    }

    /// Below it are the groups of sandboxes, one each.
    pub(crate) fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }

    /// Has an order carried out. A site that is gone is an error; an order that failed is in the answer.
    pub(crate) async fn ask(&mut self, order: Order) -> Result<Done, BenchError> {
        if let Some(done) = self.pipe.ask(&order).await {
            return Ok(done);
        }
        let said = std::fs::read_to_string(&self.log).unwrap_or_default();
        let gone = format!("the site is gone: {}", said.trim());
        Err(BenchError::refused(format!("have a site carry out {order:?}"), gone))
    }

    /// As [`Site::ask`], for what must not fail.
    pub(crate) async fn must(&mut self, order: Order) -> Result<Done, BenchError> {
        let done = self.ask(order).await?;
        match done.error {
            Some(error) => Err(BenchError::refused(format!("have a site carry out {order:?}"), error)),
            None => Ok(done),
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // Pid 1 of its namespace: whatever it started ends with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
        // The parent goes with the last of its children, and stays for those that are left.
        let _ = self.cgroup.remove();
        if let Some((parent, _)) = self.cgroup.path().rsplit_once('/')
            && crate::memory::children(parent).is_empty()
        {
            let _ = Cgroup::at(parent).remove();
        }
    }
}

/// A stopwatch with laps.
struct Watch {
    begun: Instant,
    last: Instant,
    phases: Vec<(String, u64)>,
}

impl Watch {
    fn start() -> Self {
        let now = Instant::now();
        Self { begun: now, last: now, phases: Vec::new() }
    }

    fn lap(&mut self, name: &str) {
        self.lap_at(name, Instant::now());
    }

    fn lap_at(&mut self, name: &str, now: Instant) {
        self.phases.push((name.to_owned(), micros(now.saturating_duration_since(self.last))));
        self.last = now;
    }

    /// The last lap was what was waited for.
    fn done(self) -> Done {
        let first_byte = micros(self.last.saturating_duration_since(self.begun));
        Done { first_byte, end: micros(self.begun.elapsed()), phases: self.phases, ..Done::default() }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// What can be done at a site. An error is told as text.
trait Works {
    async fn carry_out(&mut self, order: Order, watch: &mut Watch) -> Result<Option<u64>, String>;
}

/// The site itself: runs in a process of its own until its input ends.
pub(crate) fn serve(args: &SiteArgs) -> Result<(), BenchError> {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    let io = |error: rustix::io::Errno| BenchError::io("mount /proc")(error.into());
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).map_err(io)?;
    mount("proc", "/proc", "proc", MountFlags::empty(), None).map_err(io)?;
    // Before the first thread: the namespaces of the network are those of the whole process.
    let interior = match args.kind {
        SiteKind::Floor => {
            Some(ate_network::Interior::set_up().map_err(|error| BenchError::refused("set up a network", error))?)
        }
        SiteKind::Public => None,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(BenchError::io("start a site"))?;
    runtime.block_on(async {
        let reaper = Reaper::default();
        let reaping = reaper.clone();
        tokio::spawn(async move { reaping.run().await });
        match interior {
            Some(interior) => take_orders(floor::Floor::new(args, interior, reaper)?).await,
            None => take_orders(public::Public::new(args, reaper).await?).await,
        }
    })
}

async fn take_orders(mut works: impl Works) -> Result<(), BenchError> {
    pipe::take_orders(async |order| {
        let mut watch = Watch::start();
        let carried_out = works.carry_out(order, &mut watch).await;
        let mut done = watch.done();
        match carried_out {
            Ok(bytes) => done.bytes = bytes,
            Err(error) => done.error = Some(error),
        }
        done
    })
    .await
}

/// Asks the server until it answers. Laps: to the connection, then to the first byte.
async fn first_answer(watch: &mut Watch) -> Result<(), String> {
    let begun = Instant::now();
    let to = (ate_network::ACTOR_V4, 80).into();
    loop {
        match http::get(to, "actor", "/").await {
            Ok(answered) => {
                watch.lap_at("connect", answered.connected);
                watch.lap_at("first byte", answered.first_byte);
                return Ok(());
            }
            Err(error) if begun.elapsed() > UP_WITHIN => return Err(format!("no answer: {error}")),
            Err(_) => tokio::time::sleep(TRY_EVERY).await,
        }
    }
}
