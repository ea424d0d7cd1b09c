//! One binary, every role.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "ate", version, about = "Many stateful, sandboxed actors on few warm workers")]
struct Ate {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// One sandbox slot; started by the node
    #[command(hide = true)]
    Worker(WorkerArgs),
}

#[derive(Debug, clap::Args)]
struct WorkerArgs {
    #[arg(long)]
    uid: String,
    #[arg(long)]
    link: PathBuf,
    #[arg(long)]
    scratch: PathBuf,
    #[arg(long)]
    root: PathBuf,
    #[arg(long)]
    cgroup: String,
}

fn main() -> anyhow::Result<()> {
    let ate = Ate::parse();
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    match ate.verb {
        Verb::Worker(args) => Ok(ate_worker::run(&ate_worker::Config {
            uid: ate_name::WorkerUid::parse(&args.uid)?,
            link_directory: args.link,
            scratch_directory: args.scratch,
            root_directory: args.root,
            cgroup: args.cgroup,
            build: env!("CARGO_PKG_VERSION").to_owned(),
        })?),
    }
}
