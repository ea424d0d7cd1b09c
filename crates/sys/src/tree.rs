//! A process tree of its own: pid 1 of a pid namespace, so that ending the one ends all.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use nix::sched::CloneFlags;

/// Starts `command` as pid 1 of new pid, mount, network, ipc and uts namespaces, in a session of its own.
/// Whatever it starts dies with it, by the kernel's hand; it itself outlives its parent and may be adopted by the next.
pub fn in_new_namespaces(mut command: Command) -> io::Result<Child> {
    // The first child of the *thread that unshared* becomes pid 1, and that thread could never start another process in
    // the old namespace: so the thread exists for this one call.
    std::thread::scope(|scope| {
        scope
            .spawn(move || {
                nix::sched::unshare(CloneFlags::CLONE_NEWPID)?;
                // SAFETY: only async-signal-safe system calls between fork and exec, no allocation, no locks.
                unsafe {
                    command.pre_exec(move || {
                        nix::sched::unshare(
                            CloneFlags::CLONE_NEWNS
                                | CloneFlags::CLONE_NEWNET
                                | CloneFlags::CLONE_NEWIPC
                                | CloneFlags::CLONE_NEWUTS,
                        )?;
                        nix::unistd::setsid()?;
                        Ok(())
                    });
                }
                command.spawn()
            })
            .join()
            .expect("the spawning thread does not panic")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_child_is_pid_1_and_this_process_can_still_fork() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let mut command = Command::new("sh");
        command.args(["-c", "test $$ = 1"]);
        assert!(in_new_namespaces(command).unwrap().wait().unwrap().success());
        let mut own = Command::new("sh");
        own.args(["-c", "test $$ != 1"]);
        assert!(own.status().unwrap().success());
    }
}
