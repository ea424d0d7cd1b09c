//! Which actor a request is for, and which of its ports.
//!
//! ```text
//!   ate-target-actor: <atespace>/<actor>                     wins
//!   [<port>.]<actor>.<atespace>.actors.resources.substrate.ate.dev[.][:…]
//!   [<port>.]<actor>.<atespace>.localhost[.][:…]             resolves to loopback without any DNS
//!   ate-target-port: <port>                                  wins over a label
//! ```

use ate_name::{ACTOR_ZONE, ActorKey, ActorName, AtespaceName, NameError};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::uri::Authority;

/// Headers that are words to the router; none of them reaches a workload.
pub(crate) const TARGET_PREFIX: &str = "ate-target-";
const TARGET_ACTOR: &str = "ate-target-actor";
const TARGET_PORT: &str = "ate-target-port";

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) key: ActorKey,
    pub(crate) port: Option<u16>,
    /// As the client wrote it, for the workload to see.
    pub(crate) host: HeaderValue,
}

/// Why a request names no actor. The first text is part of the public API.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidTarget {
    #[error("invalid host {host:?}: {reason}")]
    Host { host: String, reason: HostError },
    #[error("invalid {name} {value:?}: {expected}")]
    Header { name: &'static str, value: String, expected: &'static str },
    #[error("more than one {0} header")]
    Ambiguous(HeaderName),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HostError {
    #[error("the port after it is not a number up to 65535")]
    Port,
    #[error("must be <actor>.<atespace>.{ACTOR_ZONE}")]
    Shape,
    #[error("the label before the actor is not a port from 1 to 65535")]
    PortLabel,
    #[error("invalid actor_id: {0}")]
    Actor(NameError),
    #[error("invalid atespace: {0}")]
    Atespace(NameError),
}

impl Target {
    pub(crate) fn of(parts: &Parts) -> Result<Self, InvalidTarget> {
        let Words { host, actor, port } = Words::of(&parts.headers)?;
        // The request target names the host where it can (HTTP/2, absolute form), the header otherwise.
        let host = match parts.uri.authority() {
            Some(authority) => Some(without_userinfo(authority)),
            None => host.cloned(),
        };
        let port = match port {
            None => None,
            Some(value) => Some(value.to_str().ok().and_then(port_number).ok_or_else(|| InvalidTarget::Header {
                name: TARGET_PORT,
                value: lossy(value),
                expected: "expected a number from 1 to 65535",
            })?),
        };
        if let Some(value) = actor {
            let key = parse_actor(value).ok_or_else(|| InvalidTarget::Header {
                name: TARGET_ACTOR,
                value: lossy(value),
                expected: "expected <atespace>/<actor>",
            })?;
            let host = host.unwrap_or_else(|| stable_name(&key));
            return Ok(Self { key, port, host });
        }
        let host = host.unwrap_or_else(|| HeaderValue::from_static(""));
        let (key, label) =
            parse_host(host.as_bytes()).map_err(|reason| InvalidTarget::Host { host: lossy(&host), reason })?;
        Ok(Self { key, port: port.or(label), host })
    }
}

/// The headers that say where to. Of each there is one at most: of two, we could heed one and the workload the other.
#[derive(Default)]
struct Words<'a> {
    host: Option<&'a HeaderValue>,
    actor: Option<&'a HeaderValue>,
    port: Option<&'a HeaderValue>,
}

impl<'a> Words<'a> {
    fn of(headers: &'a HeaderMap) -> Result<Self, InvalidTarget> {
        let mut words = Self::default();
        for (name, value) in headers {
            let word = match name.as_str() {
                "host" => &mut words.host,
                TARGET_ACTOR => &mut words.actor,
                TARGET_PORT => &mut words.port,
                _ => continue,
            };
            if word.replace(value).is_some() {
                return Err(InvalidTarget::Ambiguous(name.clone()));
            }
        }
        Ok(words)
    }
}

