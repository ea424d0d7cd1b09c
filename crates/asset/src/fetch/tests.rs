use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::*;

fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\n{headers}\r\n");
    [head.as_bytes(), body].concat()
}

fn ok(body: &[u8]) -> Vec<u8> {
    answer("200 OK", &format!("content-length: {}\r\n", body.len()), body)
}

async fn converse(mut stream: impl AsyncRead + AsyncWrite + Unpin, reply: &(dyn Fn(&str) -> Vec<u8> + Send + Sync)) {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => request.push(byte),
            Err(_) => return,
        }
    }
    let _ = stream.write_all(&reply(&String::from_utf8_lossy(&request))).await;
    let _ = stream.shutdown().await;
}

/// A server on a free port of this machine that answers a request's head with what `reply` makes of it.
async fn server(
    tls: Option<TlsAcceptor>,
    reply: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static,
) -> (String, tokio::task::JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            match &tls {
                None => converse(stream, &reply).await,
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        converse(stream, &reply).await;
                    }
                }
            }
        }
    });
    (address, tasks)
}

async fn all(fetching: Result<Fetching, Cause>) -> Result<Bytes, Cause> {
    let chunks: Vec<Bytes> = fetching?.bytes.try_collect().await?;
    Ok(chunks.concat().into())
}

fn sources(https: reqwest::Client, settings: Settings) -> Sources {
    Sources { https, s3: settings.clone(), gcs: settings }
}

async fn get(sources: &Sources, url: &str) -> Result<Bytes, Cause> {
    all(sources.fetch(&AssetUrl::parse(url).unwrap()).await).await
}

#[tokio::test]
async fn https_wants_a_trusted_certificate_and_says_what_the_server_refused() {
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder().with_no_client_auth();
    let config = config.with_single_cert(vec![CertificateDer::from(cert.der().to_vec())], key).unwrap();
    let (address, _server) =
        server(Some(TlsAcceptor::from(Arc::new(config))), |request| match request.split(' ').nth(1).unwrap() {
            "/good?signature=secret" => ok(b"binary"),
            "/moved" => answer("302 Found", "location: /good?signature=secret\r\ncontent-length: 0\r\n", b""),
            "/downgraded" => answer("302 Found", "location: http://127.0.0.1:1/\r\ncontent-length: 0\r\n", b""),
            "/cut" => answer("200 OK", "content-length: 100\r\n", b"bin"),
            "/private" => answer("403 Forbidden", "content-length: 0\r\n", b""),
            "/broken?signature=secret" => answer("500 No", "content-length: 0\r\n", b""),
            _ => answer("404 Not Found", "content-length: 0\r\n", b""),
        })
        .await;
    let trusted = reqwest::Certificate::from_der(cert.der()).unwrap();
    let trusting = sources(client().no_proxy().tls_certs_only([trusted]).build().unwrap(), Settings::default());
    let url = |path: &str| format!("https://{address}/{path}");
    assert_eq!(get(&trusting, &url("good?signature=secret")).await.unwrap(), "binary");
    assert_eq!(get(&trusting, &url("moved")).await.unwrap(), "binary");
    assert!(matches!(get(&trusting, &url("cut")).await, Err(Cause::Fetch { .. })));
    assert!(matches!(get(&trusting, &url("gone")).await, Err(Cause::Missing { .. })));
    assert!(matches!(get(&trusting, &url("private")).await, Err(Cause::Denied { .. })));
    let downgraded = get(&trusting, &url("downgraded")).await.unwrap_err().to_string();
    assert!(downgraded.contains("URL scheme is not allowed"), "{downgraded}");
    let broken = get(&trusting, &url("broken?signature=secret")).await.unwrap_err().to_string();
    assert!(broken.contains("500") && !broken.contains("secret"), "{broken}");
    let wary = sources(client().no_proxy().build().unwrap(), Settings::default());
    let error = get(&wary, &url("good")).await.unwrap_err().to_string();
    assert!(error.contains("certificate"), "{error}");
}

