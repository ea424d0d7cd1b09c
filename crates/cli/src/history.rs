use ate_proto::Json;
use ate_proto::ate::v1::{GetHistoryRequest, HistoryEntry, history_entry};

use crate::change::ActorArgs;
use crate::errors::CliError;
use crate::human;
use crate::session::Session;
use crate::show::{json_text, yaml_text};
use crate::table::Table;
use crate::words::Format;

/// Cells that stand for the whole of a wake or a suspend.
const BAR: usize = 40;

#[derive(Debug, clap::Args)]
#[command(override_usage = "ate history [actor] <NAME> -a <ATESPACE>")]
#[command(after_help = "Examples:
  ate history my-actor -a demo
  ate history my-actor -a demo -o wide   with the steps of every wake and suspend and how long each took")]
pub struct HistoryArgs {
    #[command(flatten)]
    actor: ActorArgs,
}

pub(crate) async fn run(args: HistoryArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let actor = session.actor(args.actor.atespace(), args.actor.name()?);
    let request = GetHistoryRequest { atespace: actor.atespace, name: actor.name };
    let answer = session.substrate.get_history(request).await;
    let history = session.answer(answer)?;
    let text = match session.format {
        Format::Json => json_text(&Json::new(&history)),
        Format::Yaml => yaml_text(&Json::new(&history)),
        Format::Name => history.entries.iter().map(|entry| format!("{}\n", entry.event)).collect(),
        Format::Table => shown(&history.entries, session.terminal.colour.0, false),
        Format::Wide => shown(&history.entries, session.terminal.colour.0, true),
    };
    session.terminal.write(text)
}

fn shown(entries: &[HistoryEntry], colour: bool, with_phases: bool) -> String {
    let rows: Vec<Vec<String>> = entries.iter().map(row).collect();
    let lines = Table::new(&["TIME", "EVENT", "GEN", "WORKER", "DETAIL"], colour).lines(&rows);
    let mut text = String::new();
    for (index, line) in lines.iter().enumerate() {
        text.push_str(line.trim_end());
        text.push('\n');
        // The first line is the header's.
        let phases = index.checked_sub(1).filter(|_| with_phases).map_or(&[][..], |entry| &entries[entry].phases);
        for line in waterfall(phases) {
            text.push_str(&format!("  {line}\n"));
        }
    }
    text
}

fn row(entry: &HistoryEntry) -> Vec<String> {
    let time = entry.time.and_then(|time| jiff::Timestamp::new(time.seconds, time.nanos).ok());
    let size = (entry.snapshot_bytes > 0).then(|| human::bytes(entry.snapshot_bytes));
    let detail = [Some(entry.detail.clone()).filter(|detail| !detail.is_empty()), size];
    vec![
        time.map(human::time).unwrap_or_default(),
        entry.event.clone(),
        entry.generation.to_string(),
        if entry.worker.is_empty() { "<none>".to_owned() } else { entry.worker.clone() },
        detail.into_iter().flatten().collect::<Vec<_>>().join(", "),
    ]
}

fn waterfall(phases: &[history_entry::Phase]) -> Vec<String> {
    let phase = |phase: &history_entry::Phase| {
        ate_chart::Phase::new(phase.name.clone(), std::time::Duration::from_micros(phase.micros))
    };
    ate_chart::waterfall(&phases.iter().map(phase).collect::<Vec<_>>(), BAR)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn phase(name: &str, micros: u64) -> history_entry::Phase {
        history_entry::Phase { name: name.to_owned(), micros }
    }

    #[test]
    fn a_waterfall_shows_when_each_phase_ran_and_how_long() {
        let lines =
            waterfall(&[phase("claim", 1000), phase("restore", 8000), phase("settle", 10), phase("ready", 990)]);
        assert_eq!(
            lines,
            [
                "claim       1.0 ms  ████",
                "restore     8.0 ms      ████████████████████████████████",
                "settle       10 us                                      █",
                "ready       990 us                                      ████",
                "total      10.0 ms",
            ]
        );
        assert!(waterfall(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn no_bar_leaves_the_drawing(micros in proptest::collection::vec(any::<u64>(), 1..10)) {
            let phases: Vec<_> = micros.iter().map(|micros| phase("p", *micros)).collect();
            for line in &waterfall(&phases)[..phases.len()] {
                let bar = line.rsplit_once('s').unwrap().1;
                prop_assert!(bar.contains('\u{2588}') && bar.chars().count() <= 2 + 40, "{line}");
            }
        }
    }

    #[test]
    fn entries_have_the_columns_of_the_table_and_phases_only_when_asked() {
        let entry = HistoryEntry {
            time: Some(prost_types::Timestamp { seconds: 0, nanos: 5_000_000 }),
            event: "resumed".to_owned(),
            generation: 2,
            worker: "default/w-0".to_owned(),
            snapshot_bytes: 2048,
            phases: vec![phase("restore", 5000)],
            ..Default::default()
        };
        let expected = "TIME                       EVENT     GEN   WORKER        DETAIL\n\
                        1970-01-01T00:00:00.005Z   resumed   2     default/w-0   2.0 KiB\n";
        assert_eq!(shown(std::slice::from_ref(&entry), false, false), expected);
        assert!(shown(&[entry], false, true).contains("\n  restore     5.0 ms  █"));
    }
}
