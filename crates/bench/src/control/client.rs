//! The benchmark's end of a control plane: orders to the process, calls to its API.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ate_proto::ate::v1::substrate_client::SubstrateClient;
use ate_proto::ate::v1::{ActivateRequest, ApplyRequest, GetObjectRequest, WatchActorsRequest, actor_event};
use ate_proto::ateapi::control_client::ControlClient;
use ate_proto::ateapi::{
    ActorRef, CreateActorRequest, CreateAtespaceRequest, ListActorsRequest, ResumeActorRequest, SuspendActorRequest,
    UpdateActorRequest,
};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Response, Status};

use super::plane::{Done, Order, POSTGRES};
use super::{ATESPACE, NAMESPACE, POOL, TEMPLATE, actor_name, clock};
use crate::pipe::Pipe;
use crate::schedule::Pace;
use crate::{BenchError, Setup};

/// Connections to the API: as many routers.
const ROUTERS: usize = 4;

/// For a golden snapshot, which fake nodes make at once.
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two looks at what tells nobody when it changes.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Where a plane keeps its records.
#[derive(Clone, Debug)]
pub(crate) enum Home {
    Embedded(PathBuf),
    Postgres { url: String, schema: String },
}

/// What is asked of an actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// The router's: answered when it runs, and the binding is durable.
    Activate,
    /// The public API's: answered when that it runs is durable, too.
    Resume,
    Suspend,
    /// Changes the record, nothing else: one commit.
    Update,
}

/// One call, by [`clock`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) scheduled: u64,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

pub(crate) struct Plane {
    child: Child,
    /// Ends the process when it is dropped.
    pipe: Option<Pipe>,
    socket: PathBuf,
    log: PathBuf,
    api: Option<Api>,
}

impl Plane {
    pub(crate) fn start(setup: &Setup, home: &Home, directory: &Path, workers: u32) -> Result<Self, BenchError> {
        std::fs::create_dir_all(directory).map_err(BenchError::io("make a directory"))?;
        let (socket, log) = (directory.join("api.sock"), directory.join("plane.log"));
        let stderr = std::fs::File::options().create(true).append(true).open(&log);
        let mut command = Command::new(&setup.program);
        command.args(["bench", "plane", "--workers", &workers.to_string(), "--socket"]).arg(&socket);
        match home {
            Home::Embedded(directory) => command.arg("--embedded").arg(directory),
            Home::Postgres { url, schema } => command.args(["--schema", schema]).env(POSTGRES, url),
        };
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr.map_err(BenchError::io("make a log"))?)
            .spawn()
            .map_err(BenchError::io("start a control plane"))?;
        let pipe = Some(Pipe::to(&mut child));
        Ok(Self { child, pipe, socket, log, api: None })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// An order that failed is an error, as is a plane that is gone.
    pub(crate) async fn must(&mut self, order: Order) -> Result<Done, BenchError> {
        let what = || format!("have the control plane carry out {order:?}");
        let answer = match &mut self.pipe {
            Some(pipe) => pipe.ask::<Done>(&order).await,
            None => None,
        };
        match answer {
            Some(Done { error: Some(error), .. }) => Err(BenchError::refused(what(), error)),
            Some(done) => Ok(done),
            None => {
                let said = std::fs::read_to_string(&self.log).unwrap_or_default();
                Err(BenchError::refused(what(), format!("it is gone: {}", said.trim())))
            }
        }
    }

    pub(crate) async fn serve(&mut self) -> Result<(), BenchError> {
        self.must(Order::Serve).await?;
        let mut routers = Vec::new();
        for _ in 0..ROUTERS {
            routers.push(connect(&self.socket).await?);
        }
        self.api = Some(Api { routers: Arc::new(routers) });
        Ok(())
    }

    pub(crate) async fn retire(&mut self) -> Result<(), BenchError> {
        // Its connections first: the server waits for them.
        self.api = None;
        self.must(Order::Retire).await.map(drop)
    }

    pub(crate) fn api(&self) -> Result<&Api, BenchError> {
        self.api.as_ref().ok_or_else(|| BenchError::refused("call the API", "it is not served"))
    }

    /// Ends the process in order: what is in memory is written, and the store closed.
    pub(crate) async fn end(mut self) -> Result<(), BenchError> {
        self.api = None;
        self.must(Order::Retire).await?;
        self.pipe = None;
        loop {
            match self.child.try_wait().map_err(BenchError::io("end a control plane"))? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(BenchError::refused("end a control plane", status)),
                None => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn connect(socket: &Path) -> Result<Channel, BenchError> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
    });
    let connected = Endpoint::from_static("http://ate").connect_with_connector(connector).await;
    connected.map_err(|error| BenchError::refused("reach the API", error))
}

