//! One request, from its head to the head of its answer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ate_name::Generation;
use ate_preface::PrefaceError;
use bytes::Bytes;
use http::header::{HeaderValue, UPGRADE};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::assignment::{ActivateError, Assignment, Port, Protocol};
use crate::body::{Reply, Upload};
use crate::failure::{Failure, no_tunnels};
use crate::front::Client;
use crate::head;
use crate::parking::{Flights, Ticket};
use crate::routes::Routes;
use crate::stats::Timing;
use crate::target::Target;
use crate::upstream::{DialError, Lease, Pool, Route, SendError};

/// Pause before a request looks for its actor for the third time, doubled for each time after it, so often. A worker's
/// verdict is followed by an activation that settles where the actor is, so the second look finds it; more are for actors
/// that move while we look, or whose worker has died and is not missed yet. It ends with the request's patience: 503.
const BACKOFF: Duration = Duration::from_millis(10);
const DOUBLINGS: u32 = 6;

/// A workload that accepts a connection and closes it is where it should be: it will not be found elsewhere.
const MAX_HANG_UPS: u32 = 5;

pub(crate) struct Router {
    pub(crate) pool: Arc<Pool>,
    pub(crate) routes: Arc<Routes>,
    pub(crate) flights: Arc<Flights>,
    /// Connections of clients, and the tunnels some became.
    pub(crate) clients: TaskTracker,
    /// Cuts them.
    pub(crate) kill: CancellationToken,
}

/// A client's wish to speak another protocol from here on.
struct Wish {
    protocol: HeaderValue,
    client: OnUpgrade,
}

/// A request made ready for its workload.
struct Exchange {
    target: Target,
    grpc: bool,
    wish: Option<Wish>,
    deadline: Instant,
}

impl Router {
    pub(crate) async fn handle(&self, client: &Arc<Client>, request: Request<Incoming>) -> Response<Reply> {
        let stats = &self.pool.stats;
        let mut timing = Timing::start(stats);
        if request.method() == Method::CONNECT {
            timing.settle(&stats.error);
            return no_tunnels();
        }
        let (mut parts, body) = request.into_parts();
        let target = match Target::of(&parts) {
            Ok(target) => target,
            Err(invalid) => {
                timing.settle(&stats.not_found);
                return invalid.reply();
            }
        };
        let mut exchange = Exchange {
            grpc: head::is_grpc(&parts),
            wish: Wish::of(&mut parts),
            deadline: timing.start + self.pool.config.park_timeout,
            target,
        };
        head::rewrite_request(&mut parts, &exchange.target.host, &client.address);
        if let Some(wish) = &exchange.wish {
            head::ask_upgrade(&mut parts.headers, &wish.protocol);
        }
        let request = Request::from_parts(parts, Upload::new(body));
        let answered = match self.send(&exchange, request, &mut timing).await {
            Ok((response, lease)) => self.answer(client, exchange.wish.take(), response, lease),
            Err(failure) => Err(failure),
        };
        answered.unwrap_or_else(|failure| {
            timing.settle(failure.outcome(stats));
            failure.reply(&exchange.target.key)
        })
    }

    /// Finds the actor and sends it the request; finds it anew while workers disown it.
    async fn send(
        &self,
        exchange: &Exchange,
        mut request: Request<Upload>,
        timing: &mut Timing<'_>,
    ) -> Result<(Response<Incoming>, Option<Lease>), Failure> {
        let Exchange { target, deadline, .. } = exchange;
        let (mut looks, mut hang_ups, mut denied) = (0, 0, None);
        loop {
            let route = match self.routes.get(&target.key) {
                Some(route) if route.is_live() => route,
                _ => {
                    let bytes = head::size_of(request.headers(), request.uri());
                    Box::pin(self.park(target, bytes, pause_before(looks), denied, *deadline)).await?
                }
            };
            let (lane, port) = route.lane(target.port).map_err(|wanted| Failure::UndeclaredPort {
                wanted,
                declared: route.assignment.ports.iter().map(|port| port.number).collect(),
            })?;
            timing.settle(&route.durations);
            let protocol = exchange.protocol(port);
            match protocol {
                Protocol::Http => head::shape_for_http1(&mut request, &target.host),
                Protocol::H2c => head::shape_for_http2(&mut request, &target.host),
            }
            match route.send(lane, protocol, request, *deadline).await {
                Ok(answered) => return Ok(answered),
                Err(SendError::NotSent(unsent, reason)) => {
                    request = *unsent;
                    hang_ups += u32::from(matches!(reason, DialError::HungUp(_)));
                    self.give_up(&route, reason, port.number)?;
                    (looks, denied) = (looks + 1, Some(route.assignment.generation));
                    let is_late = Instant::now() + pause_before(looks).unwrap_or_default() >= *deadline;
                    if is_late || hang_ups == MAX_HANG_UPS {
                        return Err(Failure::Activate(ActivateError::Unavailable));
                    }
                }
                Err(SendError::Lost(error)) => {
                    self.pool.stats.lost.fetch_add(1, Ordering::Relaxed);
                    tracing::debug!(actor = %target.key, %error, "connection to worker lost");
                    return Err(Failure::Lost);
                }
            }
        }
    }

