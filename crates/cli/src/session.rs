//! One command's connection to the API, and what its answers and refusals mean.

use ate_object::Kind;
use ate_proto::ate::v1::substrate_client::SubstrateClient;
use ate_proto::ate::v1::{ActorState, ListObjectsRequest, WatchActorsRequest, actor_event};
use ate_proto::ateapi::control_client::ControlClient;
use ate_proto::ateapi::{ActorRef, ListActorsRequest, ListAtespacesRequest};
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;
use tonic::{Response, Status};

use crate::connect::{Dialer, Endpoint, LastFailure};
use crate::errors::CliError;
use crate::terminal::Terminal;
use crate::words::{Format, nearest};
use crate::{Global, SOCKET};

/// Largest answer taken: every worker of an instance comes in one.
const MAX_ANSWER: usize = 64 << 20;

const ELAPSED: &str = "x-server-elapsed-us";

/// What a command is about, for a guess at what was meant should it not exist.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    Actor { atespace: String, name: String },
    Atespace { name: String },
    Object { kind: Kind, namespace: String, name: String },
}

pub(crate) struct Session<'t> {
    pub(crate) control: ControlClient<Channel>,
    pub(crate) substrate: SubstrateClient<Channel>,
    pub(crate) terminal: &'t mut Terminal,
    pub(crate) format: Format,
    pub(crate) target: Option<Target>,
    endpoint: Endpoint,
    failure: LastFailure,
    trace: bool,
}

impl<'t> Session<'t> {
    pub(crate) fn new(global: &Global, terminal: &'t mut Terminal) -> Result<Self, CliError> {
        let in_cluster = [("--kubeconfig", global.kubeconfig.is_some()), ("--context", global.context.is_some())];
        if let (Some((flag, _)), None) = (in_cluster.iter().find(|(_, given)| *given), &global.endpoint) {
            return Err(CliError::Failed(format!(
                "{flag} is for clusters, which cannot be reached this way yet: leave it out to use the daemon of this \
                 machine, or name the API with --endpoint"
            )));
        }
        let endpoint = global.endpoint.clone().unwrap_or_else(|| Endpoint::Unix(global.data_dir.join(SOCKET)));
        let dialer = Dialer {
            endpoint: endpoint.clone(),
            data_dir: global.data_dir.clone(),
            is_default: global.endpoint.is_none(),
            skip_verify: global.insecure_skip_verify,
        };
        let (channel, failure) = dialer.channel();
        Ok(Self {
            control: ControlClient::new(channel.clone()).max_decoding_message_size(MAX_ANSWER),
            substrate: SubstrateClient::new(channel).max_decoding_message_size(MAX_ANSWER),
            terminal,
            format: global.output,
            target: None,
            endpoint,
            failure,
            trace: global.trace,
        })
    }

    /// Names the actor that the next calls are about.
    pub(crate) fn actor(&mut self, atespace: &str, name: &str) -> ActorRef {
        self.target = Some(Target::Actor { atespace: atespace.to_owned(), name: name.to_owned() });
        ActorRef { atespace: atespace.to_owned(), name: name.to_owned() }
    }

    pub(crate) fn answer<T>(&mut self, answer: Result<Response<T>, Status>) -> Result<T, CliError> {
        match answer {
            Ok(response) => {
                self.tell_elapsed(response.metadata());
                Ok(response.into_inner())
            }
            Err(status) => Err(self.refusal(status)),
        }
    }

    pub(crate) fn refusal(&mut self, status: Status) -> CliError {
        self.tell_elapsed(status.metadata());
        // Only a status that was made on this side has a source; what the server says comes without.
        if std::error::Error::source(&status).is_some() {
            return self.failure.lock().take().map_or_else(|| self.lost(), CliError::from);
        }
        let text = match status.message() {
            "" => status.code().description().to_owned(),
            text => text.to_owned(),
        };
        CliError::Refused { code: status.code(), text, hint: None }
    }

    /// The other side has gone without finishing.
    pub(crate) fn lost(&self) -> CliError {
        CliError::Lost { endpoint: self.endpoint.to_string() }
    }

    pub(crate) fn tell_elapsed(&mut self, metadata: &MetadataMap) {
        let elapsed = metadata.get(ELAPSED).filter(|_| self.trace).and_then(|elapsed| elapsed.to_str().ok());
        if let Some(elapsed) = elapsed {
            self.terminal.note(&format!("trace: {elapsed} us in the server"));
        }
    }

