//! The windows in which an operation can be cut off, each with what must come of it. The rows of `docs/faults.md`.

use ate_actor::Phase;
use ate_name::NodeName;
use ate_sim::scenario::{Stage, play, play_alone, play_with};

/// The first replica dies at the point while it resumes a suspended actor; the other brings it to an end.
fn resume_survives(point: &str) -> u64 {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        let before = stage.generation().await;
        stage.die_when(point);
        stage.resume().await;
        assert!(stage.is_first_dead().await, "it never came to {point}");
        assert_eq!(stage.count().await, 2, "what was counted before the suspend is there");
        stage.generation().await - before
    })
}

/// The same while it suspends a running one.
fn suspend_survives(point: &str) {
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        stage.die_when(point);
        stage.suspend().await;
        assert!(stage.is_first_dead().await, "it never came to {point}");
        stage.until("at rest or running", |actor| actor.phase.operation().is_none()).await;
        assert_eq!(stage.count().await, 3, "nothing that was counted is lost");
    });
}

#[test]
fn window_01_worker_and_actor_are_bound_by_one_commit() {
    resume_survives("before commit of resuming");
    resume_survives("after commit of resuming");
}

#[test]
fn window_02_a_bound_actor_whose_order_was_never_given() {
    resume_survives("before activate");
}

#[test]
fn window_03_the_node_did_it_and_nobody_heard() {
    assert_eq!(resume_survives("after activate"), 1, "what runs is found, and nothing is restored over it");
}

#[test]
fn window_04_it_runs_and_that_is_not_written_down() {
    for point in ["before commit of running", "after commit of running"] {
        assert_eq!(resume_survives(point), 1, "what runs is found, and nothing is restored over it");
    }
}

#[test]
fn window_05_a_suspend_that_was_announced_and_not_begun() {
    suspend_survives("after commit of suspending");
    suspend_survives("before capture");
}

#[test]
fn window_06_an_upload_that_fails_costs_nothing() {
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        stage.storage_away(true);
        // Idle: put to rest on the node, woken from there while nothing can be uploaded.
        stage
            .until("at rest on its node", |actor| actor.phase == Phase::Suspended && actor.snapshots.local.is_some())
            .await;
        assert_eq!(stage.count().await, 3);
        stage.until_suspended().await;
        stage.storage_away(false);
        stage.until("durable", |actor| actor.snapshots.uploading.is_none()).await;
        assert_eq!(stage.count().await, 4);
    });
}

#[test]
fn window_07_an_upload_that_was_done_and_nobody_heard() {
    suspend_survives("before upload");
    suspend_survives("after upload");
}

#[test]
fn window_08_the_worker_is_free_with_the_commit_that_says_so() {
    suspend_survives("after capture");
    suspend_survives("before commit of saving");
    suspend_survives("after commit of saving");
    suspend_survives("before store");
    suspend_survives("after store");
    suspend_survives("before commit of suspended");
    suspend_survives("after commit of suspended");
}

#[test]
fn window_09_a_pause_cut_off_anywhere() {
    for point in [
        "before commit of suspending",
        "after commit of suspending",
        "before capture",
        "after capture",
        "before commit of saving",
        "after commit of saving",
        "before store",
        "after store",
        "before commit of paused",
        "after commit of paused",
    ] {
        play(async |stage: &Stage| {
            assert_eq!(stage.count().await, 2);
            stage.die_when(point);
            stage.pause().await;
            assert!(stage.is_first_dead().await, "it never came to {point}");
            if point != "before commit of suspending" {
                stage.until("paused", |actor| actor.phase == Phase::Paused).await;
            }
            assert_eq!(stage.count().await, 3);
        });
    }
}

