//! The durable directory, and its archive: everything below it, depth first.
//!
//! ```text
//!   "ate-dir\x01"  record…
//!   d directory      name, meta; its entries follow, and an e
//!   f file           name, meta, number (0: it has one name), size, { offset, length > 0, bytes }…, offset 0, length 0
//!   s symbolic link  name, meta, length u16 of the target, target
//!   p pipe           name, meta
//!   l another name   name, number of the file              m: the same, and there are no more
//!   e end            of a directory; that of the outermost ends the archive
//!
//!   name: length u8, bytes     meta: mode u32, uid u32, gid u32, seconds i64, nanoseconds u32     other numbers: u64
//! ```
//!
//! All of it was made by an actor, which may have meant harm. So nothing is looked up by a path: one directory is open at a
//! time, and a tree may be deeper than paths and descriptors reach. No link is followed. And the archive is never much
//! larger than the directory, or an actor could make itself impossible to save: that is why it is not tar, in which every
//! entry repeats its path and each further name of a file takes a kilobyte. Holes stay holes.
//!
//! Kept: names, modes, owners, modification times, symbolic and hard links, pipes. Left out: extended attributes; sockets,
//! which mean nothing without the process behind them; devices, which cannot be made in a sandbox.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, RawDir, RawMode, Stat, Timespec, Timestamps, UTIME_OMIT, Uid,
};
use rustix::io::Errno;

const MAGIC: &[u8; 8] = b"ate-dir\x01";

const DIRECTORY: u8 = b'd';
const FILE: u8 = b'f';
const SYMLINK: u8 = b's';
const PIPE: u8 = b'p';
const LINK: u8 = b'l';
const LAST_LINK: u8 = b'm';
const END: u8 = b'e';

/// Where files with several names wait for the others while an archive is read. No volume is called so.
const LINKS: &CStr = c".links";

const BUFFER: usize = 1 << 20;

/// What names of a directory are read into, a few hundred at a time.
const NAMES: usize = 64 << 10;

/// An archive is stored compressed and sealed: what that may add to what does not compress.
fn stored_at_most(archive: u64) -> u64 {
    archive + archive / 128 + (64 << 10)
}

/// The durable directory of a box, one directory in it per volume.
#[derive(Clone, Debug)]
pub(crate) struct Durable(Arc<OwnedFd>);

impl Durable {
    /// To be opened before the actor is there: what the file system fails to keep is told to those who had it open.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(Arc::new(rustix::fs::open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)))
    }

    /// Writes it all to `file`, and sets aside as much again in `room`: what comes after must not fail for want of it.
    pub(crate) fn save(&self, file: File, room: &File) -> io::Result<()> {
        rustix::fs::syncfs(&self.0)?;
        let mut out = BufWriter::with_capacity(BUFFER, file);
        archive(self.0.as_fd(), &mut out)?;
        let mut file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_data()?;
        let length = stored_at_most(file.stream_position()?);
        let taken = room.metadata()?.len();
        Ok(rustix::fs::fallocate(room, FallocateFlags::empty(), taken, length)?)
    }

    /// Puts what an archive holds into it. It must be empty but for the volumes' own directories.
    pub(crate) fn fill(&self, file: File) -> io::Result<()> {
        extract(&mut BufReader::with_capacity(BUFFER, file), self.0.as_fd())
    }
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn open_directory(at: impl AsFd, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(at, name, flags, Mode::empty())?)
}

/// Of a thing, whatever it is.
struct Meta {
    mode: RawMode,
    uid: u32,
    gid: u32,
    modified: Timespec,
}

impl Meta {
    fn of(stat: &Stat) -> Self {
        let modified = Timespec { tv_sec: stat.st_mtime, tv_nsec: i64::try_from(stat.st_mtime_nsec).unwrap_or(0) };
        Self { mode: stat.st_mode & 0o7777, uid: stat.st_uid, gid: stat.st_gid, modified }
    }

    fn times(&self) -> Timestamps {
        Timestamps { last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }, last_modification: self.modified }
    }

    fn owner(&self) -> (Option<Uid>, Option<Gid>) {
        (Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))
    }

    fn apply(&self, to: impl AsFd) -> io::Result<()> {
        let (uid, gid) = self.owner();
        rustix::fs::fchown(&to, uid, gid)?;
        // After the owner: a change of owner takes away set-user-id.
        rustix::fs::fchmod(&to, Mode::from_raw_mode(self.mode))?;
        Ok(rustix::fs::futimens(&to, &self.times())?)
    }

    /// To what cannot be opened. A symbolic link has no mode of its own.
    fn apply_at(&self, at: impl AsFd, name: &CStr) -> io::Result<()> {
        let (uid, gid) = self.owner();
        rustix::fs::chownat(&at, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(rustix::fs::utimensat(&at, name, &self.times(), AtFlags::SYMLINK_NOFOLLOW)?)
    }
}

/// A directory on the way to where we are.
struct Above {
    inode: u64,
    /// Directories in it that are still to be archived.
    rest: Vec<CString>,
}

