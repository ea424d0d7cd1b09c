//! Addresses mean what they mean in libpq, `sslmode` above all.

use std::sync::atomic::{AtomicUsize, Ordering};

use ate_store::{Change, Store};
use ate_store_postgres::{PostgresStore, Settings};
use ate_testkit_postgres::{PASSWORD, Server, USER};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(vec![]).expect("no names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("signs"))
    }

    /// A server that shows a certificate for this name.
    fn server(&self, name: &str) -> Server {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        let certificate = params.signed_by(&key, &self.0).expect("signs").pem();
        Server::start("ssl = on", &[("server.crt", &certificate), ("server.key", &key.serialize_pem())])
    }

    fn file(&self, directory: &tempfile::TempDir, name: &str) -> String {
        let path = directory.path().join(name);
        std::fs::write(&path, self.0.pem()).expect("writes");
        path.display().to_string()
    }
}

/// Whether the sessions are encrypted, or why there are none.
async fn connect(server: &Server, query: &str) -> Result<bool, String> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // Those of the connection before may not have ended yet.
    let name = format!("tls{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let url = format!("{}?application_name={name}&{query}", server.url());
    let settings = Settings::new(url.parse().expect("well formed"));
    let store = PostgresStore::connect(settings).await.map_err(|refused| refused.to_string())?;
    store.revision().await.expect("opens a session");
    let encrypted = server.sql(&format!(
        "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name LIKE '{name} %'"
    ));
    Ok(encrypted == "t")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_mode_protects_as_much_as_it_says() {
    let directory = tempfile::TempDir::new().expect("a temporary directory");
    let (ours, other) = (Authority::new("ours"), Authority::new("other"));
    let (roots, others) = (ours.file(&directory, "ours.pem"), other.file(&directory, "other.pem"));
    let server = ours.server("127.0.0.1");
    assert_eq!(connect(&server, "sslmode=disable").await, Ok(false));
    assert_eq!(connect(&server, "sslmode=prefer").await, Ok(true));
    assert_eq!(connect(&server, "sslmode=require").await, Ok(true));
    assert_eq!(connect(&server, "sslmode=require&channel_binding=require").await, Ok(true));
    assert_eq!(connect(&server, &format!("sslmode=verify-full&sslrootcert={roots}")).await, Ok(true));
    let stranger = connect(&server, &format!("sslmode=verify-full&sslrootcert={others}")).await;
    assert!(stranger.as_ref().is_err_and(|error| error.contains("UnknownIssuer")), "{stranger:?}");
    let stranger = connect(&server, "sslmode=verify-full").await;
    assert!(stranger.as_ref().is_err_and(|error| error.contains("UnknownIssuer")), "{stranger:?}");
    let missing = connect(&server, "sslmode=verify-full&sslrootcert=/nowhere").await;
    assert!(missing.as_ref().is_err_and(|error| error.contains("/nowhere")), "{missing:?}");

    let renamed = ours.server("other.example");
    let wrong = connect(&renamed, &format!("sslmode=verify-full&sslrootcert={roots}")).await;
    assert!(wrong.as_ref().is_err_and(|error| error.contains("not valid for name")), "{wrong:?}");
    assert_eq!(connect(&renamed, "sslmode=require").await, Ok(true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_required_and_not_offered_is_refused() {
    let server = Server::default();
    assert_eq!(connect(&server, "sslmode=prefer").await, Ok(false));
    let refused = connect(&server, "sslmode=require").await;
    assert!(refused.as_ref().is_err_and(|error| error.contains("does not support TLS")), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_is_found_by_its_socket_and_behind_one_that_is_dead() {
    let (server, dead) = (Server::default(), Server::default());
    dead.crash();
    let socket = server.sql("SHOW unix_socket_directories");
    for url in [
        format!("postgres://{USER}:{PASSWORD}@/postgres?host={socket}&port={}", server.port()),
        format!("postgres://{USER}:{PASSWORD}@127.0.0.1:{},127.0.0.1:{}/postgres", dead.port(), server.port()),
    ] {
        let settings = Settings::new(url.parse().expect("well formed"));
        let store = PostgresStore::connect(settings).await.expect("finds it");
        store.commit(Change::new()).await.expect("and its writer too");
    }
}
