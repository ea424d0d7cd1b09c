use std::collections::HashSet;
use std::fmt;

use bytes::Bytes;

use crate::{CommitError, Fault, Key, Prefix};

/// Most guards, and most writes, in one change. The largest operation (delete an actor with its history and
/// snapshots) needs dozens; a larger job is several changes. More is refused with [`CommitError::TooLarge`].
pub const MAX_CHANGE_ITEMS: usize = 256;

/// Largest value. A record is a description, not a payload: the largest kind, a template, is a few KiB of JSON.
pub const MAX_VALUE: usize = 1 << 20;

/// Most bytes of values in one change, which bounds how long it holds up the changes behind it.
pub const MAX_CHANGE_BYTES: usize = 4 << 20;

/// Most records in one page; a larger limit means this one.
pub const MAX_PAGE_RECORDS: usize = 1000;

/// A page ends early once its values pass this, so that a page of large records is no memory spike.
pub const MAX_PAGE_BYTES: usize = 8 << 20;

/// Counts the commits of a store: every commit that writes takes the next one. Zero is the empty store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

impl Revision {
    pub const ZERO: Revision = Revision(0);

    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What is stored under a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub key: Key,
    /// 1 when created, one more with each write. A record that is deleted and created again starts at 1 again.
    pub version: u64,
    /// The commit that last wrote this record; never the same for two writes of a key.
    pub revision: Revision,
    /// Opaque to the store; callers keep JSON in it.
    pub value: Bytes,
}

impl Record {
    /// Holds while nobody has written, deleted or re-created this record since it was read.
    pub fn unchanged(&self) -> Guard {
        Guard::Revision(self.key.clone(), self.revision)
    }
}

/// A condition on the state just before the change. All must hold, or nothing is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Guard {
    /// The record exists at this version. A record deleted and created again passes through the same versions,
    /// so a read-then-write that must not hit such a namesake uses [`Record::unchanged`].
    Version(Key, u64),
    /// The record exists and was last written by this commit.
    Revision(Key, Revision),
    Absent(Key),
    Present(Key),
    /// No record exists below the prefix.
    Empty(Prefix),
    /// The number is no larger. One that was never added to is zero.
    AtMost(Key, u64),
}

impl fmt::Display for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Guard::Version(key, version) => write!(f, "{key} at version {version}"),
            Guard::Revision(key, revision) => write!(f, "{key} unchanged since revision {revision}"),
            Guard::Absent(key) => write!(f, "{key} absent"),
            Guard::Present(key) => write!(f, "{key} present"),
            Guard::Empty(prefix) => write!(f, "nothing below {prefix}"),
            Guard::AtMost(key, most) => write!(f, "{key} at most {most}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    Put(Key, Bytes),
    /// Deleting what does not exist is no error and no event.
    Delete(Key),
    /// Adds to a number of [`Kind::Count`], or to `from` if that is larger; never below zero. Nobody has to read it first,
    /// so those who add at once are never in each other's way.
    Add {
        key: Key,
        by: i64,
        from: u64,
    },
}

impl Write {
    pub fn key(&self) -> &Key {
        match self {
            Write::Put(key, _) | Write::Delete(key) | Write::Add { key, .. } => key,
        }
    }
}

/// One atomic, durable transaction. Without guards it always applies; without writes it only checks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    pub guards: Vec<Guard>,
    pub writes: Vec<Write>,
}

impl Change {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn guard(mut self, guard: Guard) -> Self {
        self.guards.push(guard);
        self
    }

    pub fn put(mut self, key: Key, value: impl Into<Bytes>) -> Self {
        self.writes.push(Write::Put(key, value.into()));
        self
    }

    pub fn delete(mut self, key: Key) -> Self {
        self.writes.push(Write::Delete(key));
        self
    }

    pub fn add(self, key: Key, by: i64) -> Self {
        self.add_from(key, by, 0)
    }

    pub fn add_from(mut self, key: Key, by: i64, from: u64) -> Self {
        self.writes.push(Write::Add { key, by, from });
        self
    }

    /// Puts a record that must not exist yet.
    pub fn create(self, key: Key, value: impl Into<Bytes>) -> Self {
        self.guard(Guard::Absent(key.clone())).put(key, value)
    }

    /// Puts over exactly the record that was read.
    pub fn replace(self, read: &Record, value: impl Into<Bytes>) -> Self {
        self.guard(read.unchanged()).put(read.key.clone(), value)
    }

    /// Bytes of values this change writes.
    pub fn bytes(&self) -> usize {
        self.writes.iter().map(|write| if let Write::Put(_, value) = write { value.len() } else { 0 }).sum()
    }

