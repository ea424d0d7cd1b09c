//! What actors print, one file each, on the node's disk.

use std::fs::File;
use std::io::{self, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ate_name::ActorUid;
use ate_orders::LogsOrder;
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncSeekExt, BufReader};
use tokio::sync::mpsc;

/// How often a log that is followed is looked at again.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A log file is cut off here and begun anew; the one before it is kept.
const MAX_LOG: u64 = 16 << 20;

/// Read at once when the end of a log is looked for.
const STEP: usize = 64 << 10;

/// A log of an actor that is elsewhere goes when nobody has written to it for so long: the actor has moved on, or is no more, and a
/// node may never be told.
const KEPT_FOR: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Bytes that the logs of actors that do not run here may take together; those not written to for longest go first.
pub(crate) const KEPT_BYTES: u64 = 1 << 30;

#[derive(Debug)]
pub(crate) struct Logs {
    directory: PathBuf,
    /// Held while one is opened for writing, and while one is removed because it is old.
    tidying: Mutex<()>,
}

/// Where an actor is, as its log sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whereabouts {
    Running,
    /// Its snapshot is here, and whoever asks for its log will ask here.
    Asleep,
    Elsewhere,
}

/// A file of a log.
#[derive(Debug)]
struct Old {
    asleep: bool,
    path: PathBuf,
    bytes: u64,
    written: SystemTime,
}

impl Old {
    /// If it is a log's, of an actor that does not run.
    fn of(path: PathBuf, whereabouts: impl Fn(ActorUid) -> Whereabouts) -> Option<Self> {
        let (actor, _) = path.file_name()?.to_str()?.split_once('.')?;
        let metadata = path.metadata().ok()?;
        let asleep = match whereabouts(ActorUid::parse(actor).ok()?) {
            Whereabouts::Running => return None,
            Whereabouts::Asleep => true,
            Whereabouts::Elsewhere => false,
        };
        Some(Self { asleep, bytes: metadata.len(), written: metadata.modified().ok()?, path })
    }
}

impl Logs {
    pub(crate) fn open(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), tidying: Mutex::default() }
    }

    /// By uid: another actor of the same name has another log.
    fn path(&self, actor: ActorUid) -> PathBuf {
        self.directory.join(format!("{actor}.jsonl"))
    }

    pub(crate) fn remove(&self, actor: ActorUid) {
        let path = self.path(actor);
        let _ = std::fs::remove_file(path.with_extension("jsonl.1"));
        let _ = std::fs::remove_file(path);
    }

    /// For writing at the end, whoever else does.
    pub(crate) fn append(&self, actor: ActorUid) -> io::Result<File> {
        let path = self.path(actor);
        let _one = self.tidying.lock();
        if path.metadata().is_ok_and(|metadata| metadata.len() > MAX_LOG) {
            std::fs::rename(&path, path.with_extension("jsonl.1"))?;
        }
        let file = File::options().create(true).append(true).open(path)?;
        // Whoever is about to print something is about to be here.
        file.set_modified(SystemTime::now())?;
        Ok(file)
    }

    /// Removes what is old of actors that are elsewhere, and what is too much; returns how many files went. Blocks.
    pub(crate) fn tidy(
        &self,
        whereabouts: impl Fn(ActorUid) -> Whereabouts,
        budget: u64,
        now: SystemTime,
    ) -> io::Result<usize> {
        let paths = std::fs::read_dir(&self.directory)?.flatten().map(|entry| entry.path());
        let mut logs: Vec<Old> = paths.filter_map(|path| Old::of(path, &whereabouts)).collect();
        logs.sort_by_key(|log| log.written);
        let mut total: u64 = logs.iter().map(|log| log.bytes).sum();
        let mut gone = 0;
        for log in logs {
            let is_old = now.duration_since(log.written).is_ok_and(|age| age > KEPT_FOR);
            if total <= budget && (log.asleep || !is_old) {
                continue;
            }
            total = total.saturating_sub(log.bytes);
            let _one = self.tidying.lock();
            // Unless its actor has come meanwhile.
            if log.path.metadata().and_then(|now| now.modified()).is_ok_and(|written| written == log.written) {
                std::fs::remove_file(&log.path)?;
                gone += 1;
            }
        }
        Ok(gone)
    }

    /// Sends the lines asked for. A log that is not there yet has no lines.
    pub(crate) async fn read(&self, actor: ActorUid, order: &LogsOrder, lines: mpsc::Sender<String>) -> io::Result<()> {
        let path = self.path(actor);
        let mut position = match order.tail {
            Some(tail) => {
                let path = path.clone();
                tokio::task::spawn_blocking(move || last_lines(&path, tail)).await.map_err(io::Error::other)??
            }
            None => 0,
        };
        loop {
            let length = match tokio::fs::metadata(&path).await {
                Ok(metadata) => metadata.len(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
                Err(error) => return Err(error),
            };
            // Begun anew since the last look.
            if length < position {
                position = 0;
            }
            if length > position {
                let mut file = tokio::fs::File::open(&path).await?;
                file.seek(SeekFrom::Start(position)).await?;
                let mut reader = BufReader::new(file);
                let mut line = String::new();
                while reader.read_line(&mut line).await? > 0 && line.ends_with('\n') {
                    position += line.len() as u64;
                    let whole = std::mem::take(&mut line);
                    if lines.send(whole.trim_end().to_owned()).await.is_err() {
                        return Ok(());
                    }
                }
            }
            if !order.follow {
                return Ok(());
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = lines.closed() => return Ok(()),
            }
        }
    }
}

