//! Snapshots on this node's disk, and on their way to and from durable storage.
//!
//! ```text
//!   save:  image ─▶ delta against the golden ─▶ seal ─▶ file      archive ─▶ zstd ─▶ seal ─▶ file      manifest last
//!   load:  manifest (its digest is in the actor's record) ─▶ file ─▶ open ─▶ delta ─▶ straight into memory
//! ```

use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ate_blob::Blobs;
use ate_name::{ActorUid, Digest};
use ate_orders::Recent;
use ate_snapshot::seal::{Opener, Place, Sealer};
use ate_snapshot::{
    Algorithm, Base, Content, DataKey, Encryption, FileName, Hashing, MANIFEST, Manifest, Role, SnapshotKey, delta,
};
use ate_sys::Memory;
use parking_lot::Mutex;

use crate::bases::{Bases, LoadedBase};
use crate::tier::Flights;
use crate::{NodeError, evict, moving};

/// The mark of a snapshot that is in no durable storage, also if there is none: its place there, and the digest of its manifest,
/// which nobody else tells whoever brings it there.
pub(crate) const ONLY_HERE: &str = "only-here";

/// For archives; the images' own codec chooses for itself.
const ARCHIVE_LEVEL: i32 = 1;

#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("cannot {what} of snapshot {key}")]
    Io { what: &'static str, key: String, source: io::Error },
    #[error("snapshot {key} is not usable: {reason}")]
    Unusable { key: String, reason: String },
    #[error("snapshot {key} is not in {whence}")]
    Missing { key: String, whence: String },
    #[error(
        "this node was not heard of all the while that snapshot {key} was uploaded: it is asked for again once it is"
    )]
    Unheard { key: String },
    #[error("durable storage failed for snapshot {key}")]
    Storage { key: String, source: Box<ate_blob::BlobError> },
}

/// An image or archive to be stored.
pub(crate) struct Unsaved<'a> {
    pub(crate) manifest: Manifest,
    pub(crate) image: Option<&'a [u8]>,
    pub(crate) archive: Option<File>,
    pub(crate) base: Option<(SnapshotKey, Arc<LoadedBase>)>,
    pub(crate) key: Option<&'a DataKey>,
}

#[derive(Debug)]
pub(crate) struct Snapshots {
    directory: PathBuf,
    pub(crate) scratch: PathBuf,
    bases: Bases,
    /// Beyond this disk; `None` if this disk is all there is.
    pub(crate) blobs: Option<Blobs>,
    /// Complete, and not yet in durable storage. Each has a mark beside its files, so that they are known after a restart, also one
    /// with other storage.
    only_here: Mutex<HashSet<SnapshotKey>>,
    /// Told to be removed: whoever would write or upload them comes late.
    forgotten: Mutex<Recent<SnapshotKey>>,
    pub(crate) flights: Flights<SnapshotKey>,
}

impl Snapshots {
    /// What an earlier process was writing when it ended is removed: whoever still needs it writes it anew.
    pub(crate) fn open(directory: &Path, scratch: &Path, blobs: Option<Blobs>) -> Result<Self, NodeError> {
        remove_halves(directory);
        evict::remove_asides(scratch);
        moving::check(directory, blobs.is_some())?;
        let marked = if blobs.is_some() { marked(directory) } else { HashSet::new() };
        Ok(Self {
            directory: directory.to_owned(),
            scratch: scratch.to_owned(),
            bases: Bases::default(),
            blobs,
            only_here: Mutex::new(marked),
            forgotten: Mutex::default(),
            flights: Flights::default(),
        })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Those that wait to be uploaded, or were never meant to be.
    pub(crate) fn only_here(&self) -> Vec<String> {
        if self.blobs.is_none() {
            return Vec::new();
        }
        self.marked_here().iter().map(ToString::to_string).collect()
    }

    pub(crate) fn marked_here(&self) -> Vec<SnapshotKey> {
        self.only_here.lock().iter().cloned().collect()
    }

    /// Sets room aside on the disk, so that a full one is found out while the actor still lives.
    pub(crate) fn reserve(&self, bytes: u64) -> io::Result<File> {
        let file = self.scratch_file()?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)?;
        Ok(file)
    }

