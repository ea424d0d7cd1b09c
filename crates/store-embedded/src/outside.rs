//! What is known of a store outside of its directory, so that an older copy which was put in its place is noticed.
//!
//! ```text
//!   <directory>/LINE   1f0c…                         drawn anew each time the store is opened
//!   <directory>.mark   00000000000000000097 1f0c… 1f0c…
//!                      the last revision that was acknowledged, the LINE that the directory has to have, and the one
//!                      that it had before: the same, but for the moment in which it is changed
//! ```
//!
//! A copy from before the store was last opened has another `LINE`; one from after that has less than the mark, also if all
//! was flushed that it holds. The revision is written before anybody is answered and not flushed, as `MARK` is: after a power
//! cut it may lag, it never runs ahead. A whole that is copied with its mark agrees with itself, and is not noticed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ate_store::Revision;
use uuid::Uuid;

use crate::directory::OpenError;

const LINE_FILE: &str = "LINE";

/// Digits of the largest revision.
const DIGITS: usize = 20;

/// Where a store really is: what lies beside it must be the same whichever way leads there.
pub(crate) fn resolve(directory: &Path) -> PathBuf {
    let is_plain = directory.file_name().is_some() && !directory.is_symlink();
    let resolved = if is_plain { None } else { fs::canonicalize(directory).ok() };
    resolved.unwrap_or_else(|| directory.to_owned())
}

pub(crate) fn beside(directory: &Path, suffix: &str) -> PathBuf {
    let mut name = directory.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{suffix}"));
    directory.with_file_name(name)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) revision: Revision,
    line: Uuid,
    before: Uuid,
}

impl Said {
    /// What cannot be read says nothing.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.strip_suffix('\n')?.split(' ');
        let (revision, line, before) = (words.next()?, words.next()?, words.next()?);
        Some(Self {
            revision: Revision(revision.parse().ok()?),
            line: line.parse().ok()?,
            before: before.parse().ok()?,
        })
    }

    /// Whether a directory with this `LINE` is the one. An older program writes none; then the numbers decide.
    fn is_of(&self, line: Option<Uuid>) -> bool {
        line.is_none_or(|line| line == self.line || line == self.before)
    }
}

/// The mark of a store that this process has locked.
#[derive(Debug)]
pub(crate) struct Outside {
    path: PathBuf,
    file: File,
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.to_owned();
    move |source| OpenError::Io { action, path, source }
}

pub(crate) fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

impl Outside {
    fn path_of(directory: &Path) -> PathBuf {
        beside(directory, "mark")
    }

    /// What was said of the store in `directory`, if anything was.
    pub(crate) fn said(directory: &Path) -> Result<Option<Said>, OpenError> {
        let path = Self::path_of(directory);
        let mut text = String::new();
        match File::open(&path).and_then(|file| file.take(4096).read_to_string(&mut text)) {
            Ok(_) => Ok(Said::parse(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
            Err(error) => Err(io_error("read", &path)(error)),
        }
    }

    /// Refuses to begin anew where there was a store.
    pub(crate) fn check_nothing_was_in(directory: &Path) -> Result<(), OpenError> {
        match Self::said(directory)? {
            Some(Said { revision: seen, .. }) if seen > Revision::ZERO => {
                Err(OpenError::Gone { directory: directory.to_owned(), mark: Self::path_of(directory), seen })
            }
            _ => Ok(()),
        }
    }

    /// Refuses a directory, at revision `found`, that is not the one which was last used in this place.
    pub(crate) fn check(directory: &Path, found: Revision) -> Result<(), OpenError> {
        let Some(said) = Self::said(directory)? else { return Ok(()) };
        if found >= said.revision && said.is_of(line_in(directory)?) {
            return Ok(());
        }
        let (directory, mark) = (directory.to_owned(), Self::path_of(directory));
        Err(OpenError::Another { directory, mark, seen: said.revision, found })
    }

    fn open(directory: &Path) -> Result<Self, OpenError> {
        let path = Self::path_of(directory);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(io_error("open", &path))?;
        sync_parent(&path).map_err(io_error("flush", &path))?;
        Ok(Self { path, file })
    }

    /// From here on this very directory, which was checked, is the one. Whenever this is cut off, it is still.
    pub(crate) fn begin(directory: &Path, found: Revision) -> Result<Self, OpenError> {
        let outside = Self::open(directory)?;
        let line = Uuid::new_v4();
        let before = line_in(directory)?.unwrap_or(line);
        outside.say(Said { revision: found, line, before })?;
        draw(directory, line)?;
        outside.say(Said { revision: found, line, before: line })?;
        Ok(outside)
    }

    /// As [`Outside::begin`], but the directory is about to be replaced by `staged`, with `exchange`. What could be opened
    /// before that still can, if it does not come to it.
    pub(crate) fn replace<E: From<OpenError>>(
        directory: &Path,
        staged: &Path,
        revision: Revision,
        exchange: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let outside = Self::open(directory)?;
        let line = Uuid::new_v4();
        draw(staged, line)?;
        let said = Self::said(directory)?;
        let there = line_in(directory)?;
        let before = match said {
            Some(said) => there.filter(|there| said.is_of(Some(*there))).unwrap_or(said.line),
            None => there.unwrap_or(line),
        };
        outside.say(Said { revision: said.map_or(Revision::ZERO, |said| said.revision), line, before })?;
        exchange()?;
        Ok(outside.say(Said { revision, line, before: line })?)
    }

    /// Everything up to there is durable in the store.
    pub(crate) fn note(&self, revision: Revision) -> io::Result<()> {
        self.file.write_all_at(format!("{:0DIGITS$}", revision.0).as_bytes(), 0)
    }

    /// In place: it is shorter than what a disk writes at once.
    fn say(&self, said: Said) -> Result<(), OpenError> {
        let Said { revision: Revision(revision), line, before } = said;
        let text = format!("{revision:0DIGITS$} {line} {before}\n");
        let said = self.file.write_all_at(text.as_bytes(), 0).and_then(|()| self.file.set_len(text.len() as u64));
        said.and_then(|()| self.file.sync_all()).map_err(io_error("write", &self.path))
    }
}

/// What the directory says of itself. Nothing, if its first line was cut off while it was written.
fn line_in(directory: &Path) -> Result<Option<Uuid>, OpenError> {
    let path = directory.join(LINE_FILE);
    match fs::read(&path) {
        Ok(text) => Ok(str::from_utf8(&text).ok().and_then(|text| text.trim().parse().ok())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error("read", &path)(error)),
    }
}

fn draw(directory: &Path, line: Uuid) -> Result<(), OpenError> {
    let path = directory.join(LINE_FILE);
    let write = || {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path)?;
        file.write_all_at(format!("{line}\n").as_bytes(), 0)?;
        file.sync_all()?;
        sync_parent(&path)
    };
    write().map_err(io_error("write", &path))
}
