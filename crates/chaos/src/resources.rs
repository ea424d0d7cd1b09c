//! What nodes and their workers hold while they live. One more of something with every fault would be a leak that no end of a
//! process gives back.

use std::collections::BTreeMap;
use std::path::Path;

use ate_testkit::Leaks;

use crate::faults::Site;

/// What caches and connections may differ by from one look to another, for all processes together. Of what holds somebody's
/// memory there is no more than there was.
const MORE: usize = 16;

const BOXES: &str = "boxes";

/// How many of what, over all nodes: which node has which worker is not the same in the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources(BTreeMap<&'static str, usize>);

impl Resources {
    pub(crate) fn of(site: &Site) -> Self {
        let mut counts = BTreeMap::new();
        let mut add = |what, count| *counts.entry(what).or_default() += count;
        for node in site.cluster.running("node") {
            let (pid, workers) = (site.cluster.pid(&node), site.cluster.workers_of(&node));
            add("descriptors of nodes", links(pid).len());
            for pid in workers.iter().copied().chain([pid]) {
                add("memory images", links(pid).iter().filter(|link| link.starts_with("/memfd:")).count());
            }
            for pid in workers {
                add("descriptors of workers", links(pid).len());
                add("mounts of workers", lines(&format!("/proc/{pid}/mounts")));
                // Not the processes in them: how many a sandbox has is its own affair.
                add(BOXES, entries(&format!("/proc/{pid}/root/box")));
                add("volumes", entries(&format!("/proc/{pid}/root/volume")));
            }
            let leaks = Leaks::of_instance(&site.cluster.data(&node));
            add("loop devices", leaks.loops.len());
            add("control groups", leaks.cgroups.iter().map(|root| below(root)).sum());
        }
        let named = site.cluster.directory().display().to_string();
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        add("mounts of the host", mounts.lines().filter(|line| line.contains(&named)).count());
        Self(counts)
    }

    /// How many boxes wait for somebody, if nobody is awake.
    pub(crate) fn boxes(&self) -> usize {
        self.0.get(BOXES).copied().unwrap_or(0)
    }

    /// What there is more of than there was.
    pub(crate) fn exceeding(&self, before: &Self) -> Vec<String> {
        let most = |what: &str| {
            let count = before.0.get(what).copied().unwrap_or(0);
            if what.starts_with("descriptors") { count + MORE } else { count }
        };
        let more = self.0.iter().filter(|(what, count)| **count > most(what));
        more.map(|(what, count)| format!("{count} {what}, not {}", most(what))).collect()
    }
}

/// What a process has open.
fn links(pid: u32) -> Vec<String> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some(std::fs::read_link(entry.path()).ok()?.display().to_string())).collect()
}

fn lines(file: &str) -> usize {
    std::fs::read_to_string(file).map(|text| text.lines().count()).unwrap_or(0)
}

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory).map(Iterator::count).unwrap_or(0)
}

fn below(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter(|entry| entry.path().is_dir()).map(|entry| 1 + below(&entry.path())).sum()
}
