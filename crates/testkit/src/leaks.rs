//! What a run could leave on the host.

use std::path::{Path, PathBuf};

/// Counts of things, to be compared between two moments. Only what belongs to one data directory is counted, so that tests
/// may run beside each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leaks {
    pub processes: Vec<String>,
    pub mounts: Vec<String>,
    pub cgroups: Vec<PathBuf>,
    pub sockets: Vec<PathBuf>,
}

impl Leaks {
    /// Everything that names the directory, or a control group of the instance that lives in it.
    pub fn of(directory: &Path, cgroup: Option<&str>) -> Self {
        let text = directory.display().to_string();
        let mut leaks = Self::default();
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let own = std::process::id().to_string();
            if name.bytes().all(|byte| byte.is_ascii_digit()) && name != own {
                let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
                let command = String::from_utf8_lossy(&command).replace('\0', " ");
                if command.contains(&text) {
                    leaks.processes.push(command);
                }
            }
        }
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        leaks.mounts = mounts.lines().filter(|line| line.contains(&text)).map(str::to_owned).collect();
        if let Some(cgroup) = cgroup {
            let hierarchies =
                std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path());
            let roots = hierarchies.chain([PathBuf::from("/sys/fs/cgroup")]);
            leaks.cgroups = roots.map(|root| root.join(cgroup)).filter(|path| path.exists()).collect();
        }
        leaks.sockets = sockets(directory);
        leaks
    }
}

fn sockets(directory: &Path) -> Vec<PathBuf> {
    use std::os::unix::fs::FileTypeExt;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(sockets(&entry.path())),
            Ok(kind) if kind.is_socket() => found.push(entry.path()),
            _ => {}
        }
    }
    found
}
