//! Control groups, version 1 (one hierarchy per controller) and version 2 (one for all).

use std::io;
use std::path::{Path, PathBuf};

const ROOT: &str = "/sys/fs/cgroup";

/// The period over which a CPU limit is counted, the kernel's own default.
const CPU_PERIOD_MICROS: u64 = 100_000;

/// What a group may use; `None` is no limit of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub memory_bytes: Option<u64>,
    pub cpu_millis: Option<u64>,
    pub processes: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupVersion {
    V1,
    V2,
}

impl CgroupVersion {
    pub fn of_this_host() -> Self {
        if Path::new(ROOT).join("cgroup.controllers").exists() { Self::V2 } else { Self::V1 }
    }
}

/// A group by its path below the root of every hierarchy, e.g. `/ate/worker-1`. It may or may not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    version: CgroupVersion,
    path: String,
}

impl Cgroup {
    pub fn at(path: &str) -> Self {
        Self { version: CgroupVersion::of_this_host(), path: format!("/{}", path.trim_matches('/')) }
    }

    pub fn child(&self, name: &str) -> Self {
        Self { version: self.version, path: format!("{}/{name}", self.path) }
    }

    /// As an OCI spec names it.
    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn create(&self, limits: &Limits) -> io::Result<()> {
        match self.version {
            CgroupVersion::V1 => {
                for controller in ["memory", "cpu", "cpuacct", "pids"] {
                    std::fs::create_dir_all(self.v1(controller))?;
                }
            }
            CgroupVersion::V2 => {
                let mut at = PathBuf::from(ROOT);
                for part in self.path.split('/').filter(|part| !part.is_empty()) {
                    // A controller works in a group only if its parent hands it down.
                    std::fs::write(at.join("cgroup.subtree_control"), "+memory +cpu +pids")?;
                    at.push(part);
                    match std::fs::create_dir(&at) {
                        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                        _ => {}
                    }
                }
            }
        }
        self.limit(limits)
    }

    pub fn limit(&self, limits: &Limits) -> io::Result<()> {
        let number = |limit: Option<u64>, none: &str| limit.map_or_else(|| none.to_owned(), |n| n.to_string());
        let quota = limits.cpu_millis.map(|millis| millis * CPU_PERIOD_MICROS / 1000);
        match self.version {
            CgroupVersion::V1 => {
                std::fs::write(self.v1("memory").join("memory.limit_in_bytes"), number(limits.memory_bytes, "-1"))?;
                std::fs::write(self.v1("cpu").join("cpu.cfs_quota_us"), number(quota, "-1"))?;
                std::fs::write(self.v1("pids").join("pids.max"), number(limits.processes, "max"))
            }
            CgroupVersion::V2 => {
                std::fs::write(self.v2().join("memory.max"), number(limits.memory_bytes, "max"))?;
                std::fs::write(self.v2().join("cpu.max"), format!("{} {CPU_PERIOD_MICROS}", number(quota, "max")))?;
                std::fs::write(self.v2().join("pids.max"), number(limits.processes, "max"))
            }
        }
    }

    /// Moves a process, and what it will start, into the group.
    pub fn add(&self, pid: u32) -> io::Result<()> {
        match self.version {
            CgroupVersion::V1 => ["memory", "cpu", "cpuacct", "pids"]
                .iter()
                .try_for_each(|controller| std::fs::write(self.v1(controller).join("cgroup.procs"), pid.to_string())),
            CgroupVersion::V2 => std::fs::write(self.v2().join("cgroup.procs"), pid.to_string()),
        }
    }

    /// Bytes charged to the group now; `None` if it does not exist.
    pub fn memory_bytes(&self) -> Option<u64> {
        let file = match self.version {
            CgroupVersion::V1 => self.v1("memory").join("memory.usage_in_bytes"),
            CgroupVersion::V2 => self.v2().join("memory.current"),
        };
        std::fs::read_to_string(file).ok()?.trim().parse().ok()
    }

    /// How many processes of the group the kernel has killed for want of memory.
    pub fn oom_kills(&self) -> u64 {
        let file = match self.version {
            CgroupVersion::V1 => self.v1("memory").join("memory.oom_control"),
            CgroupVersion::V2 => self.v2().join("memory.events"),
        };
        field(&file, "oom_kill").unwrap_or(0)
    }

    /// Processes in the group and in those below it, as this process's pid namespace numbers them; those it cannot see are left out.
    pub fn processes(&self) -> Vec<u32> {
        match self.version {
            CgroupVersion::V1 => processes_below(&self.v1("memory")),
            CgroupVersion::V2 => processes_below(&self.v2()),
        }
    }

    pub fn exists(&self) -> bool {
        self.directories().iter().any(|directory| directory.exists())
    }

    /// Removes the group and those below it, in every hierarchy. Groups with living processes stay: an error.
    pub fn remove(&self) -> io::Result<()> {
        self.directories().iter().try_for_each(|directory| remove_tree(directory))
    }

    fn directories(&self) -> Vec<PathBuf> {
        match self.version {
            // Sandboxes are put into every hierarchy that the host mounts, not only those we limit.
            CgroupVersion::V1 => std::fs::read_dir(ROOT)
                .into_iter()
                .flatten()
                .filter_map(|entry| Some(entry.ok()?.path().join(&self.path[1..])))
                .filter(|directory| directory.is_dir())
                .collect(),
            CgroupVersion::V2 => vec![self.v2()],
        }
    }

    fn v1(&self, controller: &str) -> PathBuf {
        Path::new(ROOT).join(controller).join(&self.path[1..])
    }

    fn v2(&self) -> PathBuf {
        Path::new(ROOT).join(&self.path[1..])
    }
}

fn field(file: &Path, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

fn processes_below(directory: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    let mut found: Vec<u32> = text.lines().filter_map(|line| line.parse().ok()).filter(|&pid| pid != 0).collect();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(processes_below(&entry.path()));
        }
    }
    found
}

fn remove_tree(directory: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    match std::fs::remove_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_limits_counts_and_goes_away() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let group = Cgroup::at(&format!("ate-test-{}", std::process::id()));
        group.create(&Limits { memory_bytes: Some(64 << 20), cpu_millis: Some(500), processes: Some(10) }).unwrap();
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        group.add(child.id()).unwrap();
        assert!(group.memory_bytes().is_some());
        assert_eq!(group.oom_kills(), 0);
        assert_eq!(group.processes(), [child.id()]);
        group.child("below").create(&Limits::default()).unwrap();
        group.child("below").add(child.id()).unwrap();
        assert_eq!(group.processes(), [child.id()], "also there");
        assert!(group.child("nope").memory_bytes().is_none());
        assert!(group.remove().is_err(), "a group with a process in it stays");
        child.kill().unwrap();
        child.wait().unwrap();
        group.remove().unwrap();
        assert!(!group.exists());
    }
}
