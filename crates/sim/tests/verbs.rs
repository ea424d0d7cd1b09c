//! What people do to actors beyond waking them and putting them to rest, in the middle of everything else.

#[path = "verbs/restore.rs"]
mod restore;

use std::collections::BTreeMap;
use std::time::Duration;

use ate_actor::{Actor, Phase, Status};
use ate_control::{ActorChange, Changed, Code, Quota};
use ate_name::NodeName;
use ate_sim::scenario::{Stage, play, play_alone, play_with};
use futures::StreamExt;

/// Begins something that hangs, because its node falls silent or its disk is full, and does `what` meanwhile.
async fn amid(stage: &Stage, phase: &str, silence: fn(&Stage, &NodeName), what: impl AsyncFnOnce()) {
    assert!(stage.suspend().await);
    let begun = async {
        match phase {
            "resuming" => {
                silence(stage, &stage.node().await);
                stage.resume().await;
            }
            "suspending" => {
                assert_eq!(stage.count().await, 2);
                silence(stage, &stage.node().await);
                stage.suspend().await;
            }
            _ => {
                assert_eq!(stage.count().await, 2);
                stage.disk_full(&stage.node().await, true);
                stage.suspend().await;
            }
        }
    };
    let done = async {
        stage
            .until(phase, |actor| match phase {
                "resuming" => matches!(actor.phase, Phase::Resuming { lease: Some(_), .. }),
                "suspending" => matches!(actor.phase, Phase::Suspending { .. }),
                _ => matches!(actor.phase, Phase::Saving { .. }),
            })
            .await;
        what().await;
    };
    tokio::join!(begun, done);
}

#[test]
fn an_actor_that_is_stuck_is_brought_back_to_its_last_snapshot() {
    for phase in ["resuming", "suspending", "saving"] {
        play(async |stage: &Stage| {
            // The sandbox is gone with the power: whoever still has a route to it must not be answered by it.
            amid(stage, phase, Stage::power_off, async || {
                let unstuck = stage.unstick().await.expect("nobody died").expect(phase);
                assert_eq!(unstuck.phase, Phase::Suspended, "{phase}");
                assert!(!stage.holds_a_worker().await, "{phase}");
            })
            .await;
            let audit = stage.audit().await;
            assert_eq!(audit.iter().map(|entry| entry.call.as_str()).collect::<Vec<_>>(), ["UnstickActor"]);
            assert_eq!((audit[0].caller.as_str(), audit[0].reason.as_str()), ("sim", "it hangs"));
            for node in stage.nodes() {
                stage.disk_full(&node, false);
                stage.start_node(&node);
            }
            assert_eq!(stage.count().await, 2, "{phase}: from the snapshot of before");
        });
    }
}

#[test]
fn what_is_not_stuck_is_left_alone() {
    play(async |stage: &Stage| {
        let refused = stage.unstick().await.expect("nobody died").expect_err("it runs");
        assert!(refused.text.contains("nothing is under way"), "{refused}");
        assert!(stage.suspend().await);
        assert!(stage.unstick().await.expect("nobody died").is_err(), "it sleeps");
        assert!(stage.audit().await.is_empty(), "nothing was done");
        assert_eq!(stage.count().await, 2);
    });
}

#[test]
fn an_actor_is_deleted_by_force_whatever_it_is_doing() {
    for phase in ["resuming", "suspending", "saving"] {
        play(async |stage: &Stage| {
            amid(stage, phase, Stage::kill_node, async || assert!(stage.force_delete().await, "{phase}")).await;
            assert!(stage.actor().await.is_none() && !stage.holds_a_worker().await, "{phase}");
            assert_eq!(stage.audit().await.len(), 1, "{phase}");
            for node in stage.nodes() {
                stage.start_node(&node);
            }
            // That nothing is left of it, not even on the node that was silent, is looked at in the end.
        });
    }
    play(async |stage: &Stage| {
        assert!(stage.force_delete().await, "running");
        assert!(stage.actor().await.is_none() && !stage.holds_a_worker().await);
    });
}

