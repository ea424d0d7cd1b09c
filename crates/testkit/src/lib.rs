//! What end-to-end tests stand on: the real binary, started as a user would, on ports and in directories of its own.
//!
//! Everything a test makes lives in one temporary directory and under one process; both are gone when the test ends, also
//! when it fails. What a failed test leaves for the reader is printed.

mod client;
mod cluster;
mod counter;
mod leaks;
mod machine;
mod metrics;
mod namespace;
mod way;

pub use ate_proto::ate::v1::HistoryEntry;
pub use client::{Client, pool};
pub use cluster::{Cluster, Shape};
pub use counter::{Reply, counter_image, shell_image};
pub use leaks::{HostWide, Leaks};
pub use machine::{Machine, Said, Setting, sandbox_runtimes};
pub use namespace::Namespace;
