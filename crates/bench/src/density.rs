//! `ate bench density`: memory per actor, next to the same sandbox without `ate` around it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ate_chart::{Cell, Column, Table, bar};

use crate::dev::{Dev, host};
use crate::image::PythonImage;
use crate::memory::{self, MemoryUse, Share};
use crate::report::Report;
use crate::site::{Order, Site, SiteKind};
use crate::{BenchError, Output, Row, Setup, http, workshop};

const FREEZE_AFTER: &str = "100ms";
const BAR: usize = 24;
/// A box that is made ahead is there by then.
const WARM_WITHIN: Duration = Duration::from_secs(120);

#[derive(Clone, Debug, clap::Args)]
pub struct DensityArgs {
    /// Actors in memory at once, each on a worker of its own
    #[arg(long, default_value_t = 4)]
    actors: usize,
    #[command(flatten)]
    output: Output,
}

struct Measured {
    way: &'static str,
    state: &'static str,
    each: Vec<MemoryUse>,
}

pub(crate) async fn run(args: &DensityArgs, setup: &Setup) -> Result<(), BenchError> {
    let mut rows = args.output.rows("density")?;
    let workshop = workshop()?;
    let image = tokio::task::spawn_blocking(PythonImage::ensure)
        .await
        .map_err(|error| BenchError::refused("make the image", error))??;
    let mut measured = bare(setup, workshop.path(), &image).await?;
    let dev = Dev::start(setup, workshop.path()).await?;
    measured.extend(ours(&dev, &image, args.actors).await?);
    dev.stop().await?;
    for measured in &measured {
        for memory in &measured.each {
            rows.push(Row {
                way: measured.way.to_owned(),
                kind: measured.state.to_owned(),
                bytes: Some(memory.share.own),
                phases: vec![
                    ("files".to_owned(), memory.share.files),
                    ("charged".to_owned(), memory.charged),
                    ("processes".to_owned(), memory.processes as u64),
                ],
                ..Row::default()
            })?;
        }
    }
    rows.flush()?;
    report(&measured)?;
    Report::new().say(&format!("\nevery measurement: {}", rows.path().display()))
}

/// A sandbox of the same image and build, made by runsc and driven by nobody else.
async fn bare(setup: &Setup, directory: &std::path::Path, image: &PythonImage) -> Result<Vec<Measured>, BenchError> {
    let mut site = Site::start(setup, SiteKind::Floor, &image.rootfs, directory)?;
    let cgroup = site.cgroup().path().to_owned();
    let mut measured = Vec::new();
    let mut measure = |state| {
        let boxes = memory::children(&cgroup);
        let newest = boxes.iter().map(|path| MemoryUse::of_cgroup(path)).max_by_key(|memory| memory.charged);
        measured.push(Measured { way: "bare sandbox", state, each: newest.into_iter().collect() });
    };
    for order in [Order::Prepare, Order::Boot, Order::Request, Order::Suspend, Order::Prepare] {
        site.must(order).await?;
    }
    measure("warm");
    site.must(Order::Restore).await?;
    site.must(Order::Request).await?;
    measure("running");
    site.must(Order::Freeze).await?;
    measure("frozen");
    site.must(Order::Suspend).await?;
    Ok(measured)
}

async fn ours(dev: &Dev, image: &PythonImage, actors: usize) -> Result<Vec<Measured>, BenchError> {
    let mut measured = Vec::new();
    dev.apply(&image.reference, actors, &[("steady", None), ("napping", Some(FREEZE_AFTER))]).await?;
    let names = |kind: &str| (0..actors).map(|number| format!("{kind}-{number}")).collect::<Vec<_>>();
    let (steady, napping) = (names("steady"), names("napping"));
    wake(dev, "steady", &steady).await?;
    // Saved once and woken again: a first wake has pages of the image that a second does not have.
    for actor in &steady {
        dev.suspend(actor).await?;
    }
    for actor in &steady {
        ask(dev.router(), actor).await?;
    }
    for actor in &steady {
        ask(dev.router(), actor).await?;
    }
    let (agents, running, _) = look(dev);
    measured.push(Measured { way: "ate", state: "running", each: running });
    measured.push(Measured { way: "ate", state: "worker itself", each: agents });
    for actor in &steady {
        dev.suspend(actor).await?;
    }
    let warm = all_warm(dev).await?;
    measured.push(Measured { way: "ate", state: "warm", each: warm });
    wake(dev, "napping", &napping).await?;
    for actor in &napping {
        dev.until(actor, "frozen", |actor| actor.frozen).await?;
    }
    let (_, frozen, _) = look(dev);
    measured.push(Measured { way: "ate", state: "frozen", each: frozen });
    let node = MemoryUse { share: Share::of(dev.pid()), processes: 1, charged: 0 };
    measured.push(Measured { way: "ate", state: "control plane, router and node", each: vec![node] });
    Ok(measured)
}

