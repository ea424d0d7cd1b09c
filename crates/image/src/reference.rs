use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ate_name::Digest;

const LAYOUT: &str = "oci-layout:";
const ARCHIVE: &str = "oci-archive:";

/// Exactly one image: where it is, and the digest of its index or manifest.
///
/// ```text
///   registry.example.com:5000/team/app:1.2@sha256:…     the tag is for people, the digest decides
///   oci-layout:///srv/images/app@sha256:…               a directory in OCI layout
///   oci-archive:///srv/images/app.tar@sha256:…          a tar of one
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    location: Location,
    digest: Digest,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    Registry { registry: String, repository: String, tag: Option<String> },
    Layout(PathBuf),
    Archive(PathBuf),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceError {
    #[error(
        "image {reference:?} has no digest; append @sha256:<64 hexadecimal digits>, for what is pulled must never change"
    )]
    NoDigest { reference: String },
    #[error("image {reference:?} has a malformed digest; it must be sha256: and 64 lower-case hexadecimal digits")]
    Digest { reference: String },
    #[error("image {reference:?} names no registry; write its host first, as in docker.io/library/python@sha256:…")]
    NoRegistry { reference: String },
    #[error("image {reference:?} is malformed; write host[:port]/repository[:tag]@sha256:…")]
    Name { reference: String, source: oci_client::ParseError },
    #[error("image {reference:?} has a malformed path; write {scheme}///absolute/path@sha256:…")]
    Path { reference: String, scheme: &'static str },
}

impl Reference {
    pub fn parse(text: &str) -> Result<Self, ReferenceError> {
        let reference = || text.to_owned();
        let (place, digest) =
            text.rsplit_once('@').ok_or_else(|| ReferenceError::NoDigest { reference: reference() })?;
        let digest = parse_digest(digest).ok_or_else(|| ReferenceError::Digest { reference: reference() })?;
        let location = if let Some(path) = place.strip_prefix(LAYOUT) {
            Location::Layout(parse_path(text, LAYOUT, path)?)
        } else if let Some(path) = place.strip_prefix(ARCHIVE) {
            Location::Archive(parse_path(text, ARCHIVE, path)?)
        } else {
            // Without this, a missing host would silently mean one company's registry.
            let host = place.split_once('/').map_or("", |(host, _)| host);
            if !(host == "localhost" || host.contains(['.', ':'])) {
                return Err(ReferenceError::NoRegistry { reference: reference() });
            }
            let parsed: oci_client::Reference =
                place.parse().map_err(|source| ReferenceError::Name { reference: reference(), source })?;
            if parsed.digest().is_some() {
                return Err(ReferenceError::Digest { reference: reference() });
            }
            let named = place.strip_prefix(host).unwrap_or_default();
            let tag = named.rsplit_once(':').map(|(_, tag)| tag.to_owned());
            Location::Registry { registry: host.to_owned(), repository: parsed.repository().to_owned(), tag }
        };
        Ok(Self { location, digest })
    }

    pub fn location(&self) -> &Location {
        &self.location
    }

    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The same image with an absolute path. A relative path means something only where it was written, so whoever
    /// reads it there calls this before sending the reference on.
    #[must_use]
    pub fn resolve_relative_to(self, directory: &Path) -> Self {
        let location = match self.location {
            Location::Layout(path) => Location::Layout(directory.join(path)),
            Location::Archive(path) => Location::Archive(directory.join(path)),
            registry @ Location::Registry { .. } => registry,
        };
        Self { location, ..self }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |f: &mut fmt::Formatter<'_>, scheme: &str, path: &Path| {
            write!(f, "{scheme}{}{}", if path.is_absolute() { "//" } else { "" }, path.display())
        };
        match &self.location {
            Location::Registry { registry, repository, tag } => {
                write!(f, "{registry}/{repository}")?;
                tag.iter().try_for_each(|tag| write!(f, ":{tag}"))
            }
            Location::Layout(layout) => path(f, LAYOUT, layout),
            Location::Archive(archive) => path(f, ARCHIVE, archive),
        }?;
        write!(f, "@sha256:{}", self.digest)
    }
}

