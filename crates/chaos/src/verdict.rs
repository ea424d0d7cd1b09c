//! What must be so when the faults are over.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ate_testkit::{Client, Leaks};
use ate_witness::{Examined, Seen, What};

use crate::faults::Site;
use crate::traffic::Traffic;
use crate::{ACTORS, ATESPACE, WORKERS};

/// By then every lease has run out and every retry has had its turn.
const WITHIN: Duration = Duration::from_secs(180);

pub(crate) async fn judge(site: &mut Site, traffic: &Traffic, seen: &[Seen]) -> anyhow::Result<Examined> {
    // Nobody was away for all of it.
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
    let seen = [seen, &traffic.seen()[seen.len()..]].concat();
    let examined = ate_witness::examine(&seen).context("what clients saw cannot be explained")?;
    let wrong = traffic.wrong();
    ensure!(wrong.is_empty(), "what clients got cannot be:\n  {}", wrong.join("\n  "));

    // Nobody needs a worker when everybody sleeps, and nothing is under way.
    let api = site.cluster.running("api").first().context("a replica runs")?.clone();
    let client = site.cluster.client(&api, 0).await;
    for actor in crate::actors() {
        settled(&format!("{actor} is suspended"), || suspended(&client, &actor)).await?;
    }
    settled("every worker is there, and free", || free(&client)).await?;
    settled("no operation is left", || async { operations(site) == 0 }).await?;
    settled("nothing is stored that nobody refers to", || async { manifests(site) == ACTORS + 1 })
        .await
        .with_context(|| format!("{} snapshots for {ACTORS} actors and their template", manifests(site)))?;

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
    Ok(examined)
}

async fn settled<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) -> anyhow::Result<()> {
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

fn manifests(site: &Site) -> usize {
    fn below(directory: &Path) -> usize {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        // An object is a directory of its name.
        entries.map(|entry| if entry.file_name() == "manifest.json" { 1 } else { below(&entry.path()) }).sum()
    }
    below(&site.minio.directory().join(ate_testkit_minio::BUCKET))
}

/// Snapshots below a directory that were begun and never finished.
fn half(snapshots: &Path) -> Vec<PathBuf> {
    let below = |path: PathBuf| std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let all = below(snapshots.to_owned()).flat_map(below);
    all.filter(|snapshot| !snapshot.join("manifest.json").exists()).collect()
}
