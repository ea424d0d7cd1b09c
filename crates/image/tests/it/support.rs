use std::error::Error;
use std::fs;
use std::path::Path;

use ate_image::{ImageStore, Limits, Reference};
use ate_name::Digest;
use serde_json::{Value, json};

/// Leaves a test that cannot run, and says why.
macro_rules! needs_root {
    () => {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: an image store needs root");
            return;
        }
    };
}
pub(crate) use needs_root;

pub(crate) fn store(directory: &Path) -> ImageStore {
    ImageStore::open(&directory.join("store"), Limits::default()).unwrap()
}

pub(crate) fn host_architecture() -> &'static str {
    ate_image::Architecture::HOST.as_str()
}

pub(crate) fn sha256(bytes: &[u8]) -> Digest {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes);
    Digest::from_bytes(digest.as_ref().try_into().unwrap())
}

/// A tar of plain files; a path that ends with a slash is a directory.
pub(crate) fn tar(files: &[(&str, &str)]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, data) in files {
        let mut header = tar::Header::new_gnu();
        let is_directory = path.ends_with('/');
        header.set_entry_type(if is_directory { tar::EntryType::Directory } else { tar::EntryType::Regular });
        header.set_mode(if is_directory { 0o755 } else { 0o644 });
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(data.len() as u64);
        archive.append_data(&mut header, path, data.as_bytes()).unwrap();
    }
    archive.into_inner().unwrap()
}

/// An OCI layout, written as a stranger would: any bytes, any claims.
pub(crate) struct Layout<'a>(pub(crate) &'a Path);

impl Layout<'_> {
    pub(crate) fn blob(&self, bytes: &[u8]) -> Digest {
        let blobs = self.0.join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        let digest = sha256(bytes);
        fs::write(blobs.join(digest.to_string()), bytes).unwrap();
        digest
    }

    pub(crate) fn descriptor(&self, media_type: &str, bytes: &[u8]) -> Value {
        json!({ "mediaType": media_type, "digest": format!("sha256:{}", self.blob(bytes)), "size": bytes.len() })
    }

    /// An image of these uncompressed layers, lowest first.
    pub(crate) fn image(&self, layers: &[Vec<u8>], config: Value) -> Reference {
        let diff_ids: Vec<_> = layers.iter().map(|layer| format!("sha256:{}", sha256(layer))).collect();
        let config = json!({
            "architecture": host_architecture(), "os": "linux", "config": config,
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        });
        let config = self.descriptor("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
        let layer = |layer: &Vec<u8>| self.descriptor("application/vnd.oci.image.layer.v1.tar", layer);
        let layers: Vec<_> = layers.iter().map(layer).collect();
        let manifest = json!({ "schemaVersion": 2, "config": config, "layers": layers });
        self.reference(self.blob(manifest.to_string().as_bytes()))
    }

    pub(crate) fn reference(&self, digest: Digest) -> Reference {
        Reference::parse(&format!("oci-layout://{}@sha256:{digest}", self.0.display())).unwrap()
    }
}

/// The error with all its causes, as a person reads it.
pub(crate) fn text(error: &dyn Error) -> String {
    std::iter::successors(Some(error), |error| (*error).source())
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

pub(crate) fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
