//! A file as a disk, for as long as somebody uses it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
};

// From <linux/loop.h>.
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// How often another may be faster to take the device that the kernel has just called free.
const TRIES: usize = 64;

/// What file systems count in, and so what the device does.
const BLOCK: u32 = 4096;

/// A user whom nobody is. What a file system holds back is for its owner, which would be root and so everyone's; like
/// this it is for those who may exceed limits (`CAP_SYS_RESOURCE`), and a sandbox's file server may not.
const OWNER_OF_THE_RESERVE: &str = "4294967294";

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    /// Device, inode, device number, offset, size limit: the kernel's to fill in, or none.
    numbers: [u64; 5],
    number: u32,
    encryption: [u32; 2],
    flags: u32,
    /// File name, cipher, key.
    names: [u8; 64 + 64 + 32],
    init: [u64; 2],
    reserved: [u64; 8],
}

#[derive(Debug)]
pub enum LoopError {
    /// The kernel has no loop devices, or none is to be seen here.
    NoDevices(io::Error),
    Attach(io::Error),
    Mount(io::Error),
}

/// Mounts the ext4 file system that `file` holds. Detached like every mount here, and the loop device below it is let go
/// by the kernel with the mount: a file without a name leaves nothing behind, however its users end.
///
/// For what is scratch between snapshots: nothing is flushed to the disk below, also where a program asks for it.
pub fn detached_ext4(file: &File) -> Result<OwnedFd, LoopError> {
    // Held until the mount holds it too: without a user the device is let go.
    let (_device, path) = attach(file)?;
    mount(&path).map_err(LoopError::Mount)
}

fn mount(device: &str) -> io::Result<OwnedFd> {
    let context = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", device)?;
    fsconfig_set_flag(&context, "nobarrier")?;
    // Else the kernel would write out tables of zeroes that a hole says as well: 3% of each file.
    fsconfig_set_flag(&context, "noinit_itable")?;
    fsconfig_set_string(&context, "resuid", OWNER_OF_THE_RESERVE)?;
    fsconfig_create(&context)?;
    Ok(fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV,
    )?)
}

fn attach(file: &File) -> Result<(File, String), LoopError> {
    let open = |path: &str| File::options().read(true).write(true).open(path);
    let control = open("/dev/loop-control").map_err(LoopError::NoDevices)?;
    let mut tries = 0;
    loop {
        // SAFETY: this request takes no argument.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        if number < 0 {
            return Err(LoopError::NoDevices(io::Error::last_os_error()));
        }
        let path = format!("/dev/loop{number}");
        let device = open(&path).map_err(LoopError::NoDevices)?;
        match configure(&device, file) {
            Ok(()) => return Ok((device, path)),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && tries < TRIES => tries += 1,
            Err(error) => return Err(LoopError::Attach(error)),
        }
    }
}

fn configure(device: &File, file: &File) -> io::Result<()> {
    let config = LoopConfig {
        fd: u32::try_from(file.as_raw_fd()).expect("a descriptor is not negative"),
        block_size: BLOCK,
        numbers: [0; 5],
        number: 0,
        encryption: [0; 2],
        flags: LO_FLAGS_AUTOCLEAR,
        names: [0; 160],
        init: [0; 2],
        reserved: [0; 8],
    };
    // SAFETY: the argument is a live loop_config, which the kernel only reads; both descriptors are open.
    let done = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, std::ptr::from_ref(&config)) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_is_laid_out_as_the_kernel_wants_it() {
        assert_eq!(size_of::<LoopConfig>(), 304);
        assert_eq!(std::mem::offset_of!(LoopConfig, flags), 8 + 52);
        assert_eq!(std::mem::offset_of!(LoopConfig, reserved), 8 + 232);
    }
}
