//! The numbers that say whether the promises are kept.

use std::collections::BTreeSet;

use ate_testkit::{Machine, Setting};

use crate::ATE;

/// The names of numbers in a text that is for people.
fn named_in(text: &str) -> BTreeSet<&str> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter(|word| word.starts_with("ate_") && !word.contains(char::is_whitespace)).collect()
}

#[tokio::test]
async fn every_number_that_is_written_of_is_told_and_says_what_happened() {
    let args = vec!["--metrics-listen".to_owned(), "127.0.0.1:0".to_owned()];
    let mut machine = Machine::start_with(ATE, Setting { args, ..Setting::default() }).await;
    let repository = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let told = machine.told().await;
    for document in ["SPECIFICATION.md", "docs/operations.md"] {
        let text = std::fs::read_to_string(format!("{repository}/{document}")).expect("a document");
        let named = named_in(&text);
        assert!(named.len() > 10, "{document} names {named:?}");
        let untold: Vec<&str> = named.into_iter().filter(|name| !told.contains_key(*name)).collect();
        assert_eq!(untold, [""; 0], "{document} names what is not told");
    }
    assert!(told.values().all(|value| *value == 0), "nothing has happened yet: {told:?}");

    machine.apply_counter(2, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 1);
    machine.until("both workers are there", || async { machine.told().await["ate_workers"] == 2 }).await;
    let told = machine.told().await;
    assert_eq!(told["ate_workers_taken"], 1, "{told:?}");
    assert!(told["ate_requests_routed_total"] == 1 && told["ate_actors_woken_total"] > 0, "{told:?}");

    // An actor that ended by itself.
    let _ = machine.post("space", "a", "/exit?code=7").await;
    machine.until("it is found out", || async { machine.told().await["ate_actors_crashed_total"] == 1 }).await;

    // A snapshot that is not where it should be.
    assert_eq!(machine.count("space", "a").await.memory, 1);
    machine.suspend("space", "a").await;
    let of_actor = machine.data().join("node/snapshots");
    let aside = machine.directory().join("aside");
    std::fs::rename(&of_actor, &aside).expect("moved");
    machine.resume("space", "a", false).await.expect_err("its snapshot is gone");
    std::fs::rename(&aside, &of_actor).expect("moved back");
    assert!(machine.told().await["ate_snapshots_missing_total"] > 0);
    assert_eq!(machine.count("space", "a").await.memory, 2);

    // A template that does not come up, a quota that refuses, and nothing under way in the end.
    machine.apply(&machine.template("ends", "    command: [/no/such/program]", "")).await;
    machine.until("it fails", || async { machine.told().await["ate_goldens_failed_total"] == 1 }).await;
    machine.ate(&["quota", "space", "--actors", "1"]).await;
    assert_eq!(machine.cli(&["create", "actor", "b", "-t", "demo/counter", "-a", "space"]).await.code, 1);
    machine.suspend("space", "a").await;
    let at_rest = ["ate_workers_taken", "ate_operations", "ate_operation_oldest_seconds", "ate_forgets"];
    let is_at_rest = || async {
        let told = machine.told().await;
        at_rest.iter().all(|name| told[*name] == 0)
    };
    machine.until("nothing is under way", is_at_rest).await;
    let told = machine.told().await;
    assert!(told["ate_quota_refusals_total"] == 1 && told["ate_snapshots_stored_total"] >= 3, "{told:?}");
    for never in [
        "ate_actors_not_in_worker_total",
        "ate_workers_freed_total",
        "ate_actors_fell_back_total",
        "ate_nodes_given_up_total",
    ] {
        assert_eq!(told[never], 0, "{told:?}");
    }
    machine.stop().await;
}
