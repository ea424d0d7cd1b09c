//! What a role needs of the machine that it runs on.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use ate_blob::{Backend, Blobs, Provider, Settings};
use ate_control::Control;
use ate_identity::{ClientCertificates, Identity, Role};
use ate_name::{GOLDEN_ATESPACE, NodeName};
use ate_node::Node;
use ate_orders::NodeEvent;
use ate_snapshot::InstanceKey;
use ate_store::{Change, CommitError, Key, Kind, Prefix, Store};
use ate_sys::SocketPath;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::place::Opened;

/// Requests that are under way when a role ends have ten seconds to do so; a client that does not answer then is not waited for.
const LAST_REQUESTS: Duration = Duration::from_secs(12);

/// The file without which there is no identity.
const AUTHORITY: &str = "authority.pem";

/// Actors looked at together.
const PAGE: usize = 1000;

#[derive(Clone, Debug)]
pub(crate) enum Storage {
    /// The node's own disk is all there is.
    Disk,
    Beyond(Backend),
}

pub(crate) fn storage(text: &str) -> Result<Storage, String> {
    let cloud = |provider| Storage::Beyond(Backend::Cloud(provider, Settings::from_environment(provider)));
    match text {
        "disk" => Ok(Storage::Disk),
        "s3" => Ok(cloud(Provider::S3)),
        "gs" => Ok(cloud(Provider::Gcs)),
        "azure" => Ok(cloud(Provider::Azure)),
        path if path.contains('/') => Ok(Storage::Beyond(Backend::Directory(path.into()))),
        _ => Err("say disk, s3, gs, azure, or a directory as a path with a slash in it".to_owned()),
    }
}

/// What a node is given of its machine.
#[derive(Debug, clap::Args)]
pub(crate) struct NodeResources {
    /// Credentials for image registries, in docker's format [default: ~/.docker/config.json if it is there]
    #[arg(long, value_name = "FILE")]
    registry_config: Option<PathBuf>,
    /// How much disk unpacked images may take; those in use always stay
    #[arg(long, default_value = "20", value_name = "GIB")]
    image_budget: u64,
    /// How much disk copies of snapshots may take that are in durable storage too
    #[arg(long, default_value = "20", value_name = "GIB")]
    snapshot_budget: u64,
    /// How much disk sandbox runtimes may take; those in use always stay
    #[arg(long, default_value = "4", value_name = "GIB")]
    asset_budget: u64,
}

impl NodeResources {
    pub(crate) async fn node(
        &self,
        name: NodeName,
        directory: PathBuf,
        identity: &Identity,
        storage: &Storage,
        door: Option<SocketAddr>,
    ) -> anyhow::Result<(Arc<Node>, mpsc::Receiver<NodeEvent>)> {
        let snapshots = directory.join("snapshots");
        let (node, events) = Node::open(ate_node::Config {
            name,
            directory,
            worker_program: std::env::current_exe()?,
            build: crate::BUILD.to_owned(),
            instance_key: identity.instance_key(),
            activations_at_once: std::thread::available_parallelism()?.get(),
            storage: match storage {
                Storage::Disk => None,
                Storage::Beyond(backend) => Some(Blobs::open(backend.clone()).await?),
            },
            image_budget: self.image_budget.saturating_mul(1 << 30),
            copy_budget: self.snapshot_budget.saturating_mul(1 << 30),
            asset_budget: self.asset_budget.saturating_mul(1 << 30),
            door,
            registry_config: self.registry_config.clone().or_else(docker_config),
        })?;
        if let waiting @ 1.. = node.not_moved() {
            eprintln!(
                "bringing {waiting} snapshots in {} to durable storage before anybody is served",
                snapshots.display()
            );
        }
        node.move_to_storage().await?;
        Ok((node, events))
    }
}

fn docker_config() -> Option<PathBuf> {
    let file = PathBuf::from(std::env::var_os("HOME")?).join(".docker/config.json");
    file.is_file().then_some(file)
}

/// What this machine must have, each with what to do about it.
pub(crate) fn check_host() -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("workers are made of namespaces, control groups and mounts, so this must run as root\n  try: sudo");
    }
    for (tool, package) in [("ip", "iproute2"), ("nft", "nftables")] {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        if !std::env::split_paths(&paths).any(|directory| directory.join(tool).is_file()) {
            bail!("`{tool}` is not installed: workers set up their networks with it\n  try: apt-get install {package}");
        }
    }
    Ok(())
}

pub(crate) fn make_directory(path: &Path) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(path).with_context(|| format!("cannot make the data directory {}", path.display()))?;
    let path = path.canonicalize()?;
    // Snapshots, keys and sockets: nobody else's business.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700))?;
    Ok(path)
}

pub(crate) async fn listen(address: SocketAddr, flag: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}: choose another address with {flag}"))
}

