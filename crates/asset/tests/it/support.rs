use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ate_asset::{Asset, AssetUrl, Cause, Fetch, Fetching};
use ate_name::Digest;
use bytes::Bytes;
use futures::stream::{self, StreamExt};

pub(crate) const BUDGET: u64 = 1 << 20;

pub(crate) fn sha256(bytes: &[u8]) -> Digest {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes);
    Digest::from_bytes(digest.as_ref().try_into().unwrap())
}

/// An asset that [`Warehouse`] has under this name.
pub(crate) fn asset(name: &str, content: &[u8]) -> Asset {
    Asset { url: format!("https://warehouse/{name}"), sha256: sha256(content) }
}

pub(crate) fn file_asset(path: &Path, content: &[u8]) -> Asset {
    Asset { url: format!("file://{}", path.display()), sha256: sha256(content) }
}

/// A source that counts, and that can be made to wait and to fail.
#[derive(Debug, Default)]
pub(crate) struct Warehouse {
    pub(crate) content: Mutex<HashMap<String, Vec<u8>>>,
    pub(crate) fetches: AtomicUsize,
    /// Announced in place of the real length.
    pub(crate) announced: Option<u64>,
    /// How many fetches fail before one succeeds.
    pub(crate) failures: AtomicUsize,
    /// Closed until it has a permit.
    pub(crate) gate: Option<tokio::sync::Semaphore>,
    pub(crate) arrived: tokio::sync::Notify,
}

impl Warehouse {
    pub(crate) fn with(content: &[(&str, &[u8])]) -> Self {
        let content = content.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        Self { content: Mutex::new(content), ..Self::default() }
    }

    pub(crate) fn fetches(&self) -> usize {
        self.fetches.load(Ordering::SeqCst)
    }
}

#[async_trait::async_trait]
impl Fetch for Warehouse {
    async fn fetch(&self, url: &AssetUrl) -> Result<Fetching, Cause> {
        self.fetches.fetch_add(1, Ordering::SeqCst);
        self.arrived.notify_one();
        if let Some(gate) = &self.gate {
            gate.acquire().await.unwrap().forget();
        }
        let AssetUrl::Https(url) = url else { panic!("{url} is not in the warehouse") };
        let place = url.to_string();
        let content = self.content.lock().unwrap().get(&url.path()[1..]).cloned();
        let content = content.ok_or(Cause::Missing { place })?;
        let size = Some(self.announced.unwrap_or(content.len() as u64));
        let mut chunks: Vec<_> = content.chunks(1000).map(|chunk| Ok(Bytes::copy_from_slice(chunk))).collect();
        if self.failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            chunks.truncate(1);
            chunks.push(Err(Cause::Fetch { reason: "the line was cut".to_owned() }));
        }
        Ok(Fetching { size, bytes: stream::iter(chunks).boxed() })
    }
}
