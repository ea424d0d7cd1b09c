use std::error::Error;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use ate_asset::{Asset, AssetStore, Cause, StoreError};
use futures::future::{FutureExt, join_all};
use tempfile::tempdir;

use crate::support::{BUDGET, Warehouse, asset, file_asset, sha256};

fn open(directory: &Path, warehouse: &Arc<Warehouse>) -> AssetStore {
    AssetStore::with_sources(directory, BUDGET, warehouse.clone()).unwrap()
}

async fn cause(store: &AssetStore, asset: &Asset) -> Cause {
    store.ensure(asset).await.unwrap_err().cause
}

/// Nothing of an asset that was refused stays.
fn assert_clean(directory: &Path) {
    for part in ["sha256", "fetch"] {
        assert_eq!(fs::read_dir(directory.join(part)).unwrap().count(), 0, "{part}");
    }
}

#[tokio::test]
async fn an_asset_is_an_executable_file_under_its_hash_and_outlives_its_source() {
    let directory = tempdir().unwrap();
    let source = directory.path().join("runsc");
    fs::write(&source, b"#!/bin/sh\nexit 7\n").unwrap();
    let asset = file_asset(&source, &fs::read(&source).unwrap());
    let root = directory.path().join("assets");
    let store = AssetStore::open(&root, BUDGET).unwrap();
    let file = store.ensure(&asset).await.unwrap();
    assert_eq!(file.path(), root.join("sha256").join(asset.sha256.to_string()));
    assert_eq!(fs::metadata(file.path()).unwrap().permissions().mode() & 0o777, 0o755);
    // A process that another test forks holds our descriptors until it has become its program.
    let mut runs = (0..1000).map(|_| std::process::Command::new(file.path()).status());
    let run = runs.find(|run| !matches!(run, Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy));
    assert_eq!(run.expect("nobody writes to it").unwrap().code(), Some(7));
    fs::remove_file(&source).unwrap();
    AssetStore::open(&root, BUDGET).unwrap().ensure(&asset).await.unwrap();
}

#[tokio::test]
async fn callers_share_one_fetch_and_one_that_goes_away_does_not_stop_it() {
    let directory = tempdir().unwrap();
    let gate = Some(tokio::sync::Semaphore::new(0));
    let warehouse = Arc::new(Warehouse { gate, ..Warehouse::with(&[("a", b"content")]) });
    let store = Arc::new(open(directory.path(), &warehouse));
    let ensure = |_| {
        let store = store.clone();
        tokio::spawn(async move { store.ensure(&asset("a", b"content")).await.map(|file| file.path().to_owned()) })
    };
    let mut callers: Vec<_> = (0..20).map(ensure).collect();
    warehouse.arrived.notified().await;
    let first = callers.remove(0);
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    warehouse.gate.as_ref().unwrap().add_permits(1);
    for path in join_all(callers).await {
        assert_eq!(fs::read(path.unwrap().unwrap()).unwrap(), b"content");
    }
    assert_eq!(warehouse.fetches(), 1);
    store.ensure(&asset("a", b"content")).await.unwrap();
    assert_eq!(warehouse.fetches(), 1, "it is on the node");
}

#[tokio::test]
async fn a_fetch_that_nobody_waits_for_ends_and_leaves_nothing() {
    let directory = tempdir().unwrap();
    let gate = Some(tokio::sync::Semaphore::new(0));
    let warehouse = Arc::new(Warehouse { gate, ..Warehouse::with(&[("a", b"content")]) });
    let store = open(directory.path(), &warehouse);
    let wanted = asset("a", b"content");
    tokio::select! {
        _ = store.ensure(&wanted) => panic!("the gate is closed"),
        () = warehouse.arrived.notified() => {}
    }
    assert_clean(directory.path());
    warehouse.gate.as_ref().unwrap().add_permits(1);
    store.ensure(&wanted).await.unwrap();
}

