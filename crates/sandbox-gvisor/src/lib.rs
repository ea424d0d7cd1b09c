//! gVisor: boxes made by `runsc create` and driven over their control socket.
//!
//! The command line is used to create a box, ahead of need; everything on the path of a request or a suspend is a call on
//! the control socket, which saves 30 to 45 ms each. The protocol belongs to a build of runsc: the one that
//! `runtime/build` names.
//!
//! What must stay so, because the contrary loses actors: a box is stopped with `Pause`, never with the cgroup freezer
//! (thawing twice kills an idle sandbox); a checkpoint asks to resume, never to exit (a failed save would be the end);
//! segmentation is the host's (see [`spec`]); the stop timeout is zero (an ended box would linger for 15 s).

pub mod spec;
mod urpc;

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use ate_sandbox::{Driver, Exec, Exit, LinkConfig, Reaper, Sandbox, SandboxError, Spawned, Workload};
use ate_sys::{Cgroup, Memory};
use rustix::process::{Pid, Signal, kill_process};
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio::sync::watch;

use urpc::{CallError, Control};

/// `create` takes 0.1 s; on a machine that is out of memory or disk it can hang, and the slot with it.
const CREATE_TIMEOUT: Duration = Duration::from_secs(30);

/// Control calls that only flip state. Generous: a machine under load must not lose an actor to a stopwatch.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// Saving and loading grow with memory: about 0.6 s/GB here, so this is room for a hundred GB.
const IMAGE_TIMEOUT: Duration = Duration::from_secs(120);

/// A control server that is there answers a question at once.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// Between the end of a sandbox's process and the news of how its workload ended, both on their way to us.
const LAST_WORDS: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub struct GvisorDriver {
    runsc: PathBuf,
    /// Bundles, runsc's own state and its logs, of all boxes of this driver.
    directory: PathBuf,
    reaper: Reaper,
}

impl GvisorDriver {
    /// A driver that runs the `runsc` binary given, with its sidecars beside it in `gvisor-bin/` if it has any.
    pub fn new(runsc: &Path, directory: &Path, reaper: Reaper) -> Self {
        Self { runsc: runsc.to_owned(), directory: directory.to_owned(), reaper }
    }

    fn command(&self, id: &str) -> Command {
        let mut command = Command::new(&self.runsc);
        command
            .arg(format!("--root={}", self.state().display()))
            .arg(format!("--log={}", self.log(id).display()))
            .args([
                "--platform=systrap",
                "--network=sandbox",
                "--overlay2=root:memory",
                "--control-rpc-stop-timeout=0s",
                "--allow-live-tcp-migration=false",
            ])
            .env_clear();
        command
    }

    fn state(&self) -> PathBuf {
        self.directory.join("state")
    }

    fn socket(&self, id: &str) -> PathBuf {
        self.state().join(format!("runsc-{id}.sock"))
    }

    fn log(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{id}.log"))
    }

    fn bundle(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{id}.bundle"))
    }

    async fn cli(&self, id: &str, what: &str, command: &mut Command) -> Result<(), SandboxError> {
        let child = self.reaper.spawn(command).map_err(SandboxError::io(format!("start runsc to {what}")))?;
        let exited = match tokio::time::timeout(CREATE_TIMEOUT, child.exited()).await {
            Ok(exited) => exited,
            Err(_) => {
                kill(child.pid);
                return Err(SandboxError::Timeout { what: what.to_owned(), after: CREATE_TIMEOUT });
            }
        };
        self.reaper.forget(child.pid);
        if exited.success() {
            return Ok(());
        }
        let log = std::fs::read_to_string(self.log(id)).unwrap_or_default();
        let message = log.lines().last().unwrap_or("nothing").trim().to_owned();
        Err(SandboxError::Runtime { what: format!("{what} ({exited:?})"), message })
    }

    async fn create(
        &self,
        workload: &Workload,
        index: usize,
        root_id: &str,
        id: &str,
        stdio: &OwnedFd,
    ) -> Result<(), SandboxError> {
        let container = &workload.containers[index];
        let spec = spec::oci(workload, container, index == 0, root_id);
        spec::write_bundle(&self.bundle(id), &spec).map_err(SandboxError::io("write the bundle"))?;
        let bundle = format!("--bundle={}", self.bundle(id).display());
        self.on_container(id, &format!("create container {:?}", container.name), &["create", &bundle], stdio).await
    }

    /// A subcommand on a container, whose output goes where the container's is to go.
    async fn on_container(&self, id: &str, what: &str, args: &[&str], stdio: &OwnedFd) -> Result<(), SandboxError> {
        let output = || stdio.try_clone().map(Stdio::from).map_err(SandboxError::io("share the output"));
        let mut command = self.command(id);
        command.args(args).arg(id).stdin(Stdio::null()).stdout(output()?).stderr(output()?);
        self.cli(id, what, &mut command).await
    }
}

