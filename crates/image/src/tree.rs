//! A directory tree that nothing written into it can leave.
//!
//! Every change names one entry of one open directory. Directories are opened by the kernel beneath the root, never
//! through a symbolic link, so there is no path that an archive could bend after it was checked.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    self, AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, UTIME_OMIT, Uid,
    XattrFlags,
};
use rustix::io::Errno;

use crate::meter::{Allowance, Limits};
use crate::unpack::{Fault, Refused};

/// Longest path of an entry, that of the kernel; a longer one is refused.
pub(crate) const MAX_PATH: usize = 4095;

/// Most directories above an entry; deeper ones are refused. Removing a tree opens one descriptor per level.
const MAX_DEPTH: usize = 256;

pub(crate) const OPAQUE: &str = "trusted.overlay.opaque";
const CAPABILITY: &str = "security.capability";
const BLOCK: u64 = 4096;

/// Where an entry goes, relative to the root; empty for the root itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EntryPath(PathBuf);

impl EntryPath {
    /// An absolute path starts at the root of the layer; one that climbs is refused.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Refused> {
        let mut path = PathBuf::new();
        for part in bytes.split(|byte| *byte == b'/') {
            match part {
                b"" | b"." => {}
                b".." => return Err(Refused::Climbs),
                part => path.push(OsStr::from_bytes(part)),
            }
        }
        let fits = bytes.len() <= MAX_PATH && !bytes.contains(&0) && path.iter().count() <= MAX_DEPTH;
        if fits { Ok(Self(path)) } else { Err(Refused::Path) }
    }

    pub(crate) fn parent(&self) -> &Path {
        self.0.parent().unwrap_or(Path::new(""))
    }

    pub(crate) fn name(&self) -> Option<&OsStr> {
        self.0.file_name()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Attributes {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) modified: Timespec,
    pub(crate) capability: Option<Vec<u8>>,
}

impl Attributes {
    /// Of a directory that has no entry of its own.
    const IMPLIED: Self =
        Self { mode: 0o755, uid: 0, gid: 0, modified: Timespec { tv_sec: 0, tv_nsec: 0 }, capability: None };
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occupant {
    Nothing,
    Directory,
    File,
    Symlink,
    Whiteout,
    Other,
}

pub(crate) struct Tree<'a> {
    root: OwnedFd,
    allowance: &'a Allowance,
    /// About what the tree takes on disk.
    pub(crate) disk_bytes: u64,
}

impl<'a> Tree<'a> {
    /// `root` is an empty directory of ours.
    pub(crate) fn new(root: &Path, allowance: &'a Allowance) -> io::Result<Self> {
        let root = fs::openat(CWD, root, directory_flags(), Mode::empty())?;
        apply(&root, &Attributes::IMPLIED)?;
        Ok(Self { root, allowance, disk_bytes: BLOCK })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.allowance.limits
    }

    /// An entry for a directory: what an earlier entry put into it stays.
    pub(crate) fn directory(&mut self, path: &EntryPath, attributes: &Attributes) -> Result<(), Fault> {
        let Some(name) = path.name() else {
            return Ok(apply(&self.root, attributes)?);
        };
        let parent = self.open(path.parent())?;
        keeping_time(&parent, || {
            if !matches!(occupant(&parent, name)?, Occupant::Directory | Occupant::Whiteout) {
                remove(&parent, name)?;
            }
            self.make_directory(&parent, name)?;
            let directory = fs::openat(&parent, name, directory_flags(), Mode::empty())?;
            Ok(apply(&directory, attributes)?)
        })
    }

    pub(crate) fn file(
        &mut self,
        path: &EntryPath,
        attributes: &Attributes,
        data: &mut impl Read,
    ) -> Result<u64, Fault> {
        let (parent, name) = self.vacate(path)?;
        keeping_time(&parent, || {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut file = std::fs::File::from(fs::openat(&parent, &name, flags, Mode::RUSR | Mode::WUSR)?);
            let size = io::copy(data, &mut file)?;
            apply(&file, attributes)?;
            self.disk_bytes += size.next_multiple_of(BLOCK);
            Ok(size)
        })
    }

