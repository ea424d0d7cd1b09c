//! Files of objects, read and checked before anything is sent. Paths in them mean something only beside the file, so
//! they are made absolute here.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use ate_image::Reference;
use ate_object::{MAX_MANIFEST_BYTES, Object, read_manifests};

use crate::errors::CliError;
use crate::terminal::Terminal;

const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];
const STDIN: &str = "-";

/// The objects of all `paths`, in the order given, those of a directory by file name. Nothing if anything is wrong.
pub(crate) fn read(paths: &[PathBuf], namespace: &str, terminal: &mut Terminal) -> Result<Vec<Object>, CliError> {
    let (mut objects, mut refused) = (Vec::new(), Vec::new());
    for path in paths {
        for (file, directory) in files(path)? {
            let bytes = bytes_of(&file, &mut *terminal.stdin)
                .map_err(|source| CliError::File { path: file.clone(), source })?;
            match read_manifests(&file.display().to_string(), &bytes, namespace) {
                Ok(manifests) => {
                    manifests.notes.iter().for_each(|note| terminal.note(note));
                    for object in manifests.objects {
                        objects.push(resolved(object, &file, &directory)?);
                    }
                }
                Err(error) => refused.push(error),
            }
        }
    }
    if !refused.is_empty() {
        return Err(CliError::Manifests(refused));
    }
    if objects.is_empty() {
        // A file that was to be filled and is not would otherwise look like success.
        let names: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
        return Err(CliError::Failed(format!("no object in {}", names.join(", "))));
    }
    Ok(objects)
}