#[test]
fn an_actor_is_made_of_the_template_that_has_the_name_now() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await && stage.delete().await);
        assert!(stage.make_it_of_a_new_template().await);
        assert_eq!(stage.count().await, 1);
    });
}

#[test]
fn every_node_is_told_of_an_actor_that_is_gone() {
    play(async |stage: &Stage| {
        let uid = stage.actor().await.expect("it runs").uid;
        assert!(stage.suspend().await && stage.delete().await);
        stage.until_all_are_told_gone(uid).await;
    });
}

#[test]
fn a_machine_that_stops_puts_all_to_rest_though_one_of_them_is_deleted_meanwhile() {
    for gone in 0..3 {
        play_alone(3, async |stage: &Stage| {
            stage.wake_the_others().await;
            assert_eq!(stage.running().await.len(), 3);
            let (failed, deleted) = tokio::join!(stage.suspend_all(), stage.force_delete_one(gone));
            assert!(deleted && failed.len() == 1, "it was gone before its turn: {failed:?}");
            assert!(stage.running().await.is_empty());
            stage.kill_first();
        });
    }
}

#[test]
fn a_machine_that_stops_wakes_nobody_in_a_worker_that_it_has_just_freed() {
    play_alone(8, async |stage: &Stage| {
        // More than there are workers: the others wait for one.
        let waiting = stage.begin_to_activate_all();
        stage.sleep(1).await;
        assert!(!stage.running().await.is_empty());
        assert_eq!(stage.suspend_all().await, []);
        assert!(stage.running().await.is_empty());
        let woken = waiting.join_all().await;
        let refused = woken.into_iter().filter_map(Result::err).collect::<Vec<_>>();
        assert!(!refused.is_empty(), "all found a worker: nobody waited");
        assert!(refused.iter().all(|error| error.code == Code::Unavailable), "{refused:?}");
        assert!(stage.running().await.is_empty());
        stage.kill_first();
    });
}

#[test]
fn a_delete_by_force_is_done_or_not_and_its_audit_with_it() {
    for (point, done) in
        [("before commit of deleted", false), ("after commit of deleted", true), ("before forget", true)]
    {
        play(async |stage: &Stage| {
            assert!(stage.suspend().await);
            stage.die_when(point);
            assert!(!stage.force_delete().await);
            assert!(stage.is_first_dead().await, "it never came to {point}");
            assert_eq!(
                (stage.actor().await.is_none(), stage.audit().await.len()),
                (done, usize::from(done)),
                "{point}"
            );
        });
    }
}

/// Counts, and tells whether by the processes of before.
async fn counted_anew(stage: &Stage, before: u64) -> (u64, bool) {
    let count = stage.count().await;
    (count, stage.nonce() != before)
}

#[test]
fn a_restart_keeps_the_files_and_nothing_else() {
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        let before = stage.nonce();
        assert!(stage.restart(false).await, "running");
        assert_eq!(counted_anew(stage, before).await, (3, true));
        let before = stage.nonce();
        assert!(stage.suspend().await && stage.restart(false).await, "suspended");
        assert_eq!(counted_anew(stage, before).await, (4, true));
        let before = stage.nonce();
        assert!(stage.suspend().await);
        assert_eq!(counted_anew(stage, before).await, (5, false), "once");
        assert!(stage.restart(true).await, "by force");
        assert_eq!(counted_anew(stage, before).await, (5, true), "with the files of its last snapshot");
    });
}

#[test]
fn a_restart_does_not_wait_for_durable_storage() {
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        let before = stage.nonce();
        stage.storage_away(true);
        assert!(stage.restart(false).await);
        assert_eq!(counted_anew(stage, before).await, (3, true));
        stage.storage_away(false);
    });
}

