//! Verbs that change one actor or atespace.

use ate_object::{DEFAULT_NAMESPACE, Kind};
use ate_proto::ate::v1::{ForkActorRequest, RestartActorRequest};
use ate_proto::ateapi::{
    CreateActorRequest, CreateAtespaceRequest, PauseActorRequest, ResumeActorRequest, Selector, SuspendActorRequest,
    UpdateActorRequest,
};

use crate::errors::CliError;
use crate::session::{Session, Target};
use crate::words::actor_name;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ate create atespace demo
  ate create actor my-actor -t default/counter -a demo
  ate create actor my-actor -t default/counter -a demo --selector disk=fast")]
pub struct CreateArgs {
    #[command(subcommand)]
    what: Create,
}

#[derive(Debug, clap::Subcommand)]
enum Create {
    /// Make an actor of a template; it sleeps until the first request
    Actor(CreateActor),
    /// Make an atespace, the boundary that actors live in
    Atespace {
        /// Lower-case letters, digits and '-', at most 63
        name: String,
    },
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ate create actor my-actor -t default/counter -a demo
  ate create actor my-actor -t default/counter -a demo --selector disk=fast")]
struct CreateActor {
    /// Lower-case letters, digits and '-', at most 63
    name: String,
    /// The actor's template, as namespace/name; "default" if no namespace is named
    #[arg(short, long, value_name = "NS/NAME")]
    template: String,
    /// The atespace it will live in
    #[arg(short, long)]
    atespace: String,
    /// Only pools with this label may run it; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',', value_parser = label)]
    selector: Vec<(String, String)>,
}

#[derive(Debug, clap::Args)]
pub struct UpdateArgs {
    #[command(subcommand)]
    what: Update,
}

#[derive(Debug, clap::Subcommand)]
enum Update {
    /// Replace an actor's worker selector; it counts from the next resume on
    Actor(UpdateActor),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ate update actor my-actor -a demo --selector disk=fast
  ate update actor my-actor -a demo --no-selector")]
struct UpdateActor {
    /// The actor
    name: String,
    /// The atespace it lives in
    #[arg(short, long)]
    atespace: String,
    /// Only pools with this label may run it; may be repeated. Replaces all there were
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',', value_parser = label)]
    #[arg(required_unless_present = "no_selector")]
    selector: Vec<(String, String)>,
    /// Any pool that the template allows may run it
    #[arg(long, conflicts_with = "selector")]
    no_selector: bool,
}

/// One actor, with the word `actor` before its name or without.
#[derive(Debug, clap::Args)]
pub struct ActorArgs {
    /// The actor; the word "actor" before it may be left out
    #[arg(value_name = "[actor] NAME", num_args = 1..=2, required = true)]
    words: Vec<String>,
    /// The atespace it lives in
    #[arg(short, long)]
    atespace: String,
}

impl ActorArgs {
    pub(crate) fn name(&self) -> Result<&str, CliError> {
        actor_name(&self.words)
    }

    pub(crate) fn atespace(&self) -> &str {
        &self.atespace
    }
}

#[derive(Debug, clap::Args)]
#[command(override_usage = "ate resume [actor] <NAME> -a <ATESPACE> [--boot]")]
#[command(after_help = "Examples:
  ate resume my-actor -a demo
  ate resume my-actor -a demo --boot   from nothing, not from the template's golden snapshot")]
pub struct ResumeArgs {
    #[command(flatten)]
    actor: ActorArgs,
    /// Start from nothing if it has no snapshot of its own
    #[arg(long)]
    boot: bool,
}

#[derive(Debug, clap::Args)]
#[command(override_usage = "ate restart [actor] <NAME> -a <ATESPACE> [--force]")]
#[command(after_help = "Its processes end and start anew; the files of its durable directory are kept.

Examples:
  ate restart my-actor -a demo
  ate restart my-actor -a demo --force   with the files of its last snapshot: what it did since then is lost")]
pub struct RestartArgs {
    #[command(flatten)]
    actor: ActorArgs,
    /// Do not save what runs, neither memory nor files
    #[arg(long)]
    force: bool,
}

