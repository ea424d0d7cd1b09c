//! An `ate dev` of the benchmark's own, on a data directory and ports that nobody else has.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use ate_proto::ate::v1::substrate_client::SubstrateClient;
use ate_proto::ate::v1::{
    ActorState, ApplyRequest, GetHistoryRequest, GetInfoRequest, GetObjectRequest, HistoryEntry, WatchActorsRequest,
    actor_event,
};
use ate_proto::ateapi::control_client::ControlClient;
use ate_proto::ateapi::{ActorRef, CreateActorRequest, CreateAtespaceRequest, DeleteActorRequest, SuspendActorRequest};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::{BenchError, Setup};

pub(crate) const ATESPACE: &str = "bench";

/// For what has no deadline of its own: a start, a golden snapshot. Generous, as the machine may be slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long it may take to suspend every actor and end.
const END_WITHIN: Duration = Duration::from_secs(60);

/// Between two looks at what tells nobody when it changes.
const LOOK_EVERY: Duration = Duration::from_millis(20);

pub(crate) struct Dev {
    child: Child,
    data: PathBuf,
    channel: Channel,
    router: SocketAddr,
    actors: watch::Receiver<HashMap<String, ActorState>>,
}

impl Dev {
    pub(crate) async fn start(setup: &Setup, directory: &Path) -> Result<Self, BenchError> {
        let (data, log) = (directory.join("data"), directory.join("dev.log"));
        let stderr = std::fs::File::create(&log).map_err(BenchError::io("make a log"))?;
        let mut child = Command::new(&setup.program)
            .args(["dev", "--listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0", "--data-dir"])
            .arg(&data)
            .arg("--runtime")
            .arg(setup.runtime()?)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .map_err(BenchError::io("start `ate dev`"))?;
        let begun = Instant::now();
        let (channel, router) = loop {
            if let Some(up) = reach(&data).await {
                break up;
            }
            let ended = child.try_wait().map_err(BenchError::io("follow `ate dev`"))?;
            if ended.is_some() || begun.elapsed() > PATIENCE {
                let _ = child.kill();
                let _ = child.wait();
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                return Err(BenchError::refused("start `ate dev`", said.trim()));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        };
        let (tell, actors) = watch::channel(HashMap::new());
        tokio::spawn(follow(SubstrateClient::new(channel.clone()), tell));
        let dev = Self { child, data, channel, router, actors };
        let request = CreateAtespaceRequest { name: ATESPACE.to_owned() };
        dev.control().create_atespace(request).await.map_err(refused("make an atespace"))?;
        Ok(dev)
    }

    fn control(&self) -> ControlClient<Channel> {
        ControlClient::new(self.channel.clone())
    }

    fn substrate(&self) -> SubstrateClient<Channel> {
        SubstrateClient::new(self.channel.clone())
    }

    pub(crate) fn router(&self) -> SocketAddr {
        self.router
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The processes of the workers, as the node has written them down.
    pub(crate) fn worker_pids(&self) -> Vec<u32> {
        let workers = std::fs::read_dir(self.data.join("node/workers")).into_iter().flatten().flatten();
        let pid = |path: PathBuf| {
            let birth: serde_json::Value =
                serde_json::from_slice(&std::fs::read(path.join("worker.json")).ok()?).ok()?;
            u32::try_from(birth["pid"].as_u64()?).ok()
        };
        workers.filter_map(|entry| pid(entry.path())).collect()
    }

    /// A pool, and templates of the image beside it: name and how long until an idle actor is frozen.
    pub(crate) async fn apply(
        &self,
        image: &str,
        workers: usize,
        templates: &[(&str, Option<&str>)],
    ) -> Result<(), BenchError> {
        let mut documents = vec![format!(
            "{{apiVersion: ate.dev/v1alpha1, kind: WorkerPool, metadata: {{name: bench, namespace: bench}}, spec: {{replicas: {workers}}}}}"
        )];
        for (name, freeze_after) in templates {
            let idle = freeze_after.map(|after| format!("\n  idle: {{freezeAfter: {after}}}")).unwrap_or_default();
            documents.push(format!(
                "apiVersion: ate.dev/v1alpha1
kind: ActorTemplate
metadata: {{name: {name}, namespace: bench}}
spec:
  containers: [{{name: main, image: '{image}', readyz: {{httpGet: {{port: 80}}}}}}]
  snapshotsConfig: {{location: 'gs://bench/{name}'}}{idle}
"
            ));
        }
        let request = ApplyRequest { documents, dry_run: false };
        self.substrate().apply(request).await.map_err(refused("apply the benchmark's objects"))?;
        for (name, _) in templates {
            self.ready(name).await?;
        }
        Ok(())
    }

    async fn ready(&self, template: &str) -> Result<(), BenchError> {
        let begun = Instant::now();
        loop {
            let request =
                GetObjectRequest { kind: "ActorTemplate".into(), namespace: "bench".into(), name: template.into() };
            let object = self.substrate().get_object(request).await.map_err(refused("read a template"))?.into_inner();
            let object: serde_json::Value =
                serde_json::from_str(&object.json).map_err(|error| BenchError::refused("read a template", error))?;
            let status = &object["status"];
            match status["phase"].as_str() {
                Some("Ready") => return Ok(()),
                Some("Failed") => return Err(BenchError::refused("make a golden snapshot", status)),
                _ if begun.elapsed() > PATIENCE => {
                    return Err(BenchError::refused("make a golden snapshot in time", status));
                }
                _ => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    pub(crate) async fn create(&self, name: &str, template: &str) -> Result<(), BenchError> {
        let request = CreateActorRequest {
            actor_ref: Some(reference(name)),
            actor_template_namespace: "bench".into(),
            actor_template_name: template.into(),
            worker_selector: None,
        };
        self.control().create_actor(request).await.map_err(refused("create an actor")).map(drop)
    }

    pub(crate) async fn suspend(&self, name: &str) -> Result<(), BenchError> {
        let request = SuspendActorRequest { actor_ref: Some(reference(name)) };
        self.control().suspend_actor(request).await.map_err(refused("suspend an actor")).map(drop)
    }

    pub(crate) async fn delete(&self, name: &str) -> Result<(), BenchError> {
        let request = DeleteActorRequest { actor_ref: Some(reference(name)) };
        self.control().delete_actor(request).await.map_err(refused("delete an actor")).map(drop)
    }

    /// The newest entry of the actor's history with this event.
    pub(crate) async fn latest(&self, name: &str, event: &str) -> Option<HistoryEntry> {
        let request = GetHistoryRequest { atespace: ATESPACE.into(), name: name.into() };
        let history = self.substrate().get_history(request).await.ok()?.into_inner();
        history.entries.into_iter().rev().find(|entry| entry.event == event)
    }

    /// Waits until the watch tells that the actor is so; the moment it was told.
    pub(crate) async fn until(
        &self,
        name: &str,
        what: &str,
        mut holds: impl FnMut(&ActorState) -> bool,
    ) -> Result<Instant, BenchError> {
        let mut actors = self.actors.clone();
        let seen = actors.wait_for(|actors| actors.get(name).is_some_and(&mut holds));
        match tokio::time::timeout(PATIENCE, seen).await {
            Ok(Ok(_)) => Ok(Instant::now()),
            Ok(Err(_)) => Err(BenchError::refused(format!("see actor {name} {what}"), "the watch has ended")),
            Err(_) => Err(BenchError::refused(format!("see actor {name} {what}"), "it never was")),
        }
    }

    /// As Ctrl-C does; waits for the end.
    pub(crate) async fn stop(mut self) -> Result<(), BenchError> {
        let ended = tokio::task::spawn_blocking(move || self.end()).await;
        match ended.map_err(std::io::Error::other).flatten().map_err(BenchError::io("end `ate dev`"))? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(BenchError::refused("end `ate dev`", status)),
            None => Err(BenchError::refused("end `ate dev`", "it does not, and was killed")),
        }
    }

    /// Blocks. `None`: it had to be killed.
    fn end(&mut self) -> std::io::Result<Option<ExitStatus>> {
        if let Some(ended) = self.child.try_wait()? {
            return Ok(Some(ended));
        }
        signal(self.child.id(), rustix::process::Signal::INT);
        let begun = Instant::now();
        while begun.elapsed() < END_WITHIN {
            if let Some(ended) = self.child.try_wait()? {
                return Ok(Some(ended));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.child.kill()?;
        self.child.wait()?;
        // Workers outlive their node on purpose; these must not. Nobody starts more by now.
        self.worker_pids().into_iter().for_each(|pid| signal(pid, rustix::process::Signal::KILL));
        Ok(None)
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

pub(crate) fn host(actor: &str) -> String {
    format!("{actor}.{ATESPACE}.localhost")
}

fn reference(name: &str) -> ActorRef {
    ActorRef { atespace: ATESPACE.into(), name: name.into() }
}

fn refused(what: &'static str) -> impl FnOnce(tonic::Status) -> BenchError {
    move |status| BenchError::refused(what, status.message())
}

async fn reach(data: &Path) -> Option<(Channel, SocketAddr)> {
    let path = data.join("api.sock");
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
    });
    let channel = Endpoint::from_static("http://ate").connect_with_connector(connector).await.ok()?;
    let info = SubstrateClient::new(channel.clone()).get_info(GetInfoRequest {}).await.ok()?.into_inner();
    let port: u16 = info.router_url.rsplit(':').next()?.parse().ok()?;
    Some((channel, SocketAddr::from(([127, 0, 0, 1], port))))
}

async fn follow(mut substrate: SubstrateClient<Channel>, tell: watch::Sender<HashMap<String, ActorState>>) {
    let request = WatchActorsRequest { atespace: Some(ATESPACE.to_owned()), resume_version: 0 };
    let Ok(stream) = substrate.watch_actors(request).await else { return };
    let mut stream = stream.into_inner();
    while let Ok(Some(event)) = stream.message().await {
        match event.event {
            Some(actor_event::Event::Changed(state)) => {
                let name = state.actor.as_ref().map(|actor| actor.actor_id.clone()).unwrap_or_default();
                tell.send_modify(|actors| drop(actors.insert(name, state)));
            }
            Some(actor_event::Event::Deleted(key)) => tell.send_modify(|actors| drop(actors.remove(&key.name))),
            _ => {}
        }
    }
}

fn signal(pid: u32, signal: rustix::process::Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}
