//! The public project's way: a pause and an application container in one sandbox of the stock build, and each step a
//! command of runsc, with the flags that the public project uses.
//!
//! In its favour, and so against our ratios: the network is set up ahead, images stay in the page cache (`-direct` is left
//! out, as its later versions do), nothing is downloaded, hashed or unpacked, and no process of its own is asked first.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ate_sandbox::Reaper;
use rustix::mount::{MountFlags, mount};
use serde_json::{Value, json};

use super::{Order, SiteArgs, Watch, Works, first_answer};
use crate::{BenchError, image};

const NETWORK: &str = "/run/netns/actor";

/// Static, and small: what the pause container's only process is.
const PAUSE: &str = "/bin/busybox";

pub(super) struct Public {
    runsc: PathBuf,
    directory: PathBuf,
    reaper: Reaper,
}

impl Public {
    pub(super) async fn new(args: &SiteArgs, reaper: Reaper) -> Result<Self, BenchError> {
        let site = Self { runsc: args.runtime.join("stock/runsc"), directory: args.directory.clone(), reaper };
        site.write_bundles(&args.rootfs).map_err(BenchError::io("write bundles"))?;
        site.set_up_network().await.map_err(|error| BenchError::refused("set up a network", error))?;
        Ok(site)
    }

    fn write_bundles(&self, rootfs: &Path) -> std::io::Result<()> {
        let annotations = |kind: &str| json!({"io.kubernetes.cri.container-type": kind});
        let mut member = annotations("container");
        member["io.kubernetes.cri.container-name"] = json!("app");
        member["io.kubernetes.cri.sandbox-id"] = json!("pause");
        let root = |name: &str| self.bundle(name).join("rootfs");
        for name in ["pause", "app"] {
            std::fs::create_dir_all(root(name))?;
        }
        for directory in ["bin", "proc", "dev", "sys"] {
            std::fs::create_dir_all(root("pause").join(directory))?;
        }
        std::fs::copy(PAUSE, root("pause").join("bin/busybox"))?;
        // Writable, as a bundle's root is, without touching what others read.
        let changes = self.directory.join("changes");
        std::fs::create_dir_all(&changes)?;
        mount("tmpfs", &changes, "tmpfs", MountFlags::empty(), None)?;
        for directory in ["upper", "work"] {
            std::fs::create_dir(changes.join(directory))?;
        }
        let options = format!(
            "lowerdir={},upperdir={changes}/upper,workdir={changes}/work",
            rootfs.display(),
            changes = changes.display()
        );
        let options = std::ffi::CString::new(options).map_err(std::io::Error::other)?;
        mount("overlay", root("app"), "overlay", MountFlags::empty(), Some(options.as_c_str()))?;
        let pause = spec(&[PAUSE, "sleep", "1000000"], &annotations("sandbox"));
        std::fs::write(self.bundle("pause").join("config.json"), serde_json::to_vec(&pause)?)?;
        let app = spec(&image::ENTRYPOINT, &member);
        std::fs::write(self.bundle("app").join("config.json"), serde_json::to_vec(&app)?)
    }

    async fn set_up_network(&self) -> Result<(), String> {
        // Names of namespaces are files, which would outlive us on the host's own.
        mount("tmpfs", "/run", "tmpfs", MountFlags::empty(), None).map_err(|error| error.to_string())?;
        for line in [
            "link set lo up",
            "netns add actor",
            "link add ateom0 type veth peer name eth0 netns actor",
            "addr add 169.254.17.1/30 dev ateom0",
            "link set ateom0 up",
            "-n actor link set lo up",
        ] {
            self.run(Command::new("ip").args(line.split(' '))).await?;
        }
        Ok(())
    }

    /// A sandbox takes the addresses off the device; the next one wants to find them there, and nothing else of the last.
    async fn prepare(&self) -> Result<(), String> {
        let states = std::fs::read_dir(self.directory.join("runsc-state")).into_iter().flatten().flatten();
        states.for_each(|state| drop(std::fs::remove_file(state.path())));
        for container in ["pause", "app"] {
            let root = std::fs::read_dir(self.bundle(container).join("rootfs")).into_iter().flatten().flatten();
            let leftovers = root.filter(|entry| entry.file_name().to_string_lossy().starts_with(".gvisor.filestore"));
            leftovers.for_each(|leftover| drop(std::fs::remove_file(leftover.path())));
        }
        for line in [
            "-n actor addr replace 169.254.17.2/30 dev eth0",
            "-n actor link set eth0 up",
            "-n actor route replace default via 169.254.17.1",
        ] {
            self.run(Command::new("ip").args(line.split(' '))).await?;
        }
        Ok(())
    }

