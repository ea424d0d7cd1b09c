//! A daemon of few words: it answers both APIs from memory and remembers what it was told.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use ate_proto::ate::v1::*;
use ate_proto::ateapi::{self, actor::Status as ActorStatus, control_server::Control, *};
use tokio::sync::{broadcast, mpsc};
use tokio_stream::wrappers::{BroadcastStream, ReceiverStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};

type Answer<T> = Result<Response<T>, Status>;
type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Few, so that lists take several pages.
const PAGE: usize = 2;

#[derive(Default)]
pub(crate) struct State {
    pub(crate) actors: BTreeMap<[String; 2], Actor>,
    pub(crate) atespaces: BTreeSet<String>,
    pub(crate) objects: Vec<Object>,
    /// What a template's status will be, one per look; the last stays.
    pub(crate) phases: VecDeque<serde_json::Value>,
    pub(crate) selectors: Vec<Option<Selector>>,
    audit: Vec<AuditEntry>,
    /// Whether by force.
    pub(crate) restarts: Vec<bool>,
}

#[derive(Clone)]
pub(crate) struct Fake {
    pub(crate) state: Arc<Mutex<State>>,
    events: broadcast::Sender<ActorEvent>,
}

impl Fake {
    pub(crate) fn new() -> Self {
        Self { state: Arc::default(), events: broadcast::channel(64).0 }
    }

    pub(crate) fn put(&self, atespace: &str, name: &str, status: ActorStatus) -> Actor {
        let mut state = self.state.lock().unwrap();
        state.atespaces.insert(atespace.to_owned());
        let actor = state.actors.entry([atespace.to_owned(), name.to_owned()]).or_insert_with(|| Actor {
            actor_id: name.to_owned(),
            atespace: atespace.to_owned(),
            actor_template_namespace: "default".to_owned(),
            actor_template_name: "counter".to_owned(),
            ..Default::default()
        });
        actor.version += 1;
        actor.status = status.into();
        let on_worker = status == ActorStatus::Running;
        actor.ateom_pod_namespace = if on_worker { "default".to_owned() } else { String::new() };
        actor.ateom_pod_name = if on_worker { "w-0".to_owned() } else { String::new() };
        actor.ateom_pod_ip = if on_worker { "127.0.0.1".to_owned() } else { String::new() };
        let event = actor_event::Event::Changed(detailed(actor));
        let _ = self.events.send(ActorEvent { version: 7, event: Some(event) });
        actor.clone()
    }

    pub(crate) fn remove(&self, atespace: &str, name: &str) {
        self.state.lock().unwrap().actors.remove(&[atespace.to_owned(), name.to_owned()]);
        let key = ActorKey { atespace: atespace.to_owned(), name: name.to_owned() };
        let _ = self.events.send(ActorEvent { version: 8, event: Some(actor_event::Event::Deleted(key)) });
    }

    pub(crate) fn template(&self, namespace: &str, name: &str) {
        let json = serde_json::json!({
            "apiVersion": "ate.dev/v1alpha1",
            "kind": "ActorTemplate",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"sandboxClass": "gvisor", "containers": [{"image": "registry.example/x"}]},
        });
        self.state.lock().unwrap().objects.push(object("ActorTemplate", namespace, name, json.to_string()));
    }

    fn audited(&self, call: &str, name: &str, reason: String) {
        let mut state = self.state.lock().unwrap();
        let seconds = i64::try_from(state.audit.len()).unwrap();
        state.audit.push(AuditEntry {
            time: Some(prost_types::Timestamp { seconds, nanos: 0 }),
            call: call.to_owned(),
            atespace: "demo".to_owned(),
            name: name.to_owned(),
            uid: "u".to_owned(),
            caller: "socket".to_owned(),
            reason,
            detail: "was running".to_owned(),
        });
    }

    fn actor(&self, reference: Option<ActorRef>) -> Result<Actor, Status> {
        let ActorRef { atespace, name } = reference.unwrap_or_default();
        let found = self.state.lock().unwrap().actors.get(&[atespace, name.clone()]).cloned();
        found.ok_or_else(|| Status::not_found(format!("Actor {name} not found")))
    }

    fn moved(&self, reference: Option<ActorRef>, status: ActorStatus) -> Result<Option<Actor>, Status> {
        let actor = self.actor(reference)?;
        Ok(Some(self.put(&actor.atespace, &actor.actor_id, status)))
    }
}

