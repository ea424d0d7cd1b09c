//! A node, and workers that are only talked to, for tests.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ate_name::{ActorKey, ActorUid, Digest, Generation, NodeName, ObjectKey, OpId, TemplateUid, WorkerUid};
use ate_orders::{Identity, Workload};
use ate_worker::link::{self, Answer, BoxKind, Call, Command, Event, Recalled, Refusal, Report};
use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio::sync::broadcast;

use crate::boxes::Ran;
use crate::workers::{Birth, Handle, Memo};
use crate::{Config, Node, NodeError};

pub(crate) const BUILD: &str = "test";

pub(crate) fn config(directory: &Path, worker_program: PathBuf) -> Config {
    Config {
        name: NodeName::new("n"),
        directory: directory.join("node"),
        worker_program,
        build: BUILD.to_owned(),
        instance_key: [7; 32],
        activations_at_once: 1,
        storage: None,
        image_budget: u64::MAX,
        copy_budget: u64::MAX,
        asset_budget: u64::MAX,
        door: None,
        registry_config: None,
    }
}

/// One that starts no workers.
pub(crate) fn node(directory: &Path) -> Arc<Node> {
    Node::open(config(directory, "/nowhere".into())).expect("a node").0
}

pub(crate) fn identity() -> Identity {
    Identity {
        uid: ActorUid::from_random([1; 16]),
        key: ActorKey::parse("space", "a").expect("a name"),
        template: ObjectKey::new("demo", "counter"),
        generation: Generation::new(1),
    }
}

pub(crate) fn workload() -> Workload {
    Workload {
        template: ObjectKey::new("demo", "counter"),
        template_uid: TemplateUid::from_random([1; 16]),
        containers: Vec::new(),
        ports: Vec::new(),
        egress: Vec::new(),
        memory_limit: None,
        cpu_limit_millis: None,
        durable_bytes: None,
        freeze_after: None,
    }
}

pub(crate) fn ran() -> Ran {
    Ran { assets: BTreeMap::new(), label: String::new(), workload: Digest::from_bytes([0; 32]) }
}

fn memo() -> serde_json::Value {
    serde_json::to_value(Memo { ran: ran(), workload: workload() }).expect("plain data")
}

/// A worker that lets everybody in and keeps what it has captured.
#[derive(Debug)]
pub(crate) struct Stub {
    pub(crate) build: String,
    /// Archives.
    pub(crate) retained: Mutex<HashMap<OpId, File>>,
    pub(crate) boxes: Mutex<Vec<BoxKind>>,
    pub(crate) stopped: tokio_util::sync::CancellationToken,
    pub(crate) news: broadcast::Sender<Event>,
    /// What it never answers.
    pub(crate) is_deaf_to: fn(&Command) -> bool,
    /// Its link ends without a word.
    pub(crate) dies: tokio::sync::Notify,
}

impl Stub {
    pub(crate) fn new(retained: HashMap<OpId, File>) -> Self {
        let (build, retained) = (BUILD.to_owned(), Mutex::new(retained));
        Self {
            build,
            retained,
            boxes: Mutex::default(),
            stopped: Default::default(),
            news: broadcast::Sender::new(8),
            is_deaf_to: |_| false,
            dies: Default::default(),
        }
    }

    /// Where a worker of the node's has its directory, and who it is.
    pub(crate) fn birth(node: &Node) -> (Birth, PathBuf) {
        let uid = WorkerUid::from_random(rand::random());
        // No process is to be ended for it.
        let birth = Birth { uid, pool: ObjectKey::new("demo", "small"), pod: "small-0".to_owned(), pid: 0 };
        let directory = node.config.directory.join("workers").join(uid.to_string());
        std::fs::create_dir_all(directory.join("link")).expect("a directory");
        (birth, directory)
    }

    /// Begins to serve, and is found by the node.
    pub(crate) async fn join(self: &Arc<Self>, node: &Arc<Node>) -> Result<Arc<Handle>, NodeError> {
        let (birth, directory) = self.settle(node);
        node.connect(&birth, &directory).await
    }

    /// Begins to serve; whoever looks into the directory finds it.
    pub(crate) fn settle(self: &Arc<Self>, node: &Arc<Node>) -> (Birth, PathBuf) {
        let (birth, directory) = Self::birth(node);
        std::fs::write(directory.join("worker.json"), serde_json::to_vec(&birth).expect("plain data")).expect("a file");
        let socket = directory.join("link").join(ate_worker::LINK_SOCKET);
        let listener = UnixListener::bind(ate_sys::SocketPath::of(&socket).expect("a path").path()).expect("a socket");
        tokio::spawn(Arc::clone(self).serve(birth.uid, listener, self.news.subscribe()));
        (birth, directory)
    }

    async fn serve(self: Arc<Self>, worker: WorkerUid, listener: UnixListener, mut news: broadcast::Receiver<Event>) {
        let (stream, _) = listener.accept().await.expect("a node");
        let (mut reader, mut writer) = link::split(stream);
        while !self.stopped.is_cancelled() {
            let (said, fds) = tokio::select! {
                call = reader.next::<Call>() => {
                    let Ok(Some((Call { id, command }, _))) = call else { return };
                    if (self.is_deaf_to)(&command) {
                        continue;
                    }
                    let (result, fds) = self.answer(worker, command);
                    (link::Said::Reply { id, result }, fds)
                }
                () = self.dies.notified() => return,
                Ok(event) = news.recv() => (link::Said::Event(event), Vec::new()),
            };
            writer.send(&said, &link::borrowed(&fds)).await.expect("a node that listens");
        }
    }

    fn answer(&self, worker: WorkerUid, command: Command) -> (Result<Answer, Refusal>, Vec<OwnedFd>) {
        let mut retained = self.retained.lock();
        let answer = match command {
            Command::Report => Answer::Report(Box::new(Report {
                worker,
                build: self.build.clone(),
                hosted: None,
                warm: self.boxes.lock().clone(),
                retained: retained.keys().copied().collect(),
            })),
            Command::Memo => Answer::Memo(serde_json::Value::Null),
            Command::Recall { op } => {
                let Some(archive) = retained.get(&op) else { return (Err(Refusal::Stale), Vec::new()) };
                let archive = archive.as_fd().try_clone_to_owned().expect("a descriptor");
                let recalled = Recalled { image_bytes: 0, memory: false, data: true, memo: memo() };
                return (Ok(Answer::Recalled(recalled)), vec![archive]);
            }
            Command::Release { op } => {
                retained.remove(&op);
                Answer::Done
            }
            Command::Stop => {
                self.stopped.cancel();
                Answer::Done
            }
            Command::Prepare(prepare) => {
                self.boxes.lock().push(prepare.kind);
                Answer::Done
            }
            Command::Activate(activate) => match self.boxes.lock().pop_if(|kind| *kind == activate.kind) {
                Some(_) => Answer::Activated { phases: Vec::new() },
                None => return (Err(Refusal::NotPrepared), Vec::new()),
            },
            other => return (Err(Refusal::Failed(format!("a stub does not {other:?}"))), Vec::new()),
        };
        (Ok(answer), Vec::new())
    }
}

/// What is logged on a thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct Said(Arc<Mutex<String>>);

impl Said {
    pub(crate) fn text(&self) -> String {
        self.0.lock().clone()
    }
}

impl tracing::field::Visit for Said {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0.lock().push_str(&format!("{field}={value:?} "));
    }
}

impl tracing::Subscriber for Said {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::Id {
        tracing::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::Id, _: &tracing::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &tracing::Id) {}
    fn exit(&self, _: &tracing::Id) {}
}
