//! What is checked in under `src/gen` is what the `.proto` files give, and the public API keeps its numbers.

use std::fs;
use std::path::Path;

use prost::Message as _;
use prost_reflect::{DescriptorPool, Kind};

const FILES: [&str; 3] = ["ateapi.rs", "ate.v1.rs", "descriptors.bin"];

/// Writes [`FILES`] into `out`.
fn generate(protos: &Path, out: &Path) {
    let mut compiler = protox::Compiler::new([protos]).unwrap();
    compiler.include_imports(true).include_source_info(true);
    compiler.open_files(["ateapi/ateapi.proto", "ate/v1/substrate.proto", "ate/v1/node.proto"]).unwrap();
    let mut descriptors = compiler.file_descriptor_set();

    let mut messages = tonic_prost_build::Config::new();
    messages.enable_type_names();
    tonic_prost_build::configure()
        .bytes(".ate.v1")
        .btree_map(".")
        .out_dir(out)
        .compile_fds_with_config(descriptors.clone(), messages)
        .unwrap();

    // Comments are in the .proto files and in the generated code; a third copy would be half of the binary file.
    descriptors.file.iter_mut().for_each(|file| file.source_code_info = None);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec()).unwrap();
}

#[test]
fn generated_code_is_current() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (protos, checked_in) = (here.join("../../proto"), here.join("src/gen"));
    let fresh = tempfile::tempdir().unwrap();
    generate(&protos, fresh.path());
    for file in FILES {
        let wanted = fs::read(fresh.path().join(file)).unwrap();
        if std::env::var_os("ATE_UPDATE").is_some() {
            fs::write(checked_in.join(file), wanted).unwrap();
        } else {
            let found = fs::read(checked_in.join(file)).unwrap_or_default();
            assert!(found == wanted, "src/gen/{file} is stale: run ATE_UPDATE=1 cargo test -p ate-proto");
        }
    }
}

/// Every message and enum of the public API in one line, as existing clients have them compiled in.
const PUBLIC_MESSAGES: &str = "\
Actor: actor_id=1 string, version=2 int64, actor_template_namespace=3 string, actor_template_name=4 string, \
status=5 Actor.Status, ateom_pod_namespace=6 string, ateom_pod_name=7 string, ateom_pod_ip=8 string, \
in_progress_snapshot=10 string, ateom_pod_uid=11 string, latest_snapshot_info=12 SnapshotInfo, \
worker_selector=13 Selector, worker_pool_name=14 string, atespace=15 string
Actor.Status: STATUS_UNSPECIFIED=0, STATUS_RESUMING=1, STATUS_RUNNING=2, STATUS_SUSPENDING=3, STATUS_SUSPENDED=4, \
STATUS_PAUSING=5, STATUS_PAUSED=6
ActorRef: atespace=1 string, name=2 string
Atespace: name=1 string
CreateActorRequest: actor_ref=1 ActorRef, actor_template_namespace=2 string, actor_template_name=3 string, \
worker_selector=4 Selector
CreateActorResponse: actor=1 Actor
CreateAtespaceRequest: name=1 string
CreateAtespaceResponse: atespace=1 Atespace
DebugClearRequest:
DebugClearResponse:
DeleteActorRequest: actor_ref=1 ActorRef
DeleteActorResponse:
DeleteAtespaceRequest: name=1 string
DeleteAtespaceResponse:
ExternalSnapshotInfo: snapshot_uri_prefix=1 string
GetActorRequest: actor_ref=1 ActorRef
GetActorResponse: actor=1 Actor
GetAtespaceRequest: name=1 string
GetAtespaceResponse: atespace=1 Atespace
ListActorsRequest: page_size=1 int32, page_token=2 string, atespace=3 string
ListActorsResponse: actors=1 repeated Actor, next_page_token=2 string
ListAtespacesRequest:
ListAtespacesResponse: atespaces=1 repeated Atespace
ListWorkersRequest:
ListWorkersResponse: workers=1 repeated Worker
LocalSnapshotInfo: snapshot_prefix=1 string, node_vms_with_local_snapshots=2 repeated string
MintCertRequest: app_id=1 string, user_id=2 string, session_id=3 string, certificate_signing_request=4 bytes
MintCertResponse: session_certificates=1 repeated bytes
MintJWTRequest: audience=1 repeated string, app_id=2 string, user_id=3 string, session_id=4 string
MintJWTResponse: session_jwt=1 string
PauseActorRequest: actor_ref=1 ActorRef
PauseActorResponse: actor=1 Actor
ResumeActorRequest: actor_ref=1 ActorRef, boot=2 bool
ResumeActorResponse: actor=1 Actor
Selector: match_labels=1 repeated Selector.MatchLabelsEntry
Selector.MatchLabelsEntry: key=1 string, value=2 string
SnapshotInfo: type=1 SnapshotType, external=2 ExternalSnapshotInfo, local=3 LocalSnapshotInfo
SnapshotType: SNAPSHOT_TYPE_UNSPECIFIED=0, SNAPSHOT_TYPE_LOCAL=1, SNAPSHOT_TYPE_EXTERNAL=2
SuspendActorRequest: actor_ref=1 ActorRef
SuspendActorResponse: actor=1 Actor
UpdateActorRequest: actor_ref=1 ActorRef, worker_selector=2 Selector
UpdateActorResponse: actor=1 Actor
Worker: worker_namespace=1 string, worker_pool=2 string, worker_pod=3 string, actor_namespace=4 string, \
actor_template=5 string, actor_id=6 string, ip=7 string, version=8 int64, worker_pod_uid=9 string, node_name=10 string, \
actor_atespace=11 string
";

