//! Who may use the API, from where.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use crate::ATE;

/// `ate api` on a store of its own; ended with the test.
struct Api {
    child: Child,
    port: u16,
}

impl Api {
    fn start(data: &Path, arguments: &[&str]) -> Self {
        let mut child = Command::new(ATE)
            .args(["api", "--data-dir"])
            .arg(data)
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut said = BufReader::new(child.stderr.take().expect("piped")).lines().map_while(Result::ok);
        let up = said.find(|line| line.contains(" is up: ")).expect("it comes up");
        let port = up.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
        // Whoever writes to a pipe that nobody reads stands still.
        std::thread::spawn(move || said.for_each(drop));
        Self { child, port }
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn list(data: &Path, host: &str, port: u16, arguments: &[&str]) -> Output {
    let endpoint = format!("https://{host}:{port}");
    let mut command = Command::new(ATE);
    command.args(["get", "atespaces", "--endpoint", &endpoint, "--data-dir"]).arg(data).args(arguments);
    command.output().expect("it starts")
}

#[test]
fn beyond_loopback_people_show_a_certificate_of_the_instance() {
    let (owner, stranger) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let identity = stranger.path().join("identity");
    std::fs::create_dir(&identity).expect("a directory");
    for (open, arguments) in [
        (false, &["--listen", "0.0.0.0:0"][..]),
        (true, &["--listen", "0.0.0.0:0", "--open"]),
        (true, &["--listen", "127.0.0.1:0"]),
    ] {
        let api = Api::start(owner.path(), arguments);
        let authority = std::fs::read(owner.path().join("identity/ca.pem")).expect("everybody may read it");
        std::fs::write(identity.join("ca.pem"), authority).expect("written");
        let said = list(owner.path(), "localhost", api.port, &[]);
        assert!(said.status.success(), "{arguments:?}: {said:?}");
        let said = list(stranger.path(), "localhost", api.port, &[]);
        assert_eq!(said.status.success(), open, "{arguments:?}: {said:?}");
        let text = String::from_utf8_lossy(&said.stderr);
        assert!(open || text.contains("certificate of the instance") && text.contains("--data-dir"), "{text}");
        let asked = Command::new(ATE)
            .args(["version", "--endpoint", &format!("https://localhost:{}", api.port), "--data-dir"])
            .arg(stranger.path())
            .output()
            .expect("it starts");
        assert!(asked.status.success(), "who it is may be asked by everybody: {asked:?}");
    }
}

#[test]
fn a_certificate_bears_the_names_that_are_advertised() {
    let owner = tempfile::tempdir().expect("a directory");
    for (arguments, known) in
        [(&["--listen", "0.0.0.0:0"][..], false), (&["--listen", "0.0.0.0:0", "--advertise", "127.0.0.7"], true)]
    {
        let api = Api::start(owner.path(), arguments);
        let said = list(owner.path(), "127.0.0.7", api.port, &[]);
        assert_eq!(said.status.success(), known, "{arguments:?}: {said:?}");
        let text = String::from_utf8_lossy(&said.stderr);
        assert!(known || text.contains("cannot be trusted"), "{text}");
    }
}
