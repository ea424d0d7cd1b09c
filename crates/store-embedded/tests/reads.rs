//! Reads of single records share threads; everybody is answered all the same.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use ate_store::{Change, FeedLimits, Key, Kind, Store};
use ate_store_embedded::EmbeddedStore;
use futures::future::join_all;
use tokio::runtime::Builder;

const RECORDS: usize = 100;

/// A read that is not answered by then never will be.
const PATIENCE: Duration = Duration::from_secs(60);

fn key(number: usize) -> Key {
    Key::new(Kind::Actor, ["demo".to_owned(), format!("a{number}")]).expect("plain names")
}

async fn fill(store: &EmbeddedStore) {
    let change = (0..RECORDS).fold(Change::new(), |change, number| change.put(key(number), number.to_string()));
    store.commit(change).await.expect("it is empty");
}

/// Each reads its own record, and one that is not there.
async fn read_all(store: &EmbeddedStore, readers: usize) {
    let reads = (0..readers).map(async |reader| {
        let number = reader % RECORDS;
        let record = store.get(&key(number)).await.expect("it is readable").expect("it is there");
        assert_eq!((record.key, &record.value[..]), (key(number), number.to_string().as_bytes()));
        assert_eq!(store.get(&key(RECORDS + number)).await, Ok(None));
    });
    join_all(reads).await;
}

#[test]
fn everybody_who_reads_at_once_gets_their_own_record() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let store = EmbeddedStore::open(&directory.path().join("store"), FeedLimits::default()).expect("opens");
    let runtime = Builder::new_multi_thread().worker_threads(2).build().expect("starts");
    runtime.block_on(async {
        fill(&store).await;
        read_all(&store, 5000).await;
    });
}

#[test]
fn a_runtime_that_ends_in_the_middle_of_a_read_keeps_no_other_from_reading() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let store = Arc::new(EmbeddedStore::open(&directory.path().join("store"), FeedLimits::default()).expect("opens"));
    let other = Builder::new_current_thread().enable_time().build().expect("starts");
    other.block_on(fill(&store));

    let ending = Builder::new_current_thread().max_blocking_threads(1).build().expect("starts");
    let (finish, finished) = mpsc::channel::<()>();
    // Its only thread is busy, so the read never begins.
    ending.spawn_blocking(move || finished.recv());
    let reading = Arc::clone(&store);
    ending.block_on(async move {
        let read = key(0);
        let mut read = std::pin::pin!(reading.get(&read));
        assert!(futures::poll!(&mut read).is_pending());
    });
    let (left, leaving) = mpsc::channel::<()>();
    ending.spawn_blocking(move || drop(left));
    ending.shutdown_background();
    drop(finish);
    // What waits behind the read is given up only after it.
    assert!(leaving.recv().is_err());
    other.block_on(async {
        tokio::time::timeout(PATIENCE, read_all(&store, 1)).await.expect("a read does not wait for who is gone");
    });
}
