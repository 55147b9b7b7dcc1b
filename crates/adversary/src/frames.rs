//! Handwritten HTTP/2 (RFC 9113), for what a well-behaved implementation does not send.

use crate::hold::Hold;
use crate::tally::{Tally, cause};
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Every implementation accepts frames of this length.
pub(crate) const FRAME_BYTES_MAX: usize = 16_384;
pub(crate) const WINDOW_MAX: u32 = 0x7fff_ffff;
/// Of a connection, and of each stream of a peer whose settings were not acknowledged.
pub(crate) const WINDOW_AT_FIRST: u32 = 65_535;

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;

pub(crate) const END_STREAM: u8 = 1;
pub(crate) const ACK: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

/// Index of the newest entry of a dynamic table (RFC 7541, 2.3.3).
pub(crate) const DYNAMIC_INDEX_MIN: u8 = 62;

/// RST_STREAM's CANCEL: the client no longer wants the response.
pub(crate) const CANCEL: u32 = 8;

/// Appends a frame.
pub(crate) fn put(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    out.extend_from_slice(&length[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
}

/// Appends the preface and settings, and raises the connection's own window to the maximum.
pub(crate) fn put_opening(out: &mut Vec<u8>, stream_window: u32) {
    out.extend_from_slice(PREFACE);
    put_stream_window(out, stream_window);
    put(
        out,
        WINDOW_UPDATE,
        0,
        0,
        &(WINDOW_MAX - WINDOW_AT_FIRST).to_be_bytes(),
    );
}

/// Appends settings that change the window of each stream (SETTINGS_INITIAL_WINDOW_SIZE).
pub(crate) fn put_stream_window(out: &mut Vec<u8>, bytes: u32) {
    let [a, b, c, d] = bytes.to_be_bytes();
    put(out, SETTINGS, 0, 0, &[0, 4, a, b, c, d]);
}

/// Appends header fields, each as a literal that is not indexed and not compressed (RFC 7541, 6.2.2).
pub(crate) fn put_fields(out: &mut Vec<u8>, fields: &[(&str, &str)]) {
    fields.iter().for_each(|field| put_field(out, 0, *field));
}

/// Appends header fields that become entries of the receiver's dynamic table (RFC 7541, 6.2.1), the last one with the index
/// [`DYNAMIC_INDEX_MIN`].
pub(crate) fn put_entries(out: &mut Vec<u8>, fields: &[(&str, &str)]) {
    fields.iter().for_each(|field| put_field(out, 0x40, *field));
}

/// Appends a reference to an entry of the static or dynamic table (RFC 7541, 6.1), whose index is below 127.
pub(crate) fn put_reference(out: &mut Vec<u8>, index: u8) {
    out.push(0x80 | index);
}

fn put_field(out: &mut Vec<u8>, representation: u8, (name, value): (&str, &str)) {
    out.push(representation);
    put_text(out, name);
    put_text(out, value);
}

/// Appends the beginning of a field whose value of so many bytes is to follow.
pub(crate) fn put_field_start(out: &mut Vec<u8>, name: &str, value_bytes: usize) {
    out.push(0);
    put_text(out, name);
    put_length(out, value_bytes);
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_length(out, text.len());
    out.extend_from_slice(text.as_bytes());
}

/// What header fields count for in a limit of their list (RFC 9113, 6.5.2): their text and 32 bytes each.
pub(crate) fn list_bytes(fields: &[(&str, &str)]) -> usize {
    let lengths = fields.iter().map(|(name, value)| name.len() + value.len() + 32);
    lengths.sum()
}

/// A string's length, as an integer with a prefix of seven bits (RFC 7541, 5.1).
fn put_length(out: &mut Vec<u8>, length: usize) {
    let low = |value: usize| u8::try_from(value & 0x7f).unwrap_or(0);
    if length < 127 {
        return out.push(low(length));
    }
    out.push(127);
    let mut rest = length - 127;
    while rest >= 128 {
        out.push(low(rest) | 128);
        rest >>= 7;
    }
    out.push(low(rest));
}

/// The fields of a gRPC request.
pub(crate) fn grpc_fields(path: &str) -> Vec<(&str, &str)> {
    vec![
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
}

/// A message with gRPC's prefix: not compressed, four bytes of length.
pub(crate) fn grpc_message(message: &[u8]) -> Vec<u8> {
    let mut framed = grpc_prefix(message.len()).to_vec();
    framed.extend_from_slice(message);
    framed
}

pub(crate) fn grpc_prefix(length: usize) -> [u8; 5] {
    let [a, b, c, d] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    [0, a, b, c, d]
}

/// Appends a gRPC request: its fields, and its message in as many frames as needed.
pub(crate) fn put_call(out: &mut Vec<u8>, stream: u32, path: &str, message: &[u8]) {
    let mut fields = Vec::new();
    put_fields(&mut fields, &grpc_fields(path));
    put(out, HEADERS, END_HEADERS, stream, &fields);
    let body = grpc_message(message);
    let mut parts = body.chunks(FRAME_BYTES_MAX).peekable();
    while let Some(part) = parts.next() {
        let flags = if parts.peek().is_none() { END_STREAM } else { 0 };
        put(out, DATA, flags, stream, part);
    }
}

/// A frame's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) length: usize,
}

/// Reads one frame. Payloads of DATA are skipped.
pub(crate) async fn read_frame(from: &mut (impl AsyncRead + Unpin)) -> io::Result<(Head, Vec<u8>)> {
    let mut bytes = [0; 9];
    from.read_exact(&mut bytes).await?;
    let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = bytes;
    let length = usize::try_from(u32::from_be_bytes([0, l0, l1, l2])).unwrap_or(usize::MAX);
    let head = Head {
        kind,
        flags,
        stream: u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]),
        length,
    };
    if kind == DATA {
        let mut rest = length;
        let mut scrap = [0; 4096];
        while rest > 0 {
            let part = rest.min(scrap.len());
            from.read_exact(&mut scrap[..part]).await?;
            rest -= part;
        }
        return Ok((head, Vec::new()));
    }
    let mut payload = vec![0; length];
    from.read_exact(&mut payload).await?;
    Ok((head, payload))
}

