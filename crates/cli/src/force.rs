//! What operators do when nothing else helps, and the record of it.

use ate_proto::Json;
use ate_proto::ate::v1::{
    AuditEntry, ForceDeleteActorRequest, ListAuditRequest, ListAuditResponse, UnstickActorRequest,
};

use crate::change::ActorArgs;
use crate::errors::CliError;
use crate::human;
use crate::session::Session;
use crate::show::{json_text, yaml_text};
use crate::table::Table;
use crate::words::Format;

#[derive(Debug, clap::Args)]
#[command(override_usage = "ate unstick [actor] <NAME> -a <ATESPACE> [--reason <TEXT>]")]
#[command(
    after_help = "What it has counted, written or computed since its last snapshot is lost. Who did it, when and why
is written down: see `ate audit`.

Examples:
  ate unstick my-actor -a demo
  ate unstick my-actor -a demo --reason \"hangs since the storage was moved\""
)]
pub struct UnstickArgs {
    #[command(flatten)]
    actor: ActorArgs,
    /// Why, for those who read the audit later
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ate audit
  ate audit -o wide   with what was found
  ate audit -o json")]
pub struct AuditArgs {}

pub(crate) async fn unstick(args: UnstickArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let actor = session.actor(args.actor.atespace(), args.actor.name()?);
    let request = UnstickActorRequest { atespace: actor.atespace, name: actor.name, reason: args.reason };
    let answer = session.substrate.unstick_actor(request).await;
    let unstuck = session.answer(answer)?;
    warn_of(&unstuck.silent_node, session);
    session.show_actors(unstuck.actor.into_iter().collect()).await
}

/// Deletes an actor whatever it is doing.
pub(crate) async fn delete(
    atespace: &str,
    name: &str,
    reason: String,
    session: &mut Session<'_>,
) -> Result<(), CliError> {
    let actor = session.actor(atespace, name);
    let request = ForceDeleteActorRequest { atespace: actor.atespace, name: actor.name, reason };
    let answer = session.substrate.force_delete_actor(request).await;
    let deleted = session.answer(answer)?;
    warn_of(&deleted.silent_node, session);
    Ok(())
}

fn warn_of(silent_node: &str, session: &mut Session<'_>) {
    if !silent_node.is_empty() {
        session
            .terminal
            .note(&format!("node {silent_node} does not answer: what may still run there is ended once it does"));
    }
}

pub(crate) async fn audit(AuditArgs {}: AuditArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let mut all = ListAuditResponse::default();
    loop {
        let request = ListAuditRequest { page_size: 0, page_token: all.next_page_token.clone() };
        let answer = session.substrate.list_audit(request).await;
        let page = session.answer(answer)?;
        all.entries.extend(page.entries);
        all.next_page_token = page.next_page_token;
        if all.next_page_token.is_empty() {
            break;
        }
    }
    let text = match session.format {
        Format::Json => json_text(&Json::new(&all)),
        Format::Yaml => yaml_text(&Json::new(&all)),
        Format::Name => all.entries.iter().map(|entry| format!("{}\n", entry.call)).collect(),
        Format::Table => shown(&all.entries, session.terminal.colour.0, false),
        Format::Wide => shown(&all.entries, session.terminal.colour.0, true),
    };
    session.terminal.write(text)
}

fn shown(entries: &[AuditEntry], colour: bool, is_wide: bool) -> String {
    let common = ["TIME", "CALL", "ATESPACE", "ACTOR", "CALLER", "REASON"];
    let columns: Vec<&str> = common.into_iter().chain(["UID", "DETAIL"].into_iter().filter(|_| is_wide)).collect();
    let row = |entry: &AuditEntry| {
        let time = entry.time.and_then(|time| jiff::Timestamp::new(time.seconds, time.nanos).ok());
        let AuditEntry { call, atespace, name, uid, caller, reason, detail, .. } = entry.clone();
        let time = time.map(human::time).unwrap_or_default();
        let mut row = vec![time, call, atespace, name, caller, reason];
        row.extend([uid, detail].into_iter().filter(|_| is_wide));
        row
    };
    let rows: Vec<Vec<String>> = entries.iter().map(row).collect();
    Table::new(&columns, colour).lines(&rows).iter().map(|line| format!("{}\n", line.trim_end())).collect()
}