fn object(kind: &str, namespace: &str, name: &str, json: String) -> Object {
    Object { kind: kind.to_owned(), namespace: namespace.to_owned(), name: name.to_owned(), json }
}

fn detailed(actor: &Actor) -> ActorState {
    ActorState {
        actor: Some(actor.clone()),
        generation: 3,
        frozen: true,
        idle: Some(prost_types::Duration { seconds: 65, nanos: 0 }),
        snapshot_bytes: 75_776,
        failure: "worker lost".to_owned(),
        ..Default::default()
    }
}

fn stream<T: Send + 'static>(items: impl IntoIterator<Item = T>) -> BoxStream<T> {
    Box::pin(tokio_stream::iter(items.into_iter().map(Ok).collect::<Vec<_>>()))
}

#[tonic::async_trait]
impl Control for Fake {
    async fn get_actor(&self, request: Request<GetActorRequest>) -> Answer<GetActorResponse> {
        let actor = Some(self.actor(request.into_inner().actor_ref)?);
        let mut response = Response::new(GetActorResponse { actor });
        response.metadata_mut().insert("x-server-elapsed-us", 42.into());
        Ok(response)
    }

    async fn create_actor(&self, request: Request<CreateActorRequest>) -> Answer<CreateActorResponse> {
        let request = request.into_inner();
        let ActorRef { atespace, name } = request.actor_ref.unwrap_or_default();
        let (namespace, template) = (request.actor_template_namespace, request.actor_template_name);
        let mut state = self.state.lock().unwrap();
        if !state.objects.iter().any(|object| object.namespace == namespace && object.name == template) {
            return Err(Status::failed_precondition(format!("ActorTemplate {namespace}/{template} not found")));
        }
        if !state.atespaces.contains(&atespace) {
            return Err(Status::failed_precondition(format!("Atespace {atespace} not found")));
        }
        state.selectors.push(request.worker_selector);
        drop(state);
        Ok(Response::new(CreateActorResponse { actor: Some(self.put(&atespace, &name, ActorStatus::Suspended)) }))
    }

    async fn update_actor(&self, request: Request<UpdateActorRequest>) -> Answer<UpdateActorResponse> {
        let request = request.into_inner();
        let actor = self.moved(request.actor_ref, ActorStatus::Suspended)?;
        self.state.lock().unwrap().selectors.push(request.worker_selector);
        Ok(Response::new(UpdateActorResponse { actor }))
    }

    async fn suspend_actor(&self, request: Request<SuspendActorRequest>) -> Answer<SuspendActorResponse> {
        let actor = self.moved(request.into_inner().actor_ref, ActorStatus::Suspended)?;
        Ok(Response::new(SuspendActorResponse { actor }))
    }

    async fn pause_actor(&self, request: Request<PauseActorRequest>) -> Answer<PauseActorResponse> {
        let actor = self.moved(request.into_inner().actor_ref, ActorStatus::Paused)?;
        Ok(Response::new(PauseActorResponse { actor }))
    }

    async fn resume_actor(&self, request: Request<ResumeActorRequest>) -> Answer<ResumeActorResponse> {
        let actor = self.moved(request.into_inner().actor_ref, ActorStatus::Running)?;
        Ok(Response::new(ResumeActorResponse { actor }))
    }

    async fn delete_actor(&self, request: Request<DeleteActorRequest>) -> Answer<DeleteActorResponse> {
        let actor = self.actor(request.into_inner().actor_ref)?;
        if actor.status() != ActorStatus::Suspended {
            let status = actor.status().as_str_name();
            let text = format!("Actor {} is not suspended (status: {status})", actor.actor_id);
            return Err(Status::failed_precondition(text));
        }
        self.remove(&actor.atespace, &actor.actor_id);
        Ok(Response::new(DeleteActorResponse {}))
    }

    async fn list_workers(&self, _: Request<ListWorkersRequest>) -> Answer<ListWorkersResponse> {
        let worker = |pod: &str, actor: &str| Worker {
            worker_namespace: "default".to_owned(),
            worker_pool: "small".to_owned(),
            worker_pod: pod.to_owned(),
            actor_namespace: "default".to_owned(),
            actor_template: "counter".to_owned(),
            actor_id: actor.to_owned(),
            node_name: "n1".to_owned(),
            ..Default::default()
        };
        Ok(Response::new(ListWorkersResponse { workers: vec![worker("w-1", ""), worker("w-0", "a1")] }))
    }

