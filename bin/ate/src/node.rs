//! `ate node run`: one machine of several. It takes orders from every replica of the control plane, and leads routers to its
//! workers, on one port; what a connection is for is agreed on in its handshake.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use ate_identity::{Authority, ClientCertificates, Role};
use ate_name::NodeName;
use ate_node::{LocalNode, Node};
use ate_orders_grpc::News;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::machine::{
    self, NodeResources, Storage, Tasks, any_ended, asked_to_end, check_host, host_name, listen, make_directory, tend,
};
use crate::peers::{ApiArgs, Membership, Replicas};

/// A handshake that takes longer is given up.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);

/// Handshakes under way at once.
const MAX_HANDSHAKES: usize = 64;

/// A peer of which nothing has been heard for so long is asked whether it is there, so often, and given up then.
const QUIET_FOR: Duration = Duration::from_secs(30);
const ASK_EVERY: Duration = Duration::from_secs(10);
const ASK_TIMES: u32 = 3;

/// Connections of the control plane that are not taken up yet.
const BACKLOG: usize = 16;

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    ate node run --api 10.0.0.1:8443 --listen 0.0.0.0:8440 --advertise 10.0.0.7:8440 --storage s3")]
pub(crate) struct NodeArgs {
    #[command(flatten)]
    api: ApiArgs,
    /// Where orders and routers come in
    #[arg(long, default_value = "127.0.0.1:8440", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Where others reach that [default: the address of --listen]
    #[arg(long, value_name = "ADDRESS")]
    advertise: Option<SocketAddr>,
    /// What this node is called [default: the machine's name]
    #[arg(long)]
    name: Option<String>,
    /// Where snapshots are durable for every node: `s3`, `gs`, `azure` with endpoint and credentials from the environment as
    /// their own tools read them, or a directory that all of them share
    #[arg(long, value_name = "WHERE", value_parser = machine::storage)]
    storage: Storage,
    /// Who this instance is [default: `identity` in the data directory]
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    #[command(flatten)]
    resources: NodeResources,
}

pub(crate) async fn run(args: NodeArgs, data: &Path) -> anyhow::Result<()> {
    check_host()?;
    if matches!(args.storage, Storage::Disk) {
        bail!(
            "--storage disk would keep snapshots where no other node finds them\n  name a directory that all nodes share, or s3, gs, azure"
        );
    }
    let directory = make_directory(data)?;
    let identity = machine::identity_of(args.identity.as_deref(), &directory)?;
    let listener = listen(args.listen, "--listen").await?;
    let at = listener.local_addr()?;
    let door = args.advertise.unwrap_or(at);
    if door.ip().is_unspecified() {
        bail!("others cannot reach {door}\n  say with --advertise where they reach this node");
    }
    let name = args.name.unwrap_or_else(host_name);
    if !ate_name::check_dns_subdomain(&name) {
        bail!("{name:?} is no name for a node: lower case letters, digits, '-' and '.'\n  choose one with --name");
    }
    let name = NodeName::new(name);
    let replicas = Replicas::new(&args.api, &identity, Role::Node)?;
    let (node, events) =
        args.resources.node(name.clone(), directory.join("node"), &identity, &args.storage, Some(door)).await?;
    let address = door.ip().to_string();
    let mut tls = identity.server_config(Role::Node, &[&address], ClientCertificates::Required)?;
    tls.alpn_protocols.push(ate_preface::ALPN.to_vec());
    let shutdown = CancellationToken::new();
    let (mut serving, mut tending) = (Tasks::new(), Tasks::new());
    // Heard from the first moment, but asked nothing before it knows who is here.
    let membership = Membership { replicas, node: name.clone(), endpoint: door.to_string() };
    let registered = Arc::clone(&node).keep_registered(Arc::new(membership));
    serving.spawn(async move { Ok(registered.await?) });
    node.adopt().await;
    let (orders, ordered) = mpsc::channel(BACKLOG);
    let news = News::default();
    let (nodes, stop) = (Arc::new(LocalNode(Arc::clone(&node))), shutdown.clone());
    let taking = ate_orders_grpc::serve(name.clone(), nodes, news.clone(), ordered, stop.cancelled_owned());
    serving.spawn(async move { taking.await.context("orders cannot be taken") });
    let authority = Arc::clone(identity.authority());
    serving.spawn(open_door(Arc::clone(&node), listener, TlsAcceptor::from(Arc::new(tls)), authority, orders));
    tend(&mut tending, async move { news.pass_on(events).await });
    tend(&mut tending, Arc::clone(&node).report_regularly());
    tend(&mut tending, Arc::clone(&node).evict_regularly());
    tend(&mut tending, Arc::clone(&node).keep_workers());
    eprintln!("ate node {name} is up at {door}, all state in {}", directory.display());

    let ended = tokio::select! {
        asked = asked_to_end() => asked,
        error = any_ended(&mut serving) => Err(error),
        error = any_ended(&mut tending) => Err(error),
    };
    if ended.is_ok() {
        eprintln!("stopping: its actors are suspended and go on elsewhere");
        if !node.leave().await {
            eprintln!(
                "some of its actors did not leave in time: start it again on this directory within {} s to keep them",
                ate_orders::NODE_SERVES_FOR.as_secs()
            );
        }
    }
    shutdown.cancel();
    let kept = node.workers();
    node.stop(&kept).await;
    ended
}

/// A peer whose machine has vanished says no goodbye: without this its connections would stay for ever.
fn keep_alive(stream: &TcpStream) -> std::io::Result<()> {
    sockopt::set_tcp_keepidle(stream, QUIET_FOR)?;
    sockopt::set_tcp_keepintvl(stream, ASK_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, ASK_TIMES)?;
    Ok(sockopt::set_socket_keepalive(stream, true)?)
}

/// Lets in who belongs to the instance: the control plane with orders, routers with requests.
async fn open_door(
    node: Arc<Node>,
    listener: TcpListener,
    acceptor: TlsAcceptor,
    authority: Arc<Authority>,
    orders: mpsc::Sender<TlsStream<TcpStream>>,
) -> anyhow::Result<()> {
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    loop {
        // More wait in the kernel's queue.
        let handshake = Arc::clone(&handshakes).acquire_owned().await?;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely: they come back when connections end.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let (node, acceptor, authority, orders) =
            (Arc::clone(&node), acceptor.clone(), Arc::clone(&authority), orders.clone());
        tokio::spawn(async move {
            let _ = stream.set_nodelay(true).and_then(|()| keep_alive(&stream));
            let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_WITHIN, acceptor.accept(stream)).await else { return };
            drop(handshake);
            let (_, session) = stream.get_ref();
            let role = authority.role_of(session.peer_certificates().unwrap_or_default());
            match (role, session.alpn_protocol() == Some(ate_preface::ALPN)) {
                (Ok(Role::Api), false) => drop(orders.send(stream).await),
                (Ok(Role::Router | Role::Gateway), true) => node.admit(stream).await,
                (role, _) => tracing::warn!(?role, "sent away at the door"),
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use ate_control::Settings;

    #[test]
    fn a_node_that_waits_for_one_of_its_workers_is_not_shut_out_for_it() {
        assert!(ate_node::ANSWERS_WITHIN * 2 <= Settings::default().reach_within, "the rest is for its restart");
    }
}
