//! The benchmarks come to an end, say what they should and leave nothing behind. How fast anything was is not looked at.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use ate_bench::Row;
use ate_testkit::Leaks;

/// Runs a benchmark to its end: what it printed, and its rows.
fn bench(args: &[&str]) -> (String, Vec<Row>) {
    let directory = tempfile::tempdir().unwrap();
    let rows = directory.path().join("rows.jsonl");
    let child = Command::new(crate::ATE)
        .arg("bench")
        .args(args)
        .arg("--rows")
        .arg(&rows)
        .env("TMPDIR", directory.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let cgroup = format!("ate-bench-{}", child.id());
    let output = child.wait_with_output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}: {printed}", output.status);
    assert_eq!(Leaks::of(directory.path(), Some(&cgroup)), Leaks::default());
    let rows = std::fs::read_to_string(rows).unwrap();
    (printed, rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

fn count(rows: &[Row]) -> BTreeMap<(&str, &str), usize> {
    let mut counts = BTreeMap::new();
    for row in rows {
        assert_eq!(row.error, None, "{row:?}");
        assert!(row.scheduled <= row.start && row.start <= row.first_byte && row.first_byte <= row.end, "{row:?}");
        *counts.entry((row.way.as_str(), row.kind.as_str())).or_default() += 1;
    }
    counts
}

#[test]
fn the_router_benchmark_measures_each_way_and_judges_its_target() {
    let (printed, rows) = bench(&["router", "--duration", "1s", "--rounds", "1", "--rate", "200"]);
    let counts = count(&rows);
    for way in ["direct", "nginx", "ate"] {
        assert_eq!(counts[&(way, "open")], 200, "open loop sends what is due: {counts:?}");
        assert!(counts[&(way, "closed")] > 0, "{counts:?}");
    }
    assert!(printed.contains("router's requests per second / nginx's"), "{printed}");
}

#[test]
fn the_wake_benchmark_measures_each_way_and_judges_its_targets() {
    let (printed, rows) = bench(&["wake", "--rounds", "2", "--every", "3s"]);
    let expected = [
        ("ate", "first"),
        ("ate", "next request"),
        ("ate", "request"),
        ("ate", "suspend"),
        ("ate", "thaw"),
        ("ate", "wake"),
        ("floor", "request"),
        ("floor", "restore"),
        ("floor", "suspend"),
        ("public", "restore"),
        ("public", "suspend"),
    ];
    let mut counts = count(&rows);
    assert!(counts.remove(&("floor", "boot")) > Some(0));
    assert_eq!(counts, expected.map(|event| (event, 2)).into());
    for target in ["/ floor", "/ public way", "/ request to a running actor", "/ full compressed image"] {
        assert!(printed.contains(target), "{target}: {printed}");
    }
    assert!(!printed.contains("none"), "every ratio has both its sides: {printed}");
}

#[test]
fn the_density_benchmark_weighs_every_state_beside_the_bare_sandbox() {
    let (_, rows) = bench(&["density", "--actors", "1"]);
    for (way, state) in [("bare sandbox", "warm"), ("bare sandbox", "running"), ("bare sandbox", "frozen")]
        .into_iter()
        .chain([("ate", "warm"), ("ate", "running"), ("ate", "frozen"), ("ate", "worker itself")])
    {
        let weighed = rows.iter().filter(|row| row.way == way && row.kind == state);
        assert!(weighed.clone().count() > 0, "{way} {state}: {rows:?}");
        assert!(weighed.clone().all(|row| row.bytes > Some(0)), "{way} {state}: {rows:?}");
    }
}
