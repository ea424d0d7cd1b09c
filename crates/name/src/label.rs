//! Kubernetes labels: the keys and values that selectors compare.

use std::collections::BTreeMap;

pub type Labels = BTreeMap<String, String>;

/// Longest label value and longest name part of a key.
pub const MAX_LABEL_VALUE: usize = 63;

/// Most pairs that an actor's own selector may hold; a larger one is refused.
pub const MAX_SELECTOR_LABELS: usize = 10;

/// What Kubernetes says of a bad label, word for word (its double spaces included): clients compare the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    #[error("name part must be non-empty")]
    EmptyName,
    #[error("name part must be no more than 63 bytes")]
    LongName,
    #[error(
        "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
    )]
    MalformedName,
    #[error("prefix part must be non-empty")]
    EmptyPrefix,
    #[error("prefix part must be no more than 253 bytes")]
    LongPrefix,
    #[error(
        "prefix part a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
    )]
    MalformedPrefix,
    #[error(
        "a qualified name must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
    )]
    TooManySlashes,
    #[error("must be no more than 63 bytes")]
    LongValue,
    #[error(
        "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
    )]
    MalformedValue,
}

/// A qualified name: an optional DNS subdomain and a slash, then a name.
pub fn check_label_key(key: &str) -> Result<(), LabelError> {
    let mut parts = key.split('/');
    let (prefix, name) = match (parts.next(), parts.next(), parts.next()) {
        (Some(name), None, _) => (None, name),
        (Some(prefix), Some(name), None) => (Some(prefix), name),
        _ => return Err(LabelError::TooManySlashes),
    };
    if let Some(prefix) = prefix {
        if prefix.is_empty() {
            return Err(LabelError::EmptyPrefix);
        }
        if prefix.len() > 253 {
            return Err(LabelError::LongPrefix);
        }
        // Unlike a host name, a label's prefix may hold parts longer than 63 bytes.
        let part = |part: &str| {
            part.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').count() == 1
                && !part.bytes().any(|b| b.is_ascii_uppercase())
                && part.starts_with(|c: char| c.is_ascii_alphanumeric())
                && part.ends_with(|c: char| c.is_ascii_alphanumeric())
        };
        if !prefix.split('.').all(part) {
            return Err(LabelError::MalformedPrefix);
        }
    }
    if name.is_empty() {
        return Err(LabelError::EmptyName);
    }
    if name.len() > MAX_LABEL_VALUE {
        return Err(LabelError::LongName);
    }
    if is_label_text(name) { Ok(()) } else { Err(LabelError::MalformedName) }
}

pub fn check_label_value(value: &str) -> Result<(), LabelError> {
    if value.len() > MAX_LABEL_VALUE {
        return Err(LabelError::LongValue);
    }
    if value.is_empty() || is_label_text(value) { Ok(()) } else { Err(LabelError::MalformedValue) }
}

fn is_label_text(text: &str) -> bool {
    let alnum = |c: char| c.is_ascii_alphanumeric();
    text.starts_with(alnum)
        && text.ends_with(alnum)
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_follow_kubernetes() {
        for good in ["app", "ate.dev/worker-pool", "A_b.c", "x.y/1"] {
            assert_eq!(check_label_key(good), Ok(()), "{good}");
        }
        assert_eq!(check_label_key(""), Err(LabelError::EmptyName));
        assert_eq!(check_label_key("/a"), Err(LabelError::EmptyPrefix));
        assert_eq!(check_label_key("a/b/c"), Err(LabelError::TooManySlashes));
        assert_eq!(check_label_key("A.b/c"), Err(LabelError::MalformedPrefix));
        assert_eq!(check_label_key("a b"), Err(LabelError::MalformedName));
        assert_eq!(check_label_key(&"x".repeat(64)), Err(LabelError::LongName));
        for good in ["", "a", "my_value", "1.2-3"] {
            assert_eq!(check_label_value(good), Ok(()), "{good}");
        }
        assert_eq!(check_label_value("-a"), Err(LabelError::MalformedValue));
        assert_eq!(check_label_value(&"x".repeat(64)), Err(LabelError::LongValue));
    }
}
