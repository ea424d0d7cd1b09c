use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use ate_name::{ActorKey, ActorUid, Generation, ObjectKey, OpId, WorkerUid};
use ate_orders::{Identity, Readyz};
use ate_sandbox::User;
use ate_sys::Memory;
use ate_worker::WorkerLink;
use ate_worker::link::{self, Activate, Answer, BoxKind, Capture, ContainerSpec, Prepare, Source};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

async fn get(dir: &Path, id: &Identity) -> String {
    let t = Instant::now();
    let mut s = tokio::net::UnixStream::connect(dir.join("link/ingress.sock")).await.unwrap();
    s.write_all(&preface(id)).await.unwrap();
    assert_eq!(s.read_u8().await.unwrap(), 1);
    s.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut out = String::new();
    s.read_to_string(&mut out).await.unwrap();
    format!("{} [{} us]", out.lines().last().unwrap_or(""), t.elapsed().as_micros())
}

fn preface(id: &Identity) -> Vec<u8> {
    let mut b = b"ATE\r\n\x01".to_vec();
    b.extend(80u16.to_be_bytes());
    b.extend(id.generation.get().to_be_bytes());
    b.extend(id.uid.as_bytes());
    b
}

#[tokio::test]
async fn smoke() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for x in ["link", "scratch", "root"] {
        std::fs::create_dir(d.join(x)).unwrap();
    }
    let mut c = Command::new(env!("CARGO_BIN_EXE_ate"));
    c.arg("worker").args(["--uid", &WorkerUid::from_random([1; 16]).to_string(), "--cgroup", "/ate-smoke/w1"]);
    c.arg("--link").arg(d.join("link")).arg("--scratch").arg(d.join("scratch")).arg("--root").arg(d.join("root"));
    let mut child = ate_sys::in_new_namespaces(c).unwrap();
    while !d.join("link/ingress.sock").exists() {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    let (w, mut events) = WorkerLink::connect(&d.join("link")).await.unwrap();
    tokio::spawn(async move {
        while let Some(e) = events.recv().await {
            println!("EVENT {e:?}");
        }
    });
    let runtime = std::env::var("RUNTIME").unwrap_or("/tmp/bg/rt".into());
    let kind = BoxKind("k".into());
    let prep = || async {
        let t = Instant::now();
        let fds = [
            ate_sys::detached_bind(Path::new(&runtime)).unwrap(),
            ate_sys::detached_bind(Path::new("/tmp/bg/ctr/rootfs")).unwrap(),
        ];
        let r = w
            .call(
                link::Command::Prepare(Prepare {
                    kind: kind.clone(),
                    memory_limit: Some(256 << 20),
                    cpu_limit_millis: None,
                    containers: vec![ContainerSpec {
                        name: "main".into(),
                        args: vec!["/ctr".into()],
                        env: vec![],
                        cwd: "/".into(),
                        user: User::default(),
                        volumes: BTreeMap::from([("data".into(), "/data".into())]),
                    }],
                }),
                &link::borrowed(&fds),
            )
            .await;
        println!("prepare {:?} {:?}", t.elapsed(), r);
        r.unwrap();
    };
    prep().await;
    let mut id = Identity {
        uid: ActorUid::from_random([2; 16]),
        key: ActorKey::parse("demo", "a1").unwrap(),
        template: ObjectKey::new("ns", "t"),
        generation: Generation::new(1),
    };
    let act = |id: Identity, source| Activate {
        op: OpId::from_random([3; 16]),
        identity: id,
        kind: kind.clone(),
        source,
        readyz: vec![Readyz { path: "/readyz".into(), port: 80 }],
        ports: vec![80],
        egress: vec![],
        freeze_after: Some(std::time::Duration::from_millis(300)),
    };
    let log: OwnedFd = File::options().create(true).append(true).open(d.join("log")).unwrap().into();
    let t = Instant::now();
    let r =
        w.call(link::Command::Activate(Box::new(act(id.clone(), Source::Boot { data: false }))), &[log.as_fd()]).await;
    println!("boot {:?} {:?}", t.elapsed(), r);
    r.unwrap();
    println!("{}", get(d, &id).await);
    println!("{}", get(d, &id).await);
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    println!("after freeze {}", get(d, &id).await);
    let mut mem = Memory::with_capacity("img", 64 << 20).unwrap();
    for g in 2..6 {
        let data = tempfile::tempfile().unwrap();
        let t = Instant::now();
        let r = w
            .call(
                link::Command::Capture(Capture {
                    op: OpId::from_random([4; 16]),
                    actor: id.uid,
                    generation: id.generation,
                    memory: true,
                    data: true,
                }),
                &[mem.as_fd(), data.as_fd()],
            )
            .await;
        println!("capture {:?} {:?}", t.elapsed(), r);
        let Answer::Captured { image_bytes, .. } = r.unwrap() else { panic!() };
        println!("{}", mem.map(image_bytes as usize).unwrap().len());
        prep().await;
        std::io::Seek::rewind(&mut &data).unwrap();
        id.generation = Generation::new(g);
        let t = Instant::now();
        let r = w
            .call(
                link::Command::Activate(Box::new(act(id.clone(), Source::Image { data: true }))),
                &[log.as_fd(), mem.as_fd(), data.as_fd()],
            )
            .await;
        println!("restore {:?} {:?}", t.elapsed(), r);
        r.unwrap();
        println!("{} total {:?}", get(d, &id).await, t.elapsed());
        println!("{}", get(d, &id).await);
    }
    println!("{:?}", w.call(link::Command::Report, &[]).await);
    println!("{:?}", w.call(link::Command::Stop, &[]).await);
    child.wait().unwrap();
    println!("{}", std::fs::read_to_string(d.join("log")).unwrap());
}
