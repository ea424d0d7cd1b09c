//! What actors print, one file each, on the node's disk.

use std::fs::File;
use std::io::{self, SeekFrom};
use std::path::{Path, PathBuf};

use ate_name::ActorUid;
use ate_orders::LogsOrder;
use tokio::io::{AsyncBufReadExt, AsyncSeekExt, BufReader};
use tokio::sync::mpsc;

/// How often a log that is followed is looked at again.
const LOOK_EVERY: std::time::Duration = std::time::Duration::from_millis(100);

/// A log file is cut off here and begun anew; the one before it is kept.
const MAX_LOG: u64 = 16 << 20;

#[derive(Clone, Debug)]
pub(crate) struct Logs {
    directory: PathBuf,
}

impl Logs {
    pub(crate) fn open(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
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
        if path.metadata().is_ok_and(|metadata| metadata.len() > MAX_LOG) {
            std::fs::rename(&path, path.with_extension("jsonl.1"))?;
        }
        File::options().create(true).append(true).open(path)
    }

    /// Sends the lines asked for. A log that is not there yet has no lines.
    pub(crate) async fn read(&self, actor: ActorUid, order: &LogsOrder, lines: mpsc::Sender<String>) -> io::Result<()> {
        let path = self.path(actor);
        let mut skip = match order.tail {
            Some(tail) => count_lines(&path).await?.saturating_sub(tail),
            None => 0,
        };
        let mut position = 0;
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
                    if skip > 0 {
                        skip -= 1;
                    } else if lines.send(whole.trim_end().to_owned()).await.is_err() {
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

async fn count_lines(path: &Path) -> io::Result<usize> {
    match tokio::fs::read(path).await {
        Ok(bytes) => Ok(bytes.iter().filter(|&&byte| byte == b'\n').count()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}
