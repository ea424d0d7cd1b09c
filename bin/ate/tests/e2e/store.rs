//! `ate store` as an operator runs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ate_store::{Change, FeedLimits, Key, Kind, Store};
use ate_store_embedded::EmbeddedStore;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::ATE;

const UID: &str = "00000000-0000-4000-8000-000000000001";
const TEMPLATE: &str = "00000000-0000-4000-8000-000000000002";
const WORKER: &str = "00000000-0000-4000-8000-000000000003";

struct Machine(TempDir);

impl Machine {
    /// A machine whose store holds one actor that runs.
    async fn new() -> Self {
        let machine = Self(TempDir::new().expect("a temporary directory"));
        let store = machine.open();
        let object = |namespace: &str, name: &str| json!({"namespace": namespace, "name": name});
        let lease = json!({
            "worker": WORKER, "pod": object("ns", "w"), "pool": object("ns", "p"), "node": "n",
        });
        let key = json!({"atespace": "space", "name": "a"});
        let records = [
            (Kind::Atespace, "space".to_owned(), json!({"name": "space"})),
            (
                Kind::Template,
                "ns/t".to_owned(),
                json!({
                    "uid": TEMPLATE, "created": "2026-05-01T10:00:00Z", "status": {"phase": "Ready"},
                    "object": {"metadata": object("ns", "t"), "spec": {"snapshotsConfig": {"location": "gs://a/b"}}},
                }),
            ),
            (Kind::Meta, format!("made-from/{TEMPLATE}/space/a"), Value::Null),
            (Kind::Count, "space/actors".to_owned(), json!(1)),
            (Kind::Count, "space/running".to_owned(), json!(1)),
            (
                Kind::Worker,
                WORKER.to_owned(),
                json!({
                    "lease": lease, "ingress": "/w",
                    "assigned": {"key": key, "uid": UID, "generation": 7, "template": object("ns", "t")},
                }),
            ),
            (
                Kind::Actor,
                "space/a".to_owned(),
                json!({
                    "uid": UID, "key": key, "template": object("ns", "t"), "templateUid": TEMPLATE, "generation": 7,
                    "phase": {"phase": "running", "lease": lease}, "sealedKey": "x", "created": "2026-05-01T10:00:00Z",
                }),
            ),
        ];
        for (kind, path, value) in records {
            let key = Key::parse(kind, &path).expect("well formed");
            let value = if kind == Kind::Meta { String::new() } else { value.to_string() };
            store.commit(Change::new().put(key, value)).await.expect("no guards");
        }
        machine
    }

    fn open(&self) -> EmbeddedStore {
        EmbeddedStore::open(&self.path("data/store"), FeedLimits::default()).expect("opens")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ate"));
        command.arg("store").args(arguments).arg("--data-dir").arg(self.path("data")).current_dir(self.0.path());
        command.env_remove("ATE_STORE").env_remove("ATE_STORE_SCHEMA");
        command
    }

    fn ate(&self, arguments: &[&str]) -> (bool, String, String) {
        let Output { status, stdout, stderr } = self.command(arguments).output().expect("runs");
        let text = |bytes| String::from_utf8(bytes).expect("text");
        (status.success(), text(stdout), text(stderr))
    }

