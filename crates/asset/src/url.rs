use std::fmt;
use std::path::PathBuf;

use ate_blob::BlobPath;
use ate_name::Digest;
use reqwest::Url;

use crate::Cause;

/// Where an asset is fetched from.
#[derive(Clone, PartialEq, Eq)]
pub enum AssetUrl {
    File(PathBuf),
    Https(Url),
    S3(BlobPath),
    Gcs(BlobPath),
    /// An artifact in a registry, by the digest of its manifest; its one layer is the asset.
    Oci {
        host: String,
        repository: String,
        manifest: Digest,
    },
}

impl AssetUrl {
    pub fn parse(text: &str) -> Result<Self, Cause> {
        let error = |reason| Cause::Url { reason };
        let (scheme, rest) = text.split_once("://").ok_or(error("has no scheme"))?;
        let blob = || match BlobPath::parse(text) {
            Ok(path) if !path.key().is_empty() => Ok(path),
            _ => Err(error("names no object in a bucket")),
        };
        match scheme {
            "file" => {
                let url = Url::parse(text).ok().filter(|url| !url.has_host() && url.query().is_none());
                let path = url.and_then(|url| url.to_file_path().ok()).filter(|_| rest.starts_with('/'));
                path.map(Self::File).ok_or(error("names no absolute path"))
            }
            "https" => {
                let url = Url::parse(text).map_err(|_| error("is malformed"))?;
                // It is kept in manifests and shown in errors.
                if !url.username().is_empty() || url.password().is_some() {
                    return Err(error("holds credentials, which are stored and shown with it"));
                }
                Ok(Self::Https(url))
            }
            "s3" => blob().map(Self::S3),
            "gs" => blob().map(Self::Gcs),
            "oci" => {
                let parts =
                    rest.rsplit_once("@sha256:").and_then(|(name, digest)| Some((name.split_once('/')?, digest)));
                let ((host, repository), digest) = parts.ok_or(error("names no artifact by digest"))?;
                let plain = |text: &str, more: &[u8]| {
                    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b".-_".contains(&b);
                    !text.is_empty() && text.bytes().all(|b| plain(b) || more.contains(&b))
                };
                let segments = repository.split('/').all(|segment| plain(segment, b"") && !segment.starts_with('.'));
                if !plain(host, b":[]") || !segments {
                    return Err(error("has a malformed host or repository"));
                }
                let manifest = Digest::parse(digest).map_err(|_| error("has a malformed digest"))?;
                Ok(Self::Oci { host: host.into(), repository: repository.into(), manifest })
            }
            _ => Err(error("has a scheme that assets are not fetched by")),
        }
    }
}

/// Without a query: it may be a signature that lets its bearer in.
impl fmt::Display for AssetUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file://{}", path.display()),
            Self::Https(url) => {
                let mut url = url.clone();
                url.set_query(None);
                fmt::Display::fmt(&url, f)
            }
            Self::S3(path) | Self::Gcs(path) => fmt::Display::fmt(path, f),
            Self::Oci { host, repository, manifest } => write!(f, "oci://{host}/{repository}@sha256:{manifest}"),
        }
    }
}

impl fmt::Debug for AssetUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_scheme_is_told_and_written_back() {
        let digest = "506a9418fe385f8eabb93b53647b4cc92e080fe4880da2a302176cd360e372a4";
        for good in [
            "file:///usr/local/bin/runsc",
            "https://example.com/a/b",
            "s3://bucket/a/b",
            "gs://bucket/release/20260101/x86_64/runsc",
            &format!("oci://registry.example.com:5000/team/runsc@sha256:{digest}"),
            &format!("oci://[::1]:5000/runsc@sha256:{digest}"),
        ] {
            assert_eq!(AssetUrl::parse(good).unwrap().to_string(), good);
        }
        let signed = AssetUrl::parse("https://example.com/a?X-Signature=secret").unwrap();
        assert_eq!(format!("{signed} {signed:?}"), "https://example.com/a https://example.com/a");
    }

    #[test]
    fn what_cannot_be_fetched_is_refused_with_the_reason() {
        let digest = "0".repeat(64);
        for (bad, reason) in [
            ("runsc", "no scheme"),
            ("ftp://host/x", "not fetched by"),
            ("http://host/x", "not fetched by"),
            ("HTTPS://host/x", "not fetched by"),
            ("file://relative/x", "absolute"),
            ("file://", "absolute"),
            ("https://", "malformed"),
            ("https://user:secret@host/x", "credentials"),
            ("s3://bucket", "object"),
            ("gs://bucket/../x", "object"),
            ("oci://host/repo:tag", "digest"),
            (&format!("oci://host/repo:tag@sha256:{digest}"), "repository"),
            (&format!("oci://host/../x@sha256:{digest}"), "repository"),
            (&format!("oci://host@sha256:{digest}"), "digest"),
            ("oci://host/repo@sha256:12", "malformed digest"),
        ] {
            let error = AssetUrl::parse(bad).unwrap_err().to_string();
            assert!(error.contains(reason) && !error.contains("secret"), "{bad}: {error}");
        }
    }
}
