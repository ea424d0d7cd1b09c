//! Images without a builder and without a registry, for demos and tests.
//!
//! The same content gives the same digests, on every machine and at any time: entries are sorted, owned by root,
//! without times, with one of two modes; the layer is not compressed, so no version of a compressor decides.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ate_name::Digest;
use serde::Serialize;
use tar::{Builder, EntryType, Header};

use crate::document::{
    Architecture, CONFIG, ConfigFile, Descriptor, Document, INDEX, ImageConfig, LAYER, MANIFEST, OciDigest, Platform,
    Rootfs,
};
use crate::meter::Hashing;
use crate::tree::EntryPath;

/// What an image is made of.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub config: ImageConfig,
    /// For each architecture, what goes into its one layer; of two contents with the same path, the later wins.
    pub content: BTreeMap<Architecture, Vec<Content>>,
}

#[derive(Clone, Debug)]
pub enum Content {
    /// Everything in this directory, at the root of the image.
    Directory(PathBuf),
    /// One file, at `to` in the image.
    File { from: PathBuf, to: String },
}

#[derive(Debug, thiserror::Error)]
pub enum PackError {
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot pack {}: only directories, plain files and symbolic links go into an image", path.display())]
    Kind { path: PathBuf },
    #[error("cannot pack {:?}: the path must lie in the image, without \"..\" and names that begin with .wh.", path)]
    Path { path: PathBuf },
    #[error("cannot pack {:?}: one content has a directory there, and another something else", path)]
    Conflict { path: PathBuf },
    #[error("an image needs content for at least one architecture")]
    Empty,
}

/// Writes the image as an OCI layout into `layout`, beside what is there already, and returns the digest of its index:
/// `oci-layout://<layout>@sha256:<digest>`.
pub fn pack(recipe: &Recipe, layout: &Path) -> Result<Digest, PackError> {
    if recipe.content.is_empty() {
        return Err(PackError::Empty);
    }
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).map_err(io("create", &blobs))?;
    let mut manifests = Vec::new();
    for (architecture, content) in &recipe.content {
        let tree = collect(content)?;
        let layer = write_blob(&blobs, LAYER, |file| write_layer(&tree, file))?;
        let config = ConfigFile {
            architecture: architecture.as_str().to_owned(),
            os: "linux".to_owned(),
            config: recipe.config.clone(),
            rootfs: Rootfs { r#type: "layers".to_owned(), diff_ids: vec![layer.digest] },
        };
        let config = write_json(&blobs, CONFIG, &config)?;
        let mut manifest = write_json(&blobs, MANIFEST, &Document::manifest(config, vec![layer]))?;
        let platform =
            Platform { architecture: architecture.as_str().to_owned(), os: "linux".to_owned(), variant: None };
        manifest.platform = Some(platform);
        manifests.push(manifest);
    }
    let index = write_json(&blobs, INDEX, &Document::index(manifests))?;
    let digest = index.digest.0;
    write_file(layout, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    write_file(layout, "index.json", &json(&Document::index(vec![index])))?;
    Ok(digest)
}

/// Writes the image as a tar of an OCI layout: `oci-archive://<archive>@sha256:<digest>`.
pub fn pack_archive(recipe: &Recipe, archive: &Path) -> Result<Digest, PackError> {
    let parent = archive.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let layout = tempfile::tempdir_in(parent).map_err(io("write to", parent))?;
    let digest = pack(recipe, layout.path())?;
    let tree = collect(&[Content::Directory(layout.path().to_owned())])?;
    let mut file = new_file(parent)?;
    write_layer(&tree, file.as_file_mut())?;
    file.persist(archive).map_err(|error| io("write", archive)(error.error))?;
    Ok(digest)
}

enum Item {
    Directory,
    File(PathBuf),
    Symlink(PathBuf),
}

/// By path in the image. Paths sort by their parts, so a directory comes before what it holds.
type Tree = BTreeMap<PathBuf, Item>;

fn collect(content: &[Content]) -> Result<Tree, PackError> {
    let mut tree = Tree::new();
    for content in content {
        match content {
            Content::Directory(directory) => collect_directory(&mut tree, directory, Path::new(""))?,
            Content::File { from, to } => {
                let path = || PackError::Path { path: PathBuf::from(to) };
                let to = EntryPath::parse(to.as_bytes()).map_err(|_| path())?;
                let name = to.name().ok_or_else(path)?;
                let item = item(from)?;
                if matches!(item, Item::Directory) {
                    return Err(PackError::Kind { path: from.clone() });
                }
                insert(&mut tree, to.parent().join(name), item)?;
            }
        }
    }
    Ok(tree)
}

fn collect_directory(tree: &mut Tree, from: &Path, to: &Path) -> Result<(), PackError> {
    for entry in fs::read_dir(from).map_err(io("list", from))? {
        let entry = entry.map_err(io("list", from))?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        let item = item(&from)?;
        let is_directory = matches!(item, Item::Directory);
        insert(tree, to.clone(), item)?;
        if is_directory {
            collect_directory(tree, &from, &to)?;
        }
    }
    Ok(())
}

fn item(path: &Path) -> Result<Item, PackError> {
    let kind = fs::symlink_metadata(path).map_err(io("inspect", path))?.file_type();
    if kind.is_dir() {
        Ok(Item::Directory)
    } else if kind.is_file() {
        Ok(Item::File(path.to_owned()))
    } else if kind.is_symlink() {
        fs::read_link(path).map(Item::Symlink).map_err(io("read", path))
    } else {
        Err(PackError::Kind { path: path.to_owned() })
    }
}

fn insert(tree: &mut Tree, path: PathBuf, item: Item) -> Result<(), PackError> {
    if path.iter().any(|part| part.as_bytes().starts_with(b".wh.")) {
        return Err(PackError::Path { path });
    }
    for parent in path.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty()) {
        if !matches!(tree.entry(parent.to_owned()).or_insert(Item::Directory), Item::Directory) {
            return Err(PackError::Conflict { path });
        }
    }
    if matches!(tree.get(&path), Some(Item::Directory)) && !matches!(item, Item::Directory) {
        return Err(PackError::Conflict { path });
    }
    tree.insert(path, item);
    Ok(())
}

