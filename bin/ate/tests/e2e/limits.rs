//! What an actor may use, and what happens when it wants more.

use std::path::{Path, PathBuf};

use ate_testkit::{Leaks, Machine, Said, counter_image, pool, shell_image};

use crate::ATE;

/// What a control group file says for the group that a process is in, by the file's name in either version; nothing if it has
/// just ended.
fn group_file(pid: u32, v1: (&str, &str), v2: &str) -> Option<String> {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
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
    Some(std::fs::read_to_string(&file).ok()?.trim().to_owned())
}

/// Whether every process of a sandbox has these limits. One that has just been started gets them in a moment.
fn are_limited(machine: &Machine, memory_bytes: u64, quota_micros: &str) -> bool {
    let pids = machine.sandbox_pids();
    let is_limited = |pid: u32| {
        let memory = group_file(pid, ("memory", "memory.limit_in_bytes"), "memory.max")?;
        let quota = group_file(pid, ("cpu", "cpu.cfs_quota_us"), "cpu.max")?;
        Some(memory == memory_bytes.to_string() && quota.split(' ').next() == Some(quota_micros))
    };
    !pids.is_empty() && pids.into_iter().all(|pid| is_limited(pid) == Some(true))
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
    machine.until("all have their limits", || async { are_limited(&machine, 256 << 20, "50000") }).await;
    let (status, body) = machine.get("space", "glutton", "/eat?mib=512").await;
    assert_ne!(status, 200, "{body}");
    // A request that may be repeated was, and killed it again: it is left alone for a moment.
    machine.until("it is woken", || async { machine.get("space", "glutton", "/readyz").await.0 == 200 }).await;
    let reply = machine.count("space", "glutton").await;
    assert_eq!((reply.memory, reply.file), (2, 2), "it continues from its snapshot: {reply:?}");
    let history = machine.history("space", "glutton").await;
    assert!(
        history.iter().any(|entry| entry.event == "Crashed" && entry.detail.contains("out of memory")),
        "{history:?}"
    );
    assert_eq!(machine.count("space", "bystander").await.memory, 2, "nobody else noticed");
    machine.stop().await;
}

/// Runs a script in an actor.
async fn shell(machine: &Machine, actor: &str, script: &str) -> Said {
    machine.cli(&["exec", actor, "-a", "space", "--", "/busybox", "sh", "-c", script]).await
}

/// What a script prints that must succeed.
async fn told(machine: &Machine, actor: &str, script: &str) -> String {
    let said = shell(machine, actor, script).await;
    assert_eq!(said.code, 0, "{script}: {said:?}\n{}", machine.logged());
    said.stdout.trim().to_owned()
}

/// Bytes of the devices that durable directories lie on.
fn volumes(machine: &Machine) -> Vec<u64> {
    let loops = Leaks::of_instance(&machine.data()).loops;
    let size = |device: &String| {
        let name = device.split(' ').next().expect("a name");
        let sectors = std::fs::read_to_string(format!("/sys/block/{name}/size")).expect("it has a size");
        sectors.trim().parse::<u64>().expect("a number") * 512
    };
    loops.iter().map(size).collect()
}

#[tokio::test]
async fn an_actor_that_fills_its_durable_directory_is_told_so_and_sleeps_and_wakes_as_before() {
    let mut machine = Machine::start(ATE).await;
    let template = machine
        .template("counter", "", "")
        .replace(&counter_image(machine.directory()), &shell_image(machine.directory()))
        .replace("durableDir: {}", "durableDir: {sizeLimit: 32Mi}");
    machine.apply(&format!("{}---{template}", pool("counter", 2, ""))).await;
    machine.ready("demo", "counter").await;
    machine.create_atespace("space").await;
    for name in ["glutton", "bystander"] {
        machine.create_counter("space", name).await;
        assert_eq!(machine.count("space", name).await.file, 1);
    }
    let fill = "cd /data; /busybox dd if=/dev/urandom of=big bs=1M count=64";
    let said = shell(&machine, "glutton", fill).await;
    assert!(said.code != 0 && said.stderr.contains("No space left on device"), "{said:?}");
    let devices = volumes(&machine);
    assert!(!devices.is_empty() && devices.iter().all(|&size| size == 32 << 20), "the disk is bounded: {devices:?}");
    let sum = "/busybox md5sum /data/big; /busybox stat -c %s /data/big";
    let written = told(&machine, "glutton", sum).await;
    assert!(written.lines().last().and_then(|size| size.parse().ok()).is_some_and(|size: u64| size > 28 << 20));
    assert_eq!(machine.get("space", "glutton", "/peek").await.0, 200, "it lives");
    assert_eq!(machine.count("space", "bystander").await.file, 2, "nobody else noticed");
    for _ in 0..2 {
        machine.suspend("space", "glutton").await;
        assert_eq!(told(&machine, "glutton", sum).await, written, "what was full fits again");
    }
    told(&machine, "glutton", "/busybox rm /data/big").await;
    let reply = machine.count("space", "glutton").await;
    assert_eq!((reply.memory, reply.file), (2, 2), "there is room again: {reply:?}");
    machine.stop().await;
    machine.until("no loop device is left", || async { Leaks::of_instance(&machine.data()).loops.is_empty() }).await;
}

#[tokio::test]
async fn no_tree_that_an_actor_can_make_keeps_it_from_being_suspended() {
    let mut machine = Machine::start(ATE).await;
    let template = machine
        .template("counter", "", "")
        .replace(&counter_image(machine.directory()), &shell_image(machine.directory()));
    machine.apply(&format!("{}---{template}", pool("counter", 1, ""))).await;
    machine.ready("demo", "counter").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "digger").await;
    // From the bottom upwards, and so that no shell has to say where it is: 12000 bytes of path.
    let name = "n".repeat(200);
    let sixty_times = |each: &str| format!("cd /data; i=0; while [ $i -lt 60 ]; do {each}; i=$((i+1)); done;");
    let bury = sixty_times(&format!("/busybox mkdir up; /busybox mv deep up/{name}; /busybox mv up deep"));
    let dig = sixty_times(&format!("/busybox mv deep/{name} up; /busybox rmdir deep; /busybox mv up deep"));
    told(&machine, "digger", &format!("cd /data; /busybox mkdir deep; echo treasure > deep/chest; {bury}")).await;
    told(&machine, "digger", "/busybox truncate -s 1024G /data/hole; /busybox ln /data/hole /data/other").await;
    machine.suspend("space", "digger").await;
    assert_eq!(told(&machine, "digger", &format!("{dig} /busybox cat deep/chest")).await, "treasure");
    assert_eq!(told(&machine, "digger", "/busybox stat -c '%s %h' /data/hole").await, format!("{} 2", 1_u64 << 40));
    machine.stop().await;
}
