//! From what the control plane knows to what the wire says, and back.

use ate_actor::{Actor, Phase, SnapshotRef, Snapshots, Status as ActorStatus};
use ate_control::{Code, ControlError, Versioned, WorkerRecord};
use ate_proto::ateapi;
use tonic::Status;

/// Seconds, as in HTTP: what is refused now would be refused again before they have passed.
const RETRY_AFTER: &str = "retry-after";

pub(crate) fn status(error: ControlError) -> Status {
    let code = match error.code {
        Code::InvalidArgument => tonic::Code::InvalidArgument,
        Code::NotFound => tonic::Code::NotFound,
        Code::AlreadyExists => tonic::Code::AlreadyExists,
        Code::FailedPrecondition => tonic::Code::FailedPrecondition,
        Code::Aborted => tonic::Code::Aborted,
        Code::ResourceExhausted => tonic::Code::ResourceExhausted,
        Code::Unavailable => tonic::Code::Unavailable,
        Code::DeadlineExceeded => tonic::Code::DeadlineExceeded,
        Code::OutOfRange => tonic::Code::OutOfRange,
        Code::Internal => tonic::Code::Internal,
    };
    let mut status = Status::new(code, error.text);
    if let Some(after) = error.retry_after {
        status
            .metadata_mut()
            .insert(RETRY_AFTER, after.as_millis().div_ceil(1000).to_string().parse().expect("digits"));
    }
    status
}

pub(crate) fn actor(versioned: &Versioned) -> ateapi::Actor {
    let Versioned { actor, version } = versioned;
    let lease = actor.lease();
    let pod = lease.map(|lease| lease.pod.clone());
    ateapi::Actor {
        actor_id: actor.key.name.to_string(),
        version: i64::try_from(*version).unwrap_or(i64::MAX),
        actor_template_namespace: actor.template.namespace.clone(),
        actor_template_name: actor.template.name.clone(),
        status: actor_status(actor.phase.status()).into(),
        ateom_pod_namespace: pod.as_ref().map(|pod| pod.namespace.clone()).unwrap_or_default(),
        ateom_pod_name: pod.map(|pod| pod.name).unwrap_or_default(),
        ateom_pod_ip: lease.map(|_| LOOPBACK.to_owned()).unwrap_or_default(),
        in_progress_snapshot: in_progress(actor),
        ateom_pod_uid: lease.map(|lease| lease.worker.to_string()).unwrap_or_default(),
        latest_snapshot_info: latest_snapshot(actor),
        worker_selector: (!actor.selector.is_empty())
            .then(|| ateapi::Selector { match_labels: actor.selector.clone().into_iter().collect() }),
        worker_pool_name: lease.map(|lease| lease.pool.name.clone()).unwrap_or_default(),
        atespace: actor.key.atespace.to_string(),
    }
}

/// Workers of a lone machine have no address of their own; public clients want one that parses.
const LOOPBACK: &str = "127.0.0.1";

fn actor_status(status: ActorStatus) -> ateapi::actor::Status {
    match status {
        ActorStatus::Resuming => ateapi::actor::Status::Resuming,
        ActorStatus::Running => ateapi::actor::Status::Running,
        ActorStatus::Suspending => ateapi::actor::Status::Suspending,
        ActorStatus::Suspended => ateapi::actor::Status::Suspended,
        ActorStatus::Pausing => ateapi::actor::Status::Pausing,
        ActorStatus::Paused => ateapi::actor::Status::Paused,
    }
}

fn in_progress(actor: &Actor) -> String {
    match &actor.phase {
        Phase::Suspending { snapshot, .. } | Phase::Saving { snapshot, .. } => snapshot.prefix.clone(),
        _ => String::new(),
    }
}