    /// Where a worker may write an archive that will be stored later, or what a durable directory lies in; it has no name,
    /// so nothing is left of it.
    pub(crate) fn scratch_file(&self) -> io::Result<File> {
        let fd = rustix::fs::open(
            &self.scratch,
            rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::from_raw_mode(0o600),
        )?;
        Ok(File::from(fd))
    }

    pub(crate) fn path(&self, key: &SnapshotKey) -> PathBuf {
        self.directory.join(key.id.actor.to_string()).join(key.id.to_string())
    }

    /// Whether there is any of this actor.
    pub(crate) fn is_any_here(&self, actor: ActorUid) -> bool {
        self.directory.join(actor.to_string()).exists()
    }

    pub(crate) fn is_here(&self, key: &SnapshotKey) -> bool {
        self.path(key).join(MANIFEST).exists()
    }

    /// The digest of the manifest, if the snapshot is complete and outlives a power cut. An error says nothing of whether it is
    /// there: whoever takes it for missing would write it once more, as another. Blocks.
    pub(crate) fn stored(&self, key: &SnapshotKey) -> io::Result<Option<(Digest, u64)>> {
        let directory = self.path(key);
        let Some(bytes) = if_there(std::fs::read(directory.join(MANIFEST)))? else { return Ok(None) };
        let Ok(manifest) = Manifest::read_unverified(&bytes) else { return Ok(None) };
        for file in &manifest.files {
            let there = if_there(directory.join(file.name.as_str()).metadata())?;
            if there.is_none_or(|there| there.len() != file.stored.length) {
                return Ok(None);
            }
        }
        // Whoever wrote it may have been killed on the way from the one to the other.
        sync_up(&directory)?;
        let size = manifest.files.iter().map(|file| file.stored.length).sum();
        Ok(Some((Content::of(&bytes).digest, size)))
    }

    /// Writes a snapshot; it exists once its manifest does. Blocks.
    pub(crate) fn save(&self, key: &SnapshotKey, unsaved: Unsaved<'_>) -> Result<(Digest, u64), SnapshotError> {
        self.write_files(key, unsaved).inspect_err(|_| self.forget_half(key))
    }

    fn write_files(&self, key: &SnapshotKey, mut unsaved: Unsaved<'_>) -> Result<(Digest, u64), SnapshotError> {
        let directory = self.path(key);
        let io = |what| move |source| SnapshotError::Io { what, key: key.to_string(), source };
        std::fs::create_dir_all(&directory).map_err(io("make the directory"))?;
        // What is there is not whole: until this is done there is no snapshot.
        let _ = std::fs::remove_file(directory.join(MANIFEST));
        if let Some(image) = unsaved.image {
            unsaved.manifest.image = Some(Content::of(image));
            let name = FileName::parse("memory").expect("a constant name");
            let base = unsaved.base.as_ref();
            let mut stored = self
                .write(key, &directory, &name, unsaved.key, |out| {
                    delta::encode(base.map(|(_, base)| &base.bytes[..]), image, out).map(drop).map_err(io::Error::other)
                })
                .map_err(io("write the image"))?;
            let mut used = base;
            if let Some((_, base)) = base
                && !delta::worth_it(stored.length, base.stored)
            {
                stored = self
                    .write(key, &directory, &name, unsaved.key, |out| {
                        delta::encode(None, image, out).map(drop).map_err(io::Error::other)
                    })
                    .map_err(io("write the image"))?;
                used = None;
            }
            unsaved.manifest.base = used.map(|(prefix, base)| Base { prefix: prefix.clone(), image: base.content });
            unsaved.manifest.files.push(ate_snapshot::File { name, role: Role::Image, stored });
        }
        if let Some(mut archive) = unsaved.archive.take() {
            let name = FileName::parse("data").expect("a constant name");
            archive.rewind().map_err(io("rewind the archive"))?;
            let stored = self
                .write(key, &directory, &name, unsaved.key, |out| {
                    zstd::stream::copy_encode(archive, out, ARCHIVE_LEVEL)
                })
                .map_err(io("write the archive"))?;
            unsaved.manifest.files.push(ate_snapshot::File { name, role: Role::Durable, stored });
        }
        let (digest, size) = self.complete(key, &mut unsaved.manifest, unsaved.key)?;
        if unsaved.manifest.golden
            && let (Some(image), Some(content)) = (unsaved.image, unsaved.manifest.image)
        {
            self.bases.keep(key, &Arc::new(LoadedBase { content, stored: size, bytes: image.to_vec() }));
        }
        Ok((digest, size))
    }

