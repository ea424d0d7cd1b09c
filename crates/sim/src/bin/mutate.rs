//! `mutate [SEEDS [WORDS]]`: puts bugs into the control plane on purpose, one at a time, and sees whether the simulation finds each;
//! with words, only those whose name has them.
//!
//! A copy of the workspace is changed, built and run; the tree itself is not touched. A change that no longer applies is an
//! error, so the list cannot go stale in silence; and so is a seed that fails without any change, which would find every bug.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

struct Mutation {
    name: &'static str,
    file: &'static str,
    /// Found exactly once.
    from: &'static str,
    to: &'static str,
}

const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "a new assignment keeps the old generation",
        file: "crates/actor/src/apply.rs",
        from: "self.generation = self.generation.next();",
        to: "",
    },
    Mutation {
        name: "an actor is bound without claiming its worker",
        file: "crates/actor/src/apply.rs",
        from: "effects.push(Effect::ClaimWorker(lease.clone()));",
        to: "",
    },
    Mutation {
        name: "the worker is freed before the actor is out of it",
        file: "crates/actor/src/apply.rs",
        from: "(P::Running { lease }, E::Save { op, intent, snapshot }) => P::Suspending { lease, op, intent, snapshot },",
        to: "(P::Running { lease }, E::Save { op, intent, snapshot }) => {
            effects.push(Effect::FreeWorker(lease.clone()));
            P::Suspending { lease, op, intent, snapshot }
        }",
    },
    Mutation {
        name: "a wake is settled before the node has answered",
        file: "crates/control/src/resume.rs",
        from: "let started = match control.start_sandbox(&bound).await {",
        to: "let (early, late) = (Arc::clone(&control), bound.clone());
            tokio::spawn(async move { drop(early.start_sandbox(&late).await) });
            let started = match Ok::<Result<Vec<ate_orders::Phase>, NodeError>, ControlError>(Ok(Vec::new())) {",
    },
    Mutation {
        name: "a record is written over whatever has become of it",
        file: "crates/control/src/ledger.rs",
        from: "change.replace(&read.record, record.value.clone());",
        to: "change.put(read.record.key.clone(), record.value.clone());",
    },
    Mutation {
        name: "nothing is written down of what is begun",
        file: "crates/control/src/ledger.rs",
        from: "for &op in after.difference(&before) {",
        to: "for &op in after.difference(&before).take(0) {",
    },
    Mutation {
        name: "an untold commit is taken for done",
        file: "crates/control/src/ledger.rs",
        from: "Err(error) if error.is_store_away() => patience.wait(self).await?,
                other => return other,",
        to: "Err(error) if error.is_store_away() => {
                    let (value, _) = read.value.clone().apply(event.clone()).map_err(|_| ControlError::conflict())?;
                    return Ok(Read { record: read.record, value });
                }
                other => return other,",
    },
    Mutation {
        name: "a snapshot counts as durable although its upload failed",
        file: "crates/control/src/save.rs",
        from: "let uploaded = self.nodes.upload(&node, &newest.prefix).await;",
        to: "let uploaded = self.nodes.upload(&node, &newest.prefix).await.or(Ok::<(), NodeError>(()));",
    },
    Mutation {
        name: "a suspend is acknowledged when only a node has it",
        file: "crates/control/src/save.rs",
        from: "Ok(saved) if intent == Intent::Suspend => saved.durable(&control).await,",
        to: "Ok(saved) if intent == Intent::Pause => saved.durable(&control).await,",
    },
    Mutation {
        name: "snapshots are removed that are still referred to",
        file: "crates/control/src/forget.rs",
        from: "Self::of(before, |prefix| !kept.contains(prefix))",
        to: "Self::of(before, |prefix| kept.contains(prefix))",
    },
    Mutation {
        name: "a node is given up while it still serves",
        file: "crates/control/src/nodes.rs",
        from: "if self.silence(silence) < self.settings.node_lease {",
        to: "if self.silence(silence) < self.settings.node_lease / 8 {",
    },
    Mutation {
        name: "a node is asked before the store is read",
        file: "crates/control/src/reconcile.rs",
        from: "let mut expected = BTreeMap::new();",
        to: "let early = self.ask(node).await?;
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        let mut expected = BTreeMap::new();",
    },
    Mutation {
        name: "sandboxes that have no right to be there are left alone",
        file: "crates/control/src/reconcile.rs",
        from: "if !has_right {",
        to: "if !has_right && false {",
    },
    Mutation {
        name: "the news of one generation are taken for the next one's",
        file: "crates/control/src/workers.rs",
        from: "if read.value.lease().is_none() || read.value.generation != generation {",
        to: "if read.value.lease().is_none() {",
    },
    Mutation {
        name: "images that nobody will store are kept",
        file: "crates/control/src/reconcile.rs",
        from: "let _ = self.nodes.release(node, op).await;",
        to: "",
    },
    Mutation {
        name: "what only a silent node has is given up at once",
        file: "crates/control/src/nodes.rs",
        from: "(known.given_up && self.silence(since) >= self.settings.node_grace).then_some(known)",
        to: "(!self.silence(since).is_zero()).then_some(known)",
    },
    Mutation {
        name: "operations of the dead are left alone",
        file: "crates/control/src/drive.rs",
        from: "if operation.owner != self.replica && self.lives(operation.owner) && !self.can_help(operation).await? {",
        to: "if operation.owner != self.replica {",
    },
    Mutation {
        name: "those who leave a worker are not counted",
        file: "crates/control/src/quota.rs",
        from: "let change = add(change, atespace, RUNNING, difference(running(before), running(after)));",
        to: "let change = add(change, atespace, RUNNING, difference(running(before), running(after)).max(0));",
    },
    Mutation {
        name: "a quota can be passed by one",
        file: "crates/control/src/quota.rs",
        from: "Some(most) => Ok(change.guard(Guard::AtMost(count_key(atespace, what), most - 1))),",
        to: "Some(most) => Ok(change.guard(Guard::AtMost(count_key(atespace, what), most))),",
    },
    Mutation {
        name: "a suspend is acknowledged that lost the actor",
        file: "crates/control/src/save.rs",
        from: "self.settle_while(gone.as_ref(), read, Event::Lost, Note::because(\"Lost\", why.clone())).await?;",
        to: "return self.settle(read, Event::Lost, Note::because(\"Lost\", why)).await.map(|read| Saved { read, upload: None });",
    },
    Mutation {
        name: "who is deleted by force keeps a worker",
        file: "crates/control/src/force.rs",
        from: "(change, _) = self.with_effect(change, actor, Effect::FreeWorker(lease)).await?;",
        to: "let _ = lease;",
    },
    Mutation {
        name: "wakes come at any pace",
        file: "crates/control/src/quota.rs",
        from: "change.guard(Guard::AtMost(count_key(atespace, WAKES), now_micros + SECOND - part)).add_from(",
        to: "change.add_from(",
    },
    Mutation {
        name: "whoever waits for a node that hangs waits as long as it does",
        file: "crates/control/src/resume.rs",
        from: "before(deadline, self.activated(key, stale, deadline)).await.unwrap_or_else(|| {",
        to: "Some(self.activated(key, stale, deadline).await).unwrap_or_else(|| {",
    },
    Mutation {
        name: "an actor of a backup is woken as its record says",
        file: "crates/control/src/catch_up.rs",
        from: "let more = read.value.snapshots.caught_up(&found, driver.op);",
        to: "let more = None::<ate_actor::Snapshots>;",
    },
    Mutation {
        name: "nodes go on after a restore with what they ran before",
        file: "crates/control/src/restored.rs",
        from: "given_up: true, restored: true, ",
        to: "",
    },
];

