//! Where a store is: a directory of this machine, or a schema of a PostgreSQL database. Every verb that has one says it alike.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use ate_control::Replicas;
use ate_store::{Contents, Fault, FeedLimits, IfOccupied, LostTail, Replacement, Revision, Store};
use ate_store_embedded::{EmbeddedStore, OpenError};
use ate_store_postgres::{PostgresStore, Schema, Settings};

/// How often replicas say that they live, and when one that does not is taken for dead.
pub(crate) const REPLICAS: Replicas = Replicas::Several { beat: Duration::from_secs(1), lease: Duration::from_secs(5) };

/// In the data directory: what a process has seen of a database.
const MARK: &str = "store-mark";

#[derive(Debug, clap::Args)]
pub(crate) struct StoreArgs {
    /// Where everything is kept: a directory, which is for one process, or postgres://user@host/database
    /// [default: `store` in the data directory]. Arguments can be read by everybody on a machine: put an address with a
    /// password in it into the environment
    #[arg(long, env = "ATE_STORE", value_name = "WHERE", hide_env_values = true)]
    store: Option<String>,
    /// The schema of a store in PostgreSQL; the same for every replica
    #[arg(long, env = "ATE_STORE_SCHEMA", value_name = "NAME", default_value_t)]
    schema: Schema,
}

impl StoreArgs {
    pub(crate) fn place(&self, data: &Path) -> anyhow::Result<Place> {
        match self.store.as_deref() {
            None => Ok(Place::Directory(data.join("store"))),
            Some(text) if has_scheme(text) => {
                let address = text
                    .parse()
                    .context("--store is a directory or a database (a directory with a colon in its name: ./NAME)")?;
                let (schema, mark) = (self.schema.clone(), Some(data.join(MARK)));
                Ok(Place::Database(Box::new(Settings { schema, mark, ..Settings::new(address) })))
            }
            Some(path) => Ok(Place::Directory(path.into())),
        }
    }
}

/// Whether it begins as an address does. One that is misspelt must not become a directory of that name, new and empty.
fn has_scheme(text: &str) -> bool {
    text.split_once(':').is_some_and(|(scheme, _)| !scheme.is_empty() && !scheme.contains('/'))
}

#[derive(Clone, Debug)]
pub(crate) enum Place {
    Directory(PathBuf),
    Database(Box<Settings>),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::Database(settings) => write!(f, "{}, schema {}", settings.address, settings.schema),
        }
    }
}

impl Place {
    pub(crate) async fn open(self) -> anyhow::Result<Opened> {
        match &self {
            Self::Directory(path) => {
                let directory = path.clone();
                let opening =
                    tokio::task::spawn_blocking(move || EmbeddedStore::open(&directory, FeedLimits::default()));
                let store = opening.await?.map_err(|error| open_error(path, error))?;
                Ok(Opened { place: self, store: Either::Embedded(Arc::new(store)) })
            }
            Self::Database(settings) => {
                let store = PostgresStore::connect(Settings::clone(settings)).await?;
                Ok(Opened { place: self, store: Either::Postgres(Arc::new(store)) })
            }
        }
    }

    pub(crate) async fn contents(&self, tail: LostTail) -> anyhow::Result<Contents> {
        match self {
            Self::Directory(path) => {
                ate_store_embedded::contents(path, tail).await.map_err(|error| open_error(path, error))
            }
            Self::Database(settings) => Ok(ate_store_postgres::contents(settings, tail).await?),
        }
    }

    /// Tells where what was there before is now.
    pub(crate) async fn load(
        &self,
        occupied: IfOccupied,
        replacement: impl FnOnce(Revision) -> Replacement + Send + 'static,
    ) -> anyhow::Result<Option<PathBuf>> {
        match self {
            Self::Directory(path) => {
                use ate_store_embedded::LoadError;
                match ate_store_embedded::load(path, occupied, replacement).await {
                    Ok(loaded) => Ok(loaded.moved_aside),
                    Err(LoadError::Open(error)) => Err(open_error(path, error)),
                    Err(error) => Err(error.into()),
                }
            }
            Self::Database(settings) => {
                ate_store_postgres::load(settings, occupied, replacement).await?;
                Ok(None)
            }
        }
    }

    /// What went wrong while it was read.
    pub(crate) fn read_error(&self, fault: Fault) -> anyhow::Error {
        match (self, fault) {
            (Self::Directory(path), fault @ Fault::Corrupt { .. }) => {
                open_error(path, OpenError::Fault { directory: path.clone(), source: fault })
            }
            (place, fault) => anyhow!("{place}: {fault}"),
        }
    }

    /// Why the process that has it open cannot go on, and what to do. Only what is known to be wrong is told as such: a store
    /// that stopped without a fault has panicked.
    fn stopped_error(&self, fault: Option<Fault>) -> anyhow::Error {
        match (self, fault) {
            (Self::Directory(path), fault) => {
                let reason =
                    fault.map_or_else(|| "its engine gave up: see the log".to_owned(), |fault| fault.to_string());
                anyhow!(
                    "the store in {0} has stopped: {reason}\n  start again: it goes on from what is on the disk, and refuses to if \
                     that is less than was acknowledged\n  should it stop again: ate store check --store {0}",
                    path.display()
                )
            }
            (Self::Database(settings), Some(fault)) => anyhow!(
                "{self}: {fault}\n  to see what is there: ate store check --store {} --schema {}",
                settings.address,
                settings.schema
            ),
            (Self::Database(_), None) => {
                anyhow!("{self}: the writer of this replica has stopped: see the log\n  start it again")
            }
        }
    }
}

