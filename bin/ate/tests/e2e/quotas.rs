//! Quotas hold, however many ask at once.

use ate_proto::ate::v1::{Quota, SetQuotaRequest};
use ate_proto::ateapi::{ActorRef, CreateActorRequest};
use ate_testkit::{Client, Cluster, Machine};

use crate::ATE;

/// Creates a thousand actors at once, by these in turns; how many were made, and how many refused for the quota.
async fn create_a_thousand(clients: &[&Client]) -> (usize, usize) {
    let creates = (0..1000).map(|index| {
        let mut control = clients[index % clients.len()].control();
        tokio::spawn(async move {
            let request = CreateActorRequest {
                actor_ref: Some(ActorRef { atespace: "space".into(), name: format!("a{index}") }),
                actor_template_namespace: "demo".into(),
                actor_template_name: "counter".into(),
                worker_selector: None,
            };
            control.create_actor(request).await.map(drop)
        })
    });
    let creates: Vec<_> = creates.collect();
    let (mut made, mut refused) = (0, 0);
    for create in creates {
        match create.await.expect("it ends") {
            Ok(()) => made += 1,
            Err(error) if error.code() == tonic::Code::ResourceExhausted => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    (made, refused)
}

async fn set_quota(client: &Client, quota: Quota) {
    let request = SetQuotaRequest { atespace: "space".into(), quota: Some(quota), seen: None };
    client.substrate().set_quota(request).await.expect("a quota");
}

#[tokio::test]
async fn two_replicas_do_not_pass_a_quota_by_one_together() {
    let mut cluster = Cluster::start(ATE, 2, 1, 1).await;
    let (one, other) = (cluster.client("api-0", 0).await, cluster.client("api-1", 0).await);
    one.apply_counter(1, "  idle: {}").await;
    other.create_atespace("space").await;
    one.create_counter("space", "first").await;
    // Whether or not the other has heard of it by then.
    set_quota(&one, Quota { actors: Some(701), running: Some(0), ..Default::default() }).await;
    let woken = other.resume("space", "first", false).await.expect_err("nobody may run");
    assert_eq!(woken.code(), tonic::Code::ResourceExhausted, "{woken}");
    assert_eq!(create_a_thousand(&[&one, &other]).await, (700, 300));
    let refused = async |api| cluster.counted(api, "ate_quota_refusals_total").await;
    assert!(refused("api-0").await + refused("api-1").await >= 300, "and counted");
    cluster.stop_all().await;
}

/// In microseconds, as the store counts.
const SECOND: i64 = 1_000_000;

/// When the wakes of an actor began, as its history says.
async fn wakes(client: &Client, name: &str) -> Vec<i64> {
    let history = client.history("space", name).await;
    let began = history.iter().filter(|entry| entry.event == "Resuming").filter_map(|entry| entry.time);
    began.map(|time| time.seconds * SECOND + i64::from(time.nanos / 1000)).collect()
}

#[tokio::test]
async fn two_replicas_do_not_pass_a_quota_of_wakes_together() {
    const ACTORS: usize = 24;
    /// On a machine that takes a second for one request after the other nobody need be refused: then once more.
    const BURSTS: usize = 5;
    let mut cluster = Cluster::start(ATE, 2, 1, 1).await;
    let clients = [cluster.client("api-0", 0).await, cluster.client("api-1", 0).await];
    clients[0].apply_counter(4, "  idle: {}").await;
    clients[0].create_atespace("space").await;
    let names: Vec<String> = (0..ACTORS).map(|number| format!("a{number}")).collect();
    for name in &names {
        clients[0].create_counter("space", name).await;
    }
    let one_a_second = Quota { wakes_per_second: Some(1), ..Default::default() };
    set_quota(&clients[0], one_a_second).await;
    let begun = jiff::Timestamp::now().as_microsecond();
    let mut refused = [0, 0];
    for _ in 0..BURSTS {
        let burst = names.iter().enumerate().map(|(number, name)| {
            let (client, name) = (clients[number % 2].clone(), name.clone());
            tokio::spawn(async move { (number % 2, client.resume("space", &name, false).await) })
        });
        for wake in burst.collect::<Vec<_>>() {
            match wake.await.expect("joined") {
                (_, Ok(())) => {}
                (replica, Err(error)) if error.code() == tonic::Code::ResourceExhausted => refused[replica] += 1,
                // All workers have somebody by then.
                (_, Err(error)) => assert_eq!(error.code(), tonic::Code::FailedPrecondition, "{error}"),
            }
        }
        for name in &names {
            let _ = clients[0].try_suspend("space", name).await;
        }
        if !refused.contains(&0) {
            break;
        }
    }
    assert!(!refused.contains(&0), "each replica refuses those that come too soon: {refused:?}");
    let mut granted = Vec::new();
    for name in &names {
        granted.extend(wakes(&clients[0], name).await);
    }
    granted.sort_unstable();
    // However slow the machine is: before each a second has passed for every one before it, whichever replica granted that.
    let mut earliest = begun;
    for at in &granted {
        assert!(*at >= earliest, "begun at {begun}, granted: {granted:?}");
        earliest += SECOND;
    }
    let paced = "SELECT convert_from(value, 'UTF8') FROM ate.records WHERE kind = 'count' AND path = 'space/wakes'";
    let paced: i64 = cluster.postgres().sql(paced).parse().expect("a time");
    assert!(paced >= earliest, "both count in one place: {paced}, begun at {begun}, granted: {granted:?}");
    let one_more = || async { clients[1].resume("space", "a0", false).await.is_ok() };
    clients[1].until("a second has passed", one_more).await;
    cluster.stop_all().await;
}

#[tokio::test]
async fn a_thousand_creates_at_once_do_not_pass_the_quota_by_one() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "  idle: {}").await;
    machine.create_atespace("space").await;
    machine.ate(&["quota", "space", "--actors", "700"]).await;
    assert_eq!(create_a_thousand(&[&machine]).await, (700, 300));
    let said = machine.cli(&["create", "actor", "one-more", "-a", "space", "-t", "demo/counter"]).await;
    assert!(said.code != 0 && said.stderr.contains("quota of actors"), "{said:?}");
    machine.ate(&["delete", "a0", "-a", "space"]).await;
    machine.create_counter("space", "one-more").await;
    machine.stop().await;
}