/// The seeds of one mutation take a minute or two; a control plane that goes round in circles takes for ever.
const HANGS_AFTER: &str = "15m";

/// How `sim` ends that does not understand what it is asked for.
const REFUSED: i32 = 2;

/// What belongs to one of them only.
const ALSO: &[Mutation] = &[Mutation {
    name: "a node is asked before the store is read",
    file: "crates/control/src/reconcile.rs",
    from: "let answer = self.ask(node).await?;",
    to: "let answer = early;",
}];

fn main() -> ExitCode {
    let seeds = std::env::args().nth(1).unwrap_or_else(|| "4000".to_owned());
    let words = std::env::args().nth(2).unwrap_or_default();
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("it is two levels down").to_owned();
    let copy = workspace.join("target/mutants");
    match fails(&workspace, &copy, &[], &seeds) {
        Ok(None) => println!("sound    without a change, {seeds} seeds"),
        Ok(Some(said)) => {
            eprintln!("error: it fails without a change, and so says nothing of bugs\n{said}");
            return ExitCode::FAILURE;
        }
        Err(error) => {
            eprintln!("error: without a change: {error}");
            return ExitCode::FAILURE;
        }
    }
    let (mut put_in, mut missed) = (0, 0);
    for mutation in MUTATIONS.iter().filter(|mutation| mutation.name.contains(&words)) {
        put_in += 1;
        let changes: Vec<&Mutation> =
            [mutation].into_iter().chain(ALSO.iter().filter(|also| also.name == mutation.name)).collect();
        match fails(&workspace, &copy, &changes, &seeds) {
            Ok(Some(_)) => println!("found    {}", mutation.name),
            Ok(None) => {
                missed += 1;
                println!("MISSED   {}", mutation.name);
            }
            Err(error) => {
                eprintln!("{}: {error}", mutation.name);
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{put_in} bugs put in, {missed} not found");
    if put_in > 0 && missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What the simulation says of a workspace with these changes, if it finds fault with it.
fn fails(workspace: &Path, copy: &Path, changes: &[&Mutation], seeds: &str) -> Result<Option<String>, String> {
    refresh(workspace, copy)?;
    for change in changes {
        apply(copy, change)?;
    }
    let cargo = |args: &[&str]| {
        Command::new("cargo")
            .args(args)
            .args(["--quiet", "--release", "-p", "ate-sim", "--bin", "sim"])
            .current_dir(copy)
            .env("RUSTFLAGS", "-Awarnings")
            .env_remove("CARGO_TARGET_DIR")
            .status()
    };
    if !cargo(&["build"]).map_err(|error| error.to_string())?.success() {
        return Err("it does not build any more".to_owned());
    }
    // One that hangs is found, too.
    let mut run = Command::new("timeout");
    run.arg(HANGS_AFTER).arg(copy.join("target/release/sim")).args([seeds, "0", "--stop"]);
    let run = run.output().map_err(|error| error.to_string())?;
    match run.status.code() {
        Some(0) => Ok(None),
        Some(REFUSED) => Err(format!("the simulation did not run: {}", String::from_utf8_lossy(&run.stderr).trim())),
        _ => Ok(Some(format!("{}\n{}", run.status, String::from_utf8_lossy(&run.stderr).trim()))),
    }
}

/// The sources as they are, beside the target directory of earlier runs.
fn refresh(workspace: &Path, copy: &Path) -> Result<(), String> {
    let error = |error: std::io::Error| error.to_string();
    std::fs::create_dir_all(copy).map_err(error)?;
    for name in ["Cargo.toml", "Cargo.lock", "crates", "bin", "demos", "proto", "docs"] {
        copy_changed(&workspace.join(name), &copy.join(name)).map_err(error)?;
    }
    Ok(())
}

/// Only what differs, so that what was built of the rest stays good.
fn copy_changed(from: &Path, to: &Path) -> std::io::Result<()> {
    if from.is_dir() {
        std::fs::create_dir_all(to)?;
        for entry in std::fs::read_dir(from)? {
            let entry = entry?;
            copy_changed(&entry.path(), &to.join(entry.file_name()))?;
        }
    } else if from.is_file() {
        let bytes = std::fs::read(from)?;
        if std::fs::read(to).ok().as_ref() != Some(&bytes) {
            std::fs::write(to, bytes)?;
        }
    }
    Ok(())
}

fn apply(copy: &Path, mutation: &Mutation) -> Result<(), String> {
    let path: PathBuf = copy.join(mutation.file);
    let text = std::fs::read_to_string(&path).map_err(|error| error.to_string())?;
    match text.matches(mutation.from).count() {
        1 => std::fs::write(&path, text.replace(mutation.from, mutation.to)).map_err(|error| error.to_string()),
        count => Err(format!("{} has what is to be changed {count} times, not once", mutation.file)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bug_can_still_be_put_in() {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("it is two levels down");
        for mutation in MUTATIONS.iter().chain(ALSO) {
            let text = std::fs::read_to_string(workspace.join(mutation.file)).expect("the file is there");
            assert_eq!(text.matches(mutation.from).count(), 1, "{}: {}", mutation.file, mutation.name);
        }
    }
}
