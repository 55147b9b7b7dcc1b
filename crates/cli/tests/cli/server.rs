//! A fake daemon on its own port: pattern data straight from its definition, with one byte flipped or a shorter
//! response if a test asks for it. It has no files; the real daemon is tested elsewhere.

mod admin;

use crate::connections::serve;
use crate::flaw::Flaw;
use ringfetch_engine::dataset::Dtype;
use ringfetch_pattern as pattern;
use ringfetch_proto::v1 as wire;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::service::InterceptorLayer;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_types::{ErrorDetails, StatusExt as _};
use wire::admin_service_server::{AdminService, AdminServiceServer};
use wire::dataset_service_server::{DatasetService, DatasetServiceServer};
use wire::fetch_service_server::{FetchService, FetchServiceServer};
use wire::fetch_stream_request::Request as StreamRequest;
use wire::fetch_stream_response::Response as StreamResponse;

pub(crate) const SEED: u64 = 42;
const BLOCK_BYTES: u64 = 512;
const BLOCKS: u64 = 1000;
const DIM: u64 = 24;
const VECTORS: u64 = 300;
pub(crate) const OBJECTS: u64 = 150;

/// The data, as both transports serve it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Server(Flaw);

/// An item's bytes, or why there are none.
pub(crate) type Item = Result<Vec<u8>, (Code, String)>;

/// Lengths, errors and data of a response.
type Batch = (Vec<u32>, Vec<wire::ItemError>, Vec<u8>);

/// Serves until the process ends.
pub(crate) fn start(flaw: Flaw) -> SocketAddr {
    start_for(None, flaw)
}

/// As [`start`], only for clients with this `authorization`.
pub(crate) fn start_for(authorization: Option<&'static str>, flaw: Flaw) -> SocketAddr {
    let check = move |request: Request<()>| match authorization {
        Some(wanted)
            if request
                .metadata()
                .get("authorization")
                .is_none_or(|sent| sent != wanted) =>
        {
            Err(Status::unauthenticated("no token"))
        }
        Some(_) | None => Ok(request),
    };
    start_with(check, flaw)
}

/// As [`start`], with a check of each request's head.
pub(crate) fn start_with(
    check: impl Fn(Request<()>) -> Result<Request<()>, Status> + Clone + Send + Sync + 'static,
    flaw: Flaw,
) -> SocketAddr {
    let server = Server(flaw);
    serve(async move |listener| {
        tonic::transport::Server::builder()
            .layer(InterceptorLayer::new(check))
            .add_service(FetchServiceServer::new(server))
            .add_service(DatasetServiceServer::new(server))
            .add_service(AdminServiceServer::new(server))
            .serve_with_incoming(TcpListenerStream::new(listener).map(|connection| {
                // Otherwise a response of several writes waits 40 ms for an acknowledgement.
                connection.and_then(|connection| connection.set_nodelay(true).map(|()| connection))
            }))
            .await
            .unwrap();
    })
}

/// A dataset of 5 MiB that no listing has, and that is replaced after each request.
pub(crate) const REPLACED: &str = "replaced";

/// An object that no listing has, and that is longer than a response may be.
pub(crate) const LONG_OBJECT: &str = "long";
pub(crate) const LONG_OBJECT_BYTES: u64 = (5 << 20) + 1;

fn object_length(index: u64) -> u64 {
    pattern::object_length(SEED, index, 10, 3000)
}

fn datasets() -> Vec<wire::Dataset> {
    let dataset = |name: &str, kind: wire::Kind, count, length_bytes| wire::Dataset {
        name: name.to_owned(),
        kind: kind.into(),
        count,
        length_bytes,
        ..Default::default()
    };
    let mut blocks = dataset("blocks", wire::Kind::Blocks, BLOCKS, BLOCKS * BLOCK_BYTES);
    blocks.block_bytes = 512;
    let mut vectors = dataset("vectors", wire::Kind::Vectors, VECTORS, VECTORS * DIM * 2 + 128);
    vectors.vectors = Some(wire::VectorShape {
        dim: 24,
        dtype: wire::Dtype::F16.into(),
        layout: "npy".into(),
        ..Default::default()
    });
    vec![blocks, dataset("objects", wire::Kind::Objects, 0, 0), vectors]
}