#[test]
fn window_10_its_worker_goes_while_it_is_woken() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        let killed = async {
            stage.until("in a worker", |actor| matches!(actor.phase, Phase::Resuming { lease: Some(_), .. })).await;
            stage.kill_its_worker().await;
        };
        tokio::join!(stage.resume(), killed);
        stage.until("out of it", |actor| actor.phase.operation().is_none()).await;
        assert_eq!(stage.count().await, 2, "from the last acknowledged snapshot");
    });
}

#[test]
fn window_10_its_worker_goes_while_it_is_put_to_rest() {
    for pauses in [false, true] {
        play(async |stage: &Stage| {
            assert!(stage.suspend().await);
            assert_eq!(stage.count().await, 2);
            let asked = async { if pauses { stage.pause().await } else { stage.suspend().await } };
            let killed = async {
                stage.until("still in it", |actor| matches!(actor.phase, Phase::Suspending { .. })).await;
                stage.kill_its_worker().await;
            };
            let (acknowledged, ()) = tokio::join!(asked, killed);
            assert!(!acknowledged, "nothing was saved");
            stage.until("out of it", |actor| actor.phase.operation().is_none()).await;
            assert_eq!(stage.counted("ate_actors_lost_total"), 1);
            assert_eq!(
                stage.count().await,
                2,
                "from the last acknowledged snapshot: what came after it went with the worker"
            );
        });
    }
}

#[test]
fn window_11_no_lock_outlives_its_holder() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        stage.die_when("before activate");
        assert!(!stage.resume().await);
        // The lease of a replica, and a little: not the thirty seconds of a lock that nobody renews.
        assert!(stage.time_to_count().await.as_secs() < 20);
    });
}

#[test]
fn window_12_the_node_is_restarted_in_the_middle_of_a_restore() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        let node = stage.node().await;
        let resumed = stage.resume();
        let restarted = async {
            stage.until_restoring(&node).await;
            stage.kill_node(&node);
            // The worker goes on, and nobody hears of it.
            stage.sleep(2).await;
            assert!(stage.is_hosted(&node).await);
            stage.start_node(&node);
        };
        tokio::join!(resumed, restarted);
        assert_eq!(stage.count().await, 2);
    });
}

#[test]
fn window_13_a_sandbox_that_ends_is_seen() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        assert_eq!(stage.count().await, 2);
        stage.kill_its_sandbox().await;
        stage.until_suspended().await;
        assert_eq!(stage.count().await, 2, "from its last snapshot");
    });
}

#[test]
fn window_14_a_node_is_lost_with_a_running_actor() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        assert_eq!(stage.count().await, 2);
        let node = stage.node().await;
        stage.power_off(&node);
        assert_eq!(stage.count().await, 2, "on another node, from its last snapshot");
        assert_ne!(stage.node().await, node);
        assert_eq!(stage.counted("ate_actors_lost_total"), 1);
        stage.start_node(&node);
    });
}

#[test]
fn window_14_a_node_that_comes_back_can_do_no_harm() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        assert_eq!(stage.count().await, 2);
        let node = stage.node().await;
        stage.cut_off(&node, true);
        // Until its lease is over it may serve whoever reaches it.
        stage.sleep(25).await;
        assert_eq!(stage.count().await, 2, "moved");
        stage.cut_off(&node, false);
        stage.sleep(30).await;
        assert_eq!(stage.count().await, 3, "and nothing of the old one is heard");
        assert_eq!(stage.counted("ate_nodes_given_up_total"), 1);
        assert!(stage.counted("ate_fenced_total") > 0);
    });
}

#[test]
fn window_15_a_node_is_lost_with_a_paused_actor() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        assert_eq!(stage.count().await, 2);
        assert!(stage.pause().await);
        stage.until("durable", |actor| actor.snapshots.base().is_some_and(|(_, only)| only.is_none())).await;
        let node = stage.node().await;
        stage.power_off(&node);
        assert_eq!(stage.count().await, 3, "it was paused on its node, and brought to durable storage behind that");
        assert_eq!(stage.counted("ate_actors_fell_back_total"), 0);
    });
}

