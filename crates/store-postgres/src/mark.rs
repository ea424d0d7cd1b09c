//! The last revision that this replica has seen, in a file of its machine. A process that is started later knows by it that the
//! database has gone back: restored without us, or failed over to a standby that had not got everything.
//!
//! ```text
//!   00000000000000000097 postgres://ate@db/ate ate       revision, address, schema
//! ```
//! It is written before anybody is answered, and not flushed: after a power cut it may lag, it never runs ahead.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use ate_store::Revision;
use tokio::sync::watch;

/// Digits of the largest revision.
const DIGITS: usize = 20;

#[derive(Debug)]
pub(crate) struct Mark {
    file: File,
    of: String,
    /// Its lock keeps an older one from being written over a newer one.
    last: watch::Sender<Revision>,
    /// Said once.
    failed: AtomicBool,
}

impl Mark {
    /// `of`: which store it is of. What the file says of another one is not looked at.
    pub(crate) fn open(path: &Path, of: String) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let last = said(&mut file, &of);
        if last == Revision::ZERO {
            file.set_len(0)?;
        }
        Ok(Self { file, of, last: watch::Sender::new(last), failed: AtomicBool::new(false) })
    }

    /// What the file says, if there is one.
    pub(crate) fn read(path: &Path, of: String) -> io::Result<Revision> {
        match File::open(path) {
            Ok(mut file) => Ok(said(&mut file, &of)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Revision::ZERO),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn last(&self) -> Revision {
        *self.last.borrow()
    }

    pub(crate) fn note(&self, revision: Revision) {
        self.last.send_if_modified(|last| {
            if revision <= *last {
                return false;
            }
            let line = format!("{:0DIGITS$} {}\n", revision.0, self.of);
            // A few bytes in the kernel's memory.
            if let Err(error) = self.file.write_all_at(line.as_bytes(), 0)
                && !self.failed.swap(true, Ordering::Relaxed)
            {
                tracing::warn!(%error, "what was seen of the database is not written down: one that goes back is not noticed");
            }
            *last = revision;
            true
        });
    }
}

fn said(file: &mut File, of: &str) -> Revision {
    let mut text = String::new();
    // What is no text is no mark.
    let _ = file.take(4096).read_to_string(&mut text);
    let marked = text.strip_suffix('\n').and_then(|line| line.split_once(' ')).filter(|(_, store)| *store == of);
    marked.and_then(|(revision, _)| revision.parse().ok()).map_or(Revision::ZERO, Revision)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_is_known_to_the_next_process_and_to_nobody_elses_store() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mark");
        let open = |of: &str| Mark::open(&path, of.to_owned()).unwrap();
        let mark = open("db ate");
        assert_eq!(mark.last(), Revision::ZERO);
        for revision in [7, 1 << 60, 8] {
            mark.note(Revision(revision));
        }
        assert_eq!(open("db ate").last(), Revision(1 << 60));
        let read = |of: &str| Mark::read(&path, of.to_owned()).unwrap();
        assert_eq!((read("db ate"), read("db other")), (Revision(1 << 60), Revision::ZERO));
        assert_eq!(Mark::read(&directory.path().join("none"), "db ate".to_owned()).unwrap(), Revision::ZERO);
        assert!(!directory.path().join("none").exists());
        let other = open("a-database-with-another-name ate");
        assert_eq!(other.last(), Revision::ZERO);
        other.note(Revision(3));
        assert_eq!(open("a-database-with-another-name ate").last(), Revision(3));
        std::fs::write(&path, [0xff; 10]).unwrap();
        assert_eq!(open("db ate").last(), Revision::ZERO, "what cannot be read says nothing");
    }
}
