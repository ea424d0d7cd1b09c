//! What is done to the instance. Each fault is mended before the next, so that every one meets a whole.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::ensure;
use ate_testkit::Cluster;
use ate_testkit_minio::Minio;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rustix::process::Signal;

/// A node's disk: room for images and snapshots, small enough to be filled in a moment.
pub(crate) const DISK_BYTES: u64 = 1 << 30;

/// So long, in milliseconds, a fault lasts at most.
const LONGEST_MILLIS: u64 = 20_000;
pub(crate) const LONGEST: Duration = Duration::from_millis(LONGEST_MILLIS);

/// What faults are inflicted on.
pub(crate) struct Site {
    pub(crate) cluster: Cluster,
    pub(crate) minio: Minio,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    KillApi,
    /// It is taken for dead by the others, and goes on as if nothing had been.
    StopApi,
    KillNode,
    /// For longer than its lease: its actors go on elsewhere, and it comes back.
    LoseNode,
    /// It neither speaks nor hears for a while, and goes on as if nothing had been.
    StopNode,
    /// It runs, and what it says is not heard, or it does not hear, or both.
    CutNode,
    KillRouter,
    KillWorker,
    StopWorker,
    KillSandbox,
    StopDatabase,
    StopStorage,
    /// It answers, in the end.
    SlowStorage,
    FillDisk,
    /// A process ends just between a thing and the telling of it.
    Failpoint,
}

