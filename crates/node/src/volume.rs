//! A durable directory: a file system of its own in a file without a name.
//!
//! ```text
//!   sparse file (O_TMPFILE) ─▶ mkfs.ext4 ─▶ loop device ─▶ detached mount ─▶ worker ─▶ sandbox
//! ```
//! Its size is the limit: whoever fills it is told so by the kernel (ENOSPC), and nobody else notices. The disk below is
//! used as far as there is something in it. Nothing has a name on the host, and all of it goes with its last user.
//!
//! Room on that disk is not set aside: boxes are made ahead, for many more actors than ever write much. Where the host's
//! own disk is full, a write fails late: the actor's fsync says so (EIO), and so does the next save, which leaves it running.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use ate_sys::LoopError;

/// The size of a file system is counted in these.
const BLOCK: u64 = 4096;

/// One inode per so many bytes: source trees and package directories are of small files.
const BYTES_PER_INODE: &str = "8192";

/// Held back, in percent: what was full when it was saved must fit again, though its directories may be laid out anew.
const RESERVE: &str = "3";

#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    #[error("its file cannot be made")]
    File(#[source] io::Error),
    #[error("mkfs.ext4 cannot be run: install e2fsprogs")]
    NoMkfs(#[source] io::Error),
    #[error("mkfs.ext4 failed ({status}): {said}")]
    Format { status: std::process::ExitStatus, said: String },
    #[error("there are no loop devices: modprobe loop, and let /dev show them")]
    NoLoop(#[source] io::Error),
    #[error("a loop device cannot be used: that takes Linux 5.8 or newer")]
    Loop(#[source] io::Error),
    #[error("ext4 cannot be mounted: modprobe ext4")]
    Mount(#[source] io::Error),
}

/// Makes an empty durable directory of `bytes` in `file`, which must be empty, as a detached mount. Blocks.
pub fn durable_directory(file: File, bytes: u64) -> Result<OwnedFd, VolumeError> {
    file.set_len(bytes.next_multiple_of(BLOCK)).map_err(VolumeError::File)?;
    format(file.try_clone().map_err(VolumeError::File)?)?;
    let mount = ate_sys::detached_ext4(&file).map_err(|error| match error {
        LoopError::NoDevices(error) => VolumeError::NoLoop(error),
        LoopError::Attach(error) => VolumeError::Loop(error),
        LoopError::Mount(error) => VolumeError::Mount(error),
    })?;
    rustix::fs::unlinkat(&mount, "lost+found", rustix::fs::AtFlags::REMOVEDIR)
        .map_err(|error| VolumeError::Mount(error.into()))?;
    Ok(mount)
}

fn format(file: File) -> Result<(), VolumeError> {
    let output = Command::new("mkfs.ext4")
        .args(["-q", "-F", "-b", "4096", "-I", "256", "-i", BYTES_PER_INODE, "-m", RESERVE])
        // Nobody reads it after a crash, so there is nothing to be repaired by a journal.
        .args(["-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard", "/proc/self/fd/0"])
        // How a program opens a file that has no name.
        .stdin(file)
        .stdout(Stdio::null())
        .output()
        .map_err(VolumeError::NoMkfs)?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
            Err(VolumeError::Format { status: output.status, said })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;

    fn create(mount: &OwnedFd, name: &str) -> File {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(mount, name, flags, Mode::from_raw_mode(0o644)).unwrap().into()
    }

    /// Whether a loop device stands on this file.
    fn is_attached(file: &File) -> bool {
        let inode = file.metadata().unwrap().ino().to_string();
        let devices = std::fs::read_dir("/sys/block").unwrap().flatten();
        let backing =
            devices.filter_map(|device| std::fs::read_to_string(device.path().join("loop/backing_file")).ok());
        // A file without a name is shown by its inode.
        backing.into_iter().any(|path| path.contains(&format!("#{inode} ")))
    }

    #[test]
    fn a_durable_directory_is_empty_ends_at_its_size_and_goes_with_its_last_user() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let size = 16 << 20;
        let directory = tempfile::tempdir().unwrap();
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(directory.path(), flags, Mode::from_raw_mode(0o600)).unwrap());
        let mount = durable_directory(file.try_clone().unwrap(), size).unwrap();
        assert!(is_attached(&file));
        assert!(file.metadata().unwrap().blocks() * 512 < 1 << 20, "an empty one takes no room");
        let listed = rustix::fs::openat(&mount, ".", OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty()).unwrap();
        let names = rustix::fs::Dir::new(listed).unwrap().map(|entry| entry.unwrap().file_name().to_owned());
        assert_eq!(names.filter(|name| !name.to_bytes().starts_with(b".")).count(), 0);
        let mut big = create(&mount, "big");
        let full = (0..64).find_map(|_| big.write_all(&[1; 1 << 20]).err()).expect("it is full at some time");
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        assert!(big.metadata().unwrap().len() > size * 4 / 5, "most of it can be used");
        rustix::fs::syncfs(&big).unwrap();
        assert!(file.metadata().unwrap().blocks() * 512 <= size);
        drop((big, mount));
        // The kernel does it behind the last close.
        let begun = std::time::Instant::now();
        while is_attached(&file) {
            assert!(begun.elapsed().as_secs() < 30, "the loop device is gone with the mount");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    #[test]
    fn many_at_once_each_get_a_device_of_their_own() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        std::thread::scope(|scope| {
            let make = |number: usize| {
                let mount = durable_directory(tempfile::tempfile().unwrap(), 16 << 20).unwrap();
                create(&mount, &format!("only-{number}"));
                mount
            };
            let threads: Vec<_> = (0..8).map(|number| scope.spawn(move || make(number))).collect();
            let mounts: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            for (number, mount) in mounts.iter().enumerate() {
                let there = |name: &str| {
                    rustix::fs::accessat(mount, name, rustix::fs::Access::EXISTS, rustix::fs::AtFlags::empty())
                };
                assert!(there(&format!("only-{number}")).is_ok());
                assert!(there(&format!("only-{}", (number + 1) % 8)).is_err());
            }
        });
    }
}
