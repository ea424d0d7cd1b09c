//! A store's directory that was changed for another behind everybody's back is noticed, and only that.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ate_store::{Change, Fault, FeedLimits, IfOccupied, Key, Kind, LostTail, Replacement, Revision, Store};
use ate_store_embedded::{EmbeddedStore, LoadError, Loaded, OpenError, contents, load};
use futures::{StreamExt, stream};
use tempfile::TempDir;

struct Home(TempDir);

impl Home {
    fn new() -> Self {
        Self(TempDir::new().expect("a temporary directory"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn open(&self) -> Result<EmbeddedStore, OpenError> {
        EmbeddedStore::open(&self.path("store"), FeedLimits::default())
    }

    /// Opens the store, commits so many times, and closes it.
    async fn commit(&self, times: usize) {
        let store = self.open().expect("nothing speaks against it");
        for _ in 0..times {
            store.commit(Change::new().put(key(), "x")).await.expect("no guards");
        }
    }

    /// The store of another time, in the place of what is there.
    fn put_back(&self, from: &str) {
        let (from, store) = (self.path(from), self.path("store"));
        let _ = fs::remove_dir_all(&store);
        copy(&from, &store);
    }

    async fn restore(&self, occupied: IfOccupied) -> (Loaded, Revision) {
        let (tell, told) = tokio::sync::oneshot::channel();
        let store = self.path("store");
        let loaded = load(&store, occupied, |there| {
            let _ = tell.send(there);
            Replacement { revision: Revision(there.0 + 1000), mutations: stream::empty().boxed() }
        });
        (loaded.await.expect("restores"), told.await.expect("is told"))
    }

    /// By whoever opens it to serve from it, and by whoever only reads; what is there can be saved if somebody says that they know.
    async fn assert_refused(&self, seen: u64, found: u64) {
        let opened = self.open().map(drop).expect_err("it is not the one that was here");
        let read = contents(&self.path("store"), LostTail::Refuse).await.map(drop).expect_err("nor here");
        for refused in [opened, read] {
            assert!(
                matches!(&refused, OpenError::Another { seen: Revision(at), found: Revision(there), .. } if (*at, *there) == (seen, found)),
                "{refused}"
            );
            let told = refused.to_string();
            assert!(told.contains(&format!("at revision {found},")) && told.contains("store.mark"), "{told}");
        }
        let left = contents(&self.path("store"), LostTail::Accept).await.expect("asked for");
        assert_eq!((left.revision, left.lost), (Revision(found), (seen > found).then_some(Revision(seen))));
    }
}

fn key() -> Key {
    Key::new(Kind::Actor, ["a"]).expect("well formed")
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status().expect("is installed");
    assert!(copied.success(), "{} could not be copied", from.display());
}

#[tokio::test]
async fn an_older_copy_that_is_put_back_is_refused() {
    let home = Home::new();
    home.commit(3).await;
    copy(&home.path("store"), &home.path("older"));
    home.commit(2).await;
    home.put_back("older");
    home.assert_refused(5, 3).await;
    home.assert_refused(5, 3).await;
}

/// As a snapshot of the file system that was taken under a running store.
#[tokio::test]
async fn a_copy_of_the_very_same_opening_is_refused_by_what_was_acknowledged_since() {
    let home = Home::new();
    let store = home.open().expect("creates");
    store.commit(Change::new().put(key(), "x")).await.expect("no guards");
    copy(&home.path("store"), &home.path("older"));
    store.commit(Change::new().put(key(), "y")).await.expect("no guards");
    drop(store);
    home.put_back("older");
    home.assert_refused(2, 1).await;
}

/// By its number it has more than was ever seen here.
#[tokio::test]
async fn a_copy_that_was_gone_on_with_elsewhere_is_refused() {
    let (home, elsewhere) = (Home::new(), Home::new());
    home.commit(1).await;
    copy(&home.path("store"), &elsewhere.path("store"));
    home.commit(2).await;
    elsewhere.commit(9).await;
    copy(&elsewhere.path("store"), &home.path("foreign"));
    home.put_back("foreign");
    home.assert_refused(3, 10).await;
}

#[tokio::test]
async fn what_was_replaced_by_a_restore_is_refused_when_it_is_put_back() {
    let home = Home::new();
    home.commit(3).await;
    let (loaded, _) = home.restore(IfOccupied::Replace).await;
    let aside = loaded.moved_aside.expect("what was there is kept");
    home.commit(1).await;
    fs::remove_dir_all(home.path("store")).expect("removes");
    fs::rename(aside, home.path("store")).expect("renames");
    home.assert_refused(1004, 3).await;
}

#[tokio::test]
async fn a_restore_goes_on_past_what_was_seen_whatever_is_there_now() {
    let home = Home::new();
    home.commit(3).await;
    copy(&home.path("store"), &home.path("older"));
    home.commit(4).await;
    home.put_back("older");
    let (_, there) = home.restore(IfOccupied::Replace).await;
    assert_eq!(there, Revision(7), "not only what the copy knows of");
    home.commit(1).await;
    fs::remove_dir_all(home.path("store")).expect("removes");
    let (_, there) = home.restore(IfOccupied::Refuse).await;
    assert_eq!(there, Revision(1008), "nor nothing");
    home.commit(1).await;
}

#[tokio::test]
async fn a_store_that_is_gone_is_not_begun_anew() {
    let home = Home::new();
    home.commit(2).await;
    fs::rename(home.path("store"), home.path("away")).expect("renames");
    let refused = home.open().map(drop).expect_err("there was one");
    assert!(matches!(refused, OpenError::Gone { seen: Revision(2), .. }), "{refused}");
    assert!(!home.path("store").exists(), "nothing is made that could be taken for one");
    fs::rename(home.path("away"), home.path("store")).expect("renames");
    home.commit(1).await;
}

#[tokio::test]
async fn a_store_from_before_there_were_marks_is_taken_as_it_is() {
    let home = Home::new();
    home.commit(2).await;
    fs::remove_file(home.path("store.mark")).expect("removes");
    fs::remove_file(home.path("store/LINE")).expect("removes");
    copy(&home.path("store"), &home.path("older"));
    home.commit(1).await;
    home.commit(1).await;
    home.put_back("older");
    home.assert_refused(4, 2).await;
}

#[tokio::test]
async fn a_whole_that_is_put_back_with_its_mark_agrees_with_itself() {
    let home = Home::new();
    home.commit(2).await;
    copy(&home.path("store"), &home.path("older"));
    copy(&home.path("store.mark"), &home.path("older.mark"));
    home.commit(1).await;
    home.put_back("older");
    fs::copy(home.path("older.mark"), home.path("store.mark")).expect("copies");
    home.commit(1).await;
}

/// Cut off at any step of an opening or of a restore, what was the store before is still, or what is to be is.
#[tokio::test]
async fn a_process_that_is_killed_while_it_says_which_store_it_is_leaves_one_that_opens() {
    let home = Home::new();
    home.commit(2).await;
    let said = |revision: u64, line: &str, before: &str| {
        fs::write(home.path("store.mark"), format!("{revision:020} {line} {before}\n")).expect("writes");
    };
    let line = || fs::read_to_string(home.path("store/LINE")).expect("reads").trim().to_owned();
    let other = "6f1c8f0e-52a4-4b8e-9a55-0c7d2d6b7a11";
    // Said outside, and not yet inside.
    said(2, other, &line());
    home.commit(1).await;
    // Also inside.
    said(3, &line(), other);
    home.commit(1).await;
    // What was being written when the power was cut says nothing.
    fs::write(home.path("store/LINE"), "").expect("writes");
    home.commit(1).await;
    // A restore that was about to put another in its place.
    said(5, other, &line());
    home.commit(1).await;
    said(6, other, other);
    home.assert_refused(6, 6).await;
}

#[tokio::test]
async fn whichever_way_leads_to_a_store_its_mark_is_the_same() {
    let home = Home::new();
    fs::create_dir(home.path("disk")).expect("creates");
    fs::create_dir(home.path("disk/real")).expect("creates");
    std::os::unix::fs::symlink(home.path("disk/real"), home.path("store")).expect("links");
    home.commit(1).await;
    assert!(home.path("disk/real.mark").exists() && !home.path("store.mark").exists());
    drop(EmbeddedStore::open(&home.path("disk/real"), FeedLimits::default()).expect("it is the same"));
    home.commit(1).await;
    home.restore(IfOccupied::Replace).await;
    assert!(home.path("store").is_symlink(), "the store is replaced, not the way to it");
    home.commit(1).await;
}

#[tokio::test]
async fn a_restore_that_fails_changes_nothing() {
    let home = Home::new();
    home.commit(2).await;
    let store = home.path("store");
    let failing = load(&store, IfOccupied::Replace, |_| Replacement {
        revision: Revision(9),
        mutations: stream::once(async { Err("the file is gone".into()) }).boxed(),
    });
    let failed = failing.await.expect_err("a part is not all");
    assert!(matches!(failed, LoadError::Source(_)), "{failed}");
    home.commit(1).await;
    assert!(matches!(home.open().expect("opens").revision().await, Ok::<_, Fault>(Revision(3))));
}
