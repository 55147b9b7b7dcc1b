//! gRPC messages in their frames. A request is encoded once; an answer is decoded in place: its one large
//! field (`data`, the only one of type `bytes`) becomes slices of the received chunks and is never copied.

use crate::error::Error;
use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use prost::Message;
use ringfetch_proto::v1 as wire;
use std::collections::VecDeque;
use wire::fetch_stream_request::Request as WireRequest;

/// One byte that says whether the message is compressed, and four of length.
const PREFIX_BYTES: usize = 5;

/// Longest detail of a `google.rpc.Status` that is decoded.
const DETAIL_BYTES_MAX: usize = 4 << 10;

/// Most bytes before the batch in a stream's request: the prefix, the id and the deadline, each after its
/// key.
const HEAD_BYTES: usize = PREFIX_BYTES + 11 + 6;

/// A message after its prefix.
pub(crate) fn frame(message: &impl Message) -> Result<Bytes, Error> {
    let length = message.encoded_len();
    let on_wire = length_on_wire(length)?;
    let mut out = BytesMut::with_capacity(PREFIX_BYTES + length);
    out.put_u8(0);
    out.put_u32(on_wire);
    // The buffer has room, so this does not fail.
    message
        .encode(&mut out)
        .map_err(|error| Error::protocol(error.to_string()))?;
    Ok(out.freeze())
}

/// h2 sends less than 2 GiB at a time.
fn length_on_wire(length: usize) -> Result<u32, Error> {
    let on_wire = i32::try_from(length + PREFIX_BYTES).ok();
    let on_wire = on_wire.and_then(|_| u32::try_from(length).ok());
    on_wire.ok_or_else(|| {
        Error::invalid(
            "request",
            format!("is {length} bytes long, more than a message may have"),
        )
    })
}

/// A stream's request, encoded before its id is known: room for the head, then the batch.
#[derive(Debug, Clone, Default)]
pub(crate) struct StreamRequest(Vec<u8>);

impl StreamRequest {
    pub(crate) fn encode(request: &WireRequest) -> Result<Self, Error> {
        let length = HEAD_BYTES + request.encoded_len();
        length_on_wire(length)?;
        // Exactly as long as needed, so that `Bytes` takes it without a copy.
        let mut out = Vec::with_capacity(length);
        out.resize(HEAD_BYTES, 0);
        request.encode(&mut out);
        Ok(Self(out))
    }

    /// The message after its prefix.
    pub(crate) fn frame(mut self, id: u64, deadline_ms: u32) -> Result<Bytes, Error> {
        let fields = wire::FetchStreamRequest {
            id,
            request: None,
            deadline_ms,
        };
        let fields_length = fields.encoded_len();
        let begin = HEAD_BYTES - PREFIX_BYTES - fields_length;
        let on_wire = length_on_wire(self.0.len() - HEAD_BYTES + fields_length)?;
        let mut head = &mut self.0[begin..HEAD_BYTES];
        head.put_u8(0);
        head.put_u32(on_wire);
        // The head has room, so this does not fail.
        fields
            .encode(&mut head)
            .map_err(|error| Error::protocol(error.to_string()))?;
        let mut out = Bytes::from(self.0);
        out.advance(begin);
        Ok(out)
    }
}

/// The bytes of an answer's items, in the pieces that the transport delivered.
#[derive(Debug, Clone, Default)]
pub(crate) struct Data {
    length: usize,
    first: Bytes,
    /// Further pieces, each with its offset.
    rest: Vec<(usize, Bytes)>,
}

impl Data {
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Bytes `from..to`: a slice if they lie in one piece, else a copy. They must lie inside.
    pub(crate) fn slice(&self, from: usize, to: usize) -> Bytes {
        if to <= self.first.len() {
            return self.first.slice(from..to);
        }
        // The piece that `from` lies in, as a number of `rest` after `first`.
        let after = self.rest.partition_point(|(begin, _)| *begin <= from);
        if let Some((begin, piece)) = after.checked_sub(1).and_then(|at| self.rest.get(at))
            && to - begin <= piece.len()
        {
            return piece.slice(from - begin..to - begin);
        }
        let (mut copy, mut at) = (BytesMut::with_capacity(to - from), from);
        for (begin, piece) in self.places().skip(after) {
            if at >= to {
                break;
            }
            let end = to.min(begin + piece.len());
            copy.extend_from_slice(&piece[at - begin..end - begin]);
            at = end;
        }
        copy.freeze()
    }

    fn places(&self) -> impl Iterator<Item = (usize, &Bytes)> {
        std::iter::once((0, &self.first)).chain(self.rest.iter().map(|(begin, piece)| (*begin, piece)))
    }

    pub(crate) fn pieces(&self) -> impl Iterator<Item = &Bytes> {
        self.places()
            .map(|(_, piece)| piece)
            .filter(|piece| !piece.is_empty())
    }

    fn push(&mut self, piece: Bytes) {
        let begin = self.length;
        self.length += piece.len();
        if begin == 0 {
            self.first = piece;
        } else {
            self.rest.push((begin, piece));
        }
    }
}

