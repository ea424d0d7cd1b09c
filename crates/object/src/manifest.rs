//! Files of declared objects: YAML or JSON, several documents, all or nothing.

use std::collections::BTreeMap;
use std::fmt;

use ate_name::ObjectKey;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::decode::{decode, nearest};
use crate::meta::SERVER_FIELDS;
use crate::yaml::{Flaw, Node, Position, Value, load};
use crate::{API_VERSION, ActorTemplate, FieldPath, Kind, Meta, Object, Problem, SandboxConfig, WorkerPool};

/// Largest file; a larger one is refused unread. A directory of many objects is many files.
pub const MAX_MANIFEST_BYTES: usize = 4 * 1024 * 1024;

/// Most documents of one file; one with more is refused.
pub const MAX_DOCUMENTS: usize = 1000;

/// Most faults that are reported of one file; a last line says how many more there are.
const MAX_FAULTS: usize = 100;

/// What a file declares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifests {
    /// In the order of the file, each valid in itself.
    pub objects: Vec<Object>,
    /// What was left out and why, a line each.
    pub notes: Vec<String>,
}

/// One thing that is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Counted from one.
    pub line: usize,
    /// Counted from one, in characters.
    pub column: usize,
    /// The object, once it is known: `ActorTemplate "demo/counter"`.
    pub object: Option<String>,
    pub problem: Problem,
}

/// A file that was refused, with everything that is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ManifestError {
    pub source_name: String,
    pub faults: Vec<Fault>,
}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Fault { line, column, object, problem }) in self.faults.iter().take(MAX_FAULTS).enumerate() {
            let end = if index == 0 { "" } else { "\n" };
            write!(f, "{end}{}:{line}:{column}: ", self.source_name)?;
            if let Some(object) = object {
                write!(f, "{object}: ")?;
            }
            write!(f, "{problem}")?;
        }
        match self.faults.len().saturating_sub(MAX_FAULTS) {
            0 => Ok(()),
            more => write!(f, "\n{}: and {more} more", self.source_name),
        }
    }
}

/// Reads the objects of one file and checks them. `source_name` is for messages; `namespace` is what a namespaced
/// object gets that names none, [`DEFAULT_NAMESPACE`](crate::DEFAULT_NAMESPACE) unless a person chose another.
pub fn read_manifests(source_name: &str, bytes: &[u8], namespace: &str) -> Result<Manifests, ManifestError> {
    let mut reader =
        Reader { source_name, namespace, manifests: Manifests::default(), faults: Vec::new(), places: BTreeMap::new() };
    match text_of(bytes).and_then(|text| load(text, MAX_DOCUMENTS)) {
        Ok(documents) => {
            let empty = |document: &Node| matches!(document.value, Value::Null);
            for mut document in documents.into_iter().filter(|document| !empty(document)) {
                reader.node(&mut document, FieldPath::default());
            }
        }
        Err(flaw) => reader.fault(flaw.at, None, flaw.path, flaw.message),
    }
    if reader.faults.is_empty() {
        return Ok(reader.manifests);
    }
    Err(ManifestError { source_name: source_name.to_owned(), faults: reader.faults })
}

fn text_of(bytes: &[u8]) -> Result<&str, Flaw> {
    let flaw =
        |line, column, message: String| Flaw { at: Position { line, column }, path: FieldPath::default(), message };
    if bytes.len() > MAX_MANIFEST_BYTES {
        let message = format!("a file of {} bytes; more than {MAX_MANIFEST_BYTES} are not read", bytes.len());
        return Err(flaw(1, 1, message));
    }
    match str::from_utf8(bytes) {
        Ok(text) => Ok(text.strip_prefix('\u{feff}').unwrap_or(text)),
        Err(error) => {
            let valid = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
            let column = valid.rsplit('\n').next().map_or(0, |line| line.chars().count());
            Err(flaw(valid.matches('\n').count() + 1, column + 1, "not UTF-8 text".to_owned()))
        }
    }
}

/// One document of ours. `status` belongs to the server: a file copied from one may hold it, and it is ignored.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document<Spec> {
    #[serde(rename = "apiVersion")]
    _api_version: IgnoredAny,
    #[serde(rename = "kind")]
    _kind: IgnoredAny,
    metadata: Meta,
    spec: Spec,
    #[serde(default, rename = "status")]
    _status: IgnoredAny,
}

struct Reader<'a> {
    source_name: &'a str,
    namespace: &'a str,
    manifests: Manifests,
    faults: Vec<Fault>,
    places: BTreeMap<(Kind, ObjectKey), Position>,
}

