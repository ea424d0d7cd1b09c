//! Which binaries run what.

use std::collections::BTreeSet;

use ate_testkit::{Machine, pool};

use crate::ATE;

/// The files of a build, by hash, as the repository pins them.
fn pinned(build: &str) -> BTreeSet<String> {
    let arch = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let pins = include_str!("../../../../runtime/gvisor/SHA256SUMS");
    let of_build = pins.lines().filter(|line| line.contains(&format!("  {arch}/{build}/")));
    of_build.filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect()
}

#[track_caller]
fn runs_only(machine: &Machine, builds: &[&str]) {
    let running = machine.runtimes();
    let allowed: BTreeSet<_> = builds.iter().flat_map(|build| pinned(build)).collect();
    assert!(!running.is_empty() && running.is_subset(&allowed), "{running:?} is not of {builds:?}");
    for build in builds {
        assert!(!running.is_disjoint(&pinned(build)), "nothing of {build} in {running:?}");
    }
}

/// The shipped configs, with the other one as default.
async fn change_default(machine: &Machine, default: &str) {
    let mut documents = Vec::new();
    for name in ["gvisor-default", "gvisor-stock"] {
        let json = machine.ate(&["get", "sandboxconfig", name, "-o", "json"]).await;
        let mut config: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        config["spec"]["default"] = (name == default).into();
        config["metadata"]["annotations"] = serde_json::json!({});
        documents.push(config.to_string());
    }
    machine.apply(&documents.join("\n---\n")).await;
}

#[tokio::test]
async fn an_actor_wakes_on_the_runtime_of_its_snapshot_whatever_the_config_says_now() {
    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    machine.create_atespace("space").await;
    for name in ["a", "b"] {
        machine.create_counter("space", name).await;
    }
    assert_eq!(machine.count("space", "a").await.memory, 1);
    machine.suspend("space", "a").await;
    change_default(&machine, "gvisor-stock").await;
    let reply = machine.count("space", "a").await;
    assert_eq!((reply.memory, reply.file), (2, 2), "{reply:?}");
    runs_only(&machine, &["tuned"]);
    machine.suspend("space", "a").await;
    // The golden snapshot pins what is made from it.
    assert_eq!(machine.count("space", "b").await.memory, 1);
    runs_only(&machine, &["tuned"]);
    machine.suspend("space", "b").await;
    // A restart ships nothing over what somebody has changed.
    machine.stop().await;
    machine.restart().await;
    // A template that is new boots on what is the default now.
    machine.apply(&machine.template("later", "", "")).await;
    machine.ready("demo", "later").await;
    machine.create("space", "c", "later").await;
    assert_eq!(machine.count("space", "c").await.memory, 1);
    runs_only(&machine, &["stock"]);
    machine.suspend("space", "c").await;
    assert_eq!(machine.count("space", "c").await.memory, 2);
    machine.suspend("space", "c").await;
    assert_eq!(machine.count("space", "a").await.memory, 3);
    runs_only(&machine, &["stock", "tuned"]);
    machine.stop().await;
}

#[tokio::test]
async fn two_pools_run_two_builds_at_once() {
    let mut machine = Machine::start(ATE).await;
    let mut documents = vec![
        pool("one", 1, "  sandboxConfigName: gvisor-default"),
        pool("two", 1, "  sandboxConfigName: gvisor-stock"),
    ];
    for name in ["one", "two"] {
        documents.push(machine.template(name, "", &format!("  workerSelector: {{matchLabels: {{pool: {name}}}}}")));
    }
    machine.apply(&documents.join("---")).await;
    machine.create_atespace("space").await;
    for name in ["one", "two"] {
        machine.ready("demo", name).await;
        machine.create("space", name, name).await;
    }
    for round in 1..=3 {
        for name in ["one", "two"] {
            let reply = machine.count("space", name).await;
            assert_eq!((reply.memory, reply.file), (round, round), "{name}: {reply:?}");
        }
        runs_only(&machine, &["tuned", "stock"]);
        for name in ["one", "two"] {
            machine.suspend("space", name).await;
        }
    }
    machine.stop().await;
}

#[tokio::test]
async fn a_runtime_that_is_not_what_it_should_be_is_refused_with_a_remedy() {
    let mut machine = Machine::start(ATE).await;
    let json = machine.ate(&["get", "sandboxconfig", "gvisor-stock", "-o", "json"]).await;
    let stock: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let arch = stock["spec"]["assets"].as_object().expect("by architecture").keys().next().expect("one").clone();
    let other = if arch == "amd64" { "arm64" } else { "amd64" };
    let asset = stock["spec"]["assets"][&arch]["runsc"].clone();
    let hash = asset["sha256"].as_str().expect("a hash");
    let wrong: String = hash.chars().map(|digit| if digit == '0' { '1' } else { '0' }).collect();
    let config = |name: &str, arch: &str, asset: &serde_json::Value| {
        serde_json::json!({
            "apiVersion": "ate.dev/v1alpha1", "kind": "SandboxConfig", "metadata": {"name": name},
            "spec": {"sandboxClass": "gvisor", "assets": {arch: {"runsc": asset}}},
        })
        .to_string()
    };
    let changed = serde_json::json!({"url": asset["url"], "sha256": wrong});
    let absent = serde_json::json!({"url": "file:///nonexistent/runsc", "sha256": hash.replace('a', "b")});
    let cases = [
        ("wrong-hash", config("wrong-hash", &arch, &changed), vec!["wrong-hash", "runsc", "sha256"]),
        ("other-arch", config("other-arch", other, &asset), vec!["other-arch", &arch, "spec.assets"]),
        ("absent-file", config("absent-file", &arch, &absent), vec!["absent-file", "/nonexistent/runsc"]),
    ];
    for (name, config, _) in &cases {
        let pool = pool(name, 1, &format!("  sandboxConfigName: {name}"));
        let selector = format!("  workerSelector: {{matchLabels: {{pool: {name}}}}}");
        machine.apply(&format!("{config}\n---{pool}---{}", machine.template(name, "", &selector))).await;
    }
    for (name, _, words) in &cases {
        let failed = || async { machine.template_status("demo", name).await["phase"] == "Failed" };
        machine.until("the template fails", failed).await;
        let status = machine.template_status("demo", name).await.to_string();
        assert!(words.iter().all(|word| status.contains(word)), "{name}: {status}");
    }
    assert!(machine.runtimes().is_empty(), "nothing was started");
    let file = machine.directory().join("config.json");
    std::fs::write(&file, config("classless", &arch, &asset).replace("gvisor\"", "nonsense\"")).expect("written");
    let said = machine.cli(&["apply", "-f", &file.display().to_string()]).await;
    assert!(said.code != 0 && said.stderr.contains("sandboxClass"), "{said:?}");
    // Two defaults of one class: refused, with both names.
    let rival = config("rival", &arch, &asset).replace("\"spec\":{", "\"spec\":{\"default\":true,");
    std::fs::write(&file, rival).expect("written");
    let said = machine.cli(&["apply", "-f", &file.display().to_string()]).await;
    assert!(said.code != 0 && ["rival", "gvisor-default"].iter().all(|name| said.stderr.contains(name)), "{said:?}");
    machine.stop().await;
}