/// The only hosts to which plain http is spoken.
pub(crate) fn is_loopback(registry: &str) -> bool {
    let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// `sha256:<hex>`, the only algorithm in use.
pub(crate) fn parse_digest(text: &str) -> Option<Digest> {
    Digest::parse(text.strip_prefix("sha256:")?).ok()
}

fn parse_path(reference: &str, scheme: &'static str, path: &str) -> Result<PathBuf, ReferenceError> {
    let error = || ReferenceError::Path { reference: reference.to_owned(), scheme };
    let path = match path.strip_prefix("//") {
        Some(absolute) if absolute.starts_with('/') => absolute,
        None if !path.is_empty() && !path.starts_with('/') => path,
        _ => return Err(error()),
    };
    if path.contains('\0') { Err(error()) } else { Ok(PathBuf::from(path)) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEX: &str = "506a9418fe385f8eabb93b53647b4cc92e080fe4880da2a302176cd360e372a4";

    #[test]
    fn every_form_reads_back_as_it_was_written() {
        for place in [
            "docker.io/library/python:3.13",
            "docker.io/library/python",
            "localhost/x",
            "localhost:5000/team/app",
            "127.0.0.1:1/app:v1",
            "registry.example.com:5000/team/app:1.2",
            "oci-layout:///srv/images/app",
            "oci-archive:///srv/a@b.tar",
            "oci-layout:demo/image",
            "oci-archive:../image.tar",
        ] {
            let text = format!("{place}@sha256:{HEX}");
            assert_eq!(Reference::parse(&text).unwrap_or_else(|e| panic!("{e}")).to_string(), text);
        }
    }

    #[test]
    fn a_reference_without_a_digest_a_host_or_a_proper_path_is_refused() {
        let parse = |place: &str| Reference::parse(&format!("{place}@sha256:{HEX}")).unwrap_err();
        assert!(matches!(Reference::parse("docker.io/a:b"), Err(ReferenceError::NoDigest { .. })));
        for digest in ["sha256:12", "sha512:12", HEX, &format!("sha256:{}", HEX.to_uppercase())] {
            let text = format!("docker.io/a@{digest}");
            assert!(matches!(Reference::parse(&text), Err(ReferenceError::Digest { .. })), "{text}");
        }
        assert!(matches!(parse(&format!("docker.io/a@sha256:{HEX}")), ReferenceError::Digest { .. }));
        for place in ["python", "library/python", "python:3", "/python", ""] {
            assert!(matches!(parse(place), ReferenceError::NoRegistry { .. }), "{place}");
        }
        for place in ["docker.io/A", "docker.io/a/../b", "docker.io/", "docker.io/a b", "user:pw@docker.io/a"] {
            assert!(matches!(parse(place), ReferenceError::Name { .. }), "{place}");
        }
        for place in ["oci-layout:", "oci-layout:/abs", "oci-layout://host/x", "oci-archive:///a\0b"] {
            assert!(matches!(parse(place), ReferenceError::Path { .. }), "{place}");
        }
    }

    #[test]
    fn a_relative_path_is_resolved_where_it_was_written() {
        let reference = Reference::parse(&format!("oci-layout:demo/x@sha256:{HEX}")).unwrap();
        let resolved = reference.resolve_relative_to(Path::new("/srv"));
        assert_eq!(resolved.to_string(), format!("oci-layout:///srv/demo/x@sha256:{HEX}"));
        assert_eq!(resolved.clone().resolve_relative_to(Path::new("/else")), resolved);
    }

    #[test]
    fn only_loopback_hosts_are_spoken_to_in_the_clear() {
        for host in ["localhost", "localhost:80", "127.0.0.1", "127.9.9.9:5000"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["localhost.example.com", "127.0.0.1.example.com:80", "10.0.0.1", "128.0.0.1:5000", "0.0.0.0"] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    proptest! {
        #[test]
        fn what_parses_reads_back_as_the_same(place in "[a-zA-Z0-9:/@._ -]{0,40}") {
            if let Ok(reference) = Reference::parse(&format!("{place}@sha256:{HEX}")) {
                prop_assert_eq!(Reference::parse(&reference.to_string()).unwrap(), reference);
            }
        }
    }
}
