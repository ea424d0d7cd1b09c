use ate_name::{Labels, ObjectKey, check_dns_label, check_dns_subdomain, check_label_key, check_label_value};
use serde::{Deserialize, Serialize};

use crate::path::Problems;
use crate::{FieldPath, Kind};

/// The namespace of a namespaced object that names none.
pub const DEFAULT_NAMESPACE: &str = "default";

/// Most bytes of all annotation keys and values together; Kubernetes refuses more, and so do we.
const MAX_ANNOTATION_BYTES: usize = 256 * 1024;

/// A pool's name becomes the value of the label `ate.dev/worker-pool` on each of its workers.
const MAX_POOL_NAME: usize = ate_name::MAX_LABEL_VALUE;

/// What a server writes into `metadata`. A file that was copied from one may hold these; they are not ours to set.
pub(crate) const SERVER_FIELDS: [&str; 9] = [
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generation",
    "managedFields",
    "ownerReferences",
    "resourceVersion",
    "uid",
];

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    pub name: String,
    /// Empty for a kind that has no namespace.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub annotations: Labels,
}

impl Meta {
    pub fn key(&self) -> ObjectKey {
        ObjectKey::new(&self.namespace, &self.name)
    }

    pub(crate) fn check(&self, kind: Kind, problems: &mut Problems) {
        let path = FieldPath::new("metadata");
        if !check_dns_subdomain(&self.name) {
            problems.add(
                path.field("name"),
                "must be a DNS subdomain: lower case letters, digits, '-' and '.', starting and ending with a letter \
                 or digit, at most 253 characters",
            );
        } else if kind == Kind::WorkerPool && self.name.len() > MAX_POOL_NAME {
            problems.add(path.field("name"), "must be no more than 63 characters: it labels every worker of the pool");
        }
        if !kind.is_namespaced() {
            if !self.namespace.is_empty() {
                problems.add(path.field("namespace"), format!("must be absent: a {kind} belongs to no namespace"));
            }
        } else if let Err(error) = check_dns_label(&self.namespace) {
            problems.add(path.field("namespace"), error.to_string());
        }
        check_labels(&path.field("labels"), &self.labels, problems);
        let annotations = path.field("annotations");
        for key in self.annotations.keys() {
            // Kubernetes holds annotation keys to the rule of label keys, but ignores case.
            if let Err(error) = check_label_key(&key.to_ascii_lowercase()) {
                problems.add(annotations.field(key), error.to_string());
            }
        }
        let bytes: usize = self.annotations.iter().map(|(key, value)| key.len() + value.len()).sum();
        if bytes > MAX_ANNOTATION_BYTES {
            problems.add(annotations, format!("must be no more than {MAX_ANNOTATION_BYTES} bytes in all, are {bytes}"));
        }
    }
}

/// Keys and values that Kubernetes would take, each problem at its own key.
pub(crate) fn check_labels(path: &FieldPath, labels: &Labels, problems: &mut Problems) {
    for (key, value) in labels {
        if let Err(error) = check_label_key(key) {
            problems.add(path.field(key), error.to_string());
        }
        if let Err(error) = check_label_value(value) {
            problems.add(path.field(key), error.to_string());
        }
    }
}
