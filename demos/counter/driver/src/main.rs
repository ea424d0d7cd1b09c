//! `make demo`: many counters on few workers, driven, checked and shown.
//!
//! ```text
//!   lock the directory ─▶ `ate dev` as a child ─▶ apply demos/counter ─▶ actors ─▶ traffic ─▶ tables ─▶ stay up
//!        │                      │                                            │                          │
//!     server.rs              server.rs                         ledger.rs: what each answer must be   Ctrl-C
//!                                                              wakes.rs: how each request found it      ▼
//!                                                                                stop, wait, look for what is left
//! ```

mod http;
mod ledger;
mod narrator;
mod report;
mod server;
mod traffic;
mod wakes;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ate_chart::{Paint, Tone, duration};
use ate_proto::ate::v1::substrate_client::SubstrateClient;
use ate_proto::ate::v1::{GetHistoryRequest, HistoryEntry, WatchActorsRequest, actor_event};
use ate_proto::ateapi::control_client::ControlClient;
use ate_proto::ateapi::{ActorRef, CreateActorRequest, CreateAtespaceRequest};
use ate_testkit::{HostWide, Leaks};
use clap::Parser;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tonic::transport::Channel;

use crate::ledger::{Before, Ledger};
use crate::narrator::Narrator;
use crate::report::{Line, Measured};
use crate::server::{Directory, Server};
use crate::traffic::Demo;

const ATESPACE: &str = "demo";
const TEMPLATE: (&str, &str) = ("demo", "counter");

/// What a stopped instance held is gone by then; the kernel takes its time with the last of a process tree.
const GONE_WITHIN: Duration = Duration::from_secs(30);

/// Signals that come within this time ask for the same thing.
const SAME_WISH: Duration = Duration::from_secs(1);

/// As shells say it of a command that Ctrl-C has ended.
const INTERRUPTED: u8 = 130;

/// Shows 24 counting actors on 4 workers: asks them in random order, and checks that no count is ever lost
#[derive(Debug, Parser)]
struct Args {
    /// The `ate` to demonstrate
    #[arg(long, value_name = "FILE")]
    ate: PathBuf,
    /// Where everything is kept; the next run on it continues with the same actors
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// The template and the pool
    #[arg(long, value_name = "DIR", default_value = "demos/counter")]
    manifests: PathBuf,
    /// Stop when it has been shown; fails if a count is wrong or anything is left behind
    #[arg(long)]
    once: bool,
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u16).range(1..=1000))]
    actors: u16,
    /// Requests of the mixed part, besides one to each actor and the bursts
    #[arg(long, default_value_t = 26)]
    requests: usize,
    /// For the router; a free one if it is taken
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// For the API by TLS; a free one if it is taken
    #[arg(long, default_value_t = 8443)]
    api_port: u16,
}

/// The signals that end a demo.
struct Stop([Signal; 3]);

impl Stop {
    fn new() -> std::io::Result<Self> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = kinds.map(signal);
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    /// What has been asked so far.
    fn forget(&mut self) {
        for signal in &mut self.0 {
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            while signal.poll_recv(&mut context).is_ready() {}
        }
    }

