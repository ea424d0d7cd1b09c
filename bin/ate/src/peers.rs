//! The control plane, as roles in other processes know it: some replicas, of which any will do.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ate_identity::{Identity, Role};
use ate_name::{ActorKey, ActorUid, Generation, NodeName, ObjectKey, SessionId, WorkerUid};
use ate_node::{Pool, Registry, Renewed};
use ate_proto::ate::v1::substrate_client::SubstrateClient;
use ate_proto::ate::v1::{self as proto, assignment, assignment_event, port};
use ate_router::{ActivateError, Activator, Assignment, Endpoint, Port, Protocol, Update};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Status};

/// Before a watch that has ended is begun again, with the next replica.
const AGAIN: Duration = Duration::from_millis(200);

/// A node that is not heard by one replica in time still has time to ask the next.
const RENEWED_WITHIN: Duration = Duration::from_millis(1200);

/// Largest answer. The largest there is lists every actor that runs.
const MAX_ANSWER: usize = 64 << 20;

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ApiArgs {
    /// Where the API is served; say it once for each replica
    #[arg(long, required = true, value_name = "HOST:PORT")]
    api: Vec<String>,
}

/// The replicas; calls go to one until it fails, then to the next.
pub(crate) struct Replicas {
    channels: Vec<Channel>,
    current: AtomicUsize,
}

impl Replicas {
    pub(crate) fn new(args: &ApiArgs, identity: &Identity, role: Role) -> anyhow::Result<Arc<Self>> {
        let tls = Arc::new(identity.client_config(role, Role::Api)?);
        let channel = |address: &String| {
            let address = address.strip_prefix("https://").unwrap_or(address).trim_end_matches('/');
            ate_orders_grpc::channel(address, Arc::clone(&tls)).map_err(anyhow::Error::msg)
        };
        let channels = args.api.iter().map(channel).collect::<anyhow::Result<_>>()?;
        Ok(Arc::new(Self { channels, current: AtomicUsize::new(0) }))
    }

    fn client(&self) -> (usize, SubstrateClient<Channel>) {
        let index = self.current.load(Ordering::Relaxed);
        let channel = self.channels[index % self.channels.len()].clone();
        (index, SubstrateClient::new(channel).max_decoding_message_size(MAX_ANSWER))
    }