#[test]
fn a_watch_shows_what_there_is_while_it_changes_and_goes_on_where_it_was_left() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        // Several pages.
        stage.copy_records(2500).await;
        let mut watch = stage.watch(None).await;
        let mut shown = BTreeMap::new();
        let show = |shown: &mut BTreeMap<_, _>, change| match change {
            Changed::Put(versioned) => drop(shown.insert(versioned.actor.key, versioned.version)),
            Changed::Deleted(key) => drop(shown.remove(&key)),
            Changed::Listed => {}
        };
        let first = watch.next().await.expect("there are some").expect("they can be read");
        show(&mut shown, first.change);
        // Behind the list, and ahead of it.
        for index in [7, 2400] {
            stage.touch_copy(index).await;
            stage.remove_copy(index + 1).await;
        }
        let mut listed = loop {
            let ActorChange { revision, change } = watch.next().await.expect("it goes on").expect("it can be read");
            if matches!(change, Changed::Listed) {
                break revision;
            }
            assert_eq!(revision, 0, "it cannot be gone on with halfway");
            show(&mut shown, change);
        };
        // What the feed had not told by then comes behind it.
        for _ in 0..4 {
            if shown == stage.versions().await {
                break;
            }
            let ActorChange { revision, change } = watch.next().await.expect("it goes on").expect("it can be read");
            assert!(revision > listed, "{revision} and {listed}");
            listed = revision;
            show(&mut shown, change);
        }
        assert_eq!(shown, stage.versions().await);
        drop(watch);
        stage.touch_copy(7).await;
        stage.remove_copy(9).await;
        let mut watch = stage.watch(Some(listed)).await;
        let mut news = Vec::new();
        for _ in 0..2 {
            let ActorChange { revision, change } = watch.next().await.expect("it goes on").expect("it can be read");
            assert!(revision > listed, "{revision} and {listed}");
            news.push(matches!(change, Changed::Put(_)));
        }
        assert_eq!(news, [true, false]);
        for index in 0..2500 {
            stage.remove_copy(index).await;
        }
    });
}

#[test]
fn a_restart_that_is_cut_off_is_completed_by_another_replica() {
    for point in [
        "after commit of running",
        "after commit of suspending",
        "after capture",
        "after commit of suspended",
        "after commit of resuming",
        "before activate",
        "after activate",
    ] {
        play(async |stage: &Stage| {
            assert_eq!(stage.count().await, 2);
            let before = stage.nonce();
            stage.die_when(point);
            assert!(!stage.restart(false).await);
            assert!(stage.is_first_dead().await, "it never came to {point}");
            stage.until("started anew", |actor| !actor.fresh && actor.phase.operation().is_none()).await;
            assert_eq!(counted_anew(stage, before).await, (3, true), "{point}");
        });
    }
}

#[test]
fn an_actor_that_crashes_while_it_starts_is_woken_ever_more_rarely() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        stage.kill_first();
        stage.crash_at_start(true);
        for _ in 0..2 {
            let failed = stage.refusal().await.expect("it does not come up");
            assert!(!failed.text.contains("in a row"), "{failed}");
        }
        let refused = stage.refusal().await.expect("it is left alone");
        assert!(refused.text.contains("2 times in a row") && refused.text.contains("before it was ready"), "{refused}");
        stage.crash_at_start(false);
        stage.sleep(1).await;
        assert_eq!(stage.count().await, 2);
    });
}

#[test]
fn an_actor_that_crashes_again_and_again_is_woken_ever_more_rarely() {
    play(async |stage: &Stage| {
        // Clocks of replicas disagree by minutes here; one of them is enough to see pauses of seconds.
        stage.kill_first();
        assert!(stage.refusal().await.is_none());
        stage.crash().await;
        assert_eq!(stage.time_to_count().await.as_secs(), 0, "once is nothing");
        for pause in [1, 2, 4] {
            stage.crash().await;
            let refused = stage.refusal().await.expect("it is left alone");
            assert!(refused.text.contains("in a row") && refused.text.contains("code 1"), "{refused}");
            assert!(refused.retry_after.is_some_and(|left| left.as_secs() < pause), "{refused:?}");
            stage.sleep(pause).await;
            assert!(stage.refusal().await.is_none(), "after {pause} s it is tried");
        }
        // A restart is somebody's who looks after it.
        stage.crash().await;
        assert!(stage.refusal().await.is_some());
        stage.until_suspended().await;
        assert!(stage.restart_elsewhere().await);
        stage.crash().await;
        assert!(stage.refusal().await.is_none(), "counted from there");
    });
}