fn refused(what: &'static str) -> impl FnOnce(Status) -> BenchError {
    move |status| BenchError::refused(what, status.message())
}

fn reference(number: u32) -> ActorRef {
    ActorRef { atespace: ATESPACE.to_owned(), name: actor_name(number) }
}

#[derive(Clone)]
pub(crate) struct Api {
    routers: Arc<Vec<Channel>>,
}

impl Api {
    pub(crate) fn control(&self, of: usize) -> ControlClient<Channel> {
        ControlClient::new(self.routers[of % self.routers.len()].clone())
    }

    pub(crate) fn substrate(&self, of: usize) -> SubstrateClient<Channel> {
        SubstrateClient::new(self.routers[of % self.routers.len()].clone())
    }

    /// A pool, a template with its golden snapshot, an atespace, and one actor that was woken and is suspended again.
    pub(crate) async fn furnish(&self) -> Result<(), BenchError> {
        let zero = "0".repeat(64);
        let documents = vec![
            format!(
                "{{apiVersion: ate.dev/v1alpha1, kind: SandboxConfig, metadata: {{name: bench}}, spec: {{sandboxClass: gvisor, \
                 default: true, assets: {{amd64: {{runsc: {{url: 'file:///runsc', sha256: '{zero}'}}}}}}}}}}"
            ),
            format!(
                "{{apiVersion: ate.dev/v1alpha1, kind: WorkerPool, metadata: {{name: {POOL}, namespace: {NAMESPACE}}}, \
                 spec: {{replicas: 1, ateomImage: none}}}}"
            ),
            format!(
                "{{apiVersion: ate.dev/v1alpha1, kind: ActorTemplate, metadata: {{name: {TEMPLATE}, namespace: {NAMESPACE}}}, \
                 spec: {{containers: [{{name: main, image: 'example/app@sha256:{zero}', readyz: {{httpGet: {{port: 80}}}}}}], \
                 snapshotsConfig: {{location: 'gs://bench/snapshots'}}}}}}"
            ),
        ];
        self.substrate(0).apply(ApplyRequest { documents, dry_run: false }).await.map_err(refused("apply objects"))?;
        self.golden_made().await?;
        let request = CreateAtespaceRequest { name: ATESPACE.to_owned() };
        self.control(0).create_atespace(request).await.map_err(refused("make an atespace"))?;
        let request = CreateActorRequest {
            actor_ref: Some(reference(0)),
            actor_template_namespace: NAMESPACE.to_owned(),
            actor_template_name: TEMPLATE.to_owned(),
            worker_selector: None,
        };
        self.control(0).create_actor(request).await.map_err(refused("create an actor"))?;
        for call in [Call::Activate, Call::Suspend] {
            self.call(call, 0, 0).await?;
        }
        Ok(())
    }

