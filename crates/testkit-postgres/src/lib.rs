//! A real PostgreSQL for tests: the server that Debian packages, on a directory, a socket and a port of its own.
//!
//! ```text
//!   <temporary directory>/        belongs to the user that runs the server: PostgreSQL refuses to run as root
//!                        /data    the cluster
//!                        /log     what the server said
//!                        /.s.PGSQL.<port>   its socket; besides, it listens on 127.0.0.1:<port>
//! ```
//!
//! A keeper process holds the far end of a pipe from the test. When that pipe ends, because the [`Server`] was dropped
//! or the test process died in whatever way, the keeper stops the server and removes the directory.

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::unistd::{Gid, Uid, User, geteuid};

/// Where Debian and its kin keep the servers, one directory per major version.
const VERSIONS: &str = "/usr/lib/postgresql";

/// How long a start or a stop may take; a machine that is busy with builds needs seconds.
const PATIENCE_SECONDS: &str = "120";

/// The one user of the cluster, a superuser.
pub const USER: &str = "ate";

/// Its password; something that a test can look for where it must not be.
pub const PASSWORD: &str = "pa55-of-the-test";

/// A PostgreSQL server that runs as long as this lives.
#[derive(Debug)]
pub struct Server {
    programs: PathBuf,
    directory: PathBuf,
    owner: Option<(Uid, Gid)>,
    port: u16,
    /// Holds the pipe; see the module.
    keeper: Child,
}

impl Default for Server {
    fn default() -> Self {
        Self::start("", &[])
    }
}

impl Server {
    /// Starts a server with these lines more in its configuration, and these files, which only the server's user may
    /// read, in its data directory.
    ///
    /// # Panics
    ///
    /// If there is no PostgreSQL here, or it does not start: a test that needs one has failed then.
    pub fn start(configuration: &str, files: &[(&str, &str)]) -> Self {
        let programs = newest_programs().expect("PostgreSQL is installed; ./setup --test does that");
        let owner = unprivileged();
        let directory = tempfile::Builder::new().prefix("ate-postgres-").tempdir().expect("a temporary directory");
        if let Some((uid, gid)) = owner {
            chown(directory.path(), Some(uid.as_raw()), Some(gid.as_raw())).expect("root may give it away");
        }
        // From here on the keeper removes it.
        let directory = directory.keep();
        let keeper = keep(&programs, &directory, owner);
        let server = Self { programs, port: ate_testkit_port::free_port(), directory, owner, keeper };
        server.create(configuration, files);
        server.resume();
        server
    }

    fn create(&self, configuration: &str, files: &[(&str, &str)]) {
        let password = self.directory.join("password");
        self.write(&password, PASSWORD);
        // The files of an empty cluster need no flush; the server itself flushes as it does in earnest.
        self.run("initdb", ["--no-sync", "--encoding=UTF8", "--locale=C.UTF-8", "--auth=scram-sha-256"], |command| {
            command.arg("--username").arg(USER).arg("--pwfile").arg(&password).arg("--pgdata").arg(self.data());
        });
        let mut lines = std::fs::read_to_string(self.data().join("postgresql.conf")).expect("initdb wrote it");
        lines += &format!(
            "\nlisten_addresses = '127.0.0.1'\nport = {}\nunix_socket_directories = '{}'\nfsync = on\n{configuration}\n",
            self.port,
            self.directory.display()
        );
        self.write(&self.data().join("postgresql.conf"), &lines);
        for (name, text) in files {
            self.write(&self.data().join(name), text);
        }
    }

    /// Starts the server again after [`Server::crash`].
    pub fn resume(&self) {
        let log = self.directory.join("log");
        self.run("pg_ctl", ["start", "--silent", "--wait", "--timeout", PATIENCE_SECONDS], |command| {
            command.arg("--pgdata").arg(self.data()).arg("--log").arg(log);
        });
    }

