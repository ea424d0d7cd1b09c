//! What the store costs beside plain PostgreSQL: single-row upserts, each its own transaction, over as many connections as
//! there are committers, against commits of the same bytes through the store. On a server of its own, both in turn.
//!
//! ```text
//! cargo run --release -p ate-store-postgres --example measure -- [seconds per run] [committers,…]
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use ate_store::{Change, Key, Kind, Store};
use ate_store_postgres::{PostgresStore, Settings};
use ate_testkit_postgres::Server;
use tokio::task::JoinSet;
use tokio_postgres::NoTls;

/// A bind's record, about.
const VALUE_BYTES: usize = 640;

/// Rows that are written over and over.
const KEYS: u64 = 10_000;

fn value(seed: u64) -> Vec<u8> {
    // Text that compresses about as badly as names and digests do.
    let mut state = seed;
    let step = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        b"0123456789abcdefghijklmnopqrstuvwxyz\"{}:,_-/"[(state >> 33) as usize % 44]
    };
    (0..VALUE_BYTES).map(step).collect()
}

/// Runs as many of these as there are committers until the time is up, and gives their commits per second.
async fn rate<F: Future<Output = u64> + Send + 'static>(
    seconds: u64,
    committers: Vec<impl FnOnce(Instant) -> F>,
) -> f64 {
    let (start, mut tasks) = (Instant::now(), JoinSet::new());
    let end = start + Duration::from_secs(seconds);
    for committer in committers {
        tasks.spawn(committer(end));
    }
    let commits: u64 = tasks.join_all().await.into_iter().sum();
    commits as f64 / start.elapsed().as_secs_f64()
}

async fn raw(server: &Server, seconds: u64, committers: u64) -> f64 {
    let mut clients = Vec::new();
    for at in 0..committers {
        let (client, connection) = tokio_postgres::connect(&server.url(), NoTls).await.expect("connects");
        tokio::spawn(connection);
        let upsert = client
            .prepare("INSERT INTO plain VALUES ($1, $2) ON CONFLICT (path) DO UPDATE SET value = excluded.value")
            .await
            .expect("prepares");
        clients.push(move |end: Instant| async move {
            let mut commits = 0;
            while Instant::now() < end {
                let path = format!("demo/{:05}", (at * 7919 + commits) % KEYS);
                client.execute(&upsert, &[&path, &value(commits)]).await.expect("upserts");
                commits += 1;
            }
            commits
        });
    }
    rate(seconds, clients).await
}

async fn stored(store: &Arc<PostgresStore>, seconds: u64, committers: u64) -> f64 {
    let committers = (0..committers).map(|at| {
        let store = store.clone();
        move |end: Instant| async move {
            let mut commits = 0;
            while Instant::now() < end {
                let path = format!("demo/{:05}", (at * 7919 + commits) % KEYS);
                let key = Key::parse(Kind::Actor, &path).expect("well formed");
                store.commit(Change::new().put(key, value(commits))).await.expect("commits");
                commits += 1;
            }
            commits
        }
    });
    rate(seconds, committers.collect()).await
}

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds = arguments.next().map_or(5, |text| text.parse().expect("seconds per run"));
    let counts = arguments.next().unwrap_or_else(|| "1,8,64".to_owned());
    let server = Server::default();
    server.sql("CREATE TABLE plain (path text COLLATE \"C\" PRIMARY KEY, value bytea NOT NULL)");
    let settings = Settings::new(server.url().parse().expect("well formed"));
    let connect = async || Arc::new(PostgresStore::connect(settings.clone()).await.expect("connects"));
    println!("{} ; commits per second", server.sql("SHOW server_version"));
    println!("{:>10} {:>10} {:>10} {:>14}", "committers", "upserts", "store", "two replicas");
    for committers in counts.split(',').map(|text| text.parse::<u64>().expect("a number of committers")) {
        let plain = raw(&server, seconds, committers).await;
        let store = connect().await;
        let one = stored(&store, seconds, committers).await;
        let second = connect().await;
        let half = committers.div_ceil(2);
        let (first, other) = tokio::join!(stored(&store, seconds, half), stored(&second, seconds, half));
        println!("{committers:>10} {plain:>10.0} {one:>10.0} {:>14.0}", first + other);
    }
}
