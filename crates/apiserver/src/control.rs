//! `ateapi.Control`. What is checked, in which order and with which words is part of the public API: clients and tests
//! compare texts.

use std::sync::Arc;

use ate_actor::Intent;
use ate_control::{Control, MAX_PAGE, usable};
use ate_name::{ActorKey, ActorName, AtespaceName, Labels, NameError, ObjectKey};
use ate_proto::ateapi::*;
use ate_store::{Key, Kind};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use tonic::{Request, Response, Status};

use crate::convert::{actor, status, worker};

pub(crate) struct ControlService(pub(crate) Arc<Control>);

type Answer<T> = Result<Response<T>, Status>;

fn required(text: &str, message: &str) -> Result<(), Status> {
    if text.is_empty() { Err(Status::invalid_argument(message)) } else { Ok(()) }
}

fn actor_name(text: &str) -> Result<ActorName, Status> {
    ActorName::parse(text).map_err(|error: NameError| Status::invalid_argument(format!("invalid actor_id: {error}")))
}

fn atespace_name(text: &str) -> Result<AtespaceName, Status> {
    AtespaceName::parse(text).map_err(|error: NameError| Status::invalid_argument(format!("invalid atespace: {error}")))
}

fn selector(selector: Option<Selector>) -> Result<Labels, Status> {
    let labels: Labels = selector.map(|selector| selector.match_labels.into_iter().collect()).unwrap_or_default();
    ate_object::check_worker_selector(&labels).map_err(Status::invalid_argument)?;
    Ok(labels)
}

/// An actor that is only looked up: a name that cannot be is one that is not there.
fn existing(reference: Option<ActorRef>, id_message: &str) -> Result<ActorKey, Status> {
    let ActorRef { atespace, name } = reference.unwrap_or_default();
    required(&name, id_message)?;
    required(&atespace, "atespace is required")?;
    ActorKey::parse(&atespace, &name).map_err(|_| Status::not_found(format!("Actor {name} not found")))
}

#[tonic::async_trait]
impl control_server::Control for ControlService {
    async fn get_actor(&self, request: Request<GetActorRequest>) -> Answer<GetActorResponse> {
        let key = existing(request.into_inner().actor_ref, "id is required")?;
        let found = self.0.get_actor(&key).await.map_err(status)?;
        Ok(Response::new(GetActorResponse { actor: Some(actor(&found)) }))
    }

    async fn create_actor(&self, request: Request<CreateActorRequest>) -> Answer<CreateActorResponse> {
        let request = request.into_inner();
        required(&request.actor_template_namespace, "actor_template_namespace is required")?;
        required(&request.actor_template_name, "actor_template_name is required")?;
        let ActorRef { atespace, name } = request.actor_ref.unwrap_or_default();
        required(&name, "actor_id is required")?;
        let name = actor_name(&name)?;
        required(&atespace, "atespace is required")?;
        let atespace = atespace_name(&atespace)?;
        let labels = selector(request.worker_selector)?;
        let template = ObjectKey::new(request.actor_template_namespace, request.actor_template_name);
        let key = ActorKey::new(atespace, name);
        usable(&key).map_err(status)?;
        let made = self.0.create_actor(&key, &template, labels).await.map_err(status)?;
        Ok(Response::new(CreateActorResponse { actor: Some(actor(&made)) }))
    }

    async fn update_actor(&self, request: Request<UpdateActorRequest>) -> Answer<UpdateActorResponse> {
        let request = request.into_inner();
        let ActorRef { atespace, name } = request.actor_ref.unwrap_or_default();
        required(&name, "actor_id is required")?;
        required(&atespace, "atespace is required")?;
        let atespace = atespace_name(&atespace)?;
        let labels = selector(request.worker_selector)?;
        let name = ActorName::parse(name.clone()).map_err(|_| Status::not_found(format!("Actor {name} not found")))?;
        let key = ActorKey::new(atespace, name);
        usable(&key).map_err(status)?;
        let updated = self.0.update_actor(&key, labels).await.map_err(status)?;
        Ok(Response::new(UpdateActorResponse { actor: Some(actor(&updated)) }))
    }

    async fn suspend_actor(&self, request: Request<SuspendActorRequest>) -> Answer<SuspendActorResponse> {
        let key = existing(request.into_inner().actor_ref, "id is required")?;
        usable(&key).map_err(status)?;
        let saved = self.0.save_actor(&key, Intent::Suspend).await.map_err(status)?;
        Ok(Response::new(SuspendActorResponse { actor: Some(actor(&saved)) }))
    }

    async fn pause_actor(&self, request: Request<PauseActorRequest>) -> Answer<PauseActorResponse> {
        let key = existing(request.into_inner().actor_ref, "id is required")?;
        usable(&key).map_err(status)?;
        let saved = self.0.save_actor(&key, Intent::Pause).await.map_err(status)?;
        Ok(Response::new(PauseActorResponse { actor: Some(actor(&saved)) }))
    }

    async fn resume_actor(&self, request: Request<ResumeActorRequest>) -> Answer<ResumeActorResponse> {
        let request = request.into_inner();
        let key = existing(request.actor_ref, "id is required")?;
        usable(&key).map_err(status)?;
        let resumed = self.0.resume_actor(&key, request.boot).await.map_err(status)?;
        Ok(Response::new(ResumeActorResponse { actor: Some(actor(&resumed)) }))
    }

