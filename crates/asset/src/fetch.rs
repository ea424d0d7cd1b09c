//! Where the bytes of an asset come from. Nothing of what is read here is trusted until its hash was checked.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use ate_blob::{Backend, BlobError, BlobPath, Blobs, Provider, Settings, blocking, reason};
use ate_name::Digest;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::manifest::OciManifest;
use oci_client::secrets::RegistryAuth;
use reqwest::{StatusCode, Url};

use crate::{AssetUrl, Cause};

/// A server that does not accept a connection for this long is given up.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// A server that sends nothing for this long is given up.
const READ_DEADLINE: Duration = Duration::from_secs(30);
/// Most redirections that are followed; release pages use one or two.
const MAX_REDIRECTS: usize = 5;
/// How much of a file is read at a time.
const CHUNK: usize = 1 << 20;

/// Gives the bytes behind a url.
#[async_trait]
pub trait Fetch: fmt::Debug + Send + Sync {
    async fn fetch(&self, url: &AssetUrl) -> Result<Fetching, Cause>;
}

/// Bytes on their way.
pub struct Fetching {
    /// How many there will be, if the source says so.
    pub size: Option<u64>,
    pub bytes: BoxStream<'static, Result<Bytes, Cause>>,
}

impl fmt::Debug for Fetching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fetching").field("size", &self.size).finish_non_exhaustive()
    }
}

/// The sources that a node has: files, the web, buckets and registries.
#[derive(Debug)]
pub(crate) struct Sources {
    https: reqwest::Client,
    s3: Settings,
    gcs: Settings,
}

impl Sources {
    /// Buckets by the credentials of the environment.
    pub(crate) fn from_environment() -> Result<Self, reqwest::Error> {
        let https = client().build()?;
        let settings = Settings::from_environment;
        Ok(Self { https, s3: settings(Provider::S3), gcs: settings(Provider::Gcs) })
    }
}

fn client() -> reqwest::ClientBuilder {
    let client = reqwest::Client::builder().connect_timeout(CONNECT_DEADLINE).read_timeout(READ_DEADLINE);
    // A redirection to plain HTTP is refused as well.
    client.https_only(true).redirect(reqwest::redirect::Policy::limited(MAX_REDIRECTS)).user_agent("ate")
}

#[async_trait]
impl Fetch for Sources {
    async fn fetch(&self, url: &AssetUrl) -> Result<Fetching, Cause> {
        match url {
            AssetUrl::File(path) => file(path.clone()).await,
            AssetUrl::Https(url) => https(&self.https, url).await,
            AssetUrl::S3(path) => blob(Provider::S3, self.s3.clone(), path).await,
            AssetUrl::Gcs(path) => {
                // Releases of gVisor are public, and a node without credentials would look for some in vain.
                let anonymous = self.gcs.clone().with("google_skip_signature", "true");
                match blob(Provider::Gcs, anonymous, path).await {
                    Err(Cause::Denied { .. }) => blob(Provider::Gcs, self.gcs.clone(), path).await,
                    fetching => fetching,
                }
            }
            AssetUrl::Oci { host, repository, manifest } => artifact(host, repository, *manifest).await,
        }
    }
}

async fn file(path: PathBuf) -> Result<Fetching, Cause> {
    let place = path.display().to_string();
    let failed = move |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Cause::Missing { place: place.clone() },
        io::ErrorKind::PermissionDenied => Cause::Denied { place: place.clone(), reason: error.to_string() },
        _ => Cause::Fetch { reason: format!("{place}: {error}") },
    };
    let open = move || {
        // Opening a pipe would wait for its other end.
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits();
        let file = File::options().read(true).custom_flags(nonblocking.cast_signed()).open(&path)?;
        let metadata = file.metadata()?;
        if metadata.is_file() { Ok((file, metadata.len())) } else { Err(io::Error::other("it is no regular file")) }
    };
    let (file, size) = blocking(open).await.map_err(&failed)?;
    let bytes = stream::try_unfold(file, move |mut file| {
        let failed = failed.clone();
        async move {
            let read = blocking(move || {
                let mut chunk = Vec::with_capacity(CHUNK);
                (&mut file).take(CHUNK as u64).read_to_end(&mut chunk)?;
                Ok((chunk, file))
            });
            let (chunk, file) = read.await.map_err(failed)?;
            Ok((!chunk.is_empty()).then(|| (chunk.into(), file)))
        }
    });
    Ok(Fetching { size: Some(size), bytes: bytes.boxed() })
}