impl From<Bytes> for Data {
    fn from(bytes: Bytes) -> Self {
        let mut data = Self::default();
        data.push(bytes);
        data
    }
}

/// The chunks received so far, and the messages in them.
#[derive(Debug)]
pub(crate) struct Incoming {
    chunks: Chunks,
    length_max: usize,
}

impl Incoming {
    pub(crate) fn new(length_max: usize) -> Self {
        Self {
            chunks: Chunks::default(),
            length_max,
        }
    }

    pub(crate) fn push(&mut self, chunk: Bytes) {
        self.chunks.push(chunk);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.chunks.left == 0
    }

    /// The next message, once it is complete. A message that is too long fails before it has arrived.
    pub(crate) fn next(&mut self) -> Result<Option<Encoded>, Error> {
        let Some(prefix) = self.chunks.peek::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let [compressed, length @ ..] = prefix;
        if compressed != 0 {
            return Err(Error::protocol(
                "the answer is compressed, but no compression was requested",
            ));
        }
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        if length > self.length_max {
            return Err(Error::protocol(format!(
                "the answer has {length} bytes; raise the builder's max_answer_bytes ({}), or ask for less at once",
                self.length_max
            )));
        }
        if self.chunks.left - PREFIX_BYTES < length {
            return Ok(None);
        }
        self.chunks.advance(PREFIX_BYTES);
        Ok(Some(Encoded(self.chunks.split_to(length))))
    }
}

/// A complete message, still encoded.
#[derive(Debug)]
pub(crate) struct Encoded(Chunks);

impl Encoded {
    /// The message without its `data`, and its `data`.
    pub(crate) fn decode<M: Message + Default>(self) -> Result<(M, Data), Error> {
        let mut message = M::default();
        let data = self.decode_into(&mut message)?;
        Ok((message, data))
    }

    /// The same, decoded into an existing empty message.
    pub(crate) fn decode_into(self, message: &mut impl Message) -> Result<Data, Error> {
        let mut reader = Reader {
            chunks: self.0,
            taken: Data::default(),
        };
        message
            .merge(&mut reader)
            .map_err(|error| Error::protocol(error.to_string()))?;
        Ok(reader.taken)
    }
}

/// Bytes in pieces, read from the front.
#[derive(Debug, Default)]
struct Chunks {
    /// Empty only if there are none.
    front: Bytes,
    rest: VecDeque<Bytes>,
    left: usize,
}

impl Chunks {
    fn push(&mut self, chunk: Bytes) {
        self.left += chunk.len();
        if self.front.is_empty() {
            self.front = chunk;
        } else if !chunk.is_empty() {
            self.rest.push_back(chunk);
        }
    }

    fn pop(&mut self) -> Bytes {
        std::mem::replace(&mut self.front, self.rest.pop_front().unwrap_or_default())
    }

    fn peek<const N: usize>(&self) -> Option<[u8; N]> {
        if let Some(front) = self.front.first_chunk() {
            return Some(*front);
        }
        let mut bytes = self.front.iter().chain(self.rest.iter().flatten());
        let mut out = [0; N];
        for byte in &mut out {
            *byte = *bytes.next()?;
        }
        Some(out)
    }

    /// Takes pieces of `length` bytes in total off the front; there must be as many.
    fn take(&mut self, mut length: usize, mut to: impl FnMut(Bytes)) {
        self.left -= length;
        while length > self.front.len() {
            if self.front.is_empty() {
                return;
            }
            length -= self.front.len();
            to(self.pop());
        }
        to(self.front.split_to(length));
        if self.front.is_empty() {
            self.pop();
        }
    }

    fn advance(&mut self, count: usize) {
        if count < self.front.len() {
            self.left -= count;
            self.front.advance(count);
        } else {
            self.take(count, drop);
        }
    }

    fn split_to(&mut self, length: usize) -> Self {
        if length == self.left {
            return std::mem::take(self);
        }
        let mut chunks = Self::default();
        self.take(length, |piece| chunks.push(piece));
        chunks
    }
}

/// A message as prost reads it. prost requests owned bytes only for fields of type `bytes`, which are kept
/// aside.
struct Reader {
    chunks: Chunks,
    /// The last field of type `bytes` that was decoded.
    taken: Data,
}

impl Buf for Reader {
    fn remaining(&self) -> usize {
        self.chunks.left
    }

    fn chunk(&self) -> &[u8] {
        &self.chunks.front
    }

    fn advance(&mut self, count: usize) {
        self.chunks.advance(count);
    }