#[async_trait::async_trait]
impl Driver for GvisorDriver {
    async fn prepare(
        &self,
        workload: &Workload,
        id: &str,
        stdio: Vec<OwnedFd>,
    ) -> Result<Box<dyn Sandbox>, SandboxError> {
        std::fs::create_dir_all(self.state()).map_err(SandboxError::io("make the state directory"))?;
        let cgroup = workload.cgroup.as_deref().map(Cgroup::at);
        let created = match self.create(workload, 0, id, id, &stdio[0]).await {
            Ok(()) => self.pids(id),
            Err(error) => Err(error),
        };
        let [sandbox, gofer] = match created {
            Ok(pids) => pids,
            Err(error) => {
                self.clear_failed(id, cgroup.as_ref()).await;
                return Err(error);
            }
        };
        let mut made = GvisorBox {
            runsc: Self::new(&self.runsc, &self.directory, self.reaper.clone()),
            id: id.to_owned(),
            others: Vec::new(),
            surroundings: workload.containers.iter().map(|one| (one.env.clone(), one.cwd.clone())).collect(),
            control: Control::new(&self.socket(id)),
            sandbox: self.reaper.follow(sandbox),
            gofers: std::sync::Mutex::new(vec![self.reaper.follow(gofer)]),
            cgroup,
            exit: watch::Sender::new(None),
            watcher: std::sync::Mutex::default(),
        };
        for (index, output) in stdio.into_iter().enumerate().skip(1) {
            let other = format!("{id}.{index}");
            let created = self.create(workload, index, id, &other, &output).await;
            made.others.push((other, output));
            if let Err(error) = created {
                let _ = made.destroy().await;
                return Err(error);
            }
        }
        made.watch_exit(false);
        Ok(Box::new(made))
    }
}

impl GvisorDriver {
    /// A `create` that failed or hung may have got as far as processes and a control group.
    async fn clear_failed(&self, id: &str, cgroup: Option<&Cgroup>) {
        let left = cgroup.map(Cgroup::processes).unwrap_or_default();
        for &pid in &left {
            kill(pid);
            self.reaper.follow(pid).exited().await;
            self.reaper.forget(pid);
        }
        self.clear(id, std::iter::empty());
        if let Some(Err(error)) = cgroup.map(Cgroup::remove) {
            tracing::warn!(id, %error, "a box that was never made left its control group");
        }
    }

    /// Removes the files of a box.
    fn clear<'a>(&self, id: &'a str, others: impl Iterator<Item = &'a str>) {
        for id in std::iter::once(id).chain(others) {
            let _ = std::fs::remove_dir_all(self.bundle(id));
            let _ = std::fs::remove_file(self.log(id));
        }
        let own = |name: &str| {
            name.starts_with(&format!("{id}_"))
                || name.starts_with(&format!("{id}."))
                || name.starts_with(&format!("runsc-{id}."))
        };
        let entries = std::fs::read_dir(self.state()).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| own(&entry.file_name().to_string_lossy())) {
            let _ = std::fs::remove_file(entry.path());
        }
    }

    /// The sandbox's and the gofer's pid, from the state that `create` has left.
    fn pids(&self, id: &str) -> Result<[u32; 2], SandboxError> {
        let broken =
            |message: &str| SandboxError::Runtime { what: format!("read the state of {id}"), message: message.into() };
        let entries = std::fs::read_dir(self.state()).map_err(SandboxError::io("list the state directory"))?;
        let file = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| {
                path.file_name().is_some_and(|name| {
                    let name = name.to_string_lossy();
                    name.starts_with(&format!("{id}_")) && name.ends_with(".state")
                })
            })
            .ok_or_else(|| broken("there is no state file"))?;
        let state = std::fs::read(file).map_err(SandboxError::io("read the state file"))?;
        let state: Value = serde_json::from_slice(&state).map_err(|error| broken(&error.to_string()))?;
        let number = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|&pid| pid > 1);
        match (number(&state["sandbox"]["pid"]), number(&state["goferPid"])) {
            (Some(sandbox), Some(gofer)) => Ok([sandbox, gofer]),
            _ => Err(broken("it names no processes")),
        }
    }
}

struct GvisorBox {
    runsc: GvisorDriver,
    id: String,
    /// Containers beside the root one, and where their output goes.
    others: Vec<(String, OwnedFd)>,
    /// What commands in each container find: its variables, and where it works.
    surroundings: Vec<(Vec<String>, String)>,
    control: Control,
    sandbox: Spawned,
    gofers: std::sync::Mutex<Vec<Spawned>>,
    cgroup: Option<Cgroup>,
    exit: watch::Sender<Option<Exit>>,
    watcher: std::sync::Mutex<Option<tokio::task::AbortHandle>>,
}