impl Fault {
    /// They come first, so that a minute has them all.
    const KILLS: [(Self, &'static str); 5] = [
        (Self::KillApi, "kill api"),
        (Self::KillNode, "kill node"),
        (Self::KillRouter, "kill router"),
        (Self::KillWorker, "kill worker"),
        (Self::KillSandbox, "kill sandbox"),
    ];

    /// Failpoints come twice: there are many of them.
    const OTHERS: [(Self, &'static str); 11] = [
        (Self::StopApi, "stop api"),
        (Self::LoseNode, "lose node"),
        (Self::StopNode, "stop node"),
        (Self::CutNode, "cut node"),
        (Self::StopWorker, "stop worker"),
        (Self::StopDatabase, "stop database"),
        (Self::StopStorage, "stop object store"),
        (Self::SlowStorage, "slow object store"),
        (Self::FillDisk, "fill disk"),
        (Self::Failpoint, "failpoint"),
        (Self::Failpoint, "failpoint"),
    ];
}

pub(crate) struct Faults {
    dice: StdRng,
    /// Those that were done.
    pub(crate) counts: BTreeMap<&'static str, usize>,
    told: String,
    begun: Instant,
    /// Those not inflicted yet in this round: every one has its turn before one has two.
    round: Vec<(Fault, &'static str)>,
    /// The same for the places where a process ends.
    places: Vec<&'static str>,
    /// Those where one has.
    pub(crate) reached: BTreeSet<&'static str>,
}

impl Faults {
    pub(crate) fn new(dice: StdRng) -> Self {
        Self {
            dice,
            counts: BTreeMap::new(),
            told: String::new(),
            begun: Instant::now(),
            round: Vec::new(),
            places: Vec::new(),
            reached: BTreeSet::new(),
        }
    }

    /// What was done when.
    pub(crate) fn told(&self) -> &str {
        &self.told
    }

    /// Whether one of the kills was never done yet.
    pub(crate) fn kills_are_left(&self) -> bool {
        Fault::KILLS.iter().any(|(_, name)| !self.counts.contains_key(name))
    }

    /// What was never done.
    pub(crate) fn never(&self) -> Vec<&'static str> {
        let all = Fault::KILLS.iter().chain(&Fault::OTHERS).map(|(_, name)| *name);
        all.filter(|name| !self.counts.contains_key(name)).collect()
    }

    fn tell(&mut self, what: &str) {
        let _ = writeln!(self.told, "{:8.3} {what}", self.begun.elapsed().as_secs_f64());
        eprintln!("{:8.3} {what}", self.begun.elapsed().as_secs_f64());
    }

    /// Lets it be well for a moment, then inflicts the next fault and mends it.
    pub(crate) async fn inflict(&mut self, site: &mut Site) -> anyhow::Result<()> {
        self.wait(500..2500).await;
        let ended = site.cluster.ended();
        ensure!(ended.is_empty(), "ended without being told to: {}", ended.join(", "));
        if self.round.is_empty() {
            let mut shuffled = |mut faults: Vec<_>| {
                faults.shuffle(&mut self.dice);
                faults
            };
            // From the end on.
            self.round = [shuffled(Fault::OTHERS.to_vec()), shuffled(Fault::KILLS.to_vec())].concat();
        }
        let (fault, name) = self.round.pop().expect("filled above");
        if self.done(fault, site).await {
            *self.counts.entry(name).or_default() += 1;
        } else if !matches!(fault, Fault::Failpoint) {
            // Nobody was there for it. Its turn comes again, after the next.
            self.round.insert(self.round.len().saturating_sub(1), (fault, name));
        }
        Ok(())
    }

    /// Whether it could be done.
    async fn done(&mut self, fault: Fault, site: &mut Site) -> bool {
        match fault {
            Fault::KillApi => self.kill(site, "api", 0..3000).await,
            Fault::KillNode => self.kill(site, "node", 0..3000).await,
            Fault::LoseNode => self.kill(site, "node", 17_000..LONGEST_MILLIS).await,
            Fault::KillRouter => self.kill(site, "router", 0..1000).await,
            Fault::StopApi => {
                let name = self.one_of(&site.cluster.running("api"));
                let pid = site.cluster.pid(&name);
                self.stand_still(&name, pid, 1000..12_000).await;
            }
            Fault::StopNode => {
                let name = self.one_of(&site.cluster.running("node"));
                let pid = site.cluster.pid(&name);
                self.stand_still(&name, pid, 5000..LONGEST_MILLIS).await;
            }
            Fault::CutNode => {
                let name = self.one_of(&site.cluster.running("node"));
                let (to, from) =
                    *[(true, true), (true, false), (false, true)].choose(&mut self.dice).expect("not empty");
                self.tell(&format!("{name} is cut off (to it: {to}, from it: {from})"));
                site.cluster.cut(&name, to, from);
                self.wait(3000..LONGEST_MILLIS).await;
                site.cluster.cut(&name, false, false);
                self.tell(&format!("{name} is reached again"));
            }
            Fault::StopWorker => {
                let Some(pid) = site.cluster.worker_pids().choose(&mut self.dice).copied() else { return false };
                self.stand_still("a worker", pid, 1000..5000).await;
            }
            Fault::KillWorker => return self.kill_one("a worker", &site.cluster.worker_pids()),
            Fault::KillSandbox => return self.kill_one("a process of a sandbox", &site.cluster.sandbox_pids()),
            Fault::StopDatabase => {
                self.tell("the database crashes");
                site.cluster.postgres().crash();
                // Now and then for longer than a node's lease.
                let away = if self.dice.random_bool(0.3) { 12_000..LONGEST_MILLIS } else { 500..4000 };
                self.wait(away).await;
                site.cluster.postgres().resume();
                self.tell("the database is back");
            }
            Fault::StopStorage => {
                self.tell("the object store crashes");
                site.minio.crash();
                self.wait(1000..8000).await;
                site.minio.resume();
                self.tell("the object store is back");
            }
            Fault::SlowStorage => {
                self.tell("the object store is slow");
                let pid = site.minio.pid().expect("every fault is mended before the next");
                for _ in 0..self.dice.random_range(5..15) {
                    Cluster::signal(pid, Signal::STOP);
                    self.wait(300..1500).await;
                    Cluster::signal(pid, Signal::CONT);
                    self.wait(10..50).await;
                }
                self.tell("the object store is as fast as before");
            }
            Fault::FillDisk => {
                let name = self.one_of(&site.cluster.running("node"));
                self.tell(&format!("the disk of {name} is full"));
                let file = site.cluster.fill_disk(&name);
                self.wait(2000..8000).await;
                let _ = std::fs::remove_file(file);
                self.tell(&format!("the disk of {name} has room again"));
            }
            Fault::Failpoint => return self.failpoint(site).await,
        }
        true
    }

    /// Everything runs again.
    pub(crate) async fn mend_all(&mut self, site: &mut Site) {
        self.tell("no more faults");
        for name in site.cluster.stopped() {
            site.cluster.restart(&name).await;
        }
    }

    async fn kill(&mut self, site: &mut Site, role: &str, gone: std::ops::Range<u64>) {
        let name = self.one_of(&site.cluster.running(role));
        self.tell(&format!("kill {name}"));
        site.cluster.kill(&name).await;
        self.wait(gone).await;
        site.cluster.restart(&name).await;
        self.tell(&format!("{name} is back"));
    }

    async fn stand_still(&mut self, what: &str, pid: u32, still: std::ops::Range<u64>) {
        self.tell(&format!("{what} ({pid}) stands still"));
        Cluster::signal(pid, Signal::STOP);
        self.wait(still).await;
        Cluster::signal(pid, Signal::CONT);
        self.tell(&format!("{what} goes on"));
    }

    fn kill_one(&mut self, what: &str, pids: &[u32]) -> bool {
        let Some(&pid) = pids.choose(&mut self.dice) else { return false };
        self.tell(&format!("kill {what} ({pid})"));
        Cluster::signal(pid, Signal::KILL);
        true
    }

    /// Starts a process again so that it ends at a certain place, waits until it has, and starts it without. Whether it has.
    async fn failpoint(&mut self, site: &mut Site) -> bool {
        if self.places.is_empty() {
            self.places = ate_failpoint::ALL.to_vec();
        }
        let index = self.dice.random_range(0..self.places.len());
        let place = self.places.swap_remove(index);
        let role = if place.starts_with("node") || place.starts_with("worker") { "node" } else { "api" };
        let name = self.one_of(&site.cluster.running(role));
        self.tell(&format!("{name} is to end at {place}"));
        site.cluster.kill(&name).await;
        site.cluster.restart_with(&name, &[("ATE_FAILPOINTS", place)]).await;
        // Those it adopts know nothing of it.
        let adopted: BTreeSet<u32> = match place.starts_with("worker") {
            true => site.cluster.workers_of(&name).into_iter().collect(),
            false => BTreeSet::new(),
        };
        adopted.iter().for_each(|&pid| Cluster::signal(pid, Signal::KILL));
        // A worker ends by itself, and its node starts another.
        let mut workers = BTreeSet::new();
        let begun = Instant::now();
        let mut reached = false;
        while begun.elapsed() < Duration::from_secs(8) && !reached {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let here: BTreeSet<u32> = site.cluster.workers_of(&name).into_iter().collect();
            reached = match place.starts_with("worker") {
                true => !workers.is_subset(&here),
                false => !site.cluster.is_alive(&name),
            };
            workers.extend(here.difference(&adopted));
        }
        site.cluster.kill(&name).await;
        site.cluster.restart(&name).await;
        let workers = if place.starts_with("worker") { site.cluster.workers_of(&name) } else { Vec::new() };
        workers.into_iter().for_each(|pid| Cluster::signal(pid, Signal::KILL));
        self.tell(&format!("{name} is back{}", if reached { ", it ended there" } else { "" }));
        if reached {
            self.reached.insert(place);
        }
        reached
    }

    fn one_of(&mut self, names: &[String]) -> String {
        names.choose(&mut self.dice).expect("every fault is mended before the next").clone()
    }

    async fn wait(&mut self, millis: std::ops::Range<u64>) {
        tokio::time::sleep(Duration::from_millis(self.dice.random_range(millis))).await;
    }
}
