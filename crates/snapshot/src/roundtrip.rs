//! A snapshot's whole way, in streams, as a node does it.

use std::collections::BTreeMap;
use std::error::Error;

use ate_name::{Digest, Generation, NodeName};

use crate::manifest::tests::sample;
use crate::seal::{Opener, Place, Sealer};
use crate::{
    Content, DataKey, Expectation, FileName, Hashing, Host, InstanceKey, Location, Manifest, Scope, SnapshotKey,
    WrappedKey, delta,
};

/// What object storage and the actor's record hold after a suspend.
#[derive(Clone)]
struct Suspended {
    objects: BTreeMap<String, Vec<u8>>,
    key: SnapshotKey,
    manifest: Digest,
    wrapped: WrappedKey,
}

fn golden_image() -> Vec<u8> {
    (0..50_000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect()
}

fn memory() -> Vec<u8> {
    let mut image = golden_image();
    image.splice(40_960..40_960, [7; 4096]);
    image
}

fn suspend() -> Suspended {
    let mut manifest = sample();
    let key = SnapshotKey {
        location: Location::parse("s3://bucket/demo/").unwrap(),
        actor: manifest.actor.key.clone(),
        id: manifest.id(),
    };
    let data_key = DataKey::from_random([8; 32]);
    let wrapped = InstanceKey::from_bytes([1; 32]).wrap(&data_key, key.id.actor, [3; 12]);

    let name = FileName::parse("image").unwrap();
    let place = Place { snapshot: key.id, file: &name };
    let mut sealer = Sealer::new(&data_key, place, [4; 7], Hashing::new(Vec::new())).unwrap();
    delta::encode(Some(&golden_image()), &memory(), &mut sealer).unwrap();
    let (object, stored) = sealer.finish().unwrap().0.finish();

    manifest.image = Some(Content::of(&memory()));
    manifest.files[0].stored = stored;
    let bytes = manifest.to_bytes().unwrap();
    let digest = Content::of(&bytes).digest;
    let objects = [(key.file(&name), object), (key.manifest(), bytes)].into();
    Suspended { objects, key, manifest: digest, wrapped }
}

fn resume(suspended: &Suspended) -> Result<Vec<u8>, Box<dyn Error>> {
    let key = &suspended.key;
    let manifest = Manifest::read(&suspended.objects[&key.manifest()], &suspended.manifest)?;
    let host = Host {
        node: NodeName::new("n1"),
        sandbox_class: "gvisor".into(),
        architecture: "amd64".into(),
        cpu_features: manifest.cpu_features.clone(),
        platform: "systrap".into(),
    };
    let expectation = Expectation {
        actor: key.id.actor,
        template: sample().template,
        scope: Scope::Full,
        generation: Generation::new(8),
        workload: sample().workload,
    };
    manifest.admit(&host, &expectation)?;
    let data_key = InstanceKey::from_bytes([1; 32]).unwrap(&suspended.wrapped, key.id.actor)?;
    assert_eq!(manifest.encryption.map(|encryption| encryption.key), Some(data_key.id()));

    let file = &manifest.files[0];
    let mut image = vec![0; usize::try_from(manifest.image.ok_or("no image")?.length)?];
    let mut source = Hashing::new(&suspended.objects[&key.file(&file.name)][..]);
    let place = Place { snapshot: manifest.id(), file: &file.name };
    delta::decode(Some(&golden_image()), Opener::new(&data_key, place, &mut source)?, &mut image)?;
    assert_eq!(source.finish().1, file.stored);
    Ok(image)
}

#[test]
fn a_suspended_image_comes_back_and_is_small() {
    let suspended = suspend();
    let stored: usize = suspended.objects.values().map(Vec::len).sum();
    assert!(stored < 10_000, "{stored} bytes");
    assert_eq!(resume(&suspended).unwrap(), memory());
}

#[test]
fn no_flip_or_cut_of_any_object_passes() {
    let good = suspend();
    for (name, object) in &good.objects {
        for at in (0..object.len()).step_by((object.len() / 200).max(1)) {
            let mut bad = good.clone();
            bad.objects.get_mut(name).unwrap()[at] ^= 1;
            assert!(resume(&bad).is_err(), "{name} flipped at {at}");
            bad.objects.get_mut(name).unwrap().truncate(at);
            assert!(resume(&bad).is_err(), "{name} cut at {at}");
        }
    }
}