/// What a frame requires of a client that only waits: an acknowledgement, or the end of the connection.
pub(crate) enum Reaction {
    None,
    Send(Vec<u8>),
    End(String),
}

/// The polite reaction to a frame.
pub(crate) fn react(head: Head, payload: &[u8]) -> Reaction {
    let mut out = Vec::new();
    match head.kind {
        SETTINGS if head.flags & ACK == 0 => put(&mut out, SETTINGS, ACK, 0, &[]),
        PING if head.flags & ACK == 0 => put(&mut out, PING, ACK, 0, payload),
        GOAWAY => return Reaction::End(goaway(payload)),
        _ => return Reaction::None,
    }
    Reaction::Send(out)
}

/// The reason of a GOAWAY, as a word.
pub(crate) fn goaway(payload: &[u8]) -> String {
    let reason = payload
        .get(4..8)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(u32::MAX, u32::from_be_bytes);
    format!("GOAWAY {:?}", h2::Reason::from(reason))
}

/// How a connection ended, as a word.
pub(crate) fn ending(error: &io::Error) -> String {
    match error.kind() == io::ErrorKind::UnexpectedEof {
        true => "end of stream".to_owned(),
        false => cause(error),
    }
}

/// Opens a connection, and keeps answering settings and pings until the hold or the connection ends.
pub(crate) async fn wait_politely(mut stream: TcpStream, opening: &[u8], hold: &Hold, tally: &Tally) {
    let run = async {
        stream.write_all(opening).await?;
        tally.sent(opening.len());
        loop {
            let (head, payload) = read_frame(&mut stream).await?;
            tally.received(head.length + 9);
            match react(head, &payload) {
                Reaction::None => {}
                Reaction::Send(out) => stream.write_all(&out).await?,
                Reaction::End(how) => return Ok::<_, io::Error>(how),
            }
        }
    };
    match hold.unless_ended(run).await {
        None => {}
        Some(Ok(how)) => tally.closed(&how),
        Some(Err(error)) => tally.closed(&ending(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_are_read_as_they_were_written() {
        // Scenario: a SETTINGS, a DATA and a GOAWAY frame. Expectation: heads and payloads are read back;
        // DATA is skipped.
        let mut bytes = Vec::new();
        put(&mut bytes, SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 1]);
        put(&mut bytes, DATA, END_STREAM, 3, &[7; 5000]);
        put(&mut bytes, GOAWAY, 0, 0, &[0, 0, 0, 0, 0, 0, 0, 11]);
        let mut from = bytes.as_slice();
        let (head, payload) = read_frame(&mut from).await.expect("a frame");
        assert_eq!((head.kind, payload.len()), (SETTINGS, 6));
        assert!(matches!(react(head, &payload), Reaction::Send(_)));
        let (head, _) = read_frame(&mut from).await.expect("a frame");
        assert_eq!(
            head,
            Head {
                kind: DATA,
                flags: END_STREAM,
                stream: 3,
                length: 5000
            }
        );
        let (head, payload) = read_frame(&mut from).await.expect("a frame");
        assert!(matches!(react(head, &payload), Reaction::End(how) if how == "GOAWAY ENHANCE_YOUR_CALM"));
        assert!(read_frame(&mut from).await.is_err());
    }

    #[test]
    fn lengths_are_encoded_as_the_rfc_shows() {
        // Scenario: RFC 7541, C.1.2 with a prefix of seven bits: below, at and far above the prefix.
        // Expectation: the RFC's bytes.
        let encoded = |length| {
            let mut out = Vec::new();
            put_length(&mut out, length);
            out
        };
        assert_eq!(encoded(10), [10]);
        assert_eq!(encoded(127), [127, 0]);
        assert_eq!(encoded(127 + 1210), [127, 0x80 | 58, 9]);
    }

    #[test]
    fn entries_and_references_are_encoded_as_the_rfc_shows() {
        // Scenario: RFC 7541, C.2.1 and C.2.4: a field that becomes an entry; a reference to `:method: GET`. Then the size of
        // the first one's entry. Expectation: the RFC's bytes, and its 55 bytes.
        let field = [("custom-key", "custom-header")];
        let mut out = Vec::new();
        put_entries(&mut out, &field);
        assert_eq!(out, *b"\x40\x0acustom-key\x0dcustom-header");
        out.clear();
        put_reference(&mut out, 2);
        assert_eq!(out, [0x82]);
        assert_eq!(list_bytes(&field), 55);
    }
}
