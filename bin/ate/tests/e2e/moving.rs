//! A machine that is given durable storage when it already has snapshots.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ate_testkit::Machine;

use crate::ATE;

fn manifests(below: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(below).into_iter().flatten().flatten().map(|entry| entry.path());
    let found = entries.flat_map(|path| match path.is_dir() {
        true => manifests(&path),
        false => vec![path],
    });
    found.filter(|path| path.ends_with("manifest.json")).collect()
}

/// So that it may go at once: one that was used just now stays for a minute. To be read does not change a time to come.
fn not_just_used(manifest: &Path) {
    let times = std::fs::FileTimes::new().set_accessed(SystemTime::now() + Duration::from_secs(3600));
    let file = std::fs::File::options().append(true).open(manifest).expect("it is there");
    file.set_times(times).expect("its times are set");
}

#[tokio::test]
async fn who_was_suspended_on_a_disk_alone_goes_on_when_there_is_durable_storage() {
    let storage = tempfile::tempdir().expect("a directory");
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 1);
    machine.suspend("space", "a").await;
    machine.stop().await;
    let here = machine.data().join("node/snapshots");
    assert_eq!(manifests(&here).len(), 2, "its own and the golden");
    manifests(&here).iter().for_each(|manifest| not_just_used(manifest));
    machine.add_args(&["--storage", &storage.path().display().to_string(), "--snapshot-budget", "0"]);
    machine.restart().await;
    assert_eq!(manifests(storage.path()).len(), 2, "they are there before anybody is served");
    assert!(machine.logged().contains("bringing 2 snapshots in "), "{}", machine.logged());
    machine.until("no copy is left on its disk", || async { manifests(&here).is_empty() }).await;
    let reply = machine.count("space", "a").await;
    assert_eq!((reply.memory, reply.file), (2, 2), "{reply:?}");
    machine.suspend("space", "a").await;
    machine.stop().await;
}