impl Server {
    /// One without a flaw.
    pub(crate) const GOOD: Self = Self(Flaw::NONE);

    pub(crate) fn range(self, offset: u64, length: u64) -> Item {
        if offset + length > BLOCKS * BLOCK_BYTES {
            return Err((Code::OutOfRange, format!("{offset} is past the end")));
        }
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        pattern::fill(SEED, offset, &mut bytes);
        let flipped = self.0.flipped_byte.and_then(|byte| byte.checked_sub(offset));
        if let Some(at) = flipped.filter(|at| *at < length) {
            bytes[usize::try_from(at).unwrap()] ^= 0xff;
        }
        Ok(bytes)
    }

    pub(crate) fn block(self, index: u64) -> Item {
        let past_the_end = |_| (Code::OutOfRange, format!("{index} is past the end"));
        self.range(index * BLOCK_BYTES, BLOCK_BYTES).map_err(past_the_end)
    }

    pub(crate) fn vector(id: u64) -> Item {
        if id >= VECTORS {
            return Err((Code::OutOfRange, format!("{id} is past the end")));
        }
        let mut vector = vec![0; 48];
        pattern::fill_elements(SEED, Dtype::F16, id * DIM, &mut vector);
        Ok(vector)
    }

    /// An object from `offset` on; 0 bytes: to its end.
    fn object(name: &str, offset: u64, length: u64) -> Item {
        let index = (0..OBJECTS).find(|&index| pattern::object_name(index) == name);
        let long = (name == LONG_OBJECT).then_some(LONG_OBJECT_BYTES);
        let end = index.map(object_length).or(long);
        let end = end.ok_or_else(|| (Code::NotFound, format!("there is no object {name:?}")))?;
        let length = if length == 0 { end - offset } else { length };
        if offset + length > end {
            return Err((Code::OutOfRange, format!("{name:?} ends at {end}")));
        }
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        pattern::fill(pattern::object_seed(SEED, name), offset, &mut bytes);
        Ok(bytes)
    }

    fn batch(self, fail_fast: bool, items: impl Iterator<Item = Item>) -> Result<Batch, Status> {
        if self.0.overloaded {
            let (code, message) = (Code::ResourceExhausted, "over a limit");
            return Err(match self.0.overloaded_for {
                None => Status::new(code, message),
                hint => Status::with_error_details(code, message, ErrorDetails::with_retry_info(hint)),
            });
        }
        if let Some((hint, reads)) = self.0.refused_for
            && reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(2)
        {
            let mut details = ErrorDetails::with_retry_info(Some(hint));
            details.set_error_info("RATE_LIMITED", "ringfetch", []);
            let code = Code::ResourceExhausted;
            return Err(Status::with_error_details(code, "over a rate", details));
        }
        let mut items: Vec<Item> = items.collect();
        let at_first = |reads: &AtomicUsize| {
            let codes = [Code::Unavailable, Code::ResourceExhausted];
            codes.get(reads.fetch_add(1, Ordering::Relaxed)).copied()
        };
        let code = self.0.unreadable_at_first.and_then(at_first);
        let code = code.or(self.0.unreadable.then_some(Code::Unavailable));
        if let (Some(code), Some(last)) = (code, items.last_mut()) {
            *last = Err((code, "for now".to_owned()));
            if fail_fast {
                let details = ErrorDetails::with_retry_info(Some(Duration::from_millis(1)));
                return Err(Status::with_error_details(code, "for now", details));
            }
        }
        if items.len() > self.0.items_max {
            let details = ErrorDetails::with_error_info("TOO_MANY_ITEMS", "ringfetch", []);
            let message = format!("{} items, at most {}", items.len(), self.0.items_max);
            return Err(Status::with_error_details(
                Code::ResourceExhausted,
                message,
                details,
            ));
        }
        let (mut lengths, mut errors, mut data) = Batch::default();
        let max = self.0.response_bytes_max;
        let too_large = |bytes: usize| (Code::ResourceExhausted, format!("{bytes} bytes, at most {max}"));
        for (item, bytes) in (0..).zip(items) {
            let fits = bytes.and_then(|bytes| match bytes.len() {
                length if length > max => Err(too_large(length)),
                _ => Ok(bytes),
            });
            let bytes = match fits {
                Ok(bytes) => bytes,
                Err((code, message)) if fail_fast => return Err(Status::new(code, message)),
                Err((code, message)) => {
                    let code = code.into();
                    errors.push(wire::ItemError { item, code, message });
                    Vec::new()
                }
            };
            lengths.push(u32::try_from(bytes.len()).unwrap());
            data.extend(bytes);
        }
        if data.len() > max {
            let (code, message) = too_large(data.len());
            return Err(Status::new(code, message));
        }
        Ok((lengths, errors, data))
    }

