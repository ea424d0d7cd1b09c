//! Pulls from the registry that most people run, `distribution`.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ate_image::{Architecture, Cause, Content, Credentials, ImageConfig, Recipe, Reference, pack};
use oci_client::RegistryOperation;
use oci_client::client::{Client, ClientConfig, ClientProtocol};
use oci_client::secrets::RegistryAuth;
use serde_json::Value;

use crate::support::{needs_root, store, text};

const VERSION: &str = "v3.1.2";
/// bcrypt of "correct horse", at its lowest cost.
const ACCOUNT: &str = "alice:$2a$04$hQFtPGj/VDPUiwibHBKTsOo7EiG5DlmwtZ7o1wzwAuyr4uLLuOHFS\n";

/// The binary that `ATE_TEST_REGISTRY` names, or one that is built once and kept.
fn binary() -> PathBuf {
    if let Some(binary) = env::var_os("ATE_TEST_REGISTRY") {
        return binary.into();
    }
    let home = || PathBuf::from(env::var_os("HOME").expect("HOME is set")).join(".cache");
    let cache = env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from);
    let directory = cache.join(format!("ate/tools/registry-{VERSION}"));
    let binary = directory.join("registry");
    if !binary.exists() {
        eprintln!("building the registry, once; this takes minutes");
        let package = format!("github.com/distribution/distribution/v3/cmd/registry@{VERSION}");
        let mut build = Command::new("go");
        let built = build.args(["install", &package]).env("GOFLAGS", "-mod=mod").env("GOBIN", &directory).status();
        assert!(built.expect("go is installed").success(), "cannot build the registry");
    }
    binary
}

struct Registry {
    process: Child,
    address: String,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Registry {
    fn start(directory: &Path) -> Self {
        let path = |name: &str| directory.join(name).display().to_string();
        fs::write(path("htpasswd"), ACCOUNT).unwrap();
        let config = format!(
            "version: 0.1\nlog: {{level: info}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: \"127.0.0.1:0\"}}\nauth: {{htpasswd: {{realm: test, path: {}}}}}\n",
            path("data"),
            path("htpasswd"),
        );
        fs::write(path("config.yml"), config).unwrap();
        let mut command = Command::new(binary());
        command.args(["serve", &path("config.yml")]).env("OTEL_TRACES_EXPORTER", "none").stderr(Stdio::piped());
        let mut process = command.stdout(Stdio::null()).spawn().unwrap();
        let mut log = BufReader::new(process.stderr.take().expect("piped above")).lines();
        let mut seen = Vec::new();
        let address = log.by_ref().map_while(Result::ok).find_map(|line| {
            let address = line.split_once("listening on ").map(|(_, rest)| rest.to_owned());
            seen.push(line);
            address
        });
        let Some(address) = address else { panic!("the registry did not start:\n{}", seen.join("\n")) };
        let address = address.split(['"', ' ', ',']).next().unwrap_or_default().to_owned();
        // A full pipe would stop it.
        std::thread::spawn(move || log.for_each(drop));
        Self { process, address }
    }

    async fn push(&self, layout: &Path, repository: &str) {
        let config = ClientConfig { protocol: ClientProtocol::Http, ..ClientConfig::default() };
        let client = Client::try_from(config).unwrap();
        let image = |digest: &str| {
            oci_client::Reference::with_digest(self.address.clone(), repository.to_owned(), digest.to_owned())
        };
        let auth = RegistryAuth::Basic("alice".into(), "correct horse".into());
        client.auth(&image("sha256:0"), &auth, RegistryOperation::Push).await.unwrap();
        // What a document refers to goes before the document.
        let index = serde_json::from_slice::<Value>(&fs::read(layout.join("index.json")).unwrap()).unwrap();
        let mut open = vec![index["manifests"][0].clone()];
        let mut order = Vec::new();
        while let Some(descriptor) = open.pop() {
            let digest = descriptor["digest"].as_str().unwrap().to_owned();
            let bytes = fs::read(layout.join("blobs").join(digest.replace(':', "/"))).unwrap();
            let document = serde_json::from_slice::<Value>(&bytes).unwrap_or_default();
            let children = ["manifests", "layers"].iter().filter_map(|key| document[key].as_array()).flatten();
            open.extend(
                children.chain(document.get("config").filter(|config| config.get("digest").is_some())).cloned(),
            );
            order.push((digest, bytes, descriptor["mediaType"].as_str().unwrap().to_owned()));
        }
        for (digest, bytes, media_type) in order.into_iter().rev() {
            if media_type.contains("manifest") || media_type.contains("index") {
                client.push_manifest_raw(&image(&digest), bytes, media_type.parse().unwrap()).await.unwrap();
            } else {
                client.push_blob(&image(&digest), bytes, &digest).await.unwrap();
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_in_a_real_registry_is_had_with_the_right_credentials_only() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::start(directory.path());
    let file = directory.path().join("app");
    fs::write(&file, vec![7; 9 << 20]).unwrap();
    let content = |_| vec![Content::File { from: file.clone(), to: "/app".to_owned() }];
    let content = BTreeMap::from([Architecture::Amd64, Architecture::Arm64].map(|a| (a, content(a))));
    let config = ImageConfig { entrypoint: vec!["/app".into()], ..ImageConfig::default() };
    let layout = directory.path().join("layout");
    let digest = pack(&Recipe { config: config.clone(), content }, &layout).unwrap();
    registry.push(&layout, "team/app").await;

    let store = store(directory.path());
    let reference = |repository: &str, digest| {
        Reference::parse(&format!("{}/{repository}:tag@sha256:{digest}", registry.address)).unwrap()
    };
    let image = reference("team/app", digest);
    let error = store.ensure(&image, None).await.unwrap_err();
    assert!(matches!(error.cause, Cause::NoCredentials { .. }), "{}", text(&error));
    let wrong = Credentials { username: "alice".into(), password: "battery staple".into() };
    let error = store.ensure(&image, Some(&wrong)).await.unwrap_err();
    assert!(matches!(error.cause, Cause::WrongCredentials { .. }), "{}", text(&error));
    assert!(!text(&error).contains("battery"));

    let secret = format!(r#"{{"auths":{{"{}":{{"username":"alice","password":"correct horse"}}}}}}"#, registry.address);
    let right = Credentials::from_docker_config(secret.as_bytes(), &registry.address).unwrap().unwrap();
    let pulled = store.ensure(&image, Some(&right)).await.unwrap_or_else(|error| panic!("{}", text(&error)));
    assert_eq!(pulled.config, config);
    assert_eq!(fs::read(pulled.layers[0].join("app")).unwrap(), fs::read(&file).unwrap());

    let absent = ate_name::Digest::from_bytes([1; 32]);
    for missing in [reference("team/app", absent), reference("team/other", absent)] {
        let error = store.ensure(&missing, Some(&right)).await.unwrap_err();
        assert!(matches!(error.cause, Cause::Missing { .. }), "{}", text(&error));
    }
    drop(registry);
    // It is on the node now.
    store.ensure(&image, None).await.unwrap();
}
