//! `ate router`: HTTP to actors' names in, to the doors of their nodes out. It keeps nothing: any number of them will do.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ate_identity::Role;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::machine::{Tasks, any_ended, asked_to_end, identity_of, last_requests, listen, tend};
use crate::metrics::MetricsArgs;
use crate::peers::{self, ApiArgs, Replicas};

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ate router --api 10.0.0.1:8443 --api 10.0.0.2:8443 --listen 0.0.0.0:80")]
pub(crate) struct RouterArgs {
    #[command(flatten)]
    api: ApiArgs,
    /// Where actors are reached: http://<actor>.<atespace>.<zone>:<port>/
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Who this instance is [default: `identity` in the data directory]
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    #[command(flatten)]
    metrics: MetricsArgs,
}

pub(crate) async fn run(args: RouterArgs, data: &Path) -> anyhow::Result<()> {
    let identity = identity_of(args.identity.as_deref(), data)?;
    let replicas = Replicas::new(&args.api, &identity, Role::Router)?;
    let mut door = identity.client_config(Role::Router, Role::Node)?;
    door.alpn_protocols = vec![ate_preface::ALPN.to_vec()];
    let listener = listen(args.listen, "--listen").await?;
    let at = listener.local_addr()?;
    let config = ate_router::RouterConfig { door: Some(Arc::new(door)), ..crate::dev::router_config() };
    let shutdown = CancellationToken::new();
    let stats = Arc::<ate_router::Stats>::default();
    let (updates, updated) = mpsc::channel(64);
    let (mut serving, mut tending) = (Tasks::new(), Tasks::new());
    tend(&mut tending, peers::follow(Arc::clone(&replicas), updates));
    let routing = ate_router::serve(vec![listener], config, replicas, updated, Arc::clone(&stats), shutdown.clone());
    tend(&mut serving, routing);
    args.metrics.listen().await?.serve(&mut tending, move || crate::metrics::of_router(&stats))?;
    eprintln!("ate router is up: http://<actor>.<atespace>.localhost:{}/", at.port());
    let ended = tokio::select! {
        asked = asked_to_end() => asked,
        error = any_ended(&mut serving) => Err(error),
        error = any_ended(&mut tending) => Err(error),
    };
    shutdown.cancel();
    last_requests(serving).await;
    ended
}
