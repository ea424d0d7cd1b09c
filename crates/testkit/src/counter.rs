//! The demo's counter, as an image, and what it answers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use ate_image::{Architecture, Content, ImageConfig, Recipe};

/// What the counter says.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Reply {
    pub actor: String,
    pub memory: i64,
    pub file: i64,
    pub nonce: String,
    /// As the nonce, but drawn anew at each start and restore.
    pub launch: String,
    pub generation: u64,
    pub host: String,
}

impl Reply {
    pub fn parse(body: &str) -> Self {
        Self::try_parse(body).unwrap_or_else(|error| panic!("{error}: {body:?}"))
    }

    pub fn try_parse(body: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(body)
    }
}

/// An image reference to the counter, packed into `directory`. The program is built once per test run.
pub fn counter_image(directory: &Path) -> String {
    image(&directory.join("counter-image"), &[])
}

/// The same with `/busybox` in it, which is a shell and everything that goes with it.
pub fn shell_image(directory: &Path) -> String {
    let busybox = Content::File { from: "/bin/busybox".into(), to: "busybox".to_owned() };
    image(&directory.join("shell-image"), &[busybox])
}

fn image(layout: &Path, more: &[Content]) -> String {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let target = repository().join("target/counter");
        let status = Command::new(repository().join("demos/counter/build")).arg(&target).status();
        assert!(status.is_ok_and(|status| status.success()), "demos/counter/build failed");
        target
    });
    let content = [(Architecture::Amd64, "amd64"), (Architecture::Arm64, "arm64")].map(|(architecture, name)| {
        let from = built.join(name).join("counter");
        let counter = Content::File { from, to: "counter".to_owned() };
        (architecture, [&[counter], more].concat())
    });
    let config = ImageConfig { entrypoint: vec!["/counter".to_owned()], ..ImageConfig::default() };
    let digest =
        ate_image::pack(&Recipe { config, content: BTreeMap::from(content) }, layout).expect("the counter packs");
    format!("oci-layout://{}@sha256:{digest}", layout.display())
}

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository is where it was built")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demos_template_names_the_image_that_is_packed() {
        let directory = tempfile::tempdir().expect("a directory");
        let image = counter_image(directory.path());
        let (_, digest) = image.split_once('@').expect("it is named by its digest");
        let template = std::fs::read_to_string(repository().join("demos/counter/template.yaml")).expect("it is there");
        assert!(template.contains(&format!("image: oci-layout:image@{digest}\n")), "the image is {digest}: {template}");
    }
}
