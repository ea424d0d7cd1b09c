use std::path::PathBuf;
use std::process::Command;

use ate_image::{User, UserError};
use serde_json::json;

use crate::support::{Layout, needs_root, store, tar};

/// What `script` prints in the root of an overlay of these directories, in a mount namespace of its own.
fn in_overlay(layers: &[PathBuf], script: &str) -> String {
    let (mount_point, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // One directory alone is refused where nothing can be written.
    let lower = layers.iter().map(PathBuf::as_path).chain([empty.path()]);
    let lower = lower.map(|layer| layer.to_str().unwrap()).collect::<Vec<_>>().join(":");
    let script = format!("mount -t overlay overlay -o ro,lowerdir=\"$1\" \"$2\" && cd \"$2\" && {script}");
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-euc", &script, "sh", &lower]).arg(mount_point.path());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn an_overlay_of_the_layers_is_the_image() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    let low = tar(&[
        ("kept", "low"),
        ("changed", "low"),
        ("gone", "low"),
        ("gone-directory/x", "low"),
        ("opaque/hidden", "low"),
        ("replaced/hidden", "low"),
        ("merged/low", "low"),
    ]);
    let middle = tar(&[("middle", "middle"), ("changed", "middle"), ("back", "middle")]);
    let top = tar(&[
        ("changed", "top"),
        (".wh.gone", ""),
        (".wh.gone-directory", ""),
        (".wh.back", ""),
        ("opaque/.wh..wh..opq", ""),
        ("opaque/shown", "top"),
        (".wh.replaced", ""),
        ("replaced/shown", "top"),
        ("merged/top", "top"),
    ]);
    // The lowest layer comes again on top of the second, as an empty layer often does.
    let layers = [low.clone(), middle, low, top];
    let reference = Layout(&directory.path().join("layout")).image(&layers, json!({}));
    let image = store(directory.path()).ensure(&reference, None).await.unwrap();
    assert_eq!(image.layers.len(), 3, "overlayfs refuses the same directory twice");
    let files = in_overlay(&image.layers, "find . -type f | sort | while read f; do echo \"$f $(cat $f)\"; done");
    let expected = "./changed top\n./kept low\n./merged/low low\n./merged/top top\n./middle middle\n./opaque/shown top\n\
                    ./replaced/shown top\n";
    assert_eq!(files, expected);
    assert_eq!(in_overlay(&image.layers, "find . ! -type f ! -type d"), "", "no whiteout shows");
}

#[tokio::test]
async fn the_accounts_of_an_image_are_those_that_its_overlay_shows() {
    needs_root!();
    let directory = tempfile::tempdir().unwrap();
    let low = tar(&[("etc/passwd", "app:x:7:8::/:\n"), ("etc/group", "more:x:9:app\n")]);
    let store = store(directory.path());
    for (hidden_by, top) in [
        ("nothing", vec![("etc/other", "")]),
        ("a whiteout", vec![("etc/.wh.passwd", "")]),
        ("a whiteout of the directory", vec![(".wh.etc", "")]),
        ("an opaque directory", vec![("etc/.wh..wh..opq", "")]),
        ("an opaque root", vec![(".wh..wh..opq", "")]),
        ("a new directory", vec![(".wh.etc", ""), ("etc/other", "")]),
    ] {
        let layout = directory.path().join(hidden_by);
        let reference = Layout(&layout).image(&[low.clone(), tar(&top)], json!({ "User": "app" }));
        let image = store.ensure(&reference, None).await.unwrap();
        let shown = in_overlay(&image.layers, "cat etc/passwd 2>/dev/null || true");
        match (hidden_by, image.user()) {
            ("nothing", user) => assert_eq!(user.unwrap(), User { uid: 7, gid: 8, additional_gids: vec![9] }),
            (_, Err(UserError::UnknownUser { .. })) => assert_eq!(shown, "", "{hidden_by}"),
            (_, user) => panic!("{hidden_by}: {user:?}"),
        }
    }
}
