//! Who an actor is: what clones of one snapshot share, and what they must not.

use std::time::{SystemTime, UNIX_EPOCH};

use ate_testkit::{Machine, pool};

use crate::ATE;

async fn json(machine: &Machine, actor: &str, path: &str) -> serde_json::Value {
    let (status, body) = machine.get("space", actor, path).await;
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("JSON")
}

#[tokio::test]
async fn clones_have_names_entropy_and_a_clock_of_their_own() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(2, "").await;
    machine.create_atespace("space").await;
    for name in ["a", "b"] {
        machine.create_counter("space", name).await;
    }
    let (a, b) = (json(&machine, "a", "/random").await, json(&machine, "b", "/random").await);
    assert_eq!(a["seeded"], b["seeded"], "they are clones of one memory");
    assert_ne!(a["fresh"], b["fresh"], "and yet the kernel's randomness is their own");
    let mut generation = 0;
    for round in 1..=3 {
        for name in ["a", "b"] {
            let reply = machine.count("space", name).await;
            assert_eq!((reply.actor.as_str(), reply.memory), (name, round));
            assert!(reply.generation > generation || name == "b", "a generation per assignment: {reply:?}");
            generation = reply.generation;
            let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos();
            let asked = now();
            let clock = machine.get("space", name, "/time").await.1;
            let clock: u128 = clock.trim().parse().expect("nanoseconds");
            // A clock that stood still while it slept would be further off than this.
            let slack = 500_000_000;
            let told = (asked - slack)..(now() + slack);
            assert!(told.contains(&clock), "its clock is {clock}, and it is {told:?}");
            machine.suspend("space", name).await;
        }
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }
    machine.stop().await;
}

#[tokio::test]
async fn what_an_actor_prints_and_what_runs_in_it_is_at_hand() {
    let mut machine = Machine::start(ATE).await;
    let variables = "    env: [{name: PATH, value: /}]";
    machine.apply(&format!("{}---{}", pool("counter", 1, ""), machine.template("counter", variables, ""))).await;
    machine.ready("demo", "counter").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    machine.count("space", "a").await;
    machine.suspend("space", "a").await;
    machine.count("space", "a").await;
    let logs = machine.ate(&["logs", "a", "-a", "space", "-o", "json"]).await;
    let lines: Vec<serde_json::Value> =
        logs.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect();
    for line in &lines {
        assert_eq!(line["labels"]["ate.dev/actor_id"], "a", "{line}");
        assert_eq!(line["labels"]["ate.dev/atespace"], "space", "{line}");
        assert_eq!(line["labels"]["ate.dev/actor_template_name"], "counter", "{line}");
    }
    let requests = lines.iter().filter(|line| line["message"].as_str().is_some_and(|text| text.contains("GET / 200")));
    assert_eq!(requests.count(), 2, "{logs}");
    let said = machine.cli(&["exec", "a", "-a", "space", "--", "counter", "-help"]).await;
    assert!(said.code == 0 && said.stderr.contains("-grpc-port"), "found by its container's PATH: {said:?}");
    let said = machine.cli(&["exec", "a", "-a", "space", "--", "/counter", "-nonsense"]).await;
    assert_eq!(said.code, 2, "the command's own exit code: {said:?}");
    let said = machine.cli(&["exec", "a", "-a", "space", "--", "/bin/sh"]).await;
    assert!(said.code == 1 && said.stderr.contains("cannot run \"/bin/sh\""), "{said:?}");
    assert!(!machine.logged().contains('\u{1b}'), "what is no terminal is told without colours");
    assert_eq!(machine.count("space", "a").await.memory, 3, "and the actor did not notice");
    // Its log is its own: who has its name later does not see it.
    machine.suspend("space", "a").await;
    machine.ate(&["delete", "actor", "a", "-a", "space"]).await;
    machine.create_counter("space", "a").await;
    assert_eq!(machine.ate(&["logs", "a", "-a", "space", "-o", "json"]).await, "");
    machine.stop().await;
}

