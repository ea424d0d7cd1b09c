//! What a run could leave on the host.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Things found at one moment. Only what belongs to one directory is looked for, so that instances, and tests, may run
/// beside each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leaks {
    /// Servers, workers and sandboxes: by what their command line names, or by the control group they are in.
    pub processes: Vec<String>,
    /// In any mount namespace that a process is in.
    pub mounts: Vec<String>,
    /// In every hierarchy.
    pub cgroups: Vec<PathBuf>,
    pub sockets: Vec<PathBuf>,
    /// Devices that stand on a file there, also on one without a name.
    pub loops: Vec<String>,
    /// Network namespaces that those processes keep.
    pub namespaces: Vec<String>,
}

impl Leaks {
    /// Everything that names the directory, or a control group of the instance that lives in it. Not this process nor
    /// those that started it, which may well name the directory.
    pub fn of(directory: &Path, cgroup: Option<&str>) -> Self {
        Self::named(&directory.display().to_string(), directory, cgroup)
    }

    /// Everything of the instance whose data directory this is, and nothing of those who only look at it.
    pub fn of_instance(data: &Path) -> Self {
        let node = data.join("node");
        Self::named(&node.display().to_string(), data, Some(&cgroup_of(&node)))
    }

    fn named(text: &str, directory: &Path, cgroup: Option<&str>) -> Self {
        let mut leaks = Self { cgroups: cgroup.map(cgroups).unwrap_or_default(), ..Self::default() };
        let us = ancestors();
        let host = namespace("self", "net");
        let (mut mounts, mut namespaces) = (BTreeMap::new(), BTreeSet::new());
        for pid in processes() {
            if let Some(seen_from) = namespace(&pid, "mnt") {
                mounts.entry(seen_from).or_insert_with(|| read(&pid, "mountinfo"));
            }
            let command = read(&pid, "cmdline").replace('\0', " ");
            if us.contains(&pid) || !(command.contains(text) || cgroup.is_some_and(|name| is_in(&pid, name))) {
                continue;
            }
            let name = if command.is_empty() { read(&pid, "comm") } else { command };
            leaks.processes.push(format!("{pid} {}", name.trim()));
            namespaces.extend(namespace(&pid, "net").filter(|namespace| Some(namespace) != host.as_ref()));
        }
        leaks.namespaces = namespaces.into_iter().collect();
        let lines = mounts.values().flat_map(|mounts| mounts.lines());
        leaks.mounts = lines.filter(|line| line.contains(text)).map(str::to_owned).collect();
        leaks.sockets = sockets(directory);
        leaks.loops = loops(text);
        leaks
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Leaks {
    /// A line for each thing.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.processes.iter().try_for_each(|process| writeln!(f, "process {process}"))?;
        self.mounts.iter().try_for_each(|mount| writeln!(f, "mount {mount}"))?;
        self.cgroups.iter().try_for_each(|cgroup| writeln!(f, "control group {}", cgroup.display()))?;
        self.sockets.iter().try_for_each(|socket| writeln!(f, "socket {}", socket.display()))?;
        self.loops.iter().try_for_each(|device| writeln!(f, "loop device {device}"))?;
        self.namespaces.iter().try_for_each(|namespace| writeln!(f, "network namespace {namespace}"))
    }
}

/// What belongs to the whole host and to nobody: firewall rules, named network namespaces, links. None of ours should ever
/// be there; what is ours can only be told by its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostWide(BTreeSet<String>);

impl HostWide {
    pub fn look() -> Self {
        let mut found = BTreeSet::new();
        for (kind, program, arguments) in [
            ("nft", "nft", &["list", "ruleset"][..]),
            ("network namespace", "ip", &["netns", "list"]),
            ("link", "ip", &["-brief", "link"]),
        ] {
            let Ok(output) = Command::new(program).args(arguments).output() else { continue };
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            found.extend(text.lines().filter(|line| is_ours(line)).map(|line| format!("{kind}: {}", line.trim())));
        }
        Self(found)
    }

    /// What is there now and was not then.
    pub fn added_since(&self, then: &Self) -> Vec<String> {
        self.0.difference(&then.0).cloned().collect()
    }
}

/// Whether a line of `ip` or `nft` names a table, link or address as workers name theirs.
fn is_ours(line: &str) -> bool {
    let words = line.split(|char: char| !(char.is_alphanumeric() || "-_.:".contains(char)));
    words.into_iter().any(|word| {
        matches!(word, "ate" | "ate0" | "act0")
            || word.starts_with("ate-")
            || word.starts_with("169.254.17.")
            || word.starts_with("fd61:7465:")
    })
}

/// As the node names the control group of its instance.
pub(crate) fn cgroup_of(node: &Path) -> String {
    let digest = ate_snapshot::Content::of(node.as_os_str().as_encoded_bytes()).digest.to_string();
    format!("ate-{}", &digest[..12])
}

fn cgroups(name: &str) -> Vec<PathBuf> {
    let hierarchies = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path());
    let roots = hierarchies.chain([PathBuf::from("/sys/fs/cgroup")]);
    roots.map(|root| root.join(name)).filter(|path| path.exists()).collect()
}

fn is_in(pid: &str, cgroup: &str) -> bool {
    read(pid, "cgroup").lines().any(|line| line.split('/').any(|part| part == cgroup))
}

fn processes() -> Vec<String> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).collect()
}

/// This process and those that started it.
fn ancestors() -> BTreeSet<String> {
    let mut pids = BTreeSet::new();
    let mut pid = std::process::id().to_string();
    while pid != "0" && pids.insert(pid.clone()) {
        let status = read(&pid, "status");
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        pid = parent.unwrap_or("0").trim().to_owned();
    }
    pids
}

fn read(pid: &str, file: &str) -> String {
    String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default()).into_owned()
}

fn namespace(pid: &str, kind: &str) -> Option<String> {
    Some(std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok()?.display().to_string())
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

fn loops(text: &str) -> Vec<String> {
    let devices = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let stands_on = |device: std::fs::DirEntry| {
        let file = std::fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        file.contains(text).then(|| format!("{} on {}", device.file_name().display(), file.trim()))
    };
    devices.filter_map(stands_on).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_workers_make_is_told_from_what_others_make() {
        for line in ["table inet ate {", "act0@if3 UP 02:a8", "ip daddr 169.254.17.2 drop", "ate-4", "iifname \"ate0\""]
        {
            assert!(is_ours(line), "{line}");
        }
        for line in ["ct state established accept", "table inet filter {", "date0 UP", "ip daddr 169.254.1.2 drop"] {
            assert!(!is_ours(line), "{line}");
        }
    }

    #[test]
    fn a_process_that_names_the_directory_is_found_and_we_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let socket = std::os::unix::net::UnixListener::bind(directory.path().join("a.sock")).unwrap();
        // Reads from a pipe that nothing is written to, after it has been started with the directory as its name.
        let mut child = Command::new("sh")
            .args(["-c", "read line"])
            .arg(directory.path())
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // A process has no command line for a moment while it becomes its program.
        while read(&child.id().to_string(), "cmdline").is_empty() {
            std::thread::yield_now();
        }
        let leaks = Leaks::of(directory.path(), None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(leaks.processes.len(), 1, "{leaks}");
        assert_eq!(leaks.sockets.len(), 1, "{leaks}");
        drop(socket);
        std::fs::remove_file(directory.path().join("a.sock")).unwrap();
        assert!(Leaks::of(directory.path(), None).is_empty());
    }
}
