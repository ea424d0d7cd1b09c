//! What an actor may use, and what happens when it wants more.

use std::path::{Path, PathBuf};

use ate_testkit::Machine;

use crate::ATE;

/// What a control group file says for the group that a process is in, by the file's name in either version.
fn group_file(pid: u32, v1: (&str, &str), v2: &str) -> String {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("the process is there");
    let (controller, name) = v1;
    let find = |wanted: &dyn Fn(&str) -> bool| {
        groups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            wanted(controllers).then(|| path.trim_start_matches('/').to_owned())
        })
    };
    let file: PathBuf = match find(&|controllers| controllers.split(',').any(|one| one == controller)) {
        Some(path) => Path::new("/sys/fs/cgroup").join(controller).join(path).join(name),
        None => Path::new("/sys/fs/cgroup").join(find(&str::is_empty).expect("version 2")).join(v2),
    };
    std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display())).trim().to_owned()
}

#[tokio::test]
async fn an_actor_that_wants_more_memory_than_it_may_have_is_killed_told_of_and_woken_again() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(2, "  resources: {limits: {memory: 256Mi, cpu: 500m}}").await;
    machine.create_atespace("space").await;
    for name in ["glutton", "bystander"] {
        machine.create_counter("space", name).await;
        assert_eq!(machine.count("space", name).await.memory, 1);
    }
    machine.suspend("space", "glutton").await;
    assert_eq!(machine.count("space", "glutton").await.memory, 2);
    for pid in machine.sandbox_pids() {
        assert_eq!(group_file(pid, ("memory", "memory.limit_in_bytes"), "memory.max"), (256 << 20).to_string());
        let quota = group_file(pid, ("cpu", "cpu.cfs_quota_us"), "cpu.max");
        assert_eq!(quota.split(' ').next(), Some("50000"));
    }
    let (status, body) = machine.get("space", "glutton", "/eat?mib=512").await;
    assert_ne!(status, 200, "{body}");
    let reply = machine.count("space", "glutton").await;
    assert_eq!((reply.memory, reply.file), (2, 2), "it continues from its snapshot: {reply:?}");
    let history = machine.history("space", "glutton").await;
    assert!(history.iter().any(|entry| entry.event == "Lost" && entry.detail.contains("out of memory")), "{history:?}");
    assert_eq!(machine.count("space", "bystander").await.memory, 2, "nobody else noticed");
    machine.stop().await;
}
