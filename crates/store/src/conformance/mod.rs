//! One suite for every adapter. Each function is one promise of the port; an adapter's tests name its [`Subject`]
//! and get one test per promise:
//!
//! ```ignore
//! ate_store::conformance_tests!(MySubject::new());
//! ```
//!
//! The crash test needs a process to kill, so an adapter that persists calls [`crash`] from a test of its own.

mod concurrency;
pub mod crash;
mod lists;
mod records;
mod watches;

use std::sync::Arc;

use async_trait::async_trait;

use crate::{Change, FeedLimits, Key, Kind, Prefix, Record, Store};

pub use concurrency::*;
pub use lists::*;
pub use records::*;
pub use watches::*;

/// Where the suite gets stores of the adapter under test.
#[async_trait]
pub trait Subject: Send + Sync {
    /// A new, empty store.
    async fn open(&self, feed: FeedLimits) -> Arc<dyn Store>;

    /// Closes the store and opens it again from what it kept; `None` if it keeps nothing.
    async fn reopen(&self, store: Arc<dyn Store>) -> Option<Arc<dyn Store>>;

    /// Forgets commits that the feed no longer holds, where an adapter keeps them elsewhere.
    async fn forget(&self, _store: &dyn Store) {}
}

/// Makes one test per promise. The expression gives a fresh [`Subject`] each time.
#[macro_export]
macro_rules! conformance_tests {
    ($subject:expr) => {
        $crate::conformance_tests! { $subject;
            a_record_counts_its_writes_and_names_its_commit
            a_record_created_again_starts_at_version_one
            each_guard_refuses_exactly_what_it_names
            a_refused_change_writes_nothing
            guards_are_judged_before_the_writes
            an_unchanged_guard_is_not_fooled_by_a_namesake
            a_change_without_writes_only_checks
            a_change_beyond_the_limits_is_refused
            deleting_what_is_absent_is_no_error_and_no_event
            kinds_do_not_mix
            what_was_committed_is_there_after_reopening
            lists_are_ordered_by_path_within_their_prefix
            paging_visits_each_stable_record_once_while_others_come_and_go
            a_page_is_bounded_by_records_and_by_bytes
            a_watch_shows_each_commit_once_whole_and_in_order
            a_watch_resumes_after_any_revision_still_kept
            a_list_and_a_watch_from_its_revision_miss_nothing
            a_watch_from_too_long_ago_is_refused
            a_watch_from_the_future_is_refused
            a_watch_of_a_quiet_prefix_survives_a_busy_neighbour
            a_slow_watcher_is_ended_and_holds_up_nobody
            a_watch_ends_with_its_store
            concurrent_increments_lose_no_update
            what_is_added_at_once_adds_up_and_never_passes_its_limit
            a_number_is_added_to_from_where_it_is_or_from_where_it_should_be
            concurrent_binds_never_share_a_worker
            a_dropped_commit_happens_whole_or_not_at_all
        }
    };
    ($subject:expr; $($promise:ident)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $promise() {
                $crate::conformance::$promise(&$subject).await;
            }
        )+
    };
}

pub(crate) fn key(kind: Kind, path: &str) -> Key {
    Key::parse(kind, path).expect("the suite's keys are well formed")
}

pub(crate) fn actor(path: &str) -> Key {
    key(Kind::Actor, path)
}

pub(crate) fn below(segment: &str) -> Prefix {
    Prefix::below(Kind::Actor, [segment]).expect("the suite's prefixes are well formed")
}

pub(crate) fn actors() -> Prefix {
    Prefix::all(Kind::Actor)
}

pub(crate) async fn put(store: &dyn Store, path: &str, value: &str) -> Record {
    let change = Change::new().put(actor(path), value.to_owned());
    store.commit(change).await.expect("a put without guards is accepted");
    get(store, path).await.expect("a put is read back")
}

pub(crate) async fn get(store: &dyn Store, path: &str) -> Option<Record> {
    store.get(&actor(path)).await.expect("reads")
}

pub(crate) fn paths(records: &[Record]) -> Vec<&str> {
    records.iter().map(|record| record.key.path()).collect()
}
