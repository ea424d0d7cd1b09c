//! Names, ports, heads, and what a client reads when there is no way.

use std::sync::atomic::Ordering;

use ate_router::{ActivateError, Endpoint, Protocol, Update};
use http::Response;

use crate::support::*;

#[tokio::test]
async fn each_way_not_to_be_activated_has_its_status_and_text() {
    let cases = [
        (ActivateError::NotFound, 404, "actor \"a\" not found", false),
        (
            ActivateError::FailedPrecondition("no free workers".into()),
            503,
            "actor \"a\" unavailable: no free workers",
            true,
        ),
        (ActivateError::Unavailable, 503, "actor \"a\" unavailable", true),
        (ActivateError::DeadlineExceeded, 504, "actor \"a\" request timed out", true),
        (ActivateError::PermissionDenied, 403, "actor \"a\" access denied", false),
        (ActivateError::Unauthenticated, 401, "actor \"a\" authentication required", false),
        (
            ActivateError::ResourceExhausted("atespace b may have 2 actors running".into()),
            429,
            "actor \"a\" rate limited: atespace b may have 2 actors running",
            true,
        ),
        (ActivateError::Internal, 500, "error resuming actor \"a\"", false),
    ];
    for (error, status, text, again) in cases {
        let control = Control::new(move |_, _| {
            let error = error.clone();
            async move { Err(error) }
        });
        let router = Router::start(control).await;
        let answer = router.get("a", "/").await;
        answer.is(status, text);
        assert_eq!(answer.header("content-type"), Some("text/plain"));
        assert_eq!(answer.header("retry-after").is_some(), again, "{text}");
    }
}

#[tokio::test]
async fn an_actor_that_is_left_alone_for_a_while_says_why_and_until_when() {
    let control = Control::new(|_, _| async {
        let after = std::time::Duration::from_millis(3200);
        Err(ActivateError::Resting { text: "it has crashed 4 times in a row".into(), after })
    });
    let router = Router::start(control).await;
    let answer = router.get("a", "/").await;
    answer.is(503, "actor \"a\" unavailable: it has crashed 4 times in a row");
    assert_eq!(answer.header("retry-after"), Some("4"), "not before it is tried again");
}

#[tokio::test]
async fn a_name_that_is_none_is_not_found_and_nobody_is_asked() {
    let control = Control::never();
    let router = Router::start(control.clone()).await;
    let mut client = Client::connect(router.address).await;
    for (host, reason) in [
        ("example.com:80", "must be <actor>.<atespace>.actors.resources.substrate.ate.dev"),
        ("x.a.b.localhost", "must be <actor>.<atespace>.actors.resources.substrate.ate.dev"),
        ("0.a.b.localhost", "the label before the actor is not a port from 1 to 65535"),
    ] {
        let request = http::Request::get("/").header("host", host).body(empty()).unwrap();
        client.answer(request).await.is(404, &format!("invalid host {host:?}: {reason}"));
    }
    let request = http::Request::get("/").header("ate-target-actor", "nonsense").body(empty()).unwrap();
    client.answer(request).await.is(404, "invalid ate-target-actor \"nonsense\": expected <atespace>/<actor>");
    assert_eq!(control.count(), 0);
    assert_eq!(router.stats.not_found.count(), 4);
}

