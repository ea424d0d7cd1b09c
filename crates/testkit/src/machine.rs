//! `ate dev`, started and stopped as a user would.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ate_proto::ate::v1::GetInfoRequest;
use ate_proto::ate::v1::substrate_client::SubstrateClient;

use crate::Namespace;
use crate::client::{Client, PATIENCE, connect};
use crate::counter::repository;
use crate::leaks::cgroup_of;

/// What a test wants to be different from what a user gets.
#[derive(Debug, Default)]
pub struct Setting {
    /// More arguments of `ate dev`.
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    /// Where `ate dev` lives, if not in the host's network.
    pub namespace: Option<Arc<Namespace>>,
    /// What it reads in the place of /etc/resolv.conf.
    pub resolver: Option<PathBuf>,
}

/// What a command of the CLI said.
#[derive(Debug)]
pub struct Said {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

#[derive(Debug)]
pub struct Machine {
    program: PathBuf,
    setting: Setting,
    directory: tempfile::TempDir,
    child: Option<Child>,
    api: Option<SocketAddr>,
    client: Client,
}

impl std::ops::Deref for Machine {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Machine {
    /// Starts `ate dev` on an empty data directory. `program` is the test's `CARGO_BIN_EXE_ate`.
    pub async fn start(program: &str) -> Self {
        Self::start_with(program, Setting::default()).await
    }

    pub async fn start_with(program: &str, setting: Setting) -> Self {
        let mut machine = Self::new(program, setting);
        machine.restart().await;
        machine
    }

    /// Nothing runs yet, and the data directory does not exist.
    pub fn new(program: &str, setting: Setting) -> Self {
        let directory = tempfile::Builder::new().prefix("ate-e2e-").tempdir().expect("a temporary directory");
        let client = Client {
            channel: None,
            port: 0,
            namespace: setting.namespace.clone(),
            directory: directory.path().to_owned(),
            logs: vec![directory.path().join("dev.log")],
        };
        Self { program: program.into(), setting, directory, child: None, api: None, client }
    }

