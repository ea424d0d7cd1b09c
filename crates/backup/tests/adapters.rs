//! A backup of any adapter is restored by any other, whole or not at all.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use ate_backup::{Backup, BackupError, save};
use ate_store::{
    Change, Contents, Entry, FeedLimits, IfOccupied, Key, Kind, LostTail, Mutation, Mutations, Prefix, Record,
    Replacement, Revision, Store,
};
use ate_store_embedded::{EmbeddedStore, OpenError};
use ate_store_postgres::{ConnectError, PostgresStore, Settings};
use ate_testkit_postgres::Server;
use futures::{StreamExt, stream};
use jiff::Timestamp;
use tempfile::TempDir;

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(Server::default)
}

/// Where a store is.
#[derive(Clone, Debug)]
enum Place {
    Directory(PathBuf),
    Schema(Box<Settings>),
}

impl Place {
    fn schema() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let schema = format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed)).parse().expect("plain");
        Self::Schema(Box::new(Settings { schema, ..Settings::new(server().url().parse().expect("well formed")) }))
    }

    async fn open(&self) -> Result<Box<dyn Store>, String> {
        Ok(match self {
            Self::Directory(path) => {
                Box::new(EmbeddedStore::open(path, FeedLimits::default()).map_err(|error| error.to_string())?)
            }
            Self::Schema(settings) => {
                Box::new(PostgresStore::connect((**settings).clone()).await.map_err(|error| error.to_string())?)
            }
        })
    }

    async fn contents(&self) -> Result<Contents, String> {
        match self {
            Self::Directory(path) => {
                ate_store_embedded::contents(path, LostTail::Refuse).await.map_err(|error| error.to_string())
            }
            Self::Schema(settings) => {
                ate_store_postgres::contents(settings, LostTail::Refuse).await.map_err(|error| error.to_string())
            }
        }
    }

    async fn load(&self, occupied: IfOccupied, revision: Revision, mutations: Mutations) -> Result<(), String> {
        self.replace(occupied, move |_| Replacement { revision, mutations }).await
    }

    async fn replace(
        &self,
        occupied: IfOccupied,
        replacement: impl FnOnce(Revision) -> Replacement + Send + 'static,
    ) -> Result<(), String> {
        let text = |error: &dyn std::error::Error| match error.source() {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        };
        match self {
            Self::Directory(path) => {
                let loaded = ate_store_embedded::load(path, occupied, replacement).await;
                loaded.map(drop).map_err(|error| text(&error))
            }
            Self::Schema(settings) => {
                let loaded = ate_store_postgres::load(settings, occupied, replacement).await;
                loaded.map_err(|error| text(&error))
            }
        }
    }

    /// Everything in it, and where it is.
    async fn everything(&self) -> (Revision, Vec<Record>) {
        let contents = self.contents().await.expect("opens");
        let records = contents.entries.map(|entry| match entry.expect("reads") {
            Entry::Record(record) => record,
            foreign => panic!("{foreign:?}"),
        });
        (contents.revision, records.collect().await)
    }
}

struct Places {
    directory: TempDir,
}

