//! Compares storage engines under the embedded store's real write path.
//!
//! ```text
//! cargo run --release -p ate-store-embedded --example compare -- [actors] [rounds] [directory] [engine,engine]
//! ```
//!
//! Each phase runs in a process of its own, so that memory is the engine's alone and a crash is a real one. Engines
//! take turns within a round, so that a noisy machine is noisy for all; the table shows medians over the rounds, and
//! beside them the ratio to the raw log of the same run.

mod raw;
mod redb;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ate_store::{Change, Fault, FeedLimits, Guard, Key, Kind, Prefix, Store};
use ate_store_embedded::engine::{Engine, Opener};
use ate_store_embedded::{EmbeddedStore, FjallEngine};
use hdrhistogram::Histogram;

use crate::redb::{Mode, RedbEngine};

const ENGINES: &str = "raw log,fjall,redb,redb two-phase,redb quick-repair";
const WORKERS: usize = 4096;
const CACHE_BYTES: usize = 256 << 20;
const READS: usize = 20_000;
/// Committers, and binds to make with them.
const LOADS: [(usize, usize); 3] = [(1, 2_000), (8, 8_000), (64, 24_000)];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |at: usize, default: &str| arguments.get(at).cloned().unwrap_or_else(|| default.to_owned());
    if argument(0, "") == "phase" {
        let actors = argument(4, "").parse().expect("actors");
        return phase(&argument(1, ""), &argument(2, ""), Path::new(&argument(3, "")), actors);
    }
    let actors = argument(0, "1000000");
    let rounds: usize = argument(1, "3").parse().expect("rounds is a number");
    let directory = PathBuf::from(argument(2, "/var/tmp/ate-store-compare"));
    let engines = argument(3, ENGINES);
    let engines: Vec<&str> = engines.split(',').collect();
    let mut rows = Rows::new();
    for engine in &engines {
        let home = directory.join(engine.replace(' ', "-"));
        let _ = std::fs::remove_dir_all(&home);
        std::fs::create_dir_all(&home).expect("a directory to work in");
        run(&mut rows, "load", engine, &home, &actors);
    }
    for round in 0..rounds {
        for engine in &engines {
            eprintln!("round {} of {rounds}: {engine}", round + 1);
            let home = directory.join(engine.replace(' ', "-"));
            run(&mut rows, "bench", engine, &home, &actors);
            run(&mut rows, "reopen", engine, &home, &actors);
        }
    }
    print(&rows, &engines);
    std::fs::remove_dir_all(&directory).expect("remove what was made");
}

/// In the order in which they were measured: the name, then the values of each engine.
type Rows = Vec<(String, BTreeMap<String, Vec<f64>>)>;

fn run(rows: &mut Rows, phase: &str, engine: &str, home: &Path, actors: &str) {
    let me = std::env::current_exe().expect("own path");
    let output = Command::new(me).args(["phase", phase, engine]).arg(home).arg(actors).output().expect("runs");
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let (name, value) = line.split_once('\t').expect("name and value");
        let at = rows.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
            rows.push((name.to_owned(), BTreeMap::new()));
            rows.len() - 1
        });
        rows[at].1.entry(engine.to_owned()).or_default().push(value.parse().expect("a number"));
    }
}

fn print(rows: &Rows, engines: &[&str]) {
    println!("| | {} |\n|---|{}", engines.join(" | "), "---|".repeat(engines.len()));
    for (name, values) in rows {
        let median = |engine: &str| {
            let mut values = values.get(engine)?.clone();
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied()
        };
        let floor = median("raw log");
        let cell = |engine: &&str| match (median(engine), floor) {
            (Some(value), Some(floor)) if *engine != "raw log" => format!("{value:.2} (x{:.2})", value / floor),
            (value, _) => value.map_or(String::new(), |value| format!("{value:.2}")),
        };
        println!("| {name} | {} |", engines.iter().map(cell).collect::<Vec<_>>().join(" | "));
    }
}

fn report(name: impl std::fmt::Display, value: f64) {
    println!("{name}\t{value}");
}

fn opener(engine: &str) -> Opener {
    let redb = |mode| -> Opener {
        Box::new(move |directory| Ok(Box::new(RedbEngine::open(&directory.join("redb"), CACHE_BYTES, mode)?)))
    };
    match engine {
        "raw log" => Box::new(|directory| {
            let opened = raw::RawEngine::open(directory);
            Ok(Box::new(opened.map_err(|error| Fault::Unavailable { reason: error.to_string() })?))
        }),
        "fjall" => Box::new(|directory| {
            let engine = FjallEngine::open(&directory.join("fjall"), CACHE_BYTES as u64, 64 << 20)?;
            Ok(Box::new(engine) as Box<dyn Engine>)
        }),
        "redb" => redb(Mode::OnePhase),
        "redb two-phase" => redb(Mode::TwoPhase),
        _ => redb(Mode::QuickRepair),
    }
}