/// All are unary, and each method `M` takes an `MRequest` and returns an `MResponse`.
const PUBLIC_METHODS: [(&str, &[&str]); 2] = [
    (
        "Control",
        &[
            "GetActor",
            "CreateActor",
            "UpdateActor",
            "SuspendActor",
            "PauseActor",
            "ResumeActor",
            "DeleteActor",
            "ListWorkers",
            "ListActors",
            "CreateAtespace",
            "GetAtespace",
            "ListAtespaces",
            "DeleteAtespace",
            "DebugClear",
        ],
    ),
    ("SessionIdentity", &["MintJWT", "MintCert"]),
];

fn public_api() -> DescriptorPool {
    DescriptorPool::decode(ate_proto::FILE_DESCRIPTOR_SET).unwrap()
}

fn own_name(full_name: &str) -> &str {
    full_name.strip_prefix("ateapi.").unwrap_or(full_name)
}

#[test]
fn the_public_api_keeps_its_numbers() {
    let api = public_api();
    let messages = api.all_messages().filter(|message| message.package_name() == "ateapi").map(|message| {
        let fields = message.fields().map(|field| {
            let kind = match field.kind() {
                Kind::Message(message) => own_name(message.full_name()).to_owned(),
                Kind::Enum(kind) => own_name(kind.full_name()).to_owned(),
                scalar => format!("{scalar:?}").to_lowercase(),
            };
            format!(
                " {}={} {}{kind}",
                field.name(),
                field.number(),
                if field.is_list() || field.is_map() { "repeated " } else { "" }
            )
        });
        format!("{}:{}\n", own_name(message.full_name()), fields.collect::<Vec<_>>().join(","))
    });
    let enums = api.all_enums().filter(|kind| kind.package_name() == "ateapi").map(|kind| {
        let values = kind.values().map(|value| format!(" {}={}", value.name(), value.number()));
        format!("{}:{}\n", own_name(kind.full_name()), values.collect::<Vec<_>>().join(","))
    });
    let mut lines: Vec<String> = messages.chain(enums).collect();
    lines.sort_by_key(|line| line.split(':').next().map(str::to_owned));
    similar(&lines.concat(), PUBLIC_MESSAGES);
}

/// Fails on the first line that differs: the whole of two long texts helps nobody.
fn similar(found: &str, wanted: &str) {
    for (found, wanted) in found.lines().zip(wanted.lines()) {
        assert_eq!(found, wanted);
    }
    assert_eq!(found.lines().count(), wanted.lines().count());
}

#[test]
fn the_public_api_keeps_its_methods() {
    let api = public_api();
    let services: Vec<_> = api.services().filter(|service| service.package_name() == "ateapi").collect();
    assert_eq!(services.len(), PUBLIC_METHODS.len());
    for (service, (name, methods)) in services.iter().zip(PUBLIC_METHODS) {
        assert_eq!(service.name(), name);
        assert_eq!(service.methods().map(|method| method.name().to_owned()).collect::<Vec<_>>(), methods);
        for method in service.methods() {
            assert!(!method.is_client_streaming() && !method.is_server_streaming());
            assert_eq!(method.input().full_name(), format!("ateapi.{}Request", method.name()));
            assert_eq!(method.output().full_name(), format!("ateapi.{}Response", method.name()));
        }
    }
}
