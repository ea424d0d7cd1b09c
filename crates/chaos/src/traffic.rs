//! Clients that count and suspend, and write down what they saw. Requests are sent when their time has come, whatever has
//! become of those before.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, ensure};
use ate_testkit::{Client, Cluster, Reply};
use ate_witness::{Asks, Examined, Line, Seen, Told, What, covers};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::ATESPACE;

/// How long a client waits for its answer: longer than a wake may take after a node was lost. No request may be without one
/// for so long, if it is only that there is none now.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// A suspend that was not acknowledged may still begin for so long: its replica stood still, or its commit was under way.
const BEGUN_LATE: Duration = Duration::from_secs(60);

/// Between requests to one actor, and between suspends that somebody asks for.
const REQUESTS: std::ops::Range<Duration> = Duration::from_millis(100)..Duration::from_millis(2500);
const SUSPENDS: std::ops::Range<Duration> = Duration::from_millis(300)..Duration::from_millis(2000);

#[derive(Debug)]
pub struct Traffic {
    /// The sockets of the replicas, of which any will do.
    apis: Vec<PathBuf>,
    router: u16,
    /// Between suspends that somebody asks for.
    suspends: std::ops::Range<Duration>,
    begun: Instant,
    seen: Mutex<Vec<Seen>>,
    /// Answers that cannot be, and requests without any.
    wrong: Mutex<Vec<String>>,
    asks: Mutex<Asks>,
    refused_suspends: AtomicUsize,
    excused_suspends: AtomicUsize,
    /// How often a replica was chosen by turns.
    turns: AtomicUsize,
}

impl Traffic {
    pub fn new(cluster: &Cluster) -> Self {
        Self {
            apis: cluster.running("api").iter().map(|api| cluster.data(api).join("api.sock")).collect(),
            router: cluster.router_port(0),
            suspends: SUSPENDS,
            begun: Instant::now(),
            seen: Mutex::default(),
            wrong: Mutex::default(),
            asks: Mutex::default(),
            refused_suspends: AtomicUsize::new(0),
            excused_suspends: AtomicUsize::new(0),
            turns: AtomicUsize::new(0),
        }
    }

    /// With other times between suspends.
    pub fn suspending(self, between: std::ops::Range<Duration>) -> Self {
        Self { suspends: between, ..self }
    }

    pub(crate) fn refused_suspends(&self) -> usize {
        self.refused_suspends.load(Ordering::Relaxed)
    }

    /// Those that were acknowledged and promise nothing: nobody had answered before, or history says that it was lost before.
    pub(crate) fn excused_suspends(&self) -> usize {
        self.excused_suspends.load(Ordering::Relaxed)
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().clone()
    }

    /// Whether one activation at a time, each on an acknowledged snapshot, explains all that was seen. Nobody may be waiting for
    /// an answer: what was asked is only noted with it.
    pub fn explained(&self) -> anyhow::Result<Examined> {
        let examined = ate_witness::examine(&self.seen()).context("what clients saw cannot be explained")?;
        let wrong = self.wrong.lock();
        ensure!(wrong.is_empty(), "what clients got cannot be:\n  {}", wrong.join("\n  "));
        Ok(examined)
    }

    /// How many suspends were acknowledged, and are to be explained.
    pub fn suspends(&self) -> usize {
        self.seen.lock().iter().filter(|seen| matches!(seen.what, What::Suspended { .. })).count()
    }

    /// Those who have not answered any request that was sent since.
    pub fn unanswered_since(&self, then: u64) -> Vec<String> {
        let seen = self.seen.lock();
        let answered: BTreeSet<&str> = seen
            .iter()
            .filter(|seen| seen.begun >= then && matches!(seen.what, What::Answered { .. }))
            .map(|seen| seen.actor.as_str())
            .collect();
        crate::actors().filter(|actor| !answered.contains(actor.as_str())).collect()
    }

    /// The time of what is seen.
    pub fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn saw(&self, actor: &str, begun: u64, what: What) {
        let ended = self.now();
        self.seen.lock().push(Seen { actor: actor.to_owned(), begun, ended, what });
    }

