//! The worker's own root: a small tmpfs with the system's pseudo file systems, and the link to the node.

use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind_recursive, mount_change, unmount,
};

use crate::{Config, INGRESS_SOCKET, LINK_SOCKET, WorkerError};

/// Paths inside the root.
pub(crate) const LINK: &str = "/link";
pub(crate) const VOLUMES: &str = "/volume";
pub(crate) const BOXES: &str = "/box";
pub(crate) const RUNTIMES: &str = "/runtime";
pub(crate) const IMAGES: &str = "/image";

/// The root holds bundles, sockets and logs of a few boxes, kilobytes each; the rest is mounts.
const ROOT_SIZE: &str = "size=64m,mode=0700";

#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) link: UnixListener,
    pub(crate) ingress: UnixListener,
}

/// Bound before the root changes, at the paths where node and router look for them.
pub(crate) fn bind_sockets(config: &Config) -> Result<Sockets, WorkerError> {
    let bind = |name| {
        // A short path whatever the directory: socket addresses end at 108 bytes.
        std::env::set_current_dir(&config.link_directory)?;
        let socket = UnixListener::bind(name)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    };
    let sockets = Sockets {
        link: bind(LINK_SOCKET).map_err(WorkerError::io("listen for the node"))?,
        ingress: bind(INGRESS_SOCKET).map_err(WorkerError::io("listen for the router"))?,
    };
    std::env::set_current_dir("/").map_err(WorkerError::io("leave the link directory"))?;
    Ok(sockets)
}

/// Nothing mounted from here on is seen by the host, nor the other way round; `/proc` shows the worker's own processes.
pub(crate) fn private_mounts() -> Result<(), WorkerError> {
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
        .map_err(|e| WorkerError::Io { what: "make mounts private", source: e.into() })?;
    mount("proc", "/proc", "proc", MountFlags::empty(), None)
        .map_err(|e| WorkerError::Io { what: "mount /proc", source: e.into() })
}

pub(crate) fn enter(config: &Config) -> Result<(), WorkerError> {
    let root = config.root_directory.as_path();
    let io = |what| move |e: rustix::io::Errno| WorkerError::Io { what, source: e.into() };
    let options = std::ffi::CString::new(ROOT_SIZE).expect("no NUL in a constant");
    mount("tmpfs", root, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(options.as_c_str()))
        .map_err(io("mount the root"))?;
    let inside = |path: &str| root.join(path.trim_start_matches('/'));
    for path in ["/proc", "/dev", "/sys", "/tmp", "/old", LINK, VOLUMES, BOXES, RUNTIMES, IMAGES] {
        std::fs::create_dir(inside(path)).map_err(WorkerError::io("make a directory of the root"))?;
    }
    for (from, to) in [
        (Path::new("/proc"), "/proc"),
        (Path::new("/dev"), "/dev"),
        (Path::new("/sys"), "/sys"),
        (&config.link_directory, LINK),
    ] {
        mount_bind_recursive(from, inside(to)).map_err(io("bind a directory into the root"))?;
    }
    rustix::process::pivot_root(root, inside("/old")).map_err(io("enter the root"))?;
    std::env::set_current_dir("/").map_err(WorkerError::io("enter the root"))?;
    unmount("/old", UnmountFlags::DETACH).map_err(io("leave the old root"))
}
