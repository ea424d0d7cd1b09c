//! `ate bench wake`: an actor's way out of its sleep and back, beside the floor and the public project's way.
//!
//! ```text
//!   slot        1          2          3          4       5         6       next round: one slot further on
//!   due at 0    wake       restore    restore    thaw    request   first
//!   due at 1/2  suspend    suspend    suspend
//!               ours       floor      public     ours    ours      ours
//! ```
//! Each has its own lane, so that one that is late delays nobody but itself. What of ours is late is charged for it; a
//! baseline is not: it has one sandbox only, and a floor that waits for itself would flatter us.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use ate_chart::Progress;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::dev::{Dev, host};
use crate::image::PythonImage;
use crate::report::Report;
use crate::schedule::Rounds;
use crate::site::{Order, Site, SiteKind};
use crate::target::{Limit, Target};
use crate::{BenchError, Output, Row, Rows, Setup, http, interval, workshop};

pub(crate) const OURS: &str = "ate";
const FLOOR: &str = "floor";
const PUBLIC: &str = "public";

/// Actors, by what is done to them.
const SLEEPER: &str = "sleeper";
const NAPPER: &str = "napper";
const RUNNER: &str = "runner";

/// As short as it gets: the router lets go of its connection to the actor before.
const FREEZE_AFTER: &str = "100ms";

/// One for each actor, and one for the newcomers.
const WORKERS: usize = 4;

/// Starts from nothing, before the rounds: they take as long as a slot, and would be in everybody's way.
const BOOTS: u32 = 3;

/// Timers are coarse; what remains is waited for awake.
const COARSE: Duration = Duration::from_millis(2);

/// Ticks of the progress line.
const TICK: Duration = Duration::from_millis(200);

#[derive(Clone, Debug, clap::Args)]
pub struct WakeArgs {
    /// Measured rounds; every event happens once in each
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// How long a slot of a round is; longer than anything in it takes, or events queue
    #[arg(long, default_value = "800ms", value_parser = interval, value_name = "DURATION")]
    every: Duration,
    #[command(flatten)]
    output: Output,
}

/// Where the clock of the rows begins.
#[derive(Clone, Copy)]
struct Origin(Instant);

impl Origin {
    fn micros(self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.0).as_micros()).unwrap_or(u64::MAX)
    }
}

/// One slot of a lane.
#[derive(Clone, Copy)]
struct Turn {
    round: u32,
    scheduled: Instant,
    /// When the second event of the slot is due.
    half: Instant,
}

type Turns = mpsc::UnboundedReceiver<Turn>;

#[derive(Clone)]
struct Lane {
    origin: Origin,
    rows: mpsc::UnboundedSender<Row>,
}

pub(crate) async fn run(args: &WakeArgs, setup: &Setup) -> Result<(), BenchError> {
    let mut progress = Progress::new(std::io::stderr(), std::io::IsTerminal::is_terminal(&std::io::stderr()));
    let mut rows = args.output.rows("wake")?;
    let workshop = workshop()?;
    let image = tokio::task::spawn_blocking(PythonImage::ensure)
        .await
        .map_err(|error| BenchError::refused("make the image", error))??;
    let stage = Stage::set(setup, workshop.path(), &image).await?;
    let full_bytes = stage.measure(args, &mut rows, &mut progress).await?;
    rows.flush()?;
    report(&rows, full_bytes, args.output.check)
}

/// Everything that takes part, warmed up.
struct Stage {
    dev: Dev,
    floor: Site,
    public: Site,
}

