//! `chaos --ate PROGRAM --minutes N`: see the library.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

/// Runs an instance under faults and tells whether anything was lost
#[derive(Debug, Parser)]
struct Arguments {
    /// The binary under test
    #[arg(long, value_name = "PROGRAM")]
    ate: PathBuf,
    #[arg(long, default_value = "10")]
    minutes: f64,
    /// What the faults are drawn from [default: the clock]
    #[arg(long)]
    seed: Option<u64>,
    /// Where what was seen and said is kept if something is wrong
    #[arg(long, default_value = "target/chaos", value_name = "DIR")]
    evidence: PathBuf,
}

#[tokio::main]
async fn main() -> ExitCode {
    let Arguments { ate, minutes, seed, evidence } = Arguments::parse();
    let clock = || std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    let seed = seed.unwrap_or_else(clock);
    eprintln!("seed {seed}");
    let plan = ate_chaos::Plan { program: ate, length: Duration::from_secs_f64(minutes * 60.0), seed, evidence };
    match ate_chaos::run(&plan).await {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
