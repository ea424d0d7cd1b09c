use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ate_blob::{Backend, BlobError, Blobs};
use futures::stream::TryStreamExt;

use crate::conformance::{content, keeps_all_promises, path};

async fn open(root: &Path) -> Blobs {
    Blobs::open(Backend::Directory(root.to_owned())).await.unwrap()
}

/// What processes have in the works, their locks left out.
fn unfinished(root: &Path) -> Vec<PathBuf> {
    let files = |directory: PathBuf| fs::read_dir(directory).into_iter().flatten().map(|entry| entry.unwrap().path());
    let inside = files(root.join(".unfinished")).flat_map(files);
    inside.filter(|path| !path.ends_with("lock")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_keeps_the_promises_of_a_store() {
    let root = tempfile::tempdir().unwrap();
    keeps_all_promises(&open(root.path()).await, "bucket").await;
    assert_eq!(unfinished(root.path()), Vec::<PathBuf>::new());
    let mode = fs::metadata(root.path().join("bucket/back/1/bytes")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "snapshots are for their owner only");
}

#[tokio::test]
async fn nothing_outside_the_root_is_reached_through_links() {
    let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let blobs = open(root.path()).await;
    fs::write(outside.path().join("secret"), b"secret").unwrap();
    blobs.put_new(&path("s3://b/real"), content(0, 3)).await.unwrap();
    symlink(outside.path(), root.path().join("b/link")).unwrap();
    symlink(outside.path().join("secret"), root.path().join("b/file")).unwrap();
    symlink(outside.path(), root.path().join("linked-bucket")).unwrap();
    for object in ["s3://b/link/secret", "s3://b/file", "s3://linked-bucket/secret"] {
        assert!(blobs.get_bytes(&path(object), 100).await.is_err(), "{object}");
        assert!(blobs.put_new(&path(object), content(0, 3)).await.is_err(), "{object}");
    }
    assert!(blobs.put_new(&path("s3://b/link/new"), content(0, 3)).await.is_err());
    let listed: Vec<_> = blobs.list(&path("s3://b")).map_ok(|info| info.path).try_collect().await.unwrap();
    assert_eq!(listed, [path("s3://b/real")]);
    for name in ["link/secret", "link", "file"] {
        blobs.delete(&path(&format!("s3://b/{name}"))).await.unwrap();
    }
    assert_eq!(fs::read(outside.path().join("secret")).unwrap(), b"secret");
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
}

const CHILD: &str = "ATE_TEST_BLOB_CHILD";
const CHILD_LENGTH: usize = 24 << 20;

/// Not a test of its own: what the next one kills. Says which puts were acknowledged.
#[tokio::test]
#[ignore = "is run by another test"]
async fn child_that_puts_until_it_is_killed() {
    let blobs = open(Path::new(&std::env::var_os(CHILD).expect("set by the parent"))).await;
    for number in 0.. {
        blobs.put_new(&path(&format!("s3://b/{number}")), content(number, CHILD_LENGTH)).await.unwrap();
        let mut out = std::io::stderr();
        writeln!(out, "put {number}").unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_is_killed_leaves_no_part_of_an_object_and_is_cleaned_up() {
    let root = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "directory::child_that_puts_until_it_is_killed", "--ignored", "--nocapture"])
        .env(CHILD, root.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(said.by_ref().any(|line| line == "put 1"), "the child has ended");
    let midway = |path: &PathBuf| fs::metadata(path).is_ok_and(|file| (1..CHILD_LENGTH as u64).contains(&file.len()));
    while !unfinished(root.path()).iter().any(midway) {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let acknowledged = 2 + said.filter(|line| line.starts_with("put ")).count();

    assert_ne!(unfinished(root.path()), Vec::<PathBuf>::new());
    let living = open(root.path()).await;
    assert_eq!(unfinished(root.path()), Vec::<PathBuf>::new());
    for number in 0..acknowledged {
        let whole = living.get_bytes(&path(&format!("s3://b/{number}")), u64::MAX).await.unwrap();
        assert!(whole == content(number, CHILD_LENGTH), "{number}");
    }
    let sizes: Vec<_> = living.list(&path("s3://b")).map_ok(|info| info.size).try_collect().await.unwrap();
    assert!(sizes.len() >= acknowledged && sizes.iter().all(|&size| size == CHILD_LENGTH as u64), "{sizes:?}");
    // Whoever opens the root next does not take the work of the living for leftovers.
    let file = fs::read_dir(root.path().join(".unfinished")).unwrap().map(|entry| entry.unwrap().path());
    let work = file.filter(|path| path.is_dir()).map(|own| own.join("work")).next().unwrap();
    fs::write(&work, b"").unwrap();
    open(root.path()).await;
    assert!(work.exists());
}

/// A file system that is there while this value lives.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(arguments: &[&str]) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root, to mount");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        assert!(Command::new("mount").args(arguments).arg(directory.path()).status().unwrap().success());
        Some(Self(directory))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily: a process that another test forks holds our descriptors until it has become its program.
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[tokio::test]
async fn a_full_disk_is_said_and_leaves_room_for_what_is_smaller() {
    let Some(disk) = Mounted::new(&["-t", "tmpfs", "-o", "size=4m", "tmpfs"]) else { return };
    let root = disk.0.path().join("store");
    let blobs = open(&root).await;
    let error = blobs.put_new(&path("s3://b/large"), content(0, 8 << 20)).await.unwrap_err();
    assert!(matches!(error, BlobError::Full { .. }), "{error}");
    assert_eq!(unfinished(&root), Vec::<PathBuf>::new());
    assert_eq!(blobs.size(&path("s3://b/large")).await.unwrap(), None);
    blobs.put_new(&path("s3://b/small"), content(0, 3 << 20)).await.unwrap();
}

/// The image of a mounted disk, copied at once, holds what the loss of power would leave: what was written to the disk
/// and not what waits in memory.
#[tokio::test]
async fn what_was_acknowledged_survives_the_loss_of_power() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image).status();
    if !made.is_ok_and(|status| status.success()) {
        eprintln!("skipped: needs mkfs.ext4");
        return;
    }
    let Some(disk) = Mounted::new(&["-o", "loop", image.to_str().unwrap()]) else { return };
    let blobs = open(&disk.0.path().join("new/store")).await;
    // Each a file of its own: the kernel may still hold the one before.
    let after_power_cut = |number: usize| {
        let after = directory.path().join(format!("after-{number}"));
        fs::copy(&image, &after).unwrap();
        Mounted::new(&["-o", "loop", after.to_str().unwrap()]).unwrap()
    };
    let object = path("s3://b/deep/er/object");
    let second = path("s3://b/deep/er/x");
    let objects = [("first", &object), ("in a directory that is durable already", &second)];
    for (number, (name, object)) in objects.into_iter().enumerate() {
        blobs.put_new(object, content(1, 3 << 20)).await.unwrap();
        let recovered = after_power_cut(number);
        let blobs = open(&recovered.0.path().join("new/store")).await;
        assert!(blobs.get_bytes(object, u64::MAX).await.unwrap() == content(1, 3 << 20), "{name}");
    }
    blobs.delete(&object).await.unwrap();
    let recovered = after_power_cut(objects.len());
    assert_eq!(open(&recovered.0.path().join("new/store")).await.size(&object).await.unwrap(), None);
}
