use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use deadpool_postgres::Connect;
use futures::FutureExt;
use tokio::task::JoinHandle;
use tokio_postgres::{AsyncMessage, Client, Config, Error, Notification, SimpleQueryMessage};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::address::Address;
use crate::error::{ConnectError, Trouble, reason, within};
use crate::tls;

/// The server ends a session that holds a transaction open and says nothing for this long. A replica that hangs between
/// the two halves of a commit (stopped, swapped out, cut off) holds the lock that all others wait for; a healthy one
/// takes a millisecond there.
const IDLE_IN_TRANSACTION: Duration = Duration::from_secs(3);

/// A commit that does not get the lock in this time gives up its place and tries again; longer than the above, so that
/// one hanging replica is outwaited.
const LOCK_WAIT: Duration = Duration::from_secs(4);

/// No statement of ours takes nearly this long; one that does is stuck, and holds up those behind it. It does not count
/// while the server flushes a commit, or waits for its standbys to do so.
const STATEMENT: Duration = Duration::from_secs(8);

/// From here a silent peer is asked whether it is still there, and given up after three questions.
const KEEPALIVE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);
const KEEPALIVE_QUESTIONS: u32 = 3;

/// Sent, but not even acknowledged by the peer's kernel in this time: the connection is dead.
const UNACKNOWLEDGED: Duration = Duration::from_secs(15);

/// For the whole way to a usable session; a server that recovers from a crash answers at once that it does.
pub(crate) const CONNECT: Duration = Duration::from_secs(10);

/// For one exchange with the server. Longer than all that the server itself would end, so that this is about servers
/// that are gone without a word.
pub(crate) const EXCHANGE: Duration = Duration::from_secs(15);

/// As PostgreSQL writes a duration.
pub(crate) fn seconds(duration: Duration) -> String {
    format!("{}s", duration.as_secs())
}

/// Makes sessions, all alike.
#[derive(Clone)]
pub(crate) struct Connector {
    config: Config,
    tls: MakeRustlsConnect,
}

/// Called with each notification, and with `None` when the connection has ended.
pub(crate) type Listener = Box<dyn Fn(Option<Notification>) + Send>;

impl Connector {
    /// Blocks on the disk: roots of trust may be read.
    pub(crate) fn new(address: &Address) -> Result<Self, ConnectError> {
        let mut config = Config::clone(&address.config);
        config
            .keepalives_idle(KEEPALIVE)
            .keepalives_interval(KEEPALIVE_INTERVAL)
            .keepalives_retries(KEEPALIVE_QUESTIONS)
            .tcp_user_timeout(UNACKNOWLEDGED);
        if config.get_connect_timeout().is_none() {
            // For one host of several.
            config.connect_timeout(CONNECT / 2);
        }
        Ok(Self { config, tls: tls::connector(&address.protection)? })
    }

    /// The role is for whoever looks at the server's list of sessions.
    pub(crate) async fn session(&self, role: &str, listener: Listener) -> Result<Client, Trouble> {
        Ok(within(CONNECT, self.open(role, listener)).await?.0)
    }

    async fn open(&self, role: &str, listener: Listener) -> Result<(Client, JoinHandle<()>), Error> {
        let mut config = self.config.clone();
        config.application_name(format!("{} {role}", self.config.get_application_name().unwrap_or("ate")));
        let (client, mut connection) = config.connect(self.tls.clone()).await?;
        // Ends by itself when the client is dropped and what it asked for is answered.
        let driver = tokio::spawn(async move {
            loop {
                match poll_fn(|context| connection.poll_message(context)).await {
                    Some(Ok(AsyncMessage::Notification(notification))) => listener(Some(notification)),
                    Some(Ok(_)) => {}
                    Some(Err(error)) => {
                        tracing::debug!(reason = reason(&error), "the connection to the database broke");
                        break;
                    }
                    None => break,
                }
            }
            // Before anyone is told: whoever is, finds the client closed.
            drop(connection);
            listener(None);
        });
        client.batch_execute(&parameters()).await?;
        Ok((client, driver))
    }
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector").finish_non_exhaustive()
    }
}

