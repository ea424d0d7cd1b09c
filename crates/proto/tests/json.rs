//! Messages as JSON, against what Go's `protojson` writes for the same values.

use ate_proto::Json;
use ate_proto::ate::v1::{self, actor_event, exec_response};
use ate_proto::ateapi::{
    self, Actor, ListActorsResponse, ListWorkersResponse, LocalSnapshotInfo, MintCertResponse, Selector, SnapshotInfo,
    SnapshotType, Worker, actor::Status, snapshot_info::Data,
};

fn pretty<M: prost::Name>(message: &M) -> String {
    serde_json::to_string_pretty(&Json::new(message)).unwrap()
}

fn line<M: prost::Name>(message: &M) -> String {
    serde_json::to_string(&Json::new(message)).unwrap()
}

#[test]
fn a_list_of_actors_reads_as_existing_clients_print_it() {
    let labels = ["zone", "disk", "arch", "tier"].map(|key| (key.to_owned(), format!("{key}-1")));
    let paused = Actor {
        actor_id: "counter".into(),
        version: 9_007_199_254_740_993,
        actor_template_namespace: "demo".into(),
        actor_template_name: "counter".into(),
        status: Status::Paused.into(),
        latest_snapshot_info: Some(SnapshotInfo {
            r#type: SnapshotType::Local.into(),
            data: Some(Data::Local(LocalSnapshotInfo {
                snapshot_prefix: "a/1".into(),
                node_vms_with_local_snapshots: vec!["n1".into(), "n2".into()],
            })),
        }),
        worker_selector: Some(Selector { match_labels: labels.into() }),
        atespace: "team".into(),
        ..Default::default()
    };
    let running = Actor {
        actor_id: "quoted \"name\" ü".into(),
        status: Status::Running.into(),
        ateom_pod_namespace: "demo".into(),
        ateom_pod_uid: "u".into(),
        worker_selector: Some(Selector::default()),
        ..Default::default()
    };
    let list = ListActorsResponse { actors: vec![paused, running, Actor::default()], next_page_token: "next".into() };
    let wanted = r#"{
  "actors": [
    {
      "actorId": "counter",
      "version": "9007199254740993",
      "actorTemplateNamespace": "demo",
      "actorTemplateName": "counter",
      "status": "STATUS_PAUSED",
      "latestSnapshotInfo": {
        "type": "SNAPSHOT_TYPE_LOCAL",
        "local": {
          "snapshotPrefix": "a/1",
          "nodeVmsWithLocalSnapshots": [
            "n1",
            "n2"
          ]
        }
      },
      "workerSelector": {
        "matchLabels": {
          "arch": "arch-1",
          "disk": "disk-1",
          "tier": "tier-1",
          "zone": "zone-1"
        }
      },
      "atespace": "team"
    },
    {
      "actorId": "quoted \"name\" ü",
      "status": "STATUS_RUNNING",
      "ateomPodNamespace": "demo",
      "ateomPodUid": "u",
      "workerSelector": {}
    },
    {}
  ],
  "nextPageToken": "next"
}"#;
    assert_eq!(pretty(&list), wanted);
}

#[test]
fn an_empty_list_is_an_empty_object() {
    assert_eq!(line(&ListActorsResponse::default()), "{}");
    assert_eq!(line(&ListWorkersResponse { workers: vec![Worker::default()] }), r#"{"workers":[{}]}"#);
}

#[test]
fn a_value_that_was_set_is_shown_even_if_it_is_zero() {
    let exited = v1::ExecResponse { output: Some(exec_response::Output::ExitCode(0)) };
    assert_eq!(line(&exited), r#"{"exitCode":0}"#);
    let none_of_the_old = v1::LogsRequest { tail: Some(0), ..Default::default() };
    assert_eq!(line(&none_of_the_old), r#"{"tail":0}"#);
    let listed = v1::ActorEvent { version: 7, event: Some(actor_event::Event::Listed(Default::default())) };
    assert_eq!(line(&listed), r#"{"version":"7","listed":{}}"#);
}

#[test]
fn a_status_of_a_newer_api_is_shown_by_its_number() {
    assert_eq!(line(&Actor { status: 7, ..Default::default() }), r#"{"status":7}"#);
}

#[test]
fn bytes_are_base64_and_times_are_text() {
    let minted = MintCertResponse { session_certificates: vec![vec![0xfb, 0xff], vec![]] };
    assert_eq!(line(&minted), r#"{"sessionCertificates":["+/8=",""]}"#);

    let state = v1::ActorState {
        actor: Some(ateapi::Actor { actor_id: "a".into(), ..Default::default() }),
        idle: Some(prost_types::Duration { seconds: 90, nanos: 500_000_000 }),
        frozen: true,
        snapshot_bytes: u64::MAX,
        ..Default::default()
    };
    let wanted = r#"{"actor":{"actorId":"a"},"frozen":true,"idle":"90.500s","snapshotBytes":"18446744073709551615"}"#;
    assert_eq!(line(&state), wanted);

    let entry = v1::HistoryEntry {
        time: Some(prost_types::Timestamp { seconds: 1_782_777_600, nanos: 1_000 }),
        phases: vec![v1::history_entry::Phase { name: "restore".into(), micros: 1200 }],
        ..Default::default()
    };
    let wanted = r#"{"time":"2026-06-30T00:00:00.000001Z","phases":[{"name":"restore","micros":"1200"}]}"#;
    assert_eq!(line(&entry), wanted);
}
