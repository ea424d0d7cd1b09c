//! Several processes on one store.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ate_asset::{AssetStore, AssetUrl, Cause, Fetch, Fetching};
use futures::stream::{self, StreamExt};
use tempfile::tempdir;

use crate::support::{BUDGET, asset};

const CHILD: &str = "ATE_TEST_ASSET_CHILD";

/// Says that it was asked, and gives nothing before it is allowed to.
#[derive(Debug)]
struct Gated(PathBuf);

#[async_trait::async_trait]
impl Fetch for Gated {
    async fn fetch(&self, _: &AssetUrl) -> Result<Fetching, Cause> {
        say("fetching");
        while !self.0.join("go").exists() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(Fetching { size: None, bytes: stream::iter([Ok("content".into())]).boxed() })
    }
}

fn say(text: &str) {
    eprintln!("{text}");
}

/// Not a test of its own: what the others start several times.
#[tokio::test]
#[ignore = "is run by another test"]
async fn child_that_wants_an_asset() {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let directory = PathBuf::from(std::env::var_os(CHILD).expect("set by the parent"));
    let gated = Arc::new(Gated(directory.clone()));
    let store = AssetStore::with_sources(&directory.join("assets"), BUDGET, gated).unwrap();
    let file = store.ensure(&asset("a", b"content")).await.unwrap();
    assert_eq!(fs::read(file.path()).unwrap(), b"content");
    say("done");
    // Holds the lease until it is killed.
    std::future::pending::<()>().await;
}

struct Peer {
    process: Child,
    said: Box<dyn Iterator<Item = String>>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Peer {
    fn start(directory: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "peers::child_that_wants_an_asset", "--ignored", "--nocapture"]);
        command.env(CHILD, directory).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let said = Box::new(BufReader::new(process.stderr.take().unwrap()).lines().map_while(Result::ok));
        Self { process, said }
    }

    /// The first line that has one of these texts.
    fn wait_for(&mut self, texts: &[&str]) -> String {
        let mut seen = Vec::new();
        for line in self.said.by_ref() {
            if texts.iter().any(|text| line.contains(text)) {
                return line;
            }
            seen.push(line);
        }
        panic!("the child ended before it said one of {texts:?}:\n{}", seen.join("\n"));
    }
}

#[tokio::test]
async fn processes_share_one_fetch_and_respect_each_others_leases() {
    let directory = tempdir().unwrap();
    let mut first = Peer::start(directory.path());
    first.wait_for(&["fetching"]);
    let mut second = Peer::start(directory.path());
    let said = second.wait_for(&["fetching", "somebody else fetches"]);
    assert!(said.contains("somebody else fetches"), "{said}");
    fs::write(directory.path().join("go"), b"").unwrap();
    first.wait_for(&["done"]);
    second.wait_for(&["done"]);

    // A third with no room for both may not evict what they use, until both are gone.
    let large = vec![1; usize::try_from(BUDGET).unwrap() - 3];
    let warehouse = Arc::new(crate::support::Warehouse::with(&[("large", &large)]));
    let store = AssetStore::with_sources(&directory.path().join("assets"), BUDGET, warehouse).unwrap();
    for peer in [first, second] {
        let refused = store.ensure(&asset("large", &large)).await.unwrap_err().cause;
        assert!(matches!(refused, Cause::OverBudget { .. }), "{refused}");
        drop(peer);
    }
    store.ensure(&asset("large", &large)).await.unwrap();
}

#[tokio::test]
async fn a_process_that_is_killed_while_it_fetches_is_followed_by_the_next() {
    let directory = tempdir().unwrap();
    let mut first = Peer::start(directory.path());
    first.wait_for(&["fetching"]);
    let mut second = Peer::start(directory.path());
    second.wait_for(&["somebody else fetches"]);
    drop(first);
    second.wait_for(&["fetching"]);
    fs::write(directory.path().join("go"), b"").unwrap();
    second.wait_for(&["done"]);
}
