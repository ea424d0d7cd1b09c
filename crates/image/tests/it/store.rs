use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use ate_image::{Cause, Image, ImageStore, Limits, Reference, Refused, StoreError, UnpackError};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::json;

use crate::support::{Layout, names, needs_root, sha256, store, tar, text};

#[tokio::test]
async fn an_image_outlives_its_source_and_its_store() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    let layout = directory.path().join("layout");
    let config = json!({ "Entrypoint": ["/app"], "Env": ["A=b"], "WorkingDir": "/w", "User": "5" });
    let layers = [tar(&[("f", "low"), ("low", "")]), tar(&[("f", "top")])];
    let reference = Layout(&layout).image(&layers, config);
    let pulled = store(directory.path()).ensure(&reference, None).await.unwrap();
    fs::remove_dir_all(&layout).unwrap();
    let image = store(directory.path()).ensure(&reference, None).await.unwrap();
    assert_eq!((&image.config, &image.layers), (&pulled.config, &pulled.layers));
    assert_eq!(image.config.entrypoint, ["/app"]);
    let read = |layer: &PathBuf| fs::read_to_string(layer.join("f")).unwrap();
    assert_eq!(image.layers.iter().map(read).collect::<Vec<_>>(), ["top", "low"], "topmost first");
}

#[tokio::test]
async fn an_image_that_cannot_be_used_here_says_why() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    let layout_path = directory.path().join("layout");
    let layout = Layout(&layout_path);
    let good = layout.image(&[tar(&[("f", "")])], json!({}));
    let manifest = fs::read(layout_path.join("blobs/sha256").join(good.digest().to_string())).unwrap();
    let mut entry = layout.descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
    entry["platform"] = json!({ "os": "linux", "architecture": "riscv64" });
    let index = json!({ "schemaVersion": 2, "manifests": [entry] }).to_string();
    let index = layout.reference(layout.blob(index.as_bytes()));
    let store = store(directory.path());
    let error = text(&store.ensure(&index, None).await.unwrap_err());
    assert!(error.contains("linux/riscv64") && error.contains(&index.to_string()), "{error}");

    let config = &serde_json::from_slice::<serde_json::Value>(&manifest).unwrap()["config"]["digest"];
    for (what, digest) in
        [("config", &config.as_str().unwrap()["sha256:".len()..]), ("manifest", &good.digest().to_string())]
    {
        let path = layout_path.join("blobs/sha256").join(digest);
        let intact = fs::read(&path).unwrap();
        fs::write(&path, [&intact[..], b" "].concat()).unwrap();
        let error = store.ensure(&good, None).await.unwrap_err();
        assert!(matches!(error.cause, Cause::Digest { what: told, .. } if told == what), "{}", text(&error));
        fs::write(&path, intact).unwrap();
    }

    let absent = layout.reference(sha256(b"absent"));
    assert!(matches!(store.ensure(&absent, None).await.unwrap_err().cause, Cause::Missing { .. }));
    let relative = Reference::parse(&format!("oci-layout:layout@sha256:{}", good.digest())).unwrap();
    assert!(matches!(store.ensure(&relative, None).await.unwrap_err().cause, Cause::Relative));
    let large = layout.image(&[tar(&[("a", "")]), tar(&[("b", "")])], json!({}));
    for limits in [Limits { layers: 1, ..Limits::default() }, Limits { image_bytes: 1000, ..Limits::default() }] {
        let store = ImageStore::open(&directory.path().join("small"), limits).unwrap();
        assert!(matches!(store.ensure(&large, None).await.unwrap_err().cause, Cause::TooLarge { .. }));
    }
}

#[tokio::test]
async fn a_bad_layer_leaves_nothing_behind_and_is_pulled_again_when_it_is_good() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    let layout_path = directory.path().join("layout");
    let layout = Layout(&layout_path);
    let store = store(directory.path());
    let hostile = layout.image(&[tar(&[("f", ""), ("f/x", "")])], json!({}));
    let Cause::Layer { source, .. } = store.ensure(&hostile, None).await.unwrap_err().cause else { panic!() };
    assert!(matches!(&*source, UnpackError::Entry { refused: Refused::ThroughFile, .. }), "{source}");

    let layer = tar(&[("f", "data")]);
    let reference = layout.image(std::slice::from_ref(&layer), json!({}));
    let blob = layout_path.join("blobs/sha256").join(sha256(&layer).to_string());
    for damage in [&layer[..layer.len() - 1], &[&layer[..], &[0]].concat(), &[0; 10_240]] {
        fs::write(&blob, damage).unwrap();
        assert!(matches!(store.ensure(&reference, None).await.unwrap_err().cause, Cause::Layer { .. }));
        assert_eq!(names(&directory.path().join("store/layers")), [""; 0]);
    }
    let [ingest] = names(&directory.path().join("store/ingest")).try_into().unwrap();
    assert_eq!(names(&directory.path().join("store/ingest").join(ingest)), [""; 0]);
    fs::write(&blob, &layer).unwrap();
    store.ensure(&reference, None).await.unwrap();
}

async fn filled(directory: &Path, names: &[&str]) -> Vec<(Reference, PathBuf)> {
    let layout = directory.join("layout");
    let store = store(directory);
    let base = tar(&[("base", &"x".repeat(200_000))]);
    let mut images = Vec::new();
    for (age, name) in names.iter().rev().enumerate() {
        let own = tar(&[(name, &"x".repeat(100_000))]);
        let reference = Layout(&layout).image(&[base.clone(), own], json!({}));
        store.ensure(&reference, None).await.unwrap();
        let record = directory.join("store/images").join(reference.digest().to_string());
        let used = SystemTime::now() - Duration::from_secs(60 * (age as u64 + 1));
        File::open(&record).unwrap().set_modified(used).unwrap();
        images.insert(0, (reference, record));
    }
    images
}

