use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// Longest path that fits into a socket's address, with the zero that ends it.
const LONGEST: usize = 107;

/// The path of a unix socket, whatever its length: a long one goes by way of its directory's descriptor. Valid while this
/// lives.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    _directory: Option<OwnedFd>,
}

impl SocketPath {
    pub fn of(path: &Path) -> io::Result<Self> {
        if path.as_os_str().len() <= LONGEST {
            return Ok(Self { path: path.to_owned(), _directory: None });
        }
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not the path of a socket"));
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(directory, flags, Mode::empty())?;
        let path = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
        Ok(Self { path, _directory: Some(directory) })
    }

    /// Borrowed, since it means nothing without the descriptor.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_socket_of_any_depth_is_bound_and_reached() {
        for depth in [0, 40] {
            let temporary = tempfile::tempdir().unwrap();
            let directory = temporary.path().join("directory/".repeat(depth));
            std::fs::create_dir_all(&directory).unwrap();
            let path = directory.join("x.sock");
            let listener = UnixListener::bind(SocketPath::of(&path).unwrap().path()).unwrap();
            assert!(path.exists());
            UnixStream::connect(SocketPath::of(&path).unwrap().path()).unwrap();
            listener.accept().unwrap();
        }
    }
}
