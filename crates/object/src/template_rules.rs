//! The rules of an ActorTemplate. Messages in quotes of the public schema stay word for word: clients compare them.

use std::collections::{BTreeMap, BTreeSet};

use ate_name::{check_dns_label, check_dns_subdomain};

use crate::path::Problems;
use crate::{
    ActorTemplateSpec, Container, EnvSource, EnvVar, FieldPath, HttpGet, Quantity, SandboxClass, Scope, SecretKey,
    VolumeMount,
};

// Limits of the public schema; a template that exceeds one is refused whole.
const MAX_CONTAINERS: usize = 10;
const MAX_COMMAND: usize = 64;
const MAX_ENV: usize = 32;
const MAX_VOLUMES: usize = 32;
const MAX_VOLUME_MOUNTS: usize = 32;
const MAX_MOUNT_PATH: usize = 4096;
const MAX_READYZ_PATH: usize = 1024;

// Limits of our own fields.
const MAX_PORTS: usize = 16;
const MAX_PULL_SECRETS: usize = 16;
/// Less, and a file system is hardly more than its own tables.
const LEAST_DURABLE: u64 = 16 << 20;
/// A durable directory is one sparse file of its node, and the file systems of most hosts keep none of 16 TiB.
const MOST_DURABLE: u64 = 8 << 40;

/// The public runtime names the container that holds the sandbox so.
const RESERVED_CONTAINER: &str = "pause";

const PINNED: &str = "All images must be pinned (changing the image invalidates snapshots)";
const DNS_LABEL: &str = "Name must be a valid DNS label";
const DNS_SUBDOMAIN: &str = "Name must be a valid DNS subdomain";
const CLEAN_PATH: &str = "MountPath must be a clean absolute Unix path: must start with '/', not be '/', and contain \
                          no ':', '..', '.', '//', trailing '/', or control characters";

impl ActorTemplateSpec {
    pub(crate) fn check(&self, problems: &mut Problems) {
        let spec = FieldPath::new("spec");
        if self.pause_image.as_ref().is_some_and(|image| !image.contains('@')) {
            problems.add(spec.field("pauseImage"), PINNED);
        }
        self.check_volumes(&spec.field("volumes"), problems);
        self.check_containers(&spec.field("containers"), problems);
        self.check_ports(&spec.field("containers"), problems);
        self.check_snapshots(&spec.field("snapshotsConfig"), problems);
        if let Some(selector) = &self.worker_selector {
            selector.check(&spec.field("workerSelector"), problems);
        }
        if let Some(egress) = &self.egress {
            egress.check(&spec.field("egress"), problems);
        }
        self.check_idle(&spec.field("idle"), problems);
        self.check_limits(&spec.field("resources").field("limits"), problems);
        let secrets = spec.field("imagePullSecrets");
        problems.at_most(&secrets, MAX_PULL_SECRETS, self.image_pull_secrets.len());
        for (index, secret) in self.image_pull_secrets.iter().enumerate() {
            if !check_dns_subdomain(&secret.name) {
                problems.add(secrets.index(index).field("name"), DNS_SUBDOMAIN);
            }
        }
    }

    fn check_volumes(&self, path: &FieldPath, problems: &mut Problems) {
        problems.at_most(path, MAX_VOLUMES, self.volumes.len());
        let mut names = BTreeSet::new();
        let mut durable = 0;
        for (index, volume) in self.volumes.iter().enumerate() {
            let path = path.index(index);
            if check_dns_label(&volume.name).is_err() {
                problems.add(path.field("name"), DNS_LABEL);
            } else if !names.insert(&volume.name) {
                problems.add(path.field("name"), format!("another volume is already named \"{}\"", volume.name));
            }
            let Some(durable_dir) = volume.durable_dir else {
                problems.add(path.clone(), "must have exactly one source: durableDir");
                continue;
            };
            if !(LEAST_DURABLE..=MOST_DURABLE).contains(&durable_dir.bytes()) {
                let [least, most] = [LEAST_DURABLE, MOST_DURABLE].map(Quantity::from_units);
                problems.add(
                    path.field("durableDir").field("sizeLimit"),
                    format!("must be from {least} to {most}: it is the size of a file system"),
                );
            }
            durable += 1;
            if durable == 2 {
                problems.add(path.clone(), "At most one DurableDir-typed volume is supported per ActorTemplate");
            }
            if self.sandbox_class == SandboxClass::Microvm {
                problems.add(path, "DurableDir volumes are not supported when sandboxClass is 'microvm'");
            }
        }
    }