fn without_userinfo(authority: &Authority) -> HeaderValue {
    let text = authority.as_str();
    let host = text.rsplit_once('@').map_or(text, |(_, host)| host);
    HeaderValue::from_str(host).expect("an authority is header text")
}

fn stable_name(key: &ActorKey) -> HeaderValue {
    let name = format!("{}.{}.{ACTOR_ZONE}", key.name, key.atespace);
    HeaderValue::try_from(name).expect("names are header text")
}

fn parse_actor(value: &HeaderValue) -> Option<ActorKey> {
    let (atespace, name) = value.to_str().ok()?.split_once('/')?;
    ActorKey::parse(atespace, name).ok()
}

fn lossy(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
}

fn port_number(text: &str) -> Option<u16> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|port| digits && *port != 0)
}

fn parse_host(host: &[u8]) -> Result<(ActorKey, Option<u16>), HostError> {
    // Only ASCII folds: a wider folding would let foreign letters spell an actor's name.
    let host = std::str::from_utf8(host).map_err(|_| HostError::Shape)?;
    let folded = host.bytes().any(|b| b.is_ascii_uppercase()).then(|| host.to_ascii_lowercase());
    let host = folded.as_deref().unwrap_or(host);
    let host = match host.rsplit_once(':') {
        None => host,
        Some((host, port)) if port.is_empty() || port_number(port).is_some() => host,
        Some(_) => return Err(HostError::Port),
    };
    let host = host.strip_suffix('.').unwrap_or(host);
    let rest = host.strip_suffix(ACTOR_ZONE).or_else(|| host.strip_suffix("localhost"));
    let rest = rest.and_then(|rest| rest.strip_suffix('.')).ok_or(HostError::Shape)?;

    let mut labels = rest.rsplit('.');
    let (atespace, actor, port) = (labels.next(), labels.next(), labels.next());
    let (Some(atespace), Some(actor), None) = (atespace, actor, labels.next()) else { return Err(HostError::Shape) };
    let port = match port {
        None => None,
        Some(label) if label.bytes().all(|b| b.is_ascii_digit()) => {
            Some(port_number(label).ok_or(HostError::PortLabel)?)
        }
        Some(_) => return Err(HostError::Shape),
    };
    let name = ActorName::parse(actor).map_err(HostError::Actor)?;
    let atespace = AtespaceName::parse(atespace).map_err(HostError::Atespace)?;
    Ok((ActorKey::new(atespace, name), port))
}

#[cfg(test)]
mod tests {
    use http::Request;
    use proptest::prelude::*;

    use super::*;