#[test]
fn a_loss_that_is_not_its_own_fault_is_no_crash() {
    play(async |stage: &Stage| {
        for _ in 0..4 {
            stage.count().await;
            stage.kill_its_sandbox().await;
            stage.until_suspended().await;
            stage.count().await;
            stage.kill_its_worker().await;
            stage.until_suspended().await;
        }
        let refused = stage.refusal().await;
        assert!(refused.is_none(), "{refused:?}");
    });
}

#[test]
fn a_fork_has_what_the_other_had_and_is_somebody_else() {
    play(async |stage: &Stage| {
        assert_eq!(stage.count().await, 2);
        let forked = stage.fork().await.expect("nobody died").expect("it runs, and is suspended for it");
        let from = stage.actor().await.expect("it is there");
        assert_eq!((from.phase, forked.phase.clone()), (Phase::Suspended, Phase::Suspended));
        assert!(
            from.uid != forked.uid && from.sealed_key != forked.sealed_key && from.template_uid == forked.template_uid
        );
        assert_eq!(stage.forked().await.map(|(actor, count)| (actor.uid, count)), Some((forked.uid, 2)));
        let taken = stage.fork().await.expect("nobody died").expect_err("the name is taken");
        assert_eq!(taken.code, ate_control::Code::AlreadyExists);
        assert_eq!(stage.count().await, 3, "the other goes on as it was");
    });
}

#[test]
fn a_fork_that_is_cut_off_is_made_by_another_replica() {
    for point in [
        "before copy",
        "after copy",
        "before upload",
        "after upload",
        "before commit of suspended",
        "after commit of suspended",
    ] {
        play(async |stage: &Stage| {
            assert!(stage.suspend().await);
            stage.die_when(point);
            assert!(stage.fork().await.is_none());
            assert!(stage.is_first_dead().await, "it never came to {point}");
            let (_, count) = stage.forked().await.expect("it is made");
            assert_eq!(count, 1, "{point}");
        });
    }
}

#[test]
fn a_fork_whose_order_gets_lost_is_made_all_the_same() {
    for point in ["before copy", "after copy"] {
        play(async |stage: &Stage| {
            assert!(stage.suspend().await);
            stage.never_answered(point);
            stage.fork().await.expect("nobody died").expect("it is made in the end");
            assert!(stage.was_never_answered(), "it never came to {point}");
            assert_eq!(stage.forked().await.map(|(_, count)| count), Some(1), "{point}");
        });
    }
}

#[test]
fn a_fork_whose_snapshot_is_replaced_begins_again_with_the_new_one() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        stage.die_when("before copy");
        assert!(stage.fork().await.is_none());
        // Before anybody takes over.
        assert_eq!(stage.count().await, 2);
        stage.suspend_elsewhere().await;
        let (_, count) = stage.forked().await.expect("it is made");
        assert_eq!(count, 2, "the snapshot of before is gone");
    });
}

#[test]
fn a_fork_whose_copy_was_removed_begins_again_under_another_operation() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        stage.die_when("after copy");
        assert!(stage.fork().await.is_none());
        // Before anybody takes over; whoever does may not make it once more, and what it is of is still there.
        stage.remove_the_copy().await;
        assert_eq!(stage.forked().await.map(|(_, count)| count), Some(1));
    });
}

#[test]
fn a_copy_that_waits_for_durable_storage_is_kept_for_its_fork() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        stage.storage_away(true);
        let back = async {
            // Nodes are compared with the store meanwhile, and nobody refers to the copy.
            stage.sleep(30).await;
            stage.storage_away(false);
        };
        let (forked, ()) = tokio::join!(stage.fork(), back);
        assert!(forked.expect("nobody died").is_ok());
        assert_eq!(stage.forked().await.map(|(_, count)| count), Some(1));
    });
}

