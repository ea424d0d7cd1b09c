//! The store on disks that fill up and lose power. Both need a file system of their own, and so root.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use ate_store::{Change, CommitError, Fault, FeedLimits, Key, Kind, Prefix, Revision, Store};
use ate_store_embedded::engine::Engine;
use ate_store_embedded::{EmbeddedStore, FjallEngine};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use tempfile::TempDir;

/// Past what is captured of a test that passes: whoever reads that it did reads this, too.
fn skipped(why: &str) {
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    // At once, as others write, too.
    let _ = std::io::stderr().write_all(format!("skipped: {name}: {why}\n").as_bytes());
}

/// Runs `work` where it may mount. Mounts belong to a namespace of one thread and those it starts, so they go with
/// them however they end.
fn with_own_mounts(work: impl AsyncFnOnce(&Path) + Send + 'static) {
    if !nix::unistd::geteuid().is_root() {
        return skipped("mounting needs root");
    }
    // Removed by this thread, which does not see what the other one mounted there.
    let directory = TempDir::new().expect("a temporary directory");
    let path = directory.path().to_owned();
    let thread = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace");
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("stays in this namespace");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(work(&path));
    });
    thread.join().expect("the work succeeds");
}

fn pair(at: usize) -> Change {
    let side = |side: &str| Key::new(Kind::Actor, [side, &format!("{at:05}")[..]]).expect("well formed");
    Change::new().put(side("left"), vec![b'x'; 3000]).put(side("right"), vec![b'x'; 3000])
}

async fn pairs(store: &EmbeddedStore) -> usize {
    let side = async |side| {
        let prefix = Prefix::below(Kind::Actor, [side]).expect("well formed");
        store.list(&prefix, None, 1000).await.expect("reads go on").records
    };
    let (left, right) = (side("left").await, side("right").await);
    assert_eq!(left.len(), right.len(), "half a commit");
    left.len()
}

/// The second time with little memory, so that it is the writing of sorted files that fails.
#[test]
fn a_full_disk_loses_nothing_and_heals() {
    for memory_bytes in [64 << 20, 64 << 10] {
        with_own_mounts(async move |directory| {
            let (none, small) = (MsFlags::empty(), Some("size=8m"));
            mount(Some("small"), directory, Some("tmpfs"), none, small).expect("mounts");
            fill_and_heal(directory, memory_bytes).await;
        });
    }
}

async fn fill_and_heal(directory: &Path, memory_bytes: u64) {
    let (home, ballast) = (directory.join("store"), directory.join("ballast"));
    let open = || {
        let opener = move |directory: &Path| -> Result<Box<dyn Engine>, Fault> {
            Ok(Box::new(FjallEngine::open(&directory.join("records"), 1 << 20, memory_bytes)?))
        };
        EmbeddedStore::open_with(&home, FeedLimits::default(), Box::new(opener)).expect("opens")
    };
    let store = open();
    fs::write(&ballast, vec![0; 6 << 20]).expect("fits");

    // A refused commit may leave a little room, so the disk is full only when several are refused in a row.
    let (mut acknowledged, mut refused) = (0, 0);
    while refused < 3 {
        match store.commit(pair(acknowledged)).await {
            Ok(_) => (acknowledged, refused) = (acknowledged + 1, 0),
            Err(CommitError::Fault(Fault::Unavailable { .. })) => refused += 1,
            Err(other) => panic!("{other}"),
        }
        assert!(pairs(&store).await >= acknowledged, "reads go on while the disk is full");
    }
    assert!(acknowledged > 10, "there was room for more than {acknowledged}");

    fs::remove_file(&ballast).expect("removes");
    for at in acknowledged..acknowledged + 100 {
        store.commit(pair(at)).await.expect("there is space again");
    }
    assert_eq!(pairs(&store).await, acknowledged + 100);
    drop(store);
    assert_eq!(pairs(&open()).await, acknowledged + 100, "nothing was lost over the reopening");
}

fn run(program: &str, arguments: &[&str], paths: &[&Path]) {
    let status = Command::new(program).args(arguments).args(paths).status().expect("is installed");
    assert!(status.success(), "{program} {arguments:?}");
}

/// A thread of the engine may outlive the store by a moment, with its files open.
fn umount(path: &Path) {
    let begun = std::time::Instant::now();
    while !Command::new("umount").arg(path).status().expect("is installed").success() {
        assert!(begun.elapsed().as_secs() < 30, "{} is still in use", path.display());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// The disk is a file, and a copy of it is what the platter holds: everything flushed, nothing that only the kernel knows.
#[test]
fn an_acknowledged_commit_survives_a_power_cut() {
    if nix::unistd::geteuid().is_root() && !Path::new("/dev/loop-control").exists() {
        let known = fs::read_to_string("/proc/misc").expect("Linux has it");
        let is_there = known.lines().any(|line| line.trim_start() == "237 loop-control");
        assert!(
            !is_there,
            "the kernel has loop devices, but there is no /dev/loop-control: mknod /dev/loop-control c 10 237"
        );
        return skipped("this kernel has no loop devices");
    }
    with_own_mounts(async |directory| {
        let [disk, live, after] = ["disk", "live", "after"].map(|name| directory.join(name));
        fs::File::create(&disk).and_then(|file| file.set_len(96 << 20)).expect("a file for a disk");
        // Nothing may be written but what the store asks for: no background initialisation, no periodic commit.
        run("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"], &[&disk]);
        fs::create_dir(&live).and_then(|()| fs::create_dir(&after)).expect("mount points");
        run("mount", &["-o", "loop,commit=3600"], &[&disk, &live]);

        let store = EmbeddedStore::open(&live.join("store"), FeedLimits::default()).expect("opens");
        for at in 0..20 {
            store.commit(pair(at)).await.expect("no guards");
            // Each a file of its own: the kernel may still hold the one before.
            let platter = directory.join(format!("platter-{at}"));
            fs::copy(&disk, &platter).expect("the power is cut");
            run("mount", &["-o", "loop"], &[&platter, &after]);
            let kept = EmbeddedStore::open(&after.join("store"), FeedLimits::default()).expect("opens");
            assert_eq!(kept.revision().await, Ok(Revision(at as u64 + 1)));
            assert_eq!(pairs(&kept).await, at + 1);
            drop(kept);
            umount(&after);
            fs::remove_file(&platter).expect("removes");
        }
    });
}