    async fn golden_made(&self) -> Result<(), BenchError> {
        let begun = Instant::now();
        loop {
            let request = GetObjectRequest {
                kind: "ActorTemplate".to_owned(),
                namespace: NAMESPACE.to_owned(),
                name: TEMPLATE.to_owned(),
            };
            let object = self.substrate(0).get_object(request).await.map_err(refused("read a template"))?.into_inner();
            let object: serde_json::Value =
                serde_json::from_str(&object.json).map_err(|error| BenchError::refused("read a template", error))?;
            match object["status"]["phase"].as_str() {
                Some("Ready") => return Ok(()),
                Some("Failed") => return Err(BenchError::refused("make a golden snapshot", &object["status"])),
                _ if begun.elapsed() > PATIENCE => {
                    return Err(BenchError::refused("make a golden snapshot in time", &object["status"]));
                }
                _ => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    async fn call(&self, call: Call, number: u32, by: usize) -> Result<(), BenchError> {
        let answer = match call {
            Call::Activate => {
                let ActorRef { atespace, name } = reference(number);
                let request = ActivateRequest { atespace, name, stale_generation: 0, wait: None };
                self.substrate(by).activate(request).await.map(drop)
            }
            Call::Resume => {
                let request = ResumeActorRequest { actor_ref: Some(reference(number)), boot: false };
                self.control(by).resume_actor(request).await.map(drop)
            }
            Call::Suspend => {
                let request = SuspendActorRequest { actor_ref: Some(reference(number)) };
                self.control(by).suspend_actor(request).await.map(drop)
            }
            Call::Update => {
                let request = UpdateActorRequest { actor_ref: Some(reference(number)), worker_selector: None };
                self.control(by).update_actor(request).await.map(drop)
            }
        };
        answer.map_err(|status| BenchError::refused(format!("{call:?} {}", actor_name(number)), status))
    }

    /// Calls for each of the actors, so many at once, each as soon as one before it is answered.
    pub(crate) async fn closed(&self, call: Call, actors: &[u32], clients: usize) -> Result<Vec<Event>, BenchError> {
        let (actors, next) = (Arc::new(actors.to_vec()), Arc::new(AtomicUsize::new(0)));
        let mut calling = JoinSet::new();
        for by in 0..clients {
            let (api, actors, next) = (self.clone(), Arc::clone(&actors), Arc::clone(&next));
            calling.spawn(async move {
                let mut events = Vec::new();
                while let Some(&number) = actors.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let start = clock::now();
                    api.call(call, number, by).await?;
                    events.push(Event { scheduled: start, start, end: clock::now() });
                }
                Ok(events)
            });
        }
        collect(calling).await
    }

    /// Calls for each of the actors, each when it is due, whatever became of those before it.
    pub(crate) async fn open(&self, call: Call, actors: &[u32], pace: Pace) -> Result<Vec<Event>, BenchError> {
        let (api, actors, runtime) = (self.clone(), actors.to_vec(), tokio::runtime::Handle::current());
        // On a thread of its own: the runtime's clock ticks in milliseconds.
        let calling = tokio::task::spawn_blocking(move || {
            let mut calling = JoinSet::new();
            let begun = clock::now();
            for (index, number) in actors.into_iter().enumerate() {
                let scheduled = begun + u64::try_from(pace.at(index as u64).as_micros()).unwrap_or(u64::MAX);
                std::thread::sleep(Duration::from_micros(scheduled.saturating_sub(clock::now())));
                let api = api.clone();
                let due = async move {
                    let start = clock::now();
                    api.call(call, number, index).await?;
                    Ok(vec![Event { scheduled, start, end: clock::now() }])
                };
                calling.spawn_on(due, &runtime);
            }
            calling
        });
        collect(calling.await.map_err(|error| BenchError::refused("send requests", error))?).await
    }

    /// A page of actors, how long it took, and what the next one is asked for with.
    pub(crate) async fn page(&self, token: &str) -> Result<(usize, Event, String), BenchError> {
        let request =
            ListActorsRequest { atespace: ATESPACE.to_owned(), page_token: token.to_owned(), ..Default::default() };
        let start = clock::now();
        let page = self.control(0).list_actors(request).await.map_err(refused("list actors"))?.into_inner();
        Ok((page.actors.len(), Event { scheduled: start, start, end: clock::now() }, page.next_page_token))
    }

    /// Tells of every change from now on: its version and when it was told.
    pub(crate) async fn watch(&self, by: usize) -> Result<tokio::sync::mpsc::Receiver<(u64, u64)>, BenchError> {
        // Of an atespace in which nobody is: the list is empty, and tells where the store is.
        let nobody = WatchActorsRequest { atespace: Some("nobody".to_owned()), resume_version: 0 };
        let listed = self.substrate(by).watch_actors(nobody).await.map_err(refused("watch actors"))?;
        let listed = listed.into_inner().message().await.map_err(refused("watch actors"))?;
        let version = match listed {
            Some(event) if matches!(event.event, Some(actor_event::Event::Listed(_))) => event.version,
            _ => return Err(BenchError::refused("watch actors", "the list did not end")),
        };
        let request = WatchActorsRequest { atespace: Some(ATESPACE.to_owned()), resume_version: version };
        let mut changes = self
            .substrate(by)
            .watch_actors(request)
            .await
            .map(Response::into_inner)
            .map_err(refused("watch actors"))?;
        let (tell, told) = tokio::sync::mpsc::channel(4096);
        tokio::spawn(async move {
            while let Ok(Some(event)) = changes.message().await {
                if tell.send((event.version, clock::now())).await.is_err() {
                    return;
                }
            }
        });
        Ok(told)
    }
}

async fn collect(mut calling: JoinSet<Result<Vec<Event>, BenchError>>) -> Result<Vec<Event>, BenchError> {
    let mut events = Vec::new();
    while let Some(called) = calling.join_next().await {
        events.extend(called.map_err(|error| BenchError::refused("send requests", error))??);
    }
    events.sort_by_key(|event| event.start);
    Ok(events)
}
