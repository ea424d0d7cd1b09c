use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use percent_encoding::percent_decode_str;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};

/// How the connection is protected: libpq's `sslmode`, as far as it is supported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Protection {
    /// `disable`: none.
    None,
    /// `prefer`, the default as in libpq: encrypted if the server offers it. Holds off nobody who sits in between.
    Offered,
    /// `require`: encrypted, but with whoever answers.
    Encrypted,
    /// `verify-full`: encrypted, with a server whose certificate one of these roots vouches for, by its name.
    Verified(Roots),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Roots {
    /// Those of the machine: no `sslrootcert`, or `sslrootcert=system`.
    System,
    File(PathBuf),
}

/// Where the database is and who one is there. Shown, it never holds the password.
///
/// A URL as libpq takes it: `postgres://user:password@host:port/database?sslmode=verify-full&sslrootcert=/etc/ca.pem`,
/// with several hosts divided by commas, of which the one that takes writes is used.
#[derive(Clone, PartialEq, Eq)]
pub struct Address {
    pub(crate) config: Arc<Config>,
    pub(crate) protection: Protection,
}

/// Why a text is no address. The text itself may hold a password, so nothing of it is repeated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("a database address begins with postgres:// or postgresql://")]
    Scheme,
    #[error("the database address has two '@'; one that belongs to the password is written %40")]
    SecondAt,
    #[error("the database address cannot be read; it looks like postgres://user:password@host:5432/database")]
    Malformed,
    #[error("the database address names no host")]
    NoHost,
    #[error("the database address has an unknown parameter; known are {}", KNOWN.join(", "))]
    Parameter,
    #[error("sslmode={mode} is not supported; use {instead}")]
    Mode { mode: &'static str, instead: &'static str },
    #[error("sslmode is none of disable, prefer, require and verify-full")]
    UnknownMode,
    #[error("sslrootcert is only looked at with sslmode=verify-full; say that, or leave sslrootcert out")]
    UnusedRoots,
    #[error("a store is written to; target_session_attrs cannot be read-only")]
    ReadOnly,
}

/// Parameters that are passed on or understood here. Client certificates are not supported.
const KNOWN: [&str; 13] = [
    "user",
    "password",
    "dbname",
    "host",
    "hostaddr",
    "port",
    "connect_timeout",
    "application_name",
    "channel_binding",
    "load_balance_hosts",
    "target_session_attrs",
    "sslmode",
    "sslrootcert",
];

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let (scheme, rest) = text.split_once("://").ok_or(AddressError::Scheme)?;
        if !matches!(scheme, "postgres" | "postgresql") {
            return Err(AddressError::Scheme);
        }
        let place = rest.split_once('@').map_or(rest, |(_, place)| place);
        // Otherwise half a password would be taken for the host, and shown.
        if place.contains('@') {
            return Err(AddressError::SecondAt);
        }
        let query = place.split_once('?').map_or("", |(_, query)| query);
        let (mut mode, mut roots, mut others) = (None, None, Vec::new());
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').ok_or(AddressError::Malformed)?;
            match name {
                "sslmode" => mode = Some(value),
                "sslrootcert" => {
                    roots = Some(percent_decode_str(value).decode_utf8().map_err(|_| AddressError::Malformed)?);
                }
                name if KNOWN.contains(&name) => others.push(pair),
                _ => return Err(AddressError::Parameter),
            }
        }
        let bare = &text[..text.len() - query.len()];
        let mut config: Config = (bare.to_owned() + &others.join("&")).parse().map_err(|_| AddressError::Malformed)?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(AddressError::NoHost);
        }
        if config.get_target_session_attrs() == TargetSessionAttrs::ReadOnly {
            return Err(AddressError::ReadOnly);
        }
        let protection = Protection::parse(mode, roots.as_deref())?;
        config.target_session_attrs(TargetSessionAttrs::ReadWrite).ssl_mode(match protection {
            Protection::None => SslMode::Disable,
            Protection::Offered => SslMode::Prefer,
            Protection::Encrypted | Protection::Verified(_) => SslMode::Require,
        });
        Ok(Self { config: Arc::new(config), protection })
    }
}