impl Reader<'_> {
    fn fault(&mut self, at: Position, object: Option<String>, path: FieldPath, message: impl Into<String>) {
        let problem = Problem { path, message: message.into() };
        self.faults.push(Fault { line: at.line, column: at.column, object, problem });
    }

    /// `path` leads to the object from the start of its document.
    fn node(&mut self, node: &mut Node, path: FieldPath) {
        if !matches!(node.value, Value::Map(_)) {
            return self.fault(node.at, None, path, "expected a mapping with apiVersion, kind, metadata and spec");
        }
        let Some(api_version) = self.text(node, &path, "apiVersion") else { return };
        let Some(kind) = self.text(node, &path, "kind") else { return };
        match (api_version.as_str(), kind.as_str()) {
            ("v1", "List") => self.list(node, &path),
            ("v1", "Namespace") => self.namespace(node),
            (API_VERSION, "ActorTemplate") => {
                self.object(node, &path, |metadata, spec| Object::ActorTemplate(ActorTemplate { metadata, spec }));
            }
            (API_VERSION, "WorkerPool") => {
                self.object(node, &path, |metadata, spec| Object::WorkerPool(WorkerPool { metadata, spec }));
            }
            (API_VERSION, "SandboxConfig") => {
                self.object(node, &path, |metadata, spec| Object::SandboxConfig(SandboxConfig { metadata, spec }));
            }
            _ => self.unknown(node, &path, &api_version, &kind),
        }
    }

    fn text(&mut self, node: &Node, path: &FieldPath, field: &str) -> Option<String> {
        let at = node.position(&FieldPath::new(field), false);
        let message = match node.get(field).map(|child| &child.value) {
            Some(Value::Text(text)) => return Some(text.clone()),
            None | Some(Value::Null) => "is required",
            Some(_) => "expected a string",
        };
        self.fault(at, None, path.field(field), message);
        None
    }

    fn unknown(&mut self, node: &Node, path: &FieldPath, api_version: &str, kind: &str) {
        let names = Kind::ALL.map(Kind::as_str);
        if names.contains(&kind) {
            let at = node.position(&FieldPath::new("apiVersion"), false);
            let message = format!("unknown apiVersion {api_version:?}: {kind} is of {API_VERSION}");
            return self.fault(at, None, path.field("apiVersion"), message);
        }
        let at = node.position(&FieldPath::new("kind"), false);
        let message = match nearest(kind, &names) {
            Some(near) => format!("unknown kind {kind:?}: did you mean \"{near}\"?"),
            None => format!(
                "unknown kind {kind:?} of {api_version:?}: known are {} of {API_VERSION}, and List and Namespace of v1",
                names.join(", ")
            ),
        };
        self.fault(at, None, path.field("kind"), message);
    }

    fn list(&mut self, node: &mut Node, path: &FieldPath) {
        let path = path.field("items");
        let at = node.position(&FieldPath::new("items"), false);
        match node.get_mut("items").map(|items| &mut items.value) {
            None | Some(Value::Null) => {}
            Some(Value::List(items)) => {
                for (index, item) in items.iter_mut().enumerate() {
                    self.node(item, path.index(index));
                }
            }
            Some(_) => self.fault(at, None, path, "expected a list"),
        }
    }

    fn namespace(&mut self, node: &Node) {
        let name = match node.get("metadata").and_then(|metadata| metadata.get("name")) {
            Some(Node { value: Value::Text(name), .. }) => name,
            _ => "",
        };
        let Position { line, column } = node.at;
        self.manifests.notes.push(format!(
            "{}:{line}:{column}: Namespace {name:?} left out: a namespace needs no object here",
            self.source_name
        ));
    }

    fn object<Spec: DeserializeOwned>(
        &mut self,
        node: &mut Node,
        path: &FieldPath,
        make: impl FnOnce(Meta, Spec) -> Object,
    ) {
        if let Some(Value::Map(entries)) = node.get_mut("metadata").map(|metadata| &mut metadata.value) {
            entries.retain(|entry| !SERVER_FIELDS.contains(&entry.key.as_str()));
        }
        let mut object = match decode::<Document<Spec>>(node) {
            Ok(document) => make(document.metadata, document.spec),
            Err(error) => {
                let at = node.position(&error.path(), error.of_key);
                return self.fault(at, None, path.join(&error.path()), error.message);
            }
        };
        if object.kind().is_namespaced() && object.metadata().namespace.is_empty() {
            object.metadata_mut().namespace = self.namespace.to_owned();
        }
        let name = format!("{} {:?}", object.kind(), object.key().to_string());
        if let Err(invalid) = object.validate() {
            for problem in invalid.problems {
                // Finding a position walks the tree, which must not happen once for each of a million problems.
                let reported = self.faults.len() < MAX_FAULTS;
                let at = if reported { node.position(&problem.path, false) } else { node.at };
                self.fault(at, Some(name.clone()), path.join(&problem.path), problem.message);
            }
        }
        if let Some(first) = self.places.insert((object.kind(), object.key()), node.at) {
            let message = format!("is in this file twice, first at line {}", first.line);
            return self.fault(node.at, Some(name), path.clone(), message);
        }
        self.manifests.objects.push(object);
    }
}