impl Stage {
    async fn set(setup: &Setup, directory: &Path, image: &PythonImage) -> Result<Self, BenchError> {
        let mut floor = Site::start(setup, SiteKind::Floor, &image.rootfs, directory)?;
        let mut public = Site::start(setup, SiteKind::Public, &image.rootfs, directory)?;
        let dev = Dev::start(setup, directory).await?;
        dev.apply(&image.reference, WORKERS, &[("steady", None), ("napping", Some(FREEZE_AFTER))]).await?;
        for (actor, template) in [(SLEEPER, "steady"), (RUNNER, "steady"), (NAPPER, "napping"), (&first(0), "steady")] {
            dev.create(actor, template).await?;
        }
        for site in [&mut floor, &mut public] {
            for order in [Order::Prepare, Order::Boot, Order::Suspend, Order::Prepare, Order::Restore, Order::Suspend] {
                site.must(order).await?;
            }
            site.must(Order::Prepare).await?;
        }
        let dev = Self::warm_up(dev).await?;
        Ok(Self { dev, floor, public })
    }

    /// Every worker has run both templates once before anything counts.
    async fn warm_up(dev: Dev) -> Result<Dev, BenchError> {
        let awake = ["warm-0", "warm-1", "warm-2", "warm-3"];
        for template in ["steady", "napping"] {
            for actor in awake {
                dev.create(actor, template).await?;
                ask(&dev, actor).await?;
            }
            for actor in awake {
                dev.suspend(actor).await?;
                dev.delete(actor).await?;
            }
        }
        for actor in [SLEEPER, RUNNER, NAPPER] {
            ask(&dev, actor).await?;
        }
        dev.suspend(SLEEPER).await?;
        Ok(dev)
    }

    /// Runs all rounds; returns the size of a full image, compressed as ours are.
    async fn measure(
        self,
        args: &WakeArgs,
        rows: &mut Rows,
        progress: &mut Progress<std::io::Stderr>,
    ) -> Result<u64, BenchError> {
        let Self { dev, mut floor, public } = self;
        let dev = Arc::new(dev);
        let origin = Origin(Instant::now());
        let (tell, mut told) = mpsc::unbounded_channel();
        let lane = Lane { origin, rows: tell };
        let [(sleeper, for_sleeper), (napper, for_napper), (runner, for_runner), (newcomers, for_newcomers)] =
            std::array::from_fn(|_| mpsc::unbounded_channel());
        let [(at_floor, for_floor), (at_public, for_public)] = std::array::from_fn(|_| mpsc::unbounded_channel());
        for boot in 0..BOOTS {
            lane.at_site(FLOOR, &mut floor, "boot", Order::Boot, boot).await?;
            floor.must(Order::Discard).await?;
            floor.must(Order::Prepare).await?;
        }
        let mut lanes = JoinSet::new();
        lanes.spawn(lane.clone().sleeper(dev.clone(), for_sleeper));
        lanes.spawn(lane.clone().napper(dev.clone(), for_napper));
        lanes.spawn(lane.clone().runner(dev.clone(), for_runner));
        lanes.spawn(lane.clone().newcomers(dev.clone(), for_newcomers));
        let floor = tokio::spawn(lane.clone().site(FLOOR, floor, for_floor));
        let public = tokio::spawn(lane.site(PUBLIC, public, for_public));
        let steps = [sleeper, at_floor, at_public, napper, runner, newcomers];

        progress.begin(Instant::now(), "measuring wakes");
        let rounds = Rounds::new(steps.len(), args.every);
        // A moment of rest before the first slot.
        let begin = Instant::now() + args.every;
        for due in (0..args.rounds).flat_map(|round| rounds.round(round)) {
            let at = begin + due.at;
            while Instant::now() + TICK < at {
                tokio::time::sleep(TICK).await;
                progress.tick(Instant::now(), &format!("round {} of {}", due.round + 1, args.rounds));
            }
            // Handed over a little ahead: the lane waits for the exact moment.
            tokio::time::sleep_until((at - COARSE * 2).into()).await;
            let half = at + args.every / 2;
            // A lane that has ended has failed, and says so below.
            let _ = steps[due.step].send(Turn { round: due.round, scheduled: at, half });
            drain(&mut told, rows)?;
        }
        drop(steps);
        while let Some(ended) = lanes.join_next().await {
            ended.map_err(|error| BenchError::refused("measure", error))??;
        }
        let ended = |error| BenchError::refused("measure", error);
        let mut floor = floor.await.map_err(ended)??;
        drop(public.await.map_err(ended)??);
        drain(&mut told, rows)?;
        let compressed = floor.must(Order::Compress).await?.bytes.unwrap_or(0);
        progress.end(Instant::now());
        match Arc::into_inner(dev) {
            Some(dev) => dev.stop().await?,
            None => unreachable!("every lane has ended"),
        }
        Ok(compressed)
    }
}

