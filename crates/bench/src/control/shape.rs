//! What a suspended actor leaves in the store, as a mould for millions of others.
//!
//! One actor is created, woken and suspended through the API. Its records are cut where its name, its uid and what was drawn
//! by lot stand, and others are cast from the pieces: as many bytes, and as hard to compress.
//!
//! ```text
//!   {"uid":"6f0c…","key":{"atespace":"bench","name":"a0000000"},…     the actor that was made
//!   {"uid":" |uid| ","key":{"atespace":"bench","name":" |name| "},…   the mould
//! ```

use std::ops::Range;

use ate_actor::Actor;
use ate_name::{ActorUid, Digest, OpId};
use ate_snapshot::SnapshotKey;
use ate_store::{Kind, Prefix, Store};

use super::{ATESPACE, actor_name};
use crate::BenchError;

/// Added to the numbers of history entries. Records that are cast have been written once, so the next transition of such an
/// actor has number 2; a real one's has a number that nobody has yet, and this keeps it so.
const HISTORY_OFFSET: u64 = 1000;

/// The kinds that an actor has records of, in the order in which they are written: each whole kind in the order of the actors' names,
/// which is that of its keys but for histories, that go by uid.
pub(crate) const KINDS: [Kind; 3] = [Kind::Actor, Kind::Meta, Kind::History];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Name,
    Uid,
    Op,
    Manifest,
    SealedKey,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Mark(Mark),
}

#[derive(Clone, Debug)]
struct Mould {
    kind: Kind,
    path: Vec<Piece>,
    value: Vec<Piece>,
}

#[derive(Clone, Debug)]
pub(crate) struct Shape {
    moulds: Vec<Mould>,
    sealed_key: usize,
}

/// A record before it is in a store.
pub(crate) struct Cast {
    pub(crate) kind: Kind,
    pub(crate) path: String,
    pub(crate) value: Vec<u8>,
}

impl Shape {
    /// Of the actor with number 0.
    pub(crate) async fn of_first(store: &dyn Store) -> Result<Self, BenchError> {
        let wrong = |what: &str| BenchError::refused("copy the first actor's records", what);
        let fault = |fault: ate_store::Fault| BenchError::refused("copy the first actor's records", fault);
        let name = actor_name(0);
        let key = ate_store::Key::new(Kind::Actor, [ATESPACE, &name]).expect("names are segments");
        let record = store.get(&key).await.map_err(fault)?.ok_or_else(|| wrong("it has none"))?;
        let actor: Actor = serde_json::from_slice(&record.value).map_err(|error| wrong(&error.to_string()))?;
        let durable = actor.snapshots.durable.as_ref().ok_or_else(|| wrong("it has no snapshot"))?;
        let manifest = durable.manifest.ok_or_else(|| wrong("its snapshot is not stored"))?;
        let op = SnapshotKey::parse(&durable.prefix).map_err(|error| wrong(&error.to_string()))?.id.op;
        let marks = [
            (name.clone(), Mark::Name),
            (actor.uid.to_string(), Mark::Uid),
            (op.to_string(), Mark::Op),
            (manifest.to_string(), Mark::Manifest),
            (actor.sealed_key.clone(), Mark::SealedKey),
        ];
        let mut found = vec![record];
        let made_from = Prefix::below(Kind::Meta, ["made-from"]).expect("a constant segment");
        let history = Prefix::below(Kind::History, [actor.uid.to_string()]).expect("a uid is a segment");
        for prefix in [made_from, history] {
            let page = store.list(&prefix, None, ate_store::MAX_PAGE_RECORDS).await.map_err(fault)?;
            found.extend(page.records.into_iter().filter(|record| {
                record.key.kind() == Kind::History || record.key.path().ends_with(&format!("/{name}"))
            }));
        }
        let moulds = found.iter().map(|record| {
            let path = match (record.key.kind(), record.key.path().rsplit_once('/')) {
                (Kind::History, Some((uid, number))) => {
                    let number: u64 = number.parse().map_err(|_| wrong("its history has no numbers"))?;
                    format!("{uid}/{:020}", number + HISTORY_OFFSET)
                }
                _ => record.key.path().to_owned(),
            };
            let value = std::str::from_utf8(&record.value).map_err(|_| wrong("they are no text"))?;
            Ok(Mould { kind: record.key.kind(), path: cut(&path, &marks), value: cut(value, &marks) })
        });
        Ok(Self { moulds: moulds.collect::<Result<_, BenchError>>()?, sealed_key: actor.sealed_key.len() })
    }

