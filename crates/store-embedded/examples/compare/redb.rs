use std::ops::Bound;
use std::path::Path;

use ate_store::Fault;
use redb::{Database, ReadableDatabase, ReadableTable, StorageError, Table, TableDefinition};

use ate_store_embedded::engine::{Each, Engine, Finish, Reads, Writes};

const RECORDS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("records");

/// How much redb does per commit so that a crash costs less later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// One flush; a torn commit is found by its checksums.
    OnePhase,
    /// Two flushes; a torn commit is never pointed at.
    TwoPhase,
    /// Two flushes and the page allocator's state, so that opening after a crash walks nothing.
    QuickRepair,
}

#[derive(Debug)]
pub(crate) struct RedbEngine {
    database: Database,
    mode: Mode,
}

impl RedbEngine {
    pub(crate) fn open(file: &Path, cache_bytes: usize, mode: Mode) -> Result<Self, Fault> {
        let database = Database::builder().set_cache_size(cache_bytes).create(file).map_err(fault)?;
        let engine = Self { database, mode };
        // Readers open the table without creating it.
        engine.write(&mut |_| Ok(Finish::Commit))?;
        Ok(engine)
    }
}

fn fault(error: impl Into<redb::Error>) -> Fault {
    let error = error.into();
    match error {
        redb::Error::Corrupted(reason) => Fault::Corrupt { reason },
        redb::Error::UpgradeRequired(_) | redb::Error::TableTypeMismatch { .. } => {
            Fault::Corrupt { reason: error.to_string() }
        }
        other => Fault::Unavailable { reason: other.to_string() },
    }
}

impl Engine for RedbEngine {
    fn read(&self, work: &mut dyn FnMut(&dyn Reads) -> Result<(), Fault>) -> Result<(), Fault> {
        let transaction = self.database.begin_read().map_err(fault)?;
        work(&Readable(transaction.open_table(RECORDS).map_err(fault)?))
    }

    fn write(&self, work: &mut dyn FnMut(&mut dyn Writes) -> Result<Finish, Fault>) -> Result<(), Fault> {
        let mut transaction = self.database.begin_write().map_err(fault)?;
        transaction.set_two_phase_commit(self.mode != Mode::OnePhase);
        transaction.set_quick_repair(self.mode == Mode::QuickRepair);
        let finish = work(&mut Readable(transaction.open_table(RECORDS).map_err(fault)?))?;
        match finish {
            Finish::Commit => transaction.commit().map_err(fault),
            Finish::Abandon => transaction.abort().map_err(|error: StorageError| fault(error)),
        }
    }
}

struct Readable<T>(T);

impl<T: ReadableTable<&'static [u8], &'static [u8]>> Reads for Readable<T> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Fault> {
        Ok(self.0.get(key).map_err(fault)?.map(|value| value.value().to_vec()))
    }

    fn scan(&self, start: Bound<&[u8]>, each: Each<'_>) -> Result<(), Fault> {
        for entry in self.0.range::<&[u8]>((start, Bound::Unbounded)).map_err(fault)? {
            let (key, value) = entry.map_err(fault)?;
            if !each(key.value(), value.value())? {
                break;
            }
        }
        Ok(())
    }
}

impl Writes for Readable<Table<'_, &'static [u8], &'static [u8]>> {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), Fault> {
        self.0.insert(key, value).map(drop).map_err(fault)
    }

    fn remove(&mut self, key: &[u8]) -> Result<(), Fault> {
        self.0.remove(key).map(drop).map_err(fault)
    }
}
