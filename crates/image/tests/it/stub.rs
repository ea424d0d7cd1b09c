//! A registry of a few lines, for what a real one does not do on request: count, lie, want tokens.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use ate_image::{Cause, Credentials, Reference};
use ate_name::Digest;
use futures::future::join_all;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::support::{Layout, is_root, names, sha256, store, tar, text};

type Answer = (u16, String, Vec<u8>);
type Handler = dyn Fn(&str, Option<&str>, u16) -> Answer + Send + Sync;

struct Stub {
    port: u16,
    requests: Arc<Mutex<HashMap<String, usize>>>,
    server: JoinHandle<()>,
}

impl Drop for Stub {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Stub {
    /// The handler gets the path, the `Authorization` header and the port, and gives status, headers and body.
    async fn start(handler: Arc<Handler>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::<Mutex<HashMap<String, usize>>>::default();
        let counter = requests.clone();
        let server = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let (handler, counter) = (handler.clone(), counter.clone());
                tokio::spawn(async move {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        head.push(stream.read_u8().await?);
                    }
                    let head = String::from_utf8_lossy(&head).into_owned();
                    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                    *counter.lock().unwrap().entry(path.clone()).or_default() += 1;
                    let header =
                        |line: &str| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()));
                    let headers: HashMap<_, _> = head.lines().filter_map(header).collect();
                    let (status, extra, body) = handler(&path, headers.get("authorization").map(String::as_str), port);
                    let length = body.len();
                    let answer =
                        format!("HTTP/1.1 {status} x\r\n{extra}Content-Length: {length}\r\nConnection: close\r\n\r\n");
                    stream.write_all(answer.as_bytes()).await?;
                    stream.write_all(&body).await
                });
            }
        });
        Self { port, requests, server }
    }

    fn reference(&self, digest: Digest) -> Reference {
        Reference::parse(&format!("127.0.0.1:{}/team/app@sha256:{digest}", self.port)).unwrap()
    }

    fn count(&self, path: &str) -> usize {
        *self.requests.lock().unwrap().get(path).unwrap_or(&0)
    }
}

fn serve(layout: PathBuf) -> impl Fn(&str) -> Answer + Send + Sync {
    move |path| {
        let digest = path.rsplit_once("sha256:").map_or("none", |(_, digest)| digest);
        match std::fs::read(layout.join("blobs/sha256").join(digest)) {
            Ok(blob) => (200, String::new(), blob),
            Err(_) => (404, String::new(), b"{}".to_vec()),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_at_the_same_time_share_one_pull_and_images_share_layers() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let layout_path = directory.path().join("layout");
    let layout = Layout(&layout_path);
    let shared = tar(&[("shared", &"x".repeat(100_000))]);
    let one = layout.image(&[shared.clone(), tar(&[("one", "1")])], json!({})).digest();
    let two = layout.image(&[shared.clone(), tar(&[("two", "2")])], json!({})).digest();
    let serve = serve(layout_path.clone());
    let stub = Stub::start(Arc::new(move |path, _, _| serve(path))).await;
    let store = store(directory.path());
    let references = [stub.reference(one), stub.reference(two)];
    let wanted: Vec<_> = references.iter().cycle().take(16).collect();
    for image in join_all(wanted.iter().map(|reference| store.ensure(reference, None))).await {
        assert!(image.unwrap().layers[1].join("shared").is_file());
    }
    for digest in [one, two] {
        assert_eq!(stub.count(&format!("/v2/team/app/manifests/sha256:{digest}")), 1);
    }
    assert_eq!(stub.count(&format!("/v2/team/app/blobs/sha256:{}", sha256(&shared))), 1);
}

#[tokio::test]
async fn what_a_registry_sends_is_checked() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let layout_path = directory.path().join("layout");
    let layer = tar(&[("file", "data")]);
    let digest = Layout(&layout_path).image(std::slice::from_ref(&layer), json!({})).digest();
    let layer_path = format!("/blobs/sha256:{}", sha256(&layer));
    for (lie, what) in [("manifest", "Invalid digest"), ("longer layer", "bytes"), ("other layer", "sha256")] {
        let (serve, layer_path) = (serve(layout_path.clone()), layer_path.clone());
        let stub = Stub::start(Arc::new(move |path, _, _| {
            let (status, headers, mut body) = serve(path);
            match lie {
                "manifest" if path.contains("/manifests/") => body.push(b' '),
                "longer layer" if path.ends_with(&layer_path) => body.push(0),
                "other layer" if path.ends_with(&layer_path) => body[600] ^= 1,
                _ => {}
            }
            (status, headers, body)
        }))
        .await;
        let store = store(directory.path());
        let error = store.ensure(&stub.reference(digest), None).await.unwrap_err();
        assert!(text(&error).contains(what), "{lie}: {}", text(&error));
        assert_eq!(names(&directory.path().join("store/layers")), [""; 0], "{lie}");
    }
}

#[tokio::test]
async fn a_registry_that_wants_tokens_gets_the_credentials_at_its_token_service() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let layout_path = directory.path().join("layout");
    let digest = Layout(&layout_path).image(&[tar(&[("file", "data")])], json!({})).digest();
    let serve = serve(layout_path.clone());
    let stub = Stub::start(Arc::new(move |path, authorization, port| {
        let challenge =
            format!("WWW-Authenticate: Bearer realm=\"http://127.0.0.1:{port}/token\",service=\"stub\"\r\n");
        match (path.starts_with("/token?"), authorization) {
            // base64 of "user:right"
            (true, Some("Basic dXNlcjpyaWdodA==")) => (200, String::new(), br#"{"token":"t0ken"}"#.to_vec()),
            (false, Some("Bearer t0ken")) => serve(path),
            _ => (401, challenge, b"{}".to_vec()),
        }
    }))
    .await;
    let credentials = |password: &str| Credentials { username: "user".into(), password: password.into() };
    let (right, wrong) = (credentials("right"), credentials("wrong"));
    let store = store(directory.path());
    let reference = stub.reference(digest);
    // All at once: the refusal of one is not the refusal of another.
    let (refused, anonymous, image) = tokio::join!(
        store.ensure(&reference, Some(&wrong)),
        store.ensure(&reference, None),
        store.ensure(&reference, Some(&right)),
    );
    let refused = refused.unwrap_err();
    assert!(matches!(refused.cause, Cause::WrongCredentials { .. }), "{}", text(&refused));
    assert!(!format!("{refused:?} {}", text(&refused)).contains("wrong\""));
    assert!(matches!(anonymous.unwrap_err().cause, Cause::NoCredentials { .. }));
    assert!(image.unwrap().layers[0].join("file").is_file());
}
