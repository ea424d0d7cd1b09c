use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use ate_image::{Architecture, Content, ImageConfig, PackError, Recipe, Reference, pack, pack_archive};

use crate::support::{needs_root, store, text};

fn config() -> ImageConfig {
    ImageConfig {
        user: "1000:1000".into(),
        env: vec!["A=b".into()],
        entrypoint: vec!["/bin/app".into()],
        cmd: vec!["--serve".into()],
        working_dir: "/data".into(),
    }
}

fn recipe(tree: &Path) -> Recipe {
    let content = |architecture: &str| {
        let file = tree.join(architecture);
        vec![Content::Directory(tree.join("tree")), Content::File { from: file, to: "/bin/app".to_owned() }]
    };
    let content = [(Architecture::Amd64, content("amd64")), (Architecture::Arm64, content("arm64"))];
    Recipe { config: config(), content: BTreeMap::from(content) }
}

fn write_tree(tree: &Path, umask: u32) {
    let long = format!("tree/{}/{}", "long".repeat(30), "name".repeat(30));
    let mut files = [("tree/etc/b", 0o666), ("tree/etc/a", 0o666), (&long, 0o666), ("amd64", 0o777), ("arm64", 0o777)];
    if umask != 0 {
        files.reverse();
    }
    for (name, mode) in files {
        let path = tree.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("content of {name}")).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode & !umask)).unwrap();
    }
    symlink("../etc/a", tree.join("tree/etc/link")).unwrap();
}

#[test]
fn the_same_content_gives_the_same_digest_on_every_machine() {
    let directory = tempfile::tempdir().unwrap();
    let (one, two) = (directory.path().join("one"), directory.path().join("two"));
    write_tree(&one, 0);
    write_tree(&two, 0o077);
    let digest = pack(&recipe(&one), &directory.path().join("layout")).unwrap();
    assert_eq!(digest, pack(&recipe(&two), &directory.path().join("other")).unwrap());
    assert_eq!(digest, pack_archive(&recipe(&two), &directory.path().join("archive.tar")).unwrap());
    pack_archive(&recipe(&one), &directory.path().join("archive2.tar")).unwrap();
    let read = |name| fs::read(directory.path().join(name)).unwrap();
    assert!(read("archive.tar") == read("archive2.tar"));
    // Changes only when the format does; then digests that people wrote down no longer fit.
    assert_eq!(digest.to_string(), "5a9f7826ef36319b69cb81de58b281c85b689271f3dfb20ea831b592f823e089");
}

#[tokio::test]
async fn a_packed_image_is_what_was_packed_from_a_layout_and_from_an_archive() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    write_tree(directory.path(), 0);
    let (layout, archive) = (directory.path().join("layout"), directory.path().join("image.tar"));
    let digest = pack(&recipe(directory.path()), &layout).unwrap();
    pack_archive(&recipe(directory.path()), &archive).unwrap();
    for (number, place) in
        [format!("oci-layout://{}", layout.display()), format!("oci-archive://{}", archive.display())]
            .iter()
            .enumerate()
    {
        let store = store(&directory.path().join(number.to_string()));
        let reference = Reference::parse(&format!("{place}@sha256:{digest}")).unwrap();
        let image = store.ensure(&reference, None).await.unwrap_or_else(|error| panic!("{}", text(&error)));
        assert_eq!((image.digest, &image.config), (digest, &config()));
        assert_eq!(image.user().unwrap().uid, 1000);
        let [layer] = image.layers.as_slice() else { panic!("{:?}", image.layers) };
        let app = format!("content of {}", Architecture::HOST);
        assert_eq!(fs::read_to_string(layer.join("bin/app")).unwrap(), app);
        let metadata = layer.join("bin/app").metadata().unwrap();
        assert_eq!((metadata.mode() & 0o7777, metadata.uid(), metadata.mtime()), (0o755, 0, 0));
        assert_eq!(layer.join("etc/a").metadata().unwrap().mode() & 0o7777, 0o644);
        assert_eq!(fs::read_link(layer.join("etc/link")).unwrap(), Path::new("../etc/a"));
        assert!(layer.join("long".repeat(30)).join("name".repeat(30)).is_file());
    }
}

#[test]
fn what_cannot_be_in_an_image_is_not_packed() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let pack = |content: Vec<Content>| {
        let recipe = Recipe { config: config(), content: BTreeMap::from([(Architecture::Amd64, content)]) };
        pack(&recipe, &directory.path().join("layout")).unwrap_err()
    };
    let at = |to: &str| Content::File { from: file.clone(), to: to.to_owned() };
    for path in ["../x", "/", "", ".wh.x", "a/.wh.b/c"] {
        assert!(matches!(pack(vec![at(path)]), PackError::Path { .. }), "{path}");
    }
    assert!(matches!(pack(vec![at("a"), at("a/b")]), PackError::Conflict { .. }));
    assert!(matches!(pack(vec![at("a/b"), at("a")]), PackError::Conflict { .. }));
    let directory_as_file = Content::File { from: directory.path().to_owned(), to: "x".to_owned() };
    assert!(matches!(pack(vec![directory_as_file]), PackError::Kind { .. }));
    let socket = directory.path().join("tree/socket");
    fs::create_dir(socket.parent().unwrap()).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert!(matches!(pack(vec![Content::Directory(directory.path().join("tree"))]), PackError::Kind { .. }));
}
