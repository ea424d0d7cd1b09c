use std::collections::BTreeSet;
use std::fmt;

use ate_name::{ActorUid, Digest, Generation, NodeName};

use crate::{Manifest, Scope, SecretExposure, TemplateIdentity};

/// The machine that would restore.
#[derive(Clone, Debug)]
pub struct Host {
    pub node: NodeName,
    pub sandbox_class: String,
    pub architecture: String,
    pub cpu_features: BTreeSet<String>,
    pub platform: String,
}

/// What the control plane wants back.
#[derive(Clone, Debug)]
pub struct Expectation {
    pub actor: ActorUid,
    pub template: TemplateIdentity,
    /// `Data` also takes a Full snapshot and leaves its memory aside.
    pub scope: Scope,
    /// The generation that the restore is for; a later one cannot have written what it may read.
    pub generation: Generation,
    pub workload: Digest,
}

/// A snapshot that must not be restored here. Says which, why, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{snapshot} is not restored: {reason}")]
pub struct Refused {
    pub snapshot: String,
    pub reason: Reason,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    #[error("its sandbox class is {snapshot} and node {node} runs {host}; use a pool of sandboxClass {snapshot}")]
    Class { snapshot: String, host: String, node: NodeName },
    #[error("it was taken on {snapshot} and node {node} is {host}; add a node of {snapshot} to the pool")]
    Architecture { snapshot: String, host: String, node: NodeName },
    #[error(
        "node {node} lacks CPU features it was taken with ({}); use a node that has them, or restart the actor to boot it anew",
        List(.missing)
    )]
    CpuFeatures { missing: Vec<String>, node: NodeName },
    #[error("it was taken on platform {snapshot} and node {node} uses {host}; use a node with platform {snapshot}")]
    Platform { snapshot: String, host: String, node: NodeName },
    #[error("it belongs to actor {snapshot} and is wanted for actor {expected}; fork it to give it to another actor")]
    Actor { snapshot: ActorUid, expected: ActorUid },
    #[error(
        "it was taken from template {} (uid {}) and the actor's is {} (uid {}); create an actor from that template instead",
        .snapshot.key, .snapshot.uid, .expected.key, .expected.uid
    )]
    Template { snapshot: Box<TemplateIdentity>, expected: Box<TemplateIdentity> },
    #[error("it holds data without memory; resume with scope Data, which boots the program anew")]
    Scope,
    #[error(
        "it was written in generation {snapshot}, after generation {expected} that wants it; read the actor again and retry"
    )]
    Generation { snapshot: Generation, expected: Generation },
    #[error("its workload {snapshot} is not the {expected} to be run; restart the actor to boot it with the new one")]
    Workload { snapshot: Digest, expected: Digest },
    #[error("it is golden and its secret exposure is {0:?}; take the template's golden snapshot again without secrets")]
    SecretExposure(SecretExposure),
}

/// Most features that a message spells out; a foreign machine can lack a hundred.
const MAX_LISTED: usize = 8;

