//! Long ones and large ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ate_router::RouterConfig;
use bytes::Bytes;
use http::Response;
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::support::*;

const SIZE: usize = 64 << 20;
const CHUNK: usize = 64 << 10;

/// Waits until a count no longer grows, and says where it stopped.
async fn settled(count: &AtomicUsize) -> usize {
    loop {
        let before = count.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(200)).await;
        if before > 0 && before == count.load(Ordering::SeqCst) {
            return before;
        }
    }
}

fn chunk(at: usize) -> Bytes {
    Bytes::from(vec![u8::try_from(at / CHUNK % 251).unwrap(); CHUNK])
}

/// Checks what was read from some place on, and says where it ended.
fn check(mut bytes: &[u8], mut at: usize) -> usize {
    while !bytes.is_empty() {
        let (now, rest) = bytes.split_at(bytes.len().min(CHUNK - at % CHUNK));
        assert_eq!(now, &chunk(at)[..now.len()]);
        (bytes, at) = (rest, at + now.len());
    }
    at
}

#[tokio::test]
async fn a_download_goes_as_fast_as_its_reader_and_arrives_whole() {
    let produced = Arc::new(AtomicUsize::new(0));
    let counter = produced.clone();
    let worker = Worker::tcp(workload(move |_| {
        let (sender, download) = piped();
        let counter = counter.clone();
        tokio::spawn(async move {
            for at in (0..SIZE).step_by(CHUNK) {
                sender.send(Ok(Frame::data(chunk(at)))).await.ok()?;
                counter.fetch_add(CHUNK, Ordering::SeqCst);
            }
            Some(())
        });
        async { Ok(Response::new(download)) }
    }))
    .await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    let mut client = Client::connect(router.address).await;
    let mut answer = client.send(request("GET", "a", "/").body(empty()).unwrap()).await.unwrap().into_body();
    let ahead = settled(&produced).await;
    assert!(ahead < SIZE / 2, "{ahead} bytes are held for a client that reads nothing");
    let mut read = 0;
    while let Some(frame) = answer.frame().await {
        read = check(&frame.unwrap().into_data().unwrap(), read);
    }
    assert_eq!(read, SIZE);
}

#[tokio::test]
async fn an_upload_goes_as_fast_as_its_reader_and_arrives_whole() {
    let (gate, held) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let (opened, reached) = (gate.clone(), held.clone());
    let worker = Worker::tcp(workload(move |visit| {
        let (opened, reached) = (opened.clone(), reached.clone());
        async move {
            reached.add_permits(1);
            opened.acquire().await.unwrap().forget();
            let (mut incoming, mut read) = (visit.request.into_body(), 0);
            while let Some(frame) = incoming.frame().await {
                read = check(&frame.map_err(|_| HangUp)?.into_data().map_err(|_| HangUp)?, read);
            }
            Ok(Response::new(body(read.to_string())))
        }
    }))
    .await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    let mut client = Client::connect(router.address).await;
    let (sender, upload) = piped();
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = sent.clone();
    tokio::spawn(async move {
        for at in (0..SIZE).step_by(CHUNK) {
            sender.send(Ok(Frame::data(chunk(at)))).await.ok()?;
            counter.fetch_add(CHUNK, Ordering::SeqCst);
        }
        Some(())
    });
    let watch = async {
        held.acquire().await.unwrap().forget();
        let ahead = settled(&sent).await;
        assert!(ahead < SIZE / 2, "{ahead} bytes are held for a workload that reads nothing");
        gate.add_permits(1);
    };
    let (answer, ()) = tokio::join!(client.answer(request("POST", "a", "/").body(upload).unwrap()), watch);
    answer.is(200, &SIZE.to_string());
}

#[tokio::test]
async fn an_event_stream_outlives_every_timeout_for_heads() {
    let gate = Arc::new(Semaphore::new(1));
    let held = gate.clone();
    let worker = Worker::tcp(workload(move |_| {
        let (sender, events) = piped();
        let held = held.clone();
        tokio::spawn(async move {
            for number in 0..3 {
                held.acquire().await.unwrap().forget();
                sender.send(Ok(Frame::data(Bytes::from(format!("data: {number}\n\n"))))).await.ok()?;
            }
            Some(())
        });
        async { Ok(Response::builder().header("content-type", "text/event-stream").body(events).unwrap()) }
    }))
    .await;
    let brief = Duration::from_millis(300);
    let config = RouterConfig { head_timeout: brief, client_idle_timeout: brief, ..RouterConfig::default() };
    let router = Router::with(Control::fixed([worker.host("a", 1)]), config).await;
    let mut client = Client::connect(router.address).await;
    let mut events = client.send(request("GET", "a", "/").body(empty()).unwrap()).await.unwrap().into_body();
    for number in 0..3 {
        assert_eq!(events.frame().await.unwrap().unwrap().into_data().unwrap(), format!("data: {number}\n\n"));
        // A connection that came after the stream and sends half a head is the clock: when it is cut, the time is over.
        let mut clock = TcpStream::connect(router.address).await.unwrap();
        clock.write_all(b"GET / HT").await.unwrap();
        let _ = clock.read_to_end(&mut Vec::new()).await;
        gate.add_permits(1);
    }
    assert!(events.frame().await.is_none());
}

#[tokio::test]
async fn a_reader_that_leaves_ends_the_stream_at_its_source() {
    let (gone, noticed) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let notice = noticed.clone();
    let worker = Worker::tcp(workload(move |_| {
        let (sender, events) = piped();
        let notice = notice.clone();
        tokio::spawn(async move {
            while sender.send(Ok(Frame::data(Bytes::from_static(b"tick")))).await.is_ok() {}
            notice.add_permits(1);
        });
        async { Ok(Response::new(events)) }
    }))
    .await;
    let router = Router::start(Control::fixed([worker.host("a", 1)])).await;
    let mut client = Client::connect(router.address).await;
    let mut events = client.send(request("GET", "a", "/").body(empty()).unwrap()).await.unwrap().into_body();
    events.frame().await.unwrap().unwrap();
    drop((events, client, gone));
    noticed.acquire().await.unwrap().forget();
    until("its connection is closed", || worker.open.load(Ordering::SeqCst) == 0).await;
}
