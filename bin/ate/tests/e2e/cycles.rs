//! Hundreds of sleeps and wakes: no count is lost, and nothing is left behind by any of them.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ate_testkit::{Leaks, Machine};

use crate::ATE;

const ACTORS: usize = 24;
const WORKERS: u32 = 4;
const CYCLES: usize = 500;
/// What bounded caches may still be filling; a leak would be hundreds.
const CACHED: usize = 6;
/// Clients at once: as many as actors can run.
const CLIENTS: usize = 4;

/// As soon as nothing more is being made ahead, if others leave the host alone for long enough to tell.
async fn at_rest(machine: &Machine) -> HashMap<String, usize> {
    let mut before = resources(machine);
    for _ in 0..30 {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        let now = resources(machine);
        if std::mem::replace(&mut before, now.clone()) == now {
            break;
        }
    }
    before
}

/// What one more of with every cycle would be a leak.
fn resources(machine: &Machine) -> HashMap<String, usize> {
    let mut counts = HashMap::new();
    let entries = |path: String| std::fs::read_dir(path).map(Iterator::count).unwrap_or(0);
    let lines = |path: String| std::fs::read_to_string(path).map(|text| text.lines().count()).unwrap_or(0);
    counts.insert("descriptors of the server".to_owned(), entries(format!("/proc/{}/fd", machine.pid())));
    counts.insert("mounts of the host".to_owned(), lines("/proc/self/mounts".to_owned()));
    let mut workers = machine.worker_pids();
    workers.sort_unstable();
    for (index, pid) in workers.into_iter().enumerate() {
        counts.insert(format!("descriptors of worker {index}"), entries(format!("/proc/{pid}/fd")));
        counts.insert(format!("mounts of worker {index}"), lines(format!("/proc/{pid}/mounts")));
        counts.insert(format!("files of worker {index}"), files(Path::new(&format!("/proc/{pid}/root/run"))));
        counts.insert(format!("volumes of worker {index}"), entries(format!("/proc/{pid}/root/volume")));
    }
    counts.insert("loop devices".to_owned(), ate_testkit::Leaks::of_instance(&machine.data()).loops.len());
    counts.insert("processes of sandboxes".to_owned(), machine.sandbox_pids().len());
    counts.insert("snapshots".to_owned(), manifests(&machine.data().join("node/snapshots")));
    counts.insert("control groups".to_owned(), machine.cgroups());
    counts
}

fn files(below: &Path) -> usize {
    let entries = std::fs::read_dir(below).into_iter().flatten().flatten();
    entries.map(|entry| if entry.path().is_dir() { files(&entry.path()) } else { 1 }).sum()
}

fn manifests(below: &Path) -> usize {
    let entries = std::fs::read_dir(below).into_iter().flatten().flatten();
    let count = |entry: std::fs::DirEntry| match entry.path().is_dir() {
        true => manifests(&entry.path()),
        false => usize::from(entry.file_name() == "manifest.json"),
    };
    entries.map(count).sum()
}

async fn all_suspended(machine: &Machine) {
    for index in 0..ACTORS {
        let name = format!("c{index}");
        let suspended = || async { machine.actor("space", &name).await.status().as_str_name() == "STATUS_SUSPENDED" };
        machine.until("everybody is suspended", suspended).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_sleeps_and_wakes_lose_no_count_and_leave_nothing_behind() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(WORKERS, "  idle: {freezeAfter: 10ms, suspendAfter: 500ms}").await;
    machine.create_atespace("space").await;
    let counts: Vec<Mutex<i64>> = (0..ACTORS).map(|_| Mutex::new(0)).collect();
    for index in 0..ACTORS {
        machine.create_counter("space", &format!("c{index}")).await;
    }
    let count = |index: usize| {
        let (machine, counts) = (&machine, &counts);
        async move {
            let reply = machine.count("space", &format!("c{index}")).await;
            let mut count = counts[index].lock().expect("no holder panics");
            *count += 1;
            assert_eq!((reply.memory, reply.file), (*count, *count), "c{index}: {reply:?}");
            assert_eq!(reply.actor, format!("c{index}"), "another actor answered: {reply:?}");
            reply.generation
        }
    };
    for index in 0..ACTORS {
        count(index).await;
    }
    all_suspended(&machine).await;
    machine.until("boxes are made ahead", || async { machine.sandbox_pids().len() >= WORKERS as usize }).await;
    let before = at_rest(&machine).await;

    // Each client has actors of its own, so that it knows what each must say; all share the workers.
    let wakes = AtomicUsize::new(0);
    let client = |client: usize| {
        let (count, wakes) = (&count, &wakes);
        async move {
            let mut generations = HashMap::new();
            let mut state = 0x9e37_79b9_u64 + client as u64;
            while wakes.load(Ordering::SeqCst) < CYCLES {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let index = client + CLIENTS * ((state >> 33) as usize % (ACTORS / CLIENTS));
                let generation = count(index).await;
                if generations.insert(index, generation) != Some(generation) {
                    wakes.fetch_add(1, Ordering::SeqCst);
                }
            }
        }
    };
    tokio::join!(client(0), client(1), client(2), client(3));
    for index in 0..ACTORS {
        count(index).await;
    }
    all_suspended(&machine).await;
    let settled = || async {
        let now = resources(&machine);
        before.iter().all(|(what, count)| now.get(what).is_some_and(|now| *now <= count + CACHED))
    };
    let begun = std::time::Instant::now();
    while !settled().await {
        if begun.elapsed() > std::time::Duration::from_secs(30) {
            panic!("left behind: {before:?} became {:?}", resources(&machine));
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    machine.stop().await;
    // The kernel takes its time with the last of a process tree.
    let begun = std::time::Instant::now();
    loop {
        let left = Leaks::of_instance(&machine.data());
        if left.is_empty() {
            break;
        }
        assert!(begun.elapsed().as_secs() < 60, "{left}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}
