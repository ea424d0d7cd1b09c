//! The promises on a real S3 server, MinIO.

use std::fs;

use ate_blob::{Backend, BlobError, Blobs, Provider, Settings};
use ate_testkit_minio::{Minio, PASSWORD};
use bytes::Bytes;
use futures::stream::StreamExt;

use crate::conformance::{content, keeps_all_promises, path};

async fn open(minio: &Minio, password: &str) -> Blobs {
    let settings = minio
        .environment()
        .iter()
        .fold(Settings::default(), |settings, (name, value)| settings.with(&name.to_lowercase(), value));
    let settings = settings.with("aws_secret_access_key", password);
    Blobs::open(Backend::Cloud(Provider::S3, settings)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn minio_keeps_the_promises_of_a_store() {
    let minio = Minio::start();
    let blobs = open(&minio, PASSWORD).await;
    keeps_all_promises(&blobs, "bucket").await;
    let uploads = minio.directory().join(".minio.sys/multipart");
    let left =
        fs::read_dir(uploads).into_iter().flatten().flat_map(|entry| fs::read_dir(entry.unwrap().path()).unwrap());
    assert_eq!(left.count(), 0, "an upload that lost the race is aborted");

    let error = blobs.put_new(&path("s3://no-such-bucket/x"), Bytes::new()).await.unwrap_err();
    assert!(matches!(error, BlobError::Missing { .. }), "{error}");
    blobs.delete(&path("s3://no-such-bucket/x")).await.unwrap();
    let stranger = open(&minio, "battery-staple").await;
    let error = stranger.put_new(&path("s3://bucket/x"), content(0, 3)).await.unwrap_err();
    assert!(matches!(error, BlobError::Denied { .. }), "{error}");
    let listed = stranger.list(&path("s3://bucket")).next().await.unwrap().unwrap_err();
    assert!(matches!(listed, BlobError::Denied { .. }), "{listed}");
    for shown in [format!("{error:?} {error} {listed}"), format!("{stranger:?}")] {
        assert!(!shown.contains("battery-staple"), "{shown}");
    }
}
