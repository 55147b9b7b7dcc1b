//! A server in this process that does what no real daemon can be made to do: refuse, stall, lie, cut
//! connections. Reached over in-memory pipes, so that time can be paused: nothing waits for the kernel.

use bytes::Bytes;
use futures_util::stream::BoxStream;
use ringfetch_client::{Builder, Client};
use ringfetch_proto::v1 as wire;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::DuplexStream;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tonic_types::{ErrorDetails, StatusExt as _};
use wire::dataset_service_server::{DatasetService, DatasetServiceServer};
use wire::fetch_service_server::{FetchService, FetchServiceServer};

/// Time is paused in most tests: it passes only when nothing moves.
pub(crate) const STILL: Duration = Duration::from_millis(100);
/// Longer than anything takes that does not hang.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Settings of a client of a fake that is not on a socket.
pub(crate) fn builder() -> Builder {
    Client::builder("http://fake:1")
}

/// An error that says when to try again.
pub(crate) fn with_hint(code: tonic::Code, hint: Duration) -> Status {
    Status::with_error_details(code, "for now", ErrorDetails::with_retry_info(Some(hint)))
}

type Answers = Pin<Box<dyn Stream<Item = Result<wire::FetchStreamResponse, Status>> + Send>>;
pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
/// A connection that is being opened.
pub(crate) type Dialled = BoxFuture<std::io::Result<DuplexStream>>;
type OnBlocks = dyn Fn(usize, Request<wire::FetchBlocksRequest>) -> BoxFuture<Result<wire::FetchBlocksResponse, Status>>
    + Send
    + Sync;
type OnStream = dyn Fn(
        Streaming<wire::FetchStreamRequest>,
        mpsc::UnboundedSender<Result<wire::FetchStreamResponse, Status>>,
    ) -> BoxFuture<()>
    + Send
    + Sync;
/// The messages of an object.
pub(crate) type ObjectMessages = BoxStream<'static, Result<wire::ReadObjectResponse, Status>>;
type OnObject = dyn Fn(usize, wire::ReadObjectRequest) -> Result<ObjectMessages, Status> + Send + Sync;
type OnList = dyn Fn(wire::ListObjectsRequest) -> wire::ListObjectsResponse + Send + Sync;
type OnScores = dyn Fn(wire::ScoreVectorsRequest) -> Status + Send + Sync;
type OnDatasets =
    dyn Fn(Request<wire::ListDatasetsRequest>) -> BoxFuture<wire::ListDatasetsResponse> + Send + Sync;

pub(crate) const BLOCK_BYTES: u32 = 8;

/// What a stream's client may send before the fake reads.
const WINDOW_BYTES: u32 = 64 << 10;

/// Block `index` of the fake's only dataset: its index.
pub(crate) fn block(index: u64) -> [u8; 8] {
    index.to_le_bytes()
}

/// The correct answer to a request for blocks.
pub(crate) fn blocks(indices: &[u64]) -> wire::FetchBlocksResponse {
    let data: Vec<u8> = indices.iter().flat_map(|&index| block(index)).collect();
    wire::FetchBlocksResponse {
        block_bytes: BLOCK_BYTES,
        data: data.into(),
        ..Default::default()
    }
}

/// The correct answer to request `id` of a stream, for blocks.
pub(crate) fn answer(id: u64, indices: &[u64]) -> wire::FetchStreamResponse {
    let response = wire::fetch_stream_response::Response::Blocks(blocks(indices));
    wire::FetchStreamResponse {
        id,
        response: Some(response),
    }
}

/// The indices that a stream's request asks for.
pub(crate) fn indices(request: &wire::FetchStreamRequest) -> &[u64] {
    match &request.request {
        Some(wire::fetch_stream_request::Request::Blocks(blocks)) => &blocks.indices,
        other => panic!("not a request for blocks: {other:?}"),
    }
}

/// Whether a stream's request cancels another one.
pub(crate) fn is_cancel(request: &wire::FetchStreamRequest) -> bool {
    matches!(
        request.request,
        Some(wire::fetch_stream_request::Request::Cancel(_))
    )
}