async fn https(client: &reqwest::Client, url: &Url) -> Result<Fetching, Cause> {
    let failed = |error: reqwest::Error| Cause::Fetch { reason: reason(&error.without_url()) };
    let response = client.get(url.clone()).send().await.map_err(failed)?;
    let place = || AssetUrl::Https(url.clone()).to_string();
    match response.status() {
        StatusCode::OK => {}
        StatusCode::NOT_FOUND | StatusCode::GONE => return Err(Cause::Missing { place: place() }),
        status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
            return Err(Cause::Denied { place: place(), reason: status.to_string() });
        }
        status => return Err(Cause::Fetch { reason: format!("{} answers {status}", place()) }),
    }
    Ok(Fetching { size: response.content_length(), bytes: response.bytes_stream().map_err(failed).boxed() })
}

async fn blob(provider: Provider, settings: Settings, path: &BlobPath) -> Result<Fetching, Cause> {
    let cause = |error| match error {
        BlobError::Missing { object } => Cause::Missing { place: object.to_string() },
        BlobError::Denied { object, reason } => Cause::Denied { place: object.to_string(), reason },
        error => Cause::Fetch { reason: error.to_string() },
    };
    let blobs = Blobs::open(Backend::Cloud(provider, settings)).await.map_err(cause)?;
    let reading = blobs.read(path).await.map_err(cause)?;
    Ok(Fetching { size: Some(reading.size), bytes: reading.bytes.map_err(cause).boxed() })
}

async fn artifact(host: &str, repository: &str, manifest: Digest) -> Result<Fetching, Cause> {
    let config = ClientConfig {
        protocol: if is_loopback(host) { ClientProtocol::Http } else { ClientProtocol::Https },
        connect_timeout: Some(CONNECT_DEADLINE),
        read_timeout: Some(READ_DEADLINE),
        user_agent: "ate",
        ..ClientConfig::default()
    };
    let place = format!("oci://{host}/{repository}@sha256:{manifest}");
    let failed = |error: OciDistributionError| registry_cause(&place, &error);
    let client = oci_client::Client::try_from(config).map_err(failed)?;
    let digest = format!("sha256:{manifest}");
    let artifact = oci_client::Reference::with_digest(host.to_owned(), repository.to_owned(), digest);
    let (manifest, _) = client.pull_manifest(&artifact, &RegistryAuth::Anonymous).await.map_err(failed)?;
    let layer = match manifest {
        OciManifest::Image(manifest) => <[_; 1]>::try_from(manifest.layers),
        OciManifest::ImageIndex(_) => return Err(Cause::Artifact { reason: "it is an index of manifests" }),
    };
    let [layer] = layer.map_err(|_| Cause::Artifact { reason: "it has not one layer" })?;
    let blob = client.pull_blob_stream(&artifact, &layer).await.map_err(failed)?;
    let bytes = blob.stream.map_err(|error| Cause::Fetch { reason: reason(&error) });
    Ok(Fetching { size: blob.content_length, bytes: bytes.boxed() })
}

/// As everywhere with registries: one on this machine is spoken to without TLS.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(address) => address.split(']').next(),
        None => host.split(':').next(),
    };
    name.is_some_and(|name| name == "localhost" || name.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback()))
}

fn registry_cause(place: &str, error: &OciDistributionError) -> Cause {
    use OciDistributionError as E;
    use OciErrorCode as C;
    let has = |codes: &[C]| matches!(error, E::RegistryError { envelope, .. } if envelope.errors.iter().any(|e| codes.contains(&e.code)));
    let (place, reason) = (place.to_owned(), reason(error));
    match error {
        E::UnauthorizedError { .. } | E::AuthenticationFailure(_) | E::ServerError { code: 401 | 403, .. } => {
            Cause::Denied { place, reason }
        }
        _ if has(&[C::Unauthorized, C::Denied]) => Cause::Denied { place, reason },
        E::ServerError { code: 404, .. } | E::ImageManifestNotFoundError(_) => Cause::Missing { place },
        _ if has(&[C::ManifestUnknown, C::BlobUnknown, C::NameUnknown]) => Cause::Missing { place },
        _ => Cause::Fetch { reason },
    }
}

#[cfg(test)]
mod tests;
