//! Boxes that wait for their actor: made of what the node sent, and gone without a trace.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::task::{Context, Waker};

use ate_orders::chain;
use ate_sandbox::{Container, Driver, Mount, Reaper, Sandbox, SandboxError, Workload};
use ate_sandbox_gvisor::GvisorDriver;
use rustix::mount::{UnmountFlags, unmount};

use crate::durable::Durable;
use crate::identity;
use crate::link::{BoxKind, Prepare};
use crate::output::{self, Sink};
use crate::root::{BOXES, IMAGES, RUNTIMES, VOLUMES};

/// Boxes that wait in a worker. Each is a sandbox with its processes and some tens of megabytes, and keeps its image and its runtime
/// on the disk; whoever finds none of its kind waits until one is made.
const WARM_KEPT: usize = 4;

/// A box without an actor.
pub(crate) struct WarmBox {
    pub(crate) sandbox: Box<dyn Sandbox>,
    pub(crate) place: Place,
    pub(crate) sink: Sink,
}

impl WarmBox {
    /// Also while it waits: memory may have become scarce.
    fn has_ended(&self) -> bool {
        self.sandbox.ended().as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    /// Ends it and clears away what it leaves.
    pub(crate) async fn remove(self) {
        if let Err(error) = self.sandbox.destroy().await {
            // What is left over goes with the worker.
            tracing::warn!(error = chain(&error), "a box was not cleaned up");
        }
        clear_away(self);
    }
}

/// What a box leaves may be a gigabyte that is still to be written where nobody will read it; nobody waits for that.
pub(crate) fn clear_away(left: impl Send + 'static) {
    tokio::task::spawn_blocking(move || drop(left));
}

/// The boxes that wait, one of a kind, in the order in which they were made.
#[derive(Default)]
pub(crate) struct Warm(Vec<(BoxKind, WarmBox)>);

impl Warm {
    /// Returns the one that makes room: of the same kind, or the one that has waited longest if there are too many.
    pub(crate) fn put(&mut self, kind: BoxKind, warm: WarmBox) -> Option<WarmBox> {
        let same = self.0.iter().position(|(known, _)| *known == kind);
        let goes = same.or((self.0.len() >= WARM_KEPT).then_some(0));
        let gone = goes.map(|index| self.0.remove(index).1);
        self.0.push((kind, warm));
        gone
    }

    /// The one of this kind, unless it has ended, and those that have.
    pub(crate) fn take(&mut self, kind: &BoxKind) -> (Option<WarmBox>, Vec<WarmBox>) {
        let ended = self.0.extract_if(.., |(_, warm)| warm.has_ended()).map(|(_, warm)| warm).collect();
        let found = self.0.iter().position(|(known, _)| known == kind);
        (found.map(|index| self.0.remove(index).1), ended)
    }

    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = WarmBox> + use<> {
        std::mem::take(&mut self.0).into_iter().map(|(_, warm)| warm)
    }

    pub(crate) fn kinds(&self) -> Vec<BoxKind> {
        self.0.iter().map(|(kind, _)| kind.clone()).collect()
    }
}

/// Where a box lies in the worker's file system. Dropped after its sandbox has ended, and everything below goes with it.
pub(crate) struct Place {
    pub(crate) identity: PathBuf,
    pub(crate) durable: Option<Durable>,
    mounts: Vec<PathBuf>,
    /// Open for as long as the box is there: the node evicts nothing that somebody holds open.
    _leases: Vec<OwnedFd>,
}

impl Place {
    fn new(id: &str, leases: Vec<OwnedFd>) -> Self {
        Self { identity: Path::new(BOXES).join(id), durable: None, mounts: Vec::new(), _leases: leases }
    }

    fn attach(&mut self, parent: &str, name: &str, mount: &OwnedFd) -> Result<PathBuf, SandboxError> {
        let at = Path::new(parent).join(name);
        std::fs::create_dir_all(&at).map_err(SandboxError::io("make a mount point"))?;
        self.mounts.push(at.clone());
        ate_sys::attach(mount, &at).map_err(SandboxError::io("attach a mount that the node sent"))?;
        Ok(at)
    }

