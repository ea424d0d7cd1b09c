//! What a snapshot taken here can depend on.

use std::collections::BTreeSet;

#[derive(Clone, Debug)]
pub(crate) struct HostFacts {
    pub(crate) architecture: &'static str,
    pub(crate) cpu_features: BTreeSet<String>,
}

impl HostFacts {
    pub(crate) fn read() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        // "flags" on x86, "Features" on Arm; all processors of a machine are taken to be alike.
        let line = cpuinfo.lines().find(|line| line.starts_with("flags") || line.starts_with("Features"));
        let features = line.and_then(|line| line.split_once(':')).map(|(_, features)| features).unwrap_or_default();
        Self { architecture: architecture(), cpu_features: features.split_whitespace().map(str::to_owned).collect() }
    }
}

/// As container images and configs name it.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