fn exists(image: &Image) -> bool {
    image.layers.iter().all(|layer| layer.read_dir().is_ok_and(|mut entries| entries.next().is_some()))
}

#[tokio::test]
async fn eviction_takes_the_longest_unused_first_and_never_what_is_leased() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    let images = filled(directory.path(), &["a", "b", "c", "d"]).await;
    let present = || images.iter().map(|(_, record)| record.exists()).collect::<Vec<_>>();
    // Two stores in one directory are as two processes are.
    let (holder, evictor) = (store(directory.path()), store(directory.path()));
    let nothing = evictor.evict_to(u64::MAX).await.unwrap();
    assert_eq!((nothing.images, nothing.freed_bytes), (0, 0));
    assert!(nothing.remaining_bytes > 600_000 && nothing.remaining_bytes < 800_000, "{nothing:?}");

    // "a" was used longest ago, until now.
    drop(holder.ensure(&images[0].0, None).await.unwrap());
    let some = evictor.evict_to(nothing.remaining_bytes - 1).await.unwrap();
    assert_eq!((some.images, present()), (1, vec![true, false, true, true]));
    assert!(some.freed_bytes > 90_000 && some.freed_bytes < 150_000, "the shared layer stays: {some:?}");

    let leased = holder.ensure(&images[2].0, None).await.unwrap();
    let clone = leased.lease.clone();
    let all = evictor.evict_to(0).await.unwrap();
    assert_eq!((all.images, present()), (2, vec![false, false, true, false]));
    assert!(exists(&leased) && all.remaining_bytes > 290_000, "{all:?}");
    let layers = leased.layers.clone();
    drop(leased);
    assert_eq!(evictor.evict_to(0).await.unwrap().images, 0, "a clone of the lease is left");
    drop(clone);
    let last = evictor.evict_to(0).await.unwrap();
    assert_eq!((last.images, last.remaining_bytes, present()), (1, 0, vec![false; 4]));
    assert!(layers.iter().all(|layer| !layer.exists()));
    assert!(exists(&holder.ensure(&images[2].0, None).await.unwrap()), "and it can be pulled again");
}

#[tokio::test]
async fn a_store_is_private_and_its_path_fit_for_overlayfs() {
    needs_root!();
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().unwrap();
    for name in ["a:b", "a,b", "a\\b"] {
        let opened = ImageStore::open(&directory.path().join(name), Limits::default());
        assert!(matches!(opened, Err(StoreError::Path { .. })), "{name}");
    }
    store(directory.path());
    let layers = directory.path().join("store/layers").metadata().unwrap();
    assert_eq!(layers.mode() & 0o777, 0o700, "setuid files of strangers are in there");
}

#[test]
fn opening_removes_what_the_dead_left_and_not_what_the_living_do() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    let living = store(directory.path());
    let ingest = directory.path().join("store/ingest");
    let theirs = names(&ingest);
    fs::create_dir_all(ingest.join("dead/layer-x/fs")).unwrap();
    fs::write(ingest.join("dead/layer-x/fs/file"), "").unwrap();
    let second = store(directory.path());
    assert!(!ingest.join("dead").exists());
    assert!(theirs.iter().all(|name| ingest.join(name).exists()));
    drop((living, second));
    assert_eq!(names(&ingest), [""; 0]);
}

const CHILD: &str = "ATE_TEST_PULL";

/// Pulls what `a_process_killed_half_way_leaves_a_good_store` asks for; alone it does nothing.
#[tokio::test]
#[ignore = "run by another test, as a process of its own"]
async fn child() {
    let Some(text) = env::var_os(CHILD) else { return };
    let (directory, reference) = text.to_str().unwrap().split_once('\n').unwrap();
    let _ = store(Path::new(directory)).ensure(&Reference::parse(reference).unwrap(), None).await;
}

#[tokio::test]
async fn a_process_killed_half_way_leaves_a_good_store() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    let layout = directory.path().join("layout");
    let files: Vec<_> = (0..64).map(|n| (format!("file-{n}"), "x".repeat(50_000))).collect();
    let layer = tar(&files.iter().map(|(path, data)| (path.as_str(), data.as_str())).collect::<Vec<_>>());
    let reference = Layout(&layout).image(std::slice::from_ref(&layer), json!({}));
    let blob = layout.join("blobs/sha256").join(sha256(&layer).to_string());
    fs::remove_file(&blob).unwrap();
    mknodat(CWD, &blob, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();

    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "store::child", "--ignored"]);
    child.env(CHILD, format!("{}\n{reference}", directory.path().display())).stdout(std::process::Stdio::null());
    let mut child = child.spawn().unwrap();
    // A pipe holds little: once half of the layer went in, the child has unpacked most of that.
    OpenOptions::new().write(true).open(&blob).unwrap().write_all(&layer[..layer.len() / 2]).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();

    let ingest = directory.path().join("store/ingest");
    let [dead] = names(&ingest).try_into().unwrap();
    let [work] = names(&ingest.join(&dead)).try_into().unwrap();
    assert!(names(&ingest.join(&dead).join(work).join("fs")).len() > 10, "it was killed half-way");
    assert_eq!(names(&directory.path().join("store/layers")), [""; 0]);

    fs::remove_file(&blob).unwrap();
    fs::write(&blob, &layer).unwrap();
    let store = store(directory.path());
    assert!(!ingest.join(dead).exists());
    let image = store.ensure(&reference, None).await.unwrap();
    assert_eq!(names(&image.layers[0]).len(), 64);
}