fn archive(root: BorrowedFd<'_>, out: &mut BufWriter<File>) -> io::Result<()> {
    out.write_all(MAGIC)?;
    let mut writer = Writer { out, linked: HashMap::new(), numbers: 0 };
    let mut here = open_directory(root, c".")?;
    let (mut inode, mut rest) = (rustix::fs::fstat(&here)?.st_ino, writer.entries(&here)?);
    let mut above: Vec<Above> = Vec::new();
    loop {
        if let Some(name) = rest.pop() {
            let inner = open_directory(&here, &name)?;
            let stat = rustix::fs::fstat(&inner)?;
            writer.begin(DIRECTORY, &name, Some(&stat))?;
            above.push(Above { inode, rest });
            (here, inode) = (inner, stat.st_ino);
            rest = writer.entries(&here)?;
            continue;
        }
        writer.out.write_all(&[END])?;
        let Some(outer) = above.pop() else { break };
        here = open_directory(&here, c"..")?;
        if rustix::fs::fstat(&here)?.st_ino != outer.inode {
            return Err(io::Error::other("it changes while it is archived"));
        }
        (inode, rest) = (outer.inode, outer.rest);
    }
    match writer.linked.values().all(|link| link.missing == 0) {
        true => Ok(()),
        false => Err(io::Error::other("a file in it has a name outside of it")),
    }
}

struct Writer<'a> {
    out: &'a mut BufWriter<File>,
    /// Files with several names, by inode.
    linked: HashMap<u64, Linked>,
    numbers: u64,
}

struct Linked {
    number: u64,
    /// Names that have not come by yet.
    missing: u64,
}

impl Writer<'_> {
    fn begin(&mut self, kind: u8, name: &CStr, stat: Option<&Stat>) -> io::Result<()> {
        let name = name.to_bytes();
        let length = u8::try_from(name.len()).map_err(|_| io::Error::other("a name longer than names can be"))?;
        self.out.write_all(&[kind, length])?;
        self.out.write_all(name)?;
        if let Some(Meta { mode, uid, gid, modified }) = stat.map(Meta::of) {
            for number in [mode, uid, gid] {
                self.out.write_all(&number.to_le_bytes())?;
            }
            self.out.write_all(&modified.tv_sec.to_le_bytes())?;
            self.out.write_all(&u32::try_from(modified.tv_nsec).unwrap_or(0).to_le_bytes())?;
        }
        Ok(())
    }

    fn number(&mut self, number: u64) -> io::Result<()> {
        self.out.write_all(&number.to_le_bytes())
    }

    /// Writes all of a directory but the directories in it, and returns those.
    fn entries(&mut self, here: &OwnedFd) -> io::Result<Vec<CString>> {
        let (mut names, mut directories) = (Vec::with_capacity(NAMES), Vec::new());
        let mut entries = RawDir::new(here, names.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let stat = rustix::fs::statat(here, name, AtFlags::SYMLINK_NOFOLLOW)?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => directories.push(name.to_owned()),
                FileType::RegularFile => self.file(here, name, &stat)?,
                FileType::Symlink => {
                    let target = rustix::fs::readlinkat(here, name, Vec::new())?;
                    let target = target.to_bytes();
                    let length = u16::try_from(target.len()).map_err(io::Error::other)?;
                    self.begin(SYMLINK, name, Some(&stat))?;
                    self.out.write_all(&length.to_le_bytes())?;
                    self.out.write_all(target)?;
                }
                FileType::Fifo => self.begin(PIPE, name, Some(&stat))?,
                _ => {}
            }
        }
        Ok(directories)
    }

    fn file(&mut self, here: &OwnedFd, name: &CStr, stat: &Stat) -> io::Result<()> {
        if let Some(linked) = self.linked.get_mut(&stat.st_ino) {
            linked.missing = linked.missing.saturating_sub(1);
            let (kind, number) = (if linked.missing == 0 { LAST_LINK } else { LINK }, linked.number);
            self.begin(kind, name, None)?;
            return self.number(number);
        }
        let mut number = 0;
        if stat.st_nlink > 1 {
            self.numbers += 1;
            number = self.numbers;
            #[allow(clippy::unnecessary_cast, reason = "it is of another width on other processors")]
            self.linked.insert(stat.st_ino, Linked { number, missing: stat.st_nlink as u64 - 1 });
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::openat(here, name, flags, Mode::empty())?);
        let size = file.metadata()?.len();
        self.begin(FILE, name, Some(stat))?;
        self.number(number)?;
        self.number(size)?;
        let mut at = 0;
        while let Some((start, end)) = data_after(&file, at)? {
            self.number(start)?;
            self.number(end - start)?;
            file.seek(SeekFrom::Start(start))?;
            if io::copy(&mut (&file).take(end - start), self.out)? != end - start {
                return Err(io::Error::other("a file in it changes while it is archived"));
            }
            at = end;
        }
        self.number(0)?;
        self.number(0)
    }
}

/// The next piece of a file that is no hole.
fn data_after(file: &File, at: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Err(Errno::NXIO) => return Ok(None),
        start => start?,
    };
    Ok(Some((start, rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(start))?)))
}

