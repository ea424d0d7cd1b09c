use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use ate_name::Digest;
use ate_store::{Contents, Counts, Kind, MAX_PATH, MAX_VALUE, Record};
use aws_lc_rs::digest::{Context, SHA256};

use crate::line::{FORMAT, First, FirstOfAny, Last, Line};
use crate::{BackupError, Header, VERSION};

/// Longest line: JSON may write a byte of a value, or of a path, as six (`\u0000`). A longer one is no line of ours.
const MAX_LINE: u64 = 6 * (MAX_VALUE + MAX_PATH) as u64 + 1024;

/// A file that was read to its end and is a whole backup.
#[derive(Clone, Debug)]
pub struct Backup {
    path: PathBuf,
    pub header: Header,
    pub counts: Counts,
    sha256: Digest,
}

impl Backup {
    /// Reads all of it, and shows each record. Blocks on the disk.
    pub fn open(path: &Path, mut each: impl FnMut(&Record)) -> Result<Self, BackupError> {
        let mut records = Records::open(path)?;
        let mut counts = Counts::default();
        for record in &mut records {
            let record = record?;
            counts.add(record.key.kind());
            each(&record);
        }
        let sha256 = records.sha256.expect("the records end with the last line or with an error");
        Ok(Self { path: path.to_owned(), header: records.header, counts, sha256 })
    }

    /// What it holds; read anew, and an error at the end if the file is another by now. Blocks on the disk.
    pub fn records(&self) -> Result<Records, BackupError> {
        let mut records = Records::open(&self.path)?;
        records.expected = Some(self.sha256);
        Ok(records)
    }
}

/// The records of a backup. Only after the last one is it known that they are what was written.
#[derive(Debug)]
pub struct Records {
    path: PathBuf,
    lines: BufReader<File>,
    line: u64,
    count: u64,
    header: Header,
    digest: Digesting,
    last: Option<(usize, String)>,
    expected: Option<Digest>,
    sha256: Option<Digest>,
    over: bool,
}

struct Digesting(Context);

impl std::fmt::Debug for Digesting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Digesting")
    }
}

impl Records {
    fn open(path: &Path) -> Result<Self, BackupError> {
        let file = File::open(path).map_err(|source| io_error("open", path, source))?;
        let mut lines = BufReader::with_capacity(1 << 20, file);
        let no_backup = || BackupError::NoBackup { path: path.to_owned() };
        let mut first = Vec::new();
        // A foreign file may have no line at all.
        let read = (&mut lines).take(MAX_LINE).read_until(b'\n', &mut first);
        read.map_err(|source| io_error("read", path, source))?;
        let any: FirstOfAny = serde_json::from_slice(&first).map_err(|_| no_backup())?;
        if any.format != FORMAT {
            return Err(no_backup());
        }
        if any.version > VERSION {
            return Err(BackupError::TooNew { path: path.to_owned(), found: any.version });
        }
        let header = serde_json::from_slice::<First>(&first).map_err(|_| no_backup())?.header();
        let mut digest = Context::new(&SHA256);
        digest.update(&first);
        let digest = Digesting(digest);
        let path = path.to_owned();
        Ok(Self {
            path,
            lines,
            line: 1,
            count: 0,
            header,
            digest,
            last: None,
            expected: None,
            sha256: None,
            over: false,
        })
    }

    fn damaged(&self, reason: impl Into<String>) -> BackupError {
        BackupError::Damaged { path: self.path.clone(), line: self.line, reason: reason.into() }
    }

    fn step(&mut self) -> Result<Option<Record>, BackupError> {
        let mut line = Vec::new();
        let read = (&mut self.lines).take(MAX_LINE).read_until(b'\n', &mut line);
        read.map_err(|source| io_error("read", &self.path, source))?;
        if line.last() != Some(&b'\n') {
            let cut = BackupError::Cut { path: self.path.clone(), line: self.line };
            return Err(if line.len() as u64 == MAX_LINE { self.damaged("a line without end") } else { cut });
        }
        self.line += 1;
        if let Ok(last) = serde_json::from_slice::<Last>(&line) {
            self.finish(&last)?;
            return Ok(None);
        }
        self.digest.0.update(&line);
        self.count += 1;
        let parsed = serde_json::from_slice::<Line<'_>>(&line).map_err(|error| self.damaged(error.to_string()))?;
        let record = parsed.record().map_err(|reason| self.damaged(reason))?;
        self.check_order(&record)?;
        Ok(Some(record))
    }

    fn finish(&mut self, last: &Last) -> Result<(), BackupError> {
        let digest = self.digest.0.clone().finish();
        let digest = Digest::from_bytes(digest.as_ref().try_into().expect("a sha256 has 32 bytes"));
        if last.records != self.count {
            let Last { records, .. } = last;
            return Err(self.damaged(format!("it has {} records and says {records}", self.count)));
        }
        if last.sha256 != digest {
            return Err(self.damaged("it is not what was written: its sha256 is another"));
        }
        if self.expected.is_some_and(|expected| expected != digest) {
            return Err(self.damaged("it was changed while it was read"));
        }
        let mut rest = [0];
        match self.lines.read(&mut rest) {
            Ok(0) => {}
            Ok(_) => return Err(self.damaged("something follows its last line")),
            Err(source) => return Err(io_error("read", &self.path, source)),
        }
        self.sha256 = Some(digest);
        Ok(())
    }

    /// Each key once, and those last that others are taken back by.
    fn check_order(&mut self, record: &Record) -> Result<(), BackupError> {
        let position = |kind: Kind| Contents::ORDER.iter().position(|other| *other == kind).unwrap_or_default();
        let place = (position(record.key.kind()), record.key.path().to_owned());
        if self.last.as_ref().is_some_and(|last| *last >= place) {
            return Err(self.damaged(format!("{} is out of order", record.key)));
        }
        self.last = Some(place);
        Ok(())
    }
}

impl Iterator for Records {
    type Item = Result<Record, BackupError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let step = self.step();
        self.over = !matches!(step, Ok(Some(_)));
        step.transpose()
    }
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> BackupError {
    BackupError::Io { action, path: path.to_owned(), source }
}