#[test]
fn window_15_a_node_is_lost_before_a_pause_is_durable() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        assert_eq!(stage.count().await, 2);
        stage.storage_away(true);
        assert!(stage.pause().await);
        let node = stage.node().await;
        stage.destroy(&node);
        stage.storage_away(false);
        assert_eq!(stage.count().await, 2, "from its last durable snapshot, after a grace");
        assert_eq!(stage.counted("ate_actors_fell_back_total"), 1);
    });
}

#[test]
fn window_15_a_node_that_comes_back_just_when_it_is_given_up_for_good_keeps_what_only_it_has() {
    // With so many the node asks the other replica first; asked of the one that stands still it would come too late.
    play_with(3, async |stage: &Stage| {
        assert!(stage.suspend().await);
        assert_eq!(stage.count().await, 2);
        stage.storage_away(true);
        assert!(stage.pause().await);
        let node = stage.node().await;
        stage.power_off(&node);
        stage.until_first_stands_still("before commit of suspended", 5).await;
        stage.start_node(&node);
        stage.sleep(6).await;
        stage.storage_away(false);
        assert_eq!(stage.count().await, 3);
        assert_eq!(stage.counted("ate_actors_fell_back_total"), 0);
    });
}

#[test]
fn window_16_a_route_of_the_past_is_refused_by_the_worker_that_has_somebody_else() {
    play_with(12, async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        let route = stage.route();
        assert!(stage.suspend().await);
        stage.wake_the_others().await;
        assert!(stage.is_refused_where_somebody_else_is(&route).await);
    });
}

#[test]
fn window_16_a_route_of_the_past_is_refused_by_a_worker_that_is_free() {
    // The client keeps its route; whoever serves is checked against the store at every request.
    play(async |stage: &Stage| {
        for expected in 2..6 {
            assert!(stage.suspend().await);
            assert_eq!(stage.count().await, expected);
        }
    });
}

#[test]
fn window_17_the_store_is_away_for_a_while() {
    // One that comes back without what it acknowledged is refused by the adapters themselves: see their own tests.
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        let suspended = stage.suspend();
        let away = async {
            stage.until("suspending", |actor| actor.phase.operation().is_some()).await;
            stage.store_away(true);
            stage.sleep(20).await;
            stage.store_away(false);
        };
        tokio::join!(suspended, away);
        stage.until_suspended().await;
        assert_eq!(stage.count().await, 3);
    });
}

#[test]
fn window_17_the_store_of_one_that_is_alone_is_away_for_longer_than_nodes_are_waited_for() {
    play_alone(1, async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        stage.store_away(true);
        stage.sleep(60).await;
        stage.store_away(false);
        assert_eq!(stage.count().await, 3, "nobody was taken for dead meanwhile");
    });
}

#[test]
fn window_18_a_delete_and_a_resume_at_once() {
    for point in ["before commit of deleted", "after commit of deleted", "before forget", "after forget"] {
        play(async |stage: &Stage| {
            assert!(stage.suspend().await);
            stage.die_when(point);
            stage.delete().await;
            assert!(stage.is_first_dead().await, "it never came to {point}");
        });
    }
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        let (deleted, resumed) = tokio::join!(stage.delete(), stage.resume());
        assert!(!(deleted && resumed), "one of them was told so");
    });
}

#[test]
fn window_19_a_golden_snapshot_cut_off_anywhere() {
    for point in [
        // That it is there, and not that its template waits for it.
        "after commit of suspended",
        "before commit of resuming",
        "after commit of resuming",
        "after activate",
        "after capture",
        "after store",
        "after upload",
        "after discard",
        "before commit of template",
        "after commit of template",
        "before commit of ready",
        "after commit of ready",
    ] {
        ate_sim::scenario::golden_survives(point);
    }
    // And by one that only seemed to be dead.
    for point in [
        "after commit of resuming",
        "before activate",
        "after activate",
        "after commit of running",
        "before capture",
        "after capture",
        "after commit of saving",
        "after store",
        "after upload",
        "before discard",
        "before commit of template",
        "after commit of template",
        "before commit of ready",
        "after commit of ready",
    ] {
        ate_sim::scenario::golden_is_left_alone(point);
    }
}