    /// Writes the manifest of a snapshot whose files are there; returns its digest and how much they occupy.
    pub(crate) fn complete(
        &self,
        key: &SnapshotKey,
        manifest: &mut Manifest,
        seal: Option<&DataKey>,
    ) -> Result<(Digest, u64), SnapshotError> {
        let directory = self.path(key);
        let io = |what| move |source| SnapshotError::Io { what, key: key.to_string(), source };
        manifest.encryption = seal.map(|key| Encryption { algorithm: Algorithm::Aes256GcmStream, key: key.id() });
        let bytes = seal
            .map_or(Ok(()), |seal| manifest.prove(seal))
            .and_then(|()| manifest.to_bytes())
            .map_err(|error| SnapshotError::Unusable { key: key.to_string(), reason: error.to_string() })?;
        // Without durable storage, too: the next start may have one, and must not take for a copy what is nowhere else.
        let digest = Content::of(&bytes).digest;
        let mark = format!("{key}\n{digest}\n");
        write_durably(&directory, ONLY_HERE, mark.as_bytes()).map_err(io("mark the snapshot"))?;
        self.only_here.lock().insert(key.clone());
        write_durably(&directory, MANIFEST, &bytes).map_err(io("write the manifest"))?;
        Ok((digest, manifest.files.iter().map(|file| file.stored.length).sum()))
    }

