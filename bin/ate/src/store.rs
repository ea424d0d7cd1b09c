//! `ate store`: looks after what the control plane remembers. Check it, back it up, restore it.

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use ate_backup::Backup;
use ate_cli::Global;
use ate_control::{Check, Findings, Named, Restoring, Unreadable};
use ate_store::{Contents, Counts, IfOccupied, LostTail, Mutation, Mutations, Replacement, Revision};
use futures::{StreamExt, stream};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};

use crate::place::{Place, StoreArgs};

/// Mutations between the file and the store.
const ON_THE_WAY: usize = 256;

/// How often progress is told, in records.
const TELL_EVERY: u64 = 5000;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum StoreVerb {
    /// Read every record and tell what does not agree with the others
    #[command(after_help = "Exits with 1 if anything is found. Nothing is written.

Examples:
  ate store check                                  stop `ate dev` first
  ate store check --store postgres://ate@db/ate    also while the control plane runs
  ate store check -o json")]
    Check(CheckArgs),
    /// Write everything that a store holds into one file
    #[command(after_help = "The file is the same for every kind of store, and appears only when it is whole.
It holds sealed keys: only its owner may read it. Snapshots, and the key in
identity/ without which they cannot be read, are not in it. Actors that this program
cannot read are saved as they are, and named: a restore has to leave them out.

Examples:
  ate store backup monday.backup                   stop `ate dev` first
  ate store backup b --store postgres://ate@db/ate also while the control plane runs
  ate store backup left.backup --accept-loss       of a store that lost its last commits")]
    Backup(BackupArgs),
    /// Make a store of a backup
    #[command(after_help = "What happened after the backup is unknown: actors that were on a worker continue
from their last snapshot, and nothing that still runs from before is served or
believed. All of it is restored, or nothing. Stop the control plane first.

Examples:
  ate store restore monday.backup                  into a store that holds nothing
  ate store restore monday.backup --replace        the old directory is moved aside
  ate store restore b --drop-unreadable            without the actors that cannot be read
  ate store restore b --store postgres://ate@db/ate
                                                   from one machine to PostgreSQL")]
    Restore(RestoreArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct BackupArgs {
    /// The file to write; it must not be there yet
    file: PathBuf,
    /// Save what is left of a store that came back with less than it acknowledged
    #[arg(long)]
    accept_loss: bool,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RestoreArgs {
    /// The backup
    file: PathBuf,
    /// Put it in the place of what the store holds now
    #[arg(long)]
    replace: bool,
    /// Leave out actors that this program cannot read, and name each
    #[arg(long)]
    drop_unreadable: bool,
    #[command(flatten)]
    store: StoreArgs,
}

pub(crate) async fn run(verb: StoreVerb, global: &Global) -> anyhow::Result<bool> {
    match verb {
        StoreVerb::Check(args) => check(&args, global).await,
        StoreVerb::Backup(args) => backup(&args, global).await.map(|()| true),
        StoreVerb::Restore(args) => restore(args, global).await.map(|()| true),
    }
}

/// Returns whether nothing was found.
async fn check(args: &CheckArgs, global: &Global) -> anyhow::Result<bool> {
    let place = args.store.place(&global.data_dir)?;
    let Contents { revision, mut entries, .. } = place.contents(LostTail::Refuse).await?;
    let (mut check, mut progress) = (Check::new(revision), Progress::new("checked"));
    let mut count = 0;
    while let Some(entry) = entries.next().await {
        let entry = entry.map_err(|fault| place.read_error(fault))?;
        check.take(&entry);
        count += 1;
        progress.tell(count);
    }
    drop(progress);
    let found = check.finish();
    let sound = found.findings.is_empty();
    match global.document(&found) {
        Some(text) => print(&text)?,
        None => print(&text_of(&found, &place, revision))?,
    }
    Ok(sound)
}

fn text_of(found: &Findings, place: &Place, revision: Revision) -> String {
    let mut text = String::new();
    for finding in &found.findings {
        text += &format!("{}\n  {}\n  remedy: {}\n", finding.object, finding.wrong, finding.remedy);
    }
    let all = found.findings.len() as u64 + found.more;
    if found.more > 0 {
        text += &format!("and {} more\n", found.more);
    }
    text + &match all {
        0 => format!("{place}: {} records, revision {revision}, all of them agree\n", found.records),
        all => format!("{place}: {all} of {} records, revision {revision}, do not agree\n", found.records),
    }
}

/// Whoever reads may have gone, as `head` does: that is no failure, as it is none of the verbs that talk to the API.
fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// For the person, if there is one: a terminal that is gone is no reason to stop, least of all by a panic.
fn note(text: impl std::fmt::Display) {
    let _ = write!(io::stderr(), "{text}");
}

#[derive(Serialize)]
struct Made<'a> {
    file: &'a Path,
    revision: u64,
    records: u64,
}

async fn backup(args: &BackupArgs, global: &Global) -> anyhow::Result<()> {
    let place = args.store.place(&global.data_dir)?;
    let tail = if args.accept_loss { LostTail::Accept } else { LostTail::Refuse };
    let contents = place.contents(tail).await?;
    if let Some(lost) = contents.lost {
        let left = contents.revision;
        note(format_args!("only what is left is saved: revision {lost} was acknowledged, but only {left} is left\n"));
    }
    let mut progress = Progress::new("saved");
    let writer = format!("ate {} {}", env!("CARGO_PKG_VERSION"), crate::version::BUILT_FROM);
    let (mut count, mut unreadable) = (0, Vec::new());
    let saved = ate_backup::save(&args.file, contents, jiff::Timestamp::now(), writer.trim(), |record| {
        unreadable.extend(Unreadable::of(record));
        count += 1;
        progress.tell(count);
    });
    let (header, counts) = saved.await?;
    drop(progress);
    if !unreadable.is_empty() {
        name_each(&unreadable);
        note(
            "saved as they are: a newer program may read them, and `ate store restore --drop-unreadable` leaves them out\n",
        );
    }
    let made = Made { file: &args.file, revision: header.revision.0, records: counts.total() };
    match global.document(&made) {
        Some(text) => print(&text)?,
        None => print(&format!("{}: {place} as of revision {}: {counts}\n", args.file.display(), header.revision))?,
    }
    Ok(())
}

fn name_each(unreadable: &[Unreadable]) {
    for actor in unreadable {
        note(format_args!("{actor}\n"));
    }
}

async fn restore(args: RestoreArgs, global: &Global) -> anyhow::Result<()> {
    let place = args.store.place(&global.data_dir)?;
    let file = args.file.clone();
    let reading = tokio::task::spawn_blocking(move || {
        let mut unreadable = Vec::new();
        let backup = Backup::open(&file, |record| unreadable.extend(Unreadable::of(record)))?;
        anyhow::Ok((backup, unreadable))
    });
    let (backup, unreadable) = reading.await??;
    name_each(&unreadable);
    if !unreadable.is_empty() && !args.drop_unreadable {
        bail!(
            "{} holds {} actors that this program cannot read, named above: nothing is restored\n  if a newer program wrote them, \
             restore with that one; or leave them out: --drop-unreadable",
            args.file.display(),
            unreadable.len()
        );
    }
    let restoring = Restoring::new(backup.header.time, backup.header.revision, jiff::Timestamp::now())?;
    let restoring = restoring.without(&unreadable);
    let (tell, told) = oneshot::channel();
    let rewritten = backup.clone();
    let replacement = move |there| {
        let restoring = restoring.past(there);
        Replacement { revision: restoring.revision(), mutations: rewrite(rewritten, restoring, tell) }
    };
    let occupied = if args.replace { IfOccupied::Replace } else { IfOccupied::Refuse };
    let moved_aside = place.load(occupied, replacement).await?;
    let restored = told.await.context("the backup was not read to its end")?;
    let told = Told::of(&backup, &restored, moved_aside.as_deref());
    match global.document(&told) {
        Some(text) => print(&text)?,
        None => print(&told.text(&place))?,
    }
    Ok(())
}

/// Reads the backup and rewrites what is in it; tells how, once all was taken.
fn rewrite(backup: Backup, mut restoring: Restoring, tell: oneshot::Sender<Restoring>) -> Mutations {
    let mut progress = Progress::new("restored");
    on_a_thread(tell, move |send| {
        let mut count = 0;
        for record in backup.records()? {
            for mutation in restoring.take(record?)? {
                send.blocking_send(mutation)?;
            }
            count += 1;
            progress.tell(count);
        }
        for mutation in restoring.finish() {
            send.blocking_send(mutation)?;
        }
        Ok(restoring)
    })
}

/// What `work` sends, from a thread of its own. Only if it comes to its end is that the end of the mutations: whatever else ends
/// it, a panic too, is an error, so that nobody takes the part that was sent for the whole.
fn on_a_thread<T: Send + 'static>(
    tell: oneshot::Sender<T>,
    work: impl FnOnce(&mpsc::Sender<Mutation>) -> Result<T, Box<dyn Error + Send + Sync>> + Send + 'static,
) -> Mutations {
    let (send, arriving) = mpsc::channel(ON_THE_WAY);
    let working = tokio::task::spawn_blocking(move || work(&send));
    let mutations = stream::unfold(Some((arriving, working, tell)), |state| async move {
        let (mut arriving, working, tell) = state?;
        if let Some(mutation) = arriving.recv().await {
            return Some((Ok(mutation), Some((arriving, working, tell))));
        }
        match working.await {
            Ok(Ok(done)) => {
                let _ = tell.send(done);
                None
            }
            Ok(Err(error)) => Some((Err(error), None)),
            Err(panicked) => Some((Err(panicked.into()), None)),
        }
    });
    mutations.boxed()
}

/// What a restore tells.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Told {
    backup_of: jiff::Timestamp,
    backup_revision: u64,
    revision: u64,
    kept: String,
    dropped: String,
    fell_back: Few,
    saving: Few,
    uploading: Few,
    #[serde(skip_serializing_if = "Option::is_none")]
    moved_aside: Option<PathBuf>,
}

