//! What stands between client and backend in the router's benchmark: our router with one actor that is always there, or
//! nginx.

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ate_name::{ActorKey, ActorUid, Generation, ObjectKey};
use ate_router::{ActivateError, Activator, Assignment, Endpoint, Port, Protocol, RouterConfig, Update};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{BenchError, Setup};

pub(crate) const HOST: &str = "actor.bench.localhost";

/// For nginx to listen.
const UP_WITHIN: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[derive(Clone, Debug, clap::Args)]
pub struct ProxyArgs {
    /// Where the only worker listens
    #[arg(long)]
    worker: PathBuf,
}

/// Nobody sleeps here.
struct Nobody;

#[async_trait::async_trait]
impl Activator for Nobody {
    async fn activate(
        &self,
        _: &ActorKey,
        _: Option<Generation>,
        _: tokio::time::Instant,
    ) -> Result<Assignment, ActivateError> {
        Err(ActivateError::NotFound)
    }
}

/// Our router in a process of its own: tells its port, and ends with its input.
pub(crate) async fn serve(args: &ProxyArgs) -> Result<(), BenchError> {
    let io = || BenchError::io("start the router");
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(io())?;
    println!("{}", listener.local_addr().map_err(io())?);
    let assignment = Assignment {
        key: ActorKey::parse("bench", "actor").expect("constant names"),
        uid: ActorUid::from_random([7; 16]),
        generation: Generation::new(1),
        endpoint: Endpoint::Unix(args.worker.clone()),
        ports: vec![Port { number: 80, protocol: Protocol::Http }],
        template: ObjectKey::new("bench", "template"),
    };
    let (updates, updated) = mpsc::channel(1);
    let _ = updates.send(Update::Reset(vec![assignment])).await;
    let shutdown = CancellationToken::new();
    let routing = ate_router::serve(
        vec![listener],
        RouterConfig::default(),
        Arc::new(Nobody),
        updated,
        Arc::default(),
        shutdown.clone(),
    );
    let ended = tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0]));
    tokio::select! {
        () = routing => {}
        _ = ended => {}
    }
    drop(updates);
    Ok(())
}

/// A proxy that runs; ended with this value.
#[derive(Debug)]
pub(crate) struct Proxy {
    child: Child,
    pub(crate) at: SocketAddr,
}

impl Proxy {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn ours(setup: &Setup, worker: &Path) -> Result<Self, BenchError> {
        let io = || BenchError::io("start the router");
        let mut child = Command::new(&setup.program)
            .args(["bench", "proxy", "--worker"])
            .arg(worker)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(io())?;
        let mut line = String::new();
        let stdout = child.stdout.take().expect("stdout is piped");
        let told = BufReader::new(stdout).read_line(&mut line).map_err(io());
        match told.map(|_| line.trim().parse()) {
            Ok(Ok(at)) => Ok(Self { child, at }),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                Err(BenchError::refused("start the router", "it did not tell its address"))
            }
        }
    }

    /// nginx as a careful operator would set it up: connections to both sides are kept, nothing is logged.
    pub(crate) fn nginx(backend: &Path, directory: &Path, processes: usize) -> Result<Self, BenchError> {
        let io = || BenchError::io("start nginx");
        // It cannot be told to choose a port; one that was free a moment ago will be.
        let at = std::net::SocketAddr::from(([127, 0, 0, 1], ate_testkit_port::free_port()));
        let configuration = directory.join("nginx.conf");
        std::fs::write(&configuration, nginx_configuration(at, backend, directory, processes)).map_err(io())?;
        let log = std::fs::File::create(directory.join("nginx.log")).map_err(io())?;
        let child = Command::new("nginx")
            .arg("-e")
            .arg(directory.join("nginx.log"))
            .arg("-c")
            .arg(&configuration)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(|_| BenchError::Missing {
                what: "the program nginx, the router's baseline,".to_owned(),
                remedy: "run ./setup --bench, or install the package nginx-light",
            })?;
        let mut proxy = Self { child, at };
        let begun = Instant::now();
        while TcpStream::connect(at).is_err() {
            if begun.elapsed() > UP_WITHIN || matches!(proxy.child.try_wait(), Ok(Some(_))) {
                let said = std::fs::read_to_string(directory.join("nginx.log")).unwrap_or_default();
                return Err(BenchError::refused("start nginx", said.trim()));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(proxy)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Asked, not killed: nginx has processes below it.
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

fn nginx_configuration(at: SocketAddr, backend: &Path, directory: &Path, processes: usize) -> String {
    let (backend, directory) = (backend.display(), directory.display());
    format!(
        "daemon off;
user root; # the backend's socket is ours alone
worker_processes {processes};
pid {directory}/nginx.pid;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    keepalive_requests 1000000000;
    client_body_temp_path {directory}/nginx-body;
    proxy_temp_path {directory}/nginx-proxy;
    fastcgi_temp_path {directory}/nginx-fastcgi;
    uwsgi_temp_path {directory}/nginx-uwsgi;
    scgi_temp_path {directory}/nginx-scgi;
    upstream backend {{
        server unix:{backend};
        keepalive 256;
        keepalive_requests 1000000000;
    }}
    server {{
        listen {at};
        location / {{
            proxy_pass http://backend;
            proxy_http_version 1.1;
            proxy_set_header Connection '';
            proxy_set_header Host $http_host;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Host $http_host;
            proxy_set_header X-Forwarded-Proto $scheme;
        }}
    }}
}}
"
    )
}
