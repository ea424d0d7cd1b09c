use ate_store::{Fault, Key, MAX_PAGE_RECORDS, MAX_PATH, Page, PageFiller, Prefix, Record, Revision};
use bytes::Bytes;
use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime, Timeouts};
use tokio::time::{Instant, timeout_at};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use crate::Settings;
use crate::error::{Trouble, column, corrupt, signed, unsigned};
use crate::layout::Statements;
use crate::session::{CONNECT, Connector, Pause};

/// Commits of the log that are asked for at once: many for one exchange, few enough not to hold up other reads.
const LOG_BATCH: u64 = 500;

/// Reads go to the server that takes writes: only that one has every commit that was acknowledged.
#[derive(Clone, Debug)]
pub(crate) struct Reads {
    pool: Pool,
    patience: std::time::Duration,
}

/// Where the paths of a prefix begin and end, both exclusive: the border itself ends with '/', which no path does.
pub(crate) fn range(prefix: &Prefix) -> (String, String) {
    let end = match prefix.path().strip_suffix('/') {
        // '0' follows '/'.
        Some(segments) => format!("{segments}0"),
        // No path of the allowed length sorts behind this.
        None => char::MAX.to_string().repeat(MAX_PATH / char::MAX.len_utf8() + 1),
    };
    (prefix.path().to_owned(), end)
}

/// The columns version, revision and value, from `first` on.
pub(crate) fn record(key: Key, row: &Row, first: usize) -> Result<Record, Fault> {
    let version = unsigned(row, first)?;
    let revision = Revision(unsigned(row, first + 1)?);
    Ok(Record { key, version, revision, value: Bytes::copy_from_slice(column(row, first + 2)?) })
}

impl Reads {
    pub(crate) fn new(settings: &Settings, connector: Connector) -> Self {
        // Whether a connection still works shows when it is used; then another is taken.
        let config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = Manager::from_connect((*settings.address.config).clone(), connector, config);
        let timeouts = Timeouts { wait: None, create: Some(CONNECT), recycle: None };
        let pool = Pool::builder(manager).max_size(settings.pool.max(1)).timeouts(timeouts).runtime(Runtime::Tokio1);
        Self { pool: pool.build().expect("a runtime for the timeouts is named"), patience: settings.patience }
    }

    pub(crate) fn close(&self) {
        self.pool.close();
    }

    pub(crate) async fn get(&self, statements: &Statements, key: &Key) -> Result<Option<Record>, Fault> {
        let rows = self.query(&statements.get, &[&key.kind().name(), &key.path()]).await?;
        rows.first().map(|row| record(key.clone(), row, 0)).transpose()
    }

    pub(crate) async fn list(
        &self,
        statements: &Statements,
        prefix: &Prefix,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page, Fault> {
        let (border, end) = range(prefix);
        let start = after.map_or(&*border, |after| after.max(&border));
        let limit = limit.clamp(1, MAX_PAGE_RECORDS);
        // One more than the page takes, to know whether more follows.
        let rows = i64::try_from(limit + 1).expect("clamped");
        let rows = self.query(&statements.list, &[&prefix.kind().name(), &start, &end, &rows]).await?;
        let revision = unsigned(rows.first().ok_or_else(|| corrupt("an empty head"))?, 0)?;
        let mut filler = PageFiller::new(Revision(revision), limit);
        for row in &rows {
            // The head stands alone if there is no record to go with it.
            let Some(path) = column::<Option<&str>>(row, 1)? else { break };
            let key = Key::parse(prefix.kind(), path).map_err(|_| corrupt(&format!("the path {path:?}")))?;
            if !filler.push(record(key, row, 2)?) {
                break;
            }
        }
        Ok(filler.page())
    }

    pub(crate) async fn revision(&self, statements: &Statements) -> Result<Revision, Fault> {
        let rows = self.query(&statements.head, &[]).await?;
        let head = rows.first().ok_or_else(|| corrupt("an empty head"))?;
        Ok(Revision(unsigned(head, 1)?))
    }

    /// The next commits of the log after one revision, up to another; none if there are none, or they are no longer kept.
    pub(crate) async fn log(
        &self,
        statements: &Statements,
        after: Revision,
        upto: Revision,
    ) -> Result<Vec<Row>, Fault> {
        self.query(&statements.past, &[&signed(after.0), &signed(upto.0), &signed(LOG_BATCH)]).await
    }

    /// Asks again over another connection while that may help and patience lasts: a read can be repeated.
    async fn query(&self, statement: &str, parameters: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, Fault> {
        let deadline = Instant::now() + self.patience;
        let mut pause = Pause::default();
        loop {
            match self.attempt(deadline, statement, parameters).await {
                Err(trouble) if trouble.is_passing() && Instant::now() < deadline => pause.wait().await,
                other => return Ok(other?),
            }
        }
    }

    async fn attempt(
        &self,
        deadline: Instant,
        statement: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, Trouble> {
        let silent = |_| Trouble::Silent(self.patience);
        let client = timeout_at(deadline, self.pool.get()).await.map_err(silent)??;
        let asked = timeout_at(deadline, async {
            let statement = client.prepare_cached(statement).await?;
            client.query(&statement, parameters).await
        });
        match asked.await {
            Ok(answered) => Ok(answered?),
            Err(late) => {
                // The next one would wait behind the answer that this one did not get.
                drop(Object::take(client));
                Err(silent(late))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ate_store::Kind;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_range_holds_exactly_the_paths_of_its_prefix(
            segments in prop::collection::vec("[!-.0-~\u{10FFFF}]{1,3}", 0..3),
            path in "[!-~\u{10FFFF}]{1,9}",
        ) {
            let Ok(key) = Key::parse(Kind::Actor, &path) else { return Ok(()) };
            let prefix = Prefix::below(Kind::Actor, &segments).expect("well formed");
            let (low, high) = range(&prefix);
            prop_assert_eq!(low.as_str() < key.path() && key.path() < high.as_str(), prefix.contains(&key));
        }
    }
}
