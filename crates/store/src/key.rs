use std::fmt;
use std::sync::Arc;

/// Longest segment: a DNS subdomain, the longest name Kubernetes allows, is 253.
pub const MAX_SEGMENT: usize = 253;

/// Longest path. Engines index keys whole, and PostgreSQL refuses an index row above about 2,700 bytes.
pub const MAX_PATH: usize = 1024;

/// A key space. Records of different kinds never share a list, a watch or a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Actor,
    Worker,
    Atespace,
    Operation,
    Template,
    Pool,
    Config,
    History,
    Replica,
    Node,
    /// Numbers that changes add to.
    Count,
    Meta,
}

impl Kind {
    pub const ALL: [Kind; 12] = [
        Kind::Actor,
        Kind::Worker,
        Kind::Atespace,
        Kind::Operation,
        Kind::Template,
        Kind::Pool,
        Kind::Config,
        Kind::History,
        Kind::Replica,
        Kind::Node,
        Kind::Count,
        Kind::Meta,
    ];

    /// The name under which adapters persist this kind. It never changes: stored keys begin with it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Actor => "actor",
            Kind::Worker => "worker",
            Kind::Atespace => "atespace",
            Kind::Operation => "operation",
            Kind::Template => "template",
            Kind::Pool => "pool",
            Kind::Config => "config",
            Kind::History => "history",
            Kind::Replica => "replica",
            Kind::Node => "node",
            Kind::Count => "count",
            Kind::Meta => "meta",
        }
    }

    /// The kind of that name, if this program knows it.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a text is no key or prefix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("a {kind} key needs at least one segment")]
    NoSegments { kind: Kind },
    #[error("segment {position} of a {kind} key is empty")]
    EmptySegment { kind: Kind, position: usize },
    #[error("segment {position} of a {kind} key holds {found:?}, which no segment may hold")]
    ForbiddenCharacter { kind: Kind, position: usize, found: char },
    #[error("segment {position} of a {kind} key has {length} bytes, the limit is {MAX_SEGMENT}")]
    LongSegment { kind: Kind, position: usize, length: usize },
    #[error("the path of a {kind} key has {length} bytes, the limit is {MAX_PATH}")]
    LongPath { kind: Kind, length: usize },
}

/// Checks the segments and writes each with a '/' behind it, so that a prefix is the text itself and a key
/// is the text without its last byte.
fn joined<S: AsRef<str>>(kind: Kind, segments: impl IntoIterator<Item = S>) -> Result<String, KeyError> {
    let mut path = String::new();
    for (position, segment) in segments.into_iter().enumerate() {
        let segment = segment.as_ref();
        if segment.is_empty() {
            return Err(KeyError::EmptySegment { kind, position });
        }
        if segment.len() > MAX_SEGMENT {
            return Err(KeyError::LongSegment { kind, position, length: segment.len() });
        }
        if let Some(found) = segment.chars().find(|c| matches!(c, '/' | '\0')) {
            return Err(KeyError::ForbiddenCharacter { kind, position, found });
        }
        path.push_str(segment);
        path.push('/');
    }
    if path.len() > MAX_PATH + 1 {
        return Err(KeyError::LongPath { kind, length: path.len() - 1 });
    }
    Ok(path)
}

/// Names one record. Paths order bytewise, which is the order of lists and of keyset paging.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    kind: Kind,
    path: Arc<str>,
}

impl Key {
    pub fn new<S: AsRef<str>>(kind: Kind, segments: impl IntoIterator<Item = S>) -> Result<Self, KeyError> {
        let mut path = joined(kind, segments)?;
        if path.pop().is_none() {
            return Err(KeyError::NoSegments { kind });
        }
        Ok(Self { kind, path: path.into() })
    }

    /// The way back from [`Key::path`], for adapters and page tokens.
    pub fn parse(kind: Kind, path: &str) -> Result<Self, KeyError> {
        Self::new(kind, path.split('/'))
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The segments joined by '/'.
    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn segments(&self) -> impl Iterator<Item = &str> {
        self.path.split('/')
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.path)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Every key of a kind, or every key of it strictly below some leading segments.
/// It ends at a segment border: below `demo` is `demo/a`, but neither `demo` nor `demo2/a`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Prefix {
    kind: Kind,
    path: Arc<str>,
}

impl Prefix {
    pub fn all(kind: Kind) -> Self {
        Self { kind, path: "".into() }
    }

    pub fn below<S: AsRef<str>>(kind: Kind, segments: impl IntoIterator<Item = S>) -> Result<Self, KeyError> {
        Ok(Self { kind, path: joined(kind, segments)?.into() })
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What the paths of all keys in this prefix begin with: empty, or ends with '/'.
    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn contains(&self, key: &Key) -> bool {
        self.kind == key.kind && key.path.starts_with(&*self.path)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.path)
    }
}

impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn segments_that_could_be_read_two_ways_are_refused() {
        let kind = Kind::Actor;
        assert_eq!(Key::new(kind, [""; 0]), Err(KeyError::NoSegments { kind }));
        assert_eq!(Key::new(kind, ["a", ""]), Err(KeyError::EmptySegment { kind, position: 1 }));
        assert_eq!(Key::new(kind, ["a/b"]), Err(KeyError::ForbiddenCharacter { kind, position: 0, found: '/' }));
        assert_eq!(Key::new(kind, ["a\0"]), Err(KeyError::ForbiddenCharacter { kind, position: 0, found: '\0' }));
        assert_eq!(Prefix::below(kind, ["a", ""]), Err(KeyError::EmptySegment { kind, position: 1 }));
    }

    #[test]
    fn lengths_at_the_limit_pass_and_one_more_is_refused() {
        let kind = Kind::Actor;
        let long = |length| Key::new(kind, ["x".repeat(length)]);
        assert!(long(MAX_SEGMENT).is_ok());
        assert_eq!(long(254), Err(KeyError::LongSegment { kind, position: 0, length: 254 }));
        let deep = |last| Key::new(kind, ["x".repeat(252), "x".repeat(252), "x".repeat(252), "x".repeat(252), last]);
        assert_eq!(deep("x".repeat(12)).map(|key| key.path().len()), Ok(MAX_PATH));
        assert_eq!(deep("x".repeat(13)), Err(KeyError::LongPath { kind, length: MAX_PATH + 1 }));
    }

    #[test]
    fn a_prefix_ends_at_a_segment_border() {
        let below = Prefix::below(Kind::Actor, ["demo"]).expect("checked");
        let contains = |kind, path| below.contains(&Key::parse(kind, path).expect("checked"));
        assert!(contains(Kind::Actor, "demo/a") && contains(Kind::Actor, "demo/a/b"));
        assert!(!contains(Kind::Actor, "demo") && !contains(Kind::Actor, "demo2/a"));
        assert!(!contains(Kind::Worker, "demo/a"));
        assert!(Prefix::all(Kind::Actor).contains(&Key::parse(Kind::Actor, "demo").expect("checked")));
    }

    proptest! {
        #[test]
        fn a_path_is_a_key_exactly_if_joining_its_segments_gives_it_back(path in "[a-b/\0é]{0,8}") {
            match Key::parse(Kind::Pool, &path) {
                Ok(key) => {
                    prop_assert_eq!(key.path(), &path);
                    prop_assert_eq!(Key::new(Kind::Pool, key.segments()), Ok(key.clone()));
                }
                Err(_) => prop_assert!(path.contains('\0') || path.split('/').any(str::is_empty)),
            }
        }
    }
}
