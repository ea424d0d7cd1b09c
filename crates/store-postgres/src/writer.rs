use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use ate_store::{Fault, Group, Guard, Key, Mutation, Prefix, Record, Request, Revision, Stage, Verdict, View, Write};
use futures::future::{join, try_join4};
use tokio::time::Instant;
use tokio_postgres::{Client, Error, Row, Statement};

use crate::error::{Trouble, column, corrupt, signed, unsigned, within};
use crate::reads::range;
use crate::session::{CONNECT, EXCHANGE, Pause, check_server, deaf};
use crate::{Entry, Shared};

/// A group ends once its values pass this, which bounds how long it holds the lock: on a slow network the values are most
/// of that time. More than the largest change, so that a group of one always fits.
const GROUP_BYTES: usize = 8 << 20;

/// The one task that commits. It takes all that waits as a group; while the server flushes, the next one gathers.
pub(crate) struct Writer {
    shared: Arc<Shared>,
    session: Option<Session>,
}

/// A connection with everything prepared.
struct Session {
    client: Client,
    lock: Statement,
    find: Statement,
    vacant: Statement,
    write: Statement,
}

/// How a group failed.
enum Failure {
    /// Nothing was asked to be written: it may be tried again.
    Before(Trouble),
    /// It was sent, and may have happened.
    After(Trouble),
}

impl Writer {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, session: None }
    }

    pub(crate) async fn run(mut self) {
        let shared = self.shared.clone();
        let _closing = CloseOnExit(&shared);
        let mut waiting = VecDeque::new();
        loop {
            if waiting.is_empty() {
                // Lets those who were just answered come back with their next change. Otherwise the first of them would be a
                // group of its own, and the others wait for it.
                tokio::task::yield_now().await;
                let Some(requests) = shared.queue.take().await else { break };
                waiting.extend(requests);
            }
            let length = group_length(&waiting);
            let group: Vec<Request> = waiting.drain(..length).collect();
            match self.commit(&group).await {
                Ok(verdicts) => group.into_iter().zip(verdicts).for_each(|(request, verdict)| request.answer(verdict)),
                Err(fault) => {
                    tracing::warn!(address = %shared.settings.address, %fault, commits = group.len(), "commits failed");
                    group.into_iter().for_each(|request| request.answer(Err(fault.clone().into())));
                }
            }
        }
    }

    /// Tries until the group is committed, patience ends, or it was sent and nobody knows what became of it.
    async fn commit(&mut self, group: &[Request]) -> Result<Vec<Verdict>, Fault> {
        let deadline = Instant::now() + self.shared.settings.patience;
        let mut pause = Pause::default();
        loop {
            self.shared.check()?;
            let failure = match self.attempt(group).await {
                Ok(verdicts) => return Ok(verdicts),
                Err(failure) => failure,
            };
            // In whatever state its transaction is: the server ends it with the connection.
            self.session = None;
            let trouble = match failure {
                Failure::After(trouble) if !trouble.is_rolled_back() => {
                    // If it happened, only the log shows it.
                    self.shared.news.notify_one();
                    return Err(trouble.into());
                }
                Failure::Before(trouble) | Failure::After(trouble) => trouble,
            };
            if !trouble.is_passing() || Instant::now() >= deadline {
                return Err(trouble.into());
            }
            pause.wait().await;
        }
    }

    async fn attempt(&mut self, group: &[Request]) -> Result<Vec<Verdict>, Failure> {
        if self.session.is_none() {
            self.session = Some(self.open().await.map_err(Failure::Before)?);
        }
        let session = self.session.as_ref().expect("opened above");
        let question = Question::of(group);
        let seen = self.shared.seen();
        let answers = within(EXCHANGE, session.begin(&question)).await.map_err(Failure::Before)?;
        let wrong = |fault| Failure::Before(Trouble::Wrong(fault));
        let head = answers.head.as_ref().ok_or_else(|| Failure::Before(Trouble::Wrong(corrupt("an empty head"))))?;
        let start = self.shared.check_head(head, seen).map_err(Failure::Before)?;
        let mut overlay = question.answered(&answers).map_err(wrong)?;
        let changes = group.iter().map(|request| &request.change);
        let done = Group::judge(&mut overlay, changes, start).map_err(wrong)?;
        if done.revision == start {
            // Every verdict is right already; the lock is all there is to give back.
            within(EXCHANGE, session.client.batch_execute("COMMIT")).await.map_err(Failure::Before)?;
            return Ok(done.verdicts);
        }
        let channel = self.shared.settings.schema.channel();
        let entered = within(EXCHANGE, session.finish(start, &done, &channel)).await.map_err(Failure::After)?;
        self.shared.saw(done.revision);
        self.shared.remember(Entry { revision: done.revision, entered });
        if !self.shared.relay.publish(start, done.revision, done.events) {
            self.shared.news.notify_one();
        }
        Ok(done.verdicts)
    }

    async fn open(&self) -> Result<Session, Trouble> {
        let shared = &self.shared;
        let client = shared.connector.session("writer", deaf()).await?;
        let prepare = async {
            check_server(&client, &shared.settings.address, shared.settings.volatile).await?;
            let name = column(&client.query_one("SELECT pg_backend_pid()", &[]).await?, 0).map_err(Trouble::Wrong)?;
            shared.writer_session.store(name, Ordering::Relaxed);
            shared.check_line(&client).await?;
            let [lock, find, vacant, write] =
                [&shared.statements.lock, &shared.statements.find, &shared.statements.vacant, &shared.statements.write]
                    .map(|statement| client.prepare(statement));
            Ok::<_, Trouble>(try_join4(lock, find, vacant, write).await?)
        };
        let (lock, find, vacant, write) = within(CONNECT, prepare).await?;
        Ok(Session { client, lock, find, vacant, write })
    }
}

