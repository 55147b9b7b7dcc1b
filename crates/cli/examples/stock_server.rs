//! What one gets from tonic without further work: the generated service, its default codec and settings, two worker
//! threads, all data in memory. The peer of the warm mmap row (docs/BENCHMARKING.md): same messages, same client.
//!
//! Serves FetchBlocks of one dataset named `data`, and GetDataset, which clients ask first; the rest is UNIMPLEMENTED.
//! Deliberately absent: limits, metrics, deadlines, anything that would cost it time.
#![forbid(unsafe_code)]

use bytes::BytesMut;
use ringfetch_proto::v1::dataset_service_server::{DatasetService, DatasetServiceServer};
use ringfetch_proto::v1::fetch_service_server::{FetchService, FetchServiceServer};
use ringfetch_proto::v1::{
    Dataset, FetchBlocksRequest, FetchBlocksResponse, FetchObjectsRequest, FetchObjectsResponse,
    FetchRangesRequest, FetchRangesResponse, FetchStreamRequest, FetchStreamResponse, FetchVectorsRequest,
    FetchVectorsResponse, GetDatasetRequest, GetDatasetResponse, Kind, ListDatasetsRequest,
    ListDatasetsResponse, ListObjectsRequest, ListObjectsResponse, ReadObjectRequest, ReadObjectResponse,
    ScoreVectorsRequest, ScoreVectorsResponse,
};
use std::io::Write as _;
use std::sync::Arc;
use tonic::{Request, Response, Status, Streaming};

const BLOCK_BYTES: usize = 4096;
const NAME: &str = "data";

/// The data, shared by both services.
#[derive(Clone)]
struct Memory {
    data: Arc<Vec<u8>>,
}

impl Memory {
    fn blocks(&self) -> u64 {
        (self.data.len() / BLOCK_BYTES) as u64
    }

    /// The block's bytes; `None`: there is no such block.
    fn block(&self, index: u64) -> Option<&[u8]> {
        let start = usize::try_from(index).ok()?.checked_mul(BLOCK_BYTES)?;
        self.data.get(start..start.checked_add(BLOCK_BYTES)?)
    }
}

#[tonic::async_trait]
impl FetchService for Memory {
    type FetchStreamStream = futures_util::stream::Empty<Result<FetchStreamResponse, Status>>;

    async fn fetch_blocks(
        &self,
        request: Request<FetchBlocksRequest>,
    ) -> Result<Response<FetchBlocksResponse>, Status> {
        let request = request.into_inner();
        if request.dataset != NAME {
            return Err(Status::not_found("the only dataset is `data`"));
        }
        let mut data = BytesMut::with_capacity(request.indices.len() * BLOCK_BYTES);
        for index in request.indices {
            data.extend_from_slice(
                self.block(index)
                    .ok_or_else(|| Status::out_of_range("no such block"))?,
            );
        }
        Ok(Response::new(FetchBlocksResponse {
            block_bytes: 4096,
            lengths: Vec::new(),
            errors: Vec::new(),
            data: data.freeze(),
            ..Default::default()
        }))
    }

    async fn fetch_vectors(
        &self,
        _: Request<FetchVectorsRequest>,
    ) -> Result<Response<FetchVectorsResponse>, Status> {
        Err(not_served())
    }

    async fn score_vectors(
        &self,
        _: Request<ScoreVectorsRequest>,
    ) -> Result<Response<ScoreVectorsResponse>, Status> {
        Err(not_served())
    }

    async fn fetch_ranges(
        &self,
        _: Request<FetchRangesRequest>,
    ) -> Result<Response<FetchRangesResponse>, Status> {
        Err(not_served())
    }

    async fn fetch_objects(
        &self,
        _: Request<FetchObjectsRequest>,
    ) -> Result<Response<FetchObjectsResponse>, Status> {
        Err(not_served())
    }

    async fn fetch_stream(
        &self,
        _: Request<Streaming<FetchStreamRequest>>,
    ) -> Result<Response<Self::FetchStreamStream>, Status> {
        Err(not_served())
    }

    type ReadObjectStream = tokio_stream::Empty<Result<ReadObjectResponse, Status>>;

    async fn read_object(
        &self,
        _: Request<ReadObjectRequest>,
    ) -> Result<Response<Self::ReadObjectStream>, Status> {
        Err(not_served())
    }
}

#[tonic::async_trait]
impl DatasetService for Memory {
    async fn list_datasets(
        &self,
        _: Request<ListDatasetsRequest>,
    ) -> Result<Response<ListDatasetsResponse>, Status> {
        Err(not_served())
    }

    async fn get_dataset(
        &self,
        _: Request<GetDatasetRequest>,
    ) -> Result<Response<GetDatasetResponse>, Status> {
        let dataset = Dataset {
            name: NAME.to_owned(),
            kind: Kind::Blocks.into(),
            length_bytes: self.blocks() * BLOCK_BYTES as u64,
            count: self.blocks(),
            block_bytes: 4096,
            ..Dataset::default()
        };
        Ok(Response::new(GetDatasetResponse {
            dataset: Some(dataset),
        }))
    }

    async fn list_objects(
        &self,
        _: Request<ListObjectsRequest>,
    ) -> Result<Response<ListObjectsResponse>, Status> {
        Err(not_served())
    }
}

fn not_served() -> Status {
    Status::unimplemented("the stock server has FetchBlocks and GetDataset only")
}

fn main() -> anyhow::Result<()> {
    let path = std::env::args()
        .nth(1)
        .ok_or_else(|| anyhow::anyhow!("usage: stock_server FILE"))?;
    let memory = Memory {
        data: Arc::new(std::fs::read(path)?),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        // TCP_NODELAY is tonic's own default, too.
        let incoming =
            tonic::transport::server::TcpIncoming::from(tokio::net::TcpListener::from_std(listener)?)
                .with_nodelay(Some(true));
        let mut out = std::io::stdout();
        writeln!(out, "{address}")?;
        out.flush()?;
        tonic::transport::Server::builder()
            .add_service(FetchServiceServer::new(memory.clone()))
            .add_service(DatasetServiceServer::new(memory))
            .serve_with_incoming(incoming)
            .await?;
        anyhow::Ok(())
    })
}