    async fn get(&self, kind: Kind, path: &str) -> Option<Value> {
        let record = self.open().get(&Key::parse(kind, path).expect("well formed")).await.expect("reads")?;
        Some(serde_json::from_slice(&record.value).expect("JSON"))
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("lists").map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<_> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_is_checked_backed_up_and_restored() {
    let machine = Machine::new().await;
    let (sound, told, errors) = machine.ate(&["check"]);
    assert!(sound && told.contains("7 records") && told.contains("all of them agree"), "{told}{errors}");
    let (done, told, errors) = machine.ate(&["backup", "monday.backup"]);
    assert!(done && told.contains("1 actor") && told.contains("revision 7"), "{told}{errors}");
    let (done, _, errors) = machine.ate(&["restore", "monday.backup"]);
    assert!(!done && errors.contains("1 worker") && errors.contains("--replace"), "{errors}");
    let (done, told, errors) = machine.ate(&["restore", "monday.backup", "--replace"]);
    assert!(done, "{errors}");
    assert!(told.contains("continue from their last snapshot: 1: space/a"), "{told}");
    assert!(told.contains("dropped  1 worker") && told.contains("store.replaced-"), "{told}");
    let (sound, told, errors) = machine.ate(&["check"]);
    assert!(sound, "what is restored agrees: {told}{errors}");
    let actor = machine.get(Kind::Actor, "space/a").await.expect("restored");
    assert_eq!(actor["phase"], json!({"phase": "suspended"}));
    assert!(actor["generation"].as_u64().expect("a number") > 1 << 40);
    assert_eq!(machine.get(Kind::Worker, WORKER).await, None);
    let kept = names(&machine.path("data"));
    assert!(kept.len() == 3 && kept[..2] == ["store", "store.mark"], "{kept:?}");
    assert!(kept[2].starts_with("store.replaced-"), "{kept:?}");
}

/// On one machine, whose disk is all the durable storage there is.
#[tokio::test]
async fn what_was_saved_after_a_backup_is_there_when_that_is_restored() {
    let mut machine = ate_testkit::Machine::start(ATE).await;
    machine.apply_counter(2, "  idle: {}").await;
    machine.create_atespace("space").await;
    for name in ["saved", "untouched"] {
        machine.create_counter("space", name).await;
        assert_eq!(machine.count("space", name).await.memory, 1);
        machine.suspend("space", name).await;
    }
    machine.stop().await;
    let backup = machine.directory().join("backup").to_string_lossy().into_owned();
    machine.ate(&["store", "backup", &backup]).await;
    machine.restart().await;
    for count in [2, 3] {
        assert_eq!(machine.count("space", "saved").await.memory, count);
        machine.suspend("space", "saved").await;
    }
    let key = machine.uid("space", "saved").await;
    machine.stop().await;
    let told = machine.ate(&["store", "restore", &backup, "--replace"]).await;
    assert!(told.contains("is looked for when it is woken"), "{told}");
    machine.restart().await;
    let after = machine.count("space", "saved").await;
    assert_eq!((after.memory, after.file), (4, 4), "what the backup knows of is gone");
    let after = machine.count("space", "untouched").await;
    assert_eq!((after.memory, after.file), (2, 2));
    let told = async |name: &str| {
        let history = machine.history("space", name).await;
        history.into_iter().find(|entry| entry.event == "CaughtUp").expect("its record was from a backup").detail
    };
    assert!(told("saved").await.contains("was saved after the backup"));
    assert!(told("untouched").await.contains("not saved after the backup"));
    machine.suspend("space", "saved").await;
    machine.delete("space", "saved").await;
    let left = machine.data().join("node/snapshots").join(key);
    machine.until("nothing is left of it", || async { !left.exists() }).await;
    machine.stop().await;
}

/// As by somebody who brings the store back from a copy of the file system, and leaves the snapshots as they are.
#[tokio::test]
async fn a_store_that_was_put_back_is_refused_and_the_way_out_of_it_keeps_what_was_saved() {
    let mut machine = ate_testkit::Machine::start(ATE).await;
    machine.apply_counter(2, "  idle: {}").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 1);
    machine.suspend("space", "a").await;
    machine.stop().await;
    let (store, older) = (machine.data().join("store"), machine.data().join("older"));
    let copied = Command::new("cp").arg("-a").args([&store, &older]).status().expect("is installed");
    assert!(copied.success());
    machine.restart().await;
    for count in [2, 3] {
        assert_eq!(machine.count("space", "a").await.memory, count);
        machine.suspend("space", "a").await;
    }
    machine.stop().await;
    fs::remove_dir_all(&store).expect("removes");
    fs::rename(&older, &store).expect("renames");

    let text = |path: PathBuf| path.into_os_string().into_string().expect("text");
    let (data, left, replica) =
        (text(machine.data()), text(machine.directory().join("left")), text(machine.directory().join("replica")));
    let (place, runtime) = (text(store), ate_testkit::sandbox_runtimes());
    let listen = ["--listen", "127.0.0.1:0", "--runtime", &runtime];
    for verb in [
        &[&["dev", "--data-dir", &data, "--api-listen", "127.0.0.1:0"][..], &listen].concat()[..],
        &[&["api", "--data-dir", &replica, "--store", &place][..], &listen].concat(),
        &["store", "check"],
        &["store", "backup", &left],
    ] {
        let said = machine.cli(verb).await;
        let refused = |what: &str| assert!(said.code == 1 && said.stderr.contains(what), "{verb:?}: {what}: {said:?}");
        refused("is not the one that was last used there, at revision ");
        refused("store.mark says");
        refused(&format!("ate store backup left.backup --accept-loss --store {place}"));
        refused(&format!("ate store restore left.backup --replace --store {place}"));
    }
    let said = machine.cli(&["store", "backup", &left, "--accept-loss"]).await;
    assert!(said.code == 0 && said.stderr.contains("was acknowledged, but only"), "{said:?}");
    machine.ate(&["store", "restore", &left, "--replace"]).await;
    machine.ate(&["store", "check"]).await;
    machine.restart().await;
    let after = machine.count("space", "a").await;
    assert_eq!((after.memory, after.file), (4, 4), "not what the older store knows of");
    let history = machine.history("space", "a").await;
    let caught_up = history.into_iter().find(|entry| entry.event == "CaughtUp").expect("it was behind");
    assert!(caught_up.detail.contains("was saved after the backup"), "{}", caught_up.detail);
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_gone_is_not_begun_anew() {
    let machine = Machine::new().await;
    fs::remove_dir_all(machine.path("data/store")).expect("removes");
    let backup = machine.path("none").display().to_string();
    let (done, _, errors) = machine.ate(&["backup", &backup]);
    assert!(!done && errors.contains("there is no store in"), "{errors}");
    let mut serve = Command::new(env!("CARGO_BIN_EXE_ate"));
    serve.args(["api", "--listen", "127.0.0.1:0", "--runtime", &ate_testkit::sandbox_runtimes(), "--data-dir"]);
    let Output { status, stderr, .. } = serve.arg(machine.path("data")).output().expect("runs");
    let errors = String::from_utf8_lossy(&stderr);
    assert!(!status.success() && errors.contains("there was one, at revision 7"), "{errors}");
    assert!(errors.contains("restore a backup: ate store restore <FILE>") && errors.contains("store.mark"), "{errors}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_is_named_with_its_remedy_and_fails_the_check() {
    let machine = Machine::new().await;
    let worker = Key::parse(Kind::Worker, WORKER).expect("well formed");
    machine.open().commit(Change::new().delete(worker)).await.expect("no guards");
    let (sound, told, errors) = machine.ate(&["check"]);
    assert!(!sound && told.contains("actor/space/a\n") && told.contains("remedy: restore a backup"), "{told}{errors}");
    let (sound, told, _) = machine.ate(&["check", "-o", "json"]);
    let document: Value = serde_json::from_str(&told).expect("JSON");
    assert!(!sound && document["findings"][0]["object"] == "actor/space/a", "{told}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_stops_reading_is_no_failure() {
    let machine = Machine::new().await;
    for verb in [&["check"][..], &["check", "-o", "json"], &["backup", "b"], &["restore", "b", "--replace"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = machine.command(verb);
        let Output { status, stderr, .. } = command.stdout(writer).output().expect("runs");
        assert!(status.success(), "{verb:?}: {status}: {}", String::from_utf8_lossy(&stderr));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_cannot_be_opened_says_why_and_what_to_do() {
    let machine = Machine::new().await;
    let open = machine.open();
    for verb in [&["check"][..], &["backup", "b"]] {
        let (done, _, errors) = machine.ate(verb);
        let holder = format!("in use by process {}", std::process::id());
        assert!(!done && errors.contains(&holder) && errors.contains("stop that first"), "{errors}");
    }
    drop(open);
    // As if the engine had lost its last commits.
    let mark = machine.path("data/store/MARK");
    fs::write(&mark, [9_u64.to_le_bytes(); 2].concat()).expect("writes");
    for verb in [&["check"][..], &["backup", "b"]] {
        let (done, _, errors) = machine.ate(verb);
        assert!(!done && errors.contains("revision 9 was acknowledged, but only 7 is left"), "{errors}");
        assert!(errors.contains("--accept-loss") && errors.contains("ate store restore <FILE>"), "{errors}");
    }
    let (done, _, errors) = machine.ate(&["backup", "left.backup", "--accept-loss"]);
    assert!(done && errors.contains("revision 9 was acknowledged, but only 7 is left"), "{errors}");
    let (done, _, errors) = machine.ate(&["restore", "left.backup", "--replace"]);
    assert!(done && machine.ate(&["check"]).0, "{errors}");
    // Damage in the middle of a file.
    let journal = machine.path("data/store/records/0.jnl");
    let mut bytes = fs::read(&journal).expect("reads");
    bytes.truncate(40);
    fs::write(&journal, bytes).expect("writes");
    let (done, _, errors) = machine.ate(&["check"]);
    assert!(!done && errors.contains("is damaged") && errors.contains("--replace"), "{errors}");
    let (done, _, errors) = machine.ate(&["backup", "b", "--accept-loss", "--store", "nowhere"]);
    assert!(!done && !errors.contains("only what is left is saved"), "nothing is: {errors}");
    let (done, _, errors) = machine.ate(&["check", "--store", "nowhere"]);
    assert!(!done && errors.contains("there is no store in nowhere") && errors.contains("--store"), "{errors}");
    let (done, _, errors) = machine.ate(&["check", "--store", "postgres://me:geheim@"]);
    assert!(!done && !errors.contains("geheim"), "{errors}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_actor_that_cannot_be_read_is_named_and_can_be_left_out() {
    let machine = Machine::new().await;
    let damaged = Key::parse(Kind::Actor, "space/b").expect("well formed");
    machine.open().commit(Change::new().put(damaged, "{")).await.expect("no guards");
    let (done, told, errors) = machine.ate(&["backup", "b"]);
    assert!(done && told.contains("2 actor"), "all of it is saved: {told}{errors}");
    assert!(errors.contains("actor/space/b cannot be read: ") && errors.contains("--drop-unreadable"), "{errors}");
    let (done, _, errors) = machine.ate(&["restore", "b", "--replace"]);
    assert!(!done && errors.contains("actor/space/b cannot be read: "), "{errors}");
    assert!(errors.contains("--drop-unreadable") && !errors.contains("log"), "{errors}");
    let (done, told, errors) = machine.ate(&["restore", "b", "--replace", "--drop-unreadable"]);
    assert!(done && told.contains("1 actor") && errors.contains("actor/space/b cannot be read: "), "{told}{errors}");
    let (sound, told, errors) = machine.ate(&["check"]);
    assert!(sound, "what is left agrees: {told}{errors}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_moves_to_postgresql() {
    let machine = Machine::new().await;
    let server = ate_testkit_postgres::Server::default();
    let url = server.url();
    assert!(machine.ate(&["backup", "b"]).0);
    let (done, told, errors) = machine.ate(&["restore", "b", "--store", &url]);
    assert!(done && told.contains("schema ate"), "{told}{errors}");
    assert!(!told.contains(ate_testkit_postgres::PASSWORD));
    let (sound, told, errors) = machine.ate(&["check", "--store", &url]);
    assert!(sound && told.contains("all of them agree"), "{told}{errors}");
    let (done, _, errors) = machine.ate(&["restore", "b", "--store", &url]);
    assert!(!done && errors.contains("holds a store already"), "{errors}");
    // And back: what it holds, the running actor put to rest by the restore, is what comes out of it.
    let (done, told, errors) = machine.ate(&["backup", "tuesday", "--store", &url]);
    assert!(done && told.contains("1 actor"), "{told}{errors}");
    let (done, told, errors) = machine.ate(&["restore", "tuesday", "--store", &url, "--replace"]);
    assert!(done && !told.contains(ate_testkit_postgres::PASSWORD), "{told}{errors}");
    assert!(machine.ate(&["check", "--store", &url]).0, "what is restored agrees");
    // As if the database had been restored behind our back: this machine has seen more of it.
    let place = format!("postgres://{}@127.0.0.1:{}/postgres", ate_testkit_postgres::USER, server.port());
    fs::write(machine.path("data/store-mark"), format!("{:020} {place} ate\n", 1_u64 << 60)).expect("writes");
    for verb in [&["check", "--store", &url][..], &["backup", "wednesday", "--store", &url]] {
        let (done, _, errors) = machine.ate(verb);
        assert!(!done && errors.contains("revision 1152921504606846976 was seen"), "{errors}");
        assert!(errors.contains("ate store backup --accept-loss"), "{errors}");
    }
    let (done, _, errors) = machine.ate(&["backup", "left", "--store", &url, "--accept-loss"]);
    assert!(done && errors.contains("only what is left is saved: revision 1152921504606846976"), "{errors}");
    let (done, _, errors) = machine.ate(&["backup", "left", "--store", &url, "--accept-loss"]);
    assert!(!done && errors.contains("left is there already"), "{errors}");
    let (done, _, errors) = machine.ate(&["restore", "left", "--store", &url, "--replace"]);
    assert!(done && machine.ate(&["check", "--store", &url]).0, "past all that was seen: {errors}");
    server.sql("DELETE FROM ate.records WHERE kind = 'template'");
    let (sound, told, errors) = machine.ate(&["check", "--store", &url]);
    assert!(!sound && told.contains("actor/space/a") && told.contains("remedy:"), "{told}{errors}");
    server.sql("UPDATE ate.head SET layout = 7");
    assert!(machine.ate(&["backup", "again", "--store", &url]).2.contains("layout 7"));
}
