//! What an actor prints, as one JSON object per line with the labels that say whose it is.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use serde_json::{Map, Value, json};

use ate_orders::Identity;

/// Longest line taken whole; a longer one is cut into several.
const MAX_LINE: u64 = 1 << 20;

/// A log that an actor has filled with so much is emptied: what it prints must not fill the disk.
const MAX_LOG: u64 = 64 << 20;

/// Where lines go: nowhere until an actor is here, then to that actor's log. One lock, so lines never interleave.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sink(Arc<Mutex<Option<Log>>>);

#[derive(Debug)]
struct Log {
    file: File,
    labels: Map<String, Value>,
}

impl Sink {
    pub(crate) fn open(&self, file: File, identity: &Identity) {
        let labels = [
            ("ate.dev/actor_id", identity.key.name.to_string()),
            ("ate.dev/actor_uid", identity.uid.to_string()),
            ("ate.dev/atespace", identity.key.atespace.to_string()),
            ("ate.dev/actor_template_name", identity.template.name.clone()),
            ("ate.dev/actor_template_namespace", identity.template.namespace.clone()),
        ];
        let labels = labels.into_iter().map(|(key, value)| (key.to_owned(), Value::String(value))).collect();
        *self.0.lock().expect("no holder panics") = Some(Log { file, labels });
    }

    pub(crate) fn lifecycle(&self, message: &str) {
        self.write(message.as_bytes(), None);
    }

    fn write(&self, line: &[u8], container: Option<&str>) {
        let mut sink = self.0.lock().expect("no holder panics");
        let Some(Log { file, labels }) = sink.as_mut() else { return };
        let mut out = labelled(line, labels, container, &jiff::Timestamp::now().to_string()).to_string();
        out.push('\n');
        if file.metadata().is_ok_and(|metadata| metadata.len() > MAX_LOG) {
            // The node begins a new file when an actor wakes; one that never sleeps begins its own anew.
            let _ = file.set_len(0);
        }
        // A full disk loses log lines, never the actor.
        let _ = file.write_all(out.as_bytes());
    }
}

/// A JSON object keeps its fields; anything else becomes its `message`. Our labels win over the workload's.
fn labelled(line: &[u8], labels: &Map<String, Value>, container: Option<&str>, now: &str) -> Value {
    let mut object = match serde_json::from_slice(line) {
        Ok(Value::Object(object)) => object,
        _ => Map::from_iter([("message".to_owned(), json!(String::from_utf8_lossy(line)))]),
    };
    object.entry("time").or_insert_with(|| json!(now));
    let own = object.entry("labels").or_insert_with(|| json!({}));
    if !own.is_object() {
        *own = json!({});
    }
    let own = own.as_object_mut().expect("made one just now");
    own.extend(labels.clone());
    if let Some(container) = container {
        own.insert("ate.dev/container_name".to_owned(), json!(container));
    }
    Value::Object(object)
}

/// Follows a container's output until every writer has closed it, on a thread of its own: files can make it wait.
pub(crate) fn follow(output: OwnedFd, container: String, sink: Sink) {
    std::thread::spawn(move || {
        let mut reader = BufReader::new(File::from(output));
        let mut line = Vec::new();
        loop {
            line.clear();
            match reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => sink.write(line.strip_suffix(b"\n").unwrap_or(&line), Some(&container)),
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Value {
        let labels = Map::from_iter([("ate.dev/actor_id".to_owned(), json!("a"))]);
        labelled(text.as_bytes(), &labels, Some("main"), "now")
    }

    #[test]
    fn text_becomes_a_message() {
        let expected = json!({"message": "hello", "time": "now", "labels": {"ate.dev/actor_id": "a", "ate.dev/container_name": "main"}});
        assert_eq!(line("hello"), expected);
        assert_eq!(line("{\"a\":1} trailing")["message"], "{\"a\":1} trailing");
        assert_eq!(line("[1]")["message"], "[1]");
    }

    #[test]
    fn an_object_keeps_its_fields_but_not_our_labels() {
        let out = line(r#"{"time":"then","n":12345678901234567890,"labels":{"ate.dev/actor_id":"forged","own":"x"}}"#);
        assert_eq!(out["time"], "then");
        assert_eq!(out["n"].to_string(), "12345678901234567890");
        assert_eq!(out["labels"]["ate.dev/actor_id"], "a");
        assert_eq!(out["labels"]["own"], "x");
        assert_eq!(line(r#"{"labels":"text"}"#)["labels"]["ate.dev/actor_id"], "a");
    }
}
