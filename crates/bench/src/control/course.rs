//! What is measured, in which order.

use std::collections::HashMap;
use std::io::{IsTerminal, Stderr};
use std::path::Path;
use std::time::{Duration, Instant};

use ate_chart::Progress;

use super::client::{Call, Event, Home, Plane};
use super::plane::{Done, Order};
use super::{ControlArgs, SPARE_WORKERS, StoreKind, clock, fill};
use crate::memory::Share;
use crate::pin::processor_seconds;
use crate::schedule::Pace;
use crate::{BenchError, Row, Rows, Setup};

/// The open load, of what the slowest plane can take.
const SHARE_OF_SLOWEST: f64 = 0.25;

/// Wakes one after the other, of each kind in each round.
const ALONE: u32 = 100;

/// Bursts of one round. All of wakes come first, then all by the store alone, each half when the engine has nothing left to do:
/// what it does behind its commits is then done behind those that it is for, and behind the suspends between wakes, which are
/// not counted. In turns it would fall into the same half again and again, whichever that is.
const BURSTS: u32 = 8;

/// How often each page is asked for.
const PAGES: usize = 20;

/// Watchers of every change, and changes that they are told.
const WATCHERS: usize = 8;
const CHANGES: u32 = 100;

/// A plane is quiet that has used less than this share of a processor for a second.
const QUIET: f64 = 0.1;

/// What an engine has to put in order after millions of records have been written may take minutes.
const QUIET_WITHIN: Duration = Duration::from_secs(600);

/// A plane and how many actors sleep there.
struct Subject {
    /// As in the rows.
    way: String,
    actors: u32,
    home: Home,
    plane: Plane,
}

pub(crate) struct Course<'a> {
    args: &'a ControlArgs,
    setup: &'a Setup,
    begun: u64,
    progress: Progress<Stderr>,
    /// That no checkpoints can be made is said once.
    told: bool,
}

/// As rows name a plane.
pub(crate) fn way(kind: StoreKind, actors: u32) -> String {
    format!("{} {actors}", kind.name())
}

impl<'a> Course<'a> {
    pub(crate) fn new(args: &'a ControlArgs, setup: &'a Setup) -> Self {
        let progress = Progress::new(std::io::stderr(), std::io::stderr().is_terminal());
        Self { args, setup, begun: clock::now(), progress, told: false }
    }

    pub(crate) async fn run(
        &mut self,
        kind: StoreKind,
        directory: &Path,
        home: impl Fn(u32) -> Home,
        rows: &mut Rows,
    ) -> Result<(), BenchError> {
        let mut subjects = Vec::new();
        for &actors in &self.args.actors {
            let home = home(actors);
            let way = way(kind, actors);
            self.progress.begin(Instant::now(), &format!("{way}: filling"));
            if let Home::Postgres { url, schema } = &home {
                // Of a run that did not come to its end.
                fill::drop_schema(url, schema).await?;
            }
            self.fill(&home, directory, actors, &way, rows).await?;
            let plane = self.start(&home, directory, actors).await?;
            subjects.push(Subject { way, actors, home, plane });
            self.progress.end(Instant::now());
        }
        for Subject { plane, home, .. } in &subjects {
            self.quiet(plane, home).await?;
            if let Home::Postgres { url, schema } = home {
                fill::read_index(url, schema).await?;
            }
        }
        self.list_and_watch(&mut subjects, rows).await?;
        let measured = self.measure(&mut subjects, rows).await;
        for Subject { plane, .. } in subjects {
            plane.end().await?;
        }
        measured
    }

    async fn start(&self, home: &Home, directory: &Path, actors: u32) -> Result<Plane, BenchError> {
        let directory = directory.join(actors.to_string());
        let mut plane = Plane::start(self.setup, home, &directory, self.args.burst + SPARE_WORKERS)?;
        plane.serve().await?;
        Ok(plane)
    }

