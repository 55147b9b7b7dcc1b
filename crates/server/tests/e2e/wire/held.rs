//! HTTP/2 connections on which responses wait, and gRPC calls on connections that end.

use super::*;
use tokio_stream::StreamExt as _;

/// An HTTP/2 connection on which responses wait in the daemon: it may send at most `window_bytes` unread.
#[derive(Clone)]
pub(crate) struct Narrow {
    sender: hyper::client::conn::http2::SendRequest<BoxBody<Bytes, Infallible>>,
    address: SocketAddr,
}

/// A response whose head has arrived and whose body is not read.
pub(crate) struct Held {
    pub(crate) head: http::response::Parts,
    body: hyper::body::Incoming,
}

impl Narrow {
    pub(crate) async fn connect(address: SocketAddr, window_bytes: u32) -> Self {
        Self::connect_from("127.0.0.1", address, window_bytes).await
    }

    /// Connects from another loopback address, which is another caller.
    pub(crate) async fn connect_from(from: &str, address: SocketAddr, window_bytes: u32) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        let from = SocketAddr::new(from.parse().expect("an address"), 0);
        socket.bind(from).expect("an address of this host");
        let stream = socket.connect(address).await.expect("a connection");
        stream.set_nodelay(true).expect("nodelay");
        let (sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(window_bytes)
            .initial_connection_window_size(window_bytes)
            .handshake(hyper_util::rt::TokioIo::new(stream))
            .await
            .expect("a handshake");
        // Ends with the sender and the responses.
        tokio::spawn(connection);
        Self { sender, address }
    }

    /// Sends a GET, waits for the head of its response, and leaves the rest.
    pub(crate) async fn ask_get(&mut self, path: &str) -> Held {
        self.ask_get_with(path, &[]).await
    }

    pub(crate) async fn ask_get_with(&mut self, path: &str, headers: &[(&str, &str)]) -> Held {
        self.send(Method::GET, path, headers, Full::default().boxed())
            .await
    }

    /// Sends a request, waits for the head of its response, and leaves the rest.
    pub(crate) async fn ask(&mut self, path: &str, headers: &[(&str, &str)], body: Bytes) -> Held {
        self.send(Method::POST, path, headers, Full::new(body).boxed())
            .await
    }

    /// As [`Self::ask`], with a body of which nothing ever comes.
    pub(crate) async fn ask_without_end(&mut self, path: &str, headers: &[(&str, &str)]) -> Held {
        let never = tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>();
        self.send(Method::POST, path, headers, StreamBody::new(never).boxed())
            .await
    }

    /// As [`Self::ask`], with a body of which only the beginning comes.
    pub(crate) async fn ask_to_begin(
        &mut self,
        path: &str,
        headers: &[(&str, &str)],
        beginning: Bytes,
    ) -> Held {
        let beginning = tokio_stream::once(Ok::<_, Infallible>(Frame::data(beginning)));
        let body = beginning.chain(tokio_stream::pending());
        self.send(Method::POST, path, headers, StreamBody::new(body).boxed())
            .await
    }

    /// Sends the head of a request, and resets it once the daemon has answered a later one.
    pub(crate) async fn break_off(&mut self, path: &str, headers: &[(&str, &str)]) {
        let mut later = self.clone();
        tokio::select! {
            biased;
            held = self.ask_without_end(path, headers) => panic!("{:?}", held.head),
            _later = later.ask_get("/livez") => {}
        }
    }

    async fn send(
        &mut self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: BoxBody<Bytes, Infallible>,
    ) -> Held {
        let request = request(self.address, method, path, headers, body);
        self.sender.ready().await.expect("a connection");
        let answer = self.sender.send_request(request).await;
        let (head, body) = answer.expect("a head").into_parts();
        Held { head, body }
    }

    /// A unary gRPC call as bytes, so that no client-side deadline or limit applies first.
    pub(crate) async fn call(
        &mut self,
        method: &str,
        headers: &[(&str, &str)],
        message: &impl prost::Message,
    ) -> Held {
        let body = framed(&message.encode_to_vec());
        let common = [("content-type", "application/grpc"), ("te", "trailers")];
        self.ask(
            &format!("/{FETCH}/{method}"),
            &[&common[..], headers].concat(),
            body,
        )
        .await
    }
}

/// gRPC calls on a connection that is replaced when the daemon closes it.
///
/// tonic's channel fails a call with CANCELLED ("connection closed") if its connection closes before the call is sent on
/// it. This client sends such a call on the next connection, as those of gRPC do, and nothing else again.
pub(crate) struct Reconnecting {
    client: Client<HttpConnector, Full<Bytes>>,
    address: SocketAddr,
}

impl Reconnecting {
    pub(crate) fn new(address: SocketAddr) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .http2_only(true)
            .build_http();
        Self { client, address }
    }

    pub(crate) async fn call(&self, method: &str, message: &impl prost::Message) -> Held {
        let request = http::Request::post(format!("http://{}/{FETCH}/{method}", self.address))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Full::new(framed(&message.encode_to_vec())));
        let answer = self.client.request(request.expect("a request")).await;
        let (head, body) = answer.expect("a head").into_parts();
        Held { head, body }
    }
}

impl Held {
    /// Reads the rest: the body, and a gRPC call's status.
    pub(crate) async fn rest(self) -> (Bytes, Option<Status>) {
        let body = self.body.collect().await.expect("a whole body");
        let status = Status::from_header_map(&self.head.headers)
            .or_else(|| body.trailers().and_then(Status::from_header_map));
        (body.to_bytes(), status)
    }

    /// The next piece of the body.
    pub(crate) async fn piece(&mut self) -> Bytes {
        let frame = self.body.frame().await.expect("a frame");
        frame.expect("no reset").into_data().expect("no end")
    }

    /// Reads the rest of the body. Returns whether it was whole.
    pub(crate) async fn ends_whole(self) -> bool {
        self.body.collect().await.is_ok()
    }

    /// As [`Self::rest`], for a call that must fail.
    pub(crate) async fn status(self) -> Status {
        self.rest().await.1.expect("a status")
    }
}
