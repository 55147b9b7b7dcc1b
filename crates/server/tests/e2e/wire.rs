//! Clients of the daemon: gRPC with the generated stubs, HTTP/1.1 with hyper (which checks the framing), and
//! curl.

mod held;

pub(crate) use held::{Held, Narrow, Reconnecting};

use crate::daemon::{Daemon, eventually_async};
use crate::exposition::Scrape;
use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use ringfetch_proto::v1::admin_service_client::AdminServiceClient;
use ringfetch_proto::v1::dataset_service_client::DatasetServiceClient;
use ringfetch_proto::v1::fetch_service_client::FetchServiceClient;
use ringfetch_proto::v1::fetch_stream_request::Request as StreamRequest;
use ringfetch_proto::v1::fetch_stream_response::Response as StreamResponse;
use ringfetch_proto::{RpcStatus, v1};
use serde_json::Value;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Mutex;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpSocket, TcpStream};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

/// Addresses of daemons that require a token.
static GUARDED: Mutex<BTreeSet<SocketAddr>> = Mutex::new(BTreeSet::new());

pub(crate) const FETCH: &str = "ringfetch.v1.FetchService";
pub(crate) const DATASETS: &str = "ringfetch.v1.DatasetService";
pub(crate) const ADMIN: &str = "ringfetch.v1.AdminService";

/// The token that they require.
pub(crate) const TOKEN: &str = "the-token-of-these-tests";

/// Makes clients send the token to these addresses, or no longer.
pub(crate) fn guard(addresses: [SocketAddr; 3], is_guarded: bool) {
    let mut guarded = GUARDED.lock().expect("addresses");
    for address in addresses {
        if is_guarded {
            guarded.insert(address);
        } else {
            guarded.remove(&address);
        }
    }
}

fn authorization(address: SocketAddr) -> Option<String> {
    let is_guarded = GUARDED.lock().expect("addresses").contains(&address);
    is_guarded.then(|| format!("Bearer {TOKEN}"))
}

/// A connection whose calls have the token, if the daemon requires it.
pub(crate) type Wire = InterceptedService<Channel, WithToken>;

/// Adds `authorization` to calls.
#[derive(Debug, Clone)]
pub(crate) struct WithToken(Option<MetadataValue<Ascii>>);

impl Interceptor for WithToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

/// One gRPC connection.
pub(crate) async fn channel(address: SocketAddr) -> Wire {
    channel_of_window(address, 1 << 20).await
}

/// One gRPC connection, to which the daemon sends at most `window_bytes` of a response before some are received.
pub(crate) async fn channel_of_window(address: SocketAddr, window_bytes: u32) -> Wire {
    let value = authorization(address).map(|value| value.parse().expect("ASCII"));
    let channel = Endpoint::from_shared(format!("http://{address}"))
        .expect("a URI")
        .tcp_nodelay(true)
        .initial_stream_window_size(window_bytes)
        .initial_connection_window_size(8 << 20)
        .connect()
        .await
        .expect("a connection");
    InterceptedService::new(channel, WithToken(value))
}

/// A fetch client on a connection, without a limit of its own on responses.
pub(crate) fn fetch_client(channel: Wire) -> FetchServiceClient<Wire> {
    FetchServiceClient::new(channel).max_decoding_message_size(usize::MAX)
}

impl Daemon {
    /// A fetch client on a new connection.
    pub(crate) async fn fetch(&self) -> FetchServiceClient<Wire> {
        fetch_client(channel(self.grpc).await)
    }

    pub(crate) async fn datasets(&self) -> DatasetServiceClient<Wire> {
        DatasetServiceClient::new(channel(self.grpc).await)
    }

    pub(crate) async fn admin_client(&self) -> AdminServiceClient<Wire> {
        AdminServiceClient::new(channel(self.admin).await)
    }

    /// An HTTP client with its own connections.
    pub(crate) fn http_client(&self) -> Http {
        Http {
            client: Client::builder(TokioExecutor::new()).build_http(),
            address: self.http,
        }
    }

    /// An HTTP/2 client of one of its ports.
    pub(crate) fn http2_client(&self, address: SocketAddr) -> Http {
        let mut builder = Client::builder(TokioExecutor::new());
        Http {
            client: builder.http2_only(true).build_http(),
            address,
        }
    }

    /// An HTTP client with its own connections, from this address.
    pub(crate) fn http_client_from(&self, local: std::net::IpAddr) -> Http {
        let mut connector = HttpConnector::new();
        connector.set_local_address(Some(local));
        Http {
            client: Client::builder(TokioExecutor::new()).build(connector),
            address: self.http,
        }
    }

    /// The current metrics.
    pub(crate) async fn scrape(&self) -> Scrape {
        self.try_scrape().await.expect("no refusal")
    }

    /// The same, or the response that refuses them.
    pub(crate) async fn try_scrape(&self) -> Result<Scrape, String> {
        let answer = self.http_client().get("/metrics").await;
        let text = String::from_utf8(answer.body.to_vec()).expect("UTF-8");
        match answer.status.as_u16() {
            200 => Ok(Scrape { text }),
            status => Err(format!("{status}: {text}")),
        }
    }