    /// Runs a command of the CLI against this machine.
    pub async fn cli(&self, args: &[&str]) -> Said {
        let mut command = tokio::process::Command::new(&self.program);
        // Whoever no longer waits for it has gone on to something else.
        command.args(args).env("ATE_DATA_DIR", self.data()).stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(PATIENCE, command.output()).await.expect("it ends").expect("it starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Said { code: output.status.code().unwrap_or(-1), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    /// Runs a command that must succeed; returns what it printed.
    pub async fn ate(&self, args: &[&str]) -> String {
        let said = self.cli(args).await;
        assert_eq!(said.code, 0, "ate {args:?}: {said:?}\n{}", self.logged());
        said.stdout
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn data(&self) -> PathBuf {
        // Longer than the address of a socket can be: data directories are where people put them.
        self.directory.path().join("deep".repeat(30)).join("data")
    }

    /// Starts it again on the same data.
    pub async fn restart(&mut self) {
        assert!(self.child.is_none(), "it still runs");
        let log = std::fs::File::options().create(true).append(true).open(&self.client.logs[0]).expect("the log opens");
        let said = self.logged().len();
        let mut words: Vec<OsString> = Vec::new();
        if let Some(namespace) = &self.setting.namespace {
            words.extend(["nsenter".into(), format!("--net={}", namespace.path().display()).into()]);
        }
        if let Some(resolver) = &self.setting.resolver {
            let bind = "mount --bind \"$0\" /etc/resolv.conf && exec \"$@\"";
            words.extend(["unshare", "--mount", "sh", "-c", bind].map(OsString::from));
            words.push(resolver.into());
        }
        words.push(self.program.clone().into());
        let child = Command::new(&words[0])
            .args(&words[1..])
            .args(["dev", "--listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0", "--data-dir"])
            .arg(self.data())
            .arg("--runtime")
            .arg(sandbox_runtimes())
            .args(&self.setting.args)
            .env("ATE_LOG", "info")
            .envs(self.setting.env.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("ate dev starts");
        self.child = Some(child);
        let begun = Instant::now();
        loop {
            if let Ok(channel) = connect(self.data().join("api.sock")).await
                && let Ok(info) = SubstrateClient::new(channel.clone()).get_info(GetInfoRequest {}).await
                && let Some(api) = api_address(&self.logged()[said..])
            {
                let url = info.into_inner().router_url;
                self.client.port =
                    url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a router url ends in its port");
                self.api = Some(api);
                self.client.channel = Some(channel);
                return;
            }
            let ended = self.child.as_mut().expect("started above").try_wait().expect("it is our child");
            assert!(ended.is_none(), "ate dev ended ({ended:?}):\n{}", self.logged());
            assert!(begun.elapsed() < PATIENCE, "ate dev did not come up:\n{}", self.logged());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Sets a variable of the environment that it starts with next.
    pub fn set_env(&mut self, name: &str, value: Option<&str>) {
        self.setting.env.retain(|(known, _)| known != name);
        self.setting.env.extend(value.map(|value| (name.to_owned(), value.to_owned())));
    }

    /// More arguments of `ate dev` that it starts with next.
    pub fn add_args(&mut self, args: &[&str]) {
        self.setting.args.extend(args.iter().map(ToString::to_string));
    }

    /// Where the API is served by TLS, to whoever comes.
    pub fn api(&self) -> SocketAddr {
        self.api.expect("it runs")
    }

    /// What it tells Prometheus, by name, if it was started with `--metrics-listen`.
    pub async fn told(&self) -> BTreeMap<String, u64> {
        let begun = Instant::now();
        loop {
            let log = self.logged();
            let at = log.rsplit_once("  metrics http://").and_then(|(_, rest)| rest.split_once("/metrics\n"));
            if let Some(at) = at.and_then(|(at, _)| at.parse().ok()) {
                return crate::metrics::told(at).await;
            }
            assert!(begun.elapsed() < PATIENCE, "it does not say where it tells:\n{log}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    /// The processes of the workers, as written down by the node.
    pub fn worker_pids(&self) -> Vec<u32> {
        worker_pids(&self.data().join("node"))
    }

    /// The processes in workers beside the worker itself: those of sandboxes.
    pub fn sandbox_pids(&self) -> Vec<u32> {
        self.worker_pids().into_iter().flat_map(processes_below).collect()
    }

    /// The control group of everything that this machine runs, as its path in every hierarchy.
    pub fn cgroup(&self) -> String {
        cgroup_of(&self.data().canonicalize().unwrap_or_else(|_| self.data()).join("node"))
    }

    /// How many groups there are below it, in the hierarchy that accounts for memory.
    pub fn cgroups(&self) -> usize {
        fn below(directory: &Path) -> usize {
            let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
            entries.filter(|entry| entry.path().is_dir()).map(|entry| 1 + below(&entry.path())).sum()
        }
        let roots = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(|root| Path::new(root).join(self.cgroup()));
        let root = roots.iter().find(|root| root.exists()).expect("its control group exists");
        below(root)
    }

    /// The hashes of the programs that run in sandboxes.
    pub fn runtimes(&self) -> BTreeSet<String> {
        // A child of a worker is a copy of it until it has become its program.
        let own = self.program.canonicalize().expect("the program is there");
        let programs = self.sandbox_pids().into_iter().map(|pid| format!("/proc/{pid}/exe"));
        let programs: Vec<_> = programs.filter(|exe| std::fs::read_link(exe).is_ok_and(|exe| exe != own)).collect();
        if programs.is_empty() {
            return BTreeSet::new();
        }
        let output = Command::new("sha256sum").args(programs).output().expect("sha256sum runs");
        let text = String::from_utf8_lossy(&output.stdout);
        text.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect()
    }

    pub fn kill_process(pid: u32) {
        signal(pid, rustix::process::Signal::KILL);
    }

    /// As Ctrl-C does; waits for the end and checks that it was a good one.
    pub async fn stop(&mut self) {
        self.client.channel = None;
        let mut child = self.child.take().expect("it runs");
        signal(child.id(), rustix::process::Signal::INT);
        let status = tokio::task::spawn_blocking(move || child.wait()).await.expect("joined").expect("waited");
        assert!(status.success(), "ate dev ended with {status}:\n{}", self.logged());
    }

    /// As the kernel does when it must.
    pub async fn kill(&mut self) {
        self.client.channel = None;
        let mut child = self.child.take().expect("it runs");
        signal(child.id(), rustix::process::Signal::KILL);
        let _ = tokio::task::spawn_blocking(move || child.wait()).await;
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            signal(child.id(), rustix::process::Signal::INT);
            let _ = child.wait();
        }
        // Workers outlive a killed server; those of this test end with it.
        for command in crate::Leaks::of(self.directory.path(), None).processes {
            eprintln!("still running after the test: {command}");
        }
        for pid in self.worker_pids() {
            signal(pid, rustix::process::Signal::KILL);
        }
        if std::thread::panicking() {
            eprintln!("--- ate dev said:\n{}", self.logged());
        }
    }
}

/// The processes of a node's workers, as it has written them down.
pub(crate) fn worker_pids(node: &Path) -> Vec<u32> {
    let workers = std::fs::read_dir(node.join("workers")).into_iter().flatten().flatten();
    let birth = |path: PathBuf| -> Option<u32> {
        let birth: serde_json::Value = serde_json::from_slice(&std::fs::read(path.join("worker.json")).ok()?).ok()?;
        u32::try_from(birth["pid"].as_u64()?).ok()
    };
    workers.filter_map(|entry| birth(entry.path())).collect()
}

pub(crate) fn processes_below(pid: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children: Vec<u32> = children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
    children.iter().flat_map(|&child| std::iter::once(child).chain(processes_below(child))).collect()
}

/// The directory of the sandbox runtimes, built if they are not there yet.
pub fn sandbox_runtimes() -> String {
    let built = Command::new(repository().join("runtime/build"))
        .arg("all")
        .stderr(Stdio::inherit())
        .output()
        .expect("runtime/build runs");
    assert!(built.status.success(), "runtime/build failed");
    String::from_utf8_lossy(&built.stdout).trim().to_owned()
}

/// Where `ate dev` says that its API is. Only a line that has ended has all of it.
fn api_address(log: &str) -> Option<SocketAddr> {
    log.split_once(", https://")?.1.split_once('\n')?.0.parse().ok()
}

pub(crate) fn signal(pid: u32, signal: rustix::process::Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}
