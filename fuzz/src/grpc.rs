//! gRPC calls from bytes, and the checks of their answers.
//!
//! An input is three bytes (method; pieces and framing; length of `grpc-timeout`), the timeout, and the body.

use crate::{Answer, ITEMS_MAX, REQUEST_BYTES, World, part};
use bytes::{BufMut as _, Bytes, BytesMut};
use http::Request;
use http_body::Frame;
use http_body_util::StreamBody;
use prost::Message;
use ringfetch_proto::v1::fetch_stream_request::Request as Streamed;
use ringfetch_proto::v1::fetch_stream_response::Response as StreamedAnswer;
use ringfetch_proto::v1::{self, ItemError};
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
        if code != OK {
            return;
        }
        assert!(sound, "what is not framed was accepted: {self:?}");
        let answers = messages(&answer.body).0;
        match (self.method.strip_prefix(FETCH).unwrap_or_default(), &answers[..]) {
            ("FetchBlocks", [answer]) => agree(
                &blocks(world, &read(request)),
                &read::<v1::FetchBlocksResponse>(answer),
            ),
            ("FetchVectors", [answer]) => {
                agree(
                    &vectors(world, &read(request)),
                    &read::<v1::FetchVectorsResponse>(answer),
                );
            }
            ("FetchRanges", [answer]) => agree(
                &ranges(world, &read(request)),
                &read::<v1::FetchRangesResponse>(answer),
            ),
            ("FetchObjects", [answer]) => {
                agree(
                    &objects(world, &read(request)),
                    &read::<v1::FetchObjectsResponse>(answer),
                );
            }
            ("ScoreVectors", [answer]) => drop(read::<v1::ScoreVectorsResponse>(answer)),
            ("ReadObject", answers) => {
                let request: v1::ReadObjectRequest = read(request);
                let parts: Vec<v1::ReadObjectResponse> = answers.iter().map(|answer| read(answer)).collect();
                let expected = world.object_part(&request.name, request.offset, request.length);
                let data: Vec<u8> = parts.iter().flat_map(|part| part.data.to_vec()).collect();
                assert_eq!(Some(&data[..]), expected, "{request:?}");
            }
            (_, answers) => panic!("{} answers: {self:?}", answers.len()),
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
        let answered = requests
            .iter()
            .filter(|request| !matches!(request.request, Some(Streamed::Cancel(_))));
        answered.for_each(|request| asked.entry(request.id).or_default().push(request));
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
                check_streamed(world, request, &answer);
            }
        }
        assert!(
            code != OK || answers.len() == asked.values().map(Vec::len).sum::<usize>(),
            "not answered: {self:?}"
        );
    }
}

fn check_streamed(world: &World, request: &v1::FetchStreamRequest, answer: &v1::FetchStreamResponse) {
    match (&request.request, &answer.response) {
        (Some(Streamed::Blocks(request)), Some(StreamedAnswer::Blocks(answer))) => {
            agree(&blocks(world, request), answer)
        }
        (Some(Streamed::Vectors(request)), Some(StreamedAnswer::Vectors(answer))) => {
            agree(&vectors(world, request), answer);
        }
        (Some(Streamed::Ranges(request)), Some(StreamedAnswer::Ranges(answer))) => {
            agree(&ranges(world, request), answer)
        }
        (Some(Streamed::Objects(request)), Some(StreamedAnswer::Objects(answer))) => {
            agree(&objects(world, request), answer);
        }
        (Some(Streamed::Scores(_)), Some(StreamedAnswer::Scores(_))) => {}
        (_, Some(StreamedAnswer::Status(status))) => {
            assert!(status.code != OK && status.code != INTERNAL, "{status:?}")
        }
        (asked, answered) => panic!("{asked:?} was answered by {answered:?}"),
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

/// The bytes of each item; `None`: it fails.
type Expected<'a> = Vec<Option<&'a [u8]>>;

fn blocks<'a>(world: &'a World, request: &v1::FetchBlocksRequest) -> Expected<'a> {
    request.indices.iter().map(|index| world.block(*index)).collect()
}

fn vectors<'a>(world: &'a World, request: &v1::FetchVectorsRequest) -> Expected<'a> {
    request.ids.iter().map(|id| world.vector(*id)).collect()
}

fn ranges<'a>(world: &'a World, request: &v1::FetchRangesRequest) -> Expected<'a> {
    assert_eq!(
        request.offsets.len(),
        request.lengths.len(),
        "columns of two lengths were accepted"
    );
    let space = world
        .address_space(&request.dataset)
        .expect("a dataset that is there");
    let pairs = request.offsets.iter().zip(&request.lengths);
    pairs
        .map(|(offset, length)| part(space, *offset, *length))
        .collect()
}

fn objects<'a>(world: &'a World, request: &v1::FetchObjectsRequest) -> Expected<'a> {
    let v1::FetchObjectsRequest {
        names,
        offsets,
        lengths,
        if_match,
        ..
    } = request;
    for column in [offsets.len(), lengths.len(), if_match.len()] {
        assert!(
            column == 0 || column == names.len(),
            "columns of two lengths were accepted"
        );
    }
    let names = names.iter().enumerate();
    let item = |(item, name): (usize, &String)| {
        let number = |column: &[u64]| column.get(item).copied().unwrap_or(0);
        let is_any = if_match.get(item).is_none_or(String::is_empty);
        world
            .object_part(name, number(offsets), number(lengths))
            .filter(|_| is_any)
    };
    names.map(item).collect()
}

/// A response with items.
trait ItemsAnswer {
    fn data(&self) -> &[u8];
    fn errors(&self) -> &[ItemError];
}

macro_rules! items_answer {
    ($($response:ty),*) => {$(
        impl ItemsAnswer for $response {
            fn data(&self) -> &[u8] {
                &self.data
            }
            fn errors(&self) -> &[ItemError] {
                &self.errors
            }
        }
    )*};
}

items_answer!(
    v1::FetchBlocksResponse,
    v1::FetchVectorsResponse,
    v1::FetchRangesResponse,
    v1::FetchObjectsResponse
);

/// The items that did not fail are present, back to back, and the others are in `errors`.
fn agree(expected: &Expected<'_>, answer: &impl ItemsAnswer) {
    assert!(
        expected.len() <= ITEMS_MAX as usize,
        "{} items were accepted",
        expected.len()
    );
    let failed = (0_u32..)
        .zip(expected)
        .filter_map(|(item, bytes)| bytes.is_none().then_some(item));
    assert!(
        failed.eq(answer.errors().iter().map(|error| error.item)),
        "{:?}",
        answer.errors()
    );
    assert_eq!(
        answer.data(),
        expected.iter().copied().flatten().collect::<Vec<_>>().concat()
    );
}
