//! Command lines, driven through `ate_cli::run` against a daemon that answers from memory.

mod fake;
mod files;
mod reach;
mod streams;
mod support;

use ate_proto::ateapi::actor::Status::{Paused, Running, Suspended};
use serde_json::{Value, json};
use support::Daemon;

fn with_actors() -> Daemon {
    let daemon = Daemon::start();
    for (atespace, name, status) in [("demo", "a2", Suspended), ("demo", "a1", Running), ("other", "b1", Paused)] {
        daemon.fake.put(atespace, name, status);
    }
    daemon
}

#[tokio::test]
async fn a_list_pages_through_and_is_a_sorted_table() {
    let daemon = with_actors();
    let expected = "\
ATESPACE   TEMPLATE NS   TEMPLATE   ID   STATUS             ATEOM POD     ATEOM IP    VERSION
demo       default       counter    a1   STATUS_RUNNING     default/w-0   127.0.0.1   1
demo       default       counter    a2   STATUS_SUSPENDED   <none>                    1
other      default       counter    b1   STATUS_PAUSED      <none>                    1
";
    assert_eq!(daemon.ate("get actors -A").await.ok(), expected);
    assert_eq!(daemon.ate("get actors -a demo -o name").await.ok(), "actor/a1\nactor/a2\n");
}

#[tokio::test]
async fn documents_are_the_list_even_of_one() {
    let daemon = with_actors();
    let list: Value = serde_json::from_str(&daemon.ate("get actors -A -o json").await.ok()).unwrap();
    assert_eq!(list["actors"][0]["actorId"], "a1");
    assert_eq!(list["actors"].as_array().unwrap().len(), 3);
    let one = daemon.ate("get actor a1 -a demo -o json").await.ok();
    let expected = json!({"actors": [{
        "actorId": "a1", "version": "1", "actorTemplateNamespace": "default", "actorTemplateName": "counter",
        "status": "STATUS_RUNNING", "ateomPodNamespace": "default", "ateomPodName": "w-0", "ateomPodIp": "127.0.0.1",
        "atespace": "demo",
    }]});
    assert_eq!(serde_json::from_str::<Value>(&one).unwrap(), expected);
    assert!(one.starts_with("{\n  \"actors\": [\n    {\n"), "{one}");
    assert!(daemon.ate("get actor a1 -a demo -o yaml").await.ok().contains("version: \"1\"\n"));
}

#[tokio::test]
async fn wide_tells_what_the_public_api_does_not() {
    let daemon = with_actors();
    let text = daemon.ate("get actors -a demo -o wide").await.ok();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].ends_with("VERSION   GENERATION   FROZEN   IDLE   SNAPSHOT   FAILURE"), "{text}");
    assert!(lines[1].ends_with("1         3            true     1m5s   74 KiB     worker lost"), "{text}");
    assert_eq!(lines.len(), 3);
    let one = daemon.ate("suspend a1 -a demo -o wide").await.ok();
    assert_eq!((one.lines().count(), one.contains("STATUS_SUSPENDED")), (2, true), "{one}");
}

#[tokio::test]
async fn workers_and_atespaces_are_sorted_too() {
    let daemon = with_actors();
    let workers = "\
NAMESPACE   POOL    POD   STATUS     ASSIGNED ACTOR
default     small   w-0   ASSIGNED   default/counter/a1
default     small   w-1   FREE       <none>
";
    assert_eq!(daemon.ate("get workers").await.ok(), workers);
    assert_eq!(daemon.ate("get worker w-1 -o name").await.ok(), "worker/w-1\n");
    assert_eq!(daemon.ate("get atespaces").await.ok(), "NAME\ndemo\nother\n");
    assert_eq!(daemon.ate("get atespace demo").await.ok(), "NAME\ndemo\n");
}

