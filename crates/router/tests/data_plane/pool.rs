//! Connections to workers: kept, shared, closed.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ate_router::{RouterConfig, Update};
use futures::future::join_all;
use http::Response;
use tokio::sync::Semaphore;

use crate::support::*;

/// Answers as often as there are permits.
fn gated() -> (Arc<Semaphore>, Workload) {
    let gate = Arc::new(Semaphore::new(0));
    let held = gate.clone();
    let answer = move |_| {
        let held = held.clone();
        async move {
            held.acquire().await.unwrap().forget();
            Ok(Response::new(body("done")))
        }
    };
    (gate, workload(answer))
}

#[tokio::test]
async fn requests_one_after_another_share_a_connection() {
    let worker = Worker::tcp(whoami()).await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    for _ in 0..10 {
        router.get("a", "/").await.is(200, "a 1");
    }
    assert_eq!(worker.accepted.load(Ordering::SeqCst), 1);
    assert_eq!(router.stats.connects.load(Ordering::SeqCst), 1);
    assert_eq!(router.stats.reuses.load(Ordering::SeqCst), 9);
}

#[tokio::test]
async fn a_new_generation_closes_the_connections_of_the_old() {
    let (old, new) = (Worker::tcp(whoami()).await, Worker::tcp(whoami()).await);
    let router = Router::start(Control::never()).await;
    router.tell(Update::Assigned(old.host("a", 1))).await;
    router.get("a", "/").await.is(200, "a 1");
    assert_eq!(old.open.load(Ordering::SeqCst), 1);
    router.tell(Update::Assigned(new.host("a", 2))).await;
    until("the old one is closed", || old.open.load(Ordering::SeqCst) == 0).await;
    router.get("a", "/").await.is(200, "a 2");
}

#[tokio::test]
async fn an_answer_under_way_when_its_generation_ends_is_the_last_of_its_connection() {
    let (gate, workload) = gated();
    let (old, new) = (Worker::tcp(workload).await, Worker::tcp(whoami()).await);
    let router = Router::start(Control::never()).await;
    router.tell(Update::Assigned(old.host("a", 1))).await;
    let replace = async {
        until("it is under way", || old.open.load(Ordering::SeqCst) == 1).await;
        router.tell(Update::Assigned(new.host("a", 2))).await;
        gate.add_permits(1);
    };
    let (answer, ()) = tokio::join!(router.get("a", "/"), replace);
    answer.is(200, "done");
    until("the old one is closed", || old.open.load(Ordering::SeqCst) == 0).await;
}

/// Answers the first request of each connection, and hangs up on the second when it has read it.
fn fickle(seen: Arc<Mutex<Vec<String>>>) -> Workload {
    workload(move |visit| {
        seen.lock().unwrap().push(format!("{} {}", visit.request.method(), visit.earlier));
        async move { if visit.earlier == 0 { Ok(Response::new(body("first"))) } else { Err(HangUp) } }
    })
}

#[tokio::test]
async fn a_kept_connection_that_closes_under_a_request_costs_nothing_if_it_may_be_repeated() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let worker = Worker::tcp(fickle(seen.clone())).await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    let mut client = Client::connect(router.address).await;
    client.get("a", "/").await.is(200, "first");
    client.get("a", "/").await.is(200, "first");
    assert_eq!(*seen.lock().unwrap(), ["GET 0", "GET 1", "GET 0"]);
}

#[tokio::test]
async fn a_request_that_may_have_had_its_effect_is_not_repeated() {
    for (method, content) in [("POST", empty()), ("PUT", body("gone"))] {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let worker = Worker::tcp(fickle(seen.clone())).await;
        let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
        let mut client = Client::connect(router.address).await;
        client.get("a", "/").await.is(200, "first");
        let answer = client.answer(request(method, "a", "/").body(content).unwrap()).await;
        answer.is(502, "actor \"a\" closed the connection before it answered");
        assert_eq!(*seen.lock().unwrap(), ["GET 0".to_string(), format!("{method} 1")]);
        assert_eq!(router.stats.lost.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn a_connection_closed_while_unused_is_noticed_even_for_requests_that_may_not_be_repeated() {
    let worker = Worker::tcp(whoami()).await;
    let control = Control::fixed([worker.host("a", 1)]);
    let router = Router::start(control.clone()).await;
    let mut client = Client::connect(router.address).await;
    for _ in 0..50 {
        let post = request("POST", "a", "/").body(body("x")).unwrap();
        client.answer(post).await.is(200, "a 1");
        // Cuts the connection just used; the router may learn of it before the next request, or while sending it.
        worker.host("a", 1);
    }
    assert_eq!(control.count(), 1);
}

#[tokio::test]
async fn connections_to_one_actor_are_bounded() {
    let (gate, workload) = gated();
    let worker = Worker::tcp(workload).await;
    let config = RouterConfig { max_connections_per_actor: 2, ..RouterConfig::default() };
    let router = Router::with(Control::fixed([worker.host("a", 1)]), config).await;
    let busy = async { join_all((0..2).map(|_| router.get("a", "/"))).await };
    let surplus = async {
        until("both are busy", || worker.accepted.load(Ordering::SeqCst) == 2).await;
        router.get("a", "/").await.is(503, "actor \"a\" unavailable: too many connections");
        gate.add_permits(2);
    };
    let (answers, ()) = tokio::join!(busy, surplus);
    answers.iter().for_each(|answer| answer.is(200, "done"));
}

#[tokio::test]
async fn unused_connections_are_bounded_over_all_actors() {
    let mut workers = Vec::new();
    for number in 0..12 {
        let worker = Worker::tcp(whoami()).await;
        let actor = worker.host(&format!("actor-{number}"), 1);
        workers.push((worker, actor));
    }
    let never = Duration::from_secs(1 << 20);
    let config = RouterConfig { max_idle_connections: 4, worker_idle_timeout: never, ..RouterConfig::default() };
    let router = Router::with(Control::fixed(workers.iter().map(|(_, actor)| actor.clone())), config).await;
    let open = || workers.iter().map(|(worker, _)| worker.open.load(Ordering::SeqCst)).sum::<u64>();
    for (_, actor) in &workers {
        router.get(actor.key.name.as_str(), "/").await.is(200, &format!("{} 1", actor.key.name));
        until("room was made", || open() <= 4).await;
    }
    assert!(router.stats.idle_connections.load(Ordering::SeqCst) <= 4);
    assert_eq!(workers[0].0.open.load(Ordering::SeqCst), 0, "the least recently used went first");
    assert!(open() > 0, "not all went");
}

#[tokio::test]
async fn an_unused_connection_is_closed_after_a_while() {
    let worker = Worker::tcp(whoami()).await;
    let config = RouterConfig { worker_idle_timeout: Duration::from_millis(20), ..RouterConfig::default() };
    let router = Router::with(Control::fixed([worker.host("a", 1)]), config).await;
    router.get("a", "/").await.is(200, "a 1");
    until("it is closed", || worker.open.load(Ordering::SeqCst) == 0).await;
    router.get("a", "/").await.is(200, "a 1");
}
