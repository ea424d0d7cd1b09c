//! Places where a process can be made to die, as by `kill -9`, just there: between a thing and the telling of it.
//!
//! ```text
//!   ATE_FAILPOINTS=wake.bound=3,node.stored=1      one in three times, every time
//! ```
//!
//! Without the variable a place costs a look at a flag. The names are listed in `docs/faults.md`.

use std::sync::OnceLock;

/// Every place there is, in the order of a wake and a save.
pub const ALL: &[&str] = &[
    // The actor is bound to a worker; its node has not been told.
    "wake.bound",
    // The sandbox runs; nobody has been told.
    "worker.restored",
    // The node has said that it runs; that is not written down.
    "wake.started",
    // It is written down that the actor goes to sleep; its node has not been told.
    "save.begun",
    // The worker has the image; the sandbox is still there.
    "worker.checkpointed",
    // The node has the image; it has not said so.
    "node.captured",
    // The worker is free again; the image is not stored.
    "save.captured",
    // The snapshot is on the node's disk; it has not said so.
    "node.stored",
    // The node has said that it is stored; that is not written down.
    "save.stored",
    // The snapshot is durable; that is not written down.
    "upload.done",
    // What nobody refers to is written down as such, and still there.
    "forget.begun",
];

/// What is to happen where: a name, and one in how many times.
type Plan = Vec<(String, u32)>;

/// This place is reached: the process may end here.
pub fn reached(name: &'static str) {
    static PLAN: OnceLock<Plan> = OnceLock::new();
    debug_assert!(ALL.contains(&name), "{name} is not in the list");
    let plan = PLAN.get_or_init(|| std::env::var("ATE_FAILPOINTS").map(|text| parse(&text)).unwrap_or_default());
    if let Some((_, one_in)) = plan.iter().find(|(planned, _)| planned == name)
        && rand::random_range(0..*one_in) == 0
    {
        eprintln!("failpoint {name}: ending here");
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        // A worker is the first process of its namespace, and the kernel lets nobody inside kill that.
        std::process::abort();
    }
}

fn parse(text: &str) -> Plan {
    let one = |part: &str| {
        let (name, one_in) = part.split_once('=').unwrap_or((part, "1"));
        let one_in = one_in.parse().ok().filter(|one_in| *one_in > 0);
        match (ALL.contains(&name), one_in) {
            (true, Some(one_in)) => Some((name.to_owned(), one_in)),
            _ => {
                eprintln!("ATE_FAILPOINTS: there is no {part:?}; the places are {}", ALL.join(", "));
                None
            }
        }
    };
    text.split(',').filter(|part| !part.is_empty()).filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_names_places_and_chances() {
        let plan = parse("wake.bound=3,node.stored,nowhere=2,save.begun=0,");
        assert_eq!(plan, [("wake.bound".to_owned(), 3), ("node.stored".to_owned(), 1)]);
    }

    #[test]
    fn every_place_is_in_the_list_that_people_read() {
        let listed = include_str!("../../../docs/faults.md").lines().filter_map(|line| line.strip_prefix("| `"));
        let listed: Vec<&str> = listed.filter_map(|line| Some(line.split_once('`')?.0)).collect();
        assert_eq!(listed, ALL);
    }
}