    fn check_containers(&self, path: &FieldPath, problems: &mut Problems) {
        problems.at_most(path, MAX_CONTAINERS, self.containers.len());
        if self.containers.is_empty() {
            problems.add(path.clone(), "must have at least one container: there is nothing to run");
        }
        let mut names = BTreeSet::new();
        for (index, container) in self.containers.iter().enumerate() {
            let path = path.index(index);
            let name = &container.name;
            if check_dns_label(name).is_err() {
                problems.add(path.field("name"), DNS_LABEL);
            } else if name == RESERVED_CONTAINER {
                problems.add(path.field("name"), format!("\"{name}\" is reserved for the sandbox's own container"));
            } else if !names.insert(name) {
                problems.add(path.field("name"), format!("another container is already named \"{name}\""));
            }
            check_container(container, &path, problems);
            self.check_mounts(&container.volume_mounts, &path.field("volumeMounts"), problems);
        }
    }

    fn check_mounts(&self, mounts: &[VolumeMount], path: &FieldPath, problems: &mut Problems) {
        problems.at_most(path, MAX_VOLUME_MOUNTS, mounts.len());
        let mut paths = BTreeSet::new();
        let mut durable = 0;
        for (index, mount) in mounts.iter().enumerate() {
            let path = path.index(index);
            let volume = self.volumes.iter().find(|volume| volume.name == mount.name);
            if check_dns_label(&mount.name).is_err() {
                problems.add(path.field("name"), DNS_LABEL);
            } else if volume.is_none() {
                problems.add(path.field("name"), format!("no volume of this template is named \"{}\"", mount.name));
            }
            durable += usize::from(volume.is_some_and(|volume| volume.durable_dir.is_some()));
            if durable == 2 {
                problems.add(path.clone(), "A container may mount at most one DurableDir-typed volume");
            }
            let mount_path = path.field("mountPath");
            if mount.mount_path.chars().count() > MAX_MOUNT_PATH {
                problems.add(mount_path, format!("must be no more than {MAX_MOUNT_PATH} characters"));
            } else if !is_clean_path(&mount.mount_path) {
                problems.add(mount_path, CLEAN_PATH);
            } else if !paths.insert(&mount.mount_path) {
                problems.add(mount_path, "another volume is already mounted there");
            }
        }
    }

    /// All containers share one network, so ports must differ over the whole template.
    fn check_ports(&self, path: &FieldPath, problems: &mut Problems) {
        let mut numbers = BTreeMap::new();
        let mut names = BTreeSet::new();
        for (index, container) in self.containers.iter().enumerate() {
            let path = path.index(index).field("ports");
            problems.at_most(&path, MAX_PORTS, container.ports.len());
            for (index, port) in container.ports.iter().enumerate() {
                let path = path.index(index);
                if let Some(other) = numbers.insert(port.port, &container.name) {
                    problems.add(path.field("port"), format!("container {other:?} already listens on {}", port.port));
                }
                let Some(name) = &port.name else { continue };
                if check_dns_label(name).is_err() {
                    problems.add(path.field("name"), DNS_LABEL);
                } else if !names.insert(name) {
                    problems.add(path.field("name"), format!("another port is already named \"{name}\""));
                }
            }
        }
    }

    fn check_snapshots(&self, path: &FieldPath, problems: &mut Problems) {
        let config = &self.snapshots_config;
        if config.location.is_empty() {
            problems.add(path.field("location"), "must not be empty");
        }
        if config.on_pause != Scope::Full && config.on_commit != config.on_pause {
            problems.add(path.field("onCommit"), "onCommit must be a subset of onPause");
        }
        if self.volumes.iter().any(|volume| volume.durable_dir.is_some()) {
            return;
        }
        for (field, scope) in [("onPause", config.on_pause), ("onCommit", config.on_commit)] {
            if scope == Scope::Data {
                problems.add(
                    path.field(field),
                    "Data saves only durableDir volumes, and this template has none: add one to spec.volumes, or use \
                     Full",
                );
            }
        }
    }

    fn check_idle(&self, path: &FieldPath, problems: &mut Problems) {
        let Some(idle) = &self.idle else { return };
        if let (Some(freeze), Some(suspend)) = (idle.freeze_after, idle.suspend_after)
            && freeze > suspend
        {
            problems
                .add(path.field("freezeAfter"), format!("must not be longer than suspendAfter, which is {suspend}"));
        }
    }

