//! A daemon's stand-in on a port of its own: pattern data straight from its definition, with one byte flipped where a
//! test says so. It keeps no limits and no files; the real one is tested elsewhere.

use ringfetch_engine::dataset::Dtype;
use ringfetch_pattern as pattern;
use ringfetch_proto::v1 as wire;
use std::net::SocketAddr;
use std::pin::Pin;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};
use wire::admin_service_server::{AdminService, AdminServiceServer};
use wire::dataset_service_server::{DatasetService, DatasetServiceServer};
use wire::fetch_service_server::{FetchService, FetchServiceServer};
use wire::fetch_stream_request::Request as StreamRequest;
use wire::fetch_stream_response::Response as StreamResponse;

pub(crate) const SEED: u64 = 42;
pub(crate) const BLOCK_BYTES: u64 = 512;
pub(crate) const BLOCKS: u64 = 1000;
pub(crate) const DIM: u64 = 24;
pub(crate) const VECTORS: u64 = 300;
pub(crate) const OBJECTS: u64 = 150;

/// What differs from the pattern.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Flaw {
    /// This byte of the dataset `blocks` is flipped.
    pub(crate) flipped_byte: Option<u64>,
    /// Every read is refused.
    pub(crate) overloaded: bool,
}

#[derive(Debug, Clone, Copy)]
struct Server(Flaw);

/// Serves until the process ends.
pub(crate) fn start(flaw: Flaw) -> SocketAddr {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            tell.send(listener.local_addr().unwrap()).unwrap();
            tonic::transport::Server::builder()
                .add_service(FetchServiceServer::new(Server(flaw)))
                .add_service(DatasetServiceServer::new(Server(flaw)))
                .add_service(AdminServiceServer::new(Server(flaw)))
                .serve_with_incoming(TcpListenerStream::new(listener).map(|connection| {
                    // Without it an answer of several writes waits 40 ms for an acknowledgement.
                    connection.and_then(|connection| connection.set_nodelay(true).map(|()| connection))
                }))
                .await
                .unwrap();
        });
    });
    told.recv().unwrap()
}

fn object_name(index: u64) -> String {
    pattern::object_name(index)
}

fn object_length(index: u64) -> u64 {
    pattern::object_length(SEED, index, 10, 3000)
}

fn datasets() -> Vec<wire::Dataset> {
    let blocks = wire::Dataset {
        name: "blocks".into(),
        kind: wire::Kind::Blocks.into(),
        length_bytes: BLOCKS * BLOCK_BYTES,
        count: BLOCKS,
        block_bytes: 512,
        ..Default::default()
    };
    let shape = wire::VectorShape {
        dim: 24,
        dtype: wire::Dtype::F16.into(),
        layout: "npy".into(),
        ..Default::default()
    };
    let vectors = wire::Dataset {
        name: "vectors".into(),
        kind: wire::Kind::Vectors.into(),
        count: VECTORS,
        length_bytes: VECTORS * DIM * 2 + 128,
        vectors: Some(shape),
        block_bytes: 0,
        ..blocks.clone()
    };
    let objects = wire::Dataset {
        name: "objects".into(),
        kind: wire::Kind::Objects.into(),
        ..Default::default()
    };
    vec![blocks, vectors, objects]
}

fn dataset_statuses() -> Vec<wire::DatasetStatus> {
    let read_path = Some(wire::ReadPath {
        backend: wire::Backend::Mmap.into(),
        requested: wire::Backend::Uring.into(),
        direct_io_reason: "a mapping never is".into(),
        ..Default::default()
    });
    let status = |dataset| wire::DatasetStatus {
        dataset: Some(dataset),
        read_path: read_path.clone(),
        files: 1,
        ..Default::default()
    };
    datasets().into_iter().map(status).collect()
}

impl Server {
    fn stream_bytes(self, offset: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        pattern::fill(SEED, offset, &mut bytes);
        let flipped = self
            .0
            .flipped_byte
            .and_then(|byte| byte.checked_sub(offset))
            .filter(|&at| at < length);
        if let Some(at) = flipped {
            bytes[usize::try_from(at).unwrap()] ^= 0xff;
        }
        bytes
    }

    fn admit(self) -> Result<(), Status> {
        if self.0.overloaded {
            Err(Status::resource_exhausted("over a limit"))
        } else {
            Ok(())
        }
    }

