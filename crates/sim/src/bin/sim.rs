//! `sim [SEEDS [FIRST]]`: that many seeds, on every processor; with `--stop`, no more of them than it takes to find one that
//! fails. `sim --seed N`: one, with its trace.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Seeds between two lines that say how far it is.
const TELL_EVERY: u64 = 1000;

const USAGE: &str = "usage: sim [--stop] [SEEDS [FIRST]]\n       sim --seed SEED";

/// What is asked for.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    One(u64),
    Many { seeds: u64, first: u64, stop: bool },
}

impl Asked {
    /// A word that is not understood is refused, and named: a run of other seeds than were meant would pass for one of these.
    fn parse(words: &[String]) -> Result<Self, String> {
        let (stop, words): (Vec<&str>, Vec<&str>) =
            words.iter().map(String::as_str).partition(|&word| word == "--stop");
        let number = |word: &str| word.parse::<u64>().map_err(|_| format!("{word:?} is no number"));
        match words[..] {
            ["--seed", seed] if stop.is_empty() => Ok(Self::One(number(seed)?)),
            ["--seed", ..] => Err("--seed is followed by one number, and stands alone".to_owned()),
            _ => {
                if let Some(word) = words.get(2) {
                    return Err(format!("{word:?} is one word too many"));
                }
                let at = |index: usize, usual| words.get(index).map_or(Ok(usual), |word| number(word));
                let (seeds, first) = (at(0, 100)?, at(1, 0)?);
                first.checked_add(seeds).ok_or_else(|| format!("there are not {seeds} seeds after {first}"))?;
                Ok(Self::Many { seeds, first, stop: !stop.is_empty() })
            }
        }
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match Asked::parse(&words) {
        Ok(Asked::One(seed)) => one(seed),
        Ok(Asked::Many { seeds, first, stop }) => many(seeds, first, stop),
        Err(error) => {
            eprintln!("error: {error}\n{USAGE}");
            std::process::exit(2);
        }
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
                    // A panic of the simulation itself has told what it is; of which seed, it cannot.
                    let broken = match std::panic::catch_unwind(|| ate_sim::run(seed)) {
                        Ok(outcome) => outcome.broken.map(|broken| broken.0),
                        Err(_) => Some("it panicked".to_owned()),
                    };
                    if let Some(broken) = broken {
                        failed.fetch_add(1, Ordering::Relaxed);
                        eprintln!("seed {seed}: {broken}\n  reproduce: make sim SEED={seed}");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_is_not_understood_is_refused_by_name() {
        let parse = |text: &str| Asked::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(parse(""), Ok(Asked::Many { seeds: 100, first: 0, stop: false }));
        assert_eq!(parse("10 5 --stop"), Ok(Asked::Many { seeds: 10, first: 5, stop: true }));
        assert_eq!(parse("--seed 7"), Ok(Asked::One(7)));
        for (text, word) in
            [("1k", "1k"), ("10 x", "x"), ("--seed y", "y"), ("1 2 3", "3"), ("--sed 7", "--sed"), ("--seed", "--seed")]
        {
            let refused = parse(text).expect_err("it is not understood");
            assert!(refused.contains(word), "{text}: {refused}");
        }
        assert!(parse(&format!("2 {}", u64::MAX)).is_err(), "the last seed would be past the end");
    }
}
