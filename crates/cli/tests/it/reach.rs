//! How the daemon is reached, and what is said when it is not.

use std::os::unix::net::UnixListener;

use ate_identity::{ClientCertificates, Identity, Role};

use crate::support::Command;
use crate::with_actors;

#[tokio::test]
async fn without_a_daemon_one_is_told_how_to_start_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let expected =
        format!("error: no daemon answers at {0}/api.sock\n  start it with: ate dev --data-dir {0}\n", path.display());
    assert_eq!(Command::new("get workers", path).run().await.failed(1), expected);
    // A socket that a dead daemon has left.
    drop(UnixListener::bind(path.join("api.sock")).unwrap());
    assert_eq!(Command::new("get workers", path).run().await.failed(1), expected);
    let named = Command::new("get workers --endpoint unix:///nowhere.sock", path).run().await.failed(1);
    assert_eq!(named, "error: no daemon answers at /nowhere.sock\n  start the daemon, or correct --endpoint\n");
}

#[tokio::test]
async fn wrong_usage_is_told_before_anyone_is_asked() {
    let nowhere = std::path::Path::new("/nowhere");
    for (line, part) in [
        ("get actors", "Name one with -a, or see all with -A"),
        ("get actor a1", "in which atespace is actor \"a1\""),
        ("get workers -w", "only actors can be watched"),
        ("delete a1", "in which atespace"),
        ("delete worker w-0", "change its replicas"),
        ("suspend worker w-0 -a demo", "name one actor"),
        ("resume actor -a demo", "Write its name after \"actor\""),
    ] {
        let refused = Command::new(line, nowhere).run().await.failed(2);
        assert!(refused.starts_with("error: ") && refused.contains(part), "{line}: {refused}");
    }
    for (line, part) in [
        ("get workers --kubeconfig x", "--kubeconfig is for clusters, which cannot be reached this way yet"),
        ("get workers --context x", "--context is for clusters"),
        ("admin make-ca-pool --name x", "`ate admin make-ca-pool` is not available without a cluster"),
        ("apply -f /nowhere.yaml", "cannot read /nowhere.yaml: No such file"),
    ] {
        let refused = Command::new(line, nowhere).run().await.failed(1);
        assert!(refused.contains(part), "{line}: {refused}");
    }
}

#[tokio::test]
async fn a_socket_may_be_deeper_than_an_address_is_long() {
    let daemon = with_actors();
    let deep = daemon.directory.path().join("d".repeat(120)).join("e".repeat(120));
    std::fs::create_dir_all(&deep).unwrap();
    std::fs::rename(daemon.directory.path().join("api.sock"), deep.join("api.sock")).unwrap();
    assert!(Command::new("get atespaces", &deep).run().await.ok().contains("demo"));
    std::fs::remove_file(deep.join("api.sock")).unwrap();
    assert!(Command::new("get atespaces", &deep).run().await.failed(1).contains("no daemon answers at"));
}

#[tokio::test]
async fn tls_is_believed_only_with_the_instances_certificate() {
    let daemon = with_actors();
    let identity = Identity::open(&daemon.directory.path().join("identity")).unwrap();
    let config = identity.server_config(Role::Api, &[], ClientCertificates::VerifiedIfGiven).unwrap();
    let port = daemon.listen_tls(config);
    for endpoint in [format!("localhost:{port}"), format!("https://127.0.0.1:{port}")] {
        let line = format!("get atespaces --endpoint {endpoint}");
        assert!(daemon.ate(&line).await.ok().contains("demo"));

        let stranger = tempfile::tempdir().unwrap();
        let unknown = Command::new(&line, stranger.path()).run().await.failed(1);
        assert!(
            unknown.contains("there is no telling whether") && unknown.contains("--insecure-skip-verify"),
            "{unknown}"
        );
        Identity::open(&stranger.path().join("identity")).unwrap();
        let refused = Command::new(&line, stranger.path()).run().await.failed(1);
        assert!(refused.contains("cannot be trusted: ") && refused.contains("identity/ca.pem"), "{refused}");
        let trusting = Command::new(&format!("{line} --insecure-skip-verify"), stranger.path()).run().await;
        assert!(trusting.ok().contains("demo"));
    }
    let free = "127.0.0.1:1";
    let refused = daemon.ate(&format!("get atespaces --endpoint {free}")).await.failed(1);
    assert!(refused.starts_with(&format!("error: cannot reach https://{free}: Connection refused")), "{refused}");
}

#[tokio::test]
async fn the_servers_time_is_told_beside_the_data() {
    let daemon = with_actors();
    let traced = daemon.ate("get actor a1 -a demo --trace").await;
    assert_eq!(traced.stderr, "trace: 42 us in the server\n");
    assert_eq!(traced.stdout, daemon.ate("get actor a1 -a demo").await.ok());
}

#[tokio::test]
async fn completion_needs_no_daemon() {
    for shell in ["bash", "zsh", "fish"] {
        let script = Command::new(&format!("completion {shell}"), std::path::Path::new("/nowhere")).run().await.ok();
        assert!(script.contains("all-atespaces"), "{shell}");
    }
}