    fn blocks(self, request: &wire::FetchBlocksRequest) -> Result<wire::FetchBlocksResponse, Status> {
        self.admit()?;
        let mut answer = wire::FetchBlocksResponse {
            block_bytes: 512,
            ..Default::default()
        };
        let mut data = Vec::new();
        for (item, &index) in (0..).zip(&request.indices) {
            if index < BLOCKS {
                data.extend(self.stream_bytes(index * BLOCK_BYTES, BLOCK_BYTES));
                answer.lengths.push(512);
            } else {
                answer.errors.push(past_the_end(item, index));
                answer.lengths.push(0);
            }
        }
        answer.data = data.into();
        Ok(answer)
    }

    fn vectors(self, request: &wire::FetchVectorsRequest) -> Result<wire::FetchVectorsResponse, Status> {
        self.admit()?;
        let dtype = wire::Dtype::F16.into();
        let mut answer = wire::FetchVectorsResponse {
            dim: 24,
            dtype,
            ..Default::default()
        };
        let mut data = Vec::new();
        for (item, &id) in (0..).zip(&request.ids) {
            if id < VECTORS {
                let mut vector = [0; 48];
                pattern::fill_elements(SEED, Dtype::F16, id * DIM, &mut vector);
                data.extend(vector);
                answer.lengths.push(48);
            } else {
                answer.errors.push(past_the_end(item, id));
                answer.lengths.push(0);
            }
        }
        answer.data = data.into();
        Ok(answer)
    }

    /// The score of a vector is half its id, and the largest id is the best.
    fn scores(self, request: &wire::ScoreVectorsRequest) -> Result<wire::ScoreVectorsResponse, Status> {
        self.admit()?;
        let query = request.queries.first();
        let query = query.filter(|query| query.vector.len() == 24);
        let query = query.ok_or_else(|| Status::invalid_argument("queries[0].vector: not 24 elements"))?;
        let mut ids = query.ids.clone();
        ids.sort_unstable_by(|one, other| other.cmp(one));
        ids.retain(|id| *id < VECTORS);
        ids.truncate(request.limit as usize);
        let failed = (0..).zip(&query.ids).filter(|(_, id)| **id >= VECTORS);
        let result = wire::ScoreResult {
            scores: ids
                .iter()
                .map(|id| f64::from(u32::try_from(*id).unwrap()) / 2.0)
                .collect(),
            ids,
            unscored: 1,
            errors: failed.map(|(item, id)| past_the_end(item, *id)).collect(),
        };
        Ok(wire::ScoreVectorsResponse {
            results: vec![result],
            etag: "v1".to_owned(),
        })
    }

    fn ranges(self, request: &wire::FetchRangesRequest) -> Result<wire::FetchRangesResponse, Status> {
        self.admit()?;
        let mut answer = wire::FetchRangesResponse::default();
        let mut data = Vec::new();
        for (item, (&offset, &length)) in (0..).zip(request.offsets.iter().zip(&request.lengths)) {
            if offset + length <= BLOCKS * BLOCK_BYTES {
                data.extend(self.stream_bytes(offset, length));
                answer.lengths.push(u32::try_from(length).unwrap());
            } else {
                answer.errors.push(past_the_end(item, offset));
                answer.lengths.push(0);
            }
        }
        answer.data = data.into();
        Ok(answer)
    }

    fn objects(self, request: &wire::FetchObjectsRequest) -> Result<wire::FetchObjectsResponse, Status> {
        self.admit()?;
        let mut answer = wire::FetchObjectsResponse::default();
        let mut data = Vec::new();
        for (i, name) in request.names.iter().enumerate() {
            let Some(index) = (0..OBJECTS).find(|&index| object_name(index) == *name) else {
                let (item, code) = (u32::try_from(i).unwrap(), tonic::Code::NotFound.into());
                answer.errors.push(wire::ItemError {
                    item,
                    code,
                    message: format!("there is no object {name:?}"),
                });
                answer.lengths.push(0);
                continue;
            };
            let at = |list: &[u64]| list.get(i).copied().unwrap_or(0);
            let (offset, length) = (at(&request.offsets), at(&request.lengths));
            let length = if length == 0 {
                object_length(index) - offset
            } else {
                length
            };
            let mut bytes = vec![0; usize::try_from(length).unwrap()];
            pattern::fill(pattern::object_seed(SEED, name), offset, &mut bytes);
            data.extend(bytes);
            answer.lengths.push(u32::try_from(length).unwrap());
        }
        answer.data = data.into();
        Ok(answer)
    }
}

