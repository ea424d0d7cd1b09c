//! The durable directory as an archive: plain tar, one top-level directory per volume.
//!
//! Kept: names, modes, owners, modification times, symbolic and hard links. Left out: sockets, which mean nothing without
//! the process behind them; devices cannot be made in a sandbox.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Writes everything below `directory` to `file` from its start.
pub(crate) fn archive(directory: &Path, file: File) -> io::Result<()> {
    let mut archive = tar::Builder::new(BufWriter::with_capacity(1 << 20, file));
    archive.follow_symlinks(false);
    append(&mut archive, directory, Path::new(""), &mut HashMap::new())?;
    let file = archive.into_inner()?.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_data()
}

/// `linked`: files with several names, by inode, and the name that each was archived under.
fn append(
    archive: &mut tar::Builder<impl Write>,
    directory: &Path,
    inside: &Path,
    linked: &mut HashMap<(u64, u64), PathBuf>,
) -> io::Result<()> {
    let mut entries: Vec<_> = std::fs::read_dir(directory)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let (path, name) = (entry.path(), inside.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_dir() {
            archive.append_dir(&name, &path)?;
            append(archive, &path, &name, linked)?;
        } else if kind.is_symlink() {
            // Never as a hard link, also if it is one: an archive's links are looked up when it is unpacked.
            archive.append_path_with_name(&path, &name)?;
        } else if !kind.is_socket() {
            let metadata = entry.metadata()?;
            match linked.entry((metadata.dev(), metadata.ino())) {
                Entry::Occupied(first) => {
                    let mut header = tar::Header::new_gnu();
                    header.set_metadata(&metadata);
                    header.set_entry_type(tar::EntryType::Link);
                    header.set_size(0);
                    archive.append_link(&mut header, &name, first.get())?;
                }
                Entry::Vacant(first) => {
                    archive.append_path_with_name(&path, &name)?;
                    if metadata.nlink() > 1 {
                        first.insert(name);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Puts an archive's contents below `directory`, which must be empty but for the volumes' own directories.
pub(crate) fn extract(file: File, directory: &Path) -> io::Result<()> {
    let mut archive = tar::Archive::new(BufReader::with_capacity(1 << 20, file));
    archive.set_preserve_permissions(true);
    archive.set_preserve_mtime(true);
    archive.set_preserve_ownerships(true);
    archive.set_overwrite(true);
    archive.unpack(directory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn an_archive_brings_back_what_it_was_made_of() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir_all(from.path().join("data/deep/er")).unwrap();
        std::fs::write(from.path().join("data/deep/er/file"), b"contents").unwrap();
        std::fs::set_permissions(from.path().join("data/deep/er/file"), PermissionsExt::from_mode(0o4751)).unwrap();
        std::os::unix::fs::symlink("../nowhere", from.path().join("data/link")).unwrap();
        std::os::unix::net::UnixListener::bind(from.path().join("data/socket")).unwrap();
        std::fs::hard_link(from.path().join("data/deep/er/file"), from.path().join("data/deep/same")).unwrap();
        std::fs::hard_link(from.path().join("data/link"), from.path().join("data/same-link")).unwrap();
        let file = tempfile::tempfile().unwrap();
        archive(from.path(), file.try_clone().unwrap()).unwrap();
        std::io::Seek::rewind(&mut &file).unwrap();
        std::fs::create_dir(to.path().join("data")).unwrap();
        extract(file, to.path()).unwrap();
        let back = to.path().join("data/deep/er/file");
        assert_eq!(std::fs::read(&back).unwrap(), b"contents");
        assert_eq!(back.metadata().unwrap().mode() & 0o7777, 0o4751);
        assert_eq!(back.metadata().unwrap().mtime(), from.path().join("data/deep/er/file").metadata().unwrap().mtime());
        assert_eq!(std::fs::read_link(to.path().join("data/link")).unwrap(), Path::new("../nowhere"));
        assert_eq!(back.metadata().unwrap().ino(), to.path().join("data/deep/same").metadata().unwrap().ino());
        assert_eq!(std::fs::read_link(to.path().join("data/same-link")).unwrap(), Path::new("../nowhere"));
        assert!(!to.path().join("data/socket").exists());
    }

    #[test]
    fn an_archive_cannot_leave_its_directory() {
        let to = tempfile::tempdir().unwrap();
        let inner = to.path().join("inner");
        std::fs::create_dir(&inner).unwrap();
        let mut builder = tar::Builder::new(tempfile::tempfile().unwrap());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        builder.append_link(&mut header, "out", "..").unwrap();
        let mut header = tar::Header::new_gnu();
        header.set_size(4);
        header.set_mode(0o644);
        header.set_cksum();
        builder.append_data(&mut header, "out/escaped", &b"evil"[..]).unwrap();
        let mut file = builder.into_inner().unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        let _ = extract(file, &inner);
        assert!(!to.path().join("escaped").exists());
    }
}
