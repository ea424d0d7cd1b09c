//! Where the bytes of an image come from. What is read here is not trusted until its digest was checked.

use std::collections::HashMap;
use std::error::Error;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ate_name::Digest;
use futures::StreamExt;
use oci_client::Client;
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::manifest::OciDescriptor;
use oci_client::secrets::RegistryAuth;
use tokio::io::{AsyncSeekExt, AsyncWriteExt};

use crate::document::{ACCEPTED, Descriptor, MAX_DOCUMENT};
use crate::meter::sha256;
use crate::reference::is_loopback;
use crate::{Cause, Credentials, Location, Reference, StoreError};

/// A registry that does not accept a connection for this long is given up.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// A registry that sends nothing for this long is given up.
const READ_DEADLINE: Duration = Duration::from_secs(30);
/// Most entries of an archive; a longer one is refused. An image has a handful of blobs.
const MAX_ARCHIVE_ENTRIES: usize = 10_000;
/// How much of a registry's own words is shown.
const MAX_REASON: usize = 300;

pub(crate) enum Source {
    Registry(Box<Registry>),
    Local(Arc<Local>),
}

/// An OCI layout on this machine: a directory, or an archive in which each blob has a beginning and a length.
pub(crate) struct Local {
    path: PathBuf,
    archived: Option<HashMap<Digest, (u64, u64)>>,
}

pub(crate) struct Registry {
    name: String,
    client: Client,
    image: oci_client::Reference,
    auth: RegistryAuth,
}

impl Source {
    pub(crate) async fn open(reference: &Reference, credentials: Option<&Credentials>) -> Result<Self, Cause> {
        match reference.location() {
            Location::Layout(path) | Location::Archive(path) if !path.is_absolute() => Err(Cause::Relative),
            Location::Layout(path) => Ok(Self::Local(Arc::new(Local { path: path.clone(), archived: None }))),
            Location::Archive(path) => {
                let path = path.clone();
                blocking(move || {
                    let archived = Some(scan_archive(&path).map_err(StoreError::io("read the archive", &path))?);
                    Ok(Self::Local(Arc::new(Local { path, archived })))
                })
                .await
            }
            Location::Registry { registry, repository, .. } => {
                Ok(Self::Registry(Box::new(Registry::new(registry, repository, reference.digest(), credentials)?)))
            }
        }
    }

    /// The index or manifest with this digest.
    pub(crate) async fn manifest(&self, digest: Digest) -> Result<Vec<u8>, Cause> {
        let bytes = match self {
            Self::Registry(registry) => registry.manifest(digest).await?,
            Self::Local(local) => read_document(local.clone().blob(digest).await?).await?,
        };
        checked(bytes, "manifest", digest)
    }

    pub(crate) async fn config(&self, descriptor: &Descriptor, scratch: &Path) -> Result<Vec<u8>, Cause> {
        let size = descriptor.size.min(MAX_DOCUMENT);
        let bytes = read_document(self.blob(descriptor.digest.0, size, scratch).await?).await?;
        checked(bytes, "config", descriptor.digest.0)
    }

    /// A blob. That of a registry is at most `size` bytes and waits in an unnamed file in `scratch`.
    pub(crate) async fn blob(&self, digest: Digest, size: u64, scratch: &Path) -> Result<Blob, Cause> {
        match self {
            Self::Registry(registry) => Ok(Box::new(registry.download(digest, size, scratch).await?)),
            Self::Local(local) => local.clone().blob(digest).await,
        }
    }
}

type Blob = Box<dyn Read + Send>;

impl Local {
    async fn blob(self: Arc<Self>, digest: Digest) -> Result<Blob, Cause> {
        let what = format!("blob sha256:{digest}");
        let missing = move |place: &Path| Cause::Missing { place: place.display().to_string(), what };
        let (path, section) = match &self.archived {
            None => (self.path.join("blobs/sha256").join(digest.to_string()), None),
            Some(blobs) => match blobs.get(&digest) {
                Some(section) => (self.path.clone(), Some(*section)),
                None => return Err(missing(&self.path)),
            },
        };
        blocking(move || {
            let open = || {
                let mut file = File::open(&path)?;
                let Some((start, length)) = section else { return Ok(Box::new(file) as Blob) };
                file.seek(SeekFrom::Start(start))?;
                Ok(Box::new(file.take(length)))
            };
            open().map_err(|error: io::Error| match error.kind() {
                io::ErrorKind::NotFound => missing(&self.path),
                _ => StoreError::io("open", &path)(error).into(),
            })
        })
        .await
    }
}

fn checked(bytes: Vec<u8>, what: &'static str, expected: Digest) -> Result<Vec<u8>, Cause> {
    if bytes.len() as u64 > MAX_DOCUMENT {
        return Err(Cause::TooLarge { what, limit: MAX_DOCUMENT });
    }
    match sha256(&bytes) {
        actual if actual == expected => Ok(bytes),
        actual => Err(Cause::Digest { what, expected, actual }),
    }
}