fn write_layer(tree: &Tree, file: &mut File) -> Result<(), PackError> {
    let mut archive = Builder::new(io::BufWriter::new(file));
    for (path, item) in tree {
        let mut header = Header::new_gnu();
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(0);
        let appended = match item {
            Item::Directory => {
                header.set_entry_type(EntryType::Directory);
                header.set_mode(0o755);
                archive.append_data(&mut header, path, io::empty())
            }
            Item::Symlink(target) => {
                header.set_entry_type(EntryType::Symlink);
                header.set_mode(0o777);
                archive.append_link(&mut header, path, target)
            }
            Item::File(from) => {
                // Read whole, so that the header and the data agree even if the file changes now.
                let data = fs::read(from).map_err(io("read", from))?;
                let mode = fs::metadata(from).map_err(io("inspect", from))?.permissions().mode();
                // A checkout keeps only this bit; the others depend on somebody's umask.
                header.set_mode(if mode & 0o111 == 0 { 0o644 } else { 0o755 });
                header.set_size(data.len() as u64);
                archive.append_data(&mut header, path, data.as_slice())
            }
        };
        appended.map_err(io("pack", path))?;
    }
    let finished = archive.into_inner().and_then(|mut writer| writer.flush());
    finished.map_err(io("write", Path::new("the layer")))
}

fn write_blob(
    blobs: &Path,
    media_type: &str,
    write: impl FnOnce(&mut File) -> Result<(), PackError>,
) -> Result<Descriptor, PackError> {
    let mut file = new_file(blobs)?;
    write(file.as_file_mut())?;
    let written = file.reopen().and_then(|file| Hashing::new(file).finish());
    let (digest, size) = written.map_err(io("read", file.path()))?;
    let path = blobs.join(digest.to_string());
    file.persist(&path).map_err(|error| io("write", &path)(error.error))?;
    Ok(Descriptor { media_type: media_type.to_owned(), digest: OciDigest(digest), size, platform: None })
}

fn write_json(blobs: &Path, media_type: &str, value: &impl Serialize) -> Result<Descriptor, PackError> {
    write_blob(blobs, media_type, |file| file.write_all(&json(value)).map_err(io("write to", blobs)))
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("our documents have no keys but strings")
}

fn write_file(directory: &Path, name: &str, bytes: &[u8]) -> Result<(), PackError> {
    let path = directory.join(name);
    let mut file = new_file(directory)?;
    file.write_all(bytes).map_err(io("write", &path))?;
    file.persist(&path).map_err(|error| io("write", &path)(error.error))?;
    Ok(())
}

fn new_file(directory: &Path) -> Result<tempfile::NamedTempFile, PackError> {
    let file = tempfile::Builder::new().permissions(Permissions::from_mode(0o644)).tempfile_in(directory);
    file.map_err(io("write to", directory))
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PackError {
    move |source| PackError::Io { action, path: path.to_owned(), source }
}
