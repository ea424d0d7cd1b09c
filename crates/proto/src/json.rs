//! The protobuf JSON mapping, as Go's `protojson` writes it: camelCase names, enums by name, 64-bit integers as
//! strings, bytes in base64, fields without a value left out.
//!
//! Driven by the descriptors that reflection needs anyway. Generated serde code for the same messages would be several
//! thousand lines, and prost-reflect's own serialiser writes maps in the order of a hash table.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use base64::Engine as _;
use prost_reflect::{DescriptorPool, DynamicMessage, Kind, MapKey, ReflectMessage, Value};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::FILE_DESCRIPTOR_SET;

static DESCRIPTORS: LazyLock<DescriptorPool> =
    LazyLock::new(|| DescriptorPool::decode(FILE_DESCRIPTOR_SET).expect("a test decodes the same checked-in bytes"));

/// A message that serialises as protobuf JSON, to JSON or to YAML, whatever the serialiser writes.
#[derive(Clone, Debug)]
pub struct Json(DynamicMessage);

impl Json {
    pub fn new<M: prost::Name>(message: &M) -> Self {
        let descriptor = DESCRIPTORS.get_message_by_name(&M::full_name()).expect("every message of both APIs is there");
        let mut dynamic = DynamicMessage::new(descriptor);
        dynamic.transcode_from(message).expect("generated code and descriptors come from the same files");
        Self(dynamic)
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        message(&self.0, serializer)
    }
}

fn message<S: Serializer>(message: &DynamicMessage, serializer: S) -> Result<S::Ok, S::Error> {
    const OWN_TYPE: &str = "a well-known type has the layout of its name";
    match message.descriptor().full_name() {
        "google.protobuf.Timestamp" => {
            serializer.collect_str(&message.transcode_to::<prost_types::Timestamp>().expect(OWN_TYPE))
        }
        "google.protobuf.Duration" => {
            serializer.collect_str(&message.transcode_to::<prost_types::Duration>().expect(OWN_TYPE))
        }
        _ => {
            let mut map = serializer.serialize_map(None)?;
            for (field, value) in message.fields() {
                map.serialize_entry(field.json_name(), &Typed { kind: &field.kind(), value })?;
            }
            map.end()
        }
    }
}

struct Typed<'a> {
    kind: &'a Kind,
    value: &'a Value,
}

impl Serialize for Typed<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.value {
            Value::Bool(value) => serializer.serialize_bool(*value),
            Value::I32(value) => serializer.serialize_i32(*value),
            Value::U32(value) => serializer.serialize_u32(*value),
            Value::I64(value) => serializer.collect_str(value),
            Value::U64(value) => serializer.collect_str(value),
            // Neither API has floating-point fields, so there is no NaN to spell.
            Value::F32(value) => serializer.serialize_f32(*value),
            Value::F64(value) => serializer.serialize_f64(*value),
            Value::String(value) => serializer.serialize_str(value),
            Value::Bytes(value) => serializer.serialize_str(&base64::prelude::BASE64_STANDARD.encode(value)),
            Value::EnumNumber(number) => match self.kind.as_enum().and_then(|kind| kind.get_value(*number)) {
                Some(value) => serializer.serialize_str(value.name()),
                None => serializer.serialize_i32(*number),
            },
            Value::Message(value) => message(value, serializer),
            Value::List(values) => serializer.collect_seq(values.iter().map(|value| Typed { kind: self.kind, value })),
            Value::Map(values) => {
                let entry = self.kind.as_message().expect("a map field's kind is its entry");
                let kind = &entry.map_entry_value_field().kind();
                let sorted: BTreeMap<String, &Value> =
                    values.iter().map(|(key, value)| (map_key(key), value)).collect();
                serializer.collect_map(sorted.iter().map(|(key, value)| (key, Typed { kind, value })))
            }
        }
    }
}

fn map_key(key: &MapKey) -> String {
    match key {
        MapKey::Bool(key) => key.to_string(),
        MapKey::I32(key) => key.to_string(),
        MapKey::I64(key) => key.to_string(),
        MapKey::U32(key) => key.to_string(),
        MapKey::U64(key) => key.to_string(),
        MapKey::String(key) => key.clone(),
    }
}
