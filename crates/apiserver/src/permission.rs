//! What each call needs. One table, beside the services; a test fails on a call that is not in it.

/// What a caller must be allowed to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// Look at actors, workers, objects, history.
    Read,
    /// Change one actor, or talk to it, in its atespace.
    Actor,
    /// Change atespaces and objects.
    Administer,
    /// Route: wake actors and learn where they are. For routers.
    Route,
    /// Be a node of the instance.
    Serve,
    /// Give a node orders. For the control plane.
    Order,
    /// Destroy everything. For tests of the public API only.
    Wipe,
    /// Anyone who reaches the listener.
    Anyone,
}

pub const PERMISSIONS: &[(&str, Permission)] = &[
    ("ateapi.Control/GetActor", Permission::Read),
    ("ateapi.Control/CreateActor", Permission::Actor),
    ("ateapi.Control/UpdateActor", Permission::Actor),
    ("ateapi.Control/SuspendActor", Permission::Actor),
    ("ateapi.Control/PauseActor", Permission::Actor),
    ("ateapi.Control/ResumeActor", Permission::Actor),
    ("ateapi.Control/DeleteActor", Permission::Actor),
    ("ateapi.Control/ListWorkers", Permission::Read),
    ("ateapi.Control/ListActors", Permission::Read),
    ("ateapi.Control/CreateAtespace", Permission::Administer),
    ("ateapi.Control/GetAtespace", Permission::Read),
    ("ateapi.Control/ListAtespaces", Permission::Read),
    ("ateapi.Control/DeleteAtespace", Permission::Administer),
    ("ateapi.Control/DebugClear", Permission::Wipe),
    ("ateapi.SessionIdentity/MintJWT", Permission::Anyone),
    ("ateapi.SessionIdentity/MintCert", Permission::Anyone),
    ("ate.v1.Substrate/Apply", Permission::Administer),
    ("ate.v1.Substrate/GetObject", Permission::Read),
    ("ate.v1.Substrate/ListObjects", Permission::Read),
    ("ate.v1.Substrate/DeleteObject", Permission::Administer),
    ("ate.v1.Substrate/Activate", Permission::Route),
    ("ate.v1.Substrate/WatchAssignments", Permission::Route),
    ("ate.v1.Substrate/WatchActors", Permission::Read),
    ("ate.v1.Substrate/GetHistory", Permission::Read),
    ("ate.v1.Substrate/Logs", Permission::Actor),
    ("ate.v1.Substrate/Exec", Permission::Actor),
    ("ate.v1.Substrate/GetQuota", Permission::Read),
    ("ate.v1.Substrate/SetQuota", Permission::Administer),
    ("ate.v1.Substrate/RestartActor", Permission::Actor),
    ("ate.v1.Substrate/ForkActor", Permission::Actor),
    ("ate.v1.Substrate/UnstickActor", Permission::Administer),
    ("ate.v1.Substrate/ForceDeleteActor", Permission::Administer),
    ("ate.v1.Substrate/ListAudit", Permission::Administer),
    ("ate.v1.Substrate/RenewNode", Permission::Serve),
    ("ate.v1.Substrate/GetInfo", Permission::Anyone),
    ("ate.v1.Node/Carry", Permission::Order),
    ("ate.v1.Node/Run", Permission::Order),
    ("ate.v1.Node/Read", Permission::Order),
    ("ate.v1.Node/Listen", Permission::Order),
];

#[cfg(test)]
mod tests {
    use super::*;
    use prost_types::FileDescriptorSet;
    use tonic::codegen::Bytes;

    #[test]
    fn every_call_declares_its_permission() {
        let descriptors: FileDescriptorSet =
            prost::Message::decode(Bytes::from_static(ate_proto::FILE_DESCRIPTOR_SET)).unwrap();
        let calls: Vec<String> = descriptors
            .file
            .iter()
            .flat_map(|file| {
                file.service.iter().flat_map(move |service| {
                    service
                        .method
                        .iter()
                        .map(move |method| format!("{}.{}/{}", file.package(), service.name(), method.name()))
                })
            })
            .collect();
        assert!(!calls.is_empty());
        for call in &calls {
            assert_eq!(PERMISSIONS.iter().filter(|(name, _)| name == call).count(), 1, "{call}");
        }
        assert_eq!(PERMISSIONS.len(), calls.len(), "a permission for a call that does not exist");
    }
}