/// What a person can do about it, where the adapter cannot know.
fn open_error(path: &Path, error: OpenError) -> anyhow::Error {
    match error {
        OpenError::InUse { holder, .. } => anyhow!(
            "the store in {} is in use by process {holder}\n  stop that first (`ate dev` suspends its actors when it is told to end), and try again",
            path.display()
        ),
        OpenError::Missing { .. } => anyhow!(
            "there is no store in {}\n  name one with --store, or the directory that `ate dev` was given with --data-dir",
            path.display()
        ),
        OpenError::Another { .. } => anyhow!(
            "{error}\n  bring back the newer one; or go on from this one, every actor from its newest snapshot: \
             ate store backup left.backup --accept-loss --store {0}, then ate store restore left.backup --replace --store {0}",
            path.display()
        ),
        OpenError::Gone { ref mark, .. } => anyhow!(
            "{error}\n  bring it back, or restore a backup: ate store restore <FILE> --store {}\n  to begin with nothing, in a data \
             directory that holds nothing else either: remove {}",
            path.display(),
            mark.display()
        ),
        OpenError::Fault { source: Fault::Corrupt { reason }, .. } => anyhow!(
            "the store in {} is damaged: {reason}\n  restore a backup: ate store restore <FILE> --store {} --replace",
            path.display(),
            path.display()
        ),
        other => other.into(),
    }
}

/// A store that this process serves from.
pub(crate) struct Opened {
    place: Place,
    store: Either,
}

enum Either {
    Embedded(Arc<EmbeddedStore>),
    Postgres(Arc<PostgresStore>),
}

impl Opened {
    pub(crate) fn store(&self) -> Arc<dyn Store> {
        match &self.store {
            Either::Embedded(store) => store.clone(),
            Either::Postgres(store) => store.clone(),
        }
    }

    pub(crate) fn replicas(&self) -> Replicas {
        match self.store {
            Either::Embedded(_) => Replicas::Alone,
            Either::Postgres(_) => REPLICAS,
        }
    }

    /// Resolves once nothing can be committed any more, with why and what to do.
    pub(crate) async fn stopped(&self) -> anyhow::Error {
        let fault = match &self.store {
            Either::Embedded(store) => {
                store.stopped().await;
                None
            }
            Either::Postgres(store) => store.stopped().await,
        };
        self.place.stopped_error(fault)
    }

    pub(crate) async fn close(self) -> anyhow::Result<()> {
        match self.store {
            Either::Embedded(store) => tokio::task::spawn_blocking(move || store.close()).await?,
            Either::Postgres(store) => store.close().await,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Words {
        #[command(flatten)]
        store: StoreArgs,
    }

    fn place(words: &[&str]) -> anyhow::Result<Place> {
        let words = Words::try_parse_from([&["ate"], words].concat()).expect("they are words of the command line");
        words.store.place(Path::new("/data"))
    }

    #[test]
    fn a_store_is_a_directory_or_a_schema_of_a_database() {
        let shown = |words: &[&str]| place(words).expect("it is a place").to_string();
        assert_eq!(shown(&[]), "/data/store");
        for directory in ["here", "/var/lib/x", "./a:b", "../a://b"] {
            assert!(
                matches!(place(&["--store", directory]), Ok(Place::Directory(path)) if path == Path::new(directory))
            );
        }
        for scheme in ["postgres", "postgresql"] {
            let url = format!("{scheme}://me:secret@db/ate");
            let told = shown(&["--store", &url, "--schema", "other"]);
            assert!(told.ends_with("schema other") && !told.contains("secret"), "{told}");
            let Ok(Place::Database(settings)) = place(&["--store", &url]) else { panic!("a database") };
            assert_eq!(settings.mark.as_deref(), Some(Path::new("/data/store-mark")), "what is seen of it is kept");
        }
    }

    #[test]
    fn a_misspelt_address_is_no_directory_and_is_not_repeated() {
        for typo in ["postgress://me:secret@db/ate", "mysql://me:secret@db/ate", "postgres:/db/ate", "postgres:db"] {
            let refused = format!("{:#}", place(&["--store", typo]).expect_err("nobody knows this"));
            assert!(refused.contains("postgres:// or postgresql://"), "{typo}: {refused}");
            assert!(refused.contains("directory") && !refused.contains("secret"), "{typo}: {refused}");
        }
    }

    #[test]
    fn whoever_must_stop_is_told_what_is_wrong_and_what_to_do() {
        let database = place(&["--store", "postgres://me:secret@db/ate", "--schema", "other"]).expect("it is a place");
        let lost = Fault::Corrupt { reason: "revision 7 was seen, but the database is only at 3".to_owned() };
        let told = database.stopped_error(Some(lost)).to_string();
        assert!(told.contains("only at 3") && told.contains("ate store check --store postgres://"), "{told}");
        assert!(told.contains("--schema other") && !told.contains("secret"), "{told}");
        let told = place(&["--store", "here"]).expect("it is a place").stopped_error(None).to_string();
        assert!(told.contains("start again") && told.contains("ate store check --store here"), "{told}");
    }
}
