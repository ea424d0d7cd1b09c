//! What actors print, one file each, on the node's disk.

use std::fs::File;
use std::io::{self, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ate_name::ActorUid;
use ate_orders::LogsOrder;
use tokio::io::{AsyncBufReadExt, AsyncSeekExt, BufReader};
use tokio::sync::mpsc;

/// How often a log that is followed is looked at again.
const LOOK_EVERY: std::time::Duration = std::time::Duration::from_millis(100);

/// A log file is cut off here and begun anew; the one before it is kept.
const MAX_LOG: u64 = 16 << 20;

/// Read at once when the end of a log is looked for.
const STEP: usize = 64 << 10;

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