#[test]
fn a_name_that_is_taken_meanwhile_is_not_taken_away() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        stage.die_when("after copy");
        assert!(stage.fork().await.is_none());
        stage.create_in_its_place().await;
        // That nothing is left of the copy is looked at in the end.
        assert!(stage.forked().await.is_none(), "the one that was made has no snapshot");
    });
}

#[test]
fn a_fork_of_what_never_ran_is_refused() {
    play(async |stage: &Stage| {
        stage.create_in_its_place().await;
        let refused = stage.fork_back().await.expect("nobody died").expect_err("it has no snapshot");
        assert!(refused.text.contains("no snapshot yet"), "{refused}");
    });
}

#[test]
fn however_many_wake_at_once_their_quota_holds() {
    let wakes = async |stage: &Stage, quota, most| {
        stage.set_quota(quota).await;
        let (woken, refused): (Vec<_>, Vec<_>) = stage.resume_all().await.into_iter().partition(Result::is_ok);
        assert_eq!((woken.len(), refused.len()), (most, 12 - most), "{refused:?}");
        for error in refused.into_iter().filter_map(Result::err) {
            // Or all workers were just about to be bound.
            assert!(matches!(error.code, Code::ResourceExhausted | Code::FailedPrecondition), "{error}");
        }
        assert!(stage.counted("ate_quota_refusals_total") > 0);
        stage.set_quota(Quota::default()).await;
    };
    play_with(12, async |stage: &Stage| wakes(stage, Quota { running: Some(2), ..Quota::default() }, 2).await);
    // By one clock; and a second would have to pass for another.
    let paced = Quota { wakes_per_second: Some(1), ..Quota::default() };
    play_alone(12, async |stage: &Stage| wakes(stage, paced, 1).await);
}

#[test]
fn who_wakes_too_fast_disturbs_nobody_for_a_worker() {
    play_alone(12, async |stage: &Stage| {
        stage.resume_all().await;
        let workers = stage.running().await.len();
        // Frozen, so that they would be asked to make room, and not yet put to rest.
        stage.sleep(4).await;
        stage.set_quota(Quota { wakes_per_second: Some(1), ..Quota::default() }).await;
        stage.resume_another().await.expect("the first of its second");
        let running = stage.running().await;
        assert_eq!(running.len(), workers, "no worker is free");
        let refused = stage.resume_another().await.expect_err("the second");
        assert_eq!(refused.code, Code::ResourceExhausted, "{refused}");
        stage.sleep(1).await;
        assert_eq!(stage.running().await, running);
        stage.set_quota(Quota::default()).await;
    });
}

#[test]
fn who_sets_a_quota_changes_only_what_they_have_seen() {
    play(async |stage: &Stage| {
        let (none, two) = (Quota::default(), Quota { actors: Some(2), ..Quota::default() });
        stage.set_quota_by(two, none).await.expect("there were none");
        let late = stage.set_quota_by(Quota { running: Some(1), ..none }, none).await.expect_err("there are now");
        assert_eq!(late.code, Code::Aborted, "{late}");
        stage.set_quota_by(Quota { running: Some(1), ..two }, two).await.expect("they are these");
    });
}

#[test]
fn a_fork_that_would_pass_the_quota_of_bytes_is_refused_and_leaves_nothing() {
    // How many it has is known before, or only once it is put to rest for the fork.
    for suspended in [true, false] {
        play(async |stage: &Stage| {
            assert!(!suspended || stage.suspend().await);
            // One snapshot has a thousand.
            stage.set_quota(Quota { snapshot_bytes: Some(1999), ..Quota::default() }).await;
            let refused = stage.fork().await.expect("nobody died").expect_err("there is no room for it");
            assert_eq!(refused.code, Code::ResourceExhausted, "{refused}");
            assert!(stage.forked().await.is_none());
            stage.set_quota(Quota { snapshot_bytes: Some(2000), ..Quota::default() }).await;
            stage.fork().await.expect("nobody died").expect("now there is");
        });
    }
}