    /// Records per actor, and the bytes of their paths and values.
    pub(crate) fn size(&self) -> (usize, usize) {
        let person = Person::new(1, self.sealed_key);
        let bytes = self.moulds.iter().map(|mould| person.fill(&mould.path).len() + person.fill(&mould.value).len());
        (self.moulds.len(), bytes.sum())
    }

    /// The records of one kind of the actors with these numbers.
    pub(crate) fn cast(&self, kind: Kind, numbers: Range<u32>) -> impl Iterator<Item = Cast> {
        numbers.flat_map(move |number| {
            let person = Person::new(number, self.sealed_key);
            self.moulds.iter().filter(move |mould| mould.kind == kind).map(move |mould| Cast {
                kind,
                path: person.fill(&mould.path),
                value: person.fill(&mould.value).into_bytes(),
            })
        })
    }
}

/// What distinguishes an actor from its like.
struct Person {
    name: String,
    uid: String,
    op: String,
    manifest: String,
    sealed_key: String,
}

impl Person {
    fn new(number: u32, sealed_key: usize) -> Self {
        let mut lot = Lot(u64::from(number));
        // As those of real actors: whoever is made later sorts anywhere, and so does its past.
        let uid = lot.bytes();
        let letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut manifest = [0; 32];
        manifest[..16].copy_from_slice(&lot.bytes());
        manifest[16..].copy_from_slice(&lot.bytes());
        Self {
            name: actor_name(number),
            uid: ActorUid::from_random(uid).to_string(),
            op: OpId::from_random(lot.bytes()).to_string(),
            manifest: Digest::from_bytes(manifest).to_string(),
            sealed_key: (0..sealed_key).map(|_| char::from(letters[usize::from(lot.bytes()[0]) % 64])).collect(),
        }
    }

    fn fill(&self, pieces: &[Piece]) -> String {
        let mut text = String::with_capacity(1024);
        for piece in pieces {
            text.push_str(match piece {
                Piece::Text(text) => text,
                Piece::Mark(Mark::Name) => &self.name,
                Piece::Mark(Mark::Uid) => &self.uid,
                Piece::Mark(Mark::Op) => &self.op,
                Piece::Mark(Mark::Manifest) => &self.manifest,
                Piece::Mark(Mark::SealedKey) => &self.sealed_key,
            });
        }
        text
    }
}

/// Splitmix64: the same actors in every run, and no two alike.
struct Lot(u64);

impl Lot {
    fn bytes(&mut self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.next().to_be_bytes());
        bytes[8..].copy_from_slice(&self.next().to_be_bytes());
        bytes
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

fn cut(text: &str, marks: &[(String, Mark)]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut rest = text;
    loop {
        let first = marks.iter().filter_map(|(mark, which)| Some((rest.find(mark.as_str())?, mark.len(), *which)));
        let Some((at, length, mark)) = first.min_by_key(|(at, _, _)| *at) else { break };
        pieces.push(Piece::Text(rest[..at].to_owned()));
        pieces.push(Piece::Mark(mark));
        rest = &rest[at + length..];
    }
    pieces.push(Piece::Text(rest.to_owned()));
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_at_every_mark_and_casts_another_of_its_length() {
        let first = Person::new(0, 4);
        let marks = [(first.name.clone(), Mark::Name), (first.uid.clone(), Mark::Uid)];
        let text = format!("{}/{}:{}", first.uid, first.name, first.uid);
        let pieces = cut(&text, &marks);
        assert_eq!(first.fill(&pieces), text);
        let other = Person::new(7, 4).fill(&pieces);
        assert_eq!(other.len(), text.len());
        assert!(!other.contains(&first.name) && !other.contains(&first.uid), "{other}");
    }

    #[test]
    fn uids_are_drawn_by_lot_and_are_the_same_in_every_run() {
        let uids = || (0..1000).map(|number| Person::new(number, 0).uid).collect::<Vec<_>>();
        assert_eq!(uids(), uids());
        let rises = uids().windows(2).filter(|pair| pair[0] < pair[1]).count();
        assert!((400..600).contains(&rises), "{rises} of 999 are more than the one before");
        assert_eq!(uids().into_iter().collect::<std::collections::BTreeSet<_>>().len(), 1000, "no two alike");
    }
}
