use std::os::unix::fs::PermissionsExt;

use ate_name::ObjectKey;

use super::*;
use crate::stub::{self, Stub};
use crate::workers::kill;

/// A node whose workers never come up.
fn node(directory: &Path) -> Arc<Node> {
    let program = directory.join("program");
    std::fs::write(&program, "#!/bin/sh\nwhile :; do sleep 1; done\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    Node::open(crate::stub::config(directory, program)).unwrap().0
}

fn pool(name: &str) -> Pool {
    Pool { key: ObjectKey::new("demo", name), workers: 2, memory_limit: None, cpu_limit_millis: None }
}

/// Those that are written down.
fn born(node: &Node) -> Vec<Birth> {
    let entries = std::fs::read_dir(node.config.directory.join("workers")).unwrap();
    let births = entries.filter_map(|entry| std::fs::read(entry.unwrap().path().join("worker.json")).ok());
    births.filter_map(|birth| serde_json::from_slice(&birth).ok()).collect()
}

fn is_there(birth: &Birth) -> bool {
    let cmdline = std::fs::read(format!("/proc/{}/cmdline", birth.pid)).unwrap_or_default();
    String::from_utf8_lossy(&cmdline).contains(&birth.uid.to_string())
}

#[tokio::test]
async fn a_worker_that_is_being_started_does_not_outlive_a_node_that_stops() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let node = node(directory.path());
    node.set_pools(vec![pool("small")]);
    let keeping = tokio::spawn(Arc::clone(&node).keep_workers());
    while born(&node).is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let births = born(&node);
    // A process has no command line for a moment while it becomes its program.
    while !births.iter().all(is_there) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }

    node.stop(&[]).await;
    let left: Vec<_> = births.iter().filter(|birth| is_there(birth)).collect();
    left.iter().for_each(|birth| drop(kill(birth)));
    assert!(left.is_empty(), "{left:?}");
    assert!(std::fs::read_dir(node.config.directory.join("workers")).unwrap().next().is_none());
    assert!(!node.instance_cgroup().exists());
    keeping.await.expect("it ends, and starts no other");
    assert!(std::fs::read_dir(node.config.directory.join("workers")).unwrap().next().is_none());
}

#[tokio::test]
async fn a_pool_whose_workers_cannot_be_started_does_not_keep_others_from_theirs() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let node = node(directory.path());
    let impossible = Pool { cpu_limit_millis: Some(0), ..pool("impossible") };
    node.set_pools(vec![impossible, pool("small")]);
    let keeping = tokio::spawn(Arc::clone(&node).keep_workers());
    while born(&node).is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(born(&node).iter().all(|birth| birth.pool.name == "small"));
    node.stop(&[]).await;
    keeping.await.expect("it ends");
    assert!(std::fs::read_dir(node.config.directory.join("workers")).unwrap().next().is_none());
}

#[tokio::test]
async fn nothing_is_left_of_a_worker_that_was_begun_and_never_written_down() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let node = stub::node(directory.path());
    let (_, place) = Stub::birth(&node);
    let cgroup = node.cgroup(&place);
    let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
    for group in [cgroup.clone(), cgroup.child("agent")] {
        group.create(&ate_sys::Limits::default()).unwrap();
    }
    cgroup.child("agent").add(child.id()).unwrap();
    let ended = tokio::task::spawn_blocking(move || child.wait());
    node.adopt().await;
    assert!(!ended.await.unwrap().unwrap().success());
    assert!(!place.exists() && !cgroup.exists());
    node.instance_cgroup().remove().unwrap();
}
