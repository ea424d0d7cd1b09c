//! How a store lies in a schema, and how a schema gets there.
//!
//! ```text
//!   head      one row: layout, revision              its lock is the line in which commits stand
//!   records   (kind, path) -> version, revision, value
//!   log       revision -> the mutations of that commit, without gaps, until they are removed at the old end
//! ```
//!
//! Layouts only go forward. `head.layout` is the one thing that every layout keeps, and every commit reads it: a program
//! that is older than a schema refuses to open it, and stops if the schema is moved on under its feet.

use std::fmt;
use std::str::FromStr;

use ate_store::MAX_PAGE_BYTES;
use tokio_postgres::{Client, Error};

use crate::session::seconds;

/// Longest name of a schema: the notification channel bears it too, with [`CHANNEL`] before it, and PostgreSQL cuts names
/// at 63 bytes.
const MAX_SCHEMA: usize = 48;

const CHANNEL: &str = "ate-store:";

/// How long replicas that start together wait for the one that moves the schema on.
const MIGRATION_PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

/// The steps from each layout to the next; `{schema}` stands for the quoted name. Never changed, only appended to.
const STEPS: &[&str] = &[r#"
CREATE TABLE {schema}.head (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    layout integer NOT NULL,
    revision bigint NOT NULL
) WITH (vacuum_truncate = off);
INSERT INTO {schema}.head (layout, revision) VALUES (0, 0);

CREATE TABLE {schema}.records (
    kind text COLLATE "C" NOT NULL,
    path text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    revision bigint NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (kind, path)
);

-- One row per commit; the arrays are null if it changed nothing, a content is null if the record was deleted.
-- Rows live for minutes: not worth compressing, nor a lock on the table to give its end back to the disk.
CREATE TABLE {schema}.log (
    revision bigint PRIMARY KEY,
    committed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    kinds text[],
    paths text[],
    versions bigint[],
    contents bytea[]
) WITH (toast_tuple_target = 8160, autovacuum_vacuum_scale_factor = 0.1, vacuum_truncate = off);
"#];

/// The layout that this program reads and writes.
#[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "there are not that many")]
pub(crate) const KNOWN_LAYOUT: i32 = STEPS.len() as i32;

/// The schema that holds a store, so that several can share a database: lower-case letters, digits and `_`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schema(String);

/// Why a text is not used as a schema's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{name:?} is no name for a schema: 1 to {MAX_SCHEMA} lower-case letters, digits and '_', not beginning with a digit or \"pg_\""
)]
pub struct SchemaError {
    name: String,
}

impl Default for Schema {
    fn default() -> Self {
        Self("ate".to_owned())
    }
}

impl FromStr for Schema {
    type Err = SchemaError;

    fn from_str(name: &str) -> Result<Self, SchemaError> {
        let plain = name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'));
        let begins = name.starts_with(|first: char| !first.is_ascii_digit()) && !name.starts_with("pg_");
        if plain && begins && name.len() <= MAX_SCHEMA {
            return Ok(Self(name.to_owned()));
        }
        Err(SchemaError { name: name.to_owned() })
    }
}

impl fmt::Display for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Schema {
    fn quoted(&self) -> String {
        format!("\"{}\"", self.0)
    }

    /// Where replicas tell each other that there is something new.
    pub(crate) fn channel(&self) -> String {
        format!("{CHANNEL}{}", self.0)
    }

    pub(crate) async fn layout(&self, client: &Client) -> Result<i32, Error> {
        // Not to_regclass: that looks into a cache which does not hear of what others did while this session waited.
        let exists = "SELECT FROM pg_tables WHERE schemaname = $1 AND tablename = 'head'";
        if client.query_opt(exists, &[&self.0]).await?.is_none() {
            return Ok(0);
        }
        let row = client.query_one(&format!("SELECT layout FROM {}.head", self.quoted()), &[]).await?;
        row.try_get(0)
    }