fn drain(told: &mut mpsc::UnboundedReceiver<Row>, rows: &mut Rows) -> Result<(), BenchError> {
    while let Ok(row) = told.try_recv() {
        rows.push(row)?;
    }
    Ok(())
}

fn first(round: u32) -> String {
    format!("first-{round}")
}

async fn ask(dev: &Dev, actor: &str) -> Result<(), BenchError> {
    let answered = http::get(dev.router(), &host(actor), "/").await;
    answered.map(drop).map_err(BenchError::io(format!("get an answer of actor {actor}")))
}

/// To the microsecond, as far as the kernel lets us.
async fn exactly(at: Instant) {
    tokio::time::sleep_until((at - COARSE).into()).await;
    while Instant::now() < at {
        std::hint::spin_loop();
    }
}

impl Lane {
    fn row(&self, way: &str, kind: &str, round: u32, scheduled: Instant, start: Instant) -> Row {
        let (scheduled, start) = (self.origin.micros(scheduled), self.origin.micros(start));
        Row { round, way: way.to_owned(), kind: kind.to_owned(), scheduled, start, ..Row::default() }
    }

    fn tell(&self, row: Row) {
        let _ = self.rows.send(row);
    }

    fn tell_answer(&self, mut row: Row, answered: std::io::Result<http::Answered>) {
        match answered {
            Ok(answered) => {
                row.first_byte = self.origin.micros(answered.first_byte);
                row.end = self.origin.micros(answered.end);
            }
            Err(error) => row.error = Some(error.to_string()),
        }
        self.tell(row);
    }

    /// An actor that is woken and suspended again.
    async fn sleeper(self, dev: Arc<Dev>, mut turns: Turns) -> Result<(), BenchError> {
        while let Some(turn) = turns.recv().await {
            exactly(turn.scheduled).await;
            self.wake(&dev, SLEEPER, "wake", turn).await?;
            self.suspend(&dev, turn).await?;
        }
        Ok(())
    }

    async fn wake(&self, dev: &Dev, actor: &str, kind: &str, turn: Turn) -> Result<(), BenchError> {
        let (start, began) = (Instant::now(), SystemTime::now());
        let answered = http::get(dev.router(), &host(actor), "/").await;
        let mut row = self.row(OURS, kind, turn.round, turn.scheduled, start);
        if let Ok(answered) = &answered {
            // The answer may be here before the wake is written down.
            dev.until(actor, "running", |actor| actor.phase == "running").await?;
            row.phases = wake_phases(dev, actor, began, answered.first_byte - start).await;
        }
        self.tell_answer(row, answered);
        Ok(())
    }

    async fn suspend(&self, dev: &Dev, turn: Turn) -> Result<(), BenchError> {
        exactly(turn.half).await;
        let (start, began) = (Instant::now(), SystemTime::now());
        let free =
            dev.until(SLEEPER, "out of its worker", |actor| actor.phase == "saving" || actor.phase == "suspended");
        let (free, suspended) = tokio::join!(free, dev.suspend(SLEEPER));
        let (free, end) = (free?, Instant::now());
        let mut row = self.row(OURS, "suspend", turn.round, turn.half, start);
        row.first_byte = self.origin.micros(free);
        row.end = self.origin.micros(end);
        row.error = suspended.err().map(|error| error.to_string());
        row.bytes = dev.latest(SLEEPER, "Suspended").await.map(|entry| entry.snapshot_bytes);
        row.phases = save_phases(dev, SLEEPER, began, free - start).await;
        self.tell(row);
        Ok(())
    }

