//! Roles as processes of their own: replicas of the API on PostgreSQL, nodes, a router.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ate_chaos::{ATESPACE, Traffic};
use ate_name::{ActorUid, Generation};
use ate_preface::{Preface, PrefaceError, offer};
use ate_proto::ate::v1::{ExecRequest, exec_request, exec_response};
use ate_testkit::{Client, Cluster};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use crate::ATE;

/// The node that an actor runs on.
async fn node_of(client: &Client, name: &str) -> String {
    client.worker_of("space", name).await.expect("it runs").node_name
}

#[tokio::test]
async fn any_replica_serves_any_call_and_actors_move_between_nodes() {
    let mut cluster = Cluster::start(ATE, 2, 2, 1).await;
    let (one, other) = (cluster.client("api-0", 0).await, cluster.client("api-1", 0).await);
    one.apply_counter(4, "  idle: {}").await;
    other.ready("demo", "counter").await;
    other.create_atespace("space").await;
    one.create_counter("space", "a").await;
    assert_eq!(other.count("space", "a").await.memory, 1);
    assert_eq!(one.count("space", "a").await.memory, 2);
    other.suspend("space", "a").await;
    assert_eq!(one.count("space", "a").await.memory, 3, "woken by whichever replica");
    let said = one.printed("space", "a").await;
    assert!(said.iter().any(|line| line.contains("GET / 200")), "its log comes from its node: {said:?}");

    // A node that is taken out of service hands its actors over, memory and all.
    let first = node_of(&one, "a").await;
    cluster.stop(&first).await;
    let after = one.count("space", "a").await;
    assert_eq!((after.memory, after.file), (4, 4), "nothing was lost");
    let second = node_of(&one, "a").await;
    assert_ne!(first, second);
    cluster.restart(&first).await;
    cluster.stop_all().await;
}

/// What the worker that has an actor says to a router that looks for it at a generation.
async fn verdict(worker: &std::path::Path, uid: &str, generation: u64) -> Result<(), PrefaceError> {
    let mut stream = UnixStream::connect(worker).await.expect("the worker lives");
    let uid = ActorUid::parse(uid).expect("a uid");
    offer(&mut stream, &Preface { uid, generation: Generation::new(generation), port: 80 }).await
}

#[tokio::test]
async fn actors_of_a_lost_node_go_on_elsewhere_and_it_does_no_harm_when_it_comes_back() {
    let mut cluster = Cluster::start(ATE, 1, 2, 1).await;
    let client = cluster.client("api-0", 0).await;
    client.apply_counter(4, "  idle: {}").await;
    client.create_atespace("space").await;
    client.create_counter("space", "a").await;
    client.count("space", "a").await;
    client.suspend("space", "a").await;
    let before = client.count("space", "a").await;
    assert_eq!(before.memory, 2);
    let (lost, worker) = (node_of(&client, "a").await, client.worker_of("space", "a").await.expect("it runs"));
    let socket = cluster.data(&lost).join("node/workers").join(&worker.worker_pod_uid).join("link/ingress.sock");
    let uid = client.uid("space", "a").await;
    assert!(verdict(&socket, &uid, before.generation).await.is_ok(), "whoever knows where it is can meet it");
    // Nobody meets it by another name or number, though it runs and its worker may serve it.
    let foreign = ActorUid::from_random([7; 16]).to_string();
    for (uid, generation) in
        [(&uid, before.generation + 1), (&uid, before.generation - 1), (&foreign, before.generation)]
    {
        let met = verdict(&socket, uid, generation).await;
        assert!(matches!(met, Err(PrefaceError::Stale)), "{uid} at {generation}: {met:?}");
    }
    assert!(verdict(&socket, &uid, before.generation).await.is_ok(), "it was there all the while");

    // Its workers live, but nobody renews their lease.
    cluster.kill(&lost).await;
    let held = || async { verdict(&socket, &uid, before.generation).await.is_err() };
    client.until("its worker holds it", held).await;
    let elsewhere = || async { client.get("space", "a", "/peek").await.0 == 200 };
    client.until("it goes on elsewhere", elsewhere).await;
    let after = client.count("space", "a").await;
    assert_eq!(after.memory, 2, "from its last snapshot: one count was nobody's but its memory's");
    assert!(after.generation > before.generation);
    assert_ne!(node_of(&client, "a").await, lost);
    assert!(verdict(&socket, &uid, before.generation).await.is_err(), "and nobody meets the old one");
    let history = client.history("space", "a").await;
    let reason = history.iter().find(|entry| entry.event == "Lost").expect("its history says so");
    assert!(reason.detail.contains("silent"), "{reason:?}");

    // It was given up, ends what it has and begins anew.
    let old = cluster.workers_of(&lost);
    cluster.restart(&lost).await;
    let anew = || async {
        let workers = cluster.workers_of(&lost);
        workers.len() == 2 && workers.iter().all(|pid| !old.contains(pid))
    };
    client.until("it has workers of its own again", anew).await;
    assert_eq!(client.count("space", "a").await.memory, 3);
    assert!(cluster.counted("api-0", "ate_fenced_total").await > 0, "what it said of before was refused, and counted");
    cluster.stop_all().await;
}

