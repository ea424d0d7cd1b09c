//! Mounts that are descriptors first. A detached mount is in no namespace: it goes away with its last descriptor, so a
//! process that dies leaves none behind, and it can be sent to a worker, which attaches it where it alone can see it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_string,
    fsmount, fsopen, move_mount, open_tree,
};

/// A read-only stack of layer directories, topmost first.
pub fn detached_overlay(layers: &[impl AsRef<Path>]) -> io::Result<OwnedFd> {
    // A single layer needs no overlay, and overlayfs refuses one without an upper directory.
    if let [only] = layers {
        return detached_bind(only.as_ref());
    }
    let mut context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    // One at a time: a list in one string is limited to 255 bytes and would need escaping.
    let added = layers.iter().try_for_each(|layer| fsconfig_set_string(&context, "lowerdir+", layer.as_ref()));
    let opened;
    match added {
        // Before Linux 6.8 only the list exists.
        Err(rustix::io::Errno::INVAL) => {
            context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
            opened = layers.iter().map(open_layer).collect::<io::Result<Vec<_>>>()?;
            fsconfig_set_string(&context, "lowerdir", layer_list(&opened))?;
        }
        other => other?,
    }
    fsconfig_create(&context)?;
    Ok(fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NODEV,
    )?)
}

fn open_layer(layer: impl AsRef<Path>) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(layer.as_ref(), flags, rustix::fs::Mode::empty())?)
}

/// The layers by their descriptors: a dozen fit into what the kernel takes, whatever their paths.
fn layer_list(opened: &[OwnedFd]) -> String {
    opened.iter().map(|layer| format!("/proc/self/fd/{}", layer.as_raw_fd())).collect::<Vec<_>>().join(":")
}

/// A copy of the mount of `path`, which may be a directory or a file. As writable as the file system it is on.
pub fn detached_bind(path: &Path) -> io::Result<OwnedFd> {
    Ok(open_tree(rustix::fs::CWD, path, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?)
}

/// Makes a detached mount visible at `path` in the calling thread's mount namespace.
pub fn attach(mount: impl AsFd, path: &Path) -> io::Result<()> {
    Ok(move_mount(mount, "", rustix::fs::CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}
