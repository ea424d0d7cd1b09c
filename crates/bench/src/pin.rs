//! Processors: who runs on which, and how long.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::BenchError;

/// The processors that this process may use.
pub(crate) fn processors() -> Result<Vec<usize>, BenchError> {
    let set = sched_getaffinity(None).map_err(|error| BenchError::io("ask for processors")(error.into()))?;
    Ok((0..CpuSet::MAX_CPU).filter(|&processor| set.is_set(processor)).collect())
}

/// Runs `work` on a thread that has only these processors, as has every process that it starts.
pub(crate) fn pinned<T: Send>(
    processors: &[usize],
    work: impl FnOnce() -> Result<T, BenchError> + Send,
) -> Result<T, BenchError> {
    let mut set = CpuSet::new();
    processors.iter().for_each(|&processor| set.set(processor));
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            sched_setaffinity(None, &set).map_err(|error| BenchError::io("choose processors")(error.into()))?;
            work()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Processor time that a process and its children have used so far, in seconds.
pub(crate) fn processor_seconds(pid: u32) -> f64 {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|child| child.parse().ok()).map(processor_seconds);
    #[expect(clippy::cast_precision_loss, reason = "seconds of processor time")]
    let own = ticks(pid).unwrap_or(0) as f64 / rustix::param::clock_ticks_per_second() as f64;
    own + children.sum::<f64>()
}

fn ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, which may hold anything, ends with the last parenthesis.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}
