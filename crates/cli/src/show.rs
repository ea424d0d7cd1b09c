//! What people and scripts see: columns, names and documents of each kind of thing. Columns, order and the shape of
//! documents of actors, workers and atespaces are those of `kubectl-ate`.

use std::collections::HashMap;

use ate_object::Kind;
use ate_proto::Json;
use ate_proto::ate::v1::{ActorState, Object};
use ate_proto::ateapi::{
    Actor, Atespace, ListActorsResponse, ListAtespacesResponse, ListWorkersResponse, Worker, actor,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::errors::CliError;
use crate::human;
use crate::session::Session;
use crate::table::Table;
use crate::terminal::Terminal;
use crate::words::{Format, object_name};

const NONE: &str = "<none>";

pub(crate) const ACTOR_COLUMNS: &[&str] =
    &["ATESPACE", "TEMPLATE NS", "TEMPLATE", "ID", "STATUS", "ATEOM POD", "ATEOM IP", "VERSION"];
pub(crate) const ACTOR_WIDE: &[&str] = &["GENERATION", "FROZEN", "IDLE", "SNAPSHOT", "FAILURE"];
const WORKER_COLUMNS: &[&str] = &["NAMESPACE", "POOL", "POD", "STATUS", "ASSIGNED ACTOR"];
const WORKER_WIDE: &[&str] = &["NODE", "IP", "VERSION"];

/// Things of one kind, ready to be shown in any format.
pub(crate) struct Listing<D> {
    columns: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    names: Vec<String>,
    document: D,
}

impl<D: Serialize> Listing<D> {
    pub(crate) fn print(&self, format: Format, terminal: &mut Terminal) -> Result<(), CliError> {
        match format {
            Format::Table | Format::Wide => {
                let lines = Table::new(&self.columns, terminal.colour.0).lines(&self.rows);
                terminal.write(lines.join("\n") + "\n")
            }
            Format::Name => terminal.write(self.names.iter().map(|name| format!("{name}\n")).collect::<String>()),
            Format::Json => terminal.write(json_text(&self.document)),
            Format::Yaml => terminal.write(yaml_text(&self.document)),
        }
    }
}

pub(crate) fn json_text(document: &impl Serialize) -> String {
    serde_json::to_string_pretty(document).expect("messages and objects have text keys") + "\n"
}

pub(crate) fn yaml_text(document: &impl Serialize) -> String {
    serde_saphyr::to_string(document).expect("messages and objects have text keys")
}

fn or_none(text: String) -> String {
    if text.is_empty() { NONE.to_owned() } else { text }
}

/// The common columns, and those that only `-o wide` has.
fn columns(common: &[&'static str], wide: &[&'static str], format: Format) -> Vec<&'static str> {
    let wide = if format == Format::Wide { wide } else { &[] };
    [common, wide].concat()
}

pub(crate) fn sort_actors(actors: &mut [Actor]) {
    actors.sort_by(|a, b| place(a).cmp(&place(b)));
}

pub(crate) fn place(actor: &Actor) -> [&str; 4] {
    [&actor.atespace, &actor.actor_template_namespace, &actor.actor_template_name, &actor.actor_id]
}

pub(crate) fn status_name(actor: &Actor) -> String {
    actor::Status::try_from(actor.status).map_or_else(|_| actor.status.to_string(), |s| s.as_str_name().to_owned())
}

pub(crate) fn actor_row(actor: &Actor) -> Vec<String> {
    let pod = match (actor.ateom_pod_namespace.as_str(), actor.ateom_pod_name.as_str()) {
        (_, "") => NONE.to_owned(),
        (namespace, name) => format!("{namespace}/{name}"),
    };
    vec![
        actor.atespace.clone(),
        actor.actor_template_namespace.clone(),
        actor.actor_template_name.clone(),
        actor.actor_id.clone(),
        status_name(actor),
        pod,
        actor.ateom_pod_ip.clone(),
        actor.version.to_string(),
    ]
}

pub(crate) fn wide_actor_row(state: &ActorState) -> Vec<String> {
    let mut row = actor_row(&state.actor.clone().unwrap_or_default());
    let idle = state.idle.and_then(|idle| std::time::Duration::try_from(idle).ok());
    let snapshot = (state.snapshot_bytes > 0).then(|| human::bytes(state.snapshot_bytes));
    row.extend([
        state.generation.to_string(),
        state.frozen.to_string(),
        or_none(idle.map(human::age).unwrap_or_default()),
        or_none(snapshot.unwrap_or_default()),
        or_none(state.failure.clone()),
    ]);
    row
}

