//! HTTP/1.1 in plain text on a port that has TLS, or that speaks HTTP/2 only. It gets a response that names what the port speaks:
//! without one, curl reports "HTTP/0.9", and other clients a malformed response.

/// So many bytes tell HTTP/1 from a TLS hello and from HTTP/2's preface: the longest method and its blank.
pub(super) const FIRST_BYTES: usize = 8;

/// RFC 9110 section 9.3, and PATCH (RFC 5789).
const METHODS: [&[u8]; 9] = [
    b"GET ",
    b"HEAD ",
    b"POST ",
    b"PUT ",
    b"DELETE ",
    b"CONNECT ",
    b"OPTIONS ",
    b"TRACE ",
    b"PATCH ",
];

/// What a port speaks that plain HTTP/1.1 is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WrongProtocol {
    /// HTTP/2 only.
    Grpc,
    /// TLS.
    Tls,
}

impl WrongProtocol {
    /// The last segment of the problem's type.
    pub const fn slug(self) -> &'static str {
        match self {
            Self::Grpc => "grpc-only",
            Self::Tls => "tls-only",
        }
    }

    /// The whole response. The connection ends with it.
    pub(super) fn response(self) -> String {
        let (title, detail) = match self {
            Self::Grpc => (
                "gRPC only",
                "this port speaks gRPC over HTTP/2; the HTTP API has its own port (http.listen)",
            ),
            Self::Tls => ("TLS only", "this port has TLS: use https://"),
        };
        let slug = self.slug();
        let body =
            format!(r#"{{"type":"/problems/{slug}","title":"{title}","status":400,"detail":"{detail}"}}"#);
        let length = body.len();
        format!(
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/problem+json\r\ncontent-length: {length}\r\n\
             connection: close\r\n\r\n{body}"
        )
    }
}

/// Whether these first bytes of a connection are the beginning of a request in HTTP/1.
pub(super) fn is_http1(first: &[u8]) -> bool {
    METHODS.iter().any(|method| first.starts_with(method))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_of_http_1_are_recognized() {
        // Scenario: every method, HTTP/2's preface, a TLS hello, and a method that has not arrived completely. Expectation: only
        // the first are HTTP/1, by their first bytes.
        for method in METHODS {
            let request = [method, b"/ HTTP/1.1\r\n"].concat();
            assert!(is_http1(&request[..FIRST_BYTES]), "{request:?}");
        }
        for other in [&b"PRI * HT"[..], &[0x16, 3, 1, 2, 0, 1, 0, 1], b"GET", b""] {
            assert!(!is_http1(other), "{other:?}");
        }
    }

    #[test]
    fn the_response_is_a_problem() {
        // Scenario: both responses. Expectation: a head with the body's length, and a problem with its type and status.
        for wrong in [WrongProtocol::Grpc, WrongProtocol::Tls] {
            let response = wrong.response();
            let (head, body) = response.split_once("\r\n\r\n").unwrap();
            assert!(
                head.contains(&format!("content-length: {}\r\n", body.len())),
                "{head}"
            );
            let problem: serde_json::Value = serde_json::from_str(body).unwrap();
            assert_eq!(problem["type"], format!("/problems/{}", wrong.slug()));
            assert_eq!(problem["status"], 400);
        }
    }
}
