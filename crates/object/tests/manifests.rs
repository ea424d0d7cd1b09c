//! Reading files: what comes out of good ones, and where bad ones are refused.

use std::slice;

use ate_object::{
    ActorTemplate, DEFAULT_NAMESPACE, Idle, MAX_MANIFEST_BYTES, ManifestError, Manifests, Object, SandboxConfig, Scope,
    WorkerPool, assets_for, check_defaults, check_update, read_manifests, resolve_config,
};
use proptest::prelude::*;

const COUNTER: &str = include_str!("counter.yaml");

fn read(text: &str) -> Result<Manifests, ManifestError> {
    read_manifests("demo.yaml", text.as_bytes(), DEFAULT_NAMESPACE)
}

#[track_caller]
fn objects(text: &str) -> Vec<Object> {
    read(text).unwrap_or_else(|error| panic!("{error}")).objects
}

#[track_caller]
fn refused(text: &str, expected: &str) {
    assert_eq!(read(text).expect_err("must be refused").to_string(), expected, "{text}");
}

fn counter() -> (WorkerPool, ActorTemplate) {
    match <[Object; 2]>::try_from(objects(COUNTER)).expect("two objects") {
        [Object::WorkerPool(pool), Object::ActorTemplate(template)] => (pool, template),
        other => panic!("{other:?}"),
    }
}