/// Each file that `path` stands for, and the absolute directory that relative paths in it start from.
fn files(path: &Path) -> Result<Vec<(PathBuf, PathBuf)>, CliError> {
    let failed = |source| CliError::File { path: path.to_owned(), source };
    if path == Path::new(STDIN) {
        return Ok(vec![(path.to_owned(), std::env::current_dir().map_err(failed)?)]);
    }
    let absolute = std::path::absolute(path).map_err(failed)?;
    if !fs::metadata(path).map_err(failed)?.is_dir() {
        let parent = absolute.parent().unwrap_or(Path::new("/")).to_owned();
        return Ok(vec![(path.to_owned(), parent)]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        let known = file.extension().is_some_and(|extension| EXTENSIONS.iter().any(|known| extension == *known));
        if known && file.is_file() {
            files.push((file, absolute.clone()));
        }
    }
    if files.is_empty() {
        return Err(CliError::Failed(format!("no *.yaml, *.yml or *.json file in {}", path.display())));
    }
    files.sort();
    Ok(files)
}

/// At most a byte more than is allowed: enough for the reader to refuse it.
fn bytes_of(file: &Path, stdin: &mut dyn Read) -> io::Result<Vec<u8>> {
    let mut opened;
    let source: &mut dyn Read = if file == Path::new(STDIN) {
        stdin
    } else {
        opened = fs::File::open(file)?;
        &mut opened
    };
    let mut bytes = Vec::new();
    source.take(MAX_MANIFEST_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn resolved(mut object: Object, file: &Path, directory: &Path) -> Result<Object, CliError> {
    let name = format!("{} \"{}\"", object.kind(), object.key());
    match &mut object {
        Object::ActorTemplate(template) => {
            let images = template.spec.containers.iter_mut().map(|container| &mut container.image);
            for image in images.chain(&mut template.spec.pause_image) {
                *image = resolved_image(image, directory).map_err(|source| CliError::Image {
                    file: file.display().to_string(),
                    object: name.clone(),
                    source,
                })?;
            }
        }
        Object::SandboxConfig(config) => {
            for asset in config.spec.assets.values_mut().flat_map(|assets| assets.values_mut()) {
                asset.url = resolved_url(&asset.url, directory);
            }
        }
        Object::WorkerPool(_) => {}
    }
    Ok(object)
}

fn resolved_image(image: &str, directory: &Path) -> Result<String, ate_image::ReferenceError> {
    if image.starts_with("oci-layout:") || image.starts_with("oci-archive:") {
        return Ok(Reference::parse(image)?.resolve_relative_to(directory).to_string());
    }
    Ok(image.to_owned())
}

fn resolved_url(url: &str, directory: &Path) -> String {
    match url.strip_prefix("file://") {
        Some(relative) if !relative.starts_with('/') => format!("file://{}", directory.join(relative).display()),
        _ => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "506a9418fe385f8eabb93b53647b4cc92e080fe4880da2a302176cd360e372a4";

    fn terminal(stdin: &'static str) -> Terminal {
        Terminal {
            stdin: Box::new(stdin.as_bytes()),
            stdout: Box::new(io::sink()),
            stderr: Box::new(io::sink()),
            colour: (false, false),
            is_watched: false,
            interrupted: Box::pin(std::future::pending()),
        }
    }

    fn pool(name: &str) -> String {
        format!("apiVersion: ate.dev/v1alpha1\nkind: WorkerPool\nmetadata:\n  name: {name}\nspec:\n  replicas: 1\n")
    }

    #[test]
    fn paths_in_a_file_start_where_the_file_is() {
        let directory = Path::new("/srv/demo");
        let image = |place: &str| resolved_image(&format!("{place}@sha256:{HEX}"), directory).unwrap();
        assert_eq!(image("oci-layout:build/image"), format!("oci-layout:///srv/demo/build/image@sha256:{HEX}"));
        assert_eq!(image("oci-archive:///a.tar"), format!("oci-archive:///a.tar@sha256:{HEX}"));
        assert_eq!(image("docker.io/library/python"), format!("docker.io/library/python@sha256:{HEX}"));
        assert!(resolved_image("oci-layout:build", directory).is_err(), "a path without a digest names no image");
        assert_eq!(resolved_url("file://bin/runsc", directory), "file:///srv/demo/bin/runsc");
        for url in ["file:///bin/runsc", "https://example.com/runsc"] {
            assert_eq!(resolved_url(url, directory), url);
        }
    }

    #[test]
    fn a_directory_is_its_manifests_by_name_and_nothing_below_it() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("deeper.yaml")).unwrap();
        for (file, name) in [("b.yml", "second"), ("a.yaml", "first"), ("c.txt", "no"), ("deeper.yaml/x.yaml", "no")] {
            fs::write(at(file), pool(name)).unwrap();
        }
        let objects = read(&[directory.path().to_owned(), at("a.yaml")], "ns", &mut terminal("")).unwrap();
        let names: Vec<String> = objects.iter().map(|object| object.key().to_string()).collect();
        assert_eq!(names, ["ns/first", "ns/second", "ns/first"]);
    }

    #[test]
    fn one_bad_file_refuses_all_and_every_bad_file_is_told() {
        let directory = tempfile::tempdir().unwrap();
        for (file, text) in [("a.yaml", pool("fine")), ("b.yaml", "kind: 1".into()), ("c.yaml", "kind: 2".into())] {
            fs::write(directory.path().join(file), text).unwrap();
        }
        let error = read(&[directory.path().to_owned()], "ns", &mut terminal("")).unwrap_err();
        assert!(matches!(&error, CliError::Manifests(errors) if errors.len() == 2), "{error}");
    }

    #[test]
    fn standard_input_is_a_file_too_and_an_empty_directory_is_an_error() {
        let text = "{apiVersion: ate.dev/v1alpha1, kind: WorkerPool, metadata: {name: x}, spec: {replicas: 1}}";
        assert_eq!(read(&["-".into()], "ns", &mut terminal(text)).unwrap().len(), 1);
        let directory = tempfile::tempdir().unwrap();
        assert!(read(&[directory.path().to_owned()], "ns", &mut terminal("")).is_err());
    }
}
