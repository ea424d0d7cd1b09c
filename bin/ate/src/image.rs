//! `ate image`: images without a builder and without a registry.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, bail};
use ate_image::{Architecture, Content, ImageConfig, Recipe};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum ImageVerb {
    /// Pack files into an OCI layout; the same files always give the same digest
    #[command(
        after_help = "Example:\n  ate image pack --layout image --entrypoint /counter \\\n      --file amd64:build/amd64/counter:/counter --file arm64:build/arm64/counter:/counter"
    )]
    Pack(PackArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct PackArgs {
    /// The layout's directory; made if it is not there
    #[arg(long, value_name = "DIR")]
    layout: PathBuf,
    /// What the image starts, one word each
    #[arg(long, value_name = "WORD")]
    entrypoint: Vec<String>,
    /// Environment of the process
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// The user it runs as, `user[:group]`
    #[arg(long, default_value = "")]
    user: String,
    /// A file and its place in the image of an architecture
    #[arg(long, value_name = "ARCH:FROM:TO")]
    file: Vec<String>,
    /// A directory whose contents become the root of the image of an architecture
    #[arg(long, value_name = "ARCH:DIR")]
    directory: Vec<String>,
}

pub(crate) fn run(verb: ImageVerb) -> anyhow::Result<()> {
    let ImageVerb::Pack(args) = verb;
    let mut content: BTreeMap<Architecture, Vec<Content>> = BTreeMap::new();
    for text in &args.directory {
        let (architecture, path) =
            text.split_once(':').with_context(|| format!("--directory {text:?} is not ARCH:DIR"))?;
        content.entry(parse(architecture)?).or_default().push(Content::Directory(path.into()));
    }
    for text in &args.file {
        let mut parts = text.splitn(3, ':');
        let (Some(architecture), Some(from), Some(to)) = (parts.next(), parts.next(), parts.next()) else {
            bail!("--file {text:?} is not ARCH:FROM:TO");
        };
        content
            .entry(parse(architecture)?)
            .or_default()
            .push(Content::File { from: from.into(), to: to.trim_start_matches('/').to_owned() });
    }
    let config = ImageConfig { user: args.user, env: args.env, entrypoint: args.entrypoint, ..ImageConfig::default() };
    let digest = ate_image::pack(&Recipe { config, content }, &args.layout)?;
    println!("oci-layout://{}@sha256:{digest}", args.layout.canonicalize()?.display());
    Ok(())
}

fn parse(text: &str) -> anyhow::Result<Architecture> {
    match text {
        "amd64" => Ok(Architecture::Amd64),
        "arm64" => Ok(Architecture::Arm64),
        other => bail!("architecture {other:?} is not known: amd64 or arm64"),
    }
}
