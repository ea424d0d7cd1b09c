use super::*;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};

/// Two empty directories; what is in them may be deeper than paths reach.
struct Two(tempfile::TempDir);

impl Two {
    fn new() -> Self {
        let two = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir_all(two.from().join("data")).unwrap();
        std::fs::create_dir_all(two.to().join("data")).unwrap();
        two
    }

    fn from(&self) -> std::path::PathBuf {
        self.0.path().join("from")
    }

    fn to(&self) -> std::path::PathBuf {
        self.0.path().join("to")
    }

    /// Saves the one and fills the other; the archive.
    fn copy(&self) -> File {
        let archive = saved(&self.from());
        Durable::open(&self.to()).unwrap().fill(archive.try_clone().unwrap()).unwrap();
        archive
    }
}

impl Drop for Two {
    fn drop(&mut self) {
        // The standard library keeps a descriptor open per level.
        let _ = std::process::Command::new("rm").arg("-rf").arg(self.0.path()).status();
    }
}

fn saved(from: &Path) -> File {
    let (mut file, room) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    Durable::open(from).unwrap().save(file.try_clone().unwrap(), &room).unwrap();
    assert!(room.metadata().unwrap().len() > file.metadata().unwrap().len(), "room for it is set aside");
    file.rewind().unwrap();
    file
}

fn archive_of(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(MAGIC).unwrap();
    file.write_all(bytes).unwrap();
    file.rewind().unwrap();
    file
}

