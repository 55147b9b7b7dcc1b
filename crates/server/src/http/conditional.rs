//! Conditional requests (RFC 9110 13): entity tags and the order of preconditions.
//!
//! Every tag sent is strong: it is made from device, inode, length and mtime. No Last-Modified is sent, so
//! If-Modified-Since is ignored and a date in If-Range never matches, as the RFC requires.

use super::problem::Problem;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use smallvec::SmallVec;
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
        let mut quoted = Quoted(SmallVec::new());
        quoted.0.push(b'"');
        // Writing to memory cannot fail.
        let _always_ok = write!(quoted, "{opaque}");
        quoted.0.push(b'"');
        // At its exact length: without a copy, spare capacity takes a second allocation.
        let value = HeaderValue::from_maybe_shared(Bytes::copy_from_slice(&quoted.0));
        Self(value.unwrap_or(HeaderValue::from_static("\"\"")))
    }

    pub(super) fn value(&self) -> HeaderValue {
        self.0.clone()
    }

    /// As `value`, without another reference, which would take an allocation.
    pub(super) fn into_value(self) -> HeaderValue {
        self.0
    }

    fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// Room for most tags: four hexadecimal numbers and an item's.
const TAG_BYTES: usize = 96;

/// Text, filtered to the characters that a tag may have.
struct Quoted(SmallVec<[u8; TAG_BYTES]>);

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
///
/// # Errors
/// 400 for a header that has no tag at all: it would never hold, or be ignored.
pub(super) fn evaluate(headers: &HeaderMap, current: &ETag) -> Result<Precondition, Problem> {
    evaluate_part(headers, current, || None)
}

/// The same for a part of something that itself has a version; If-Match may name that version's tag too, so
/// that many parts can be read from one version.
///
/// # Errors
/// As [`evaluate`].
pub(super) fn evaluate_part(
    headers: &HeaderMap,
    current: &ETag,
    whole: impl FnOnce() -> Option<ETag>,
) -> Result<Precondition, Problem> {
    let names = |tag: &ETag| any_matches(headers, header::IF_MATCH, tag, Comparison::Strong);
    if headers.contains_key(header::IF_MATCH) && !names(current) && !whole().is_some_and(|tag| names(&tag)) {
        require_tag(headers, header::IF_MATCH, "If-Match")?;
        return Ok(Precondition::Failed);
    }
    if headers.contains_key(header::IF_NONE_MATCH) {
        if any_matches(headers, header::IF_NONE_MATCH, current, Comparison::Weak) {
            return Ok(Precondition::NotModified);
        }
        require_tag(headers, header::IF_NONE_MATCH, "If-None-Match")?;
    }
    Ok(Precondition::Holds)
}

/// Whether a Range header applies: there is no If-Range, or it has the strong tag of this version. With a
/// weak tag, a date, or several values, the client gets the whole resource.
///
/// # Errors
/// 400 for a value that is neither a tag nor a date.
pub(super) fn if_range_holds(headers: &HeaderMap, current: &ETag) -> Result<bool, Problem> {
    let mut values = headers.get_all(header::IF_RANGE).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(true),
        (Some(value), None) => {
            let value = value.as_bytes().trim_ascii();
            let holds = value == current.bytes();
            if !holds && !is_date(value) {
                require_tag(headers, header::IF_RANGE, "If-Range")?;
            }
            Ok(holds)
        }
        (Some(_), Some(_)) => Ok(false),
    }
}

/// Refuses a header without any tag in its lines, such as one whose quotes are missing.
fn require_tag(headers: &HeaderMap, name: HeaderName, field: &'static str) -> Result<(), Problem> {
    // An empty list is well formed, and may have commas (RFC 9110 5.6.1).
    let is_empty = |value: &[u8]| value.iter().all(|byte| b" \t,".contains(byte));
    let is_fine = |value: &[u8]| is_empty(value) || value.trim_ascii() == b"*" || next_tag(value).is_some();
    if headers
        .get_all(name)
        .iter()
        .any(|value| is_fine(value.as_bytes()))
    {
        return Ok(());
    }
    Err(Problem::malformed(
        field,
        "has no entity tag: put the tag in double quotes, as ETag has it",
    ))
}