fn extract(input: &mut BufReader<File>, root: BorrowedFd<'_>) -> io::Result<()> {
    if take::<8>(input)? != *MAGIC {
        return Err(invalid("not an archive of a durable directory"));
    }
    let mut reader = Reader { input, root, links: None };
    let mut here = open_directory(root, c".")?;
    let mut above: Vec<Meta> = Vec::new();
    loop {
        let [kind] = take::<1>(reader.input)?;
        if kind == END {
            // Only now, since every entry that is made in a directory changes its times.
            let Some(meta) = above.pop() else { break };
            meta.apply(&here)?;
            here = open_directory(&here, c"..")?;
            continue;
        }
        let name = reader.name()?;
        if kind != DIRECTORY {
            reader.entry(kind, &here, &name)?;
            continue;
        }
        let meta = reader.meta()?;
        match rustix::fs::mkdirat(&here, &name, Mode::RWXU) {
            Err(Errno::EXIST) if above.is_empty() => {}
            made => made?,
        }
        here = open_directory(&here, &name)?;
        above.push(meta);
    }
    match reader.links {
        Some(_) => Ok(rustix::fs::unlinkat(root, LINKS, AtFlags::REMOVEDIR)?),
        None => Ok(()),
    }
}

fn take<const N: usize>(input: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes)?;
    Ok(bytes)
}

struct Reader<'a> {
    input: &'a mut BufReader<File>,
    root: BorrowedFd<'a>,
    /// [`LINKS`], once there is a file with several names.
    links: Option<OwnedFd>,
}

impl Reader<'_> {
    fn number(&mut self) -> io::Result<u64> {
        Ok(u64::from_le_bytes(take(self.input)?))
    }

    fn text(&mut self, length: usize) -> io::Result<CString> {
        let mut bytes = vec![0; length];
        self.input.read_exact(&mut bytes)?;
        CString::new(bytes).map_err(|_| invalid("a name with a zero in it"))
    }

    fn name(&mut self) -> io::Result<CString> {
        let [length] = take(self.input)?;
        let name = self.text(length.into())?;
        match name.as_bytes() {
            b"" | b"." | b".." => Err(invalid("a name that is none")),
            bytes if bytes.contains(&b'/') => Err(invalid("a name that is a path")),
            _ => Ok(name),
        }
    }

    fn meta(&mut self) -> io::Result<Meta> {
        let [mode, uid, gid] = [take(self.input)?, take(self.input)?, take(self.input)?].map(u32::from_le_bytes);
        let tv_sec = i64::from_le_bytes(take(self.input)?);
        let tv_nsec = u32::from_le_bytes(take(self.input)?).into();
        Ok(Meta { mode, uid, gid, modified: Timespec { tv_sec, tv_nsec } })
    }

    fn entry(&mut self, kind: u8, here: &OwnedFd, name: &CStr) -> io::Result<()> {
        match kind {
            FILE => self.file(here, name),
            SYMLINK => {
                let meta = self.meta()?;
                let length = u16::from_le_bytes(take(self.input)?);
                rustix::fs::symlinkat(&self.text(length.into())?, here, name)?;
                meta.apply_at(here, name)
            }
            PIPE => {
                let meta = self.meta()?;
                rustix::fs::mknodat(here, name, FileType::Fifo, Mode::RUSR, 0)?;
                meta.apply_at(here, name)?;
                Ok(rustix::fs::chmodat(here, name, Mode::from_raw_mode(meta.mode), AtFlags::empty())?)
            }
            LINK | LAST_LINK => {
                let number = link_name(self.number()?);
                let links = self.links.as_ref().ok_or(invalid("another name of no file"))?;
                // The last takes the place of the one that waited: a file may have as many names as it can have.
                Ok(match kind {
                    LINK => rustix::fs::linkat(links, &number, here, name, AtFlags::empty()),
                    _ => rustix::fs::renameat(links, &number, here, name),
                }?)
            }
            _ => Err(invalid("an entry of no known kind")),
        }
    }

    fn file(&mut self, here: &OwnedFd, name: &CStr) -> io::Result<()> {
        let meta = self.meta()?;
        let (number, size) = (self.number()?, self.number()?);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::openat(here, name, flags, Mode::RWXU)?);
        loop {
            let (start, length) = (self.number()?, self.number()?);
            if length == 0 {
                break;
            }
            file.seek(SeekFrom::Start(start))?;
            if io::copy(&mut self.input.by_ref().take(length), &mut file)? != length {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        file.set_len(size)?;
        meta.apply(&file)?;
        if number > 0 {
            let links = match &self.links {
                Some(links) => links,
                None => {
                    rustix::fs::mkdirat(self.root, LINKS, Mode::RWXU)?;
                    self.links.insert(open_directory(self.root, LINKS)?)
                }
            };
            rustix::fs::linkat(here, name, links, link_name(number), AtFlags::empty())?;
        }
        Ok(())
    }
}

fn link_name(number: u64) -> CString {
    CString::new(number.to_string()).expect("digits")
}

#[cfg(test)]
mod tests;
