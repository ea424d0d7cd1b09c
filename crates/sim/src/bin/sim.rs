//! `sim [SEEDS [FIRST]]`: that many seeds, on every processor; with `--stop`, no more of them than it takes to find one that
//! fails. `sim --seed N`: one, with its trace.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Seeds between two lines that say how far it is.
const TELL_EVERY: u64 = 1000;

fn main() {
    let (options, args): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|arg| arg == "--stop");
    let number = |text: Option<&String>| text.and_then(|text| text.parse::<u64>().ok());
    match args.first().map(String::as_str) {
        Some("--seed") => one(number(args.get(1)).unwrap_or(0)),
        _ => many(number(args.first()).unwrap_or(100), number(args.get(1)).unwrap_or(0), !options.is_empty()),
    }
}

fn one(seed: u64) {
    let outcome = ate_sim::run(seed);
    println!("{}", outcome.trace);
    println!("{:?} in {:?}", outcome.examined, outcome.lasted);
    if let Some(broken) = outcome.broken {
        eprintln!("seed {seed}: {}", broken.0);
        std::process::exit(1);
    }
}

fn many(seeds: u64, first: u64, stop: bool) {
    let (begun, next, failed) = (Instant::now(), AtomicU64::new(first), AtomicU64::new(0));
    let done = AtomicU64::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + seeds || (stop && failed.load(Ordering::Relaxed) > 0) {
                        return;
                    }
                    if let Some(broken) = ate_sim::run(seed).broken {
                        failed.fetch_add(1, Ordering::Relaxed);
                        eprintln!("seed {seed}: {}\n  reproduce: make sim SEED={seed}", broken.0);
                    }
                    let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                    if done.is_multiple_of(TELL_EVERY) {
                        eprintln!("{done} of {seeds} seeds, {:.0} s", begun.elapsed().as_secs_f64());
                    }
                }
            });
        }
    });
    let failed = failed.into_inner();
    println!("{seeds} seeds in {:.1} s, {failed} failed", begun.elapsed().as_secs_f64());
    if failed > 0 {
        std::process::exit(1);
    }
}
