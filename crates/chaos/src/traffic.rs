//! Clients that count and suspend, and write down what they saw. Requests are sent when their time has come, whatever has
//! become of those before.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ate_testkit::{Client, Cluster, Reply};
use ate_witness::{Seen, What};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::ATESPACE;

/// How long a client waits for its answer: longer than a wake may take after a node was lost.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// Between requests to one actor, and between suspends that somebody asks for.
const REQUESTS: std::ops::Range<Duration> = Duration::from_millis(100)..Duration::from_millis(2500);
const SUSPENDS: std::ops::Range<Duration> = Duration::from_millis(300)..Duration::from_millis(2000);

#[derive(Debug)]
pub(crate) struct Traffic {
    /// The sockets of the replicas, of which any will do.
    apis: Vec<PathBuf>,
    router: u16,
    begun: Instant,
    seen: Mutex<Vec<Seen>>,
    refused_suspends: AtomicUsize,
}

impl Traffic {
    pub(crate) fn new(cluster: &Cluster) -> Self {
        Self {
            apis: cluster.running("api").iter().map(|api| cluster.data(api).join("api.sock")).collect(),
            router: cluster.router_port(0),
            begun: Instant::now(),
            seen: Mutex::default(),
            refused_suspends: AtomicUsize::new(0),
        }
    }

    pub(crate) fn refused_suspends(&self) -> usize {
        self.refused_suspends.load(Ordering::Relaxed)
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().clone()
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn saw(&self, actor: &str, begun: u64, what: What) {
        let ended = self.now();
        self.seen.lock().push(Seen { actor: actor.to_owned(), begun, ended, what });
    }

    /// Sends until it is told to stop, then waits for every answer.
    pub(crate) async fn run(self: Arc<Self>, seed: u64, stop: CancellationToken) {
        let tasks = TaskTracker::new();
        for (index, actor) in crate::actors().enumerate() {
            let mut dice = StdRng::seed_from_u64(seed ^ (index as u64 + 1));
            let (traffic, stop, requests) = (Arc::clone(&self), stop.clone(), tasks.clone());
            tasks.spawn(async move {
                while pause(&mut dice, REQUESTS, &stop).await {
                    let (traffic, actor) = (Arc::clone(&traffic), actor.clone());
                    requests.spawn(async move { traffic.count(&actor).await });
                }
            });
        }
        let (traffic, stopped) = (Arc::clone(&self), stop.clone());
        let mut dice = StdRng::seed_from_u64(seed);
        let suspends = tasks.clone();
        tasks.spawn(async move {
            let actors: Vec<String> = crate::actors().collect();
            while pause(&mut dice, SUSPENDS, &stopped).await {
                let actor = actors[dice.random_range(0..actors.len())].clone();
                let api = traffic.apis[dice.random_range(0..traffic.apis.len())].clone();
                let traffic = Arc::clone(&traffic);
                suspends.spawn(async move { traffic.suspend(&actor, api).await });
            }
        });
        tasks.close();
        tasks.wait().await;
    }

    /// One count; `None` if there was no answer.
    pub(crate) async fn count(&self, actor: &str) -> Option<Reply> {
        let begun = self.now();
        let asked = tokio::time::timeout(ANSWER_WITHIN, post(self.router, actor)).await;
        let reply = asked.ok().and_then(Result::ok).flatten();
        let what = reply.as_ref().map_or(What::Unanswered, |reply| What::Answered {
            generation: reply.generation,
            nonce: u64::from_str_radix(&reply.launch, 16).unwrap_or(0),
            count: u64::try_from(reply.memory).unwrap_or(0),
        });
        self.saw(actor, begun, what);
        reply
    }

    /// Asks for a suspend. What counts is that it was acknowledged; of which generation, its history tells.
    async fn suspend(&self, actor: &str, api: PathBuf) {
        let begun = self.now();
        let asked = async {
            let client = Client::at(api, self.router).await.ok()?;
            client.try_suspend(ATESPACE, actor).await.ok()?;
            client.suspended_generation(ATESPACE, actor).await
        };
        match tokio::time::timeout(ANSWER_WITHIN, asked).await {
            Ok(Some(generation)) => self.saw(actor, begun, What::Suspended { generation }),
            _ => drop(self.refused_suspends.fetch_add(1, Ordering::Relaxed)),
        }
    }
}

/// `false` once it is time to stop.
async fn pause(dice: &mut StdRng, between: std::ops::Range<Duration>, stop: &CancellationToken) -> bool {
    let wait = dice.random_range(between);
    tokio::select! {
        () = stop.cancelled() => false,
        () = tokio::time::sleep(wait) => true,
    }
}

/// A request that nobody on its way may repeat.
async fn post(router: u16, actor: &str) -> std::io::Result<Option<Reply>> {
    let mut stream = TcpStream::connect(("127.0.0.1", router)).await?;
    let head = format!(
        "POST / HTTP/1.1\r\nHost: {actor}.{ATESPACE}.localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let answer = String::from_utf8_lossy(&answer);
    let body = answer.strip_prefix("HTTP/1.1 200 ").and_then(|answer| answer.split_once("\r\n\r\n"));
    // A body that is cut off is no answer.
    Ok(body.filter(|(_, body)| body.trim_end().ends_with('}')).map(|(_, body)| Reply::parse(body)))
}