/// How many of those that wait make one group. It ends before a change that asks whether a prefix is empty below which the
/// group deletes: the server answers for the state before the group, and cannot know what the deletes leave.
fn group_length(waiting: &VecDeque<Request>) -> usize {
    let (mut bytes, mut deleted) = (0, Vec::<&Key>::new());
    for (at, Request { change, .. }) in waiting.iter().enumerate() {
        bytes += change.bytes();
        let undecided = change.guards.iter().any(|guard| match guard {
            Guard::Empty(prefix) => deleted.iter().any(|key| prefix.contains(key)),
            _ => false,
        });
        if at > 0 && (bytes > GROUP_BYTES || undecided) {
            return at;
        }
        deleted.extend(change.writes.iter().filter_map(|write| match write {
            Write::Delete(key) => Some(key),
            Write::Put(..) | Write::Add { .. } => None,
        }));
    }
    waiting.len()
}

/// What must be known to judge a group.
#[derive(Default)]
struct Question {
    keys: Vec<Key>,
    prefixes: Vec<Prefix>,
}

struct Answers {
    head: Option<Row>,
    found: Vec<Row>,
    vacant: Vec<Row>,
}

impl Question {
    fn of(group: &[Request]) -> Self {
        let (mut keys, mut prefixes) = (HashSet::new(), HashSet::new());
        for Request { change, .. } in group {
            for guard in &change.guards {
                match guard {
                    Guard::Version(key, _)
                    | Guard::Revision(key, _)
                    | Guard::Absent(key)
                    | Guard::Present(key)
                    | Guard::AtMost(key, _) => drop(keys.insert(key.clone())),
                    Guard::Empty(prefix) => drop(prefixes.insert(prefix.clone())),
                }
            }
            keys.extend(change.writes.iter().map(|write| write.key().clone()));
        }
        Self { keys: keys.into_iter().collect(), prefixes: prefixes.into_iter().collect() }
    }

    /// Only the values of numbers are asked for: no guard looks at others.
    fn answered(self, answers: &Answers) -> Result<Overlay, Fault> {
        fn at<T>(items: &[T], row: &Row) -> Result<usize, Fault> {
            let position = usize::try_from(column::<i64>(row, 0)? - 1).ok().filter(|at| *at < items.len());
            position.ok_or_else(|| corrupt("an answer of the database"))
        }
        let mut records = HashMap::with_capacity(self.keys.len());
        for row in &answers.found {
            let key = self.keys[at(&self.keys, row)?].clone();
            let version = unsigned(row, 1)?;
            let revision = Revision(unsigned(row, 2)?);
            let value = column::<Option<Vec<u8>>>(row, 3)?.unwrap_or_default().into();
            records.insert(key.clone(), Record { key, version, revision, value });
        }
        let vacant = answers.vacant.iter().map(|row| Ok(self.prefixes[at(&self.prefixes, row)?].clone()));
        Ok(Overlay { records, vacant: vacant.collect::<Result<_, Fault>>()? })
    }
}