    pub(crate) fn symlink(&mut self, path: &EntryPath, attributes: &Attributes, target: &[u8]) -> Result<(), Fault> {
        let (parent, name) = self.vacate(path)?;
        keeping_time(&parent, || {
            fs::symlinkat(target, &parent, &name)?;
            let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
            fs::chownat(&parent, &name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
            Ok(fs::utimensat(&parent, &name, &times(attributes.modified), AtFlags::SYMLINK_NOFOLLOW)?)
        })
    }

    /// The target is a path in the layer, like that of any entry.
    pub(crate) fn hard_link(&mut self, path: &EntryPath, target: &EntryPath) -> Result<(), Fault> {
        let missing = || Fault::from(Refused::LinkTarget);
        let target_name = target.name().ok_or_else(missing)?;
        let target_parent = self.open_existing(target.parent()).map_err(|errno| match errno {
            Errno::LOOP => Refused::ThroughSymlink.into(),
            Errno::NOENT | Errno::NOTDIR => missing(),
            errno => Fault::from(errno),
        })?;
        if path == target || !matches!(occupant(&target_parent, target_name)?, Occupant::File | Occupant::Symlink) {
            return Err(missing());
        }
        let (parent, name) = self.vacate(path)?;
        keeping_time(&parent, || Ok(fs::linkat(&target_parent, target_name, &parent, &name, AtFlags::empty())?))
    }

    /// Hides `name` of the layers below. What this layer itself holds under that name stays, as the OCI rules want.
    pub(crate) fn whiteout(&mut self, parent: &Path, name: &OsStr) -> Result<(), Fault> {
        let parent = self.open(parent)?;
        keeping_time(&parent, || match occupant(&parent, name)? {
            Occupant::Nothing => {
                Ok(fs::mknodat(&parent, name, FileType::CharacterDevice, Mode::empty(), fs::makedev(0, 0))?)
            }
            Occupant::Directory => {
                make_opaque(&fs::openat(&parent, name, directory_flags(), Mode::empty())?).map_err(Fault::from)
            }
            _ => Ok(()),
        })
    }

    /// Hides everything that the layers below hold in this directory.
    pub(crate) fn opaque(&mut self, directory: &Path) -> Result<(), Fault> {
        Ok(make_opaque(&self.open(directory)?)?)
    }

    /// The open parent of `path`, in which nothing has its name any more: a later entry wins over an earlier one.
    fn vacate(&mut self, path: &EntryPath) -> Result<(OwnedFd, OsString), Fault> {
        let name = path.name().ok_or(Refused::RootIsNoDirectory)?;
        let parent = self.open(path.parent())?;
        keeping_time(&parent, || remove(&parent, name))?;
        Ok((parent, name.to_owned()))
    }

    /// Opens a directory, making it and those above it where they have no entry.
    fn open(&mut self, path: &Path) -> Result<OwnedFd, Fault> {
        match self.open_existing(path) {
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(Errno::LOOP) => return Err(Refused::ThroughSymlink.into()),
            other => return Ok(other?),
        }
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Errno::NOENT.into());
        };
        let parent = self.open(parent)?;
        keeping_time(&parent, || self.make_directory(&parent, name))?;
        Ok(self.open_existing(path)?)
    }

    fn open_existing(&self, path: &Path) -> Result<OwnedFd, Errno> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        // NOFOLLOW would turn a link at the end into "not a directory", which is true of other things too.
        fs::openat2(&self.root, path, directory_flags() - OFlags::NOFOLLOW, Mode::empty(), resolve)
    }

    fn make_directory(&mut self, parent: &OwnedFd, name: &OsStr) -> Result<(), Fault> {
        let before = occupant(parent, name)?;
        match before {
            Occupant::Directory => return Ok(()),
            Occupant::Nothing => {}
            Occupant::Whiteout => fs::unlinkat(parent, name, AtFlags::empty())?,
            _ => return Err(Refused::ThroughFile.into()),
        }
        self.allowance.take_entry()?;
        self.disk_bytes += BLOCK;
        fs::mkdirat(parent, name, Mode::RWXU)?;
        let directory = fs::openat(parent, name, directory_flags(), Mode::empty())?;
        apply(&directory, &Attributes::IMPLIED)?;
        if before == Occupant::Whiteout {
            // The layer hides the directory below and puts its own in the place.
            make_opaque(&directory)?;
        }
        Ok(())
    }
}

fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

pub(crate) fn occupant(directory: impl AsFd, name: &OsStr) -> Result<Occupant, Errno> {
    let stat = match fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(Occupant::Nothing),
        other => other?,
    };
    Ok(match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Occupant::Directory,
        FileType::RegularFile => Occupant::File,
        FileType::Symlink => Occupant::Symlink,
        FileType::CharacterDevice if stat.st_rdev == 0 => Occupant::Whiteout,
        _ => Occupant::Other,
    })
}

fn apply(file: impl AsFd, attributes: &Attributes) -> Result<(), Errno> {
    let file = file.as_fd();
    // In this order: a change of owner clears setuid bits and capabilities.
    fs::fchown(file, Some(Uid::from_raw(attributes.uid)), Some(Gid::from_raw(attributes.gid)))?;
    fs::fchmod(file, Mode::from_raw_mode(attributes.mode))?;
    if let Some(capability) = &attributes.capability {
        fs::fsetxattr(file, CAPABILITY, capability, XattrFlags::empty())?;
    }
    fs::futimens(file, &times(attributes.modified))
}

fn times(modified: Timespec) -> Timestamps {
    Timestamps { last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }, last_modification: modified }
}

fn make_opaque(directory: impl AsFd) -> Result<(), Errno> {
    fs::fsetxattr(directory, OPAQUE, b"y", XattrFlags::empty())
}

pub(crate) fn is_opaque(directory: impl AsFd) -> Result<bool, Errno> {
    let mut value = [0; 1];
    match fs::fgetxattr(directory, OPAQUE, &mut value[..]) {
        Ok(length) => Ok(&value[..length] == b"y"),
        Err(Errno::NODATA) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// A change inside a directory moves its time, and that time may already be the one the layer wants.
fn keeping_time<T>(directory: &OwnedFd, change: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    let before = fs::fstat(directory)?;
    let result = change()?;
    let nanoseconds = before.st_mtime_nsec.try_into().unwrap_or_default();
    fs::futimens(directory, &times(Timespec { tv_sec: before.st_mtime, tv_nsec: nanoseconds }))?;
    Ok(result)
}

/// Removes whatever has this name, with everything in it.
fn remove(parent: &OwnedFd, name: &OsStr) -> Result<(), Fault> {
    match occupant(parent, name)? {
        Occupant::Nothing => return Ok(()),
        Occupant::Directory => {}
        _ => return Ok(fs::unlinkat(parent, name, AtFlags::empty())?),
    }
    let directory = fs::openat(parent, name, directory_flags(), Mode::empty())?;
    for child in Dir::read_from(&directory)? {
        let child = OsString::from_vec(child?.file_name().to_bytes().to_vec());
        if child != "." && child != ".." {
            remove(&directory, &child)?;
        }
    }
    Ok(fs::unlinkat(parent, name, AtFlags::REMOVEDIR)?)
}
