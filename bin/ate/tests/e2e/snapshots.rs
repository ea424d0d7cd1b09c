//! Snapshots that are damaged, cannot be written, are called off, or hold less than everything.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ate_testkit::{Machine, Reply, Setting};

use crate::ATE;

/// The files of the snapshots of all actors of this name, by path.
fn files(below: &Path, named: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(below).into_iter().flatten().flatten() {
        match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            true => found.extend(files(&entry.path(), named)),
            false if entry.file_name() == named => found.push(entry.path()),
            false => {}
        }
    }
    found
}

/// The files that belong to no snapshot: without a manifest beside them nobody would ever look for them.
fn strays(below: &Path) -> Vec<PathBuf> {
    let entries: Vec<PathBuf> =
        std::fs::read_dir(below).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    let has_manifest = entries.iter().any(|path| path.ends_with("manifest.json"));
    let stray = |path: PathBuf| match path.is_dir() {
        true => strays(&path),
        false if has_manifest => Vec::new(),
        false => vec![path],
    };
    entries.into_iter().flat_map(stray).collect()
}

/// The newest of them: the golden snapshot is older.
fn newest(below: &Path, named: &str) -> PathBuf {
    let modified = |path: &PathBuf| path.metadata().and_then(|metadata| metadata.modified()).ok();
    files(below, named).into_iter().max_by_key(modified).expect("there is a snapshot")
}

fn damage(bytes: &[u8], how: &str) -> Vec<u8> {
    let mut changed = bytes.to_vec();
    match how {
        "cut" => changed.truncate(bytes.len() / 2),
        "emptied" => changed.clear(),
        _ => changed[bytes.len() / 2] ^= 1,
    }
    changed
}

#[tokio::test]
async fn a_damaged_snapshot_is_refused_and_everybody_else_goes_on() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(2, "").await;
    machine.create_atespace("space").await;
    for name in ["bystander", "a"] {
        machine.create_counter("space", name).await;
        assert_eq!(machine.count("space", name).await.memory, 1);
        machine.suspend("space", name).await;
    }
    let snapshots = machine.data().join("node/snapshots");
    for named in ["memory", "data", "manifest.json"] {
        let file = newest(&snapshots, named);
        let whole = std::fs::read(&file).expect("it is there");
        for how in ["cut", "emptied", "changed"] {
            std::fs::write(&file, damage(&whole, how)).expect("written");
            let error = machine.resume("space", "a", false).await.expect_err("it is damaged");
            assert!(error.message().contains("snapshot gs://snapshots/counter/space/a/"), "{named} {how}: {error}");
            assert_eq!(machine.get("space", "bystander", "/peek").await.0, 200);
        }
        std::fs::write(&file, &whole).expect("written");
    }
    // As it was: nothing was lost by trying.
    let reply = machine.count("space", "a").await;
    assert_eq!((reply.memory, reply.file), (2, 2), "{reply:?}");
    assert_eq!(machine.count("space", "bystander").await.memory, 2);
    machine.stop().await;
}

/// A machine whose durable storage is there, with one actor `space/a` that counted once and was suspended.
async fn suspended_into(storage: &Path) -> Machine {
    let args = vec!["--storage".to_owned(), storage.display().to_string()];
    let machine = Machine::start_with(ATE, Setting { args, ..Setting::default() }).await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 1);
    machine.suspend("space", "a").await;
    machine
}

#[tokio::test]
async fn a_copy_that_is_damaged_or_gone_is_fetched_from_durable_storage() {
    let storage = tempfile::tempdir().expect("a directory");
    let mut machine = suspended_into(storage.path()).await;
    let snapshots = machine.data().join("node/snapshots");
    let mut expected = 1;
    for (named, how) in [("memory", "cut"), ("data", "changed"), ("manifest.json", "emptied")] {
        let file = newest(&snapshots, named);
        std::fs::write(&file, damage(&std::fs::read(&file).expect("it is there"), how)).expect("written");
        expected += 1;
        let reply = machine.count("space", "a").await;
        assert_eq!((reply.memory, reply.file), (expected, expected), "{named} {how}: {reply:?}");
        machine.suspend("space", "a").await;
    }
    // Another machine would begin with nothing on its disk, not even the golden.
    machine.stop().await;
    std::fs::remove_dir_all(&snapshots).expect("removed");
    machine.restart().await;
    let reply = machine.count("space", "a").await;
    assert_eq!((reply.memory, reply.file), (expected + 1, expected + 1), "{reply:?}");
    machine.suspend("space", "a").await;
    // The bucket: what is beside it belongs to the process that writes there.
    let bucket = storage.path().join("snapshots");
    let stored = |snapshots| {
        let bucket = bucket.as_path();
        async move { files(bucket, "manifest.json").len() == snapshots && strays(bucket).is_empty() }
    };
    machine.until("only the golden's and the newest are left", || stored(2)).await;
    machine.ate(&["delete", "actor", "a", "-a", "space"]).await;
    machine.until("only the golden's is left, and nothing of the other", || stored(1)).await;
    machine.stop().await;
}

