use std::fmt;

/// Longest key; what object stores allow.
const MAX_KEY: usize = 1024;

/// Longest part of a key between slashes; what file systems allow.
const MAX_SEGMENT: usize = 255;

/// The text names no place in object storage.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} {reason}; write it as scheme://bucket/path")]
pub struct BlobPathError {
    text: String,
    reason: &'static str,
}

/// An object, or everything below a prefix: `scheme://bucket/key`.
///
/// Which bucket store that means is the business of the [`Backend`](crate::Backend): the scheme is kept for people to
/// read and says nothing, so a template that names `gs://` works in an instance on MinIO. A prefix ends between
/// segments: `s3://b/a` has `s3://b/a/x` below it, not `s3://b/ab`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobPath {
    scheme: String,
    bucket: String,
    key: String,
}

impl BlobPath {
    pub fn parse(text: &str) -> Result<Self, BlobPathError> {
        let error = |reason| BlobPathError { text: text.chars().take(MAX_KEY).collect(), reason };
        let (scheme, rest) = text.split_once("://").ok_or(error("has no scheme"))?;
        let scheme_byte = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+.-".contains(&b);
        if !scheme.starts_with(|c: char| c.is_ascii_lowercase()) || !scheme.bytes().all(scheme_byte) {
            return Err(error("has a malformed scheme"));
        }
        let (bucket, key) = match rest.split_once('/') {
            // A slash ends a bucket, or a key that is there.
            Some((bucket, "")) => (bucket, ""),
            Some((_, "/")) => return Err(error("has an empty key segment")),
            Some((bucket, key)) => (bucket, key.strip_suffix('/').unwrap_or(key)),
            None => (rest, ""),
        };
        // Names that begin with a dot are the directory backend's own.
        if !bucket.starts_with(|c: char| c.is_ascii_alphanumeric())
            || !bucket.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
            || bucket.len() > MAX_SEGMENT
        {
            return Err(error("has no bucket, or a malformed one"));
        }
        Self { scheme: scheme.into(), bucket: bucket.into(), key: String::new() }
            .with_key(key)
            .ok_or(error("has a key that is too long, or has an empty, relative, long or unprintable segment"))
    }

    /// The same bucket, another key; `None` if it is none.
    pub(crate) fn with_key(&self, key: &str) -> Option<Self> {
        let segment = |segment: &str| {
            !matches!(segment, "" | "." | "..")
                && segment.len() <= MAX_SEGMENT
                && segment.bytes().all(|b| b.is_ascii_graphic() && !b"?#%\\".contains(&b))
        };
        let good = key.is_empty() || key.len() <= MAX_KEY && key.split('/').all(segment);
        good.then(|| Self { key: key.into(), ..self.clone() })
    }

    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// Empty for a whole bucket.
    pub fn key(&self) -> &str {
        &self.key
    }
}

impl fmt::Display for BlobPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.bucket)?;
        if self.key.is_empty() { Ok(()) } else { write!(f, "/{}", self.key) }
    }
}

impl fmt::Debug for BlobPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_path_keeps_bucket_and_key_and_loses_one_slash() {
        for (text, bucket, key) in
            [("s3://b", "b", ""), ("gs://b.c/", "b.c", ""), ("x://b/a/.b/c", "b", "a/.b/c"), ("s3://b/a/", "b", "a")]
        {
            let path = BlobPath::parse(text).unwrap();
            assert_eq!((path.bucket(), path.key()), (bucket, key));
            assert_eq!(path.to_string(), text.trim_end_matches('/'));
        }
    }

    #[test]
    fn what_could_leave_the_bucket_is_no_path() {
        for bad in [
            "b/k",
            "S3://b/k",
            "s3:///k",
            "file:///var/lib",
            "s3://../k",
            "s3://.unfinished/k",
            "s3://u@b/k",
            "s3://b:9/k",
            "s3://b/..",
            "s3://b/a/../c",
            "s3://b/./c",
            "s3://b//c",
            "s3://b/c//",
            "s3://b//",
            "s3://b/a%2f",
            "s3://b/a b",
            "s3://b/a\0",
            &format!("s3://b/{}", "x".repeat(256)),
            &format!("s3://b/{}", "x/".repeat(600)),
        ] {
            assert!(BlobPath::parse(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn a_parsed_path_writes_itself_and_stays_inside(text in ".{0,60}|[a-z]{1,3}://[a-z./]{0,40}") {
            if let Ok(path) = BlobPath::parse(&text) {
                prop_assert_eq!(path.to_string(), text.strip_suffix('/').unwrap_or(&text));
                prop_assert!(!path.bucket().starts_with('.'));
                prop_assert!(path.key().split('/').all(|segment| segment != ".."));
            }
        }
    }
}
