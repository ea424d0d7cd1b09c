//! `ate dev`: every role in one process, workers beside it, all state in one directory.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use ate_control::{Control, Settings};
use ate_name::{NodeName, ObjectKey};
use ate_node::{LocalNode, Node, Pool};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::local::{InProcess, InstanceKeys, ThisWorld, feed};

/// An unused connection to an actor is soon closed: an open one counts as use, and keeps the actor from being frozen.
const WORKER_IDLE: Duration = Duration::from_millis(200);

#[derive(Debug, clap::Args)]
pub(crate) struct DevArgs {
    /// Where everything is kept
    #[arg(long, env = "ATE_DATA_DIR", default_value = "/var/lib/ate")]
    data_dir: PathBuf,
    /// Where actors are reached: http://<actor>.<atespace>.localhost:<port>/
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Objects to apply at start
    #[arg(long, short = 'f')]
    file: Vec<PathBuf>,
}

pub(crate) async fn run(args: DevArgs) -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("`ate dev` makes namespaces, control groups and mounts, and so must run as root\n  try: sudo ate dev");
    }
    std::fs::create_dir_all(&args.data_dir).with_context(|| format!("cannot make {}", args.data_dir.display()))?;
    let name = NodeName::new(rustix::system::uname().nodename().to_string_lossy());
    let listener = tokio::net::TcpListener::bind(args.listen).await.with_context(|| {
        format!("cannot listen on {}: choose another address with --listen", args.listen)
    })?;
    let instance_key = [7; 32];
    let (node, events) = Node::open(ate_node::Config {
        name: name.clone(),
        directory: args.data_dir.join("node"),
        worker_program: std::env::current_exe()?,
        build: crate::BUILD.to_owned(),
        instance_key,
        activations_at_once: std::thread::available_parallelism()?.get(),
    })?;
    let store = Arc::new(ate_store::MemoryStore::default());
    let nodes = Arc::new(LocalNode(Arc::clone(&node)));
    let control = Control::new(store, nodes, Arc::new(ThisWorld), Arc::new(InstanceKeys(instance_key)), Settings::default());
    control.start().await?;
    control.recover(&name, &node.adopt().await).await?;
    let shutdown = CancellationToken::new();
    let (updates, updated) = mpsc::channel(64);
    let stats = Arc::default();
    let config = ate_router::RouterConfig { worker_idle_timeout: WORKER_IDLE, ..Default::default() };
    let routing = tokio::spawn(ate_router::serve(
        vec![listener],
        config,
        Arc::new(InProcess(Arc::clone(&control))),
        updated,
        stats,
        shutdown.clone(),
    ));
    tokio::spawn(feed(Arc::clone(&control), updates));
    tokio::spawn({
        let (control, name) = (Arc::clone(&control), name.clone());
        async move { control.listen(name, events).await }
    });
    tokio::spawn(Arc::clone(&node).report_regularly());
    tokio::spawn(keep_pools(Arc::clone(&control), Arc::clone(&node)));
    control.start_controllers();
    for file in &args.file {
        let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let read = ate_object::read_manifests(&file.display().to_string(), &bytes, ate_object::DEFAULT_NAMESPACE)?;
        control.apply(read.objects).await?;
    }
    eprintln!("ready: http://<actor>.<atespace>.localhost:{}/", args.listen.port());
    tokio::signal::ctrl_c().await?;
    eprintln!("stopping");
    shutdown.cancel();
    for (actor, error) in control.suspend_all().await? {
        eprintln!("actor {actor} was not suspended: {error}");
    }
    control.stop().await;
    node.stop().await;
    routing.await?;
    Ok(())
}

/// Gives every pool its workers, and again whenever the catalog changes.
async fn keep_pools(control: Arc<Control>, node: Arc<Node>) {
    let mut changes = control.catalog_changes();
    loop {
        let pools: Vec<Pool> = control
            .pools()
            .iter()
            .map(|pool| Pool {
                key: ObjectKey::new(pool.metadata.namespace.clone(), pool.metadata.name.clone()),
                workers: pool.spec.replicas,
                memory_limit: pool.spec.memory_limit_bytes(),
                cpu_limit_millis: pool.spec.cpu_limit_millis(),
            })
            .collect();
        if let Err(error) = node.set_pools(&pools).await {
            tracing::error!(%error, "workers could not be started");
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}
