//! What a box is made of: images, the command they and the template name, the runtime.

use ate_image::{Image, Reference};
use ate_name::Digest;
use ate_orders::{NodeError, RuntimeAsset, Workload};
use ate_sandbox::User;
use ate_worker::link::{self, BoxKind, ContainerSpec, Prepare};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use crate::Node;
use crate::runtime::RuntimeDir;

/// As a shell would have it, for images that name none.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Everything of a box but the worker it will stand in.
#[derive(Debug)]
pub(crate) struct Blueprint {
    pub(crate) kind: BoxKind,
    pub(crate) runtime: RuntimeDir,
    images: Vec<Image>,
    containers: Vec<ContainerSpec>,
    memory_limit: Option<u64>,
    cpu_limit_millis: Option<u64>,
    /// What must be equal between a save and a restore.
    pub(crate) workload: Digest,
}

impl Node {
    pub(crate) async fn blueprint(
        &self,
        workload: &Workload,
        assets: &BTreeMap<String, RuntimeAsset>,
    ) -> Result<Blueprint, NodeError> {
        let runtime = self.runtimes.ensure(assets).map_err(NodeError::Refused)?;
        let (mut images, mut containers) = (Vec::new(), Vec::new());
        for container in &workload.containers {
            let refused = |error: String| {
                NodeError::Refused(format!(
                    "container {:?} of ActorTemplate {}: {error}",
                    container.name, workload.template
                ))
            };
            let reference = Reference::parse(&container.image).map_err(|error| refused(error.to_string()))?;
            let image = self.images.ensure(&reference, None).await.map_err(|error| refused(chain(&error)))?;
            containers.push(container_spec(container, &image).map_err(refused)?);
            images.push(image);
        }
        let format = ate_sandbox_gvisor::spec::FORMAT;
        let digests: Vec<_> = images.iter().map(|image| image.digest).collect();
        let must_match = serde_json::to_vec(&(format, &digests, &containers)).expect("plain data");
        let workload_digest = ate_snapshot::Content::of(&must_match).digest;
        let limits = (workload.memory_limit, workload.cpu_limit_millis);
        let all = serde_json::to_vec(&(workload_digest, &runtime.path, limits)).expect("plain data");
        Ok(Blueprint {
            kind: BoxKind(ate_snapshot::Content::of(&all).digest.to_string()),
            runtime,
            images,
            containers,
            memory_limit: workload.memory_limit,
            cpu_limit_millis: workload.cpu_limit_millis,
            workload: workload_digest,
        })
    }
}

impl Blueprint {
    /// The command for a worker, and the descriptors that go with it.
    pub(crate) fn prepare(&self) -> Result<(link::Command, Vec<OwnedFd>), NodeError> {
        let failed = |error: std::io::Error| NodeError::Failed(format!("cannot lay out a root file system: {error}"));
        let mut fds = vec![ate_sys::detached_bind(&self.runtime.path).map_err(failed)?];
        for image in &self.images {
            fds.push(ate_sys::detached_overlay(&image.layers).map_err(failed)?);
        }
        let prepare = Prepare {
            kind: self.kind.clone(),
            containers: self.containers.clone(),
            memory_limit: self.memory_limit,
            cpu_limit_millis: self.cpu_limit_millis,
        };
        Ok((link::Command::Prepare(prepare), fds))
    }
}

fn container_spec(container: &ate_orders::Container, image: &Image) -> Result<ContainerSpec, String> {
    let config = &image.config;
    let args: Vec<String> = match container.command.is_empty() {
        false => container.command.clone(),
        true => config.entrypoint.iter().chain(&config.cmd).cloned().collect(),
    };
    if args.is_empty() {
        return Err("neither the template nor the image names a command: set spec.containers[].command".to_owned());
    }
    let user = image.user().map_err(|error| chain(&error))?;
    // The template's variables win over the image's.
    let mut env: BTreeMap<String, String> = BTreeMap::new();
    let pairs = std::iter::once(PATH.to_owned()).chain(config.env.iter().cloned());
    env.extend(pairs.filter_map(|pair| pair.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))));
    env.extend(container.env.iter().cloned());
    Ok(ContainerSpec {
        name: container.name.clone(),
        args,
        env: env.into_iter().map(|(name, value)| format!("{name}={value}")).collect(),
        cwd: if config.working_dir.is_empty() { "/".to_owned() } else { config.working_dir.clone() },
        user: User { uid: user.uid, gid: user.gid, additional_gids: user.additional_gids },
        volumes: container.volumes.clone(),
    })
}

/// An error and what is behind it, on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