/// Serves a stream as it should be, for blocks.
pub(crate) async fn answer_all(
    mut requests: Streaming<wire::FetchStreamRequest>,
    answers: mpsc::UnboundedSender<Result<wire::FetchStreamResponse, Status>>,
) {
    while let Ok(Some(request)) = requests.message().await {
        answers.send(Ok(answer(request.id, indices(&request)))).unwrap();
    }
}

/// The behaviour of the fake; correct by default.
#[derive(Clone)]
pub(crate) struct Fake {
    on_blocks: Arc<OnBlocks>,
    on_stream: Arc<OnStream>,
    on_object: Arc<OnObject>,
    on_scores: Arc<OnScores>,
    on_list: Arc<OnList>,
    on_datasets: Arc<OnDatasets>,
    calls: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
    /// Each connection waits for a permit.
    may_connect: Arc<Semaphore>,
    /// Whether connection number n (from 0) is refused.
    refuses: fn(usize) -> bool,
}

impl Fake {
    pub(crate) fn new() -> Self {
        Self {
            on_blocks: Arc::new(|_, request| Box::pin(async move { Ok(blocks(&request.get_ref().indices)) })),
            on_stream: Arc::new(|requests, answers| Box::pin(answer_all(requests, answers))),
            on_object: Arc::new(|_, _| Err(Status::unimplemented("no test asks for it"))),
            on_scores: Arc::new(|_| Status::unimplemented("no test asks for it")),
            on_list: Arc::new(|_| wire::ListObjectsResponse::default()),
            on_datasets: Arc::new(|_| Box::pin(async { wire::ListDatasetsResponse::default() })),
            calls: Arc::default(),
            connections: Arc::default(),
            may_connect: Arc::new(Semaphore::new(Semaphore::MAX_PERMITS)),
            refuses: |_| false,
        }
    }

    /// Refuses connection number n (from 0) if `refuses(n)`.
    pub(crate) fn refusing(mut self, refuses: fn(usize) -> bool) -> Self {
        self.refuses = refuses;
        self
    }

    /// Answers FetchBlocks calls once this semaphore has permits.
    pub(crate) fn gated(self, may_answer: &Arc<Semaphore>) -> Self {
        let may_answer = Arc::clone(may_answer);
        self.on_blocks(move |_, request| {
            let may_answer = Arc::clone(&may_answer);
            async move {
                drop(may_answer.acquire().await.unwrap());
                Ok(blocks(&request.get_ref().indices))
            }
        })
    }

    /// Connections wait for permits of this semaphore.
    pub(crate) fn dialled_with(mut self, may_connect: &Arc<Semaphore>) -> Self {
        self.may_connect = Arc::clone(may_connect);
        self
    }

    /// FetchBlocks call number n (from 0) is answered by `f(n, request)`.
    pub(crate) fn on_blocks<F, Fut>(mut self, f: F) -> Self
    where
        F: Fn(usize, Request<wire::FetchBlocksRequest>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<wire::FetchBlocksResponse, Status>> + Send + 'static,
    {
        self.on_blocks = Arc::new(move |n, request| Box::pin(f(n, request)));
        self
    }

    /// A FetchStream call is served by `f(requests, answers)`.
    pub(crate) fn on_stream<F, Fut>(mut self, f: F) -> Self
    where
        F: Fn(
                Streaming<wire::FetchStreamRequest>,
                mpsc::UnboundedSender<Result<wire::FetchStreamResponse, Status>>,
            ) -> Fut
            + Send
            + Sync
            + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        self.on_stream = Arc::new(move |requests, answers| Box::pin(f(requests, answers)));
        self
    }

    /// ReadObject call number n (from 0) is answered by `f(n, request)`.
    pub(crate) fn on_object<F>(mut self, f: F) -> Self
    where
        F: Fn(usize, wire::ReadObjectRequest) -> Result<ObjectMessages, Status> + Send + Sync + 'static,
    {
        self.on_object = Arc::new(f);
        self
    }

    /// A ScoreVectors call fails with `f(request)`.
    pub(crate) fn on_scores<F>(mut self, f: F) -> Self
    where
        F: Fn(wire::ScoreVectorsRequest) -> Status + Send + Sync + 'static,
    {
        self.on_scores = Arc::new(f);
        self
    }

