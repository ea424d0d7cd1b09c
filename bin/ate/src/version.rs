//! `ate version`: what this binary is, and which sandbox runtimes it knows.

use serde::Serialize;

use crate::runtime::{self, Pin};

/// The commit and the target, for whoever asks the API.
pub(crate) const BUILT_FROM: &str = concat!(env!("ATE_COMMIT"), " ", env!("ATE_TARGET"));

const DIRTY: &str = "-dirty";

#[derive(Debug, Serialize)]
struct Version {
    version: &'static str,
    /// Absent if it was not built from a checkout.
    #[serde(skip_serializing_if = "Option::is_none")]
    commit: Option<&'static str>,
    /// The checkout differed from the commit.
    dirty: bool,
    rustc: &'static str,
    target: &'static str,
    profile: &'static str,
    runtimes: Vec<Pin>,
}

pub(crate) fn run(global: &ate_cli::Global) -> anyhow::Result<()> {
    let version = Version::of(env!("ATE_COMMIT"), runtime::all_pins()?);
    print!("{}", global.document(&version).unwrap_or_else(|| version.text()));
    Ok(())
}

impl Version {
    fn of(commit: &'static str, runtimes: Vec<Pin>) -> Self {
        let clean = commit.strip_suffix(DIRTY);
        Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: Some(clean.unwrap_or(commit)).filter(|commit| !commit.is_empty()),
            dirty: clean.is_some(),
            rustc: env!("ATE_RUSTC"),
            target: env!("ATE_TARGET"),
            profile: env!("ATE_PROFILE"),
            runtimes,
        }
    }

    fn text(&self) -> String {
        let dirty = if self.dirty { ", with changes that are not committed" } else { "" };
        let mut text = format!(
            "ate {}\n  commit    {}{dirty}\n  compiler  {}\n  target    {}, {}\n  runtimes  by sha256\n",
            self.version,
            self.commit.unwrap_or("unknown: not built from a checkout"),
            self.rustc,
            self.target,
            self.profile,
        );
        for Pin { class, architecture, build, file, sha256 } in &self.runtimes {
            text.push_str(&format!("    {sha256}  {class} {architecture}/{build}/{file}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_built_from_what_is_told_also_without_a_checkout() {
        let pins = runtime::all_pins().unwrap();
        assert!(pins.iter().any(|pin| pin.build == "tuned" && pin.file == "runsc"), "{pins:?}");
        let version = Version::of("0123abc-dirty", pins);
        assert_eq!((version.commit, version.dirty), (Some("0123abc"), true));
        assert!(version.text().contains("commit    0123abc, with changes that are not committed\n"));
        assert!(version.text().contains("  gvisor amd64/tuned/gvisor-bin/gvisor_sentry\n"));
        let version = Version::of("", Vec::new());
        assert_eq!((version.commit, version.dirty), (None, false));
        assert!(version.text().contains("unknown"));
    }
}
