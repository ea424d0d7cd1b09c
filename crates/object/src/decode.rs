//! A tree to typed values, strictly: a field that the type does not have is refused with the nearest one it has.
//!
//! An error knows the path it happened at, from which the tree tells the position.

use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use crate::FieldPath;
use crate::path::Segment;
use crate::yaml::{Entry, Node, Value};

pub(crate) fn decode<T: DeserializeOwned>(node: &Node) -> Result<T, DecodeError> {
    T::deserialize(Decoder(node))
}

/// The candidate that a mistyped word most likely meant, if any is close enough.
pub(crate) fn nearest<'a>(word: &str, candidates: &[&'a str]) -> Option<&'a str> {
    // A longer word resembles no name, and comparing takes the product of both lengths.
    const LONGEST: usize = 64;
    if word.len() > LONGEST {
        return None;
    }
    let limit = 1 + word.chars().count() / 4;
    let distance = |candidate: &str| edits(&word.to_lowercase(), &candidate.to_lowercase());
    let scored = candidates.iter().map(|candidate| (distance(candidate), *candidate));
    scored.filter(|(distance, _)| *distance <= limit).min().map(|(_, candidate)| candidate)
}

/// How many characters to insert, delete or replace to turn one word into the other.
fn edits(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[to.len()]
}

#[derive(Debug)]
pub(crate) struct DecodeError {
    innermost_first: Vec<Segment>,
    /// The key itself is wrong, not what stands behind it.
    pub(crate) of_key: bool,
    pub(crate) message: String,
}

impl DecodeError {
    fn new(message: impl Into<String>) -> Self {
        Self { innermost_first: Vec::new(), of_key: false, message: message.into() }
    }

    fn inside(mut self, segment: Segment) -> Self {
        self.innermost_first.push(segment);
        self
    }

    fn unknown_field(name: &str, known: &[&str]) -> Self {
        let message = match nearest(name, known) {
            Some(near) => format!("unknown field: did you mean \"{near}\"?"),
            None if known.is_empty() => "unknown field: there are none here".to_owned(),
            None => format!("unknown field: known here are {}", known.join(", ")),
        };
        Self { of_key: true, ..Self::new(message) }.inside(Segment::Name(name.to_owned()))
    }

    pub(crate) fn path(&self) -> FieldPath {
        FieldPath::from_innermost_first(self.innermost_first.clone())
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for DecodeError {}

impl de::Error for DecodeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let expected = in_words(expected);
        let scalar = matches!(
            found,
            Unexpected::Bool(_) | Unexpected::Signed(_) | Unexpected::Unsigned(_) | Unexpected::Float(_)
        );
        let remedy = if scalar && expected == "a string" { ": put it in quotes" } else { "" };
        Self::new(format!("expected {expected}, found {}{remedy}", found_in_words(found)))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::new(format!("expected {}, found {}", in_words(expected), found_in_words(found)))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        let expected: Vec<_> = expected.iter().map(|variant| format!("\"{variant}\"")).collect();
        Self::new(format!("Unsupported value: {variant:?}: supported values: {}", expected.join(", ")))
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new("is required").inside(Segment::Name(field.to_owned()))
    }
}

/// Serde names what it expected by Rust types; people write mappings and lists.
fn in_words(expected: &dyn Expected) -> String {
    match expected.to_string().as_str() {
        "a sequence" => "a list".to_owned(),
        "a map" => "a mapping".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "i64" => "a whole number".to_owned(),
        "u32" => format!("a whole number from 0 to {}", i32::MAX),
        text if text.starts_with("struct ") => "a mapping".to_owned(),
        text => text.to_owned(),
    }
}

fn found_in_words(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Unsigned(value) => value.to_string(),
        Unexpected::Signed(value) => value.to_string(),
        Unexpected::Float(value) => value.to_string(),
        Unexpected::Str(value) => format!("{value:?}"),
        Unexpected::Unit => "nothing".to_owned(),
        Unexpected::Seq => "a list".to_owned(),
        Unexpected::Map => "a mapping".to_owned(),
        other => other.to_string(),
    }
}

#[derive(Clone, Copy)]
struct Decoder<'a>(&'a Node);

