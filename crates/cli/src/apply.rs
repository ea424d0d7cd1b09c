use std::path::PathBuf;
use std::time::Duration;

use ate_name::ObjectKey;
use ate_object::{DEFAULT_NAMESPACE, Interval, Kind};
use ate_proto::Json;
use ate_proto::ate::v1::{AppliedObject, ApplyRequest, GetObjectRequest, applied_object};
use tokio::time::Instant;

use crate::errors::CliError;
use crate::manifests;
use crate::session::{Session, Target};
use crate::show::{json_text, yaml_text};
use crate::words::{Format, object_name};

/// How often a template is looked at while waiting for it; also how often the spinner turns.
const LOOK_EVERY: Duration = Duration::from_millis(150);

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ate apply -f demos/counter/ --wait    every manifest of a directory, until its templates are ready
  ate apply -f template.yaml --dry-run
  cat pool.yaml | ate apply -f -")]
pub struct ApplyArgs {
    /// A file, or a directory of *.yaml, *.yml and *.json files; - reads standard input; may be repeated
    ///
    /// Everything is read and checked before anything is sent. Relative oci-layout: and oci-archive: images and
    /// relative file:// assets are looked for beside the file that names them.
    #[arg(short, long, value_name = "FILE", required = true)]
    file: Vec<PathBuf>,
    /// For objects that name no namespace
    #[arg(short, long, default_value = DEFAULT_NAMESPACE)]
    namespace: String,
    /// Say what would be done, and do not do it
    #[arg(long)]
    dry_run: bool,
    /// Wait until every applied template is ready
    #[arg(long, conflicts_with = "dry_run")]
    wait: bool,
    /// Longest to wait with --wait
    #[arg(long, default_value = "5m", value_name = "DURATION")]
    timeout: Interval,
}

pub(crate) async fn run(args: ApplyArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let objects = manifests::read(&args.file, &args.namespace, session.terminal)?;
    let document = |object| serde_json::to_string(object).expect("an object is strings, numbers, lists and maps");
    let request = ApplyRequest { documents: objects.iter().map(document).collect(), dry_run: args.dry_run };
    let answer = session.substrate.apply(request).await;
    let applied = session.answer(answer)?;
    match session.format {
        Format::Json => session.terminal.write(json_text(&Json::new(&applied)))?,
        Format::Yaml => session.terminal.write(yaml_text(&Json::new(&applied)))?,
        Format::Name | Format::Table | Format::Wide => {
            for object in &applied.objects {
                let line = line(object, session.format == Format::Name, args.dry_run);
                session.terminal.write(line)?;
            }
        }
    }
    if args.wait {
        let deadline = Instant::now() + args.timeout.get();
        for template in objects.iter().filter(|object| object.kind() == Kind::ActorTemplate) {
            let ready = ready(session, &template.key(), deadline).await;
            session.terminal.progress("");
            ready?;
        }
    }
    Ok(())
}

fn line(object: &AppliedObject, name_only: bool, dry_run: bool) -> String {
    let name = match object.kind.parse() {
        Ok(kind) => object_name(kind, &object.name),
        Err(_) => format!("{}/{}", object.kind.to_lowercase(), object.name),
    };
    if name_only {
        return format!("{name}\n");
    }
    let result = match object.result() {
        applied_object::Result::Created => "created",
        applied_object::Result::Configured => "configured",
        applied_object::Result::Unchanged => "unchanged",
        applied_object::Result::Unspecified => "applied",
    };
    format!("{name} {result}{}\n", if dry_run { " (dry run)" } else { "" })
}

/// Waits for a template's golden snapshot.
async fn ready(session: &mut Session<'_>, key: &ObjectKey, deadline: Instant) -> Result<(), CliError> {
    const SPINNER: [char; 4] = ['|', '/', '-', '\\'];
    let kind = Kind::ActorTemplate;
    let request =
        GetObjectRequest { kind: kind.as_str().to_owned(), namespace: key.namespace.clone(), name: key.name.clone() };
    session.target = Some(Target::Object { kind, namespace: key.namespace.clone(), name: key.name.clone() });
    let mut turn = 0;
    loop {
        let answer = session.substrate.get_object(request.clone()).await;
        let json = session.answer(answer)?.json;
        let document: serde_json::Value =
            serde_json::from_str(&json).map_err(|source| CliError::Answer { kind: kind.as_str(), source })?;
        let at = |path| document.pointer(path).and_then(serde_json::Value::as_str).unwrap_or_default();
        let (phase, reason) = (at("/status/phase"), at("/status/reason"));
        match phase {
            "Ready" => return Ok(()),
            "Failed" => return Err(CliError::Failed(format!("{kind} {key} failed: {reason}"))),
            _ if Instant::now() >= deadline => {
                let why = if reason.is_empty() { String::new() } else { format!(" ({reason})") };
                let text =
                    format!("{kind} {key} is not ready in time, but {phase}{why}; it goes on without this command");
                return Err(CliError::Failed(text));
            }
            _ => session.terminal.progress(&format!("{} {kind} {key}: {phase}", SPINNER[turn % SPINNER.len()])),
        }
        turn += 1;
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