#[derive(Serialize)]
struct Few {
    count: u64,
    first: Vec<String>,
}

impl Few {
    fn of(named: &Named) -> Self {
        Self { count: named.count, first: named.first.iter().map(ToString::to_string).collect() }
    }

    fn text(&self) -> String {
        let more = self.count - self.first.len() as u64;
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}: {}{more}", self.count, self.first.join(", "))
    }
}

impl Told {
    fn of(backup: &Backup, restored: &Restoring, moved_aside: Option<&Path>) -> Self {
        let summary = restored.summary();
        let text = |counts: &Counts| counts.to_string();
        Self {
            backup_of: backup.header.time,
            backup_revision: backup.header.revision.0,
            revision: restored.revision().0,
            kept: text(&summary.kept),
            dropped: text(&summary.dropped),
            fell_back: Few::of(&summary.fell_back),
            saving: Few::of(&summary.saving),
            uploading: Few::of(&summary.uploading),
            moved_aside: moved_aside.map(Path::to_owned),
        }
    }

    fn text(&self, place: &Place) -> String {
        let mut text = format!(
            "{place}: restored from a backup of {} (revision {}); it goes on at revision {}\n  kept     {}\n  dropped  {}\n",
            self.backup_of, self.backup_revision, self.revision, self.kept, self.dropped
        );
        let mut tell = |what: &str, few: &Few| {
            if few.count > 0 {
                text += &format!("  {what} {}\n", few.text());
            }
        };
        tell("actors that were on a worker, and continue from their last snapshot:", &self.fell_back);
        tell("actors whose save goes on, if their node still has the image:", &self.saving);
        tell("actors whose newest snapshot goes on to durable storage:", &self.uploading);
        if let Some(aside) = &self.moved_aside {
            text += &format!("  what was there before is in {}\n", aside.display());
        }
        text += "  an actor may have been saved after the backup: its newest snapshot is looked for when it is woken, on every node and in\n  durable storage; start every node within a minute of the control plane: until then nobody is woken whose snapshots may be on one\n";
        text
    }
}

