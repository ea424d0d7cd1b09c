//! `ate api`: one replica of the control plane. On PostgreSQL there may be several; any of them serves any call.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use ate_control::Control;
use ate_identity::Role;
use ate_name::NodeName;
use ate_orders_grpc::RemoteNodes;
use futures::StreamExt;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::local::{InstanceKeys, ThisWorld};
use crate::machine::{self, Tasks, any_ended, api_socket, asked_to_end, listen, make_directory};
use crate::metrics::MetricsArgs;
use crate::place::StoreArgs;
use crate::runtime;

/// How often it is looked whether nodes have come or gone, and whether one that was not heard can be.
const NODES_EVERY: Duration = Duration::from_millis(500);

#[derive(Debug, clap::Args)]
#[command(after_help = "Example, two replicas on one machine:\n  \
    ate api --data-dir /var/lib/ate/a --store postgres://ate@db/ate --listen 127.0.0.1:8443\n  \
    ate api --data-dir /var/lib/ate/b --store postgres://ate@db/ate --listen 127.0.0.1:8444 --identity /var/lib/ate/a/identity")]
pub(crate) struct ApiServerArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Where the API is served by TLS; it is also on a socket in the data directory
    #[arg(long, default_value = "127.0.0.1:8443", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Take API clients from other machines without asking for a certificate of the instance; nodes and routers are always
    /// asked
    #[arg(long)]
    open: bool,
    /// Further names and addresses under which others reach it, for its certificate; needed with `--listen 0.0.0.0:…`
    #[arg(long, value_name = "HOST")]
    advertise: Vec<String>,
    /// Who this instance is; the same for every replica [default: `identity` in the data directory]
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    /// The sandbox runtimes, as `runtime/build` prints it; nodes must find them there, too
    #[arg(long, env = "ATE_RUNTIME", value_name = "DIR")]
    runtime: Option<PathBuf>,
    /// Where people reach actors, for what the API says of itself
    #[arg(long, default_value = "http://localhost:8080", value_name = "URL")]
    router_url: String,
    #[command(flatten)]
    metrics: MetricsArgs,
}

pub(crate) async fn run(args: ApiServerArgs, data: &Path) -> anyhow::Result<()> {
    let place = args.store.place(data)?;
    let directory = make_directory(data)?;
    let configs = runtime::shipped(args.runtime.as_deref())?;
    let listener = listen(args.listen, "--listen").await?;
    let at = listener.local_addr()?;
    let opened = place.open().await?;
    let identity = args.identity.unwrap_or_else(|| directory.join("identity"));
    let identity = machine::own_identity(&identity, &*opened.store()).await?;
    let nodes = Arc::new(RemoteNodes::new(Arc::new(identity.client_config(Role::Api, Role::Node)?)));
    let settings = ate_control::Settings { replicas: opened.replicas(), ..Default::default() };
    let keys = Arc::new(InstanceKeys(identity.instance_key()));
    let control = Control::new(opened.store(), nodes.clone(), Arc::new(ThisWorld), keys, settings);
    control.start().await?;
    for config in configs {
        runtime::ship(&control, config).await?;
    }
    let shutdown = CancellationToken::new();
    let (mut serving, mut tending) = (Tasks::new(), Tasks::new());
    let socket = directory.join(ate_cli::SOCKET);
    let secured = machine::secured(&identity, listener, &args.advertise, args.open)?;
    let listeners = ate_apiserver::Listeners { unix: api_socket(&socket)?, tls: Some(secured) };
    let info = machine::info(&identity, args.router_url);
    let api = ate_apiserver::serve(Arc::clone(&control), nodes.clone(), info, listeners, shutdown.clone());
    serving.spawn(async move { Ok(api.await?) });
    tending.spawn(attend_nodes(Arc::clone(&control), nodes));
    control.start_controllers();
    let counting = Arc::clone(&control);
    args.metrics.listen().await?.serve(&mut tending, move || counting.samples())?;
    machine::mind(&mut tending, &control);
    eprintln!("ate api is up: unix://{}, https://{at}", socket.display());

    let ended = tokio::select! {
        asked = asked_to_end() => asked,
        error = opened.stopped() => Err(error),
        error = any_ended(&mut serving) => Err(error),
        error = any_ended(&mut tending) => Err(error),
    };
    // What is under way goes on with another replica, or with the next start.
    shutdown.cancel();
    control.stop().await;
    drop(tending);
    machine::end(serving, &socket, opened).await?;
    ended
}

/// Hears every node that has registered, and compares it with the store from time to time. Ends only if that has ended for one.
async fn attend_nodes(control: Arc<Control>, nodes: Arc<RemoteNodes>) -> anyhow::Result<()> {
    let mut attended: HashMap<NodeName, [AbortOnDropHandle<()>; 2]> = HashMap::new();
    loop {
        let registered: HashMap<_, _> = control.registered_nodes().into_iter().collect();
        attended.retain(|node, _| registered.contains_key(node));
        if let Some((node, _)) = attended.iter().find(|(_, tasks)| tasks.iter().any(AbortOnDropHandle::is_finished)) {
            bail!("node {node} was no longer attended to: a panic is in the log");
        }
        for (node, record) in registered {
            nodes.know(&node, &record.endpoint);
            attended.entry(node.clone()).or_insert_with(|| {
                let hearing = tokio::spawn(hear(Arc::clone(&control), Arc::clone(&nodes), node.clone()));
                let comparing = tokio::spawn(Arc::clone(&control).look_after(node));
                [AbortOnDropHandle::new(hearing), AbortOnDropHandle::new(comparing)]
            });
        }
        tokio::time::sleep(NODES_EVERY).await;
    }
}

async fn hear(control: Arc<Control>, nodes: Arc<RemoteNodes>, node: NodeName) {
    loop {
        if let Ok(news) = nodes.listen(&node).await {
            // What was missed.
            if let Err(error) = control.reconcile(&node).await {
                tracing::warn!(%node, %error, "a node could not be compared with the store");
            }
            let mut news = std::pin::pin!(news);
            while let Some(event) = news.next().await {
                control.take_news(&node, event).await;
            }
            tracing::warn!(%node, "a node cannot be heard any more");
        }
        tokio::time::sleep(NODES_EVERY).await;
    }
}