    /// Moves the schema on to the layout that this program knows, and tells which it found; one that is newer is left as
    /// it is. Replicas that start together do it once, under a lock of the schema's name.
    pub(crate) async fn move_on(&self, client: &mut Client) -> Result<i32, Error> {
        self.move_along(STEPS, client).await
    }

    async fn move_along(&self, steps: &[&str], client: &mut Client) -> Result<i32, Error> {
        let known = i32::try_from(steps.len()).expect("there are not that many");
        // Usually there is nothing to do, and then no more rights are needed than to read.
        let found = self.layout(client).await?;
        if found >= known {
            return Ok(found);
        }
        let transaction = client.transaction().await?;
        let patience = seconds(MIGRATION_PATIENCE);
        transaction
            .batch_execute(&format!(
                "SET LOCAL lock_timeout = '{patience}'; SET LOCAL statement_timeout = '{patience}'"
            ))
            .await?;
        let lock = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))";
        transaction.execute(lock, &[&self.channel()]).await?;
        let found = self.layout(transaction.client()).await?;
        if found == 0 {
            // Somebody who may not create schemas can still be given an empty one.
            let exists = transaction.query_opt("SELECT FROM pg_namespace WHERE nspname = $1", &[&self.0]).await?;
            if exists.is_none() {
                transaction.batch_execute(&format!("CREATE SCHEMA {}", self.quoted())).await?;
            }
        }
        for step in steps.iter().skip(usize::try_from(found).unwrap_or(0)) {
            transaction.batch_execute(&step.replace("{schema}", &self.quoted())).await?;
        }
        if found < known {
            let noted = format!("UPDATE {}.head SET layout = $1", self.quoted());
            transaction.execute(&noted, &[&known]).await?;
        }
        transaction.commit().await?;
        Ok(found.max(known))
    }
}

/// Every statement of the store, for one schema.
#[derive(Debug)]
pub(crate) struct Statements {
    /// Takes the turn to commit, and tells where the store is.
    pub(crate) lock: String,
    /// Versions and revisions of the records with these kinds and paths, by their position in the question.
    pub(crate) find: String,
    /// Positions of those ranges that hold no record.
    pub(crate) vacant: String,
    /// Everything a group writes; tells when its last commit was entered into the log.
    pub(crate) write: String,
    pub(crate) get: String,
    pub(crate) list: String,
    /// A page for whoever holds a snapshot and knows its revision. Without the head: every commit leaves an old version of its one
    /// row, which nothing removes while the snapshot is held, so that each look at it costs more than the one before.
    pub(crate) page: String,
    pub(crate) head: String,
    /// The log between two revisions.
    pub(crate) follow: String,
    /// The same for whoever takes it all at once: no more at a time than memory has room for.
    pub(crate) past: String,
    /// When a revision was entered into the log.
    pub(crate) entered: String,
    /// Removes the oldest rows of the log that are past a bound.
    pub(crate) forget: String,
    /// Keys whose kind is none of those given.
    pub(crate) foreign: String,
    pub(crate) counts: String,
    /// Empties the schema.
    pub(crate) clear: String,
    /// Records that were not there.
    pub(crate) load: String,
    pub(crate) unload: String,
    /// Ends a load: the commit line goes on from here.
    pub(crate) loaded: String,
}

