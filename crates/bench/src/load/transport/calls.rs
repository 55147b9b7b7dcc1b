//! gRPC calls straight on h2: a call is one HTTP/2 stream, and between it and the socket there is nothing but h2. The
//! client crate goes through tonic's channel (a queue, a task for each call, retries), which costs more CPU a call
//! than the daemon does, and here both share the machine. A slot keeps to its connection; a connection that breaks is
//! made anew by the next call. Absent: compression, TLS, interceptors.

use super::answer::{Answer, Refused};
use super::message::{decode, encode};
use crate::load::workload::{Part, Target};
use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri, header};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::Mutex;

/// As the client crate's builder sets them, for the reasons that it gives.
const FRAME_BYTES: u32 = 256 << 10;
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// Longest answer, frames and all.
const ANSWER_BYTES_MAX: usize = 65 << 20;

/// One thread's connections.
#[derive(Debug)]
pub(in crate::load) struct Calls {
    address: String,
    timeout: Duration,
    methods: Methods,
    headers: HeaderMap,
    connections: Vec<Mutex<Option<SendRequest<Bytes>>>>,
}

/// The four methods' addresses, parsed once.
#[derive(Debug)]
struct Methods {
    blocks: Uri,
    vectors: Uri,
    ranges: Uri,
    objects: Uri,
}

impl Calls {
    pub(super) async fn connect(url: &str, connections: usize, timeout: Duration) -> Result<Self, Refused> {
        let address = super::http::address(url)?;
        let method = |name: &str| {
            format!("http://{address}/ringfetch.v1.FetchService/{name}")
                .parse::<Uri>()
                .map_err(|error| Refused::transport(error.to_string()))
        };
        let methods = Methods {
            blocks: method("FetchBlocks")?,
            vectors: method("FetchVectors")?,
            ranges: method("FetchRanges")?,
            objects: method("FetchObjects")?,
        };
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        // At most 8 digits (gRPC over HTTP/2): 99 999 999 ms are a day.
        let ms = timeout.as_millis().clamp(1, 99_999_999);
        if let Ok(value) = HeaderValue::try_from(format!("{ms}m")) {
            headers.insert("grpc-timeout", value);
        }
        let mut calls = Self {
            address,
            timeout,
            methods,
            headers,
            connections: Vec::new(),
        };
        for _ in 0..connections {
            let opened = tokio::time::timeout(timeout, calls.open())
                .await
                .unwrap_or(Err(Refused::timeout()))?;
            calls.connections.push(Mutex::new(Some(opened)));
        }
        Ok(calls)
    }

    async fn open(&self) -> Result<SendRequest<Bytes>, Refused> {
        let told = |error: std::io::Error| Refused::transport(format!("{}: {error}", self.address));
        let stream = TcpStream::connect(&self.address).await.map_err(told)?;
        stream.set_nodelay(true).map_err(told)?;
        let (sender, connection) = h2::client::Builder::new()
            .max_frame_size(FRAME_BYTES)
            .initial_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .enable_push(false)
            .handshake(stream)
            .await
            .map_err(broken)?;
        // Why it ends is told to the calls on it.
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    }

    pub(super) async fn fetch(&self, slot: usize, part: &Part, items: &[u64]) -> Result<Answer, Refused> {
        let connection = &self.connections[slot % self.connections.len()];
        let call = self.call(connection, part, items);
        tokio::time::timeout(self.timeout, call)
            .await
            .unwrap_or(Err(Refused::timeout()))
    }

    async fn call(
        &self,
        connection: &Mutex<Option<SendRequest<Bytes>>>,
        part: &Part,
        items: &[u64],
    ) -> Result<Answer, Refused> {
        let sender = {
            let mut held = connection.lock().await;
            match &*held {
                Some(sender) => sender.clone(),
                None => held.insert(self.open().await?).clone(),
            }
        };
        let mut sender = match sender.ready().await {
            Ok(sender) => sender,
            Err(error) => {
                // Broken: the next call makes another one.
                connection.lock().await.take();
                return Err(broken(error));
            }
        };
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = match part.target() {
            Target::Blocks { .. } => &self.methods.blocks,
            Target::Vectors { .. } => &self.methods.vectors,
            Target::Ranges { .. } | Target::Extents(_) => &self.methods.ranges,
            Target::Objects { .. } => &self.methods.objects,
        }
        .clone();
        *request.headers_mut() = self.headers.clone();
        let (response, mut body) = sender.send_request(request, false).map_err(broken)?;
        drop(sender);
        body.send_data(encode(part, items), true).map_err(broken)?;
        let (head, mut body) = response.await.map_err(broken)?.into_parts();
        if head.status != StatusCode::OK {
            return Err(Refused::protocol(format!("HTTP status {} from a gRPC server", head.status)));
        }
        ended(&head.headers)?;
        let (mut chunks, mut length) = (Vec::with_capacity(4), 0usize);
        while let Some(chunk) = body.data().await {
            let chunk = chunk.map_err(broken)?;
            // The window is there so that the server can send; what came is taken at once.
            body.flow_control().release_capacity(chunk.len()).map_err(broken)?;
            length = length.saturating_add(chunk.len());
            if length > ANSWER_BYTES_MAX {
                return Err(Refused::protocol("the answer is too long"));
            }
            chunks.push(chunk);
        }
        let trailers = body.trailers().await.map_err(broken)?.unwrap_or_default();
        if !trailers.contains_key(tonic::Status::GRPC_STATUS) {
            return Err(Refused::protocol("an answer without a grpc-status"));
        }
        ended(&trailers)?;
        decode(&chunks, part, items).map(Answer::Octets)
    }
}

/// The error that headers or trailers tell, if they do.
fn ended(headers: &HeaderMap) -> Result<(), Refused> {
    match tonic::Status::from_header_map(headers) {
        Some(status) if status.code() != tonic::Code::Ok => Err(ringfetch_client::Error::from(status).into()),
        Some(_) | None => Ok(()),
    }
}

fn broken(error: h2::Error) -> Refused {
    Refused::transport(error.to_string())
}
