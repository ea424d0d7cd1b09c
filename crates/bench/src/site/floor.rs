//! The floor: what a wake and a suspend cost when the sandbox is all there is.
//!
//! It stands on our driver, which is a thin client of runsc's control socket: a sandbox created ahead, its network and
//! `Restore` sent over the socket, the image in memory that is faulted in already. No router, no control plane, no store,
//! no snapshot on disk, no difference to a golden, no encryption.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use ate_network::Interior;
use ate_sandbox::{Container, Driver, LinkConfig, Reaper, Sandbox, User, Workload};
use ate_sandbox_gvisor::GvisorDriver;
use ate_sys::{Cgroup, Memory};

use super::{Order, SiteArgs, Watch, Works, first_answer};
use crate::{BenchError, image};

/// More than an image of the workload takes.
const IMAGE_ROOM: usize = 64 << 20;

pub(super) struct Floor {
    driver: GvisorDriver,
    interior: Interior,
    rootfs: PathBuf,
    cgroup: Cgroup,
    made: u64,
    ahead: Option<Box<dyn Sandbox>>,
    running: Option<Box<dyn Sandbox>>,
    frozen: bool,
    image: Memory,
    image_length: usize,
}

impl Floor {
    pub(super) fn new(args: &SiteArgs, interior: Interior, reaper: Reaper) -> Result<Self, BenchError> {
        Ok(Self {
            driver: GvisorDriver::new(&args.runtime.join("tuned/runsc"), &args.directory, reaper),
            interior,
            rootfs: args.rootfs.clone(),
            cgroup: Cgroup::at(&args.cgroup),
            made: 0,
            ahead: None,
            running: None,
            frozen: false,
            image: Memory::with_capacity("floor", IMAGE_ROOM).map_err(BenchError::io("make room for an image"))?,
            image_length: 0,
        })
    }

    async fn prepare(&mut self) -> Result<(), String> {
        if self.ahead.is_some() {
            return Ok(());
        }
        self.made += 1;
        let id = format!("f{}", self.made);
        let container = Container {
            name: "main".to_owned(),
            rootfs: self.rootfs.clone(),
            args: image::ENTRYPOINT.map(str::to_owned).to_vec(),
            env: vec!["PATH=/usr/bin".to_owned()],
            cwd: "/".to_owned(),
            user: User::default(),
            mounts: Vec::new(),
        };
        let workload = Workload {
            containers: vec![container],
            hostname: "actor".to_owned(),
            cgroup: Some(self.cgroup.child(&id).path().to_owned()),
            memory_limit: None,
            cpu_limit_millis: None,
        };
        let output = std::fs::File::options().write(true).open("/dev/null").map_err(text)?;
        self.ahead = Some(self.driver.prepare(&workload, &id, vec![OwnedFd::from(output)]).await.map_err(text)?);
        Ok(())
    }

    async fn begin(&mut self, restore: bool, watch: &mut Watch) -> Result<(), String> {
        let sandbox = self.ahead.take().ok_or("nothing is prepared")?;
        let socket = self.interior.link_socket().map_err(text)?;
        watch.lap("link");
        match restore {
            true => sandbox.restore(&self.image, &link(), socket.as_fd()).await.map_err(text)?,
            false => sandbox.run(&link(), socket.as_fd()).await.map_err(text)?,
        }
        watch.lap(if restore { "restore" } else { "start" });
        self.running = Some(sandbox);
        first_answer(watch).await
    }

    async fn suspend(&mut self, watch: &mut Watch) -> Result<(), String> {
        let sandbox = self.running.take().ok_or("nothing runs")?;
        if !std::mem::take(&mut self.frozen) {
            sandbox.freeze().await.map_err(text)?;
            watch.lap("freeze");
        }
        self.image_length = sandbox.checkpoint(&mut self.image).await.map_err(text)?;
        watch.lap("checkpoint");
        sandbox.destroy().await.map_err(text)?;
        watch.lap("kill");
        Ok(())
    }
}

impl Works for Floor {
    async fn carry_out(&mut self, order: Order, watch: &mut Watch) -> Result<Option<u64>, String> {
        match order {
            Order::Prepare => self.prepare().await?,
            Order::Boot => self.begin(false, watch).await?,
            Order::Restore => self.begin(true, watch).await?,
            Order::Suspend => self.suspend(watch).await?,
            Order::Discard => self.running.take().ok_or("nothing runs")?.destroy().await.map_err(text)?,
            Order::Request => first_answer(watch).await?,
            Order::Freeze => {
                self.running.as_ref().ok_or("nothing runs")?.freeze().await.map_err(text)?;
                self.frozen = true;
            }
            Order::Compress => {
                let image = self.image.map(self.image_length).map_err(text)?;
                let encoded = ate_snapshot::delta::encode(None, &image, std::io::sink()).map_err(text)?;
                return Ok(Some(encoded.stored));
            }
        }
        Ok(None)
    }
}

fn link() -> LinkConfig {
    LinkConfig {
        mac: ate_network::ACTOR_MAC,
        mtu: ate_network::MTU,
        addresses: ate_network::actor_addresses(),
        gateways: vec![ate_network::GATEWAY_V4.into(), ate_network::GATEWAY_V6.into()],
        gateway_mac: ate_network::GATEWAY_MAC,
    }
}

fn text(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
