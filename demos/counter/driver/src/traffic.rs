//! Requests in random order, each answer checked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::Rng as _;
use rand::seq::{IndexedRandom as _, SliceRandom as _};
use tokio::task::JoinSet;

use crate::http::{self, Reply};
use crate::ledger::Ledger;
use crate::narrator::Narrator;
use crate::wakes::Wakes;

/// Between two requests while everyone is asked in turn. An actor makes room for another once it is frozen, so four workers
/// can take in a new actor about three times a second; faster than that, requests would measure the queue.
const PACE: Duration = Duration::from_millis(400);

/// Actors asked at the same time, but for the crowd: on a slow machine the pace falls instead of a queue growing.
const AT_A_TIME: usize = 2;

/// Different actors asked at the same moment: twice as many as there are workers, so that some have to wait for one.
const CROWD: usize = 8;

/// Requests to the same sleeping actor at the same moment: they share one wake.
const AT_ONCE: u64 = 10;

/// An actor that has just been asked is frozen by then, and not yet suspended.
const FROZEN_WITHIN: Duration = Duration::from_secs(2);

/// By then the idle policy has suspended everyone many times over.
const QUIET_WITHIN: Duration = Duration::from_secs(60);

/// Everything that is known while the demo runs.
#[derive(Debug)]
pub(crate) struct Demo {
    pub(crate) port: u16,
    pub(crate) atespace: String,
    pub(crate) names: Vec<String>,
    pub(crate) ledger: Mutex<Ledger>,
    pub(crate) wakes: Mutex<Wakes>,
    /// The newest answer of each.
    pub(crate) replies: Mutex<BTreeMap<String, Reply>>,
    /// What went wrong, for people.
    pub(crate) problems: Mutex<Vec<String>>,
    pub(crate) narrator: Narrator,
    /// Told at each news of the watch.
    pub(crate) news: tokio::sync::Notify,
    /// All has been shown: ending now is no interruption.
    pub(crate) is_shown: AtomicBool,
    progress: Mutex<Asked>,
}

#[derive(Debug, Default)]
struct Asked {
    busy: BTreeSet<String>,
    done: u64,
    planned: u64,
}

impl Demo {
    pub(crate) fn new(port: u16, atespace: &str, names: Vec<String>, ledger: Ledger, narrator: Narrator) -> Self {
        Self {
            port,
            atespace: atespace.to_owned(),
            names,
            ledger: Mutex::new(ledger),
            wakes: Mutex::default(),
            replies: Mutex::default(),
            problems: Mutex::default(),
            narrator,
            news: tokio::sync::Notify::new(),
            is_shown: AtomicBool::new(false),
            progress: Mutex::default(),
        }
    }

    pub(crate) fn requests(&self) -> u64 {
        self.progress.lock().done
    }

    pub(crate) fn problem(&self, text: String) {
        self.problems.lock().push(text);
    }

    /// All of it: everyone once, a mixture of `mixed` requests, a crowd, a silence, many at once to one,
    /// some more sleepers, and whoever is frozen then.
    pub(crate) async fn drive(self: &Arc<Self>, mixed: usize) {
        let (crowd, again) = (CROWD.min(self.names.len()), (self.names.len() / 3).max(1));
        let planned = self.names.len() + mixed + crowd + again;
        self.progress.lock().planned = u64::try_from(planned).unwrap_or_default() + AT_ONCE;
        self.narrator.begin("sending requests in random order");
        let mut tasks = JoinSet::new();
        for name in self.shuffled(self.names.len()) {
            self.spawn(&mut tasks, name, 1, false);
            pace(&mut tasks, PACE).await;
        }
        self.mix(&mut tasks, mixed).await;
        tasks.join_all().await;

        let mut tasks = JoinSet::new();
        for name in self.shuffled(crowd) {
            self.spawn(&mut tasks, name, 1, true);
        }
        tasks.join_all().await;

        self.quiet().await;
        self.narrator.begin("waking sleepers");
        let mut sleepers = self.shuffled(again + 1).into_iter();
        let mut tasks = JoinSet::new();
        if let Some(name) = sleepers.next() {
            self.spawn(&mut tasks, name, AT_ONCE, false);
        }
        for name in sleepers {
            pace(&mut tasks, PACE).await;
            self.spawn(&mut tasks, name, 1, false);
        }
        tasks.join_all().await;
        self.thaw().await;
        self.narrator.end();
    }

    /// Whoever is still on a worker, once frozen: the shortest sleep there is.
    async fn thaw(self: &Arc<Self>) {
        self.narrator.begin("thawing");
        let begun = Instant::now();
        let mut asked = BTreeSet::new();
        while let Some(left) = FROZEN_WITHIN.checked_sub(begun.elapsed()) {
            let news = self.news.notified();
            tokio::pin!(news);
            news.as_mut().enable();
            let frozen = {
                let wakes = self.wakes.lock();
                self.names.iter().find(|name| !asked.contains(*name) && wakes.is_frozen(name)).cloned()
            };
            let Some(name) = frozen else {
                let _ = tokio::time::timeout(left, news).await;
                continue;
            };
            self.progress.lock().planned += 1;
            asked.insert(name.clone());
            let mut tasks = JoinSet::new();
            self.spawn(&mut tasks, name, 1, false);
            tasks.join_all().await;
        }
    }