    fn bundle(&self, container: &str) -> PathBuf {
        self.directory.join("bundles").join(container)
    }

    fn images(&self) -> PathBuf {
        self.directory.join("checkpoint-state")
    }

    async fn run(&self, command: &mut Command) -> Result<(), String> {
        let log = || File::options().create(true).append(true).open(self.directory.join("output.log"));
        let (stdout, stderr) = (log().map_err(|e| e.to_string())?, log().map_err(|e| e.to_string())?);
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        let child = self.reaper.spawn(command).map_err(|error| format!("{command:?}: {error}"))?;
        let exited = child.exited().await;
        self.reaper.forget(child.pid);
        if exited.success() { Ok(()) } else { Err(format!("{command:?} ended with {exited:?}")) }
    }

    async fn runsc<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Result<(), String> {
        let mut command = Command::new(&self.runsc);
        command.args(["-log-format", "json", "--alsologtostderr", "-root"]).arg(self.directory.join("runsc-state"));
        self.run(command.args(args)).await
    }

    async fn create(&self, container: &str) -> Result<(), String> {
        let (bundle, pid) = (self.bundle(container), self.directory.join(format!("{container}.pid")));
        let (bundle, pid) = (bundle.to_string_lossy(), pid.to_string_lossy());
        self.runsc(["create", "-bundle", &bundle, "-pid-file", &pid, container]).await
    }

    async fn restore(&self, container: &str) -> Result<(), String> {
        let (bundle, pid) = (self.bundle(container), self.directory.join(format!("{container}.pid")));
        let (bundle, pid, images) = (bundle.to_string_lossy(), pid.to_string_lossy(), self.images());
        let images = images.to_string_lossy();
        self.runsc([
            "restore",
            "-bundle",
            &bundle,
            "-image-path",
            &images,
            "-pid-file",
            &pid,
            "-background",
            "-detach",
            container,
        ])
        .await
    }

    async fn begin(&self, restore: bool, watch: &mut Watch) -> Result<(), String> {
        for container in ["pause", "app"] {
            self.create(container).await?;
            watch.lap(&format!("create {container}"));
            match restore {
                true => self.restore(container).await?,
                false => self.runsc(["start", container]).await?,
            }
            watch.lap(&format!("{} {container}", if restore { "restore" } else { "start" }));
        }
        first_answer(watch).await
    }

    async fn suspend(&self, watch: &mut Watch) -> Result<(), String> {
        let images = self.images();
        let _ = std::fs::remove_dir_all(&images);
        std::fs::create_dir_all(&images).map_err(|error| error.to_string())?;
        self.runsc(["checkpoint", "-image-path", &images.to_string_lossy(), "pause"]).await?;
        watch.lap("checkpoint");
        for container in ["app", "pause"] {
            // Best effort, as it is there: the sandbox has ended with its checkpoint.
            let _ = self.runsc(["state", container]).await;
            let _ = self.runsc(["delete", "-force", container]).await;
        }
        watch.lap("delete");
        Ok(())
    }
}

impl Works for Public {
    async fn carry_out(&mut self, order: Order, watch: &mut Watch) -> Result<Option<u64>, String> {
        match order {
            Order::Prepare => self.prepare().await?,
            Order::Boot => self.begin(false, watch).await?,
            Order::Restore => self.begin(true, watch).await?,
            Order::Suspend => self.suspend(watch).await?,
            Order::Request => first_answer(watch).await?,
            Order::Discard | Order::Freeze | Order::Compress => return Err("this site does not do that".to_owned()),
        }
        Ok(None)
    }
}

fn spec(args: &[&str], annotations: &Value) -> Value {
    let capabilities = ["CAP_NET_BIND_SERVICE", "CAP_KILL", "CAP_CHOWN", "CAP_DAC_OVERRIDE"];
    json!({
        "ociVersion": "1.2.0",
        "hostname": "actor",
        "root": {"path": "rootfs", "readonly": false},
        "process": {
            "args": args,
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "user": {"uid": 0, "gid": 0},
            "capabilities": {
                "bounding": capabilities, "effective": capabilities,
                "inheritable": capabilities, "permitted": capabilities,
            },
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
        ],
        "linux": {
            "namespaces": [
                {"type": "pid"}, {"type": "network", "path": NETWORK}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
            ],
        },
        "annotations": annotations,
    })
}