    fn copy_to_bytes(&mut self, length: usize) -> Bytes {
        let mut data = Data::default();
        self.chunks.take(length, |piece| data.push(piece));
        // The details of a status are of type `bytes` too, but short.
        let small = if length <= DETAIL_BYTES_MAX {
            data.slice(0, length)
        } else {
            Bytes::new()
        };
        self.taken = data;
        small
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incoming(chunks: &[Bytes]) -> Incoming {
        let mut incoming = Incoming::new(1 << 20);
        chunks.iter().cloned().for_each(|chunk| incoming.push(chunk));
        incoming
    }

    fn answer() -> wire::FetchBlocksResponse {
        wire::FetchBlocksResponse {
            block_bytes: 8,
            lengths: [vec![8; 39], vec![0]].concat(),
            errors: vec![wire::ItemError {
                item: 39,
                code: 11,
                message: "past the end".into(),
            }],
            data: (0..=255).cycle().take(39 * 8).collect::<Vec<u8>>().into(),
            ..Default::default()
        }
    }

    #[test]
    fn an_answer_is_read_wherever_it_was_cut() {
        // Scenario: an answer of 40 blocks of 8 bytes with lengths and an error, cut at every place into two
        // chunks, into chunks of three bytes and into single bytes. Expected: what prost decodes from the
        // whole, and every slice of the data is right.
        let whole = answer();
        let bytes = frame(&whole).unwrap();
        let mut cuts: Vec<Vec<Bytes>> = (0..=bytes.len())
            .map(|at| vec![bytes.slice(..at), bytes.slice(at..)])
            .collect();
        for step in [1, 3] {
            cuts.push(bytes.chunks(step).map(Bytes::copy_from_slice).collect());
        }
        for chunks in &cuts {
            let mut incoming = incoming(chunks);
            let encoded = incoming.next().unwrap().unwrap();
            assert!(incoming.is_empty());
            let (mut decoded, data) = encoded.decode::<wire::FetchBlocksResponse>().unwrap();
            assert_eq!(data.len(), whole.data.len());
            for (from, to) in [
                (0, 0),
                (0, 8),
                (8, 16),
                (3, 5),
                (0, 312),
                (304, 312),
                (311, 312),
                (312, 312),
            ] {
                assert_eq!(
                    data.slice(from, to),
                    whole.data[from..to],
                    "{from}..{to} of {} chunks",
                    chunks.len()
                );
            }
            decoded.data = data.slice(0, data.len());
            assert_eq!(decoded, whole);
        }
    }

    #[test]
    fn answers_of_a_stream_come_one_by_one() {
        // Scenario: three messages, cut at every place; all but the last byte of one.
        // Expected: all three in order; no message yet.
        let messages: Vec<_> = (5..8)
            .map(|id| wire::FetchStreamResponse {
                id,
                response: Some(wire::fetch_stream_response::Response::Blocks(answer())),
            })
            .collect();
        let all: Bytes = messages
            .iter()
            .map(|message| frame(message).unwrap())
            .collect::<Vec<_>>()
            .concat()
            .into();
        for cut in 0..=all.len() {
            let mut incoming = incoming(&[all.slice(..cut), all.slice(cut..)]);
            for message in &messages {
                let encoded = incoming.next().unwrap().unwrap();
                let (decoded, data) = encoded.decode::<wire::FetchStreamResponse>().unwrap();
                assert_eq!((decoded.id, data.slice(0, 312)), (message.id, answer().data));
            }
            assert!(incoming.is_empty() && incoming.next().unwrap().is_none());
        }
        let first = frame(&messages[0]).unwrap();
        assert!(
            incoming(&[first.slice(..first.len() - 1)])
                .next()
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn a_streams_request_is_the_message_that_prost_writes() {
        // The shortest and the longest head; each is also sent again with another one.
        let request = WireRequest::Blocks(wire::FetchBlocksRequest {
            dataset: "blocks".into(),
            indices: vec![1, 300, u64::MAX],
            ..Default::default()
        });
        let encoded = StreamRequest::encode(&request).unwrap();
        for (id, deadline_ms) in [(0, 0), (1, 0), (0, 1), (300, 5000), (u64::MAX, u32::MAX)] {
            let whole = frame(&wire::FetchStreamRequest {
                id,
                request: Some(request.clone()),
                deadline_ms,
            });
            let mut sent = encoded.clone().frame(id, deadline_ms).unwrap();
            sent.advance(PREFIX_BYTES);
            let decoded = wire::FetchStreamRequest::decode(sent).unwrap();
            let whole = whole.unwrap().slice(PREFIX_BYTES..);
            assert_eq!(decoded, wire::FetchStreamRequest::decode(whole).unwrap());
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        // Scenario: a compressed message, one over the limit of which only the prefix arrived, invalid
        // protobuf. Expected: a protocol error for each.
        let refused = |bytes: &'static [u8]| {
            let outcome = incoming(&[Bytes::from_static(bytes)])
                .next()
                .and_then(|encoded| encoded.unwrap().decode::<wire::FetchBlocksResponse>().map(|_| ()));
            matches!(outcome, Err(Error::Protocol { .. }))
        };
        assert!(refused(&[1, 0, 0, 0, 0]));
        assert!(refused(&[0, 0, 0x10, 0, 1]));
        assert!(refused(&[0, 0, 0, 0, 3, 0xff, 0xff, 0xff]));
    }
}