impl Protection {
    fn parse(mode: Option<&str>, roots: Option<&str>) -> Result<Self, AddressError> {
        let refuse = |mode, instead| Err(AddressError::Mode { mode, instead });
        let protection = match mode {
            Some("verify-full") => {
                return Ok(Self::Verified(match roots {
                    None | Some("system") => Roots::System,
                    Some(file) => Roots::File(file.into()),
                }));
            }
            Some("disable") => Self::None,
            None | Some("prefer") => Self::Offered,
            Some("require") => Self::Encrypted,
            Some("allow") => return refuse("allow", "prefer, which protects more"),
            Some("verify-ca") => return refuse("verify-ca", "verify-full, which checks the server's name too"),
            Some(_) => return Err(AddressError::UnknownMode),
        };
        // libpq would silently turn `require` into `verify-ca`, and ignore the file for the others.
        if roots.is_some() { Err(AddressError::UnusedRoots) } else { Ok(protection) }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "postgres://")?;
        if let Some(user) = self.config.get_user() {
            write!(f, "{user}@")?;
        }
        let ports = self.config.get_ports();
        let addresses = self.config.get_hostaddrs().iter().map(ToString::to_string);
        let hosts = self.config.get_hosts().iter().map(|host| match host {
            Host::Tcp(name) => name.clone(),
            Host::Unix(path) => path.display().to_string(),
        });
        let named: Vec<_> = if self.config.get_hosts().is_empty() { addresses.collect() } else { hosts.collect() };
        for (at, host) in named.iter().enumerate() {
            let port = ports.get(at).or(ports.first()).copied().unwrap_or(5432);
            write!(f, "{}{host}:{port}", if at == 0 { "" } else { "," })?;
        }
        match self.config.get_dbname() {
            Some(database) => write!(f, "/{database}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Address, AddressError> {
        text.parse()
    }

    #[test]
    fn an_address_shows_everything_but_the_password() {
        let address = parse("postgres://me:geheim@one:5433,two/substrate?sslmode=disable").expect("well formed");
        assert_eq!(address.to_string(), "postgres://me@one:5433,two:5432/substrate");
        assert_eq!(format!("{address:?}"), address.to_string());
        assert_eq!(address.config.get_password(), Some(&b"geheim"[..]));
        assert_eq!(address.config.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
        let socket = parse("postgresql:///substrate?host=/run/postgresql&user=me").expect("well formed");
        assert_eq!(socket.to_string(), "postgres://me@/run/postgresql:5432/substrate");
    }

    #[test]
    fn the_modes_of_libpq_are_understood_or_refused() {
        let mode = |query: &str| parse(&format!("postgres://h/d{query}")).map(|address| address.protection);
        assert_eq!(mode(""), Ok(Protection::Offered));
        assert_eq!(mode("?sslmode=prefer"), Ok(Protection::Offered));
        assert_eq!(mode("?sslmode=disable"), Ok(Protection::None));
        assert_eq!(mode("?sslmode=require"), Ok(Protection::Encrypted));
        assert_eq!(mode("?sslmode=verify-full"), Ok(Protection::Verified(Roots::System)));
        assert_eq!(mode("?sslrootcert=system&sslmode=verify-full"), Ok(Protection::Verified(Roots::System)));
        let file = Ok(Protection::Verified(Roots::File("/a b".into())));
        assert_eq!(mode("?sslmode=verify-full&sslrootcert=%2Fa%20b"), file);
        for (query, refused) in [("allow", "prefer"), ("verify-ca", "verify-full")] {
            let error = mode(&format!("?sslmode={query}")).expect_err("not supported").to_string();
            assert!(error.contains(refused), "{error}");
        }
        assert_eq!(mode("?sslmode=on"), Err(AddressError::UnknownMode));
        assert_eq!(mode("?sslmode=require&sslrootcert=/ca"), Err(AddressError::UnusedRoots));
        assert_eq!(mode("?sslcert=/me"), Err(AddressError::Parameter));
    }

    #[test]
    fn what_is_no_address_is_refused() {
        assert_eq!(parse("host=a user=b"), Err(AddressError::Scheme));
        assert_eq!(parse("mysql://a"), Err(AddressError::Scheme));
        assert_eq!(parse("postgres://u:p@ss@h/d"), Err(AddressError::SecondAt));
        assert_eq!(parse("postgres:///d"), Err(AddressError::NoHost));
        assert_eq!(parse("postgres://h:port/d"), Err(AddressError::Malformed));
        assert_eq!(parse("postgres://h/d?target_session_attrs=read-only"), Err(AddressError::ReadOnly));
    }

    proptest! {
        #[test]
        fn no_part_of_a_password_is_shown(password in "[A-Z@:/?%&=#]{1,12}", rest in "[a-z:/?%&=#]{0,12}") {
            let parsed = parse(&format!("postgres://u:{password}@{rest}"));
            let shown = parsed.map_or_else(|error| error.to_string(), |address| address.to_string());
            prop_assert!(!shown.chars().any(|c| c.is_ascii_uppercase()), "{}", shown);
        }
    }
}