/// Nodes, their disks and durable storage are as they were; nobody has told them.
#[tokio::test]
async fn what_was_saved_after_a_backup_of_the_database_is_there_when_that_is_restored() {
    let mut cluster = Cluster::start(ATE, 1, 2, 1).await;
    let client = cluster.client("api-0", 0).await;
    client.apply_counter(4, "  idle: {}").await;
    client.create_atespace("space").await;
    for name in ["saved", "paused", "running"] {
        client.create_counter("space", name).await;
        assert_eq!(client.count("space", name).await.memory, 1);
        client.suspend("space", name).await;
    }
    let backup = cluster.directory().join("backup").to_string_lossy().into_owned();
    let said = cluster.store(&["backup", &backup]);
    assert!(said.status.success(), "{said:?}");
    for name in ["saved", "paused", "running"] {
        assert_eq!(client.count("space", name).await.memory, 2);
    }
    client.suspend("space", "saved").await;
    client.pause("space", "paused").await;
    let running = node_of(&client, "running").await;
    let old = cluster.workers_of(&running);
    cluster.kill("api-0").await;
    let said = cluster.store(&["restore", &backup, "--replace"]);
    assert!(said.status.success(), "{said:?}");
    cluster.restart("api-0").await;
    let client = cluster.client("api-0", 0).await;
    for (name, count) in [("saved", 3), ("paused", 3), ("running", 2)] {
        let answers = || async { client.get("space", name, "/peek").await.0 == 200 };
        client.until("its nodes are heard of, and its snapshots found", answers).await;
        let after = client.count("space", name).await;
        assert_eq!((after.memory, after.file), (count, count), "{name}");
    }
    assert!(cluster.workers_of(&running).iter().all(|pid| !old.contains(pid)), "what ran before is ended");
    assert_eq!(cluster.counted("api-0", "ate_actors_caught_up_total").await, 2);
    cluster.stop_all().await;
}

/// What is under way, by whom: operations and their owners, as the store has them.
fn under_way(cluster: &Cluster) -> BTreeMap<String, String> {
    let owners = "SELECT path, convert_from(value, 'UTF8')::json->>'owner' FROM ate.records WHERE kind = 'operation'";
    pairs(&cluster.postgres().sql(owners))
}

/// The replicas that are not buried yet, and how often each has said that it lives.
fn beats(cluster: &Cluster) -> BTreeMap<String, u64> {
    let beats = "SELECT path, convert_from(value, 'UTF8')::json->>'beat' FROM ate.records WHERE kind = 'replica'";
    let beats = pairs(&cluster.postgres().sql(beats));
    beats.into_iter().map(|(replica, beat)| (replica, beat.parse().expect("a beat is a number"))).collect()
}

fn pairs(rows: &str) -> BTreeMap<String, String> {
    rows.lines().filter_map(|row| row.split_once('|')).map(|(one, other)| (one.to_owned(), other.to_owned())).collect()
}