    /// Sends until it is told to stop, then waits for every answer.
    pub async fn run(self: Arc<Self>, seed: u64, stop: CancellationToken) {
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
            while pause(&mut dice, traffic.suspends.clone(), &stopped).await {
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
    pub async fn count(&self, actor: &str) -> Option<Reply> {
        let begun = self.now();
        let wrong = |what: String| self.wrong.lock().push(format!("{actor}, asked at {begun}: {what}"));
        let reply = match self.asked(actor, "POST", "/").await {
            Ok(Some(reply)) => counted(reply).map(Some),
            other => other,
        };
        let reply = reply.unwrap_or_else(|what| {
            wrong(what);
            None
        });
        let what = reply.as_ref().map_or(What::Unanswered, |reply| What::Answered {
            generation: reply.generation,
            launch: u64::from_str_radix(&reply.launch, 16).unwrap_or(0),
            nonce: u64::from_str_radix(&reply.nonce, 16).unwrap_or(0),
            count: u64::try_from(reply.memory).unwrap_or(0),
        });
        self.saw(actor, begun, what);
        reply
    }

    /// What an actor has, without counting; `None` if there was no answer.
    pub(crate) async fn peek(&self, actor: &str) -> Option<Reply> {
        self.asked(actor, "GET", "/peek").await.unwrap_or_else(|what| {
            self.wrong.lock().push(format!("{actor}, peeked at until {}: {what}", self.now()));
            None
        })
    }

    /// An error: what cannot be.
    async fn asked(&self, actor: &str, method: &str, path: &str) -> Result<Option<Reply>, String> {
        match tokio::time::timeout(ANSWER_WITHIN, send(self.router, actor, method, path)).await {
            Ok(answer) => read(actor, &answer.unwrap_or_default()),
            Err(_) => Err(format!("not even an error within {ANSWER_WITHIN:?}")),
        }
    }

    /// Somebody who speaks with one of the replicas, now this and now that; `None` if it is not there.
    pub(crate) async fn client(&self) -> Option<Client> {
        let turn = self.turns.fetch_add(1, Ordering::Relaxed);
        Client::at(self.apis[turn % self.apis.len()].clone(), self.router).await.ok()
    }

    /// Asks for a suspend. What counts is that it was acknowledged.
    async fn suspend(&self, actor: &str, api: PathBuf) {
        let (begun, then) = (self.now(), SystemTime::now());
        let ask = self.asks.lock().begin(actor, begun);
        let asked = async {
            let client = Client::at(api, self.router).await.ok()?;
            client.try_suspend(ATESPACE, actor).await.ok()?;
            Some(client)
        };
        let Ok(Some(client)) = tokio::time::timeout(ANSWER_WITHIN, asked).await else {
            let late = u64::try_from(BEGUN_LATE.as_micros()).unwrap_or(u64::MAX);
            self.asks.lock().over(&ask, self.now() + late);
            self.refused_suspends.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let now = self.now();
        self.asks.lock().over(&ask, now);
        let alone = self.asks.lock().is_alone(&ask, now);
        let answered = self.answered(actor, begun);
        // Whichever replica knows: this one may have just been killed. Nobody is asked when all is over.
        let history = match client.try_history(ATESPACE, actor).await {
            Ok(history) => Some(history),
            Err(_) => self.history(actor).await,
        };
        let Some(history) = history else {
            let what = format!("nobody tells the history behind a suspend of {actor}, acknowledged at {now}");
            return self.wrong.lock().push(what);
        };
        let line = |entry: &ate_testkit::HistoryEntry| Line {
            generation: entry.generation,
            told: Told::read(&entry.event, &entry.detail),
            since: entry.time.and_then(|time| SystemTime::try_from(time).ok()).is_none_or(|time| time >= then),
        };
        let told: Vec<Line> = history.iter().map(line).collect();
        let covered = answered.filter(|&answered| covers(answered, &told, alone));
        let saved = history.iter().rfind(|entry| entry.event == "Suspended").map(|entry| entry.generation);
        let noted: BTreeSet<u64> = covered.into_iter().chain(saved.filter(|saved| Some(*saved) > covered)).collect();
        if noted.is_empty() {
            self.excused_suspends.fetch_add(1, Ordering::Relaxed);
        }
        for generation in noted {
            self.saw(actor, begun, What::Suspended { generation });
        }
    }

    /// As the first replica tells it that answers.
    async fn history(&self, actor: &str) -> Option<Vec<ate_testkit::HistoryEntry>> {
        let begun = Instant::now();
        while begun.elapsed() < ANSWER_WITHIN {
            for api in &self.apis {
                let Ok(client) = Client::at(api.clone(), self.router).await else { continue };
                if let Ok(history) = client.try_history(ATESPACE, actor).await {
                    return Some(history);
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        None
    }

    /// The newest generation that had answered by then.
    fn answered(&self, actor: &str, by: u64) -> Option<u64> {
        let seen = self.seen.lock();
        let answered = seen.iter().filter(|seen| seen.actor == actor && seen.ended < by);
        let generations = answered.filter_map(|seen| match seen.what {
            What::Answered { generation, .. } => Some(generation),
            _ => None,
        });
        generations.max()
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

/// A request that nobody on its way may repeat; what was answered, as far as it came.
async fn send(router: u16, actor: &str, method: &str, path: &str) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(("127.0.0.1", router)).await?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {actor}.{ATESPACE}.localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    let mut answer = Vec::new();
    // One that is cut off is no answer, but also nothing that cannot be.
    let _ = stream.read_to_end(&mut answer).await;
    Ok(answer)
}

/// What an actor has answered. `None`: nothing, or that it is to be asked again. An error: what it cannot have answered.
fn read(actor: &str, answer: &[u8]) -> Result<Option<Reply>, String> {
    let answer = String::from_utf8_lossy(answer);
    let Some((head, body)) = answer.split_once("\r\n\r\n") else { return Ok(None) };
    let status: u16 = head.get(9..12).and_then(|status| status.parse().ok()).unwrap_or(0);
    match status {
        200 => {}
        429 | 500..=599 => return Ok(None),
        _ => return Err(format!("refused for good: {answer}")),
    }
    let length = head.lines().filter_map(|line| line.split_once(':')).find_map(|(name, value)| {
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok()).flatten()
    });
    if length.is_none_or(|length| body.len() < length) {
        return Ok(None);
    }
    let reply = Reply::try_parse(body).map_err(|error| format!("{error}: {body:?}"))?;
    let is_nonce = |text: &str| u64::from_str_radix(text, 16).is_ok();
    match &reply {
        reply if reply.actor != actor => Err(format!("somebody else answers: {reply:?}")),
        reply if !is_nonce(&reply.nonce) || !is_nonce(&reply.launch) => Err(format!("it has no nonce: {reply:?}")),
        _ => Ok(Some(reply)),
    }
}

/// What nobody has restarted has counted in its memory as in its file.
fn counted(reply: Reply) -> Result<Reply, String> {
    match reply.memory {
        1.. if reply.file == reply.memory => Ok(reply),
        _ => Err(format!("memory and file differ: {reply:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: &str, body: &str) -> String {
        format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    }

    fn body(actor: &str, memory: i64, file: i64) -> String {
        format!(
            r#"{{"actor":"{actor}","memory":{memory},"file":{file},"nonce":"1f","launch":"2e","generation":3,"host":"h"}}"#
        )
    }

    #[test]
    fn an_answer_that_cannot_be_is_told_from_none() {
        let read = |text: &str| read("c0", text.as_bytes())?.map(counted).transpose();
        let whole = answer("200 OK", &body("c0", 2, 2));
        assert_eq!(read(&whole).expect("it can be").expect("an answer").memory, 2);
        for none in ["", "HTTP/1.1 200 OK\r\n", &whole[..whole.len() - 1], &answer("503 Service Unavailable", "later")]
        {
            assert_eq!(read(none), Ok(None), "{none}");
        }
        for (wrong, why) in [
            (answer("200 OK", "{\"actor\":"), "EOF"),
            (answer("200 OK", "{}"), "missing field"),
            (answer("200 OK", &body("c1", 2, 2)), "somebody else"),
            (answer("200 OK", &body("c0", 2, 1)), "differ"),
            (answer("404 Not Found", "actor \"c0\" not found"), "for good"),
        ] {
            let found = read(&wrong).expect_err("it cannot be");
            assert!(found.contains(why), "{found}");
        }
    }
}
