//! Buckets in a service.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{HttpError, HttpErrorKind};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, Error, HeaderMap, HeaderValue, ObjectStore, ObjectStoreExt, PutMode, RetryConfig,
};
use parking_lot::Mutex;

use crate::{BlobError, BlobInfo, BlobPath, BlobReading, Body, Created, Store, error};

/// What is sent in one request; a longer object goes in parts of this size. S3 wants at least 5 MiB.
const PART: u64 = 8 << 20;

/// Parts of one object in memory at a time: with [`PART`], the memory that an upload takes.
const PARTS_AT_ONCE: usize = 4;

/// Most parts of an object, as S3 has it; a longer object is refused before anything is sent.
const MAX_PARTS: u64 = 10_000;

/// Connections are kept per bucket; with more buckets than this in use, all are opened anew.
const MAX_BUCKETS: usize = 64;

/// A service that does not accept a connection for this long is given up.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// A service that takes longer than this to answer a request, or between two pieces of an answer, is given up: a part
/// may pass at 140 KB/s.
const READ_DEADLINE: Duration = Duration::from_secs(60);

/// How long a request that a service refused for the time being (5xx, 429, no connection) is repeated.
const RETRY_DEADLINE: Duration = Duration::from_secs(60);
const MAX_RETRIES: usize = 8;

/// Who holds the buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// Amazon S3 and what speaks its protocol, such as MinIO.
    S3,
    Gcs,
    Azure,
}

impl Provider {
    fn knows(self, key: &str) -> bool {
        match self {
            Self::S3 => AmazonS3ConfigKey::from_str(key).is_ok(),
            Self::Gcs => GoogleConfigKey::from_str(key).is_ok(),
            Self::Azure => AzureConfigKey::from_str(key).is_ok(),
        }
    }
}

/// Endpoint, region, credentials and the like, by the names that `object_store` gives them: `aws_endpoint_url`,
/// `google_service_account`, `azure_storage_account_name`. Values never reach a log.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<String, String>);

impl Settings {
    /// What the environment says: variables that begin with `AWS_`, `GOOGLE_` or `AZURE_`. Plain HTTP needs
    /// `AWS_ALLOW_HTTP=true`.
    pub fn from_environment(provider: Provider) -> Self {
        let prefix = match provider {
            Provider::S3 => "AWS_",
            Provider::Gcs => "GOOGLE_",
            Provider::Azure => "AZURE_",
        };
        let text = |(key, value): (OsString, OsString)| Some((key.into_string().ok()?, value.into_string().ok()?));
        // Much that begins so is meant for other tools.
        let known = |key: &str| key.starts_with(prefix) && provider.knows(&key.to_lowercase());
        let pairs = std::env::vars_os().filter_map(text).filter(|(key, _)| known(key));
        pairs.fold(Self::default(), |settings, (key, value)| settings.with(&key, &value))
    }

    #[must_use]
    pub fn with(mut self, key: &str, value: &str) -> Self {
        self.0.insert(key.to_lowercase(), value.to_owned());
        self
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

pub(crate) struct Remote {
    provider: Provider,
    settings: Settings,
    buckets: Mutex<HashMap<String, Arc<Bucket>>>,
}

/// Says nothing of credentials, which the clients inside would print in part.
impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("provider", &self.provider).field("settings", &self.settings).finish()
    }
}

struct Bucket {
    objects: Arc<dyn ObjectStore>,
    parts: Arc<dyn MultipartStore>,
    finish: Finish,
}

/// How an object sent in parts appears at its name, if nothing is there.
enum Finish {
    /// Through a client whose every request says `If-None-Match: *`. The crate has no other way to say that of this one
    /// request, so this client is used for nothing else.
    Complete(Arc<dyn MultipartStore>),
    /// Completed at a name of its own and copied within the service, which checks that nothing is at the goal.
    Copy,
}

impl Remote {
    pub(crate) fn new(provider: Provider, settings: Settings) -> Result<Self, BlobError> {
        if let Some(key) = settings.0.keys().find(|key| !provider.knows(key)) {
            return Err(BlobError::Setting { provider, key: key.clone() });
        }
        let remote = Self { provider, settings, buckets: Mutex::default() };
        // Credentials that cannot be read are reported now and not at the first suspend.
        remote.connect("probe").map_err(|error| BlobError::Open { reason: error::reason(&error) })?;
        Ok(remote)
    }

    fn bucket(&self, path: &BlobPath) -> Result<Arc<Bucket>, BlobError> {
        let mut buckets = self.buckets.lock();
        if let Some(bucket) = buckets.get(path.bucket()) {
            return Ok(bucket.clone());
        }
        let bucket = self.connect(path.bucket()).map_err(|error| BlobError::remote(path, &error))?;
        if buckets.len() >= MAX_BUCKETS {
            buckets.clear();
        }
        let bucket = Arc::new(bucket);
        buckets.insert(path.bucket().to_owned(), bucket.clone());
        Ok(bucket)
    }