    /// An actor that is frozen whenever it is asked.
    async fn napper(self, dev: Arc<Dev>, mut turns: Turns) -> Result<(), BenchError> {
        while let Some(turn) = turns.recv().await {
            dev.until(NAPPER, "frozen", |actor| actor.frozen).await?;
            exactly(turn.scheduled).await;
            let start = Instant::now();
            let answered = http::get(dev.router(), &host(NAPPER), "/").await;
            self.tell_answer(self.row(OURS, "thaw", turn.round, turn.scheduled, start), answered);
        }
        Ok(())
    }

    /// An actor that runs all the time; as idle as the frozen one, so that nothing but the freeze differs.
    async fn runner(self, dev: Arc<Dev>, mut turns: Turns) -> Result<(), BenchError> {
        while let Some(turn) = turns.recv().await {
            exactly(turn.scheduled).await;
            let row = self.row(OURS, "request", turn.round, turn.scheduled, Instant::now());
            let mut connection = match http::Connection::open(dev.router(), &host(RUNNER)).await {
                Ok(connection) => connection,
                Err(error) => {
                    self.tell_answer(row, Err(error));
                    continue;
                }
            };
            let answered = connection.get("/").await;
            self.tell_answer(row, answered);
            let again = Instant::now();
            let answered = connection.get("/").await;
            self.tell_answer(self.row(OURS, "next request", turn.round, again, again), answered);
        }
        Ok(())
    }

    /// Actors that have never run, each for one request.
    async fn newcomers(self, dev: Arc<Dev>, mut turns: Turns) -> Result<(), BenchError> {
        while let Some(turn) = turns.recv().await {
            let actor = first(turn.round);
            exactly(turn.scheduled).await;
            self.wake(&dev, &actor, "first", turn).await?;
            dev.suspend(&actor).await?;
            dev.delete(&actor).await?;
            dev.create(&first(turn.round + 1), "steady").await?;
        }
        Ok(())
    }

    async fn site(self, way: &'static str, mut site: Site, mut turns: Turns) -> Result<Site, BenchError> {
        while let Some(turn) = turns.recv().await {
            exactly(turn.scheduled).await;
            self.at_site(way, &mut site, "restore", Order::Restore, turn.round).await?;
            if way == FLOOR {
                self.at_site(way, &mut site, "request", Order::Request, turn.round).await?;
            }
            exactly(turn.half).await;
            self.at_site(way, &mut site, "suspend", Order::Suspend, turn.round).await?;
            site.must(Order::Prepare).await?;
        }
        Ok(site)
    }

    async fn at_site(
        &self,
        way: &str,
        site: &mut Site,
        kind: &str,
        order: Order,
        round: u32,
    ) -> Result<(), BenchError> {
        let start = Instant::now();
        let done = site.ask(order).await?;
        let mut row = self.row(way, kind, round, start, start);
        row.first_byte = row.start + done.first_byte;
        row.end = row.start + done.end;
        row.phases = done.phases;
        row.error = done.error;
        self.tell(row);
        Ok(())
    }
}

/// Cuts a wake at the times in the actor's history, which is of the same machine and so of the same clock.
///
/// ```text
///   asked ─ route ─▶ Resuming ─ bind ─▶ the node's own steps ─▶ Running ─ answer ─▶ first byte
/// ```
async fn wake_phases(dev: &Dev, actor: &str, began: SystemTime, lasted: Duration) -> Vec<(String, u64)> {
    between(dev, actor, began, lasted, ["Resuming", "Running"], ["route", "bind", "answer"]).await
}

async fn save_phases(dev: &Dev, actor: &str, began: SystemTime, lasted: Duration) -> Vec<(String, u64)> {
    between(dev, actor, began, lasted, ["Suspending", "Captured"], ["ask", "say so", "free"]).await
}

