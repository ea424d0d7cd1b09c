//! What an actor can reach, and what it cannot.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ate_testkit::{Machine, Namespace, Setting, pool};
use tokio::io::AsyncWriteExt;

use crate::ATE;

/// Says hello to whoever comes, and counts them.
async fn greeter(namespace: &Namespace, at: &str) -> Arc<AtomicUsize> {
    let listener = namespace.listen(at.parse::<SocketAddr>().expect("an address")).await.expect("it listens");
    let visitors = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&visitors);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            let _ = stream.write_all(b"hello").await;
        }
    });
    visitors
}

/// A name server that knows one name.
async fn name_server(namespace: &Namespace, at: &str, name: &'static str, v4: [u8; 4], v6: [u8; 16]) {
    let socket = namespace.udp(at.parse::<SocketAddr>().expect("an address")).await.expect("it listens");
    tokio::spawn(async move {
        let mut question = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut question).await {
            let mut answer = question[..length].to_vec();
            // Header, the labels of the name, type and class.
            let end = 12 + question[12..length].iter().position(|&byte| byte == 0).expect("a name ends") + 5;
            answer.truncate(end);
            let wanted: Vec<u8> = name
                .split('.')
                .flat_map(|label| [&[u8::try_from(label.len()).expect("short")], label.as_bytes()].concat())
                .collect();
            let data: Option<&[u8]> = match (question[12..].starts_with(&wanted), question[end - 3]) {
                (true, 1) => Some(&v4),
                (true, 28) => Some(&v6),
                _ => None,
            };
            let known = question[12..].starts_with(&wanted);
            answer[2] |= 0x84;
            answer[3] = if known { 0x80 } else { 0x83 };
            answer[6..12].copy_from_slice(&[0, u8::from(data.is_some()), 0, 0, 0, 0]);
            if let Some(data) = data {
                let length = u8::try_from(data.len()).expect("an address is short");
                answer.extend_from_slice(&[0xc0, 12, 0, question[end - 3], 0, 1, 0, 0, 0, 60, 0, length]);
                answer.extend_from_slice(data);
            }
            let _ = socket.send_to(&answer, from).await;
        }
    });
}

async fn dial(machine: &Machine, actor: &str, to: &str) -> bool {
    let (status, body) = machine.get("space", actor, &format!("/dial?addr={to}")).await;
    assert_eq!(status, 200, "{body}");
    body.starts_with("ok")
}

/// What is allowed is reached, if not at once: on a busy machine an answer may come after the actor's own patience.
async fn reaches(machine: &Machine, actor: &str, to: &str) {
    machine.until(&format!("{actor} reaches {to}"), || async { dial(machine, actor, to).await }).await;
}

async fn resolve(machine: &Machine, actor: &str, name: &str) -> String {
    let said = machine.get("space", actor, &format!("/resolve?name={name}")).await.1;
    if said.starts_with("error: ") {
        return said;
    }
    let mut addresses: Vec<_> = said.split_whitespace().collect();
    addresses.sort_unstable();
    addresses.join(" ")
}

