//! Several processes find an empty directory at the same time. This program is all of them: called with the directory
//! in its environment, it is one that waits for the start and opens it.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};

use ate_identity::Identity;

const DIRECTORY: &str = "ATE_TEST_IDENTITY";
const PROCESSES: usize = 6;

#[test]
fn processes_that_open_a_directory_at_once_get_the_same_identity() {
    if let Some(dir) = std::env::var_os(DIRECTORY) {
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        let identity = Identity::open(dir.as_ref()).unwrap();
        println!("\nfound {:?} {}", identity.instance_key(), identity.ca_pem().replace('\n', "|"));
        return;
    }
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("not/there/yet");
    let mut children: Vec<Child> = (0..PROCESSES)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "processes_that_open_a_directory_at_once_get_the_same_identity", "--nocapture"])
                .env(DIRECTORY, &dir)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    // Each is at its starting line or will find the gun already fired.
    for child in &mut children {
        drop(child.stdin.take());
    }
    let found: Vec<String> = children
        .into_iter()
        .map(|child| {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{text}");
            text.lines().find(|line| line.starts_with("found ")).unwrap().to_owned()
        })
        .collect();
    assert!(found.iter().all(|one| *one == found[0]), "{found:#?}");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 3, "the slower ones left nothing behind");
}
