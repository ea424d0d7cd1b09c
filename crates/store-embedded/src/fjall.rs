use std::io;
use std::ops::Bound;
use std::path::Path;

use ate_store::Fault;
use fjall::config::PartitioningPolicy;
use fjall::{
    KeyspaceCreateOptions, PersistMode, Readable, SingleWriterTxDatabase, SingleWriterTxKeyspace, SingleWriterWriteTx,
};

use crate::engine::{Each, Engine, Finish, Reads, Writes};

/// A log-structured merge tree: a journal takes the flush, sorted files are written in the background.
pub struct FjallEngine {
    database: SingleWriterTxDatabase,
    records: SingleWriterTxKeyspace,
}

impl FjallEngine {
    /// `memory_bytes` is what gathers in memory before a sorted file is written; it counts when the store is created.
    pub fn open(directory: &Path, cache_bytes: u64, memory_bytes: u64) -> Result<Self, Fault> {
        // Filters and indexes in small parts from the first level on: as a whole each is a hundred kilobytes that are read again
        // for a look at one of millions of records, once they do not fit into the cache together.
        let parts = || PartitioningPolicy::new([false, true]);
        let options = || {
            KeyspaceCreateOptions::default()
                .max_memtable_size(memory_bytes)
                .filter_block_partitioning_policy(parts())
                .index_block_partitioning_policy(parts())
        };
        let database = SingleWriterTxDatabase::builder(directory).cache_size(cache_bytes).open().map_err(fault)?;
        let records = database.keyspace("records", options).map_err(fault)?;
        Ok(Self { database, records })
    }
}

impl std::fmt::Debug for FjallEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FjallEngine").finish_non_exhaustive()
    }
}

/// What may pass with time is unavailable; what contradicts the files is corrupt.
fn fault(error: fjall::Error) -> Fault {
    match error {
        fjall::Error::Io(io) | fjall::Error::Storage(fjall::LsmError::Io(io)) => match io.kind() {
            // A file that is shorter than its neighbours say, gone, or not what it should hold.
            io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound | io::ErrorKind::InvalidData => {
                Fault::Corrupt { reason: io.to_string() }
            }
            _ => Fault::Unavailable { reason: io.to_string() },
        },
        fjall::Error::Poisoned => {
            Fault::Unavailable { reason: "an earlier write failed; is the disk full?".to_owned() }
        }
        fjall::Error::Locked => Fault::Unavailable { reason: "another process holds the engine's files".to_owned() },
        other => Fault::Corrupt { reason: other.to_string() },
    }
}

impl Engine for FjallEngine {
    fn read(&self, work: &mut dyn FnMut(&dyn Reads) -> Result<(), Fault>) -> Result<(), Fault> {
        work(&State { reader: self.database.read_tx(), records: &self.records })
    }

    fn write(&self, work: &mut dyn FnMut(&mut dyn Writes) -> Result<Finish, Fault>) -> Result<(), Fault> {
        // fdatasync: it flushes the length of a file that grew, and the journal needs no other metadata.
        let reader = self.database.write_tx().durability(Some(PersistMode::SyncData));
        let mut state = State { reader, records: &self.records };
        match work(&mut state)? {
            Finish::Commit => state.reader.commit().map_err(fault),
            Finish::Abandon => Ok(()),
        }
    }

    fn cached_bytes(&self) -> u64 {
        self.database.inner().cache_size()
    }
}

struct State<'a, R> {
    reader: R,
    records: &'a SingleWriterTxKeyspace,
}

impl<R: Readable> Reads for State<'_, R> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Fault> {
        Ok(self.reader.get(self.records, key).map_err(fault)?.map(|value| value.to_vec()))
    }

    fn scan(&self, start: Bound<&[u8]>, each: Each<'_>) -> Result<(), Fault> {
        for entry in self.reader.range::<&[u8], _>(self.records, (start, Bound::Unbounded)) {
            let (key, value) = entry.into_inner().map_err(fault)?;
            if !each(&key, &value)? {
                break;
            }
        }
        Ok(())
    }
}

impl Writes for State<'_, SingleWriterWriteTx<'_>> {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), Fault> {
        self.reader.insert(self.records, key, value);
        Ok(())
    }

    fn remove(&mut self, key: &[u8]) -> Result<(), Fault> {
        self.reader.remove(self.records, key);
        Ok(())
    }
}