fn config(name: &str, spec: &str) -> SandboxConfig {
    let sha = "a".repeat(64);
    let text = format!(
        "apiVersion: ate.dev/v1alpha1\nkind: SandboxConfig\nmetadata: {{name: {name}}}\nspec:\n  {}\n",
        spec.replace("RUNSC", &format!("{{runsc: {{url: https://h/runsc, sha256: {sha}}}}}"))
    );
    match <[Object; 1]>::try_from(objects(&text)).expect("one object") {
        [Object::SandboxConfig(config)] => config,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_counter_demo_is_read_with_its_defaults() {
    let (pool, template) = counter();
    assert_eq!(pool.metadata.key().to_string(), "ate-demo-counter/counter");
    assert_eq!((pool.spec.replicas, pool.metadata.labels["workload"].as_str()), (5, "counter"));
    let spec = &template.spec;
    assert_eq!(spec.containers[0].readyz.as_ref().expect("readyz").http_get.path, "/readyz");
    assert_eq!(spec.containers[0].env[0].value.as_deref(), Some("yes"));
    assert_eq!((spec.snapshots_config.on_pause, spec.snapshots_config.on_commit), (Scope::Full, Scope::Data));
    assert_eq!((spec.sandbox_class, pool.spec.sandbox_class), Default::default());
    assert!(spec.worker_selector.as_ref().expect("selector").matches(&pool.metadata.labels));
    assert_eq!(
        read(COUNTER).unwrap().notes,
        ["demo.yaml:2:1: Namespace \"ate-demo-counter\" left out: a namespace needs no object here"]
    );
}

#[test]
fn what_is_written_reads_back_the_same() {
    for object in objects(COUNTER).into_iter().chain([
        Object::SandboxConfig(config("c", "{default: true, assets: {amd64: RUNSC}}")),
        Object::ActorTemplate(full_template()),
    ]) {
        let text = object.to_yaml();
        assert!(text.starts_with("apiVersion: ate.dev/v1alpha1\nkind: "), "{text}");
        assert_eq!(objects(&text), slice::from_ref(&object), "{text}");
        let json = serde_json::to_string_pretty(&object).unwrap();
        assert_eq!(objects(&json), slice::from_ref(&object), "{json}");
        assert_eq!(serde_json::from_str::<Object>(&json).unwrap(), object);
    }
}

/// A template that sets every field of ours.
fn full_template() -> ActorTemplate {
    let ours = "
  sandboxClass: gvisor
  idle: {freezeAfter: 30s, suspendAfter: 1h30m}
  egress: {allow: [{cidr: 10.0.0.0/8, ports: [443, 80]}, {cidr: '::/0'}]}
  resources: {limits: {cpu: 500m, memory: 256Mi}}
  imagePullSecrets: [{name: registry}]
";
    let ports = "ports: [{port: 80}, {port: 9000, name: grpc, protocol: h2c}]";
    let text = COUNTER.replace("      readyz:", &format!("      {ports}\n      readyz:")).trim_end().to_owned() + ours;
    match objects(&text).pop() {
        Some(Object::ActorTemplate(template)) => template,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_object_without_a_namespace_gets_the_chosen_one() {
    let text = "apiVersion: ate.dev/v1alpha1\nkind: WorkerPool\nmetadata: {name: p}\nspec: {replicas: 1}\n";
    let namespace = |chosen| read_manifests("f", text.as_bytes(), chosen).unwrap().objects[0].key().to_string();
    assert_eq!(namespace(DEFAULT_NAMESPACE), "default/p");
    assert_eq!(namespace("team"), "team/p");
}

#[test]
fn json_lists_comments_and_empty_documents_are_fine() {
    let pool = r#"{"apiVersion": "ate.dev/v1alpha1", "kind": "WorkerPool", "metadata": {"name": "p"},
	"spec": {"replicas": 1, "template": null}, "status": {"replicas": 7}}"#;
    let list =
        format!("{{\n\t\"apiVersion\": \"v1\",\n\t\"kind\": \"List\", \"metadata\": {{}},\n\t\"items\": [{pool}]\n}}");
    assert_eq!(objects(&list), objects(pool));
    assert_eq!(objects(&format!("\u{feff}---\n# nothing\n---\n{pool}\n...\n---\n")), objects(pool));
    assert_eq!(read("").unwrap(), Manifests::default());
    assert_eq!(read("# only a comment\n").unwrap(), Manifests::default());
}

#[test]
fn faults_say_file_line_column_and_field() {
    let change = |from: &str, to: &str| {
        assert!(COUNTER.contains(from), "{from}");
        COUNTER.replacen(from, to, 1)
    };
    // Malformed, and what a tree cannot hold.
    refused(
        &change("  replicas: 5", "  replicas: 5: 6"),
        "demo.yaml:15:14: spec: not YAML: mapping values are not allowed in this context",
    );
    refused(
        &change("  replicas: 5", "  replicas: 5\n  replicas: 6"),
        "demo.yaml:16:3: spec.replicas: duplicate key: already set at line 15, column 3",
    );
    // The wrong fields.
    refused(
        &change("      command:", "      comand:"),
        "demo.yaml:28:7: spec.containers[0].comand: unknown field: did you mean \"command\"?",
    );
    refused(
        &change("  pauseImage:", "  restartPolicy:"),
        "demo.yaml:24:3: spec.restartPolicy: unknown field: known here are pauseImage, containers, volumes, \
         snapshotsConfig, sandboxClass, workerSelector, idle, egress, resources, imagePullSecrets",
    );
    refused(
        &change("      durableDir: {}", "      durableDir: {size: 1}"),
        "demo.yaml:46:20: spec.volumes[0].durableDir.size: unknown field: known here are sizeLimit",
    );
    refused(&change("  replicas: 5\n", ""), "demo.yaml:14:1: spec.replicas: is required");
    refused(
        &change("    - name: counter\n      image", "    - image"),
        "demo.yaml:26:7: spec.containers[0].name: is required",
    );
    // The wrong types.
    refused(
        &change("          value: \"yes\"", "          value: 8080"),
        "demo.yaml:31:18: spec.containers[0].env[0].value: expected a string, found 8080: put it in quotes",
    );
    refused(
        &change("              optional: true", "              optional: maybe"),
        "demo.yaml:37:25: spec.containers[0].env[1].valueFrom.secretKeyRef.optional: expected true or false, found \"maybe\"",
    );
    refused(
        &change("  volumes:\n    - name: data\n      durableDir: {}", "  volumes: data"),
        "demo.yaml:44:12: spec.volumes: expected a list, found \"data\"",
    );
    refused(
        &change("      readyz:\n        httpGet:\n          port: 80", "      readyz: [80]"),
        "demo.yaml:38:7: spec.containers[0].readyz: expected a mapping, found a list",
    );
    refused(
        &change("command: [\"/ko-app/counter\"]", "command: [~]"),
        "demo.yaml:28:17: spec.containers[0].command[0]: expected a string, found nothing",
    );
    // The wrong values, with the object's name.
    refused(
        &change("image: registry.example/counter@", "image: registry.example/counter:"),
        "demo.yaml:27:14: ActorTemplate \"ate-demo-counter/counter\": spec.containers[0].image: All images must be \
         pinned (changing the image invalidates snapshots)",
    );
}

#[test]
fn an_unknown_kind_is_told_what_is_known() {
    let document = |api_version: &str, kind: &str| format!("apiVersion: {api_version}\nkind: {kind}\nmetadata: {{}}\n");
    refused(
        &document("apps/v1", "Deployment"),
        "demo.yaml:2:7: kind: unknown kind \"Deployment\" of \"apps/v1\": known are ActorTemplate, WorkerPool, \
         SandboxConfig of ate.dev/v1alpha1, and List and Namespace of v1",
    );
    refused(
        &document("ate.dev/v1alpha1", "ActorTemplates"),
        "demo.yaml:2:7: kind: unknown kind \"ActorTemplates\": did you mean \"ActorTemplate\"?",
    );
    refused(
        &document("ate.dev/v1", "WorkerPool"),
        "demo.yaml:1:13: apiVersion: unknown apiVersion \"ate.dev/v1\": WorkerPool is of ate.dev/v1alpha1",
    );
    refused("kind: WorkerPool\n", "demo.yaml:1:1: apiVersion: is required");
    refused("apiVersion: ate.dev/v1alpha1\nKind: WorkerPool\n", "demo.yaml:1:1: kind: is required");
    refused("apiVersion: 1\nkind: WorkerPool\n", "demo.yaml:1:13: apiVersion: expected a string");
    refused("- a\n", "demo.yaml:1:1: expected a mapping with apiVersion, kind, metadata and spec");
}

#[test]
fn all_faults_of_a_file_are_reported_and_nothing_of_it_is_used() {
    let text = COUNTER.replace("replicas: 5", "replicas: -5").replace("port: 80", "port: 0");
    refused(
        &text,
        "demo.yaml:15:13: spec.replicas: expected a whole number from 0 to 2147483647, found -5\n\
         demo.yaml:40:17: spec.containers[0].readyz.httpGet.port: must be a port from 1 to 65535",
    );
    let list = "apiVersion: v1\nkind: List\nitems:\n- apiVersion: ate.dev/v1alpha1\n  kind: WorkerPool\n  metadata: {name: P}\n  spec: {replicas: 1}\n- 5\n";
    refused(
        list,
        "demo.yaml:6:20: WorkerPool \"default/P\": items[0].metadata.name: must be a DNS subdomain: lower case \
         letters, digits, '-' and '.', starting and ending with a letter or digit, at most 253 characters\n\
         demo.yaml:8:3: items[1]: expected a mapping with apiVersion, kind, metadata and spec",
    );
    refused("apiVersion: v1\nkind: List\nitems: 1\n", "demo.yaml:3:8: items: expected a list");
}

#[test]
fn the_same_object_twice_is_a_mistake() {
    let pool = "apiVersion: ate.dev/v1alpha1\nkind: WorkerPool\nmetadata: {name: p}\nspec: {replicas: 1}\n";
    refused(
        &format!("{pool}---\n{pool}"),
        "demo.yaml:6:1: WorkerPool \"default/p\": is in this file twice, first at line 1",
    );
    assert_eq!(objects(&format!("{pool}---\n{}", pool.replace("{name: p}", "{name: p, namespace: n}"))).len(), 2);
}

#[test]
fn files_have_limits() {
    let size = vec![b'#'; MAX_MANIFEST_BYTES + 1];
    let error = read_manifests("f", &size, DEFAULT_NAMESPACE).unwrap_err().to_string();
    assert_eq!(error, "f:1:1: a file of 4194305 bytes; more than 4194304 are not read");
    assert!(read_manifests("f", &size[1..], DEFAULT_NAMESPACE).is_ok());
    let error = read(&"---\na\n".repeat(1001)).unwrap_err().to_string();
    assert_eq!(error, "demo.yaml:2002:1: more than 1000 documents in one file");
    let error = read_manifests("f", b"a: 1\nb: \xff\n", DEFAULT_NAMESPACE).unwrap_err().to_string();
    assert_eq!(error, "f:2:4: not UTF-8 text");
    let labels: String = (0..200).map(|n| format!("    k{n}: '-'\n")).collect();
    let error = read(&COUNTER.replace("    workload: counter\nspec", &format!("{labels}spec"))).unwrap_err();
    assert_eq!(error.faults.len(), 200);
    assert_eq!(error.to_string().lines().last(), Some("demo.yaml: and 100 more"));
}

#[test]
fn a_template_never_changes_but_a_pool_may() {
    let (pool, template) = counter();
    let mut other = template.clone();
    other.metadata.labels.insert("a".into(), "b".into());
    let template = Object::ActorTemplate(template);
    assert_eq!(check_update(&template, &Object::ActorTemplate(other.clone())), Ok(()));
    other.spec.containers[0].command.push("-v".into());
    assert_eq!(
        check_update(&template, &Object::ActorTemplate(other)).unwrap_err().to_string(),
        "ActorTemplate \"ate-demo-counter/counter\" is invalid: spec: Spec is immutable"
    );
    let mut grown = pool.clone();
    grown.spec.replicas = 9;
    assert_eq!(check_update(&Object::WorkerPool(pool), &Object::WorkerPool(grown)), Ok(()));
}

#[test]
fn a_pool_uses_the_config_it_names_or_the_one_default_of_its_class() {
    let (mut pool, _) = counter();
    let plain = config("plain", "{assets: {amd64: RUNSC}}");
    let default = config("default", "{default: true, assets: {amd64: RUNSC}}");
    let rival = config("rival", "{default: true, assets: {amd64: RUNSC}}");
    let mut microvm = config("vm", "{default: true, assets: {amd64: RUNSC}}");
    microvm.spec.sandbox_class = ate_object::SandboxClass::Microvm;

    let resolve = |pool: &WorkerPool, configs: &[&SandboxConfig]| {
        let found = resolve_config(pool, configs.iter().copied());
        found.map(|config| config.metadata.name.clone()).map_err(|error| error.to_string())
    };
    assert_eq!(resolve(&pool, &[&plain, &microvm, &default]), Ok("default".into()));
    assert_eq!(
        resolve(&pool, &[&plain, &microvm]).unwrap_err(),
        "pool \"ate-demo-counter/counter\" names no SandboxConfig, and none is the default of class gvisor\n  set \
         spec.default of one to true, or name one in spec.sandboxConfigName of the pool"
    );
    assert_eq!(
        resolve(&pool, &[&rival, &default]).unwrap_err(),
        "pool \"ate-demo-counter/counter\" names no SandboxConfig, and several are the default of class gvisor: \
         \"rival\", \"default\"\n  set spec.default of all but one to false, or name one in spec.sandboxConfigName of \
         the pool"
    );
    pool.spec.sandbox_config_name = Some("plain".into());
    assert_eq!(resolve(&pool, &[&rival, &default, &plain]), Ok("plain".into()));
    assert_eq!(
        resolve(&pool, &[&default]).unwrap_err(),
        "pool \"ate-demo-counter/counter\" names SandboxConfig \"plain\", which does not exist\n  apply it, or change \
         spec.sandboxConfigName of the pool"
    );
    pool.spec.sandbox_config_name = Some("vm".into());
    assert_eq!(
        resolve(&pool, &[&microvm]).unwrap_err(),
        "pool \"ate-demo-counter/counter\" is of class gvisor, but its SandboxConfig \"vm\" is of class microvm\n  \
         name a config of class gvisor in spec.sandboxConfigName of the pool"
    );
}

#[test]
fn a_class_has_one_default() {
    let default = config("default", "{default: true, assets: {amd64: RUNSC}}");
    let mut rival = config("rival", "{default: true, assets: {amd64: RUNSC}}");
    assert_eq!(check_defaults([&default], &default), Ok(()), "an object may be applied again");
    assert_eq!(
        check_defaults([&default], &rival).unwrap_err().to_string(),
        "SandboxConfig \"rival\" is invalid: spec.default: SandboxConfig \"default\" is already the default of class \
         gvisor: set its spec.default to false first, or leave this one's out and name it by sandboxConfigName"
    );
    rival.spec.default = false;
    assert_eq!(check_defaults([&default], &rival), Ok(()));
    rival.spec.default = true;
    rival.spec.sandbox_class = ate_object::SandboxClass::Microvm;
    assert_eq!(check_defaults([&default], &rival), Ok(()));
}

#[test]
fn a_missing_asset_is_named_with_the_remedy() {
    let config = config("gvisor-default", "{assets: {amd64: RUNSC}}");
    assert_eq!(assets_for(&config, "amd64").unwrap()["runsc"].url, "https://h/runsc");
    assert_eq!(
        assets_for(&config, "arm64").unwrap_err().to_string(),
        "SandboxConfig \"gvisor-default\" has no asset \"runsc\" for arm64\n  add spec.assets.arm64.runsc, or give the \
         pool a sandboxConfigName that has it"
    );
}

#[test]
fn a_record_of_a_newer_release_can_still_be_read() {
    let (_, template) = counter();
    let mut json = serde_json::to_value(Object::ActorTemplate(template.clone())).unwrap();
    json["spec"]["fromTheFuture"] = serde_json::json!({"a": 1});
    assert_eq!(serde_json::from_value::<Object>(json).unwrap(), Object::ActorTemplate(template));
}

/// Pieces that make YAML interesting, so that random files get past the first character.
fn shreds() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("apiVersion: ate.dev/v1alpha1\n".to_owned()),
        Just("kind: ActorTemplate\n".to_owned()),
        Just("metadata: {name: a}\n".to_owned()),
        Just("spec:\n".to_owned()),
        Just("  containers:\n  - name: a\n".to_owned()),
        Just("<<: *a\n".to_owned()),
        Just("? [a]\n: &a !!str x\n".to_owned()),
        "[-\\[\\]{}:,#&*!|>'\"%@` \n\ta0~]{1,6}",
        any::<String>(),
    ];
    proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

#[test]
fn a_template_that_says_nothing_of_idling_gets_what_is_usual() {
    let (_, mut template) = counter();
    template.spec.idle = None;
    assert_eq!(template.spec.idle(), Idle::USUAL);
    template.spec.idle = Some(Idle::default());
    assert_eq!(template.spec.idle(), Idle { freeze_after: None, suspend_after: None }, "never, because it was said");
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = read_manifests("f", &bytes, DEFAULT_NAMESPACE);
    }

    #[test]
    fn no_shreds_of_yaml_panic(text in shreds()) {
        let _ = read(&text);
    }

    #[test]
    fn a_fault_points_into_the_file(at in 0..COUNTER.len(), text in "[-:\\[{'\"\n a]{0,3}") {
        let broken = format!("{}{text}{}", &COUNTER[..at], &COUNTER[at + 1..]);
        if let Err(error) = read(&broken) {
            let lines = broken.lines().count() + 1;
            for fault in error.faults {
                prop_assert!((1..=lines).contains(&fault.line) && fault.column > 0, "{fault:?}");
            }
        }
    }

    #[test]
    fn any_text_survives_writing_and_reading(value in any::<String>(), argument in "[-+.0-9eExaA-Z~: #'\"|>\\n\\t]{0,12}") {
        let (_, mut template) = counter();
        template.spec.containers[0].env[0].value = Some(value.clone());
        template.spec.containers[0].command = vec![argument, value.clone()];
        template.metadata.annotations.insert("note".into(), value);
        let object = Object::ActorTemplate(template);
        let text = object.to_yaml();
        prop_assert_eq!(read(&text).map(|manifests| manifests.objects), Ok(vec![object]), "{}", text);
    }
}