/// The state that a group is judged on: what the server answered, and what the group has done so far.
struct Overlay {
    records: HashMap<Key, Record>,
    vacant: HashSet<Prefix>,
}

impl View for Overlay {
    fn record(&self, key: &Key) -> Result<Option<Record>, Fault> {
        Ok(self.records.get(key).cloned())
    }

    fn is_empty(&self, prefix: &Prefix) -> Result<bool, Fault> {
        Ok(self.vacant.contains(prefix) && !self.records.keys().any(|key| prefix.contains(key)))
    }
}

impl Stage for Overlay {
    fn apply(&mut self, mutation: &Mutation) -> Result<(), Fault> {
        match mutation {
            Mutation::Put(record) => drop(self.records.insert(record.key.clone(), record.clone())),
            Mutation::Deleted(key) => drop(self.records.remove(key)),
        }
        Ok(())
    }
}

impl Session {
    /// The first exchange: all is sent at once, and the server works it off in this order.
    async fn begin(&self, question: &Question) -> Result<Answers, Error> {
        let (kinds, paths): (Vec<_>, Vec<_>) = question.keys.iter().map(|key| (key.kind().name(), key.path())).unzip();
        let prefixes = question.prefixes.iter().map(|prefix| (prefix.kind().name(), range(prefix)));
        let (prefix_kinds, ranges): (Vec<_>, Vec<_>) = prefixes.unzip();
        let (lows, highs): (Vec<_>, Vec<_>) = ranges.into_iter().unzip();
        let vacant = async {
            if question.prefixes.is_empty() {
                return Ok(Vec::new());
            }
            self.client.query(&self.vacant, &[&prefix_kinds, &lows, &highs]).await
        };
        let (_, head, found, vacant) = try_join4(
            self.client.batch_execute("BEGIN"),
            self.client.query_opt(&self.lock, &[]),
            self.client.query(&self.find, &[&kinds, &paths]),
            vacant,
        )
        .await?;
        Ok(Answers { head, found, vacant })
    }

    /// The second exchange. `COMMIT` follows on the heels of the write; if that fails, the server makes it a rollback.
    async fn finish(&self, start: Revision, done: &Group, channel: &str) -> Result<SystemTime, Error> {
        let mutations = || done.events.iter().flat_map(|event| event.mutations.iter().map(|it| (event.revision, it)));
        let last: HashMap<_, _> = mutations().enumerate().map(|(at, (_, mutation))| (mutation.key(), at)).collect();
        let mut quiet: HashSet<u64> = (start.0 + 1..=done.revision.0).collect();
        let (mut revisions, mut kinds, mut paths) = (Vec::new(), Vec::new(), Vec::new());
        let (mut versions, mut contents, mut lasting) = (Vec::new(), Vec::new(), Vec::new());
        for (at, (revision, mutation)) in mutations().enumerate() {
            quiet.remove(&revision.0);
            let key = mutation.key();
            revisions.push(signed(revision.0));
            kinds.push(key.kind().name());
            paths.push(key.path());
            // Later changes of a group may write a record again; the log shows each, the table only the last.
            lasting.push(last[key] == at);
            let (version, content) = match mutation {
                Mutation::Put(record) => (record.version, Some(&record.value[..])),
                Mutation::Deleted(_) => (0, None),
            };
            versions.push(signed(version));
            contents.push(content);
        }
        let quiet: Vec<i64> = quiet.into_iter().map(signed).collect();
        let reached = signed(done.revision.0);
        let (written, committed) = join(
            self.client.query_one(
                &self.write,
                &[&revisions, &kinds, &paths, &versions, &contents, &lasting, &quiet, &reached, &channel],
            ),
            self.client.batch_execute("COMMIT"),
        )
        .await;
        let entered = written?.try_get(0)?;
        committed?;
        Ok(entered)
    }
}

/// Also if it panics: then nobody would take from the queue again, and committers must not wait for it.
struct CloseOnExit<'a>(&'a Shared);

impl Drop for CloseOnExit<'_> {
    fn drop(&mut self) {
        self.0.queue.close();
        drop(self.0.queue.take_blocking(None));
        self.0.relay.feed().close();
        self.0.stopped.send_replace(true);
    }
}
