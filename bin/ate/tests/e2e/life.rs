//! An actor's life from outside.

use ate_testkit::Machine;

use crate::ATE;

#[tokio::test]
async fn counts_in_memory_and_on_disk_survive_sleep_preemption_and_a_restart() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(2, "  idle: {freezeAfter: 300ms, suspendAfter: 1s}").await;
    machine.create_atespace("space").await;
    let names = ["a", "b", "c", "d"];
    for name in names {
        machine.create_counter("space", name).await;
    }
    let mut nonces = std::collections::HashMap::new();
    for round in 1..=3 {
        if round == 3 {
            machine.stop().await;
            machine.restart().await;
        }
        for name in names {
            let reply = machine.count("space", name).await;
            assert_eq!((reply.memory, reply.file, reply.actor.as_str()), (round, round, name), "{reply:?}");
            let first = nonces.entry(name).or_insert_with(|| reply.nonce.clone());
            assert_eq!(*first, reply.nonce, "the process is the one that was put to sleep");
        }
    }
    machine.stop().await;
}