impl GvisorBox {
    async fn call<R: serde::de::DeserializeOwned>(
        &self,
        method: &str,
        arg: &Value,
        fds: &[BorrowedFd<'_>],
        within: Duration,
    ) -> Result<R, SandboxError> {
        let full = format!("containerManager.{method}");
        let call = self.control.call(&full, arg, fds);
        match tokio::time::timeout(within, call).await {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(CallError::Refused(message))) => Err(SandboxError::Runtime { what: method.to_owned(), message }),
            Ok(Err(CallError::Io(source))) => Err(SandboxError::Io { what: format!("call {method}"), source }),
            Ok(Err(error @ CallError::Garbled(_))) => {
                Err(SandboxError::Runtime { what: method.to_owned(), message: error.to_string() })
            }
            Err(_) => Err(SandboxError::Timeout { what: method.to_owned(), after: within }),
        }
    }

    async fn connect_network(&self, link: &LinkConfig, socket: BorrowedFd<'_>) -> Result<(), SandboxError> {
        let IgnoredAny = self.call("SetNetworkArgs", &spec::network(link), &[socket], CALL_TIMEOUT).await?;
        Ok(())
    }

    /// Has the containers beside the root one do as the sandbox does. Their file servers are made only now.
    async fn others(&self, args: &[&str]) -> Result<(), SandboxError> {
        for (other, output) in &self.others {
            let what = format!("{} container {other}", args[0]);
            self.runsc.on_container(other, &what, args, output).await?;
            let [_, gofer] = self.runsc.pids(other)?;
            self.gofers.lock().expect("no holder panics").push(self.runsc.reaper.follow(gofer));
        }
        Ok(())
    }

    /// Follows the box to its end. `started`: ask the sandbox for the workload's exit, on a connection of its own, since
    /// the call waits as long as the workload lives, over freezes and checkpoints.
    fn watch_exit(&self, started: bool) {
        let control = Control::new(&self.runsc.socket(&self.id));
        let (exit, sandbox, cgroup, id) =
            (self.exit.clone(), self.sandbox.clone(), self.cgroup.clone(), self.id.clone());
        let task = tokio::spawn(async move {
            let status = async {
                if !started {
                    return std::future::pending().await;
                }
                match workload_status(&control, &id, &sandbox).await {
                    Some(status) => from_status(status),
                    None => std::future::pending().await,
                }
            };
            tokio::pin!(status);
            let ended = tokio::select! {
                exit = &mut status => exit,
                _ = sandbox.exited() => match tokio::time::timeout(LAST_WORDS, &mut status).await {
                    Ok(exit) => exit,
                    Err(_) if cgroup.is_some_and(|cgroup| cgroup.oom_kills() > 0) => Exit::OutOfMemory,
                    Err(_) => Exit::Killed,
                },
            };
            exit.send_if_modified(|known| {
                known.is_none() && {
                    *known = Some(ended);
                    true
                }
            });
        });
        // The watcher from before the start knows nothing of the workload's exit: the later one takes its place.
        if let Some(earlier) = self.watcher.lock().expect("no holder panics").replace(task.abort_handle()) {
            earlier.abort();
        }
    }
}

/// Waits for the workload's first process. `None` if the sandbox went away without a word.
///
/// A restore replaces the server behind the control socket, and a connection made while it does is never answered: so the
/// connection first has to show that somebody listens.
async fn workload_status(control: &Control, id: &str, sandbox: &Spawned) -> Option<u32> {
    let id = json!(id);
    while !sandbox.has_exited() {
        let state = control.call::<_, IgnoredAny>("containerManager.ContainerRuntimeState", &id, &[]);
        if let Ok(Ok(IgnoredAny)) = tokio::time::timeout(ANSWERS_WITHIN, state).await {
            return control.call("containerManager.Wait", &id, &[]).await.ok();
        }
    }
    None
}

/// A wait status as Linux packs it.
fn from_status(status: u32) -> Exit {
    match status & 0x7f {
        0 => Exit::Code(i32::from(status.to_be_bytes()[2])),
        signal => Exit::Signal(signal.cast_signed()),
    }
}

#[async_trait::async_trait]
impl Sandbox for GvisorBox {
    async fn run(&self, link: &LinkConfig, socket: BorrowedFd<'_>) -> Result<(), SandboxError> {
        self.connect_network(link, socket).await?;
        let IgnoredAny = self.call("StartRoot", &json!(self.id), &[], CALL_TIMEOUT).await?;
        self.others(&["start"]).await?;
        self.watch_exit(true);
        Ok(())
    }

