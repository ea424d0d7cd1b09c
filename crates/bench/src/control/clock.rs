//! One clock for the benchmark and the processes it starts.

use rustix::time::{ClockId, clock_gettime};

/// Microseconds since the machine was started: the same in every process.
pub(crate) fn now() -> u64 {
    micros(ClockId::Monotonic)
}

/// Microseconds of processor time that this process has used.
pub(crate) fn busy() -> u64 {
    micros(ClockId::ProcessCPUTime)
}

fn micros(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0) / 1000
}
