//! An older backup of the store is restored while nodes, disks and durable storage are where they are.

use ate_actor::{Actor, Phase};
use ate_name::NodeName;
use ate_sim::scenario::{Stage, play};

/// Suspended with one count when the backup is made.
async fn backed_up(stage: &Stage) -> ate_sim::Backup {
    assert!(stage.suspend().await);
    stage.back_up().await
}

/// Paused with two counts on a node that is cut off when the backup is restored, which knows of that node or does not.
async fn restored_while_its_node_is_silent(stage: &Stage, is_known: bool) -> NodeName {
    let backup = backed_up(stage).await;
    assert_eq!(stage.count().await, 2);
    let node = stage.node().await;
    stage.storage_away(true);
    stage.pause_elsewhere().await;
    stage.cut_off(&node, true);
    stage.restore(if is_known { backup } else { backup.without(&node) }).await;
    stage.storage_away(false);
    node
}

#[test]
fn what_was_suspended_after_a_backup_is_there_when_that_is_restored() {
    play(async |stage: &Stage| {
        let backup = backed_up(stage).await;
        for count in [2, 3] {
            assert_eq!(stage.count().await, count);
            assert!(stage.suspend().await);
        }
        stage.restore(backup.clone()).await;
        assert_eq!(stage.count().await, 4, "the one that the backup knows is gone");
        // Again, and before anybody was woken: nothing is removed meanwhile.
        stage.suspend_elsewhere().await;
        stage.restore(backup).await;
        stage.sleep(100).await;
        assert_eq!(stage.count().await, 5);
    });
}

#[test]
fn however_many_nodes_there_have_been_a_restored_actor_is_woken() {
    play(async |stage: &Stage| {
        stage.bury_nodes(300).await;
        let backup = backed_up(stage).await;
        assert_eq!(stage.count().await, 2);
        assert!(stage.suspend().await);
        stage.restore(backup).await;
        assert_eq!(stage.count().await, 3);
    });
}

#[test]
fn what_only_a_node_has_is_there_when_an_older_backup_is_restored() {
    for is_known in [true, false] {
        play(async |stage: &Stage| {
            let backup = backed_up(stage).await;
            assert_eq!(stage.count().await, 2);
            let node = stage.node().await;
            stage.storage_away(true);
            stage.pause_elsewhere().await;
            stage.restore(if is_known { backup } else { backup.without(&node) }).await;
            stage.sleep(100).await;
            stage.storage_away(false);
            // Not only when somebody asks: its node may be lost before that.
            let is_safe = |actor: &Actor| actor.snapshots.durable.as_ref().is_some_and(|it| it.generation.get() == 2);
            stage.until("what only a node has is durable", is_safe).await;
            assert_eq!(stage.count().await, 3, "known: {is_known}");
        });
    }
}

#[test]
fn nothing_is_concluded_before_every_node_can_have_been_heard_of() {
    for is_known in [true, false] {
        play(async |stage: &Stage| {
            let node = restored_while_its_node_is_silent(stage, is_known).await;
            let comes_late = async {
                stage.sleep(8).await;
                stage.cut_off(&node, false);
            };
            let (count, ()) = tokio::join!(stage.count(), comes_late);
            assert_eq!(count, 3, "known: {is_known}");
        });
    }
}

#[test]
fn a_node_that_comes_while_others_are_asked_is_asked_too() {
    for is_known in [true, false] {
        play(async |stage: &Stage| {
            let node = restored_while_its_node_is_silent(stage, is_known).await;
            // By then it is gone for good, or was never heard of.
            stage.sleep(100).await;
            let others: Vec<_> = stage.nodes().into_iter().filter(|other| *other != node).collect();
            others.iter().for_each(|other| stage.hang(other, true));
            let comes = async {
                stage.sleep(2).await;
                stage.cut_off(&node, false);
                stage.sleep(5).await;
                others.iter().for_each(|other| stage.hang(other, false));
            };
            let (count, ()) = tokio::join!(stage.count(), comes);
            assert_eq!(count, 3, "known: {is_known}");
        });
    }
}

#[test]
fn a_restart_of_a_backup_waits_until_its_newest_is_known_and_is_done_then() {
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        let before = stage.nonce();
        assert!(stage.suspend().await);
        stage.die_when("before commit of resuming");
        assert!(!stage.restart(false).await);
        let backup = stage.back_up().await;
        assert!(stage.actor().await.is_some_and(|actor| actor.fresh), "it is under way");
        stage.restore(backup).await;
        // Nobody asks for it again.
        stage.until("started anew", |actor| !actor.fresh && actor.phase.operation().is_none()).await;
        assert_eq!(stage.count().await, 3);
        assert_ne!(stage.nonce(), before);
    });
}

#[test]
fn a_golden_that_was_made_after_a_backup_stays_for_those_who_stand_on_it() {
    play(async |stage: &Stage| {
        let nodes = stage.nodes();
        nodes.iter().for_each(|node| stage.disk_full(node, true));
        stage.apply_another_template().await;
        // It runs, or is being saved.
        stage.sleep(5).await;
        assert_eq!(stage.golden_of_another().await, None);
        let backup = stage.back_up().await;
        nodes.iter().for_each(|node| stage.disk_full(node, false));
        let first = stage.until_another_is_ready().await;
        stage.restore(backup).await;
        let second = stage.until_another_is_ready().await;
        assert_ne!(first, second, "it was just being made then");
        stage.sleep(60).await;
        assert!(stage.is_durable(&first) && stage.is_durable(&second), "{first} {second}\n{}", stage.trace());
    });
}

#[test]
fn a_save_that_ended_after_a_backup_is_not_lost_with_its_node() {
    play(async |stage: &Stage| {
        let node = stage.node().await;
        stage.disk_full(&node, true);
        stage.suspend_at_first_behind();
        stage.until("saving", |actor| matches!(actor.phase, Phase::Saving { .. })).await;
        let backup = stage.back_up().await;
        stage.disk_full(&node, false);
        stage.until("durable", |actor| actor.snapshots.durable.is_some()).await;
        stage.destroy(&node);
        stage.restore(backup).await;
        assert_eq!(stage.count().await, 2);
    });
}

#[test]
fn who_was_not_saved_after_a_backup_continues_from_what_it_knows() {
    play(async |stage: &Stage| {
        let backup = backed_up(stage).await;
        assert_eq!(stage.count().await, 2);
        stage.restore(backup).await;
        // Its node does not know yet, for as long as its lease lasts.
        stage.sleep(15).await;
        assert_eq!(stage.count().await, 2, "what ran is of the past");
    });
}

#[test]
fn a_fork_after_a_restore_is_of_what_was_saved_last() {
    play(async |stage: &Stage| {
        let backup = backed_up(stage).await;
        assert_eq!(stage.count().await, 2);
        assert!(stage.suspend().await);
        stage.restore(backup).await;
        stage.sleep(45).await;
        assert_eq!(stage.fork_elsewhere().await, 2);
    });
}

#[test]
fn nothing_is_left_of_who_is_deleted_after_a_restore() {
    play(async |stage: &Stage| {
        let backup = backed_up(stage).await;
        assert_eq!(stage.count().await, 2);
        assert!(stage.suspend().await);
        stage.restore(backup).await;
        stage.sleep(5).await;
        // That nothing is left, not even what its record does not know of, is looked at in the end.
        stage.delete_elsewhere().await;
    });
}