/// The descriptors of the directories of a chain, one in the other, are not needed at once.
fn descend(root: &Path, name: &CStr, levels: usize, mut each: impl FnMut(&OwnedFd)) -> OwnedFd {
    let mut here = rustix::fs::open(root, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    for _ in 0..levels {
        each(&here);
        here = open_directory(&here, name).unwrap();
    }
    here
}

#[test]
fn an_archive_brings_back_what_it_was_made_of() {
    let two = Two::new();
    let (from, to) = (two.from().join("data"), two.to().join("data"));
    std::fs::create_dir_all(from.join("deep/er")).unwrap();
    std::fs::write(from.join("deep/er/file"), b"contents").unwrap();
    std::fs::write(from.join("empty"), b"").unwrap();
    std::os::unix::fs::chown(from.join("deep/er/file"), Some(7), Some(8)).unwrap();
    std::fs::set_permissions(from.join("deep/er/file"), PermissionsExt::from_mode(0o4751)).unwrap();
    std::fs::set_permissions(from.join("deep"), PermissionsExt::from_mode(0o1700)).unwrap();
    symlink("../nowhere", from.join("link")).unwrap();
    std::os::unix::net::UnixListener::bind(from.join("socket")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, from.join("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    std::fs::hard_link(from.join("deep/er/file"), from.join("deep/same")).unwrap();
    std::fs::hard_link(from.join("deep/er/file"), from.join("same")).unwrap();
    std::fs::hard_link(from.join("link"), from.join("same-link")).unwrap();
    two.copy();
    let meta = |path: &Path| {
        let meta = path.symlink_metadata().unwrap();
        (
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.mtime(),
            meta.mtime_nsec(),
            meta.nlink(),
            meta.is_dir() || meta.len() > 0,
        )
    };
    for name in ["deep", "deep/er", "deep/er/file", "deep/same", "same", "empty", "pipe", "."] {
        assert_eq!(meta(&to.join(name)), meta(&from.join(name)), "{name}");
    }
    assert_eq!(std::fs::read(to.join("deep/er/file")).unwrap(), b"contents");
    assert_eq!(std::fs::read_link(to.join("link")).unwrap(), Path::new("../nowhere"));
    assert_eq!(std::fs::read_link(to.join("same-link")).unwrap(), Path::new("../nowhere"));
    let inode = |name: &str| to.join(name).metadata().unwrap().ino();
    assert_eq!((inode("deep/same"), inode("same")), (inode("deep/er/file"), inode("deep/er/file")));
    assert!(to.join("pipe").metadata().unwrap().file_type().is_fifo());
    assert!(!to.join("socket").exists());
    assert_eq!(std::fs::read_dir(two.to()).unwrap().count(), 1, "nothing of the making is left");
}

#[test]
fn a_tree_may_be_deeper_than_paths_and_descriptors_reach() {
    const LEVELS: usize = 6_000;
    let two = Two::new();
    let name = CString::new("n".repeat(40)).unwrap();
    let bottom = descend(&two.from(), &name, LEVELS, |here| rustix::fs::mkdirat(here, &name, Mode::RWXU).unwrap());
    rustix::fs::symlinkat("at the bottom", &bottom, "here").unwrap();
    let archive = two.copy();
    let bottom = descend(&two.to(), &name, LEVELS, |_| {});
    assert_eq!(rustix::fs::readlinkat(&bottom, "here", Vec::new()).unwrap().as_bytes(), b"at the bottom");
    let length = archive.metadata().unwrap().len();
    assert!(length < 100 * LEVELS as u64, "a level is written once: {length}");
}

#[test]
fn a_file_of_a_tebibyte_that_is_a_hole_is_a_hole_again() {
    let two = Two::new();
    let mut file = File::create(two.from().join("data/sparse")).unwrap();
    file.write_all(b"begin").unwrap();
    file.seek(SeekFrom::Start(1 << 39)).unwrap();
    file.write_all(b"middle").unwrap();
    file.set_len(1 << 40).unwrap();
    let archive = two.copy();
    assert!(archive.metadata().unwrap().len() < 64 << 10);
    let mut back = File::open(two.to().join("data/sparse")).unwrap();
    let meta = back.metadata().unwrap();
    assert_eq!(meta.len(), 1 << 40);
    assert!(meta.blocks() * 512 < 64 << 10);
    let mut read = |at, length| {
        let mut bytes = vec![0; length];
        back.seek(SeekFrom::Start(at)).unwrap();
        back.read_exact(&mut bytes).unwrap();
        bytes
    };
    assert_eq!(read(0, 6), b"begin\0");
    assert_eq!(read((1 << 39) - 1, 8), b"\0middle\0");
}

#[test]
fn further_names_of_a_file_cost_little_and_there_may_be_as_many_as_there_can_be() {
    let two = Two::new();
    let long = "a".repeat(200);
    let first = two.from().join(&long);
    std::fs::write(&first, vec![7; 4096]).unwrap();
    // Until the file system has enough, which is at 65000 on ext4.
    let more = (1..70_000_u64).take_while(|n| std::fs::hard_link(&first, two.from().join(n.to_string())).is_ok());
    let names = 1 + more.count() as u64;
    assert!(names > 1000, "{names}");
    let archive = two.copy();
    assert_eq!(two.to().join(&long).metadata().unwrap().nlink(), names);
    assert!(archive.metadata().unwrap().len() < (8 << 10) + 32 * names);
}

#[test]
fn an_archive_cannot_leave_its_directory() {
    let two = Two::new();
    let outside = two.0.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    let meta = [0; 24];
    let named = |kind: u8, name: &[u8]| [&[kind, u8::try_from(name.len()).unwrap()], name].concat();
    let file = |name: &[u8]| [&named(FILE, name)[..], &meta, &[0; 32]].concat();
    let link = [&named(SYMLINK, b"out")[..], &meta, &10_u16.to_le_bytes(), b"../outside"].concat();
    let into = [&named(DIRECTORY, b"out")[..], &meta, &file(b"escaped"), &[END]].concat();
    let cases: [(&str, Vec<u8>); 7] = [
        ("a link is not a directory", [&link[..], &into, &[END]].concat()),
        ("a link is not a file", [&link[..], &file(b"out"), &[END]].concat()),
        ("no name goes up", [&file(b"..")[..], &[END]].concat()),
        ("no directory goes up", [&named(DIRECTORY, b"..")[..], &meta, &[END, END]].concat()),
        ("no name is a path", [&file(b"../outside/escaped")[..], &[END]].concat()),
        ("no name is absolute", [&file(b"/escaped")[..], &[END]].concat()),
        ("a name of nothing", [&named(LINK, b"x")[..], &[1; 8], &[END]].concat()),
    ];
    for (what, bytes) in cases {
        let to = two.0.path().join(what);
        std::fs::create_dir(&to).unwrap();
        assert!(Durable::open(&to).unwrap().fill(archive_of(&bytes)).is_err(), "{what}");
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0, "{what}");
    }
    let harmless = [file(b"in"), vec![END]].concat();
    Durable::open(&two.to()).unwrap().fill(archive_of(&harmless)).unwrap();
}

#[test]
fn an_archive_that_is_cut_short_or_is_none_is_refused() {
    let two = Two::new();
    std::fs::write(two.from().join("data/file"), b"contents").unwrap();
    let mut bytes = Vec::new();
    saved(&two.from()).read_to_end(&mut bytes).unwrap();
    for length in MAGIC.len()..bytes.len() {
        let to = tempfile::tempdir().unwrap();
        let cut = archive_of(&bytes[MAGIC.len()..length]);
        assert!(Durable::open(to.path()).unwrap().fill(cut).is_err(), "{length} of {}", bytes.len());
    }
    let mut other = tempfile::tempfile().unwrap();
    other.write_all(&[0; 1024]).unwrap();
    other.rewind().unwrap();
    let error = Durable::open(&two.to()).unwrap().fill(other).unwrap_err();
    assert_eq!(error.to_string(), "not an archive of a durable directory");
}