#[tokio::test]
async fn a_public_bucket_is_read_without_credentials_and_a_private_one_with_them() {
    let log = Arc::new(Mutex::new(Vec::new()));
    let requests = log.clone();
    let (address, _server) = server(None, move |request| {
        let signed = request.contains("Bearer token");
        let path = request.split(' ').nth(1).unwrap().replace("%2F", "/");
        requests.lock().unwrap().push((path.clone(), signed));
        let headers = "content-length: 6\r\nlast-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\netag: \"x\"\r\n";
        match &*path {
            "/public/a/runsc" => answer("200 OK", headers, b"public"),
            "/private/runsc" if signed => answer("200 OK", headers, b"secret"),
            "/private/runsc" => answer("401 Unauthorized", "content-length: 0\r\n", b""),
            _ => answer("404 Not Found", "content-length: 0\r\n", b""),
        }
    })
    .await;
    let settings = Settings::default().with("google_base_url", &format!("http://{address}"));
    let settings = settings.with("google_bearer_token", "token").with("google_allow_http", "true");
    let sources = sources(client().no_proxy().build().unwrap(), settings);
    assert_eq!(get(&sources, "gs://public/a/runsc").await.unwrap(), "public");
    assert_eq!(get(&sources, "gs://private/runsc").await.unwrap(), "secret");
    assert!(matches!(get(&sources, "gs://public/none").await, Err(Cause::Missing { .. })));
    let expected =
        [("/public/a/runsc", false), ("/private/runsc", false), ("/private/runsc", true), ("/public/none", false)];
    assert_eq!(*log.lock().unwrap(), expected.map(|(path, signed)| (path.to_owned(), signed)));
}

#[tokio::test]
async fn an_artifact_is_its_one_layer() {
    let hash = |bytes: &[u8]| {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes);
        Digest::from_bytes(digest.as_ref().try_into().unwrap())
    };
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let descriptor =
        format!(r#"{{"mediaType":"application/octet-stream","size":6,"digest":"sha256:{}"}}"#, hash(b"binary"));
    let manifest = |layers: &[&str]| {
        let (config, layers) = (&descriptor, layers.join(","));
        format!(r#"{{"schemaVersion":2,"mediaType":"{kind}","config":{config},"layers":[{layers}]}}"#)
    };
    let (one, two) = (manifest(&[&descriptor]), manifest(&[&descriptor, &descriptor]));
    let index =
        r#"{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}"#.to_owned();
    let manifests = [one, two, index].map(|manifest| (hash(manifest.as_bytes()), manifest));
    let [one, two, index] = manifests.clone().map(|(digest, _)| digest);
    let (address, _server) = server(None, move |request| {
        let path = request.split(' ').nth(1).unwrap();
        if path == "/v2/" || path.ends_with(&format!("/v2/team/runsc/blobs/sha256:{}", hash(b"binary"))) {
            return ok(b"binary");
        }
        let wanted = |digest| path == format!("/v2/team/runsc/manifests/sha256:{digest}");
        match manifests.iter().find(|(digest, _)| wanted(*digest)) {
            Some((_, manifest)) => {
                let headers = format!("content-type: {kind}\r\ncontent-length: {}\r\n", manifest.len());
                answer("200 OK", &headers, manifest.as_bytes())
            }
            None => answer("404 Not Found", "content-length: 0\r\n", b""),
        }
    })
    .await;
    let sources = sources(client().no_proxy().build().unwrap(), Settings::default());
    let get = async |digest| get(&sources, &format!("oci://{address}/team/runsc@sha256:{digest}")).await;
    assert_eq!(get(one).await.unwrap(), "binary");
    assert!(matches!(get(two).await, Err(Cause::Artifact { .. })));
    assert!(matches!(get(index).await, Err(Cause::Artifact { .. })));
    assert!(matches!(get(Digest::from_bytes([7; 32])).await, Err(Cause::Missing { .. })));
}

#[tokio::test]
async fn a_file_must_be_a_readable_regular_one() {
    let directory = tempfile::tempdir().unwrap();
    let sources = sources(client().no_proxy().build().unwrap(), Settings::default());
    let get = async |name: &str| get(&sources, &format!("file://{}/{name}", directory.path().display())).await;
    let long = vec![7; 3 * CHUNK + 1];
    std::fs::write(directory.path().join("long"), &long).unwrap();
    assert!(get("long").await.unwrap() == long);
    assert!(matches!(get("none").await, Err(Cause::Missing { .. })));
    let pipe = directory.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    for no_file in ["", "pipe"] {
        let error = get(no_file).await.unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
    }
}
