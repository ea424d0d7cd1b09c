//! What tests do to an instance, whichever processes it is made of: through its API, and through a router.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ate_proto::ate::v1::substrate_client::SubstrateClient;
use ate_proto::ate::v1::{
    ApplyRequest, GetHistoryRequest, GetObjectRequest, HistoryEntry, LogsRequest, WatchActorsRequest, actor_event,
};
use ate_proto::ateapi::control_client::ControlClient;
use ate_proto::ateapi::{
    Actor, ActorRef, CreateActorRequest, CreateAtespaceRequest, DeleteActorRequest, GetActorRequest,
    ListWorkersRequest, PauseActorRequest, ResumeActorRequest, SuspendActorRequest, Worker,
};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tonic::transport::{Channel, Endpoint, Uri};

use crate::counter::counter_image;
use crate::{Namespace, Reply};

/// Generous: the machine may be building beside the test.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Somebody who uses an instance.
#[derive(Clone, Debug)]
pub struct Client {
    pub(crate) channel: Option<Channel>,
    pub(crate) port: u16,
    /// Where the router lives, if not in the host's network.
    pub(crate) namespace: Option<Arc<Namespace>>,
    /// Where images are packed.
    pub(crate) directory: PathBuf,
    /// What the processes of the instance say, for the reader of a failed test.
    pub(crate) logs: Vec<PathBuf>,
}

impl Client {
    /// Somebody who speaks with whichever server has this socket, and through the router on this port.
    pub async fn at(socket: PathBuf, port: u16) -> Result<Self, tonic::transport::Error> {
        let channel = Some(connect(socket).await?);
        Ok(Self { channel, port, namespace: None, directory: PathBuf::new(), logs: Vec::new() })
    }

    pub fn logged(&self) -> String {
        let read = |path: &PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        match &self.logs[..] {
            [only] => read(only),
            several => several.iter().map(|path| format!("--- {}\n{}", path.display(), read(path))).collect(),
        }
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
        let image = counter_image(&self.directory);
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
        match &self.namespace {
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
        self.send("GET", atespace, name, path).await
    }

    /// As `get`, for what nobody on the way may send twice.
    pub async fn post(&self, atespace: &str, name: &str, path: &str) -> (u16, String) {
        self.send("POST", atespace, name, path).await
    }

    async fn send(&self, method: &str, atespace: &str, name: &str, path: &str) -> (u16, String) {
        let length = if method == "POST" { "Content-Length: 0\r\n" } else { "" };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {name}.{atespace}.localhost\r\n{length}Connection: close\r\n\r\n"
        );
        let answer = self.exchange(request.as_bytes()).await;
        let status =
            answer.get(9..12).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("no answer: {answer:?}"));
        let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default();
        (status, body)
    }

    pub async fn try_suspend(&self, atespace: &str, name: &str) -> Result<(), tonic::Status> {
        let actor_ref = Some(reference(atespace, name));
        self.control().suspend_actor(SuspendActorRequest { actor_ref }).await.map(drop)
    }

    pub async fn suspend(&self, atespace: &str, name: &str) {
        let suspended = self.try_suspend(atespace, name).await;
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

    pub async fn uid(&self, atespace: &str, name: &str) -> String {
        let request = WatchActorsRequest { atespace: Some(atespace.into()), resume_version: 0 };
        let mut events = self.substrate().watch_actors(request).await.expect("actors are watched").into_inner();
        while let Some(event) = events.message().await.expect("actors are listed") {
            if let Some(actor_event::Event::Changed(state)) = event.event
                && state.actor.is_some_and(|actor| actor.actor_id == name)
            {
                return state.uid;
            }
        }
        panic!("{name} is not listed")
    }

    pub async fn workers(&self) -> Vec<Worker> {
        self.control()
            .list_workers(ListWorkersRequest::default())
            .await
            .expect("workers are listed")
            .into_inner()
            .workers
    }

    /// The worker that an actor holds.
    pub async fn worker_of(&self, atespace: &str, name: &str) -> Option<Worker> {
        self.workers().await.into_iter().find(|worker| worker.actor_atespace == atespace && worker.actor_id == name)
    }

    /// What an actor has printed, line by line.
    pub async fn printed(&self, atespace: &str, name: &str) -> Vec<String> {
        let request = LogsRequest { atespace: atespace.into(), name: name.into(), ..Default::default() };
        let mut lines = self.substrate().logs(request).await.expect("the actor is there").into_inner();
        let mut printed = Vec::new();
        while let Some(line) = lines.message().await.expect("a log is read to its end") {
            printed.push(line.json);
        }
        printed
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
        self.try_history(atespace, name).await.expect("the actor is there")
    }

    pub async fn try_history(&self, atespace: &str, name: &str) -> Result<Vec<HistoryEntry>, tonic::Status> {
        let request = GetHistoryRequest { atespace: atespace.into(), name: name.into() };
        Ok(self.substrate().get_history(request).await?.into_inner().entries)
    }

    pub async fn delete(&self, atespace: &str, name: &str) {
        let request = DeleteActorRequest { actor_ref: Some(reference(atespace, name)) };
        let deleted = self.control().delete_actor(request).await;
        deleted.unwrap_or_else(|error| panic!("{name} is not deleted: {error}\n{}", self.logged()));
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

pub(crate) fn reference(atespace: &str, name: &str) -> ActorRef {
    ActorRef { atespace: atespace.into(), name: name.into() }
}

pub(crate) async fn connect(path: PathBuf) -> Result<Channel, tonic::transport::Error> {
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move {
            Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(ate_sys::SocketPath::of(&path)?.path()).await?))
        }
    });
    Endpoint::from_static("http://ate").connect_with_connector(connector).await
}
