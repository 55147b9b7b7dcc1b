//! gRPC calls from bytes, and the checks of their answers.
//!
//! An input is three bytes (method; pieces and framing; length of `grpc-timeout`), the timeout, and the body.

use crate::items::Batch;
use crate::{Answer, BLOCK_BYTES, REQUEST_BYTES, VECTOR_BYTES, World, part, scores};
use bytes::{BufMut as _, Bytes, BytesMut};
use http::Request;
use http_body::Frame;
use http_body_util::StreamBody;
use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, skip_field};
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request as Streamed;
use ringfetch_proto::v1::fetch_stream_response::Response as StreamedAnswer;
use std::collections::HashMap;
use std::convert::Infallible;

const FETCH: &str = "/ringfetch.v1.FetchService/";
const METHODS: [&str; 14] = [
    "/ringfetch.v1.FetchService/FetchBlocks",
    "/ringfetch.v1.FetchService/FetchVectors",
    "/ringfetch.v1.FetchService/FetchRanges",
    "/ringfetch.v1.FetchService/FetchObjects",
    "/ringfetch.v1.FetchService/FetchStream",
    "/ringfetch.v1.FetchService/ScoreVectors",
    "/ringfetch.v1.FetchService/ReadObject",
    "/ringfetch.v1.FetchService/Nothing",
    "/ringfetch.v1.DatasetService/ListDatasets",
    "/ringfetch.v1.DatasetService/GetDataset",
    "/ringfetch.v1.DatasetService/ListObjects",
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

/// gRPC statuses that the checks name.
const OK: i32 = 0;
const UNKNOWN: i32 = 2;
const INTERNAL: i32 = 13;
const UNAVAILABLE: i32 = 14;
const DATA_LOSS: i32 = 15;
/// Most pieces of a body.
const PIECES_MAX: usize = 64;

#[derive(Debug, Clone)]
pub struct Call {
    pub method: &'static str,
    pub timeout: Option<Vec<u8>>,
    pub body: Bytes,
    /// Length of the pieces in which the body arrives.
    pub piece_bytes: usize,
}

impl Call {
    pub fn parse(input: &[u8]) -> Option<Self> {
        let (&[method, framing, timeout_bytes], rest) = input.split_first_chunk::<3>()?;
        let (timeout, body) = rest.split_at_checked(usize::from(timeout_bytes % 12))?;
        // With the highest bit set, the body is one correctly framed message.
        let body = if framing & 0x80 == 0 {
            Bytes::copy_from_slice(body)
        } else {
            framed(body)
        };
        Some(Self {
            method: METHODS[usize::from(method) % METHODS.len()],
            timeout: (!timeout.is_empty()).then(|| timeout.to_vec()),
            piece_bytes: match framing & 0x7f {
                0 => usize::MAX,
                some => usize::from(some),
            },
            body,
        })
    }

    /// Its request; `None` if its timeout is not a valid header value.
    pub fn request<B>(&self, authority: &str, body: B) -> Option<Request<B>> {
        let mut request = Request::post(format!("{authority}{}", self.method))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        if let Some(timeout) = &self.timeout {
            request = request.header("grpc-timeout", &timeout[..]);
        }
        request.body(body).ok()
    }

    /// The body in its pieces. More than about a hundred unread ones would end the connection: h2 bounds the
    /// cost of small frames (`too_many_data_frames`).
    pub fn pieces(&self) -> impl http_body::Body<Data = Bytes, Error = Infallible> + Send + Sync + 'static {
        let mut rest = self.body.clone();
        let piece_bytes = self.piece_bytes.max(rest.len().div_ceil(PIECES_MAX));
        let mut pieces = Vec::new();
        while !rest.is_empty() {
            pieces.push(Ok(Frame::data(rest.split_to(piece_bytes.min(rest.len())))));
        }
        StreamBody::new(futures_util::stream::iter(pieces))
    }

    /// Checks the call's answer.
    pub fn check(&self, world: &World, answer: &Answer) {
        assert_eq!(answer.status, 200, "{self:?}\n{answer:?}");
        let status = [&answer.headers, &answer.trailers]
            .into_iter()
            .find_map(|map| map.get("grpc-status"));
        let code: i32 = status.expect("a status").to_str().unwrap().parse().unwrap();
        assert!(
            (0..=16).contains(&code) && code != UNAVAILABLE && code != DATA_LOSS,
            "{self:?}\n{answer:?}"
        );
        if self.method == "/ringfetch.v1.FetchService/FetchStream" {
            return self.check_stream(world, code, &messages(&answer.body).0);
        }
        let (requests, is_whole) = messages(&self.body);
        let sound = is_whole
            && requests
                .iter()
                .all(|message| message.len() <= REQUEST_BYTES as usize);
        if !self.method.starts_with(FETCH) {
            return;
        }
        assert!(
            !sound || (code != INTERNAL && code != UNKNOWN),
            "{self:?}\n{answer:?}"
        );
        let [request] = &requests[..] else {
            return assert_ne!(code, OK, "{self:?}");
        };
        assert!(sound || code != OK, "what is not framed was accepted: {self:?}");
        let answers = messages(&answer.body).0;
        let answers = (code == OK).then_some(&answers[..]);
        // A deadline may pass at any time.
        let is_clear = sound && self.timeout.is_none();
        match self.method.strip_prefix(FETCH).unwrap_or_default() {
            "FetchBlocks" => unary::<v1::FetchBlocksRequest>(world, request, is_clear, answers),
            "FetchVectors" => unary::<v1::FetchVectorsRequest>(world, request, is_clear, answers),
            "FetchRanges" => unary::<v1::FetchRangesRequest>(world, request, is_clear, answers),
            "FetchObjects" => unary::<v1::FetchObjectsRequest>(world, request, is_clear, answers),
            "ScoreVectors" => unary::<v1::ScoreVectorsRequest>(world, request, is_clear, answers),
            "ReadObject" => read_object(world, request, is_clear, answers),
            _ => assert_eq!(answers, None, "{self:?}"),
        }
    }

    /// Each answer belongs to a request of the stream, and has its bytes; unless there was an error, none is
    /// missing.
    fn check_stream(&self, world: &World, code: i32, answers: &[Bytes]) {
        let requests: Result<Vec<_>, _> = messages(&self.body)
            .0
            .into_iter()
            .map(v1::FetchStreamRequest::decode)
            .collect();
        // A request refused for its length is not decoded, so it may contain anything.
        let Ok(requests) = requests else { return };
        let mut asked: HashMap<u64, Vec<&v1::FetchStreamRequest>> = HashMap::new();
        let (cancels, answered): (Vec<_>, Vec<_>) = requests
            .iter()
            .partition(|request| matches!(request.request, Some(Streamed::Cancel(_))));
        let cancelled: Vec<u64> = cancels.iter().map(|request| request.id).collect();
        for request in answered {
            asked.entry(request.id).or_default().push(request);
        }
        let mut answers_of: HashMap<u64, usize> = HashMap::new();
        for answer in answers {
            let answer: v1::FetchStreamResponse = read(answer);
            let asked = asked
                .get(&answer.id)
                .expect("an answer to a request of the stream");
            let answers = answers_of.entry(answer.id).or_default();
            *answers += 1;
            assert!(*answers <= asked.len(), "answered twice: {answer:?}");
            // Of several requests with one id, any may be the one answered.
            if let [request] = asked[..] {
                let is_clear =
                    self.timeout.is_none() && request.deadline_ms == 0 && !cancelled.contains(&answer.id);
                check_streamed(world, request, is_clear, &answer);
            }
        }
        assert!(
            code != OK || answers.len() == asked.values().map(Vec::len).sum::<usize>(),
            "not answered: {self:?}"
        );
    }
}

