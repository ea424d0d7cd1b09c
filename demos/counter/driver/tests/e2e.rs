//! The demo as `make demo` runs it, only shorter. Needs root.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;

use ate_testkit::{Leaks, counter_image};

const DEMO: &str = env!("CARGO_BIN_EXE_counter-demo");
const ACTORS: u64 = 6;
/// One to each, the mixture, a crowd of everyone, ten at once and two more; then some to whoever is frozen.
const REQUESTS: u64 = ACTORS + 4 + ACTORS + 10 + 2;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..").canonicalize().unwrap()
}

/// The `ate` and the sandbox runtimes of this checkout. Cargo offers a test only the binaries of its own package.
fn built() -> &'static (PathBuf, PathBuf) {
    static BUILT: OnceLock<(PathBuf, PathBuf)> = OnceLock::new();
    BUILT.get_or_init(|| {
        let profile = Path::new(DEMO).parent().unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "ate", "--target-dir"]).arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.current_dir(repository()).status().unwrap().success(), "ate does not build");
        let runtime = Command::new(repository().join("runtime/build")).arg("all").output().unwrap();
        assert!(runtime.status.success(), "runtime/build failed");
        (profile.join("ate"), String::from_utf8(runtime.stdout).unwrap().trim().into())
    })
}

/// A directory for a demo and what it needs; nothing of it is left when the test ends, however it ends.
struct Fixture(tempfile::TempDir);

impl Fixture {
    fn new() -> Self {
        let fixture = Self(tempfile::Builder::new().prefix("ate-demo-").tempdir().unwrap());
        let image = counter_image(fixture.0.path());
        for name in ["template.yaml", "pool.yaml"] {
            let text = std::fs::read_to_string(repository().join("demos/counter").join(name)).unwrap();
            let line = |line: &str| match line.trim_start().split_once(": ") {
                Some(("image", _)) => format!("      image: {image}\n"),
                Some(("freezeAfter", _)) => "    freezeAfter: 300ms\n".to_owned(),
                Some(("suspendAfter", _)) => "    suspendAfter: 1s\n".to_owned(),
                _ => format!("{line}\n"),
            };
            let text: String = text.lines().map(line).collect();
            std::fs::create_dir_all(fixture.0.path().join("manifests")).unwrap();
            std::fs::write(fixture.0.path().join("manifests").join(name), text).unwrap();
        }
        fixture
    }

    fn data(&self) -> PathBuf {
        self.0.path().join("data")
    }

    fn command(&self) -> Command {
        let (ate, runtime) = built();
        let mut command = Command::new(DEMO);
        command.arg("--ate").arg(ate).arg("--data-dir").arg(self.data());
        command.arg("--manifests").arg(self.0.path().join("manifests")).env("ATE_RUNTIME", runtime);
        command.args(["--actors", &ACTORS.to_string(), "--requests", "4", "--port", "0", "--api-port", "0"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn once(&self) -> Output {
        self.command().arg("--once").output().unwrap()
    }

    /// A demo that has shown everything and stays up, and the command that it offers to try.
    fn stay(&self) -> (Child, BufReader<ChildStdout>, String) {
        let mut child = self.command().stderr(Stdio::inherit()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut curl = String::new();
        let mut line = String::new();
        while lines.read_line(&mut line).unwrap() > 0 {
            if line.trim_start().starts_with("curl ") {
                curl = line.trim().to_owned();
            }
            if line.starts_with("Ctrl-C") {
                return (child, lines, curl);
            }
            line.clear();
        }
        panic!("it ended ({:?}) before it had shown everything", child.wait());
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        for process in Leaks::of_instance(&self.data()).processes {
            eprintln!("still running after the test: {process}");
            let pid = process.split(' ').next().and_then(|pid| pid.parse().ok());
            if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        if std::thread::panicking() {
            eprintln!(
                "--- ate dev said:\n{}",
                std::fs::read_to_string(self.data().join("ate-dev.log")).unwrap_or_default()
            );
        }
    }
}

fn told(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The sums over all actors: in memory, in files, asked.
fn sums(output: &Output) -> Vec<u64> {
    let text = told(output);
    let line = text.lines().find(|line| line.trim_start().starts_with("all ")).unwrap_or_else(|| panic!("{text}"));
    line.split_whitespace().skip(1).take(3).map(|number| number.parse().unwrap()).collect()
}

fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

#[test]
fn a_second_demo_continues_the_counts_and_a_lost_count_fails_it() {
    let fixture = Fixture::new();
    let mut counted = 0;
    for _ in 0..2 {
        let output = fixture.once();
        assert!(output.status.success(), "{}", told(&output));
        let [memory, file, asked] = sums(&output)[..] else { panic!("{}", told(&output)) };
        counted += asked;
        assert!(asked >= REQUESTS && memory == counted && file == counted, "{}", told(&output));
        assert!(told(&output).contains("everything is stopped"), "{}", told(&output));
    }
    let ledger = fixture.data().join("demo.ledger");
    let text = std::fs::read_to_string(&ledger).unwrap() + "got counter-1 999\n";
    std::fs::write(&ledger, text).unwrap();
    let output = fixture.once();
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
    assert!(told(&output).contains("counter-1 answered") && told(&output).contains("not 1000"), "{}", told(&output));
}

#[test]
fn a_demo_stays_up_alone_outlives_kill_9_and_ends_with_ctrl_c() {
    let fixture = Fixture::new();
    let (mut killed, _output, curl) = fixture.stay();
    let second = fixture.once();
    assert_eq!(second.status.code(), Some(1));
    assert!(told(&second).contains("a demo already runs in"), "{}", told(&second));
    assert!(curl.starts_with("curl http://counter-"), "{curl}");
    signal(&killed, rustix::process::Signal::KILL);
    killed.wait().unwrap();
    assert!(!Leaks::of_instance(&fixture.data()).processes.is_empty(), "its server and workers outlive it");

    // The next one takes over and counts on.
    let (mut child, _output, _) = fixture.stay();
    // Twice at once, as it comes from whoever signals a process and its whole group: that is one wish.
    signal(&child, rustix::process::Signal::INT);
    signal(&child, rustix::process::Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(0), "an end that was asked for, in order");
    let left = Leaks::of_instance(&fixture.data());
    assert!(left.is_empty(), "{left}");
}
