//! Damage is found, never believed. A file is changed behind the store's back; after that each answer is either
//! right or an error. What a power cut may leave is no damage: the store opens, with all that it acknowledged.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ate_store::{Change, Fault, FeedLimits, Key, Kind, MAX_PAGE_RECORDS, Prefix, Store};
use ate_store_embedded::engine::Engine;
use ate_store_embedded::{EmbeddedStore, FjallEngine, OpenError};
use tempfile::TempDir;

const RECORDS: usize = 200;
const JOURNAL: &str = "store/records/0.jnl";
/// What says how far the store got.
const MARKS: [&str; 2] = ["store/MARK", "store.mark"];

/// With so little memory records reach sorted files, and not only the journal.
fn open(directory: &Path, memory_bytes: u64) -> Result<EmbeddedStore, OpenError> {
    let opener = move |directory: &Path| -> Result<Box<dyn Engine>, Fault> {
        Ok(Box::new(FjallEngine::open(&directory.join("records"), 1 << 20, memory_bytes)?))
    };
    EmbeddedStore::open_with(&directory.join("store"), FeedLimits::default(), Box::new(opener))
}

fn key(at: usize) -> Key {
    Key::new(Kind::Actor, [format!("{at:03}")]).expect("well formed")
}

/// Text with about as much repetition as records have.
fn value(at: usize, length: usize) -> Vec<u8> {
    let words = (at..).map(|word| format!("\"{:x}\":{},", word.wrapping_mul(0x9E37_79B9) % 65_521, word % 7));
    words.flat_map(String::into_bytes).take(length).collect()
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

fn copy(from: &Path) -> TempDir {
    let to = TempDir::new().expect("a temporary directory");
    for file in files(from) {
        let target = to.path().join(file.strip_prefix(from).expect("inside"));
        fs::create_dir_all(target.parent().expect("inside")).expect("creates");
        fs::copy(&file, target).expect("copies");
    }
    to
}

const DAMAGED: &str = "ATE_STORE_DAMAGED_DIRECTORY";

/// Not a test: reads a damaged store, and fails if an answer is neither right nor an error.
#[tokio::test]
#[ignore = "run by a_changed_byte_is_an_error_or_has_no_effect"]
async fn damage_child() {
    let Some(directory) = std::env::var_os(DAMAGED) else { return };
    let store = match open(Path::new(&directory), 64 << 10) {
        Ok(store) => store,
        Err(error) => return println!("noticed: {error}"),
    };
    for at in 0..RECORDS {
        match store.get(&key(at)).await {
            Ok(Some(record)) => assert!(record.value == value(at, 600) && record.version == 1, "{record:?}"),
            Ok(None) => panic!("record {at} is gone without an error"),
            Err(error) => println!("noticed: {error}"),
        }
    }
    match store.list(&Prefix::all(Kind::Actor), None, MAX_PAGE_RECORDS).await {
        Ok(page) => assert_eq!(page.records.len(), RECORDS, "the list lacks records without an error"),
        Err(error) => println!("noticed: {error}"),
    }
}

/// In a process of its own, because a wrong length in the engine's manifest can end the process for want of memory.
fn notices_damage(directory: &Path, damage: &str) -> bool {
    let me = std::env::current_exe().expect("own path");
    let arguments = ["--exact", "damage_child", "--ignored", "--nocapture"];
    let output = Command::new(me).args(arguments).env(DAMAGED, directory).output().expect("runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let aborted = output.status.signal().is_some();
    assert!(output.status.success() || aborted, "{damage}: {said}{}", String::from_utf8_lossy(&output.stderr));
    aborted || said.contains("noticed: ")
}

#[tokio::test]
async fn a_changed_byte_is_an_error_or_has_no_effect() {
    let original = TempDir::new().expect("a temporary directory");
    let store = open(original.path(), 64 << 10).expect("creates");
    for at in 0..RECORDS {
        store.commit(Change::new().put(key(at), value(at, 600))).await.expect("no guards");
    }
    drop(store);
    // Opening cuts the journal, which is made of 64 MiB of mostly nothing, to what is in it.
    drop(open(original.path(), 64 << 10).expect("opens"));
    assert!(!notices_damage(original.path(), "none"));

    let (mut cases, mut noticed) = (0, 0);
    for file in files(original.path()) {
        let name = file.strip_prefix(original.path()).expect("inside").display().to_string();
        let bytes = fs::read(&file).expect("reads");
        for at in (0..bytes.len()).step_by(1 + bytes.len() / 12) {
            let damaged = copy(original.path());
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x55;
            fs::write(damaged.path().join(&name), bytes).expect("writes");
            cases += 1;
            noticed += usize::from(notices_damage(damaged.path(), &format!("byte {at} of {name}")));
        }
    }
    assert!(noticed > cases / 2, "only {noticed} of {cases} changes were noticed: are the right files changed?");
}

/// What a power cut may leave of the commit in flight: any of its pages, in any order, the others zero.
#[tokio::test]
async fn a_torn_commit_is_dropped_and_those_before_it_are_kept() {
    const BEFORE: usize = 5;
    const PAGE: usize = 4096;
    let used = |journal: &[u8]| journal.iter().rposition(|byte| *byte != 0).expect("not empty") + 1;
    for length in [600, 12_000] {
        let original = TempDir::new().expect("a temporary directory");
        let store = open(original.path(), 64 << 20).expect("creates");
        for at in 0..BEFORE {
            store.commit(Change::new().put(key(at), value(at, length))).await.expect("no guards");
        }
        let marks = MARKS.map(|mark| (mark, fs::read(original.path().join(mark)).expect("reads")));
        let acknowledged = used(&fs::read(original.path().join(JOURNAL)).expect("reads"));
        let flying = (BEFORE..30).fold(Change::new(), |change, at| change.put(key(at), value(at, length)));
        store.commit(flying).await.expect("no guards");
        let image = copy(original.path());
        for (mark, content) in marks {
            fs::write(image.path().join(mark), content).expect("writes");
        }
        let journal = fs::read(image.path().join(JOURNAL)).expect("reads");
        let end = used(&journal);

        for page in acknowledged / PAGE..=end / PAGE {
            let (from, to) = ((page * PAGE).max(acknowledged), ((page + 1) * PAGE).min(end));
            // One page missing, and all from there on missing.
            for missing in [from..to, from..end] {
                let mut torn = journal[..end].to_vec();
                torn[missing].fill(0);
                fs::write(image.path().join(JOURNAL), torn).expect("writes");
                let damaged = copy(image.path());
                let store = open(damaged.path(), 64 << 20).unwrap_or_else(|error| panic!("page {page}: {error:?}"));
                let left = store.list(&Prefix::all(Kind::Actor), None, 100).await.expect("reads").records;
                assert_eq!(left.len(), BEFORE, "page {page} of a commit of {length} byte values");
                let after = store.commit(Change::new().put(key(BEFORE), "again")).await.expect("goes on");
                assert_eq!(after.revision.0, 1 + BEFORE as u64);
            }
        }
    }
}