/// Checks the answer to a request of a stream. `is_clear`: no deadline and no Cancel has a say in it.
fn check_streamed(
    world: &World,
    request: &v1::FetchStreamRequest,
    is_clear: bool,
    answer: &v1::FetchStreamResponse,
) {
    match (&request.request, &answer.response) {
        (Some(Streamed::Blocks(request)), Some(StreamedAnswer::Blocks(answer))) => {
            request.check(world, answer)
        }
        (Some(Streamed::Vectors(request)), Some(StreamedAnswer::Vectors(answer))) => {
            request.check(world, answer)
        }
        (Some(Streamed::Ranges(request)), Some(StreamedAnswer::Ranges(answer))) => {
            request.check(world, answer)
        }
        (Some(Streamed::Objects(request)), Some(StreamedAnswer::Objects(answer))) => {
            request.check(world, answer)
        }
        (Some(Streamed::Scores(request)), Some(StreamedAnswer::Scores(answer))) => {
            request.check(world, answer)
        }
        (asked, Some(StreamedAnswer::Status(status))) => {
            assert!(status.code != OK && status.code != INTERNAL, "{status:?}");
            let must_succeed = match asked {
                Some(Streamed::Blocks(request)) => request.must_succeed(world),
                Some(Streamed::Vectors(request)) => request.must_succeed(world),
                Some(Streamed::Ranges(request)) => request.must_succeed(world),
                Some(Streamed::Objects(request)) => request.must_succeed(world),
                Some(Streamed::Scores(request)) => request.must_succeed(world),
                Some(Streamed::Cancel(_)) | None => false,
            };
            assert!(!is_clear || !must_succeed, "{asked:?} was refused: {status:?}");
        }
        (asked, answered) => panic!("{asked:?} was answered by {answered:?}"),
    }
}

