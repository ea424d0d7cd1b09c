//! `ate node doctor`: what this machine lacks, what each lack costs, and what to do about it.
//!
//! ```text
//!   Facts::collect ─▶ checks ─▶ a line each; --fix writes what can be written, and looks again
//! ```
//! The facts are gathered in one place and judged in another, so that every judgement is tested.

mod facts;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use ate_chart::{Cell, Column, Paint, Table, Tone};
use serde::Serialize;

use facts::{Facts, Knob, RuntimeFile};

/// `pidfd_open` is the newest thing that everything stands on.
const OLDEST_KERNEL: (u32, u32) = (5, 3);

/// From here on shared memory, which is what a sandbox's memory is, can have pages of 64 KiB.
const KERNEL_WITH_MTHP: (u32, u32) = (6, 12);

/// Less, and there is no room for an image and a snapshot.
const LEAST_DISK: u64 = 1 << 30;

/// Less, and a handful of sandboxes does not fit: one takes some 30 MB besides what its program uses.
const LEAST_MEMORY: u64 = 512 << 20;

/// What a limit of namespaces is set to that was 0.
const NAMESPACES: u64 = 65_536;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ate node doctor            exits with 1 if something is missing that is needed
  ate node doctor --fix      sets what can be set at run time; a reboot forgets it
  ate node doctor -o json")]
pub(crate) struct DoctorArgs {
    /// Set what can be set at run time, until the next reboot
    #[arg(long)]
    fix: bool,
    /// The sandbox runtimes, as `runtime/build` prints it; found in the user's cache if not given
    #[arg(long, env = "ATE_RUNTIME", value_name = "DIR")]
    runtime: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    /// It works without, at a price.
    Slow,
    Missing,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    name: &'static str,
    state: State,
    /// Nothing works while it is missing.
    needed: bool,
    found: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    cost: String,
    /// A command, or what else helps.
    #[serde(skip_serializing_if = "String::is_empty")]
    remedy: String,
    #[serde(skip)]
    fixes: Vec<Fix>,
}

/// A file of the kernel's and what to write into it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Fix {
    path: PathBuf,
    value: String,
}

#[derive(Serialize)]
struct Findings<'a> {
    /// Nothing that is needed is missing.
    ok: bool,
    checks: &'a [Check],
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            state: State::Ok,
            needed: true,
            found: found.into(),
            cost: String::new(),
            remedy: String::new(),
            fixes: Vec::new(),
        }
    }

    fn costs(self, state: State, cost: &str, remedy: impl Into<String>) -> Self {
        Self { state, cost: cost.to_owned(), remedy: remedy.into(), ..self }
    }

    fn missing(name: &'static str, found: impl Into<String>, cost: &str, remedy: impl Into<String>) -> Self {
        Self::ok(name, found).costs(State::Missing, cost, remedy)
    }

    fn not_needed(self) -> Self {
        Self { needed: false, ..self }
    }

    fn fixed_by(self, fixes: Vec<Fix>) -> Self {
        Self { fixes, ..self }
    }
}

/// Returns whether this machine has what is needed.
pub(crate) fn run(args: &DoctorArgs, global: &ate_cli::Global) -> anyhow::Result<bool> {
    let collect = || Facts::collect(&global.data_dir, args.runtime.as_deref());
    let mut found = checks(&collect());
    if args.fix {
        for fix in found.iter().flat_map(|check| &check.fixes) {
            fix.apply()?;
            eprintln!("set {} to {}, until the next reboot", fix.path.display(), fix.value);
        }
        found = checks(&collect());
    }
    let ok = !found.iter().any(|check| check.needed && check.state == State::Missing);
    match global.document(&Findings { ok, checks: &found }) {
        Some(text) => print!("{text}"),
        None => show(&found, Paint(ate_cli::Terminal::of_process().colour.0))?,
    }
    Ok(ok)
}

