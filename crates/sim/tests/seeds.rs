//! A fixed set of seeds, always the same ones.

#[test]
fn a_seed_is_the_same_every_time() {
    for seed in [1, 2, 3] {
        assert!(ate_sim::run(seed).trace == ate_sim::run(seed).trace, "seed {seed} went two ways");
    }
}

#[test]
fn nothing_is_lost_and_nothing_gets_stuck() {
    for seed in 0..40 {
        let outcome = ate_sim::run(seed);
        if let Some(broken) = outcome.broken {
            println!("{}", outcome.trace);
            panic!("seed {seed}: {}", broken.0);
        }
    }
}
