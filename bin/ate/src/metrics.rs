//! What a role counts, in the text that Prometheus reads.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ate_control::Sample;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::machine::{Tasks, listen, tend};

/// Whoever asks does so at once, and in few words.
const ASKED_WITHIN: Duration = Duration::from_secs(5);
const MAX_HEAD: usize = 8 << 10;

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MetricsArgs {
    /// Serve metrics for Prometheus here, to whoever asks: http://<ADDRESS>/metrics
    #[arg(long, value_name = "ADDRESS")]
    metrics_listen: Option<SocketAddr>,
}

type Source = Arc<dyn Fn() -> Vec<Sample> + Send + Sync>;

impl MetricsArgs {
    /// Takes the address, if that is wanted, before anything is begun that would have to be undone.
    pub(crate) async fn listen(&self) -> anyhow::Result<Metrics> {
        let Some(address) = self.metrics_listen else { return Ok(Metrics(None)) };
        Ok(Metrics(Some(listen(address, "--metrics-listen").await?)))
    }
}

/// Where metrics are asked for.
#[derive(Debug)]
pub(crate) struct Metrics(Option<TcpListener>);

impl Metrics {
    /// Serves what `source` says, as one of `tasks`.
    pub(crate) fn serve(
        self,
        tasks: &mut Tasks,
        source: impl Fn() -> Vec<Sample> + Send + Sync + 'static,
    ) -> anyhow::Result<()> {
        let Some(listener) = self.0 else { return Ok(()) };
        eprintln!("  metrics http://{}/metrics", listener.local_addr()?);
        tend(tasks, accept(listener, Arc::new(source)));
        Ok(())
    }
}

async fn accept(listener: TcpListener, source: Source) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let source = Arc::clone(&source);
                tokio::spawn(async move { tokio::time::timeout(ASKED_WITHIN, answer(stream, &source)).await });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// One question, one answer: whoever scrapes every few seconds needs no more of HTTP than this.
async fn answer(mut stream: TcpStream, source: &Source) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if head.len() > MAX_HEAD || stream.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let (status, body) = match head.starts_with(b"GET /metrics ") || head.starts_with(b"GET /metrics?") {
        true => ("200 OK", text(&source())),
        false => ("404 Not Found", "see /metrics\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}

fn text(samples: &[Sample]) -> String {
    let mut text = String::new();
    for Sample { name, help, counts, value } in samples {
        let kind = if *counts { "counter" } else { "gauge" };
        let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
    }
    text
}

/// What a router counts.
pub(crate) fn of_router(stats: &ate_router::Stats) -> Vec<Sample> {
    let counted = |name, help, value| Sample { name, help, counts: true, value };
    let is = |name, help, value| Sample { name, help, counts: false, value };
    let routed = stats.routed().iter().map(|(_, histogram)| histogram.count()).sum();
    vec![
        counted("ate_requests_routed_total", "Requests whose actor was found.", routed),
        counted("ate_requests_unknown_total", "Requests for what does not exist.", stats.not_found.count()),
        counted(
            "ate_requests_expired_total",
            "Requests whose client left, or that waited too long.",
            stats.cancelled.count(),
        ),
        counted("ate_requests_failed_total", "Requests that ended in an error before an actor.", stats.error.count()),
        counted(
            "ate_requests_lost_total",
            "Requests that were sent to an actor and not answered.",
            stats.lost.load(Relaxed),
        ),
        is("ate_requests_parked", "Requests that wait for their actor.", stats.parked.load(Relaxed)),
        counted(
            "ate_park_refusals_total",
            "Requests turned away because too many waited.",
            stats.park_refusals.load(Relaxed),
        ),
        counted(
            "ate_stale_answers_total",
            "Workers that disowned an actor that a router asked for.",
            stats.stale_answers.load(Relaxed),
        ),
        counted("ate_activations_total", "Calls of the control plane.", stats.activations.load(Relaxed)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn metrics_are_told_to_whoever_asks_for_them() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let sample = Sample { name: "ate_x_total", help: "Some.", counts: true, value: 7 };
        tokio::spawn(accept(listener, Arc::new(move || vec![sample.clone()])));
        let ask = async |path: &str| {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let told = ask("/metrics").await;
        assert!(
            told.starts_with("HTTP/1.1 200") && told.ends_with("# TYPE ate_x_total counter\nate_x_total 7\n"),
            "{told}"
        );
        assert!(ask("/").await.starts_with("HTTP/1.1 404"));
    }
}