fn show(checks: &[Check], paint: Paint) -> std::io::Result<()> {
    let mut table = Table::new(["STATE", "CHECK", "FOUND"].map(Column::left));
    for Check { name, state, found, cost, remedy, .. } in checks {
        let (word, tone) = match state {
            State::Ok => ("ok", Tone::Good),
            State::Slow => ("slow", Tone::Warn),
            State::Missing => ("missing", Tone::Bad),
        };
        let found = if cost.is_empty() { found.clone() } else { format!("{found}: {cost}; try: {remedy}") };
        table.row([Cell::new(word).tone(tone), name.into(), found.into()]);
    }
    table.write(&mut std::io::stdout().lock(), paint, "")?;
    if checks.iter().any(|check| !check.fixes.is_empty()) {
        eprintln!("`ate node doctor --fix` sets what can be set at run time; it does not survive a reboot");
    }
    Ok(())
}

impl Fix {
    fn apply(&self) -> anyhow::Result<()> {
        let Self { path, value } = self;
        match std::fs::write(path, value) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                bail!("cannot write {}: run as root\n  try: sudo ate node doctor --fix", path.display())
            }
            written => written.with_context(|| format!("cannot write {value:?} to {}", path.display())),
        }
    }
}

/// Everything that counts, judged. Pure.
fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![
        match facts.is_root {
            true => Check::ok("root", "yes"),
            false => Check::missing("root", "no", "no namespaces, control groups or mounts", "sudo ate dev"),
        },
        kernel(facts),
        cgroups(facts),
    ];
    checks.extend([("ip", "iproute2"), ("nft", "nftables")].map(|(tool, package)| match facts.tools.get(tool) {
        Some(path) => Check::ok(tool, path.display().to_string()),
        None => {
            let cost = "workers have no network";
            Check::missing(tool, "not in PATH", cost, format!("apt-get install {package}"))
        }
    }));
    checks.push(namespaces(facts));
    checks.push(match &facts.overlay {
        Ok(()) => Check::ok("overlayfs", "layers can be stacked"),
        Err(error) => {
            let cost = "images of more than one layer do not start";
            let remedy = "modprobe overlay, or a kernel of 6.8 or newer";
            Check::missing("overlayfs", error, cost, remedy)
        }
    });
    checks.push(match &facts.durable {
        Ok(()) => Check::ok("durable", "directories can have a size"),
        Err(error) => {
            let cost = "templates with a durableDir do not start";
            let remedy = "apt-get install e2fsprogs; modprobe -a loop ext4; Linux 5.8 or newer";
            Check::missing("durable", error, cost, remedy)
        }
    });
    checks.push(match &facts.memfd {
        Ok(()) => Check::ok("memfd", "yes"),
        Err(error) => Check::missing("memfd", error, "no actor can be restored", "a kernel with CONFIG_MEMFD_CREATE"),
    });
    checks.extend([&facts.anonymous_pages, &facts.shared_pages].map(huge_pages));
    checks.push(runtime(facts));
    checks.extend(facts.ports.iter().map(|(port, flag, taken)| match taken {
        None => Check::ok("port", format!("{port} is free")),
        Some(why) => {
            let remedy = format!("ate dev {flag} 127.0.0.1:0");
            let found = format!("{port}: {why}");
            Check::missing("port", found, "`ate dev` needs another one, or runs already", remedy).not_needed()
        }
    }));
    checks.push(room(
        "disk",
        facts.disk_free,
        LEAST_DISK,
        "images and snapshots do not fit",
        "--data-dir on a larger disk",
    ));
    checks.push(room("memory", facts.memory_free, LEAST_MEMORY, "few sandboxes fit", "end something, or add memory"));
    checks
}

fn kernel(facts: &Facts) -> Check {
    let Facts { kernel, kernel_name, .. } = facts;
    if *kernel < OLDEST_KERNEL {
        let (major, minor) = OLDEST_KERNEL;
        return Check::missing("kernel", kernel_name, "nothing works", format!("boot Linux {major}.{minor} or newer"));
    }
    if *kernel < KERNEL_WITH_MTHP {
        let (major, minor) = KERNEL_WITH_MTHP;
        let remedy = format!("boot Linux {major}.{minor} or newer");
        return Check::ok("kernel", kernel_name).costs(State::Slow, "no 64 KiB pages: see below", remedy);
    }
    Check::ok("kernel", kernel_name)
}

