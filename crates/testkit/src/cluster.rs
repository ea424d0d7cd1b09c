//! An instance whose roles are processes of their own: replicas of the API on a real PostgreSQL, nodes, a router.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ate_testkit_port::free_port;
use ate_testkit_postgres::Server;
use futures::future::join_all;

use crate::client::{Client, PATIENCE, connect};
use crate::leaks::Leaks;
use crate::machine::{processes_below, sandbox_runtimes, signal, worker_pids};
use crate::way::Way;

#[derive(Debug)]
struct Process {
    arguments: Vec<OsString>,
    log: PathBuf,
    child: Option<Child>,
}

/// Of what a cluster is made.
#[derive(Clone, Debug, Default)]
pub struct Shape {
    pub apis: usize,
    pub nodes: usize,
    pub routers: usize,
    /// Where snapshots are durable, if not in a directory of the cluster's own.
    pub storage: Option<String>,
    pub env: Vec<(String, String)>,
    /// Each node has a disk of its own, of this size.
    pub disk_bytes: Option<u64>,
    /// The ways to and from nodes can be [cut](Cluster::cut).
    pub can_be_cut: bool,
}

/// Replicas are called `api-0`, `api-1`, …, nodes `node-0`, …, routers `router-0`, ….
#[derive(Debug)]
pub struct Cluster {
    program: PathBuf,
    directory: tempfile::TempDir,
    postgres: Server,
    processes: BTreeMap<String, Process>,
    router_ports: Vec<u16>,
    /// Where replicas tell what they have counted.
    metrics: BTreeMap<String, SocketAddr>,
    env: Vec<(String, String)>,
    /// File systems of nodes.
    mounted: Vec<PathBuf>,
    /// To each node, and from each node to the replicas.
    to_nodes: BTreeMap<String, Way>,
    from_nodes: BTreeMap<String, Vec<Way>>,
}

impl Cluster {
    /// Starts everything and waits until it is up. `program` is the test's `CARGO_BIN_EXE_ate`.
    pub async fn start(program: &str, apis: usize, nodes: usize, routers: usize) -> Self {
        Self::start_with(program, Shape { apis, nodes, routers, ..Shape::default() }).await
    }

    pub async fn start_with(program: &str, shape: Shape) -> Self {
        let Shape { apis, nodes, routers, storage, env, disk_bytes, can_be_cut } = shape;
        let directory = tempfile::Builder::new().prefix("ate-cluster-").tempdir().expect("a temporary directory");
        let postgres = tokio::task::spawn_blocking(Server::default).await.expect("PostgreSQL starts");
        let mut cluster = Self {
            program: program.into(),
            directory,
            postgres,
            processes: BTreeMap::new(),
            router_ports: (0..routers).map(|_| free_port()).collect(),
            metrics: BTreeMap::new(),
            env,
            mounted: Vec::new(),
            to_nodes: BTreeMap::new(),
            from_nodes: BTreeMap::new(),
        };
        std::fs::create_dir(cluster.storage()).expect("a directory for snapshots");
        let api_ports: Vec<u16> = (0..apis).map(|_| free_port()).collect();
        let api_at: Vec<SocketAddr> = api_ports.iter().map(|port| ([127, 0, 0, 1], *port).into()).collect();
        let runtimes = sandbox_runtimes();
        for (index, port) in api_ports.iter().enumerate() {
            let listen = format!("127.0.0.1:{port}");
            let (store, metrics) = (cluster.postgres.url(), SocketAddr::from(([127, 0, 0, 1], free_port())));
            let told = metrics.to_string();
            let arguments = ["--listen", &listen, "--store", &store, "--runtime", &runtimes, "--metrics-listen", &told];
            cluster.add("api", index, &arguments);
            cluster.metrics.insert(format!("api-{index}"), metrics);
        }
        let storage = storage.unwrap_or_else(|| cluster.storage().display().to_string());
        for index in 0..nodes {
            let (name, at) = (format!("node-{index}"), SocketAddr::from(([127, 0, 0, 1], free_port())));
            let (mut advertised, mut api_at) = (at, api_at.clone());
            if can_be_cut {
                let to = cluster.to_nodes.entry(name.clone()).or_insert(Way::to(at).await);
                advertised = to.at();
                let from = join_all(api_at.into_iter().map(Way::to)).await;
                api_at = from.iter().map(Way::at).collect();
                cluster.from_nodes.insert(name.clone(), from);
            }
            let (listen, advertise) = (at.to_string(), advertised.to_string());
            let mut arguments =
                vec!["--name", &name, "--listen", &listen, "--advertise", &advertise, "--storage", &storage];
            let api = api_arguments(&api_at);
            arguments.extend(api.iter().map(String::as_str));
            cluster.add("node", index, &arguments);
            if let Some(bytes) = disk_bytes {
                cluster.mount_disk(&name, bytes);
            }
        }
        for (index, port) in cluster.router_ports.clone().into_iter().enumerate() {
            let listen = format!("127.0.0.1:{port}");
            let mut arguments = vec!["--listen", listen.as_str()];
            let api = api_arguments(&api_at);
            arguments.extend(api.iter().map(String::as_str));
            cluster.add("router", index, &arguments);
        }
        let names: Vec<String> = cluster.processes.keys().cloned().collect();
        for name in names {
            cluster.restart(&name).await;
        }
        cluster
    }

