//! Which worker gets which actor. Pure: a picture of the fleet in, a choice out.
//!
//! Free workers are kept in sets by pool, node and the templates they hold a warm box for, so a choice costs a few look-ups
//! whatever the size of the fleet. The picture may be old; whoever acts on a choice checks it in the transaction that
//! binds the worker.

use std::collections::{BTreeMap, BTreeSet};

use ate_actor::Lease;
use ate_name::{ActorKey, ActorUid, Generation, NodeName, ObjectKey, TemplateUid, WorkerUid};

/// Milliseconds on the caller's clock.
pub type Millis = i64;

#[derive(Clone, Debug)]
pub struct Worker {
    pub lease: Lease,
    pub warm: BTreeSet<TemplateUid>,
    pub state: State,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    Free,
    /// Bound, or about to be.
    Taken,
    /// Its actor is stopped in memory and has been without a request since then.
    Frozen {
        resident: Resident,
        since: Millis,
    },
    /// To be taken away: gets nobody new.
    Draining,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resident {
    pub key: ActorKey,
    pub uid: ActorUid,
    pub generation: Generation,
}

/// What an actor needs, and what it would like.
#[derive(Clone, Debug)]
pub struct Wish<'a> {
    /// Pools that may host it, in order of preference.
    pub pools: &'a [ObjectKey],
    pub template: TemplateUid,
    /// The only node that can, if its newest snapshot is nowhere else.
    pub required_node: Option<&'a NodeName>,
    /// The node that has its snapshot on disk.
    pub preferred_node: Option<&'a NodeName>,
    /// Nodes that are taken only if no other has room.
    pub avoided_nodes: &'a BTreeSet<NodeName>,
}

#[derive(Debug, Default)]
pub struct Fleet {
    workers: BTreeMap<WorkerUid, Worker>,
    free: BTreeMap<ObjectKey, BTreeMap<NodeName, BTreeSet<WorkerUid>>>,
    warm: BTreeMap<(ObjectKey, TemplateUid), BTreeSet<(NodeName, WorkerUid)>>,
    frozen: BTreeMap<ObjectKey, BTreeSet<(Millis, WorkerUid)>>,
}