    /// By a process of its own: what writing millions of records leaves in memory is not the control plane's.
    async fn fill(
        &mut self,
        home: &Home,
        directory: &Path,
        actors: u32,
        way: &str,
        rows: &mut Rows,
    ) -> Result<(), BenchError> {
        let mut plane = self.start(home, directory, actors).await?;
        plane.api()?.furnish().await?;
        plane.retire().await?;
        let start = clock::now();
        let Done { commits, bytes, .. } = plane.must(Order::Fill { actors }).await?;
        let event = Event { scheduled: start, start, end: clock::now() };
        self.quiet(&plane, home).await?;
        let counts = [("actors", u64::from(actors)), ("records per actor", commits)];
        rows.push(Row { bytes: Some(bytes), ..self.row(0, way, "fill", event, &counts) })?;
        plane.end().await
    }

    /// Until the plane has nothing to do any more.
    async fn quiet(&mut self, plane: &Plane, home: &Home) -> Result<(), BenchError> {
        let begun = Instant::now();
        while begun.elapsed() < QUIET_WITHIN {
            let before = processor_seconds(plane.pid());
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.progress.tick(Instant::now(), "waiting until it is quiet");
            if processor_seconds(plane.pid()) - before < QUIET {
                break;
            }
        }
        // A database puts itself in order elsewhere: its pages are written, and the first change of each is logged in whole again.
        if let Home::Postgres { url, .. } = home
            && !fill::checkpoint(url).await?
            && !std::mem::replace(&mut self.told, true)
        {
            eprintln!(
                "the database lets this user make no checkpoints: its own fall where they will\n  for steadier figures be a \
                 superuser, or GRANT pg_checkpoint (PostgreSQL 15)"
            );
        }
        Ok(())
    }

    async fn measure(&mut self, subjects: &mut [Subject], rows: &mut Rows) -> Result<(), BenchError> {
        // Not counted: connections are made, caches filled, and the pace of the open load found.
        let mut slowest = f64::INFINITY;
        for subject in subjects.iter_mut() {
            let chosen = self.choose(subject.actors, self.args.burst);
            let events = subject.plane.api()?.closed(Call::Activate, &chosen, self.args.clients as usize).await?;
            let last = events.iter().map(|event| event.end).max().unwrap_or(0);
            slowest = slowest.min(per_second(chosen.len(), span(&events, last)));
            self.suspend(subject, &chosen).await?;
        }
        let pace = Pace::new(slowest * SHARE_OF_SLOWEST)
            .ok_or_else(|| BenchError::refused("choose a rate", "no wake was counted"))?;
        // Memory first: what is remembered of bursts to commit it once more is not the control plane's.
        self.progress.begin(Instant::now(), "latency and memory");
        for (round, place) in self.turns(subjects.len()) {
            let subject = &mut subjects[place];
            self.tell_round(round, subject);
            for _ in 0..self.passes(subject.actors) {
                self.at_a_pace(round, subject, pace, rows).await?;
            }
            self.alone(round, subject, rows).await?;
            self.memory(round, "memory", subject, rows).await?;
        }
        self.progress.end(Instant::now());
        self.progress.begin(Instant::now(), "throughput");
        for (round, place) in self.turns(subjects.len()) {
            let subject = &mut subjects[place];
            self.tell_round(round, subject);
            self.throughput(round, subject, rows).await?;
        }
        self.progress.end(Instant::now());
        Ok(())
    }

    /// Every plane in every round, each round beginning one place further on.
    fn turns(&self, planes: usize) -> Vec<(u32, usize)> {
        let turn = |round: u32| (0..planes).map(move |place| (round, (place + round as usize) % planes));
        (0..self.args.rounds).flat_map(turn).collect()
    }

    fn tell_round(&mut self, round: u32, subject: &Subject) {
        let detail = format!("round {} of {}, {}", round + 1, self.args.rounds, subject.way);
        self.progress.tick(Instant::now(), &detail);
    }

    /// First of all: it reads every actor once, so that what follows finds the files in the kernel's cache, at every size.
    async fn list_and_watch(&mut self, subjects: &mut [Subject], rows: &mut Rows) -> Result<(), BenchError> {
        self.progress.begin(Instant::now(), "listing and watching");
        for subject in subjects.iter_mut() {
            self.memory(0, "memory before", subject, rows).await?;
            self.list(subject, rows).await?;
            self.watch(subject, rows).await?;
            self.memory(0, "memory listed", subject, rows).await?;
        }
        self.progress.end(Instant::now());
        Ok(())
    }