impl Connect for Connector {
    fn connect(
        &self,
        _config: &Config,
    ) -> Pin<Box<dyn Future<Output = Result<(Client, JoinHandle<()>), Error>> + Send + '_>> {
        self.open("reader", deaf()).boxed()
    }
}

/// A session with the database as the store has them, for whoever works beside it. What holds in it, `RESET ALL` takes away.
pub async fn session(address: &Address, role: &str) -> Result<Client, ConnectError> {
    let of = address.clone();
    let connector = tokio::task::spawn_blocking(move || Connector::new(&of));
    let connector = connector.await.expect("reading certificates does not panic")?;
    connector.session(role, deaf()).await.map_err(|trouble| trouble.at(address))
}

/// What holds in each of our sessions, whatever the server, the database or the role have as their defaults.
///
/// The second part is about plans: every access of ours is by key or by a short range of keys, so a plan that walks a
/// whole table is wrong, whatever the statistics of the minute say. (Costs are inflated by that, hence no `jit`.)
fn parameters() -> String {
    format!(
        "SET synchronous_commit = on;
        SET default_transaction_isolation = 'read committed';
        SET idle_in_transaction_session_timeout = '{}';
        SET lock_timeout = '{}';
        SET statement_timeout = '{}';
        SET tcp_keepalives_idle = '{}';
        SET tcp_keepalives_interval = '{}';
        SET tcp_keepalives_count = {KEEPALIVE_QUESTIONS};
        SET tcp_user_timeout = '{}';
        SET plan_cache_mode = force_generic_plan;
        SET enable_seqscan = off;
        SET enable_bitmapscan = off;
        SET enable_mergejoin = off;
        SET jit = off",
        seconds(IDLE_IN_TRANSACTION),
        seconds(LOCK_WAIT),
        seconds(STATEMENT),
        seconds(KEEPALIVE),
        seconds(KEEPALIVE_INTERVAL),
        seconds(UNACKNOWLEDGED),
    )
}

/// Whether a server may be trusted with a store. Asked of each one that commits go to: after a failover it is another.
/// Only what a server is makes it unfit: that it does not answer may pass.
pub(crate) async fn check_server(client: &Client, address: &Address, volatile: bool) -> Result<(), Trouble> {
    let ask = "SELECT current_setting('server_version_num'), current_setting('server_version'),
        current_setting('server_encoding'), current_setting('fsync', true)";
    let answers = client.simple_query(ask).await?;
    let row = answers.iter().find_map(|answer| match answer {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    let column = |at| row.and_then(|row| row.get(at)).unwrap_or_default();
    let address = address.clone();
    if column(0).parse::<u32>().is_ok_and(|number| number < 130_000) {
        return Err(Trouble::Unfit(ConnectError::TooOld { address, found: column(1).to_owned() }));
    }
    if column(2) != "UTF8" {
        return Err(Trouble::Unfit(ConnectError::Encoding { address, found: column(2).to_owned() }));
    }
    if column(3) == "off" && !volatile {
        return Err(Trouble::Unfit(ConnectError::NotDurable { address }));
    }
    Ok(())
}

/// A pause that doubles with each failure, so that a database that comes back is not met by a crowd.
#[derive(Debug)]
pub(crate) struct Pause(Duration);

impl Pause {
    const FIRST: Duration = Duration::from_millis(20);
    const LONGEST: Duration = Duration::from_secs(1);

    pub(crate) async fn wait(&mut self) {
        tokio::time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(Self::LONGEST);
    }
}

impl Default for Pause {
    fn default() -> Self {
        Self(Self::FIRST)
    }
}

/// For sessions that nobody notifies.
pub(crate) fn deaf() -> Listener {
    Box::new(|_| {})
}
