//! The real thing under real faults: every role as a process of its own, real gVisor, PostgreSQL and object storage, traffic
//! that does not wait, and `kill -9` in the middle of it.
//!
//! ```text
//!   traffic.rs   counts actors up and puts them to sleep, and writes down what it saw
//!   churn.rs     makes actors, pauses, forks and restarts them, and deletes them again
//!   faults.rs    kills, stops and fills whatever there is, one fault after the other, and mends it again
//!   resources.rs what processes hold, before and after
//!   verdict.rs   afterwards: what was seen can be explained, nobody is stuck, nothing is left
//! ```
//!
//! The faults are drawn from a seed. What they meet is not: this is no simulation.

mod churn;
mod faults;
mod resources;
mod traffic;
mod verdict;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ate_testkit::{Client, Cluster, Shape, pool};
use ate_testkit_minio::Minio;
use ate_witness::Examined;
use futures::FutureExt;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::churn::Churn;
use crate::faults::{Faults, Site};
use crate::resources::Resources;
pub use crate::traffic::Traffic;
use crate::verdict::Verdict;

/// More than can run at once, so that they are put to sleep and woken all the time.
const ACTORS: usize = 8;
const WORKERS: u32 = 4;
pub const ATESPACE: &str = "chaos";

/// In so much time every kind of fault has its turn.
const EVERYTHING_WITHIN: Duration = Duration::from_secs(600);

#[derive(Clone, Debug)]
pub struct Plan {
    /// The binary under test.
    pub program: PathBuf,
    pub length: Duration,
    pub seed: u64,
    /// Where what was seen and said is kept if something is wrong.
    pub evidence: PathBuf,
}

#[derive(Debug)]
pub struct Report {
    pub faults: BTreeMap<&'static str, usize>,
    /// Places where a process was to end, and has.
    pub failpoints: BTreeSet<&'static str>,
    pub examined: Examined,
    /// Who had to be asked for the longest time until there was an answer, and how long that was.
    pub unanswered: (String, Duration),
    /// Actors that were made beside, and deleted again.
    pub deleted: usize,
    /// Suspends that were asked for and not acknowledged: nothing was promised for them.
    pub refused_suspends: usize,
    /// Acknowledged, and no promise: what had answered was lost before, as history tells.
    pub excused_suspends: usize,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Examined { actors, answers, unanswered, suspends, generations } = self.examined;
        writeln!(f, "{actors} actors: {answers} counts answered, {unanswered} not, over {generations} generations")?;
        writeln!(f, "{suspends} suspends acknowledged as durable, {} not", self.refused_suspends)?;
        writeln!(f, "{} more acknowledged that had nothing to keep", self.excused_suspends)?;
        writeln!(f, "{} actors made, forked, restarted and deleted", self.deleted)?;
        let (actor, unanswered) = &self.unanswered;
        writeln!(f, "unanswered for the longest time: {actor}, for {:.1} s", unanswered.as_secs_f64())?;
        let faults: Vec<String> = self.faults.iter().map(|(name, count)| format!("{name} {count}")).collect();
        writeln!(f, "faults: {}", faults.join(", "))?;
        let reached: Vec<&str> = self.failpoints.iter().copied().collect();
        write!(f, "ended at {} of {} failpoints: {}", reached.len(), ate_failpoint::ALL.len(), reached.join(", "))
    }
}

/// Everything from an empty directory to the verdict.
pub async fn run(plan: &Plan) -> anyhow::Result<Report> {
    let minio = tokio::task::spawn_blocking(Minio::start).await?;
    let shape = Shape {
        apis: 2,
        nodes: 2,
        routers: 1,
        storage: Some("s3".to_owned()),
        env: minio.environment(),
        disk_bytes: Some(faults::DISK_BYTES),
        can_be_cut: true,
    };
    let program = plan.program.to_str().ok_or_else(|| anyhow::anyhow!("the program's path is not UTF-8"))?;
    let cluster = Cluster::start_with(program, shape).await;
    let client = cluster.client("api-0", 0).await;
    let template = client.template("counter", "", "  idle: {freezeAfter: 1s, suspendAfter: 3s}");
    let template = template.replace("gs://snapshots", &format!("s3://{}", ate_testkit_minio::BUCKET));
    client.apply(&format!("{}---{template}", pool("counter", WORKERS, ""))).await;
    client.ready("demo", "counter").await;
    client.create_atespace(ATESPACE).await;
    for name in actors() {
        client.create_counter(ATESPACE, &name).await;
    }
    let mut site = Site { cluster, minio };
    let traffic = Arc::new(Traffic::new(&site.cluster));
    let mut faults = Faults::new(StdRng::seed_from_u64(plan.seed));
    match without_panic(ordeal(plan, &mut site, &mut faults, &traffic)).await {
        Ok(Verdict { examined, unanswered, deleted }) => {
            let (refused_suspends, excused_suspends) = (traffic.refused_suspends(), traffic.excused_suspends());
            let failpoints = faults.reached;
            Ok(Report {
                faults: faults.counts,
                failpoints,
                examined,
                unanswered,
                deleted,
                refused_suspends,
                excused_suspends,
            })
        }
        Err(error) => {
            let kept = match keep(&plan.evidence, &site.cluster, &traffic.seen(), faults.told()) {
                Ok(()) => format!("what was seen and said is in {}", plan.evidence.display()),
                Err(error) => {
                    format!("what was seen and said could not be kept in {}: {error}", plan.evidence.display())
                }
            };
            Err(error.context(format!("seed {}: {kept}", plan.seed)))
        }
    }
}

