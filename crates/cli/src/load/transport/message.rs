//! gRPC messages without a copy: a request in its frame, and an answer as it lies in the chunks that came. The
//! answer's one large field, `data`, is never copied unless it is to be checked and came in pieces; what is left is
//! decoded by prost and held against the request.

use super::answer::{Answer, FailedItem, Refused};
use crate::load::workload::{Part, Target, name};
use bytes::{BufMut as _, Bytes, BytesMut};
use prost::Message;
use ringfetch_client::wire;
use ringfetch_client::wire::fetch_stream_request::Request as Asked;
use std::borrow::Cow;

/// Not compressed, and the length: what precedes every message.
const PREFIX_BYTES: usize = 5;
/// Number of `data` in all four answers.
const DATA_FIELD: u64 = 15;
/// Longest answer that is taken, as the client crate's default.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// What is not `data` is lengths and errors.
const REST_BYTES_MAX: usize = 16 << 20;

/// The request for these items, framed.
pub(super) fn encode(part: &Part, items: &[u64]) -> Bytes {
    match request(part, items) {
        Asked::Blocks(request) => framed(&request),
        Asked::Vectors(request) => framed(&request),
        Asked::Ranges(request) => framed(&request),
        Asked::Objects(request) => framed(&request),
        // A part of a workload never is one.
        Asked::Cancel(request) => framed(&request),
    }
}

/// The same as a stream's request `id`.
pub(super) fn encode_for_stream(id: u64, deadline_ms: u32, part: &Part, items: &[u64]) -> Bytes {
    framed(&wire::FetchStreamRequest {
        id,
        request: Some(request(part, items)),
        deadline_ms,
    })
}

fn request(part: &Part, items: &[u64]) -> Asked {
    let dataset = part.dataset().to_owned();
    let fail_fast = false;
    match part.target() {
        Target::Blocks { .. } => Asked::Blocks(wire::FetchBlocksRequest {
            dataset,
            indices: items.to_vec(),
            fail_fast,
            ..Default::default()
        }),
        Target::Vectors { .. } => Asked::Vectors(wire::FetchVectorsRequest {
            dataset,
            ids: items.to_vec(),
            fail_fast,
            ..Default::default()
        }),
        Target::Ranges { .. } | Target::Extents(_) => {
            let extents = items.iter().filter_map(|&item| part.target().extent(item));
            let (offsets, lengths) = extents.unzip();
            Asked::Ranges(wire::FetchRangesRequest {
                dataset,
                offsets,
                lengths,
                fail_fast,
                ..Default::default()
            })
        }
        Target::Objects { names } => Asked::Objects(wire::FetchObjectsRequest {
            dataset,
            names: items.iter().map(|&item| name(names, item).to_owned()).collect(),
            fail_fast,
            ..Default::default()
        }),
    }
}

fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut out = BytesMut::with_capacity(PREFIX_BYTES + length);
    out.put_u8(0);
    // A request of 4 GiB does not fit a request's limits.
    out.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // The buffer grows, so this does not fail.
    let _ = message.encode(&mut out);
    out.freeze()
}

/// Holds a call's answer, in the chunks that it came in, against its request.
pub(super) fn decode(chunks: &[Bytes], part: &Part, items: &[u64]) -> Result<Answer, Refused> {
    let mut cursor = Cursor { chunks, at: 0 };
    match cursor.prefix() {
        Some(length) if length == cursor.left() => decode_message(cursor.chunks, cursor.at, part, items),
        Some(_) | None => Err(cut_off()),
    }
}

fn cut_off() -> Refused {
    Refused::protocol("the answer is cut off, compressed or too long")
}

/// One answer of a stream.
#[derive(Debug)]
pub(super) struct Streamed {
    pub(super) id: u64,
    /// Number of its field in FetchStreamResponse.
    field: u64,
    chunks: Vec<Bytes>,
}

