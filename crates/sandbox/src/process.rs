//! Children of a process that is pid 1 of its namespace, or a subreaper: its own, and those that were orphaned onto it.

use std::collections::HashMap;
use std::io;
use std::process::Command;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

/// How a process ended, as `wait` tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exited {
    Code(i32),
    Signal(i32),
}

impl Exited {
    pub fn success(self) -> bool {
        self == Self::Code(0)
    }
}

/// Collects the exit of every child. Only one may exist in a process, and nothing else there may wait for children:
/// whoever waits for "any" would otherwise take the other's news.
#[derive(Clone, Debug, Default)]
pub struct Reaper {
    // Exits of processes that no one has asked about yet are kept: a box's sandbox process can end before its pid is read.
    exits: Arc<Mutex<HashMap<u32, watch::Sender<Option<Exited>>>>>,
}

/// A process whose exit the reaper will tell.
#[derive(Clone, Debug)]
pub struct Spawned {
    pub pid: u32,
    exit: watch::Receiver<Option<Exited>>,
}

impl Reaper {
    /// Starts a child and follows it.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Spawned> {
        // Held over the spawn, so that `reap` cannot see the exit before the pid is known here.
        let mut exits = self.exits.lock().expect("no holder panics");
        let pid = command.spawn()?.id();
        let sender = watch::Sender::new(None);
        let exit = sender.subscribe();
        exits.insert(pid, sender);
        Ok(Spawned { pid, exit })
    }

    /// Follows a process that became our child when its parent ended.
    pub fn follow(&self, pid: u32) -> Spawned {
        let mut exits = self.exits.lock().expect("no holder panics");
        let exit = exits.entry(pid).or_insert_with(|| watch::Sender::new(None)).subscribe();
        Spawned { pid, exit }
    }

    /// Collects all that have ended. To be called on every SIGCHLD.
    pub fn reap(&self) {
        use rustix::process::{WaitOptions, wait};
        let mut exits = self.exits.lock().expect("no holder panics");
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let exited = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Exited::Code(code),
                (_, Some(signal)) => Exited::Signal(signal),
                _ => continue,
            };
            let pid = pid.as_raw_pid().unsigned_abs();
            exits.entry(pid).or_insert_with(|| watch::Sender::new(None)).send_replace(Some(exited));
        }
    }

    /// Forgets a process that has ended and been dealt with; its pid may come again.
    pub fn forget(&self, pid: u32) {
        self.exits.lock().expect("no holder panics").remove(&pid);
    }

    /// Collects children for as long as it is polled.
    pub async fn run(&self) -> io::Result<()> {
        let mut changed = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::child())?;
        loop {
            self.reap();
            changed.recv().await;
        }
    }
}

impl Spawned {
    pub async fn exited(&self) -> Exited {
        let mut exit = self.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(exited) => exited.expect("waited for it to be some"),
            // The reaper has forgotten it: it had ended.
            Err(_) => Exited::Signal(9),
        }
    }

    pub fn has_exited(&self) -> bool {
        self.exit.borrow().is_some()
    }
}