#[test]
fn window_20_clocks_that_disagree() {
    play(async |stage: &Stage| {
        stage.set_clocks([5, -5]);
        for expected in 2..6 {
            for resumed in stage.suspend_and_resume_at_each().await {
                assert!(resumed.is_ok(), "{resumed:?}");
            }
            assert_eq!(stage.count().await, expected);
        }
        stage.crash().await;
        stage.until_suspended().await;
        assert!(stage.refusal().await.is_none(), "once is nothing, whoever's clock says so");
    });
}

#[test]
fn a_disk_that_stays_full_costs_what_was_not_saved_and_nothing_more() {
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        assert!(stage.suspend().await);
        assert_eq!(stage.count().await, 3);
        let node = stage.node().await;
        stage.disk_full(&node, true);
        assert!(!stage.suspend().await, "it is not acknowledged");
        stage.until_suspended().await;
        stage.disk_full(&node, false);
        assert_eq!(stage.count().await, 3, "from the snapshot of before");
    });
}

#[test]
fn a_full_disk_keeps_the_image_until_there_is_room() {
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        let node = stage.node().await;
        stage.disk_full(&node, true);
        let suspended = stage.suspend();
        let freed = async {
            stage.sleep(30).await;
            let told = ["ate_operations", "ate_operation_oldest_seconds"].map(|name| stage.counted(name));
            assert!(told[0] > 0 && told[1] > 20, "what waits can be seen: {told:?}");
            stage.disk_full(&node, false);
        };
        let (suspended, ()) = tokio::join!(suspended, freed);
        assert!(suspended);
        assert_eq!(stage.count().await, 3);
    });
}

#[test]
fn what_waits_for_a_node_that_its_owner_does_not_reach_is_taken_over_by_one_that_does() {
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        let node = stage.node().await;
        stage.cut_first_from(&node);
        stage.suspend_at_first_behind();
        stage.until_suspended().await;
        assert_eq!(stage.counted("ate_operations_taken_over_total"), 1);
        assert_eq!(stage.counted("ate_nodes_given_up_total"), 0);
        assert_eq!(stage.count().await, 3, "nothing that was counted is lost");
    });
}

#[test]
fn whoever_waits_for_a_step_that_is_over_goes_on_with_the_next() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        assert_eq!(stage.count().await, 2);
        let node = stage.node().await;
        assert!(stage.suspend().await);
        stage.cut_first_from(&node);
        stage.resume_at_first_behind();
        stage.until("being woken", |actor| matches!(actor.phase, Phase::Resuming { lease: Some(_), .. })).await;
        stage.fail_its_wake().await;
        // For the node alone the first replica would wait for ever.
        stage.destroy(&node);
        stage.until_suspended().await;
    });
}

/// It says that it lives, and takes orders from nobody: what waits for it must not wait for as long as it lives.
fn a_node_out_of_reach_is_shut_out(out_of_reach: impl Fn(&Stage, &NodeName, bool)) {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        assert_eq!(stage.count().await, 2);
        let node = stage.node().await;
        out_of_reach(stage, &node, true);
        stage.suspend_at_first_behind();
        stage.until("suspending", |actor| matches!(actor.phase, Phase::Suspending { .. })).await;
        stage.until_suspended().await;
        assert_eq!(stage.count().await, 2, "elsewhere, from its last snapshot");
        assert!(stage.counted("ate_nodes_shut_out_total") > 0);
        out_of_reach(stage, &node, false);
    });
}

#[test]
fn a_node_that_takes_orders_from_nobody_is_shut_out() {
    a_node_out_of_reach_is_shut_out(Stage::cut_everybody_from);
}