#[tokio::test]
async fn a_pause_that_cannot_be_read_is_not_replaced_by_an_older_snapshot() {
    let home = tempfile::tempdir().expect("a directory");
    let storage = Disk::mount(home.path().join("storage"), "64m");
    let mut machine = suspended_into(&storage.0).await;
    assert_eq!(machine.count("space", "a").await.memory, 2);
    // In durable storage there is the one before, and nothing of this one.
    let filler = storage.fill();
    machine.pause("space", "a").await;
    let snapshots = machine.data().join("node/snapshots");
    for named in ["memory", "data", "manifest.json"] {
        let file = newest(&snapshots, named);
        let whole = std::fs::read(&file).expect("it is there");
        std::fs::write(&file, damage(&whole, "cut")).expect("written");
        let error = machine.resume("space", "a", false).await.expect_err("it is damaged");
        assert!(error.message().contains("snapshot gs://snapshots/counter/space/a/"), "{named}: {error}");
        std::fs::write(&file, &whole).expect("written");
    }
    let reply = machine.count("space", "a").await;
    assert_eq!((reply.memory, reply.file), (3, 3), "{reply:?}");
    std::fs::remove_file(filler).expect("removed");
    machine.stop().await;
}

#[tokio::test]
async fn what_cannot_be_uploaded_is_kept_and_woken_from_and_uploaded_later() {
    let home = tempfile::tempdir().expect("a directory");
    let storage = Disk::mount(home.path().join("storage"), "64m");
    let mut machine = suspended_into(&storage.0).await;
    assert_eq!(machine.count("space", "a").await.memory, 2);
    let filler = storage.fill();
    machine.pause("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 3, "from what its node has");
    machine.pause("space", "a").await;
    // Nobody but the store remembers now that something is still to be done.
    machine.kill().await;
    machine.restart().await;
    assert_eq!(machine.actor("space", "a").await.status().as_str_name(), "STATUS_PAUSED");
    assert_eq!(machine.count("space", "a").await.memory, 4);
    // Nor does a machine that stops wait for it for ever.
    machine.stop().await;
    machine.restart().await;
    assert_eq!(machine.actor("space", "a").await.status().as_str_name(), "STATUS_SUSPENDED");
    std::fs::remove_file(filler).expect("removed");
    let durable = || async {
        let history = machine.history("space", "a").await;
        history.last().is_some_and(|entry| entry.event == "Durable")
    };
    machine.until("its newest snapshot is durable", durable).await;
    // So the node's own copy can go.
    machine.stop().await;
    std::fs::remove_dir_all(machine.data().join("node/snapshots")).expect("removed");
    machine.restart().await;
    let reply = machine.count("space", "a").await;
    assert_eq!((reply.memory, reply.file), (5, 5), "{reply:?}");
    machine.stop().await;
}

/// A file system of its own, for the node or for storage, to be filled.
struct Disk(PathBuf);

impl Disk {
    fn mount(at: PathBuf, size: &str) -> Self {
        std::fs::create_dir_all(&at).expect("made");
        let size = format!("size={size}");
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&at).status();
        assert!(status.is_ok_and(|status| status.success()), "a tmpfs can be mounted");
        Self(at)
    }

    fn fill(&self) -> PathBuf {
        let file = self.0.join("filler");
        let mut filler = std::fs::File::create(&file).expect("made");
        let block = vec![0; 1 << 20];
        while std::io::Write::write_all(&mut filler, &block).is_ok() {}
        file
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[tokio::test]
async fn a_full_disk_leaves_the_actor_alive() {
    let mut machine = Machine::new(ATE, Setting::default());
    let disk = Disk::mount(machine.data().join("node"), "1g");
    machine.restart().await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    let first = machine.count("space", "a").await;
    let filler = disk.fill();
    let said = machine.cli(&["suspend", "actor", "a", "-a", "space"]).await;
    assert!(said.code != 0 && said.stderr.contains("runs on"), "{said:?}");
    // Its own files are on the same disk, so it cannot count; but it is there, with its memory.
    let second = Reply::parse(&machine.get("space", "a", "/peek").await.1);
    assert_eq!((second.memory, second.nonce, second.generation), (1, first.nonce.clone(), first.generation));
    let history = machine.history("space", "a").await;
    assert!(history.iter().any(|entry| entry.event == "Kept" && entry.detail.contains("No space left")), "{history:?}");
    std::fs::remove_file(filler).expect("removed");
    machine.suspend("space", "a").await;
    let third = machine.count("space", "a").await;
    assert_eq!((third.memory, third.file, third.nonce), (2, 2, first.nonce));
    machine.stop().await;
    drop(disk);
}

#[tokio::test]
async fn a_request_calls_off_an_idle_suspend() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "  idle: {suspendAfter: 1s}").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    let mut before = machine.history("space", "a").await.len();
    // Large enough that its image is not taken in a moment.
    assert_eq!(machine.get("space", "a", "/eat?mib=512").await.0, 200);
    let mut expected = 0;
    for _ in 0..20 {
        machine
            .until("it is being suspended", || async {
                let history = machine.history("space", "a").await;
                history.iter().skip(before).any(|entry| entry.event == "Suspending")
            })
            .await;
        before = machine.history("space", "a").await.len();
        expected += 1;
        assert_eq!(machine.count("space", "a").await.memory, expected);
        let history = machine.history("space", "a").await;
        if history.iter().any(|entry| entry.event == "Kept" && entry.detail.contains("called off")) {
            // The one that was called off has left no trace.
            expected += 1;
            assert_eq!(machine.count("space", "a").await.memory, expected);
            machine.stop().await;
            return;
        }
    }
    panic!("no suspend was called off: {:?}", machine.history("space", "a").await);
}