    /// The one that was asked has failed. Whoever notices later has not found out about the next one.
    fn fail(&self, index: usize) {
        let _ = self.current.compare_exchange(index, index + 1, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Asks one replica after the other. Only for what may be asked twice.
    /// One that has not answered after `patience` has failed, too.
    async fn ask<T, F>(&self, patience: Duration, call: impl Fn(SubstrateClient<Channel>) -> F) -> Result<T, Status>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let mut tried = 0;
        loop {
            let (index, client) = self.client();
            let answer = tokio::time::timeout(patience, call(client)).await;
            match answer.unwrap_or_else(|_| Err(Status::unavailable("the replica does not answer"))) {
                Err(error) if is_transport(&error) => {
                    self.fail(index);
                    tried += 1;
                    if tried >= self.channels.len() {
                        return Err(error);
                    }
                }
                other => return other,
            }
        }
    }
}

/// Whether it is the replica or the way to it that failed, and another may do better.
fn is_transport(error: &Status) -> bool {
    matches!(error.code(), Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled)
        && retry_after(error).is_none()
}

/// When to ask again, said by a replica that knows: then no other knows better.
fn retry_after(error: &Status) -> Option<std::time::Duration> {
    let seconds = error.metadata().get("retry-after")?.to_str().ok()?.parse().ok()?;
    Some(std::time::Duration::from_secs(seconds))
}

/// A node's registration with the control plane.
pub(crate) struct Membership {
    pub(crate) replicas: Arc<Replicas>,
    pub(crate) node: NodeName,
    pub(crate) endpoint: String,
}

#[async_trait::async_trait]
impl Registry for Membership {
    async fn renew(&self, session: SessionId, leaving: bool, beat: u64) -> Result<Renewed, String> {
        let request = proto::RenewNodeRequest {
            node: self.node.to_string(),
            session: session.to_string(),
            endpoint: self.endpoint.clone(),
            leaving,
            beat,
        };
        let renewed = self.replicas.ask(RENEWED_WITHIN, |mut client| {
            let request = request.clone();
            async move { client.renew_node(request).await }
        });
        let answer = renewed.await.map_err(|error| error.message().to_owned())?.into_inner();
        if answer.over {
            return Ok(Renewed::Over);
        }
        let limit = |limit: u64| (limit > 0).then_some(limit);
        let pools = answer.shares.into_iter().map(|share| Pool {
            key: ObjectKey::new(share.pool_namespace, share.pool_name),
            workers: share.workers as usize,
            memory_limit: limit(share.memory_limit),
            cpu_limit_millis: limit(share.cpu_limit_millis),
        });
        let surplus = answer.surplus.iter().filter_map(|worker| WorkerUid::parse(worker).ok());
        Ok(Renewed::Kept { pools: pools.collect(), surplus: surplus.collect(), beat: answer.beat })
    }
}

#[async_trait::async_trait]
impl Activator for Replicas {
    async fn activate(
        &self,
        key: &ActorKey,
        stale: Option<Generation>,
        deadline: Instant,
    ) -> Result<Assignment, ActivateError> {
        let asked = self.ask(Duration::MAX, |mut client| {
            let wait = deadline.saturating_duration_since(Instant::now());
            let request = proto::ActivateRequest {
                atespace: key.atespace.to_string(),
                name: key.name.to_string(),
                stale_generation: stale.map_or(0, Generation::get),
                wait: wait.try_into().ok(),
            };
            async move { client.activate(request).await }
        });
        let answer = tokio::time::timeout_at(deadline, asked).await.map_err(|_| ActivateError::DeadlineExceeded)?;
        let answer = answer.map_err(|status| match status.code() {
            Code::NotFound => ActivateError::NotFound,
            Code::FailedPrecondition => ActivateError::FailedPrecondition(status.message().to_owned()),
            Code::DeadlineExceeded => ActivateError::DeadlineExceeded,
            Code::ResourceExhausted => ActivateError::ResourceExhausted(status.message().to_owned()),
            Code::PermissionDenied => ActivateError::PermissionDenied,
            Code::Unauthenticated => ActivateError::Unauthenticated,
            Code::Unavailable | Code::Aborted | Code::Unknown | Code::Cancelled => match retry_after(&status) {
                Some(after) => ActivateError::Resting { text: status.message().to_owned(), after },
                None => ActivateError::Unavailable,
            },
            _ => ActivateError::Internal,
        })?;
        assignment(answer.into_inner()).ok_or(ActivateError::Internal)
    }
}

/// Tells a router what is assigned and what changes, for as long as it listens.
pub(crate) async fn follow(replicas: Arc<Replicas>, updates: mpsc::Sender<Update>) {
    while !updates.is_closed() {
        let (index, mut client) = replicas.client();
        if let Ok(events) = client.watch_assignments(proto::WatchAssignmentsRequest {}).await {
            let mut events = events.into_inner();
            while let Ok(Some(event)) = events.message().await {
                let Some(update) = event.event.and_then(update) else { continue };
                if updates.send(update).await.is_err() {
                    return;
                }
            }
        }
        tracing::warn!("the watch of assignments has ended; asking the next replica");
        replicas.fail(index);
        tokio::time::sleep(AGAIN).await;
    }
}

fn update(event: assignment_event::Event) -> Option<Update> {
    Some(match event {
        assignment_event::Event::Reset(reset) => {
            Update::Reset(reset.assignments.into_iter().filter_map(assignment).collect())
        }
        assignment_event::Event::Assigned(assigned) => Update::Assigned(assignment(assigned)?),
        assignment_event::Event::Released(released) => Update::Released {
            key: ActorKey::parse(&released.atespace, &released.name).ok()?,
            uid: ActorUid::parse(&released.uid).ok()?,
            generation: Generation::new(released.generation),
        },
    })
}

/// `None` for what only a later version would say.
fn assignment(assigned: proto::Assignment) -> Option<Assignment> {
    let port = |port: &proto::Port| {
        let protocol = match port.protocol() {
            port::Protocol::H2c => Protocol::H2c,
            port::Protocol::Http | port::Protocol::Unspecified => Protocol::Http,
        };
        Some(Port { number: u16::try_from(port.number).ok()?, protocol })
    };
    Some(Assignment {
        key: ActorKey::parse(&assigned.atespace, &assigned.name).ok()?,
        uid: ActorUid::parse(&assigned.uid).ok()?,
        generation: Generation::new(assigned.generation),
        endpoint: match assigned.endpoint? {
            assignment::Endpoint::UnixPath(path) => Endpoint::Unix(path.into()),
            assignment::Endpoint::TcpAddress(address) => Endpoint::Tcp(address.parse().ok()?),
        },
        ports: assigned.ports.iter().filter_map(port).collect(),
        template: ObjectKey::new(assigned.template_namespace, assigned.template_name),
    })
}