impl Registry {
    fn new(registry: &str, repository: &str, digest: Digest, credentials: Option<&Credentials>) -> Result<Self, Cause> {
        let config = ClientConfig {
            protocol: if is_loopback(registry) { ClientProtocol::Http } else { ClientProtocol::Https },
            connect_timeout: Some(CONNECT_DEADLINE),
            read_timeout: Some(READ_DEADLINE),
            user_agent: "ate",
            ..ClientConfig::default()
        };
        let auth = match credentials {
            Some(Credentials { username, password }) => RegistryAuth::Basic(username.clone(), password.clone()),
            None => RegistryAuth::Anonymous,
        };
        // One client per pull: it remembers the first credentials that it sees for a registry.
        let client = Client::try_from(config);
        let client =
            client.map_err(|error| Cause::Registry { registry: registry.to_owned(), reason: reason(&error) })?;
        let (name, repository) = (registry.to_owned(), repository.to_owned());
        let image = oci_client::Reference::with_digest(name.clone(), repository, format!("sha256:{digest}"));
        Ok(Self { name, client, image, auth })
    }

    async fn manifest(&self, digest: Digest) -> Result<Vec<u8>, Cause> {
        let image = self.image.clone_with_digest(format!("sha256:{digest}"));
        let pulled = self.client.pull_manifest_raw(&image, &self.auth, &ACCEPTED).await;
        pulled.map(|(bytes, _)| bytes.to_vec()).map_err(|error| self.cause(error, "manifest", digest))
    }

    async fn download(&self, digest: Digest, size: u64, scratch: &Path) -> Result<File, Cause> {
        let wanted = OciDescriptor { digest: format!("sha256:{digest}"), ..OciDescriptor::default() };
        let stream = self.client.pull_blob_stream(&self.image, &wanted).await;
        let mut stream = stream.map_err(|error| self.cause(error, "blob", digest))?.stream;
        let write = StoreError::io::<io::Error>;
        let file = tempfile::tempfile_in(scratch).map_err(write("write to", scratch))?;
        let mut file = tokio::fs::File::from_std(file);
        let mut received = 0;
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|error| self.cause(error.into(), "blob", digest))?;
            received += chunk.len() as u64;
            if received > size {
                return Err(Cause::Size { what: "blob", expected: size, actual: received });
            }
            file.write_all(&chunk).await.map_err(write("write to", scratch))?;
        }
        file.rewind().await.map_err(write("write to", scratch))?;
        Ok(file.into_std().await)
    }

    fn cause(&self, error: OciDistributionError, what: &'static str, digest: Digest) -> Cause {
        use OciDistributionError as E;
        use OciErrorCode as C;
        let has = |codes: &[C]| {
            matches!(&error, E::RegistryError { envelope, .. }
            if envelope.errors.iter().any(|error| codes.contains(&error.code)))
        };
        match &error {
            E::UnauthorizedError { .. } | E::AuthenticationFailure(_) => self.unauthorized(),
            E::ServerError { code: 401 | 403, .. } => self.unauthorized(),
            _ if has(&[C::Unauthorized, C::Denied]) => self.unauthorized(),
            E::ServerError { code: 404, .. } => self.missing(what, digest),
            _ if has(&[C::ManifestUnknown, C::BlobUnknown, C::NameUnknown]) => self.missing(what, digest),
            error => Cause::Registry { registry: self.name.clone(), reason: reason(error) },
        }
    }

    fn unauthorized(&self) -> Cause {
        let registry = self.name.clone();
        match self.auth {
            RegistryAuth::Anonymous => Cause::NoCredentials { registry },
            _ => Cause::WrongCredentials { registry },
        }
    }

    fn missing(&self, what: &str, digest: Digest) -> Cause {
        let place = format!("{}/{}", self.name, self.image.repository());
        Cause::Missing { place, what: format!("{what} sha256:{digest}") }
    }
}

/// An error with all that lies beneath it, once each and in few words: part of them is chosen by the registry.
fn reason(error: &dyn Error) -> String {
    let mut text = error.to_string();
    for cause in std::iter::successors(error.source(), |error| (*error).source()).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text.chars().filter(|char| !char.is_control()).take(MAX_REASON).collect()
}

/// Where the blobs of an archived OCI layout begin, and how long they are.
fn scan_archive(path: &Path) -> io::Result<HashMap<Digest, (u64, u64)>> {
    let mut archive = tar::Archive::new(File::open(path)?);
    let mut blobs = HashMap::new();
    for (count, entry) in archive.entries_with_seek()?.raw(true).enumerate() {
        let entry = entry?;
        if count == MAX_ARCHIVE_ENTRIES {
            return Err(io::Error::other(format!("it has more than {MAX_ARCHIVE_ENTRIES} entries")));
        }
        let name = entry.path_bytes();
        let name = name.strip_prefix(b"./").unwrap_or(&name);
        let digest = name.strip_prefix(b"blobs/sha256/").and_then(|hex| std::str::from_utf8(hex).ok());
        if let Some(digest) = digest.and_then(|hex| Digest::parse(hex).ok())
            && entry.header().entry_type().is_file()
        {
            blobs.insert(digest, (entry.raw_file_position(), entry.size()));
        }
    }
    Ok(blobs)
}

async fn read_document(blob: Blob) -> Result<Vec<u8>, Cause> {
    blocking(move || {
        let mut bytes = Vec::new();
        let read = blob.take(MAX_DOCUMENT + 1).read_to_end(&mut bytes);
        read.map_err(|error| Cause::Malformed { what: "source", reason: error.to_string() })?;
        Ok(bytes)
    })
    .await
}

/// Runs what may block off the reactor.
pub(crate) async fn blocking<T: Send + 'static, E: Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is going away and will not poll this again.
            Err(_) => std::future::pending().await,
        },
    }
}