/// Checks the answer to a call with one message; `None`: it was refused. `is_clear`: neither framing nor a deadline has a
/// say in it.
fn unary<R: Fetch>(world: &World, message: &Bytes, is_clear: bool, answers: Option<&[Bytes]>) {
    match answers {
        Some([answer]) => read::<R>(message).check(world, &read(answer)),
        Some(answers) => panic!("{} answers: {:?}", answers.len(), read::<R>(message)),
        None => {
            let must_succeed = |request: &R| is_clear && request.must_succeed(world);
            let request = R::decode(&message[..]).ok().filter(must_succeed);
            assert!(request.is_none(), "{request:?} was refused");
        }
    }
}

/// Whether a message has no more fields than a request without lists may have, and none of them is a group, which may have any number.
fn has_few_fields(mut message: &[u8]) -> bool {
    let mut fields = 0;
    while let Ok((tag, wire_type)) = decode_key(&mut message) {
        fields += 1;
        let is_group = wire_type == WireType::StartGroup;
        if is_group || skip_field(wire_type, tag, &mut message, DecodeContext::default()).is_err() {
            return false;
        }
    }
    fields <= 64
}

/// The same for a call with any number of answers.
fn read_object(world: &World, message: &Bytes, is_clear: bool, answers: Option<&[Bytes]>) {
    let Ok(request) = v1::ReadObjectRequest::decode(&message[..]) else {
        return assert_eq!(answers, None, "what is no message was accepted");
    };
    let may_be = request.dataset == "o" && request.if_match.is_empty();
    let part = world.object_part(&request.name, request.offset, request.length);
    let expected = part.filter(|_| may_be);
    match answers {
        None => assert!(
            !is_clear || expected.is_none() || !has_few_fields(message),
            "{request:?} was refused"
        ),
        Some(answers) => {
            let parts = answers
                .iter()
                .map(|answer| read::<v1::ReadObjectResponse>(answer).data);
            let data = parts.collect::<Vec<_>>().concat();
            assert_eq!(Some(&data[..]), expected, "{request:?}");
        }
    }
}

/// One message with its prefix.
pub fn framed(message: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(message.len() + 5);
    bytes.put_u8(0);
    bytes.put_u32(message.len() as u32);
    bytes.put_slice(message);
    bytes.freeze()
}

/// The messages of a body, and whether it contains nothing else.
fn messages(body: &Bytes) -> (Vec<Bytes>, bool) {
    let (mut rest, mut found) = (body.clone(), Vec::new());
    while let Some(&[0, a, b, c, d]) = rest.first_chunk() {
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if rest.len() - 5 < length {
            break;
        }
        found.push(rest.slice(5..5 + length));
        rest = rest.slice(5 + length..);
    }
    (found, rest.is_empty())
}

fn read<M: Message + Default>(message: &[u8]) -> M {
    M::decode(message).expect("what was accepted or sent is a message")
}