#[test]
fn nobody_is_put_to_rest_for_a_fork_that_cannot_be() {
    play(async |stage: &Stage| {
        stage.set_quota(Quota { actors: Some(1), ..Quota::default() }).await;
        let refused = stage.fork().await.expect("nobody died").expect_err("there is no room for it");
        assert_eq!(refused.code, Code::ResourceExhausted, "{refused}");
        assert_eq!(stage.running().await.len(), 1);
    });
}

#[test]
fn a_clock_that_is_ahead_keeps_nobody_from_waking() {
    play(async |stage: &Stage| {
        stage.set_quota(Quota { wakes_per_second: Some(100), ..Default::default() }).await;
        // The clocks of replicas disagree by minutes here: whoever is behind must not wait until it is as late there.
        for _ in 0..3 {
            for resumed in stage.suspend_and_resume_at_each().await {
                assert!(resumed.is_ok(), "{:?}", resumed.err());
            }
        }
        stage.count().await;
    });
}

#[test]
fn a_worker_that_dies_while_the_store_is_away_is_missed_soon() {
    play(async |stage: &Stage| {
        stage.store_away(true);
        stage.kill_its_worker().await;
        stage.sleep(20).await;
        stage.store_away(false);
        // Far from the next comparison of everything.
        assert!(stage.time_to_count().await < Duration::from_secs(60));
    });
}

#[test]
fn a_worker_that_is_assigned_to_nobody_is_freed() {
    play(async |stage: &Stage| {
        assert_eq!(stage.counted("ate_workers_freed_total"), 0);
        stage.assign_a_worker_to_nobody().await;
        stage.until_no_worker_is_nobodys().await;
        stage.sleep(1).await;
        assert_eq!(stage.counted("ate_workers_freed_total"), 1);
        assert_eq!(stage.count().await, 2);
    });
}

#[test]
fn an_actor_whose_node_has_another_address_since_is_found_there() {
    play(async |stage: &Stage| {
        let before = stage.nonce();
        stage.misplace_its_worker().await;
        assert_eq!(stage.count().await, 2);
        assert_eq!(stage.nonce(), before, "it was not started anew");
    });
}

#[test]
fn a_golden_actor_that_cannot_be_saved_leaves_its_worker() {
    play(async |stage: &Stage| {
        stage.write_a_template_without_a_place().await;
        let reason = stage.until_another_has_failed().await;
        assert!(reason.contains("has no scheme"), "{reason}");
        stage.until_no_worker_is_nobodys().await;
        assert_eq!(stage.count().await, 2);
    });
}

#[test]
fn nodes_that_were_told_more_than_the_store_knows_are_refused_by_name() {
    play(async |stage: &Stage| {
        stage.sleep(10).await;
        assert_eq!(stage.counted("ate_nodes_ahead_total"), 0);
        stage.set_beats(|beat| beat - 2).await;
        stage.sleep(10).await;
        assert!(stage.counted("ate_nodes_ahead_total") > 0, "it lost commits, and that is noticed");
        // As a restore writes it.
        stage.set_beats(|beat| beat + 1_000_000).await;
        assert_eq!(stage.count().await, 2);
    });
}

#[test]
fn a_client_that_goes_away_changes_nothing_about_what_has_begun() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        let resuming = |actor: &Actor| matches!(actor.phase, Phase::Resuming { .. });
        stage.abandon(stage.resume(), "resuming", resuming).await;
        stage.until("running", |actor| matches!(actor.phase, Phase::Running { .. })).await;
        let suspending = |actor: &Actor| matches!(actor.phase, Phase::Suspending { .. });
        stage.abandon(stage.suspend(), "suspending", suspending).await;
        stage.until("durable", |actor| actor.phase == Phase::Suspended && actor.snapshots.uploading.is_none()).await;
        assert_eq!(stage.count().await, 2);
    });
}