    fn connect(&self, bucket: &str) -> Result<Bucket, Error> {
        match self.provider {
            Provider::S3 => {
                let builder = |options| {
                    let builder = AmazonS3Builder::new().with_client_options(options).with_retry(retry());
                    self.configure(builder, AmazonS3Builder::with_config).with_bucket_name(bucket)
                };
                let store = Arc::new(builder(options()).build()?);
                let mut if_absent = HeaderMap::new();
                if_absent.insert("if-none-match", HeaderValue::from_static("*"));
                let completing = builder(options().with_default_headers(if_absent));
                let completing = completing.with_credentials(store.credentials().clone()).build()?;
                Ok(Bucket { objects: store.clone(), parts: store, finish: Finish::Complete(Arc::new(completing)) })
            }
            Provider::Gcs => {
                let builder = GoogleCloudStorageBuilder::new().with_client_options(options()).with_retry(retry());
                let builder = self.configure(builder, GoogleCloudStorageBuilder::with_config);
                let store = Arc::new(builder.with_bucket_name(bucket).build()?);
                Ok(Bucket { objects: store.clone(), parts: store, finish: Finish::Copy })
            }
            Provider::Azure => {
                let builder = MicrosoftAzureBuilder::new().with_client_options(options()).with_retry(retry());
                let builder = self.configure(builder, MicrosoftAzureBuilder::with_config);
                let store = Arc::new(builder.with_container_name(bucket).build()?);
                Ok(Bucket { objects: store.clone(), parts: store, finish: Finish::Copy })
            }
        }
    }

    fn configure<B, K: FromStr>(&self, builder: B, with: impl Fn(B, K, String) -> B) -> B {
        let known = self.settings.0.iter().filter_map(|(key, value)| Some((key.parse().ok()?, value.clone())));
        known.fold(builder, |builder, (key, value)| with(builder, key, value))
    }
}

fn options() -> ClientOptions {
    // A deadline for the whole of a request would cut off every long object.
    let options = ClientOptions::new().with_timeout_disabled().with_read_timeout(READ_DEADLINE);
    options.with_connect_timeout(CONNECT_DEADLINE).with_user_agent(HeaderValue::from_static("ate"))
}

fn retry() -> RetryConfig {
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: Duration::from_secs(5), base: 2.0 };
    RetryConfig { backoff, max_retries: MAX_RETRIES, retry_timeout: RETRY_DEADLINE }
}

/// Why a put did not succeed.
enum Failure {
    Here(BlobError),
    There(Error),
    /// The request may have been carried out.
    Unanswered(Error),
}

impl From<BlobError> for Failure {
    fn from(error: BlobError) -> Self {
        Self::Here(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        if is_unanswered(&error) { Self::Unanswered(error) } else { Self::There(error) }
    }
}

/// Whether a request was cut off after it was sent. The crate does not repeat such a conditional put, because it cannot
/// know that finding our own bytes is success.
fn is_unanswered(error: &Error) -> bool {
    let mut chain = std::iter::successors(Some(error as &dyn std::error::Error), |error| (*error).source());
    chain.any(|error| {
        use HttpErrorKind as K;
        let kind = error.downcast_ref::<HttpError>().map(HttpError::kind);
        matches!(kind, Some(K::Timeout | K::Interrupted | K::Decode | K::Unknown))
    })
}

impl Bucket {
    async fn put(&self, object: &BlobPath, key: &Path, body: &Body) -> Result<(), Failure> {
        if body.length() > PART * MAX_PARTS {
            let (object, size, limit) = (object.clone(), body.length(), PART * MAX_PARTS);
            return Err(BlobError::TooLarge { object, size, limit }.into());
        }
        if let Ok(length) = usize::try_from(body.length())
            && body.length() <= PART
        {
            let bytes = body.read(object, 0, length).await?;
            self.objects.put_opts(key, bytes.into(), PutMode::Create.into()).await?;
            return Ok(());
        }
        // Asked first, because a put that is repeated would send it all to be refused.
        match self.objects.head(key).await {
            Err(Error::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Err(BlobError::Exists { object: object.clone() }.into()),
        }
        match &self.finish {
            Finish::Complete(completing) => self.put_parts(object, key, body, completing).await,
            Finish::Copy => {
                let beside = beside(key);
                self.put_parts(object, &beside, body, &self.parts).await?;
                let copied = self.objects.copy_if_not_exists(&beside, key).await;
                if let Err(error) = self.objects.delete(&beside).await {
                    tracing::warn!(%object, unfinished = %beside, %error, "an upload's remains stay in the bucket");
                }
                Ok(copied?)
            }
        }
    }

    async fn put_parts(
        &self,
        object: &BlobPath,
        key: &Path,
        body: &Body,
        completing: &Arc<dyn MultipartStore>,
    ) -> Result<(), Failure> {
        let id = self.parts.create_multipart(key).await?;
        let send = async |index: u64| {
            let offset = index * PART;
            let length = usize::try_from(PART.min(body.length() - offset)).expect("a part is small");
            let bytes = body.read(object, offset, length).await?;
            let index = usize::try_from(index).expect("fewer than MAX_PARTS");
            Ok::<PartId, Failure>(self.parts.put_part(key, &id, index, bytes.into()).await?)
        };
        let put = async {
            let count = body.length().div_ceil(PART);
            let parts = stream::iter(0..count).map(send).buffered(PARTS_AT_ONCE).try_collect().await?;
            match completing.complete_multipart(key, &id, parts).await {
                Ok(_) => Ok(()),
                // The upload is gone: an earlier try has completed it, and its answer was lost.
                Err(error @ Error::NotFound { .. }) => Err(Failure::Unanswered(error)),
                Err(error) => Err(error.into()),
            }
        };
        let put = put.await;
        if put.is_err()
            && let Err(error) = self.parts.abort_multipart(key, &id).await
        {
            tracing::debug!(%object, %error, "an upload was not aborted; the bucket's lifecycle rule will");
        }
        put
    }
}

/// A name in the same prefix, so that what a crash leaves there is collected with it.
fn beside(key: &Path) -> Path {
    let name = format!(".unfinished-{}", uuid::Uuid::new_v4().simple());
    key.parent().unwrap_or_default().join(name)
}

fn key(path: &BlobPath) -> Result<Path, BlobError> {
    Path::parse(path.key()).map_err(|error| BlobError::remote(path, &error.into()))
}

#[async_trait]
impl Store for Remote {
    async fn create(&self, object: &BlobPath, body: &Body) -> Result<Created, BlobError> {
        match self.bucket(object)?.put(object, &key(object)?, body).await {
            Ok(()) => Ok(Created::Made),
            Err(Failure::Here(BlobError::Exists { .. })) => Ok(Created::Occupied),
            Err(Failure::Here(error)) => Err(error),
            Err(Failure::Unanswered(error)) => Ok(Created::Unknown(BlobError::remote(object, &error))),
            Err(Failure::There(error)) => match BlobError::remote(object, &error) {
                BlobError::Exists { .. } => Ok(Created::Occupied),
                error => Err(error),
            },
        }
    }

