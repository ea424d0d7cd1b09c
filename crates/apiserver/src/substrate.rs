//! `ate.v1.Substrate`: what the public API lacks.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use ate_actor::Phase;
use ate_control::{
    Applied, Asked, Assigned, AssignmentUpdate, Changed, Control, MAX_PAGE, Registration, Renewal, Versioned, usable,
};
use ate_name::{
    ActorKey, ActorName, AtespaceName, Generation, NodeName, ObjectKey, SessionId, check_dns_label, check_dns_subdomain,
};
use ate_orders::{ExecOrder, Ingress, LogsOrder, Nodes, Output, PortProtocol};
use ate_proto::ate::v1::*;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures::{Stream, StreamExt};
use tokio::sync::{broadcast, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::Info as ServerInfo;
use crate::convert::{actor, status};
use crate::guard::Caller;

/// Messages of a stream that the client has not taken yet; whoever produces them then waits.
const STREAM_BUFFER: usize = 64;

/// How long an activation waits that does not say.
const DEFAULT_WAIT: Duration = Duration::from_secs(30);

/// How long a renewal may take to look for workers that are to go; they are found by the next.
const SURPLUS_WITHIN: Duration = Duration::from_millis(500);

/// Longer waits are cut to this: a client that is gone must not hold a place for ever.
const MAX_WAIT: Duration = Duration::from_secs(300);

pub(crate) struct SubstrateService {
    pub(crate) control: Arc<Control>,
    pub(crate) nodes: Arc<dyn Nodes>,
    pub(crate) info: ServerInfo,
    pub(crate) shutdown: CancellationToken,
}

type Answer<T> = Result<Response<T>, Status>;
type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn key(atespace: &str, name: &str) -> Result<ActorKey, Status> {
    ActorKey::parse(atespace, name).map_err(|_| Status::not_found(format!("Actor {name} not found")))
}

fn atespace(text: String) -> Result<AtespaceName, Status> {
    AtespaceName::parse(text).map_err(|error| Status::invalid_argument(format!("invalid atespace: {error}")))
}

/// An actor that people may do something to.
fn own(atespace: &str, name: &str) -> Result<ActorKey, Status> {
    let key = key(atespace, name)?;
    usable(&key).map_err(status)?;
    Ok(key)
}

fn caller<T>(request: &Request<T>) -> String {
    request.extensions().get::<Caller>().map_or_else(|| "unknown".to_owned(), |caller| caller.0.clone())
}

fn kind(text: &str) -> Result<ate_object::Kind, Status> {
    text.parse().map_err(|error: ate_object::UnknownKind| Status::invalid_argument(error.to_string()))
}

/// An object that is only looked up: a name that cannot be is one that is not there.
fn object(kind: ate_object::Kind, namespace: String, name: String) -> Result<ObjectKey, Status> {
    // One of the whole instance has none.
    let possible = check_dns_subdomain(&name) && (namespace.is_empty() || check_dns_label(&namespace).is_ok());
    let key = ObjectKey::new(namespace, name);
    if possible { Ok(key) } else { Err(Status::not_found(format!("{} {key} not found", kind.as_str()))) }
}

#[tonic::async_trait]
impl substrate_server::Substrate for SubstrateService {
    async fn apply(&self, request: Request<ApplyRequest>) -> Answer<ApplyResponse> {
        let request = request.into_inner();
        let mut objects = Vec::new();
        for (index, document) in request.documents.iter().enumerate() {
            let name = format!("document {}", index + 1);
            let read = ate_object::read_manifests(&name, document.as_bytes(), ate_object::DEFAULT_NAMESPACE);
            objects.extend(read.map_err(|error| Status::invalid_argument(error.to_string()))?.objects);
        }
        let applied = match request.dry_run {
            true => self.control.check(objects).map_err(status)?,
            false => self.control.apply(objects).await.map_err(status)?,
        };
        let objects = applied.iter().map(|(object, applied)| {
            let result = match applied {
                Applied::Created => applied_object::Result::Created,
                Applied::Configured => applied_object::Result::Configured,
                Applied::Unchanged => applied_object::Result::Unchanged,
            };
            let ObjectKey { namespace, name } = object.key();
            AppliedObject { kind: object.kind().as_str().to_owned(), namespace, name, result: result.into() }
        });
        Ok(Response::new(ApplyResponse { objects: objects.collect() }))
    }

    async fn get_object(&self, request: Request<GetObjectRequest>) -> Answer<Object> {
        let request = request.into_inner();
        let kind = kind(&request.kind)?;
        let wanted = object(kind, request.namespace, request.name)?;
        let found = self
            .objects(kind)
            .into_iter()
            .find(|object| object.namespace == wanted.namespace && object.name == wanted.name);
        found.map(Response::new).ok_or_else(|| Status::not_found(format!("{} {wanted} not found", kind.as_str())))
    }

    async fn list_objects(&self, request: Request<ListObjectsRequest>) -> Answer<ListObjectsResponse> {
        let request = request.into_inner();
        let mut objects = self.objects(kind(&request.kind)?);
        if let Some(namespace) = request.namespace {
            objects.retain(|object| object.namespace == namespace);
        }
        Ok(Response::new(ListObjectsResponse { objects }))
    }

    async fn delete_object(&self, request: Request<DeleteObjectRequest>) -> Answer<DeleteObjectResponse> {
        let request = request.into_inner();
        let kind = kind(&request.kind)?;
        let name = object(kind, request.namespace, request.name)?;
        self.control.delete_object(kind, &name).await.map_err(status)?;
        Ok(Response::new(DeleteObjectResponse {}))
    }

    async fn activate(&self, request: Request<ActivateRequest>) -> Answer<Assignment> {
        let request = request.into_inner();
        let key = key(&request.atespace, &request.name)?;
        let wait = request.wait.and_then(|wait| Duration::try_from(wait).ok()).unwrap_or(DEFAULT_WAIT).min(MAX_WAIT);
        let stale = (request.stale_generation > 0).then(|| Generation::new(request.stale_generation));
        let assigned = self.control.activate(&key, stale, tokio::time::Instant::now() + wait).await.map_err(status)?;
        Ok(Response::new(assignment(&assigned)))
    }

    type WatchAssignmentsStream = BoxStream<AssignmentEvent>;

    async fn watch_assignments(&self, _: Request<WatchAssignmentsRequest>) -> Answer<Self::WatchAssignmentsStream> {
        let (sender, receiver) = mpsc::channel(STREAM_BUFFER);
        let (control, shutdown) = (Arc::clone(&self.control), self.shutdown.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = tell_assignments(control, sender) => {}
                () = shutdown.cancelled() => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    type WatchActorsStream = BoxStream<ActorEvent>;

    async fn watch_actors(&self, request: Request<WatchActorsRequest>) -> Answer<Self::WatchActorsStream> {
        let request = request.into_inner();
        let atespace = request.atespace.map(atespace).transpose()?;
        let after = (request.resume_version > 0).then_some(request.resume_version);
        let changes = self.control.watch_actors(atespace.as_ref(), after).await.map_err(status)?;
        let control = Arc::clone(&self.control);
        let events = changes.map(move |change| {
            let change = change.map_err(status)?;
            let event = match change.change {
                Changed::Listed => actor_event::Event::Listed(actor_event::Listed {}),
                Changed::Put(versioned) => actor_event::Event::Changed(state(&control, &versioned)),
                Changed::Deleted(key) => actor_event::Event::Deleted(ate_proto::ate::v1::ActorKey {
                    atespace: key.atespace.to_string(),
                    name: key.name.to_string(),
                }),
            };
            Ok(ActorEvent { version: change.revision, event: Some(event) })
        });
        Ok(Response::new(Box::pin(events.take_until(self.shutdown.clone().cancelled_owned()))))
    }

    async fn get_history(&self, request: Request<GetHistoryRequest>) -> Answer<GetHistoryResponse> {
        let request = request.into_inner();
        let entries = self.control.history(&key(&request.atespace, &request.name)?).await.map_err(status)?;
        let entries = entries.into_iter().map(|entry| HistoryEntry {
            time: Some(timestamp(entry.time)),
            event: entry.event,
            generation: entry.generation.get(),
            detail: entry.detail,
            worker: entry.worker.map(|worker| worker.to_string()).unwrap_or_default(),
            phases: entry
                .phases
                .into_iter()
                .map(|phase| history_entry::Phase { name: phase.name, micros: phase.micros })
                .collect(),
            snapshot_bytes: entry.snapshot_bytes,
        });
        Ok(Response::new(GetHistoryResponse { entries: entries.collect() }))
    }

    type LogsStream = BoxStream<LogLine>;

    async fn logs(&self, request: Request<LogsRequest>) -> Answer<Self::LogsStream> {
        let request = request.into_inner();
        let key = key(&request.atespace, &request.name)?;
        let found = self.control.get_actor(&key).await.map_err(status)?;
        let node = self.node_of(&found)?;
        let (sender, receiver) = mpsc::channel(STREAM_BUFFER);
        let order = LogsOrder { follow: request.follow, tail: request.tail.map(|tail| tail as usize) };
        let nodes = Arc::clone(&self.nodes);
        tokio::spawn(async move {
            if let Err(error) = nodes.logs(&node, found.actor.uid, order, sender).await {
                tracing::warn!(actor = %key, %error, "a log could not be read");
            }
        });
        let lines = ReceiverStream::new(receiver).map(|json| Ok(LogLine { json }));
        Ok(Response::new(Box::pin(lines.take_until(self.shutdown.clone().cancelled_owned()))))
    }

    type ExecStream = BoxStream<ExecResponse>;

    async fn exec(&self, request: Request<Streaming<ExecRequest>>) -> Answer<Self::ExecStream> {
        let mut input = request.into_inner();
        let start = match input.message().await?.and_then(|message| message.input) {
            Some(exec_request::Input::Start(start)) => start,
            _ => return Err(Status::invalid_argument("the first message must be `start`")),
        };
        if start.args.is_empty() {
            return Err(Status::invalid_argument("args is required"));
        }
        if start.tty {
            return Err(Status::unimplemented("terminals are not offered yet: leave tty out"));
        }
        let key = key(&start.atespace, &start.name)?;
        // A sleeping actor is woken: whoever runs a command in it wants it awake.
        self.control.activate(&key, None, tokio::time::Instant::now() + DEFAULT_WAIT).await.map_err(status)?;
        let found = self.control.get_actor(&key).await.map_err(status)?;
        let lease = found
            .actor
            .lease()
            .cloned()
            .ok_or_else(|| Status::aborted("the actor has just gone to sleep, please retry"))?;
        let order = ExecOrder {
            worker: lease.worker,
            actor: found.actor.uid,
            generation: found.actor.generation,
            container: start.container,
            args: start.args,
            env: start.env.into_iter().map(|env| (env.name, env.value)).collect(),
        };
        let (stdin, stdin_receiver) = mpsc::channel(STREAM_BUFFER);
        tokio::spawn(async move {
            while let Ok(Some(message)) = input.message().await {
                match message.input {
                    Some(exec_request::Input::Stdin(bytes)) if stdin.send(bytes.clone().into()).await.is_ok() => {}
                    Some(exec_request::Input::Stdin(_) | exec_request::Input::CloseStdin(true)) => return,
                    _ => {}
                }
            }
        });
        let (output, mut printed) = mpsc::channel(STREAM_BUFFER);
        let (sender, receiver) = mpsc::channel(STREAM_BUFFER);
        let nodes = Arc::clone(&self.nodes);
        tokio::spawn(async move {
            let running = nodes.exec(&lease.node, order, stdin_receiver, output);
            let telling = async {
                loop {
                    let output = tokio::select! {
                        output = printed.recv() => output,
                        // Whoever runs it hears of it: the actor need not stay awake for what nobody reads.
                        () = sender.closed() => return printed.close(),
                    };
                    let output = match output {
                        Some(Output::Stdout(bytes)) => exec_response::Output::Stdout(bytes.into()),
                        Some(Output::Stderr(bytes)) => exec_response::Output::Stderr(bytes.into()),
                        None => return,
                    };
                    let _ = sender.send(Ok(ExecResponse { output: Some(output) })).await;
                }
            };
            let (ended, ()) = tokio::join!(running, telling);
            let last = match ended {
                Ok(ate_orders::Exit::Code(code)) => exec_response::Output::ExitCode(code),
                Ok(ate_orders::Exit::Signal(signal)) => exec_response::Output::ExitCode(128 + signal),
                // Its sandbox went with it, mostly because the actor was put to rest.
                Ok(other) => exec_response::Output::Error(format!(
                    "the command ended with its actor's sandbox: {other}\n  why: ate history {} -a {}",
                    key.name, key.atespace
                )),
                Err(error) => exec_response::Output::Error(error.to_string()),
            };
            let _ = sender.send(Ok(ExecResponse { output: Some(last) })).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn get_quota(&self, request: Request<GetQuotaRequest>) -> Answer<QuotaStatus> {
        let name = atespace(request.into_inner().atespace)?;
        self.quota_status(&name).await
    }

    async fn set_quota(&self, request: Request<SetQuotaRequest>) -> Answer<QuotaStatus> {
        let request = request.into_inner();
        let name = atespace(request.atespace)?;
        let parsed = |quota: ate_proto::ate::v1::Quota| ate_control::Quota {
            actors: quota.actors,
            running: quota.running,
            snapshot_bytes: quota.snapshot_bytes,
            wakes_per_second: quota.wakes_per_second,
        };
        let (quota, seen) = (parsed(request.quota.unwrap_or_default()), request.seen.map(parsed));
        if quota.wakes_per_second == Some(0) {
            return Err(Status::invalid_argument("wakes per second: at least 1; to let nobody wake, allow 0 running"));
        }
        self.control.set_quota(&name, quota, seen).await.map_err(status)?;
        self.quota_status(&name).await
    }

    async fn restart_actor(&self, request: Request<RestartActorRequest>) -> Answer<RestartActorResponse> {
        let RestartActorRequest { atespace, name, force } = request.into_inner();
        let key = own(&atespace, &name)?;
        let restarted = self.control.restart_actor(&key, force).await.map_err(status)?;
        Ok(Response::new(RestartActorResponse { actor: Some(actor(&restarted)) }))
    }

    async fn fork_actor(&self, request: Request<ForkActorRequest>) -> Answer<ForkActorResponse> {
        let ForkActorRequest { atespace, from, to } = request.into_inner();
        let from = own(&atespace, &from)?;
        let to = ActorName::parse(to).map_err(|error| Status::invalid_argument(format!("invalid name: {error}")))?;
        let to = ActorKey::new(from.atespace.clone(), to);
        let forked = self.control.fork_actor(&from, &to).await.map_err(status)?;
        Ok(Response::new(ForkActorResponse { actor: Some(actor(&forked)) }))
    }

    async fn unstick_actor(&self, request: Request<UnstickActorRequest>) -> Answer<UnstickActorResponse> {
        let caller = caller(&request);
        let UnstickActorRequest { atespace, name, reason } = request.into_inner();
        let key = own(&atespace, &name)?;
        let asked = Asked::by(caller, reason).map_err(status)?;
        let (unstuck, silent) = self.control.unstick_actor(&key, &asked).await.map_err(status)?;
        let silent_node = silent.map(|node| node.to_string()).unwrap_or_default();
        Ok(Response::new(UnstickActorResponse { actor: Some(actor(&unstuck)), silent_node }))
    }

    async fn force_delete_actor(&self, request: Request<ForceDeleteActorRequest>) -> Answer<ForceDeleteActorResponse> {
        let caller = caller(&request);
        let ForceDeleteActorRequest { atespace, name, reason } = request.into_inner();
        let key = own(&atespace, &name)?;
        let asked = Asked::by(caller, reason).map_err(status)?;
        let silent = self.control.force_delete_actor(&key, &asked).await.map_err(status)?;
        let silent_node = silent.map(|node| node.to_string()).unwrap_or_default();
        Ok(Response::new(ForceDeleteActorResponse { silent_node }))
    }

    async fn list_audit(&self, request: Request<ListAuditRequest>) -> Answer<ListAuditResponse> {
        let ListAuditRequest { page_size, page_token } = request.into_inner();
        let limit = if page_size == 0 { MAX_PAGE } else { page_size as usize };
        let after = crate::control::page_token(ate_store::Kind::Meta, &page_token)?;
        let (entries, next) = self.control.list_audit(after.as_deref(), limit).await.map_err(status)?;
        let entries = entries.into_iter().map(|entry| AuditEntry {
            time: Some(timestamp(entry.time)),
            call: entry.call,
            atespace: entry.actor.atespace.to_string(),
            name: entry.actor.name.to_string(),
            uid: entry.uid.to_string(),
            caller: entry.caller,
            reason: entry.reason,
            detail: entry.detail,
        });
        let next_page_token = next.map(|token| URL_SAFE_NO_PAD.encode(token)).unwrap_or_default();
        Ok(Response::new(ListAuditResponse { entries: entries.collect(), next_page_token }))
    }

    async fn renew_node(&self, request: Request<RenewNodeRequest>) -> Answer<RenewNodeResponse> {
        let RenewNodeRequest { node, session, endpoint, leaving, beat } = request.into_inner();
        let name = check_dns_subdomain(&node).then(|| NodeName::new(node));
        let (node, session) = name
            .zip(SessionId::parse(&session).ok())
            .ok_or_else(|| Status::invalid_argument("a node has a name that is a DNS name, and a session"))?;
        let registration = Registration { session, endpoint: &endpoint, leaving, beat };
        let Renewal::Renewed { beat } = self.control.renew_node(&node, registration).await.map_err(status)? else {
            return Ok(Response::new(RenewNodeResponse { over: true, ..Default::default() }));
        };
        let shares = self.control.shares(&node);
        // That it is heard must not depend on whether its workers can be looked after just now.
        let surplus = tokio::time::timeout(SURPLUS_WITHIN, self.control.surplus(&node, &shares)).await;
        let surplus = surplus.unwrap_or_else(|_| Ok(Vec::new())).unwrap_or_else(|error| {
            tracing::warn!(%node, %error, "workers that are not needed stay");
            Vec::new()
        });
        let shares = shares.into_iter().map(|share| PoolShare {
            pool_namespace: share.pool.namespace,
            pool_name: share.pool.name,
            workers: u32::try_from(share.workers).unwrap_or(u32::MAX),
            memory_limit: share.memory_limit.unwrap_or(0),
            cpu_limit_millis: share.cpu_limit_millis.unwrap_or(0),
        });
        Ok(Response::new(RenewNodeResponse {
            over: false,
            shares: shares.collect(),
            surplus: surplus.iter().map(|worker| worker.to_string()).collect(),
            beat,
        }))
    }

    async fn get_info(&self, _: Request<GetInfoRequest>) -> Answer<Info> {
        let ServerInfo { version, build, instance, router_url } = self.info.clone();
        Ok(Response::new(Info { version, build, instance, router_url, features: Vec::new() }))
    }
}

impl SubstrateService {
    async fn quota_status(&self, name: &AtespaceName) -> Answer<QuotaStatus> {
        let (quota, usage) = self.control.quota(name).await.map_err(status)?;
        Ok(Response::new(QuotaStatus {
            atespace: name.to_string(),
            quota: Some(Quota {
                actors: quota.actors,
                running: quota.running,
                snapshot_bytes: quota.snapshot_bytes,
                wakes_per_second: quota.wakes_per_second,
            }),
            actors: usage.actors,
            running: usage.running,
            snapshot_bytes: usage.snapshot_bytes,
        }))
    }

    fn objects(&self, kind: ate_object::Kind) -> Vec<Object> {
        let plain = |object: ate_object::Object, status: Option<serde_json::Value>| {
            let ObjectKey { namespace, name } = object.key();
            let mut json = serde_json::to_value(&object).expect("objects are plain data");
            if let Some(status) = status {
                json["status"] = status;
            }
            Object { kind: object.kind().as_str().to_owned(), namespace, name, json: json.to_string() }
        };
        match kind {
            ate_object::Kind::ActorTemplate => self
                .control
                .templates()
                .iter()
                .map(|template| {
                    let status = serde_json::to_value(&template.status).expect("plain data");
                    plain(ate_object::Object::ActorTemplate(template.object.clone()), Some(status))
                })
                .collect(),
            ate_object::Kind::WorkerPool => self
                .control
                .pools()
                .iter()
                .map(|pool| plain(ate_object::Object::WorkerPool((**pool).clone()), None))
                .collect(),
            ate_object::Kind::SandboxConfig => self
                .control
                .configs()
                .iter()
                .map(|config| plain(ate_object::Object::SandboxConfig((**config).clone()), None))
                .collect(),
        }
    }

    /// The node that has or last had the actor; it has the log too.
    fn node_of(&self, found: &Versioned) -> Result<NodeName, Status> {
        let lease = found.actor.lease().map(|lease| lease.node.clone());
        let local = found.actor.snapshots.local.as_ref().map(|(_, node)| node.clone());
        lease.or(local).or_else(|| self.control.any_node()).ok_or_else(|| Status::unavailable("no node is known"))
    }
}

async fn tell_assignments(control: Arc<Control>, sender: mpsc::Sender<Result<AssignmentEvent, Status>>) {
    let send = async |event| sender.send(Ok(AssignmentEvent { event: Some(event) })).await.is_ok();
    loop {
        let (current, mut changes) = control.watch_assignments();
        let reset = assignment_event::Reset { assignments: current.iter().map(assignment).collect() };
        if !send(assignment_event::Event::Reset(reset)).await {
            return;
        }
        loop {
            let event = match changes.recv().await {
                Ok(AssignmentUpdate::Assigned(assigned)) => assignment_event::Event::Assigned(assignment(&assigned)),
                Ok(AssignmentUpdate::Released { key, uid, generation }) => {
                    assignment_event::Event::Released(assignment_event::Released {
                        atespace: key.atespace.to_string(),
                        name: key.name.to_string(),
                        uid: uid.to_string(),
                        generation: generation.get(),
                    })
                }
                // Too far behind: everything anew.
                Err(broadcast::error::RecvError::Lagged(_)) => break,
                Err(broadcast::error::RecvError::Closed) => return,
            };
            if !send(event).await {
                return;
            }
        }
    }
}

fn assignment(assigned: &Assigned) -> Assignment {
    Assignment {
        atespace: assigned.key.atespace.to_string(),
        name: assigned.key.name.to_string(),
        uid: assigned.uid.to_string(),
        generation: assigned.generation.get(),
        endpoint: Some(match &assigned.ingress {
            Ingress::Socket(path) => assignment::Endpoint::UnixPath(path.display().to_string()),
            Ingress::Door(address) => assignment::Endpoint::TcpAddress(address.to_string()),
        }),
        ports: assigned
            .ports
            .iter()
            .map(|port| Port {
                number: port.number.into(),
                protocol: match port.protocol {
                    PortProtocol::Http => port::Protocol::Http,
                    PortProtocol::H2c => port::Protocol::H2c,
                }
                .into(),
            })
            .collect(),
        template_namespace: assigned.template.namespace.clone(),
        template_name: assigned.template.name.clone(),
    }
}

fn state(control: &Control, versioned: &Versioned) -> ActorState {
    let (frozen, idle) = control.residence(&versioned.actor).unwrap_or((false, 0));
    let newest = versioned.actor.snapshots.base().map(|(snapshot, _)| snapshot.stored_bytes);
    let failure = match &versioned.actor.phase {
        Phase::Resuming { failure: Some(failure), .. } => failure.clone(),
        _ => String::new(),
    };
    let phase = serde_json::to_value(&versioned.actor.phase).ok();
    ActorState {
        actor: Some(actor(versioned)),
        generation: versioned.actor.generation.get(),
        uid: versioned.actor.uid.to_string(),
        frozen,
        idle: Some(prost_types::Duration {
            seconds: idle / 1000,
            nanos: i32::try_from(idle % 1000).unwrap_or(0) * 1_000_000,
        }),
        snapshot_bytes: newest.unwrap_or(0),
        phase: phase.and_then(|phase| Some(phase.get("phase")?.as_str()?.to_owned())).unwrap_or_default(),
        failure,
    }
}

fn timestamp(time: jiff::Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp { seconds: time.as_second(), nanos: time.subsec_nanosecond() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_that_cannot_be_is_not_found_and_nobody_is_asked_for_it() {
        let look = |namespace: &str, name: &str| {
            object(ate_object::Kind::ActorTemplate, namespace.to_owned(), name.to_owned())
        };
        assert_eq!(look("demo", "counter").expect("it may be there"), ObjectKey::new("demo", "counter"));
        assert_eq!(look("", "gvisor.default").expect("it may be there"), ObjectKey::new("", "gvisor.default"));
        let long = "x".repeat(254);
        for (namespace, name) in
            [("demo", ""), ("demo", "a/b"), ("demo", "a\0b"), ("demo", &long), ("a/b", "c"), ("\0", "c"), ("-", "c")]
        {
            let refused = look(namespace, name).expect_err("it cannot be there");
            assert_eq!(refused.code(), tonic::Code::NotFound, "{namespace:?} {name:?}");
            assert!(refused.message().starts_with("ActorTemplate ") && refused.message().ends_with("not found"));
        }
    }
}