#[tokio::test]
async fn what_runs_and_what_is_stored_is_limited() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(2, "  idle: {}").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    machine.create_counter("space", "b").await;
    machine.ate(&["quota", "space", "--running", "1"]).await;
    machine.count("space", "a").await;
    let (status, body) = machine.get("space", "b", "/").await;
    assert_eq!(status, 429, "{body}");
    let shown = machine.ate(&["quota", "space"]).await;
    assert!(shown.lines().any(|line| line.split_whitespace().eq(["running", "1", "1"])), "{shown}");
    machine.suspend("space", "a").await;
    assert_eq!(machine.count("space", "b").await.memory, 1, "there is room again");
    machine.suspend("space", "b").await;

    // Over its bytes nothing wakes; what has been saved is there when there is room again.
    machine.ate(&["quota", "space", "--running", "none", "--snapshot-bytes", "1"]).await;
    let error = machine.resume("space", "a", false).await.expect_err("there is no room");
    assert!(error.message().contains("bytes of snapshots"), "{error}");
    machine.ate(&["quota", "space", "--snapshot-bytes", "1Gi"]).await;
    assert_eq!(machine.count("space", "a").await.memory, 2);
    machine.suspend("space", "a").await;

    machine.ate(&["quota", "space", "--wakes-per-second", "5"]).await;
    let shown = machine.ate(&["quota", "space", "-o", "json"]).await;
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    assert_eq!((&shown["actors"], &shown["quota"]["wakesPerSecond"]), (&"2".into(), &"5".into()), "{shown}");
    machine.stop().await;
}
