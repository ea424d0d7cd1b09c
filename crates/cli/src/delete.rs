use std::path::PathBuf;

use ate_object::{DEFAULT_NAMESPACE, Kind, Object};
use ate_proto::ate::v1::DeleteObjectRequest;
use ate_proto::ateapi::{DeleteActorRequest, DeleteAtespaceRequest};

use crate::errors::CliError;
use crate::force;
use crate::get::object_namespace;
use crate::manifests;
use crate::session::{Session, Target};
use crate::words::Noun;

#[derive(Debug, clap::Args)]
#[command(override_usage = "ate delete <NAME> -a <ATESPACE>
       ate delete actor <NAME>... -a <ATESPACE> [--force [--reason <TEXT>]]
       ate delete <KIND> <NAME>... [-n <NAMESPACE>]
       ate delete -f <FILE>...")]
#[command(after_help = "Examples:
  ate delete my-actor -a demo
  ate delete actor a1 a2 a3 -a demo
  ate delete my-actor -a demo --force --reason \"its node burnt down\"
  ate delete atespace demo
  ate delete template counter -n default
  ate delete -f demos/counter/")]
pub struct DeleteArgs {
    /// What to delete; an actor if only a name is given
    #[arg(value_name = "[KIND] NAME", num_args = 1.., required_unless_present = "file")]
    words: Vec<String>,
    /// The atespace that the actor lives in
    #[arg(short, long)]
    atespace: Option<String>,
    /// The namespace of the template or pool [default: default]
    #[arg(short, long)]
    namespace: Option<String>,
    /// Delete what this file or directory declares; - reads standard input; may be repeated
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["words", "atespace"])]
    file: Vec<PathBuf>,
    /// Delete the actor whatever it is doing, also if its node is silent; written down for `ate audit`
    #[arg(long, conflicts_with = "file")]
    force: bool,
    /// Why, for those who read the audit later
    #[arg(long, value_name = "TEXT", requires = "force")]
    reason: Option<String>,
}

pub(crate) async fn run(args: DeleteArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    if !args.file.is_empty() {
        return declared(args, session).await;
    }
    let (noun, names) = named(&args.words)?;
    if args.force && noun != Noun::Actors {
        return Err(CliError::Usage("only actors can be deleted by force".to_owned()));
    }
    let mut kept = Kept::default();
    for name in names {
        let done = one(&args, noun, name, session).await;
        if kept.ends_it(done, session) {
            break;
        }
    }
    kept.conclude(session)
}

async fn one(args: &DeleteArgs, noun: Noun, name: String, session: &mut Session<'_>) -> Result<(), CliError> {
    let said = match noun {
        Noun::Actors => {
            let atespace = args
                .atespace
                .as_deref()
                .ok_or_else(|| CliError::Usage(format!("in which atespace is actor {name:?}? Name it with -a")))?;
            if args.force {
                force::delete(atespace, &name, args.reason.clone().unwrap_or_default(), session).await?;
            } else {
                let actor_ref = Some(session.actor(atespace, &name));
                let answer = session.control.delete_actor(DeleteActorRequest { actor_ref }).await;
                session.answer(answer)?;
            }
            format!("actor {name:?} deleted\n")
        }
        Noun::Atespaces => {
            session.target = Some(Target::Atespace { name: name.clone() });
            let answer = session.control.delete_atespace(DeleteAtespaceRequest { name: name.clone() }).await;
            session.answer(answer)?;
            format!("atespace {name:?} deleted\n")
        }
        Noun::Objects(kind) => {
            let namespace = object_namespace(kind, args.namespace.clone());
            return object(session, kind, namespace, name).await;
        }
        Noun::Workers => {
            return Err(CliError::Usage("workers come and go with their pool: change its replicas".to_owned()));
        }
    };
    session.terminal.write(said)
}

/// `NAME`, `KIND/NAME` or `KIND NAME...`.
fn named(words: &[String]) -> Result<(Noun, Vec<String>), CliError> {
    let (kind, names) = match words {
        [only] => match only.split_once('/') {
            Some((kind, name)) => (kind, vec![name.to_owned()]),
            None if Noun::parse(only).is_ok() => {
                return Err(CliError::Usage(format!("which one? Write a name after {only:?}")));
            }
            None => ("actor", vec![only.clone()]),
        },
        [kind, names @ ..] => (kind.as_str(), names.to_vec()),
        [] => return Err(CliError::Usage("name what to delete".to_owned())),
    };
    Ok((Noun::parse(kind).map_err(CliError::Usage)?, names))
}

/// What went wrong with some of those that were to be deleted.
#[derive(Default)]
struct Kept {
    errors: Vec<CliError>,
    is_unread: Option<CliError>,
}

impl Kept {
    /// What the server will not delete, and that nobody reads what is said, does not keep the rest. Anything else does.
    fn ends_it(&mut self, done: Result<(), CliError>, session: &mut Session<'_>) -> bool {
        match done {
            Ok(()) => {
                // Advice is about the last one, and it needs none.
                session.target = None;
                false
            }
            Err(error @ CliError::Output(_)) => {
                self.is_unread = Some(error);
                false
            }
            Err(error) => {
                let ends_it = !matches!(error, CliError::Refused { .. });
                self.errors.push(error);
                ends_it
            }
        }
    }

    /// Tells of all but the last, which is for whoever is told of errors.
    fn conclude(mut self, session: &mut Session<'_>) -> Result<(), CliError> {
        let Some(last) = self.errors.pop() else { return self.is_unread.map_or(Ok(()), Err) };
        for error in self.errors {
            session.terminal.note(&error.explained(session.terminal.colour.1));
        }
        Err(last)
    }
}

/// Everything that files declare, users before what they use. What cannot be deleted does not keep the rest.
async fn declared(args: DeleteArgs, session: &mut Session<'_>) -> Result<(), CliError> {
    let namespace = args.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
    let mut objects = manifests::read(&args.file, namespace, session.terminal)?;
    objects.sort_by_key(Object::kind);
    let mut kept = Kept::default();
    for declared in objects {
        let (kind, key) = (declared.kind(), declared.key());
        let done = object(session, kind, key.namespace, key.name).await;
        if kept.ends_it(done, session) {
            break;
        }
    }
    kept.conclude(session)
}

async fn object(session: &mut Session<'_>, kind: Kind, namespace: String, name: String) -> Result<(), CliError> {
    session.target = Some(Target::Object { kind, namespace: namespace.clone(), name: name.clone() });
    let request = DeleteObjectRequest { kind: kind.as_str().to_owned(), namespace, name: name.clone() };
    let answer = session.substrate.delete_object(request).await;
    session.answer(answer)?;
    session.terminal.write(format!("{}.ate.dev {name:?} deleted\n", kind.as_str().to_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lone_name_is_an_actor_and_several_need_their_kind() {
        let named = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            named(&words).ok()
        };
        let these = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(named(&["a1"]), Some((Noun::Actors, these(&["a1"]))));
        assert_eq!(named(&["actor", "a1", "a2"]), Some((Noun::Actors, these(&["a1", "a2"]))));
        assert_eq!(named(&["atespace", "demo"]), Some((Noun::Atespaces, these(&["demo"]))));
        let template = Some((Noun::Objects(Kind::ActorTemplate), these(&["c"])));
        assert_eq!(named(&["template", "c"]), template);
        assert_eq!(named(&["actortemplate.ate.dev/c"]), template);
        for words in [&["atespace"][..], &["pods", "x"], &[]] {
            assert_eq!(named(words), None, "{words:?}");
        }
    }
}
