//! The same services over HTTP/2 on loopback: what only a real connection shows.

use super::served::{Served, serve};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_service_client::FetchServiceClient;
use ringfetch_proto::v1::fetch_stream_request::Request as Ask;
use ringfetch_server::config::Limits;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

/// Serves `served` on its own port.
async fn listen(served: &Served) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = TowerToHyperService::new(served.router.clone());
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let service = service.clone();
            tokio::spawn(async move {
                let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new()).http2_only();
                // How the connection ends is up to the client.
                let _ended = builder.serve_connection(TokioIo::new(socket), service).await;
            });
        }
    });
    address
}

/// A client over one connection, with HTTP/2's default windows (64 KiB).
async fn connect_to(address: SocketAddr) -> FetchServiceClient<Channel> {
    let channel = Endpoint::from_shared(format!("http://{address}"))
        .unwrap()
        .connect()
        .await
        .unwrap();
    FetchServiceClient::new(channel)
        .max_decoding_message_size(64 << 20)
        .max_encoding_message_size(64 << 20)
}

async fn connect(served: &Served) -> FetchServiceClient<Channel> {
    connect_to(listen(served).await).await
}

fn all_blocks() -> v1::FetchBlocksRequest {
    v1::FetchBlocksRequest {
        dataset: "blocks".into(),
        indices: (0..50).collect(),
        fail_fast: false,
        ..Default::default()
    }
}

#[tokio::test]
async fn bytes_and_statuses_cross_a_connection() {
    // A good call, a failed one and another good one on one connection: data, status, data.
    let served = serve(Limits::default());
    let mut client = connect(&served).await;
    for _ in 0..2 {
        let answer = client.fetch_blocks(all_blocks()).await.unwrap().into_inner();
        assert_eq!(answer.data, served.blocks);
        let empty = v1::FetchBlocksRequest {
            indices: Vec::new(),
            ..all_blocks()
        };
        assert_eq!(
            client.fetch_blocks(empty).await.unwrap_err().code(),
            Code::InvalidArgument
        );
    }
}

#[tokio::test]
async fn an_oversize_request_is_refused_by_name_while_it_is_sent() {
    // A message of 8 MB with a limit of 1 KiB: the status arrives although the server read only its
    // beginning, and the connection continues.
    let served = serve(Limits {
        request_bytes: 1024,
        ..Limits::default()
    });
    let mut client = connect(&served).await;
    let long = v1::FetchBlocksRequest {
        indices: vec![u64::MAX; 800_000],
        ..all_blocks()
    };
    let status = client.fetch_blocks(long).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(
        status.message().contains("limits.request_bytes"),
        "{}",
        status.message()
    );
    assert_eq!(
        client.fetch_blocks(all_blocks()).await.unwrap().into_inner().data,
        served.blocks
    );
}

#[tokio::test]
async fn a_client_that_does_not_read_stops_its_own_stream() {
    // 2000 requests of 50 kB each, and the client does not read: the server starts those that fit in the
    // windows and the limit in flight, a small part of them; other calls continue; once the client reads, all
    // are answered.
    const REQUESTS: u64 = 2000;
    let served = serve(Limits {
        stream_requests_in_flight: 4,
        ..Limits::default()
    });
    let mut client = connect(&served).await;
    let requests = (0..REQUESTS).map(|id| v1::FetchStreamRequest {
        id,
        request: Some(Ask::Blocks(all_blocks())),
        deadline_ms: 0,
    });
    let mut answers = client
        .fetch_stream(tokio_stream::iter(requests))
        .await
        .unwrap()
        .into_inner();
    let reads = || served.fetcher.engine().totals().reads / 50;
    let deadline = Instant::now() + Duration::from_secs(20);
    while reads() < 4 {
        assert!(Instant::now() < deadline, "the stream never began");
        tokio::task::yield_now().await;
    }
    // Calls on another connection take long enough that a server which did not stop would show.
    let mut other = connect(&served).await;
    for _ in 0..50 {
        assert_eq!(
            other.fetch_blocks(all_blocks()).await.unwrap().into_inner().data,
            served.blocks
        );
    }
    assert!(
        reads() - 50 < REQUESTS / 10,
        "{} requests were read for nobody",
        reads() - 50
    );
    let mut answered = 0;
    while let Some(answer) = answers.message().await.unwrap() {
        assert!(matches!(
            answer.response,
            Some(v1::fetch_stream_response::Response::Blocks(_))
        ));
        answered += 1;
    }
    assert_eq!(answered, REQUESTS);
}

#[tokio::test]
async fn a_client_that_hangs_up_is_counted_as_cancelled() {
    // A client with an open stream disconnects: the call is counted once, as CANCELLED.
    let served = serve(Limits::default());
    let address = listen(&served).await;
    // The client's thread has its own runtime, which drops the connection when it ends.
    let client = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            connect_to(address)
                .await
                .fetch_stream(tokio_stream::pending())
                .await
                .unwrap()
        });
    });
    let line = r#"ringfetch_rpc_requests_total{code="CANCELLED",method="FetchStream",transport="grpc"} 1"#;
    served.await_scraped(line).await;
    client.join().unwrap();
}
