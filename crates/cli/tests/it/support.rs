//! Runs command lines against a daemon that can be killed, and keeps what they print.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use ate_cli::{Cli, Terminal};
use ate_proto::ate::v1::substrate_server::SubstrateServer;
use ate_proto::ateapi::control_server::ControlServer;
use clap::{CommandFactory as _, Parser as _};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::Server;
use tonic::transport::server::{Connected, Router};

use crate::fake::Fake;

/// On a runtime of its own, so that it can end as a killed process does.
pub(crate) struct Daemon {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) fake: Fake,
    runtime: Option<Runtime>,
}

fn routes(fake: &Fake) -> Router {
    Server::builder().add_service(ControlServer::new(fake.clone())).add_service(SubstrateServer::new(fake.clone()))
}

impl Daemon {
    pub(crate) fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut daemon = Self { directory, fake: Fake::new(), runtime: None };
        daemon.start_again();
        daemon
    }

    pub(crate) fn start_again(&mut self) {
        let runtime = Runtime::new().unwrap();
        let within = runtime.enter();
        let socket = self.directory.path().join("api.sock");
        let _ = std::fs::remove_file(&socket);
        let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
        tokio::spawn(routes(&self.fake).serve_with_incoming(incoming));
        drop(within);
        self.runtime = Some(runtime);
    }

    pub(crate) fn kill(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }

    /// Also listens on a port of the loopback, and returns it.
    pub(crate) fn listen_tls(&self, config: rustls::ServerConfig) -> u16 {
        let within = self.runtime.as_ref().unwrap().enter();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        tokio::spawn(routes(&self.fake).serve_with_incoming(secured(listener, config)));
        drop(within);
        port
    }

    pub(crate) async fn ate(&self, line: &str) -> Outcome {
        Command::new(line, self.directory.path()).run().await
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.runtime.is_some() {
            self.kill();
        }
    }
}

fn secured(
    listener: tokio::net::TcpListener,
    config: rustls::ServerConfig,
) -> impl Stream<Item = io::Result<impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Connected + Unpin + Send + 'static>>
{
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    TcpListenerStream::new(listener)
        .then(move |stream| {
            let acceptor = acceptor.clone();
            async move { acceptor.accept(stream?).await }
        })
        // A client that does not trust us hangs up; the next one may.
        .filter(Result::is_ok)
}

/// What was printed, and a way to wait for it.
#[derive(Clone)]
pub(crate) struct Printed(Arc<watch::Sender<String>>);

impl Printed {
    fn new() -> Self {
        Self(Arc::new(watch::Sender::new(String::new())))
    }

    pub(crate) fn text(&self) -> String {
        self.0.borrow().clone()
    }

    pub(crate) async fn until(&self, part: &str) {
        self.0.subscribe().wait_for(|text| text.contains(part)).await.unwrap();
    }
}

impl Write for Printed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send_modify(|text| text.push_str(std::str::from_utf8(bytes).unwrap()));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) code: u8,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""), "{}", self.stdout);
        self.stdout
    }

    #[track_caller]
    pub(crate) fn failed(self, code: u8) -> String {
        assert_eq!((self.code, self.stdout.as_str()), (code, ""), "{}", self.stderr);
        self.stderr
    }
}

pub(crate) struct Command {
    line: Vec<String>,
    pub(crate) terminal: Terminal,
    pub(crate) stdout: Printed,
    pub(crate) stderr: Printed,
    interrupt: oneshot::Sender<()>,
}

impl Command {
    pub(crate) fn new(line: &str, data_dir: &Path) -> Self {
        let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        words.splice(0..0, ["ate".to_owned(), "--data-dir".to_owned(), data_dir.display().to_string()]);
        let (stdout, stderr) = (Printed::new(), Printed::new());
        let (interrupt, interrupted) = oneshot::channel::<()>();
        let terminal = Terminal {
            stdin: Box::new(io::empty()),
            stdout: Box::new(stdout.clone()),
            stderr: Box::new(stderr.clone()),
            colour: (false, false),
            is_watched: false,
            interrupted: Box::pin(async { interrupted.await.unwrap_or(()) }),
        };
        Self { line: words, terminal, stdout, stderr, interrupt }
    }

    pub(crate) async fn run(self) -> Outcome {
        let (stdout, stderr) = (self.stdout.clone(), self.stderr.clone());
        let (interrupt, running) = self.start();
        let code = running.await.unwrap();
        drop(interrupt);
        Outcome { code, stdout: stdout.text(), stderr: stderr.text() }
    }

    pub(crate) fn start(self) -> (oneshot::Sender<()>, JoinHandle<u8>) {
        let cli = Cli::try_parse_from(&self.line).unwrap_or_else(|error| panic!("{error}"));
        let Self { terminal, interrupt, .. } = self;
        let running = tokio::spawn(async move { ate_cli::run(cli.verb, &cli.global, Cli::command(), terminal).await });
        (interrupt, running)
    }
}