    /// The version of a dataset or of an object, before or after what replaces it.
    fn version(self, is_later: bool) -> String {
        if self.0.replaced && is_later { "v2" } else { "v1" }.to_owned()
    }

    /// Refuses a request for another version of a dataset than the one that is read.
    fn check(self, if_match: &str) -> Result<(), Status> {
        let is_current = if_match.is_empty() || if_match == self.version(true);
        is_current
            .then_some(())
            .ok_or_else(|| Status::failed_precondition("it was replaced"))
    }
}

/// A service whose unary methods are functions of the same names.
macro_rules! service {
    ($service:ident { $($name:ident($request:ident) -> $response:ident;)* } $($others:tt)*) => {
        #[tonic::async_trait]
        impl $service for Server {
            $(async fn $name(&self, request: Request<wire::$request>) -> Result<Response<wire::$response>, Status> {
                Server::$name(*self, request.into_inner()).map(Response::new)
            })*
            $($others)*
        }
    };
}

service! {
    FetchService {
        fetch_blocks(FetchBlocksRequest) -> FetchBlocksResponse;
        fetch_vectors(FetchVectorsRequest) -> FetchVectorsResponse;
        fetch_ranges(FetchRangesRequest) -> FetchRangesResponse;
        fetch_objects(FetchObjectsRequest) -> FetchObjectsResponse;
        score_vectors(ScoreVectorsRequest) -> ScoreVectorsResponse;
    }

    type ReadObjectStream = Pin<Box<dyn Stream<Item = Result<wire::ReadObjectResponse, Status>> + Send>>;

    async fn read_object(
        &self,
        request: Request<wire::ReadObjectRequest>,
    ) -> Result<Response<Self::ReadObjectStream>, Status> {
        let request = request.into_inner();
        let is_stalled = self.0.stalled && request.offset == 0;
        let messages = tokio_stream::iter(Server::read_object(*self, &request)?).map(Ok);
        Ok(Response::new(if is_stalled {
            Box::pin(messages.take(3).chain(tokio_stream::pending()))
        } else {
            Box::pin(messages)
        }))
    }

    type FetchStreamStream = Pin<Box<dyn Stream<Item = Result<wire::FetchStreamResponse, Status>> + Send>>;

    async fn fetch_stream(
        &self,
        request: Request<Streaming<wire::FetchStreamRequest>>,
    ) -> Result<Response<Self::FetchStreamStream>, Status> {
        let server = *self;
        let responses = request.into_inner().map(move |request| {
            let wire::FetchStreamRequest { id, request, .. } = request?;
            let response = server.of_stream(request).unwrap_or_else(|status| {
                let (code, message) = (status.code().into(), status.message().to_owned());
                StreamResponse::Status(ringfetch_proto::RpcStatus { code, message, details: Vec::new() })
            });
            Ok(wire::FetchStreamResponse { id, response: Some(response) })
        });
        // Not reached by a stream that breaks: its last response is an error.
        let end = tokio_stream::iter(std::iter::from_fn(move || {
            server.0.streams_ended?.fetch_add(1, Ordering::Relaxed);
            None
        }));
        Ok(Response::new(Box::pin(responses.chain(end))))
    }
}

service! {
    DatasetService {
        list_datasets(ListDatasetsRequest) -> ListDatasetsResponse;
        get_dataset(GetDatasetRequest) -> GetDatasetResponse;
        list_objects(ListObjectsRequest) -> ListObjectsResponse;
    }
}

service! {
    AdminService {
        get_status(GetStatusRequest) -> GetStatusResponse;
        set_log_level(SetLogLevelRequest) -> SetLogLevelResponse;
        set_backend(SetBackendRequest) -> SetBackendResponse;
        clear_backend(ClearBackendRequest) -> ClearBackendResponse;
        reload(ReloadRequest) -> ReloadResponse;
    }
}

