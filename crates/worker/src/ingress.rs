//! Connections from routers: checked, then spliced to a port of the actor.

use std::sync::Arc;
use std::time::Duration;

use ate_preface::Verdict;
use tokio::io::copy_bidirectional_with_sizes;
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::time::Instant;

use crate::serve::Worker;
use ate_orders::chain;

/// A router says whom it wants at once; whoever does not is no router.
const PREFACE_WITHIN: Duration = Duration::from_secs(5);

/// The actor's port is in the next namespace; a handshake that takes longer means that nothing will come.
const DIAL_WITHIN: Duration = Duration::from_secs(5);

/// Between the moment a workload stops listening and the news that it has ended.
const ENDING_WITHIN: Duration = Duration::from_millis(500);

/// Per direction. Large enough for bulk transfers, small enough for ten thousand idle connections.
const SPLICE_BUFFER: usize = 16 << 10;

/// Connections at once. Beyond it new ones wait in the socket's backlog.
const MAX_CONNECTIONS: usize = 10_000;

pub(crate) async fn serve(worker: Arc<Worker>, listener: UnixListener) {
    let places = Arc::new(tokio::sync::Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely: they come back when connections end.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let worker = Arc::clone(&worker);
        tokio::spawn(async move {
            connection(&worker, stream).await;
            drop(place);
        });
    }
}

async fn connection(worker: &Worker, mut router: UnixStream) {
    let Ok(preface) = ate_preface::accept(&mut router, Instant::now() + PREFACE_WITHIN).await else { return };
    let tenant = worker.tenant(preface.uid, preface.generation);
    let Some(tenant) = tenant else {
        let _ = Verdict::Stale.send(&mut router).await;
        return;
    };
    if worker.is_lease_over() {
        let _ = Verdict::Draining.send(&mut router).await;
        return;
    }
    let connected = tenant.connected();
    let visit = match tenant.enter(&worker.events).await {
        Ok(Some(visit)) => visit,
        Ok(None) => {
            let _ = Verdict::Draining.send(&mut router).await;
            return;
        }
        Err(error) => {
            tracing::warn!(error = chain(&error), "a frozen actor could not be thawed");
            let _ = Verdict::Draining.send(&mut router).await;
            return;
        }
    };
    if !tenant.ports.contains(&preface.port) {
        let _ = Verdict::Refused.send(&mut router).await;
        return;
    }
    // One that ends now answers no handshake any more, and refuses none.
    let dialled = tokio::select! {
        dialled = dial(preface.port) => dialled,
        _ = tenant.sandbox.ended() => None,
    };
    let Some(mut actor) = dialled else {
        // Nobody listens: because the workload does not, or because it is just coming to its end.
        let ending = tokio::time::timeout(ENDING_WITHIN, tenant.sandbox.ended()).await.is_ok();
        let verdict = if ending { Verdict::Draining } else { Verdict::Refused };
        let _ = verdict.send(&mut router).await;
        return;
    };
    if Verdict::Accepted.send(&mut router).await.is_err() {
        return;
    }
    tokio::select! {
        _ = copy_bidirectional_with_sizes(&mut router, &mut actor, SPLICE_BUFFER, SPLICE_BUFFER) => {}
        () = connected.cancelled() => {}
    }
    drop(visit);
}

/// A workload may listen on either family only.
async fn dial(port: u16) -> Option<TcpStream> {
    let dial = async {
        match TcpStream::connect((ate_network::ACTOR_V4, port)).await {
            Ok(stream) => Ok(stream),
            Err(_) => TcpStream::connect((ate_network::ACTOR_V6, port)).await,
        }
    };
    let stream = tokio::time::timeout(DIAL_WITHIN, dial).await.ok()?.ok()?;
    stream.set_nodelay(true).ok()?;
    Some(stream)
}
