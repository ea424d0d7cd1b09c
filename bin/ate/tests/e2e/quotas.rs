//! Quotas hold, however many ask at once.

use ate_proto::ateapi::{ActorRef, CreateActorRequest};
use ate_testkit::Machine;

use crate::ATE;

#[tokio::test]
async fn a_thousand_creates_at_once_do_not_pass_the_quota_by_one() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "  idle: {}").await;
    machine.create_atespace("space").await;
    machine.ate(&["quota", "space", "--actors", "700"]).await;
    let creates = (0..1000).map(|index| {
        let mut control = machine.control();
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
    assert_eq!((made, refused), (700, 300));
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
