//! Pools that grow and shrink, and templates of more than one container.

use ate_proto::ateapi::ListWorkersRequest;
use ate_testkit::{Machine, counter_image, pool};

use crate::ATE;

async fn workers(machine: &Machine) -> usize {
    machine.control().list_workers(ListWorkersRequest::default()).await.expect("workers").into_inner().workers.len()
}

#[tokio::test]
async fn a_pool_that_shrinks_keeps_every_actor() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(3, "").await;
    machine.create_atespace("space").await;
    let names = ["a", "b", "c"];
    for name in names {
        machine.create_counter("space", name).await;
        assert_eq!(machine.count("space", name).await.memory, 1);
    }
    for (replicas, expected) in [(1, 1), (0, 0), (2, 2)] {
        machine.apply(&pool("counter", replicas, "")).await;
        machine.until("the pool has its size", || async { workers(&machine).await == expected }).await;
        machine.until("processes ended", || async { machine.worker_pids().len() == expected }).await;
    }
    for name in names {
        let reply = machine.count("space", name).await;
        assert_eq!((reply.memory, reply.file), (2, 2), "{name}: {reply:?}");
        machine.suspend("space", name).await;
    }
    // Without its pool a template's actors wait; with it they go on.
    machine.ate(&["delete", "workerpool", "counter", "-n", "demo"]).await;
    machine.until("nothing is left of the pool", || async { workers(&machine).await == 0 }).await;
    let error = machine.resume("space", "a", false).await.expect_err("there is no pool");
    assert!(error.message().contains("no worker pool matches"), "{error}");
    machine.apply(&pool("counter", 1, "")).await;
    assert_eq!(machine.count("space", "a").await.memory, 3);
    machine.stop().await;
}

#[tokio::test]
async fn containers_of_a_template_share_a_sandbox_and_sleep_together() {
    let mut machine = Machine::start(ATE).await;
    let image = counter_image(machine.directory());
    let second = format!(
        "  - name: second\n    image: {image}\n    command: [/counter, -port, '8081', -grpc-port, '8082']\n    ports: [{{port: 80}}, {{port: 8081}}]"
    );
    machine.apply(&format!("{}---{}", pool("counter", 1, ""), machine.template("pair", &second, ""))).await;
    machine.ready("demo", "pair").await;
    machine.create_atespace("space").await;
    for name in ["a", "b"] {
        machine.create("space", name, "pair").await;
    }
    for round in 1..=3 {
        for name in ["a", "b"] {
            assert_eq!(machine.count("space", name).await.memory, round, "{name}");
            let (status, body) = machine.get(&format!("{name}.space"), "8081", "/").await;
            assert_eq!((status, ate_testkit::Reply::parse(&body).memory), (200, round), "{name}: {body}");
            // A single worker: the other one has to sleep meanwhile.
            machine.suspend("space", name).await;
        }
    }
    machine.stop().await;
}