#[tokio::test]
async fn a_failure_that_is_over_is_not_met_again() {
    let directory = tempdir().unwrap();
    let warehouse = Arc::new(Warehouse::with(&[]));
    let store = open(directory.path(), &warehouse);
    let wanted = asset("a", b"content");
    let mut slow = store.ensure(&wanted).boxed();
    assert!(futures::poll!(&mut slow).is_pending());
    assert!(matches!(cause(&store, &wanted).await, Cause::Missing { .. }));
    warehouse.content.lock().unwrap().insert("a".to_owned(), b"content".to_vec());
    // Somebody who has not yet taken the failed outcome does not keep it alive for others.
    store.ensure(&wanted).await.unwrap();
    assert!(matches!(slow.await.unwrap_err().cause, Cause::Missing { .. }));
    assert_eq!(warehouse.fetches(), 2);
}

#[tokio::test]
async fn other_bytes_than_pinned_are_refused_and_not_kept() {
    let directory = tempdir().unwrap();
    let warehouse = Arc::new(Warehouse::with(&[("a", b"tampered")]));
    let store = open(directory.path(), &warehouse);
    let error = store.ensure(&asset("a", b"content")).await.unwrap_err();
    let text = format!("{error}: {}", error.source().unwrap());
    for part in ["https://warehouse/a", &sha256(b"content").to_string(), &sha256(b"tampered").to_string(), "pin"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(warehouse.fetches(), 1, "asking again would not help");
    assert_clean(directory.path());
}

#[tokio::test]
async fn a_source_that_ends_early_is_asked_again_and_then_refused() {
    let directory = tempdir().unwrap();
    let (announced, content) = (Some(2000), vec![1; 1500]);
    let warehouse = Arc::new(Warehouse { announced, ..Warehouse::with(&[("a", &content)]) });
    let cut = cause(&open(directory.path(), &warehouse), &asset("a", &content)).await;
    assert!(matches!(cut, Cause::Truncated { expected: 2000, got: 1500 }), "{cut}");
    assert_eq!(warehouse.fetches(), 3);
    assert_clean(directory.path());

    let failures = AtomicUsize::new(2);
    let warehouse = Arc::new(Warehouse { failures, ..Warehouse::with(&[("a", &content)]) });
    open(directory.path(), &warehouse).ensure(&asset("a", &content)).await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_fetched_is_refused_at_once() {
    let directory = tempdir().unwrap();
    let warehouse = Arc::new(Warehouse::with(&[("large", &vec![1; 2 << 20])]));
    let store = open(directory.path(), &warehouse);
    let with_url = |url: &str| Asset { url: url.to_owned(), sha256: sha256(b"") };
    assert!(matches!(cause(&store, &asset("none", b"")).await, Cause::Missing { .. }));
    assert!(matches!(cause(&store, &asset("large", b"")).await, Cause::TooLarge { limit: BUDGET }));
    assert_eq!(warehouse.fetches(), 2);
    let error = store.ensure(&with_url("ftp://host/runsc")).await.unwrap_err();
    assert!(matches!(error.cause, Cause::Url { .. }));
    let error = store.ensure(&with_url("https://user:secret@host/x?key=secret")).await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
    assert_clean(directory.path());
    let unannounced = Arc::new(Warehouse { announced: Some(1), ..Warehouse::with(&[("large", &vec![1; 2 << 20])]) });
    let cause = cause(&open(directory.path(), &unannounced), &asset("large", b"")).await;
    assert!(matches!(cause, Cause::TooLarge { .. }), "{cause}");
}

#[tokio::test]
async fn a_damaged_asset_is_fetched_anew() {
    let directory = tempdir().unwrap();
    let warehouse = Arc::new(Warehouse::with(&[("a", b"content")]));
    let wanted = asset("a", b"content");
    let path = open(directory.path(), &warehouse).ensure(&wanted).await.unwrap().path().to_owned();
    let damage = |content: &[u8]| {
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        fs::write(&path, content).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    };
    // To the size and the times of the file it looks unchanged, and a new process does not know it.
    damage(b"c0ntent");
    let store = open(directory.path(), &warehouse);
    assert_eq!(fs::read(store.ensure(&wanted).await.unwrap().path()).unwrap(), b"content");
    assert_eq!(warehouse.fetches(), 2);
    // This process knows it, and sees the change.
    damage(b"cont");
    assert_eq!(fs::read(store.ensure(&wanted).await.unwrap().path()).unwrap(), b"content");
    assert_eq!(warehouse.fetches(), 3);
}

#[tokio::test]
async fn the_longest_unused_goes_first_and_what_is_leased_never() {
    let directory = tempdir().unwrap();
    let third = usize::try_from(BUDGET / 3).unwrap();
    let content: Vec<_> = (0..5).map(|byte| vec![byte; third]).collect();
    let names = ["a", "b", "c", "d", "e"];
    let stock: Vec<_> = names.iter().zip(&content).map(|(name, bytes)| (*name, &bytes[..])).collect();
    let warehouse = Arc::new(Warehouse::with(&stock));
    let store = open(directory.path(), &warehouse);
    let wanted: Vec<_> = stock.iter().map(|(name, bytes)| asset(name, bytes)).collect();
    let held = || (0..5).filter(|&i| directory.path().join("sha256").join(wanted[i].sha256.to_string()).exists());

    let leased = store.ensure(&wanted[0]).await.unwrap();
    store.ensure(&wanted[1]).await.unwrap();
    store.ensure(&wanted[2]).await.unwrap();
    store.ensure(&wanted[1]).await.unwrap();
    // The leased one is the oldest by now, then the third, then the second.
    let fourth = store.ensure(&wanted[3]).await.unwrap();
    assert_eq!(held().collect::<Vec<_>>(), [0, 1, 3]);
    let fifth = store.ensure(&wanted[4]).await.unwrap();
    assert_eq!(held().collect::<Vec<_>>(), [0, 3, 4]);
    let refused = cause(&store, &wanted[1]).await;
    assert!(matches!(refused, Cause::OverBudget { budget: BUDGET, .. }), "{refused}");
    assert_eq!(held().collect::<Vec<_>>(), [0, 3, 4]);
    drop((leased, fourth));
    store.ensure(&wanted[1]).await.unwrap();
    assert_eq!(held().collect::<Vec<_>>(), [1, 3, 4]);
    drop(fifth);
}

#[tokio::test]
async fn what_a_dead_process_left_is_removed_and_what_a_living_one_fetches_is_not() {
    let directory = tempdir().unwrap();
    let gate = Some(tokio::sync::Semaphore::new(0));
    let warehouse = Arc::new(Warehouse { gate, ..Warehouse::with(&[("a", b"content")]) });
    let store = open(directory.path(), &warehouse);
    let wanted = asset("a", b"content");
    let mut coming = store.ensure(&wanted).boxed();
    tokio::select! {
        _ = &mut coming => panic!("the gate is closed"),
        () = warehouse.arrived.notified() => {}
    }
    let dead = directory.path().join("fetch").join(sha256(b"dead").to_string());
    fs::write(&dead, b"half").unwrap();
    let unfinished = directory.path().join("runtimes/.unfinished-1/gvisor-bin");
    fs::create_dir_all(&unfinished).unwrap();
    open(directory.path(), &warehouse);
    assert!(!dead.exists() && !unfinished.exists());
    warehouse.gate.as_ref().unwrap().add_permits(1);
    coming.await.unwrap();
}

#[tokio::test]
async fn a_full_disk_is_said() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root, to mount");
        return;
    }
    let disk = tempdir().unwrap();
    let mount = |command: &str, arguments: &[&str]| {
        std::process::Command::new(command).args(arguments).arg(disk.path()).status().unwrap().success()
    };
    assert!(mount("mount", &["-t", "tmpfs", "-o", "size=256k", "tmpfs"]));
    let content = vec![1; 512 << 10];
    let warehouse = Arc::new(Warehouse::with(&[("a", &content)]));
    let store = open(disk.path(), &warehouse);
    let result = store.ensure(&asset("a", &content)).await;
    let left = fs::read_dir(disk.path().join("fetch")).map(Iterator::count);
    drop(store);
    // A process that another test forks holds our descriptors until it has become its program.
    let mut unmounts = (0..1000).map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        mount("umount", &[])
    });
    assert!(unmounts.any(|unmounted| unmounted));
    assert_eq!(left.unwrap(), 0);
    let full = result.unwrap_err().cause;
    assert!(matches!(full, Cause::Store(StoreError::Full { .. })), "{full}");
}
