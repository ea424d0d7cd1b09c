//! Things that go wrong.

use ate_testkit::Machine;

use crate::ATE;

#[tokio::test]
async fn after_kill_9_running_actors_are_adopted_and_suspended_ones_continue() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(2, "").await;
    machine.create_atespace("space").await;
    for name in ["running", "suspended"] {
        machine.create_counter("space", name).await;
        machine.count("space", name).await;
        machine.count("space", name).await;
    }
    machine.suspend("space", "suspended").await;
    machine.kill().await;
    machine.restart().await;
    for name in ["running", "suspended"] {
        let reply = machine.count("space", name).await;
        assert_eq!((reply.memory, reply.file), (3, 3), "{name}: {reply:?}");
    }
    // An adopted actor can be put to sleep like any other.
    machine.suspend("space", "running").await;
    assert_eq!(machine.count("space", "running").await.memory, 4);
    machine.stop().await;
}

#[tokio::test]
async fn an_actor_whose_worker_is_killed_continues_from_its_last_snapshot() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    machine.count("space", "a").await;
    machine.suspend("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 2);
    for pid in machine.worker_pids() {
        Machine::kill_process(pid);
    }
    let reply = machine.count("space", "a").await;
    assert_eq!(
        (reply.memory, reply.file),
        (2, 2),
        "the count after the snapshot is gone, the snapshot is not: {reply:?}"
    );
    machine.stop().await;
}

#[tokio::test]
async fn an_actor_that_exits_is_noticed_and_woken_again() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 1);
    let _ = machine.get("space", "a", "/exit?code=7").await;
    let reply = machine.count("space", "a").await;
    assert_eq!(reply.memory, 1, "it began anew from the golden snapshot: {reply:?}");
    let history = machine.history("space", "a").await;
    assert!(history.iter().any(|entry| entry.event == "Lost" && entry.detail.contains("code 7")), "{history:?}");
    machine.stop().await;
}
