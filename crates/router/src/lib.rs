//! The data plane: HTTP to an actor's stable name in, HTTP to the worker that hosts it out.
//!
//! A request is held against the routes in memory, kept fresh by the assignment watch; a hot one costs no call. Where
//! there is no route, or the worker disowns it, the request parks with its head only, one activation runs for all who
//! wait, and the request goes where that leads. Every connection to a worker opens with a preface naming actor and
//! generation, so being wrong about where an actor is costs a retry and never somebody else's answer.
//!
//! Bodies, trailers and protocol switches pass as they come; interim (1xx) answers of a workload do not, because our
//! HTTP server cannot send them. `100 Continue` is said when a body is first wanted, which is after parking.
//!
//! ```text
//!   client ─▶ front ─▶ exchange ──────────▶ upstream ═══ preface ═══▶ worker ─▶ actor
//!            limits    target, heads        Route: one actor, one generation,
//!                        │                         and its connections
//!                        ├─ hot ──▶ routes ◀── Update (watch)
//!                        └─ miss ─▶ parking ─▶ Activator, once per actor
//! ```

mod assignment;
mod body;
mod config;
mod exchange;
mod failure;
mod front;
mod head;
mod parking;
mod routes;
mod stats;
mod target;
mod upstream;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::join_all;
use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use assignment::{ActivateError, Activator, Assignment, Endpoint, Port, Protocol, Update};
pub use config::RouterConfig;
pub use stats::{Histogram, ROUTE_DURATION_BOUNDS, Stats};

/// What connections to workers get to end once nothing uses them.
const LAST_MOMENT: Duration = Duration::from_secs(1);

/// Serves until `shutdown`, then finishes what is in flight, within the grace, and returns.
///
/// A feed that ends is survived: what it told stays true until a worker says otherwise.
pub async fn serve(
    listeners: Vec<TcpListener>,
    config: RouterConfig,
    activator: Arc<dyn Activator>,
    mut feed: mpsc::Receiver<Update>,
    stats: Arc<Stats>,
    shutdown: CancellationToken,
) {
    let grace = config.shutdown_grace;
    let permits = Arc::new(Semaphore::new(config.max_connections));
    let pool = Arc::new(upstream::Pool { config, stats, drivers: TaskTracker::new(), crowded: Notify::new() });
    let routes = Arc::new(routes::Routes::new(pool.clone()));
    let kill = CancellationToken::new();
    let flights = Arc::new(parking::Flights {
        activator,
        routes: routes.clone(),
        pool: pool.clone(),
        kill: kill.clone(),
        aloft: Mutex::default(),
    });
    let router =
        Arc::new(exchange::Router { pool, routes: routes.clone(), flights, clients: TaskTracker::new(), kill });

    let watch = async {
        while let Some(update) = feed.recv().await {
            routes.apply(update);
        }
        tracing::warn!("assignment watch ended; going by what is known");
        std::future::pending::<()>().await;
    };
    let accept = join_all(listeners.into_iter().map(|listener| front::accept(&router, listener, &permits, &shutdown)));
    let mut upkeep = Box::pin(async { tokio::join!(watch, routes.tend()) });
    tokio::select! {
        _ = &mut upkeep => {}
        _ = accept => {}
        () = shutdown.cancelled() => {}
    }

    router.clients.close();
    tokio::select! {
        _ = &mut upkeep => {}
        _ = timeout(grace, router.clients.wait()) => {}
    }
    router.kill.cancel();
    router.clients.wait().await;
    routes.clear();
    router.pool.drivers.close();
    let _ = timeout(LAST_MOMENT, router.pool.drivers.wait()).await;
}
