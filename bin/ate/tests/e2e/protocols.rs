//! What passes through the router to a real actor and back.

use ate_proto::ateapi::ActorRef;
use ate_testkit::{Machine, pool};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::transport::Endpoint;

use crate::ATE;

async fn machine_with_actor(idle: &str) -> Machine {
    let machine = Machine::start(ATE).await;
    let ports = "    ports: [{port: 80}, {port: 50051, protocol: h2c}]";
    machine.apply(&format!("{}---{}", pool("counter", 2, ""), machine.template("counter", ports, idle))).await;
    machine.ready("demo", "counter").await;
    machine.create_atespace("space").await;
    machine.create_counter("space", "a").await;
    machine
}

#[tokio::test]
async fn web_sockets_and_event_streams_last_longer_than_any_idle_time() {
    let mut machine = machine_with_actor("  idle: {freezeAfter: 200ms, suspendAfter: 600ms}").await;
    let mut socket = machine.connect().await;
    let key = "dGhlIHNhbXBsZSBub25jZQ==";
    let ask = format!(
        "GET /ws HTTP/1.1\r\nHost: a.space.localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    );
    socket.write_all(ask.as_bytes()).await.expect("sent");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await.expect("an answer"));
    }
    let head = String::from_utf8_lossy(&head).to_lowercase();
    assert!(head.starts_with("http/1.1 101") && head.contains("s3pplmbitxaq9kygzzhzrbk+xoo="), "{head}");

    // On a slow machine it may have been idle for a moment before it was met.
    let met = machine.history("space", "a").await.len();

    // Events come as they happen, for longer than it takes an actor without a connection to be suspended.
    let mut events = machine.connect().await;
    let ask = "GET /stream?n=20 HTTP/1.1\r\nHost: a.space.localhost\r\nConnection: close\r\n\r\n";
    events.write_all(ask.as_bytes()).await.expect("sent");
    let mut seen = String::new();
    for round in 0..20 {
        while !seen.contains(&format!("data: {round}\n")) {
            let mut piece = [0; 512];
            let length = events.read(&mut piece).await.expect("more events");
            assert_ne!(length, 0, "the stream ended: {seen}");
            seen.push_str(&String::from_utf8_lossy(&piece[..length]));
        }
        // "text, final, masked", the mask, and the payload under it.
        let message = format!("message {round:02}");
        let masked: Vec<u8> = message.bytes().zip([1, 2, 3, 4].into_iter().cycle()).map(|(a, b)| a ^ b).collect();
        let length = u8::try_from(masked.len()).expect("a short message");
        socket.write_all(&[&[0x81, 0x80 | length, 1, 2, 3, 4][..], &masked].concat()).await.expect("sent");
        let mut back = vec![0; 2 + message.len()];
        socket.read_exact(&mut back).await.expect("an echo");
        assert_eq!(&back[2..], message.as_bytes());
    }
    let history = machine.history("space", "a").await;
    assert!(!history.iter().skip(met).any(|entry| entry.event == "Suspending"), "{history:?}");
    drop((socket, events));
    machine
        .until("it rests without them", || async {
            machine.history("space", "a").await.iter().skip(met).any(|entry| entry.event == "Suspended")
        })
        .await;
    machine.stop().await;
}

#[tokio::test]
async fn grpc_reaches_an_actor_that_sleeps() {
    let mut machine = machine_with_actor("").await;
    for round in 0..3 {
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{}", machine.port())).expect("a url");
        let origin = format!("http://50051.a.space.localhost:{}", machine.port()).parse().expect("a url");
        let channel = endpoint.origin(origin).connect().await.expect("it connects");
        let mut grpc = tonic::client::Grpc::new(channel);
        let codec = || tonic_prost::ProstCodec::<ActorRef, ActorRef>::default();
        let sent: Vec<_> =
            (0..5).map(|n| ActorRef { atespace: format!("{round}"), name: format!("message {n}") }).collect();
        grpc.ready().await.expect("ready");
        let call = tonic::Request::new(tokio_stream::iter(sent.clone()));
        let path = "/demo.Echo/Talk".parse().expect("a path");
        let mut answer = grpc.streaming(call, path, codec()).await.expect("an answer").into_inner();
        let mut received = Vec::new();
        while let Some(message) = answer.message().await.expect("no error") {
            received.push(message);
        }
        assert_eq!(received, sent);
        machine.suspend("space", "a").await;
    }
    machine.stop().await;
}

#[tokio::test]
async fn a_body_of_any_size_streams_both_ways_and_headers_say_who_asked() {
    let mut machine = machine_with_actor("").await;
    const SIZE: usize = 64 << 20;
    let stream = machine.connect().await;
    let (mut reader, mut writer) = stream.into_split();
    let sending = tokio::spawn(async move {
        let head = format!(
            "POST /echo HTTP/1.1\r\nHost: a.space.actors.resources.substrate.ate.dev\r\nContent-Length: {SIZE}\r\nConnection: close\r\n\r\n"
        );
        writer.write_all(head.as_bytes()).await.expect("sent");
        let block: Vec<u8> = (0..=255).cycle().take(1 << 16).collect();
        for _ in 0..SIZE / block.len() {
            writer.write_all(&block).await.expect("sent");
        }
        writer
    });
    let mut answer = Vec::new();
    reader.read_to_end(&mut answer).await.expect("read");
    sending.await.expect("sent");
    let head = answer.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer[..head]));
    let body = &answer[head..];
    assert!(body.len() >= SIZE, "{} bytes came back", body.len());

    // By header instead of by host, and the host that the client wrote is what the actor sees.
    let request = "GET /peek HTTP/1.1\r\nHost: example.test\r\nate-target-actor: space/a\r\nConnection: close\r\n\r\n";
    let answer = machine.exchange(request.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"host\":\"example.test\""), "{answer}");
    machine.stop().await;
}
