//! Templates, pools and configs: in the store, and in memory for whoever needs them at every turn. There are few of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use ate_name::{ObjectKey, TemplateUid};
use ate_object::{ActorTemplate, Object, SandboxConfig, WorkerPool};
use ate_store::{Change, CommitError, Guard, Key, Kind, Record, Signal, Waiter};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use crate::golden::is_over;
use crate::records::{Read, each, encode, made_from, object_key, object_name};
use crate::save::location;
use crate::{Code, Control, ControlError};

/// A template, and how far its golden snapshot is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    pub uid: TemplateUid,
    pub object: ActorTemplate,
    pub status: TemplateStatus,
    pub created: jiff::Timestamp,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TemplateStatus {
    pub phase: TemplatePhase,
    /// Why it failed, or what it waits for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub golden: Option<ate_actor::SnapshotRef>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TemplatePhase {
    #[default]
    Pending,
    ResumeGoldenActor,
    WaitGoldenActor,
    /// The golden is taken and being restored once, to see that it can be.
    TrialGoldenActor,
    Ready,
    Failed,
}

/// What applying an object did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    Created,
    Configured,
    Unchanged,
}

#[derive(Default)]
struct Objects {
    templates: BTreeMap<ObjectKey, Arc<Template>>,
    /// The same templates: every wake asks for one.
    by_uid: HashMap<TemplateUid, Arc<Template>>,
    pools: BTreeMap<ObjectKey, Arc<WorkerPool>>,
    /// There, and cannot be read: nothing can be said of how large they are to be.
    unread_pools: BTreeSet<ObjectKey>,
    configs: BTreeMap<ObjectKey, Arc<SandboxConfig>>,
}

impl Objects {
    fn index(&mut self) {
        self.by_uid = self.templates.values().map(|template| (template.uid, Arc::clone(template))).collect();
    }
}

pub(crate) struct Catalog {
    objects: RwLock<Objects>,
    changed: Signal,
}

impl Catalog {
    pub(crate) fn new() -> Self {
        Self { objects: RwLock::default(), changed: Signal::default() }
    }

    pub(crate) fn template(&self, key: &ObjectKey) -> Option<Arc<Template>> {
        self.objects.read().templates.get(key).cloned()
    }

    pub(crate) fn template_by_uid(&self, uid: TemplateUid) -> Option<Arc<Template>> {
        self.objects.read().by_uid.get(&uid).cloned()
    }

    pub(crate) fn templates(&self) -> Vec<Arc<Template>> {
        self.objects.read().templates.values().cloned().collect()
    }

    pub(crate) fn pools(&self) -> Vec<Arc<WorkerPool>> {
        let mut pools: Vec<_> = self.objects.read().pools.values().cloned().collect();
        pools.sort_by_key(|pool| pool.metadata.key());
        pools
    }

    pub(crate) fn pool(&self, key: &ObjectKey) -> Option<Arc<WorkerPool>> {
        self.objects.read().pools.get(key).cloned()
    }

    pub(crate) fn is_unread(&self, pool: &ObjectKey) -> bool {
        self.objects.read().unread_pools.contains(pool)
    }

    pub(crate) fn configs(&self) -> Vec<Arc<SandboxConfig>> {
        let mut configs: Vec<_> = self.objects.read().configs.values().cloned().collect();
        configs.sort_by_key(|config| config.metadata.key());
        configs
    }

    pub(crate) fn changes(&self) -> Waiter {
        self.changed.waiter()
    }

    /// Forgets what is not among these: it was deleted while nobody told us.
    fn keep_only(&self, kind: Kind, records: &[Record]) {
        let kept: BTreeSet<ObjectKey> = records.iter().map(|record| object_name(&record.key)).collect();
        let mut objects = self.objects.write();
        match kind {
            Kind::Template => objects.templates.retain(|name, _| kept.contains(name)),
            Kind::Pool => {
                objects.pools.retain(|name, _| kept.contains(name));
                objects.unread_pools.retain(|name| kept.contains(name));
            }
            Kind::Config => objects.configs.retain(|name, _| kept.contains(name)),
            _ => {}
        }
        objects.index();
    }

    /// Takes over what the store says of an object.
    pub(crate) fn take(&self, key: &Key, record: Option<&Record>) -> Result<(), ControlError> {
        let name = object_name(key);
        let mut objects = self.objects.write();
        match (key.kind(), record) {
            (Kind::Template, Some(record)) => {
                let template = Read::<Template>::decode(record.clone())?.value;
                objects.templates.insert(name, Arc::new(template));
            }
            (Kind::Pool, Some(record)) => {
                objects.unread_pools.insert(name.clone());
                objects.pools.insert(name.clone(), Arc::new(Read::decode(record.clone())?.value));
                objects.unread_pools.remove(&name);
            }
            (Kind::Config, Some(record)) => {
                objects.configs.insert(name, Arc::new(Read::decode(record.clone())?.value));
            }
            (Kind::Template, None) => drop(objects.templates.remove(&name)),
            (Kind::Pool, None) => {
                objects.unread_pools.remove(&name);
                objects.pools.remove(&name);
            }
            (Kind::Config, None) => drop(objects.configs.remove(&name)),
            _ => return Ok(()),
        }
        objects.index();
        drop(objects);
        self.changed.raise();
        Ok(())
    }
}