impl Session<'_> {
    /// Actors as the public API answers them. What `-o wide` adds is asked for here.
    pub(crate) async fn show_actors(&mut self, mut actors: Vec<Actor>) -> Result<(), CliError> {
        sort_actors(&mut actors);
        let rows = match self.format {
            Format::Wide => self.wide_rows(&actors).await?,
            _ => actors.iter().map(actor_row).collect(),
        };
        let listing = Listing {
            columns: columns(ACTOR_COLUMNS, ACTOR_WIDE, self.format),
            rows,
            names: actors.iter().map(|actor| format!("actor/{}", actor.actor_id)).collect(),
            document: Json::new(&ListActorsResponse { actors, next_page_token: String::new() }),
        };
        listing.print(self.format, self.terminal)
    }

    /// An actor that has been deleted meanwhile is shown as it last was.
    async fn wide_rows(&mut self, actors: &[Actor]) -> Result<Vec<Vec<String>>, CliError> {
        let Some(first) = actors.first() else { return Ok(Vec::new()) };
        let is_single = actors.iter().all(|actor| actor.atespace == first.atespace);
        let states = self.states(is_single.then_some(&*first.atespace)).await?;
        let key = |actor: &Actor| [actor.atespace.clone(), actor.actor_id.clone()];
        let known = states.into_iter().filter_map(|state| Some((key(state.actor.as_ref()?), state)));
        let mut known: HashMap<[String; 2], ActorState> = known.collect();
        let last_seen = |actor: &Actor| ActorState { actor: Some(actor.clone()), ..Default::default() };
        let state = |actor| known.remove(&key(actor)).unwrap_or_else(|| last_seen(actor));
        Ok(actors.iter().map(state).map(|state| wide_actor_row(&state)).collect())
    }

    pub(crate) fn show_workers(&mut self, mut workers: Vec<Worker>) -> Result<(), CliError> {
        workers.sort_by(|a, b| worker_place(a).cmp(&worker_place(b)));
        let is_wide = self.format == Format::Wide;
        let listing = Listing {
            columns: columns(WORKER_COLUMNS, WORKER_WIDE, self.format),
            rows: workers.iter().map(|worker| worker_row(worker, is_wide)).collect(),
            names: workers.iter().map(|worker| format!("worker/{}", worker.worker_pod)).collect(),
            document: Json::new(&ListWorkersResponse { workers }),
        };
        listing.print(self.format, self.terminal)
    }

    pub(crate) fn show_atespaces(&mut self, mut atespaces: Vec<Atespace>) -> Result<(), CliError> {
        atespaces.sort_by(|a, b| a.name.cmp(&b.name));
        let listing = Listing {
            columns: vec!["NAME"],
            rows: atespaces.iter().map(|atespace| vec![atespace.name.clone()]).collect(),
            names: atespaces.iter().map(|atespace| format!("atespace/{}", atespace.name)).collect(),
            document: Json::new(&ListAtespacesResponse { atespaces }),
        };
        listing.print(self.format, self.terminal)
    }

    /// Objects as they could be applied again: one by itself, several as a list.
    pub(crate) fn show_objects(&mut self, kind: Kind, objects: &[Object], is_list: bool) -> Result<(), CliError> {
        let mut documents = objects
            .iter()
            .map(|object| serde_json::from_str(&object.json))
            .collect::<Result<Vec<Value>, _>>()
            .map_err(|source| CliError::Answer { kind: kind.as_str(), source })?;
        documents
            .sort_by_cached_key(|document| [text(document, "/metadata/namespace"), text(document, "/metadata/name")]);
        let (common, wide) = object_columns(kind);
        let columns = columns(common, wide, self.format);
        let shown = columns.len();
        let listing = Listing {
            columns,
            rows: documents.iter().map(|document| object_row(kind, document, shown)).collect(),
            names: documents.iter().map(|document| object_name(kind, &text(document, "/metadata/name"))).collect(),
            document: match documents.len() {
                1 if !is_list => documents.remove(0),
                _ => json!({"apiVersion": "v1", "kind": "List", "items": documents}),
            },
        };
        listing.print(self.format, self.terminal)
    }
}

fn worker_place(worker: &Worker) -> [&str; 3] {
    [&worker.worker_namespace, &worker.worker_pool, &worker.worker_pod]
}

fn worker_row(worker: &Worker, is_wide: bool) -> Vec<String> {
    let (status, actor) = match worker.actor_id.as_str() {
        "" => ("FREE", NONE.to_owned()),
        id => ("ASSIGNED", format!("{}/{}/{id}", worker.actor_namespace, worker.actor_template)),
    };
    let mut row = vec![
        worker.worker_namespace.clone(),
        worker.worker_pool.clone(),
        worker.worker_pod.clone(),
        status.to_owned(),
        actor,
    ];
    if is_wide {
        row.extend([worker.node_name.clone(), worker.ip.clone(), worker.version.to_string()]);
    }
    row
}

fn object_columns(kind: Kind) -> (&'static [&'static str], &'static [&'static str]) {
    match kind {
        Kind::ActorTemplate => (&["NAMESPACE", "NAME", "CLASS", "STATUS"], &["IMAGES", "REASON"]),
        Kind::WorkerPool => (&["NAMESPACE", "NAME", "CLASS", "REPLICAS"], &["CONFIG"]),
        Kind::SandboxConfig => (&["NAME", "CLASS", "DEFAULT"], &["ARCHITECTURES"]),
    }
}