/// Kills one of two replicas under load and waits until what it had in hand is in the other's, or over, and everybody has
/// answered again. By when that must be is counted in beats of the other, one a second, not by this clock: on a machine that is
/// slow they are slow, too.
async fn kill_under_load(cluster: &mut Cluster, traffic: &Traffic) {
    const LEASE: u64 = 5;
    /// A request waits so long for a worker.
    const PARK: u64 = 30;
    let before = beats(cluster);
    assert_eq!(before.len(), 2, "{before:?}");
    cluster.kill("api-0").await;
    let (killed, left) = (traffic.now(), under_way(cluster));
    let other = cluster.client("api-1", 0).await;
    let beats = || beats(cluster);
    // Whoever has not moved since is not the one that lives.
    let moved =
        || beats().into_iter().find(|(replica, beat)| before.get(replica).is_some_and(|old| *beat > old + LEASE));
    other.until("one of them lives", || async { moved().is_some() }).await;
    let (living, _) = moved().expect("it was there");
    let beaten = || beats().get(&living).copied().unwrap_or_default() - before[&living];
    other
        .until("what the dead one had in hand is somebody else's, or over", || async {
            let now = under_way(cluster);
            let orphans: Vec<_> =
                left.iter().filter(|(op, owner)| **owner != living && now.get(*op) == Some(*owner)).collect();
            assert!(orphans.is_empty() || beaten() <= 6 * LEASE, "nobody takes over {orphans:?}\n{}", other.logged());
            orphans.is_empty()
        })
        .await;
    other
        .until("everybody has answered since", || async {
            let silent = traffic.unanswered_since(killed);
            assert!(silent.is_empty() || beaten() <= 6 * LEASE + PARK, "stuck: {silent:?}\n{}", other.logged());
            silent.is_empty()
        })
        .await;
}

// The store is asked by a program that is waited for.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_is_killed_under_load_loses_nothing_and_leaves_nobody_stuck() {
    /// What is in its hands is a matter of luck: so often it may have had nothing.
    const KILLS: usize = 10;
    let mut cluster = Cluster::start(ATE, 2, 1, 1).await;
    let client = cluster.client("api-1", 0).await;
    // Half of them at most can be awake: they make room for each other all the time.
    client.apply_counter(4, "  idle: {freezeAfter: 200ms, suspendAfter: 1s}").await;
    client.create_atespace(ATESPACE).await;
    for name in ate_chaos::actors() {
        client.create_counter(ATESPACE, &name).await;
    }
    // As many suspends as there are wakes: there is hardly a moment at which none that was asked for is on its way.
    let between = Duration::from_millis(20)..Duration::from_millis(150);
    let (traffic, stop) = (Arc::new(Traffic::new(&cluster).suspending(between)), CancellationToken::new());
    let running = tokio::spawn(Arc::clone(&traffic).run(1, stop.clone()));
    let (mut taken_over, mut acknowledged) = (0, 0);
    for _ in 0..KILLS {
        client.until("a suspend is acknowledged under load", || async { traffic.suspends() > acknowledged }).await;
        acknowledged = traffic.suspends();
        kill_under_load(&mut cluster, &traffic).await;
        taken_over = cluster.counted("api-1", "ate_operations_taken_over_total").await;
        if taken_over > 0 {
            break;
        }
        cluster.restart("api-0").await;
    }
    assert!(taken_over > 0, "it had nothing in hand, {KILLS} times: nothing was shown");
    client
        .until("a suspend is acknowledged by the one that is left", || async { traffic.suspends() > acknowledged })
        .await;
    stop.cancel();
    running.await.expect("the clients end");
    // What they were promised before and while it was killed is there now, too, and everybody can be put to sleep.
    for name in ate_chaos::actors() {
        client.until("it answers", || async { traffic.count(&name).await.is_some() }).await;
        client.until("it can be put to sleep", || async { client.try_suspend(ATESPACE, &name).await.is_ok() }).await;
    }
    traffic.explained().unwrap_or_else(|error| panic!("{error:#}\n{}", client.logged()));
    // Its node and workers lived all the while, so there is no excuse for a loss either.
    for name in ate_chaos::actors() {
        let history = client.history(ATESPACE, &name).await;
        assert!(
            history.iter().all(|entry| !["Lost", "FellBack"].contains(&entry.event.as_str())),
            "{name}: {history:?}"
        );
    }
    let free = || async { client.workers().await.iter().all(|worker| worker.actor_id.is_empty()) };
    client.until("every worker is free", free).await;
    cluster.restart("api-0").await;
    cluster.stop_all().await;
}

