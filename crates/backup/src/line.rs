use std::borrow::Cow;

use ate_name::Digest;
use ate_store::{Key, Kind, MAX_VALUE, Record, Revision};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::Header;

pub(crate) const FORMAT: &str = "ate-store-backup";

/// The part of the first line that every version keeps.
#[derive(Deserialize)]
pub(crate) struct FirstOfAny {
    pub(crate) format: String,
    pub(crate) version: u32,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct First {
    format: String,
    version: u32,
    revision: u64,
    time: jiff::Timestamp,
    writer: String,
}

impl First {
    pub(crate) fn of(header: &Header) -> Self {
        let Header { revision, time, writer } = header.clone();
        Self { format: FORMAT.to_owned(), version: crate::VERSION, revision: revision.0, time, writer }
    }

    pub(crate) fn header(self) -> Header {
        Header { revision: Revision(self.revision), time: self.time, writer: self.writer }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Last {
    pub(crate) records: u64,
    pub(crate) sha256: Digest,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Line<'a> {
    kind: Cow<'a, str>,
    path: Cow<'a, str>,
    version: u64,
    revision: u64,
    /// The text itself; or, if it is none:
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base64: Option<String>,
}

impl Line<'_> {
    pub(crate) fn of(record: &Record) -> Line<'_> {
        let text = std::str::from_utf8(&record.value).ok();
        Line {
            kind: record.key.kind().name().into(),
            path: record.key.path().into(),
            version: record.version,
            revision: record.revision.0,
            value: text.map(Cow::from),
            base64: text.is_none().then(|| STANDARD.encode(&record.value)),
        }
    }

    pub(crate) fn record(self) -> Result<Record, String> {
        let kind = Kind::named(&self.kind).ok_or_else(|| format!("{:?} is no kind of record", self.kind))?;
        let key = Key::parse(kind, &self.path).map_err(|error| error.to_string())?;
        let value = match (self.value, self.base64) {
            (Some(text), None) => Bytes::from(text.into_owned()),
            (None, Some(text)) => STANDARD.decode(text).map_err(|error| error.to_string())?.into(),
            _ => return Err(format!("{key} has not one value")),
        };
        if value.len() > MAX_VALUE {
            return Err(format!("the value of {key} has {} bytes, the limit is {MAX_VALUE}", value.len()));
        }
        Ok(Record { key, version: self.version, revision: Revision(self.revision), value })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_record_comes_back_as_it_was_and_is_one_line(
            path in "[^/\0]{1,9}(/[^/\0]{1,9}){0,2}",
            (version, revision) in any::<(u64, u64)>(),
            value in prop_oneof![prop::collection::vec(any::<u8>(), 0..50), "\\PC*".prop_map(String::into_bytes)],
        ) {
            let key = Key::parse(Kind::Meta, &path).expect("well formed");
            let record = Record { key, version, revision: Revision(revision), value: value.into() };
            let text = serde_json::to_string(&Line::of(&record)).expect("plain data");
            prop_assert!(!text.contains('\n'));
            let back: Line<'_> = serde_json::from_str(&text).expect("was just written");
            prop_assert_eq!(back.record(), Ok(record));
        }
    }
}
