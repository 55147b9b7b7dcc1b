//! DatasetService, health and reflection.

use super::served::serve;
use ringfetch_proto::v1;
use ringfetch_server::config::Limits;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1alpha as alpha;

#[tokio::test]
async fn datasets_describe_themselves() {
    // Three datasets by name: kind, shape and read path of each; an unknown name is NOT_FOUND.
    let served = serve(Limits::default());
    let listed = served
        .datasets()
        .list_datasets(v1::ListDatasetsRequest::default())
        .await
        .unwrap()
        .into_inner()
        .datasets;
    assert_eq!(
        listed.iter().map(|dataset| &dataset.name).collect::<Vec<_>>(),
        ["blocks", "objects", "vectors"]
    );
    let blocks = &listed[0];
    assert_eq!(
        (blocks.kind(), blocks.count, blocks.block_bytes),
        (v1::Kind::Blocks, 50, 1000)
    );
    assert_eq!((blocks.length_bytes, blocks.etag.is_empty()), (50_000, false));
    let shape = listed[2].vectors.as_ref().unwrap();
    assert_eq!(
        (shape.dim, shape.dtype(), shape.layout.as_str()),
        (3, v1::Dtype::F32, "fvecs")
    );
    assert_eq!(shape.vector_bytes, 12);

    let one = v1::GetDatasetRequest {
        name: "vectors".into(),
    };
    let one = served
        .datasets()
        .get_dataset(one)
        .await
        .unwrap()
        .into_inner()
        .dataset;
    assert_eq!(one.as_ref(), Some(&listed[2]));
    let none = v1::GetDatasetRequest { name: "none".into() };
    assert_eq!(
        served.datasets().get_dataset(none).await.unwrap_err().code(),
        Code::NotFound
    );
    let counted = r#"ringfetch_rpc_requests_total{code="NOT_FOUND",method="GetDataset",transport="grpc"} 1"#;
    assert!(served.scraped(counted));
}

#[tokio::test]
async fn objects_are_listed_page_by_page() {
    // Three objects in pages of two: byte order of names, a token on the first page only; blocks cannot be
    // listed.
    let served = serve(Limits::default());
    let mut request = v1::ListObjectsRequest {
        dataset: "objects".into(),
        page_size: 2,
        ..Default::default()
    };
    let first = served
        .datasets()
        .list_objects(request.clone())
        .await
        .unwrap()
        .into_inner();
    let names = |page: &v1::ListObjectsResponse| {
        page.objects
            .iter()
            .map(|object| (object.name.clone(), object.length_bytes))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        names(&first),
        [("deep/two".to_owned(), 6), ("empty".to_owned(), 0)]
    );
    request.page_token = first.next_page_token;
    let second = served
        .datasets()
        .list_objects(request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (names(&second), second.next_page_token.as_str()),
        (vec![("one".to_owned(), 12)], "")
    );

    let blocks = v1::ListObjectsRequest {
        dataset: "blocks".into(),
        ..Default::default()
    };
    assert_eq!(
        served.datasets().list_objects(blocks).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
}

#[tokio::test]
async fn walks_are_bounded_over_all_transports() {
    // Four walks are running, requested by any caller: one more is refused with a hint, and served when one
    // has ended.
    let served = serve(Limits::default());
    let mut walks: Vec<_> = std::iter::from_fn(|| served.fetcher.try_walk()).collect();
    assert_eq!(walks.len(), 4);
    let request = v1::ListObjectsRequest {
        dataset: "objects".into(),
        ..Default::default()
    };
    let refused = served.datasets().list_objects(request.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    walks.pop();
    assert!(served.datasets().list_objects(request).await.is_ok());
}

#[tokio::test]
async fn health_follows_the_lifecycle() {
    // SERVING by name and as a whole; NOT_SERVING once it drains.
    let served = serve(Limits::default());
    let mut health = HealthClient::new(served.router.clone());
    for (drains, expected) in [(false, ServingStatus::Serving), (true, ServingStatus::NotServing)] {
        if drains {
            served.lifecycle.start_draining();
        }
        for service in ["", "ringfetch.v1.FetchService", "ringfetch.v1.DatasetService"] {
            let answer = health
                .check(HealthCheckRequest {
                    service: service.into(),
                })
                .await
                .unwrap();
            assert_eq!(answer.into_inner().status(), expected, "{service:?}");
        }
    }
}

#[tokio::test]
async fn reflection_names_what_the_port_serves() {
    // v1 and v1alpha list the services of this port without the admin service, and know their files.
    let served = serve(Limits::default());
    let ask = |message| ServerReflectionRequest {
        host: String::new(),
        message_request: Some(message),
    };
    let asked = tokio_stream::iter([
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol(
            "ringfetch.v1.FetchService".into(),
        )),
    ]);
    let mut client = ServerReflectionClient::new(served.router.clone());
    let mut answers = client.server_reflection_info(asked).await.unwrap().into_inner();
    let Some(MessageResponse::ListServicesResponse(list)) =
        answers.message().await.unwrap().unwrap().message_response
    else {
        panic!("no list")
    };
    let names = list
        .service
        .into_iter()
        .map(|service| service.name)
        .collect::<Vec<_>>();
    assert!(
        names.contains(&"ringfetch.v1.FetchService".to_owned()),
        "{names:?}"
    );
    assert!(names.contains(&"grpc.health.v1.Health".to_owned()), "{names:?}");
    assert!(
        !names.contains(&"ringfetch.v1.AdminService".to_owned()),
        "{names:?}"
    );
    let file = answers.message().await.unwrap().unwrap().message_response;
    assert!(
        matches!(file, Some(MessageResponse::FileDescriptorResponse(_))),
        "{file:?}"
    );

    let message = alpha::server_reflection_request::MessageRequest::ListServices(String::new());
    let asked = [alpha::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(message),
    }];
    let mut client = alpha::server_reflection_client::ServerReflectionClient::new(served.router.clone());
    let mut answers = client
        .server_reflection_info(tokio_stream::iter(asked))
        .await
        .unwrap()
        .into_inner();
    assert!(answers.message().await.unwrap().is_some());
}
