use std::sync::Arc;
use std::time::Duration;

use ate_store::{Event, Fault, Key, Kind, Mutation, Record, Revision};
use bytes::Bytes;
use futures::{StreamExt, pin_mut};
use tokio::time::{MissedTickBehavior, interval};
use tokio_postgres::{Client, Row, Statement};

use crate::error::{Trouble, column, corrupt, signed, unsigned, within};
use crate::session::{EXCHANGE, Pause};
use crate::{Entry, Shared};

/// How often the follower looks without being told to. It is told of every commit, so this is for a notification that got
/// lost, and to find out that a connection is dead while nobody commits.
const POLL: Duration = Duration::from_secs(5);

/// Rows of the log that are asked for at once. They come one by one, so this bounds time, not memory.
const BATCH: u64 = 1000;

/// The log is kept for a replica that lost its connection, which comes back in seconds. One that was away for longer than
/// this, or behind by more than that many commits, does not get them one by one: its watchers list again.
const KEPT: Duration = Duration::from_secs(600);
const KEPT_COMMITS: u64 = 200_000;

/// Rows removed from the log in one go, so that each is a short transaction.
const FORGET: i64 = 2000;

/// Brings what other replicas commit to the feed, and removes what is too old from the log.
pub(crate) async fn follow(shared: Arc<Shared>) {
    let mut pause = Pause::default();
    loop {
        let trouble = match Follower::listen(&shared).await {
            Ok(follower) => {
                pause = Pause::default();
                follower.run().await
            }
            Err(trouble) => trouble,
        };
        if shared.check().is_err() {
            return;
        }
        tracing::debug!(fault = %Fault::from(trouble), "following the log again");
        pause.wait().await;
    }
}

struct Follower {
    shared: Arc<Shared>,
    client: Client,
    head: Statement,
    log: Statement,
    forget: Statement,
}

impl Follower {
    async fn listen(shared: &Arc<Shared>) -> Result<Self, Trouble> {
        let listener = {
            let shared = Arc::downgrade(shared);
            Box::new(move |notification: Option<tokio_postgres::Notification>| {
                let Some(shared) = shared.upgrade() else { return };
                // The writer brings its own commits to the feed, or says that it could not.
                if notification.is_none_or(|notification| !shared.is_writer(notification.process_id())) {
                    shared.news.notify_one();
                }
            })
        };
        let client = shared.connector.session("follower", listener).await?;
        let prepare = async {
            client.batch_execute(&format!("LISTEN \"{}\"", shared.settings.schema.channel())).await?;
            let statements = &shared.statements;
            let [head, log, forget] =
                [&statements.head, &statements.follow, &statements.forget].map(|statement| client.prepare(statement));
            futures::future::try_join3(head, log, forget).await
        };
        let (head, log, forget) = within(EXCHANGE, prepare).await?;
        within(EXCHANGE, shared.check_line(&client)).await?;
        Ok(Self { shared: shared.clone(), client, head, log, forget })
    }

    /// Ends with the connection, or with what is wrong in the database.
    async fn run(&self) -> Trouble {
        let mut poll = interval(POLL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let told = tokio::select! {
                () = self.shared.news.notified() => true,
                _ = poll.tick() => false,
            };
            let worked = async {
                self.catch_up().await?;
                if !told {
                    self.forget().await?;
                }
                Ok(())
            };
            if let Err(trouble) = worked.await {
                return trouble;
            }
        }
    }

    async fn catch_up(&self) -> Result<(), Trouble> {
        loop {
            let seen = self.shared.seen();
            let head = within(EXCHANGE, self.client.query_opt(&self.head, &[])).await?;
            let head = head.ok_or_else(|| Trouble::Wrong(corrupt("an empty head")))?;
            let head = self.shared.check_head(&head, seen)?;
            self.shared.saw(head);
            if self.shared.relay.seen() >= head {
                return Ok(());
            }
            within(EXCHANGE, self.show(head)).await?;
        }
    }

    /// Shows the next commits up to `head`, or skips those that the log no longer has.
    async fn show(&self, head: Revision) -> Result<(), Trouble> {
        let relay = &self.shared.relay;
        let mut seen = relay.seen();
        let parameters = [signed(seen.0), signed(head.0), signed(BATCH)];
        let rows = self.client.query_raw(&self.log, parameters).await?;
        pin_mut!(rows);
        let mut found = false;
        while let Some(row) = rows.next().await.transpose()? {
            found = true;
            let (entry, event) = match read_entry(&row) {
                Ok(read) => read,
                // Watchers end and list again, which does not need the log.
                Err(fault) => {
                    tracing::error!(address = %self.shared.settings.address, %fault, "the log is skipped");
                    relay.skip_to(head);
                    return Ok(());
                }
            };
            let before = Revision(entry.revision.0 - 1);
            if before > seen {
                relay.skip_to(before);
            }
            relay.publish(before, entry.revision, event.into_iter().collect());
            seen = entry.revision;
            self.shared.remember(entry);
        }
        if !found {
            relay.skip_to(head);
        }
        Ok(())
    }

    async fn forget(&self) -> Result<(), Trouble> {
        let floor = signed(self.shared.relay.seen().0.saturating_sub(KEPT_COMMITS));
        let age = KEPT.as_secs_f64();
        loop {
            let removed = within(EXCHANGE, self.client.execute(&self.forget, &[&FORGET, &floor, &age])).await?;
            if signed(removed) < FORGET {
                return Ok(());
            }
        }
    }
}

/// A row of the log; without an event if the commit changed nothing that this program knows.
pub(crate) fn read_entry(row: &Row) -> Result<(Entry, Option<Event>), Fault> {
    let entry = Entry { revision: Revision(unsigned(row, 0)?), entered: column(row, 5)? };
    let revision = entry.revision;
    if revision == Revision::ZERO {
        return Err(corrupt("revision 0 in the log"));
    }
    let Some(kinds) = column::<Option<Vec<&str>>>(row, 1)? else { return Ok((entry, None)) };
    let (paths, versions): (Vec<&str>, Vec<i64>) = (column(row, 2)?, column(row, 3)?);
    let contents: Vec<Option<&[u8]>> = column(row, 4)?;
    if [paths.len(), versions.len(), contents.len()] != [kinds.len(); 3] {
        return Err(corrupt(&format!("revision {revision} in the log")));
    }
    let mut mutations = Vec::with_capacity(kinds.len());
    for (((name, path), version), content) in kinds.into_iter().zip(paths).zip(versions).zip(contents) {
        // A newer replica may know kinds that nobody can watch here.
        let Some(kind) = Kind::named(name) else { continue };
        let key = Key::parse(kind, path).map_err(|_| corrupt(&format!("the path {path:?} in the log")))?;
        mutations.push(match content {
            Some(content) => {
                let version =
                    u64::try_from(version).map_err(|_| corrupt(&format!("the version {version} in the log")))?;
                Mutation::Put(Record { key, version, revision, value: Bytes::copy_from_slice(content) })
            }
            None => Mutation::Deleted(key),
        });
    }
    Ok((entry, (!mutations.is_empty()).then_some(Event { revision, mutations })))
}