    /// Bursts of wakes, and the very same changes by the store alone.
    async fn throughput(&mut self, round: u32, subject: &mut Subject, rows: &mut Rows) -> Result<(), BenchError> {
        let mut wakes = Vec::new();
        self.quiet(&subject.plane, &subject.home).await?;
        for _ in 0..BURSTS * self.passes(subject.actors) {
            let chosen = self.choose(subject.actors, self.args.burst);
            wakes.push(chosen.len() as u64);
            let (events, settled) = self.wakes(subject, &chosen).await?;
            for event in &events {
                rows.push(self.row(round, &subject.way, "wake", *event, &[]))?;
            }
            let counts = [("wakes", chosen.len() as u64), ("commits", settled.commits), ("busy", settled.busy)];
            let burst = span(&events, settled.end);
            rows.push(Row { bytes: Some(settled.bytes), ..self.row(round, &subject.way, "wakes", burst, &counts) })?;
            let suspends = self.suspend(subject, &chosen).await?;
            let last = suspends.iter().map(|event| event.end).max().unwrap_or(0);
            let counts = [("suspends", suspends.len() as u64)];
            rows.push(self.row(round, &subject.way, "suspends", span(&suspends, last), &counts))?;
        }
        subject.plane.retire().await?;
        self.quiet(&subject.plane, &subject.home).await?;
        for wakes in wakes {
            let raw = subject.plane.must(Order::Replay { clients: self.args.clients as usize }).await?;
            let burst = Event { scheduled: raw.start, start: raw.start, end: raw.end };
            let counts = [("wakes", wakes), ("commits", raw.commits), ("busy", raw.busy)];
            rows.push(Row { bytes: Some(raw.bytes), ..self.row(round, &subject.way, "raw", burst, &counts) })?;
        }
        subject.plane.serve().await
    }

    async fn at_a_pace(
        &mut self,
        round: u32,
        subject: &mut Subject,
        pace: Pace,
        rows: &mut Rows,
    ) -> Result<(), BenchError> {
        let chosen = self.choose(subject.actors, self.args.burst);
        let events = subject.plane.api()?.open(Call::Activate, &chosen, pace).await?;
        events.iter().try_for_each(|event| rows.push(self.row(round, &subject.way, "open", *event, &[])))?;
        self.suspend(subject, &chosen).await.map(drop)
    }

    async fn alone(&mut self, round: u32, subject: &mut Subject, rows: &mut Rows) -> Result<(), BenchError> {
        for (call, kind) in [(Call::Activate, "alone"), (Call::Resume, "resume")] {
            let chosen = self.choose(subject.actors, ALONE.min(self.args.burst));
            let events = subject.plane.api()?.closed(call, &chosen, 1).await?;
            events.iter().try_for_each(|event| rows.push(self.row(round, &subject.way, kind, *event, &[])))?;
            self.suspend(subject, &chosen).await?;
        }
        Ok(())
    }

    /// Bursts of one round: where there are too few actors for a whole one there are more, so that all planes have done as
    /// much when their memory is compared.
    fn passes(&self, actors: u32) -> u32 {
        self.args.burst.div_ceil(actors.min(self.args.burst))
    }

    /// Wakes, and when the last of their commits was durable.
    async fn wakes(&self, subject: &mut Subject, chosen: &[u32]) -> Result<(Vec<Event>, Done), BenchError> {
        subject.plane.must(Order::Record).await?;
        let clients = self.args.clients as usize;
        let events = subject.plane.api()?.closed(Call::Activate, chosen, clients).await?;
        let settled = subject.plane.must(Order::Settled { commits: 2 * chosen.len(), keep: true }).await?;
        Ok((events, settled))
    }

    async fn suspend(&self, subject: &Subject, chosen: &[u32]) -> Result<Vec<Event>, BenchError> {
        subject.plane.api()?.closed(Call::Suspend, chosen, self.args.clients as usize).await
    }

    /// So many actors, anywhere, none twice.
    fn choose(&self, actors: u32, count: u32) -> Vec<u32> {
        let chosen = rand::seq::index::sample(&mut rand::rng(), actors as usize, count.min(actors) as usize);
        chosen.into_iter().filter_map(|number| u32::try_from(number).ok()).collect()
    }

