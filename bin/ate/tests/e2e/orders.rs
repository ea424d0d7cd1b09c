//! A real node, with real sandboxes, keeps what the simulated ones keep, also for a control plane that is elsewhere.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ate_blob::{Backend, Blobs};
use ate_identity::{ClientCertificates, Identity, Role};
use ate_name::{ActorUid, Digest, NodeName, ObjectKey, OpId, SessionId, TemplateUid};
use ate_node::{LocalNode, Node, Pool, Registry, Renewed};
use ate_orders::conformance::{Subject, keeps_its_promises};
use ate_orders::{
    Container, Identity as Incarnation, NODE_SERVES_FOR, Nodes, Readyz, Runtime, RuntimeAsset, Source, Workload,
};
use ate_orders_grpc::{News, RemoteNodes};
use ate_snapshot::{DataKey, Home, InstanceKey, Location, SnapshotId};
use base64::Engine as _;
use futures::FutureExt as _;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::ATE;

const INSTANCE_KEY: [u8; 32] = [7; 32];

/// A node that does not come up by then never will.
const PATIENCE: Duration = Duration::from_secs(60);

/// `sha256  architecture/build/file` lines.
const PINS: &str = include_str!("../../../../runtime/gvisor/SHA256SUMS");

struct Real {
    name: NodeName,
    nodes: RemoteNodes,
    image: String,
    runtime: Runtime,
    ear: Arc<Ear>,
}

/// A control plane that hears the node, or does not.
struct Ear {
    hears: AtomicBool,
    heard: AtomicU64,
}

#[async_trait::async_trait]
impl Registry for Ear {
    async fn renew(&self, _: SessionId, _: bool, _: u64) -> Result<Renewed, String> {
        if !self.hears.load(Ordering::Relaxed) {
            return Err("it is deaf".to_owned());
        }
        let beat = self.heard.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Renewed::Kept { pools: vec![pool()], surplus: Vec::new(), beat })
    }
}

#[async_trait::async_trait]
impl Subject for Real {
    fn nodes(&self) -> &dyn Nodes {
        &self.nodes
    }

    fn node(&self) -> NodeName {
        self.name.clone()
    }

    fn workload(&self) -> Workload {
        Workload {
            template: ObjectKey::new("demo", "counter"),
            template_uid: TemplateUid::from_random([1; 16]),
            containers: vec![Container {
                name: "main".to_owned(),
                image: self.image.clone(),
                command: Vec::new(),
                env: Vec::new(),
                volumes: BTreeMap::from([("data".to_owned(), "/data".to_owned())]),
                readyz: Some(Readyz { path: "/readyz".to_owned(), port: 80 }),
            }],
            ports: Vec::new(),
            egress: Vec::new(),
            memory_limit: None,
            cpu_limit_millis: None,
            durable_bytes: Some(16 << 20),
            freeze_after: None,
        }
    }

    fn boot(&self) -> Source {
        Source::Boot { runtime: self.runtime.clone() }
    }

    fn sealed_key(&self, actor: ActorUid) -> String {
        let key = DataKey::from_random([actor.as_bytes()[0]; 32]);
        let wrapped = InstanceKey::from_bytes(INSTANCE_KEY).wrap(&key, actor, [1; 12]);
        base64::engine::general_purpose::STANDARD.encode(wrapped.as_bytes())
    }

    fn home(&self, identity: &Incarnation) -> String {
        let location = Location::parse("gs://snapshots/counter").expect("a location");
        Home { location, actor: identity.key.clone(), uid: identity.uid }.to_string()
    }

    fn prefix(&self, identity: &Incarnation, op: OpId) -> String {
        let id = SnapshotId { actor: identity.uid, generation: identity.generation, op };
        format!("{}/{id}", self.home(identity))
    }

