//! Media types: the response format that the client prefers (RFC 9110 12.5.1), and whether a body is JSON.

use super::problem::Problem;
use http::{HeaderMap, HeaderValue, StatusCode, header};

/// The media type of raw bytes.
pub(super) const OCTET_STREAM: &str = "application/octet-stream";
/// The media type of JSON.
pub(super) const JSON: &str = "application/json";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResponseFormat {
    /// The bytes.
    Octets,
    Json,
}

impl ResponseFormat {
    pub(super) fn media_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Octets => OCTET_STREAM,
            Self::Json => JSON,
        })
    }
}

/// The format that the Accept header prefers; bytes if it has no preference.
///
/// # Errors
/// 406 if it accepts neither.
pub(super) fn preferred(headers: &HeaderMap) -> Result<ResponseFormat, Problem> {
    let octets = quality(headers, "octet-stream");
    let json = quality(headers, "json");
    match (octets, json) {
        (0, 0) => Err(Problem::new(
            StatusCode::NOT_ACCEPTABLE,
            "not-acceptable",
            format!("the response is available as {OCTET_STREAM} or {JSON}: name one of them in Accept"),
        )
        .with_field("Accept")
        .with_allowed(vec![OCTET_STREAM, JSON])),
        (octets, json) if json > octets => Ok(ResponseFormat::Json),
        _ => Ok(ResponseFormat::Octets),
    }
}

/// Checks that the client accepts JSON, for a response that has no other format.
///
/// # Errors
/// 406 if it does not.
pub(super) fn require_json_accepted(headers: &HeaderMap) -> Result<(), Problem> {
    if quality(headers, "json") > 0 {
        return Ok(());
    }
    Err(Problem::new(
        StatusCode::NOT_ACCEPTABLE,
        "not-acceptable",
        format!("the response is available as {JSON}: name it in Accept"),
    )
    .with_field("Accept")
    .with_allowed(vec![JSON]))
}

/// Checks that a request's body is JSON, without a content encoding.
///
/// # Errors
/// 415 for another type, or none, and for any Content-Encoding except `identity`. 501 for a transfer coding besides `chunked`
/// (RFC 9112 6.1), which hyper leaves as it is.
pub(super) fn require_json(headers: &HeaderMap) -> Result<(), Problem> {
    let coded = |value: &&HeaderValue| !value.as_bytes().eq_ignore_ascii_case(b"chunked");
    if let Some(coding) = headers.get_all(header::TRANSFER_ENCODING).iter().find(coded) {
        return Err(Problem::new(
            StatusCode::NOT_IMPLEMENTED,
            "unsupported-transfer-coding",
            format!("the request's Transfer-Encoding is {coding:?}: use chunked alone"),
        )
        .with_field("Transfer-Encoding")
        .with_allowed(vec!["chunked"]));
    }
    let coded = |value: &&HeaderValue| !value.as_bytes().eq_ignore_ascii_case(b"identity");
    if let Some(coding) = headers.get_all(header::CONTENT_ENCODING).iter().find(coded) {
        return Err(Problem::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported-media-type",
            format!("the request's Content-Encoding is {coding:?}: send the body without an encoding"),
        )
        .with_field("Content-Encoding")
        .with_allowed(vec!["identity"])
        // Tells it from a wrong Content-Type (RFC 9110 15.5.16).
        .with_header(header::ACCEPT_ENCODING, HeaderValue::from_static("identity")));
    }
    let value = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let essence = value.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case(JSON) {
        return Ok(());
    }
    let found = if value.is_empty() {
        "there is none".to_owned()
    } else {
        format!("it is {value:?}")
    };
    Err(Problem::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "unsupported-media-type",
        format!("the request's Content-Type must be {JSON}; {found}"),
    )
    .with_field("Content-Type")
    .with_allowed(vec![JSON]))
}

/// The weight of `application/{subtype}` in thousandths, from the most specific range that includes it. 1000 without a
/// header; invalid elements are skipped.
fn quality(headers: &HeaderMap, subtype: &str) -> u32 {
    let lines = headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let mut best = None;
    let mut any = false;
    for element in lines.flat_map(|line| line.split(',')) {
        let mut parts = element.split(';').map(str::trim);
        let Some((range_kind, range_subtype)) = parts.next().and_then(|range| range.split_once('/')) else {
            continue;
        };
        any = true;
        let specificity = if range_kind.eq_ignore_ascii_case("application")
            && range_subtype.eq_ignore_ascii_case(subtype)
        {
            2
        } else if range_kind.eq_ignore_ascii_case("application") && range_subtype == "*" {
            1
        } else if range_kind == "*" && range_subtype == "*" {
            0
        } else {
            continue;
        };
        let weight = parts
            .filter_map(|parameter| parameter.split_once('='))
            .find(|(name, _)| name.trim().eq_ignore_ascii_case("q"))
            .map_or(1000, |(_, value)| thousandths(value.trim()));
        if best.is_none_or(|(known, _)| specificity > known) {
            best = Some((specificity, weight));
        }
    }
    match best {
        Some((_, weight)) => weight,
        None if any => 0,
        None => 1000,
    }
}

/// `0.25` to 250. An invalid weight counts as 1, as if it were missing.
fn thousandths(value: &str) -> u32 {
    let (whole, fraction) = value.split_once('.').unwrap_or((value, ""));
    let digits = fraction.len() <= 3 && fraction.bytes().all(|byte| byte.is_ascii_digit());
    match whole {
        "0" if digits => format!("{fraction:0<3}").parse().unwrap_or(1000),
        _ => 1000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accept(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::ACCEPT, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn bytes_unless_json_is_preferred() {
        // Accept headers as clients send them: JSON only if it is preferred to bytes.
        for (value, expected) in [
            ("*/*", ResponseFormat::Octets),
            ("application/json", ResponseFormat::Json),
            ("APPLICATION/JSON; charset=utf-8", ResponseFormat::Json),
            ("application/json, */*;q=0.1", ResponseFormat::Json),
            ("application/json, */*", ResponseFormat::Octets),
            ("application/*", ResponseFormat::Octets),
            (
                "application/octet-stream;q=0.2, application/json;q=0.3",
                ResponseFormat::Json,
            ),
            ("application/octet-stream;q=0, */*", ResponseFormat::Json),
            ("text/html, application/octet-stream", ResponseFormat::Octets),
            ("nonsense", ResponseFormat::Octets),
        ] {
            assert_eq!(preferred(&accept(value)).unwrap(), expected, "{value}");
        }
        assert_eq!(preferred(&HeaderMap::new()).unwrap(), ResponseFormat::Octets);
    }

    #[test]
    fn neither_form_is_not_acceptable() {
        // Only other types, or both formats at weight 0: a problem.
        for value in [
            "text/html",
            "image/*",
            "*/*;q=0",
            "application/json;q=0.0, application/octet-stream;q=0.000",
        ] {
            assert!(preferred(&accept(value)).is_err(), "{value}");
        }
    }

    #[test]
    fn only_json_bodies_are_taken() {
        // Content types that are JSON, and others, including none: parameters and case do not matter.
        for (value, fine) in [
            ("application/json", true),
            ("Application/JSON; charset=utf-8", true),
            ("text/json", false),
            ("application/x-www-form-urlencoded", false),
            ("application/jsonx", false),
        ] {
            let headers =
                HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_str(value).unwrap())]);
            assert_eq!(require_json(&headers).is_ok(), fine, "{value}");
        }
        assert!(require_json(&HeaderMap::new()).is_err());
    }
}
