//! Things that go wrong.

use ate_testkit::{Machine, Setting};

use crate::ATE;

#[tokio::test]
async fn after_kill_9_running_actors_are_adopted_and_suspended_ones_continue() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(2, "").await;
    machine.create_atespace("space").await;
    for name in ["running", "suspended"] {
        machine.create_counter("space", name).await;
        machine.count("space", name).await;
        machine.count("space", name).await;
    }
    machine.suspend("space", "suspended").await;
    machine.kill().await;
    machine.restart().await;
    for name in ["running", "suspended"] {
        let reply = machine.count("space", name).await;
        assert_eq!((reply.memory, reply.file), (3, 3), "{name}: {reply:?}");
    }
    // An adopted actor can be put to sleep like any other.
    machine.suspend("space", "running").await;
    assert_eq!(machine.count("space", "running").await.memory, 4);
    machine.stop().await;
}

#[tokio::test]
async fn an_actor_whose_worker_is_killed_continues_from_its_last_snapshot() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    machine.count("space", "a").await;
    machine.suspend("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 2);
    for pid in machine.worker_pids() {
        Machine::kill_process(pid);
    }
    let reply = machine.count("space", "a").await;
    assert_eq!(
        (reply.memory, reply.file),
        (2, 2),
        "the count after the snapshot is gone, the snapshot is not: {reply:?}"
    );
    machine.stop().await;
}

#[tokio::test]
async fn an_actor_that_exits_is_noticed_and_woken_again() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 1);
    let _ = machine.post("space", "a", "/exit?code=7").await;
    // Until it is known that it has ended, nobody may listen where it was.
    machine.until("it is woken", || async { machine.get("space", "a", "/peek").await.0 == 200 }).await;
    let reply = machine.count("space", "a").await;
    assert_eq!(reply.memory, 1, "it began anew from the golden snapshot: {reply:?}");
    let history = machine.history("space", "a").await;
    assert!(history.iter().any(|entry| entry.event == "Crashed" && entry.detail.contains("code 7")), "{history:?}");
    machine.stop().await;
}

#[tokio::test]
async fn a_worker_that_hangs_is_ended_and_its_actor_goes_on_elsewhere() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    machine.count("space", "a").await;
    machine.suspend("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 2);
    let pids = machine.worker_pids();
    let [worker] = pids[..] else { panic!("one worker, not {pids:?}") };
    let worker = rustix::process::Pid::from_raw(i32::try_from(worker).expect("a pid")).expect("a pid");
    rustix::process::kill_process(worker, rustix::process::Signal::STOP).expect("stopped");
    let lost = || async { machine.history("space", "a").await.iter().any(|entry| entry.event == "Lost") };
    machine.until("it is given up", lost).await;
    assert_eq!(machine.count("space", "a").await.memory, 2, "from its last snapshot, in a new worker");
    machine.stop().await;
}

#[tokio::test]
async fn what_people_do_to_a_template_leaves_its_actors_alone() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    machine.count("space", "a").await;
    machine.suspend("space", "a").await;
    let said = machine.cli(&["delete", "actortemplate", "counter", "-n", "demo"]).await;
    assert!(said.code != 0 && said.stderr.contains("still has actors"), "{said:?}");
    // The actor that the golden snapshot was made with is nobody's to wake, suspend or delete.
    let golden = machine.ate(&["get", "actors", "-a", "ate-golden", "-o", "name"]).await;
    let golden = golden.trim().rsplit('/').next().expect("a name").to_owned();
    let (status, _) = machine.get("ate-golden", &golden, "/").await;
    assert_ne!(status, 200);
    for verb in ["suspend", "resume", "delete"] {
        let said = machine.cli(&[verb, "actor", &golden, "-a", "ate-golden"]).await;
        assert!(said.code != 0 && said.stderr.contains("belongs to its ActorTemplate"), "{verb}: {said:?}");
    }
    assert_eq!(machine.count("space", "a").await.memory, 2);
    machine.create_counter("space", "b").await;
    machine.suspend("space", "a").await;
    assert_eq!(machine.count("space", "b").await.memory, 1);
    machine.suspend("space", "b").await;
    for name in ["a", "b"] {
        machine.ate(&["delete", "actor", name, "-a", "space"]).await;
    }
    machine.ate(&["delete", "actortemplate", "counter", "-n", "demo"]).await;
    machine.stop().await;
}

/// How often something has happened to an actor.
async fn seen(machine: &Machine, name: &str, event: &str) -> i64 {
    let history = machine.history("space", name).await;
    i64::try_from(history.iter().filter(|entry| entry.event == event).count()).expect("few")
}

