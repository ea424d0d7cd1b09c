//! As many workers as each pool should have: started, and started again.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ate_name::WorkerUid;
use ate_orders::{NodeEvent, chain};
use ate_sys::Limits;

use crate::workers::{Birth, Handle};
use crate::{Node, NodeError, Pool};

/// A worker that is not up by then will not be.
const UP_WITHIN: Duration = Duration::from_secs(10);

/// Lines of the log of a worker that has ended, or did not come up. The last one says why; the rest is what led there.
const LAST_WORDS: usize = 10;

/// After a worker that could not be started, the next try; doubles each time, this often.
const RESTART_FIRST: Duration = Duration::from_millis(250);
const RESTART_STEPS: u32 = 7;

impl Node {
    /// Says which pools this node should have workers for. See [`Node::keep_workers`].
    pub fn set_pools(&self, pools: Vec<Pool>) {
        self.pools.send_if_modified(|known| {
            let changed = *known != pools;
            *known = pools;
            changed
        });
    }

    /// Brings each pool to its number of workers, and again when the number changes or a worker is gone, for as long as
    /// this is polled. Workers that keep dying are started anew ever more slowly.
    pub async fn keep_workers(self: Arc<Self>) {
        let mut pools = self.pools.subscribe();
        let mut failures = 0;
        loop {
            let wanted = pools.borrow_and_update().clone();
            failures = if self.fill(&wanted).await { 0 } else { (failures + 1).min(RESTART_STEPS) };
            tokio::select! {
                () = self.stopping.cancelled() => return,
                changed = pools.changed() => if changed.is_err() { return },
                () = self.missing.notified() => {}
                () = tokio::time::sleep(RESTART_FIRST * 2_u32.pow(failures)), if failures > 0 => {}
            }
        }
    }

    /// `false`: a worker could not be started.
    async fn fill(self: &Arc<Self>, pools: &[Pool]) -> bool {
        let mut filled = true;
        for pool in pools {
            let here = |handle: &&Arc<Handle>| handle.birth.pool == pool.key;
            let mut have: BTreeSet<String> =
                self.workers.lock().values().filter(here).map(|handle| handle.birth.pod.clone()).collect();
            let mut index = 0;
            while have.len() < pool.workers {
                // Where there are other nodes, names must not meet.
                let pod = match self.config.door {
                    Some(_) => format!("{}-{}-{index}", pool.key.name, self.config.name),
                    None => format!("{}-{index}", pool.key.name),
                };
                index += 1;
                if self.stopping.is_cancelled() || *self.pools.borrow() != *pools {
                    return true;
                }
                if have.insert(pod.clone())
                    && let Err(error) = self.start(pool, &pod).await
                {
                    if !self.stopping.is_cancelled() {
                        tracing::error!(pool = %pool.key, pod, error = chain(&error), "a worker could not be started");
                    }
                    // Others of this pool would fare no better; those of the next may.
                    filled = false;
                    break;
                }
            }
        }
        filled
    }

    async fn start(self: &Arc<Self>, pool: &Pool, pod: &str) -> Result<(), NodeError> {
        // Held until the worker is known or nothing of it is left: whoever stops the node waits for that.
        let one = self.starting.lock().await;
        if self.stopping.is_cancelled() {
            return Ok(());
        }
        let mut random = [0; 16];
        rand::fill(&mut random);
        let uid = WorkerUid::from_random(random);
        let directory = self.config.directory.join("workers").join(uid.to_string());
        let (node, pool, pod, at) = (Arc::clone(self), pool.clone(), pod.to_owned(), directory.clone());
        let spawned = tokio::task::spawn_blocking(move || node.spawn(uid, &pool, pod, &at)).await;
        let spawned = spawned.map_err(|error| NodeError::io("start a worker")(error.into())).flatten();
        let (birth, mut child) = match spawned {
            Ok(spawned) => spawned,
            Err(error) => {
                self.clean_up(None, directory).await;
                return Err(error);
            }
        };
        let up = tokio::select! {
            up = tokio::time::timeout(UP_WITHIN, self.come_up(&birth, &directory, &mut child)) => {
                up.unwrap_or_else(|_| Err(silent(uid, &format!("is not up after {} s", UP_WITHIN.as_secs()), &directory)))
            }
            () = self.stopping.cancelled() => Err(NodeError::Worker("the node is stopping".into())),
        };
        if up.is_err() {
            self.clean_up(Some(birth), directory).await;
        }
        // Collected when it ends, so that it does not stay as a zombie.
        std::thread::spawn(move || child.wait());
        drop(one);
        if let Some((report, _)) = up?.report().await {
            let _ = self.events.send(NodeEvent::WorkerUp(report)).await;
        }
        Ok(())
    }

    /// A process that becomes a worker, written down so that the next node finds it.
    fn spawn(&self, uid: WorkerUid, pool: &Pool, pod: String, directory: &Path) -> Result<(Birth, Child), NodeError> {
        for name in ["link", "root"] {
            std::fs::create_dir_all(directory.join(name)).map_err(NodeError::io("make a worker's directory"))?;
        }
        let cgroup = self.cgroup(directory);
        let limits = Limits { memory_bytes: pool.memory_limit, cpu_millis: pool.cpu_limit_millis, processes: None };
        cgroup.create(&limits).map_err(NodeError::io("make a worker's control group"))?;
        let log = std::fs::File::create(directory.join("worker.log")).map_err(NodeError::io("make a worker's log"))?;
        let mut command = Command::new(&self.config.worker_program);
        command
            .arg("worker")
            .arg("--uid")
            .arg(uid.to_string())
            .arg("--link")
            .arg(directory.join("link"))
            .arg("--root")
            .arg(directory.join("root"))
            .arg("--cgroup")
            .arg(cgroup.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let mut child = ate_sys::in_new_namespaces(command).map_err(NodeError::io("start a worker"))?;
        let birth = Birth { uid, pool: pool.key.clone(), pod, pid: child.id() };
        let _ = cgroup.child("agent").create(&Limits::default()).and_then(|()| cgroup.child("agent").add(child.id()));
        let written = std::fs::write(directory.join("worker.json"), serde_json::to_vec(&birth).expect("plain data"));
        if let Err(error) = written {
            let _ = child.kill().and_then(|()| child.wait());
            return Err(NodeError::io("write down a worker")(error));
        }
        Ok((birth, child))
    }

    async fn come_up(
        self: &Arc<Self>,
        birth: &Birth,
        directory: &Path,
        child: &mut Child,
    ) -> Result<Arc<Handle>, NodeError> {
        while !directory.join("link").join(ate_worker::INGRESS_SOCKET).exists() {
            if let Ok(Some(status)) = child.try_wait() {
                return Err(silent(birth.uid, &format!("ended with {status}"), directory));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        self.connect(birth, directory).await
    }
}

fn silent(worker: WorkerUid, why: &str, directory: &Path) -> NodeError {
    NodeError::Worker(format!("{worker} {why}, and its log says: {}", last_words(directory)))
}

/// The last that a worker said: its log goes with it.
pub(crate) fn last_words(directory: &Path) -> String {
    let log = std::fs::read(directory.join("worker.log")).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let mut last: Vec<&str> = log.trim().lines().rev().take(LAST_WORDS).collect();
    last.reverse();
    if last.is_empty() { "nothing".to_owned() } else { last.join("\n") }
}

#[cfg(test)]
mod tests;
