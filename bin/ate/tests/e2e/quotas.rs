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

#[tokio::test]
async fn two_replicas_do_not_pass_a_quota_of_wakes_together() {
    const ACTORS: usize = 24;
    let mut cluster = Cluster::start(ATE, 2, 1, 1).await;
    let clients = [cluster.client("api-0", 0).await, cluster.client("api-1", 0).await];
    clients[0].apply_counter(4, "  idle: {}").await;
    clients[0].create_atespace("space").await;
    for number in 0..ACTORS {
        clients[0].create_counter("space", &format!("a{number}")).await;
    }
    let one_a_second = Quota { wakes_per_second: Some(1), ..Default::default() };
    set_quota(&clients[0], one_a_second).await;
    let begun = jiff::Timestamp::now().as_second();
    let wakes = (0..ACTORS).map(|number| {
        let (client, name) = (clients[number % 2].clone(), format!("a{number}"));
        tokio::spawn(async move { client.resume("space", &name, false).await })
    });
    let mut woken = 0;
    for wake in wakes.collect::<Vec<_>>() {
        match wake.await.expect("joined") {
            Ok(()) => woken += 1,
            // Or all workers have somebody by then.
            Err(error) => assert!(
                matches!(error.code(), tonic::Code::ResourceExhausted | tonic::Code::FailedPrecondition),
                "{error}"
            ),
        }
    }
    // However slow the machine is: one for each second that has begun meanwhile, and not one more.
    let seconds = jiff::Timestamp::now().as_second() - begun + 1;
    assert!(woken <= seconds, "{woken} in {seconds} s");
    for number in 0..ACTORS {
        let _ = clients[0].try_suspend("space", &format!("a{number}")).await;
    }
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