    /// In an order of its own, as the public API's lists are.
    async fn list_actors(&self, request: Request<ListActorsRequest>) -> Answer<ListActorsResponse> {
        let request = request.into_inner();
        let state = self.state.lock().unwrap();
        let all: Vec<&Actor> = state.actors.values().rev().collect();
        let from = request.page_token.parse().unwrap_or(0);
        let wanted =
            all.iter().skip(from).take(PAGE).filter(|actor| ["", &actor.atespace].contains(&&*request.atespace));
        let next_page_token = if from + PAGE < all.len() { (from + PAGE).to_string() } else { String::new() };
        let actors = wanted.map(|actor| (*actor).clone()).collect();
        Ok(Response::new(ListActorsResponse { actors, next_page_token }))
    }

    async fn create_atespace(&self, request: Request<CreateAtespaceRequest>) -> Answer<CreateAtespaceResponse> {
        let name = request.into_inner().name;
        if !self.state.lock().unwrap().atespaces.insert(name.clone()) {
            return Err(Status::already_exists(format!("Atespace {name} already exists")));
        }
        Ok(Response::new(CreateAtespaceResponse { atespace: Some(Atespace { name }) }))
    }

    async fn get_atespace(&self, request: Request<GetAtespaceRequest>) -> Answer<GetAtespaceResponse> {
        let name = request.into_inner().name;
        if !self.state.lock().unwrap().atespaces.contains(&name) {
            return Err(Status::not_found(format!("Atespace {name} not found")));
        }
        Ok(Response::new(GetAtespaceResponse { atespace: Some(Atespace { name }) }))
    }

    async fn list_atespaces(&self, _: Request<ListAtespacesRequest>) -> Answer<ListAtespacesResponse> {
        let names = self.state.lock().unwrap().atespaces.clone();
        let atespaces = names.into_iter().rev().map(|name| Atespace { name }).collect();
        Ok(Response::new(ListAtespacesResponse { atespaces }))
    }

    async fn delete_atespace(&self, request: Request<DeleteAtespaceRequest>) -> Answer<DeleteAtespaceResponse> {
        self.state.lock().unwrap().atespaces.remove(&request.into_inner().name);
        Ok(Response::new(DeleteAtespaceResponse {}))
    }

    async fn debug_clear(&self, _: Request<DebugClearRequest>) -> Answer<ateapi::DebugClearResponse> {
        Err(Status::unimplemented(""))
    }
}