#[tokio::test]
async fn an_actor_reaches_what_its_template_allows_and_nothing_else() {
    let (home, world) = (Arc::new(Namespace::new()), Namespace::new());
    home.cable(
        &world,
        [&["192.0.2.1/24", "2001:db8:1::1/64"], &["192.0.2.2/24", "2001:db8:1::2/64", "169.254.169.254/32"]],
    );
    home.ip("route add 169.254.169.254/32 dev cable");
    let allowed = [greeter(&world, "192.0.2.2:443").await, greeter(&world, "[2001:db8:1::2]:443").await];
    greeter(&world, "192.0.2.2:80").await;
    let metadata = greeter(&world, "169.254.169.254:80").await;
    let hosts = [greeter(&home, "192.0.2.1:9000").await, greeter(&home, "[2001:db8:1::1]:9000").await];
    let loopback = greeter(&home, "127.0.0.1:9000").await;
    name_server(
        &world,
        "192.0.2.2:53",
        "peer.test",
        [192, 0, 2, 2],
        "2001:db8:1::2".parse::<std::net::Ipv6Addr>().unwrap().octets(),
    )
    .await;

    let resolver = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(resolver.path(), "nameserver 192.0.2.2\n").expect("written");
    let setting = Setting {
        namespace: Some(Arc::clone(&home)),
        resolver: Some(resolver.path().to_owned()),
        ..Setting::default()
    };
    let mut machine = Machine::start_with(ATE, setting).await;
    let some = "  egress: {allow: [{cidr: 192.0.2.0/24, ports: [443]}, {cidr: '2001:db8:1::/64', ports: [443]}]}";
    let all = "  egress: {allow: [{cidr: 0.0.0.0/0}, {cidr: '::/0'}]}";
    let templates = [("none", ""), ("some", some), ("all", all)];
    let documents: Vec<_> = templates.iter().map(|(name, egress)| machine.template(name, "", egress)).collect();
    machine.apply(&format!("{}---{}", pool("workers", 4, ""), documents.join("---"))).await;
    machine.create_atespace("space").await;
    for (name, _) in templates {
        machine.ready("demo", name).await;
        machine.create("space", name, name).await;
    }
    machine.create("space", "other", "none").await;
    machine.count("space", "other").await;

    let (peer, peer6, closed) = ("192.0.2.2:443", "[2001:db8:1::2]:443", "192.0.2.2:80");
    let never = [
        "192.0.2.1:9000",
        "[2001:db8:1::1]:9000",
        "127.0.0.1:9000",
        "169.254.169.254:80",
        // The worker's own end of the link, and what listens there.
        "169.254.17.1:9000",
        "169.254.17.1:15001",
        "[fd61:7465::1]:15001",
        "[::ffff:127.0.0.1]:9000",
    ];
    for round in 0..2 {
        for to in [peer, peer6, closed] {
            assert!(!dial(&machine, "none", to).await, "round {round}: {to} from an actor without egress");
        }
        for (actor, to) in [("some", peer), ("some", peer6), ("all", closed), ("all", peer6), ("all", "peer.test:443")]
        {
            reaches(&machine, actor, to).await;
        }
        assert!(!dial(&machine, "some", closed).await, "round {round}: a port that is not allowed");
        for to in never {
            for actor in ["none", "some", "all"] {
                assert!(!dial(&machine, actor, to).await, "round {round}: {to} from {actor}");
            }
        }
        let resolved = || async { resolve(&machine, "all", "peer.test").await == "192.0.2.2 2001:db8:1::2" };
        machine.until("names are resolved", resolved).await;
        for (actor, name) in [("none", "peer.test"), ("some", "peer.test"), ("all", "nobody.test")] {
            let said = resolve(&machine, actor, name).await;
            assert!(said.starts_with("error: "), "round {round}: {actor} asks for {name}: {said}");
        }
        for (name, _) in templates {
            machine.suspend("space", name).await;
        }
    }
    // A connection that was open when its actor was suspended is dead when it wakes; the actor is not.
    let kept = machine.get("space", "all", &format!("/dial?addr={peer}&keep=1")).await.1;
    assert!(kept.starts_with("ok"), "{kept}");
    let before = machine.count("space", "all").await;
    machine.suspend("space", "all").await;
    for _ in 0..3 {
        let (status, said) = machine.get("space", "all", "/poke").await;
        assert_eq!((status, said.lines().count()), (200, 1), "{said}");
    }
    let after = machine.count("space", "all").await;
    assert_eq!((after.memory, after.nonce), (before.memory + 1, before.nonce));
    for (what, visitors) in [
        ("the metadata service", &metadata),
        ("the host", &hosts[0]),
        ("the host by IPv6", &hosts[1]),
        ("loopback", &loopback),
    ] {
        assert_eq!(visitors.load(Ordering::SeqCst), 0, "{what} was reached");
    }
    assert!(allowed.iter().all(|visitors| visitors.load(Ordering::SeqCst) >= 2));
    machine.stop().await;
}
