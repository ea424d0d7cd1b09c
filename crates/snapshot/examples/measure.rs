//! What the codec and the seal cost: `cargo run --release -p ate-snapshot --example measure -- [MiB]`.
//!
//! The base is made of this machine's shared libraries mixed with pages that look like a heap; the image is the base with
//! words changed in scattered pages and a few pages inserted, which is what serving requests does to an actor.

use std::hint::black_box;
use std::time::Instant;

use ate_name::{ActorUid, Generation, OpId};
use ate_snapshot::seal::{Place, open, seal};
use ate_snapshot::{Content, DataKey, FileName, SnapshotId, delta};

const PAGE: usize = 4096;
const EDITED: usize = 300;
const INSERTED: usize = 12;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mebibytes: usize = std::env::args().nth(1).map_or(Ok(24), |text| text.parse())?;
    let runs = (1000 / mebibytes.max(1)).clamp(3, 40);
    let mut random = Random(99);
    let base = base(mebibytes << 20, &mut random)?;
    let image = edited(&base, &mut random);
    let mut out = vec![1; image.len()];
    println!(
        "image of {} bytes, {EDITED} pages edited, {INSERTED} inserted; ms, median and best of {runs}",
        image.len()
    );

    time("memcpy", runs, || out.copy_from_slice(&image));
    time("sha256", runs, || {
        black_box(Content::of(&image));
    });
    let mut stored = Vec::new();
    for (name, base) in [("full", None), ("delta", Some(&base[..]))] {
        time(&format!("{name} encode"), runs, || {
            stored.clear();
            delta::encode(base, &image, &mut stored).expect("a vector takes everything");
        });
        time(&format!("{name} decode"), runs, || delta::decode(base, &stored[..], &mut out).expect("just encoded"));
        assert!(out == image, "what was decoded differs");
        println!("{name:>14} {:>10} bytes", stored.len());
    }
    let id = SnapshotId {
        actor: ActorUid::from_random([1; 16]),
        generation: Generation::new(1),
        op: OpId::from_random([2; 16]),
    };
    let name = FileName::parse("image")?;
    let (key, place) = (DataKey::from_random([3; 32]), Place { snapshot: id, file: &name });
    for (name, plain) in [("delta", &stored[..]), ("image", &image[..])] {
        let (mut sealed, mut opened) = (Vec::new(), Vec::new());
        time(&format!("{name} seal"), runs, || {
            sealed.clear();
            seal(&key, place, [4; 7], plain, &mut sealed).expect("a vector takes everything");
        });
        time(&format!("{name} open"), runs, || {
            opened.clear();
            open(&key, place, &sealed[..], &mut opened).expect("just sealed");
        });
    }
    Ok(())
}

fn time(name: &str, runs: usize, mut run: impl FnMut()) {
    let mut times: Vec<f64> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("{name:>14} {:8.2} {:8.2}", times[runs / 2], times[0]);
}

fn base(length: usize, random: &mut Random) -> std::io::Result<Vec<u8>> {
    let directory = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let mut paths: Vec<_> = std::fs::read_dir(directory)?.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.to_string_lossy().contains(".so") && !path.is_symlink() && path.is_file());
    paths.sort();
    let mut base = Vec::with_capacity(length + PAGE);
    // A small machine's libraries are used several times over; each time other heap pages lie between.
    for path in paths.iter().cycle() {
        for page in std::fs::read(path)?.chunks_exact(PAGE).take(512) {
            base.extend_from_slice(page);
            if random.below(3) == 0 {
                base.extend(heap_page(random));
            }
        }
        if base.len() >= length {
            break;
        }
    }
    base.truncate(length);
    Ok(base)
}

fn edited(base: &[u8], random: &mut Random) -> Vec<u8> {
    let mut inserts: Vec<usize> = (0..INSERTED).map(|_| random.below(base.len() / PAGE)).collect();
    inserts.sort_unstable();
    let mut image = Vec::with_capacity(base.len() + INSERTED * PAGE);
    for (number, page) in base.chunks(PAGE).enumerate() {
        for _ in inserts.iter().filter(|at| **at == number) {
            image.extend(heap_page(random));
        }
        image.extend_from_slice(page);
    }
    for _ in 0..EDITED {
        let page = random.below(image.len() / PAGE) * PAGE;
        for _ in 0..=random.below(40) {
            let at = page + random.below(PAGE / 8) * 8;
            image[at..at + 8].copy_from_slice(&pointer(random.next()).to_le_bytes());
        }
    }
    image
}

/// Zeros, small numbers and pointers into one region.
fn heap_page(random: &mut Random) -> Vec<u8> {
    let region = random.next();
    let word = |random: &mut Random| match random.below(4) {
        0 => 0,
        1 => random.next() & 0xff,
        _ => pointer(region & !0xfff | random.next() & 0xff8),
    };
    (0..PAGE / 8).flat_map(|_| word(random).to_le_bytes()).collect()
}

fn pointer(value: u64) -> u64 {
    0x7f00_0000_0000 | value & 0xffff_fff8
}

/// xorshift: the same bytes on every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).expect("less than a usize")
    }
}
