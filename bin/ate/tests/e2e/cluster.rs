//! Roles as processes of their own: replicas of the API on PostgreSQL, nodes, a router.

use std::time::Duration;

use ate_name::{ActorUid, Generation};
use ate_preface::{Preface, PrefaceError, offer};
use ate_proto::ate::v1::{ExecRequest, exec_request, exec_response};
use ate_testkit::{Client, Cluster};
use tokio::net::UnixStream;

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

#[tokio::test]
async fn a_replica_that_is_killed_under_load_loses_nothing_and_leaves_nobody_stuck() {
    let mut cluster = Cluster::start(ATE, 2, 1, 1).await;
    let one = cluster.client("api-0", 0).await;
    // Those whose suspend is lost with the replica make room by themselves.
    one.apply_counter(4, "  idle: {freezeAfter: 1s, suspendAfter: 2s}").await;
    one.create_atespace("space").await;
    let names: Vec<String> = (0..8).map(|index| format!("a{index}")).collect();
    for name in &names {
        one.create_counter("space", name).await;
        assert_eq!(one.count("space", name).await.memory, 1);
        one.suspend("space", name).await;
    }
    // Half of them are being woken or put to sleep by the one that dies.
    let busy: Vec<_> = names
        .iter()
        .map(|name| {
            let (client, name) = (one.clone(), name.clone());
            tokio::spawn(async move {
                let _ = client.resume("space", &name, false).await;
                let _ = client.try_suspend("space", &name).await;
            })
        })
        .collect();
    let other = cluster.client("api-1", 0).await;
    let begun = || async {
        let workers = other.workers().await;
        workers.iter().filter(|worker| !worker.actor_id.is_empty()).count() >= 2
    };
    other.until("some are on their way", begun).await;
    cluster.kill("api-0").await;
    for task in busy {
        let _ = task.await;
    }
    for name in &names {
        // What the other had begun is over once it can be put to sleep.
        let rests = || async { other.try_suspend("space", name).await.is_ok() };
        other.until("it can be put to sleep", rests).await;
        assert_eq!(other.count("space", name).await.memory, 2, "{name} has lost nothing");
        other.until("it can be put to sleep again", rests).await;
    }
    let free = || async { other.workers().await.iter().all(|worker| worker.actor_id.is_empty()) };
    other.until("every worker is free", free).await;
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
    let (mut counted, mut generation) = (before.memory, before.generation);
    // On a machine that is too slow to have it back within its lease it is given up, as it should be, and its history says so;
    // then once more.
    for _ in 0..5 {
        cluster.kill(&node).await;
        cluster.restart(&node).await;
        let answers = || async { client.get("space", "a", "/peek").await.0 == 200 };
        client.until("it answers", answers).await;
        let after = client.count("space", "a").await;
        let history = client.history("space", "a").await;
        let Some(lost) = history.iter().find(|entry| entry.event == "Lost" && entry.generation == generation) else {
            assert_eq!((after.memory, after.generation), (counted + 1, generation), "it was adopted, not lost");
            cluster.stop_all().await;
            return;
        };
        assert!(lost.detail.contains("silent"), "a node that is back in time loses nobody: {lost:?}");
        assert!(after.generation > generation, "{after:?}");
        (counted, generation) = (after.memory, after.generation);
    }
    eprintln!("this machine is too slow to tell: it has never had its node back within the lease");
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