/// Traffic and faults, for as long as is planned; then the verdict.
async fn ordeal(plan: &Plan, site: &mut Site, faults: &mut Faults, traffic: &Arc<Traffic>) -> anyhow::Result<Verdict> {
    let api = site.cluster.running("api").first().context("a replica runs")?.clone();
    let before = at_rest(site, &site.cluster.client(&api, 0).await, traffic).await?;
    let stop = CancellationToken::new();
    let running = AbortOnDropHandle::new(tokio::spawn(Arc::clone(traffic).run(plan.seed, stop.clone())));
    let churn = Arc::new(Churn::new(Arc::clone(traffic)));
    let churning = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&churn).run(stop.clone())));
    let until = Instant::now() + plan.length;
    let mut inflicted = Ok(());
    // However slow the machine is, there is something to show.
    while inflicted.is_ok() && (Instant::now() < until || faults.kills_are_left()) {
        inflicted = faults.inflict(site).await;
    }
    if inflicted.is_ok() {
        faults.mend_all(site).await;
    }
    stop.cancel();
    running.await?;
    inflicted?;
    churning.await??;
    let verdict = verdict::judge(site, (traffic, &churn), &before, plan.length).await?;
    let never = faults.never();
    ensure!(plan.length < EVERYTHING_WITHIN || never.is_empty(), "never inflicted: {}", never.join(", "));
    Ok(verdict)
}

/// What everything holds once everybody has been awake, and sleeps, and what is made ahead is made.
async fn at_rest(site: &Site, client: &Client, traffic: &Traffic) -> anyhow::Result<Resources> {
    for actor in actors() {
        ensure!(traffic.count(&actor).await.is_some(), "{actor} does not answer");
    }
    verdict::sleeping(client).await?;
    let mut before = Resources::of(site);
    verdict::settled("nothing more is being made", || {
        let now = Resources::of(site);
        // Each worker has a box ahead.
        let same = std::mem::replace(&mut before, now.clone()) == now && now.boxes() == WORKERS as usize;
        async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            same
        }
    })
    .await?;
    Ok(before)
}

/// Whoever looks after the cluster asserts what it expects of it. That is a finding like any other, and its evidence is kept.
async fn without_panic<T>(ordeal: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    AssertUnwindSafe(ordeal).catch_unwind().await.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(anyhow::anyhow!("{}", text.unwrap_or("a panic without words")))
    })
}

/// Those who count, in [`ATESPACE`].
pub fn actors() -> impl Iterator<Item = String> {
    (0..ACTORS).map(|index| format!("c{index}"))
}

fn keep(evidence: &Path, cluster: &Cluster, seen: &[ate_witness::Seen], faults: &str) -> anyhow::Result<()> {
    std::fs::create_dir_all(evidence)?;
    let lines: Vec<String> = seen.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    std::fs::write(evidence.join("seen.jsonl"), lines.join("\n"))?;
    std::fs::write(evidence.join("faults.txt"), faults)?;
    for entry in std::fs::read_dir(cluster.directory())?.flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "log") {
            std::fs::copy(entry.path(), evidence.join(entry.file_name()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_assertion_that_fails_is_a_finding_with_its_words() {
        let asserting = async {
            tokio::task::yield_now().await;
            assert!(std::process::id() == 0, "node-1 did not come up");
            Ok(())
        };
        let found = without_panic(asserting).await.expect_err("it does not hold").to_string();
        assert_eq!(found, "node-1 did not come up");
        assert_eq!(without_panic(async { Ok(7) }).await.expect("it holds"), 7);
    }
}
