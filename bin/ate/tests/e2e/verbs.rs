//! What people do to actors beyond waking them and putting them to rest.

use ate_testkit::Machine;

use crate::ATE;

async fn one_counter(workers: u32) -> Machine {
    let machine = Machine::start(ATE).await;
    machine.apply_counter(workers, "").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    machine
}

#[tokio::test]
async fn an_actor_that_is_stuck_goes_back_to_its_last_snapshot_and_that_is_audited() {
    let mut machine = one_counter(1).await;
    assert_eq!(machine.count("space", "a").await.memory, 1);
    machine.suspend("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 2);
    let refused = machine.cli(&["unstick", "a", "-a", "space"]).await;
    assert!(refused.code == 1 && refused.stderr.contains("nothing is under way"), "{refused:?}");
    // Stored for seconds: time enough to be in the middle of it, on most machines; on others it gets larger.
    let (mut counted, mut times) = (2, 0);
    let (unstuck, suspending) = loop {
        times += 1;
        assert!(times <= 5, "it is stored too quickly for this test");
        assert_eq!(machine.get("space", "a", "/eat?mib=512").await.0, 200);
        let suspending = tokio::spawn({
            let client = (*machine).clone();
            async move { client.try_suspend("space", "a").await.is_ok() }
        });
        let saved = || async {
            let history = machine.history("space", "a").await;
            history.iter().filter(|entry| entry.event == "Captured").count() == 1 + times
        };
        machine.until("it is out of its worker again", saved).await;
        let said = machine.cli(&["unstick", "a", "-a", "space", "--reason", "takes too long"]).await;
        if said.code == 0 {
            break (said.stdout, suspending);
        }
        assert!(said.stderr.contains("nothing is under way"), "{said:?}");
        assert!(suspending.await.expect("joined"), "it was stored before anybody could come between");
        counted += 1;
        assert_eq!(machine.count("space", "a").await.memory, counted);
    };
    assert!(unstuck.contains("STATUS_SUSPENDED"), "{unstuck}");
    assert!(!suspending.await.expect("joined"), "the suspend was called off, and whoever asked for it is told");
    let reply = machine.count("space", "a").await;
    assert_eq!((reply.memory, reply.file), (counted, counted), "from the snapshot of before: {reply:?}");
    let history = machine.history("space", "a").await;
    assert!(history.iter().any(|entry| entry.event == "Unstuck" && entry.detail.contains("takes too long")));
    let audit = machine.ate(&["audit"]).await;
    assert!(audit.contains("UnstickActor") && audit.contains("socket") && audit.contains("takes too long"), "{audit}");
    machine.suspend("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, counted + 1);
    machine.stop().await;
}

#[tokio::test]
async fn an_actor_is_deleted_by_force_also_if_its_worker_hangs() {
    let mut machine = one_counter(1).await;
    assert_eq!(machine.count("space", "a").await.memory, 1);
    machine.suspend("space", "a").await;
    let uid = machine.uid("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 2);
    let refused = machine.cli(&["delete", "actor", "a", "-a", "space"]).await;
    assert!(refused.code == 1 && refused.stderr.contains("is not suspended"), "{refused:?}");
    // By TLS, as somebody without a certificate.
    let api = format!("https://{}", machine.api());
    let tls = ["--endpoint", &api, "--insecure-skip-verify"];
    let force = ["delete", "actor", "a", "-a", "space", "--force", "--reason", "in the way"];
    machine.ate(&[&tls[..], &force[..]].concat()).await;
    assert!(machine.worker_of("space", "a").await.is_none());
    let left = machine.data().join("node/snapshots").join(&uid);
    machine.until("its snapshots are gone", || async { !left.exists() }).await;
    // The next one of that name is another, in the same worker.
    machine.create_counter("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 1);
    let pids = machine.worker_pids();
    let [worker] = pids[..] else { panic!("one worker, not {pids:?}") };
    let worker = rustix::process::Pid::from_raw(i32::try_from(worker).expect("a pid")).expect("a pid");
    rustix::process::kill_process(worker, rustix::process::Signal::STOP).expect("stopped");
    let deleted = machine.cli(&["delete", "actor", "a", "-a", "space", "--force"]).await;
    assert!(deleted.code == 0 && deleted.stderr.contains("does not answer"), "{deleted:?}");
    let audit = machine.ate(&["audit", "-o", "wide"]).await;
    assert_eq!(audit.matches("ForceDeleteActor").count(), 2, "{audit}");
    for part in ["in the way", &uid, "no certificate", "socket", "did not say"] {
        assert!(audit.contains(part), "no {part:?} in {audit}");
    }
    machine.create_counter("space", "b").await;
    machine.until("another is served", || async { machine.get("space", "b", "/").await.0 == 200 }).await;
    machine.stop().await;
}

#[tokio::test]
async fn a_restart_starts_the_processes_anew_and_keeps_the_files() {
    let mut machine = one_counter(1).await;
    let first = machine.count("space", "a").await;
    machine.count("space", "a").await;
    machine.ate(&["restart", "a", "-a", "space"]).await;
    let second = machine.count("space", "a").await;
    assert_eq!((second.memory, second.file), (1, 3), "running: {second:?}");
    assert_ne!(first.nonce, second.nonce, "another process");
    machine.suspend("space", "a").await;
    assert_eq!(machine.count("space", "a").await.nonce, second.nonce, "once");
    machine.suspend("space", "a").await;
    machine.ate(&["restart", "a", "-a", "space"]).await;
    let third = machine.count("space", "a").await;
    assert_eq!((third.memory, third.file), (1, 5), "suspended, with its memory in the snapshot: {third:?}");
    machine.ate(&["restart", "a", "-a", "space", "--force"]).await;
    let fourth = machine.count("space", "a").await;
    assert_eq!((fourth.memory, fourth.file), (1, 5), "what came after the last snapshot is not saved: {fourth:?}");
    machine.create_counter("space", "b").await;
    machine.suspend("space", "a").await;
    machine.ate(&["restart", "b", "-a", "space"]).await;
    let other = machine.count("space", "b").await;
    assert_eq!((other.memory, other.file), (1, 1), "one that never ran starts with the golden's files: {other:?}");
    assert_ne!(other.nonce, first.nonce);
    machine.stop().await;
}

#[tokio::test]
async fn a_restart_that_is_cut_off_is_completed_by_the_next_server() {
    let mut machine = one_counter(1).await;
    let first = machine.count("space", "a").await;
    machine.stop().await;
    machine.set_env("ATE_FAILPOINTS", Some("save.captured"));
    machine.restart().await;
    assert_eq!(machine.count("space", "a").await.nonce, first.nonce);
    assert_ne!(machine.cli(&["restart", "a", "-a", "space"]).await.code, 0, "the server dies in the middle");
    machine.kill().await;
    machine.set_env("ATE_FAILPOINTS", None);
    machine.restart().await;
    let anew = || async {
        let history = machine.history("space", "a").await;
        let last = |event: &str| history.iter().rposition(|entry| entry.event == event);
        last("Running") > last("Restarting")
    };
    machine.until("it was started anew, though nobody asked for it", anew).await;
    let second = machine.count("space", "a").await;
    assert_eq!((second.memory, second.file), (1, 3), "{second:?}");
    machine.stop().await;
}

#[tokio::test]
async fn an_actor_that_crashes_again_and_again_is_left_alone_ever_longer() {
    let mut machine = one_counter(1).await;
    assert_eq!(machine.count("space", "a").await.memory, 1);
    let crashed = async |times: usize| {
        let _ = machine.post("space", "a", "/exit?code=7").await;
        let counted = || async {
            machine.history("space", "a").await.iter().filter(|entry| entry.event == "Crashed").count() == times
        };
        machine.until("it has crashed", counted).await;
    };
    crashed(1).await;
    assert_eq!(machine.count("space", "a").await.memory, 1, "the first time it is woken at once");
    let request = b"GET / HTTP/1.1\r\nHost: a.space.localhost\r\nConnection: close\r\n\r\n";
    let mut times = 1;
    // On a slow machine the first pauses may be over before anybody asks: then it crashes once more.
    let refused = loop {
        times += 1;
        crashed(times).await;
        let answer = machine.exchange(request).await;
        if !answer.starts_with("HTTP/1.1 200") {
            break answer;
        }
        assert!(times < 8, "never refused: {answer}");
    };
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    for part in [format!("crashed {times} times in a row"), "code 7".into(), "ate logs a -a space".into()] {
        assert!(refused.contains(&part), "no {part:?} in {refused}");
    }
    let after = refused.to_lowercase().lines().find_map(|line| line.strip_prefix("retry-after: ")?.parse::<u64>().ok());
    assert!(after.is_some_and(|after| after >= 1), "{refused}");
    let resumed = machine.resume("space", "a", false).await;
    assert!(resumed.is_ok() || resumed.is_err_and(|error| error.message().contains("in a row")));
    machine.until("it is tried again", || async { machine.get("space", "a", "/readyz").await.0 == 200 }).await;
    // A snapshot is a sign of health: the next crash is a first one.
    machine.suspend("space", "a").await;
    machine.count("space", "a").await;
    crashed(times + 1).await;
    assert_eq!(machine.get("space", "a", "/readyz").await.0, 200);
    machine.stop().await;
}

#[tokio::test]
async fn a_fork_continues_where_the_other_was_as_somebody_else() {
    let mut machine = one_counter(2).await;
    machine.count("space", "a").await;
    let before = machine.count("space", "a").await;
    machine.ate(&["fork", "a", "b", "-a", "space"]).await;
    let (one, other) = (machine.count("space", "a").await, machine.count("space", "b").await);
    for (reply, name) in [(&one, "a"), (&other, "b")] {
        assert_eq!((reply.memory, reply.file, reply.actor.as_str()), (3, 3, name), "{reply:?}");
        assert_eq!(reply.nonce, before.nonce, "the same memory");
    }
    assert_ne!(one.launch, other.launch, "each has randomness of its own");
    assert_ne!(machine.uid("space", "a").await, machine.uid("space", "b").await);
    let taken = machine.cli(&["fork", "a", "b", "-a", "space"]).await;
    assert!(taken.code == 1 && taken.stderr.contains("already exists"), "{taken:?}");
    // Each goes its own way, also over sleep; and neither needs the other.
    assert_eq!(machine.count("space", "b").await.memory, 4);
    for name in ["a", "b"] {
        machine.suspend("space", name).await;
    }
    machine.ate(&["delete", "actor", "a", "-a", "space"]).await;
    let reply = machine.count("space", "b").await;
    assert_eq!((reply.memory, reply.file), (5, 5), "{reply:?}");
    machine.create_counter("space", "new").await;
    let refused = machine.cli(&["fork", "new", "c", "-a", "space"]).await;
    assert!(refused.code == 1 && refused.stderr.contains("no snapshot yet"), "{refused:?}");
    machine.stop().await;
}
