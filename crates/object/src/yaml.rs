//! YAML text to a tree that remembers where everything stood.
//!
//! Deserialising straight from YAML would lose the position of a value as soon as a rule, and not its syntax, is
//! broken. So the text becomes a tree first, and whatever is wrong later is looked up there by its path.

use std::collections::{HashMap, HashSet};

use serde_saphyr::granit_parser::{self, Event, Parser, ScalarStyle, ScanError, Span, StrInput, Tag};

use crate::FieldPath;
use crate::path::Segment;

/// Deepest nesting of lists and mappings; a file that goes deeper is refused. Ours need ten levels.
pub const MAX_DEPTH: usize = 64;

/// Most memory that the tree of a file may take once its aliases are written out; a file that needs more is refused.
/// A few lines of aliases to aliases could otherwise stand for terabytes.
pub const MAX_EXPANDED_BYTES: usize = 32 * 1024 * 1024;

/// What a node costs besides its text.
const NODE_BYTES: usize = 64;

/// Counted from one, columns in characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) line: usize,
    pub(crate) column: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) at: Position,
    pub(crate) value: Value,
}

#[derive(Clone, Debug)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    /// Fits an `i64` or a `u64`.
    Integer(i128),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) at: Position,
    pub(crate) value: Node,
}

/// Why a text is no tree.
#[derive(Debug)]
pub(crate) struct Flaw {
    pub(crate) at: Position,
    pub(crate) path: FieldPath,
    pub(crate) message: String,
}

/// The documents of a file, at most `limit`.
pub(crate) fn load(text: &str, limit: usize) -> Result<Vec<Node>, Flaw> {
    let options = granit_parser::options! { emit_comments: false };
    let mut loader = Loader {
        parser: Parser::new_from_str_with_options(text, options),
        anchors: HashMap::new(),
        expanded: 0,
        path: FieldPath::default(),
    };
    let mut documents = Vec::new();
    loop {
        let (event, span) = loader.next()?;
        match event {
            Event::StreamEnd => return Ok(documents),
            Event::StreamStart | Event::DocumentStart(..) => {}
            Event::DocumentEnd => loader.anchors.clear(),
            _ if documents.len() == limit => {
                return Err(loader.flaw(start(&span), format!("more than {limit} documents in one file")));
            }
            event => documents.push(loader.node(event, &span, 0)?),
        }
    }
}

struct Loader<'a> {
    parser: Parser<'a, StrInput<'a>>,
    anchors: HashMap<usize, Node>,
    expanded: usize,
    /// Of the node that is being read.
    path: FieldPath,
}

impl<'a> Loader<'a> {
    fn flaw(&self, at: Position, message: impl Into<String>) -> Flaw {
        Flaw { at, path: self.path.clone(), message: message.into() }
    }

