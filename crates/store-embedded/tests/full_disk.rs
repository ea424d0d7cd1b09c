//! A full disk stops commits, loses nothing, and is over when there is space again.

use std::fs;
use std::path::Path;

use ate_store::{Change, CommitError, Fault, FeedLimits, Key, Kind, Prefix, Store};
use ate_store_embedded::engine::Engine;
use ate_store_embedded::{EmbeddedStore, FjallEngine};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use tempfile::TempDir;

/// Runs `work` on a small file system of its own. The mount belongs to a namespace of one thread and those it
/// starts, so it goes with them however they end.
fn with_small_disk(work: impl FnOnce(&Path) + Send + 'static) {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: mounting a small file system needs root");
    }
    let directory = TempDir::new().expect("a temporary directory");
    let thread = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace");
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("stays in this namespace");
        mount(Some("small"), directory.path(), Some("tmpfs"), MsFlags::empty(), Some("size=8m")).expect("mounts");
        work(directory.path());
    });
    thread.join().expect("the work on the small disk succeeds");
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
        with_small_disk(move |directory| {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
            runtime.block_on(fill_and_heal(directory, memory_bytes));
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