impl Streamed {
    /// The next answer in what has come so far, and how many bytes of it it was; `None`: it is not all there yet.
    pub(super) fn next(chunks: &[Bytes]) -> Result<Option<(Self, usize)>, Refused> {
        let mut cursor = Cursor { chunks, at: 0 };
        if cursor.left() < PREFIX_BYTES {
            return Ok(None);
        }
        let length = cursor.prefix().ok_or_else(cut_off)?;
        if cursor.left() < length {
            return Ok(None);
        }
        let after = cursor.left() - length;
        let mut whole = || -> Option<Self> {
            let mut streamed = Self {
                id: 0,
                field: 0,
                chunks: Vec::new(),
            };
            while cursor.left() > after {
                match (cursor.varint()?, cursor.varint()?) {
                    // id = 1, a number.
                    (8, id) => streamed.id = id,
                    (key, length) if key & 7 == 2 => {
                        streamed.field = key >> 3;
                        streamed.chunks = cursor.pieces(usize::try_from(length).ok()?)?;
                    }
                    _ => return None,
                }
            }
            (cursor.left() == after).then_some(streamed)
        };
        whole()
            .map(|streamed| Some((streamed, PREFIX_BYTES + length)))
            .ok_or_else(cut_off)
    }

    /// Holds it against its request.
    pub(super) fn decode(&self, part: &Part, items: &[u64]) -> Result<Answer, Refused> {
        let due = match part.target() {
            Target::Blocks { .. } => 2,
            Target::Vectors { .. } => 3,
            Target::Ranges { .. } | Target::Extents(_) => 4,
            Target::Objects { .. } => 5,
        };
        if self.field == due {
            return decode_message(&self.chunks, 0, part, items);
        }
        if self.field != 7 {
            return Err(Refused::protocol("an answer of another kind than the request"));
        }
        let encoded = self.chunks.concat();
        let status = ringfetch_proto::RpcStatus::decode(encoded.as_slice())
            .map_err(|error| Refused::protocol(error.to_string()))?;
        let code = ringfetch_client::Code::from_i32(status.code);
        let status = tonic::Status::with_details(code, status.message, encoded.into());
        Err(Refused::from(ringfetch_client::Error::from(status)))
    }
}

/// Holds a message against its request.
fn decode_message(chunks: &[Bytes], at: usize, part: &Part, items: &[u64]) -> Result<Answer, Refused> {
    let (rest, data) = split(Cursor { chunks, at }, part.verifies()).ok_or_else(cut_off)?;
    let told = |error: prost::DecodeError| Refused::protocol(error.to_string());
    let (each, lengths, errors) = match part.target() {
        Target::Blocks { .. } => {
            let answer = wire::FetchBlocksResponse::decode(rest.as_slice()).map_err(told)?;
            (Some(answer.block_bytes), answer.lengths, answer.errors)
        }
        Target::Vectors { .. } => {
            let answer = wire::FetchVectorsResponse::decode(rest.as_slice()).map_err(told)?;
            let element =
                ringfetch_client::Dtype::from_wire(answer.dtype).map_or(0, |dtype| dtype.size_bytes());
            (answer.dim.checked_mul(element), answer.lengths, answer.errors)
        }
        Target::Ranges { .. } | Target::Extents(_) => {
            let answer = wire::FetchRangesResponse::decode(rest.as_slice()).map_err(told)?;
            (None, answer.lengths, answer.errors)
        }
        Target::Objects { .. } => {
            let answer = wire::FetchObjectsResponse::decode(rest.as_slice()).map_err(told)?;
            (None, answer.lengths, answer.errors)
        }
    };
    check(part, items, each, lengths, &errors, data)
}

/// An answer's data: how much, and the bytes where they are to be checked.
#[derive(Debug, Default, PartialEq, Eq)]
struct Data {
    length: usize,
    bytes: Bytes,
}

