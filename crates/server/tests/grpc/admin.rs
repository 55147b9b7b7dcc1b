//! AdminService on its own router.

use super::served::serve;
use ringfetch_proto::v1;
use ringfetch_proto::v1::admin_service_client::AdminServiceClient;
use ringfetch_server::config::Limits;
use tonic::Code;
use tonic_types::StatusExt as _;

#[tokio::test]
async fn the_status_counts_what_was_read() {
    // Five good blocks and a bad one: the status has six reads, one error, a latency, the backend and the
    // datasets.
    let served = serve(Limits::default());
    let request = v1::FetchBlocksRequest {
        dataset: "blocks".into(),
        indices: vec![0, 9, 8, 7, 6, 999],
        fail_fast: false,
        ..Default::default()
    };
    served.fetch().fetch_blocks(request).await.unwrap();
    let mut admin = AdminServiceClient::new(served.admin.clone());
    let status = admin
        .get_status(v1::GetStatusRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!((status.reads_total, status.read_errors_total), (6, 1));
    assert_eq!(
        (status.backend(), status.fallback, status.state.as_str()),
        (v1::Backend::Pread, false, "serving")
    );
    assert_eq!((status.datasets.len(), status.memory_budget_bytes), (3, 64 << 20));
    assert!(!status.shards.is_empty() && !status.version.is_empty());
    assert!(status.latency_p50_us > 0.0 && status.latency_p50_us <= status.latency_p999_us);
    assert!(status.reads_per_second >= 0.0);
}

#[tokio::test]
async fn the_log_filter_is_replaced_or_refused() {
    // A valid filter replaces the configured one; an invalid one is INVALID_ARGUMENT on `filter`.
    let served = serve(Limits::default());
    let mut admin = AdminServiceClient::new(served.admin.clone());
    for filter in ["", "ringfetch=nonsense"] {
        let request = v1::SetLogLevelRequest {
            filter: filter.into(),
        };
        let status = admin.set_log_level(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{filter:?}");
        assert_eq!(
            status.get_details_bad_request().unwrap().field_violations[0].field,
            "filter"
        );
    }
    let refused =
        r#"ringfetch_rpc_requests_total{code="INVALID_ARGUMENT",method="SetLogLevel",transport="grpc"} 2"#;
    assert!(served.scraped(refused));
}

#[tokio::test]
async fn a_daemon_without_a_file_cannot_reload_and_says_so() {
    // The demo has no configuration file: FAILED_PRECONDITION with the remedy, and no reload in the status.
    let served = serve(Limits::default());
    let mut admin = AdminServiceClient::new(served.admin.clone());
    let status = admin.reload(v1::ReloadRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert!(status.message().contains("--config"), "{status:?}");
    assert_eq!(status.get_details_error_info().unwrap().reason, "NO_FILE");
    let state = admin.get_status(v1::GetStatusRequest {}).await.unwrap();
    assert_eq!(state.into_inner().last_reload, None);
}

#[tokio::test]
async fn a_switch_is_made_between_two_reads() {
    // pread, then mmap for one dataset, then its own backend is cleared: each response has the backends
    // before and after.
    let served = serve(Limits::default());
    let mut admin = AdminServiceClient::new(served.admin.clone());
    let request = v1::SetBackendRequest {
        backend: v1::Backend::Mmap.into(),
        dataset: Some("blocks".into()),
    };
    let answer = admin.set_backend(request).await.unwrap().into_inner();
    assert_eq!(
        (answer.previous(), answer.backend()),
        (v1::Backend::Pread, v1::Backend::Mmap)
    );
    let request = v1::ClearBackendRequest {
        dataset: "blocks".into(),
    };
    let answer = admin.clear_backend(request).await.unwrap().into_inner();
    assert_eq!(
        (answer.previous(), answer.backend()),
        (v1::Backend::Mmap, v1::Backend::Pread)
    );
}
