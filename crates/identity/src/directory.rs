//! The files of an identity: made once, by whoever comes first, and only ever read after that.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustls::pki_types::UnixTime;
use tempfile::NamedTempFile;
use zeroize::Zeroizing;

use crate::authority::Authority;
use crate::{INSTANCE_KEY_BYTES, IdentityError};

/// The largest file is some 900 bytes. What is larger is read so far and then found damaged.
const MAX_FILE: u64 = 64 << 10;

type InstanceKey = Zeroizing<[u8; INSTANCE_KEY_BYTES]>;

pub(crate) struct Directory<'a> {
    path: &'a Path,
}

impl<'a> Directory<'a> {
    pub(crate) fn new(path: &'a Path) -> Self {
        Self { path }
    }

    pub(crate) fn open(&self, now: UnixTime) -> Result<(Authority, InstanceKey), IdentityError> {
        let (key_path, authority_path) = (self.path.join("instance.key"), self.path.join("authority.pem"));
        let authority = match read_secret(&authority_path)? {
            Some(present) => present,
            None => {
                fs::create_dir_all(self.path).map_err(failed("create", self.path))?;
                self.create_once(&key_path, &*new_instance_key())?;
                self.create_once(&authority_path, Authority::generate(now)?.as_bytes())?;
                let vanished = || failed("read", &authority_path)(io::ErrorKind::NotFound.into());
                read_secret(&authority_path)?.ok_or_else(vanished)?
            }
        };
        let authority = Authority::parse(&authority_path, &authority, now)?;
        let lost = || IdentityError::LostKey { path: key_path.clone(), authority: authority_path };
        let key = read_secret(&key_path)?.ok_or_else(lost)?;
        let key = <[u8; INSTANCE_KEY_BYTES]>::try_from(key.as_slice())
            .map_err(|_| IdentityError::DamagedKey { path: key_path, length: key.len() })?;
        self.publish(&self.path.join("ca.pem"), authority.ca_pem())?;
        Ok((authority, Zeroizing::new(key)))
    }

    /// After this the file is whole and on disk, with these bytes or with those of whoever was faster.
    fn create_once(&self, path: &Path, secret: &[u8]) -> Result<(), IdentityError> {
        let create = || {
            let file = self.written(secret)?;
            match file.persist_noclobber(path) {
                Err(lost) if lost.error.kind() != io::ErrorKind::AlreadyExists => Err(lost.error),
                _ => File::open(self.path)?.sync_all(),
            }
        };
        create().map_err(failed("create", path))
    }

    fn publish(&self, path: &Path, text: &str) -> Result<(), IdentityError> {
        if fs::read(path).is_ok_and(|present| present == text.as_bytes()) {
            return Ok(());
        }
        let publish = || {
            let file = self.written(text.as_bytes())?;
            file.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
            file.persist(path).map_err(|lost| lost.error)
        };
        publish().map(drop).map_err(failed("write", path))
    }

    /// A temporary file beside the others, readable by its owner only, as `tempfile` makes them.
    fn written(&self, bytes: &[u8]) -> io::Result<NamedTempFile> {
        let mut file = NamedTempFile::new_in(self.path)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        Ok(file)
    }
}

fn new_instance_key() -> InstanceKey {
    let mut key = Zeroizing::new([0; INSTANCE_KEY_BYTES]);
    aws_lc_rs::rand::fill(&mut *key).expect("the kernel gives random bytes");
    key
}

/// The bytes of a file that nobody else can read, if there is one.
fn read_secret(path: &Path) -> Result<Option<Zeroizing<Vec<u8>>>, IdentityError> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(failed("open", path))?,
    };
    let mode = file.metadata().map_err(failed("inspect", path))?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(IdentityError::Exposed { path: path.to_owned(), mode });
    }
    let mut bytes = Zeroizing::new(Vec::new());
    file.take(MAX_FILE).read_to_end(&mut bytes).map_err(failed("read", path))?;
    Ok(Some(bytes))
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> IdentityError {
    let path: PathBuf = path.to_owned();
    move |source| IdentityError::Io { action, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_comes_second_finds_what_the_first_one_made() {
        let dir = tempfile::tempdir().unwrap();
        let (directory, path) = (Directory::new(dir.path()), dir.path().join("file"));
        directory.create_once(&path, b"first").unwrap();
        directory.create_once(&path, b"second").unwrap();
        assert_eq!(read_secret(&path).unwrap().unwrap().as_slice(), b"first");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the loser's file is gone");
    }
}