    async fn asked(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut stop = Stop::new()?;
    let narrator = Narrator::start();
    let host = HostWide::look();
    let mut directory = Directory::lock(&args.data_dir)?;
    if let Some(pid) = directory.orphan() {
        narrator.say("the server of a demo that was killed still runs: stopping it first");
        narrator.begin("suspending its actors");
        Directory::stop_orphan(pid).await?;
        narrator.end();
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let begun = jiff::Timestamp::now().as_second();
    let ledger = Ledger::open(&directory.path.join("demo.ledger"), boot.trim(), begun)?;
    let (router, note) = server::free_port(args.port);
    let (api, api_note) = server::free_port(args.api_port);
    [note, api_note].iter().flatten().for_each(|note| narrator.say(note));

    narrator.begin("starting ate dev");
    let mut server = Server::start(&args.ate, &mut directory, router, api)?;
    let mut demo = None;
    let up = tokio::select! {
        up = server.up() => up.map(Some),
        () = stop.asked() => Ok(None),
    };
    // Whatever happens from here on, the server is stopped in the end.
    let shown = match up {
        Ok(Some((port, channel))) => {
            let names = (1..=args.actors).map(|number| format!("counter-{number}")).collect();
            let running = demo.insert(Arc::new(Demo::new(port, ATESPACE, names, ledger, narrator.clone())));
            tokio::select! {
                shown = show(&args, &directory.path, running, &channel, begun) => shown.map(Some),
                dead = server.died() => Err(dead),
                () = stop.asked() => Ok(None),
            }
        }
        Ok(None) => Ok(None),
        Err(error) => Err(error),
    };
    let stopped = stop_server(&mut server, &mut stop, &narrator).await;
    let problems = demo.as_ref().map(|demo| std::mem::take(&mut *demo.problems.lock())).unwrap_or_default();
    for problem in &problems {
        eprintln!("wrong: {problem}");
    }
    if stopped.is_ok()
        && shown.is_ok()
        && let Some(demo) = &demo
    {
        demo.ledger.lock().end()?;
    }
    let shown = shown?;
    stopped?;
    look_for_leftovers(&directory.path, &host).await?;
    eprintln!("everything is stopped: no process, namespace, mount, control group, firewall rule or socket is left");
    Ok(match shown {
        _ if !problems.is_empty() => ExitCode::FAILURE,
        Some(()) => ExitCode::SUCCESS,
        None if demo.is_some_and(|demo| demo.is_shown.load(Ordering::Relaxed)) => ExitCode::SUCCESS,
        None => INTERRUPTED.into(),
    })
}

/// Everything from the first actor to the tables; and then, unless it is to be shown once, nothing for ever.
async fn show(args: &Args, data: &Path, demo: &Arc<Demo>, channel: &Channel, begun: i64) -> anyhow::Result<()> {
    let narrator = &demo.narrator;
    narrator.begin("applying the template: its golden snapshot is made once");
    apply(&args.ate, data, &args.manifests).await?;
    narrator.begin("making actors");
    let watching = tokio::spawn(watch(Arc::clone(demo), channel.clone()));
    make_actors(demo, channel).await?;
    excuse(demo, channel).await?;
    let started = Instant::now();
    demo.drive(args.requests).await;
    let took = started.elapsed();
    if Leaks::of_instance(data).processes.is_empty() || Leaks::of_instance(data).cgroups.is_empty() {
        demo.problem("the look for what is left behind sees nothing while everything runs".to_owned());
    }
    let mut histories = BTreeMap::new();
    for name in &demo.names {
        histories.insert(name.clone(), history(channel, name).await?);
    }
    print(demo, &histories, begun, took)?;
    if args.once {
        watching.abort();
        return Ok(());
    }
    demo.ledger.lock().share()?;
    print_next(args, data, demo)?;
    demo.is_shown.store(true, Ordering::Relaxed);
    std::future::pending().await
}

/// As anybody would: by the command.
async fn apply(ate: &Path, data: &Path, manifests: &Path) -> anyhow::Result<()> {
    let mut command = tokio::process::Command::new(ate);
    command.args(["apply", "--wait", "-f"]).arg(manifests).arg("--data-dir").arg(data).kill_on_drop(true);
    let output = command.output().await.with_context(|| format!("cannot run {}", ate.display()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("Spec is immutable") {
        bail!(
            "the state in {0} was made with another version of the demo\n  remove it (rm -r {0}), or keep this one's elsewhere: \
             make demo DATA=<another directory>",
            data.display()
        );
    }
    bail!("`ate apply` failed: {}", said.trim());
}

/// Keeps `demo.wakes` up to date for as long as the server answers.
async fn watch(demo: Arc<Demo>, channel: Channel) {
    let request = WatchActorsRequest { atespace: Some(ATESPACE.to_owned()), resume_version: 0 };
    while let Ok(events) = SubstrateClient::new(channel.clone()).watch_actors(request.clone()).await {
        let mut events = events.into_inner();
        while let Ok(Some(event)) = events.message().await {
            match event.event {
                Some(actor_event::Event::Changed(state)) => {
                    let name = state.actor.as_ref().map(|actor| actor.actor_id.clone()).unwrap_or_default();
                    demo.wakes.lock().changed(&name, state);
                }
                Some(actor_event::Event::Listed(_)) => demo.wakes.lock().listed(),
                Some(actor_event::Event::Deleted(_)) | None => {}
            }
            demo.news.notify_waiters();
        }
    }
}

/// Those that are missing; and takes up everyone in the ledger.
async fn make_actors(demo: &Arc<Demo>, channel: &Channel) -> anyhow::Result<()> {
    let mut control = ControlClient::new(channel.clone());
    match control.create_atespace(CreateAtespaceRequest { name: ATESPACE.to_owned() }).await {
        Ok(_) => {}
        Err(status) if status.code() == tonic::Code::AlreadyExists => {}
        Err(status) => return Err(status).context("cannot make the atespace"),
    }
    let there: BTreeSet<String> = news(demo, |demo| {
        let wakes = demo.wakes.lock();
        wakes.is_listed().then(|| wakes.actors().map(|(name, _)| name.to_owned()).collect())
    })
    .await;
    for name in demo.names.iter().filter(|name| !there.contains(*name)) {
        let request = CreateActorRequest {
            actor_ref: Some(ActorRef { atespace: ATESPACE.to_owned(), name: name.clone() }),
            actor_template_namespace: TEMPLATE.0.to_owned(),
            actor_template_name: TEMPLATE.1.to_owned(),
            worker_selector: None,
        };
        control.create_actor(request).await.with_context(|| format!("cannot make {name}"))?;
    }
    for name in &demo.names {
        let uid = news(demo, |demo| demo.wakes.lock().actor(name).map(|actor| actor.state.uid.clone())).await;
        if let Err(gone) = demo.ledger.lock().take_up(name, &uid, !there.contains(name))? {
            demo.problem(gone);
        }
    }
    Ok(())
}

/// Waits for what the watch is about to tell.
async fn news<T>(demo: &Demo, told: impl Fn(&Demo) -> Option<T>) -> T {
    loop {
        let news = demo.news.notified();
        tokio::pin!(news);
        // Before the look, so that what is told in between is not missed.
        news.as_mut().enable();
        if let Some(value) = told(demo) {
            return value;
        }
        news.await;
    }
}

/// After a run that was killed, workers may have been lost with their actors' newest counts, which then continue from their
/// last snapshots. That is no fault if, and only if, the system says so.
async fn excuse(demo: &Demo, channel: &Channel) -> anyhow::Result<()> {
    let before = demo.ledger.lock().before().clone();
    let since = match before {
        Before::Nothing | Before::InOrder => return Ok(()),
        Before::MachineDown => {
            demo.narrator.say("the machine went down during the last run: counts are taken as they are found");
            return Ok(());
        }
        Before::Killed(since) => since,
    };
    demo.narrator.say("the last run was killed: continuing");
    for name in &demo.names {
        let lost = |entry: &HistoryEntry| entry.event == "Lost" && wakes::begins(entry) >= since;
        if let Some(entry) = history(channel, name).await?.iter().find(|entry| lost(entry)) {
            demo.narrator.say(&format!("{name} continues from its last snapshot: {}", entry.detail));
            demo.ledger.lock().excuse(name);
        }
    }
    Ok(())
}

async fn history(channel: &Channel, name: &str) -> anyhow::Result<Vec<HistoryEntry>> {
    let request = GetHistoryRequest { atespace: ATESPACE.to_owned(), name: name.to_owned() };
    let answer = SubstrateClient::new(channel.clone()).get_history(request).await;
    Ok(answer.with_context(|| format!("cannot read the history of {name}"))?.into_inner().entries)
}

fn colours() -> Paint {
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
        || std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    Paint(std::io::stdout().is_terminal() && !is_plain)
}

fn print(
    demo: &Demo,
    histories: &BTreeMap<String, Vec<HistoryEntry>>,
    begun: i64,
    took: Duration,
) -> anyhow::Result<()> {
    let (wakes, ledger, replies) = (demo.wakes.lock(), demo.ledger.lock(), demo.replies.lock());
    let line = |name: &String| {
        let reply = replies.get(name);
        let actor = wakes.actor(name);
        Line {
            name: name.clone(),
            memory: reply.map_or(0, |reply| reply.memory),
            file: reply.map_or(0, |reply| reply.file),
            expected: ledger.acknowledged(name),
            asked: actor.map_or(0, |actor| actor.asked.iter().map(|asked| asked.requests).sum()),
            frozen: actor.map_or(0, |actor| actor.freezes),
            suspended: wakes::suspends(&histories[name], begun),
            moved: wakes::moves(&histories[name], begun),
        }
    };
    let lines: Vec<Line> = demo.names.iter().map(line).collect();
    let (mut out, paint) = (std::io::stdout().lock(), colours());
    let workers: BTreeSet<&str> =
        histories.values().flatten().map(|entry| entry.worker.as_str()).filter(|worker| !worker.is_empty()).collect();
    let requests = format!("{} requests in {}", demo.requests(), duration(took));
    let title = format!("{} actors on {} workers, {requests}", demo.names.len(), workers.len());
    writeln!(out, "\n{}\n", paint.tone(Tone::Strong, &title))?;
    report::write_actors(&mut out, paint, &lines)?;
    writeln!(out)?;
    Measured::of(&wakes, histories).write(&mut out, paint)?;
    let problems = demo.problems.lock();
    if problems.is_empty() {
        writeln!(out, "\n{}", paint.tone(Tone::Good, "Every count is right, in memory and on disk."))?;
    } else {
        writeln!(out, "\n{}", paint.tone(Tone::Bad, "Not everything is right:"))?;
        problems.iter().try_for_each(|problem| writeln!(out, "  {problem}"))?;
    }
    let unsure = ledger.unsure();
    if unsure > 0 {
        writeln!(out, "{unsure} requests got no answer; whether they counted is not known, and either is right.")?;
    }
    Ok(())
}

fn print_next(args: &Args, data: &Path, demo: &Demo) -> anyhow::Result<()> {
    let (name, port) = (&demo.names[demo.names.len().min(7) - 1], demo.port);
    let ate = args.ate.canonicalize()?;
    let programs = ate.parent().unwrap_or(Path::new("."));
    let (mut out, paint) = (std::io::stdout().lock(), colours());
    writeln!(out, "\n{} in another terminal:\n", paint.tone(Tone::Strong, "Try next,"))?;
    writeln!(out, "  export ATE_DATA_DIR={} PATH={}:$PATH", data.display(), programs.display())?;
    for (command, what) in [
        (format!("curl http://{name}.{ATESPACE}.localhost:{port}/"), "wakes it if it sleeps; it counts on"),
        (format!("ate get actors -a {ATESPACE} -w"), "see them freeze and sleep"),
        (format!("ate suspend {name} -a {ATESPACE}"), "snapshot it now, free its worker"),
        (format!("ate logs {name} -a {ATESPACE} -f"), "what it prints, over its sleep and from worker to worker"),
    ] {
        writeln!(out, "  {command:<52}  {}", paint.tone(Tone::Faint, &format!("# {what}")))?;
    }
    writeln!(out, "\nCtrl-C suspends every actor and stops everything; the next `make demo` continues.")?;
    Ok(out.flush()?)
}

/// Stops the server in order; at once if asked a second time.
async fn stop_server(server: &mut Server, stop: &mut Stop, narrator: &Narrator) -> anyhow::Result<()> {
    narrator.begin("stopping: suspending every actor");
    server.stop();
    let again = async {
        // Whoever signals a whole group may reach us twice with the same wish.
        tokio::time::sleep(SAME_WISH).await;
        stop.forget();
        stop.asked().await;
    };
    tokio::select! {
        ended = server.wait() => ended?,
        () = again => {
            server.kill().await?;
            bail!("stopped halfway: workers still run for some minutes, and the next `make demo` takes them over");
        }
    }
    narrator.end();
    Ok(())
}

/// Fails if anything of this instance is left on the machine.
async fn look_for_leftovers(data: &Path, host: &HostWide) -> anyhow::Result<()> {
    let begun = Instant::now();
    let (leaks, added) = loop {
        let (leaks, added) = (Leaks::of_instance(data), HostWide::look().added_since(host));
        if (leaks.is_empty() && added.is_empty()) || begun.elapsed() >= GONE_WITHIN {
            break (leaks, added);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    if !leaks.is_empty() || !added.is_empty() {
        bail!("left behind:\n{leaks}{}", added.join("\n"));
    }
    Ok(())
}