    async fn park(
        &self,
        target: &Target,
        bytes: usize,
        pause: Option<Duration>,
        denied: Option<Generation>,
        deadline: Instant,
    ) -> Result<Arc<Route>, Failure> {
        let _ticket = Ticket::take(&self.pool, bytes)?;
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
        }
        self.flights.route(&target.key, denied, deadline).await
    }

    /// What a worker's refusal means: an error for the client, or `Ok` for a route that leads nowhere any more.
    fn give_up(&self, route: &Route, reason: DialError, port: u16) -> Result<(), Failure> {
        match &reason {
            DialError::Full => return Err(Failure::TooManyConnections),
            DialError::Preface(PrefaceError::Refused) => return Err(Failure::SilentPort(port)),
            // Not one that is just leaving: that is no answer of the past.
            DialError::Preface(PrefaceError::Stale) => {
                self.pool.stats.stale_answers.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
        let Assignment { key, generation, .. } = &route.assignment;
        tracing::debug!(actor = %key, %generation, %reason, "worker gave up");
        route.retire();
        Ok(())
    }

    fn answer(
        &self,
        client: &Arc<Client>,
        wish: Option<Wish>,
        mut response: Response<Incoming>,
        lease: Option<Lease>,
    ) -> Result<Response<Reply>, Failure> {
        *response.version_mut() = Version::HTTP_11;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            head::strip_hop_by_hop(response.headers_mut());
            return Ok(response.map(|body| Reply::stream(body, lease)));
        }
        // A workload may not switch to what nobody asked for.
        let Some(wish) = wish else { return Err(Failure::Lost) };
        let worker = hyper::upgrade::on(&mut response);
        let protocol = response.headers().get(UPGRADE).cloned().unwrap_or(wish.protocol);
        head::strip_hop_by_hop(response.headers_mut());
        head::ask_upgrade(response.headers_mut(), &protocol);
        let (client, kill, connection) = (client.clone(), self.kill.clone(), lease.map(Lease::keep));
        self.clients.spawn(async move {
            kill.run_until_cancelled(tunnel(wish.client, worker)).await;
            drop((client, connection));
        });
        Ok(response.map(|_| Reply::text(Bytes::new())))
    }
}

/// Before a request looks for its actor, having looked so often.
fn pause_before(looks: u32) -> Option<Duration> {
    looks.checked_sub(2).map(|doublings| BACKOFF * 2u32.pow(doublings.min(DOUBLINGS)))
}

/// Bytes both ways, for as long as both ends like.
async fn tunnel(client: OnUpgrade, worker: OnUpgrade) {
    let Ok((client, worker)) = futures::future::try_join(client, worker).await else { return };
    let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(worker)).await;
}

impl Wish {
    fn of(parts: &mut Parts) -> Option<Self> {
        let protocol = head::upgrade_of(parts)?;
        Some(Self { protocol, client: parts.extensions.remove()? })
    }
}

impl Exchange {
    fn protocol(&self, port: Port) -> Protocol {
        match &self.wish {
            // Only HTTP/1.1 can switch protocols in mid-connection.
            Some(_) => Protocol::Http,
            None if self.grpc => Protocol::H2c,
            None => port.protocol,
        }
    }
}
