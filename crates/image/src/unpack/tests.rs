//! One test per attack: each fails when its check is taken away.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::meter::{Limits, sha256};
use crate::tree::OPAQUE;

/// An archive as an attacker writes it: nothing is checked.
#[derive(Clone, Default)]
struct Tar(Vec<u8>);

impl Tar {
    fn entry(mut self, kind: u8, path: &[u8], link: &[u8], data: &[u8], edit: impl FnOnce(&mut Header)) -> Self {
        let mut header = Header::new_ustar();
        let fields = header.as_old_mut();
        fields.name[..path.len()].copy_from_slice(path);
        fields.linkname[..link.len()].copy_from_slice(link);
        header.set_entry_type(EntryType::new(kind));
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1);
        header.set_size(data.len() as u64);
        edit(&mut header);
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, path: &str, data: &str) -> Self {
        self.entry(b'0', path.as_bytes(), b"", data.as_bytes(), |_| {})
    }

    fn directory(self, path: &str) -> Self {
        self.entry(b'5', path.as_bytes(), b"", b"", |header| header.set_mode(0o755))
    }

    fn symlink(self, path: &str, target: &str) -> Self {
        self.entry(b'2', path.as_bytes(), target.as_bytes(), b"", |_| {})
    }

    fn hard_link(self, path: &str, target: &str) -> Self {
        self.entry(b'1', path.as_bytes(), target.as_bytes(), b"", |_| {})
    }

    fn records(self, records: &[(&str, &[u8])]) -> Self {
        let mut data = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let length = (1..).find(|digits| (rest + digits).to_string().len() == *digits).unwrap() + rest;
            data.extend_from_slice(format!("{length} {key}=").as_bytes());
            data.extend_from_slice(value);
            data.push(b'\n');
        }
        self.entry(b'x', b"pax", b"", &data, |_| {})
    }
}

/// A root to unpack into, with something beside it that must not change.
struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("root")).unwrap();
        fs::create_dir(directory.path().join("outside")).unwrap();
        fs::write(directory.path().join("outside/secret"), "secret").unwrap();
        Self { directory }
    }

    fn root(&self, path: &str) -> PathBuf {
        self.directory.path().join("root").join(path)
    }

    fn outside(&self) -> String {
        self.directory.path().join("outside").to_str().unwrap().to_owned()
    }

    fn unpack_with(&self, tar: &[u8], limits: Limits) -> Result<u64, UnpackError> {
        let result = unpack(tar, &self.root(""), &Allowance::new(&limits));
        let mut names: Vec<_> = fs::read_dir(self.directory.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["outside", "root"], "something was written beside the root");
        let outside: Vec<_> = fs::read_dir(self.outside()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(outside, ["secret"], "something was written outside of the root");
        let secret = self.directory.path().join("outside/secret");
        assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
        assert_eq!(secret.metadata().unwrap().nlink(), 1, "a file outside of the root was linked");
        result
    }

    fn unpack(&self, tar: &Tar) -> Result<u64, UnpackError> {
        self.unpack_with(&tar.0, Limits::default())
    }

    fn refused(&self, tar: &Tar) -> Refused {
        match self.unpack(tar) {
            Err(UnpackError::Entry { refused, .. }) => refused,
            other => panic!("not refused: {other:?}"),
        }
    }
}

fn refused(tar: &Tar) -> Refused {
    Place::new().refused(tar)
}

fn is_whiteout(path: PathBuf) -> bool {
    path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_char_device() && metadata.rdev() == 0)
}

fn is_opaque(path: PathBuf) -> bool {
    let mut value = [0; 8];
    rustix::fs::lgetxattr(path, OPAQUE, &mut value[..]).is_ok_and(|length| &value[..length] == b"y")
}

macro_rules! needs_root {
    ($($otherwise:expr)?) => {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: unpacking keeps owners, which needs root");
            return $($otherwise)?;
        }
    };
}

