//! One message: bytes, and open descriptors that arrive with the first of them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

/// Most descriptors one message may carry. The kernel's own limit is 253; a box of ten containers, which is as many as a
/// template may have, is made of some thirty.
pub const MAX_FDS: usize = 48;

const CONTROL_SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// Sends a prefix of `bytes` (at least one) with all of `fds`; returns how many bytes went.
/// The socket's own blocking mode decides whether it waits.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); CONTROL_SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
    }
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Receives into `bytes`, appending descriptors to `fds` (close-on-exec). Zero means the peer has closed.
pub fn receive(socket: impl AsFd, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); CONTROL_SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.flags.contains(rustix::net::ReturnFlags::CTRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the peer sent more descriptors than a message may carry",
        ));
    }
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn descriptors_travel_with_the_bytes() {
        let (a, b) = UnixStream::pair().unwrap();
        let (inner, other) = UnixStream::pair().unwrap();
        assert_eq!(send(&a, b"take", &[inner.as_fd()]).unwrap(), 4);
        drop(inner);
        let (mut bytes, mut fds) = ([0; 16], Vec::new());
        assert_eq!(receive(&b, &mut bytes, &mut fds).unwrap(), 4);
        assert_eq!(fds.len(), 1);
        rustix::io::write(&fds[0], b"x").unwrap();
        let mut one = [0];
        rustix::io::read(&other, &mut one).unwrap();
        assert_eq!(one, *b"x");
    }
}