    /// What every adapter refuses before it looks at any state.
    pub fn check(&self) -> Result<(), CommitError> {
        let within = |what, actual, limit| {
            if actual > limit { Err(CommitError::TooLarge { what, actual, limit }) } else { Ok(()) }
        };
        within("guards", self.guards.len(), MAX_CHANGE_ITEMS)?;
        within("writes", self.writes.len(), MAX_CHANGE_ITEMS)?;
        let mut seen = HashSet::with_capacity(self.writes.len());
        for write in &self.writes {
            if let Write::Put(_, value) = write {
                within("bytes of one value", value.len(), MAX_VALUE)?;
            }
            if !seen.insert(write.key()) {
                return Err(CommitError::WrittenTwice { key: write.key().clone() });
            }
        }
        within("bytes of values", self.bytes(), MAX_CHANGE_BYTES)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The commit's own revision, or the current one if the change had no writes.
    pub revision: Revision,
    /// The new version of each put, in the order of the puts.
    pub versions: Vec<u64>,
}

/// Part of a list, as of one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    pub records: Vec<Record>,
    /// More records follow; ask again with the last path of this page.
    pub more: bool,
    /// The state this page shows. Watching from the first page's revision misses nothing.
    pub revision: Revision,
}

/// Fills a page from ordered records. Every adapter ends its pages this way.
#[derive(Debug)]
pub struct PageFiller {
    page: Page,
    limit: usize,
    bytes: usize,
}

impl PageFiller {
    pub fn new(revision: Revision, limit: usize) -> Self {
        let page = Page { records: Vec::new(), more: false, revision };
        Self { page, limit: limit.clamp(1, MAX_PAGE_RECORDS), bytes: 0 }
    }

    /// Takes the next record; `false` once the page is full and the record was left out.
    pub fn push(&mut self, record: Record) -> bool {
        if self.page.records.len() == self.limit || self.bytes >= MAX_PAGE_BYTES {
            self.page.more = true;
            return false;
        }
        self.bytes += record.value.len();
        self.page.records.push(record);
        true
    }

    pub fn page(self) -> Page {
        self.page
    }
}

/// What happened to one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mutation {
    Put(Record),
    Deleted(Key),
}

impl Mutation {
    pub fn key(&self) -> &Key {
        match self {
            Mutation::Put(record) => &record.key,
            Mutation::Deleted(key) => key,
        }
    }
}

/// One commit as a watcher sees it: all its mutations that the watch covers, never half of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub revision: Revision,
    pub mutations: Vec<Mutation>,
}

impl Event {
    /// What somebody sees of it who watches only these prefixes, if anything.
    pub fn below(&self, prefixes: &[Prefix]) -> Option<Self> {
        let watched = |mutation: &&Mutation| prefixes.iter().any(|prefix| prefix.contains(mutation.key()));
        let mutations: Vec<_> = self.mutations.iter().filter(watched).cloned().collect();
        (!mutations.is_empty()).then_some(Self { revision: self.revision, mutations })
    }
}

/// The state a change is judged against.
pub trait View {
    fn record(&self, key: &Key) -> Result<Option<Record>, Fault>;
    fn is_empty(&self, prefix: &Prefix) -> Result<bool, Fault>;
}

/// Judges a checked change: what it would do at `revision` to the state in `view`. Pure, and the one place that
/// says what guards and versions mean, for every adapter that can read its own state while it commits.
pub fn judge(view: &dyn View, change: &Change, revision: Revision) -> Result<(Vec<u64>, Vec<Mutation>), CommitError> {
    for guard in &change.guards {
        let holds = match guard {
            Guard::Version(key, version) => view.record(key)?.is_some_and(|record| record.version == *version),
            Guard::Revision(key, revision) => view.record(key)?.is_some_and(|record| record.revision == *revision),
            Guard::Absent(key) => view.record(key)?.is_none(),
            Guard::Present(key) => view.record(key)?.is_some(),
            Guard::Empty(prefix) => view.is_empty(prefix)?,
            Guard::AtMost(key, most) => number(view.record(key)?.as_ref())? <= *most,
        };
        if !holds {
            return Err(CommitError::Conflict { guard: guard.clone() });
        }
    }
    let mut versions = Vec::new();
    let mut mutations = Vec::with_capacity(change.writes.len());
    for write in &change.writes {
        let before = view.record(write.key())?;
        match write {
            Write::Put(key, value) => {
                let version = before.map_or(0, |record| record.version) + 1;
                versions.push(version);
                mutations.push(Mutation::Put(Record { key: key.clone(), version, revision, value: value.clone() }));
            }
            Write::Delete(key) if before.is_some() => mutations.push(Mutation::Deleted(key.clone())),
            Write::Delete(_) => {}
            Write::Add { key, by, from } => {
                let value = number(before.as_ref())?.max(*from).saturating_add_signed(*by).to_string().into();
                let version = before.map_or(0, |record| record.version) + 1;
                mutations.push(Mutation::Put(Record { key: key.clone(), version, revision, value }));
            }
        }
    }
    Ok((versions, mutations))
}

/// What a record of [`Kind::Count`] says.
pub fn number(record: Option<&Record>) -> Result<u64, Fault> {
    let Some(record) = record else { return Ok(0) };
    let text = std::str::from_utf8(&record.value).ok();
    text.and_then(|text| text.parse().ok())
        .ok_or_else(|| Fault::Corrupt { reason: format!("{} is not a number", record.key) })
}