    fn shuffled(&self, count: usize) -> Vec<String> {
        let mut names = self.names.clone();
        names.shuffle(&mut rand::rng());
        names.truncate(count);
        names
    }

    /// Half of the requests to actors that are frozen at the moment, the others to anyone, who is mostly asleep.
    async fn mix(self: &Arc<Self>, tasks: &mut JoinSet<()>, requests: usize) {
        for _ in 0..requests {
            let name = {
                let (busy, wakes) = (&self.progress.lock().busy, self.wakes.lock());
                let anyone: Vec<&String> = self.names.iter().filter(|name| !busy.contains(*name)).collect();
                let frozen: Vec<&String> = anyone.iter().copied().filter(|name| wakes.is_frozen(name)).collect();
                let random = &mut rand::rng();
                let favourite = frozen.choose(random).filter(|_| random.random_bool(0.5));
                favourite.or(anyone.choose(random)).map(|name| (*name).clone())
            };
            if let Some(name) = name {
                self.spawn(tasks, name, 1, false);
            }
            let jitter = rand::rng().random_range(0.3..1.0);
            pace(tasks, PACE.mul_f64(jitter)).await;
        }
    }

    /// Until the idle policy has put everyone to sleep.
    async fn quiet(&self) {
        self.narrator.begin("no requests: idle actors are frozen, then suspended");
        let begun = Instant::now();
        loop {
            let news = self.news.notified();
            tokio::pin!(news);
            news.as_mut().enable();
            let asleep = {
                let wakes = self.wakes.lock();
                self.names.iter().filter(|name| wakes.is_suspended(name)).count()
            };
            self.narrator.detail(format!("{asleep} of {} suspended", self.names.len()));
            if asleep == self.names.len() {
                return;
            }
            let left = QUIET_WITHIN.saturating_sub(begun.elapsed());
            if tokio::time::timeout(left, news).await.is_err() {
                return self.problem(format!("{asleep} of {} actors were suspended when idle", self.names.len()));
            }
        }
    }

    fn spawn(self: &Arc<Self>, tasks: &mut JoinSet<()>, name: String, requests: u64, in_burst: bool) {
        self.progress.lock().busy.insert(name.clone());
        let demo = Arc::clone(self);
        tasks.spawn(async move {
            if let Err(error) = demo.ask(&name, requests, in_burst).await {
                demo.problem(format!("{error:#}"));
            }
            let mut progress = demo.progress.lock();
            progress.busy.remove(&name);
            progress.done += requests;
            demo.narrator.detail(format!("{} of {}", progress.done, progress.planned));
        });
    }

    /// Requests to one actor at once, and what their answers are worth.
    async fn ask(self: &Arc<Self>, name: &str, requests: u64, in_burst: bool) -> anyhow::Result<()> {
        self.ledger.lock().sent(name, requests)?;
        let number = self.wakes.lock().asking(name, requests, in_burst);
        let mut exchanges = JoinSet::new();
        for _ in 0..requests {
            let (port, host) = (self.port, format!("{name}.{}.localhost", self.atespace));
            exchanges.spawn(async move { http::count(port, &host).await });
        }
        let mut replies: Vec<Reply> = Vec::new();
        for answer in exchanges.join_all().await {
            match answer {
                Ok(reply) => replies.push(reply),
                Err(error) => self.problem(format!("{name}: {error:#}")),
            }
        }
        for reply in &replies {
            if reply.actor != name {
                self.problem(format!("{name} was asked and {} answered", reply.actor));
            }
            if reply.memory != reply.file {
                let Reply { memory, file, .. } = reply;
                self.problem(format!("{name} counts {memory} in memory and {file} in its file"));
            }
        }
        if let Some(first) = replies.iter().min_by_key(|reply| reply.first_byte) {
            self.wakes.lock().answered(name, number, first.first_byte, first.generation);
        }
        let counts: Vec<u64> = replies.iter().map(|reply| reply.memory).collect();
        let verdict = self.ledger.lock().answered(name, requests, &counts)?;
        if let Err(wrong) = verdict {
            self.problem(wrong);
        }
        if let Some(last) = replies.into_iter().max_by_key(|reply| reply.memory) {
            self.replies.lock().insert(name.to_owned(), last);
        }
        Ok(())
    }
}

/// Until the next request may be sent.
async fn pace(tasks: &mut JoinSet<()>, pause: Duration) {
    tokio::time::sleep(pause).await;
    while tasks.len() >= AT_A_TIME {
        tasks.join_next().await;
    }
}