#[tokio::test]
async fn kill_9_while_one_actor_is_stored_keeps_the_next_one_in_its_worker() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    for name in ["large", "next"] {
        machine.create_counter("space", name).await;
    }
    // Stored for seconds: time enough for the next one to move in, on most machines; on others it gets larger.
    let (suspend, times) = {
        let mut times = 0;
        loop {
            times += 1;
            assert!(times <= 5, "it is stored too quickly for this test");
            assert_eq!(machine.count("space", "large").await.memory, times);
            assert_eq!(machine.get("space", "large", "/eat?mib=512").await.0, 200);
            let client = (*machine).clone();
            let suspend = tokio::spawn(async move { client.try_suspend("space", "large").await.is_ok() });
            let captured = || async { seen(&machine, "large", "Captured").await == times };
            machine.until("it is out of its worker", captured).await;
            assert_eq!(machine.count("space", "next").await.memory, times);
            if seen(&machine, "large", "Suspended").await < times {
                break (suspend, times);
            }
            let _ = suspend.await;
            machine.suspend("space", "next").await;
        }
    };
    machine.kill().await;
    let _ = suspend.await;
    machine.restart().await;
    assert_eq!(machine.count("space", "next").await.memory, times + 1, "it was adopted as it ran");
    machine.suspend("space", "next").await;
    let stored = || async { seen(&machine, "large", "Suspended").await == times };
    machine.until("the other is stored after all", stored).await;
    assert_eq!(machine.count("space", "large").await.memory, times + 1, "memory and all");
    machine.suspend("space", "large").await;
    assert_eq!(machine.count("space", "next").await.memory, times + 2);
    machine.stop().await;
}

#[tokio::test]
async fn a_process_that_ends_between_a_thing_and_the_telling_of_it_costs_nothing() {
    let storage = tempfile::tempdir().expect("a directory");
    let args = vec!["--storage".to_owned(), storage.path().display().to_string()];
    let mut machine = Machine::start_with(ATE, Setting { args, ..Setting::default() }).await;
    machine.apply_counter(1, "  idle: {}").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    let mut counted = machine.count("space", "a").await.memory;
    machine.suspend("space", "a").await;
    for place in ate_failpoint::ALL {
        // Workers know of it, too: those of before are gone.
        machine.stop().await;
        machine.set_env("ATE_FAILPOINTS", Some(place));
        machine.restart().await;
        let lived = async {
            for verb in ["resume", "suspend"].into_iter().cycle() {
                machine.cli(&[verb, "actor", "a", "-a", "space"]).await;
            }
        };
        machine.until("there is a worker", || async { !machine.worker_pids().is_empty() }).await;
        // What a worker says goes elsewhere; its node starts another.
        let workers = machine.worker_pids();
        let said = format!("failpoint {place}: ending here");
        let ended = || async {
            let here = machine.worker_pids();
            match place.starts_with("worker.") {
                true => !here.is_empty() && here != workers,
                false => machine.logged().contains(&said),
            }
        };
        tokio::select! {
            () = machine.until(place, ended) => {}
            () = lived => {}
        }
        machine.kill().await;
        if place.starts_with("worker.") {
            // Those that live know of it still.
            machine.worker_pids().into_iter().for_each(Machine::kill_process);
        }
        machine.set_env("ATE_FAILPOINTS", None);
        machine.restart().await;
        let reply = machine.count("space", "a").await;
        counted += 1;
        assert_eq!((reply.memory, reply.file), (counted, counted), "{place}: {reply:?}\n{}", machine.logged());
        machine.suspend("space", "a").await;
    }
    machine.stop().await;
}

#[tokio::test]
async fn a_worker_that_no_node_comes_to_ends_by_itself() {
    let home = tempfile::tempdir().expect("a directory");
    let at = |name: &str| {
        std::fs::create_dir(home.path().join(name)).expect("made");
        home.path().join(name)
    };
    // As one whose node was killed before it could write down that there is one.
    let mut worker = tokio::process::Command::new("unshare")
        .args(["--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts", ATE, "worker", "--uid"])
        .arg("00000000-0000-4000-8000-000000000001")
        .args(["--cgroup", "ate-nobody", "--link"])
        .arg(at("link"))
        .arg("--root")
        .arg(at("root"))
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("unshare starts");
    let up = home.path().join("link/ingress.sock");
    let mut said = String::new();
    let stderr = worker.stderr.as_mut().expect("a pipe");
    let words = tokio::io::AsyncReadExt::read_to_string(stderr, &mut said);
    tokio::time::timeout(std::time::Duration::from_secs(120), words).await.expect("it ends").expect("read");
    assert!(up.exists() && said.contains("no node for 15 s"), "{said}");
    assert!(worker.wait().await.expect("waited").success(), "{said}");
}