pub(crate) fn api_socket(path: &Path) -> anyhow::Result<UnixListener> {
    // Whoever else had it has lost it: one data directory is for one server at a time.
    let _ = std::fs::remove_file(path);
    let socket = SocketPath::of(path)
        .and_then(|short| UnixListener::bind(short.path()))
        .with_context(|| format!("cannot listen on {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(socket)
}

/// The API by TLS. On a loopback address everybody is let in, elsewhere whoever has a certificate, unless it is `open`.
pub(crate) fn secured(
    identity: &Identity,
    listener: TcpListener,
    advertise: &[String],
    open: bool,
) -> anyhow::Result<ate_apiserver::Secured> {
    let at = listener.local_addr()?.ip();
    let (host, address) = (host_name(), at.to_string());
    let mut names: Vec<&str> = advertise.iter().map(String::as_str).chain([host.as_str()]).collect();
    if !at.is_unspecified() {
        names.push(&address);
    }
    let config = identity.server_config(Role::Api, &names, ClientCertificates::VerifiedIfGiven)?;
    let authority = Arc::clone(identity.authority());
    Ok(ate_apiserver::Secured { listener, config: Arc::new(config), authority, open: open || at.is_loopback() })
}

pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns when this process is asked to end.
pub(crate) async fn asked_to_end() -> anyhow::Result<()> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}

/// What goes on for as long as the process does. If one of them ends it has failed, and takes the rest with it.
pub(crate) type Tasks = tokio::task::JoinSet<anyhow::Result<()>>;

pub(crate) fn tend(tending: &mut Tasks, what: impl Future<Output = ()> + Send + 'static) {
    tending.spawn(async move {
        what.await;
        Ok(())
    });
}

/// Ends if the control plane has lost a part that it cannot do without.
pub(crate) fn mind(tending: &mut Tasks, control: &Arc<Control>) {
    let control = Arc::clone(control);
    tending.spawn(async move {
        control.failed().await;
        bail!("a part of the control plane has ended by itself: what it said is in the log")
    });
}

/// Why one of them ended.
pub(crate) async fn any_ended(serving: &mut Tasks) -> anyhow::Error {
    match serving.join_next().await {
        Some(Ok(Err(error))) => error,
        Some(Err(panic)) => panic.into(),
        _ => anyhow::anyhow!("a server ended without being told to"),
    }
}

/// Waits for requests that are under way. All are cut by then but those of a client that does not answer.
pub(crate) async fn last_requests(mut serving: Tasks) {
    let served = async { while serving.join_next().await.is_some() {} };
    if tokio::time::timeout(LAST_REQUESTS, served).await.is_err() {
        eprintln!("some connections did not end in time and were cut");
    }
}

/// The end of whoever serves the API from a store: the last requests, then the socket, then the store.
pub(crate) async fn end(serving: Tasks, socket: &Path, store: Opened) -> anyhow::Result<()> {
    last_requests(serving).await;
    // While the data directory is still ours, and so the socket.
    let _ = std::fs::remove_file(socket);
    store.close().await
}

/// What the API says of itself.
pub(crate) fn info(identity: &Identity, router_url: String) -> ate_apiserver::Info {
    ate_apiserver::Info {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        build: crate::version::BUILT_FROM.to_owned(),
        instance: identity.authority().instance().to_string(),
        router_url,
    }
}

/// Who an instance is, or a new one if the store knows of no actors: the key of their snapshots is a part of it. All who use a store
/// are one instance: an actor that one of them made could not be saved by the nodes of another.
pub(crate) async fn own_identity(directory: &Path, store: &dyn Store) -> anyhow::Result<Identity> {
    if !directory.join(AUTHORITY).exists() && is_used(store).await? {
        bail!(
            "there is no identity in {}, but the store is in use: it has replicas or nodes, or actors whose snapshots only \
             their instance's key can read\n  copy the directory `identity` of a replica that uses this store, or bring that \
             directory back as it was; if it is lost, so are the actors: begin with another store",
            directory.display()
        );
    }
    let identity = Identity::open(directory)?;
    let key = Key::new(Kind::Meta, ["instance"]).expect("constant segments");
    let ours = InstanceKey::from_bytes(identity.instance_key()).id().to_string();
    loop {
        let owner = store.get(&key).await?;
        let change = match &owner {
            Some(owner) if owner.value == ours => return Ok(identity),
            Some(_) if is_used(store).await? => bail!(
                "the store is another instance's: its key is not the one in {0}\n  \
                 copy the directory `identity` of a replica that uses this store to {0}, or begin with another store",
                directory.display()
            ),
            // That one is no more, and nothing was made with its key.
            Some(owner) => Change::new().replace(owner, ours.clone()),
            None => Change::new().create(key.clone(), ours.clone()),
        };
        match store.commit(change).await {
            // Somebody else has just been faster.
            Ok(_) | Err(CommitError::Conflict { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether anybody's work depends on who the instance of a store is, or somebody is at it.
async fn is_used(store: &dyn Store) -> anyhow::Result<bool> {
    for kind in [Kind::Replica, Kind::Node] {
        if !store.list(&Prefix::all(kind), None, 1).await?.records.is_empty() {
            return Ok(true);
        }
    }
    has_actors(store).await
}

/// Golden ones do not count: their snapshots are read without a key.
async fn has_actors(store: &dyn Store) -> anyhow::Result<bool> {
    let golden = format!("{GOLDEN_ATESPACE}/");
    let mut after = None;
    loop {
        let page = store.list(&Prefix::all(Kind::Actor), after.as_deref(), PAGE).await?;
        if page.records.iter().any(|record| !record.key.path().starts_with(&golden)) {
            return Ok(true);
        }
        match page.records.last() {
            Some(last) if page.more => after = Some(last.key.path().to_owned()),
            _ => return Ok(false),
        }
    }
}

/// Who an instance is that exists already. Making another here would only end in handshakes that fail.
pub(crate) fn identity_of(directory: Option<&Path>, data: &Path) -> anyhow::Result<Identity> {
    let directory = directory.map_or_else(|| data.join("identity"), Path::to_owned);
    if !directory.join(AUTHORITY).exists() {
        bail!(
            "there is no identity in {}\n  copy the directory `identity` of the API's data directory, and name it with --identity",
            directory.display()
        );
    }
    Ok(Identity::open(&directory)?)
}
