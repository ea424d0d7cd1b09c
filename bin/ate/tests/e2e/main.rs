//! The binary as a user runs it, on real gVisor. Needs root.

mod faults;
mod life;

/// The binary under test.
const ATE: &str = env!("CARGO_BIN_EXE_ate");