fn check(
    part: &Part,
    items: &[u64],
    each: Option<u32>,
    lengths: Vec<u32>,
    errors: &[wire::ItemError],
    data: Data,
) -> Result<Answer, Refused> {
    let size = |length: u32| usize::try_from(length).unwrap_or(usize::MAX);
    let lengths: Vec<usize> = match each {
        Some(each) if lengths.is_empty() && errors.is_empty() => vec![size(each); items.len()],
        _ => lengths.into_iter().map(size).collect(),
    };
    if lengths.len() != items.len() {
        return Err(Refused::protocol(format!(
            "{} lengths of {} items",
            lengths.len(),
            items.len()
        )));
    }
    let is_failed = |i: usize| errors.iter().any(|error| usize::try_from(error.item) == Ok(i));
    for (i, (&item, &length)) in items.iter().zip(&lengths).enumerate() {
        let due = part
            .target()
            .item_bytes(item)
            .and_then(|due| usize::try_from(due).ok());
        if due.is_some_and(|due| due != length) && !(length == 0 && is_failed(i)) {
            return Err(Refused::protocol(format!(
                "item {i} has {length} bytes, {due:?} were due"
            )));
        }
    }
    let sum = lengths
        .iter()
        .try_fold(0usize, |sum, length| sum.checked_add(*length));
    if sum != Some(data.length) {
        return Err(Refused::protocol(format!(
            "{} bytes of data for {sum:?}",
            data.length
        )));
    }
    if let Some(wrong) = errors.iter().find(|error| size(error.item) >= items.len()) {
        return Err(Refused::protocol(format!("an error of item {}", wrong.item)));
    }
    let tell = |error: &wire::ItemError| {
        // The code's name as the client tells it.
        let code = ringfetch_client::Code::from_i32(error.code);
        let told = ringfetch_client::Error::from(tonic::Status::new(code, error.message.clone()));
        FailedItem {
            label: Cow::Borrowed(told.label()),
            message: format!("item {}: {}", error.item, error.message),
        }
    };
    Ok(Answer {
        items: items.len(),
        bytes: u64::try_from(data.length).unwrap_or(u64::MAX),
        failed: errors.iter().map(tell).collect(),
        lengths,
        data: data.bytes,
    })
}

/// A message as everything but `data`, and `data`. `None`: it is none.
fn split(mut cursor: Cursor<'_>, keep: bool) -> Option<(Vec<u8>, Data)> {
    let (mut rest, mut data) = (Vec::new(), Data::default());
    while cursor.left() > 0 {
        let key = cursor.varint()?;
        let (field, kind) = (key >> 3, key & 7);
        // The kinds that these messages have: 0 a number, 2 bytes.
        match (field, kind) {
            (DATA_FIELD, 2) => {
                data.length = usize::try_from(cursor.varint()?).ok()?;
                data.bytes = cursor.take(data.length, keep)?;
            }
            (_, 0) => {
                put_varint(key, &mut rest);
                put_varint(cursor.varint()?, &mut rest);
            }
            (_, 2) => {
                let length = cursor.varint()?;
                let bytes = cursor.take(usize::try_from(length).ok()?, true)?;
                put_varint(key, &mut rest);
                put_varint(length, &mut rest);
                rest.extend_from_slice(&bytes);
            }
            _ => return None,
        }
        if rest.len() > REST_BYTES_MAX {
            return None;
        }
    }
    Some((rest, data))
}