    pub(crate) fn on_list<F>(mut self, f: F) -> Self
    where
        F: Fn(wire::ListObjectsRequest) -> wire::ListObjectsResponse + Send + Sync + 'static,
    {
        self.on_list = Arc::new(f);
        self
    }

    pub(crate) fn on_datasets<F, Fut>(mut self, f: F) -> Self
    where
        F: Fn(Request<wire::ListDatasetsRequest>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = wire::ListDatasetsResponse> + Send + 'static,
    {
        self.on_datasets = Arc::new(move |request| Box::pin(f(request)));
        self
    }

    /// Number of FetchBlocks and ReadObject calls so far.
    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// Number of connections so far.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// A client with these settings.
    pub(crate) fn client_with(&self, builder: Builder) -> Client {
        builder.connect_lazy_with(self.connector()).unwrap()
    }

    /// Opens connections to it.
    pub(crate) fn connector(&self) -> impl Fn() -> Dialled + Send + Sync + use<> {
        let (accept, incoming) = mpsc::unbounded_channel::<std::io::Result<DuplexStream>>();
        let server = tonic::transport::Server::builder()
            .initial_stream_window_size(WINDOW_BYTES)
            .add_service(FetchServiceServer::new(self.clone()))
            .add_service(DatasetServiceServer::new(self.clone()))
            .serve_with_incoming(UnboundedReceiverStream::new(incoming));
        tokio::spawn(server);
        let (connections, may_connect) = (Arc::clone(&self.connections), Arc::clone(&self.may_connect));
        let refuses = self.refuses;
        move || {
            let (accept, n) = (accept.clone(), connections.fetch_add(1, Ordering::SeqCst));
            let may_connect = Arc::clone(&may_connect);
            Box::pin(async move {
                may_connect.acquire().await.unwrap().forget();
                if refuses(n) {
                    return Err(std::io::ErrorKind::ConnectionRefused.into());
                }
                let (near, far) = tokio::io::duplex(1 << 16);
                accept
                    .send(Ok(far))
                    .map_err(|_| std::io::ErrorKind::ConnectionRefused)?;
                Ok(near)
            })
        }
    }

    /// Serves on a socket until stopped; then its connections are closed too.
    pub(crate) async fn serve(self, listener: tokio::net::TcpListener, ended: oneshot::Receiver<()>) {
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        let server = tonic::transport::Server::builder().add_service(FetchServiceServer::new(self));
        server
            .serve_with_incoming_shutdown(incoming, async { drop(ended.await) })
            .await
            .unwrap();
    }

    /// A client with the default settings.
    pub(crate) fn client(&self) -> Client {
        self.client_with(builder())
    }
}

/// Opens connections of which `serve` is the server.
pub(crate) fn served_by<Fut>(
    serve: impl Fn(h2::server::Connection<DuplexStream, Bytes>) -> Fut + Send + Sync + 'static,
) -> impl Fn() -> Dialled + Send + Sync + 'static
where
    Fut: Future<Output = ()> + Send + 'static,
{
    let serve = Arc::new(serve);
    move || -> Dialled {
        let (serve, (near, far)) = (Arc::clone(&serve), tokio::io::duplex(1 << 16));
        tokio::spawn(async move { serve(h2::server::handshake(far).await.unwrap()).await });
        Box::pin(async { Ok(near) })
    }
}

/// Connections that can be cut.
#[derive(Clone, Default)]
pub(crate) struct Pipes(Arc<Mutex<JoinSet<()>>>);

impl Pipes {
    /// Opens connections that go through these.
    pub(crate) fn through(
        &self,
        connector: impl Fn() -> Dialled + Send + Sync + 'static,
    ) -> impl Fn() -> Dialled + Send + Sync + 'static {
        let pipes = self.clone();
        move || -> Dialled {
            let (dialled, pipes) = (connector(), pipes.clone());
            Box::pin(async move {
                let mut server = dialled.await?;
                let (near, mut far) = tokio::io::duplex(1 << 16);
                pipes.0.lock().unwrap().spawn(async move {
                    drop(tokio::io::copy_bidirectional(&mut far, &mut server).await);
                });
                Ok(near)
            })
        }
    }

    /// Cuts those that are open.
    pub(crate) fn cut(&self) {
        self.0.lock().unwrap().abort_all();
    }
}