    /// The current sum over a metric's series with all of these labels.
    pub(crate) async fn sum(&self, metric: &str, labels: &[(&str, &str)]) -> u64 {
        self.scrape().await.sum(metric, labels)
    }

    /// Connections to a port that the daemon has closed for this reason.
    pub(crate) async fn closed(&self, transport: &str, reason: &str) -> u64 {
        let labels = [("transport", transport), ("reason", reason)];
        self.sum("ringfetch_connections_closed_total", &labels).await
    }

    /// Waits until there is one.
    pub(crate) async fn has_closed(&self, transport: &str, reason: &str) {
        eventually_async(&format!("{transport} is closed for {reason}"), async || {
            (self.closed(transport, reason).await > 0).then_some(())
        })
        .await;
    }

    /// The admin service's status.
    pub(crate) async fn status(&self) -> v1::GetStatusResponse {
        let request = v1::GetStatusRequest {};
        self.admin_client()
            .await
            .get_status(request)
            .await
            .expect("a status")
            .into_inner()
    }

    /// Waits until no response has memory.
    pub(crate) async fn gives_memory_back(&self) {
        eventually_async("the memory is given back", async || {
            (self.status().await.memory_in_use_bytes == 0).then_some(())
        })
        .await;
    }

    /// How a dataset is read.
    pub(crate) async fn read_path(&self, name: &str) -> v1::ReadPath {
        let status = self.status().await;
        let named =
            |found: &v1::DatasetStatus| found.dataset.as_ref().is_some_and(|dataset| dataset.name == name);
        let found = status.datasets.into_iter().find(named).expect("the dataset");
        found.read_path.expect("a read path")
    }

    /// Fails unless a plain read of block 0 of a dataset works over both transports: the daemon still serves.
    pub(crate) async fn assert_serves(&self, dataset: &str) {
        let request = blocks(dataset, &[0]);
        let answer = self
            .fetch()
            .await
            .fetch_blocks(request)
            .await
            .expect("a block over gRPC");
        let path = format!("/v1/datasets/{dataset}/blocks/0");
        let mirrored = self.http_client().get(&path).await;
        assert_eq!(mirrored.status, 200);
        assert_eq!(answer.into_inner().data, mirrored.body);
    }
}

pub(crate) fn blocks(dataset: &str, indices: &[u64]) -> v1::FetchBlocksRequest {
    v1::FetchBlocksRequest {
        dataset: dataset.to_owned(),
        indices: indices.to_vec(),
        ..Default::default()
    }
}

pub(crate) fn vectors(dataset: &str, ids: &[u64]) -> v1::FetchVectorsRequest {
    v1::FetchVectorsRequest {
        dataset: dataset.to_owned(),
        ids: ids.to_vec(),
        ..Default::default()
    }
}

/// A request for (offset, length) ranges.
pub(crate) fn ranges(dataset: &str, ranges: &[(u64, u64)]) -> v1::FetchRangesRequest {
    v1::FetchRangesRequest {
        dataset: dataset.to_owned(),
        offsets: ranges.iter().map(|range| range.0).collect(),
        lengths: ranges.iter().map(|range| range.1).collect(),
        ..Default::default()
    }
}

pub(crate) fn objects(dataset: &str, names: &[&str]) -> v1::FetchObjectsRequest {
    v1::FetchObjectsRequest {
        dataset: dataset.to_owned(),
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        ..v1::FetchObjectsRequest::default()
    }
}

/// A request for the first page of a dataset's objects.
pub(crate) fn listing(dataset: &str) -> v1::ListObjectsRequest {
    v1::ListObjectsRequest {
        dataset: dataset.to_owned(),
        ..Default::default()
    }
}

/// A request for a whole object, in parts.
pub(crate) fn object(dataset: &str, name: &str) -> v1::ReadObjectRequest {
    v1::ReadObjectRequest {
        dataset: dataset.to_owned(),
        name: name.to_owned(),
        ..Default::default()
    }
}

/// A request for the one of these vectors whose inner product with `vector` is the largest.
pub(crate) fn best(dataset: &str, vector: Vec<f32>, ids: Vec<u64>) -> v1::ScoreVectorsRequest {
    v1::ScoreVectorsRequest {
        dataset: dataset.to_owned(),
        queries: vec![v1::ScoreQuery { vector, ids }],
        metric: v1::Metric::Dot.into(),
        limit: 1,
        ..Default::default()
    }
}

/// A request of a stream, without a deadline of its own.
pub(crate) fn on_stream(id: u64, request: StreamRequest) -> v1::FetchStreamRequest {
    v1::FetchStreamRequest {
        id,
        request: Some(request),
        deadline_ms: 0,
    }
}