    /// `durable`: where the durable directory is attached.
    fn mounts(&self, volumes: &BTreeMap<String, String>, durable: Option<&Path>) -> Result<Vec<Mount>, SandboxError> {
        let mut mounts = vec![
            Mount { source: self.identity.clone(), destination: "/run/ate".into(), writable: false },
            Mount {
                source: self.identity.join("resolv.conf"),
                destination: "/etc/resolv.conf".into(),
                writable: false,
            },
        ];
        for (volume, destination) in volumes {
            // Without it the directory would be in the worker's own root, which is memory.
            let Some(durable) = durable else { return Err(incomplete("a volume needs a durable directory")) };
            let source = durable.join(volume);
            std::fs::create_dir_all(&source).map_err(SandboxError::io("make a volume"))?;
            mounts.push(Mount { source, destination: destination.clone(), writable: true });
        }
        Ok(mounts)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for mount in &self.mounts {
            // Lazily: a process that is just being reaped may still hold it.
            let _ = unmount(mount, UnmountFlags::DETACH);
            let _ = std::fs::remove_dir(mount);
        }
        let _ = std::fs::remove_dir_all(&self.identity);
    }
}

fn incomplete(message: &str) -> SandboxError {
    SandboxError::Runtime { what: "prepare a box".to_owned(), message: message.to_owned() }
}

/// Makes a box. `fds`: the runtime, one root file system per container, the durable directory if there is one, and what is
/// to be kept open with the box.
pub(crate) async fn make(
    id: &str,
    cgroup: &str,
    prepare: &Prepare,
    mut fds: Vec<OwnedFd>,
    reaper: Reaper,
) -> Result<WarmBox, SandboxError> {
    let images = 1..1 + prepare.containers.len();
    let needed = images.end + usize::from(prepare.durable);
    if fds.len() < needed {
        return Err(incomplete(
            "a box needs one runtime, one root file system per container, and its durable directory",
        ));
    }
    let mut place = Place::new(id, fds.split_off(needed));
    identity::blank(&place.identity).map_err(SandboxError::io("write the identity"))?;
    let runtime = place.attach(RUNTIMES, id, &fds[0])?;
    let mut durable = None;
    if prepare.durable {
        let at = place.attach(VOLUMES, id, &fds[images.end])?;
        place.durable = Some(Durable::open(&at).map_err(SandboxError::io("open the durable directory"))?);
        durable = Some(at);
    }
    let (mut containers, mut stdio, sink) = (Vec::new(), Vec::new(), Sink::default());
    for (index, (spec, image)) in prepare.containers.iter().zip(&fds[images]).enumerate() {
        containers.push(Container {
            name: spec.name.clone(),
            rootfs: place.attach(IMAGES, &format!("{id}.{index}"), image)?,
            args: spec.args.clone(),
            env: spec.env.clone(),
            cwd: spec.cwd.clone(),
            user: spec.user.clone(),
            mounts: place.mounts(&spec.volumes, durable.as_deref())?,
        });
        let (reader, writer) = std::io::pipe().map_err(SandboxError::io("make a pipe"))?;
        output::follow(reader.into(), spec.name.clone(), sink.clone());
        stdio.push(OwnedFd::from(writer));
    }
    let workload = Workload {
        containers,
        hostname: "actor".to_owned(),
        cgroup: Some(format!("{cgroup}/{id}")),
        memory_limit: prepare.memory_limit,
        cpu_limit_millis: prepare.cpu_limit_millis,
    };
    let driver = GvisorDriver::new(&runtime.join("runsc"), Path::new("/run"), reaper);
    let sandbox = driver.prepare(&workload, id, stdio).await?;
    Ok(WarmBox { sandbox, place, sink })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::still::Still;

    fn kind(name: &str) -> BoxKind {
        BoxKind(name.to_owned())
    }

    fn warm(id: &str, sandbox: Still) -> WarmBox {
        WarmBox { sandbox: Box::new(sandbox), place: Place::new(id, Vec::new()), sink: Sink::default() }
    }

    fn id(warm: &WarmBox) -> String {
        warm.place.identity.file_name().expect("an id").to_string_lossy().into_owned()
    }

    #[test]
    fn few_boxes_wait_and_those_that_have_waited_longest_go() {
        let mut boxes = Warm::default();
        for n in 0..WARM_KEPT {
            assert!(boxes.put(kind(&format!("k{n}")), warm(&n.to_string(), Still::default())).is_none());
        }
        let gone = boxes.put(kind("k1"), warm("second", Still::default())).expect("one of a kind");
        assert_eq!(id(&gone), "1");
        let gone = boxes.put(kind("new"), warm("new", Still::default())).expect("one too many");
        assert_eq!(id(&gone), "0");
        assert_eq!(boxes.kinds().len(), WARM_KEPT);
        assert!(boxes.take(&kind("k0")).0.is_none());
        assert_eq!(boxes.take(&kind("k1")).0.map(|warm| id(&warm)).as_deref(), Some("second"));
        assert!(boxes.take(&kind("k1")).0.is_none());
    }

    #[test]
    fn a_box_that_has_ended_while_it_waited_is_not_used() {
        let mut boxes = Warm::default();
        let dead = Still::default();
        let ends = dead.ended.clone();
        boxes.put(kind("other"), warm("alive", Still::default()));
        boxes.put(kind("k"), warm("dead", dead));
        ends.cancel();
        let (taken, ended) = boxes.take(&kind("k"));
        assert!(taken.is_none());
        assert_eq!(ended.iter().map(id).collect::<Vec<_>>(), ["dead"]);
        assert_eq!(boxes.take(&kind("other")).0.map(|warm| id(&warm)).as_deref(), Some("alive"));
    }
}
