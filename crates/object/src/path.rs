//! Where in an object something is wrong, and what.

use std::fmt;

use ate_name::ObjectKey;

use crate::Kind;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    Name(String),
    Index(usize),
}

/// A place in an object: `spec.containers[0].image`. A name that would make that ambiguous stands in brackets:
/// `metadata.labels[example.com/team]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FieldPath(Vec<Segment>);

impl FieldPath {
    pub fn new(name: &str) -> Self {
        Self::default().field(name)
    }

    #[must_use]
    pub fn field(&self, name: &str) -> Self {
        self.then(Segment::Name(name.to_owned()))
    }

    #[must_use]
    pub fn index(&self, index: usize) -> Self {
        self.then(Segment::Index(index))
    }

    fn then(&self, segment: Segment) -> Self {
        let mut path = self.clone();
        path.0.push(segment);
        path
    }

    pub(crate) fn join(&self, rest: &FieldPath) -> Self {
        Self(self.0.iter().chain(&rest.0).cloned().collect())
    }

    pub(crate) fn from_innermost_first(mut segments: Vec<Segment>) -> Self {
        segments.reverse();
        Self(segments)
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.0
    }

    pub(crate) fn push(&mut self, segment: Segment) {
        self.0.push(segment);
    }

    pub(crate) fn pop(&mut self) {
        self.0.pop();
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plain = |name: &str| {
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
        };
        for (position, segment) in self.0.iter().enumerate() {
            match segment {
                Segment::Index(index) => write!(f, "[{index}]")?,
                Segment::Name(name) if !plain(name) => write!(f, "[{}]", name.escape_debug())?,
                Segment::Name(name) if position == 0 => f.write_str(name)?,
                Segment::Name(name) => write!(f, ".{name}")?,
            }
        }
        Ok(())
    }
}

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub path: FieldPath,
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() { f.write_str(&self.message) } else { write!(f, "{}: {}", self.path, self.message) }
    }
}

/// An object that breaks rules: which object, and all of its problems.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {:?} is invalid:{}", .key.to_string(), list(.problems))]
pub struct Invalid {
    pub kind: Kind,
    pub key: ObjectKey,
    pub problems: Vec<Problem>,
}

/// One problem goes on the line of its object, as kubectl prints it; several get a line each.
fn list(problems: &[Problem]) -> String {
    match problems {
        [only] => format!(" {only}"),
        many => many.iter().map(|problem| format!("\n  {problem}")).collect(),
    }
}

/// Collects the problems of one object.
#[derive(Debug, Default)]
pub(crate) struct Problems(pub(crate) Vec<Problem>);

impl Problems {
    pub(crate) fn add(&mut self, path: FieldPath, message: impl Into<String>) {
        self.0.push(Problem { path, message: message.into() });
    }

    pub(crate) fn at_most(&mut self, path: &FieldPath, limit: usize, items: usize) {
        if items > limit {
            self.add(path.clone(), format!("must have at most {limit} items, has {items}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_reads_like_the_file() {
        let path = FieldPath::new("spec").field("containers").index(0).field("image");
        assert_eq!(path.to_string(), "spec.containers[0].image");
        assert_eq!(FieldPath::new("metadata").field("labels").field("a.b/c").to_string(), "metadata.labels[a.b/c]");
    }

    #[test]
    fn one_problem_is_one_line_and_several_are_a_list() {
        let problem = |path: &str| Problem { path: FieldPath::new(path), message: "is wrong".into() };
        let invalid = |problems| Invalid { kind: Kind::WorkerPool, key: ObjectKey::new("ns", "a"), problems };
        assert_eq!(invalid(vec![problem("spec")]).to_string(), "WorkerPool \"ns/a\" is invalid: spec: is wrong");
        assert_eq!(
            invalid(vec![problem("a"), problem("b")]).to_string(),
            "WorkerPool \"ns/a\" is invalid:\n  a: is wrong\n  b: is wrong"
        );
    }
}
