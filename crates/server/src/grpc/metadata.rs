//! Headers of a gRPC call: content type, encoding, timeout (PROTOCOL-HTTP2.md, "Requests").

use http::header::{CONTENT_TYPE, HeaderMap};
use std::time::Duration;
use tonic::Status;
use tonic::metadata::MetadataValue;

/// Whether the body is protobuf in gRPC framing: `application/grpc` or `application/grpc+proto`, with or
/// without parameters. Anything else gets HTTP 415, as the protocol requires.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()) else {
        return false;
    };
    let essence = value.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/grpc") || essence.eq_ignore_ascii_case("application/grpc+proto")
}

/// Random reads do not compress well enough to be worth the CPU, so a compressed call is answered UNIMPLEMENTED with the
/// accepted encodings.
pub(super) fn check_encoding(headers: &HeaderMap) -> Result<(), Status> {
    match headers.get("grpc-encoding") {
        None => Ok(()),
        Some(value) if value == "identity" => Ok(()),
        Some(value) => {
            let value = String::from_utf8_lossy(value.as_bytes())
                .chars()
                .take(32)
                .collect::<String>();
            let message =
                format!("grpc-encoding: {value:?} is not accepted here; send messages uncompressed");
            let mut status = Status::unimplemented(message);
            status
                .metadata_mut()
                .insert("grpc-accept-encoding", MetadataValue::from_static("identity"));
            Err(status)
        }
    }
}

/// `grpc-timeout`: up to 8 digits and a unit. `None`: no timeout.
pub(super) fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, Status> {
    let Some(value) = headers.get("grpc-timeout") else {
        return Ok(None);
    };
    let parsed = value.to_str().ok().and_then(parse_timeout);
    parsed.map(Some).ok_or_else(|| {
        Status::invalid_argument("grpc-timeout: must be 1 to 8 digits and one of H, M, S, m, u, n")
    })
}

fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let amount = digits.parse::<u64>().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(amount * 3600),
        "M" => Duration::from_secs(amount * 60),
        "S" => Duration::from_secs(amount),
        "m" => Duration::from_millis(amount),
        "u" => Duration::from_micros(amount),
        "n" => Duration::from_nanos(amount),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn header(name: &'static str, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(
            http::HeaderName::from_static(name),
            HeaderValue::from_static(value),
        )])
    }

    #[test]
    fn timeouts_are_read_as_the_protocol_writes_them() {
        // Every unit, the longest value, and what is not a timeout.
        for (text, expected) in [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("250m", Some(Duration::from_millis(250))),
            ("7u", Some(Duration::from_micros(7))),
            ("99999999n", Some(Duration::from_nanos(99_999_999))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("0S", Some(Duration::ZERO)),
            ("", None),
            ("S", None),
            ("5", None),
            ("123456789S", None),
            ("-1S", None),
            ("+1S", None),
            ("1.5S", None),
            ("1s", None),
            ("1é", None),
        ] {
            assert_eq!(parse_timeout(text), expected, "{text:?}");
        }
        assert_eq!(timeout(&HeaderMap::new()).unwrap(), None);
        assert_eq!(
            timeout(&header("grpc-timeout", "soon")).unwrap_err().code(),
            tonic::Code::InvalidArgument
        );
    }

    #[test]
    fn only_protobuf_in_grpc_framing_is_grpc() {
        // gRPC-Web and JSON look similar and are refused.
        for (value, expected) in [
            ("application/grpc", true),
            ("application/grpc+proto", true),
            ("Application/gRPC; charset=utf-8", true),
            ("application/grpc-web", false),
            ("application/grpc+json", false),
            ("application/json", false),
        ] {
            assert_eq!(is_grpc(&header("content-type", value)), expected, "{value}");
        }
        assert!(!is_grpc(&HeaderMap::new()));
    }

    #[test]
    fn a_compressed_call_learns_what_is_accepted() {
        // gzip gets UNIMPLEMENTED with grpc-accept-encoding; `identity` and no header are accepted.
        assert!(check_encoding(&HeaderMap::new()).is_ok());
        assert!(check_encoding(&header("grpc-encoding", "identity")).is_ok());
        let response = check_encoding(&header("grpc-encoding", "gzip"))
            .unwrap_err()
            .into_http::<()>();
        assert_eq!(response.headers()["grpc-status"], "12");
        assert_eq!(response.headers()["grpc-accept-encoding"], "identity");
    }
}