fn latest_snapshot(actor: &Actor) -> Option<ateapi::SnapshotInfo> {
    use ateapi::snapshot_info::Data;
    let Snapshots { local, durable, uploading, paused } = &actor.snapshots;
    // One that is asked for is about to be; a pause is of its node until it is.
    let about_to_be = uploading.is_some() && !paused;
    let elsewhere = |prefix: &str| durable.as_ref().is_some_and(|durable| durable.prefix == prefix) || about_to_be;
    let (snapshot, node) = match (local, durable) {
        // One that is on its way to durable storage counts as being there: its name already says where.
        (Some((local, node)), _) if actor.phase == Phase::Paused || !elsewhere(&local.prefix) => (local, Some(node)),
        (Some((local, _)), _) => (local, None),
        (None, Some(durable)) => (durable, None),
        (None, None) => return None,
    };
    let SnapshotRef { prefix, .. } = snapshot;
    let (kind, data) = match node {
        Some(node) => {
            let local = ateapi::LocalSnapshotInfo {
                snapshot_prefix: prefix.clone(),
                node_vms_with_local_snapshots: vec![node.to_string()],
            };
            (ateapi::SnapshotType::Local, Data::Local(local))
        }
        None => (
            ateapi::SnapshotType::External,
            Data::External(ateapi::ExternalSnapshotInfo { snapshot_uri_prefix: prefix.clone() }),
        ),
    };
    Some(ateapi::SnapshotInfo { r#type: kind.into(), data: Some(data) })
}

pub(crate) fn worker(record: &WorkerRecord, version: u64) -> ateapi::Worker {
    let assigned = record.assigned.as_ref();
    ateapi::Worker {
        worker_namespace: record.lease.pod.namespace.clone(),
        worker_pool: record.lease.pool.name.clone(),
        worker_pod: record.lease.pod.name.clone(),
        actor_namespace: assigned.map(|assignee| assignee.template.namespace.clone()).unwrap_or_default(),
        actor_template: assigned.map(|assignee| assignee.template.name.clone()).unwrap_or_default(),
        actor_id: assigned.map(|assignee| assignee.key.name.to_string()).unwrap_or_default(),
        ip: LOOPBACK.to_owned(),
        version: i64::try_from(version).unwrap_or(i64::MAX),
        worker_pod_uid: record.lease.worker.to_string(),
        node_name: record.lease.node.to_string(),
        actor_atespace: assigned.map(|assignee| assignee.key.atespace.to_string()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use ate_actor::{Event, Intent, Lease, Scope, Start};
    use ate_name::{ActorKey, ActorUid, Generation, NodeName, ObjectKey, OpId, TemplateUid, WorkerUid};
    use ateapi::SnapshotType;

    use super::*;

    fn saved(intent: Intent, durable: bool) -> Actor {
        let actor = Actor::new(
            ActorUid::from_random([1; 16]),
            ActorKey::parse("space", "a").unwrap(),
            ObjectKey::new("ns", "t"),
            TemplateUid::from_random([2; 16]),
            String::new(),
            jiff::Timestamp::UNIX_EPOCH,
        );
        let op = OpId::from_random([3; 16]);
        let snapshot = SnapshotRef {
            prefix: "gs://bucket/a".into(),
            manifest: None,
            generation: Generation::new(1),
            scope: Scope::Full,
            stored_bytes: 0,
        };
        let saving = [Event::Save { op, intent, snapshot: snapshot.clone() }, Event::Captured { op }];
        let stored = Event::Stored { op, snapshot, durable };
        waking().into_iter().chain(saving).chain([stored]).fold(actor, |actor, event| actor.apply(event).unwrap().0)
    }

    fn waking() -> [Event; 2] {
        let op = OpId::from_random([4; 16]);
        let lease = Lease {
            worker: WorkerUid::from_random([5; 16]),
            pod: ObjectKey::new("ns", "w"),
            pool: ObjectKey::new("ns", "pool"),
            node: NodeName::new("n"),
        };
        [Event::Bind { lease, op, start: Start::Newest }, Event::Started { op }]
    }

    #[test]
    fn a_snapshot_is_external_only_if_it_outlives_its_node_or_is_about_to() {
        for (intent, durable, asleep, awake) in [
            (Intent::Suspend, true, SnapshotType::External, SnapshotType::External),
            (Intent::Idle, false, SnapshotType::External, SnapshotType::External),
            (Intent::Pause, false, SnapshotType::Local, SnapshotType::Local),
            (Intent::Pause, true, SnapshotType::Local, SnapshotType::External),
        ] {
            let sleeper = saved(intent, durable);
            let kind = |actor: &Actor| latest_snapshot(actor).unwrap().r#type();
            assert_eq!(kind(&sleeper), asleep, "{intent:?}, durable {durable}");
            let woken = waking().into_iter().fold(sleeper, |actor, event| actor.apply(event).unwrap().0);
            assert_eq!(kind(&woken), awake, "{intent:?}, durable {durable}, woken");
        }
    }
}
