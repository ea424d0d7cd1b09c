//! A store as a whole: what a backup and a check read, and what a restore puts in its place.

use std::collections::BTreeMap;
use std::fmt;

use futures::stream::BoxStream;

use crate::{Fault, Kind, Mutation, Record, Revision};

/// Everything that a store holds as of one commit: kind by kind as in [`Contents::ORDER`], each kind in path order.
/// Nothing is held in memory but what is on its way.
pub struct Contents {
    pub revision: Revision,
    /// The last revision that was acknowledged, if it is more than is left.
    pub lost: Option<Revision>,
    pub entries: BoxStream<'static, Result<Entry, Fault>>,
}

impl fmt::Debug for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Contents").field("revision", &self.revision).finish_non_exhaustive()
    }
}

impl Contents {
    /// Actors come last: what a restore makes of one may take back records of every other kind, which must be there then.
    pub const ORDER: [Kind; 12] = [
        Kind::Atespace,
        Kind::Config,
        Kind::Pool,
        Kind::Template,
        Kind::Node,
        Kind::Count,
        Kind::Replica,
        Kind::Worker,
        Kind::Meta,
        Kind::Operation,
        Kind::History,
        Kind::Actor,
    ];
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    Record(Record),
    /// Something that this program cannot have written: damage, or the work of a newer one.
    Foreign {
        key: String,
        reason: String,
    },
}

/// What is made of a store that came back with less than it acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostTail {
    Refuse,
    /// For whoever only reads what is left: it may not be gone on with as it is.
    Accept,
}

/// What a restore writes, in this order. An error ends it, and nothing is written.
pub type Mutations = BoxStream<'static, Result<Mutation, Box<dyn std::error::Error + Send + Sync>>>;

/// What takes the place of a store, as of a revision that is past the store's own.
pub struct Replacement {
    pub revision: Revision,
    pub mutations: Mutations,
}

impl fmt::Debug for Replacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replacement").field("revision", &self.revision).finish_non_exhaustive()
    }
}

/// What a restore does with a store that holds records already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfOccupied {
    Refuse,
    Replace,
}

/// How many records of each kind there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts(pub BTreeMap<Kind, u64>);

impl Counts {
    pub fn add(&mut self, kind: Kind) {
        *self.0.entry(kind).or_default() += 1;
    }

    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nothing");
        }
        for (at, (kind, count)) in self.0.iter().enumerate() {
            write!(f, "{}{count} {kind}", if at == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_in_the_order_once_and_actors_are_last() {
        let mut ordered = Contents::ORDER;
        assert_eq!(ordered.last(), Some(&Kind::Actor));
        ordered.sort();
        let mut all = Kind::ALL;
        all.sort();
        assert_eq!(ordered, all);
    }
}