#[test]
fn a_path_that_climbs_is_refused() {
    needs_root!();
    for path in ["../outside/x", "a/../../outside/x", "..", "a/..", "/../outside/x"] {
        assert_eq!(refused(&Tar::default().file(path, "")), Refused::Climbs, "{path}");
    }
    let long = |path: &'static str| Tar::default().records(&[("path", path.as_bytes())]).file("x", "");
    assert_eq!(refused(&long("../outside/x")), Refused::Climbs);
    let gnu = Tar::default().entry(b'L', b"././@LongLink", b"", b"../outside/x\0", |_| {}).file("x", "");
    assert_eq!(refused(&gnu), Refused::Climbs);
}

#[test]
fn an_absolute_path_begins_at_the_root_of_the_layer() {
    needs_root!();
    let place = Place::new();
    let path = format!("{}/x", place.outside());
    place.unpack(&Tar::default().file(&path, "inside")).unwrap();
    assert_eq!(fs::read_to_string(place.root(&path[1..])).unwrap(), "inside");
}

#[test]
fn a_symbolic_link_is_never_followed() {
    needs_root!();
    let place = Place::new();
    for target in [place.outside().as_str(), "../outside", "../../../../../../../../..", "."] {
        let tar = Tar::default().symlink("l", target);
        for attack in [
            tar.clone().file("l/x", ""),
            tar.clone().file("l/a/x", ""),
            tar.clone().directory("l/x"),
            tar.clone().symlink("l/x", "y"),
            tar.clone().file("l/.wh.secret", ""),
            tar.clone().file("l/.wh..wh..opq", ""),
            tar.clone().file("f", "").hard_link("l/x", "f"),
            tar.clone().directory("d").symlink("d/l", target).file("d/l/x", ""),
        ] {
            assert_eq!(refused(&attack), Refused::ThroughSymlink, "{target}");
        }
    }
}

#[test]
fn an_entry_with_the_name_of_a_link_replaces_the_link() {
    needs_root!();
    let place = Place::new();
    let secret = format!("{}/secret", place.outside());
    let tar = Tar::default().symlink("f", &secret).file("f", "mine");
    let tar = tar.symlink("d", &place.outside()).directory("d").file("d/secret", "mine");
    place.unpack(&tar.symlink("m", &secret).hard_link("n", "m").file("n", "mine")).unwrap();
    for path in ["f", "d/secret", "n"] {
        assert!(place.root(path).symlink_metadata().unwrap().is_file(), "{path}");
        assert_eq!(fs::read_to_string(place.root(path)).unwrap(), "mine");
    }
}

#[test]
fn a_hard_link_out_of_the_layer_is_refused() {
    needs_root!();
    let place = Place::new();
    let secret = format!("{}/secret", place.outside());
    assert_eq!(place.refused(&Tar::default().hard_link("x", &secret)), Refused::LinkTarget);
    assert_eq!(refused(&Tar::default().hard_link("x", "../outside/secret")), Refused::Climbs);
    let through = Tar::default().symlink("l", "../outside").hard_link("x", "l/secret");
    assert_eq!(refused(&through), Refused::ThroughSymlink);
    let file = Tar::default().file("f", "");
    for target in ["missing", "f/x", "", "."] {
        assert_eq!(refused(&file.clone().hard_link("x", target)), Refused::LinkTarget, "{target}");
    }
    assert_eq!(refused(&file.hard_link("f", "./f")), Refused::LinkTarget);
    assert_eq!(refused(&Tar::default().directory("d").hard_link("x", "d")), Refused::LinkTarget);
    assert_eq!(refused(&Tar::default().file(".wh.w", "").hard_link("x", "w")), Refused::LinkTarget);
}

