//! The verbs of `ate` that talk to the API: everything a person or a script does with a running instance.
//!
//! ```text
//!   Verb ─▶ run ─▶ get · watch · change · delete · apply · logs · exec · history · force
//!                     │ words.rs    what the arguments mean         │ show.rs, table.rs, human.rs   what is printed
//!                     ▼                                             ▼
//!                  Session ── connect.rs: unix socket or TLS     Terminal: data on stdout, the rest on stderr
//! ```
//! Verbs, flags, columns and documents are those of `kubectl-ate`, so that scripts written for it go on working; what
//! it lacks is added beside. An error is told once, at the end of [`run`], with what to do about it.

mod apply;
mod change;
mod connect;
mod delete;
mod errors;
mod exec;
mod force;
mod get;
mod history;
mod human;
mod logs;
mod manifests;
mod quota;
mod session;
mod show;
mod table;
mod terminal;
mod watch;
mod words;

use std::path::PathBuf;

pub use apply::ApplyArgs;
pub use change::{ActorArgs, CreateArgs, ForkArgs, RestartArgs, ResumeArgs, UpdateArgs};
pub use connect::{Endpoint, EndpointError};
pub use delete::DeleteArgs;
pub use exec::ExecArgs;
pub use force::{AuditArgs, UnstickArgs};
pub use get::GetArgs;
pub use history::HistoryArgs;
pub use logs::LogsArgs;
pub use quota::QuotaArgs;
pub use terminal::{Terminal, is_log_plain};

use errors::CliError;
use session::Session;
use words::Format;

/// The API's socket within a data directory.
pub const SOCKET: &str = "api.sock";

/// These verbs alone, as a program of their own. A program with more of them flattens [`Global`] and [`Verb`].
#[derive(Debug, clap::Parser)]
#[command(name = "ate", version, about = "Many stateful, sandboxed actors on few warm workers")]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub verb: Verb,
}

/// Flags that every verb takes, before it or after.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Where the API is [default: the socket of --data-dir]
    ///
    /// unix:///path is a socket of this machine; https://host:port and host:port are TLS.
    #[arg(long, global = true, env = "ATE_ENDPOINT")]
    pub endpoint: Option<Endpoint>,
    /// The daemon's data directory
    ///
    /// Its api.sock is where the API is unless --endpoint says otherwise, and its identity/ca.pem is what a TLS
    /// endpoint must be certified by.
    #[arg(long, global = true, env = "ATE_DATA_DIR", default_value = "/var/lib/ate")]
    pub data_dir: PathBuf,
    /// Trust whoever answers at a TLS endpoint
    #[arg(long, global = true)]
    pub insecure_skip_verify: bool,
    /// How to show results: table, wide, json, yaml or name
    #[arg(short, long, global = true, value_name = "FORMAT", default_value = "table")]
    #[arg(value_parser = Format::parser(), hide_possible_values = true)]
    output: Format,
    /// Tell on stderr how long the server took
    #[arg(long, global = true)]
    pub trace: bool,
    /// For clusters, which cannot be reached this way yet
    #[arg(long, global = true, value_name = "FILE", hide_short_help = true)]
    pub kubeconfig: Option<PathBuf>,
    /// For clusters, which cannot be reached this way yet
    #[arg(long, global = true, hide_short_help = true)]
    pub context: Option<String>,
}

impl Global {
    /// `document` as JSON or YAML, if that is how results are to be shown; otherwise they are for people.
    pub fn document(&self, document: &impl serde::Serialize) -> Option<String> {
        match self.output {
            Format::Json => Some(show::json_text(document)),
            Format::Yaml => Some(show::yaml_text(document)),
            Format::Table | Format::Wide | Format::Name => None,
        }
    }
}

