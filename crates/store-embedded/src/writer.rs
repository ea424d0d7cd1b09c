use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use ate_store::{Fault, Group, Key, Mutation, Prefix, Record, Request, Revision, Stage, View};

use crate::Shared;
use crate::codec;
use crate::directory::Directory;
use crate::engine::{Engine, Finish, Opener, Writes};

/// How often a store without an engine tries to open one while nobody asks for a commit.
const REOPEN_EVERY: Duration = Duration::from_secs(1);

/// The one thread that writes. It takes all that waits as a group, judges each change against the state that those
/// before it leave, and makes the whole group durable with one flush; while the disk is busy the next group gathers.
pub(crate) struct Writer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) opener: Opener,
    /// Unlocked when the thread ends, after the engine is closed.
    pub(crate) directory: Directory,
}

impl Writer {
    pub(crate) fn run(self) {
        let _closing = CloseOnExit(&self.shared);
        let mut health = Health::Good;
        loop {
            // A store that cannot be read tries to come back even if nobody asks it to write.
            let patience = matches!(health, Health::Closed(_)).then_some(REOPEN_EVERY);
            let Some(group) = self.shared.queue.take_blocking(patience) else { break };
            if !matches!(health, Health::Good) {
                health = self.reopen();
            }
            health = match health {
                Health::Closed(fault) => {
                    fail(group, &fault);
                    Health::Closed(fault)
                }
                _ if group.is_empty() => Health::Good,
                _ => self.commit(group),
            };
        }
    }

    /// An engine that failed to write knows no longer what is on the disk; only what a new one reads back counts.
    fn reopen(&self) -> Health {
        let mut slot = self.shared.slot();
        // Before the new one opens: engines lock their files.
        drop(slot.take());
        let (engine, revision) = match open_engine(&self.opener, &self.directory) {
            Ok(opened) => opened,
            Err(fault) => return Health::Closed(fault),
        };
        *slot = Some(engine);
        drop(slot);
        // A commit answered as unavailable may have reached the disk after all; watchers have not seen it.
        self.shared.feed.skip_to(revision);
        tracing::info!(directory = %self.directory.path().display(), %revision, "store reopened");
        Health::Good
    }

    fn commit(&self, group: Vec<Request>) -> Health {
        let fault = match self.shared.with_engine(|engine| carry_out(engine, &group)) {
            Ok(done) => {
                self.publish(group, done);
                return Health::Good;
            }
            Err(fault) => fault,
        };
        tracing::error!(directory = %self.directory.path().display(), %fault, "commit failed");
        fail(group, &fault);
        Health::Failed
    }

    /// Everything here is durable.
    fn publish(&self, group: Vec<Request>, done: Group) {
        if let Err(error) = self.directory.mark(done.revision) {
            tracing::warn!(directory = %self.directory.path().display(), %error, "cannot write the mark");
        }
        self.shared.feed.publish(done.events);
        for (request, verdict) in group.into_iter().zip(done.verdicts) {
            request.answer(verdict);
        }
    }
}

enum Health {
    Good,
    /// The engine refuses to write, but still shows what it had; it is replaced when there is something to write.
    Failed,
    /// No engine could be opened.
    Closed(Fault),
}

/// Opens the engine and makes sure that nothing acknowledged is missing.
pub(crate) fn open_engine(opener: &Opener, directory: &Directory) -> Result<(Box<dyn Engine>, Revision), Fault> {
    let (engine, revision) = open_what_is_left(opener, directory)?;
    directory.check_mark(revision)?;
    Ok((engine, revision))
}

pub(crate) fn open_what_is_left(opener: &Opener, directory: &Directory) -> Result<(Box<dyn Engine>, Revision), Fault> {
    let open = || {
        let engine = opener(directory.path())?;
        let mut revision = Revision::ZERO;
        engine.read(&mut |reads| {
            revision = codec::read_revision(reads)?;
            Ok(())
        })?;
        Ok((engine, revision))
    };
    // Engines assert what they expect of their own files.
    std::panic::catch_unwind(AssertUnwindSafe(open)).unwrap_or_else(|_| {
        Err(Fault::Corrupt { reason: "the engine gave up on its files; see the log for where".to_owned() })
    })
}

fn fail(group: Vec<Request>, fault: &Fault) {
    for request in group {
        request.answer(Err(fault.clone().into()));
    }
}

/// One engine transaction for the group. Answers leave this function only if all of it is durable.
fn carry_out(engine: &dyn Engine, group: &[Request]) -> Result<Group, Fault> {
    let mut done = None;
    engine.write(&mut |writes| {
        let start = codec::read_revision(writes)?;
        let changes = group.iter().map(|request| &request.change);
        let judged = Group::judge(&mut InTransaction(writes), changes, start)?;
        let revision = judged.revision;
        done = Some(judged);
        if revision == start {
            return Ok(Finish::Abandon);
        }
        writes.put(codec::REVISION_KEY, &codec::encode_revision(revision))?;
        Ok(Finish::Commit)
    })?;
    Ok(done.expect("an engine runs the work before it returns Ok"))
}

struct InTransaction<'a>(&'a mut dyn Writes);

impl View for InTransaction<'_> {
    fn record(&self, key: &Key) -> Result<Option<Record>, Fault> {
        codec::read_record(self.0, key)
    }

    fn is_empty(&self, prefix: &Prefix) -> Result<bool, Fault> {
        let mut empty = true;
        codec::scan_records(self.0, prefix, None, &mut |_| {
            empty = false;
            false
        })?;
        Ok(empty)
    }
}

impl Stage for InTransaction<'_> {
    fn apply(&mut self, mutation: &Mutation) -> Result<(), Fault> {
        let key = mutation.key();
        let key = codec::key_bytes(key.kind(), key.path());
        match mutation {
            Mutation::Put(record) => self.0.put(&key, &codec::encode(record)),
            Mutation::Deleted(_) => self.0.remove(&key),
        }
    }
}

/// Also when the engine panics: then nobody would take from the queue again, and committers must not wait for it.
struct CloseOnExit<'a>(&'a Shared);

impl Drop for CloseOnExit<'_> {
    fn drop(&mut self) {
        self.0.queue.close();
        drop(self.0.queue.take_blocking(None));
        drop(self.0.slot().take());
        self.0.feed.close();
        self.0.stopped.send_replace(true);
    }
}