#[test]
fn devices_fifos_and_unknown_kinds_are_refused() {
    needs_root!();
    let device = |kind, major, minor| {
        Tar::default().entry(kind, b"x", b"", b"", |header| {
            header.set_device_major(major).unwrap();
            header.set_device_minor(minor).unwrap();
        })
    };
    assert_eq!(refused(&device(b'3', 1, 3)), Refused::Device);
    assert_eq!(refused(&device(b'3', 0, 0)), Refused::Device, "overlayfs would read it as a whiteout");
    assert_eq!(refused(&device(b'4', 8, 0)), Refused::Device);
    assert_eq!(refused(&device(b'6', 0, 0)), Refused::Kind);
    for kind in [b'S', b'7', b's', b'V', b'D'] {
        assert_eq!(refused(&device(kind, 0, 0)), Refused::Kind, "{}", char::from(kind));
    }
    assert_eq!(refused(&Tar::default().records(&[("GNU.sparse.map", b"0,1")]).file("x", "")), Refused::Kind);
}

#[test]
fn the_root_stays_a_directory() {
    needs_root!();
    for path in ["", ".", "/", "./."] {
        assert_eq!(refused(&Tar::default().symlink(path, "/")), Refused::RootIsNoDirectory, "{path}");
    }
    let place = Place::new();
    place.unpack(&Tar::default().entry(b'5', b"./", b"", b"", |header| header.set_mode(0o751))).unwrap();
    assert_eq!(place.root("").metadata().unwrap().mode() & 0o7777, 0o751);
}

#[test]
fn only_the_capability_of_a_file_is_kept_of_its_xattrs() {
    needs_root!();
    // cap_dac_override and cap_fowner, permitted and effective: the value holds a newline.
    let mut capability = [0; 20];
    capability[..5].copy_from_slice(&[1, 0, 0, 2, 0x0a]);
    let place = Place::new();
    let tar = Tar::default().records(&[
        ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
        ("SCHILY.xattr.trusted.overlay.redirect", b"/etc"),
        ("SCHILY.xattr.user.x", b"y"),
        ("SCHILY.xattr.security.capability", &capability),
    ]);
    let names = |path: &str| {
        let mut names = [0; 256];
        let length = rustix::fs::llistxattr(place.root(path), &mut names[..]).unwrap();
        String::from_utf8_lossy(&names[..length]).into_owned()
    };
    place.unpack(&Tar(tar.clone().file("f", "data").0.into_iter().chain(tar.directory("d").0).collect())).unwrap();
    assert_eq!(names("f"), "security.capability\0");
    assert_eq!(names("d"), "");
    let mut value = [0; 20];
    rustix::fs::lgetxattr(place.root("f"), "security.capability", &mut value[..]).unwrap();
    assert_eq!(value, capability);
}

#[test]
fn modes_owners_and_times_are_kept() {
    needs_root!();
    let place = Place::new();
    let owned = |header: &mut Header| {
        header.set_uid(1000);
        header.set_gid(1001);
        header.set_mode(0o6755);
        header.set_mtime(1_000_000_000);
    };
    let tar = Tar::default().entry(b'5', b"d", b"", b"", owned).entry(b'0', b"d/f", b"", b"x", owned);
    let tar = tar.entry(b'2', b"d/l", b"f", b"", owned).file("d/.wh.w", "").file("d/late", "").file("d/late", "");
    let precise = tar.records(&[("uid", b"3000000000"), ("mtime", b"12.25"), ("gid", b"7")]).file("p", "");
    place.unpack(&precise.file("implied/x", "")).unwrap();
    for path in ["d", "d/f", "d/l"] {
        let metadata = place.root(path).symlink_metadata().unwrap();
        assert_eq!((metadata.uid(), metadata.gid(), metadata.mtime()), (1000, 1001, 1_000_000_000), "{path}");
        assert!(path == "d/l" || metadata.mode() & 0o7777 == 0o6755, "{path}");
    }
    let p = place.root("p").metadata().unwrap();
    assert_eq!((p.uid(), p.gid(), p.mtime(), p.mtime_nsec()), (3_000_000_000, 7, 12, 250_000_000));
    let implied = place.root("implied").metadata().unwrap();
    assert_eq!((implied.uid(), implied.mode() & 0o7777, implied.mtime()), (0, 0o755, 0));
    let nobody = Tar::default().records(&[("uid", b"4294967295")]).file("x", "");
    assert_eq!(refused(&nobody), Refused::Header, "the kernel takes it for \"unchanged\"");
}

