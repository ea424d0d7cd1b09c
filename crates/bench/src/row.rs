//! What is kept of every single event, so that any number can be computed again from the file.
//!
//! One JSON object per line; times are microseconds since the run began:
//!
//! ```text
//!   {"round":3,"way":"ate","kind":"wake","scheduled":12000000,"start":12000041,"first_byte":12061220,"end":12061300,
//!    "phases":[["load",4100],["restore",38000]]}
//! ```
//! An event that failed has an `error` and counts in no percentile; the table says how many there were.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::BenchError;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    pub round: u32,
    /// Whose: ours, or the name of a baseline.
    pub way: String,
    /// What was done, such as "wake" or "suspend".
    pub kind: String,
    /// When it should have begun. Latency counts from here: who comes late because an earlier event took too long has
    /// waited, and the wait is part of what a client sees.
    pub scheduled: u64,
    pub start: u64,
    /// For events that have an answer: its first byte. For others the moment that was waited for.
    pub first_byte: u64,
    pub end: u64,
    /// Steps and how long each took, as far as they are known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<(String, u64)>,
    /// Of what was stored, if something was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Row {
    pub fn latency(&self) -> Duration {
        Duration::from_micros(self.first_byte.saturating_sub(self.scheduled))
    }
}

/// Rows of a run: kept, and written to a file as they come.
#[derive(Debug)]
pub struct Rows {
    path: PathBuf,
    writer: BufWriter<File>,
    kept: Vec<Row>,
}

impl Rows {
    pub fn create(path: &Path) -> Result<Self, BenchError> {
        let what = || BenchError::io(format!("write rows to {}", path.display()));
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent).map_err(what())?;
        }
        let file = File::create(path).map_err(what())?;
        Ok(Self { path: path.to_owned(), writer: BufWriter::new(file), kept: Vec::new() })
    }

    pub fn push(&mut self, row: Row) -> Result<(), BenchError> {
        let written = serde_json::to_writer(&mut self.writer, &row).map_err(io::Error::from);
        written
            .and_then(|()| self.writer.write_all(b"\n"))
            .map_err(BenchError::io(format!("write rows to {}", self.path.display())))?;
        self.kept.push(row);
        Ok(())
    }

    pub fn flush(&mut self) -> Result<(), BenchError> {
        self.writer.flush().map_err(BenchError::io(format!("write rows to {}", self.path.display())))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Those of one way and kind, the failed ones included.
    pub fn of<'a>(&'a self, way: &'a str, kind: &'a str) -> impl Iterator<Item = &'a Row> {
        self.kept.iter().filter(move |row| row.way == way && row.kind == kind)
    }

    pub fn samples(&self, way: &str, kind: &str) -> ate_chart::Samples {
        self.of(way, kind).filter(|row| row.error.is_none()).map(Row::latency).collect()
    }

    pub fn failures(&self, way: &str, kind: &str) -> usize {
        self.of(way, kind).filter(|row| row.error.is_some()).count()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_row_read_back_is_the_row_written(
            round: u32, way: String, kind: String, times: [u64; 4],
            phases in proptest::collection::vec((any::<String>(), any::<u64>()), 0..4),
            bytes: Option<u64>, error: Option<String>,
        ) {
            let [scheduled, start, first_byte, end] = times;
            let row = Row { round, way, kind, scheduled, start, first_byte, end, phases, bytes, error };
            let line = serde_json::to_string(&row).unwrap();
            prop_assert!(!line.contains('\n'));
            prop_assert_eq!(serde_json::from_str::<Row>(&line).unwrap(), row);
        }
    }

    #[test]
    fn an_event_that_began_late_is_charged_for_the_wait() {
        let row = Row { scheduled: 1000, start: 5000, first_byte: 6000, ..Row::default() };
        assert_eq!(row.latency(), Duration::from_millis(5));
    }

    #[test]
    fn failed_events_are_counted_and_in_no_percentile() {
        let directory = tempfile::tempdir().unwrap();
        let mut rows = Rows::create(&directory.path().join("deep/rows.jsonl")).unwrap();
        let row = |error: Option<&str>| Row {
            way: "ate".into(),
            kind: "wake".into(),
            error: error.map(str::to_owned),
            ..Row::default()
        };
        rows.push(row(None)).unwrap();
        rows.push(row(Some("no answer"))).unwrap();
        rows.flush().unwrap();
        assert_eq!((rows.samples("ate", "wake").len(), rows.failures("ate", "wake")), (1, 1));
        assert_eq!(std::fs::read_to_string(rows.path()).unwrap().lines().count(), 2);
    }
}