#[test]
fn a_node_that_hangs_is_shut_out() {
    a_node_out_of_reach_is_shut_out(Stage::hang);
}

#[test]
fn nobody_is_shut_out_if_no_node_is_reached() {
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        let nodes = stage.nodes();
        for node in &nodes {
            stage.cut_everybody_from(node, true);
        }
        stage.sleep(120).await;
        for node in &nodes {
            stage.cut_everybody_from(node, false);
        }
        assert_eq!(stage.counted("ate_nodes_shut_out_total"), 0, "the fault is not theirs");
        assert_eq!(stage.count().await, 3);
    });
}

#[test]
fn an_image_is_kept_for_as_long_as_its_node_is_only_not_reached() {
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        let (node, nodes) = (stage.node().await, stage.nodes());
        stage.disk_full(&node, true);
        let cut = async {
            stage.until("out of its worker", |actor| matches!(actor.phase, Phase::Saving { .. })).await;
            for node in &nodes {
                stage.cut_everybody_from(node, true);
            }
            stage.disk_full(&node, false);
            // Longer than a disk may fail.
            stage.sleep(120).await;
            for node in &nodes {
                stage.cut_everybody_from(node, false);
            }
        };
        let (suspended, ()) = tokio::join!(stage.suspend(), cut);
        assert!(suspended);
        assert_eq!(stage.count().await, 3);
    });
}

/// A node is fine, and one order to it is never answered. Whoever gave it has an end.
#[test]
fn an_order_that_is_never_answered_keeps_nobody_for_ever() {
    for point in ["before activate", "after activate"] {
        play(async |stage: &Stage| {
            assert!(stage.suspend().await);
            stage.never_answered(point);
            stage.resume_at_first_behind();
            stage.until("resuming", |actor| matches!(actor.phase, Phase::Resuming { .. })).await;
            stage.until("at rest or running", |actor| actor.phase.operation().is_none()).await;
            assert!(stage.was_never_answered(), "it never came to {point}");
            assert_eq!(stage.count().await, 2, "{point}: it is where its snapshot is");
        });
    }
    for point in ["before capture", "after capture", "before store", "after store", "before upload", "after upload"] {
        play(async |stage: &Stage| {
            assert!(stage.suspend().await);
            assert_eq!(stage.count().await, 2);
            stage.never_answered(point);
            stage.suspend_at_first_behind();
            stage.until("suspending", |actor| matches!(actor.phase, Phase::Suspending { .. })).await;
            stage.until_suspended().await;
            stage.until("durable", |actor| actor.snapshots.uploading.is_none()).await;
            assert!(stage.was_never_answered(), "it never came to {point}");
            assert_eq!(stage.count().await, 3, "{point}: nothing that was counted is lost");
        });
    }
}

#[test]
fn an_order_that_gets_lost_is_not_counted_as_a_disk_that_fails() {
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        let node = stage.node().await;
        stage.never_answered("before store");
        stage.suspend_at_first_behind();
        stage.until("saving", |actor| matches!(actor.phase, Phase::Saving { .. })).await;
        stage.sleep(25).await;
        stage.disk_full(&node, true);
        stage.sleep(30).await;
        assert!(stage.was_never_answered());
        stage.disk_full(&node, false);
        stage.until_suspended().await;
        assert_eq!(stage.count().await, 3, "nothing that was counted is lost");
    });
}

#[test]
fn a_removal_that_gets_lost_is_made_up_for() {
    for point in ["before forget", "after forget"] {
        play(async |stage: &Stage| {
            assert!(stage.suspend().await);
            assert_eq!(stage.count().await, 2);
            stage.never_answered(point);
            stage.suspend_at_first_behind();
            stage.until("suspending", |actor| matches!(actor.phase, Phase::Suspending { .. })).await;
            stage.until_suspended().await;
            stage.sleep(5).await;
            assert!(stage.was_never_answered(), "it never came to {point}");
        });
    }
}