impl Statements {
    pub(crate) fn new(schema: &Schema) -> Self {
        let with_schema = |text: &str| text.replace("{schema}", &schema.quoted());
        // A row goes over the wire only if the page still has room before the one in front of it, so that the end of a page of large
        // records is cheap.
        let page = "SELECT path, version, revision, value, coalesce(sum(octet_length(value)) OVER (
                ORDER BY path ROWS BETWEEN UNBOUNDED PRECEDING AND 2 PRECEDING), 0) AS before
            FROM (
                SELECT path, version, revision, value FROM {schema}.records
                WHERE kind = $1 AND path > $2 AND path < $3 ORDER BY path LIMIT $4
            ) AS bounded";
        Self {
            lock: with_schema("SELECT layout, revision FROM {schema}.head FOR UPDATE"),
            find: with_schema(
                "SELECT asked.position, record.version, record.revision,
                    CASE WHEN record.kind = 'count' THEN record.value END
                FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS asked(kind, path, position)
                JOIN {schema}.records AS record ON record.kind = asked.kind AND record.path = asked.path",
            ),
            // A subquery with a limit and not NOT EXISTS, which could become a join with everything there is.
            vacant: with_schema(
                "SELECT asked.position
                FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS asked(kind, low, high, position)
                WHERE (SELECT true FROM {schema}.records AS record
                    WHERE record.kind = asked.kind AND record.path > asked.low AND record.path < asked.high
                    LIMIT 1) IS NULL",
            ),
            write: with_schema(
                r#"WITH mutation AS MATERIALIZED (
                    SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::bytea[], $6::boolean[])
                        WITH ORDINALITY AS mutation(revision, kind, path, version, content, lasting, position)
                ), logged AS (
                    INSERT INTO {schema}.log (revision, kinds, paths, versions, contents)
                    SELECT revision, array_agg(kind ORDER BY position), array_agg(path ORDER BY position),
                        array_agg(version ORDER BY position), array_agg(content ORDER BY position)
                    FROM mutation GROUP BY revision
                    UNION ALL SELECT quiet, NULL, NULL, NULL, NULL FROM unnest($7::bigint[]) AS quiet
                    RETURNING revision, committed_at
                ), deleted AS (
                    DELETE FROM {schema}.records AS record USING mutation
                    WHERE mutation.lasting AND mutation.content IS NULL
                        AND record.kind = mutation.kind AND record.path = mutation.path
                ), put AS (
                    INSERT INTO {schema}.records (kind, path, version, revision, value)
                    SELECT kind, path, version, revision, content FROM mutation WHERE lasting AND content IS NOT NULL
                    ON CONFLICT (kind, path) DO UPDATE
                        SET version = excluded.version, revision = excluded.revision, value = excluded.value
                ), moved AS (
                    UPDATE {schema}.head SET revision = $8
                )
                SELECT committed_at, pg_notify($9, '') FROM logged WHERE revision = $8"#,
            ),
            get: with_schema("SELECT version, revision, value FROM {schema}.records WHERE kind = $1 AND path = $2"),
            // One statement and so one snapshot for the page and its revision.
            list: with_schema(&format!(
                "SELECT head.revision, page.path, page.version, page.revision, page.value
                FROM {{schema}}.head AS head LEFT JOIN ({page}) AS page ON page.before < {MAX_PAGE_BYTES}
                ORDER BY page.path"
            )),
            page: with_schema(&format!(
                "SELECT path, version, revision, value FROM ({page}) AS page WHERE before < {MAX_PAGE_BYTES} ORDER BY path"
            )),
            head: with_schema("SELECT layout, revision FROM {schema}.head"),
            follow: with_schema(
                "SELECT revision, kinds, paths, versions, contents, committed_at FROM {schema}.log
                WHERE revision > $1 AND revision <= $2 ORDER BY revision LIMIT $3",
            ),
            past: with_schema(&format!(
                "SELECT revision, kinds, paths, versions, contents, committed_at FROM (
                    SELECT *, coalesce(sum(pg_column_size(contents)) OVER (
                        ORDER BY revision ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
                    FROM (
                        SELECT * FROM {{schema}}.log WHERE revision > $1 AND revision <= $2 ORDER BY revision LIMIT $3
                    ) AS next
                ) AS bounded WHERE before < {MAX_PAGE_BYTES} ORDER BY revision"
            )),
            entered: with_schema("SELECT committed_at FROM {schema}.log WHERE revision = $1"),
            // From the old end up to one revision: replicas that do this at once lock the rows in the same order, and the
            // second finds nothing left to do.
            forget: with_schema(
                "DELETE FROM {schema}.log WHERE revision <= (
                    SELECT max(revision) FROM (
                        SELECT revision, committed_at FROM {schema}.log ORDER BY revision LIMIT $1
                    ) AS oldest
                    WHERE revision <= $2 OR committed_at < clock_timestamp() - make_interval(secs => $3)
                )",
            ),
            foreign: with_schema("SELECT kind, path FROM {schema}.records WHERE kind <> ALL ($1) ORDER BY kind, path"),
            counts: with_schema("SELECT kind, count(*) FROM {schema}.records GROUP BY kind"),
            // Not TRUNCATE: whoever still reads sees what was there until all of the new is.
            clear: with_schema("DELETE FROM {schema}.records; DELETE FROM {schema}.log"),
            load: with_schema(
                "INSERT INTO {schema}.records (kind, path, version, revision, value)
                SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bytea[])",
            ),
            unload: with_schema(
                "DELETE FROM {schema}.records AS record USING unnest($1::text[], $2::text[]) AS gone(kind, path)
                WHERE record.kind = gone.kind AND record.path = gone.path",
            ),
            loaded: with_schema("WITH moved AS (UPDATE {schema}.head SET revision = $1) SELECT pg_notify($2, '')"),
        }
    }
}

