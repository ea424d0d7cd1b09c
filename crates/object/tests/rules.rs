//! Every rule with its message. The cases are in `rules.txt`.

use ate_object::{DEFAULT_NAMESPACE, Object, read_manifests};

const TEMPLATE: &str = "\
apiVersion: ate.dev/v1alpha1
kind: ActorTemplate
metadata:
  name: t
spec:
  containers:
    - name: main
      image: a@sha256:1
      readyz: {httpGet: {port: 80}}
      volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, durableDir: {}}]
  snapshotsConfig: {location: gs://b/p}
";

fn document(kind: &str, rest: &str) -> String {
    let rest = rest.replace("SHA", &"a".repeat(64));
    format!("apiVersion: ate.dev/v1alpha1\nkind: {kind}\nmetadata:\n  name: x\n{rest}\n")
}

fn object(name: &str) -> String {
    let file = "{url: file:///x, sha256: SHA}";
    match name {
        "template" => TEMPLATE.to_owned(),
        "pool" => document("WorkerPool", "spec:\n  replicas: 1"),
        "config" => {
            document("SandboxConfig", "spec:\n  assets:\n    amd64:\n      runsc: {url: https://h/runsc, sha256: SHA}")
        }
        "microvm" => {
            let names = ["cloud-hypervisor", "virtiofsd", "kata-kernel", "kata-image", "kata-config"];
            let assets: String = names.iter().map(|name| format!("      {name}: {file}\n")).collect();
            document("SandboxConfig", &format!("spec:\n  sandboxClass: microvm\n  assets:\n    amd64:\n{assets}"))
        }
        "empty template" => document("ActorTemplate", "spec: {}"),
        "empty config" => document("SandboxConfig", "spec: {}"),
        other => panic!("no object {other:?}"),
    }
}

fn problems(text: &str) -> Vec<String> {
    match read_manifests("f", text.as_bytes(), DEFAULT_NAMESPACE) {
        Ok(_) => Vec::new(),
        Err(error) => error.faults.iter().map(|fault| fault.problem.to_string()).collect(),
    }
}

#[track_caller]
fn read(text: &str) -> Object {
    let mut manifests = read_manifests("f", text.as_bytes(), DEFAULT_NAMESPACE).unwrap_or_else(|e| panic!("{e}"));
    manifests.objects.pop().expect("one object")
}

#[track_caller]
fn replaced(text: &str, old: &str, new: &str) -> String {
    assert!(text.contains(old), "{old:?} is not in the object");
    text.replacen(old, new, 1)
}

/// Puts the line `new` below the line `old`, inside of it if it opens a mapping.
#[track_caller]
fn inserted(text: &str, old: &str, new: &str) -> String {
    let line = text.lines().find(|line| line.trim_start_matches([' ', '-']) == old);
    let line = line.unwrap_or_else(|| panic!("no line {old:?}"));
    let indent = line.len() - old.len() + if old.ends_with(':') { 2 } else { 0 };
    replaced(text, line, &format!("{line}\n{:indent$}{new}", ""))
}

/// Writes out `<3 of a#>` and `<3 times a>`.
fn expanded(text: &str) -> String {
    let Some((before, rest)) = text.split_once('<') else { return text.to_owned() };
    let (inside, after) = rest.split_once('>').expect("a closing bracket");
    let (count, rest) = inside.split_once(' ').expect("a count");
    let count: usize = count.parse().expect("a count");
    let middle = match rest.split_once(' ').expect("a word") {
        ("of", item) => {
            let items: Vec<_> = (0..count).map(|n| item.replace('#', &n.to_string())).collect();
            format!("[{}]", items.join(", "))
        }
        (_, text) => text.repeat(count),
    };
    format!("{before}{middle}{}", expanded(after))
}

#[test]
fn every_rule_is_enforced_in_its_own_words() {
    let mut good = String::new();
    let mut lines = include_str!("rules.txt").lines().enumerate().peekable();
    let mut cases = 0;
    while let Some((number, line)) = lines.next() {
        let change = |rest: &str, edit: fn(&str, &str, &str) -> String| {
            let (old, new) = rest.split_once(" => ").unwrap_or_else(|| panic!("line {number}: {rest}"));
            edit(&good, old, &expanded(new))
        };
        let changed = match line.split_at_checked(2) {
            Some(("- ", rest)) => change(rest, replaced),
            Some(("+ ", rest)) => change(rest, inserted),
            Some(("# ", _)) => continue,
            _ if line.is_empty() || line == "#" => continue,
            _ => {
                let name = line.strip_prefix('[').and_then(|line| line.strip_suffix(']'));
                let name = name.unwrap_or_else(|| panic!("line {}: {line}", number + 1));
                good = object(name);
                assert!(name.starts_with("empty") || problems(&good).is_empty(), "{name}: {:?}", problems(&good));
                continue;
            }
        };
        let mut expected = Vec::new();
        let mut accepted = false;
        while let Some((_, line)) = lines.next_if(|(_, line)| line.starts_with(['!', '.'])) {
            accepted |= line.starts_with('.');
            expected.extend(line.strip_prefix("! "));
        }
        assert_ne!(accepted, !expected.is_empty(), "line {}: either refused or accepted", number + 1);
        assert_eq!(problems(&changed), expected, "line {}: {line}", number + 1);
        cases += 1;
    }
    assert!(cases > 100, "only {cases} cases were found");
}

#[test]
fn what_is_said_is_what_is_read() {
    let template = |fields: &str| match read(&inserted(TEMPLATE, "spec:", fields)) {
        Object::ActorTemplate(template) => template.spec,
        other => panic!("{other:?}"),
    };
    let idle = template("idle: {freezeAfter: 0s, suspendAfter: 1h30m}").idle.expect("idle");
    assert_eq!((idle.freeze_after, idle.suspend_after.map(|after| after.get().as_secs())), (None, Some(5400)));
    let limits = template("resources: {limits: {cpu: 0.5, memory: 256Mi}}").resources.expect("resources").limits;
    assert_eq!((limits.cpu_millis(), limits.memory_bytes()), (Some(500), Some(256 << 20)));
    let durable = |limit| {
        let text = replaced(TEMPLATE, "durableDir: {}", limit);
        let Object::ActorTemplate(template) = read(&text) else { panic!("not a template") };
        template.spec.durable_dir().map(|durable| durable.bytes())
    };
    assert_eq!(durable("durableDir: {sizeLimit: 64Mi}"), Some(64 << 20));
    assert_eq!(durable("durableDir: {}"), Some(1 << 30), "one that says nothing is limited too");
    let Object::WorkerPool(pool) =
        read(&inserted(&object("pool"), "spec:", "template: {resources: {limits: {memory: 1Gi}}}"))
    else {
        panic!("not a pool")
    };
    assert_eq!((pool.spec.cpu_limit_millis(), pool.spec.memory_limit_bytes()), (None, Some(1 << 30)));
}

#[test]
fn without_a_named_port_an_actor_is_reached_on_80() {
    let ports = |text: &str| match read(text) {
        Object::ActorTemplate(template) => template.spec.ports().iter().map(|port| port.port.get()).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!(ports(TEMPLATE), [80]);
    let side = inserted(TEMPLATE, "containers:", "- {name: side, image: a@b, ports: [{port: 9000, protocol: h2c}]}");
    assert_eq!(ports(&side), [9000]);
    assert_eq!(
        problems(&inserted(&side, "name: main", "ports: [{port: 9000}]")),
        ["spec.containers[1].ports[0].port: container \"side\" already listens on 9000"]
    );
}

#[test]
fn every_problem_of_an_object_is_reported_as_kubectl_would() {
    let Object::ActorTemplate(mut template) = read(TEMPLATE) else { panic!("not a template") };
    let report = |template: &ate_object::ActorTemplate| {
        Object::ActorTemplate(template.clone()).validate().expect_err("must be refused").to_string()
    };
    let pinned = "spec.containers[0].image: All images must be pinned (changing the image invalidates snapshots)";
    template.spec.containers[0].image = "a".into();
    assert_eq!(report(&template), format!("ActorTemplate \"default/t\" is invalid: {pinned}"));
    template.spec.snapshots_config.location.clear();
    let location = "spec.snapshotsConfig.location: must not be empty";
    assert_eq!(report(&template), format!("ActorTemplate \"default/t\" is invalid:\n  {pinned}\n  {location}"));
}
