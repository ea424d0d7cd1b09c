//! The promises on a real S3 server, MinIO.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ate_blob::{Backend, BlobError, Blobs, Provider, Settings};
use bytes::Bytes;
use futures::stream::StreamExt;

use crate::conformance::{content, keeps_all_promises, path};

const VERSION: &str = "v0.0.0-20260212201848-7aac2a2c5b7c";
const USER: &str = "alice";
const PASSWORD: &str = "correct-horse-battery";

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
        fs::create_dir_all(&directory).unwrap();
        // Moved to its name when it is whole: a build that is interrupted leaves no half binary.
        let unfinished = tempfile::tempdir_in(&directory).unwrap();
        let mut build = Command::new("go");
        build.args(["install", &format!("github.com/minio/minio@{VERSION}")]);
        let built = build.env("GOFLAGS", "-mod=mod").env("GOBIN", unfinished.path()).status();
        assert!(built.expect("go is installed").success(), "cannot build MinIO");
        fs::rename(unfinished.path().join("minio"), &binary).unwrap();
    }
    binary
}

struct Minio {
    process: Child,
    address: String,
    directory: tempfile::TempDir,
}

impl Drop for Minio {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Minio {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        // A bucket is a directory that was there when the server started.
        fs::create_dir(directory.path().join("bucket")).unwrap();
        // Another process may take the port in between; then the server says so and another port is tried.
        (0..5)
            .find_map(|_| Self::try_start(directory.path()))
            .map_or_else(|| panic!("MinIO did not start"), |(process, address)| Self { process, address, directory })
    }

    fn try_start(directory: &Path) -> Option<(Child, String)> {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let mut command = Command::new(binary());
        command.arg("server").arg(directory).args(["--address", &address]);
        let quiet = [("MINIO_BROWSER", "off"), ("MINIO_UPDATE", "off"), ("MINIO_CI_CD", "1")];
        command.env("MINIO_ROOT_USER", USER).env("MINIO_ROOT_PASSWORD", PASSWORD).env("HOME", directory).envs(quiet);
        let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(process.stderr.take().expect("piped above")).lines().map_while(Result::ok);
        if !log.any(|line| line.starts_with("API:")) {
            let _ = process.wait();
            return None;
        }
        // A full pipe would stop it.
        std::thread::spawn(move || log.for_each(drop));
        Some((process, address))
    }

    fn settings(&self) -> Settings {
        let settings = Settings::default().with("aws_endpoint", &format!("http://{}", self.address));
        settings.with("aws_allow_http", "true").with("aws_access_key_id", USER).with("aws_region", "us-east-1")
    }

    async fn open(&self, password: &str) -> Blobs {
        let settings = self.settings().with("aws_secret_access_key", password);
        Blobs::open(Backend::Cloud(Provider::S3, settings)).await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn minio_keeps_the_promises_of_a_store() {
    let minio = Minio::start();
    let blobs = minio.open(PASSWORD).await;
    keeps_all_promises(&blobs, "bucket").await;
    let uploads = minio.directory.path().join(".minio.sys/multipart");
    let left =
        fs::read_dir(uploads).into_iter().flatten().flat_map(|entry| fs::read_dir(entry.unwrap().path()).unwrap());
    assert_eq!(left.count(), 0, "an upload that lost the race is aborted");

    let error = blobs.put_new(&path("s3://no-such-bucket/x"), Bytes::new()).await.unwrap_err();
    assert!(matches!(error, BlobError::Missing { .. }), "{error}");
    blobs.delete(&path("s3://no-such-bucket/x")).await.unwrap();
    let stranger = minio.open("battery-staple").await;
    let error = stranger.put_new(&path("s3://bucket/x"), content(0, 3)).await.unwrap_err();
    assert!(matches!(error, BlobError::Denied { .. }), "{error}");
    let listed = stranger.list(&path("s3://bucket")).next().await.unwrap().unwrap_err();
    assert!(matches!(listed, BlobError::Denied { .. }), "{listed}");
    for shown in [format!("{error:?} {error} {listed}"), format!("{stranger:?}")] {
        assert!(!shown.contains("battery-staple"), "{shown}");
    }
}