    /// Every actor, or those of one atespace, with what the public API does not tell.
    pub(crate) async fn states(&mut self, atespace: Option<&str>) -> Result<Vec<ActorState>, CliError> {
        let request = WatchActorsRequest { atespace: atespace.map(str::to_owned), resume_version: 0 };
        let answer = self.substrate.watch_actors(request).await;
        let mut events = self.answer(answer)?;
        let mut states = Vec::new();
        loop {
            match events.message().await.map_err(|status| self.refusal(status))?.map(|event| event.event) {
                Some(Some(actor_event::Event::Changed(state))) => states.push(state),
                Some(Some(actor_event::Event::Listed(_))) => return Ok(states),
                Some(_) => {}
                None => return Err(self.lost()),
            }
        }
    }

    /// Adds what to do to a refusal, where it can be told.
    pub(crate) async fn advised(&mut self, error: CliError) -> CliError {
        match error {
            CliError::Refused { code, text, hint: None } => {
                let hint = self.advice(&text).await;
                CliError::Refused { code, text, hint }
            }
            other => other,
        }
    }

    /// Two questions to the server at most. It has been refused something already, so a failure here is not news.
    async fn advice(&mut self, refusal: &str) -> Option<String> {
        // The words are the public API's, and leave open what to do.
        if refusal.starts_with("ActorTemplate ") && refusal.ends_with(": Spec is immutable") {
            return Some(
                "a template never changes: apply it under another name, or delete its actors and it first".to_owned(),
            );
        }
        let target = self.target.take()?;
        if refusal == "no free workers available" {
            return Some("suspend another actor, or give its pool more replicas; see: ate get workers".to_owned());
        }
        if let (Target::Actor { atespace, name }, true) = (&target, refusal.contains(" is not suspended (")) {
            return Some(format!("suspend it first: ate suspend {name} -a {atespace}"));
        }
        let missing = refusal.strip_suffix(" not found")?;
        let (known, wanted) = match &target {
            Target::Actor { .. } | Target::Object { .. } if missing.starts_with("Atespace ") => {
                return Some(format!("make it with: ate create atespace {}", missing.strip_prefix("Atespace ")?));
            }
            Target::Actor { atespace, name } => {
                let request = ListActorsRequest { atespace: atespace.clone(), ..Default::default() };
                let actors = self.control.list_actors(request).await.ok()?.into_inner().actors;
                if actors.is_empty() {
                    return self.advice_on_atespace(atespace).await;
                }
                (actors.into_iter().map(|actor| actor.actor_id).collect::<Vec<_>>(), name)
            }
            Target::Atespace { name } => (self.atespaces().await?, name),
            Target::Object { kind, namespace, name } => {
                let request = ListObjectsRequest { kind: kind.as_str().to_owned(), namespace: None };
                let objects = self.substrate.list_objects(request).await.ok()?.into_inner().objects;
                if let Some(elsewhere) = objects.iter().find(|object| object.name == *name) {
                    return Some(format!("there is one in namespace {:?}", elsewhere.namespace));
                }
                let here = objects.into_iter().filter(|object| object.namespace == *namespace);
                (here.map(|object| object.name).collect(), name)
            }
        };
        did_you_mean(wanted, &known)
    }

    /// Nobody is in it, perhaps because there is no such atespace.
    async fn advice_on_atespace(&mut self, wanted: &str) -> Option<String> {
        let known = self.atespaces().await?;
        match known.iter().any(|known| known == wanted) {
            true => Some(format!("there is no actor in atespace {wanted:?}")),
            false => {
                let near = did_you_mean(wanted, &known).map(|near| format!(": {near}"));
                Some(format!("there is no atespace {wanted:?}{}", near.unwrap_or_default()))
            }
        }
    }

    async fn atespaces(&mut self) -> Option<Vec<String>> {
        let atespaces = self.control.list_atespaces(ListAtespacesRequest {}).await.ok()?.into_inner().atespaces;
        Some(atespaces.into_iter().map(|atespace| atespace.name).collect())
    }
}

fn did_you_mean(wanted: &str, known: &[String]) -> Option<String> {
    nearest(wanted, known.iter().map(String::as_str)).map(|near| format!("did you mean {near:?}?"))
}
