//! `get actors -w`: a list, then every change. A lost connection is made again, and what has changed meanwhile is
//! found by listing anew and comparing, which holds whatever the daemon has forgotten.

use std::collections::BTreeMap;
use std::time::Duration;

use ate_proto::Json;
use ate_proto::ate::v1::{ActorEvent, ActorKey, ActorState, WatchActorsRequest, actor_event};
use tonic::Code;

use crate::errors::CliError;
use crate::session::Session;
use crate::show::{ACTOR_COLUMNS, ACTOR_WIDE, actor_row, place, wide_actor_row, yaml_text};
use crate::table::Table;
use crate::words::Format;

/// Between tries to reach a daemon that has gone, which may be restarting.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LAST: Duration = Duration::from_secs(2);

/// Only returns with an error that waiting does not mend; otherwise it is interrupted.
pub(crate) async fn run(
    session: &mut Session<'_>,
    atespace: Option<String>,
    name: Option<String>,
) -> Result<(), CliError> {
    let columns = match session.format {
        Format::Wide => [ACTOR_COLUMNS, ACTOR_WIDE].concat(),
        _ => ACTOR_COLUMNS.to_vec(),
    };
    let table = Table::new(&columns, session.terminal.colour.0);
    let mut watch = Watch { atespace, name, table, known: BTreeMap::new(), is_listed: false };
    let mut wait = RETRY_FIRST;
    loop {
        let mut progressed = false;
        let ended = watch.follow(session, &mut progressed).await;
        match ended {
            Err(error) if !watch.is_listed || !is_passing(&error) => return Err(error),
            Ok(()) if !watch.is_listed => return Err(session.lost()),
            _ => {}
        }
        if progressed {
            session.terminal.note("the connection was lost; trying again");
            wait = RETRY_FIRST;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(RETRY_LAST);
    }
}

/// What a restart of the daemon looks like from here, or a watcher that fell too far behind.
fn is_passing(error: &CliError) -> bool {
    match error {
        CliError::Dial(_) | CliError::Lost { .. } => true,
        CliError::Refused { code, .. } => matches!(code, Code::Unavailable | Code::OutOfRange | Code::Aborted),
        _ => false,
    }
}

struct Watch {
    atespace: Option<String>,
    name: Option<String>,
    table: Table,
    known: BTreeMap<[String; 2], ActorState>,
    is_listed: bool,
}

impl Watch {
    /// One connection: its list, then its changes until it ends. `progressed` once there was a list.
    async fn follow(&mut self, session: &mut Session<'_>, progressed: &mut bool) -> Result<(), CliError> {
        let request = WatchActorsRequest { atespace: self.atespace.clone(), resume_version: 0 };
        let answer = session.substrate.watch_actors(request).await;
        let mut events = session.answer(answer)?;
        let mut listed = Some(BTreeMap::new());
        while let Some(event) = events.message().await.map_err(|status| session.refusal(status))? {
            let version = event.version;
            match event.event {
                Some(actor_event::Event::Changed(state)) => {
                    let Some(key) = key(&state).filter(|[_, name]| self.is_wanted(name)) else { continue };
                    match &mut listed {
                        Some(listed) => drop(listed.insert(key, state)),
                        None => {
                            self.known.insert(key, state.clone());
                            self.show(session, version, vec![state])?;
                        }
                    }
                }
                Some(actor_event::Event::Deleted(ActorKey { atespace, name })) => match &mut listed {
                    Some(listed) => drop(listed.remove(&[atespace, name])),
                    None => self.deleted(session, version, [atespace, name])?,
                },
                Some(actor_event::Event::Listed(_)) => {
                    self.list(session, version, listed.take().unwrap_or_default())?;
                    *progressed = true;
                }
                None => {}
            }
        }
        Ok(())
    }

    fn is_wanted(&self, name: &str) -> bool {
        self.name.as_deref().is_none_or(|wanted| wanted == name)
    }

    /// Shows how a whole list differs from what was known.
    fn list(
        &mut self,
        session: &mut Session<'_>,
        version: u64,
        listed: BTreeMap<[String; 2], ActorState>,
    ) -> Result<(), CliError> {
        let gone: Vec<_> = self.known.keys().filter(|key| !listed.contains_key(*key)).cloned().collect();
        for key in gone {
            self.deleted(session, version, key)?;
        }
        // How long an actor has been idle grows by itself and is no change.
        let same = |a: &ActorState, b: &ActorState| ActorState { idle: a.idle, ..b.clone() } == *a;
        let is_new = |key, state| self.known.get(key).is_none_or(|before| !same(before, state));
        let mut new: Vec<ActorState> =
            listed.iter().filter(|(key, state)| is_new(*key, state)).map(|(_, state)| state.clone()).collect();
        new.sort_by(|a, b| a.actor.as_ref().map(place).cmp(&b.actor.as_ref().map(place)));
        self.known = listed;
        // Even an empty list has a header, once.
        if !new.is_empty() || !self.is_listed {
            self.show(session, version, new)?;
        }
        self.is_listed = true;
        Ok(())
    }

    fn deleted(&mut self, session: &mut Session<'_>, version: u64, key: [String; 2]) -> Result<(), CliError> {
        const STATUS: usize = 4;
        let Some(last) = self.known.remove(&key) else { return Ok(()) };
        match session.format {
            Format::Table | Format::Wide => {
                let mut row = row(session.format, &last);
                row[STATUS] = "DELETED".to_owned();
                self.rows(session, &[row])
            }
            _ => {
                let [atespace, name] = key;
                let event = actor_event::Event::Deleted(ActorKey { atespace, name: name.clone() });
                print_event(session, ActorEvent { version, event: Some(event) }, &name)
            }
        }
    }

    fn show(&mut self, session: &mut Session<'_>, version: u64, states: Vec<ActorState>) -> Result<(), CliError> {
        if let Format::Table | Format::Wide = session.format {
            let rows: Vec<Vec<String>> = states.iter().map(|state| row(session.format, state)).collect();
            return self.rows(session, &rows);
        }
        for state in states {
            let name = state.actor.as_ref().map(|actor| actor.actor_id.clone()).unwrap_or_default();
            let event = ActorEvent { version, event: Some(actor_event::Event::Changed(state)) };
            print_event(session, event, &name)?;
        }
        Ok(())
    }

    fn rows(&mut self, session: &mut Session<'_>, rows: &[Vec<String>]) -> Result<(), CliError> {
        session.terminal.write(self.table.lines(rows).join("\n") + "\n")
    }
}

fn row(format: Format, state: &ActorState) -> Vec<String> {
    match format {
        Format::Wide => wide_actor_row(state),
        _ => actor_row(&state.actor.clone().unwrap_or_default()),
    }
}

fn print_event(session: &mut Session<'_>, event: ActorEvent, name: &str) -> Result<(), CliError> {
    let text = match session.format {
        Format::Name => format!("actor/{name}\n"),
        Format::Yaml => format!("---\n{}", yaml_text(&Json::new(&event))),
        _ => serde_json::to_string(&Json::new(&event)).expect("a message has text keys") + "\n",
    };
    session.terminal.write(text)
}

fn key(state: &ActorState) -> Option<[String; 2]> {
    state.actor.as_ref().map(|actor| [actor.atespace.clone(), actor.actor_id.clone()])
}
