//! What a box is made of: images, the command they and the template name, the runtime.

use ate_image::{Credentials, Image, Location, Reference};
use ate_name::Digest;
use ate_orders::{NodeError, RuntimeAsset, Workload, chain};
use ate_sandbox::User;
use ate_worker::link::{self, BoxKind, ContainerSpec, Prepare};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::Node;
use crate::runtime::Runtime;
use crate::snapshots::Snapshots;
use crate::volume::{VolumeError, durable_directory};

/// Blueprints kept: the templates that a node is likely to be asked for next. What they are made of is leased meanwhile.
const KEPT: usize = 8;

/// As a shell would have it, for images that name none.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Everything of a box but the worker it will stand in.
#[derive(Debug)]
pub(crate) struct Blueprint {
    pub(crate) kind: BoxKind,
    /// What is written down of an actor that runs in such a box.
    pub(crate) ran: Ran,
    pub(crate) template: ate_name::TemplateUid,
    runtime: Runtime,
    images: Vec<Image>,
    containers: Vec<ContainerSpec>,
    memory_limit: Option<u64>,
    cpu_limit_millis: Option<u64>,
    durable_bytes: Option<u64>,
}

/// What an actor runs on, written down when it is started or restored: its snapshot will name exactly this.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ran {
    pub(crate) assets: BTreeMap<String, RuntimeAsset>,
    /// What the runtime calls its own build.
    pub(crate) label: String,
    /// What must be equal between a save and a restore.
    pub(crate) workload: Digest,
}

/// Blueprints by what they were made for, the latest last.
#[derive(Debug, Default)]
pub(crate) struct Blueprints(Mutex<Vec<(Key, Arc<Blueprint>)>>);

/// A template of the same uid never changes what it runs, but it may go from one runtime to another.
#[derive(Clone, Debug, PartialEq)]
struct Key {
    workload: Workload,
    assets: BTreeMap<String, RuntimeAsset>,
}

impl Blueprints {
    fn get(&self, workload: &Workload, assets: &BTreeMap<String, RuntimeAsset>) -> Option<Arc<Blueprint>> {
        let mut kept = self.0.lock();
        let index = kept.iter().position(|(known, _)| known.workload == *workload && known.assets == *assets)?;
        let entry = kept.remove(index);
        let blueprint = Arc::clone(&entry.1);
        kept.push(entry);
        Some(blueprint)
    }

    fn keep(&self, key: Key, blueprint: &Arc<Blueprint>) {
        let mut kept = self.0.lock();
        kept.retain(|(known, _)| *known != key);
        kept.push((key, Arc::clone(blueprint)));
        if kept.len() > KEPT {
            kept.remove(0);
        }
    }
}

impl Node {
    /// `whence`: who names the assets, for errors.
    pub(crate) async fn blueprint(
        self: &Arc<Self>,
        workload: &Workload,
        assets: &BTreeMap<String, RuntimeAsset>,
        whence: &str,
    ) -> Result<Arc<Blueprint>, NodeError> {
        if let Some(blueprint) = self.blueprints.get(workload, assets) {
            return Ok(blueprint);
        }
        let blueprint = Arc::new(self.draw(workload, assets, whence).await?);
        self.blueprints.keep(Key { workload: workload.clone(), assets: assets.clone() }, &blueprint);
        self.evict_images();
        Ok(blueprint)
    }