#[test]
fn a_later_entry_wins_over_an_earlier_one() {
    needs_root!();
    let place = Place::new();
    let tar = Tar::default().file("f", "old").file("f", "new");
    let tar = tar.directory("d").file("d/gone/x", "").file("d", "a file now");
    let tar = tar.file("e", "").directory("e").file("e/x", "").directory("e").file("h", "one").hard_link("i", "h");
    place.unpack(&tar.file("h", "two").symlink("f2", "f").symlink("f2", "h")).unwrap();
    let read = |path| fs::read_to_string(place.root(path)).unwrap();
    assert_eq!((read("f"), read("d")), ("new".into(), "a file now".into()));
    assert_eq!((read("i"), read("h")), ("one".into(), "two".into()), "the other name keeps the file");
    assert!(place.root("e/x").exists(), "a directory that is declared again keeps what it holds");
    assert_eq!(fs::read_link(place.root("f2")).unwrap(), PathBuf::from("h"));
    assert_eq!(refused(&Tar::default().file("f", "").file("f/x", "")), Refused::ThroughFile);
}

#[test]
fn whiteouts_hide_what_is_below_but_not_what_is_beside() {
    needs_root!();
    let place = Place::new();
    let tar = Tar::default().file("d/.wh.gone", "").file("o/.wh..wh..opq", "").file("o/kept", "");
    let tar = tar.file("before", "kept").file(".wh.before", "").file(".wh.after", "").file("after", "kept");
    let tar = tar.file("x/kept", "").file(".wh.x", "").file(".wh.y", "").directory("y").file("y/kept", "");
    let tar = tar.file(".wh.z", "").file("z/kept", "").file(".wh..wh.plnk/1.2", "").file(".wh..wh.aufs", "");
    place.unpack(&tar).unwrap();
    assert!(is_whiteout(place.root("d/gone")));
    for path in ["o/kept", "before", "after", "x/kept", "y/kept", "z/kept"] {
        assert!(place.root(path).metadata().unwrap().is_file(), "{path}");
    }
    for path in ["o", "x", "y", "z"] {
        assert!(is_opaque(place.root(path)), "{path}");
    }
    assert!(!is_opaque(place.root("d")));
    let names: Vec<_> = fs::read_dir(place.root("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.as_bytes().starts_with(b".wh.")), "{names:?}");
    for path in [".wh.", ".wh..", ".wh...", "d/.wh..", ".wh.d/x"] {
        assert_eq!(refused(&Tar::default().file(path, "")), Refused::Whiteout, "{path}");
    }
    assert_eq!(refused(&Tar::default().symlink(".wh.x", "y")), Refused::Whiteout);
}

#[test]
fn limits_stop_what_would_fill_the_node() {
    needs_root!();
    let message = |tar: &Tar, limits: Limits| match Place::new().unpack_with(&tar.0, limits).unwrap_err() {
        UnpackError::Read(error) | UnpackError::Write { source: error, .. } => error.to_string(),
        error => error.to_string(),
    };
    let tar = Tar::default().file("a", "").file("b", "").file("c", "");
    assert!(message(&tar, Limits { entries: 2, ..Limits::default() }).contains("more than 2 entries"));
    let deep = Tar::default().file("a/b/c/d", "");
    assert!(message(&deep, Limits { entries: 3, ..Limits::default() }).contains("more than 3 entries"));
    let large = Tar::default().file("a", "12345");
    let limits = Limits { file_bytes: 4, ..Limits::default() };
    assert!(matches!(
        Place::new().unpack_with(&large.0, limits),
        Err(UnpackError::Entry { refused: Refused::FileTooLarge, .. })
    ));
    let huge = Tar::default().records(&[("size", b"99999999999999")]).file("a", "12345");
    assert_eq!(refused(&huge), Refused::FileTooLarge);
}

#[test]
fn paths_and_extension_headers_have_limits() {
    needs_root!();
    let named = |path: &[u8]| Tar::default().records(&[("path", path)]).file("x", "");
    let deep = |depth: usize| "d/".repeat(depth) + "f";
    assert_eq!(refused(&named(deep(256).as_bytes())), Refused::Path);
    Place::new().unpack(&named(deep(255).as_bytes())).unwrap();
    assert_eq!(refused(&named(&[b'/'; 4096])), Refused::Path);
    assert_eq!(refused(&named(b"a\0b")), Refused::Path);
    assert_eq!(refused(&Tar::default().records(&[("linkpath", &[b'a'; 4096])]).symlink("x", "y")), Refused::LinkTarget);
    for kind in [b'x', b'L', b'K'] {
        let large = Tar::default().entry(kind, b"", b"", &[b'a'; (1 << 20) + 1], |_| {});
        assert_eq!(refused(&large.file("x", "")), Refused::Header);
    }
    let place = Place::new();
    let long = "n".repeat(200);
    let tar = Tar::default().entry(b'L', b"", b"", format!("{long}/gnu\0").as_bytes(), |_| {}).file("x", "");
    let tar = tar.records(&[("path", format!("{long}/pax").as_bytes())]).file("x", "");
    let target = "t".repeat(300);
    place.unpack(&tar.entry(b'K', b"", b"", target.as_bytes(), |_| {}).symlink("link", "cut")).unwrap();
    assert!(place.root(&long).join("gnu").is_file() && place.root(&long).join("pax").is_file());
    assert_eq!(fs::read_link(place.root("link")).unwrap(), PathBuf::from(target));
}

#[test]
fn an_archive_that_readers_would_read_differently_is_refused() {
    needs_root!();
    let size = Tar::default().records(&[("size", b"0")]).file("a", "12345");
    assert_eq!(refused(&size), Refused::Header);
    for kind in [b'1', b'2', b'5'] {
        let data = Tar::default().entry(kind, b"x", b"y", b"data", |_| {});
        assert_eq!(refused(&data), Refused::UnexpectedData, "{}", char::from(kind));
    }
    let twice = Tar::default().records(&[("path", b"a")]).records(&[("path", b"b")]).file("x", "");
    assert_eq!(refused(&twice), Refused::Header);
    assert_eq!(refused(&Tar::default().file("x", "").records(&[("path", b"a")])), Refused::Header);
    for malformed in [&b"8 path=a\n"[..], b"path=a\n", b"7 path=a", b"99 path=a\n", b"0 \n", b"8 patha\n\n"] {
        let tar = Tar::default().entry(b'x', b"", b"", malformed, |_| {}).file("x", "");
        assert_eq!(refused(&tar), Refused::Header, "{}", malformed.escape_ascii());
    }
    let mut short = Tar::default().file("x", &"data".repeat(300)).0;
    short.truncate(600);
    assert_eq!(refused(&Tar(short)), Refused::Truncated);
}

fn compressed(tar: &[u8], compression: Compression) -> Vec<u8> {
    // In two parts, as some builders write them.
    let (first, second) = tar.split_at(tar.len() / 2);
    let gzip = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    match compression {
        Compression::None => tar.to_vec(),
        Compression::Gzip => [gzip(first), gzip(second)].concat(),
        Compression::Zstd => {
            let zstd = |bytes| zstd::encode_all(bytes, 1).unwrap();
            [zstd(first), zstd(second)].concat()
        }
    }
}

fn expected(blob: &[u8], tar: &[u8], compression: Compression) -> Expected {
    Expected { digest: sha256(blob), size: blob.len() as u64, diff_id: sha256(tar), compression }
}

#[test]
fn every_compression_gives_the_same_layer_and_a_wrong_digest_none() {
    needs_root!();
    let mut tar = Tar::default().file("f", &"data".repeat(10_000)).0;
    tar.resize(tar.len() + 10_240, 0);
    for compression in [Compression::None, Compression::Gzip, Compression::Zstd] {
        let blob = compressed(&tar, compression);
        let right = expected(&blob, &tar, compression);
        let unpack = |expected: &Expected| {
            let place = Place::new();
            let allowance = Allowance::new(&Limits::default());
            let result = unpack_layer(blob.as_slice(), expected, &place.root(""), &allowance);
            result.map(|_| fs::read_to_string(place.root("f")).unwrap().len())
        };
        assert_eq!(unpack(&right).unwrap(), 40_000);
        let wrong = sha256(b"else");
        let digest = unpack(&Expected { digest: wrong, ..right.clone() });
        assert!(matches!(digest, Err(UnpackError::Digest { what: "digest", .. })), "{digest:?}");
        let diff_id = unpack(&Expected { diff_id: wrong, ..right.clone() });
        assert!(matches!(diff_id, Err(UnpackError::Digest { what: "diff-id", .. })), "{diff_id:?}");
        for size in [right.size - 1, right.size + 1] {
            assert!(unpack(&Expected { size, ..right.clone() }).is_err());
        }
    }
}

#[test]
fn a_bomb_is_refused() {
    needs_root!();
    // More than is never a bomb, in the padding behind the archive where no entry limits it.
    let tar = vec![0; 65 << 20];
    let place = Place::new();
    let allowance = Allowance::new(&Limits::default());
    for compression in [Compression::Gzip, Compression::Zstd] {
        let blob = compressed(&tar, compression);
        let error = unpack_layer(blob.as_slice(), &expected(&blob, &tar, compression), &place.root(""), &allowance);
        let Err(UnpackError::Read(error)) = error else { panic!("{error:?}") };
        assert!(error.to_string().contains("expands by more than 200 times"), "{error}");
    }
    let small = Allowance::new(&Limits { image_bytes: 100 << 10, ..Limits::default() });
    let right = expected(&tar, &tar, Compression::None);
    let Err(UnpackError::Read(error)) = unpack_layer(tar.as_slice(), &right, &place.root(""), &small) else { panic!() };
    assert!(error.to_string().contains("more than 102400 bytes"), "{error}");
}

fn hostile_entry() -> impl Strategy<Value = (u8, String, String, Vec<u8>)> {
    let path = "(/|\\./|\\.\\./|l/|d/|e/){0,4}(l|d|e|f|\\.wh\\.d|\\.wh\\.\\.wh\\.\\.opq|\\.\\.|secret|)";
    let link = prop_oneof![Just("../outside".to_owned()), Just("../outside/secret".to_owned()), path.prop_map(|p| p)];
    let kind = prop_oneof![8 => prop::sample::select(b"01255".to_vec()), 1 => any::<u8>()];
    (kind, path, link, prop::collection::vec(any::<u8>(), 0..20))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_sequence_of_entries_leaves_the_root(entries in prop::collection::vec(hostile_entry(), 1..20)) {
        needs_root!(Ok(()));
        // Prefixes too, for the first refusal ends an archive.
        let place = Place::new();
        let mut tar = Tar::default();
        for (kind, path, link, data) in entries {
            let data = if kind == b'0' { data } else { Vec::new() };
            let next = tar.clone().entry(kind, path.as_bytes(), link.as_bytes(), &data, |_| {});
            if Place::new().unpack(&next).is_ok() {
                tar = next;
            }
        }
        place.unpack(&tar).unwrap();
    }

    #[test]
    fn no_bytes_make_it_panic(noise in prop::collection::vec(any::<u8>(), 0..3000), at in 0usize..2000) {
        needs_root!(Ok(()));
        let _ = Place::new().unpack_with(&noise, Limits::default());
        let mut tar = Tar::default().records(&[("mtime", b"1.5"), ("path", b"a/b")]).file("x", "data").symlink("l", "x");
        tar = tar.hard_link("h", "x").directory("d");
        let end = (at + noise.len().min(40)).min(tar.0.len());
        let at = at.min(end);
        tar.0[at..end].copy_from_slice(&noise[..end - at]);
        let _ = Place::new().unpack(&tar);
        let _ = parse_records(&noise);
    }
}
