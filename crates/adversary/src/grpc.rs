//! gRPC calls over the `h2` crate, for clients that follow the protocol but misuse it.

use crate::frames::grpc_message;
use crate::tally::{Tally, cause};
use crate::target::Target;
use bytes::Bytes;
use h2::RecvStream;
use h2::client::SendRequest;
use http::{HeaderMap, HeaderValue, Request};
use prost::Message as _;
use ringfetch_client::Code;
use ringfetch_proto::v1::{FetchBlocksRequest, FetchBlocksResponse};
use std::io;
use std::time::Duration;
use tokio::task::JoinHandle;

pub(crate) const FETCH_BLOCKS: &str = "/ringfetch.v1.FetchService/FetchBlocks";
pub(crate) const FETCH_STREAM: &str = "/ringfetch.v1.FetchService/FetchStream";
pub(crate) const UNKNOWN_METHOD: &str = "/unknown.Service/Unknown";
const WINDOW_BYTES: u32 = 64 << 20;

/// How a call ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// With OK and this body, gRPC's prefix included.
    Answered(Vec<u8>),
    /// With another status: the name of its code.
    Refused(String),
    /// The stream or its connection broke: how.
    Broken(String),
}

impl Ended {
    /// Counts a call that has ended after this time.
    pub(crate) fn count(&self, after: Duration, tally: &Tally) {
        match self {
            Self::Answered(data) => {
                tally.received(data.len());
                tally.answered(after);
            }
            Self::Refused(code) => tally.refused(code, Some(after)),
            Self::Broken(how) => tally.closed(how),
        }
    }
}

/// A connection; its task ends with it.
pub(crate) struct Connection {
    pub(crate) sender: SendRequest<Bytes>,
    /// Of the target.
    pub(crate) authorization: Option<HeaderValue>,
    task: JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    pub(crate) async fn open(target: &Target) -> io::Result<Self> {
        let authorization = Target::authorization(target.token.as_deref())?;
        let stream = target.connect(target.grpc).await?;
        let (sender, connection) = h2::client::Builder::new()
            .initial_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .max_frame_size(256 << 10)
            .handshake(stream)
            .await
            .map_err(io::Error::other)?;
        // Every stream of the connection learns how it ended.
        let task = tokio::spawn(async move { drop(connection.await) });
        Ok(Self {
            sender,
            authorization,
            task,
        })
    }

    /// One call, with its whole request.
    pub(crate) async fn call(&self, message: &[u8]) -> Ended {
        self.call_as(self.authorization.as_ref(), message).await
    }

    /// The same, with this value of `authorization`.
    pub(crate) async fn call_as(&self, authorization: Option<&HeaderValue>, message: &[u8]) -> Ended {
        match self.begin(authorization, message).await {
            Ok(ended) => ended,
            Err(error) => Ended::Broken(how(&error)),
        }
    }

    async fn begin(&self, authorization: Option<&HeaderValue>, message: &[u8]) -> Result<Ended, h2::Error> {
        let mut sender = self.sender.clone().ready().await?;
        let mut request = request();
        if let Some(value) = authorization {
            request.headers_mut().insert("authorization", value.clone());
        }
        let (response, mut body) = sender.send_request(request, false)?;
        body.send_data(Bytes::from(grpc_message(message)), true)?;
        ended(response).await
    }
}

/// The head of a FetchBlocks call.
pub(crate) fn request() -> Request<()> {
    let mut request = Request::new(());
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = http::Uri::from_static(concat!(
        "http://localhost",
        "/ringfetch.v1.FetchService/FetchBlocks"
    ));
    *request.version_mut() = http::Version::HTTP_2;
    let headers = request.headers_mut();
    headers.insert("content-type", HeaderValue::from_static("application/grpc"));
    headers.insert("te", HeaderValue::from_static("trailers"));
    request
}

/// Waits for a call's end and reads all of its answer.
pub(crate) async fn ended(response: h2::client::ResponseFuture) -> Result<Ended, h2::Error> {
    let (head, mut body) = response.await?.into_parts();
    if head.status != http::StatusCode::OK {
        return Ok(Ended::Refused(format!("HTTP {}", head.status.as_u16())));
    }
    if let Some(code) = code_of(&head.headers) {
        return Ok(Ended::Refused(code));
    }
    let data = read(&mut body).await?;
    let trailers = body.trailers().await?;
    Ok(match trailers.as_ref().and_then(code_of) {
        None => Ended::Answered(data),
        Some(code) => Ended::Refused(code),
    })
}

async fn read(body: &mut RecvStream) -> Result<Vec<u8>, h2::Error> {
    let mut data = Vec::new();
    while let Some(part) = body.data().await {
        let part = part?;
        data.extend_from_slice(&part);
        body.flow_control().release_capacity(part.len())?;
    }
    Ok(data)
}

/// The name of a status other than OK.
fn code_of(headers: &HeaderMap) -> Option<String> {
    let text = headers.get("grpc-status")?.to_str().unwrap_or_default();
    let code = Code::from_number(text.parse().unwrap_or(Code::Unknown.number()));
    code.map(|code| code.as_str().to_owned())
}

/// An HTTP/2 error as a word.
pub(crate) fn how(error: &h2::Error) -> String {
    let reason = error
        .reason()
        .map(|reason| format!(" {reason:?}"))
        .unwrap_or_default();
    if error.is_go_away() {
        format!("GOAWAY{reason}")
    } else if error.is_reset() {
        format!("RST_STREAM{reason}")
    } else if let Some(error) = error.get_io() {
        cause(error)
    } else {
        error.to_string()
    }
}

/// The bytes in the only message of an answer; none if there is no such message.
pub(crate) fn blocks_of(answer: &[u8]) -> Bytes {
    let message = answer.get(5..).unwrap_or_default();
    FetchBlocksResponse::decode(message).map_or_else(|_| Bytes::new(), |blocks| blocks.data)
}

/// A request for these blocks.
pub(crate) fn fetch_blocks(target: &Target, indices: impl IntoIterator<Item = u64>) -> Vec<u8> {
    let indices = indices.into_iter().collect();
    FetchBlocksRequest {
        dataset: target.dataset.clone(),
        indices,
        fail_fast: false,
        ..Default::default()
    }
    .encode_to_vec()
}
