//! `ate dev`: every role in one process, workers beside it, all state in one directory.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use ate_control::Control;
use ate_name::{NodeName, WorkerUid};
use ate_node::{LocalNode, Node, Pool};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::local::{InProcess, InstanceKeys, ThisWorld, feed};
use crate::machine::{
    self, NodeResources, Storage, Tasks, any_ended, api_socket, asked_to_end, check_host, host_name, listen,
    make_directory, tend,
};
use crate::metrics::MetricsArgs;
use crate::place::{Opened, Place};
use crate::runtime;

/// An unused connection to an actor is soon closed: an open one counts as use, and keeps the actor from being frozen.
const WORKER_IDLE: Duration = Duration::from_millis(200);

/// How long requests that are under way may take to end before they are cut.
const GRACE: Duration = Duration::from_secs(10);

/// How often workers are counted when nothing has changed; those that are emptied are ended then, too.
const SURPLUS_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, clap::Args)]
pub(crate) struct DevArgs {
    /// Where actors are reached: http://<actor>.<atespace>.localhost:<port>/
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Where the API is served by TLS; it is also on a socket in the data directory
    #[arg(long, default_value = "127.0.0.1:8443", value_name = "ADDRESS")]
    api_listen: SocketAddr,
    /// Take API clients from other machines without asking for a certificate of the instance
    #[arg(long)]
    api_open: bool,
    /// Further names and addresses under which clients reach the API, for its certificate
    #[arg(long, value_name = "HOST")]
    api_advertise: Vec<String>,
    /// The sandbox runtimes, as `runtime/build` prints it; found in the user's cache if not given
    #[arg(long, env = "ATE_RUNTIME", value_name = "DIR")]
    runtime: Option<PathBuf>,
    /// Where snapshots are durable: `disk` (of this machine, in the data directory), a directory (of another disk), or
    /// `s3`, `gs`, `azure` with endpoint and credentials from the environment as their own tools read them
    #[arg(long, default_value = "disk", value_name = "WHERE", value_parser = machine::storage)]
    storage: Storage,
    #[command(flatten)]
    resources: NodeResources,
    #[command(flatten)]
    metrics: MetricsArgs,
}

/// Everything that runs, in the order in which it is stopped.
struct Machine {
    control: Arc<Control>,
    node: Arc<Node>,
    store: Opened,
    socket: PathBuf,
    shutdown: CancellationToken,
    serving: Tasks,
    /// Goes on while it stops.
    tending: Tasks,
}

pub(crate) async fn run(args: DevArgs, data: &Path) -> anyhow::Result<()> {
    let mut machine = Machine::start(&args, data).await?;
    let ended = tokio::select! {
        asked = asked_to_end() => asked,
        error = machine.store.stopped() => Err(error),
        error = any_ended(&mut machine.serving) => Err(error),
        error = any_ended(&mut machine.tending) => Err(error),
    };
    tokio::select! {
        stopped = machine.stop() => stopped?,
        // Whoever asks a second time does not want to wait. What is not put away stays in its worker, as after a crash.
        _ = asked_to_end() => bail!(
            "ended before everything was put away: start `ate dev` again on this directory within {} minutes to keep it",
            ate_worker::ORPHANED_AFTER.as_secs() / 60
        ),
    }
    ended
}

impl Machine {
    async fn start(args: &DevArgs, data: &Path) -> anyhow::Result<Self> {
        check_host()?;
        let directory = make_directory(data)?;
        let configs = runtime::shipped(args.runtime.as_deref())?;
        let actors = listen(args.listen, "--listen").await?;
        let api = listen(args.api_listen, "--api-listen").await?;
        let metrics = args.metrics.listen().await?;
        let (actors_at, api_at) = (actors.local_addr()?, api.local_addr()?);
        let store = Place::Directory(directory.join("store")).open().await?;
        let identity = machine::own_identity(&directory.join("identity"), &*store.store()).await?;
        let name = node_name(&directory)?;
        let node_directory = directory.join("node");
        let (node, events) = args.resources.node(name.clone(), node_directory, &identity, &args.storage, None).await?;
        let nodes = Arc::new(LocalNode(Arc::clone(&node)));
        let keys = Arc::new(InstanceKeys(identity.instance_key()));
        let control =
            Control::new(store.store(), nodes.clone(), Arc::new(ThisWorld), keys, ate_control::Settings::default());
        control.start().await?;
        node.adopt().await;
        control.reconcile(&name).await?;
        for config in configs {
            runtime::ship(&control, config).await?;
        }

        let shutdown = CancellationToken::new();
        let (mut serving, mut tending) = (Tasks::new(), Tasks::new());
        let (updates, updated) = mpsc::channel(64);
        let activator = Arc::new(InProcess(Arc::clone(&control)));
        let stats = Arc::<ate_router::Stats>::default();
        let routing =
            ate_router::serve(vec![actors], router_config(), activator, updated, Arc::clone(&stats), shutdown.clone());
        serving.spawn(async move {
            routing.await;
            Ok(())
        });
        tend(&mut tending, feed(Arc::clone(&control), updates));
        machine::mind(&mut tending, &control);
        let secured = machine::secured(&identity, api, &args.api_advertise, args.api_open)?;
        let info = machine::info(&identity, format!("http://localhost:{}", actors_at.port()));
        let listeners =
            ate_apiserver::Listeners { unix: api_socket(&directory.join(ate_cli::SOCKET))?, tls: Some(secured) };
        let api = ate_apiserver::serve(Arc::clone(&control), nodes, info, listeners, shutdown.clone());
        serving.spawn(async move { Ok(api.await?) });

        let (listener, from) = (Arc::clone(&control), name.clone());
        tend(&mut tending, async move { listener.listen(from, events).await });
        tend(&mut tending, Arc::clone(&control).look_after(name.clone()));
        tend(&mut tending, Arc::clone(&node).report_regularly());
        tend(&mut tending, Arc::clone(&node).evict_regularly());
        tend(&mut tending, keep_pools(Arc::clone(&control), Arc::clone(&node)));
        tend(&mut tending, Arc::clone(&node).keep_workers());
        control.start_controllers();
        eprintln!("ate dev is up, all state in {}", directory.display());
        eprintln!("  actors  http://<actor>.<atespace>.localhost:{}/", actors_at.port());
        eprintln!("  API     unix://{}, https://{}", directory.join(ate_cli::SOCKET).display(), api_at);
        let counting = Arc::clone(&control);
        metrics.serve(&mut tending, move || [counting.samples(), crate::metrics::of_router(&stats)].concat())?;
        let socket = directory.join(ate_cli::SOCKET);
        Ok(Self { control, node, store, socket, shutdown, serving, tending })
    }