    fn add(&mut self, role: &str, index: usize, arguments: &[&str]) {
        let name = format!("{role}-{index}");
        let at = |path: &Path| path.as_os_str().to_owned();
        let identity = self.directory.path().join("identity");
        let mut words: Vec<OsString> = vec![role.into()];
        if role == "node" {
            words.push("run".into());
        }
        words.extend(["--data-dir".into(), at(&self.data(&name)), "--identity".into(), at(&identity)]);
        words.extend(arguments.iter().map(OsString::from));
        let log = self.directory.path().join(format!("{name}.log"));
        self.processes.insert(name, Process { arguments: words, log, child: None });
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn data(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Where snapshots are durable.
    pub fn storage(&self) -> PathBuf {
        self.directory.path().join("storage")
    }

    pub fn postgres(&self) -> &Server {
        &self.postgres
    }

    /// The names of all nodes, whether they run or not.
    pub fn nodes(&self) -> Vec<String> {
        self.processes.keys().filter(|name| name.starts_with("node")).cloned().collect()
    }

    /// The names of the processes of a role that run.
    pub fn running(&self, role: &str) -> Vec<String> {
        let runs = |(name, process): (&String, &Process)| {
            (name.starts_with(role) && process.child.is_some()).then(|| name.clone())
        };
        self.processes.iter().filter_map(runs).collect()
    }

    pub fn pid(&self, name: &str) -> u32 {
        self.processes[name].child.as_ref().expect("it runs").id()
    }

    /// A file system on a file: what fills it fills nothing else.
    fn mount_disk(&mut self, name: &str, bytes: u64) {
        let (file, directory) = (self.directory.path().join(format!("{name}.disk")), self.data(name));
        std::fs::File::create(&file).and_then(|file| file.set_len(bytes)).expect("a sparse file");
        std::fs::create_dir(&directory).expect("a directory");
        let run = |command: &mut Command| {
            let output = command.output().expect("it starts");
            assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        };
        run(Command::new("mkfs.ext4").args(["-q", "-O", "^has_journal"]).arg(&file));
        run(Command::new("mount").args(["-o", "loop"]).arg(&file).arg(&directory));
        self.mounted.push(directory);
    }

    /// Takes all the room there is on a node's disk; the file that does so gives it back when it is removed.
    pub fn fill_disk(&self, name: &str) -> PathBuf {
        let path = self.data(name).join("filling");
        let file = std::fs::File::create(&path).expect("there is room for a name");
        let (mut taken, mut step) = (0, 1 << 30);
        while step >= 4096 {
            match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), taken, step) {
                Ok(()) => taken += step,
                Err(_) => step /= 2,
            }
        }
        path
    }

    pub fn router_port(&self, router: usize) -> u16 {
        self.router_ports[router]
    }

    /// The names of the processes that do not run.
    pub fn stopped(&self) -> Vec<String> {
        let stopped = |(name, process): (&String, &Process)| process.child.is_none().then(|| name.clone());
        self.processes.iter().filter_map(stopped).collect()
    }

    /// Cuts the ways to a node and from it, or mends them.
    pub fn cut(&self, node: &str, to: bool, from: bool) {
        self.to_nodes[node].set_cut(to);
        self.from_nodes[node].iter().for_each(|way| way.set_cut(from));
    }

    /// Those that should run, and have ended by themselves.
    pub fn ended(&mut self) -> Vec<String> {
        let started: Vec<String> = self
            .processes
            .iter()
            .filter(|(_, process)| process.child.is_some())
            .map(|(name, _)| name.clone())
            .collect();
        started.into_iter().filter(|name| !self.is_alive(name)).collect()
    }

    /// What everybody has said so far, by the name of the log: roles, and workers that are there now.
    pub fn logs(&self) -> Vec<(PathBuf, String)> {
        let workers = self.processes.keys().filter(|name| name.starts_with("node")).flat_map(|name| {
            let entries = std::fs::read_dir(self.data(name).join("node/workers")).into_iter().flatten().flatten();
            entries.map(|entry| entry.path().join("worker.log"))
        });
        let paths = self.processes.values().map(|process| process.log.clone()).chain(workers);
        paths.filter_map(|path| Some((path.clone(), std::fs::read_to_string(path).ok()?))).collect()
    }