    /// Ends the server as a crash does: nothing is written any more, every connection breaks.
    pub fn crash(&self) {
        self.run("pg_ctl", ["stop", "--silent", "--mode=immediate", "--timeout", PATIENCE_SECONDS], |command| {
            command.arg("--pgdata").arg(self.data());
        });
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The server's address over loopback.
    pub fn url(&self) -> String {
        format!("postgres://{USER}:{PASSWORD}@127.0.0.1:{}/postgres", self.port)
    }

    /// What `psql` answers to a statement: one line per row, columns divided by `|`.
    pub fn sql(&self, statement: &str) -> String {
        let output = self.run("psql", ["--no-psqlrc", "--quiet", "--tuples-only", "--no-align"], |command| {
            command.args(["--set", "ON_ERROR_STOP=1", "--command", statement, &self.url()]);
        });
        output.trim().to_owned()
    }

    fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    fn write(&self, path: &Path, text: &str) {
        let write = || {
            std::fs::write(path, text)?;
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o600))?;
            match self.owner {
                Some((uid, gid)) => chown(path, Some(uid.as_raw()), Some(gid.as_raw())),
                None => Ok(()),
            }
        };
        write().unwrap_or_else(|error: io::Error| panic!("cannot write {}: {error}", path.display()));
    }

    /// Runs one of the server's programs as the server's user, and gives back what it printed.
    fn run<const N: usize>(&self, program: &str, arguments: [&str; N], more: impl FnOnce(&mut Command)) -> String {
        let mut command = as_owner(self.programs.join(program), &self.directory, self.owner);
        more(command.args(arguments));
        // The server must not inherit an end of a pipe that its starter waits for.
        let said = tempfile::tempfile().expect("a temporary file");
        let copy = |file: &std::fs::File| Stdio::from(file.try_clone().expect("another descriptor"));
        let status = command.stdin(Stdio::null()).stdout(copy(&said)).stderr(copy(&said)).status();
        let mut text = String::new();
        let read = io::Seek::rewind(&mut &said).and_then(|()| io::Read::read_to_string(&mut &said, &mut text));
        read.expect("reads back what was written");
        if !status.as_ref().is_ok_and(std::process::ExitStatus::success) {
            let log = std::fs::read_to_string(self.directory.join("log")).unwrap_or_default();
            panic!("{program}: {status:?}\n{text}\n{log}");
        }
        text
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        // A keeper that failed has said why.
        let _ = self.keeper.wait();
    }
}

/// Whether a server can be started here at all.
pub fn is_installed() -> bool {
    newest_programs().is_some()
}

fn newest_programs() -> Option<PathBuf> {
    let versions = std::fs::read_dir(VERSIONS).ok()?.filter_map(Result::ok);
    let numbered = versions.filter_map(|entry| Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry.path())));
    let servers = numbered.map(|(version, path)| (version, path.join("bin")));
    Some(servers.filter(|(_, path)| path.join("initdb").exists()).max()?.1)
}

/// Whom to run the server as, if not as oneself.
fn unprivileged() -> Option<(Uid, Gid)> {
    if !geteuid().is_root() {
        return None;
    }
    let named = |name| User::from_name(name).ok().flatten();
    let user = named("postgres").or_else(|| named("nobody")).expect("a user besides root");
    Some((user.uid, user.gid))
}

fn as_owner(program: impl AsRef<OsStr>, directory: &Path, owner: Option<(Uid, Gid)>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(directory).env("LC_ALL", "C.UTF-8").env_remove("PGOPTIONS");
    if let Some((uid, gid)) = owner {
        command.uid(uid.as_raw()).gid(gid.as_raw());
    }
    command
}

fn keep(programs: &Path, directory: &Path, owner: Option<(Uid, Gid)>) -> Child {
    const SCRIPT: &str = r#"cat
[ ! -e "$1/data/postmaster.pid" ] || "$0" stop --silent --mode=immediate --pgdata "$1/data"
cd / && rm -rf "$1""#;
    let mut command = as_owner("/bin/sh", directory, owner);
    // A process group of its own: an interrupt from the terminal ends the test, and only then the keeper has work.
    command.arg("-c").arg(SCRIPT).arg(programs.join("pg_ctl")).arg(directory).process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("a shell starts")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_survives_a_crash_and_leaves_nothing_behind() {
        let server = Server::default();
        let (directory, port) = (server.directory.clone(), server.port());
        assert_eq!(server.sql("SHOW fsync"), "on");
        server.sql("CREATE TABLE kept AS SELECT 42 AS answer");
        server.crash();
        server.resume();
        assert_eq!(server.sql("SELECT answer FROM kept"), "42");
        drop(server);
        assert!(!directory.exists(), "the directory is removed");
        assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err(), "nobody listens any more");
    }
}