#[derive(Debug, clap::Args)]
#[command(
    after_help = "It has the memory and the files of the other's newest snapshot, and a name, uid and key of its own. One that
runs is suspended for it, and woken by its next request.

Examples:
  ate fork my-actor what-if -a demo"
)]
pub struct ForkArgs {
    /// The actor to continue from
    from: String,
    /// The new one: lower-case letters, digits and '-', at most 63
    to: String,
    /// The atespace of both
    #[arg(short, long)]
    atespace: String,
}

fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write key=value".to_owned()),
    }
}

fn selector(labels: Vec<(String, String)>) -> Option<Selector> {
    (!labels.is_empty()).then(|| Selector { match_labels: labels.into_iter().collect() })
}

pub(crate) async fn create(args: CreateArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    match args.what {
        Create::Actor(args) => create_actor(args, session).await,
        Create::Atespace { name } => {
            let answer = session.control.create_atespace(CreateAtespaceRequest { name }).await;
            let made = session.answer(answer)?.atespace;
            session.show_atespaces(made.into_iter().collect())
        }
    }
}

async fn create_actor(args: CreateActor, session: &mut Session<'_>) -> Result<(), CliError> {
    let (namespace, name) = args.template.split_once('/').unwrap_or((DEFAULT_NAMESPACE, &args.template));
    let request = CreateActorRequest {
        actor_ref: Some(session.actor(&args.atespace, &args.name)),
        actor_template_namespace: namespace.to_owned(),
        actor_template_name: name.to_owned(),
        worker_selector: selector(args.selector),
    };
    // It is not the new actor that can be missing.
    let template = Target::Object { kind: Kind::ActorTemplate, namespace: namespace.to_owned(), name: name.to_owned() };
    session.target = Some(template);
    let answer = session.control.create_actor(request).await;
    let made = session.answer(answer)?.actor;
    session.show_actors(made.into_iter().collect()).await
}

pub(crate) async fn update(args: UpdateArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let Update::Actor(args) = args.what;
    let actor_ref = Some(session.actor(&args.atespace, &args.name));
    let request = UpdateActorRequest { actor_ref, worker_selector: selector(args.selector) };
    let answer = session.control.update_actor(request).await;
    let updated = session.answer(answer)?.actor;
    session.show_actors(updated.into_iter().collect()).await
}

pub(crate) async fn resume(args: ResumeArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let actor_ref = Some(session.actor(&args.actor.atespace, args.actor.name()?));
    let answer = session.control.resume_actor(ResumeActorRequest { actor_ref, boot: args.boot }).await;
    let resumed = session.answer(answer)?.actor;
    session.show_actors(resumed.into_iter().collect()).await
}

pub(crate) async fn suspend(args: ActorArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let actor_ref = Some(session.actor(&args.atespace, args.name()?));
    let answer = session.control.suspend_actor(SuspendActorRequest { actor_ref }).await;
    let suspended = session.answer(answer)?.actor;
    session.show_actors(suspended.into_iter().collect()).await
}

pub(crate) async fn pause(args: ActorArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let actor_ref = Some(session.actor(&args.atespace, args.name()?));
    let answer = session.control.pause_actor(PauseActorRequest { actor_ref }).await;
    let paused = session.answer(answer)?.actor;
    session.show_actors(paused.into_iter().collect()).await
}

pub(crate) async fn restart(args: RestartArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let actor = session.actor(&args.actor.atespace, args.actor.name()?);
    let request = RestartActorRequest { atespace: actor.atespace, name: actor.name, force: args.force };
    let answer = session.substrate.restart_actor(request).await;
    let restarted = session.answer(answer)?.actor;
    session.show_actors(restarted.into_iter().collect()).await
}

pub(crate) async fn fork(args: ForkArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let from = session.actor(&args.atespace, &args.from);
    let request = ForkActorRequest { atespace: from.atespace, from: from.name, to: args.to };
    let answer = session.substrate.fork_actor(request).await;
    let forked = session.answer(answer)?.actor;
    session.show_actors(forked.into_iter().collect()).await
}