    async fn draw(
        &self,
        workload: &Workload,
        assets: &BTreeMap<String, RuntimeAsset>,
        whence: &str,
    ) -> Result<Blueprint, NodeError> {
        let runtime = self.runtimes.ensure(assets).await;
        let runtime = runtime.map_err(|error| NodeError::Refused(format!("{whence}: {error}")))?;
        let (mut images, mut containers) = (Vec::new(), Vec::new());
        for container in &workload.containers {
            let refused = |error: String| {
                NodeError::Refused(format!(
                    "container {:?} of ActorTemplate {}: {error}",
                    container.name, workload.template
                ))
            };
            let reference = Reference::parse(&container.image).map_err(|error| refused(error.to_string()))?;
            let credentials = self.credentials(&reference).map_err(refused)?;
            let image = self.images.ensure(&reference, credentials.as_ref()).await;
            let image = image.map_err(|error| refused(chain(&error)))?;
            containers.push(container_spec(container, &image).map_err(refused)?);
            images.push(image);
        }
        let format = ate_sandbox_gvisor::spec::FORMAT;
        let digests: Vec<_> = images.iter().map(|image| image.digest).collect();
        let must_match = serde_json::to_vec(&(format, &digests, &containers)).expect("plain data");
        let workload_digest = ate_snapshot::Content::of(&must_match).digest;
        let limits = (workload.memory_limit, workload.cpu_limit_millis, workload.durable_bytes);
        let hashes: BTreeMap<_, _> = assets.iter().map(|(name, asset)| (name, asset.sha256)).collect();
        let all = serde_json::to_vec(&(workload_digest, hashes, limits)).expect("plain data");
        Ok(Blueprint {
            kind: BoxKind(ate_snapshot::Content::of(&all).digest.to_string()),
            ran: Ran { assets: assets.clone(), label: runtime.label.clone(), workload: workload_digest },
            template: workload.template_uid,
            runtime,
            images,
            containers,
            memory_limit: workload.memory_limit,
            cpu_limit_millis: workload.cpu_limit_millis,
            durable_bytes: workload.durable_bytes,
        })
    }

    /// What the registry of an image wants to see, from the file that the node was given.
    fn credentials(&self, reference: &Reference) -> Result<Option<Credentials>, String> {
        let (Some(file), Location::Registry { registry, .. }) = (&self.config.registry_config, reference.location())
        else {
            return Ok(None);
        };
        let named = |error: &dyn std::fmt::Display| format!("registry credentials in {}: {error}", file.display());
        // Read each time: credentials change, and pulls are rare.
        let json = std::fs::read(file).map_err(|error| named(&error))?;
        Credentials::from_docker_config(&json, registry).map_err(|error| named(&error))
    }

    fn evict_images(self: &Arc<Self>) {
        let node = Arc::clone(self);
        self.tasks.spawn(async move {
            match node.images.evict_to(node.config.image_budget).await {
                Ok(evicted) if evicted.images > 0 => tracing::info!(?evicted, "images that nobody used were removed"),
                Ok(_) => {}
                Err(error) => tracing::warn!(error = chain(&error), "images could not be evicted"),
            }
        });
    }
}

impl Blueprint {
    /// The command for a worker, and the descriptors that go with it. Blocks.
    pub(crate) fn prepare(&self, snapshots: &Snapshots) -> Result<(link::Command, Vec<OwnedFd>), NodeError> {
        let failed = |error: std::io::Error| NodeError::Hindered(format!("cannot lay out a root file system: {error}"));
        let mut fds = vec![ate_sys::detached_bind(self.runtime.path()).map_err(failed)?];
        for image in &self.images {
            fds.push(ate_sys::detached_overlay(&image.layers).map_err(failed)?);
        }
        if let Some(bytes) = self.durable_bytes {
            let made =
                snapshots.scratch_file().map_err(VolumeError::File).and_then(|file| durable_directory(file, bytes));
            fds.push(made.map_err(|error| {
                NodeError::Hindered(format!("cannot make a durable directory of {bytes} bytes: {}", chain(&error)))
            })?);
        }
        fds.extend(self.runtime.leases().map_err(failed)?);
        for image in &self.images {
            fds.push(image.lease.descriptor().as_fd().try_clone_to_owned().map_err(failed)?);
        }
        let prepare = Prepare {
            kind: self.kind.clone(),
            containers: self.containers.clone(),
            memory_limit: self.memory_limit,
            cpu_limit_millis: self.cpu_limit_millis,
            durable: self.durable_bytes.is_some(),
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