async fn between(
    dev: &Dev,
    actor: &str,
    began: SystemTime,
    lasted: Duration,
    events: [&str; 2],
    names: [&str; 3],
) -> Vec<(String, u64)> {
    let (Some(intent), Some(settled)) = (dev.latest(actor, events[0]).await, dev.latest(actor, events[1]).await) else {
        return Vec::new();
    };
    let since = |entry: &ate_proto::ate::v1::HistoryEntry| {
        let time = entry.time.and_then(|time| SystemTime::try_from(time).ok())?;
        time.duration_since(began).ok().and_then(|since| u64::try_from(since.as_micros()).ok())
    };
    let (Some(intended), Some(done)) = (since(&intent), since(&settled)) else { return Vec::new() };
    let node: u64 = settled.phases.iter().map(|phase| phase.micros).sum();
    let lasted = u64::try_from(lasted.as_micros()).unwrap_or(u64::MAX);
    let mut phases = vec![
        (names[0].to_owned(), intended),
        (names[1].to_owned(), done.saturating_sub(intended).saturating_sub(node)),
    ];
    phases.extend(settled.phases.into_iter().map(|phase| (phase.name, phase.micros)));
    phases.push((names[2].to_owned(), lasted.saturating_sub(done)));
    phases
}

fn report(rows: &Rows, full_bytes: u64, check: bool) -> Result<(), BenchError> {
    let mut report = Report::new();
    report.machine()?;
    report.heading("From asleep to the first byte of an answer")?;
    report.latencies(
        rows,
        &[
            (OURS, "wake", "ate: suspended, through the router"),
            (FLOOR, "restore", "floor: restored without us"),
            (PUBLIC, "restore", "public way: two containers by command"),
            (OURS, "first", "ate: a new actor, from the golden"),
            (FLOOR, "boot", "floor: started from nothing"),
        ],
    )?;
    report.phases(rows, OURS, "wake", "ate")?;
    report.phases(rows, FLOOR, "restore", "floor")?;
    report.phases(rows, PUBLIC, "restore", "public way")?;
    report.heading("Awake")?;
    report.latencies(
        rows,
        &[
            (OURS, "thaw", "ate: frozen"),
            (OURS, "request", "ate: running, new connections"),
            (OURS, "next request", "ate: running, kept connections"),
            (FLOOR, "request", "floor: running, new connection"),
        ],
    )?;
    report.heading("From asked to suspend to a free worker")?;
    report
        .latencies(rows, &[(OURS, "suspend", "ate"), (FLOOR, "suspend", "floor"), (PUBLIC, "suspend", "public way")])?;
    report.phases(rows, OURS, "suspend", "ate")?;
    report.phases(rows, FLOOR, "suspend", "floor")?;
    let mut stored: Vec<u64> = rows.of(OURS, "suspend").filter_map(|row| row.bytes).collect();
    stored.sort_unstable();
    let stored = stored.get(stored.len() / 2).copied();
    report.heading("Stored for a suspended actor")?;
    report.say(&format!(
        "  {} KB as the difference to the golden, {} KB as a full image, compressed alike",
        stored.unwrap_or(0) / 1000,
        full_bytes / 1000
    ))?;
    report.targets(&targets(rows, stored, full_bytes), check)?;
    report.say(&format!("\nevery event: {}", rows.path().display()))
}

fn targets(rows: &Rows, stored: Option<u64>, full_bytes: u64) -> [Target; 5] {
    let median = |way: &str, kind: &str| rows.samples(way, kind).percentile(50.0).map(|median| median.as_secs_f64());
    let wake = median(OURS, "wake");
    #[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
    let (stored, full) = (stored.map(|bytes| bytes as f64), Some(full_bytes as f64));
    [
        Target::new("wake to first byte / floor", Limit::AtMost(1.3), wake, median(FLOOR, "restore")),
        Target::new("wake to first byte / public way", Limit::AtMost(0.4), wake, median(PUBLIC, "restore")),
        Target::new(
            "thaw to first byte / request to a running actor",
            Limit::AtMost(2.0),
            median(OURS, "thaw"),
            median(OURS, "request"),
        ),
        Target::new(
            "suspend to free worker / floor",
            Limit::AtMost(1.3),
            median(OURS, "suspend"),
            median(FLOOR, "suspend"),
        ),
        Target::new("stored bytes / full compressed image", Limit::AtMost(0.06), stored, full),
    ]
}