fn cgroups(facts: &Facts) -> Check {
    let facts::Cgroups { version, controllers } = &facts.cgroups;
    let wanted: &[&str] =
        if *version == 2 { &["cpu", "memory", "pids"] } else { &["cpu", "cpuacct", "memory", "pids"] };
    let missing: Vec<&str> = wanted.iter().copied().filter(|wanted| !controllers.contains(*wanted)).collect();
    if missing.is_empty() {
        return Check::ok("cgroups", format!("v{version}: {}", wanted.join(", ")));
    }
    let found = format!("v{version} without {}", missing.join(", "));
    let remedy = match version {
        2 => "boot with cgroup_no_v1=all, and without cgroup_disable".to_owned(),
        _ => {
            let mount = |name: &&str| {
                format!("mkdir -p /sys/fs/cgroup/{name} && mount -t cgroup -o {name} {name} /sys/fs/cgroup/{name}")
            };
            missing.iter().map(mount).collect::<Vec<_>>().join("; ")
        }
    };
    Check::missing("cgroups", found, "workers cannot be limited, and are not started", remedy)
}

fn namespaces(facts: &Facts) -> Check {
    let absent: Vec<&str> =
        facts.namespaces.iter().filter(|(_, limit)| limit.is_none()).map(|(kind, _)| *kind).collect();
    if !absent.is_empty() {
        let found = format!("no {}", absent.join(", "));
        return Check::missing("namespaces", found, "workers cannot be started", "a kernel with CONFIG_NAMESPACES");
    }
    let closed = facts.namespaces.iter().filter(|(_, limit)| **limit == Some(0));
    let closed: Vec<&str> = closed.map(|(kind, _)| *kind).collect();
    if closed.is_empty() {
        let kinds: Vec<&str> = facts.namespaces.keys().copied().collect();
        return Check::ok("namespaces", kinds.join(", "));
    }
    let set = |kind: &&str| format!("sysctl user.max_{kind}_namespaces={NAMESPACES}");
    let remedy: Vec<String> = closed.iter().map(set).collect();
    let fix = |kind: &&str| Fix {
        path: format!("/proc/sys/user/max_{kind}_namespaces").into(),
        value: NAMESPACES.to_string(),
    };
    let found = format!("none allowed: {}", closed.join(", "));
    Check::missing("namespaces", found, "workers cannot be started", remedy.join("; "))
        .fixed_by(closed.iter().map(fix).collect())
}

fn huge_pages(knob: &Knob) -> Check {
    let Some(setting) = &knob.setting else {
        let cost = "wakes cost about twice the processor time";
        return Check::ok(knob.name, "this kernel has none")
            .costs(State::Slow, cost, "boot Linux 6.12 or newer")
            .not_needed();
    };
    let effective = if setting == "inherit" { knob.inherited.as_deref().unwrap_or_default() } else { setting };
    let check = Check::ok(knob.name, setting).not_needed();
    if effective == "always" {
        return check;
    }
    // Measured with a small Python server: 85 ms from snapshot to answer, 58 ms with both; 3 to 4 MB more per sandbox.
    let cost = "wakes cost about twice the processor time (and with it 3-4 MB more per sandbox)";
    check
        .costs(State::Slow, cost, format!("echo always > {}", knob.path.display()))
        .fixed_by(vec![Fix { path: knob.path.clone(), value: "always".to_owned() }])
}

fn runtime(facts: &Facts) -> Check {
    let (cost, remedy) = ("no actor can start", "./setup");
    match &facts.runtime {
        Err(error) => Check::missing("runtime", error, cost, remedy),
        Ok((directory, files)) => {
            let wrong: Vec<String> = files.iter().filter_map(RuntimeFile::fault).collect();
            if wrong.is_empty() {
                return Check::ok("runtime", format!("{} files as pinned in {}", files.len(), directory.display()));
            }
            Check::missing("runtime", wrong.join(", "), cost, remedy)
        }
    }
}

fn room(name: &'static str, free: Option<u64>, least: u64, cost: &str, remedy: &str) -> Check {
    let Some(free) = free else { return Check::ok(name, "not known").not_needed() };
    let found = format!("{:.1} GiB free", free as f64 / f64::from(1 << 30));
    let check = Check::ok(name, found).not_needed();
    if free < least { check.costs(State::Slow, cost, remedy) } else { check }
}

/// Whether a file exists that a person could run.
fn in_path(tool: &str, path: &std::ffi::OsStr) -> Option<PathBuf> {
    std::env::split_paths(path).map(|directory| directory.join(tool)).find(|file| Path::is_file(file))
}

#[cfg(test)]
mod tests;
