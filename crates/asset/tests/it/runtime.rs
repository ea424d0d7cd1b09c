use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use ate_asset::{AssetFile, AssetStore, RuntimeError};
use tempfile::{TempDir, tempdir};

use crate::support::{BUDGET, Warehouse, asset};

async fn files(store: &AssetStore, names: &[&str]) -> BTreeMap<String, AssetFile> {
    let mut files = BTreeMap::new();
    for name in names {
        files.insert((*name).to_owned(), store.ensure(&asset(name, name.as_bytes())).await.unwrap());
    }
    files
}

fn open() -> (TempDir, AssetStore, Vec<u8>) {
    let (directory, large) = (tempdir().unwrap(), vec![1; usize::try_from(BUDGET).unwrap() - 3]);
    let stock: [(&str, &[u8]); 3] = [("runsc", b"runsc"), ("gvisor_sentry", b"gvisor_sentry"), ("large", &large)];
    let store = AssetStore::with_sources(directory.path(), BUDGET, Arc::new(Warehouse::with(&stock))).unwrap();
    (directory, store, large)
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

#[tokio::test]
async fn a_runtime_has_its_assets_where_gvisor_looks_and_is_made_once_per_set() {
    let (directory, store, _) = open();
    let assets = files(&store, &["runsc", "gvisor_sentry"]).await;
    let runtime = store.runtime_directory(assets.clone()).await.unwrap();
    // What a snapshot or another node says of the same set must stay the same.
    let digest = "f3bb6b870bf1773ef55c48ff171fe6e2b909d83cdc84c3774a4d16a12abfed8d";
    assert_eq!(runtime.digest().to_string(), digest);
    assert_eq!(runtime.path(), directory.path().join("runtimes").join(digest));
    assert_eq!(inode(&runtime.runsc()), inode(assets["runsc"].path()));
    assert_eq!(inode(&runtime.path().join("gvisor-bin/gvisor_sentry")), inode(assets["gvisor_sentry"].path()));
    let made = inode(runtime.path());
    drop(runtime);
    assert_eq!(inode(store.runtime_directory(assets).await.unwrap().path()), made);
    let smaller = store.runtime_directory(files(&store, &["runsc"]).await).await.unwrap();
    assert_ne!(smaller.digest().to_string(), digest);
    assert!(!smaller.path().join("gvisor-bin/gvisor_sentry").exists());
}

#[tokio::test]
async fn a_set_without_runsc_or_with_a_name_that_leaves_the_directory_is_refused() {
    let (_directory, store, _) = open();
    let error = store.runtime_directory(files(&store, &["gvisor_sentry"]).await).await.unwrap_err();
    assert!(matches!(error, RuntimeError::NoRunsc), "{error}");
    let assets = files(&store, &["runsc"]).await;
    for name in ["../x", "a/b", "", ".", ".hidden", &"x".repeat(65)] {
        let mut assets = assets.clone();
        assets.insert(name.to_owned(), assets["runsc"].clone());
        let error = store.runtime_directory(assets).await.unwrap_err();
        assert!(matches!(error, RuntimeError::Name { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_runtime_stays_while_it_is_leased_and_gives_its_space_back_after() {
    let (directory, store, large) = open();
    let runtime = store.runtime_directory(files(&store, &["runsc", "gvisor_sentry"]).await).await.unwrap();
    store.ensure(&asset("large", &large)).await.unwrap_err();
    assert_eq!(fs::read(runtime.runsc()).unwrap(), b"runsc");
    drop(runtime);
    store.ensure(&asset("large", &large)).await.unwrap();
    assert_eq!(fs::read_dir(directory.path().join("runtimes")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(directory.path().join("sha256")).unwrap().count(), 1);
}

#[tokio::test]
async fn a_runtime_of_damaged_or_missing_files_is_made_anew() {
    let (_directory, store, _) = open();
    let assets = files(&store, &["runsc", "gvisor_sentry"]).await;
    let runtime = store.runtime_directory(assets).await.unwrap();
    fs::write(runtime.runsc(), b"damaged").unwrap();
    fs::remove_file(runtime.path().join("gvisor-bin/gvisor_sentry")).unwrap();
    drop(runtime);
    let assets = files(&store, &["runsc", "gvisor_sentry"]).await;
    let runtime = store.runtime_directory(assets).await.unwrap();
    assert_eq!(fs::read(runtime.runsc()).unwrap(), b"runsc");
    assert_eq!(fs::read(runtime.path().join("gvisor-bin/gvisor_sentry")).unwrap(), b"gvisor_sentry");
}