impl<'a> Decoder<'a> {
    fn found(self) -> Unexpected<'a> {
        match &self.0.value {
            Value::Null => Unexpected::Unit,
            Value::Bool(value) => Unexpected::Bool(*value),
            Value::Integer(value) => match i64::try_from(*value) {
                Ok(value) => Unexpected::Signed(value),
                Err(_) => Unexpected::Float(*value as f64),
            },
            Value::Float(value) => Unexpected::Float(*value),
            Value::Text(text) => Unexpected::Str(text),
            Value::List(_) => Unexpected::Seq,
            Value::Map(_) => Unexpected::Map,
        }
    }
}

impl<'de> Deserializer<'de> for Decoder<'_> {
    type Error = DecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.0.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Integer(value) => match (i64::try_from(*value), u64::try_from(*value)) {
                (Ok(value), _) => visitor.visit_i64(value),
                (Err(_), Ok(value)) => visitor.visit_u64(value),
                (Err(_), Err(_)) => visitor.visit_f64(*value as f64),
            },
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(text) => visitor.visit_str(text),
            Value::List(items) => visitor.visit_seq(Items { items: items.iter().enumerate() }),
            Value::Map(entries) => visitor.visit_map(Entries { entries: entries.iter(), current: None }),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        if let Value::Map(entries) = &self.0.value
            && let Some(stranger) = entries.iter().find(|entry| !fields.contains(&entry.key.as_str()))
        {
            return Err(DecodeError::unknown_field(&stranger.key, fields));
        }
        // Serde would read a list as the fields in order; in a file that is a mistake.
        if let Value::List(_) = &self.0.value {
            return Err(de::Error::invalid_type(Unexpected::Seq, &visitor));
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.0.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        visitor.visit_newtype_struct(self)
    }

    /// A name, or a mapping of one name to its content.
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        match &self.0.value {
            Value::Text(text) => visitor.visit_enum(text.as_str().into_deserializer()),
            Value::Map(entries) if entries.len() == 1 => visitor.visit_enum(Variant(&entries[0])),
            _ => {
                let expected = format!("one of {}", variants.join(", "));
                Err(de::Error::invalid_type(self.found(), &expected.as_str()))
            }
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq
        tuple tuple_struct map identifier ignored_any
    }
}

struct Items<'a> {
    items: std::iter::Enumerate<std::slice::Iter<'a, Node>>,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = DecodeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, DecodeError> {
        let Some((index, item)) = self.items.next() else { return Ok(None) };
        seed.deserialize(Decoder(item)).map(Some).map_err(|error| error.inside(Segment::Index(index)))
    }
}

struct Entries<'a> {
    entries: std::slice::Iter<'a, Entry>,
    current: Option<&'a Entry>,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, DecodeError> {
        // As in Kubernetes, `field: null` says the same as no field.
        self.current = self.entries.find(|entry| !matches!(entry.value.value, Value::Null));
        let Some(entry) = self.current else { return Ok(None) };
        let key: StrDeserializer<'_, DecodeError> = entry.key.as_str().into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, DecodeError> {
        let entry = self.current.take().expect("serde asks for a value after its key");
        seed.deserialize(Decoder(&entry.value)).map_err(|error| error.inside(Segment::Name(entry.key.clone())))
    }
}

struct Variant<'a>(&'a Entry);

impl<'de> EnumAccess<'de> for Variant<'_> {
    type Error = DecodeError;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), DecodeError> {
        let name: StrDeserializer<'_, DecodeError> = self.0.key.as_str().into_deserializer();
        Ok((seed.deserialize(name)?, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_> {
    type Error = DecodeError;

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, DecodeError> {
        seed.deserialize(Decoder(&self.0.value)).map_err(|error| error.inside(Segment::Name(self.0.key.clone())))
    }

    fn unit_variant(self) -> Result<(), DecodeError> {
        Err(DecodeError::new(format!("expected just {:?}, found a mapping", self.0.key)))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _len: usize, visitor: V) -> Result<V::Value, DecodeError> {
        Err(de::Error::invalid_type(Unexpected::Map, &visitor))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        Err(de::Error::invalid_type(Unexpected::Map, &visitor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_name_is_suggested_and_a_far_one_is_not() {
        let known = ["containers", "volumes", "image", "imagePullSecrets"];
        assert_eq!(nearest("container", &known), Some("containers"));
        assert_eq!(nearest("Image", &known), Some("image"));
        assert_eq!(nearest("imagepullsecret", &known), Some("imagePullSecrets"));
        assert_eq!(nearest("replicas", &known), None);
        assert_eq!(nearest(&"x".repeat(1000), &known), None);
    }
}