fn past_the_end(item: u32, index: u64) -> wire::ItemError {
    wire::ItemError {
        item,
        code: tonic::Code::OutOfRange.into(),
        message: format!("{index} is past the end"),
    }
}

#[tonic::async_trait]
impl FetchService for Server {
    async fn fetch_blocks(
        &self,
        request: Request<wire::FetchBlocksRequest>,
    ) -> Result<Response<wire::FetchBlocksResponse>, Status> {
        self.blocks(request.get_ref()).map(Response::new)
    }

    async fn fetch_vectors(
        &self,
        request: Request<wire::FetchVectorsRequest>,
    ) -> Result<Response<wire::FetchVectorsResponse>, Status> {
        self.vectors(request.get_ref()).map(Response::new)
    }

    async fn score_vectors(
        &self,
        request: Request<wire::ScoreVectorsRequest>,
    ) -> Result<Response<wire::ScoreVectorsResponse>, Status> {
        self.scores(request.get_ref()).map(Response::new)
    }

    async fn fetch_ranges(
        &self,
        request: Request<wire::FetchRangesRequest>,
    ) -> Result<Response<wire::FetchRangesResponse>, Status> {
        self.ranges(request.get_ref()).map(Response::new)
    }

    async fn fetch_objects(
        &self,
        request: Request<wire::FetchObjectsRequest>,
    ) -> Result<Response<wire::FetchObjectsResponse>, Status> {
        self.objects(request.get_ref()).map(Response::new)
    }

    type ReadObjectStream = tokio_stream::Empty<Result<wire::ReadObjectResponse, Status>>;

    async fn read_object(
        &self,
        _: Request<wire::ReadObjectRequest>,
    ) -> Result<Response<Self::ReadObjectStream>, Status> {
        Err(Status::unimplemented("no command asks for it"))
    }

    type FetchStreamStream = Pin<Box<dyn Stream<Item = Result<wire::FetchStreamResponse, Status>> + Send>>;

