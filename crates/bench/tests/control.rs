//! A small run of `ate bench control`, looked at by its rows. How fast it was is nobody's business here.
//!
//! The control planes that a run starts are this program once more, so there is no harness around it.

use std::path::Path;
use std::time::Duration;

use ate_bench::{BenchVerb, Row, Setup};
use ate_control::Replicas;
use ate_testkit_postgres::Server;
use clap::Parser;

#[derive(Debug, Parser)]
enum Program {
    #[command(subcommand)]
    Bench(BenchVerb),
}

const ACTORS: u64 = 50;
const BURST: u64 = 20;
/// Bursts of each round.
const REPEATED: u64 = 8;
const ROUNDS: u64 = 2;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).is_some_and(|verb| verb == "bench") {
        return run(&arguments);
    }
    if arguments.iter().any(|argument| argument == "--list") {
        return TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
    }
    for (name, test) in TESTS {
        test();
        println!("test {name} ... ok");
    }
}

const TESTS: [(&str, fn()); 2] = [
    ("every_wake_and_its_raw_commits_are_counted", every_wake_and_its_raw_commits_are_counted),
    (
        "a_database_of_ones_own_may_be_encrypted_and_need_not_be_ruled",
        a_database_of_ones_own_may_be_encrypted_and_need_not_be_ruled,
    ),
];

fn run(arguments: &[String]) {
    let Program::Bench(verb) = Program::parse_from(arguments);
    let program = std::env::current_exe().expect("this program");
    let replicas = Replicas::Several { beat: Duration::from_secs(1), lease: Duration::from_secs(5) };
    ate_bench::run(verb, &Setup { program, runtime: None, replicas }).expect("it runs to its end");
}

fn every_wake_and_its_raw_commits_are_counted() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let rows = directory.path().join("rows.jsonl");
    let (actors, burst, rounds) = (format!("10,{ACTORS}"), BURST.to_string(), ROUNDS.to_string());
    let text = |path: &Path| path.to_str().expect("plain").to_owned();
    let arguments =
        ["ate", "bench", "control", "--store", "embedded,postgres", "--actors", &actors, "--burst", &burst, "--rounds"];
    let mut arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
    arguments.extend([rounds, "--clients".into(), "4".into(), "--directory".into(), text(directory.path())]);
    arguments.extend(["--rows".into(), text(&rows)]);
    run(&arguments);

    let rows: Vec<Row> = std::fs::read_to_string(&rows)
        .expect("rows are written")
        .lines()
        .map(|line| serde_json::from_str(line).expect("a row"))
        .collect();
    for store in ["embedded", "postgres"] {
        every_wake_of(store, &rows);
    }
    assert!(rows.iter().all(|row| row.error.is_none() && row.scheduled <= row.end));
    let left: Vec<_> =
        std::fs::read_dir(directory.path()).expect("it is there").flatten().map(|e| e.file_name()).collect();
    assert_eq!(left, ["rows.jsonl"], "stores are removed");
}

/// Its user may make schemas, and no checkpoints.
fn a_database_of_ones_own_may_be_encrypted_and_need_not_be_ruled() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let shown = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).expect("signs");
    let files = [("server.crt", &*shown.cert.pem()), ("server.key", &*shown.signing_key.serialize_pem())];
    let server = Server::start("ssl = on", &files);
    server.sql("CREATE ROLE plain LOGIN PASSWORD 'plain'; GRANT CREATE ON DATABASE postgres TO plain");
    let rows = directory.path().join("rows.jsonl").display().to_string();
    let url = format!("postgres://plain:plain@127.0.0.1:{}/postgres?sslmode=require", server.port());
    let words = ["ate", "bench", "control", "--store", "postgres", "--postgres", &url, "--actors", "5", "--burst", "5"];
    let more = ["--rounds", "1", "--clients", "2", "--rows", &rows];
    run(&words.iter().chain(&more).map(|word| (*word).to_owned()).collect::<Vec<_>>());
    assert_eq!(
        server.sql("SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'ate_bench_%'"),
        "0",
        "it is left as it was"
    );
}

fn every_wake_of(store: &str, rows: &[Row]) {
    let of = |actors: u64, kind: &str| -> Vec<&Row> {
        rows.iter().filter(|row| row.way == format!("{store} {actors}") && row.kind == kind).collect()
    };
    let count = |row: &Row, name: &str| row.phases.iter().find(|(phase, _)| phase == name).map(|(_, count)| *count);
    // Where there are too few actors for a burst there are two.
    for (actors, burst, bursts) in [(10, 10, 2), (ACTORS, BURST, 1)] {
        for kind in ["wake", "open", "alone", "resume"] {
            let wakes = match kind {
                "alone" | "resume" => burst,
                "wake" => REPEATED * BURST,
                _ => BURST,
            };
            assert_eq!(of(actors, kind).len() as u64, ROUNDS * wakes, "{kind} of {actors}");
        }
        let (wakes, raw) = (of(actors, "wakes"), of(actors, "raw"));
        let bursts = ROUNDS * REPEATED * bursts;
        assert_eq!((wakes.len() as u64, raw.len() as u64), (bursts, bursts));
        for (wakes, raw) in wakes.iter().zip(&raw) {
            // The binding, and that it runs.
            assert_eq!(count(wakes, "commits"), Some(2 * burst));
            assert_eq!(
                (count(raw, "commits"), raw.bytes),
                (count(wakes, "commits"), wakes.bytes),
                "the very same changes"
            );
        }
        assert_eq!(of(actors, "list").iter().map(|row| count(row, "actors")).collect::<Vec<_>>(), [Some(actors)]);
        assert_eq!(of(actors, "watch").len() as u64, 8 * actors.min(100), "each watcher is told each change");
        assert_eq!(of(actors, "memory").iter().filter(|row| row.bytes > Some(0)).count() as u64, ROUNDS);
        // The actor, what it was made from, and six steps of its history.
        assert_eq!(of(actors, "fill").first().and_then(|row| count(row, "records per actor")), Some(8));
    }
}