#[cfg(test)]
mod tests {
    use ate_testkit_postgres::Server;
    use futures::future::join_all;
    use tokio_postgres::NoTls;

    use super::*;

    async fn client(server: &Server) -> Client {
        let (client, connection) = tokio_postgres::connect(&server.url(), NoTls).await.expect("connects");
        tokio::spawn(connection);
        client
    }

    /// As a later program would, with replicas that start together.
    #[tokio::test]
    async fn a_store_of_an_older_layout_is_moved_on_once_with_all_it_holds() {
        let server = Server::default();
        let schema = Schema::default();
        assert_eq!(schema.move_on(&mut client(&server).await).await.expect("an empty database"), KNOWN_LAYOUT);
        server.sql("INSERT INTO ate.records VALUES ('actor', 'a', 3, 7, 'x'); UPDATE ate.head SET revision = 7");
        let next = "ALTER TABLE {schema}.records ADD COLUMN colour text NOT NULL DEFAULT 'red';
            ALTER TABLE {schema}.head ADD COLUMN moved integer NOT NULL DEFAULT 1";
        let broken = [STEPS, &[next, "SELECT nothing_of_that_name"]].concat();
        let steps = [STEPS, &[next]].concat();
        let layout = || server.sql("SELECT layout FROM ate.head");
        schema.move_along(&broken, &mut client(&server).await).await.expect_err("its last step cannot be done");
        assert_eq!(layout(), KNOWN_LAYOUT.to_string(), "all of the way, or nothing of it");
        let replicas = join_all((0..4).map(|_| client(&server))).await;
        let moved = join_all(replicas.into_iter().map(async |mut client| schema.move_along(&steps, &mut client).await));
        for found in moved.await {
            assert_eq!(found.expect("one moves it, the others wait"), KNOWN_LAYOUT + 1);
        }
        assert_eq!(layout(), (KNOWN_LAYOUT + 1).to_string());
        assert_eq!(server.sql("SELECT path, version, revision, colour FROM ate.records"), "a|3|7|red");
        assert_eq!(server.sql("SELECT revision, moved FROM ate.head"), "7|1");
        // This program does not know it, and leaves it as it is.
        let found = schema.move_on(&mut client(&server).await).await.expect("it is there");
        assert_eq!((found, layout()), (KNOWN_LAYOUT + 1, (KNOWN_LAYOUT + 1).to_string()));
    }

    #[test]
    fn only_plain_names_are_schemas() {
        let longest = "a".repeat(MAX_SCHEMA);
        for name in ["ate", "ate_2", "_", &longest] {
            assert_eq!(Schema::from_str(name).map(|schema| schema.to_string()), Ok(name.to_owned()));
        }
        let long = "a".repeat(MAX_SCHEMA + 1);
        for name in ["", "2", "Ate", "pg_ate", "a-b", "a\"b", "a.b", "é", "a b", &long] {
            let refused = Schema::from_str(name).expect_err("not plain").to_string();
            assert!(refused.contains(&format!("{name:?}")), "{refused}");
        }
    }
}