fn put_varint(mut number: u64, out: &mut Vec<u8>) {
    while let low @ 0x80.. = number {
        out.push((low & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    out.push((number & 0x7f) as u8);
}

/// A place in chunks that belong together.
struct Cursor<'a> {
    /// From the current one on.
    chunks: &'a [Bytes],
    /// In the first of them.
    at: usize,
}

impl Cursor<'_> {
    fn left(&self) -> usize {
        self.chunks
            .iter()
            .map(Bytes::len)
            .sum::<usize>()
            .saturating_sub(self.at)
    }

    /// What precedes a message; its length.
    fn prefix(&mut self) -> Option<usize> {
        let compressed = self.byte()?;
        let mut length = [0; 4];
        for byte in &mut length {
            *byte = self.byte()?;
        }
        let length = usize::try_from(u32::from_be_bytes(length)).ok()?;
        (compressed == 0 && length <= ANSWER_BYTES_MAX).then_some(length)
    }

    /// The next bytes as they lie in their chunks.
    fn pieces(&mut self, length: usize) -> Option<Vec<Bytes>> {
        let (mut left, mut pieces) = (length, Vec::with_capacity(2));
        while left > 0 {
            let (first, others) = self.chunks.split_first()?;
            let step = first.len().checked_sub(self.at)?.min(left);
            if step == 0 {
                (self.chunks, self.at) = (others, 0);
                continue;
            }
            pieces.push(first.slice(self.at..self.at + step));
            self.at += step;
            left -= step;
        }
        Some(pieces)
    }

    fn byte(&mut self) -> Option<u8> {
        loop {
            let (first, others) = self.chunks.split_first()?;
            if let Some(byte) = first.get(self.at) {
                self.at += 1;
                return Some(*byte);
            }
            (self.chunks, self.at) = (others, 0);
        }
    }

    fn varint(&mut self) -> Option<u64> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    /// The next bytes; empty if they are not to be kept. A copy only where they lie in several chunks.
    fn take(&mut self, length: usize, keep: bool) -> Option<Bytes> {
        let (mut left, mut pieces) = (length, BytesMut::new());
        while left > 0 {
            let (first, others) = self.chunks.split_first()?;
            let here = first.get(self.at..)?;
            if here.is_empty() {
                (self.chunks, self.at) = (others, 0);
                continue;
            }
            let step = here.len().min(left);
            let from = self.at;
            self.at += step;
            left -= step;
            if keep && step == length {
                return Some(first.slice(from..from + step));
            }
            if keep {
                pieces.reserve(left + step);
                pieces.extend_from_slice(&here[..step]);
            }
        }
        Some(pieces.freeze())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::workload::Workload;
    use std::time::Duration;

    fn answer(blocks: usize) -> wire::FetchBlocksResponse {
        wire::FetchBlocksResponse {
            block_bytes: 8,
            data: (0..blocks * 8)
                .map(|at| u8::try_from(at % 251).unwrap())
                .collect::<Vec<_>>()
                .into(),
            ..Default::default()
        }
    }

    #[test]
    fn an_answer_is_read_wherever_it_was_cut() {
        // Scenario: an answer of 40 blocks of 8 bytes with lengths and an error, cut at every place into two chunks,
        // and into single bytes; then the same cut short by one byte.
        // Expected: what prost decodes from the whole, in each case; nothing for the short one.
        let mut whole = answer(39);
        whole.lengths = [vec![8; 39], vec![0]].concat();
        whole.errors = vec![wire::ItemError {
            item: 39,
            code: 11,
            message: "past the end".into(),
        }];
        let bytes = framed(&whole);
        let mut cuts: Vec<Vec<Bytes>> = (0..=bytes.len())
            .map(|at| vec![bytes.slice(..at), bytes.slice(at..)])
            .collect();
        cuts.push((0..bytes.len()).map(|at| bytes.slice(at..=at)).collect());
        for chunks in &cuts {
            let after_prefix = |chunks| {
                let mut cursor = Cursor { chunks, at: 0 };
                cursor.prefix().map(|_| cursor)
            };
            let (rest, data) = split(after_prefix(chunks).unwrap(), true).unwrap();
            let mut decoded = wire::FetchBlocksResponse::decode(rest.as_slice()).unwrap();
            decoded.data = data.bytes;
            assert_eq!(decoded, whole);
            let (_, data) = split(after_prefix(chunks).unwrap(), false).unwrap();
            assert_eq!((data.length, data.bytes.len()), (39 * 8, 0));
        }
        let workload = Workload::of_blocks(100);
        let items: Vec<u64> = (0..40).collect();
        assert!(decode(&[bytes.slice(..bytes.len() - 1)], workload.part(0), &[]).is_err());
        assert!(decode(&[], workload.part(0), &[]).is_err());
        let octets = decode(&cuts[3], workload.part(0), &items).unwrap();
        assert_eq!((octets.items, octets.bytes, octets.failed.len()), (40, 312, 1));
        assert_eq!(octets.failed[0].label, "OUT_OF_RANGE");
    }

    #[test]
    fn an_answer_that_does_not_fit_its_request_is_refused() {
        // Scenario: answers to two blocks of 8 bytes: right; of other blocks, too few bytes, lengths of three items, a
        // block that is missing without an error, an error of a third; bytes that are no message.
        // Expected: the first is taken, each of the others is an error.
        let workload = Workload::of_blocks(100);
        let check = |answer: &wire::FetchBlocksResponse| decode(&[framed(answer)], workload.part(0), &[4, 5]);
        let right = answer(2);
        assert_eq!(check(&right).unwrap().lengths, [8, 8]);
        let error = wire::ItemError {
            item: 2,
            code: 11,
            message: String::new(),
        };
        for wrong in [
            wire::FetchBlocksResponse {
                block_bytes: 4,
                ..right.clone()
            },
            answer(1),
            wire::FetchBlocksResponse {
                lengths: vec![8, 8, 0],
                ..right.clone()
            },
            wire::FetchBlocksResponse {
                lengths: vec![8, 0],
                ..answer(1)
            },
            wire::FetchBlocksResponse {
                lengths: vec![8, 8],
                errors: vec![error],
                ..right
            },
        ] {
            assert!(check(&wrong).is_err(), "{wrong:?}");
        }
        let garbage = Bytes::from_static(&[0, 0, 0, 0, 3, 0xff, 0xff, 0xff]);
        assert!(decode(&[garbage], workload.part(0), &[4, 5]).is_err());
    }

    #[test]
    fn answers_of_a_stream_come_one_by_one() {
        // Scenario: two answers of a stream and an error, cut at every place; all but the last byte; a compressed one.
        // Expected: the three by their ids, the error as its code with its hint; wait for more; an error.
        use ringfetch_client::wire::fetch_stream_response::Response as Told;
        // A google.rpc.RetryInfo of 7 ms: retry_delay (field 1) with nanos (field 2).
        let mut error = ringfetch_proto::RpcStatus {
            code: 8,
            message: "full".into(),
            details: vec![Default::default()],
        };
        error.details[0].type_url = "type.googleapis.com/google.rpc.RetryInfo".into();
        error.details[0].value = vec![0x0a, 0x05, 0x10, 0xc0, 0x9f, 0xab, 0x03];
        let told = [
            Told::Blocks(answer(1)),
            Told::Blocks(answer(1)),
            Told::Status(error),
        ];
        let messages: Vec<Bytes> = (5..)
            .zip(told)
            .map(|(id, told)| {
                framed(&wire::FetchStreamResponse {
                    id,
                    response: Some(told),
                })
            })
            .collect();
        let all = Bytes::from(messages.concat());
        let workload = Workload::of_blocks(100);
        for cut in 0..=all.len() {
            let (mut rest, mut ids) = (vec![all.slice(..cut), all.slice(cut..)], Vec::new());
            while let Some((streamed, length)) = Streamed::next(&rest).unwrap() {
                rest = vec![Bytes::from(rest.concat()).slice(length..)];
                ids.push(streamed.id);
                match (streamed.id, streamed.decode(workload.part(0), &[3])) {
                    (5 | 6, Ok(octets)) => assert_eq!(octets.bytes, 8),
                    (7, Err(refused)) => {
                        assert_eq!(refused.label, "RESOURCE_EXHAUSTED");
                        assert_eq!(refused.retry_after, Some(Duration::from_millis(7)));
                    }
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(ids, [5, 6, 7]);
        }
        assert!(
            Streamed::next(&[messages[0].slice(..messages[0].len() - 1)])
                .unwrap()
                .is_none()
        );
        assert!(Streamed::next(&[Bytes::from_static(&[1, 0, 0, 0, 0])]).is_err());
    }

    #[test]
    fn numbers_are_written_as_they_are_read() {
        // Scenario: numbers around every length that a varint has.
        // Expected: what went in comes out.
        for number in (0..64)
            .flat_map(|shift| [(1u64 << shift) - 1, 1 << shift])
            .chain([u64::MAX])
        {
            let mut out = Vec::new();
            put_varint(number, &mut out);
            let chunks = [Bytes::from(out)];
            assert_eq!(
                Cursor {
                    chunks: &chunks,
                    at: 0
                }
                .varint(),
                Some(number)
            );
        }
    }
}