#[tokio::test]
async fn an_activator_that_answers_for_another_actor_is_not_believed() {
    let worker = Worker::tcp(whoami()).await;
    let other = worker.host("other", 1);
    let router = Router::start(Control::new(move |_, _| std::future::ready(Ok(other.clone())))).await;
    router.get("a", "/").await.is(500, "actor \"a\" routing failed");
    assert_eq!(worker.accepted.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_request_reaches_the_port_it_names() {
    let say = |visit: Visit| async move { Ok(Response::new(body(visit.port.to_string()))) };
    let worker = Worker::tcp(workload(say)).await;
    let mut actor = assignment("a", 1, &worker.endpoint);
    actor.ports = vec![port(80, Protocol::Http), port(8080, Protocol::Http)];
    let router = Router::start(Control::fixed([worker.take_in(actor)])).await;
    let mut client = Client::connect(router.address).await;

    client.get("a", "/").await.is(200, "80");
    client.get("8080.a", "/").await.is(200, "8080");
    let named = request("GET", "a", "/").header("ate-target-port", "8080").body(empty()).unwrap();
    client.answer(named).await.is(200, "8080");
    client.get("81.a", "/").await.is(404, "actor \"a\" has no port 81; its template declares 80, 8080");
}

#[tokio::test]
async fn a_template_with_one_port_needs_no_port_in_the_name() {
    let say = |visit: Visit| async move { Ok(Response::new(body(visit.port.to_string()))) };
    let worker = Worker::tcp(workload(say)).await;
    let mut actor = assignment("a", 1, &worker.endpoint);
    actor.ports = vec![port(3000, Protocol::Http)];
    let router = Router::start(Control::fixed([worker.take_in(actor)])).await;
    router.get("a", "/").await.is(200, "3000");

    let mut silent = assignment("b", 1, &worker.endpoint);
    silent.ports = Vec::new();
    router.tell(Update::Assigned(worker.take_in(silent))).await;
    router.get("b", "/").await.is(200, "80");
}

#[tokio::test]
async fn a_port_nobody_listens_on_is_a_bad_gateway() {
    let worker = Worker::tcp(whoami()).await;
    *worker.refuse.lock().unwrap() = Some(ate_preface::Verdict::Refused);
    let control = Control::fixed([worker.host("a", 1)]);
    let router = Router::start(control.clone()).await;
    router.get("a", "/").await.is(502, "actor \"a\" does not listen on port 80");
    assert_eq!(control.count(), 1);
}

#[tokio::test]
async fn tunnels_to_anywhere_are_refused() {
    let router = Router::start(Control::never()).await;
    let request = http::Request::connect("example.com:443").body(empty()).unwrap();
    Client::connect(router.address).await.answer(request).await.is(405, "CONNECT is not served here");
}

#[tokio::test]
async fn the_workload_sees_the_host_it_was_called_by_and_who_called() {
    let show = |visit: Visit| async move {
        let mut lines: Vec<_> =
            visit.request.headers().iter().map(|(name, value)| format!("{name}={}", value.to_str().unwrap())).collect();
        lines.sort();
        let mut response = Response::new(body(format!("{} {}", visit.request.uri(), lines.join(" "))));
        for (name, value) in [("connection", "x-hop"), ("x-hop", "1"), ("keep-alive", "timeout=5"), ("x-kept", "1")] {
            response.headers_mut().append(name, value.parse().unwrap());
        }
        Ok(response)
    };
    let worker = Worker::tcp(workload(show)).await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    let added = "x-forwarded-for=127.0.0.1 x-forwarded-host=A.space.localhost:8000 x-forwarded-proto=http";

    let over_http1 = http::Request::get("/p?q=1")
        .header("host", "A.space.localhost:8000")
        .header("connection", "x-mine")
        .header("x-mine", "1")
        .header("ate-target-port", "80")
        .header("forwarded", "for=10.9.9.9");
    let answer = Client::connect(router.address).await.answer(over_http1.body(empty()).unwrap()).await;
    answer.is(200, &format!("/p?q=1 host=A.space.localhost:8000 {added}"));
    assert_eq!((answer.header("x-kept"), answer.header("x-hop"), answer.header("keep-alive")), (Some("1"), None, None));

    let over_http2 =
        http::Request::get("http://A.space.localhost:8000/p?q=1").header("cookie", "a=1").header("cookie", "b=2");
    let mut client = http2_client(router.address).await;
    let response = client.send_request(over_http2.body(empty()).unwrap()).await.unwrap();
    let text = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
    assert_eq!(text, format!("/p?q=1 cookie=a=1; b=2 host=A.space.localhost:8000 {added}"));
}

#[tokio::test]
async fn requests_without_bodies_and_answers_without_bodies_keep_their_meaning() {
    let say = |visit: Visit| async move {
        let sized = Response::builder().header("content-length", "5");
        Ok(match visit.request.uri().path() {
            "/none" => Response::builder().status(204).body(empty()).unwrap(),
            "/same" => Response::builder().status(304).body(empty()).unwrap(),
            _ => sized.body(if visit.request.method() == "HEAD" { empty() } else { body("12345") }).unwrap(),
        })
    };
    let worker = Worker::tcp(workload(say)).await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    let mut client = Client::connect(router.address).await;
    let answer = client.answer(request("HEAD", "a", "/").body(empty()).unwrap()).await;
    assert_eq!((answer.text.as_str(), answer.header("content-length")), ("", Some("5")));
    client.get("a", "/none").await.is(204, "");
    client.get("a", "/same").await.is(304, "");
    client.get("a", "/").await.is(200, "12345");
    assert_eq!(worker.accepted.load(Ordering::SeqCst), 1, "all on one connection");
}

#[tokio::test]
async fn workers_are_reached_over_unix_sockets_too() {
    let directory = tempfile::tempdir().unwrap();
    let worker = Worker::unix(&directory.path().join("worker"), whoami()).await;
    assert!(matches!(worker.endpoint, Endpoint::Unix(_)));
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    router.get("a", "/").await.is(200, "a 1");
}
