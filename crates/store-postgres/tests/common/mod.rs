//! One server for the tests of a file, and a schema for each store.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use ate_store::{Revision, Store};
use ate_store_postgres::{PostgresStore, Schema, Settings};
use ate_testkit_postgres::Server;

/// Lives until the test process ends, in whatever way.
pub(crate) fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(Server::default)
}

pub(crate) fn new_schema() -> Schema {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed)).parse().expect("plain")
}

pub(crate) fn settings(server: &Server, schema: &Schema) -> Settings {
    let address = server.url().parse().expect("well formed");
    // One connection less than there could be at once, so that reads wait for each other too.
    Settings { schema: schema.clone(), pool: 4, ..Settings::new(address) }
}

pub(crate) async fn connect(settings: Settings) -> PostgresStore {
    PostgresStore::connect(settings).await.expect("connects")
}

/// Removes the log when every replica has seen it: `replicas` calls go to all of them in turn.
#[allow(dead_code, reason = "not every file of tests has a use for it")]
pub(crate) async fn forget_the_log(store: &dyn Store, schema: &Schema, replicas: usize) {
    let current: Revision = store.revision().await.expect("reads");
    for _ in 0..replicas {
        drop(store.watch(&[], current).await.expect("waits until it has seen that"));
    }
    server().sql(&format!("DELETE FROM {schema}.log"));
}
