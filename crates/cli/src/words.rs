//! Words of the command line: what there is to act on, and how to show it.

use ate_object::Kind;
use clap::builder::{PossibleValue, TypedValueParser};
use clap::error::ErrorKind;

use crate::errors::CliError;

/// What `get` and `delete` act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Noun {
    Actors,
    Workers,
    Atespaces,
    Objects(Kind),
}

impl Noun {
    const SHOWN: &[&str] = &["actors", "workers", "atespaces", "templates", "pools", "configs"];

    pub(crate) fn parser() -> Choice<Self> {
        Choice { values: Self::SHOWN, parse: Self::parse }
    }

    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "actor" | "actors" => Ok(Self::Actors),
            "worker" | "workers" => Ok(Self::Workers),
            "atespace" | "atespaces" => Ok(Self::Atespaces),
            "template" | "templates" => Ok(Self::Objects(Kind::ActorTemplate)),
            "pool" | "pools" => Ok(Self::Objects(Kind::WorkerPool)),
            "config" | "configs" => Ok(Self::Objects(Kind::SandboxConfig)),
            other => other.parse().map(Self::Objects).map_err(|_| {
                let near = nearest(other, Self::SHOWN.iter().copied());
                let remedy = near.map_or_else(
                    || format!("use one of {}", Self::SHOWN.join(", ")),
                    |near| format!("did you mean \"{near}\"?"),
                );
                format!("unknown kind {other:?}: {remedy}")
            }),
        }
    }
}

/// `actortemplate.ate.dev/counter`, as `-o name` shows objects.
pub(crate) fn object_name(kind: Kind, name: &str) -> String {
    format!("{}.ate.dev/{name}", kind.as_str().to_lowercase())
}

/// How a result is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Table,
    Wide,
    Json,
    Yaml,
    Name,
}

impl Format {
    pub(crate) fn parser() -> Choice<Self> {
        Choice { values: &["table", "wide", "json", "yaml", "name"], parse: Self::parse }
    }

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "table" => Ok(Self::Table),
            "wide" => Ok(Self::Wide),
            "json" => Ok(Self::Json),
            "yaml" => Ok(Self::Yaml),
            "name" => Ok(Self::Name),
            other => Err(format!("unsupported format {other:?}: use table, wide, json, yaml or name")),
        }
    }
}

/// An argument with a few values that completion offers, more that are understood, and an error of its own.
#[derive(Clone, Debug)]
pub(crate) struct Choice<T> {
    values: &'static [&'static str],
    parse: fn(&str) -> Result<T, String>,
}

impl<T: Clone + Send + Sync + 'static> TypedValueParser for Choice<T> {
    type Value = T;

    fn parse_ref(
        &self,
        command: &clap::Command,
        _: Option<&clap::Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<T, clap::Error> {
        (self.parse)(&value.to_string_lossy())
            .map_err(|message| command.clone().error(ErrorKind::InvalidValue, message))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.values.iter().map(PossibleValue::new)))
    }
}

/// What is meant by `[actor] NAME`, with the word `actor` or without, apart or as `actor/NAME`.
pub(crate) fn actor_name(words: &[String]) -> Result<&str, CliError> {
    let refused = |text: String| Err(CliError::Usage(text));
    let (word, name) = match words {
        [only] => match only.split_once('/') {
            Some((word, name)) => (word, name),
            None if matches!(Noun::parse(only), Ok(Noun::Actors)) => {
                return refused(format!("which actor? Write its name after {only:?}"));
            }
            None => return Ok(only),
        },
        [word, name] => (word.as_str(), name.as_str()),
        _ => return refused("name one actor".to_owned()),
    };
    match Noun::parse(word) {
        Ok(Noun::Actors) => Ok(name),
        _ => refused(format!("only actors can do this, and {word:?} is not \"actor\": name one actor")),
    }
}

/// The candidate that somebody who wrote `word` may have meant.
pub(crate) fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let limit = 1 + word.chars().count() / 4;
    let scored = candidates.map(|candidate| (strsim::osa_distance(word, candidate), candidate));
    scored.filter(|(distance, _)| *distance <= limit).min().map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_known_by_its_short_and_its_full_names() {
        for text in ["template", "templates", "actortemplate", "ActorTemplates", "actortemplates.ate.dev"] {
            assert_eq!(Noun::parse(text), Ok(Noun::Objects(Kind::ActorTemplate)), "{text}");
        }
        for text in Noun::SHOWN {
            assert!(Noun::parse(text).is_ok(), "{text}");
        }
        assert_eq!(Noun::parse("actros").unwrap_err(), "unknown kind \"actros\": did you mean \"actors\"?");
        assert!(Noun::parse("pods").unwrap_err().ends_with("did you mean \"pools\"?"));
        assert!(Noun::parse("deployments").unwrap_err().contains("use one of actors, workers"));
    }

    #[test]
    fn an_actor_may_be_named_with_or_without_the_word() {
        let name = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            actor_name(&words).map(str::to_owned).map_err(|error| error.to_string())
        };
        for words in [&["a1"][..], &["actor", "a1"], &["actors", "a1"], &["actor/a1"]] {
            assert_eq!(name(words), Ok("a1".to_owned()), "{words:?}");
        }
        assert_eq!(name(&["actor", "actor"]), Ok("actor".to_owned()));
        for words in [&["actor"][..], &["worker", "a1"], &["a1", "a2"], &["worker/a1"]] {
            assert!(name(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn a_near_name_is_offered_and_a_far_one_is_not() {
        assert_eq!(nearest("conuter-1", ["counter-1", "other"].into_iter()), Some("counter-1"));
        assert_eq!(nearest("a", ["counter"].into_iter()), None);
    }
}