impl Server {
    fn fetch_blocks(self, request: wire::FetchBlocksRequest) -> Result<wire::FetchBlocksResponse, Status> {
        self.check(&request.if_match)?;
        let (lengths, errors, data) = self.batch(
            request.fail_fast,
            request.indices.iter().map(|index| self.block(*index)),
        )?;
        let (block_bytes, data) = (512, data.into());
        Ok(wire::FetchBlocksResponse {
            block_bytes,
            lengths,
            errors,
            etag: self.version(true),
            data,
        })
    }

    fn fetch_vectors(self, request: wire::FetchVectorsRequest) -> Result<wire::FetchVectorsResponse, Status> {
        self.check(&request.if_match)?;
        let (lengths, errors, data) =
            self.batch(request.fail_fast, request.ids.iter().map(|id| Self::vector(*id)))?;
        let (dim, dtype, data) = (24, wire::Dtype::F16.into(), data.into());
        Ok(wire::FetchVectorsResponse {
            dim,
            dtype,
            lengths,
            errors,
            etag: self.version(true),
            data,
        })
    }

    fn fetch_ranges(self, request: wire::FetchRangesRequest) -> Result<wire::FetchRangesResponse, Status> {
        if request.dataset == REPLACED {
            let etag = format!("v{}", request.offsets[0]);
            if ![&etag, ""].contains(&request.if_match.as_str()) {
                return Err(Status::failed_precondition("it was replaced"));
            }
            let lengths = request.lengths.iter();
            let lengths: Vec<u32> = lengths.map(|length| u32::try_from(*length).unwrap()).collect();
            return Ok(wire::FetchRangesResponse {
                data: vec![0; lengths.iter().sum::<u32>() as usize].into(),
                lengths,
                etag,
                ..Default::default()
            });
        }
        self.check(&request.if_match)?;
        let ranges = request.offsets.iter().zip(&request.lengths);
        let (lengths, errors, data) = self.batch(
            request.fail_fast,
            ranges.map(|(offset, length)| self.range(*offset, *length)),
        )?;
        let data = data.into();
        Ok(wire::FetchRangesResponse {
            lengths,
            errors,
            etag: self.version(true),
            data,
        })
    }

    fn fetch_objects(self, request: wire::FetchObjectsRequest) -> Result<wire::FetchObjectsResponse, Status> {
        let at = |list: &[u64], item: usize| list.get(item).copied().unwrap_or(0);
        let object = |(item, name): (usize, &String)| {
            Self::object(name, at(&request.offsets, item), at(&request.lengths, item))
        };
        let (lengths, errors, data) =
            self.batch(request.fail_fast, request.names.iter().enumerate().map(object))?;
        let version = |item| self.version(at(&request.offsets, item) > 0);
        let (etags, data) = ((0..request.names.len()).map(version).collect(), data.into());
        Ok(wire::FetchObjectsResponse {
            lengths,
            errors,
            etags,
            data,
        })
    }

    /// In messages that end in the middle of a line of a dump.
    fn read_object(self, request: &wire::ReadObjectRequest) -> Result<Vec<wire::ReadObjectResponse>, Status> {
        let of = |offset, length| {
            let item = Self::object(&request.name, offset, length);
            item.map_err(|(code, message)| Status::new(code, message))
        };
        self.batch(true, std::iter::once(Ok(Vec::new())))?;
        let (whole, bytes) = (of(0, 0)?, of(request.offset, request.length)?);
        let mut messages = vec![wire::ReadObjectResponse {
            etag: self.version(false),
            object_length_bytes: whole.len() as u64,
            offset: request.offset,
            ..Default::default()
        }];
        let mut offset = request.offset;
        for piece in bytes.chunks(100_003) {
            messages.push(wire::ReadObjectResponse {
                offset,
                data: piece.to_vec().into(),
                ..Default::default()
            });
            offset += piece.len() as u64;
        }
        Ok(messages)
    }