#[tokio::test]
async fn a_database_that_is_away_for_longer_than_every_lease_costs_nothing() {
    let mut cluster = Cluster::start(ATE, 2, 2, 1).await;
    let client = cluster.client("api-0", 0).await;
    client.apply_counter(2, "  idle: {}").await;
    client.create_atespace("space").await;
    client.create_counter("space", "a").await;
    assert_eq!(client.count("space", "a").await.memory, 1);
    client.suspend("space", "a").await;
    let before = client.count("space", "a").await;
    assert_eq!(before.memory, 2);

    // No lease can be renewed, so its worker holds it; nobody may take it for lost because of that.
    let worker = client.worker_of("space", "a").await.expect("it runs");
    let node = cluster.data(&worker.node_name).join("node/workers");
    let socket = node.join(&worker.worker_pod_uid).join("link/ingress.sock");
    let uid = client.uid("space", "a").await;
    cluster.postgres().crash();
    let held = || async { verdict(&socket, &uid, before.generation).await.is_err() };
    client.until("its worker holds it", held).await;
    tokio::time::sleep(ate_orders::NODE_SERVES_FOR).await;
    cluster.postgres().resume();
    let served = || async { verdict(&socket, &uid, before.generation).await.is_ok() };
    client.until("its worker serves it again", served).await;
    let after = client.count("space", "a").await;
    assert_eq!((after.memory, after.generation), (3, before.generation), "it went on as it was");
    client.suspend("space", "a").await;
    cluster.stop_all().await;
}

#[tokio::test]
async fn a_node_process_that_is_killed_finds_its_actors_as_they_run() {
    let mut cluster = Cluster::start(ATE, 1, 1, 1).await;
    let client = cluster.client("api-0", 0).await;
    client.apply_counter(2, "  idle: {}").await;
    client.create_atespace("space").await;
    client.create_counter("space", "a").await;
    let before = client.count("space", "a").await;
    let node = node_of(&client, "a").await;
    cluster.kill(&node).await;
    cluster.restart(&node).await;
    let answers = || async { client.get("space", "a", "/peek").await.0 == 200 };
    client.until("it answers", answers).await;
    let after = client.count("space", "a").await;
    let history = client.history("space", "a").await;
    match history.iter().find(|entry| entry.event == "Lost") {
        None => assert_eq!((after.memory, after.generation), (before.memory + 1, before.generation), "it was adopted"),
        // On a machine that is too slow to have it back within its lease it is given up, as it should be.
        Some(lost) => {
            assert!(lost.detail.contains("silent"), "a node that is back in time loses nobody: {lost:?}");
            assert!(after.generation > before.generation, "{after:?}");
        }
    }

    // No lease runs out while nobody can be heard: now it is back in time however slow the machine is.
    cluster.postgres().crash();
    cluster.kill(&node).await;
    cluster.restart(&node).await;
    cluster.postgres().resume();
    client.until("it answers again", answers).await;
    let adopted = client.count("space", "a").await;
    let history = client.history("space", "a").await;
    assert_eq!(
        (adopted.memory, adopted.generation, &adopted.launch),
        (after.memory + 1, after.generation, &after.launch),
        "it was adopted, not lost: {history:?}"
    );
    cluster.stop_all().await;
}

#[tokio::test]
async fn a_command_keeps_its_actor_awake_for_as_long_as_somebody_reads_what_it_prints() {
    let mut cluster = Cluster::start(ATE, 1, 1, 1).await;
    let client = cluster.client("api-0", 0).await;
    client.apply_counter(1, "  idle: {freezeAfter: 100ms, suspendAfter: 300ms}").await;
    client.create_atespace("space").await;
    client.create_counter("space", "a").await;
    let args = ["/counter", "-port", "8081", "-grpc-port", "8082"].map(str::to_owned).to_vec();
    let start = exec_request::Start { atespace: "space".into(), name: "a".into(), args, ..Default::default() };
    let input = tokio_stream::once(ExecRequest { input: Some(exec_request::Input::Start(start)) });
    let mut running = client.substrate().exec(input).await.expect("it begins").into_inner();
    let printed = running.message().await.expect("it lives").and_then(|said| said.output);
    let Some(exec_response::Output::Stdout(printed)) = printed else { panic!("{printed:?}") };
    assert!(String::from_utf8_lossy(&printed).contains("listening"), "{printed:?}");

    let sleeps = || async { client.actor("space", "a").await.status().as_str_name() == "STATUS_SUSPENDED" };
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!sleeps().await, "somebody reads: {:?}", client.history("space", "a").await);
    drop(running);
    client.until("it sleeps, the command in it", sleeps).await;
    assert_eq!(client.count("space", "a").await.memory, 1);
    cluster.stop_all().await;
}