fn phase(phase: &str, engine: &str, home: &Path, actors: usize) {
    let started = Instant::now();
    let store = EmbeddedStore::open_with(&home.join("store"), FeedLimits::default(), opener(engine)).expect("opens");
    let opening = started.elapsed().as_secs_f64() * 1e3;
    let store = Arc::new(store);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    match phase {
        "load" => {
            runtime.block_on(load(&store, actors));
            store.close();
            // What the engine owes in the background is part of the cost.
            report("disk after load, MB", disk_bytes(home) / 1e6);
            report("written per byte loaded", written_bytes() / (actors * value(0, 0).len()) as f64);
        }
        "bench" => {
            report("open after close, ms", opening);
            runtime.block_on(read(&store, actors));
            for (committers, binds) in LOADS {
                runtime.block_on(bind(&store, actors, committers, binds));
            }
            report("memory after binds, MB", memory_bytes() / 1e6);
            // The crash whose recovery the next phase times.
            std::process::abort();
        }
        _ => {
            report("open after crash, ms", opening);
            runtime.block_on(churn(&store));
            store.close();
            report("disk after binds, MB", disk_bytes(home) / 1e6);
        }
    }
}

fn actor(number: usize) -> Key {
    Key::new(Kind::Actor, [format!("space-{}", number % 100), format!("actor-{number:08}")]).expect("a key")
}

fn worker(number: usize) -> Key {
    Key::new(Kind::Worker, ["pool", &format!("worker-{number:05}")]).expect("a key")
}

/// About 600 bytes of JSON; the ids are as incompressible as real ones.
fn value(number: usize, salt: usize) -> String {
    let mut random = Random(number as u64 ^ (salt as u64) << 40);
    let mut id = || format!("{:016x}{:016x}", random.next(), random.next());
    format!(
        r#"{{"uid":"{}","generation":{salt},"phase":{{"running":{{"worker":"{}","node":"node-{}","lease":"{}"}}}},"template":{{"namespace":"default","name":"counter","uid":"{}"}},"labels":{{"app":"counter","team":"agents"}},"snapshot":{{"base":"sha256:{}{}","local":"{}","durable":"{}"}},"created":"2026-01-01T00:00:00Z","changed":"2026-01-01T00:00:00Z","reason":"resumed by request","operation":"{}"}}"#,
        id(),
        id(),
        number % 50,
        id(),
        id(),
        id(),
        id(),
        id(),
        id(),
        id()
    )
}

struct Random(u64);

impl Random {
    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("fits")
    }
}

async fn load(store: &Arc<EmbeddedStore>, actors: usize) {
    const PER_CHANGE: usize = 200;
    let keys = (0..WORKERS).map(worker).chain((0..actors).map(actor)).collect::<Vec<_>>();
    let mut tasks = tokio::task::JoinSet::new();
    for (chunk, keys) in keys.chunks(PER_CHANGE).enumerate() {
        let mut change = Change::new();
        for (at, key) in keys.iter().enumerate() {
            change = change.put(key.clone(), value(chunk * PER_CHANGE + at, 0));
        }
        let store = store.clone();
        tasks.spawn(async move { store.commit(change).await.expect("loads") });
        if tasks.len() >= 32 {
            tasks.join_next().await;
        }
    }
    tasks.join_all().await;
}