impl Control {
    pub(crate) async fn load_objects(&self, kind: Kind) -> Result<(), ControlError> {
        let records = self.all(kind).await?;
        self.catalog.keep_only(kind, &records);
        each(&records, |record| self.catalog.take(&record.key, Some(record)));
        Ok(())
    }

    /// What applying would do; nothing is written.
    pub fn check(&self, mut objects: Vec<Object>) -> Result<Vec<(Object, Applied)>, ControlError> {
        self.validate(&mut objects)?;
        let applied = objects.into_iter().map(|object| {
            let key = object.key();
            let existing = match &object {
                Object::ActorTemplate(_) => {
                    self.catalog.template(&key).map(|template| Object::ActorTemplate(template.object.clone()))
                }
                Object::WorkerPool(_) => self.catalog.pool(&key).map(|pool| Object::WorkerPool((*pool).clone())),
                Object::SandboxConfig(_) => self
                    .catalog
                    .configs()
                    .iter()
                    .find(|config| config.metadata.key() == key)
                    .map(|config| Object::SandboxConfig((**config).clone())),
            };
            let applied = match existing {
                None => Applied::Created,
                Some(existing) if existing == object => Applied::Unchanged,
                Some(existing) => {
                    ate_object::check_update(&existing, &object)
                        .map_err(|error| ControlError::invalid(error.to_string()))?;
                    Applied::Configured
                }
            };
            Ok((object, applied))
        });
        applied.collect()
    }

    /// Applies objects in an order in which each finds what it refers to; all are checked before the first is written.
    pub async fn apply(&self, objects: Vec<Object>) -> Result<Vec<(Object, Applied)>, ControlError> {
        let objects: Vec<Object> = self.check(objects)?.into_iter().map(|(object, _)| object).collect();
        let mut done = Vec::with_capacity(objects.len());
        for object in objects {
            let applied = self.apply_one(&object).await?;
            done.push((object, applied));
        }
        Ok(done)
    }

    fn validate(&self, objects: &mut [Object]) -> Result<(), ControlError> {
        objects.sort_by_key(|object| match object {
            Object::SandboxConfig(_) => 0,
            Object::WorkerPool(_) => 1,
            Object::ActorTemplate(_) => 2,
        });
        let invalid = |error: ate_object::Invalid| ControlError::invalid(error.to_string());
        let existing = self.catalog.configs();
        let configs = |objects: &[Object]| -> Vec<SandboxConfig> {
            objects
                .iter()
                .filter_map(|object| match object {
                    Object::SandboxConfig(config) => Some(config.clone()),
                    _ => None,
                })
                .collect()
        };
        let new = configs(objects);
        for (index, object) in objects.iter().enumerate() {
            object.validate().map_err(invalid)?;
            if let Object::ActorTemplate(template) = object {
                location(template)?;
            }
            if let Object::SandboxConfig(config) = object {
                // Those that this very apply replaces count as what they will be.
                let kept = existing
                    .iter()
                    .map(|config| &**config)
                    .filter(|old| !new.iter().any(|new| new.metadata.key() == old.metadata.key()));
                ate_object::check_defaults(kept.chain(&new[..index]), config).map_err(invalid)?;
            }
        }
        Ok(())
    }

    async fn apply_one(&self, object: &Object) -> Result<Applied, ControlError> {
        let key = object_key(store_kind(object), &object.key());
        let read = self.store.get(&key).await?;
        let value = match object {
            Object::ActorTemplate(template) => {
                let existing = read.clone().map(Read::<Template>::decode).transpose()?;
                if let Some(existing) = &existing {
                    ate_object::check_update(&Object::ActorTemplate(existing.value.object.clone()), object)
                        .map_err(|error| ControlError::invalid(error.to_string()))?;
                }
                let applied = match existing.as_ref().map(|read| read.value.clone()) {
                    // Whoever applies it again wants it tried again.
                    Some(existing) if existing.status.phase == TemplatePhase::Failed => {
                        Template { object: template.clone(), status: TemplateStatus::default(), ..existing }
                    }
                    Some(existing) => Template { object: template.clone(), ..existing },
                    None => Template {
                        uid: TemplateUid::from_random(self.world.random()),
                        object: template.clone(),
                        status: TemplateStatus::default(),
                        created: self.world.now(),
                    },
                };
                existing.map_or_else(|| encode(&applied), |existing| existing.rewritten(&applied))
            }
            Object::WorkerPool(pool) => over(read.clone(), pool)?,
            Object::SandboxConfig(config) => over(read.clone(), config)?,
        };
        let (change, applied) = match &read {
            Some(record) if record.value == value => return Ok(Applied::Unchanged),
            Some(record) => (Change::new().replace(record, value.clone()), Applied::Configured),
            None => (Change::new().create(key.clone(), value.clone()), Applied::Created),
        };
        let committed = self.store.commit(change).await?;
        let version = committed.versions.first().copied().unwrap_or(1);
        self.catalog.take(
            &key,
            Some(&Record { key: key.clone(), version, revision: committed.revision, value: value.into() }),
        )?;
        Ok(applied)
    }