#[test]
fn a_client_that_goes_away_changes_nothing_about_a_pause_a_restart_a_fork_or_a_delete() {
    play(async |stage: &Stage| {
        let suspending = |actor: &Actor| matches!(actor.phase, Phase::Suspending { .. });
        stage.abandon(stage.pause(), "pausing", suspending).await;
        stage.until("paused", |actor| actor.phase == Phase::Paused).await;
        let before = stage.nonce();
        stage.abandon(stage.restart(false), "to be restarted", |actor| actor.fresh).await;
        stage.until("started anew", |actor| !actor.fresh && actor.phase.operation().is_none()).await;
        assert_eq!(stage.count().await, 2);
        assert_ne!(stage.nonce(), before);
        assert!(stage.suspend().await);
        stage.abandon_the_fork().await;
        assert_eq!(stage.forked().await.expect("it is made").1, 2);
        stage.abandon_the_deletion().await;
        assert!(stage.actor().await.is_none());
    });
}

#[test]
fn whose_record_cannot_be_read_keeps_nobody_on_a_node_that_is_lost() {
    play_with(6, async |stage: &Stage| {
        stage.wake_the_others().await;
        let node = stage.node().await;
        let (damaged, others) = stage.damage_the_first_beside_it().await;
        assert!(!others.is_empty());
        stage.destroy(&node);
        stage.until_they_have_left(&others, &node).await;
        stage.mend(damaged).await;
    });
}

#[test]
fn the_public_oddities_of_resumes_and_suspends_stay() {
    play(async |stage: &Stage| {
        // A second operation is refused, not queued.
        assert!(stage.suspend().await);
        let node = stage.node().await;
        stage.cut_everybody_from(&node, true);
        stage.resume_at_first_behind();
        stage.until("resuming", |actor| matches!(actor.phase, Phase::Resuming { .. })).await;
        let refused = stage.try_resume().await.expect_err("one is under way");
        assert_eq!(
            (refused.code, refused.text.as_str()),
            (Code::Aborted, "another operation is in progress for this actor")
        );
        stage.cut_everybody_from(&node, false);
        stage.until("running", |actor| matches!(actor.phase, Phase::Running { .. })).await;

        // A resume that failed is seen as RESUMING for a while, and then it is not.
        assert!(stage.suspend().await);
        stage.storage_away(true);
        stage.nodes().iter().for_each(|node| stage.wipe_disk(node));
        assert!(stage.try_resume().await.is_err());
        let status = |actor: &Actor| actor.phase.status();
        stage.until("shown as failed", |actor| status(actor) == Status::Resuming && actor.lease().is_none()).await;
        stage.until_suspended().await;
        stage.storage_away(false);

        // A suspend of an actor whose worker is gone succeeds: it is suspended.
        assert_eq!(stage.count().await, 2);
        stage.kill_its_worker().await;
        stage.until_suspended().await;
        assert!(stage.suspend().await);
    });
}

#[test]
fn a_record_that_cannot_be_read_keeps_nobody_from_hearing_of_the_others() {
    play(async |stage: &Stage| {
        assert!(stage.suspend().await);
        stage.write_what_nobody_can_read(true).await;
        // Told to one of them: the others hear of it, or would wake somebody.
        for replicas in [2, 3] {
            stage.set_quota(Quota { running: Some(0), ..Quota::default() }).await;
            stage.sleep(5).await;
            let resumed = stage.suspend_and_resume_at_each().await;
            assert_eq!(resumed.len(), replicas);
            for error in resumed {
                assert_eq!(error.expect_err("it knows of the quota").code, Code::ResourceExhausted);
            }
            stage.set_quota(Quota::default()).await;
            stage.begin_anew().await;
        }
        stage.write_what_nobody_can_read(false).await;
        assert_eq!(stage.count().await, 2);
    });
}
