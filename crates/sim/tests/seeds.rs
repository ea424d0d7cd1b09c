//! Some seeds that are always the same, and some that are not.

#[test]
fn a_seed_is_the_same_every_time() {
    for seed in [1, 2, 3] {
        assert!(ate_sim::run(seed).trace == ate_sim::run(seed).trace, "seed {seed} went two ways");
    }
}

#[test]
fn nothing_is_lost_and_nothing_gets_stuck() {
    (0..40).for_each(holds);
}

/// Every run of the tests looks where none has looked before.
#[test]
fn nothing_is_lost_where_nobody_has_looked_yet() {
    let now = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs() * 1000);
    (now..now + 10).for_each(holds);
}

fn holds(seed: u64) {
    let outcome = ate_sim::run(seed);
    if let Some(broken) = outcome.broken {
        println!("{}", outcome.trace);
        panic!("seed {seed}: {}\n  again: make sim SEED={seed}", broken.0);
    }
}
