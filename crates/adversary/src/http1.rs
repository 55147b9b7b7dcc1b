//! A minimal HTTP/1.1 client for a friendly reader: GET, with an answer of known length.

use std::io;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const HEAD_BYTES_MAX: usize = 64 << 10;
const BODY_BYTES_MAX: usize = 64 << 20;

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

/// One GET on a connection that stays open.
pub(crate) async fn get(stream: &mut TcpStream, path: &str) -> io::Result<Answer> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut bytes = Vec::with_capacity(8 << 10);
    let (status, length, head) = loop {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let (status, length) = parse(&bytes[..end])?;
            break (status, length, end + 4);
        }
        if bytes.len() > HEAD_BYTES_MAX {
            return Err(io::Error::other("the answer's head does not end"));
        }
    };
    let mut body = bytes.split_off(head);
    if length > BODY_BYTES_MAX || body.len() > length {
        return Err(io::Error::other("the answer's length is wrong"));
    }
    let missing = length - body.len();
    if missing > 0 {
        let begin = body.len();
        body.resize(length, 0);
        stream.read_exact(&mut body[begin..]).await?;
    }
    Ok(Answer { status, body })
}

fn parse(head: &[u8]) -> io::Result<(u16, usize)> {
    let problem = || io::Error::other("the answer is not HTTP/1.1 with a length");
    let head = str::from_utf8(head).map_err(|_| problem())?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(status_of).ok_or_else(problem)?;
    let mut fields = lines.filter_map(|line| line.split_once(':'));
    let length = fields.find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let length = length
        .and_then(|(_, value)| value.trim().parse().ok())
        .ok_or_else(problem)?;
    Ok((status, length))
}

pub(crate) fn status_of(line: &str) -> Option<u16> {
    line.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_parsed_or_refused() {
        // Scenario: a whole head, one without a length, one of another protocol. Expectation: only the first
        // is accepted.
        assert_eq!(
            parse(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nX: y").expect("a head"),
            (200, 12)
        );
        assert!(parse(b"HTTP/1.1 200 OK\r\nX: y").is_err());
        assert!(parse(b"SSH-2.0-x").is_err());
    }
}
