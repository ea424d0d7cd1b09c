use ate_object::{DEFAULT_NAMESPACE, Kind};
use ate_proto::ate::v1::{GetObjectRequest, ListObjectsRequest};
use ate_proto::ateapi::{
    Actor, GetActorRequest, GetAtespaceRequest, ListActorsRequest, ListAtespacesRequest, ListWorkersRequest,
};
use tonic::Code;

use crate::errors::CliError;
use crate::session::{Session, Target};
use crate::words::Noun;

const EXAMPLES: &str = "Examples:
  ate get actors -a demo             all actors of one atespace
  ate get actors -A -o wide          all actors, in more detail
  ate get actor my-actor -a demo -w  one actor, and every change of it
  ate get workers
  ate get templates -o yaml          templates as they could be applied again";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct GetArgs {
    /// What to show
    ///
    /// Singular and plural mean the same; templates, pools and configs also go by their full names: actortemplates,
    /// workerpools, sandboxconfigs.
    #[arg(value_name = "KIND", value_parser = Noun::parser())]
    noun: Noun,
    /// Only this one
    name: Option<String>,
    /// Only actors of this atespace
    #[arg(short, long)]
    atespace: Option<String>,
    /// Actors of all atespaces
    #[arg(short = 'A', long, conflicts_with_all = ["atespace", "name"])]
    all_atespaces: bool,
    /// Only templates or pools of this namespace
    ///
    /// Without it, those of all namespaces are listed, and one that is named is looked for in "default".
    #[arg(short, long)]
    namespace: Option<String>,
    /// Go on with every change, until Ctrl-C
    ///
    /// A table gets a row per change. JSON and YAML get one document per change, an event of the API's WatchActors;
    /// JSON has one on each line. If the daemon restarts, the watch goes on with what has changed meanwhile.
    #[arg(short, long)]
    watch: bool,
}

impl GetArgs {
    pub(crate) fn is_endless(&self) -> bool {
        self.watch
    }
}

pub(crate) async fn run(args: GetArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    if args.watch && args.noun != Noun::Actors {
        return Err(CliError::Usage("only actors can be watched: leave out --watch".to_owned()));
    }
    match args.noun {
        Noun::Actors => actors(args, session).await,
        Noun::Workers => workers(args.name, session).await,
        Noun::Atespaces => atespaces(args.name, session).await,
        Noun::Objects(kind) => objects(kind, args, session).await,
    }
}

async fn actors(args: GetArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    match (&args.name, &args.atespace) {
        (Some(name), None) => {
            return Err(CliError::Usage(format!("in which atespace is actor {name:?}? Name it with -a")));
        }
        (None, None) if !args.all_atespaces => {
            return Err(CliError::Usage("of which atespace? Name one with -a, or see all with -A".to_owned()));
        }
        _ => {}
    }
    if let (Some(name), Some(atespace)) = (&args.name, &args.atespace) {
        let actor = one(session, atespace, name).await?;
        if !args.watch {
            return session.show_actors(vec![actor]).await;
        }
    }
    if args.watch {
        return crate::watch::run(session, args.atespace, args.name).await;
    }
    let actors = all(session, args.atespace.unwrap_or_default()).await?;
    session.show_actors(actors).await
}

async fn one(session: &mut Session<'_>, atespace: &str, name: &str) -> Result<Actor, CliError> {
    let request = GetActorRequest { actor_ref: Some(session.actor(atespace, name)) };
    let answer = session.control.get_actor(request).await;
    Ok(session.answer(answer)?.actor.unwrap_or_default())
}

async fn all(session: &mut Session<'_>, atespace: String) -> Result<Vec<Actor>, CliError> {
    let mut actors = Vec::new();
    let mut request = ListActorsRequest { atespace, ..Default::default() };
    loop {
        let answer = session.control.list_actors(request.clone()).await;
        let page = session.answer(answer)?;
        actors.extend(page.actors);
        if page.next_page_token.is_empty() {
            return Ok(actors);
        }
        request.page_token = page.next_page_token;
    }
}

async fn workers(name: Option<String>, session: &mut Session<'_>) -> Result<(), CliError> {
    let answer = session.control.list_workers(ListWorkersRequest {}).await;
    let mut workers = session.answer(answer)?.workers;
    if let Some(name) = name {
        workers.retain(|worker| worker.worker_pod == name);
        if workers.is_empty() {
            let text = format!("Worker {name} not found");
            return Err(CliError::Refused { code: Code::NotFound, text, hint: None });
        }
    }
    session.show_workers(workers)
}

async fn atespaces(name: Option<String>, session: &mut Session<'_>) -> Result<(), CliError> {
    let atespaces = match name {
        Some(name) => {
            session.target = Some(Target::Atespace { name: name.clone() });
            let answer = session.control.get_atespace(GetAtespaceRequest { name }).await;
            session.answer(answer)?.atespace.into_iter().collect()
        }
        None => {
            let answer = session.control.list_atespaces(ListAtespacesRequest {}).await;
            session.answer(answer)?.atespaces
        }
    };
    session.show_atespaces(atespaces)
}

async fn objects(kind: Kind, args: GetArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let Some(name) = args.name else {
        let namespace = args.namespace.filter(|_| kind.is_namespaced());
        let request = ListObjectsRequest { kind: kind.as_str().to_owned(), namespace };
        let answer = session.substrate.list_objects(request).await;
        let objects = session.answer(answer)?.objects;
        return session.show_objects(kind, &objects, true);
    };
    let namespace = object_namespace(kind, args.namespace);
    session.target = Some(Target::Object { kind, namespace: namespace.clone(), name: name.clone() });
    let answer =
        session.substrate.get_object(GetObjectRequest { kind: kind.as_str().to_owned(), namespace, name }).await;
    let object = session.answer(answer)?;
    session.show_objects(kind, &[object], false)
}

/// Where a single object is looked for.
pub(crate) fn object_namespace(kind: Kind, namespace: Option<String>) -> String {
    if kind.is_namespaced() { namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()) } else { String::new() }
}