#[tokio::test]
async fn an_actor_is_made_woken_put_to_sleep_and_deleted() {
    let daemon = Daemon::start();
    daemon.fake.template("default", "counter");
    assert_eq!(daemon.ate("create atespace demo").await.ok(), "NAME\ndemo\n");
    let made = daemon.ate("create actor a1 -t default/counter -a demo --selector disk=fast,zone=x").await.ok();
    assert!(made.contains("demo       default       counter    a1   STATUS_SUSPENDED"), "{made}");
    assert!(daemon.ate("resume actor a1 -a demo --boot").await.ok().contains("STATUS_RUNNING"));
    let refused = daemon.ate("delete a1 -a demo").await.failed(1);
    assert_eq!(
        refused,
        "error: Actor a1 is not suspended (status: STATUS_RUNNING)\n  suspend it first: ate suspend a1 -a demo\n"
    );
    assert!(daemon.ate("pause actor/a1 -a demo").await.ok().contains("STATUS_PAUSED"));
    assert!(daemon.ate("suspend a1 -a demo").await.ok().contains("STATUS_SUSPENDED"));
    daemon.ate("update actor a1 -a demo --selector disk=slow").await.ok();
    daemon.ate("update actor a1 -a demo --no-selector").await.ok();
    assert_eq!(daemon.ate("delete a1 -a demo").await.ok(), "actor \"a1\" deleted\n");
    assert_eq!(daemon.ate("delete atespace demo").await.ok(), "atespace \"demo\" deleted\n");
    let selectors = std::mem::take(&mut daemon.fake.state.lock().unwrap().selectors);
    let sizes: Vec<_> = selectors.iter().map(|selector| selector.as_ref().map(|s| s.match_labels.len())).collect();
    assert_eq!(sizes, [Some(2), Some(1), None]);
}

#[tokio::test]
async fn an_atespace_that_is_not_there_is_named() {
    let daemon = with_actors();
    let missing = daemon.ate("suspend a1 -a dem").await.failed(1);
    assert_eq!(missing, "error: Actor a1 not found\n  there is no atespace \"dem\": did you mean \"demo\"?\n");
    daemon.ate("create atespace empty").await.ok();
    let missing = daemon.ate("suspend a1 -a empty").await.failed(1);
    assert_eq!(missing, "error: Actor a1 not found\n  there is no actor in atespace \"empty\"\n");
}

#[tokio::test]
async fn several_are_deleted_as_far_as_it_goes() {
    let daemon = with_actors();
    daemon.fake.put("demo", "a1", Running);
    let outcome = daemon.ate("delete actor a1 a2 a3 -a demo").await;
    assert_eq!(outcome.stdout, "actor \"a2\" deleted\n");
    assert!(outcome.code == 1 && outcome.stderr.contains("Actor a1 is not suspended"), "{outcome:?}");
    assert!(outcome.stderr.contains("Actor a3 not found"), "{outcome:?}");
    let missing = daemon.ate("delete actor a1 a2 -a dem").await.failed(1);
    assert!(
        missing.ends_with("Actor a2 not found\n  there is no atespace \"dem\": did you mean \"demo\"?\n"),
        "{missing}"
    );
}

#[tokio::test]
async fn an_actor_is_restarted_and_by_force_only_if_that_is_said() {
    let daemon = with_actors();
    for line in ["restart actor a2 -a demo", "restart a2 -a demo --force"] {
        assert!(daemon.ate(line).await.ok().contains("STATUS_RUNNING"), "{line}");
    }
    assert_eq!(daemon.fake.state.lock().unwrap().restarts, [false, true]);
    let missing = daemon.ate("restart a3 -a demo").await.failed(1);
    assert!(missing.starts_with("error: Actor a3 not found\n  did you mean"), "{missing}");
}

#[tokio::test]
async fn a_fork_is_a_new_actor_and_never_takes_anothers_name() {
    let daemon = with_actors();
    assert_eq!(daemon.ate("fork a1 a9 -a demo -o name").await.ok(), "actor/a9\n");
    assert_eq!(daemon.ate("fork a1 a2 -a demo").await.failed(1), "error: Actor a2 already exists\n");
    let missing = daemon.ate("fork a3 a4 -a demo").await.failed(1);
    assert!(missing.starts_with("error: Actor a3 not found\n  did you mean"), "{missing}");
}

