//! Who the process of an image runs as, by the image's own `/etc/passwd` and `/etc/group`.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{self, CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::tree::{Occupant, is_opaque, occupant};

/// Longest `/etc/passwd` or `/etc/group` that is read; with a longer one, names cannot be resolved.
const MAX_ACCOUNT_FILE: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    pub additional_gids: Vec<u32>,
}

#[derive(Debug, thiserror::Error)]
pub enum UserError {
    #[error(
        "the image's user {user:?} is not in its /etc/passwd; give a numeric user, or add the account to the image"
    )]
    UnknownUser { user: String },
    #[error("the image's group {group:?} is not in its /etc/group; give a numeric group, or add it to the image")]
    UnknownGroup { group: String },
    #[error("the image's user {user:?} cannot be looked up: its /{file} is not a plain file of at most 1 MiB")]
    NotAFile { user: String, file: &'static str },
    #[error("cannot read /{file} of the image from {}", layer.display())]
    Io { file: &'static str, layer: PathBuf, source: io::Error },
}

/// `user[:group]`, each a name or a number. Supplementary groups count only where no group is given, as OCI says.
pub(crate) fn resolve(text: &str, layers: &[PathBuf]) -> Result<User, UserError> {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (text, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let number = user.parse::<u32>().ok();
    if let (Some(uid), Some(Ok(gid))) = (number, group.map(str::parse)) {
        return Ok(User { uid, gid, additional_gids: Vec::new() });
    }

    let read = |file| read_account_file(file, layers, text);
    let passwd = read("etc/passwd")?;
    // name:password:uid:gid:…
    let account = rows(&passwd).find_map(|row| {
        let (name, uid, gid) = (*row.first()?, row.get(2)?.parse().ok()?, row.get(3)?.parse().ok()?);
        number.map_or(name == user, |number| uid == number).then_some((name, uid, gid))
    });
    let (name, uid, primary_gid) = match (account, number) {
        (Some((name, uid, gid)), _) => (Some(name), uid, gid),
        (None, Some(uid)) => (None, uid, 0),
        (None, None) => return Err(UserError::UnknownUser { user: user.to_owned() }),
    };

    let groups = read("etc/group")?;
    // name:password:gid:member,member
    let group_rows =
        || rows(&groups).filter_map(|row| Some((*row.first()?, row.get(2)?.parse().ok()?, *row.get(3).unwrap_or(&""))));
    match group {
        None => {
            let is_member = |members: &str| members.split(',').any(|member| Some(member) == name);
            let additional = group_rows().filter(|(_, _, members)| is_member(members)).map(|(_, gid, _)| gid);
            let mut additional_gids: Vec<u32> = additional.filter(|gid| *gid != primary_gid).collect();
            additional_gids.sort_unstable();
            additional_gids.dedup();
            Ok(User { uid, gid: primary_gid, additional_gids })
        }
        Some(group) => {
            let named = || group_rows().find(|(name, _, _)| *name == group).map(|(_, gid, _)| gid);
            let gid = group.parse().ok().or_else(named);
            let gid = gid.ok_or_else(|| UserError::UnknownGroup { group: group.to_owned() })?;
            Ok(User { uid, gid, additional_gids: Vec::new() })
        }
    }
}

fn rows(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().map(|line| line.trim_end().split(':').collect())
}

/// The file as the overlay of the layers would show it; empty if there is none.
fn read_account_file(file: &'static str, layers: &[PathBuf], user: &str) -> Result<String, UserError> {
    for layer in layers {
        let found = find(layer, Path::new(file)).map_err(|errno| UserError::Io {
            file,
            layer: layer.clone(),
            source: errno.into(),
        })?;
        match found {
            Found::Nothing => {}
            Found::Hidden => break,
            Found::NotAFile => return Err(UserError::NotAFile { user: user.to_owned(), file }),
            Found::File(found) => {
                let mut bytes = Vec::new();
                let read = File::from(found).take(MAX_ACCOUNT_FILE + 1).read_to_end(&mut bytes);
                read.map_err(|source| UserError::Io { file, layer: layer.clone(), source })?;
                if bytes.len() as u64 > MAX_ACCOUNT_FILE {
                    return Err(UserError::NotAFile { user: user.to_owned(), file });
                }
                return Ok(String::from_utf8_lossy(&bytes).into_owned());
            }
        }
    }
    Ok(String::new())
}

enum Found {
    File(OwnedFd),
    /// Lower layers may have it.
    Nothing,
    /// Lower layers may have it, but are hidden.
    Hidden,
    NotAFile,
}

fn find(layer: &Path, file: &Path) -> Result<Found, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let mut directory = fs::openat(CWD, layer, flags | OFlags::DIRECTORY, Mode::empty())?;
    let mut opaque = false;
    for part in file {
        match occupant(&directory, part)? {
            Occupant::Nothing if opaque => return Ok(Found::Hidden),
            Occupant::Nothing => return Ok(Found::Nothing),
            Occupant::Whiteout => return Ok(Found::Hidden),
            Occupant::Directory => {
                directory = fs::openat2(&directory, part, flags | OFlags::DIRECTORY, Mode::empty(), resolve)?;
                opaque |= is_opaque(&directory)?;
            }
            Occupant::File if file.file_name() == Some(part) => {
                return Ok(Found::File(fs::openat2(&directory, part, flags, Mode::empty(), resolve)?));
            }
            _ => return Ok(Found::NotAFile),
        }
    }
    Ok(Found::NotAFile)
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::symlink;

    use super::*;

    const PASSWD: &str =
        "root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/:/bin/sh\nbroken\nbad:x:y:z\napp:x:9:9::/:\n7:x:77:77::/:\n";
    const GROUP: &str = "root:x:0:\nwheel:x:10:root,app\nstaff:x:1001:app\nextra:x:5:app,app\nonly:x:6:apple\n";

    fn layers(count: usize) -> (tempfile::TempDir, Vec<PathBuf>) {
        let directory = tempfile::tempdir().unwrap();
        let layers: Vec<_> = (0..count).map(|n| directory.path().join(n.to_string())).collect();
        for layer in &layers {
            create_dir_all(layer.join("etc")).unwrap();
        }
        (directory, layers)
    }

    fn user(uid: u32, gid: u32, additional: &[u32]) -> User {
        User { uid, gid, additional_gids: additional.to_vec() }
    }

    #[test]
    fn names_and_numbers_are_resolved_as_oci_says() {
        let (_directory, layers) = layers(1);
        write(layers[0].join("etc/passwd"), PASSWD).unwrap();
        write(layers[0].join("etc/group"), GROUP).unwrap();
        for (text, expected) in [
            ("", user(0, 0, &[10])),
            ("app", user(1000, 1001, &[5, 10])),
            ("1000", user(1000, 1001, &[5, 10])),
            ("app:wheel", user(1000, 10, &[])),
            ("app:44", user(1000, 44, &[])),
            ("app:", user(1000, 1001, &[5, 10])),
            ("4000:wheel", user(4000, 10, &[])),
            ("4000", user(4000, 0, &[])),
            ("7", user(7, 0, &[])),
            ("4000:4001", user(4000, 4001, &[])),
        ] {
            assert_eq!(resolve(text, &layers).unwrap(), expected, "{text}");
        }
        assert!(matches!(resolve("ghost", &layers), Err(UserError::UnknownUser { .. })));
        assert!(matches!(resolve("bad", &layers), Err(UserError::UnknownUser { .. })));
        assert!(matches!(resolve("app:ghost", &layers), Err(UserError::UnknownGroup { .. })));
        assert!(matches!(resolve("4294967296", &layers), Err(UserError::UnknownUser { .. })));
    }

    #[test]
    fn the_topmost_file_wins_and_an_image_without_one_knows_only_numbers() {
        let (_directory, layers) = layers(3);
        write(layers[1].join("etc/passwd"), "app:x:1:1::/:\n").unwrap();
        write(layers[2].join("etc/passwd"), "app:x:2:2::/:\nlow:x:3:3::/:\n").unwrap();
        assert_eq!(resolve("app", &layers).unwrap(), user(1, 1, &[]));
        assert!(matches!(resolve("low", &layers), Err(UserError::UnknownUser { .. })));
        assert_eq!(resolve("5", &layers[..1]).unwrap(), user(5, 0, &[]));
    }

    #[test]
    fn a_link_out_of_the_layer_is_not_followed() {
        let outside = tempfile::tempdir().unwrap();
        write(outside.path().join("passwd"), "app:x:1:1::/:\n").unwrap();
        let (_directory, layers) = layers(2);
        symlink(outside.path().join("passwd"), layers[0].join("etc/passwd")).unwrap();
        assert!(matches!(resolve("app", &layers[..1]), Err(UserError::NotAFile { .. })));
        std::fs::remove_dir(layers[1].join("etc")).unwrap();
        symlink(outside.path(), layers[1].join("etc")).unwrap();
        assert!(matches!(resolve("app", &layers[1..]), Err(UserError::NotAFile { .. })));
    }
}
