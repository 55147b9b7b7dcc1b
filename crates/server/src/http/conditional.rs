//! Conditional requests (RFC 9110 13): entity tags and the order of preconditions.
//!
//! Every tag sent is strong: it is made from device, inode, length and mtime. No Last-Modified is sent, so
//! If-Modified-Since is ignored and a date in If-Range never matches, as the RFC requires.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use std::fmt::{self, Display, Write as _};

/// The result of the preconditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Precondition {
    /// Proceed.
    Holds,
    /// If-Match names other versions: 412.
    Failed,
    /// If-None-Match names this version: 304.
    NotModified,
}

/// A strong entity tag as in a header, quotes included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ETag(HeaderValue);

impl ETag {
    /// From the unquoted tag. Characters that a tag may not contain are left out.
    pub(super) fn new(opaque: impl Display) -> Self {
        let mut quoted = Quoted(Vec::with_capacity(TAG_BYTES));
        quoted.0.push(b'"');
        // Writing to memory cannot fail.
        let _always_ok = write!(quoted, "{opaque}");
        quoted.0.push(b'"');
        let value = HeaderValue::from_maybe_shared(Bytes::from(quoted.0));
        Self(value.unwrap_or(HeaderValue::from_static("\"\"")))
    }

    pub(super) fn value(&self) -> HeaderValue {
        self.0.clone()
    }

    fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// Room for most tags: four hexadecimal numbers and an item's.
const TAG_BYTES: usize = 96;

/// Text, filtered to the characters that a tag may have.
struct Quoted(Vec<u8>);

impl fmt::Write for Quoted {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let legal = |byte: &u8| matches!(byte, b'\x21' | b'\x23'..=b'\x7e');
        if text.as_bytes().iter().all(legal) {
            self.0.extend_from_slice(text.as_bytes());
        } else {
            self.0.extend(text.bytes().filter(legal));
        }
        Ok(())
    }
}

/// Evaluates If-Match, then If-None-Match (RFC 9110 13.2.2).
pub(super) fn evaluate(headers: &HeaderMap, current: &ETag) -> Precondition {
    evaluate_part(headers, current, || None)
}

/// The same for a part of something that itself has a version; If-Match may name that version's tag too, so
/// that many parts can be read from one version.
pub(super) fn evaluate_part(
    headers: &HeaderMap,
    current: &ETag,
    whole: impl FnOnce() -> Option<ETag>,
) -> Precondition {
    let names = |tag: &ETag| any_matches(headers, header::IF_MATCH, tag, Comparison::Strong);
    if headers.contains_key(header::IF_MATCH) && !names(current) && !whole().is_some_and(|tag| names(&tag)) {
        return Precondition::Failed;
    }
    if any_matches(headers, header::IF_NONE_MATCH, current, Comparison::Weak) {
        return Precondition::NotModified;
    }
    Precondition::Holds
}

/// Whether a Range header applies: there is no If-Range, or it has the strong tag of this version. With a
/// weak tag, a date, or anything else, the client gets the whole resource.
pub(super) fn if_range_holds(headers: &HeaderMap, current: &ETag) -> bool {
    let mut values = headers.get_all(header::IF_RANGE).iter();
    match (values.next(), values.next()) {
        (None, _) => true,
        (Some(value), None) => value.as_bytes().trim_ascii() == current.bytes(),
        (Some(_), Some(_)) => false,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Comparison {
    /// Both tags strong and the same.
    Strong,
    /// The same, ignoring `W/`.
    Weak,
}

fn any_matches(headers: &HeaderMap, name: HeaderName, current: &ETag, comparison: Comparison) -> bool {
    headers
        .get_all(name)
        .iter()
        .any(|value| list_matches(value.as_bytes(), current, comparison))
}

/// `*`, or a comma-separated list of `"tag"` and `W/"tag"`; a tag may contain commas. Anything after a syntax error is
/// ignored.
fn list_matches(list: &[u8], current: &ETag, comparison: Comparison) -> bool {
    if list.trim_ascii() == b"*" {
        return true;
    }
    let mut rest = list;
    loop {
        while let [b' ' | b'\t' | b',', tail @ ..] = rest {
            rest = tail;
        }
        let (weak, tag) = match rest {
            [b'W', b'/', tail @ ..] => (true, tail),
            tail => (false, tail),
        };
        let [b'"', inner @ ..] = tag else { return false };
        let Some(end) = inner.iter().position(|&b| b == b'"') else {
            return false;
        };
        let (quoted, tail) = tag.split_at(end + 2);
        if quoted == current.bytes() && (comparison == Comparison::Weak || !weak) {
            return true;
        }
        rest = tail;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(name, HeaderValue::from_str(value).unwrap());
        }
        map
    }

    #[test]
    fn if_match_compares_strongly() {
        // If-Match against the tag "a": only `*` and the same strong tag let the request through.
        let tag = ETag::new("a");
        for (value, expected) in [
            ("*", Precondition::Holds),
            ("\"a\"", Precondition::Holds),
            ("\"b\", \"a\"", Precondition::Holds),
            ("W/\"a\"", Precondition::Failed),
            ("\"b\"", Precondition::Failed),
            ("a", Precondition::Failed),
            ("", Precondition::Failed),
            ("\"a", Precondition::Failed),
        ] {
            assert_eq!(
                evaluate(&headers(&[(header::IF_MATCH, value)]), &tag),
                expected,
                "{value}"
            );
        }
    }

    #[test]
    fn if_none_match_compares_weakly() {
        // If-None-Match against the tag "a,b" (a comma inside): weak and strong forms both mean "not modified".
        let tag = ETag::new("a,b");
        for (value, expected) in [
            ("*", Precondition::NotModified),
            ("\"a,b\"", Precondition::NotModified),
            ("W/\"a,b\"", Precondition::NotModified),
            ("\"x\",W/\"a,b\"", Precondition::NotModified),
            ("\"a\"", Precondition::Holds),
            ("\"x\" oops \"a,b\"", Precondition::Holds),
        ] {
            assert_eq!(
                evaluate(&headers(&[(header::IF_NONE_MATCH, value)]), &tag),
                expected,
                "{value}"
            );
        }
    }

    #[test]
    fn a_tag_never_breaks_the_header() {
        // An opaque tag with a quote, a space and a line break: they are left out, the value stays one quoted tag.
        assert_eq!(ETag::new("a\"b c\r\nd").value(), "\"abcd\"");
    }
}
