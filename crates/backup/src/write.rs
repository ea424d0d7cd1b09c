use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use ate_name::Digest;
use ate_store::{Contents, Counts, Entry, Record};
use aws_lc_rs::digest::{Context, SHA256};
use futures::StreamExt;
use tempfile::NamedTempFile;
use tokio::sync::mpsc;

use crate::line::{First, Last, Line};
use crate::{BackupError, Header};

/// Records between the store and the file.
const ON_THE_WAY: usize = 256;

/// Writes a backup, and shows each record. The name exists only once the whole is on the disk; nobody but the owner may read it.
pub async fn save(
    path: &Path,
    contents: Contents,
    time: jiff::Timestamp,
    writer: &str,
    mut each: impl FnMut(&Record),
) -> Result<(Header, Counts), BackupError> {
    let header = Header { revision: contents.revision, time, writer: writer.to_owned() };
    let (send, mut arriving) = mpsc::channel::<Record>(ON_THE_WAY);
    let (path, first) = (path.to_owned(), header.clone());
    let writing = tokio::task::spawn_blocking(move || {
        let mut file = Writing::begin(path, &first)?;
        while let Some(record) = arriving.blocking_recv() {
            file.record(&record)?;
        }
        Ok(file)
    });
    let mut entries = contents.entries;
    let mut counts = Counts::default();
    while let Some(entry) = entries.next().await {
        let record = match entry? {
            Entry::Record(record) => record,
            Entry::Foreign { key, reason } => return Err(BackupError::Foreign { key, reason }),
        };
        counts.add(record.key.kind());
        each(&record);
        if send.send(record).await.is_err() {
            break;
        }
    }
    drop(send);
    let file: Result<Writing, BackupError> = writing.await.expect("writing a file does not panic");
    let file = file?;
    // Only now is it known that nothing was missed.
    tokio::task::spawn_blocking(move || file.finish()).await.expect("writing a file does not panic")?;
    Ok((header, counts))
}

/// Gone when it is dropped unfinished.
struct Writing {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
    digest: Context,
    records: u64,
}

impl Writing {
    fn begin(path: PathBuf, header: &Header) -> Result<Self, BackupError> {
        if path.exists() {
            return Err(BackupError::Exists { path });
        }
        let directory = directory_of(&path);
        // Records hold sealed keys: `tempfile` makes files with mode 0600.
        let file = tempfile::Builder::new().prefix(".ate-backup-").tempfile_in(directory);
        let file =
            file.map_err(|source| BackupError::Io { action: "make a file in", path: directory.into(), source })?;
        let file = BufWriter::with_capacity(1 << 20, file);
        let mut writing = Self { path, file, digest: Context::new(&SHA256), records: 0 };
        writing.line(&First::of(header))?;
        Ok(writing)
    }

    fn record(&mut self, record: &Record) -> Result<(), BackupError> {
        self.records += 1;
        self.line(&Line::of(record))
    }

    fn line(&mut self, line: &impl serde::Serialize) -> Result<(), BackupError> {
        let mut bytes = serde_json::to_vec(line).expect("lines are plain data with text keys");
        bytes.push(b'\n');
        self.digest.update(&bytes);
        self.file.write_all(&bytes).map_err(|source| self.io("write", source))
    }

    fn io(&self, action: &'static str, source: io::Error) -> BackupError {
        BackupError::Io { action, path: self.path.clone(), source }
    }

    fn finish(mut self) -> Result<(), BackupError> {
        let digest = self.digest.clone().finish();
        let sha256 = Digest::from_bytes(digest.as_ref().try_into().expect("a sha256 has 32 bytes"));
        self.line(&Last { records: self.records, sha256 })?;
        let path = self.path.clone();
        let io = |source| BackupError::Io { action: "write", path: path.clone(), source };
        let file = self.file.into_inner().map_err(|error| io(error.into_error()))?;
        file.as_file().sync_all().map_err(io)?;
        file.persist_noclobber(&path).map_err(|error| match error.error.kind() {
            io::ErrorKind::AlreadyExists => BackupError::Exists { path: path.clone() },
            _ => io(error.error),
        })?;
        File::open(directory_of(&path)).and_then(|directory| directory.sync_all()).map_err(io)
    }
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