    fn check_limits(&self, path: &FieldPath, problems: &mut Problems) {
        let Some(resources) = &self.resources else { return };
        for (name, limit) in [("cpu", resources.limits.cpu), ("memory", resources.limits.memory)] {
            if limit.is_some_and(|limit| limit.is_zero()) {
                problems.add(path.field(name), "must be greater than zero: leave it out for no limit");
            }
        }
    }
}

fn check_container(container: &Container, path: &FieldPath, problems: &mut Problems) {
    if !container.image.contains('@') {
        problems.add(path.field("image"), PINNED);
    }
    problems.at_most(&path.field("command"), MAX_COMMAND, container.command.len());
    let env = path.field("env");
    problems.at_most(&env, MAX_ENV, container.env.len());
    for (index, variable) in container.env.iter().enumerate() {
        check_env(variable, &env.index(index), problems);
    }
    if let Some(readyz) = &container.readyz {
        check_http_get(&readyz.http_get, &path.field("readyz").field("httpGet"), problems);
    }
}

fn check_env(variable: &EnvVar, path: &FieldPath, problems: &mut Problems) {
    let printable = |b: u8| matches!(b, b' '..=b'~') && b != b'=';
    if variable.name.is_empty() || !variable.name.bytes().all(printable) {
        problems.add(path.field("name"), "must be printable ASCII characters other than '=', at least one");
    }
    match (&variable.value, &variable.value_from) {
        (Some(_), None) => {}
        (None, Some(EnvSource::SecretKeyRef(secret))) => {
            check_secret_key(secret, &path.field("valueFrom").field("secretKeyRef"), problems);
        }
        _ => problems.add(path.clone(), "exactly one of value and valueFrom must be set"),
    }
}

fn check_secret_key(secret: &SecretKey, path: &FieldPath, problems: &mut Problems) {
    if !check_dns_subdomain(&secret.name) {
        problems.add(path.field("name"), DNS_SUBDOMAIN);
    }
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    if secret.key.is_empty() || !secret.key.bytes().all(allowed) {
        problems.add(path.field("key"), "must be letters, digits, '-', '_' or '.', at least one");
    }
}

fn check_http_get(http_get: &HttpGet, path: &FieldPath, problems: &mut Problems) {
    let path = path.field("path");
    if http_get.path.len() > MAX_READYZ_PATH {
        problems.add(path, format!("must be no more than {MAX_READYZ_PATH} characters"));
    } else if !is_url_path(&http_get.path) {
        problems.add(path, "must be the path of a URL: it starts with '/' and has neither a query nor a fragment");
    }
}

fn is_clean_path(path: &str) -> bool {
    path.len() > 1
        && path.starts_with('/')
        && !path.chars().any(|c| c == ':' || c.is_ascii_control())
        && path[1..].split('/').all(|part| !matches!(part, "" | "." | ".."))
}

/// A slash, then characters that RFC 3986 allows in a path.
fn is_url_path(path: &str) -> bool {
    let mut bytes = path.bytes();
    if bytes.next() != Some(b'/') {
        return false;
    }
    while let Some(byte) = bytes.next() {
        let fine = match byte {
            b'%' => [bytes.next(), bytes.next()].iter().all(|b| b.is_some_and(|b| b.is_ascii_hexdigit())),
            _ => byte.is_ascii_alphanumeric() || b"/-._~!$&'()*+,;=:@".contains(&byte),
        };
        if !fine {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_path_is_absolute_and_clean() {
        for good in ["/data", "/home/counter", "/a..b/.c", "/a b"] {
            assert!(is_clean_path(good), "{good}");
        }
        for bad in
            ["", "/", "data", "/a/", "//a", "/a//b", "/a:b", "/a\u{7f}", "/a\n", "/.", "/a/..", "/../a", "/a/./b"]
        {
            assert!(!is_clean_path(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_readyz_path_is_the_path_of_a_url() {
        for good in ["/", "/readyz", "/a/b%2Fc;v=1", "/~me/@x:y"] {
            assert!(is_url_path(good), "{good}");
        }
        for bad in ["", "readyz", "/a?b", "/a#b", "/a b", "/%2", "/%zz", "/ä"] {
            assert!(!is_url_path(bad), "{bad:?}");
        }
    }
}
