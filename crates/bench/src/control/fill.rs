//! Millions of suspended actors, written as fast as a store takes them.

use std::pin::pin;

use ate_store::{Change, Key, MAX_CHANGE_ITEMS, Store};
use ate_store_postgres::Schema;
use futures::{StreamExt, TryStreamExt, stream};
use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, NoTls};

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

pub(crate) async fn checkpoint(url: &str) -> Result<(), BenchError> {
    connect(url).await?.batch_execute("CHECKPOINT").await.map_err(failed)
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

async fn connect(url: &str) -> Result<Client, BenchError> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.map_err(failed)?;
    // Ends with the client.
    tokio::spawn(connection);
    Ok(client)
}

/// With the server's own words, which the error itself keeps to its source.
fn failed(error: tokio_postgres::Error) -> BenchError {
    let said = error.as_db_error().map_or_else(|| error.to_string(), |said| said.message().to_owned());
    BenchError::refused("work on the database", said)
}
