//! One binary, every role.

mod dev;
mod image;
mod local;
mod runtime;

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
    /// Run everything on this machine, with embedded defaults
    Dev(dev::DevArgs),
    /// Make images without a builder and without a registry
    #[command(subcommand)]
    Image(image::ImageVerb),
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

/// What this binary was built from; a node adopts only workers of its own kind.
const BUILD: &str = env!("CARGO_PKG_VERSION");

fn main() -> anyhow::Result<()> {
    let ate = Ate::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_env("ATE_LOG").unwrap_or_else(|_| "warn".into()))
        .init();
    match ate.verb {
        Verb::Dev(args) => tokio::runtime::Runtime::new()?.block_on(dev::run(args)),
        Verb::Image(verb) => image::run(verb),
        Verb::Worker(args) => Ok(ate_worker::run(&ate_worker::Config {
            uid: ate_name::WorkerUid::parse(&args.uid)?,
            link_directory: args.link,
            scratch_directory: args.scratch,
            root_directory: args.root,
            cgroup: args.cgroup,
            build: BUILD.to_owned(),
        })?),
    }
}