    /// Every actor is suspended first: the next start finds all of them where they were.
    async fn stop(self) -> anyhow::Result<()> {
        eprintln!("stopping: suspending actors");
        self.shutdown.cancel();
        let kept: Vec<WorkerUid> = match self.control.suspend_all().await {
            Ok(unsaved) => unsaved
                .into_iter()
                .map(|(actor, worker, error)| {
                    eprintln!("actor {actor} was not suspended: {error}");
                    worker
                })
                .collect(),
            Err(error) => {
                eprintln!("actors could not be suspended: {error}");
                self.node.workers()
            }
        };
        let minutes = ate_worker::ORPHANED_AFTER.as_secs() / 60;
        if !kept.is_empty() {
            eprintln!(
                "they stay in their workers for {minutes} minutes: start `ate dev` again on this directory to keep them"
            );
        }
        self.control.stop().await;
        if !self.node.stop(&kept).await.is_empty() {
            eprintln!("some images could not be stored yet and stay in their workers for {minutes} minutes:");
            eprintln!("  start `ate dev` again on this directory, with room on its disk, to keep them");
        }
        machine::end(self.serving, &self.socket, self.store).await
    }
}

pub(crate) fn router_config() -> ate_router::RouterConfig {
    ate_router::RouterConfig { worker_idle_timeout: WORKER_IDLE, shutdown_grace: GRACE, ..Default::default() }
}

fn pool_of(share: ate_control::Share) -> Pool {
    Pool {
        key: share.pool,
        workers: share.workers,
        memory_limit: share.memory_limit,
        cpu_limit_millis: share.cpu_limit_millis,
    }
}

/// Tells the node which pools there are, and again whenever the catalog changes. Workers beyond them are ended.
async fn keep_pools(control: Arc<Control>, node: Arc<Node>) {
    let mut changes = control.catalog_changes();
    loop {
        let shares = control.shares(node.name());
        match control.surplus(node.name(), &shares).await {
            Ok(surplus) => node.retire(surplus),
            Err(error) => tracing::warn!(%error, "workers that are not needed stay"),
        }
        node.set_pools(shares.into_iter().map(pool_of).collect());
        // A worker that was being started while its pool shrank is seen the next time.
        let _ = tokio::time::timeout(SURPLUS_EVERY, changes.changed()).await;
    }
}

/// What the machine was called when its data was made. Workers and snapshots are found by that, whatever it is called now.
fn node_name(directory: &Path) -> anyhow::Result<NodeName> {
    let path = directory.join("node-name");
    let known = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        read => read.with_context(|| format!("cannot read {}", path.display()))?,
    };
    if !known.trim().is_empty() {
        return Ok(NodeName::new(known.trim()));
    }
    let name = host_name();
    let write = || {
        let mut file = tempfile::NamedTempFile::new_in(directory)?;
        std::io::Write::write_all(&mut file, name.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(&path)?;
        std::io::Result::Ok(())
    };
    write().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(NodeName::new(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_keeps_its_name_when_the_machine_gets_another() {
        let directory = tempfile::tempdir().expect("a directory");
        assert_eq!(node_name(directory.path()).expect("named").as_str(), host_name());
        std::fs::write(directory.path().join("node-name"), "as-it-was\n").expect("written");
        assert_eq!(node_name(directory.path()).expect("known").as_str(), "as-it-was");
    }
}
