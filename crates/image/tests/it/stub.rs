//! A registry of a few lines, for what a real one does not do on request: count, lie, want tokens.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use ate_image::{Cause, Credentials, Reference};
use ate_name::Digest;
use futures::future::join_all;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::support::{Layout, names, needs_root, sha256, store, tar, text};

/// Status, headers, body.
type Answer = (u16, String, Vec<u8>);

struct Stub {
    port: u16,
    paths: Arc<Mutex<Vec<String>>>,
    server: JoinHandle<()>,
}

impl Drop for Stub {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Stub {
    /// The handler gets the path, the `Authorization` header and the port.
    async fn start(handler: impl Fn(&str, &str, u16) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let paths = Arc::<Mutex<Vec<String>>>::default();
        let seen = paths.clone();
        let answer = Arc::new(move |path: &str, authorization: &str| {
            seen.lock().unwrap().push(path.to_owned());
            handler(path, authorization, port)
        });
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, answer.clone()));
            }
        });
        Self { port, paths, server }
    }

    fn reference(&self, digest: Digest) -> Reference {
        Reference::parse(&format!("127.0.0.1:{}/team/app@sha256:{digest}", self.port)).unwrap()
    }

    fn count(&self, end: &str) -> usize {
        self.paths.lock().unwrap().iter().filter(|path| path.ends_with(end)).count()
    }
}

async fn serve(mut stream: TcpStream, answer: Arc<impl Fn(&str, &str) -> Answer>) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let path = head.split(' ').nth(1).unwrap_or_default();
    let headers: HashMap<_, _> = head.lines().filter_map(|line| line.split_once(": ")).collect();
    let (status, extra, body) = answer(path, headers.get("authorization").unwrap_or(&""));
    let head = format!("HTTP/1.1 {status} x\r\n{extra}Content-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), &body].concat()).await
}

fn blob(layout: &Path, path: &str) -> Answer {
    let digest = path.rsplit_once("sha256:").map_or("none", |(_, digest)| digest);
    match fs::read(layout.join("blobs/sha256").join(digest)) {
        Ok(blob) => (200, String::new(), blob),
        Err(_) => (404, String::new(), b"{}".to_vec()),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_at_the_same_time_share_one_pull_and_images_share_layers() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("layout");
    let shared = tar(&[("shared", &"x".repeat(100_000))]);
    let image = |name: &str| Layout(&path).image(&[shared.clone(), tar(&[(name, "")])], json!({})).digest();
    let digests = [image("one"), image("two")];
    let layout = path.clone();
    let stub = Stub::start(move |path, _, _| blob(&layout, path)).await;
    let store = store(directory.path());
    let references = digests.map(|digest| stub.reference(digest));
    let wanted: Vec<_> = references.iter().cycle().take(16).collect();
    for image in join_all(wanted.iter().map(|reference| store.ensure(reference, None))).await {
        assert!(image.unwrap().layers[1].join("shared").is_file());
    }
    for digest in digests {
        assert_eq!(stub.count(&format!("/manifests/sha256:{digest}")), 1);
    }
    assert_eq!(stub.count(&format!("/blobs/sha256:{}", sha256(&shared))), 1);
}

#[tokio::test]
async fn what_a_registry_sends_is_checked() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("layout");
    let layer = tar(&[("file", "data")]);
    let digest = Layout(&path).image(std::slice::from_ref(&layer), json!({})).digest();
    let flip: fn(&mut Vec<u8>) = |body| body[300] ^= 1;
    for (target, lie, told) in [
        (digest, flip, "Invalid digest"),
        (sha256(&layer), flip, "Invalid digest"),
        (sha256(&layer), |body| body.push(0), "bytes, not"),
    ] {
        let target = format!("/sha256:{target}");
        let layout: PathBuf = path.clone();
        let stub = Stub::start(move |path, _, _| {
            let (status, headers, mut body) = blob(&layout, path);
            if path.ends_with(&target) {
                lie(&mut body);
            }
            (status, headers, body)
        });
        let stub = stub.await;
        let error = store(directory.path()).ensure(&stub.reference(digest), None).await.unwrap_err();
        assert!(text(&error).contains(told), "{}", text(&error));
        assert_eq!(names(&directory.path().join("store/layers")), [""; 0]);
    }
}

#[tokio::test]
async fn a_registry_that_wants_tokens_gets_the_credentials_at_its_token_service() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    let layout = directory.path().join("layout");
    let digest = Layout(&layout).image(&[tar(&[("file", "data")])], json!({})).digest();
    let stub = Stub::start(move |path, authorization, port| {
        let realm = format!("WWW-Authenticate: Bearer realm=\"http://127.0.0.1:{port}/token\",service=\"stub\"\r\n");
        match (path.starts_with("/token?"), authorization) {
            // base64 of "user:right"
            (true, "Basic dXNlcjpyaWdodA==") => (200, String::new(), br#"{"token":"t0ken"}"#.to_vec()),
            (false, "Bearer t0ken") => blob(&layout, path),
            _ => (401, realm, b"{}".to_vec()),
        }
    });
    let stub = stub.await;
    let [right, wrong] = ["right", "wrong"].map(|word| Credentials { username: "user".into(), password: word.into() });
    let (store, reference) = (store(directory.path()), stub.reference(digest));
    // All at once: the refusal of one is not the refusal of another.
    let (refused, anonymous, image) = tokio::join!(
        store.ensure(&reference, Some(&wrong)),
        store.ensure(&reference, None),
        store.ensure(&reference, Some(&right)),
    );
    assert!(matches!(refused.unwrap_err().cause, Cause::WrongCredentials { .. }));
    assert!(matches!(anonymous.unwrap_err().cause, Cause::NoCredentials { .. }));
    assert!(image.unwrap().layers[0].join("file").is_file());
}