    async fn memory(&self, round: u32, kind: &str, subject: &mut Subject, rows: &mut Rows) -> Result<(), BenchError> {
        let size = subject.plane.must(Order::Size).await?;
        let share = Share::of(subject.plane.pid());
        let now = clock::now();
        let counts = [("cached", size.cached), ("files", share.files), ("on disk", size.bytes)];
        let event = Event { scheduled: now, start: now, end: now };
        rows.push(Row { bytes: Some(share.own), ..self.row(round, &subject.way, kind, event, &counts) })
    }

    /// All of them, page by page; then the first, the middle and the last page again and again.
    async fn list(&mut self, subject: &Subject, rows: &mut Rows) -> Result<(), BenchError> {
        let api = subject.plane.api()?;
        let (mut tokens, mut actors) = (vec![String::new()], 0);
        let start = clock::now();
        loop {
            let (count, _, next) = api.page(tokens.last().map_or("", String::as_str)).await?;
            actors += count as u64;
            self.progress.tick(Instant::now(), &format!("{}: {actors} listed", subject.way));
            if next.is_empty() {
                break;
            }
            tokens.push(next);
        }
        let event = Event { scheduled: start, start, end: clock::now() };
        let counts = [("actors", actors), ("pages", tokens.len() as u64)];
        rows.push(self.row(0, &subject.way, "list", event, &counts))?;
        let places = [("page first", 0), ("page middle", tokens.len() / 2), ("page last", tokens.len() - 1)];
        for round in 0..PAGES {
            for (kind, place) in places {
                let (count, event, _) = api.page(&tokens[place]).await?;
                let round = u32::try_from(round).unwrap_or(u32::MAX);
                rows.push(self.row(round, &subject.way, kind, event, &[("actors", count as u64)]))?;
            }
        }
        Ok(())
    }

    /// From a commit to each of the watchers.
    async fn watch(&mut self, subject: &mut Subject, rows: &mut Rows) -> Result<(), BenchError> {
        let mut watchers = Vec::new();
        for by in 0..WATCHERS {
            watchers.push(subject.plane.api()?.watch(by).await?);
        }
        subject.plane.must(Order::Record).await?;
        let chosen = self.choose(subject.actors, CHANGES);
        subject.plane.api()?.closed(Call::Update, &chosen, 1).await?;
        let settled = subject.plane.must(Order::Settled { commits: chosen.len(), keep: false }).await?;
        let durable: HashMap<u64, u64> = settled.durable.into_iter().collect();
        for mut watcher in watchers {
            for _ in &chosen {
                let told = tokio::time::timeout(Duration::from_secs(10), watcher.recv()).await.ok().flatten();
                let (version, told) =
                    told.ok_or_else(|| BenchError::refused("watch actors", "a change was not told"))?;
                let at = *durable
                    .get(&version)
                    .ok_or_else(|| BenchError::refused("watch actors", "a change was told that nobody made"))?;
                // The watcher may be told before whoever committed is.
                let event = Event { scheduled: at, start: at, end: told.max(at) };
                rows.push(self.row(0, &subject.way, "watch", event, &[]))?;
            }
        }
        Ok(())
    }

    fn row(&self, round: u32, way: &str, kind: &str, event: Event, counts: &[(&str, u64)]) -> Row {
        let since = |at: u64| at.saturating_sub(self.begun);
        Row {
            round,
            way: way.to_owned(),
            kind: kind.to_owned(),
            scheduled: since(event.scheduled),
            start: since(event.start),
            first_byte: since(event.end),
            end: since(event.end),
            phases: counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
            ..Row::default()
        }
    }
}

/// From the first call to the end.
fn span(events: &[Event], end: u64) -> Event {
    let start = events.iter().map(|event| event.start).min().unwrap_or(end);
    Event { scheduled: start, start, end }
}

fn per_second(count: usize, burst: Event) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "counts and microseconds of a burst")]
    let rate = count as f64 * 1e6 / burst.end.saturating_sub(burst.start).max(1) as f64;
    rate
}
