//! gRPC calls straight on h2: a call is one HTTP/2 stream, and between it and the socket there is nothing but h2. The
//! client crate goes through tonic's channel (a queue, a task for each call, retries), which costs about as much CPU
//! a call as the daemon does, and here both share the machine. A slot keeps to its connection; a connection that
//! breaks is made anew by the next call. Absent: compression, TLS, interceptors.

use super::answer::{Answer, Refused};
use super::message::{decode, encode};
use crate::load::workload::{Part, Target};
use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri, header};
use std::time::Duration;
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::sync::Mutex;

/// As the client crate's builder sets them, for the reasons that it gives.
const FRAME_BYTES: u32 = 256 << 10;
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// What one system call reads: h2 asks for 8 KiB, which is two small answers. Large frames go past this buffer.
const READ_BYTES: usize = 64 << 10;
/// Longest answer, frames and all.
const ANSWER_BYTES_MAX: usize = 65 << 20;
/// At most 8 digits (gRPC over HTTP/2): about a day.
const TIMEOUT_MS_MAX: u32 = 99_999_999;

/// A gRPC server, and how it is spoken to.
#[derive(Debug)]
pub(super) struct Origin {
    address: String,
    pub(super) timeout: Duration,
    /// Of a call without a deadline, and of one with it.
    headers: HeaderMap,
    headers_deadline: HeaderMap,
}

/// One thread's connections.
#[derive(Debug)]
pub(in crate::load) struct Calls {
    origin: Origin,
    methods: Methods,
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

impl Origin {
    /// The server at `http://HOST:PORT`.
    pub(super) fn new(url: &str, timeout: Duration) -> Result<Self, Refused> {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        let mut origin = Self {
            address: super::http::address(url)?,
            timeout,
            headers_deadline: headers.clone(),
            headers,
        };
        if let Ok(value) = HeaderValue::try_from(format!("{}m", origin.timeout_ms())) {
            origin.headers_deadline.insert("grpc-timeout", value);
        }
        Ok(origin)
    }

    pub(super) fn timeout_ms(&self) -> u32 {
        u32::try_from(self.timeout.as_millis())
            .unwrap_or(u32::MAX)
            .clamp(1, TIMEOUT_MS_MAX)
    }

    /// Where a method is called.
    pub(super) fn method(&self, name: &str) -> Result<Uri, Refused> {
        format!("http://{}/ringfetch.v1.FetchService/{name}", self.address)
            .parse()
            .map_err(|error: http::uri::InvalidUri| Refused::transport(error.to_string()))
    }

    /// A connection, driven by a task of its own.
    pub(super) async fn open(&self) -> Result<SendRequest<Bytes>, Refused> {
        let told = |error: std::io::Error| Refused::transport(format!("{}: {error}", self.address));
        let stream = TcpStream::connect(&self.address).await.map_err(told)?;
        // Without it a small request waits 40 ms for the acknowledgement of the one before.
        stream.set_nodelay(true).map_err(told)?;
        let (sender, connection) = h2::client::Builder::new()
            .max_frame_size(FRAME_BYTES)
            .initial_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .enable_push(false)
            .handshake(BufReader::with_capacity(READ_BYTES, stream))
            .await
            .map_err(broken)?;
        // Why it ends is told to the calls on it.
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    }

    /// The head of a call, with the deadline or without one.
    pub(super) fn request(&self, method: &Uri, deadline: bool) -> Request<()> {
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = method.clone();
        let headers = if deadline {
            &self.headers_deadline
        } else {
            &self.headers
        };
        *request.headers_mut() = headers.clone();
        request
    }
}

impl Calls {
    pub(super) async fn connect(origin: Origin, connections: usize) -> Result<Self, Refused> {
        let methods = Methods {
            blocks: origin.method("FetchBlocks")?,
            vectors: origin.method("FetchVectors")?,
            ranges: origin.method("FetchRanges")?,
            objects: origin.method("FetchObjects")?,
        };
        let mut calls = Self {
            origin,
            methods,
            connections: Vec::new(),
        };
        for _ in 0..connections {
            let opened = tokio::time::timeout(calls.origin.timeout, calls.origin.open())
                .await
                .unwrap_or(Err(Refused::timeout()))?;
            calls.connections.push(Mutex::new(Some(opened)));
        }
        Ok(calls)
    }

    pub(super) async fn fetch(&self, slot: usize, part: &Part, items: &[u64]) -> Result<Answer, Refused> {
        let connection = &self.connections[slot % self.connections.len()];
        let call = self.call(connection, part, items);
        tokio::time::timeout(self.origin.timeout, call)
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
                None => held.insert(self.origin.open().await?).clone(),
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
        let method = match part.target() {
            Target::Blocks { .. } => &self.methods.blocks,
            Target::Vectors { .. } => &self.methods.vectors,
            Target::Ranges { .. } | Target::Extents(_) => &self.methods.ranges,
            Target::Objects { .. } => &self.methods.objects,
        };
        let request = self.origin.request(method, true);
        let (response, mut body) = sender.send_request(request, false).map_err(broken)?;
        drop(sender);
        body.send_data(encode(part, items), true).map_err(broken)?;
        let (head, mut body) = response.await.map_err(broken)?.into_parts();
        if head.status != StatusCode::OK {
            return Err(Refused::protocol(format!(
                "HTTP status {} from a gRPC server",
                head.status
            )));
        }
        ended(&head.headers)?;
        let (mut chunks, mut length) = (Vec::with_capacity(4), 0usize);
        while let Some(chunk) = body.data().await {
            let chunk = chunk.map_err(broken)?;
            // The window is there so that the server can send; what came is taken at once.
            body.flow_control()
                .release_capacity(chunk.len())
                .map_err(broken)?;
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
        decode(&chunks, part, items)
    }
}

/// The error that headers or trailers tell, if they do.
pub(super) fn ended(headers: &HeaderMap) -> Result<(), Refused> {
    match tonic::Status::from_header_map(headers) {
        Some(status) if status.code() != tonic::Code::Ok => Err(ringfetch_client::Error::from(status).into()),
        Some(_) | None => Ok(()),
    }
}

pub(super) fn broken(error: h2::Error) -> Refused {
    Refused::transport(error.to_string())
}
