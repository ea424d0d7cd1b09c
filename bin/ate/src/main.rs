//! One binary, every role.

mod api;
mod dev;
mod doctor;
mod image;
mod local;
mod machine;
mod metrics;
mod node;
mod peers;
mod place;
mod router;
mod runtime;
mod store;
mod version;

use std::path::PathBuf;
use std::process::ExitCode;

use ate_cli::{Global, Terminal};
use clap::{CommandFactory, Parser, Subcommand};

/// Small things made on one thread and dropped on another are most of what the control plane does.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Debug, Parser)]
#[command(
    name = "ate",
    version,
    about = "Many stateful, sandboxed actors on few warm workers",
    after_help = "Begin with `ate dev`, which runs everything on this machine; then, in another terminal:\n  \
                  demos/counter/pack \"$(command -v ate)\"   # makes its image, in a checkout\n  \
                  ate apply -f demos/counter --wait\n  \
                  ate create atespace demo\n  \
                  ate create actor my-counter -a demo -t demo/counter\n  \
                  curl http://my-counter.demo.localhost:8080/"
)]
struct Ate {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run everything on this machine, with embedded defaults
    Dev(dev::DevArgs),
    #[command(flatten)]
    Client(ate_cli::Verb),
    /// Make images without a builder and without a registry
    #[command(subcommand)]
    Image(image::ImageVerb),
    /// Run a replica of the control plane
    Api(api::ApiServerArgs),
    /// Run the node of this machine, or look after it
    #[command(subcommand)]
    Node(NodeVerb),
    /// Run a router: HTTP to actors' names in, to their nodes out
    Router(router::RouterArgs),
    /// Check, back up and restore what the control plane remembers
    #[command(subcommand)]
    Store(store::StoreVerb),
    /// Tell what this binary was built from, and which sandbox runtimes it knows
    #[command(after_help = "Examples:\n  ate version\n  ate version -o json")]
    Version,
    /// Measure what this costs next to doing without it
    #[command(subcommand)]
    Bench(ate_bench::BenchVerb),
    /// One sandbox slot; started by the node
    #[command(hide = true)]
    Worker(WorkerArgs),
}

#[derive(Debug, Subcommand)]
enum NodeVerb {
    /// Run the node: take orders, run workers
    Run(Box<node::NodeArgs>),
    /// Tell what this machine lacks, what each lack costs, and what to do about it
    Doctor(doctor::DoctorArgs),
}

#[derive(Debug, clap::Args)]
struct WorkerArgs {
    #[arg(long)]
    uid: String,
    #[arg(long)]
    link: PathBuf,
    #[arg(long)]
    root: PathBuf,
    #[arg(long)]
    cgroup: String,
}

/// What this binary was built from; a node adopts only workers of its own kind.
const BUILD: &str = env!("CARGO_PKG_VERSION");

fn main() -> ExitCode {
    let Ate { global, verb } = Ate::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(!ate_cli::is_log_plain())
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_env("ATE_LOG").unwrap_or_else(|_| "warn".into()))
        .init();
    let ended = match verb {
        Verb::Client(verb) => return client(verb, &global),
        Verb::Dev(args) => runtime().and_then(|runtime| runtime.block_on(dev::run(args, &global.data_dir))),
        Verb::Image(verb) => image::run(verb),
        Verb::Version => version::run(&global),
        Verb::Api(args) => runtime().and_then(|runtime| runtime.block_on(api::run(args, &global.data_dir))),
        Verb::Router(args) => runtime().and_then(|runtime| runtime.block_on(router::run(args, &global.data_dir))),
        Verb::Node(NodeVerb::Run(args)) => {
            runtime().and_then(|runtime| runtime.block_on(node::run(*args, &global.data_dir)))
        }
        Verb::Node(NodeVerb::Doctor(args)) => match doctor::run(&args, &global) {
            // It has been told line by line.
            Ok(false) => return ExitCode::FAILURE,
            told => told.map(drop),
        },
        Verb::Store(verb) => match runtime().and_then(|runtime| runtime.block_on(store::run(verb, &global))) {
            // It has been told line by line.
            Ok(false) => return ExitCode::FAILURE,
            told => told.map(drop),
        },
        Verb::Bench(verb) => bench(verb),
        Verb::Worker(args) => worker(args),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Runtime::new()?)
}

fn client(verb: ate_cli::Verb, global: &Global) -> ExitCode {
    match runtime() {
        Ok(runtime) => runtime.block_on(ate_cli::run(verb, global, Ate::command(), Terminal::of_process())).into(),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn bench(verb: ate_bench::BenchVerb) -> anyhow::Result<()> {
    // Not every benchmark has sandboxes, so a runtime that is not there is for those to complain about.
    let runtime = std::env::var_os("ATE_RUNTIME").map(PathBuf::from).or_else(|| runtime::find().ok());
    let setup = ate_bench::Setup { program: std::env::current_exe()?, runtime, replicas: place::REPLICAS };
    Ok(ate_bench::run(verb, &setup)?)
}

fn worker(args: WorkerArgs) -> anyhow::Result<()> {
    Ok(ate_worker::run(&ate_worker::Config {
        uid: ate_name::WorkerUid::parse(&args.uid)?,
        link_directory: args.link,
        root_directory: args.root,
        cgroup: args.cgroup,
        build: BUILD.to_owned(),
    })?)
}