    pub async fn delete_object(self: &Arc<Self>, kind: ate_object::Kind, name: &ObjectKey) -> Result<(), ControlError> {
        let (store_kind, shown) = match kind {
            ate_object::Kind::ActorTemplate => (Kind::Template, "ActorTemplate"),
            ate_object::Kind::WorkerPool => (Kind::Pool, "WorkerPool"),
            ate_object::Kind::SandboxConfig => (Kind::Config, "SandboxConfig"),
        };
        let key = object_key(store_kind, name);
        loop {
            // As the store has it: what is known here may be old, or not be readable here at all.
            let record = self.store.get(&key).await?;
            let record =
                record.ok_or_else(|| ControlError::new(Code::NotFound, format!("{shown} {name} not found")))?;
            let mut change = Change::new().guard(record.unchanged()).delete(key.clone());
            let (mut golden, mut uid) = (None, None);
            if store_kind == Kind::Template {
                let template = Read::<Template>::decode(record)?.value;
                change = change.guard(Guard::Empty(made_from(template.uid)));
                golden = self.golden_at_rest(&template).await?;
                uid = Some(template.uid);
            }
            let deleted = match &golden {
                Some(golden) => {
                    let change = change.guard(golden.record.unchanged()).delete(golden.record.key.clone());
                    self.delete_with(change, &golden.value).await
                }
                None => self.store.commit(change).await.map(drop),
            };
            return match deleted {
                // Known already: what has this name by now, if anything, is another.
                Ok(()) if uid.is_some_and(|uid| self.catalog.template_by_uid(uid).is_none()) => Ok(()),
                Ok(()) => self.catalog.take(&key, None),
                Err(CommitError::Conflict { guard: Guard::Empty(_) }) => Err(ControlError::precondition(format!(
                    "ActorTemplate {name} still has actors: delete them first (`ate get actors -A` lists them)"
                ))),
                // It has changed since it was read.
                Err(CommitError::Conflict { .. }) => continue,
                Err(error) => Err(error.into()),
            };
        }
    }

    pub fn templates(&self) -> Vec<Arc<Template>> {
        let mut templates = self.catalog.templates();
        templates.sort_by_key(|template| template.object.metadata.key());
        templates
    }

    pub fn template(&self, key: &ObjectKey) -> Option<Arc<Template>> {
        self.catalog.template(key)
    }

    pub fn pools(&self) -> Vec<Arc<WorkerPool>> {
        self.catalog.pools()
    }

    pub fn configs(&self) -> Vec<Arc<SandboxConfig>> {
        self.catalog.configs()
    }

    /// Says when anything of the catalog has changed.
    pub fn catalog_changes(&self) -> Waiter {
        self.catalog.changes()
    }

    /// Whichever has the name now: the one that is known here may be gone.
    pub(crate) async fn template_named(&self, name: &ObjectKey) -> Result<Option<Read<Template>>, ControlError> {
        let record = self.store.get(&object_key(Kind::Template, name)).await?;
        record.map(Read::decode).transpose()
    }

    /// As the store has it now.
    pub(crate) async fn stored_template(
        &self,
        template: &ObjectKey,
        uid: TemplateUid,
    ) -> Result<Read<Template>, ControlError> {
        let read = self.template_named(template).await?.filter(|read| read.value.uid == uid);
        read.ok_or_else(|| ControlError::new(Code::NotFound, format!("ActorTemplate {template} not found")))
    }

    /// A step towards its golden; refused once that is made, or could not be.
    pub(crate) async fn set_status(
        &self,
        template: &ObjectKey,
        uid: TemplateUid,
        guards: impl IntoIterator<Item = Guard>,
        change: impl FnOnce(&mut TemplateStatus),
    ) -> Result<(), ControlError> {
        let read = self.stored_template(template, uid).await?;
        if is_over(&read.value) {
            return Err(ControlError::conflict());
        }
        let mut value = read.value.clone();
        change(&mut value.status);
        let bytes = read.rewritten(&value);
        let change = guards.into_iter().fold(Change::new(), Change::guard).replace(&read.record, bytes.clone());
        let committed = self.store.commit(change).await?;
        let (key, version) = (read.record.key, read.record.version + 1);
        self.catalog
            .take(&key, Some(&Record { key: key.clone(), version, revision: committed.revision, value: bytes.into() }))
    }
}

/// What is applied, over what is there.
fn over<T: serde::de::DeserializeOwned + Serialize>(
    there: Option<Record>,
    object: &T,
) -> Result<Vec<u8>, ControlError> {
    Ok(match there {
        Some(record) => Read::<T>::decode(record)?.rewritten(object),
        None => encode(object),
    })
}

fn store_kind(object: &Object) -> Kind {
    match object {
        Object::ActorTemplate(_) => Kind::Template,
        Object::WorkerPool(_) => Kind::Pool,
        Object::SandboxConfig(_) => Kind::Config,
    }
}