/// All columns of an object, cut to how many are `shown`.
fn object_row(kind: Kind, document: &Value, shown: usize) -> Vec<String> {
    let at = |path| text(document, path);
    let class = or_none(at("/spec/sandboxClass"));
    let mut row = match kind {
        Kind::ActorTemplate => {
            let images = document.pointer("/spec/containers").and_then(Value::as_array).into_iter().flatten();
            let images: Vec<String> = images.map(|container| text(container, "/image")).collect();
            let status = or_none(at("/status/phase"));
            let reason = or_none(at("/status/reason"));
            vec![at("/metadata/namespace"), at("/metadata/name"), class, status, images.join(","), reason]
        }
        Kind::WorkerPool => {
            let config = or_none(at("/spec/sandboxConfigName"));
            vec![at("/metadata/namespace"), at("/metadata/name"), class, at("/spec/replicas"), config]
        }
        Kind::SandboxConfig => {
            let assets = document.pointer("/spec/assets").and_then(Value::as_object);
            let architectures: Vec<&str> = assets.into_iter().flatten().map(|(name, _)| name.as_str()).collect();
            let is_default = document.pointer("/spec/default").and_then(Value::as_bool).unwrap_or(false);
            vec![at("/metadata/name"), class, is_default.to_string(), architectures.join(",")]
        }
    };
    row.truncate(shown);
    row
}

/// Text as it is, anything else as JSON, nothing as empty.
fn text(document: &Value, path: &str) -> String {
    match document.pointer(path) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn actor(atespace: &str, template: [&str; 2], id: &str) -> Actor {
        Actor {
            atespace: atespace.to_owned(),
            actor_template_namespace: template[0].to_owned(),
            actor_template_name: template[1].to_owned(),
            actor_id: id.to_owned(),
            version: 3,
            status: actor::Status::Suspended.into(),
            ..Default::default()
        }
    }

    #[test]
    fn actors_are_sorted_by_atespace_template_and_id() {
        let mut actors = vec![
            actor("b", ["a", "a"], "a"),
            actor("a", ["b", "a"], "a"),
            actor("a", ["a", "b"], "a"),
            actor("a", ["a", "a"], "b"),
            actor("a", ["a", "a"], "a"),
        ];
        let expected: Vec<Actor> = actors.iter().rev().cloned().collect();
        sort_actors(&mut actors);
        assert_eq!(actors, expected);
    }

    #[test]
    fn an_actor_without_a_worker_has_no_pod_and_an_unknown_status_is_a_number() {
        let mut sleeping = actor("demo", ["default", "counter"], "a1");
        assert_eq!(actor_row(&sleeping), ["demo", "default", "counter", "a1", "STATUS_SUSPENDED", "<none>", "", "3"]);
        sleeping.status = 99;
        (sleeping.ateom_pod_namespace, sleeping.ateom_pod_name) = ("ns".to_owned(), "w-0".to_owned());
        assert_eq!(&actor_row(&sleeping)[4..6], ["99", "ns/w-0"]);
    }

    #[test]
    fn wide_columns_follow_the_common_ones() {
        let state = ActorState {
            actor: Some(actor("demo", ["default", "counter"], "a1")),
            generation: 7,
            frozen: true,
            idle: Some(prost_types::Duration { seconds: 65, nanos: 0 }),
            snapshot_bytes: 75_776,
            ..Default::default()
        };
        let row = wide_actor_row(&state);
        assert_eq!(row.len(), ACTOR_COLUMNS.len() + ACTOR_WIDE.len());
        assert_eq!(&row[8..], ["7", "true", "1m5s", "74 KiB", "<none>"]);
    }

    #[test]
    fn a_worker_is_free_or_tells_its_actor() {
        let mut worker = Worker {
            worker_namespace: "ns".into(),
            worker_pool: "p".into(),
            worker_pod: "w".into(),
            ..Default::default()
        };
        assert_eq!(worker_row(&worker, false), ["ns", "p", "w", "FREE", "<none>"]);
        (worker.actor_namespace, worker.actor_template, worker.actor_id) = ("tn".into(), "t".into(), "a".into());
        assert_eq!(worker_row(&worker, false)[3..], ["ASSIGNED", "tn/t/a"]);
    }

    #[test]
    fn numbers_that_are_text_in_json_stay_text_in_yaml() {
        let list = ListActorsResponse { actors: vec![actor("demo", ["d", "c"], "1")], next_page_token: String::new() };
        let yaml = yaml_text(&Json::new(&list));
        let read: Value = serde_saphyr::from_str(&yaml).unwrap();
        assert_eq!(read, serde_json::to_value(Json::new(&list)).unwrap(), "{yaml}");
        assert_eq!(read["actors"][0]["version"], "3");
    }

    #[test]
    fn every_kind_has_a_cell_for_each_column() {
        for kind in Kind::ALL {
            let (common, wide) = object_columns(kind);
            assert_eq!(object_row(kind, &json!({}), usize::MAX).len(), common.len() + wide.len());
            assert_eq!(object_row(kind, &json!({}), common.len()).len(), common.len());
        }
    }
}