async fn read(store: &Arc<EmbeddedStore>, actors: usize) {
    let mut random = Random(7);
    for name in ["first", "again"] {
        let mut times = Histogram::<u64>::new(3).expect("a histogram");
        for _ in 0..READS {
            let key = actor(random.below(actors));
            let started = Instant::now();
            store.get(&key).await.expect("reads").expect("is there");
            times.record(nanoseconds(started.elapsed())).expect("grows as needed");
        }
        for (label, quantile) in [("p50", 0.5), ("p99", 0.99)] {
            report(format!("read {name} {label}, us"), times.value_at_quantile(quantile) as f64 / 1e3);
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).expect("no bind takes centuries")
}

async fn bind(store: &Arc<EmbeddedStore>, actors: usize, committers: usize, binds: usize) {
    let mut tasks = tokio::task::JoinSet::new();
    let seed = std::process::id() as usize;
    let ready = Arc::new(tokio::sync::Barrier::new(committers + 1));
    for committer in 0..committers {
        let (store, ready) = (store.clone(), ready.clone());
        tasks.spawn(async move {
            let mut random = Random((seed * 1000 + committer) as u64);
            let mut versions = Vec::new();
            for _ in 0..binds / committers {
                // Each committer has its own actors and workers: conflicts are not what is measured here.
                let actor = actor(random.below(actors / committers) * committers + committer);
                let worker = worker(random.below(WORKERS / committers) * committers + committer);
                versions.push((actor, worker));
            }
            let mut known = BTreeMap::new();
            for key in versions.iter().flat_map(|(actor, worker)| [actor, worker]) {
                if !known.contains_key(key) {
                    known.insert(key.clone(), store.get(key).await.expect("reads").expect("is there").version);
                }
            }
            ready.wait().await;
            let mut times = Histogram::<u64>::new(3).expect("a histogram");
            for (at, (actor, worker)) in versions.into_iter().enumerate() {
                let id = format!("{:016x}{committers}", random.next());
                let change = Change::new()
                    .guard(Guard::Version(actor.clone(), known[&actor]))
                    .guard(Guard::Version(worker.clone(), known[&worker]))
                    .put(actor.clone(), value(at, committer))
                    .put(worker.clone(), value(at, committer))
                    .put(Key::new(Kind::Operation, [&id]).expect("a key"), value(at, committer))
                    .put(
                        Key::parse(Kind::History, &format!("{}/{id}", actor.path())).expect("a key"),
                        value(at, committer),
                    );
                let started = Instant::now();
                store.commit(change).await.expect("binds");
                times.record(nanoseconds(started.elapsed())).expect("grows as needed");
                *known.get_mut(&actor).expect("known") += 1;
                *known.get_mut(&worker).expect("known") += 1;
            }
            times
        });
    }
    ready.wait().await;
    let (started, before) = (Instant::now(), written_bytes());
    let mut all = Histogram::<u64>::new(3).expect("a histogram");
    for times in tasks.join_all().await {
        all += times;
    }
    let at = format!("bind x{committers}");
    report(format!("{at} commits/s"), all.len() as f64 / started.elapsed().as_secs_f64());
    for (label, quantile) in [("p50", 0.5), ("p95", 0.95), ("p99", 0.99)] {
        report(format!("{at} {label}, ms"), all.value_at_quantile(quantile) as f64 / 1e6);
    }
    let payload = all.len() as f64 * 4.0 * value(0, 0).len() as f64;
    report(format!("{at} written per byte"), (written_bytes() - before) / payload);
}

/// Operations come and go; what is left of them is in the way of a list.
async fn churn(store: &Arc<EmbeddedStore>) {
    const GONE: usize = 100_000;
    let prefix = Prefix::below(Kind::Operation, ["churn"]).expect("a prefix");
    let keys: Vec<Key> = (0..GONE)
        .map(|at| Key::new(Kind::Operation, ["churn", &format!("{:016x}", Random(at as u64).next())]).expect("a key"))
        .collect();
    for keys in keys.chunks(200) {
        let put = keys.iter().fold(Change::new(), |change, key| change.put(key.clone(), value(1, 1)));
        store.commit(put).await.expect("puts");
        let delete = keys.iter().fold(Change::new(), |change, key| change.delete(key.clone()));
        store.commit(delete).await.expect("deletes");
    }
    let started = Instant::now();
    assert!(store.list(&prefix, None, 100).await.expect("lists").records.is_empty());
    report("list where 100k records were, ms", started.elapsed().as_secs_f64() * 1e3);
}

/// What this process made the kernel write, background threads included.
fn written_bytes() -> f64 {
    number_after("/proc/self/io", "write_bytes:")
}

fn memory_bytes() -> f64 {
    number_after("/proc/self/status", "RssAnon:") * 1024.0
}

fn number_after(file: &str, field: &str) -> f64 {
    let text = std::fs::read_to_string(file).expect("proc is mounted");
    let line = text.lines().find_map(|line| line.strip_prefix(field)).expect("the field");
    line.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number")
}

/// Blocks, not lengths: engines make sparse files.
fn disk_bytes(directory: &Path) -> f64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry"));
    entries
        .map(|entry| match entry.metadata().expect("metadata") {
            data if data.is_dir() => disk_bytes(&entry.path()),
            data => data.blocks() as f64 * 512.0,
        })
        .sum()
}