/// The responses to these requests, on a stream of their own.
pub(crate) async fn stream(
    fetch: &mut FetchServiceClient<Wire>,
    requests: impl IntoIterator<Item = v1::FetchStreamRequest, IntoIter: Send + 'static>,
) -> Streaming<v1::FetchStreamResponse> {
    let answers = fetch.fetch_stream(tokio_stream::iter(requests)).await;
    answers.expect("a stream").into_inner()
}

/// The blocks that a stream's response has, or why its request failed.
pub(crate) fn blocks_of(answer: Option<StreamResponse>) -> Result<v1::FetchBlocksResponse, RpcStatus> {
    match answer {
        Some(StreamResponse::Blocks(blocks)) => Ok(blocks),
        Some(StreamResponse::Status(status)) => Err(status),
        other => panic!("{other:?}"),
    }
}

/// A complete HTTP response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    /// A header as text; empty if it is missing.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().expect("printable"))
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Fails unless this is a problem with this status and type, with this field and these parts in its text.
    pub(crate) fn is_problem(&self, status: u16, slug: &str, field: Option<&str>, parts: &[&str]) {
        assert_eq!(self.status.as_u16(), status, "{self:?}");
        assert_eq!(
            self.header("content-type"),
            "application/problem+json",
            "{self:?}"
        );
        let body = self.json();
        assert_eq!(body["type"], format!("/problems/{slug}"), "{body}");
        assert_eq!(body["status"], status, "{body}");
        assert_eq!(body["field"].as_str(), field, "{body}");
        let detail = body["detail"].as_str().expect("a detail");
        for part in parts {
            assert!(detail.contains(part), "{part:?} is not in {detail:?}");
        }
    }
}

/// A request with these headers, and with the token if the daemon requires it.
fn request<B>(
    address: SocketAddr,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: B,
) -> http::Request<B> {
    let uri = http::Uri::builder()
        .scheme("http")
        .authority(address.to_string())
        .path_and_query(path);
    let mut request = http::Request::builder()
        .method(method)
        .uri(uri.build().expect("a URI"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    if let Some(value) = authorization(address) {
        request = request.header("authorization", value);
    }
    request.body(body).expect("a request")
}

/// Reads the complete response.
async fn whole(response: http::Response<hyper::body::Incoming>) -> Answer {
    let (parts, body) = response.into_parts();
    Answer {
        status: parts.status,
        headers: parts.headers,
        body: body.collect().await.expect("a whole body").to_bytes(),
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Http {
    client: Client<HttpConnector, Full<Bytes>>,
    address: SocketAddr,
}

impl Http {
    /// Sends a request and reads the complete response.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        let request = request(self.address, method, path, headers, Full::new(body.into()));
        whole(self.client.request(request).await.expect("an answer")).await
    }

    /// A GET to a daemon that may be ending: `None` if the connection fails, or is closed without a response.
    /// A truncated response is a failure.
    pub(crate) async fn try_get(&self, path: &str, headers: &[(&str, &str)]) -> Option<Answer> {
        let request = request(self.address, Method::GET, path, headers, Full::default());
        Some(whole(self.client.request(request).await.ok()?).await)
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, &[], "").await
    }

    pub(crate) async fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.send(Method::GET, path, headers, "").await
    }

    /// Sends a batch as JSON; the response is in the format that `accept` names.
    pub(crate) async fn batch(&self, path: &str, body: &Value, accept: &str) -> Answer {
        let headers = [("content-type", "application/json"), ("accept", accept)];
        self.send(Method::POST, path, &headers, body.to_string()).await
    }
}

/// Runs curl and returns its stdout. `{http}` in an argument is the daemon's address.
pub(crate) fn curl(daemon: &Daemon, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new("curl")
        .args(["--silent", "--show-error", "--max-time", "60"])
        .args(
            arguments
                .iter()
                .map(|word| word.replace("{http}", &format!("http://{}", daemon.http))),
        )
        .output()
        .expect("curl must be installed");
    assert!(
        output.status.success(),
        "curl {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}

/// A name as one path: every byte that needs it is escaped, `/` is kept.
pub(crate) fn escaped(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    name.bytes()
        .map(|byte| {
            if plain(byte) {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}

/// A new connection that has sent these bytes.
pub(crate) async fn saying(address: SocketAddr, words: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    stream.write_all(words).await.expect("sent");
    stream
}

/// A new connection that takes few bytes before it reads.
pub(crate) async fn with_small_buffer(address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4096).expect("a small buffer");
    socket.connect(address).await.expect("a connection")
}

/// The messages in the body of a gRPC response.
pub(crate) fn messages<M: prost::Message + Default>(mut body: &[u8]) -> Vec<M> {
    let mut found = Vec::new();
    while let Some((prefix, rest)) = body.split_first_chunk::<5>() {
        let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
        let (message, rest) = rest.split_at(length);
        found.push(M::decode(message).expect("a message"));
        body = rest;
    }
    assert!(body.is_empty());
    found
}

/// A message as gRPC frames it.
pub(crate) fn framed(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).expect("a short message");
    Bytes::from([&[0][..], &length.to_be_bytes(), message].concat())
}
