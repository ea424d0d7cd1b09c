//! The kernel, where the safe wrappers end.
//!
//! Everything `unsafe` of the workspace lives here, small enough to be read at one sitting:
//!
//! * [`Memory`]: a memfd that can be mapped, how snapshots travel between processes without a copy;
//! * [`message`]: bytes with open descriptors over a unix socket, how the node hands things to a worker;
//! * [`packet_socket`]: the raw link that a sandbox's network stack sits on;
//! * [`detached_overlay`], [`detached_bind`]: mounts that exist only as descriptors until a worker attaches them,
//!   so that a crash leaves none behind;
//! * [`detached_ext4`]: the same of a file system that is a file, which is how a directory gets a size;
//! * [`SocketPath`]: unix sockets at paths longer than an address.

mod cgroup;
mod loopback;
mod memory;
pub mod message;
mod mount;
mod packet;
mod socket;
mod tree;

pub use cgroup::{Cgroup, CgroupVersion, Limits};
pub use loopback::{LoopError, detached_ext4};
pub use memory::{Mapping, Memory};
pub use mount::{attach, detached_bind, detached_overlay};
pub use packet::packet_socket;
pub use socket::SocketPath;
pub use tree::in_new_namespaces;

/// The machine's own clock: it never jumps, counts while the machine sleeps, and is the same for every process on it.
pub fn since_boot() -> std::time::Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    std::time::Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
