//! The two ends of a look at requests per second, each a process of its own so that each can be pinned to a core.
//!
//! ```text
//!   rps worker 127.0.0.1:9001 127.0.0.1:9002     answers "ok": plain HTTP on the first, behind a preface on the second
//!   rps router 127.0.0.1:9000 127.0.0.1:9002     routes everything to the second
//!   wrk -t1 -c64 -d10 -H 'Host: a.b.localhost' http://127.0.0.1:9000/
//! ```
//!
//! Another proxy in front of the plain port, pinned to the same core, is the measure.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use ate_name::{ActorKey, ActorUid, Generation, ObjectKey};
use ate_preface::{Verdict, accept};
use ate_router::{ActivateError, Activator, Assignment, Endpoint, RouterConfig, Stats, serve};
use bytes::Bytes;
use http::Response;
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

struct Everywhere(Endpoint);

#[async_trait::async_trait]
impl Activator for Everywhere {
    async fn activate(&self, key: &ActorKey, _: Option<Generation>, _: Instant) -> Result<Assignment, ActivateError> {
        Ok(Assignment {
            key: key.clone(),
            uid: ActorUid::from_random([1; 16]),
            generation: Generation::new(1),
            endpoint: self.0.clone(),
            ports: Vec::new(),
            template: ObjectKey::new("demo", "ok"),
        })
    }
}

async fn worker(listener: TcpListener, preface: bool) {
    while let Ok((mut stream, _)) = listener.accept().await {
        tokio::spawn(async move {
            stream.set_nodelay(true).ok();
            if preface {
                accept(&mut stream, Instant::now() + Duration::from_secs(5)).await.ok()?;
                Verdict::Accepted.send(&mut stream).await.ok()?;
            }
            let answer =
                service_fn(|_| async { Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"ok")))) });
            http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await.ok()
        });
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [role, first, second] = arguments.as_slice() else { panic!("rps worker|router <address> <address>") };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("runtime");
    runtime.block_on(async {
        let listener = TcpListener::bind(first).await.expect("the first address is free");
        if role == "worker" {
            let behind = TcpListener::bind(second).await.expect("the second address is free");
            tokio::join!(tokio::spawn(worker(listener, false)), tokio::spawn(worker(behind, true))).0.expect("worker");
            return;
        }
        let activator = Arc::new(Everywhere(Endpoint::Tcp(second.parse().expect("an address"))));
        let (_feed, updates) = tokio::sync::mpsc::channel(1);
        let (stats, shutdown) = (Arc::new(Stats::default()), CancellationToken::new());
        let router = serve(vec![listener], RouterConfig::default(), activator, updates, stats, shutdown);
        tokio::spawn(router).await.expect("router");
    });
}
