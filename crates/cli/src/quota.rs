use std::str::FromStr;

use ate_object::Quantity;
use ate_proto::Json;
use ate_proto::ate::v1::{GetQuotaRequest, Quota, QuotaStatus, SetQuotaRequest};

use crate::errors::CliError;
use crate::human;
use crate::session::Session;
use crate::show::{json_text, yaml_text};
use crate::table::Table;
use crate::words::Format;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ate quota demo                                       what it may use, and what it uses
  ate quota demo --actors 1000 --running 50
  ate quota demo --snapshot-bytes 20Gi --wakes-per-second 10
  ate quota demo --running none                        no limit any more")]
pub struct QuotaArgs {
    /// The atespace
    atespace: String,
    /// Most actors
    #[arg(long, value_name = "N")]
    actors: Option<Limit>,
    /// Most actors that hold a worker at once
    #[arg(long, value_name = "N")]
    running: Option<Limit>,
    /// Most bytes of snapshots; over it what runs can be saved, but nothing more wakes
    #[arg(long, value_name = "BYTES")]
    snapshot_bytes: Option<Limit>,
    /// Most wakes per second
    #[arg(long, value_name = "N")]
    wakes_per_second: Option<Limit>,
}

/// A number, with a unit if one likes, or none.
#[derive(Clone, Copy, Debug)]
struct Limit(Option<u64>);

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(None));
        }
        let quantity = text.parse::<Quantity>().map_err(|_| "write a number, like 100 or 20Gi, or none".to_owned())?;
        Ok(Self(Some(quantity.units())))
    }
}

pub(crate) async fn run(args: QuotaArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let or = |limit: Option<Limit>, now: Option<u64>| limit.map_or(now, |limit| limit.0);
    let status = loop {
        let request = GetQuotaRequest { atespace: args.atespace.clone() };
        let answer = session.substrate.get_quota(request).await;
        let status = session.answer(answer)?;
        let now = status.quota.unwrap_or_default();
        let quota = Quota {
            actors: or(args.actors, now.actors),
            running: or(args.running, now.running),
            snapshot_bytes: or(args.snapshot_bytes, now.snapshot_bytes),
            wakes_per_second: or(args.wakes_per_second, now.wakes_per_second),
        };
        if quota == now {
            break status;
        }
        let request = SetQuotaRequest { atespace: args.atespace.clone(), quota: Some(quota), seen: Some(now) };
        match session.substrate.set_quota(request).await {
            // Somebody else has changed another of the limits: theirs stays.
            Err(changed) if changed.code() == tonic::Code::Aborted => {}
            answer => break session.answer(answer)?,
        }
    };
    let text = match session.format {
        Format::Json => json_text(&Json::new(&status)),
        Format::Yaml => yaml_text(&Json::new(&status)),
        Format::Name => format!("{}\n", status.atespace),
        Format::Table | Format::Wide => shown(&status, session.terminal.colour.0),
    };
    session.terminal.write(text)
}

fn shown(status: &QuotaStatus, colour: bool) -> String {
    let quota = status.quota.unwrap_or_default();
    let limit = |limit: Option<u64>, show: fn(u64) -> String| limit.map_or_else(|| "none".to_owned(), show);
    let plain = |number: u64| number.to_string();
    let rows = [
        ["actors".to_owned(), plain(status.actors), limit(quota.actors, plain)],
        ["running".to_owned(), plain(status.running), limit(quota.running, plain)],
        ["snapshot bytes".to_owned(), human::bytes(status.snapshot_bytes), limit(quota.snapshot_bytes, human::bytes)],
        ["wakes per second".to_owned(), String::new(), limit(quota.wakes_per_second, plain)],
    ];
    let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
    let lines = Table::new(&["WHAT", "USED", "LIMIT"], colour).lines(&rows);
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}
