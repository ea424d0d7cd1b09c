//! The floor: a map in memory and a log of the same bytes, one `fdatasync` per transaction.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::ops::Bound;
use std::path::Path;
use std::sync::{Mutex, RwLock};

use ate_store::Fault;
use ate_store_embedded::engine::{Each, Engine, Finish, Reads, Writes};

type Map = BTreeMap<Vec<u8>, Vec<u8>>;

pub(crate) struct RawEngine {
    map: RwLock<Map>,
    log: Mutex<File>,
}

const REMOVED: u32 = u32::MAX;

impl RawEngine {
    pub(crate) fn open(directory: &Path) -> std::io::Result<Self> {
        let mut log = File::options().read(true).append(true).create(true).open(directory.join("log"))?;
        let mut bytes = Vec::new();
        log.read_to_end(&mut bytes)?;
        let mut map = Map::new();
        let mut rest = &bytes[..];
        while let Some((head, tail)) = rest.split_first_chunk::<8>() {
            let length = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
            let (key, value) = (length(0), length(4));
            let (key, tail) = tail.split_at(key as usize);
            rest = if value == REMOVED {
                map.remove(key);
                tail
            } else {
                let (value, tail) = tail.split_at(value as usize);
                map.insert(key.to_vec(), value.to_vec());
                tail
            };
        }
        Ok(Self { map: RwLock::new(map), log: Mutex::new(log) })
    }
}

impl Engine for RawEngine {
    fn read(&self, work: &mut dyn FnMut(&dyn Reads) -> Result<(), Fault>) -> Result<(), Fault> {
        work(&Transaction { map: &self.map, own: BTreeMap::new() })
    }

    fn write(&self, work: &mut dyn FnMut(&mut dyn Writes) -> Result<Finish, Fault>) -> Result<(), Fault> {
        let mut transaction = Transaction { map: &self.map, own: BTreeMap::new() };
        if work(&mut transaction)? == Finish::Abandon {
            return Ok(());
        }
        let own = transaction.own;
        let mut bytes = Vec::new();
        for (key, value) in &own {
            let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("small").to_le_bytes();
            bytes.extend_from_slice(&length(key));
            bytes.extend_from_slice(&value.as_ref().map_or(REMOVED.to_le_bytes(), |value| length(value)));
            bytes.extend_from_slice(key);
            bytes.extend_from_slice(value.as_deref().unwrap_or_default());
        }
        let mut log = self.log.lock().expect("no panics");
        log.write_all(&bytes)
            .and_then(|()| log.sync_data())
            .map_err(|error| Fault::Unavailable { reason: error.to_string() })?;
        let mut map = self.map.write().expect("no panics");
        for (key, value) in own {
            match value {
                Some(value) => map.insert(key, value),
                None => map.remove(&key),
            };
        }
        Ok(())
    }
}

struct Transaction<'a> {
    map: &'a RwLock<Map>,
    own: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

impl Reads for Transaction<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Fault> {
        let own = self.own.get(key).cloned();
        Ok(own.unwrap_or_else(|| self.map.read().expect("no panics").get(key).cloned()))
    }

    /// The comparison scans only in snapshots, never over its own writes.
    fn scan(&self, start: Bound<&[u8]>, each: Each<'_>) -> Result<(), Fault> {
        for (key, value) in self.map.read().expect("no panics").range::<[u8], _>((start, Bound::Unbounded)) {
            if !each(key, value)? {
                break;
            }
        }
        Ok(())
    }
}

impl Writes for Transaction<'_> {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), Fault> {
        self.own.insert(key.to_vec(), Some(value.to_vec()));
        Ok(())
    }

    fn remove(&mut self, key: &[u8]) -> Result<(), Fault> {
        self.own.insert(key.to_vec(), None);
        Ok(())
    }
}