/// Where the last `count` whole lines begin; read from the end, so that it costs what they cost. Blocks.
fn last_lines(path: &Path, count: usize) -> io::Result<u64> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let mut at = file.metadata()?.len();
    let mut ends = 0;
    let mut block = vec![0; STEP];
    while at > 0 {
        let length = usize::try_from(at).map_or(STEP, |at| at.min(STEP));
        at -= length as u64;
        file.read_exact_at(&mut block[..length], at)?;
        for (index, _) in block[..length].iter().enumerate().rev().filter(|&(_, &byte)| byte == b'\n') {
            // The end of the line before the first one that is wanted.
            if ends == count {
                return Ok(at + index as u64 + 1);
            }
            ends += 1;
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_actors_that_are_elsewhere_go_when_they_are_old_or_too_many() {
        let directory = tempfile::tempdir().unwrap();
        let logs = Logs::open(directory.path());
        let now = SystemTime::now();
        let log = |n: u8, name: &str, age: Duration| {
            let path = logs.path(ActorUid::from_random([n; 16])).with_extension(name);
            std::fs::write(&path, [0; 1000]).unwrap();
            File::options().append(true).open(&path).unwrap().set_modified(now - age).unwrap();
            path
        };
        let (day, long) = (Duration::from_secs(24 * 60 * 60), KEPT_FOR + Duration::from_secs(1));
        let here = [log(1, "jsonl", long), log(1, "jsonl.1", 2 * long)];
        let old = [log(2, "jsonl", long), log(2, "jsonl.1", 2 * long)];
        let [older, newer] = [log(3, "jsonl", 2 * day), log(4, "jsonl", day)];
        let asleep = log(5, "jsonl", 3 * long);
        let whereabouts = |actor| match actor {
            actor if actor == ActorUid::from_random([1; 16]) => Whereabouts::Running,
            actor if actor == ActorUid::from_random([5; 16]) => Whereabouts::Asleep,
            _ => Whereabouts::Elsewhere,
        };
        assert_eq!(logs.tidy(whereabouts, KEPT_BYTES, now).unwrap(), 2);
        assert!(old.iter().all(|path| !path.exists()));
        assert!(here.iter().chain([&asleep, &older, &newer]).all(|path| path.exists()));

        assert_eq!(logs.tidy(whereabouts, 1000, now).unwrap(), 2);
        assert!(!older.exists() && !asleep.exists(), "whoever sleeps here for ever does not fill the disk");
        assert!(here.iter().chain([&newer]).all(|path| path.exists()));
        let gone = logs.tidy(|_| Whereabouts::Elsewhere, KEPT_BYTES, now).unwrap();
        assert_eq!(gone, 2, "when the actor has gone, its log is old");
    }

    #[test]
    fn the_log_of_an_actor_that_is_just_coming_stays() {
        let directory = tempfile::tempdir().unwrap();
        let logs = Logs::open(directory.path());
        let actor = ActorUid::from_random([1; 16]);
        let now = SystemTime::now();
        drop(logs.append(actor).unwrap());
        let path = logs.path(actor);
        File::options().append(true).open(&path).unwrap().set_modified(now - 2 * KEPT_FOR).unwrap();
        // It comes while the others are being looked at.
        let whereabouts = |_| {
            logs.append(actor).unwrap();
            Whereabouts::Elsewhere
        };
        assert_eq!(logs.tidy(whereabouts, 0, now).unwrap(), 0);
        assert!(path.exists());
    }

    #[test]
    fn the_last_lines_are_found_from_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        assert_eq!(last_lines(&path, 3).unwrap(), 0, "a log that is not there yet");
        let long = "x".repeat(STEP);
        std::fs::write(&path, format!("one\n{long}\nthree\nhalf")).unwrap();
        let (two, three) = (4, 4 + STEP as u64 + 1);
        let half = three + 6;
        assert_eq!([0, 1, 2, 3, 4].map(|count| last_lines(&path, count).unwrap()), [half, three, two, 0, 0]);
    }
}