impl Places {
    fn new() -> Self {
        Self { directory: TempDir::new().expect("a temporary directory") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn directory(&self, name: &str) -> Place {
        Place::Directory(self.path(name))
    }
}

fn key(kind: Kind, path: &str) -> Key {
    Key::parse(kind, path).expect("well formed")
}

/// Records of every kind, with versions above one, gaps, an empty value, one that is no text and a large one.
async fn fill(place: &Place) {
    let store = place.open().await.expect("opens");
    for kind in Kind::ALL {
        for path in ["a", "a/b", "a-b", "zoë"] {
            let change = Change::new().put(key(kind, path), format!("{{\"of\":\"{kind}\"}}"));
            store.commit(change).await.expect("no guards");
        }
    }
    for _ in 0..3 {
        store.commit(Change::new().put(key(Kind::Actor, "a"), "again")).await.expect("no guards");
    }
    let odd = Change::new()
        .put(key(Kind::Meta, "empty"), "")
        .put(key(Kind::Meta, "bytes"), vec![0, 159, 146, 150, 255])
        .put(key(Kind::Meta, "large"), vec![7_u8; ate_store::MAX_VALUE])
        .put(key(Kind::Meta, "lines"), "a\nb\r\n\u{2028}\"\\")
        .delete(key(Kind::Node, "a"));
    store.commit(odd).await.expect("no guards");
}

fn time() -> Timestamp {
    "2026-05-01T10:00:00Z".parse().expect("a time")
}

async fn back_up(place: &Place, file: &Path) {
    save(file, place.contents().await.expect("opens"), time(), "a test", |_| {}).await.expect("saves");
}

fn mutations(backup: &Backup) -> Mutations {
    let records = backup.records().expect("opens");
    stream::iter(records.map(|record| record.map(Mutation::Put).map_err(Into::into))).boxed()
}

async fn restore(file: &Path, place: &Place) -> Result<(), String> {
    let backup = Backup::open(file, |_| {}).map_err(|error| error.to_string())?;
    place.load(IfOccupied::Refuse, backup.header.revision, mutations(&backup)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_goes_through_every_adapter_unchanged() {
    let places = Places::new();
    let line = [places.directory("one"), Place::schema(), Place::schema(), places.directory("two")];
    fill(&line[0]).await;
    let (revision, records) = line[0].everything().await;
    assert_eq!(records.len(), 4 * Kind::ALL.len() + 4 - 1);
    for (at, pair) in line.windows(2).enumerate() {
        let file = places.path(&format!("backup-{at}"));
        back_up(&pair[0], &file).await;
        assert_eq!(fs::metadata(&file).expect("there").permissions().mode() & 0o777, 0o600);
        restore(&file, &pair[1]).await.expect("restores");
        assert_eq!(pair[1].everything().await, (revision, records.clone()));
    }
    // The files are the same too: what is in them does not depend on the adapter.
    let read = |at: usize| fs::read(places.path(&format!("backup-{at}"))).expect("reads");
    assert!(read(0) == read(1) && read(1) == read(2));
    for place in &line[1..] {
        let store = place.open().await.expect("opens");
        let done = store.commit(Change::new().put(key(Kind::Actor, "a"), "on")).await.expect("goes on");
        assert_eq!((done.revision, &done.versions[..]), (revision.next(), &[5][..]));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_or_changed_backup_is_refused() {
    let places = Places::new();
    let file = places.path("backup");
    let store = places.directory("store");
    let opened = store.open().await.expect("opens");
    for name in ["a", "b", "c"] {
        opened.commit(Change::new().put(key(Kind::Actor, name), "x")).await.expect("no guards");
    }
    drop(opened);
    back_up(&store, &file).await;
    let whole = fs::read(&file).expect("reads");
    let damaged = places.path("damaged");
    let refused = |bytes: &[u8], what: String| {
        fs::write(&damaged, bytes).expect("writes");
        let error = Backup::open(&damaged, |_| {}).expect_err(&what);
        assert!(!matches!(error, BackupError::Io { .. }), "{what}: {error}");
        assert!(error.to_string().contains(&damaged.display().to_string()), "{error}");
    };
    for length in 0..whole.len() {
        refused(&whole[..length], format!("cut at {length}"));
    }
    for at in 0..whole.len() {
        for bit in [1, 0x20, 0x80] {
            let mut bytes = whole.clone();
            bytes[at] ^= bit;
            refused(&bytes, format!("byte {at} changed by {bit:#x}"));
        }
    }
    refused(&[&whole[..], b"\n"].concat(), "something behind".to_owned());
    refused(&[&whole[..], &whole[..]].concat(), "twice".to_owned());
    let newer = String::from_utf8(whole.clone()).expect("text").replacen("\"version\":1", "\"version\":2", 1);
    fs::write(&damaged, newer).expect("writes");
    let text = Backup::open(&damaged, |_| {}).expect_err("it is newer").to_string();
    assert!(text.contains("format 2") && text.contains("newer program"), "{text}");
    fs::write(&damaged, &whole).expect("writes");
    assert_eq!(Backup::open(&damaged, |_| {}).expect("the whole is whole").counts.to_string(), "3 actor");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_changes_between_the_look_and_the_restore_is_noticed() {
    let places = Places::new();
    let (store, other) = (places.directory("store"), places.directory("other"));
    for (place, value) in [(&store, "x"), (&other, "y")] {
        let opened = place.open().await.expect("opens");
        opened.commit(Change::new().put(key(Kind::Actor, "a"), value)).await.expect("no guards");
    }
    let [file, another] = ["backup", "another"].map(|name| places.path(name));
    back_up(&store, &file).await;
    back_up(&other, &another).await;
    for target in [places.directory("target"), Place::schema()] {
        fs::copy(&file, places.path("changing")).expect("copies");
        let backup = Backup::open(&places.path("changing"), |_| {}).expect("whole");
        fs::copy(&another, places.path("changing")).expect("copies");
        let refused = target.load(IfOccupied::Refuse, Revision(1), mutations(&backup)).await.expect_err("another file");
        assert!(refused.contains("changed while it was read"), "{refused}");
        let store = target.open().await.expect("an empty one");
        assert_eq!(store.get(&key(Kind::Actor, "a")).await, Ok(None), "nothing was written");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_that_is_there_is_not_written_over() {
    let places = Places::new();
    let store = places.directory("store");
    drop(store.open().await.expect("opens"));
    let file = places.path("backup");
    fs::write(&file, "precious").expect("writes");
    let contents = store.contents().await.expect("opens");
    let refused = save(&file, contents, time(), "a test", |_| {}).await.expect_err("it is there");
    assert!(matches!(refused, BackupError::Exists { .. }), "{refused}");
    assert_eq!(fs::read_to_string(&file).expect("reads"), "precious");
    let left = fs::read_dir(places.directory.path()).expect("lists").count();
    assert_eq!(left, 3, "the store, its mark and the file: nothing is left behind");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_with_records_is_not_written_over_unless_asked_for() {
    let places = Places::new();
    let source = places.directory("source");
    fill(&source).await;
    let file = places.path("backup");
    back_up(&source, &file).await;
    let backup = Backup::open(&file, |_| {}).expect("whole");
    let expected = source.everything().await;
    for target in [places.directory("target"), Place::schema()] {
        let store = target.open().await.expect("opens");
        store.commit(Change::new().put(key(Kind::Pool, "mine"), "x")).await.expect("no guards");
        drop(store);
        let before = target.everything().await;
        let refused = target.load(IfOccupied::Refuse, Revision(9), mutations(&backup)).await.expect_err("occupied");
        assert!(refused.contains("1 pool") && refused.contains("--replace"), "{refused}");
        assert_eq!(target.everything().await, before);
        target.load(IfOccupied::Replace, expected.0, mutations(&backup)).await.expect("asked for");
        assert_eq!(target.everything().await, expected);
    }
    // Moved, not deleted.
    let aside = fs::read_dir(places.directory.path()).expect("lists").map(|entry| entry.expect("an entry").path());
    let aside: Vec<_> = aside.filter(|path| path.display().to_string().contains("target.replaced-")).collect();
    let records = Place::Directory(aside[0].clone()).everything().await.1;
    assert_eq!((aside.len(), records[0].key.path()), (1, "mine"));
}

/// The numbers of the new store begin past it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_replaces_a_store_is_told_how_far_it_got() {
    let places = Places::new();
    for target in [places.directory("target"), Place::schema()] {
        let reached = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let replace = async |occupied| {
            let reached = reached.clone();
            let replacement = move |there: Revision| {
                reached.lock().expect("no panics").push(there);
                Replacement { revision: Revision(there.0 + 10), mutations: stream::empty().boxed() }
            };
            target.replace(occupied, replacement).await
        };
        replace(IfOccupied::Refuse).await.expect("nothing is there");
        let store = target.open().await.expect("opens");
        store.commit(Change::new().put(key(Kind::Pool, "mine"), "x")).await.expect("no guards");
        drop(store);
        replace(IfOccupied::Refuse).await.expect_err("occupied");
        replace(IfOccupied::Replace).await.expect("asked for");
        // Nothing is in it, but it has a past.
        replace(IfOccupied::Refuse).await.expect("nothing is there");
        assert_eq!(*reached.lock().expect("no panics"), [0, 11, 21].map(Revision), "{target:?}");
        assert_eq!(target.everything().await.0, Revision(31));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_is_no_store_is_left_alone() {
    let places = Places::new();
    let target = places.path("target");
    fs::create_dir(&target).expect("creates");
    fs::write(target.join("thesis.txt"), "years").expect("writes");
    for occupied in [IfOccupied::Refuse, IfOccupied::Replace] {
        let load = Place::Directory(target.clone()).load(occupied, Revision(1), stream::empty().boxed()).await;
        assert!(load.expect_err("no store").contains("no store"));
    }
    assert_eq!(fs::read_dir(&target).expect("lists").count(), 1, "not even a lock");
    assert_eq!(fs::read_dir(places.directory.path()).expect("lists").count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_later_layout_is_refused_by_every_verb() {
    let places = Places::new();
    let directory = places.directory("store");
    let schema = Place::schema();
    for place in [&directory, &schema] {
        drop(place.open().await.expect("opens"));
    }
    fs::write(places.path("store").join("FORMAT"), "ate-store 2\n").expect("writes");
    let Place::Schema(settings) = &schema else { unreachable!("made above") };
    server().sql(&format!("UPDATE {}.head SET layout = 7", settings.schema));
    for (place, says) in [(&directory, "format 2"), (&schema, "layout 7")] {
        let read = place.contents().await.expect_err("it is newer");
        assert!(read.contains(says), "{read}");
        for occupied in [IfOccupied::Refuse, IfOccupied::Replace] {
            let load = place.load(occupied, Revision(1), stream::empty().boxed()).await.expect_err("it is newer");
            assert!(load.contains(says), "{load}");
        }
    }
    assert_eq!(server().sql(&format!("SELECT layout FROM {}.head", settings.schema)), "7");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_made_where_there_is_nothing_to_read() {
    let places = Places::new();
    let missing = ate_store_embedded::contents(&places.path("none"), LostTail::Refuse).await.expect_err("nothing");
    assert!(matches!(missing, OpenError::Missing { .. }), "{missing}");
    assert!(!places.path("none").exists());
    let Place::Schema(settings) = Place::schema() else { unreachable!("made so") };
    let missing = ate_store_postgres::contents(&settings, LostTail::Refuse).await.expect_err("nothing");
    assert!(matches!(missing, ConnectError::NoStore { .. }), "{missing}");
    let made = format!("SELECT count(*) FROM pg_namespace WHERE nspname = '{}'", settings.schema);
    assert_eq!(server().sql(&made), "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_in_use_names_who_uses_it() {
    let places = Places::new();
    let place = places.directory("store");
    let _open = place.open().await.expect("opens");
    for refused in [
        place.contents().await.expect_err("in use"),
        place.load(IfOccupied::Replace, Revision(1), stream::empty().boxed()).await.expect_err("in use"),
    ] {
        assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
    }
}

/// Replicas commit pairs all the while; in the backup no pair is torn and none is newer than it says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_online_backup_shows_one_point_of_the_commit_line() {
    const WRITERS: u64 = 4;
    let place = Place::schema();
    let store = std::sync::Arc::from(place.open().await.expect("opens"));
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let (store, stop): (std::sync::Arc<dyn Store>, _) =
                (std::sync::Arc::clone(&store), std::sync::Arc::clone(&stop));
            tokio::spawn(async move {
                let mut count = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    count += 1;
                    // One of a kind that is read early, one of that which is read last.
                    let change = Change::new()
                        .put(key(Kind::Atespace, &writer.to_string()), count.to_string())
                        .put(key(Kind::Actor, &writer.to_string()), count.to_string());
                    store.commit(change).await.expect("no guards");
                }
            })
        })
        .collect();
    let mut backups = 0;
    while backups < 5 {
        let (revision, records) = place.everything().await;
        let all = |kind| records.iter().filter(move |record| record.key.kind() == kind);
        let values = |kind| all(kind).map(|record| (record.key.path(), &record.value)).collect::<Vec<_>>();
        assert_eq!(values(Kind::Atespace), values(Kind::Actor), "torn at revision {revision}");
        assert!(records.iter().all(|record| record.revision <= revision));
        let versions: u64 = all(Kind::Actor).map(|record| record.version).sum();
        assert_eq!(versions, revision.0, "every commit up to it, and none after it");
        backups += u64::from(revision > Revision::ZERO);
    }
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.expect("writes");
    }
}

const CUT_OFF: &str = "ATE_BACKUP_CUT_OFF";

/// Not a test: a restore that says when it is half way, and then never goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by a_restore_that_is_killed_leaves_nothing_that_opens"]
async fn half_a_restore() {
    let Ok(target) = std::env::var(CUT_OFF) else { return };
    let place = match target.split_once(' ') {
        Some((url, schema)) => {
            let settings = Settings::new(url.parse().expect("well formed"));
            Place::Schema(Box::new(Settings { schema: schema.parse().expect("plain"), ..settings }))
        }
        None => Place::Directory(target.into()),
    };
    let record = |at: usize| Record {
        key: key(Kind::Actor, &format!("{at:05}")),
        version: 1,
        revision: Revision(1),
        value: vec![b'x'; 1000].into(),
    };
    // Several batches, so that some of it has reached the disk or the server.
    let first = stream::iter((0..5000).map(move |at| Ok(Mutation::Put(record(at)))));
    let never = stream::once(async {
        println!("half way");
        std::future::pending().await
    });
    let _ = place.load(IfOccupied::Replace, Revision(1), first.chain(never).boxed()).await;
}

fn kill_half_way(target: &str) {
    use std::io::{BufRead, BufReader};
    let mut child: Child = Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", "half_a_restore", "--ignored", "--nocapture"])
        .env(CUT_OFF, target)
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert!(lines.any(|line| line.expect("reads").contains("half way")));
    child.kill().expect("kills");
    child.wait().expect("ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_that_is_killed_leaves_nothing_that_opens() {
    let places = Places::new();
    let (fresh, occupied, schema) = (places.directory("fresh"), places.directory("occupied"), Place::schema());
    for place in [&occupied, &schema] {
        let store = place.open().await.expect("opens");
        store.commit(Change::new().put(key(Kind::Pool, "mine"), "x")).await.expect("no guards");
    }
    let Place::Schema(settings) = &schema else { unreachable!("made above") };
    for target in [places.path("fresh"), places.path("occupied")] {
        kill_half_way(&target.display().to_string());
    }
    kill_half_way(&format!("{} {}", server().url(), settings.schema));

    assert!(!places.path("fresh").exists());
    for half in ["fresh.restoring", "occupied.restoring"] {
        assert!(places.path(half).join("records").exists(), "it was half way");
        let refused = places.directory(half).open().await.map(drop).expect_err("half a store");
        assert!(refused.contains("restore not finished"), "{refused}");
        assert!(places.directory(half).contents().await.is_err());
    }
    for place in [&occupied, &schema] {
        let store = place.open().await.expect("what was there is there");
        // The server may still be busy with what the dead process sent; it is done when a commit gets its turn.
        store.commit(Change::new()).await.expect("has its turn");
        let actors = store.list(&Prefix::all(Kind::Actor), None, 1).await.expect("reads").records;
        assert!(actors.is_empty() && store.get(&key(Kind::Pool, "mine")).await.expect("reads").is_some());
    }
    // One that was killed right after it took the place of what was there is not what the next one removes.
    let aside = places.directory("occupied");
    fs::rename(places.path("occupied.restoring"), places.path("half")).expect("renames");
    fs::rename(places.path("occupied"), places.path("occupied.restoring")).expect("renames");
    aside.load(IfOccupied::Refuse, Revision(1), stream::empty().boxed()).await.expect("loads");
    let kept = fs::read_dir(places.directory.path()).expect("lists").map(|entry| entry.expect("an entry").path());
    let mut kept = kept.filter(|path| path.display().to_string().contains("occupied.replaced-"));
    let occupied = Place::Directory(kept.next().expect("what was there is kept"));
    // And the next restore is not disturbed by the rest.
    let file = places.path("backup");
    back_up(&occupied, &file).await;
    restore(&file, &fresh).await.expect("restores");
    assert!(!places.path("fresh.restoring").exists());
    assert_eq!(fresh.everything().await, occupied.everything().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_taken_back_is_gone() {
    let places = Places::new();
    for target in [places.directory("target"), Place::schema()] {
        let record =
            |name: &str| Record { key: key(Kind::Actor, name), version: 3, revision: Revision(2), value: "x".into() };
        let written = [
            Mutation::Put(record("a")),
            Mutation::Put(record("b")),
            Mutation::Deleted(key(Kind::Actor, "a")),
            Mutation::Deleted(key(Kind::Actor, "never")),
        ];
        let mutations = stream::iter(written.map(Ok)).boxed();
        target.load(IfOccupied::Refuse, Revision(1 << 50), mutations).await.expect("loads");
        assert_eq!(target.everything().await, (Revision(1 << 50), vec![record("b")]));
        // Whoever watched before the restore begins anew.
        let store = target.open().await.expect("opens");
        let watched = store.watch(&[Prefix::all(Kind::Actor)], Revision(5)).await.map(drop);
        assert!(matches!(watched, Err(ate_store::WatchError::Compacted { .. })), "{watched:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_program_of_this_kind_wrote_is_shown_and_not_backed_up() {
    let places = Places::new();
    let schema = Place::schema();
    let store = schema.open().await.expect("opens");
    store.commit(Change::new().put(key(Kind::Actor, "a"), "x")).await.expect("no guards");
    let Place::Schema(settings) = &schema else { unreachable!("made above") };
    server().sql(&format!(
        "INSERT INTO {}.records VALUES ('gateway', 'x', 1, 1, ''), ('actor', 'b//c', 1, 1, '')",
        settings.schema
    ));
    let contents = schema.contents().await.expect("opens");
    let entries: Vec<_> = contents.entries.map(|entry| entry.expect("reads")).collect().await;
    let foreign = entries.iter().filter_map(|entry| match entry {
        Entry::Foreign { key, .. } => Some(key.as_str()),
        Entry::Record(_) => None,
    });
    assert_eq!(foreign.collect::<Vec<_>>(), ["actor/b//c", "gateway/x"]);
    let contents = schema.contents().await.expect("opens");
    let refused = save(&places.path("backup"), contents, time(), "a test", |_| {}).await.expect_err("not all is known");
    assert!(refused.to_string().contains("actor/b//c"), "{refused}");
    assert!(!places.path("backup").exists());
}

/// What is left of a store that forgot what it acknowledged: refused, unless somebody says that they know.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_tail_is_refused_and_what_is_left_can_be_saved() {
    let places = Places::new();
    let place = places.directory("store");
    let store = place.open().await.expect("opens");
    store.commit(Change::new().put(key(Kind::Actor, "a"), "x")).await.expect("no guards");
    drop(store);
    fs::write(places.path("store").join("MARK"), [7_u64.to_le_bytes(); 2].concat()).expect("writes");
    for refused in [
        place.open().await.map(drop).expect_err("six are lost"),
        place.contents().await.map(drop).expect_err("six are lost"),
    ] {
        assert!(refused.contains("cannot open the store in"), "{refused}");
    }
    let reason = match ate_store_embedded::contents(&places.path("store"), LostTail::Refuse).await {
        Err(OpenError::Fault { source, .. }) => source.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(reason.contains("revision 7 was acknowledged, but only 1 is left"), "{reason}");
    assert!(reason.contains("`ate store backup --accept-loss` and restore that"), "{reason}");
    let left = ate_store_embedded::contents(&places.path("store"), LostTail::Accept).await.expect("asked for");
    assert_eq!((left.revision, left.lost), (Revision(1), Some(Revision(7))));
    let file = places.path("backup");
    save(&file, left, time(), "a test", |_| {}).await.expect("saves");
    let restored = places.directory("restored");
    restore(&file, &restored).await.expect("restores");
    assert_eq!(restored.everything().await.1.len(), 1);
    assert!(place.open().await.is_err(), "it is refused still");
}