    /// Whether a process that was started has not ended by itself.
    pub fn is_alive(&mut self, name: &str) -> bool {
        let child = self.processes.get_mut(name).and_then(|process| process.child.as_mut());
        child.is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Starts a process again, with what it had.
    pub async fn restart(&mut self, name: &str) {
        self.restart_with(name, &[]).await;
    }

    pub async fn restart_with(&mut self, name: &str, env: &[(&str, &str)]) {
        let process = self.processes.get_mut(name).expect("it is one of the cluster");
        assert!(process.child.is_none(), "{name} still runs");
        let log = std::fs::File::options().create(true).append(true).open(&process.log).expect("the log opens");
        let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
        let said = read(&process.log).len();
        let child = Command::new(&self.program)
            .args(&process.arguments)
            .env("ATE_LOG", "info")
            .envs(self.env.iter().cloned())
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("it starts");
        let child = process.child.insert(child);
        let begun = Instant::now();
        while !read(&process.log)[said..].contains(" is up") {
            let ended = child.try_wait().expect("it is our child");
            assert!(ended.is_none(), "{name} ended ({ended:?}):\n{}", read(&process.log));
            assert!(begun.elapsed() < PATIENCE, "{name} did not come up:\n{}", read(&process.log));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// As the kernel does when it must.
    pub async fn kill(&mut self, name: &str) {
        let child = self.processes.get_mut(name).and_then(|process| process.child.take());
        let mut child = child.expect("it runs");
        signal(child.id(), rustix::process::Signal::KILL);
        let _ = tokio::task::spawn_blocking(move || child.wait()).await;
    }

    /// As whoever takes it out of service does; checks that it ended well.
    pub async fn stop(&mut self, name: &str) {
        let process = self.processes.get_mut(name).expect("it is one of the cluster");
        let mut child = process.child.take().expect("it runs");
        signal(child.id(), rustix::process::Signal::TERM);
        let log = process.log.clone();
        let status = tokio::task::spawn_blocking(move || child.wait()).await.expect("joined").expect("waited");
        let log = std::fs::read_to_string(log).unwrap_or_default();
        assert!(status.success(), "{name} ended with {status}:\n{log}");
    }

    /// Ends everything in order, nodes while they can still hand over what they have.
    pub async fn stop_all(&mut self) {
        for role in ["router", "node", "api"] {
            for name in self.running(role) {
                self.stop(&name).await;
            }
        }
    }

    /// What a replica has counted, as Prometheus is told.
    pub async fn counted(&self, api: &str, metric: &str) -> u64 {
        let told = crate::metrics::told(self.metrics[api]).await;
        *told.get(metric).unwrap_or_else(|| panic!("{metric} is not told: {told:?}"))
    }

    /// What `ate store check` says of the database.
    pub fn check_store(&self) -> std::process::Output {
        self.store(&["check"])
    }

    /// `ate store` on the database.
    pub fn store(&self, args: &[&str]) -> std::process::Output {
        let url = self.postgres.url();
        Command::new(&self.program).arg("store").args(args).args(["--store", &url]).output().expect("it starts")
    }

    /// Takes the disks of the nodes away; nothing may use them any more. The kernel lets go of what ended processes had
    /// mounted behind their end, loop devices last.
    pub async fn unmount(&mut self) {
        let begun = Instant::now();
        while let Some(directory) = self.mounted.last() {
            let output = Command::new("umount").arg(directory).output().expect("umount starts");
            if output.status.success() {
                self.mounted.pop();
                continue;
            }
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(begun.elapsed() < PATIENCE, "{}: {}", said.trim(), Leaks::of(directory, None));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Somebody who speaks with one of the replicas, and through one of the routers.
    pub async fn client(&self, api: &str, router: usize) -> Client {
        let channel = connect(self.data(api).join("api.sock")).await.expect("the replica answers");
        Client {
            channel: Some(channel),
            port: self.router_ports[router],
            namespace: None,
            directory: self.directory.path().to_owned(),
            logs: self.processes.values().map(|process| process.log.clone()).collect(),
        }
    }

    pub fn worker_pids(&self) -> Vec<u32> {
        let nodes = self.processes.keys().filter(|name| name.starts_with("node"));
        nodes.flat_map(|name| self.workers_of(name)).collect()
    }

    /// The workers of one node.
    pub fn workers_of(&self, name: &str) -> Vec<u32> {
        worker_pids(&self.data(name).join("node"))
    }

    /// The processes in workers beside the worker itself: those of sandboxes.
    pub fn sandbox_pids(&self) -> Vec<u32> {
        self.worker_pids().into_iter().flat_map(processes_below).collect()
    }

    pub fn signal(pid: u32, which: rustix::process::Signal) {
        signal(pid, which);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for process in self.processes.values_mut() {
            if let Some(child) = &mut process.child {
                signal(child.id(), rustix::process::Signal::KILL);
                let _ = child.wait();
            }
        }
        for pid in self.worker_pids() {
            signal(pid, rustix::process::Signal::KILL);
        }
        for directory in &self.mounted {
            // Lazily: what a killed worker had open goes with the worker, a moment later.
            let _ = Command::new("umount").arg("-l").arg(directory).status();
        }
        if std::thread::panicking() {
            for (name, process) in &self.processes {
                let log = std::fs::read_to_string(&process.log).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(60).collect();
                eprintln!("--- the last that {name} said:");
                tail.iter().rev().for_each(|line| eprintln!("{line}"));
            }
        }
    }
}

fn api_arguments(api_at: &[SocketAddr]) -> Vec<String> {
    api_at.iter().flat_map(|at| ["--api".to_owned(), at.to_string()]).collect()
}
