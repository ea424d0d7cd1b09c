use std::collections::BTreeMap;

use ate_name::{Labels, check_dns_subdomain};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::meta::check_labels;
use crate::path::Problems;
use crate::{FieldPath, Meta, Quantity, SandboxClass};

/// Limit of the public schema; a pool with more is refused.
const MAX_TOLERATIONS: usize = 16;

/// Warm capacity: so many workers of one sandbox class. Templates and actors choose pools by the pool's labels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerPool {
    pub metadata: Meta,
    pub spec: WorkerPoolSpec,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerPoolSpec {
    pub replicas: u32,
    /// Required by the public schema, where workers are images of their own. Here a worker is a role of the one
    /// binary, so that without a cluster there is no image to name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ateom_image: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<WorkerTemplate>,
    #[serde(default)]
    pub sandbox_class: SandboxClass,
    /// Absent, the default config of the class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_config_name: Option<String>,
}

/// How worker pods are placed. Only Kubernetes reads the loosely typed fields, and it checks them itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerTemplate {
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub node_selector: Labels,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_affinity: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<WorkerResources>,
}

/// What one worker may use. Resources other than cpu and memory are for Kubernetes alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerResources {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, Quantity>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, Quantity>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<Value>,
}

impl WorkerPoolSpec {
    pub fn cpu_limit_millis(&self) -> Option<u64> {
        self.limit("cpu").map(Quantity::millis)
    }

    pub fn memory_limit_bytes(&self) -> Option<u64> {
        self.limit("memory").map(Quantity::units)
    }

    fn limit(&self, name: &str) -> Option<Quantity> {
        self.template.as_ref()?.resources.as_ref()?.limits.get(name).copied()
    }

    pub(crate) fn check(&self, problems: &mut Problems) {
        let spec = FieldPath::new("spec");
        if self.replicas > i32::MAX.unsigned_abs() {
            problems.add(spec.field("replicas"), format!("must be no more than {}", i32::MAX));
        }
        if self.ateom_image.as_ref().is_some_and(String::is_empty) {
            problems.add(spec.field("ateomImage"), "must not be empty");
        }
        if self.sandbox_config_name.as_ref().is_some_and(|name| !check_dns_subdomain(name)) {
            problems.add(spec.field("sandboxConfigName"), "Name must be a valid DNS subdomain");
        }
        let Some(template) = &self.template else { return };
        let path = spec.field("template");
        check_labels(&path.field("nodeSelector"), &template.node_selector, problems);
        problems.at_most(&path.field("tolerations"), MAX_TOLERATIONS, template.tolerations.len());
        for name in ["cpu", "memory"] {
            if self.limit(name).is_some_and(Quantity::is_zero) {
                let path = path.field("resources").field("limits").field(name);
                problems.add(path, "must be greater than zero: leave it out for no limit");
            }
        }
    }
}