#[derive(Debug, clap::Subcommand)]
pub enum Verb {
    /// Show actors, workers, atespaces, templates, pools or configs
    Get(GetArgs),
    /// Make an actor or an atespace
    Create(CreateArgs),
    /// Change an actor
    Update(UpdateArgs),
    /// Run an actor on a worker, from its latest snapshot
    Resume(ResumeArgs),
    /// Save an actor to durable storage and free its worker
    #[command(override_usage = "ate suspend [actor] <NAME> -a <ATESPACE>")]
    #[command(after_help = "Examples:\n  ate suspend my-actor -a demo")]
    Suspend(ActorArgs),
    /// Save an actor to its node's disk and free its worker
    #[command(override_usage = "ate pause [actor] <NAME> -a <ATESPACE>")]
    #[command(after_help = "Examples:\n  ate pause my-actor -a demo")]
    Pause(ActorArgs),
    /// Start an actor's processes anew, on the files that it has
    Restart(RestartArgs),
    /// Make an actor that continues from another's newest snapshot
    Fork(ForkArgs),
    /// Delete an actor, an atespace, an object, or what files declare
    Delete(DeleteArgs),
    /// Create or change the templates, pools and configs that files declare
    Apply(ApplyArgs),
    /// Show what an actor has printed
    Logs(LogsArgs),
    /// Run a command inside an actor
    Exec(ExecArgs),
    /// Show what has happened to an actor
    History(HistoryArgs),
    /// Show or change what an atespace may use
    Quota(QuotaArgs),
    /// Bring an actor that is stuck on its way back to its last snapshot
    Unstick(UnstickArgs),
    /// Show what operators have done by force
    Audit(AuditArgs),
    /// Print a script that completes commands in a shell
    #[command(after_help = "Examples:
  source <(ate completion bash)
  ate completion zsh > \"${fpath[1]}/_ate\"
  ate completion fish > ~/.config/fish/completions/ate.fish")]
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Commands of a cluster's administrator
    #[command(hide = true)]
    Admin {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

impl Verb {
    /// Goes on until it is interrupted, and has then done what it should.
    fn is_endless(&self) -> bool {
        match self {
            Self::Get(args) => args.is_endless(),
            Self::Logs(args) => args.is_endless(),
            _ => false,
        }
    }
}

/// Does what `verb` says and returns the exit code: 0, 1 for a failure, 2 for wrong usage, or that of an executed
/// command. `program` is the whole command line, for completion.
pub async fn run(verb: Verb, global: &Global, program: clap::Command, mut terminal: Terminal) -> u8 {
    let is_endless = verb.is_endless();
    let interrupted = std::mem::replace(&mut terminal.interrupted, Box::pin(std::future::pending()));
    let done = tokio::select! {
        done = act(verb, global, program, &mut terminal) => done,
        () = interrupted, if is_endless => Ok(0),
    };
    match done {
        Ok(code) => code,
        Err(error) if error.is_closed_output() => 0,
        Err(error) => {
            terminal.note(&error.explained(terminal.colour.1));
            error.exit_code()
        }
    }
}

async fn act(verb: Verb, global: &Global, program: clap::Command, terminal: &mut Terminal) -> Result<u8, CliError> {
    match verb {
        Verb::Completion { shell } => return complete(shell, program, terminal),
        Verb::Admin { words } => return Err(not_without_cluster(&words)),
        _ => {}
    }
    let mut session = Session::new(global, terminal)?;
    match ask(verb, &mut session).await {
        Err(error) => Err(session.advised(error).await),
        done => done,
    }
}

async fn ask(verb: Verb, session: &mut Session<'_>) -> Result<u8, CliError> {
    match verb {
        Verb::Get(args) => get::run(args, session).await?,
        Verb::Create(args) => change::create(args, session).await?,
        Verb::Update(args) => change::update(args, session).await?,
        Verb::Resume(args) => change::resume(args, session).await?,
        Verb::Suspend(args) => change::suspend(args, session).await?,
        Verb::Pause(args) => change::pause(args, session).await?,
        Verb::Restart(args) => change::restart(args, session).await?,
        Verb::Fork(args) => change::fork(args, session).await?,
        Verb::Delete(args) => delete::run(args, session).await?,
        Verb::Apply(args) => apply::run(args, session).await?,
        Verb::Logs(args) => logs::run(args, session).await?,
        Verb::Exec(args) => return exec::run(args, session).await,
        Verb::History(args) => history::run(args, session).await?,
        Verb::Quota(args) => quota::run(args, session).await?,
        Verb::Unstick(args) => force::unstick(args, session).await?,
        Verb::Audit(args) => force::audit(args, session).await?,
        Verb::Completion { .. } | Verb::Admin { .. } => unreachable!("these need no session and have been done"),
    }
    Ok(0)
}

fn complete(shell: clap_complete::Shell, mut program: clap::Command, terminal: &mut Terminal) -> Result<u8, CliError> {
    let name = program.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut program, name, &mut script);
    terminal.write(script)?;
    Ok(0)
}

fn not_without_cluster(words: &[String]) -> CliError {
    let verb = words.first().map_or("…", String::as_str);
    CliError::Failed(format!(
        "`ate admin {verb}` is not available without a cluster: on one machine, `ate dev` makes all keys and keeps all \
         records by itself"
    ))
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::*;

    #[test]
    fn the_command_line_holds_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_verb_and_flag_is_documented() {
        fn check(command: &clap::Command) {
            for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
                assert!(argument.get_help().is_some(), "{}: {}", command.get_name(), argument.get_id());
            }
            for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
                assert!(verb.get_about().is_some(), "{}", verb.get_name());
                let leaf = !verb.has_subcommands() && verb.get_arguments().count() > 0;
                assert!(
                    !leaf || verb.get_after_help().is_some() || verb.get_name() == "atespace",
                    "{}",
                    verb.get_name()
                );
                check(verb);
            }
        }
        check(&Cli::command());
    }

    #[test]
    fn lines_written_for_kubectl_ate_are_understood() {
        for line in [
            "ate get actors -A",
            "ate -o json get actors --all-atespaces",
            "ate get actor my-actor -a demo -o yaml",
            "ate get workers --endpoint localhost:443",
            "ate get atespaces",
            "ate get atespace demo",
            "ate create actor my-actor -t ns/name -a demo",
            "ate create actor my-actor --template ns/name --atespace demo --kubeconfig x --context y",
            "ate create atespace demo",
            "ate resume actor my-actor -a demo --boot",
            "ate suspend actor my-actor -a demo --trace",
            "ate pause actor my-actor -a demo",
            "ate delete actor my-actor -a demo",
            "ate delete atespace demo",
            "ate logs actors my-actor -a demo -f",
            "ate admin make-ca-pool --name x --ca-id 1",
        ] {
            if let Err(error) = Cli::try_parse_from(line.split(' ')) {
                panic!("{line}: {error}");
            }
        }
    }

    #[test]
    fn wrong_lines_are_usage_errors() {
        for (line, part) in [
            ("ate get actors -a demo -A", "cannot be used with"),
            ("ate get actors -A -o xml", "unsupported format \"xml\""),
            ("ate get pods", "unknown kind \"pods\""),
            ("ate suspend my-actor", "--atespace"),
            ("ate update actor a -a demo", "--selector"),
            ("ate create actor a -t x -a demo --selector novalue", "write key=value"),
            ("ate apply", "--file"),
            ("ate exec a -a demo", "COMMAND"),
            ("ate delete a -a demo --reason x", "--force"),
            ("ate delete -f x.yaml --force", "cannot be used with"),
            ("ate get actors -A --endpoint http://x:1", "unix:///path"),
        ] {
            let error = Cli::try_parse_from(line.split(' ')).expect_err(line);
            assert!(error.to_string().contains(part), "{line}: {error}");
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }
}
