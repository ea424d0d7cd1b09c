use ate_proto::ate::v1::LogsRequest;
use serde_json::{Map, Value};

use crate::change::ActorArgs;
use crate::errors::CliError;
use crate::human;
use crate::session::Session;
use crate::words::Format;

#[derive(Debug, clap::Args)]
#[command(override_usage = "ate logs [actor] <NAME> -a <ATESPACE> [-f] [--tail <LINES>]")]
#[command(after_help = "Examples:
  ate logs my-actor -a demo --tail 20
  ate logs my-actor -a demo -f             over its sleep, from worker to worker, until Ctrl-C
  ate logs my-actor -a demo -o json | jq   every line with its labels")]
pub struct LogsArgs {
    #[command(flatten)]
    actor: ActorArgs,
    /// Go on with lines as they are printed, until Ctrl-C
    #[arg(short, long)]
    follow: bool,
    /// At most so many of the newest lines that are already there
    #[arg(long, value_name = "LINES")]
    tail: Option<u32>,
}

impl LogsArgs {
    pub(crate) fn is_endless(&self) -> bool {
        self.follow
    }
}

pub(crate) async fn run(args: LogsArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let actor = session.actor(args.actor.atespace(), args.actor.name()?);
    let request =
        LogsRequest { atespace: actor.atespace, name: actor.name, follow: args.follow, tail: args.tail, since: None };
    let answer = session.substrate.logs(request).await;
    let mut lines = session.answer(answer)?;
    while let Some(line) = lines.message().await.map_err(|status| session.refusal(status))? {
        let text = if session.format == Format::Json { line.json } else { displayed(&line.json) };
        session.terminal.write(text + "\n")?;
    }
    if args.follow {
        session.terminal.note("the log has ended: the actor was deleted, or the daemon was stopped");
    }
    Ok(())
}

/// Time, message, and as JSON whatever else the workload has logged. Labels say what the person has asked for.
fn displayed(line: &str) -> String {
    let Ok(Value::Object(mut fields)) = serde_json::from_str::<Value>(line) else { return line.to_owned() };
    for labels in ["labels", "logging.googleapis.com/labels"] {
        fields.remove(labels);
    }
    let time = taken(&mut fields, "time").map(|time| time.parse().map_or(time, human::time));
    let message = taken(&mut fields, "message").or_else(|| taken(&mut fields, "msg"));
    let rest = (!fields.is_empty()).then(|| Value::Object(fields).to_string());
    [time, message, rest].into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// Only text is taken: what is not stays with the other fields.
fn taken(fields: &mut Map<String, Value>, name: &str) -> Option<String> {
    match fields.remove(name)? {
        Value::String(text) => Some(text),
        other => {
            fields.insert(name.to_owned(), other);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_shows_its_time_its_message_and_what_else_was_logged() {
        let labels = r#""labels":{"ate.dev/actor_id":"a"}"#;
        let shown = |fields: &str| displayed(&format!("{{{fields},{labels}}}"));
        assert_eq!(
            shown(r#""time":"2026-06-30T12:00:00.123456789Z","message":"hello""#),
            "2026-06-30T12:00:00.123Z hello"
        );
        assert_eq!(
            shown(r#""time":"2026-06-30T12:00:00Z","msg":"hello","level":"INFO","n":12345678901234567890"#),
            r#"2026-06-30T12:00:00.000Z hello {"level":"INFO","n":12345678901234567890}"#
        );
        assert_eq!(shown(r#""time":"then","event":"x""#), r#"then {"event":"x"}"#);
        assert_eq!(shown(r#""time":1,"message":{"a":1}"#), r#"{"message":{"a":1},"time":1}"#);
    }

    #[test]
    fn what_is_no_json_object_is_shown_as_it_is() {
        for line in ["plain", "[1]", "", "{broken"] {
            assert_eq!(displayed(line), line);
        }
    }
}