    async fn read(&self, object: &BlobPath) -> Result<BlobReading, BlobError> {
        let reading = self.bucket(object)?.objects.get(&key(object)?).await;
        let reading = reading.map_err(|error| BlobError::remote(object, &error))?;
        let (object, size) = (object.clone(), reading.meta.size);
        let bytes = reading.into_stream().map_err(move |error| BlobError::remote(&object, &error));
        Ok(BlobReading { size, bytes: bytes.boxed() })
    }

    async fn size(&self, object: &BlobPath) -> Result<u64, BlobError> {
        let meta = self.bucket(object)?.objects.head(&key(object)?).await;
        Ok(meta.map_err(|error| BlobError::remote(object, &error))?.size)
    }

    fn list(&self, prefix: &BlobPath) -> BoxStream<'static, Result<BlobInfo, BlobError>> {
        let (bucket, key) = match self.bucket(prefix).and_then(|bucket| Ok((bucket, key(prefix)?))) {
            Ok(found) => found,
            Err(error) => return stream::iter([Err(error)]).boxed(),
        };
        let prefix = prefix.clone();
        let listed = bucket.objects.list((!key.is_root()).then_some(&key));
        let info = move |meta: Result<object_store::ObjectMeta, Error>| match meta {
            Ok(meta) => {
                let path = prefix.with_key(meta.location.as_ref())?;
                Some(Ok(BlobInfo { path, size: meta.size, modified: meta.last_modified.into() }))
            }
            Err(error) => Some(Err(BlobError::remote(&prefix, &error))),
        };
        listed.filter_map(move |meta| std::future::ready(info(meta))).boxed()
    }

    async fn delete(&self, path: &BlobPath) -> Result<(), BlobError> {
        let (bucket, key) = (self.bucket(path)?, key(path)?);
        let below = bucket.objects.list(Some(&key)).map_ok(|meta| meta.location);
        let mut deleted = bucket.objects.delete_stream(stream::iter([Ok(key)]).chain(below).boxed());
        while let Some(deleted) = deleted.next().await {
            match deleted.map_err(|error| BlobError::remote(path, &error)) {
                Ok(_) | Err(BlobError::Missing { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_show_their_names_only() {
        let settings =
            Settings::default().with("AWS_SECRET_ACCESS_KEY", "correct horse").with("aws_access_key_id", "moon");
        let remote = Remote::new(Provider::S3, settings.clone()).unwrap();
        assert_eq!(format!("{settings:?}"), r#"{"aws_access_key_id", "aws_secret_access_key"}"#);
        let shown = format!("{remote:?}");
        assert!(shown.contains("aws_access_key_id") && !shown.contains("horse") && !shown.contains("moon"), "{shown}");
    }

    #[test]
    fn a_setting_that_the_provider_does_not_know_is_named() {
        let error = Remote::new(Provider::Gcs, Settings::default().with("aws_region", "moon")).unwrap_err();
        assert!(matches!(&error, BlobError::Setting { key, .. } if key == "aws_region"), "{error}");
    }
}