#[tokio::test]
async fn what_is_done_by_force_needs_the_word_and_is_listed_with_its_reason() {
    let daemon = with_actors();
    let unstuck = daemon.ate("unstick a1 -a demo --reason hangs").await;
    assert_eq!(unstuck.stderr, "node n1 does not answer: what may still run there is ended once it does\n");
    assert!(unstuck.code == 0 && unstuck.stdout.contains("STATUS_SUSPENDED"), "{unstuck:?}");
    daemon.fake.put("demo", "a1", Running);
    daemon.ate("delete a1 -a demo").await.failed(1);
    let refused = daemon.ate("delete atespace demo --force").await.failed(2);
    assert!(refused.contains("only actors"), "{refused}");
    assert_eq!(daemon.ate("delete actor a1 -a demo --force --reason burnt").await.ok(), "actor \"a1\" deleted\n");
    assert_eq!(daemon.ate("delete a2 -a demo --force").await.ok(), "actor \"a2\" deleted\n");
    let expected = "\
TIME                       CALL               ATESPACE   ACTOR   CALLER   REASON
1970-01-01T00:00:00.000Z   UnstickActor       demo       a1      socket   hangs
1970-01-01T00:00:01.000Z   ForceDeleteActor   demo       a1      socket   burnt
1970-01-01T00:00:02.000Z   ForceDeleteActor   demo       a2      socket
";
    assert_eq!(daemon.ate("audit").await.ok(), expected);
    assert!(daemon.ate("audit -o wide").await.ok().contains("was running"));
    let json: Value = serde_json::from_str(&daemon.ate("audit -o json").await.ok()).unwrap();
    assert_eq!(json["entries"][1]["reason"], "burnt");
}

#[tokio::test]
async fn a_wrong_name_gets_the_servers_words_and_the_nearest_right_one() {
    let daemon = with_actors();
    daemon.fake.put("demo", "counter-1", Suspended);
    daemon.fake.template("default", "counter");
    let near = |name: &str| format!("  did you mean {name:?}?\n");
    for (line, text, hint) in [
        ("get actor conuter-1 -a demo", "Actor conuter-1 not found", near("counter-1")),
        ("logs counter-2 -a demo", "Actor counter-2 not found", near("counter-1")),
        ("suspend zzz -a demo", "Actor zzz not found", String::new()),
        ("get atespace dem", "Atespace dem not found", near("demo")),
        ("get template countre", "ActorTemplate default/countre not found", near("counter")),
        (
            "get template counter -n x",
            "ActorTemplate x/counter not found",
            "  there is one in namespace \"default\"\n".into(),
        ),
        ("create actor x -t countr -a demo", "ActorTemplate default/countr not found", near("counter")),
        (
            "create actor x -t counter -a new",
            "Atespace new not found",
            "  make it with: ate create atespace new\n".into(),
        ),
        ("get worker w-9", "Worker w-9 not found", String::new()),
    ] {
        assert_eq!(daemon.ate(line).await.failed(1), format!("error: {text}\n{hint}"), "{line}");
    }
}

#[tokio::test]
async fn history_is_a_table_and_a_waterfall_when_wide() {
    let daemon = with_actors();
    let table = "\
TIME                       EVENT     GEN   WORKER        DETAIL
1970-01-01T00:00:00.000Z   created   0     <none>
1970-01-01T00:01:00.000Z   resumed   1     default/w-0
";
    assert_eq!(daemon.ate("history a1 -a demo").await.ok(), table);
    let wide = daemon.ate("history a1 -a demo -o wide").await.ok();
    let bars = format!(
        "{table}  claim       500 us  {0}\n  restore     500 us  {1}{0}\n  total       1.0 ms\n",
        "█".repeat(20),
        " ".repeat(20)
    );
    assert_eq!(wide, bars);
    let json: Value = serde_json::from_str(&daemon.ate("history a1 -a demo -o json").await.ok()).unwrap();
    assert_eq!(json["entries"][1]["phases"][0], json!({"name": "claim", "micros": "500"}));
}
