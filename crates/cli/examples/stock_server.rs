//! What tonic offers without further work: the generated service, its default codec and settings, two worker
//! threads, all data in memory. The peer of the warm mmap row (docs/BENCHMARKING.md): same messages, same
//! client.
//!
//! Serves FetchBlocks of one dataset named `data`, and GetDataset, which clients call first; the rest is
//! UNIMPLEMENTED. It has no limits, metrics or deadlines, which would cost it time.
#![forbid(unsafe_code)]

use bytes::BytesMut;
use ringfetch_proto::v1 as wire;
use ringfetch_proto::v1::dataset_service_server::{DatasetService, DatasetServiceServer};
use ringfetch_proto::v1::fetch_service_server::{FetchService, FetchServiceServer};
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

/// A service with some methods implemented and the others unimplemented.
macro_rules! service {
    ($service:ident { $($others:tt)* } not served: $($name:ident($request:ty) -> $response:ty;)*) => {
        #[tonic::async_trait]
        impl $service for Memory {
            $($others)*
            $(async fn $name(&self, _: Request<$request>) -> Result<Response<$response>, Status> {
                Err(Status::unimplemented("the stock server has FetchBlocks and GetDataset only"))
            })*
        }
    };
}

service! {
    FetchService {
        type FetchStreamStream = futures_util::stream::Empty<Result<wire::FetchStreamResponse, Status>>;
        type ReadObjectStream = futures_util::stream::Empty<Result<wire::ReadObjectResponse, Status>>;

        async fn fetch_blocks(
            &self,
            request: Request<wire::FetchBlocksRequest>,
        ) -> Result<Response<wire::FetchBlocksResponse>, Status> {
            let request = request.into_inner();
            if request.dataset != NAME {
                return Err(Status::not_found("the only dataset is `data`"));
            }
            let mut data = BytesMut::with_capacity(request.indices.len() * BLOCK_BYTES);
            for index in request.indices {
                let block = self.block(index).ok_or_else(|| Status::out_of_range("no such block"))?;
                data.extend_from_slice(block);
            }
            let (block_bytes, data) = (4096, data.freeze());
            Ok(Response::new(wire::FetchBlocksResponse { block_bytes, data, ..Default::default() }))
        }
    }
    not served:
    fetch_vectors(wire::FetchVectorsRequest) -> wire::FetchVectorsResponse;
    score_vectors(wire::ScoreVectorsRequest) -> wire::ScoreVectorsResponse;
    fetch_ranges(wire::FetchRangesRequest) -> wire::FetchRangesResponse;
    fetch_objects(wire::FetchObjectsRequest) -> wire::FetchObjectsResponse;
    fetch_stream(Streaming<wire::FetchStreamRequest>) -> Self::FetchStreamStream;
    read_object(wire::ReadObjectRequest) -> Self::ReadObjectStream;
}

service! {
    DatasetService {
        async fn get_dataset(
            &self,
            _: Request<wire::GetDatasetRequest>,
        ) -> Result<Response<wire::GetDatasetResponse>, Status> {
            let dataset = Some(wire::Dataset {
                name: NAME.to_owned(),
                kind: wire::Kind::Blocks.into(),
                length_bytes: self.blocks() * BLOCK_BYTES as u64,
                count: self.blocks(),
                block_bytes: 4096,
                ..Default::default()
            });
            Ok(Response::new(wire::GetDatasetResponse { dataset }))
        }
    }
    not served:
    list_datasets(wire::ListDatasetsRequest) -> wire::ListDatasetsResponse;
    list_objects(wire::ListObjectsRequest) -> wire::ListObjectsResponse;
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
