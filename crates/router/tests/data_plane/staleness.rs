//! What the router believes, and what happens when it is wrong.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ate_name::Generation;
use ate_preface::Verdict;
use ate_router::{ActivateError, Assignment, Endpoint, RouterConfig, Update};
use futures::future::join_all;

use crate::support::*;

fn released(assignment: &Assignment) -> Update {
    Update::Released { key: assignment.key.clone(), uid: assignment.uid, generation: assignment.generation }
}

#[tokio::test]
async fn a_hot_request_asks_nobody() {
    let worker = Worker::tcp(whoami()).await;
    let control = Control::never();
    let router = Router::start(control.clone()).await;
    router.tell(Update::Assigned(worker.host("a", 1))).await;
    let mut client = Client::connect(router.address).await;
    for _ in 0..100 {
        client.get("a", "/").await.is(200, "a 1");
    }
    assert_eq!(control.count(), 0);
    assert_eq!(router.stats.activations.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_disowned_actor_is_found_where_it_is_now() {
    let (old, new) = (Worker::tcp(whoami()).await, Worker::tcp(whoami()).await);
    let control = Control::fixed([new.host("a", 2)]);
    let router = Router::start(control.clone()).await;
    router.tell(Update::Assigned(old.host("a", 1))).await;
    router.get("a", "/").await.is(200, "a 1");

    old.host("b", 1);
    router.get("a", "/").await.is(200, "a 2");
    assert_eq!(*control.calls.lock().unwrap(), [(key("a"), Some(Generation::new(1)))]);
    assert_eq!(router.stats.stale_answers.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_draining_or_vanished_worker_is_left_for_the_next() {
    let (old, new) = (Worker::tcp(whoami()).await, Worker::tcp(whoami()).await);
    let control = Control::fixed([new.host("a", 3)]);
    *old.refuse.lock().unwrap() = Some(Verdict::Draining);
    let vanished = assignment("a", 1, &Endpoint::Unix("/nowhere/at/all".into()));
    for believed in [old.host("a", 2), vanished] {
        let router = Router::start(control.clone()).await;
        let generation = believed.generation;
        router.tell(Update::Assigned(believed)).await;
        router.get("a", "/").await.is(200, "a 3");
        assert_eq!(control.calls.lock().unwrap().pop(), Some((key("a"), Some(generation))));
    }
}

#[tokio::test]
async fn an_actor_nobody_hosts_is_given_up_with_a_retryable_error() {
    let worker = Worker::tcp(whoami()).await;
    let control = Control::fixed([assignment("a", 1, &worker.endpoint)]);
    let config = RouterConfig { park_timeout: Duration::from_millis(500), ..RouterConfig::default() };
    let router = Router::with(control.clone(), config).await;
    let answer = router.get("a", "/").await;
    answer.is(503, "actor \"a\" unavailable");
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert!(control.count() > 1, "it was looked for again");
}

#[tokio::test]
async fn an_actor_whose_worker_has_died_is_looked_for_until_that_is_noticed() {
    let worker = Worker::tcp(whoami()).await;
    let (dead, found) = (assignment("a", 1, &Endpoint::Unix("/nowhere/at/all".into())), worker.host("a", 2));
    let looks = AtomicU64::new(0);
    let control = Control::new(move |_, _| {
        let answer = if looks.fetch_add(1, Ordering::SeqCst) < 6 { dead.clone() } else { found.clone() };
        async { Ok(answer) }
    });
    let router = Router::start(control.clone()).await;
    router.get("a", "/").await.is(200, "a 2");
    assert_eq!(control.count(), 7);
}

#[tokio::test]
async fn a_workload_that_hangs_up_at_once_is_not_looked_for_elsewhere_for_long() {
    let worker = Worker::tcp(whoami()).await;
    let control = Control::fixed([worker.host("a", 1)]);
    *worker.refuse.lock().unwrap() = Some(Verdict::Accepted);
    let router = Router::start(control.clone()).await;
    let status = router.get("a", "/").await.status.as_u16();
    assert!(matches!(status, 502 | 503), "{status}");
    assert!(control.count() <= 5, "asked {} times", control.count());
}

#[tokio::test]
async fn a_request_with_a_body_survives_a_stale_route() {
    let echo = |visit: Visit| async move {
        let text = http_body_util::BodyExt::collect(visit.request.into_body()).await.map_err(|_| HangUp)?.to_bytes();
        Ok(http::Response::new(body(text)))
    };
    let (old, new) = (Worker::tcp(workload(echo)).await, Worker::tcp(workload(echo)).await);
    let router = Router::start(Control::fixed([new.host("a", 2)])).await;
    router.tell(Update::Assigned(assignment("a", 1, &old.endpoint))).await;
    let post = request("POST", "a", "/").body(body("once")).unwrap();
    Client::connect(router.address).await.answer(post).await.is(200, "once");
}

#[tokio::test]
async fn old_news_do_not_replace_new_ones() {
    let (here, there) = (Worker::tcp(whoami()).await, Worker::tcp(whoami()).await);
    let control = Control::never();
    let router = Router::start(control.clone()).await;
    let (current, older) = (here.host("a", 5), there.host("a", 4));
    router.tell(Update::Assigned(current.clone())).await;

    router.tell(Update::Assigned(older.clone())).await;
    router.get("a", "/").await.is(200, "a 5");
    router.tell(released(&older)).await;
    router.get("a", "/").await.is(200, "a 5");
    assert_eq!(control.count(), 0);

    router.tell(released(&current)).await;
    router.get("a", "/").await.is(404, "actor \"a\" not found");
    assert_eq!(*control.calls.lock().unwrap(), [(key("a"), None)]);
}

#[tokio::test]
async fn an_activation_does_not_turn_back_the_watch() {
    let (here, there) = (Worker::tcp(whoami()).await, Worker::tcp(whoami()).await);
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let (held, slow) = (gate.clone(), there.host("a", 4));
    let control = Control::new(move |_, _| {
        let (held, slow) = (held.clone(), slow.clone());
        async move {
            held.acquire().await.unwrap().forget();
            Ok(slow)
        }
    });
    let router = Router::start(control.clone()).await;
    let news = async {
        until("asked", || control.count() == 1).await;
        router.tell(Update::Assigned(here.host("a", 5))).await;
        gate.add_permits(1);
    };
    let (answer, ()) = tokio::join!(router.get("a", "/"), news);
    answer.is(200, "a 5");
}

#[tokio::test]
async fn a_disowned_generation_is_not_believed_again_because_the_watch_repeats_it() {
    let worker = Worker::tcp(whoami()).await;
    let control = Control::fixed([worker.host("a", 2)]);
    let router = Router::start(control.clone()).await;
    let believed = assignment("a", 2, &Endpoint::Unix("/nowhere/at/all".into()));
    router.tell(Update::Assigned(believed.clone())).await;
    // The control plane insists on the generation, and it is right about the worker.
    router.get("a", "/").await.is(200, "a 2");
    router.tell(Update::Assigned(believed)).await;
    router.get("a", "/").await.is(200, "a 2");
    assert_eq!(control.count(), 1);
}

#[tokio::test]
async fn an_actor_created_anew_starts_over() {
    let worker = Worker::tcp(whoami()).await;
    let control = Control::never();
    let router = Router::start(control.clone()).await;
    router.tell(Update::Assigned(worker.host("a", 7))).await;
    router.get("a", "/").await.is(200, "a 7");
    let mut anew = assignment("a", 1, &worker.endpoint);
    anew.uid = ate_name::ActorUid::from_random([9; 16]);
    router.tell(Update::Assigned(worker.take_in(anew))).await;
    router.get("a", "/").await.is(200, "a 1");
    assert_eq!(control.count(), 0);
}

#[tokio::test]
async fn a_reset_leaves_what_it_lists_and_nothing_else() {
    let (one, two) = (Worker::tcp(whoami()).await, Worker::tcp(whoami()).await);
    let control = Control::never();
    let router = Router::start(control.clone()).await;
    let (a, b) = (one.host("a", 1), two.host("b", 1));
    router.tell(Update::Assigned(a)).await;
    router.get("a", "/").await.is(200, "a 1");
    router.tell(Update::Reset(vec![b])).await;
    router.get("b", "/").await.is(200, "b 1");
    assert_eq!(control.count(), 0);
    router.get("a", "/").await.is(404, "actor \"a\" not found");
    until("its connection is closed", || one.open.load(Ordering::SeqCst) == 0).await;
}

/// Few workers, more actors, and a scheduler that moves them whenever asked.
struct Cluster {
    workers: Vec<Arc<Worker>>,
    generation: AtomicU64,
    places: Mutex<HashMap<String, (usize, Assignment)>>,
}

impl Cluster {
    /// Puts the actor on a worker, throwing out whoever is there.
    fn place(&self, name: &str) -> Assignment {
        let mut places = self.places.lock().unwrap();
        if let Some((_, actor)) = places.get(name) {
            return actor.clone();
        }
        let generation = self.generation.fetch_add(1, Ordering::SeqCst);
        let at = usize::try_from(generation).unwrap() % self.workers.len();
        places.retain(|_, (occupied, _)| *occupied != at);
        let actor = self.workers[at].host(name, generation);
        places.insert(name.into(), (at, actor.clone()));
        actor
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_answer_ever_comes_from_another_actor() {
    let workers = vec![Worker::tcp(whoami()).await, Worker::tcp(whoami()).await];
    let cluster = Arc::new(Cluster { workers, generation: AtomicU64::new(1), places: Mutex::default() });
    let control = Control::new({
        let cluster = cluster.clone();
        move |key, _| {
            let actor = cluster.place(key.name.as_str());
            async move { Ok::<_, ActivateError>(actor) }
        }
    });
    let router = Router::with(control.clone(), RouterConfig::default()).await;
    let names: Vec<_> = (0..5).map(|number| format!("actor-{number}")).collect();
    let (answered, done) = (AtomicU64::new(0), AtomicBool::new(false));

    let clients = join_all((0..20).map(|number| {
        let (router, name, answered) = (&router, &names[number % names.len()], &answered);
        async move {
            let (mut right, mut client) = (0, Client::connect(router.address).await);
            for _ in 0..100 {
                let answer = client.get(name, "/").await;
                answered.fetch_add(1, Ordering::SeqCst);
                match answer.status.as_u16() {
                    200 => {
                        assert_eq!(answer.text.split(' ').next(), Some(name.as_str()));
                        right += 1;
                    }
                    // Moved away between the worker's word and the answer, or faster than we could follow.
                    502 | 503 => {}
                    other => panic!("{other} {}", answer.text),
                }
            }
            right
        }
    }));
    // Some actor moves with every answer, so that clients and moves keep pace on any machine.
    let moves = async {
        for round in 0.. {
            let before = answered.load(Ordering::SeqCst);
            let name = &names[round % names.len()];
            cluster.places.lock().unwrap().remove(name);
            let actor = cluster.place(name);
            if round % 3 == 0 {
                router.tell(Update::Assigned(actor)).await;
            }
            while answered.load(Ordering::SeqCst) == before && !done.load(Ordering::SeqCst) {
                tokio::task::yield_now().await;
            }
            if done.load(Ordering::SeqCst) {
                break;
            }
        }
    };
    let clients = async {
        let right = clients.await;
        done.store(true, Ordering::SeqCst);
        right
    };
    let (right, ()) = tokio::join!(clients, moves);
    assert!(right.iter().sum::<u64>() > 0, "some were answered");
    assert!(router.stats.stale_answers.load(Ordering::SeqCst) > 0, "the workers did move");
}