struct List<'a>(&'a [String]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0[..self.0.len().min(MAX_LISTED)].join(", "))?;
        match self.0.len().saturating_sub(MAX_LISTED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

impl Manifest {
    /// Whether this snapshot may be restored by `host` for what is expected. Whose it is comes before where it fits, so
    /// that a stale caller is told about its own mistake rather than about a machine.
    pub fn admit(&self, host: &Host, expected: &Expectation) -> Result<(), Refused> {
        let found = self.check_owner(expected).and_then(|()| self.check_host(host, expected));
        found.map_err(|reason| Refused { snapshot: self.describe(), reason })
    }

    fn check_owner(&self, expected: &Expectation) -> Result<(), Reason> {
        if self.golden {
            if self.secret_exposure != SecretExposure::None {
                return Err(Reason::SecretExposure(self.secret_exposure));
            }
        } else {
            if self.actor.uid != expected.actor {
                return Err(Reason::Actor { snapshot: self.actor.uid, expected: expected.actor });
            }
            // Generations of two actors do not compare, so a golden one's says nothing here.
            if self.generation > expected.generation {
                return Err(Reason::Generation { snapshot: self.generation, expected: expected.generation });
            }
        }
        if self.template != expected.template {
            let [snapshot, expected] = [&self.template, &expected.template].map(|t| Box::new(t.clone()));
            return Err(Reason::Template { snapshot, expected });
        }
        Ok(())
    }

    fn check_host(&self, host: &Host, expected: &Expectation) -> Result<(), Reason> {
        let pair = |snapshot: &String, host: &String| (snapshot.clone(), host.clone());
        let node = host.node.clone();
        if self.sandbox_class != host.sandbox_class {
            let (snapshot, host) = pair(&self.sandbox_class, &host.sandbox_class);
            return Err(Reason::Class { snapshot, host, node });
        }
        // Files fit every machine; all that follows is about memory.
        if expected.scope == Scope::Data {
            return Ok(());
        }
        if self.scope == Scope::Data {
            return Err(Reason::Scope);
        }
        if self.architecture != host.architecture {
            let (snapshot, host) = pair(&self.architecture, &host.architecture);
            return Err(Reason::Architecture { snapshot, host, node });
        }
        if self.platform != host.platform {
            let (snapshot, host) = pair(&self.platform, &host.platform);
            return Err(Reason::Platform { snapshot, host, node });
        }
        let missing: Vec<_> = self.cpu_features.difference(&host.cpu_features).cloned().collect();
        if !missing.is_empty() {
            return Err(Reason::CpuFeatures { missing, node });
        }
        if self.workload != expected.workload {
            return Err(Reason::Workload { snapshot: self.workload, expected: expected.workload });
        }
        Ok(())
    }

    fn describe(&self) -> String {
        if self.golden {
            format!("golden snapshot of template {}", self.template.key)
        } else {
            format!("snapshot of actor {} (generation {}, operation {})", self.actor.key, self.generation, self.op)
        }
    }
}

#[cfg(test)]
mod tests {
    use ate_name::{ObjectKey, TemplateUid};

    use super::*;
    use crate::manifest::tests::sample;

    fn host() -> Host {
        Host {
            node: NodeName::new("n3"),
            sandbox_class: "gvisor".into(),
            architecture: "amd64".into(),
            cpu_features: ["avx2", "avx512f", "sse4_2"].map(String::from).into(),
            platform: "systrap".into(),
        }
    }

    fn expectation() -> Expectation {
        let manifest = sample();
        Expectation {
            actor: manifest.actor.uid,
            template: manifest.template,
            scope: Scope::Full,
            generation: Generation::new(8),
            workload: manifest.workload,
        }
    }

    fn golden() -> Manifest {
        Manifest { golden: true, base: None, generation: Generation::new(99), ..sample() }
    }

    fn refused(manifest: &Manifest, host: &Host, expected: &Expectation) -> (Reason, String) {
        let refused = manifest.admit(host, expected).unwrap_err();
        (refused.reason.clone(), refused.to_string())
    }

    #[test]
    fn a_matching_snapshot_is_admitted() {
        assert_eq!(sample().admit(&host(), &expectation()), Ok(()));
        let same = Expectation { generation: sample().generation, ..expectation() };
        assert_eq!(sample().admit(&host(), &same), Ok(()));
    }

    #[test]
    fn a_golden_snapshot_serves_every_actor_of_its_template() {
        let other = Expectation { actor: ActorUid::from_random([9; 16]), ..expectation() };
        assert_eq!(golden().admit(&host(), &other), Ok(()));
        let template = TemplateIdentity { uid: TemplateUid::from_random([9; 16]), ..other.template.clone() };
        let replaced = Expectation { template, ..other };
        assert!(matches!(refused(&golden(), &host(), &replaced).0, Reason::Template { .. }));
    }

    #[test]
    fn a_golden_snapshot_that_may_hold_secrets_is_refused() {
        for exposure in [SecretExposure::Env, SecretExposure::Unknown] {
            let manifest = Manifest { secret_exposure: exposure, ..golden() };
            let (reason, text) = refused(&manifest, &host(), &expectation());
            assert_eq!(reason, Reason::SecretExposure(exposure));
            assert!(text.starts_with("golden snapshot of template demo/counter is not restored: "), "{text}");
            let own = Manifest { secret_exposure: exposure, ..sample() };
            assert_eq!(own.admit(&host(), &expectation()), Ok(()));
        }
    }

    #[test]
    fn each_mismatch_has_its_own_reason_that_names_objects_and_a_remedy() {
        let text = |host: &Host, expected: &Expectation| refused(&sample(), host, expected).1;
        let with_host = |change: fn(&mut Host)| {
            let mut host = host();
            change(&mut host);
            text(&host, &expectation())
        };
        let with_expectation = |change: fn(&mut Expectation)| {
            let mut expected = expectation();
            change(&mut expected);
            text(&host(), &expected)
        };
        for (text, parts) in [
            (
                with_host(|h| h.sandbox_class = "microvm".into()),
                ["class is gvisor", "node n3 runs microvm", "use a pool"],
            ),
            (
                with_host(|h| h.architecture = "arm64".into()),
                ["taken on amd64", "node n3 is arm64", "add a node of amd64"],
            ),
            (with_host(|h| h.platform = "kvm".into()), ["platform systrap", "node n3 uses kvm", "use a node with"]),
            (with_host(|h| h.cpu_features.clear()), ["node n3 lacks", "avx2, sse4_2", "restart the actor"]),
            (with_expectation(|e| e.actor = ActorUid::from_random([9; 16])), ["belongs to", "wanted for", "fork it"]),
            (
                with_expectation(|e| e.template.key = ObjectKey::new("demo", "other")),
                ["template demo/counter", "demo/other", "create an actor"],
            ),
            (
                with_expectation(|e| e.generation = Generation::new(6)),
                ["generation 7", "generation 6", "read the actor"],
            ),
            (
                with_expectation(|e| e.workload = Digest::from_bytes([9; 32])),
                ["workload 0707", "0909", "restart the actor"],
            ),
        ] {
            assert!(text.starts_with("snapshot of actor team/counter (generation 7, operation "), "{text}");
            for part in parts {
                assert!(text.contains(part), "{part:?} is not in {text:?}");
            }
        }
    }

    #[test]
    fn data_is_not_bound_to_a_machine_but_cannot_give_memory() {
        let data = Manifest { scope: Scope::Data, image: None, base: None, files: vec![], ..sample() };
        assert_eq!(refused(&data, &host(), &expectation()).0, Reason::Scope);

        let cold = Expectation { scope: Scope::Data, workload: Digest::from_bytes([9; 32]), ..expectation() };
        let foreign =
            Host { architecture: "arm64".into(), cpu_features: BTreeSet::new(), platform: "kvm".into(), ..host() };
        for manifest in [&data, &sample()] {
            assert_eq!(manifest.admit(&foreign, &cold), Ok(()));
        }
        let other_class = Host { sandbox_class: "microvm".into(), ..host() };
        assert!(matches!(refused(&data, &other_class, &cold).0, Reason::Class { .. }));
        let other_actor = Expectation { actor: ActorUid::from_random([9; 16]), ..cold };
        assert!(matches!(refused(&data, &host(), &other_actor).0, Reason::Actor { .. }));
    }

    #[test]
    fn a_long_list_of_features_is_cut() {
        let names: Vec<_> = (0..30).map(|n| format!("f{n}")).collect();
        assert_eq!(List(&names).to_string(), "f0, f1, f2, f3, f4, f5, f6, f7 and 22 more");
    }
}
