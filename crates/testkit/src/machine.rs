//! `ate dev`, started and stopped as a user would.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ate_proto::ate::v1::substrate_client::SubstrateClient;
use ate_proto::ate::v1::{ApplyRequest, GetHistoryRequest, GetInfoRequest, GetObjectRequest, HistoryEntry};
use ate_proto::ateapi::control_client::ControlClient;
use ate_proto::ateapi::{
    Actor, ActorRef, CreateActorRequest, CreateAtespaceRequest, GetActorRequest, PauseActorRequest, ResumeActorRequest,
    SuspendActorRequest,
};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tonic::transport::{Channel, Endpoint, Uri};

use crate::counter::{counter_image, repository};
use crate::leaks::cgroup_of;
use crate::{Namespace, Reply};

/// Generous: the machine may be building beside the test.
const PATIENCE: Duration = Duration::from_secs(120);

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
    port: u16,
    api: Option<SocketAddr>,
    channel: Option<Channel>,
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
        Self { program: program.into(), setting, directory, child: None, port: 0, api: None, channel: None }
    }

    /// Runs a command of the CLI against this machine.
    pub async fn cli(&self, args: &[&str]) -> Said {
        let mut command = tokio::process::Command::new(&self.program);
        command.args(args).env("ATE_DATA_DIR", self.data()).stdin(Stdio::null());
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

    fn log(&self) -> PathBuf {
        self.directory.path().join("dev.log")
    }

    /// Starts it again on the same data.
    pub async fn restart(&mut self) {
        assert!(self.child.is_none(), "it still runs");
        let runtime = Command::new(repository().join("runtime/build"))
            .arg("all")
            .stderr(Stdio::inherit())
            .output()
            .expect("runtime/build runs");
        assert!(runtime.status.success(), "runtime/build failed");
        let log = std::fs::File::options().create(true).append(true).open(self.log()).expect("the log opens");
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
            .arg(String::from_utf8_lossy(&runtime.stdout).trim())
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
                self.port =
                    url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a router url ends in its port");
                self.api = Some(api);
                self.channel = Some(channel);
                return;
            }
            let ended = self.child.as_mut().expect("started above").try_wait().expect("it is our child");
            assert!(ended.is_none(), "ate dev ended ({ended:?}):\n{}", self.logged());
            assert!(begun.elapsed() < PATIENCE, "ate dev did not come up:\n{}", self.logged());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn logged(&self) -> String {
        std::fs::read_to_string(self.log()).unwrap_or_default()
    }

    pub fn control(&self) -> ControlClient<Channel> {
        ControlClient::new(self.channel.clone().expect("it runs"))
    }

    pub fn substrate(&self) -> SubstrateClient<Channel> {
        SubstrateClient::new(self.channel.clone().expect("it runs"))
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Where the API is served by TLS, to whoever comes.
    pub fn api(&self) -> SocketAddr {
        self.api.expect("it runs")
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    pub async fn apply(&self, documents: &str) {
        let request = ApplyRequest { documents: vec![documents.to_owned()], dry_run: false };
        self.substrate().apply(request).await.expect("the objects apply");
    }

    /// Applies a pool and the counter's template, `demo/counter`, and waits until its golden snapshot is there. `spec` is
    /// more of the template.
    pub async fn apply_counter(&self, workers: u32, spec: &str) {
        self.apply(&format!("{}---{}", pool("counter", workers, ""), self.template("counter", "", spec))).await;
        self.ready("demo", "counter").await;
    }

    /// The counter as a template of that name; `container` and `spec` are more of either.
    pub fn template(&self, name: &str, container: &str, spec: &str) -> String {
        let image = counter_image(self.directory.path());
        format!(
            "
apiVersion: ate.dev/v1alpha1
kind: ActorTemplate
metadata: {{name: {name}, namespace: demo}}
spec:
  containers:
  - name: main
    image: {image}
    readyz: {{httpGet: {{port: 80}}}}
    volumeMounts: [{{name: data, mountPath: /data}}]
{container}
  volumes: [{{name: data, durableDir: {{}}}}]
  snapshotsConfig: {{location: 'gs://snapshots/{name}'}}
{spec}
"
        )
    }

    pub async fn ready(&self, namespace: &str, name: &str) {
        let begun = Instant::now();
        loop {
            let status = self.template_status(namespace, name).await;
            match status["phase"].as_str() {
                Some("Ready") => return,
                Some("Failed") => panic!("the template failed: {status}\n{}", self.logged()),
                _ => {}
            }
            assert!(begun.elapsed() < PATIENCE, "the template is not ready: {status}\n{}", self.logged());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn template_status(&self, namespace: &str, name: &str) -> serde_json::Value {
        let request = GetObjectRequest { kind: "ActorTemplate".into(), namespace: namespace.into(), name: name.into() };
        let object = self.substrate().get_object(request).await.expect("the template is there").into_inner();
        serde_json::from_str::<serde_json::Value>(&object.json).expect("objects are JSON")["status"].clone()
    }

    pub async fn create_atespace(&self, name: &str) {
        self.control()
            .create_atespace(CreateAtespaceRequest { name: name.into() })
            .await
            .expect("the atespace is made");
    }

    pub async fn create_counter(&self, atespace: &str, name: &str) {
        self.create(atespace, name, "counter").await;
    }

    /// An actor of a template in the namespace `demo`.
    pub async fn create(&self, atespace: &str, name: &str, template: &str) {
        let request = CreateActorRequest {
            actor_ref: Some(reference(atespace, name)),
            actor_template_namespace: "demo".into(),
            actor_template_name: template.into(),
            worker_selector: None,
        };
        self.control().create_actor(request).await.expect("the actor is made");
    }

    /// A connection to the router.
    pub async fn connect(&self) -> TcpStream {
        let address = ([127, 0, 0, 1], self.port).into();
        match &self.setting.namespace {
            Some(namespace) => namespace.connect(address).await,
            None => TcpStream::connect(address).await,
        }
        .expect("the router takes connections")
    }

    /// Sends a request that asks for the connection to be closed; returns the whole answer.
    pub async fn exchange(&self, request: &[u8]) -> String {
        let exchange = async {
            let mut stream = self.connect().await;
            stream.write_all(request).await?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await?;
            Ok::<_, std::io::Error>(String::from_utf8_lossy(&answer).into_owned())
        };
        tokio::time::timeout(PATIENCE, exchange).await.expect("an answer in time").expect("the router answers")
    }

    /// `GET path` of an actor through the router; the status and the body.
    pub async fn get(&self, atespace: &str, name: &str, path: &str) -> (u16, String) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {name}.{atespace}.localhost\r\nConnection: close\r\n\r\n");
        let answer = self.exchange(request.as_bytes()).await;
        let status =
            answer.get(9..12).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("no answer: {answer:?}"));
        let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default();
        (status, body)
    }

    pub async fn suspend(&self, atespace: &str, name: &str) {
        let actor_ref = Some(reference(atespace, name));
        let suspended = self.control().suspend_actor(SuspendActorRequest { actor_ref }).await;
        suspended.unwrap_or_else(|error| panic!("{name} is not suspended: {error}\n{}", self.logged()));
    }

    pub async fn pause(&self, atespace: &str, name: &str) {
        let actor_ref = Some(reference(atespace, name));
        let paused = self.control().pause_actor(PauseActorRequest { actor_ref }).await;
        paused.unwrap_or_else(|error| panic!("{name} is not paused: {error}\n{}", self.logged()));
    }

    pub async fn resume(&self, atespace: &str, name: &str, boot: bool) -> Result<(), tonic::Status> {
        let actor_ref = Some(reference(atespace, name));
        self.control().resume_actor(ResumeActorRequest { actor_ref, boot }).await.map(drop)
    }

    pub async fn actor(&self, atespace: &str, name: &str) -> Actor {
        let request = GetActorRequest { actor_ref: Some(reference(atespace, name)) };
        self.control().get_actor(request).await.expect("the actor is there").into_inner().actor.expect("an actor")
    }

    /// Waits until something is so; how often it is looked at decides nothing.
    pub async fn until<F: Future<Output = bool>>(&self, what: &str, mut holds: impl FnMut() -> F) {
        let begun = Instant::now();
        while !holds().await {
            assert!(begun.elapsed() < PATIENCE, "waited in vain until {what}\n{}", self.logged());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// One count of a counter.
    pub async fn count(&self, atespace: &str, name: &str) -> Reply {
        let (status, body) = self.get(atespace, name, "/").await;
        assert_eq!(status, 200, "{body}\n{}", self.logged());
        Reply::parse(&body)
    }

    pub async fn history(&self, atespace: &str, name: &str) -> Vec<HistoryEntry> {
        let request = GetHistoryRequest { atespace: atespace.into(), name: name.into() };
        self.substrate().get_history(request).await.expect("the actor is there").into_inner().entries
    }

    /// The processes of the workers, as written down by the node.
    pub fn worker_pids(&self) -> Vec<u32> {
        let workers = std::fs::read_dir(self.data().join("node/workers")).into_iter().flatten().flatten();
        let birth = |path: PathBuf| -> Option<u32> {
            let birth: serde_json::Value =
                serde_json::from_slice(&std::fs::read(path.join("worker.json")).ok()?).ok()?;
            u32::try_from(birth["pid"].as_u64()?).ok()
        };
        workers.filter_map(|entry| birth(entry.path())).collect()
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
        let inside = self.sandbox_pids();
        if inside.is_empty() {
            return BTreeSet::new();
        }
        let programs = inside.into_iter().map(|pid| format!("/proc/{pid}/exe"));
        let output = Command::new("sha256sum").args(programs).output().expect("sha256sum runs");
        let text = String::from_utf8_lossy(&output.stdout);
        text.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect()
    }

    pub fn kill_process(pid: u32) {
        signal(pid, rustix::process::Signal::KILL);
    }

    /// As Ctrl-C does; waits for the end and checks that it was a good one.
    pub async fn stop(&mut self) {
        self.channel = None;
        let mut child = self.child.take().expect("it runs");
        signal(child.id(), rustix::process::Signal::INT);
        let status = tokio::task::spawn_blocking(move || child.wait()).await.expect("joined").expect("waited");
        assert!(status.success(), "ate dev ended with {status}:\n{}", self.logged());
    }

    /// As the kernel does when it must.
    pub async fn kill(&mut self) {
        self.channel = None;
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

/// A WorkerPool in the namespace `demo`; `spec` is more of it.
pub fn pool(name: &str, workers: u32, spec: &str) -> String {
    format!(
        "
apiVersion: ate.dev/v1alpha1
kind: WorkerPool
metadata: {{name: {name}, namespace: demo, labels: {{pool: {name}}}}}
spec:
  replicas: {workers}
{spec}
"
    )
}

fn processes_below(pid: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children: Vec<u32> = children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
    children.iter().flat_map(|&child| std::iter::once(child).chain(processes_below(child))).collect()
}

pub(crate) fn reference(atespace: &str, name: &str) -> ActorRef {
    ActorRef { atespace: atespace.into(), name: name.into() }
}

/// Where `ate dev` says that its API is. Only a line that has ended has all of it.
fn api_address(log: &str) -> Option<SocketAddr> {
    log.split_once(", https://")?.1.split_once('\n')?.0.parse().ok()
}

fn signal(pid: u32, signal: rustix::process::Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

async fn connect(path: PathBuf) -> Result<Channel, tonic::transport::Error> {
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move {
            Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(ate_sys::SocketPath::of(&path)?.path()).await?))
        }
    });
    Endpoint::from_static("http://ate").connect_with_connector(connector).await
}