    pub(crate) fn write(
        &self,
        key: &SnapshotKey,
        directory: &Path,
        name: &FileName,
        seal: Option<&DataKey>,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<Content> {
        let file = File::create(directory.join(name.as_str()))?;
        let mut out = Hashing::new(BufWriter::with_capacity(1 << 20, file));
        match seal {
            Some(data_key) => {
                let mut nonce = [0; 7];
                rand::fill(&mut nonce);
                let mut sealer = Sealer::new(data_key, Place { snapshot: key.id, file: name }, nonce, out)?;
                fill(&mut sealer)?;
                out = sealer.finish()?.0;
            }
            None => fill(&mut out)?,
        }
        let (out, content) = out.finish();
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        Ok(content)
    }

    fn manifest_bytes(&self, key: &SnapshotKey) -> Result<Vec<u8>, SnapshotError> {
        std::fs::read(self.path(key).join(MANIFEST)).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => {
                SnapshotError::Missing { key: key.to_string(), whence: "this node's disk".to_owned() }
            }
            _ => SnapshotError::Io { what: "read the manifest", key: key.to_string(), source },
        })
    }

    /// The manifest that the actor's record speaks of, and no other.
    pub(crate) fn manifest(&self, key: &SnapshotKey, digest: &Digest) -> Result<Manifest, SnapshotError> {
        let bytes = self.manifest_bytes(key)?;
        Manifest::read(&bytes, digest)
            .map_err(|error| SnapshotError::Unusable { key: key.to_string(), reason: error.to_string() })
    }

    /// Decodes the image into `memory`; returns its length. Blocks.
    pub(crate) fn image_into(
        &self,
        key: &SnapshotKey,
        manifest: &Manifest,
        data_key: Option<&DataKey>,
        memory: &mut Memory,
    ) -> Result<usize, SnapshotError> {
        let unusable = |reason: String| SnapshotError::Unusable { key: key.to_string(), reason };
        let image = manifest.image.ok_or_else(|| unusable("it holds no memory".into()))?;
        let length = usize::try_from(image.length).map_err(|_| unusable("its image is larger than memory".into()))?;
        let base = manifest.base.as_ref().map(|base| self.base(&base.prefix, base.image.digest)).transpose()?;
        memory.reserve(length).map_err(|source| SnapshotError::Io {
            what: "make room for the image",
            key: key.to_string(),
            source,
        })?;
        let mut mapping = memory.map(length).map_err(|source| SnapshotError::Io {
            what: "map the image",
            key: key.to_string(),
            source,
        })?;
        self.read(key, manifest, Role::Image, data_key, |stored| {
            delta::decode(base.as_ref().map(|base| &base.bytes[..]), stored, &mut mapping)
                .map_err(|error| error.to_string())
        })?;
        Ok(length)
    }

    /// The archive of the durable directory as a file of its own; `None` if the snapshot has none. Blocks.
    pub(crate) fn archive(
        &self,
        key: &SnapshotKey,
        manifest: &Manifest,
        data_key: Option<&DataKey>,
    ) -> Result<Option<File>, SnapshotError> {
        if !manifest.files.iter().any(|file| file.role == Role::Durable) {
            return Ok(None);
        }
        let mut file = self.scratch_file().map_err(|source| SnapshotError::Io {
            what: "make room for the archive",
            key: key.to_string(),
            source,
        })?;
        let mut out = Noting { file: &mut file, failed: None };
        let read = self.read(key, manifest, Role::Durable, data_key, |stored| {
            zstd::stream::copy_decode(stored, &mut out).map_err(|error| error.to_string())
        });
        // What cannot be written is no fault of what is read.
        if let Some(source) = out.failed {
            return Err(SnapshotError::Io { what: "unpack the archive", key: key.to_string(), source });
        }
        read?;
        file.rewind().map_err(|source| SnapshotError::Io {
            what: "rewind the archive",
            key: key.to_string(),
            source,
        })?;
        Ok(Some(file))
    }

    /// Whether its manifest is the one that was written. A mark of an earlier build does not tell. Blocks.
    pub(crate) fn is_as_marked(&self, key: &SnapshotKey, manifest: &Digest) -> Result<(), SnapshotError> {
        let mark = if_there(std::fs::read_to_string(self.path(key).join(ONLY_HERE)));
        let mark = mark
            .map_err(|source| SnapshotError::Io { what: "read the mark", key: key.to_string(), source })?
            .unwrap_or_default();
        match mark.lines().nth(1) {
            Some(written) if written != manifest.to_string() => Err(SnapshotError::Unusable {
                key: key.to_string(),
                reason: "its manifest is not the one that was written".to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// One of its files, read to its end to see that it is the one that was written. Blocks.
    pub(crate) fn open_whole(&self, key: &SnapshotKey, file: &ate_snapshot::File) -> Result<File, SnapshotError> {
        let unusable = |reason: String| SnapshotError::Unusable { key: key.to_string(), reason };
        let io = |source| SnapshotError::Io { what: "read a file", key: key.to_string(), source };
        let opened = if_there(File::open(self.path(key).join(file.name.as_str()))).map_err(io)?;
        let opened = opened.ok_or_else(|| unusable(format!("its file {} is gone", file.name)))?;
        let mut read = Hashing::new(BufReader::with_capacity(1 << 20, &opened));
        io::copy(&mut read, &mut io::sink()).map_err(io)?;
        if read.finish().1 != file.stored {
            return Err(unusable(format!("file {} is not the one that was written", file.name)));
        }
        Ok(opened)
    }

    pub(crate) fn read(
        &self,
        key: &SnapshotKey,
        manifest: &Manifest,
        role: Role,
        data_key: Option<&DataKey>,
        take: impl FnOnce(&mut dyn Read) -> Result<(), String>,
    ) -> Result<(), SnapshotError> {
        let unusable = |reason: String| SnapshotError::Unusable { key: key.to_string(), reason };
        let described = manifest
            .files
            .iter()
            .find(|file| file.role == role)
            .ok_or_else(|| unusable("a file is missing from its manifest".into()))?;
        let file = File::open(self.path(key).join(described.name.as_str()));
        let file = file.map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => unusable(format!("its file {} is gone", described.name)),
            _ => SnapshotError::Io { what: "open a file", key: key.to_string(), source },
        })?;
        let mut stored = Hashing::new(BufReader::with_capacity(1 << 20, file));
        match (manifest.encryption, data_key) {
            (Some(encryption), Some(data_key)) if encryption.key == data_key.id() => {
                let place = Place { snapshot: manifest.id(), file: &described.name };
                let mut opener =
                    Opener::new(data_key, place, &mut stored).map_err(|error| unusable(error.to_string()))?;
                take(&mut opener).map_err(unusable)?;
            }
            (None, _) => take(&mut stored).map_err(unusable)?,
            _ => return Err(unusable("it is sealed with another key than the actor's".into())),
        }
        io::copy(&mut stored, &mut io::sink()).map_err(|error| unusable(error.to_string()))?;
        if stored.finish().1 != described.stored {
            return Err(unusable(format!("file {} is not the one that was written", described.name)));
        }
        Ok(())
    }

    /// A golden image to which others are differences. Blocks.
    pub(crate) fn base(&self, key: &SnapshotKey, image: Digest) -> Result<Arc<LoadedBase>, SnapshotError> {
        self.bases.get(key, image, || self.decode_base(key, image))
    }

    fn decode_base(&self, key: &SnapshotKey, image: Digest) -> Result<LoadedBase, SnapshotError> {
        let unusable = |reason: &str| SnapshotError::Unusable { key: key.to_string(), reason: reason.to_owned() };
        let bytes = self.manifest_bytes(key)?;
        let manifest = Manifest::read_unverified(&bytes).map_err(|error| unusable(&error.to_string()))?;
        let content = manifest
            .image
            .filter(|content| content.digest == image)
            .ok_or_else(|| unusable("it is not the base that was written against"))?;
        let mut bytes =
            vec![0; usize::try_from(content.length).map_err(|_| unusable("its image is larger than memory"))?];
        self.read(key, &manifest, Role::Image, None, |stored| {
            delta::decode(None, stored, &mut bytes).map_err(|error| error.to_string())
        })?;
        // Its digest, not its manifest's, is what the difference was taken against.
        if Content::of(&bytes) != content {
            return Err(unusable("its image is not the one that was written"));
        }
        let stored = manifest.files.iter().map(|file| file.stored.length).sum();
        Ok(LoadedBase { content, stored, bytes })
    }

    /// Removes snapshots of the actor that are older than the one it continues from: nobody asks for them again.
    pub(crate) fn forget_older(&self, key: &SnapshotKey) {
        let newest = self.path(key);
        let entries = newest.parent().and_then(|actor| std::fs::read_dir(actor).ok()).into_iter().flatten().flatten();
        // Names begin with the generation, padded: they sort by it.
        for old in entries.filter(|entry| entry.path() < newest) {
            let _ = std::fs::remove_file(old.path().join(MANIFEST));
            let _ = std::fs::remove_dir_all(old.path());
        }
        self.only_here.lock().retain(|other| other.id.actor != key.id.actor || self.path(other) >= newest);
    }

    pub(crate) fn is_only_here(&self, key: &SnapshotKey) -> bool {
        self.only_here.lock().contains(key)
    }

    /// It is in durable storage now: what is here is a copy.
    pub(crate) fn is_durable(&self, key: &SnapshotKey) {
        let _ = std::fs::remove_file(self.path(key).join(ONLY_HERE));
        self.only_here.lock().remove(key);
    }

    /// What was decoded of it is not to be relied on.
    pub(crate) fn forget_base(&self, key: &SnapshotKey) {
        self.bases.forget(key);
    }

    pub(crate) fn is_forgotten(&self, key: &SnapshotKey) -> bool {
        self.forgotten.lock().contains(key)
    }

    /// What has been written of a snapshot that has no manifest: the room it takes may be what is missing for the next try.
    pub(crate) fn forget_half(&self, key: &SnapshotKey) {
        if remove_half(&self.path(key)) {
            self.only_here.lock().remove(key);
        }
    }

    /// Removes all there is of an actor that is no more, also what nobody knows of, as after an older backup was restored. Blocks.
    pub(crate) fn forget_actor(&self, actor: ActorUid) -> io::Result<()> {
        self.only_here.lock().retain(|key| key.id.actor != actor);
        match std::fs::remove_dir_all(self.directory.join(actor.to_string())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    pub(crate) fn forget_here(&self, key: &SnapshotKey) -> io::Result<()> {
        self.forgotten.lock().insert(key.clone(), ());
        let directory = self.path(key);
        self.only_here.lock().remove(key);
        // Without its manifest it no longer exists, whatever happens next.
        let _ = std::fs::remove_file(directory.join(MANIFEST));
        match std::fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        if let Some(parent) = directory.parent() {
            let _ = std::fs::remove_dir(parent);
        }
        self.bases.forget(key);
        Ok(())
    }
}

/// What is in a directory; nothing if it cannot be read.
pub(crate) fn below(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
}

fn remove_halves(directory: &Path) {
    for snapshot in below(directory).flat_map(|actor| below(&actor)) {
        remove_half(&snapshot);
    }
}

/// Removes a snapshot's directory if it is sure that there is no manifest in it; says whether it was.
fn remove_half(directory: &Path) -> bool {
    let is_half = matches!(directory.join(MANIFEST).try_exists(), Ok(false));
    if is_half && std::fs::remove_dir_all(directory).is_ok() {
        // Unless others of the same actor are there.
        let _ = directory.parent().map(std::fs::remove_dir);
    }
    is_half
}

/// The snapshots below a directory that carry the mark of those that are nowhere else.
fn marked(directory: &Path) -> HashSet<SnapshotKey> {
    let marks = below(directory).flat_map(|actor| below(&actor)).map(|snapshot| snapshot.join(ONLY_HERE));
    marks.filter_map(|mark| SnapshotKey::parse(std::fs::read_to_string(mark).ok()?.lines().next()?).ok()).collect()
}

/// Written whole or not at all, and there after a power cut.
pub(crate) fn write_durably(directory: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let temporary = directory.join(format!(".{name}"));
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&temporary, directory.join(name))?;
    sync_up(directory)
}

/// The names of what is in a snapshot's directory, and the directory's own; both it and the one above may be new.
fn sync_up(directory: &Path) -> io::Result<()> {
    directory.ancestors().take(3).try_for_each(|directory| File::open(directory)?.sync_all())
}

/// The names of images, as a manifest lists them.
pub(crate) fn image_names(workload: &ate_orders::Workload) -> BTreeSet<String> {
    workload.containers.iter().map(|container| container.image.clone()).collect()
}
/// What is not there is `None`.
pub(crate) fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// Keeps what went wrong when it was written to.
struct Noting<'a> {
    file: &'a mut File,
    failed: Option<io::Error>,
}

impl Write for Noting<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes).map_err(|error| {
            let kind = error.kind();
            self.failed = Some(error);
            kind.into()
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
