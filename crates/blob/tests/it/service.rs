//! The promises on a service of your choice, by the credentials of the environment:
//! `ATE_TEST_BLOB=azure:some-bucket cargo test -p ate-blob -- --ignored a_service`

use ate_blob::{Backend, Blobs, Provider, Settings};

use crate::conformance::{keeps_all_promises, path};

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a service: set ATE_TEST_BLOB to s3:bucket, gcs:bucket or azure:bucket"]
async fn a_service_keeps_the_promises_of_a_store() {
    let chosen = std::env::var("ATE_TEST_BLOB").expect("ATE_TEST_BLOB is set");
    let (provider, bucket) = chosen.split_once(':').expect("provider:bucket");
    let provider = match provider {
        "s3" => Provider::S3,
        "gcs" => Provider::Gcs,
        "azure" => Provider::Azure,
        _ => panic!("{provider} is no provider"),
    };
    let blobs = Blobs::open(Backend::Cloud(provider, Settings::from_environment(provider))).await.unwrap();
    for below in ["back", "again", "race", "large-race", "absent", "list", "delete"] {
        blobs.delete(&path(&format!("s3://{bucket}/{below}"))).await.unwrap();
    }
    keeps_all_promises(&blobs, bucket).await;
}