    async fn is_heard(&self, heard: bool) {
        let before = self.ear.heard.load(Ordering::Relaxed);
        self.ear.hears.store(heard, Ordering::Relaxed);
        if !heard {
            // What it was told last holds for so long, and one more answer may be on its way.
            return tokio::time::sleep(2 * NODE_SERVES_FOR).await;
        }
        let begun = Instant::now();
        // The second time it has taken in what it was told the first time.
        while self.ear.heard.load(Ordering::Relaxed) < before + 2 {
            assert!(begun.elapsed() < PATIENCE, "it does not say that it lives");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn pool() -> Pool {
    Pool { key: ObjectKey::new("demo", "counter"), workers: 2, memory_limit: None, cpu_limit_millis: None }
}

fn runtime() -> Runtime {
    let directory = ate_testkit::sandbox_runtimes();
    let architecture = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
    let prefix = format!("{architecture}/tuned/");
    let pinned = PINS.lines().filter_map(|line| {
        let (sha256, path) = line.split_once("  ")?;
        let file = path.strip_prefix(&prefix)?;
        let asset = RuntimeAsset {
            url: format!("file://{directory}/tuned/{file}"),
            sha256: Digest::parse(sha256).expect("a digest"),
        };
        Some((file.rsplit('/').next().unwrap_or(file).to_owned(), asset))
    });
    Runtime {
        config: "gvisor-default".to_owned(),
        class: "gvisor".to_owned(),
        assets: BTreeMap::from([(architecture.to_owned(), pinned.collect())]),
    }
}

async fn open(directory: &Path) -> Arc<Node> {
    let storage = Blobs::open(Backend::Directory(directory.join("storage"))).await.expect("a directory");
    let (node, mut events) = Node::open(ate_node::Config {
        name: NodeName::new("real"),
        directory: directory.join("node"),
        worker_program: ATE.into(),
        build: env!("CARGO_PKG_VERSION").to_owned(),
        instance_key: INSTANCE_KEY,
        activations_at_once: 2,
        storage: Some(storage),
        image_budget: u64::MAX,
        copy_budget: u64::MAX,
        asset_budget: u64::MAX,
        door: None,
        registry_config: None,
    })
    .expect("a node");
    tokio::spawn(async move { while events.recv().await.is_some() {} });
    node.set_pools(vec![pool()]);
    tokio::spawn(Arc::clone(&node).keep_workers());
    let begun = Instant::now();
    while node.workers().len() < 2 {
        assert!(begun.elapsed() < PATIENCE, "no workers");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    node
}

/// The node as a replica has it that is elsewhere.
async fn at_a_distance(node: &Arc<Node>, directory: &Path) -> (RemoteNodes, JoinSet<()>) {
    let identity = Identity::open(directory).expect("a new one");
    let tls = identity.server_config(Role::Node, &["127.0.0.1"], ClientCertificates::Required).expect("a certificate");
    let (door, nodes) = (TlsAcceptor::from(Arc::new(tls)), Arc::new(LocalNode(Arc::clone(node))));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("it has one").to_string();
    let (connections, incoming) = mpsc::channel(1);
    let mut serving = JoinSet::new();
    let serve = ate_orders_grpc::serve(node.name().clone(), nodes, News::default(), incoming, std::future::pending());
    serving.spawn(async move { serve.await.expect("it serves") });
    serving.spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            let stream = door.accept(stream).await.expect("of the instance");
            connections.send(stream).await.expect("it is served");
        }
    });
    let remote = RemoteNodes::new(Arc::new(identity.client_config(Role::Api, Role::Node).expect("a certificate")));
    remote.know(node.name(), &address);
    (remote, serving)
}

#[tokio::test]
async fn a_real_node_keeps_the_promises_that_the_simulation_relies_on() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    std::fs::create_dir(directory.path().join("storage")).expect("a directory");
    let node = open(directory.path()).await;
    let image = ate_testkit::counter_image(directory.path());
    let ear = Arc::new(Ear { hears: AtomicBool::new(true), heard: AtomicU64::new(0) });
    let registered = tokio::spawn(Arc::clone(&node).keep_registered(ear.clone()));
    let (nodes, _serving) = at_a_distance(&node, &directory.path().join("identity")).await;
    let real = Real { name: node.name().clone(), nodes, image, runtime: runtime(), ear };
    let kept = AssertUnwindSafe(keeps_its_promises(&real)).catch_unwind().await;
    // Also when it does not: workers outlive a node that is gone.
    registered.abort();
    node.stop(&[]).await;
    kept.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}