#[tonic::async_trait]
impl substrate_server::Substrate for Fake {
    async fn apply(&self, request: Request<ApplyRequest>) -> Answer<ApplyResponse> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let mut objects = Vec::new();
        for json in request.documents {
            let read = ate_object::read_manifests("document", json.as_bytes(), "wrong").unwrap();
            let (kind, key) = (read.objects[0].kind().as_str(), read.objects[0].key());
            let known = state.objects.iter().find(|object| object.kind == kind && object.name == key.name);
            if let Some(known) = known {
                let before = ate_object::read_manifests("document", known.json.as_bytes(), "wrong").unwrap();
                ate_object::check_update(&before.objects[0], &read.objects[0])
                    .map_err(|error| Status::invalid_argument(error.to_string()))?;
            }
            let known = known.is_some();
            let result = if known { applied_object::Result::Unchanged } else { applied_object::Result::Created };
            if !known && !request.dry_run {
                state.objects.push(object(kind, &key.namespace, &key.name, json));
            }
            objects.push(AppliedObject {
                kind: kind.to_owned(),
                namespace: key.namespace,
                name: key.name,
                result: result.into(),
            });
        }
        Ok(Response::new(ApplyResponse { objects }))
    }

    async fn get_object(&self, request: Request<GetObjectRequest>) -> Answer<Object> {
        let GetObjectRequest { kind, namespace, name } = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let found = state
            .objects
            .iter()
            .find(|object| object.kind == kind && object.namespace == namespace && object.name == name);
        let mut found =
            found.cloned().ok_or_else(|| Status::not_found(format!("{kind} {namespace}/{name} not found")))?;
        let status = if state.phases.len() > 1 { state.phases.pop_front() } else { state.phases.front().cloned() };
        if let Some(status) = status {
            let mut json: serde_json::Value = serde_json::from_str(&found.json).unwrap();
            json["status"] = status;
            found.json = json.to_string();
        }
        Ok(Response::new(found))
    }

    async fn list_objects(&self, request: Request<ListObjectsRequest>) -> Answer<ListObjectsResponse> {
        let ListObjectsRequest { kind, namespace } = request.into_inner();
        let state = self.state.lock().unwrap();
        let wanted =
            |object: &&Object| object.kind == kind && namespace.iter().all(|wanted| object.namespace == *wanted);
        Ok(Response::new(ListObjectsResponse { objects: state.objects.iter().filter(wanted).cloned().collect() }))
    }

    async fn delete_object(&self, request: Request<DeleteObjectRequest>) -> Answer<DeleteObjectResponse> {
        let DeleteObjectRequest { kind, namespace, name } = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let before = state.objects.len();
        state.objects.retain(|object| (&object.kind, &object.namespace, &object.name) != (&kind, &namespace, &name));
        if state.objects.len() == before {
            return Err(Status::not_found(format!("{kind} {namespace}/{name} not found")));
        }
        Ok(Response::new(DeleteObjectResponse {}))
    }

    async fn activate(&self, _: Request<ActivateRequest>) -> Answer<Assignment> {
        Err(Status::unimplemented(""))
    }

    type WatchAssignmentsStream = BoxStream<AssignmentEvent>;

    async fn watch_assignments(&self, _: Request<WatchAssignmentsRequest>) -> Answer<Self::WatchAssignmentsStream> {
        Err(Status::unimplemented(""))
    }

    type WatchActorsStream = BoxStream<ActorEvent>;

    async fn watch_actors(&self, request: Request<WatchActorsRequest>) -> Answer<Self::WatchActorsStream> {
        let atespace = request.into_inner().atespace;
        // Under the lock that changes are told under: each is in the list or follows it, and not both.
        let state = self.state.lock().unwrap();
        let changes = BroadcastStream::new(self.events.subscribe()).filter_map(Result::ok).map(Ok);
        let listed =
            state.actors.values().rev().filter(|actor| atespace.iter().all(|wanted| actor.atespace == *wanted));
        let mut events: Vec<_> = listed.map(|actor| actor_event::Event::Changed(detailed(actor))).collect();
        events.push(actor_event::Event::Listed(actor_event::Listed {}));
        let list = stream(events.into_iter().map(|event| ActorEvent { version: 1, event: Some(event) }));
        Ok(Response::new(Box::pin(list.chain(changes))))
    }

    async fn get_quota(&self, _: Request<GetQuotaRequest>) -> Answer<QuotaStatus> {
        Err(Status::unimplemented("not in this fake"))
    }

    async fn set_quota(&self, _: Request<SetQuotaRequest>) -> Answer<QuotaStatus> {
        Err(Status::unimplemented("not in this fake"))
    }

    async fn renew_node(&self, _: Request<RenewNodeRequest>) -> Answer<RenewNodeResponse> {
        Err(Status::unimplemented("not in this fake"))
    }

    async fn get_history(&self, request: Request<GetHistoryRequest>) -> Answer<GetHistoryResponse> {
        let GetHistoryRequest { atespace, name } = request.into_inner();
        self.actor(Some(ActorRef { atespace, name }))?;
        let phase = |name: &str, micros| history_entry::Phase { name: name.to_owned(), micros };
        let entry = |seconds, event: &str| HistoryEntry {
            time: Some(prost_types::Timestamp { seconds, nanos: 0 }),
            event: event.to_owned(),
            ..Default::default()
        };
        let resumed = HistoryEntry {
            generation: 1,
            worker: "default/w-0".to_owned(),
            phases: vec![phase("claim", 500), phase("restore", 500)],
            ..entry(60, "resumed")
        };
        Ok(Response::new(GetHistoryResponse { entries: vec![entry(0, "created"), resumed] }))
    }

    type LogsStream = BoxStream<LogLine>;

    async fn logs(&self, request: Request<LogsRequest>) -> Answer<Self::LogsStream> {
        let LogsRequest { atespace, name, follow, tail, .. } = request.into_inner();
        self.actor(Some(ActorRef { atespace, name }))?;
        let line = |n: u32| format!(r#"{{"time":"2026-06-30T12:00:0{n}Z","message":"line {n}","labels":{{}}}}"#);
        let first = tail.map_or(1, |tail| 4 - tail.min(3));
        let lines = stream((first..4).map(|n| LogLine { json: line(n) }));
        if follow {
            return Ok(Response::new(Box::pin(lines.chain(tokio_stream::pending()))));
        }
        Ok(Response::new(lines))
    }

    type ExecStream = BoxStream<ExecResponse>;

    /// `cat` says on stderr where it runs and returns what it is given; `vanish` ends without a word.
    async fn exec(&self, request: Request<Streaming<ExecRequest>>) -> Answer<Self::ExecStream> {
        let mut input = request.into_inner();
        let Some(ExecRequest { input: Some(exec_request::Input::Start(start)) }) = input.message().await? else {
            return Err(Status::invalid_argument("the first message must be `start`"));
        };
        self.actor(Some(ActorRef { atespace: start.atespace.clone(), name: start.name.clone() }))?;
        match start.args[0].as_str() {
            "vanish" => return Ok(Response::new(stream([]))),
            "broken" => {
                let error = exec_response::Output::Error("no such file".to_owned());
                return Ok(Response::new(stream([ExecResponse { output: Some(error) }])));
            }
            _ => {}
        }
        let (sender, receiver) = mpsc::channel(8);
        tokio::spawn(async move {
            let say = async |output| sender.send(Ok(ExecResponse { output: Some(output) })).await.unwrap();
            let place = format!("{}/{}/{} {}", start.atespace, start.name, start.container, start.args.join(","));
            say(exec_response::Output::Stderr(place.into())).await;
            while let Ok(Some(ExecRequest { input: Some(exec_request::Input::Stdin(bytes)) })) = input.message().await {
                say(exec_response::Output::Stdout(bytes)).await;
            }
            say(exec_response::Output::ExitCode(3)).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn restart_actor(&self, request: Request<RestartActorRequest>) -> Answer<RestartActorResponse> {
        let RestartActorRequest { atespace, name, force } = request.into_inner();
        let actor = self.moved(Some(ActorRef { atespace, name }), ActorStatus::Running)?;
        self.state.lock().unwrap().restarts.push(force);
        Ok(Response::new(RestartActorResponse { actor }))
    }

    async fn fork_actor(&self, request: Request<ForkActorRequest>) -> Answer<ForkActorResponse> {
        let ForkActorRequest { atespace, from, to } = request.into_inner();
        self.moved(Some(ActorRef { atespace: atespace.clone(), name: from }), ActorStatus::Suspended)?;
        if self.actor(Some(ActorRef { atespace: atespace.clone(), name: to.clone() })).is_ok() {
            return Err(Status::already_exists(format!("Actor {to} already exists")));
        }
        Ok(Response::new(ForkActorResponse { actor: Some(self.put(&atespace, &to, ActorStatus::Suspended)) }))
    }

    async fn unstick_actor(&self, request: Request<UnstickActorRequest>) -> Answer<UnstickActorResponse> {
        let UnstickActorRequest { atespace, name, reason } = request.into_inner();
        let actor = self.moved(Some(ActorRef { atespace, name: name.clone() }), ActorStatus::Suspended)?;
        self.audited("UnstickActor", &name, reason);
        Ok(Response::new(UnstickActorResponse { actor, silent_node: "n1".to_owned() }))
    }

    async fn force_delete_actor(&self, request: Request<ForceDeleteActorRequest>) -> Answer<ForceDeleteActorResponse> {
        let ForceDeleteActorRequest { atespace, name, reason } = request.into_inner();
        self.actor(Some(ActorRef { atespace: atespace.clone(), name: name.clone() }))?;
        self.remove(&atespace, &name);
        self.audited("ForceDeleteActor", &name, reason);
        Ok(Response::new(ForceDeleteActorResponse { silent_node: String::new() }))
    }

    async fn list_audit(&self, request: Request<ListAuditRequest>) -> Answer<ListAuditResponse> {
        let state = self.state.lock().unwrap();
        let from: usize = request.into_inner().page_token.parse().unwrap_or(0);
        let next_page_token = if from + PAGE < state.audit.len() { (from + PAGE).to_string() } else { String::new() };
        let entries = state.audit.iter().skip(from).take(PAGE).cloned().collect();
        Ok(Response::new(ListAuditResponse { entries, next_page_token }))
    }

    async fn get_info(&self, _: Request<GetInfoRequest>) -> Answer<Info> {
        Err(Status::unimplemented(""))
    }
}
