//! A real object store for tests: MinIO, on a directory and a port of its own, ended with whoever started it.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const VERSION: &str = "v0.0.0-20260212201848-7aac2a2c5b7c";

/// Who may use it.
pub const USER: &str = "alice";
pub const PASSWORD: &str = "correct-horse-battery";

/// The one bucket there is.
pub const BUCKET: &str = "bucket";

/// The binary that `ATE_TEST_MINIO` names, or one that is built once and kept.
fn binary() -> PathBuf {
    if let Some(binary) = std::env::var_os("ATE_TEST_MINIO") {
        return binary.into();
    }
    let home = || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache");
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from);
    let directory = cache.join(format!("ate/tools/minio-{VERSION}"));
    let binary = directory.join("minio");
    if !binary.exists() {
        eprintln!("building MinIO, once; this takes minutes");
        std::fs::create_dir_all(&directory).expect("the cache can be written");
        // Moved to its name when it is whole: a build that is interrupted leaves no half binary.
        let unfinished = tempfile::tempdir_in(&directory).expect("the cache can be written");
        let mut build = Command::new("go");
        build.args(["install", &format!("github.com/minio/minio@{VERSION}")]);
        let built = build.env("GOFLAGS", "-mod=mod").env("GOBIN", unfinished.path()).status();
        assert!(built.expect("go is installed").success(), "cannot build MinIO");
        std::fs::rename(unfinished.path().join("minio"), &binary).expect("the cache can be written");
    }
    binary
}

#[derive(Debug)]
pub struct Minio {
    process: Option<Child>,
    address: String,
    directory: tempfile::TempDir,
}

impl Drop for Minio {
    fn drop(&mut self) {
        self.crash();
    }
}

impl Minio {
    /// # Panics
    ///
    /// If it cannot be built or does not start: a test that needs one has failed then.
    pub fn start() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        // A bucket is a directory that was there when the server started.
        std::fs::create_dir(directory.path().join(BUCKET)).expect("a directory");
        // Another process may take the port in between; then the server says so and another port is tried.
        let started = (0..5).find_map(|_| {
            let address = format!("127.0.0.1:{}", ate_testkit_port::free_port());
            run(directory.path(), &address).map(|process| (process, address))
        });
        let (process, address) = started.expect("MinIO starts");
        Self { process: Some(process), address, directory }
    }

    /// Ends it as a crash does.
    pub fn crash(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Starts it again, where it was and with what it had.
    pub fn resume(&mut self) {
        self.crash();
        self.process = Some(run(self.directory.path(), &self.address).expect("MinIO starts again"));
    }

    /// Unless it has crashed.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Child::id)
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// What a client of it has in its environment.
    pub fn environment(&self) -> Vec<(String, String)> {
        let pairs = [
            ("AWS_ENDPOINT", format!("http://{}", self.address)),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", USER.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", PASSWORD.to_owned()),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).to_vec()
    }
}

fn run(directory: &Path, address: &str) -> Option<Child> {
    let mut command = Command::new(binary());
    command.arg("server").arg(directory).args(["--address", address]);
    let quiet = [("MINIO_BROWSER", "off"), ("MINIO_UPDATE", "off"), ("MINIO_CI_CD", "1")];
    command.env("MINIO_ROOT_USER", USER).env("MINIO_ROOT_PASSWORD", PASSWORD).env("HOME", directory).envs(quiet);
    let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("MinIO runs");
    let mut log = BufReader::new(process.stderr.take().expect("piped above")).lines().map_while(Result::ok);
    if !log.any(|line| line.starts_with("API:")) {
        let _ = process.wait();
        return None;
    }
    // A full pipe would stop it.
    std::thread::spawn(move || log.for_each(drop));
    Some(process)
}
