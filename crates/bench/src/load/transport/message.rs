//! gRPC messages without a copy: a request in its frame, and an answer as it lies in the chunks that came. The
//! answer's one large field, `data`, is never copied unless it is to be checked and came in pieces; what is left is
//! decoded by prost and held against the request.

use super::answer::{FailedItem, Octets, Refused};
use crate::load::workload::{Part, Target, name};
use bytes::{BufMut as _, Bytes, BytesMut};
use prost::Message;
use ringfetch_client::wire;
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
    let dataset = part.dataset().to_owned();
    let fail_fast = false;
    match part.target() {
        Target::Blocks { .. } => framed(&wire::FetchBlocksRequest {
            dataset,
            indices: items.to_vec(),
            fail_fast,
        }),
        Target::Vectors { .. } => framed(&wire::FetchVectorsRequest {
            dataset,
            ids: items.to_vec(),
            fail_fast,
        }),
        Target::Ranges { .. } | Target::Extents(_) => {
            let extents = items.iter().filter_map(|&item| part.target().extent(item));
            let (offsets, lengths) = extents.unzip();
            framed(&wire::FetchRangesRequest {
                dataset,
                offsets,
                lengths,
                fail_fast,
            })
        }
        Target::Objects { names } => framed(&wire::FetchObjectsRequest {
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

/// Holds an answer, in the chunks that it came in, against its request.
pub(super) fn decode(chunks: &[Bytes], part: &Part, items: &[u64]) -> Result<Octets, Refused> {
    let (rest, data) = split(chunks, part.verifies()).ok_or_else(|| Refused::protocol("the answer is cut off"))?;
    let told = |error: prost::DecodeError| Refused::protocol(error.to_string());
    let (each, lengths, errors) = match part.target() {
        Target::Blocks { .. } => {
            let answer = wire::FetchBlocksResponse::decode(rest.as_slice()).map_err(told)?;
            (Some(answer.block_bytes), answer.lengths, answer.errors)
        }
        Target::Vectors { .. } => {
            let answer = wire::FetchVectorsResponse::decode(rest.as_slice()).map_err(told)?;
            let element = ringfetch_client::Dtype::from_wire(answer.dtype).map_or(0, |dtype| dtype.size_bytes());
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
) -> Result<Octets, Refused> {
    let size = |length: u32| usize::try_from(length).unwrap_or(usize::MAX);
    let lengths: Vec<usize> = match each {
        Some(each) if lengths.is_empty() && errors.is_empty() => vec![size(each); items.len()],
        _ => lengths.into_iter().map(size).collect(),
    };
    if lengths.len() != items.len() {
        return Err(Refused::protocol(format!("{} lengths of {} items", lengths.len(), items.len())));
    }
    let is_failed = |i: usize| errors.iter().any(|error| usize::try_from(error.item) == Ok(i));
    for (i, (&item, &length)) in items.iter().zip(&lengths).enumerate() {
        let due = part.target().item_bytes(item).and_then(|due| usize::try_from(due).ok());
        if due.is_some_and(|due| due != length) && !(length == 0 && is_failed(i)) {
            return Err(Refused::protocol(format!("item {i} has {length} bytes, {due:?} were due")));
        }
    }
    let sum = lengths.iter().try_fold(0usize, |sum, length| sum.checked_add(*length));
    if sum != Some(data.length) {
        return Err(Refused::protocol(format!("{} bytes of data for {sum:?}", data.length)));
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
    Ok(Octets {
        items: items.len(),
        bytes: u64::try_from(data.length).unwrap_or(u64::MAX),
        failed: errors.iter().map(tell).collect(),
        lengths,
        data: data.bytes,
    })
}

/// The one message in these chunks as everything but `data`, and `data`. `None`: it is not one whole message.
fn split(chunks: &[Bytes], keep: bool) -> Option<(Vec<u8>, Data)> {
    let mut cursor = Cursor { chunks, at: 0 };
    let compressed = cursor.byte()?;
    let mut length = [0; 4];
    for byte in &mut length {
        *byte = cursor.byte()?;
    }
    let length = usize::try_from(u32::from_be_bytes(length)).ok()?;
    if compressed != 0 || length > ANSWER_BYTES_MAX || cursor.left() != length {
        return None;
    }
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
        self.chunks.iter().map(Bytes::len).sum::<usize>().saturating_sub(self.at)
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

    fn answer(blocks: usize) -> wire::FetchBlocksResponse {
        wire::FetchBlocksResponse {
            block_bytes: 8,
            data: (0..blocks * 8).map(|at| u8::try_from(at % 251).unwrap()).collect::<Vec<_>>().into(),
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
        whole.errors = vec![wire::ItemError { item: 39, code: 11, message: "past the end".into() }];
        let bytes = framed(&whole);
        let mut cuts: Vec<Vec<Bytes>> =
            (0..=bytes.len()).map(|at| vec![bytes.slice(..at), bytes.slice(at..)]).collect();
        cuts.push((0..bytes.len()).map(|at| bytes.slice(at..=at)).collect());
        for chunks in &cuts {
            let (rest, data) = split(chunks, true).unwrap();
            let mut decoded = wire::FetchBlocksResponse::decode(rest.as_slice()).unwrap();
            decoded.data = data.bytes;
            assert_eq!(decoded, whole);
            let (_, data) = split(chunks, false).unwrap();
            assert_eq!((data.length, data.bytes.len()), (39 * 8, 0));
        }
        assert!(split(&[bytes.slice(..bytes.len() - 1)], true).is_none());
        assert!(split(&[], true).is_none());
        let workload = Workload::of_blocks(100);
        let items: Vec<u64> = (0..40).collect();
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
        let error = wire::ItemError { item: 2, code: 11, message: String::new() };
        for wrong in [
            wire::FetchBlocksResponse { block_bytes: 4, ..right.clone() },
            answer(1),
            wire::FetchBlocksResponse { lengths: vec![8, 8, 0], ..right.clone() },
            wire::FetchBlocksResponse { lengths: vec![8, 0], ..answer(1) },
            wire::FetchBlocksResponse { lengths: vec![8, 8], errors: vec![error], ..right },
        ] {
            assert!(check(&wrong).is_err(), "{wrong:?}");
        }
        let garbage = Bytes::from_static(&[0, 0, 0, 0, 3, 0xff, 0xff, 0xff]);
        assert!(decode(&[garbage], workload.part(0), &[4, 5]).is_err());
    }

    #[test]
    fn numbers_are_written_as_they_are_read() {
        // Scenario: numbers around every length that a varint has.
        // Expected: what went in comes out.
        for number in (0..64).flat_map(|shift| [(1u64 << shift) - 1, 1 << shift]).chain([u64::MAX]) {
            let mut out = Vec::new();
            put_varint(number, &mut out);
            let chunks = [Bytes::from(out)];
            assert_eq!(Cursor { chunks: &chunks, at: 0 }.varint(), Some(number));
        }
    }
}