#[tokio::test]
async fn a_template_whose_snapshots_have_no_place_is_refused() {
    let mut machine = Machine::start(ATE).await;
    let template = machine.template("nowhere", "", "").replace("gs://", "");
    let file = machine.directory().join("nowhere.yaml");
    std::fs::write(&file, template).expect("a file");
    let said = machine.cli(&["apply", "-f", file.to_str().expect("text")]).await;
    let names = |what: &str| said.stderr.contains(what);
    assert!(said.code == 1 && names("nowhere") && names("scheme://bucket/path"), "{said:?}");
    let said = machine.cli(&["get", "templates"]).await;
    assert!(!said.stdout.contains("nowhere"), "{said:?}");
    machine.stop().await;
}

#[tokio::test]
async fn a_template_that_does_not_come_up_says_why() {
    let mut machine = Machine::start(ATE).await;
    let with = |name: &str, command: &str| machine.template(name, &format!("    command: {command}"), "");
    // Not the others' digest either: an image that is here need not be fetched again.
    let nowhere = |template: String| {
        let image =
            template.split_whitespace().find(|word| word.starts_with("oci-layout://")).expect("an image").to_owned();
        template.replace(&image, &format!("oci-layout:///nowhere@sha256:{}", "0".repeat(64)))
    };
    let documents = [
        pool("counter", 2, ""),
        with("ends", "[/counter, -nonsense]"),
        with("absent", "[/no/such/program]"),
        nowhere(machine.template("unpullable", "", "")),
    ];
    machine.apply(&documents.join("---")).await;
    for (name, word) in [("ends", "code 2"), ("absent", "/no/such/program"), ("unpullable", "/nowhere")] {
        let failed = || async { machine.template_status("demo", name).await["phase"] == "Failed" };
        machine.until("the template fails", failed).await;
        let status = machine.template_status("demo", name).await;
        assert!(status["reason"].as_str().is_some_and(|reason| reason.contains(word)), "{name}: {status}");
    }
    // An actor of such a template says the same, instead of waiting for what will not come.
    machine.create_atespace("space").await;
    machine.create("space", "a", "ends").await;
    let error = machine.resume("space", "a", false).await.expect_err("it cannot");
    assert!(
        error.message().contains("ActorTemplate demo/ends has failed") && error.message().contains("code 2"),
        "{error}"
    );
    // What failed can be taken away at once, while its failure is still shown.
    machine.ate(&["delete", "actortemplate", "absent", "-n", "demo"]).await;
    machine.stop().await;
}

#[tokio::test]
async fn a_template_that_failed_is_tried_again_when_it_is_applied_again() {
    let mut machine = Machine::start(ATE).await;
    let root = machine.directory().join("later");
    let template =
        machine.template("later", "", "").replace("oci-layout://", &format!("oci-layout://{}", root.display()));
    machine.apply(&[pool("counter", 1, ""), template.clone()].join("---")).await;
    let failed = || async { machine.template_status("demo", "later").await["phase"] == "Failed" };
    machine.until("its image is not there", failed).await;
    std::os::unix::fs::symlink("/", &root).expect("a link");
    machine.apply(&template).await;
    machine.ready("demo", "later").await;
    machine.stop().await;
}

#[tokio::test]
async fn a_store_with_actors_is_not_given_another_identity() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    machine.stop().await;
    let (identity, away) = (machine.data().join("identity"), machine.data().join("away"));
    // Golden actors are read without a key: an instance may be another as long as there are no others.
    std::fs::rename(&identity, &away).expect("it is there");
    machine.restart().await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    assert_eq!(machine.count("space", "a").await.memory, 1);
    machine.stop().await;
    std::fs::remove_dir_all(&away).expect("it is there");
    std::fs::rename(&identity, &away).expect("it is there");
    let data = machine.data();
    let listen = ["--listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0"];
    let verb = [&["dev", "--data-dir", data.to_str().expect("text")][..], &listen].concat();
    let said = machine.cli(&verb).await;
    assert!(said.code == 1 && said.stderr.contains("there is no identity in"), "{said:?}");
    assert!(!identity.exists());
    ate_identity::Identity::open(&identity).expect("one of another instance");
    let said = machine.cli(&verb).await;
    assert!(said.code == 1 && said.stderr.contains("the store is another instance's"), "{said:?}");
    std::fs::remove_dir_all(&identity).expect("it is there");
    std::fs::rename(&away, &identity).expect("nobody made another");
    machine.restart().await;
    assert_eq!(machine.count("space", "a").await.memory, 2);
    machine.stop().await;
}