    fn next(&mut self) -> Result<(Event<'a>, Span), Flaw> {
        match self.parser.next() {
            Some(Ok(next)) => Ok(next),
            Some(Err(error)) => Err(self.malformed(&error)),
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn malformed(&self, error: &ScanError) -> Flaw {
        let marker = error.marker();
        self.flaw(Position { line: marker.line(), column: marker.col() + 1 }, format!("not YAML: {}", error.info()))
    }

    fn node(&mut self, event: Event<'a>, span: &Span, depth: usize) -> Result<Node, Flaw> {
        let at = start(span);
        if depth > MAX_DEPTH {
            return Err(self.flaw(at, format!("nested deeper than {MAX_DEPTH} levels")));
        }
        let (value, anchor) = match event {
            Event::Alias(id) => return self.alias(id, at, depth),
            Event::Scalar(text, style, anchor, tag) => {
                self.spend(NODE_BYTES + text.len(), at)?;
                let is_text = self.is_text_tag(tag.as_deref(), at)? || style != ScalarStyle::Plain;
                (if is_text { Value::Text(text.into_owned()) } else { plain(&text) }, anchor)
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.is_text_tag(tag.as_deref(), at)?;
                self.spend(NODE_BYTES, at)?;
                (Value::List(self.list(depth)?), anchor)
            }
            Event::MappingStart(_, anchor, tag) => {
                self.is_text_tag(tag.as_deref(), at)?;
                self.spend(NODE_BYTES, at)?;
                (Value::Map(self.map(depth)?), anchor)
            }
            _ => return Err(self.flaw(at, "not YAML: a value was expected here")),
        };
        let node = Node { at, value };
        if anchor > 0 {
            // The copy that aliases are made from.
            self.spend(weight(&node), at)?;
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn list(&mut self, depth: usize) -> Result<Vec<Node>, Flaw> {
        let mut items = Vec::new();
        loop {
            let (event, span) = self.next()?;
            if matches!(event, Event::SequenceEnd) {
                return Ok(items);
            }
            self.path.push(Segment::Index(items.len()));
            items.push(self.node(event, &span, depth + 1)?);
            self.path.pop();
        }
    }

    fn map(&mut self, depth: usize) -> Result<Vec<Entry>, Flaw> {
        let mut entries = Vec::new();
        let mut merged = Vec::new();
        let mut places = HashMap::new();
        loop {
            let (event, span) = self.next()?;
            if matches!(event, Event::MappingEnd) {
                break;
            }
            let at = start(&span);
            let is_merge = matches!(&event, Event::Scalar(text, ScalarStyle::Plain, ..) if text == "<<");
            let key = self.key(event, at, depth)?;
            self.path.push(Segment::Name(key.clone()));
            if !is_merge && let Some(Position { line, column }) = places.insert(key.clone(), at) {
                return Err(self.flaw(at, format!("duplicate key: already set at line {line}, column {column}")));
            }
            let (event, span) = self.next()?;
            let value = self.node(event, &span, depth + 1)?;
            if is_merge {
                merged.push(value)
            } else {
                entries.push(Entry { key, at, value })
            }
            self.path.pop();
        }
        self.merge(&mut entries, places.into_keys().collect(), merged)?;
        Ok(entries)
    }

    fn key(&mut self, event: Event<'a>, at: Position, depth: usize) -> Result<String, Flaw> {
        let key = match event {
            Event::Scalar(text, _, anchor, _) => {
                if anchor > 0 {
                    self.anchors.insert(anchor, Node { at, value: Value::Text(text.to_string()) });
                }
                text.into_owned()
            }
            Event::Alias(id) => match self.alias(id, at, depth)?.value {
                Value::Text(text) => text,
                _ => return Err(self.flaw(at, "a key must be text")),
            },
            _ => return Err(self.flaw(at, "a key must be text")),
        };
        self.spend(NODE_BYTES + key.len(), at)?;
        Ok(key)
    }

    /// `<<: *defaults`: what a mapping says itself wins, and an earlier merge wins over a later one.
    fn merge(&self, entries: &mut Vec<Entry>, mut known: HashSet<String>, merged: Vec<Node>) -> Result<(), Flaw> {
        let mut sources = Vec::new();
        for node in merged {
            match node.value {
                Value::List(items) => sources.extend(items),
                _ => sources.push(node),
            }
        }
        for source in sources {
            let Value::Map(more) = source.value else {
                return Err(self.flaw(source.at, "\"<<\" takes a mapping, or a list of them"));
            };
            entries.extend(more.into_iter().filter(|entry| known.insert(entry.key.clone())));
        }
        Ok(())
    }

    fn alias(&mut self, id: usize, at: Position, depth: usize) -> Result<Node, Flaw> {
        let Some(node) = self.anchors.get(&id) else {
            return Err(self.flaw(at, "an alias inside of what it stands for"));
        };
        if depth + height(node) > MAX_DEPTH {
            return Err(self.flaw(at, format!("nested deeper than {MAX_DEPTH} levels")));
        }
        self.spend(weight(node), at)?;
        Ok(self.anchors[&id].clone())
    }

    fn spend(&mut self, bytes: usize, at: Position) -> Result<(), Flaw> {
        self.expanded += bytes;
        if self.expanded > MAX_EXPANDED_BYTES {
            return Err(self.flaw(at, format!("the file takes more than {MAX_EXPANDED_BYTES} bytes of memory")));
        }
        Ok(())
    }

    /// Whether a tag says that a scalar is text. A tag that YAML itself does not define is refused.
    fn is_text_tag(&self, tag: Option<&Tag>, at: Position) -> Result<bool, Flaw> {
        let Some(tag) = tag else { return Ok(false) };
        match tag.core_suffix() {
            Some(name) => Ok(name == "str"),
            None => Err(self.flaw(at, format!("unknown tag \"{}\"", tag.to_string().escape_debug()))),
        }
    }
}

fn start(span: &Span) -> Position {
    Position { line: span.start.line(), column: span.start.col() + 1 }
}

fn weight(node: &Node) -> usize {
    NODE_BYTES
        + match &node.value {
            Value::Text(text) => text.len(),
            Value::List(items) => items.iter().map(weight).sum(),
            Value::Map(entries) => {
                entries.iter().map(|entry| NODE_BYTES + entry.key.len() + weight(&entry.value)).sum()
            }
            _ => 0,
        }
}

fn height(node: &Node) -> usize {
    let tallest = match &node.value {
        Value::List(items) => items.iter().map(height).max(),
        Value::Map(entries) => entries.iter().map(|entry| height(&entry.value)).max(),
        _ => None,
    };
    tallest.map_or(0, |height| height + 1)
}

/// What an unquoted scalar means in YAML 1.2. Infinities and the like stay text: no field takes one.
fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" => return Value::Bool(true),
        "false" | "False" | "FALSE" => return Value::Bool(false),
        _ => {}
    }
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let integer = match text.split_at_checked(2) {
        Some(("0x", digits)) => i128::from_str_radix(digits, 16).ok().filter(|_| digits.bytes().all(hexadecimal)),
        Some(("0o", digits)) => i128::from_str_radix(digits, 8).ok().filter(|_| digits.bytes().all(octal)),
        _ if unsigned.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok(),
        _ => None,
    };
    if let Some(integer) = integer.filter(|n| (i128::from(i64::MIN)..=i128::from(u64::MAX)).contains(n)) {
        return Value::Integer(integer);
    }
    let numeric = unsigned.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        && unsigned.bytes().all(|b| b.is_ascii_digit() || b".eE+-".contains(&b));
    match text.parse::<f64>() {
        Ok(number) if numeric && number.is_finite() => Value::Float(number),
        _ => Value::Text(text.to_owned()),
    }
}

fn hexadecimal(byte: u8) -> bool {
    byte.is_ascii_hexdigit()
}

fn octal(byte: u8) -> bool {
    matches!(byte, b'0'..=b'7')
}

impl Node {
    pub(crate) fn get(&self, key: &str) -> Option<&Node> {
        let Value::Map(entries) = &self.value else { return None };
        entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
    }

    pub(crate) fn get_mut(&mut self, key: &str) -> Option<&mut Node> {
        let Value::Map(entries) = &mut self.value else { return None };
        entries.iter_mut().find(|entry| entry.key == key).map(|entry| &mut entry.value)
    }

    /// Where a path leads, or where the first part of it that is missing should have been. A mapping, a list and
    /// anything that `of_key` asks for are found at their key: that is the line a person looks for.
    pub(crate) fn position(&self, path: &FieldPath, of_key: bool) -> Position {
        let mut node = self;
        let mut at = self.at;
        for segment in path.segments() {
            let (place, child) = match (segment, &node.value) {
                (Segment::Index(index), Value::List(items)) => match items.get(*index) {
                    Some(item) => (item.at, item),
                    None => return at,
                },
                (Segment::Name(name), Value::Map(entries)) => match entries.iter().find(|entry| entry.key == *name) {
                    Some(entry) => (entry.at, &entry.value),
                    None => return at,
                },
                _ => return at,
            };
            (at, node) = (place, child);
        }
        match node.value {
            Value::Null | Value::List(_) | Value::Map(_) => at,
            _ if of_key => at,
            _ => node.at,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flaw(text: &str) -> String {
        let flaw = load(text, 3).unwrap_err();
        format!("{}:{} {} {}", flaw.at.line, flaw.at.column, flaw.path, flaw.message)
    }

    #[test]
    fn unquoted_scalars_mean_what_yaml_says() {
        for (text, expected) in [
            ("", "Null"),
            ("~", "Null"),
            ("true", "Bool(true)"),
            ("no", "Text(\"no\")"),
            ("8080", "Integer(8080)"),
            ("-1", "Integer(-1)"),
            ("0x1F", "Integer(31)"),
            ("0o17", "Integer(15)"),
            ("0x-1", "Text(\"0x-1\")"),
            ("18446744073709551615", "Integer(18446744073709551615)"),
            ("18446744073709551616", "Float(1.8446744073709552e19)"),
            ("0.5", "Float(0.5)"),
            ("1e3", "Float(1000.0)"),
            ("1e999", "Text(\"1e999\")"),
            (".inf", "Text(\".inf\")"),
            ("infinity", "Text(\"infinity\")"),
            ("256Mi", "Text(\"256Mi\")"),
            ("1.2.3", "Text(\"1.2.3\")"),
            ("+", "Text(\"+\")"),
            ("é", "Text(\"é\")"),
        ] {
            assert_eq!(format!("{:?}", plain(text)), expected, "{text}");
        }
    }

    #[test]
    fn anchors_aliases_and_merges_are_written_out() {
        let text = "&k a: &a {x: 1, y: 2}\nb: *a\nc: {<<: *a, y: 3}\nd: {<<: [{z: 4}, *a]}\ne: {*k : 5}\n";
        let documents = load(text, 1).unwrap();
        let number = |path: &[&str]| {
            let node = path.iter().try_fold(&documents[0], |node, key| node.get(key));
            node.map(|node| format!("{:?}", node.value))
        };
        assert_eq!(number(&["b", "x"]).unwrap(), "Integer(1)");
        assert_eq!(number(&["c", "x"]).unwrap(), "Integer(1)");
        assert_eq!(number(&["c", "y"]).unwrap(), "Integer(3)");
        assert_eq!(number(&["d", "z"]).unwrap(), "Integer(4)");
        assert_eq!(number(&["d", "y"]).unwrap(), "Integer(2)");
        assert_eq!(number(&["d", "<<"]), None);
        assert_eq!(number(&["e", "a"]).unwrap(), "Integer(5)");
    }

    #[test]
    fn what_is_no_tree_is_refused_where_it_stands() {
        assert_eq!(flaw("a:\n  b: 1\n  b: 2\n"), "3:3 a.b duplicate key: already set at line 2, column 3");
        assert_eq!(flaw("a: {b: [{c: 1, c: 2}]}"), "1:16 a.b[0].c duplicate key: already set at line 1, column 10");
        assert_eq!(flaw("a:\n  [1]: 2\n"), "2:3 a a key must be text");
        assert_eq!(flaw("a: &a [*a]\n"), "1:8 a[0] an alias inside of what it stands for");
        assert_eq!(flaw("a: !thing 1\n"), "1:11 a unknown tag \"!thing\"");
        assert_eq!(flaw("a: {<<: 1}\n"), "1:9 a \"<<\" takes a mapping, or a list of them");
        assert_eq!(flaw("1\n---\n2\n---\n3\n---\n4\n"), "7:1  more than 3 documents in one file");
        assert!(flaw("a: [1\nb: 2\n").contains("not YAML: "), "{}", flaw("a: [1\nb: 2\n"));
        assert!(flaw("a: *nobody\n").starts_with("1:4 a not YAML: "), "{}", flaw("a: *nobody\n"));
    }

    #[test]
    fn a_tree_has_limits() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert!(load(&nested(MAX_DEPTH), 1).is_ok());
        assert!(flaw(&nested(MAX_DEPTH + 2)).ends_with("nested deeper than 64 levels"));
        let half = nested(MAX_DEPTH / 2);
        let deep = flaw(&format!("- &a {half}\n- {}*a{}", "[".repeat(40), "]".repeat(40)));
        assert!(deep.ends_with("nested deeper than 64 levels"), "{deep}");

        let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
        for level in 1..20 {
            let previous = format!("*a{}, ", level - 1).repeat(9);
            bomb.push_str(&format!("a{level}: &a{level} [{previous}]\n"));
        }
        assert!(flaw(&bomb).ends_with("bytes of memory"));
        let long = format!("a: &a {}\nb: [{}]\n", "x".repeat(1 << 20), "*a, ".repeat(40));
        assert!(flaw(&long).ends_with("bytes of memory"));
    }
}
