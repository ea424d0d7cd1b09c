use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Kernel buffers of the link, both ways. Below about 1 MiB bulk transfers through the sandbox stall on drops.
const LINK_BUFFER: libc::c_int = 4 << 20;

/// A raw Ethernet socket on `interface` of the calling thread's network namespace, with a GSO header before each frame:
/// large frames pass host and sandbox whole (1.3 GB/s instead of 0.1), and the sandbox needs no software segmentation,
/// which panics on TCP connections that were restored from a snapshot.
pub fn packet_socket(interface: &str) -> io::Result<OwnedFd> {
    let index = nix::net::if_::if_nametoindex(interface)?;
    let protocol = (libc::ETH_P_ALL as u16).to_be();
    // SAFETY: no pointers; the result is checked before it is used as a descriptor.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    set_option(&fd, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
    for option in [libc::SO_SNDBUFFORCE, libc::SO_RCVBUFFORCE] {
        set_option(&fd, libc::SOL_SOCKET, option, LINK_BUFFER)?;
    }
    // SAFETY: sockaddr_ll is plain integers, for which zero is valid.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol;
    address.sll_ifindex = libc::c_int::try_from(index).map_err(io::Error::other)?;
    // SAFETY: the address is a live sockaddr_ll and the length is its own.
    let bound = unsafe {
        libc::bind(
            fd.as_raw_fd(),
            std::ptr::from_ref(&address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if bound < 0 { Err(io::Error::last_os_error()) } else { Ok(fd) }
}

fn set_option(fd: &OwnedFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the value is a live c_int and the length is its own.
    let set = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(&value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