#[tokio::test]
async fn what_a_suspend_and_a_pause_keep_is_what_the_template_says() {
    let mut machine = Machine::start(ATE).await;
    let data = machine.template("data", "", "").replace("location:", "onPause: Full, onCommit: Data, location:");
    machine.apply_counter(1, "").await;
    machine.apply(&data).await;
    machine.ready("demo", "data").await;
    machine.create_atespace("space").await;
    machine.create("space", "a", "data").await;
    let first = machine.count("space", "a").await;
    assert_eq!((first.memory, first.file), (1, 1));
    machine.pause("space", "a").await;
    assert_eq!(machine.actor("space", "a").await.status().as_str_name(), "STATUS_PAUSED");
    let paused = machine.count("space", "a").await;
    assert_eq!((paused.memory, paused.file, &paused.nonce), (2, 2, &first.nonce), "a pause keeps memory");
    machine.suspend("space", "a").await;
    let suspended = machine.count("space", "a").await;
    assert_eq!((suspended.memory, suspended.file), (1, 3), "a suspend keeps files only");
    assert_ne!(suspended.nonce, first.nonce, "its process began anew");
    // `boot` begins with nothing at all, `not boot` with the golden process.
    for name in ["golden", "booted"] {
        machine.create_counter("space", name).await;
    }
    let golden = machine.template_status("demo", "counter").await;
    assert_eq!(golden["phase"], "Ready");
    machine.suspend("space", "a").await;
    machine.resume("space", "golden", false).await.expect("it wakes");
    let from_golden = machine.count("space", "golden").await;
    machine.suspend("space", "golden").await;
    machine.resume("space", "booted", true).await.expect("it boots");
    let booted = machine.count("space", "booted").await;
    assert_ne!(from_golden.nonce, booted.nonce);
    machine.stop().await;
}

#[tokio::test]
async fn kill_9_at_any_moment_of_a_suspend_loses_nothing() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    let mut expected = 0;
    for moment in [0, 5, 15, 30, 45, 60, 80, 110, 150] {
        expected += 1;
        let reply = machine.count("space", "a").await;
        assert_eq!((reply.memory, reply.file), (expected, expected), "killed before {moment} ms: {reply:?}");
        let actor_ref = Some(ate_proto::ateapi::ActorRef { atespace: "space".into(), name: "a".into() });
        let mut control = machine.control();
        let suspend = tokio::spawn(async move {
            control.suspend_actor(ate_proto::ateapi::SuspendActorRequest { actor_ref }).await.is_ok()
        });
        tokio::time::sleep(Duration::from_millis(moment)).await;
        machine.kill().await;
        let _ = suspend.await;
        machine.restart().await;
    }
    let reply = machine.count("space", "a").await;
    assert_eq!((reply.memory, reply.file), (expected + 1, expected + 1), "{reply:?}");
    let history = machine.history("space", "a").await;
    assert!(!history.iter().any(|entry| entry.event == "Lost"), "{history:?}");
    machine.stop().await;
}
