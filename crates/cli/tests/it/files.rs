//! Objects from files.

use std::fs;

use serde_json::{Value, json};

use crate::support::{Command, Daemon};

const HEX: &str = "506a9418fe385f8eabb93b53647b4cc92e080fe4880da2a302176cd360e372a4";

/// A config, a pool and a template, with paths that are relative to the file.
fn manifests() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let config = format!(
        "{{apiVersion: ate.dev/v1alpha1, kind: SandboxConfig, metadata: {{name: gvisor}}, spec: {{sandboxClass: gvisor, \
         assets: {{amd64: {{runsc: {{url: 'file://bin/runsc', sha256: {HEX}}}}}}}}}}}"
    );
    let pool = "{apiVersion: ate.dev/v1alpha1, kind: WorkerPool, metadata: {name: small}, spec: {replicas: 2}}";
    let template = format!(
        "{{apiVersion: ate.dev/v1alpha1, kind: ActorTemplate, metadata: {{name: counter, namespace: demo}}, spec: {{\
         containers: [{{name: main, image: 'oci-layout:image@sha256:{HEX}'}}], \
         snapshotsConfig: {{location: 'file:///snapshots'}}}}}}"
    );
    fs::write(directory.path().join("1-config.yaml"), config).unwrap();
    fs::write(directory.path().join("2-rest.yaml"), format!("{pool}\n---\n{template}\n")).unwrap();
    directory
}

#[tokio::test]
async fn a_directory_is_applied_with_its_paths_made_absolute() {
    let (daemon, files) = (Daemon::start(), manifests());
    let apply = format!("apply -f {}", files.path().display());
    let created = "sandboxconfig.ate.dev/gvisor created\nworkerpool.ate.dev/small created\nactortemplate.ate.dev/counter created\n";
    let dry = created.replace(" created", " created (dry run)");
    assert_eq!(daemon.ate(&format!("{apply} --dry-run")).await.ok(), dry);
    assert_eq!(daemon.ate(&format!("{apply} -n team")).await.ok(), created);
    assert_eq!(daemon.ate(&apply).await.ok(), created.replace(" created", " unchanged"));

    let config: Value = serde_json::from_str(&daemon.ate("get config gvisor -o json").await.ok()).unwrap();
    let beside = |path: &str| files.path().join(path).display().to_string();
    assert_eq!(config["spec"]["assets"]["amd64"]["runsc"]["url"], format!("file://{}", beside("bin/runsc")));
    let template: Value = serde_json::from_str(&daemon.ate("get template counter -n demo -o json").await.ok()).unwrap();
    let image = format!("oci-layout://{}@sha256:{HEX}", beside("image"));
    assert_eq!(template["spec"]["containers"][0]["image"], image);
    let pools = "NAMESPACE   NAME    CLASS    REPLICAS\nteam        small   gvisor   2\n";
    assert_eq!(daemon.ate("get pools").await.ok(), pools);
    let list: Value = serde_json::from_str(&daemon.ate("get pools -o json").await.ok()).unwrap();
    assert_eq!((&list["kind"], list["items"].as_array().unwrap().len()), (&json!("List"), 1));
}

#[tokio::test]
async fn what_was_shown_can_be_applied_again() {
    let (daemon, files) = (Daemon::start(), manifests());
    daemon.ate(&format!("apply -f {}", files.path().display())).await.ok();
    for kind in ["configs", "pools", "templates"] {
        for format in ["json", "yaml"] {
            let shown = daemon.ate(&format!("get {kind} -o {format}")).await.ok();
            let mut apply = Command::new("apply -f - -o name", daemon.directory.path());
            apply.terminal.stdin = Box::new(std::io::Cursor::new(shown));
            assert_eq!(apply.run().await.ok(), daemon.ate(&format!("get {kind} -o name")).await.ok());
        }
    }
}

#[tokio::test]
async fn nothing_is_sent_if_any_file_is_wrong() {
    let (daemon, files) = (Daemon::start(), manifests());
    fs::write(files.path().join("3-bad.yaml"), "apiVersion: ate.dev/v1alpha1\nkind: WorkerPol\n").unwrap();
    let refused = daemon.ate(&format!("apply -f {}", files.path().display())).await.failed(1);
    assert!(refused.contains("3-bad.yaml:2:7: kind: unknown kind \"WorkerPol\": did you mean"), "{refused}");
    let missing =
        daemon.ate(&format!("apply -f {0}/1-config.yaml -f {0}/none", files.path().display())).await.failed(1);
    assert!(missing.contains("cannot read") && missing.contains("none: No such file"), "{missing}");
    assert!(daemon.fake.state.lock().unwrap().objects.is_empty());
}

#[tokio::test]
async fn a_template_that_was_changed_is_refused_with_what_to_do() {
    let (daemon, files) = (Daemon::start(), manifests());
    let apply = format!("apply -f {}", files.path().display());
    daemon.ate(&apply).await.ok();
    let file = files.path().join("2-rest.yaml");
    let changed = fs::read_to_string(&file).unwrap().replace("name: main", "name: other");
    fs::write(&file, changed).unwrap();
    let refused = daemon.ate(&apply).await.failed(1);
    assert_eq!(
        refused,
        "error: ActorTemplate \"demo/counter\" is invalid: spec: Spec is immutable\n  a template never changes: apply it \
         under another name, or delete its actors and it first\n"
    );
}

#[tokio::test]
async fn waiting_ends_when_templates_are_ready_or_one_has_failed() {
    let (mut daemon, files) = (Daemon::start(), manifests());
    let line = format!("apply -f {} --wait", files.path().display());
    let phases = |last: Value| [json!({"phase": "Pending"}), json!({"phase": "WaitGoldenActor"}), last].into();
    daemon.fake.state.lock().unwrap().phases = phases(json!({"phase": "Ready"}));
    let mut watched = Command::new(&line, daemon.directory.path());
    watched.terminal.is_watched = true;
    let outcome = watched.run().await;
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("ActorTemplate demo/counter: WaitGoldenActor"), "{}", outcome.stderr);
    assert!(outcome.stderr.ends_with("\r\x1b[2K"), "nothing is left of the spinner: {}", outcome.stderr);

    daemon.fake.state.lock().unwrap().phases = phases(json!({"phase": "Failed", "reason": "no image"}));
    let outcome = daemon.ate(&line).await;
    assert_eq!(outcome.stderr, "error: ActorTemplate demo/counter failed: no image\n");
    assert_eq!(outcome.code, 1);

    daemon.fake.state.lock().unwrap().phases = [json!({"phase": "Pending", "reason": "no worker"})].into();
    let outcome = daemon.ate(&format!("{line} --timeout 0s")).await;
    assert!(outcome.stderr.contains("is not ready in time, but Pending (no worker)"), "{}", outcome.stderr);
    daemon.kill();
}

#[tokio::test]
async fn what_files_declare_is_deleted_users_first_and_as_far_as_it_goes() {
    let (daemon, files) = (Daemon::start(), manifests());
    let path = files.path().display();
    daemon.ate(&format!("apply -f {path}")).await.ok();
    assert_eq!(daemon.ate("delete pool small").await.ok(), "workerpool.ate.dev \"small\" deleted\n");
    let outcome = daemon.ate(&format!("delete -f {path}")).await;
    let deleted = "actortemplate.ate.dev \"counter\" deleted\nsandboxconfig.ate.dev \"gvisor\" deleted\n";
    assert_eq!(outcome.stdout, deleted);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (1, "error: WorkerPool default/small not found\n"));
}
