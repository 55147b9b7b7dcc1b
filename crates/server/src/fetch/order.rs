//! Tests the order of the checks that can refuse a request.

use super::tests::serving;
use super::*;
use crate::access::tests::{PrincipalsFile, User, headers_of, line};
use crate::access::{Need, PrincipalLimits};
use ringfetch_engine::config::DirectIo;
use ringfetch_engine::dataset::{DatasetSpec, KindSpec};

const LIMITS: PrincipalLimits = PrincipalLimits {
    requests: 1,
    memory_bytes: 64 << 10,
    requests_per_s: 1,
    bytes_per_s: 64 << 10,
    weight: 1,
};

#[tokio::test]
async fn a_request_is_refused_by_the_first_check_that_it_fails() {
    // Scenario: a request that fails every check, and whose faults are corrected one after the other; then the daemon drains.
    // Expectation: the refusals come in the order of ADR 0014; a refused response is charged to no rate.
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("data"), [7; 128 << 10]).unwrap();
    let spec = DatasetSpec::new(
        "blocks",
        directory.path().join("data"),
        KindSpec::blocks(4096),
        DirectIo::Off,
    );
    let fetcher = serving(vec![Arc::new(Dataset::open(&spec).unwrap())], Limits::default());
    let access = PrincipalsFile::new(&line("a", "blocks,absent")).access();
    let connection = fetcher.callers().connect("192.0.2.1".parse().unwrap(), u64::MAX);
    let connection = access
        .admit(
            &headers_of("a"),
            Need::Known,
            &connection,
            &Arc::new(User::default()),
        )
        .unwrap();
    let principal = connection.principal().unwrap();
    principal.set_limits(LIMITS);
    principal.take_request().unwrap();
    principal.take_bytes(1 << 40).unwrap();
    let in_flight = connection.shares().requests.charge(1).unwrap();
    let memory = connection.account().memory().charge(64 << 10).unwrap();
    let now = Instant::now();
    let mut context = RequestContext {
        connection: Some(Arc::clone(&connection)),
        arrived: Some(now),
        deadline: Some(now),
        ..RequestContext::default()
    };
    let (offsets, lengths) = ([0, 0], [64 << 10, 4096]);
    let unequal = Items::Ranges {
        offsets: &offsets,
        lengths: &lengths[..1],
    };
    let long = Items::Ranges {
        offsets: &offsets,
        lengths: &lengths,
    };
    let refused = async |dataset, version, items, context: &RequestContext| {
        let result = fetcher.fetch(dataset, version, &items, context).await;
        result.map(drop).unwrap_err()
    };
    let rate = |error: FetchError| {
        let FetchError::OverRate { rate, .. } = &error else {
            panic!("{error}");
        };
        *rate
    };

    let error = refused("hidden", "other", unequal, &context).await;
    assert_eq!(rate(error), RateLimit::Requests);
    let no_rate = PrincipalLimits {
        requests_per_s: PrincipalLimits::NONE.requests_per_s,
        ..LIMITS
    };
    principal.set_limits(no_rate);
    let error = refused("hidden", "other", unequal, &context).await;
    assert!(matches!(error, FetchError::Forbidden { .. }), "{error}");
    let error = refused("absent", "other", unequal, &context).await;
    assert!(matches!(error, FetchError::DatasetNotFound { .. }), "{error}");
    let error = refused("blocks", "other", Items::Vectors(&[]), &context).await;
    assert!(matches!(error, FetchError::WrongKind { .. }), "{error}");
    let error = refused("blocks", "other", unequal, &context).await;
    assert!(
        matches!(error, FetchError::Read(ReadError::VersionMismatch { .. })),
        "{error}"
    );
    let error = refused("blocks", "", unequal, &context).await;
    assert!(matches!(error, FetchError::ListsDiffer { .. }), "{error}");
    let error = refused("blocks", "", long, &context).await;
    assert_eq!(error, FetchError::PrincipalRequests { max: 1 });
    drop(in_flight);
    let error = refused("blocks", "", long, &context).await;
    assert_eq!(error, FetchError::Read(ReadError::DeadlineExceeded));
    context.deadline = None;
    let error = refused("blocks", "", long, &context).await;
    assert!(
        matches!(error, FetchError::Read(ReadError::ResponseTooLarge { .. })),
        "{error}"
    );
    let error = refused("blocks", "", Items::Blocks(&[1]), &context).await;
    assert_eq!(rate(error), RateLimit::Bytes);
    principal.give_back_bytes(1 << 40);
    for _ in 0..100 {
        let error = refused("blocks", "", Items::Blocks(&[1]), &context).await;
        let resource = Resource::PrincipalMemory;
        assert_eq!(error, FetchError::Read(ReadError::Overloaded { resource }));
    }
    drop(memory);
    fetcher
        .fetch("blocks", "", &Items::Blocks(&[1]), &context)
        .await
        .unwrap();

    principal.set_limits(LIMITS);
    principal.take_request().unwrap();
    fetcher.start_draining();
    let error = refused("hidden", "other", unequal, &context).await;
    assert_eq!(error, FetchError::Read(ReadError::Draining));
}
