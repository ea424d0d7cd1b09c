//! Roles as processes of their own: replicas of the API on PostgreSQL, nodes, a router.

use ate_testkit::{Client, Cluster};

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