/// Every box that waits for an actor, as soon as each worker has one that runs.
async fn all_warm(dev: &Dev) -> Result<Vec<MemoryUse>, BenchError> {
    let begun = Instant::now();
    loop {
        let (agents, first, others) = look(dev);
        if first.len() == agents.len() && first.iter().all(|memory| memory.share.own > 0) {
            return Ok(first.into_iter().chain(others.into_iter().filter(|memory| memory.share.own > 0)).collect());
        }
        if begun.elapsed() > WARM_WITHIN {
            return Err(BenchError::refused("weigh boxes that are made ahead", "there are none"));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn wake(dev: &Dev, template: &str, actors: &[String]) -> Result<(), BenchError> {
    for actor in actors {
        dev.create(actor, template).await?;
        ask(dev.router(), actor).await?;
    }
    Ok(())
}

async fn ask(router: SocketAddr, actor: &str) -> Result<(), BenchError> {
    let answered = http::get(router, &host(actor), "/").await;
    answered.map(drop).map_err(BenchError::io(format!("get an answer of actor {actor}")))
}

/// Of every worker: itself, the box with the most memory (an actor's, if there is one), and the other boxes.
fn look(dev: &Dev) -> (Vec<MemoryUse>, Vec<MemoryUse>, Vec<MemoryUse>) {
    let (mut agents, mut largest, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for pid in dev.worker_pids() {
        let Some(agent) = memory::group_of(pid) else { continue };
        agents.push(MemoryUse::of_cgroup(&agent));
        let Some((worker, _)) = agent.rsplit_once('/') else { continue };
        let boxes = memory::children(worker).into_iter().filter(|path| *path != agent);
        let mut boxes: Vec<MemoryUse> = boxes.map(|path| MemoryUse::of_cgroup(&path)).collect();
        boxes.sort_by_key(|memory| std::cmp::Reverse(memory.charged));
        let mut boxes = boxes.into_iter();
        largest.extend(boxes.next());
        others.extend(boxes);
    }
    (agents, largest, others)
}

fn report(measured: &[Measured]) -> Result<(), BenchError> {
    let mut report = Report::new();
    report.machine()?;
    report.heading("Memory of each, in MB")?;
    let mean = |each: &[MemoryUse], of: fn(&MemoryUse) -> u64| {
        #[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
        let sum = each.iter().map(of).sum::<u64>() as f64;
        sum / 1e6 / each.len().max(1) as f64
    };
    let largest = measured.iter().map(|measured| mean(&measured.each, |memory| memory.share.own)).fold(0.0, f64::max);
    let columns = ["N", "OWN", "FILES", "CHARGED", "PROCESSES"].map(Column::right);
    let words = [Column::left("WHOSE"), Column::left("STATE")];
    let mut table = Table::new(words.into_iter().chain(columns).chain([Column::left("")]));
    for Measured { way, state, each } in measured {
        let own = mean(each, |memory| memory.share.own);
        let processes = each.iter().map(|memory| memory.processes).max().unwrap_or(0);
        table.row([
            Cell::new(way),
            Cell::new(state),
            Cell::new(each.len()),
            Cell::new(format!("{own:.1}")),
            Cell::new(format!("{:.1}", mean(each, |memory| memory.share.files))),
            Cell::new(format!("{:.1}", mean(each, |memory| memory.charged))),
            Cell::new(processes),
            Cell::new(bar(own, largest, BAR)).tone(ate_chart::Tone::Accent),
        ]);
    }
    report.table(&table)
}