    async fn delete_actor(&self, request: Request<DeleteActorRequest>) -> Answer<DeleteActorResponse> {
        let ActorRef { atespace, name } = request.into_inner().actor_ref.unwrap_or_default();
        required(&name, "actor_id is required")?;
        let name = actor_name(&name)?;
        required(&atespace, "atespace is required")?;
        let atespace =
            AtespaceName::parse(atespace).map_err(|_| Status::not_found(format!("Actor {name} not found")))?;
        let key = ActorKey::new(atespace, name);
        usable(&key).map_err(status)?;
        self.0.delete_actor(&key).await.map_err(status)?;
        Ok(Response::new(DeleteActorResponse {}))
    }

    async fn list_workers(&self, _: Request<ListWorkersRequest>) -> Answer<ListWorkersResponse> {
        let workers = self.0.list_workers().await.map_err(status)?;
        Ok(Response::new(ListWorkersResponse {
            workers: workers.iter().map(|(record, version)| worker(record, *version)).collect(),
        }))
    }

    async fn list_actors(&self, request: Request<ListActorsRequest>) -> Answer<ListActorsResponse> {
        let request = request.into_inner();
        let atespace = match request.atespace.as_str() {
            "" => None,
            text => Some(atespace_name(text)?),
        };
        let limit = match usize::try_from(request.page_size) {
            Err(_) => return Err(Status::invalid_argument("page_size cannot be negative")),
            Ok(size) if size > MAX_PAGE => {
                return Err(Status::invalid_argument(format!("page_size {size} exceeds maximum page size {MAX_PAGE}")));
            }
            Ok(0) => MAX_PAGE,
            Ok(size) => size,
        };
        let after = page_token(Kind::Actor, &request.page_token)?;
        let (actors, token) = self.0.list_actors(atespace.as_ref(), after.as_deref(), limit).await.map_err(status)?;
        Ok(Response::new(ListActorsResponse {
            actors: actors.iter().map(actor).collect(),
            next_page_token: token.map(|token| URL_SAFE_NO_PAD.encode(token)).unwrap_or_default(),
        }))
    }

    async fn create_atespace(&self, request: Request<CreateAtespaceRequest>) -> Answer<CreateAtespaceResponse> {
        let name = request.into_inner().name;
        required(&name, "name is required")?;
        let parsed = atespace_name(&name)?;
        self.0.create_atespace(&parsed).await.map_err(status)?;
        Ok(Response::new(CreateAtespaceResponse { atespace: Some(Atespace { name }) }))
    }

    async fn get_atespace(&self, request: Request<GetAtespaceRequest>) -> Answer<GetAtespaceResponse> {
        let name = request.into_inner().name;
        required(&name, "name is required")?;
        let parsed = atespace_name(&name)?;
        self.0.get_atespace(&parsed).await.map_err(status)?;
        Ok(Response::new(GetAtespaceResponse { atespace: Some(Atespace { name }) }))
    }

    async fn list_atespaces(&self, _: Request<ListAtespacesRequest>) -> Answer<ListAtespacesResponse> {
        let names = self.0.list_atespaces().await.map_err(status)?;
        Ok(Response::new(ListAtespacesResponse {
            atespaces: names.iter().map(|name| Atespace { name: name.to_string() }).collect(),
        }))
    }

    async fn delete_atespace(&self, request: Request<DeleteAtespaceRequest>) -> Answer<DeleteAtespaceResponse> {
        let name = request.into_inner().name;
        required(&name, "name is required")?;
        let parsed = atespace_name(&name)?;
        self.0.delete_atespace(&parsed).await.map_err(status)?;
        Ok(Response::new(DeleteAtespaceResponse {}))
    }

    /// Wiping everything is a help for tests of the public project, and here a way to lose every actor at once.
    async fn debug_clear(&self, _: Request<DebugClearRequest>) -> Answer<DebugClearResponse> {
        Err(Status::permission_denied("DebugClear is disabled: it would delete every actor; delete them one by one"))
    }
}

/// Tokens are the last key of a page, so a list goes on where it was whatever has changed in between.
pub(crate) fn page_token(kind: Kind, token: &str) -> Result<Option<String>, Status> {
    if token.is_empty() {
        return Ok(None);
    }
    let path = URL_SAFE_NO_PAD.decode(token).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    // What no key can be no page ended with, and not every store could compare with it.
    let path = path.filter(|path| Key::parse(kind, path).is_ok());
    let malformed = || Status::invalid_argument("page_token is malformed: use the one that the last page came with");
    path.map(Some).ok_or_else(malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_no_page_came_with_is_refused() {
        let token = |path: &[u8]| page_token(Kind::Actor, &URL_SAFE_NO_PAD.encode(path));
        assert_eq!(token(b"demo/my-counter").expect("a key").as_deref(), Some("demo/my-counter"));
        assert_eq!(page_token(Kind::Actor, "").expect("the first page"), None);
        let long = [b'x'; 254];
        for path in [&b"demo/a\0b"[..], b"\0", b"demo//a", b"/", b"\xff", &long] {
            assert_eq!(token(path).expect_err("no key").code(), tonic::Code::InvalidArgument, "{path:?}");
        }
        assert_eq!(page_token(Kind::Actor, "no base64!").expect_err("no token").code(), tonic::Code::InvalidArgument);
    }
}
