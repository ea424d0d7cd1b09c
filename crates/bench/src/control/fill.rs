//! Millions of suspended actors, written as fast as a store takes them.

use std::pin::pin;

use ate_store::{Change, Key, MAX_CHANGE_ITEMS, Store};
use ate_store_postgres::{Address, Schema};
use futures::{StreamExt, TryStreamExt, stream};
use tokio_postgres::Client;
use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::shape::{Cast, KINDS, Shape};
use crate::BenchError;

/// Changes under way at once: a flush is shared by that many.
const AT_ONCE: usize = 32;

/// Through the port, as any other commit.
pub(crate) async fn through_port(store: &dyn Store, shape: &Shape, actors: u32) -> Result<(), BenchError> {
    let failed = |error: ate_store::CommitError| BenchError::refused("fill the store", error);
    for kind in KINDS {
        let mut records = shape.cast(kind, 1..actors).peekable();
        let changes = std::iter::from_fn(|| {
            records.peek()?;
            let change =
                records.by_ref().take(MAX_CHANGE_ITEMS).fold(Change::new(), |change, Cast { path, value, .. }| {
                    change.put(Key::parse(kind, &path).expect("cast from a key"), value)
                });
            Some(store.commit(change))
        });
        stream::iter(changes).buffer_unordered(AT_ONCE).map_err(failed).try_for_each(|_| async { Ok(()) }).await?;
    }
    Ok(())
}

/// Straight into the table, past the port: through it each record would stand in the log a second time. Nobody may have the
/// store open meanwhile. The records bear the revision that the store is at, which they could have.
pub(crate) async fn by_copy(url: &str, schema: &Schema, shape: &Shape, actors: u32) -> Result<(), BenchError> {
    let client = connect(url).await?;
    let head = client.query_one(&format!("SELECT revision FROM \"{schema}\".head"), &[]).await.map_err(failed)?;
    let revision: i64 = head.try_get(0).map_err(failed)?;
    let into = format!("COPY \"{schema}\".records (kind, path, version, revision, value) FROM STDIN (FORMAT binary)");
    for kind in KINDS {
        let sink = client.copy_in(&into).await.map_err(failed)?;
        let types = [Type::TEXT, Type::TEXT, Type::INT8, Type::INT8, Type::BYTEA];
        let mut writer = pin!(BinaryCopyInWriter::new(sink, &types));
        for Cast { kind, path, value } in shape.cast(kind, 1..actors) {
            writer.as_mut().write(&[&kind.name(), &path, &1i64, &revision, &value]).await.map_err(failed)?;
        }
        writer.finish().await.map_err(failed)?;
    }
    // What the server would do in its own time, and that would be while something is measured.
    client.batch_execute(&format!("VACUUM (FREEZE, ANALYZE) \"{schema}\".records")).await.map_err(failed)
}

/// Whether it could be made: not everybody may.
pub(crate) async fn checkpoint(url: &str) -> Result<bool, BenchError> {
    match connect(url).await?.batch_execute("CHECKPOINT").await {
        Ok(()) => Ok(true),
        Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Ok(false),
        Err(error) => Err(failed(error)),
    }
}

/// Reads the whole index, so that it is in the kernel's cache. Lists read what they show and its part of the index only.
pub(crate) async fn read_index(url: &str, schema: &str) -> Result<(), BenchError> {
    let count = format!("SET enable_seqscan = off; SELECT count(*) FROM \"{schema}\".records");
    connect(url).await?.batch_execute(&count).await.map_err(failed)
}

/// What the records of a schema take on the database's disk, their index included.
pub(crate) async fn table_bytes(url: &str, schema: &Schema) -> Result<u64, BenchError> {
    let ask = format!("SELECT pg_total_relation_size('\"{schema}\".records')");
    let answer = connect(url).await?.query_one(&ask, &[]).await.and_then(|row| row.try_get::<_, i64>(0));
    answer.map(|bytes| u64::try_from(bytes).unwrap_or(0)).map_err(failed)
}

pub(crate) async fn drop_schema(url: &str, schema: &str) -> Result<(), BenchError> {
    connect(url).await?.batch_execute(&format!("DROP SCHEMA IF EXISTS \"{schema}\" CASCADE")).await.map_err(failed)
}

/// Schemas that are gone with this value, however a run ends.
#[derive(Debug)]
pub(crate) struct Schemas {
    pub(crate) url: String,
    pub(crate) names: Vec<String>,
}

impl Drop for Schemas {
    fn drop(&mut self) {
        let (url, names) = (self.url.clone(), std::mem::take(&mut self.names));
        // On a thread of its own: a runtime that is being left can no longer wait for anything.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(BenchError::io("start"))?;
            runtime.block_on(async {
                for name in &names {
                    drop_schema(&url, name).await?;
                }
                Ok::<_, BenchError>(())
            })
        });
        if let Ok(Err(error)) = dropping.join() {
            eprintln!("schemas ate_bench_… are still in the database: {error}\n  drop them by hand");
        }
    }
}

/// As the store itself does, so that what is an address there is one here.
async fn connect(url: &str) -> Result<Client, BenchError> {
    let address: Address = url.parse().map_err(|error| BenchError::refused("read the database's address", error))?;
    let session = ate_store_postgres::session(&address, "bench").await;
    let client = session.map_err(|error| BenchError::refused("work on the database", error))?;
    // The time limits of a store are not for millions of records.
    client.batch_execute("RESET ALL").await.map_err(failed)?;
    Ok(client)
}

/// With the server's own words, which the error itself keeps to its source.
fn failed(error: tokio_postgres::Error) -> BenchError {
    let said = error.as_db_error().map_or_else(|| error.to_string(), |said| said.message().to_owned());
    BenchError::refused("work on the database", said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn schemas_are_dropped_with_what_stands_for_them() {
        let server = ate_testkit_postgres::Server::default();
        let names = ["ate_bench_1", "ate_bench_2"].map(str::to_owned);
        for name in &names {
            server.sql(&format!("CREATE SCHEMA {name} CREATE TABLE records (one int)"));
        }
        server.sql("CREATE SCHEMA ate_bench_3");
        drop(Schemas { url: server.url(), names: names.to_vec() });
        assert_eq!(server.sql("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'ate_%'"), "ate_bench_3");
    }
}