/// A request with one answer, and what the contract says about it.
trait Fetch: Message + Default + std::fmt::Debug {
    type Answer: Message + Default;
    /// Whether a refusal would be a mistake.
    fn must_succeed(&self, world: &World) -> bool;
    fn check(&self, world: &World, answer: &Self::Answer);
}

impl Fetch for v1::ScoreVectorsRequest {
    type Answer = v1::ScoreVectorsResponse;

    fn must_succeed(&self, world: &World) -> bool {
        scores::must_succeed(world, self)
    }

    fn check(&self, world: &World, answer: &Self::Answer) {
        scores::check(world, self, answer);
    }
}

macro_rules! fetch {
    ($($request:ident, $answer:ident, $batch:ident);*) => {$(
        impl Fetch for v1::$request {
            type Answer = v1::$answer;

            fn must_succeed(&self, world: &World) -> bool {
                $batch(world, self).is_some_and(|batch| batch.must_succeed())
            }

            fn check(&self, world: &World, answer: &Self::Answer) {
                let batch = $batch(world, self).unwrap_or_else(|| panic!("{self:?} was accepted"));
                batch.check(&answer.data, answer.errors.iter().map(|error| error.item));
            }
        }
    )*};
}

fetch!(
    FetchBlocksRequest, FetchBlocksResponse, blocks;
    FetchVectorsRequest, FetchVectorsResponse, vectors;
    FetchRangesRequest, FetchRangesResponse, ranges;
    FetchObjectsRequest, FetchObjectsResponse, objects
);

// The batch of a request; `None`: it must be refused. No input can guess the tag of a file of this run, so a tag is one of
// another version.

fn blocks<'a>(world: &'a World, request: &v1::FetchBlocksRequest) -> Option<Batch<'a>> {
    (request.dataset == "b" && request.if_match.is_empty()).then(|| Batch {
        items: request.indices.iter().map(|index| world.block(*index)).collect(),
        bytes: (request.indices.len() * BLOCK_BYTES) as u64,
        fail_fast: request.fail_fast,
    })
}

fn vectors<'a>(world: &'a World, request: &v1::FetchVectorsRequest) -> Option<Batch<'a>> {
    (request.dataset == "v" && request.if_match.is_empty()).then(|| Batch {
        items: request.ids.iter().map(|id| world.vector(*id)).collect(),
        bytes: (request.ids.len() * VECTOR_BYTES) as u64,
        fail_fast: request.fail_fast,
    })
}

fn ranges<'a>(world: &'a World, request: &v1::FetchRangesRequest) -> Option<Batch<'a>> {
    let v1::FetchRangesRequest { offsets, lengths, .. } = request;
    let space = world.address_space(&request.dataset)?;
    (offsets.len() == lengths.len() && request.if_match.is_empty()).then(|| Batch {
        items: offsets
            .iter()
            .zip(lengths)
            .map(|(offset, length)| part(space, *offset, *length))
            .collect(),
        bytes: lengths.iter().fold(0, |sum, length| sum.saturating_add(*length)),
        fail_fast: request.fail_fast,
    })
}

fn objects<'a>(world: &'a World, request: &v1::FetchObjectsRequest) -> Option<Batch<'a>> {
    let v1::FetchObjectsRequest {
        names,
        offsets,
        lengths,
        if_match,
        ..
    } = request;
    let mut columns = [offsets.len(), lengths.len(), if_match.len()].into_iter();
    // A tag has no quotes here.
    let is_tag = |tag: &String| !tag.contains('"');
    if request.dataset != "o"
        || !columns.all(|column| column == 0 || column == names.len())
        || !if_match.iter().all(is_tag)
    {
        return None;
    }
    let (mut items, mut bytes) = (Vec::new(), 0_u64);
    for (item, name) in names.iter().enumerate() {
        let number = |column: &[u64]| column.get(item).copied().unwrap_or(0);
        let (offset, length) = (number(offsets), number(lengths));
        let is_any = if_match.get(item).is_none_or(String::is_empty);
        items.push(world.object_part(name, offset, length).filter(|_| is_any));
        bytes = bytes.saturating_add(length.max(world.object(name).map_or(0, <[u8]>::len) as u64));
    }
    Some(Batch {
        items,
        bytes,
        fail_fast: request.fail_fast,
    })
}