impl Fleet {
    pub fn get(&self, worker: WorkerUid) -> Option<&Worker> {
        self.workers.get(&worker)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Worker> {
        self.workers.values()
    }

    pub fn insert(&mut self, worker: Worker) {
        self.remove(worker.lease.worker);
        self.index(&worker);
        self.workers.insert(worker.lease.worker, worker);
    }

    pub fn remove(&mut self, worker: WorkerUid) -> Option<Worker> {
        let worker = self.workers.remove(&worker)?;
        self.unindex(&worker);
        Some(worker)
    }

    pub fn set_state(&mut self, worker: WorkerUid, state: State) {
        if let Some(mut worker) = self.remove(worker) {
            worker.state = state;
            self.insert(worker);
        }
    }

    pub fn set_warm(&mut self, worker: WorkerUid, warm: BTreeSet<TemplateUid>) {
        if self.workers.get(&worker).is_some_and(|known| known.warm != warm)
            && let Some(mut worker) = self.remove(worker)
        {
            worker.warm = warm;
            self.insert(worker);
        }
    }

    /// The best free worker: on the right node before a warm one, warm before any.
    pub fn choose(&self, wish: &Wish<'_>) -> Option<Lease> {
        let found = self.choose_on(wish, |node| !wish.avoided_nodes.contains(node));
        found.or_else(|| if wish.avoided_nodes.is_empty() { None } else { self.choose_on(wish, |_| true) })
    }

    fn choose_on(&self, wish: &Wish<'_>, fits: impl Fn(&NodeName) -> bool) -> Option<Lease> {
        let nodes = [wish.required_node.or(wish.preferred_node)];
        let preferred = nodes.into_iter().flatten().filter(|node| fits(node));
        let on_node = preferred.flat_map(|node| {
            let warm = wish.pools.iter().filter_map(move |pool| self.warm_on(pool, wish.template, node));
            let any = wish.pools.iter().filter_map(move |pool| self.free.get(pool)?.get(node)?.first().copied());
            warm.chain(any)
        });
        let anywhere = wish.pools.iter().filter(|_| wish.required_node.is_none());
        let warm = anywhere.clone().filter_map(|pool| {
            let warm = self.warm.get(&(pool.clone(), wish.template))?;
            warm.iter().find(|(node, _)| fits(node)).map(|(_, worker)| *worker)
        });
        let any = anywhere.filter_map(|pool| {
            let (_, workers) = self.free.get(pool)?.iter().find(|(node, _)| fits(node))?;
            workers.first().copied()
        });
        let worker = on_node.chain(warm).chain(any).next()?;
        self.workers.get(&worker).map(|worker| worker.lease.clone())
    }

    /// The actor that has been frozen longest on a worker that the wish could use, of those that may be disturbed.
    pub fn idlest(&self, wish: &Wish<'_>, may_be: impl Fn(&ActorKey) -> bool) -> Option<&Resident> {
        let fits = |worker: &&Worker| {
            let disturbed = matches!(&worker.state, State::Frozen { resident, .. } if may_be(&resident.key));
            disturbed && wish.required_node.is_none_or(|node| worker.lease.node == *node)
        };
        let (_, worker) = wish
            .pools
            .iter()
            .filter_map(|pool| {
                let frozen = self.frozen.get(pool)?;
                frozen.iter().find(|(_, worker)| self.workers.get(worker).as_ref().is_some_and(fits))
            })
            .min()?;
        match &self.workers.get(worker)?.state {
            State::Frozen { resident, .. } => Some(resident),
            _ => None,
        }
    }

    fn warm_on(&self, pool: &ObjectKey, template: TemplateUid, node: &NodeName) -> Option<WorkerUid> {
        let warm = self.warm.get(&(pool.clone(), template))?;
        let first = (node.clone(), WorkerUid::from_bytes([0; 16]));
        warm.range(first..).next().filter(|(on, _)| on == node).map(|(_, worker)| *worker)
    }

    fn index(&mut self, worker: &Worker) {
        let Lease { worker: uid, pool, node, .. } = &worker.lease;
        match &worker.state {
            State::Free => {
                self.free.entry(pool.clone()).or_default().entry(node.clone()).or_default().insert(*uid);
                for template in &worker.warm {
                    self.warm.entry((pool.clone(), *template)).or_default().insert((node.clone(), *uid));
                }
            }
            State::Frozen { since, .. } => {
                self.frozen.entry(pool.clone()).or_default().insert((*since, *uid));
            }
            State::Taken | State::Draining => {}
        }
    }

    fn unindex(&mut self, worker: &Worker) {
        let Lease { worker: uid, pool, node, .. } = &worker.lease;
        match &worker.state {
            State::Free => {
                if let Some(nodes) = self.free.get_mut(pool)
                    && let Some(workers) = nodes.get_mut(node)
                {
                    workers.remove(uid);
                    if workers.is_empty() {
                        nodes.remove(node);
                    }
                }
                for template in &worker.warm {
                    if let Some(warm) = self.warm.get_mut(&(pool.clone(), *template)) {
                        warm.remove(&(node.clone(), *uid));
                    }
                }
            }
            State::Frozen { since, .. } => {
                if let Some(frozen) = self.frozen.get_mut(pool) {
                    frozen.remove(&(*since, *uid));
                }
            }
            State::Taken | State::Draining => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(n: u8) -> TemplateUid {
        TemplateUid::from_random([n; 16])
    }

    fn worker(n: u8, pool: &str, node: &str, warm: &[u8]) -> Worker {
        Worker {
            lease: Lease {
                worker: WorkerUid::from_random([n; 16]),
                pod: ObjectKey::new("ns", format!("w{n}")),
                pool: ObjectKey::new("ns", pool),
                node: NodeName::new(node),
            },
            warm: warm.iter().map(|&n| template(n)).collect(),
            state: State::Free,
        }
    }

    fn chosen(fleet: &Fleet, pools: &[&str], required: Option<&str>, preferred: Option<&str>) -> Option<String> {
        chosen_but(fleet, pools, required, preferred, &[])
    }

    fn chosen_but(
        fleet: &Fleet,
        pools: &[&str],
        required: Option<&str>,
        preferred: Option<&str>,
        avoided: &[&str],
    ) -> Option<String> {
        let pools: Vec<_> = pools.iter().map(|pool| ObjectKey::new("ns", *pool)).collect();
        let (required, preferred) = (required.map(NodeName::new), preferred.map(NodeName::new));
        let wish = Wish {
            pools: &pools,
            template: template(1),
            required_node: required.as_ref(),
            preferred_node: preferred.as_ref(),
            avoided_nodes: &avoided.iter().map(|node| NodeName::new(*node)).collect(),
        };
        fleet.choose(&wish).map(|lease| lease.pod.name)
    }

    #[test]
    fn the_right_node_comes_before_a_warm_box_and_that_before_anything() {
        let mut fleet = Fleet::default();
        for worker in
            [worker(1, "p", "a", &[]), worker(2, "p", "b", &[1]), worker(3, "p", "a", &[1]), worker(4, "q", "c", &[])]
        {
            fleet.insert(worker);
        }
        assert_eq!(chosen(&fleet, &["p"], None, Some("a")).as_deref(), Some("w3"));
        fleet.set_state(WorkerUid::from_random([3; 16]), State::Taken);
        assert_eq!(chosen(&fleet, &["p"], None, Some("a")).as_deref(), Some("w1"));
        assert_eq!(chosen(&fleet, &["p"], None, None).as_deref(), Some("w2"));
        assert_eq!(chosen(&fleet, &["p"], Some("c"), None), None, "a required node outside the pool");
        assert_eq!(chosen(&fleet, &["q"], Some("c"), None).as_deref(), Some("w4"));
        assert_eq!(chosen(&fleet, &[], None, None), None);
        for n in [1, 2] {
            fleet.set_state(WorkerUid::from_random([n; 16]), State::Taken);
        }
        assert_eq!(chosen(&fleet, &["p"], None, None), None);
        fleet.set_state(WorkerUid::from_random([2; 16]), State::Free);
        assert_eq!(chosen(&fleet, &["p"], None, Some("a")).as_deref(), Some("w2"));
    }

    #[test]
    fn a_node_that_is_avoided_gets_only_what_no_other_can_take() {
        let mut fleet = Fleet::default();
        for worker in [worker(1, "p", "a", &[1]), worker(2, "p", "b", &[])] {
            fleet.insert(worker);
        }
        assert_eq!(chosen_but(&fleet, &["p"], None, Some("a"), &["a"]).as_deref(), Some("w2"));
        assert_eq!(chosen_but(&fleet, &["p"], Some("a"), None, &["a"]).as_deref(), Some("w1"));
        fleet.set_state(WorkerUid::from_random([2; 16]), State::Taken);
        assert_eq!(chosen_but(&fleet, &["p"], None, None, &["a"]).as_deref(), Some("w1"));
    }

    #[test]
    fn the_longest_frozen_makes_room() {
        let mut fleet = Fleet::default();
        for (n, since) in [(1, 30), (2, 10), (3, 20)] {
            fleet.insert(worker(n, "p", "a", &[]));
            let resident = Resident {
                key: ActorKey::parse("s", &format!("a{n}")).unwrap(),
                uid: ActorUid::from_random([n; 16]),
                generation: Generation::new(1),
            };
            fleet.set_state(WorkerUid::from_random([n; 16]), State::Frozen { resident, since });
        }
        let pools = [ObjectKey::new("ns", "p")];
        let wish = Wish {
            pools: &pools,
            template: template(1),
            required_node: None,
            preferred_node: None,
            avoided_nodes: &BTreeSet::new(),
        };
        let idlest = |fleet: &Fleet, spared: &str| {
            fleet.idlest(&wish, |key| key.name.as_str() != spared).map(|resident| resident.key.name.to_string())
        };
        assert_eq!(idlest(&fleet, "").as_deref(), Some("a2"));
        assert_eq!(
            idlest(&fleet, "a2").as_deref(),
            Some("a3"),
            "one that may not be disturbed keeps nobody from the next"
        );
        fleet.set_state(WorkerUid::from_random([2; 16]), State::Taken);
        assert_eq!(idlest(&fleet, "").as_deref(), Some("a3"));
    }
}