#[tonic::async_trait]
impl FetchService for Fake {
    async fn fetch_blocks(
        &self,
        request: Request<wire::FetchBlocksRequest>,
    ) -> Result<Response<wire::FetchBlocksResponse>, Status> {
        let n = self.calls.fetch_add(1, Ordering::SeqCst);
        (self.on_blocks)(n, request).await.map(Response::new)
    }

    async fn fetch_vectors(
        &self,
        _: Request<wire::FetchVectorsRequest>,
    ) -> Result<Response<wire::FetchVectorsResponse>, Status> {
        Err(Status::unimplemented("the fake has blocks"))
    }

    async fn score_vectors(
        &self,
        request: Request<wire::ScoreVectorsRequest>,
    ) -> Result<Response<wire::ScoreVectorsResponse>, Status> {
        Err((self.on_scores)(request.into_inner()))
    }

    async fn fetch_ranges(
        &self,
        request: Request<wire::FetchRangesRequest>,
    ) -> Result<Response<wire::FetchRangesResponse>, Status> {
        // Byte n of the address space is n's low byte.
        let request = request.into_inner();
        let mut answer = wire::FetchRangesResponse::default();
        let mut data = Vec::new();
        for (&offset, &length) in request.offsets.iter().zip(&request.lengths) {
            data.extend((offset..offset + length).map(|n| n.to_le_bytes()[0]));
            answer.lengths.push(u32::try_from(length).unwrap());
        }
        answer.data = data.into();
        Ok(Response::new(answer))
    }

    async fn fetch_objects(
        &self,
        request: Request<wire::FetchObjectsRequest>,
    ) -> Result<Response<wire::FetchObjectsResponse>, Status> {
        // An object contains its own name; names that begin with "no" do not exist. One without a version has a "?".
        let request = request.into_inner();
        let mut answer = wire::FetchObjectsResponse::default();
        let mut data = Vec::new();
        for (item, name) in (0..).zip(&request.names) {
            if name.starts_with("no") {
                let code = tonic::Code::NotFound.into();
                answer.errors.push(wire::ItemError {
                    item,
                    code,
                    message: format!("there is no object {name:?}"),
                });
                answer.lengths.push(0);
                answer.etags.push(String::new());
                continue;
            }
            let at = |list: &[u64]| list.get(item as usize).copied().unwrap_or(0) as usize;
            let (offset, length) = (at(&request.offsets), at(&request.lengths));
            let end = if length == 0 { name.len() } else { offset + length };
            data.extend(&name.as_bytes()[offset..end]);
            answer.lengths.push(u32::try_from(end - offset).unwrap());
            if !name.contains('?') {
                answer.etags.push(format!("version of {name}"));
            }
        }
        answer.data = data.into();
        Ok(Response::new(answer))
    }

    type FetchStreamStream = Answers;

    async fn fetch_stream(
        &self,
        request: Request<Streaming<wire::FetchStreamRequest>>,
    ) -> Result<Response<Answers>, Status> {
        let (sender, answers) = mpsc::unbounded_channel();
        tokio::spawn((self.on_stream)(request.into_inner(), sender));
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(answers))))
    }

    type ReadObjectStream = ObjectMessages;

    async fn read_object(
        &self,
        request: Request<wire::ReadObjectRequest>,
    ) -> Result<Response<ObjectMessages>, Status> {
        let n = self.calls.fetch_add(1, Ordering::SeqCst);
        (self.on_object)(n, request.into_inner()).map(Response::new)
    }
}

#[tonic::async_trait]
impl DatasetService for Fake {
    async fn list_datasets(
        &self,
        request: Request<wire::ListDatasetsRequest>,
    ) -> Result<Response<wire::ListDatasetsResponse>, Status> {
        Ok(Response::new((self.on_datasets)(request).await))
    }

    async fn get_dataset(
        &self,
        _: Request<wire::GetDatasetRequest>,
    ) -> Result<Response<wire::GetDatasetResponse>, Status> {
        Ok(Response::new(wire::GetDatasetResponse::default()))
    }

    async fn list_objects(
        &self,
        request: Request<wire::ListObjectsRequest>,
    ) -> Result<Response<wire::ListObjectsResponse>, Status> {
        Ok(Response::new((self.on_list)(request.into_inner())))
    }
}
