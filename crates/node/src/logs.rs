//! What actors print, one file each, on the node's disk.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use ate_name::ActorKey;

/// A log file is cut off here and begun anew; the one before it is kept.
const MAX_LOG: u64 = 16 << 20;

#[derive(Clone, Debug)]
pub struct Logs {
    directory: PathBuf,
}

/// One line of an actor's log, a JSON object.
pub type LogLine = String;

impl Logs {
    pub(crate) fn open(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    pub fn path(&self, actor: &ActorKey) -> PathBuf {
        self.directory.join(actor.atespace.as_str()).join(format!("{}.jsonl", actor.name))
    }

    /// For writing at the end, whoever else does.
    pub(crate) fn append(&self, actor: &ActorKey) -> io::Result<File> {
        let path = self.path(actor);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        if path.metadata().is_ok_and(|metadata| metadata.len() > MAX_LOG) {
            std::fs::rename(&path, path.with_extension("jsonl.1"))?;
        }
        File::options().create(true).append(true).open(path)
    }
}