    async fn fetch_stream(
        &self,
        request: Request<Streaming<wire::FetchStreamRequest>>,
    ) -> Result<Response<Self::FetchStreamStream>, Status> {
        let server = *self;
        let answers = request.into_inner().map(move |request| {
            let request = request?;
            let response = match request.request {
                Some(StreamRequest::Blocks(blocks)) => server.blocks(&blocks).map(StreamResponse::Blocks),
                Some(StreamRequest::Vectors(vectors)) => {
                    server.vectors(&vectors).map(StreamResponse::Vectors)
                }
                Some(StreamRequest::Ranges(ranges)) => server.ranges(&ranges).map(StreamResponse::Ranges),
                Some(StreamRequest::Objects(objects)) => {
                    server.objects(&objects).map(StreamResponse::Objects)
                }
                Some(StreamRequest::Scores(_) | StreamRequest::Cancel(_)) | None => {
                    Err(Status::invalid_argument("no request"))
                }
            };
            let response = response.unwrap_or_else(|status| {
                let (code, message) = (status.code().into(), status.message().to_owned());
                StreamResponse::Status(ringfetch_proto::RpcStatus {
                    code,
                    message,
                    details: Vec::new(),
                })
            });
            Ok(wire::FetchStreamResponse {
                id: request.id,
                response: Some(response),
            })
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

#[tonic::async_trait]
impl DatasetService for Server {
    async fn list_datasets(
        &self,
        _: Request<wire::ListDatasetsRequest>,
    ) -> Result<Response<wire::ListDatasetsResponse>, Status> {
        Ok(Response::new(wire::ListDatasetsResponse {
            datasets: datasets(),
            ..Default::default()
        }))
    }

    async fn get_dataset(
        &self,
        request: Request<wire::GetDatasetRequest>,
    ) -> Result<Response<wire::GetDatasetResponse>, Status> {
        let name = &request.get_ref().name;
        let dataset = datasets().into_iter().find(|dataset| dataset.name == *name);
        let dataset =
            dataset.ok_or_else(|| Status::not_found(format!("dataset: there is no dataset {name:?}")))?;
        Ok(Response::new(wire::GetDatasetResponse {
            dataset: Some(dataset),
        }))
    }

    async fn list_objects(
        &self,
        request: Request<wire::ListObjectsRequest>,
    ) -> Result<Response<wire::ListObjectsResponse>, Status> {
        let first: u64 = request.get_ref().page_token.parse().unwrap_or(0);
        let end = (first + 100).min(OBJECTS);
        let object = |index| wire::ObjectInfo {
            name: object_name(index),
            length_bytes: object_length(index),
        };
        let next_page_token = if end < OBJECTS {
            end.to_string()
        } else {
            String::new()
        };
        Ok(Response::new(wire::ListObjectsResponse {
            objects: (first..end).map(object).collect(),
            next_page_token,
        }))
    }
}

#[tonic::async_trait]
impl AdminService for Server {
    async fn get_status(
        &self,
        _: Request<wire::GetStatusRequest>,
    ) -> Result<Response<wire::GetStatusResponse>, Status> {
        Ok(Response::new(wire::GetStatusResponse {
            version: "1.2.3".into(),
            uptime_ms: 3_723_456,
            state: "serving".into(),
            backend: wire::Backend::Mmap.into(),
            requested: wire::Backend::Uring.into(),
            reason: "seccomp forbids io_uring".into(),
            fallback: true,
            cores: 2,
            memory_budget_bytes: 256 << 20,
            memory_in_use_bytes: 1 << 20,
            shards: vec![wire::ShardStatus {
                backend: wire::Backend::Uring.into(),
                routed: true,
                queue_depth: 128,
                device_reads_total: 12_345,
                ..Default::default()
            }],
            datasets: dataset_statuses(),
            reads_per_second: 91_234.5,
            read_bytes_per_second: 373.7e6,
            rates_window_ms: 1000,
            reads_total: 1_234_567,
            read_errors_total: 8,
            latency_p50_us: 500.0,
            latency_p99_us: 20_000.0,
            latency_p999_us: 50_000.0,
            last_reload: Some(wire::LastReload {
                successful: false,
                problem: "engine.bakend: is not a key here".into(),
                ..Default::default()
            }),
        }))
    }

    async fn set_log_level(
        &self,
        request: Request<wire::SetLogLevelRequest>,
    ) -> Result<Response<wire::SetLogLevelResponse>, Status> {
        if request.get_ref().filter == "no filter" {
            return Err(Status::invalid_argument("filter: does not parse"));
        }
        Ok(Response::new(wire::SetLogLevelResponse {
            previous: "info".into(),
        }))
    }

    async fn set_backend(
        &self,
        request: Request<wire::SetBackendRequest>,
    ) -> Result<Response<wire::SetBackendResponse>, Status> {
        let request = request.into_inner();
        match (request.backend(), request.dataset.as_deref()) {
            (wire::Backend::Uring, _) => Err(Status::failed_precondition(
                "backend uring: seccomp forbids io_uring",
            )),
            (_, Some("nothing")) => Err(Status::not_found("dataset: there is no dataset \"nothing\"")),
            (backend, dataset) => Ok(Response::new(wire::SetBackendResponse {
                previous: wire::Backend::Mmap.into(),
                backend: backend.into(),
                reason: "asked for at run time".into(),
                datasets_with_own: dataset.map_or(vec!["vectors".into()], |_| Vec::new()),
            })),
        }
    }

    async fn clear_backend(
        &self,
        _: Request<wire::ClearBackendRequest>,
    ) -> Result<Response<wire::ClearBackendResponse>, Status> {
        Ok(Response::new(wire::ClearBackendResponse {
            previous: wire::Backend::Pread.into(),
            backend: wire::Backend::Mmap.into(),
            reason: "asked for by name".into(),
        }))
    }

    async fn reload(
        &self,
        _: Request<wire::ReloadRequest>,
    ) -> Result<Response<wire::ReloadResponse>, Status> {
        if self.0.overloaded {
            return Err(Status::invalid_argument("engine.bakend: is not a key here"));
        }
        let change = |key: &str, before: &str, after: &str| wire::ConfigChange {
            key: key.into(),
            before: before.into(),
            after: after.into(),
        };
        Ok(Response::new(wire::ReloadResponse {
            applied: vec![change("limits.connections", "4096", "100")],
            needs_restart: vec![change("engine.cores", "2", "4")],
            datasets_added: vec!["new".into()],
            datasets_removed: vec!["old".into()],
            datasets_replaced: Vec::new(),
            datasets_unchanged: vec!["blocks".into(), "vectors".into()],
            notes: Vec::new(),
        }))
    }
}
