//! What must be so when the faults are over.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ate_testkit::{Client, Leaks};
use ate_witness::{Examined, Seen, What};

use crate::churn::Churn;
use crate::faults::{LONGEST, Site};
use crate::resources::Resources;
use crate::traffic::Traffic;
use crate::{ACTORS, ATESPACE, WORKERS};

/// So many are deleted in the end, to see that nothing is left of them.
const DELETED: usize = 2;

/// By then every lease has run out and every retry has had its turn.
pub(crate) const WITHIN: Duration = Duration::from_secs(180);

/// One is asked for every second or so, and most are acknowledged. With fewer than these nobody slept through the faults.
const SUSPENDS_A_MINUTE: f64 = 6.0;

/// A node is given up when it has been silent for so long while it could be heard.
const NODE_LEASE: Duration = Duration::from_secs(15);

/// What only a node has that was given up is waited for.
const NODE_GRACE: Duration = Duration::from_secs(60);

/// A request waits for a worker before it is told to come again.
const PARK: Duration = Duration::from_secs(30);

/// What no actor is unanswered for that is not stuck: it meets two of the longest faults, one after the other, with a lease that
/// only begins to run out when each is over; what it needs was on the node that went; and all workers have somebody.
const UNANSWERED_AT_MOST: Duration =
    Duration::from_secs(2 * (LONGEST.as_secs() + NODE_LEASE.as_secs()) + NODE_GRACE.as_secs() + PARK.as_secs());

pub(crate) struct Verdict {
    pub(crate) examined: Examined,
    pub(crate) unanswered: (String, Duration),
    pub(crate) deleted: usize,
}

