//! `/run/ate`: what an actor can read about itself. Rewritten at each launch, so a clone of a golden snapshot sees its own.
//!
//! Files that were open when a snapshot was taken must exist when it is restored, so the set of names never shrinks.

use std::io;
use std::path::Path;

use ate_orders::Identity;

use crate::link::Source;

/// Fresh bytes for whoever keeps a random generator of their own: its state was cloned with the memory.
const ENTROPY_BYTES: usize = 64;

/// Before anyone is here. The names must be there when the box is created.
pub(crate) fn blank(directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    for name in ["actor-id", "actor-uid", "atespace", "template", "generation", "entropy", "notice"] {
        std::fs::write(directory.join(name), "")?;
    }
    std::fs::write(directory.join("resolv.conf"), format!("nameserver {}\n", ate_network::GATEWAY_V4))
}

pub(crate) fn write(directory: &Path, identity: &Identity, source: Source, now: jiff::Timestamp) -> io::Result<()> {
    let mut entropy = [0; ENTROPY_BYTES];
    rand::fill(&mut entropy);
    let kind = if matches!(source, Source::Image { .. }) { "restore" } else { "boot" };
    let notice = serde_json::json!({"kind": kind, "generation": identity.generation, "time": now.to_string()});
    let files: [(&str, Vec<u8>); 7] = [
        ("actor-id", identity.key.name.as_str().into()),
        ("actor-uid", identity.uid.to_string().into()),
        ("atespace", identity.key.atespace.as_str().into()),
        ("template", identity.template.to_string().into()),
        ("generation", identity.generation.to_string().into()),
        ("entropy", entropy.into()),
        // Last: whoever is woken by it finds the others in place.
        ("notice", notice.to_string().into()),
    ];
    for (name, contents) in files {
        // Renamed into place: a reader never sees half a name, and a watcher sees one event.
        let temporary = directory.join(format!(".{name}"));
        std::fs::write(&temporary, contents)?;
        std::fs::rename(&temporary, directory.join(name))?;
    }
    Ok(())
}
