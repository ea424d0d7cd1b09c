//! Watches, logs and commands inside actors.

use std::io::{self, Write};

use ate_proto::ateapi::actor::Status::{Resuming, Running, Suspended};
use serde_json::Value;

use crate::support::{Command, Daemon};
use crate::with_actors;

#[tokio::test]
async fn a_watch_has_one_header_and_a_row_per_change_and_survives_a_restart() {
    let mut daemon = with_actors();
    let command = Command::new("get actors -a demo -w", daemon.directory.path());
    let (stdout, stderr) = (command.stdout.clone(), command.stderr.clone());
    let (interrupt, running) = command.start();
    stdout.until("a2").await;
    daemon.fake.put("demo", "a2", Resuming);
    stdout.until("STATUS_RESUMING").await;
    daemon.fake.remove("demo", "a2");
    stdout.until("DELETED").await;

    daemon.kill();
    stderr.until("the connection was lost; trying again\n").await;
    daemon.fake.put("demo", "a3", Suspended);
    daemon.fake.remove("demo", "a1");
    daemon.fake.put("demo", "kept", Suspended);
    daemon.start_again();
    stdout.until("kept").await;
    daemon.kill();
    // What is the same after another restart is not told again.
    daemon.start_again();
    daemon.fake.put("demo", "last", Running);
    stdout.until("last").await;
    interrupt.send(()).unwrap();
    assert_eq!(running.await.unwrap(), 0);

    let text = stdout.text();
    let shown: Vec<[&str; 2]> =
        text.lines().map(|line| [3, 4].map(|n| line.split_whitespace().nth(n).unwrap())).collect();
    let expected = [
        ["TEMPLATE", "ID"],
        ["a1", "STATUS_RUNNING"],
        ["a2", "STATUS_SUSPENDED"],
        ["a2", "STATUS_RESUMING"],
        ["a2", "DELETED"],
        ["a1", "DELETED"],
        ["a3", "STATUS_SUSPENDED"],
        ["kept", "STATUS_SUSPENDED"],
        ["last", "STATUS_RUNNING"],
    ];
    assert_eq!(shown, expected, "{text}");
}

#[tokio::test]
async fn a_watch_of_one_actor_as_json_is_one_event_per_line() {
    let daemon = with_actors();
    let command = Command::new("get actor a1 -a demo -w -o json", daemon.directory.path());
    let stdout = command.stdout.clone();
    let (interrupt, running) = command.start();
    stdout.until("STATUS_RUNNING").await;
    daemon.fake.put("demo", "a2", Running);
    daemon.fake.put("demo", "a1", Suspended);
    daemon.fake.remove("demo", "a1");
    stdout.until("deleted").await;
    interrupt.send(()).unwrap();
    assert_eq!(running.await.unwrap(), 0);
    let events: Vec<Value> = stdout.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events[0]["changed"]["actor"]["status"], "STATUS_RUNNING");
    assert_eq!(events[1]["changed"]["actor"]["status"], "STATUS_SUSPENDED");
    assert_eq!(events[2]["deleted"]["name"], "a1");
    assert_eq!(events.len(), 3);
}

#[tokio::test]
async fn logs_show_time_and_message_and_json_shows_all() {
    let daemon = with_actors();
    let last_two = "2026-06-30T12:00:02.000Z line 2\n2026-06-30T12:00:03.000Z line 3\n";
    assert_eq!(daemon.ate("logs actor a1 -a demo --tail 2").await.ok(), last_two);
    let raw = "{\"time\":\"2026-06-30T12:00:03Z\",\"message\":\"line 3\",\"labels\":{}}\n";
    assert_eq!(daemon.ate("logs a1 -a demo --tail 1 -o json").await.ok(), raw);
}

#[tokio::test]
async fn following_a_log_ends_well_when_interrupted_and_badly_when_the_daemon_dies() {
    let mut daemon = with_actors();
    let follow = |daemon: &Daemon| Command::new("logs a1 -a demo -f", daemon.directory.path());
    let command = follow(&daemon);
    let stdout = command.stdout.clone();
    let (interrupt, running) = command.start();
    stdout.until("line 3").await;
    interrupt.send(()).unwrap();
    assert_eq!(running.await.unwrap(), 0);

    let command = follow(&daemon);
    let (stdout, stderr) = (command.stdout.clone(), command.stderr.clone());
    let (_interrupt, running) = command.start();
    stdout.until("line 3").await;
    daemon.kill();
    assert_eq!(running.await.unwrap(), 1);
    let text = stderr.text();
    assert!(
        text.starts_with("error: the connection to unix://") && text.contains(" was lost\n  see whether"),
        "{text}"
    );
}

#[tokio::test]
async fn a_command_gets_our_input_and_we_get_its_output_and_exit_code() {
    let daemon = with_actors();
    let mut command = Command::new("exec a1 -a demo -c side -- cat -n", daemon.directory.path());
    command.terminal.stdin = Box::new("one\ntwo\n".as_bytes());
    let outcome = command.run().await;
    assert_eq!((outcome.code, outcome.stdout.as_str()), (3, "one\ntwo\n"));
    assert_eq!(outcome.stderr, "demo/a1/side cat,-n");
    assert_eq!(daemon.ate("exec a1 -a demo -- broken").await.failed(1), "error: no such file\n");
    assert!(daemon.ate("exec a1 -a demo -- vanish").await.failed(1).contains(" was lost\n"));
    assert!(
        daemon.ate("exec a9 -a demo -- cat").await.failed(1).starts_with("error: Actor a9 not found\n  did you mean")
    );
}

struct Gone;

impl Write for Gone {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_reader_that_has_gone_ends_the_command_without_a_word() {
    let daemon = with_actors();
    for line in ["get actors -A", "get actors -A -w", "logs a1 -a demo -f", "completion bash"] {
        let mut command = Command::new(line, daemon.directory.path());
        command.terminal.stdout = Box::new(Gone);
        let outcome = command.run().await;
        assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""), "{line}");
    }
}