    async fn restore(&self, image: &Memory, link: &LinkConfig, socket: BorrowedFd<'_>) -> Result<(), SandboxError> {
        self.connect_network(link, socket).await?;
        image.rewind().map_err(SandboxError::io("rewind the image"))?;
        let options = json!({"HavePagesFile": false, "HaveDeviceFile": false, "Background": false});
        let IgnoredAny = self.call("Restore", &options, &[image.as_fd()], IMAGE_TIMEOUT).await?;
        // The image is that of the whole sandbox and has been handed over: the path is not looked at.
        self.others(&["restore", "--detach", "--image-path=/"]).await?;
        self.control.reconnect().await;
        self.watch_exit(true);
        Ok(())
    }

    async fn freeze(&self) -> Result<(), SandboxError> {
        let IgnoredAny = self.call("Pause", &Value::Null, &[], CALL_TIMEOUT).await?;
        Ok(())
    }

    async fn thaw(&self) -> Result<(), SandboxError> {
        let IgnoredAny = self.call("Resume", &Value::Null, &[], CALL_TIMEOUT).await?;
        Ok(())
    }

    async fn checkpoint(&self, image: &mut Memory) -> Result<usize, SandboxError> {
        image.rewind().map_err(SandboxError::io("rewind the image"))?;
        let options = json!({
            "metadata": {"compression": "none"},
            "have_pages_file": false,
            "Resume": true,
            "app_mf_exclude_committed_zero_pages": false,
            "ExecOpts": {"Argv": "", "Timeout": 0, "ContainerID": ""},
        });
        let IgnoredAny = self.call("Checkpoint", &options, &[image.as_fd()], IMAGE_TIMEOUT).await?;
        image.written().map_err(SandboxError::io("measure the image"))
    }

    async fn exec(&self, exec: &Exec, stdio: [OwnedFd; 3]) -> Result<Exit, SandboxError> {
        let container = if exec.container == 0 { self.id.clone() } else { format!("{}.{}", self.id, exec.container) };
        let (env, cwd) = self.surroundings.get(exec.container).cloned().unwrap_or_default();
        let name = |variable: &str| variable.split('=').next().unwrap_or_default().to_owned();
        let own: HashSet<String> = exec.env.iter().map(|variable| name(variable)).collect();
        let env: Vec<String> =
            env.into_iter().filter(|variable| !own.contains(&name(variable))).chain(exec.env.clone()).collect();
        let cwd = exec.cwd.clone().unwrap_or(cwd);
        let cwd = if cwd.is_empty() { "/" } else { &cwd };
        let arg = json!({
            "argv": exec.args, "envv": env, "wd": cwd, "ContainerID": container,
            "GuestFDs": [0, 1, 2], "KUID": 0, "KGID": 0,
        });
        let fds: Vec<BorrowedFd<'_>> = stdio.iter().map(AsFd::as_fd).collect();
        let started = self.call("ExecuteAsync", &arg, &fds, CALL_TIMEOUT).await;
        let pid: i32 = started.map_err(|error| match error {
            // Mostly that there is no such program in the image: what counts is which.
            SandboxError::Runtime { message, .. } => {
                let program = exec.args.first().map_or("", String::as_str);
                SandboxError::Runtime { what: format!("cannot run {program:?}"), message }
            }
            error => error,
        })?;
        drop(fds);
        drop(stdio);
        let own = Control::new(&self.runsc.socket(&self.id));
        let status = own.call("containerManager.WaitPID", &json!({"PID": pid, "CID": container}), &[]).await;
        Ok(status.map_or(Exit::Killed, from_status))
    }

    async fn ended(&self) -> Exit {
        let mut exit = self.exit.subscribe();
        exit.wait_for(Option::is_some).await.ok().and_then(|exit| exit.clone()).unwrap_or(Exit::Killed)
    }

    fn memory_bytes(&self) -> u64 {
        self.cgroup.as_ref().and_then(Cgroup::memory_bytes).unwrap_or(0)
    }

    async fn destroy(&self) -> Result<(), SandboxError> {
        let gofers = self.gofers.lock().expect("no holder panics").clone();
        for process in std::iter::once(&self.sandbox).chain(&gofers) {
            if !process.has_exited() {
                kill(process.pid);
            }
        }
        for process in std::iter::once(&self.sandbox).chain(&gofers) {
            process.exited().await;
            self.runsc.reaper.forget(process.pid);
        }
        self.runsc.clear(&self.id, self.others.iter().map(|(id, _)| id.as_str()));
        if let Some(cgroup) = &self.cgroup {
            cgroup.remove().map_err(SandboxError::io("remove the cgroup"))?;
        }
        Ok(())
    }
}

fn kill(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::KILL);
    }
}