/// `before`: what the processes had when all was well and everybody slept.
pub(crate) async fn judge(
    site: &mut Site,
    (traffic, churn): (&Traffic, &Churn),
    before: &Resources,
    length: Duration,
) -> anyhow::Result<Verdict> {
    // Nobody was away for all of it.
    let seen = traffic.seen();
    for actor in crate::actors() {
        let answered = |seen: &&Seen| seen.actor == actor && matches!(seen.what, What::Answered { .. });
        ensure!(seen.iter().any(|seen| answered(&seen)), "actor {actor} never answered while there were faults");
    }
    // Nobody is stuck: everybody answers, and what they say goes with what was seen.
    for actor in crate::actors() {
        let begun = Instant::now();
        while traffic.count(&actor).await.is_none() {
            if begun.elapsed() > WITHIN {
                bail!("actor {actor} does not answer any more");
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    let examined = traffic.explained()?;
    let suspends = (length.as_secs_f64() / 60.0 * SUSPENDS_A_MINUTE).ceil();
    ensure!(
        examined.suspends as f64 >= suspends,
        "{} suspends were acknowledged, not {suspends}: too few to show anything",
        examined.suspends
    );
    let seen = traffic.seen();
    let each = crate::actors().map(|actor| (unanswered(&seen, &actor), actor));
    let (longest, actor) = each.max().context("there are actors")?;
    ensure!(longest <= UNANSWERED_AT_MOST, "{actor} had no answer for {longest:?}, more than {UNANSWERED_AT_MOST:?}");

    // Nobody needs a worker when everybody sleeps, and nothing is under way.
    let api = site.cluster.running("api").first().context("a replica runs")?.clone();
    let client = site.cluster.client(&api, 0).await;
    sleeping(&client).await?;
    settled("no operation is left", || async { operations(site) == 0 }).await?;
    churn.judge(&client).await.context("of those that were made beside")?;
    settled("no operation is left", || async { operations(site) == 0 }).await?;
    settled("every worker is free again", || free(&client)).await?;
    let stored = || stored(&site.minio.directory().join(ate_testkit_minio::BUCKET));
    settled("nothing is stored that nobody refers to", || async { is_whole(&stored(), ACTORS + 1) })
        .await
        .with_context(|| format!("for {ACTORS} actors and their template there is {:?}", stored()))?;
    settled("resources are as at the start", || async { Resources::of(site).exceeding(before).is_empty() })
        .await
        .with_context(|| format!("left behind: {}", Resources::of(site).exceeding(before).join(", ")))?;
    for actor in crate::actors().take(DELETED) {
        client.delete(ATESPACE, &actor).await;
        let left =
            || stored().into_iter().filter(|object| object.iter().any(|part| *part == *actor)).collect::<Vec<_>>();
        settled("nothing of the deleted is stored", || async { left().is_empty() })
            .await
            .with_context(|| format!("of {actor} there is {:?}", left()))?;
    }
    settled("nothing else has gone", || async { is_whole(&stored(), ACTORS + 1 - DELETED) })
        .await
        .with_context(|| format!("there is {:?}", stored()))?;

    for (log, said) in site.cluster.logs() {
        if let Some(line) = said.lines().find(|line| line.contains("panicked at")) {
            bail!("{}: {line}", log.display());
        }
    }
    let ended = site.cluster.ended();
    ensure!(ended.is_empty(), "ended without being told to: {}", ended.join(", "));

    site.cluster.stop_all().await;
    let checked = site.cluster.check_store();
    if !checked.status.success() {
        bail!("the records do not agree: {}", String::from_utf8_lossy(&checked.stdout));
    }
    for node in site.cluster.nodes() {
        let leaks = Leaks::of_instance(&site.cluster.data(&node));
        ensure!(leaks.cgroups.is_empty(), "something of {node} is left: {leaks}");
        let half = half(&site.cluster.data(&node).join("node/snapshots"));
        ensure!(half.is_empty(), "on the disk of {node} there is half of {half:?}");
    }
    site.cluster.unmount().await;
    let leaks = || Leaks::of(site.cluster.directory(), None);
    settled("nothing is left", || async { leaks().is_empty() }).await.with_context(|| leaks().to_string())?;
    Ok(Verdict { examined, unanswered: (actor, longest), deleted: churn.deleted() })
}

/// The longest time from a request to the next answer that anybody got: who asks is not told to wait while others are answered.
fn unanswered(seen: &[Seen], actor: &str) -> Duration {
    let of = |seen: &&Seen| seen.actor == actor && matches!(seen.what, What::Answered { .. } | What::Unanswered);
    let mut asked: Vec<u64> = seen.iter().filter(of).map(|seen| seen.begun).collect();
    let answers = seen.iter().filter(of).filter(|seen| matches!(seen.what, What::Answered { .. }));
    let mut answers: Vec<u64> = answers.map(|seen| seen.ended).collect();
    asked.sort_unstable();
    answers.sort_unstable();
    // Whoever never got one waited until the last had given up.
    answers.extend(seen.iter().filter(of).map(|seen| seen.ended).max());
    let mut since = 0;
    let times = answers.into_iter().map(|answered| {
        let waiting = asked.get(asked.partition_point(|begun| *begun < since)).copied();
        since = answered;
        waiting.map_or(0, |begun| answered.saturating_sub(begun))
    });
    Duration::from_micros(times.max().unwrap_or(0))
}

/// Waits until everybody sleeps and no worker has anybody.
pub(crate) async fn sleeping(client: &Client) -> anyhow::Result<()> {
    for actor in crate::actors() {
        settled(&format!("{actor} is suspended"), || suspended(client, &actor)).await?;
    }
    settled("every worker is there, and free", || free(client)).await
}

pub(crate) async fn settled<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) -> anyhow::Result<()> {
    let begun = Instant::now();
    while !holds().await {
        if begun.elapsed() > WITHIN {
            bail!("waited in vain until {what}");
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

async fn suspended(client: &Client, actor: &str) -> bool {
    client.actor(ATESPACE, actor).await.status().as_str_name() == "STATUS_SUSPENDED"
}

async fn free(client: &Client) -> bool {
    let workers = client.workers().await;
    workers.len() == WORKERS as usize && workers.iter().all(|worker| worker.actor_id.is_empty())
}

fn operations(site: &Site) -> usize {
    let counted = site.cluster.postgres().sql("SELECT count(*) FROM ate.records WHERE kind = 'operation'");
    counted.trim().parse().unwrap_or(usize::MAX)
}

/// Every object in the bucket. To MinIO one is a directory of its name, with this file in it.
fn stored(directory: &Path) -> Vec<PathBuf> {
    if directory.join("xl.meta").exists() {
        return vec![directory.to_owned()];
    }
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter(|entry| entry.path().is_dir()).flat_map(|entry| stored(&entry.path())).collect()
}

/// Whether these are so many snapshots, and nothing that is part of none: without its manifest nobody would ever look for it.
fn is_whole(stored: &[PathBuf], snapshots: usize) -> bool {
    let manifests: BTreeSet<&Path> =
        stored.iter().filter(|object| object.ends_with("manifest.json")).filter_map(|object| object.parent()).collect();
    let part_of_one = |object: &PathBuf| object.parent().is_some_and(|snapshot| manifests.contains(snapshot));
    manifests.len() == snapshots && stored.iter().all(part_of_one)
}

/// Snapshots below a directory that were begun and never finished.
fn half(snapshots: &Path) -> Vec<PathBuf> {
    let below = |path: PathBuf| std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let all = below(snapshots.to_owned()).flat_map(below);
    all.filter(|snapshot| !snapshot.join("manifest.json").exists()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_long_nobody_was_answered_counts_from_the_first_who_asked() {
        let seen = |begun, ended, what| Seen { actor: "a".into(), begun, ended, what };
        let answered =
            |begun, ended| seen(begun, ended, What::Answered { generation: 1, launch: 1, nonce: 1, count: 1 });
        let refused = |begun, ended| seen(begun, ended, What::Unanswered);
        let longest = |all: &[Seen]| unanswered(all, "a").as_micros();
        assert_eq!(longest(&[answered(0, 5), answered(100, 103)]), 5, "nobody asked in between");
        assert_eq!(longest(&[answered(0, 5), refused(20, 30), refused(40, 50), answered(60, 70)]), 50);
        assert_eq!(longest(&[answered(0, 5), refused(20, 30), refused(40, 90)]), 70, "and there was none in the end");
        assert_eq!(longest(&[answered(0, 5), refused(4, 90), answered(10, 12)]), 5, "others were answered meanwhile");
        assert_eq!(unanswered(&[answered(0, 5)], "b"), Duration::ZERO);
    }
}
