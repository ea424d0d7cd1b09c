//! How much memory the processes of a control group take.

use std::path::{Path, PathBuf};

use ate_sys::Cgroup;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryUse {
    /// What the kernel charges the group for: every page it was the first to touch, page cache and kernel memory too.
    pub(crate) charged: u64,
    pub(crate) share: Share,
    pub(crate) processes: usize,
}

/// What processes map, each page divided by the number of those who map it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    /// Anonymous and shared memory: gone with the processes.
    pub(crate) own: u64,
    /// Programs and libraries, which are in the page cache for all who run them: the more sandboxes, the less for each.
    pub(crate) files: u64,
}

impl MemoryUse {
    /// Of a group, without those below it.
    pub(crate) fn of_cgroup(path: &str) -> Self {
        let pids = pids_in(path);
        let charged = Cgroup::at(path).memory_bytes().unwrap_or(0);
        let mut share = Share::default();
        for of in pids.iter().map(|&pid| Share::of(pid)) {
            share = Share { own: share.own + of.own, files: share.files + of.files };
        }
        Self { charged, share, processes: pids.len() }
    }
}

/// The groups directly below one.
pub(crate) fn children(path: &str) -> Vec<String> {
    let entries = std::fs::read_dir(hierarchy().join(path.trim_start_matches('/'))).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| format!("{path}/{}", entry.file_name().to_string_lossy()))
        .collect();
    names.sort();
    names
}

/// The group that a process is in.
pub(crate) fn group_of(pid: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        (controllers.is_empty() || controllers.split(',').any(|name| name == "memory")).then(|| path.to_owned())
    })
}

impl Share {
    /// Of one process; nothing if it is gone.
    pub(crate) fn of(pid: u32) -> Self {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default())
    }

    fn parse(rollup: &str) -> Self {
        let field = |name: &str| {
            let value = |line: &str| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok();
            rollup.lines().find_map(value).unwrap_or(0) << 10
        };
        Self { own: field("Pss_Anon:") + field("Pss_Shmem:"), files: field("Pss_File:") }
    }
}

fn pids_in(path: &str) -> Vec<u32> {
    let file = hierarchy().join(path.trim_start_matches('/')).join("cgroup.procs");
    std::fs::read_to_string(file).unwrap_or_default().lines().filter_map(|line| line.parse().ok()).collect()
}

fn hierarchy() -> PathBuf {
    let first = Path::new("/sys/fs/cgroup/memory");
    if first.is_dir() { first.to_owned() } else { PathBuf::from("/sys/fs/cgroup") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_read_from_what_the_kernel_says() {
        let rollup = "55d0-7ffc ---p 00000000 00:00 0    [rollup]\nRss:    900 kB\nPss:    700 kB\nPss_Anon:   100 kB\n\
                      Pss_File:   200 kB\nPss_Shmem:   400 kB\n";
        assert_eq!(Share::parse(rollup), Share { own: 500 << 10, files: 200 << 10 });
        assert!(Share::of(std::process::id()).own > 0);
    }

    #[test]
    fn a_process_is_in_a_group() {
        assert!(group_of(std::process::id()).is_some_and(|path| path.starts_with('/')));
    }
}
