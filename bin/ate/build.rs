//! Tells the binary what it is built from. Without git, or without a checkout, `ATE_COMMIT` says it, or nobody does.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=ATE_COMMIT");
    let given = std::env::var("ATE_COMMIT").ok().filter(|commit| !commit.is_empty());
    let commit = given.or_else(commit).unwrap_or_default();
    println!("cargo::rustc-env=ATE_COMMIT={commit}");
    let compiler = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    println!("cargo::rustc-env=ATE_RUSTC={}", said(&compiler, &["--version"]).unwrap_or_default());
    println!("cargo::rustc-env=ATE_TARGET={}", std::env::var("TARGET").unwrap_or_default());
    println!("cargo::rustc-env=ATE_PROFILE={}", std::env::var("PROFILE").unwrap_or_default());
}

/// The commit, with `-dirty` if the checkout differs from it.
fn commit() -> Option<String> {
    // Commits and checkouts show here; what is not committed shows in the sources themselves.
    for path in ["HEAD", "logs/HEAD"] {
        println!("cargo::rerun-if-changed={}", said("git", &["rev-parse", "--git-path", path])?);
    }
    for sources in ["../../bin", "../../crates", "../../proto", "../../Cargo.lock"] {
        println!("cargo::rerun-if-changed={sources}");
    }
    let commit = said("git", &["rev-parse", "HEAD"])?;
    let changes = said("git", &["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changes.is_empty() { commit } else { format!("{commit}-dirty") })
}

fn said(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
