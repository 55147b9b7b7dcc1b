//! HTTP requests as text, so that seeds are readable and writable: `METHOD PATH`, one header per line, an
//! empty line, the body.

use bytes::Bytes;
use http::Request;

/// Parses a request; `None` if it cannot be sent.
pub fn parse(input: &[u8]) -> Option<Request<Bytes>> {
    let (head, body) = match input.windows(2).position(|pair| pair == b"\n\n") {
        Some(end) => (&input[..end], &input[end + 2..]),
        None => (input, &[][..]),
    };
    let mut lines = head.split(|byte| *byte == b'\n');
    let first = std::str::from_utf8(lines.next()?).ok()?;
    let (method, path) = first.split_once(' ')?;
    if !path.starts_with('/') {
        return None;
    }
    let mut request = Request::builder().method(method).uri(path);
    for line in lines {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let value = line[colon + 1..].trim_ascii();
        request = request.header(&line[..colon], value);
    }
    request.body(Bytes::copy_from_slice(body)).ok()
}
