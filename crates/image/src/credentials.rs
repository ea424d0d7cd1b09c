use std::collections::BTreeMap;
use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

/// What a pull secret holds for one registry.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Credentials {
    pub username: String,
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("username", &self.username).field("password", &"<redacted>").finish()
    }
}

/// A pull secret that cannot be read. Says nothing of its content.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DockerConfigError {
    #[error("the pull secret is no docker config; its .dockerconfigjson must be an object with \"auths\"")]
    Malformed,
    #[error(
        "the pull secret's entry {entry:?} has neither a username and password nor an \"auth\" of base64(user:password)"
    )]
    Entry { entry: String },
}

#[derive(Deserialize)]
struct DockerConfig {
    auths: BTreeMap<String, Auth>,
}

#[derive(Deserialize)]
struct Auth {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
}

impl Credentials {
    /// The credentials for `registry_host` (with its port, if it has one) in the content of a secret of type
    /// `kubernetes.io/dockerconfigjson`. An exact host goes before a pattern such as `*.example.com`, whose `*` stands
    /// for one label, as in Kubernetes.
    pub fn from_docker_config(json: &[u8], registry_host: &str) -> Result<Option<Self>, DockerConfigError> {
        // The parser's own error may quote the text, and the text is secret.
        let config: DockerConfig = serde_json::from_slice(json).map_err(|_| DockerConfigError::Malformed)?;
        let wanted = canonical_host(registry_host);
        let exact = config.auths.iter().find(|(entry, _)| canonical_host(entry) == wanted);
        let matching = || config.auths.iter().find(|(entry, _)| host_matches(canonical_host(entry), wanted));
        match exact.or_else(matching) {
            Some((entry, auth)) => {
                auth.credentials().map(Some).ok_or_else(|| DockerConfigError::Entry { entry: entry.clone() })
            }
            None => Ok(None),
        }
    }
}

impl Auth {
    fn credentials(&self) -> Option<Credentials> {
        if let (Some(username), Some(password)) = (&self.username, &self.password) {
            return Some(Credentials { username: username.clone(), password: password.clone() });
        }
        let text = String::from_utf8(STANDARD.decode(self.auth.as_ref()?).ok()?).ok()?;
        let (username, password) = text.split_once(':')?;
        Some(Credentials { username: username.to_owned(), password: password.to_owned() })
    }
}

/// Docker writes `https://index.docker.io/v1/` where a person writes `docker.io`.
fn canonical_host(entry: &str) -> &str {
    let entry = entry.strip_prefix("https://").or_else(|| entry.strip_prefix("http://")).unwrap_or(entry);
    let entry = entry.trim_end_matches('/');
    let host = entry.strip_suffix("/v1").or_else(|| entry.strip_suffix("/v2")).unwrap_or(entry);
    match host {
        "index.docker.io" | "registry-1.docker.io" => "docker.io",
        host => host,
    }
}

fn host_matches(pattern: &str, host: &str) -> bool {
    let (pattern, host) = (pattern.split('.'), host.split('.'));
    pattern.clone().count() == host.clone().count()
        && pattern.zip(host).all(|(pattern, label)| pattern == "*" || pattern == label)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(json: &str, host: &str) -> Result<Option<(String, String)>, DockerConfigError> {
        Credentials::from_docker_config(json.as_bytes(), host).map(|c| c.map(|c| (c.username, c.password)))
    }

    #[test]
    fn each_registry_gets_its_own_entry() {
        let json = r#"{"auths": {
            "https://index.docker.io/v1/": {"auth": "aHViOnA6dw==", "email": "x"},
            "registry.example.com:5000": {"username": "u", "password": "exact"},
            "*.example.com:5000": {"username": "u", "password": "pattern"},
            "bad.example.org": {"auth": "!!"}
        }}"#;
        let some = |user: &str, password: &str| Ok(Some((user.to_owned(), password.to_owned())));
        assert_eq!(find(json, "docker.io"), some("hub", "p:w"));
        assert_eq!(find(json, "registry.example.com:5000"), some("u", "exact"));
        assert_eq!(find(json, "other.example.com:5000"), some("u", "pattern"));
        for absent in ["registry.example.com", "a.b.example.com:5000", "example.com:5000", "evil.org"] {
            assert_eq!(find(json, absent), Ok(None), "{absent}");
        }
        assert_eq!(find(json, "bad.example.org"), Err(DockerConfigError::Entry { entry: "bad.example.org".into() }));
    }

    #[test]
    fn neither_debug_nor_an_error_shows_a_secret() {
        let credentials = Credentials { username: "u".into(), password: "hunter2".into() };
        assert!(!format!("{credentials:?}").contains("hunter2"));
        let error = find(r#"{"auths": {"r": {"password": 5, "auth": "hunter2"}}"#, "r").unwrap_err();
        assert!(!format!("{error:?} {error}").contains("hunter2"));
    }
}
