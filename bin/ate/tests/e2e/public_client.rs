//! The API as clients see it that know nothing of this server.

use std::path::Path;
use std::process::Command;

use ate_testkit::Machine;

use crate::ATE;

#[tokio::test]
async fn a_client_made_from_the_public_field_numbers_works_unchanged() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let client = repository.join("target/public-client");
    let built = Command::new("go")
        .args(["build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-o"])
        .arg(&client)
        .arg(".")
        .current_dir(repository.join("demos/public-client"))
        .env("GOWORK", "off")
        .status();
    assert!(built.is_ok_and(|status| status.success()), "demos/public-client does not build");

    let mut machine = Machine::start(ATE).await;
    machine.apply_counter(1, "").await;
    let walked = Command::new(&client)
        .args(["--addr", &machine.api().to_string(), "--template", "demo/counter"])
        .output()
        .expect("the client runs");
    let (steps, difference) = (String::from_utf8_lossy(&walked.stdout), String::from_utf8_lossy(&walked.stderr));
    assert!(walked.status.success(), "{steps}{difference}");
    assert!(steps.contains("no free workers available"), "with one worker a second actor has none:\n{steps}");
    machine.stop().await;
}