/// A line on stderr that changes, if a person watches it.
struct Progress {
    what: &'static str,
    shown: bool,
    is_watched: bool,
}

impl Progress {
    fn new(what: &'static str) -> Self {
        Self { what, shown: false, is_watched: io::stderr().is_terminal() }
    }

    fn tell(&mut self, count: u64) {
        if self.is_watched && count.is_multiple_of(TELL_EVERY) {
            note(format_args!("\r{} {count} records", self.what));
            self.shown = true;
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            // Over it, so that what follows begins on a clean line.
            note(format_args!("\r{:40}\r", ""));
        }
    }
}

#[cfg(test)]
mod tests {
    use ate_store::{Change, Key, Kind, Record};
    use ate_store_postgres::Settings;

    use super::*;

    fn record(name: &str) -> Record {
        let key = Key::parse(Kind::Atespace, name).expect("well formed");
        Record { key, version: 1, revision: Revision(1), value: "{}".into() }
    }

    /// As a panic does, or a thread that gives up, after a part was sent.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_source_that_ends_early_restores_nothing() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let server = ate_testkit_postgres::Server::default();
        let address = server.url().parse().expect("well formed");
        let places =
            [Place::Directory(directory.path().join("store")), Place::Database(Box::new(Settings::new(address)))];
        for place in places {
            let opened = place.clone().open().await.expect("opens");
            let kept = record("kept");
            opened.store().commit(Change::new().put(kept.key.clone(), kept.value.clone())).await.expect("no guards");
            opened.close().await.expect("closes");
            for panics in [true, false] {
                let (tell, told) = oneshot::channel::<()>();
                let mutations = on_a_thread(tell, move |send| {
                    send.blocking_send(Mutation::Put(record("new")))?;
                    if panics { panic!("as a dead terminal makes it") } else { Err("the disk is gone".into()) }
                });
                let replacement = |_| Replacement { revision: Revision(7), mutations };
                let refused = place.load(IfOccupied::Replace, replacement).await.expect_err("a part is not all");
                let refused = format!("{refused:#}");
                assert!(refused.contains("cannot be read: "), "{refused}");
                assert!(told.await.is_err(), "nothing is told of what was not done");
                let contents = place.contents(LostTail::Refuse).await.expect("what was there is there");
                let entries: Vec<_> = contents.entries.map(|entry| entry.expect("reads")).collect().await;
                assert_eq!((contents.revision, entries), (Revision(1), vec![ate_store::Entry::Record(kept.clone())]));
            }
            // And one that comes to its end is whole.
            let (tell, told) = oneshot::channel();
            let mutations = on_a_thread(tell, |send| Ok(send.blocking_send(Mutation::Put(record("new")))?));
            let replacement = |_| Replacement { revision: Revision(7), mutations };
            place.load(IfOccupied::Replace, replacement).await.expect("all of it");
            told.await.expect("it is done");
        }
    }
}