/// Whether this is meant as a date: every form begins with a day's name (RFC 9110 5.6.7).
fn is_date(value: &[u8]) -> bool {
    let days = [b"Mon", b"Tue", b"Wed", b"Thu", b"Fri", b"Sat", b"Sun"];
    days.iter().any(|day| value.starts_with(*day))
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
    while let Some((weak, quoted, tail)) = next_tag(rest) {
        if quoted == current.bytes() && (comparison == Comparison::Weak || !weak) {
            return true;
        }
        rest = tail;
    }
    false
}

/// The first tag of a list: whether it is weak, the tag with its quotes, and what follows it.
fn next_tag(mut list: &[u8]) -> Option<(bool, &[u8], &[u8])> {
    while let [b' ' | b'\t' | b',', tail @ ..] = list {
        list = tail;
    }
    let (weak, tag) = match list {
        [b'W', b'/', tail @ ..] => (true, tail),
        tail => (false, tail),
    };
    let [b'"', inner @ ..] = tag else { return None };
    let end = inner.iter().position(|&b| b == b'"')?;
    let (quoted, tail) = tag.split_at(end + 2);
    Some((weak, quoted, tail))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::batch_request::tests::rendered;

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
            ("\"b\" a", Precondition::Failed),
            ("", Precondition::Failed),
            (" ,\t,", Precondition::Failed),
        ] {
            let evaluated = evaluate(&headers(&[(header::IF_MATCH, value)]), &tag);
            assert_eq!(evaluated.unwrap(), expected, "{value}");
        }
    }

    #[tokio::test]
    async fn a_condition_without_any_tag_is_told_so() {
        // The tag "a" without its quotes, or with one, in each header: never that it is of another version, and never
        // ignored. Of several lines one that has a tag is enough.
        let tag = ETag::new("a");
        for value in ["a", "W/a", "\"a", "a, \"a\""] {
            let if_match = evaluate(&headers(&[(header::IF_MATCH, value)]), &tag);
            let if_none_match = evaluate(&headers(&[(header::IF_NONE_MATCH, value)]), &tag);
            let if_range = if_range_holds(&headers(&[(header::IF_RANGE, value)]), &tag);
            for (problem, name) in [
                (if_match.unwrap_err(), "If-Match"),
                (if_none_match.unwrap_err(), "If-None-Match"),
                (if_range.unwrap_err(), "If-Range"),
            ] {
                let (status, field, detail) = rendered(problem).await;
                assert_eq!((status, &field[..]), (400, name), "{value}");
                assert!(detail.contains("double quotes"), "{detail}");
            }
        }
        let lines = [(header::IF_NONE_MATCH, "b"), (header::IF_NONE_MATCH, "\"b\"")];
        assert_eq!(evaluate(&headers(&lines), &tag).unwrap(), Precondition::Holds);
    }

    #[test]
    fn if_range_needs_the_strong_tag() {
        // If-Range against the tag "a": nothing but that tag keeps the range; a date in each of its forms does not hold.
        let tag = ETag::new("a");
        for (value, holds) in [
            ("\"a\"", true),
            ("W/\"a\"", false),
            ("\"b\"", false),
            ("*", false),
            ("Sun, 06 Nov 1994 08:49:37 GMT", false),
            ("Sunday, 06-Nov-94 08:49:37 GMT", false),
            ("Sun Nov  6 08:49:37 1994", false),
        ] {
            let headers = headers(&[(header::IF_RANGE, value)]);
            assert_eq!(if_range_holds(&headers, &tag).unwrap(), holds, "{value}");
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
            ("", Precondition::Holds),
            (" ,\t,", Precondition::Holds),
        ] {
            let evaluated = evaluate(&headers(&[(header::IF_NONE_MATCH, value)]), &tag);
            assert_eq!(evaluated.unwrap(), expected, "{value}");
        }
    }

    #[test]
    fn a_tag_never_breaks_the_header() {
        // An opaque tag with a quote, a space and a line break: they are left out, the value stays one quoted tag.
        assert_eq!(ETag::new("a\"b c\r\nd").value(), "\"abcd\"");
    }
}