    fn parts(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn target(uri: &str, headers: &[(&str, &str)]) -> Result<(String, Option<u16>), String> {
        let target = Target::of(&parts(uri, headers)).map_err(|error| error.to_string())?;
        Ok((target.key.to_string(), target.port))
    }

    fn host(host: &str) -> Result<(String, Option<u16>), String> {
        target("/", &[("host", host)])
    }

    #[test]
    fn a_host_names_an_actor_and_perhaps_a_port() {
        let found = |port| Ok(("space/a1".to_string(), port));
        for text in [
            "a1.space.actors.resources.substrate.ate.dev",
            "a1.space.actors.resources.substrate.ate.dev.",
            "a1.space.actors.resources.substrate.ate.dev:8000",
            "a1.space.actors.resources.substrate.ate.dev.:80",
            "A1.Space.ACTORS.resources.Substrate.ate.dev",
            "a1.space.localhost",
            "a1.space.localhost:8000",
        ] {
            assert_eq!(host(text), found(None), "{text}");
        }
        assert_eq!(host("8080.a1.space.localhost:80"), found(Some(8080)));
        assert_eq!(host("8080.space.localhost"), Ok(("space/8080".into(), None)));
    }

    #[test]
    fn a_host_that_names_none_is_refused_with_the_reason() {
        for (text, reason) in [
            ("", "must be <actor>.<atespace>.actors.resources.substrate.ate.dev"),
            ("localhost", "must be <actor>.<atespace>.actors.resources.substrate.ate.dev"),
            ("a.localhost", "must be <actor>.<atespace>.actors.resources.substrate.ate.dev"),
            ("a.b.example.com", "must be <actor>.<atespace>.actors.resources.substrate.ate.dev"),
            ("a.bactors.resources.substrate.ate.dev", "must be <actor>.<atespace>.actors.resources.substrate.ate.dev"),
            ("x.a.b.localhost", "must be <actor>.<atespace>.actors.resources.substrate.ate.dev"),
            ("1.2.a.b.localhost", "must be <actor>.<atespace>.actors.resources.substrate.ate.dev"),
            ("[::1]:80", "must be <actor>.<atespace>.actors.resources.substrate.ate.dev"),
            ("a.b.localhost:http", "the port after it is not a number up to 65535"),
            ("0.a.b.localhost", "the label before the actor is not a port from 1 to 65535"),
            ("65536.a.b.localhost", "the label before the actor is not a port from 1 to 65535"),
            (
                "-a.b.localhost",
                "invalid actor_id: must start and end with a lower case alphanumeric character, and consist only of lower case alphanumeric characters or '-'",
            ),
            (
                "a.b_c.localhost",
                "invalid atespace: must start and end with a lower case alphanumeric character, and consist only of lower case alphanumeric characters or '-'",
            ),
        ] {
            assert_eq!(host(text), Err(format!("invalid host {text:?}: {reason}")));
        }
        let long = "x".repeat(64);
        let refusal = host(&format!("{long}.b.localhost")).unwrap_err();
        assert!(refusal.ends_with("invalid actor_id: must be no more than 63 characters"));
    }

    #[test]
    fn the_target_headers_win() {
        let zone = ("host", "9.a.b.localhost");
        assert_eq!(target("/", &[zone, ("ate-target-actor", "s/x")]), Ok(("s/x".into(), None)));
        assert_eq!(target("/", &[zone, ("ate-target-port", "81")]), Ok(("b/a".into(), Some(81))));
        let anywhere = Target::of(&parts("/", &[("host", "example.com"), ("ate-target-actor", "s/x")])).unwrap();
        assert_eq!(anywhere.host, "example.com");
        let nameless = Target::of(&parts("/", &[("ate-target-actor", "s/x")])).unwrap();
        assert_eq!(nameless.host, "x.s.actors.resources.substrate.ate.dev");

        assert!(target("/", &[zone, ("ate-target-actor", "x")]).unwrap_err().contains("expected <atespace>/<actor>"));
        assert!(target("/", &[zone, ("ate-target-port", "+81")]).unwrap_err().contains("expected a number"));
    }

    #[test]
    fn an_authority_wins_over_a_host_header() {
        let (uri, headers) = ("http://user@a.b.localhost:80/x", [("host", "other.b.localhost")]);
        let target = Target::of(&parts(uri, &headers)).unwrap();
        assert_eq!(
            (target.key.to_string().as_str(), target.host),
            ("b/a", HeaderValue::from_static("a.b.localhost:80"))
        );
    }

    #[test]
    fn two_hosts_are_none() {
        let twice = [("host", "a.b.localhost"), ("host", "a.b.localhost")];
        assert_eq!(target("/", &twice), Err("more than one host header".into()));
    }

    proptest! {
        #[test]
        fn a_host_is_an_actor_or_an_error_never_a_panic(text in "[ -~]{0,80}") {
            let _ = parse_host(text.as_bytes());
        }

        #[test]
        fn every_valid_name_is_found(actor in "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", space in "[a-z]([a-z0-9-]{0,20}[a-z0-9])?", port in 1u16..) {
            let (key, found) = parse_host(format!("{port}.{actor}.{space}.{ACTOR_ZONE}").as_bytes()).unwrap();
            prop_assert_eq!((key.to_string(), found), (format!("{space}/{actor}"), Some(port)));
        }
    }
}
