//! The binary as a user runs it, on real gVisor. Needs root.

mod access;
mod bench;
mod chaos;
mod cluster;
mod cycles;
mod faults;
mod hostile;
mod identity;
mod life;
mod limits;
mod metrics;
mod moving;
mod network;
mod orders;
mod pinning;
mod pools;
mod protocols;
mod public_client;
mod quotas;
mod snapshots;
mod store;
mod verbs;

/// The binary under test.
const ATE: &str = env!("CARGO_BIN_EXE_ate");