    /// The score of a vector is half its id, so the largest id is the best. Vector 7 has none.
    fn score_vectors(self, request: wire::ScoreVectorsRequest) -> Result<wire::ScoreVectorsResponse, Status> {
        let query = request.queries.first();
        let query = query.filter(|query| query.vector.len() == 24);
        let query = query.ok_or_else(|| Status::invalid_argument("queries[0].vector: not 24 elements"))?;
        let (_, errors, _) = self.batch(request.fail_fast, query.ids.iter().map(|id| Self::vector(*id)))?;
        let mut ids = query.ids.clone();
        ids.sort_unstable_by(|one, other| other.cmp(one));
        let unscored = ids.iter().filter(|id| **id == 7).count();
        ids.retain(|id| *id < VECTORS && *id != 7);
        ids.truncate(request.limit as usize);
        let scores = ids
            .iter()
            .map(|id| f64::from(u32::try_from(*id).unwrap()) / 2.0)
            .collect();
        let results = vec![wire::ScoreResult {
            scores,
            ids,
            unscored: u32::try_from(unscored).unwrap(),
            errors,
        }];
        Ok(wire::ScoreVectorsResponse {
            results,
            etag: "v1".to_owned(),
        })
    }

    fn of_stream(self, request: Option<StreamRequest>) -> Result<StreamResponse, Status> {
        match request {
            Some(StreamRequest::Blocks(blocks)) => self.fetch_blocks(blocks).map(StreamResponse::Blocks),
            Some(StreamRequest::Vectors(vectors)) => self.fetch_vectors(vectors).map(StreamResponse::Vectors),
            Some(StreamRequest::Ranges(ranges)) => self.fetch_ranges(ranges).map(StreamResponse::Ranges),
            Some(StreamRequest::Objects(objects)) => self.fetch_objects(objects).map(StreamResponse::Objects),
            Some(StreamRequest::Scores(_) | StreamRequest::Cancel(_)) | None => {
                Err(Status::invalid_argument("no request"))
            }
        }
    }

    fn list_datasets(self, _: wire::ListDatasetsRequest) -> Result<wire::ListDatasetsResponse, Status> {
        Ok(wire::ListDatasetsResponse {
            datasets: datasets(),
            ..Default::default()
        })
    }

    fn get_dataset(self, request: wire::GetDatasetRequest) -> Result<wire::GetDatasetResponse, Status> {
        let name = request.name;
        let replaced = wire::Dataset {
            name: REPLACED.to_owned(),
            kind: wire::Kind::Blocks.into(),
            length_bytes: 5 << 20,
            ..Default::default()
        };
        let mut all = datasets().into_iter().chain([replaced]);
        let dataset = all.find(|dataset| dataset.name == name);
        let missing = || Status::not_found(format!("dataset: there is no dataset {name:?}"));
        let mut dataset = dataset.ok_or_else(missing)?;
        dataset.etag = self.version(false);
        let dataset = Some(dataset);
        Ok(wire::GetDatasetResponse { dataset })
    }

    /// A dataset as HTTP describes it.
    pub(crate) fn described(self, name: &str) -> Option<Value> {
        let name = name.to_owned();
        let dataset = self.get_dataset(wire::GetDatasetRequest { name }).ok()?.dataset?;
        Some(serde_json::to_value(ringfetch_client::Dataset::from(dataset)).unwrap())
    }

    /// The page of objects of this query, as HTTP has it.
    pub(crate) fn objects(self, query: &str) -> Value {
        let page_token = query.trim_start_matches("?page_token=").to_owned();
        let request = wire::ListObjectsRequest {
            page_token,
            ..Default::default()
        };
        let page = self.list_objects(request).unwrap();
        let objects = page.objects.iter().map(|object| json!({ "name": object.name }));
        let objects: Vec<Value> = objects.collect();
        match page.next_page_token.as_str() {
            "" => json!({ "objects": objects }),
            token => json!({ "objects": objects, "next_page_token": token }),
        }
    }

    /// In pages of 100.
    fn list_objects(self, request: wire::ListObjectsRequest) -> Result<wire::ListObjectsResponse, Status> {
        let first: u64 = request.page_token.parse().unwrap_or(0);
        let end = (first + 100).min(self.0.objects);
        let next_page_token = if end < self.0.objects {
            end.to_string()
        } else {
            String::new()
        };
        let object = |index| {
            let (name, length_bytes) = (pattern::object_name(index), object_length(index));
            wire::ObjectInfo { name, length_bytes }
        };
        let objects = (first..end).map(object).collect();
        Ok(wire::ListObjectsResponse {
            objects,
            next_page_token,
        })
    }
}
