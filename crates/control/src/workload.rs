//! From a template to what a node can run.

use ate_name::ObjectKey;
use ate_object::{EnvSource, Protocol, WorkerPool, resolve_config};
use ate_orders::{Container, EgressRule, Port, PortProtocol, Readyz, Runtime, RuntimeAsset, Workload};

use crate::catalog::Template;
use crate::{Control, ControlError};

impl Template {
    /// Everything but the runtime, which is the pool's to choose.
    pub(crate) fn workload(&self) -> Result<Workload, ControlError> {
        let spec = &self.object.spec;
        let key = self.object.metadata.key();
        let containers = spec.containers.iter().map(|container| {
            let env = container.env.iter().filter_map(|var| match (&var.value, &var.value_from) {
                (Some(value), _) => Some(Ok((var.name.clone(), value.clone()))),
                (None, Some(EnvSource::SecretKeyRef(secret))) if secret.optional => None,
                // Without a cluster there are no secrets to refer to.
                (None, Some(EnvSource::SecretKeyRef(secret))) => Some(Err(ControlError::precondition(format!(
                    "container \"{}\" env \"{}\" references missing secret {}/{}",
                    container.name, var.name, key.namespace, secret.name
                )))),
                (None, None) => Some(Ok((var.name.clone(), String::new()))),
            });
            Ok(Container {
                name: container.name.clone(),
                image: container.image.clone(),
                command: container.command.clone(),
                env: env.collect::<Result<_, ControlError>>()?,
                volumes: container
                    .volume_mounts
                    .iter()
                    .map(|mount| (mount.name.clone(), mount.mount_path.clone()))
                    .collect(),
                readyz: container
                    .readyz
                    .as_ref()
                    .map(|readyz| Readyz { path: readyz.http_get.path.clone(), port: readyz.http_get.port.get() }),
            })
        });
        let limits = spec.resources.map(|resources| resources.limits).unwrap_or_default();
        Ok(Workload {
            template: key.clone(),
            template_uid: self.uid,
            containers: containers.collect::<Result<_, ControlError>>()?,
            ports: self.ports(),
            egress: spec
                .egress
                .iter()
                .flat_map(|egress| &egress.allow)
                .map(|rule| EgressRule {
                    network: rule.cidr.address(),
                    prefix: rule.cidr.prefix(),
                    ports: rule.ports.iter().flatten().map(|port| port.get()).collect(),
                })
                .collect(),
            memory_limit: limits.memory_bytes(),
            cpu_limit_millis: limits.cpu_millis(),
            durable_bytes: spec.durable_dir().map(|durable| durable.bytes()),
            freeze_after: spec.idle().freeze_after.map(|after| after.get()),
        })
    }

    pub(crate) fn ports(&self) -> Vec<Port> {
        let ports = self.object.spec.ports();
        ports
            .iter()
            .map(|port| Port {
                number: port.port.get(),
                protocol: match port.protocol {
                    Protocol::Http => PortProtocol::Http,
                    Protocol::H2c => PortProtocol::H2c,
                },
            })
            .collect()
    }

    /// Whether the workload itself says when it is up.
    pub(crate) fn tells_readiness(&self) -> bool {
        let containers = &self.object.spec.containers;
        !containers.is_empty() && containers.iter().all(|container| container.readyz.is_some())
    }
}

impl Control {
    /// Pools that may run a template's actors: the class fits, and both selectors match the pool's labels.
    pub(crate) fn eligible_pools(&self, template: &Template, selector: &ate_name::Labels) -> Vec<ObjectKey> {
        let spec = &template.object.spec;
        let fits = |pool: &WorkerPool| {
            let labels = &pool.metadata.labels;
            pool.spec.sandbox_class == spec.sandbox_class
                && spec.worker_selector.as_ref().is_none_or(|selector| selector.matches(labels))
                && selector.iter().all(|(key, value)| labels.get(key) == Some(value))
        };
        self.catalog.pools().iter().filter(|pool| fits(pool)).map(|pool| pool.metadata.key()).collect()
    }

    /// The binaries that a pool's workers start sandboxes with.
    pub(crate) fn runtime(&self, pool: &ObjectKey) -> Result<Runtime, ControlError> {
        let gone = || ControlError::precondition(format!("WorkerPool {pool} not found"));
        let pool = self.catalog.pool(pool).ok_or_else(gone)?;
        let configs = self.catalog.configs();
        let config = resolve_config(&pool, configs.iter().map(|config| &**config))
            .map_err(|error| ControlError::precondition(error.to_string()))?;
        let assets = config.spec.assets.iter().map(|(architecture, assets)| {
            let assets = assets
                .iter()
                .map(|(name, asset)| (name.clone(), RuntimeAsset { url: asset.url.clone(), sha256: asset.sha256 }));
            (architecture.clone(), assets.collect())
        });
        Ok(Runtime {
            config: config.metadata.name.clone(),
            class: config.spec.sandbox_class.to_string(),
            assets: assets.collect(),
        })
    }
}
