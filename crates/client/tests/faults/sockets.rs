//! Several servers on real sockets: balance, failover, headers, and the retry budget.

use crate::fake::{Fake, blocks};
use ringfetch_client::{Client, Code, Error, RetryBudget, RetryPolicy};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::oneshot;
use tonic::Status;

/// Serves FetchBlocks and counts what it answered.
struct Server {
    url: String,
    address: std::net::SocketAddr,
    answered: Arc<AtomicUsize>,
    end: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn start(address: std::net::SocketAddr) -> Self {
        let answered = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&answered);
        let fake = Fake::new().on_blocks(move |_, request| {
            count.fetch_add(1, Ordering::SeqCst);
            async move { Ok(blocks(&request.get_ref().indices)) }
        });
        Self::serve(fake, address, answered).await
    }

    async fn serve(fake: Fake, address: std::net::SocketAddr, answered: Arc<AtomicUsize>) -> Self {
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (end, ended) = oneshot::channel();
        Self {
            url: format!("http://{address}"),
            address,
            answered,
            end,
            task: tokio::spawn(fake.serve(listener, ended)),
        }
    }

    /// Closes the listener and every connection.
    async fn stop(self) -> std::net::SocketAddr {
        self.end.send(()).unwrap();
        self.task.await.unwrap();
        self.address
    }

    fn answered(&self) -> usize {
        self.answered.load(Ordering::SeqCst)
    }
}

fn any() -> std::net::SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

/// At an address of a test that counts on nobody else to get its ports.
fn own(test: u8) -> std::net::SocketAddr {
    ([127, 83, 5, test], 0).into()
}

async fn fetch(client: &Client, calls: usize) {
    for call in 0..calls {
        client
            .fetch_blocks("d", &[1])
            .await
            .unwrap_or_else(|error| panic!("call {call}: {error}"));
    }
}

#[tokio::test]
async fn calls_are_spread_over_all_servers() {
    // Scenario: two servers, 20 calls one after another.
    // Expected: ten each.
    let (a, b) = (Server::start(any()).await, Server::start(any()).await);
    let client = Client::builder(&a.url).endpoint(&b.url).connect().await.unwrap();
    fetch(&client, 20).await;
    assert_eq!((a.answered(), b.answered()), (10, 10));
}

#[tokio::test]
async fn a_server_that_goes_away_costs_no_call_and_is_used_again() {
    // Scenario: two servers, one of which stops and later returns; then both stop. Expected: every call is
    // answered, even the one whose connection has just broken; the returned server answers again; a transport
    // error when none is left.
    let (a, b) = (Server::start(own(1)).await, Server::start(own(1)).await);
    // Few attempts: the last one of a call that fails must not be at its deadline.
    let mut retry = RetryPolicy::default();
    retry.attempts_max = 3;
    let builder = Client::builder(&a.url).endpoint(&b.url).retry(retry);
    let client = builder.connect().await.unwrap();
    fetch(&client, 4).await;
    let address = a.stop().await;
    fetch(&client, 20).await;
    assert!(b.answered() >= 20);
    let a = Server::start(address).await;
    // It is skipped for a second at most.
    let again = async {
        while a.answered() == 0 {
            fetch(&client, 1).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), again)
        .await
        .unwrap();
    a.stop().await;
    b.stop().await;
    let error = client.fetch_blocks("d", &[1]).await.unwrap_err();
    assert!(matches!(error, Error::Transport { .. }), "{error:?}");
}

#[tokio::test]
async fn connecting_needs_one_server_of_several() {
    // Scenario: an address without a listener, alone and next to a server. Expected: a transport error; calls
    // without a retry.
    let gone = Server::start(own(2)).await.stop().await;
    let gone = format!("http://{gone}");
    let error = Client::builder(&gone).connect().await.unwrap_err();
    assert!(matches!(error, Error::Transport { .. }), "{error:?}");
    let b = Server::start(any()).await;
    let builder = Client::builder(&gone).endpoint(&b.url).retry(RetryPolicy::none());
    fetch(&builder.connect().await.unwrap(), 10).await;
    assert_eq!(b.answered(), 10);
}

#[tokio::test]
async fn a_listener_that_says_nothing_is_no_server() {
    // Scenario: a port whose connections are accepted and never answered, alone and next to a server.
    // Expected: a transport error after the time for connecting; calls without a retry.
    let silent = tokio::net::TcpListener::bind(any()).await.unwrap();
    let silent = Client::builder(format!("http://{}", silent.local_addr().unwrap()));
    let silent = silent.connect_timeout(Duration::from_secs(1));
    let error = silent.clone().connect().await.unwrap_err();
    assert!(matches!(error, Error::Transport { .. }), "{error:?}");
    let b = Server::start(any()).await;
    let builder = silent.endpoint(&b.url).retry(RetryPolicy::none());
    fetch(&builder.connect().await.unwrap(), 10).await;
    assert_eq!(b.answered(), 10);
}

#[tokio::test]
async fn a_retry_goes_to_another_server() {
    // Scenario: a draining server next to one that serves; more calls than the budget has retries. Expected: all are
    // answered by the other one; each call makes at most one attempt at the first.
    let refused = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&refused);
    let draining = Fake::new().on_blocks(move |_, _| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Err(Status::unavailable("draining")) }
    });
    let a = Server::serve(draining, any(), Arc::default()).await;
    let b = Server::start(any()).await;
    let client = Client::builder(&a.url).endpoint(&b.url).connect().await.unwrap();
    const CALLS: usize = 2000;
    fetch(&client, CALLS).await;
    assert_eq!(b.answered(), CALLS);
    assert!(
        (1..=CALLS).contains(&refused.load(Ordering::SeqCst)),
        "{refused:?}"
    );
}

/// The URL of a server that hangs up at the first request of each connection.
async fn hangs_up() -> String {
    let listener = tokio::net::TcpListener::bind(any()).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(socket).await.unwrap();
                drop(connection.accept().await);
            });
        }
    });
    url
}

#[tokio::test]
async fn a_server_that_ends_streams_does_not_get_them_all() {
    // Scenario: a server that serves streams, and one that ends each: with UNAVAILABLE, as if it were over, by hanging up.
    // While a stream to the former is open, 20 more, each for a request. Expected: hardly any fails, although the latter is
    // the less busy.
    let ends = |status: Option<Status>| {
        let fake = Fake::new().on_stream(move |mut requests, answers| {
            let status = status.clone();
            async move {
                drop(requests.message().await);
                if let Some(status) = status {
                    answers.send(Err(status)).unwrap();
                }
            }
        });
        Server::serve(fake, any(), Arc::default())
    };
    let serves = Server::serve(Fake::new(), any(), Arc::default()).await;
    let (unavailable, over) = (
        ends(Some(Status::unavailable("draining"))).await,
        ends(None).await,
    );
    for ends in [unavailable.url, over.url, hangs_up().await] {
        let client = Client::builder(&ends)
            .endpoint(&serves.url)
            .connect()
            .await
            .unwrap();
        let kept = loop {
            let stream = client.stream();
            if stream.fetch_blocks("d", &[1]).await.is_ok() {
                break stream;
            }
        };
        let mut failed = 0;
        for _ in 0..20 {
            failed += usize::from(client.stream().fetch_blocks("d", &[1]).await.is_err());
        }
        assert!(failed <= 3, "{ends}: {failed}");
        kept.fetch_blocks("d", &[1]).await.unwrap();
    }
}

#[tokio::test]
async fn a_server_that_breaks_connections_does_not_get_all_calls() {
    // Scenario: a server that hangs up at each call, next to one that serves and has a call in flight; 20 calls without
    // retries. Expected: hardly any fails, although the former is the less busy.
    let (arrive, mut arrived) = tokio::sync::mpsc::unbounded_channel();
    let serves = Fake::new().on_blocks(move |_, request| {
        let arrive = arrive.clone();
        async move {
            if request.get_ref().indices == [0] {
                arrive.send(()).unwrap();
                std::future::pending::<()>().await;
            }
            Ok(blocks(&request.get_ref().indices))
        }
    });
    let serves = Server::serve(serves, any(), Arc::default()).await;
    let builder = Client::builder(hangs_up().await)
        .endpoint(&serves.url)
        .retry(RetryPolicy::none());
    let client = builder.connect().await.unwrap();
    let mut kept = Box::pin(client.fetch_blocks("d", &[0]));
    loop {
        tokio::select! {
            _ = arrived.recv() => break,
            _ = &mut kept => kept.set(client.fetch_blocks("d", &[0])),
        }
    }
    let mut failed = 0;
    for _ in 0..20 {
        failed += usize::from(client.fetch_blocks("d", &[1]).await.is_err());
    }
    assert!(failed <= 3, "{failed}");
}

#[tokio::test]
async fn metadata_reaches_the_server_on_calls_and_streams() {
    // Scenario: a header for all calls and one for some, on a call and on a stream's opening call. Expected:
    // the server sees them, and the user agent.
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let note = Arc::clone(&seen);
    let fake = Fake::new().on_blocks(move |_, request| {
        let header = |name: &str| {
            request
                .metadata()
                .get(name)
                .map(|value| value.to_str().unwrap().to_owned())
        };
        let all = ["x-tenant", "x-trace", "user-agent"].map(|name| header(name).unwrap_or_default());
        note.lock().unwrap().push(all.join(" "));
        async move { Ok(blocks(&request.get_ref().indices)) }
    });
    let server = Server::serve(fake, any(), Arc::default()).await;
    let client = Client::builder(&server.url)
        .metadata("x-tenant", "blue")
        .connect()
        .await
        .unwrap();
    fetch(&client, 1).await;
    fetch(&client.with_metadata("x-trace", "7").unwrap(), 1).await;
    let agent = concat!("ringfetch-client/", env!("CARGO_PKG_VERSION"));
    assert_eq!(
        *seen.lock().unwrap(),
        [format!("blue  {agent}"), format!("blue 7 {agent}")]
    );
    assert!(client.with_metadata("grpc-timeout", "1S").is_err());
}

#[tokio::test]
async fn retries_cannot_multiply_an_overload() {
    // Scenario: a server that is always unavailable, 400 calls of up to five attempts, with 100 tokens; then
    // the same without a budget. Expected: 40 retries and no more, since a call's last attempt takes a token
    // too; four for each call.
    for (budget, retries) in [(100, 40), (0, 1600)] {
        let attempts = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&attempts);
        let fake = Fake::new().on_blocks(move |_, _| {
            count.fetch_add(1, Ordering::SeqCst);
            async { Err(Status::unavailable("overloaded")) }
        });
        let server = Server::serve(fake, any(), Arc::default()).await;
        let mut policy = RetryPolicy::default();
        policy.attempts_max = 5;
        (policy.backoff_min, policy.backoff_max) = (Duration::ZERO, Duration::ZERO);
        let mut limit = RetryBudget::default();
        limit.tokens_max = budget;
        let builder = Client::builder(&server.url).retry(policy).retry_budget(limit);
        let client = builder.connect().await.unwrap();
        for _ in 0..400 {
            let error = client.fetch_blocks("d", &[1]).await.unwrap_err();
            assert_eq!(error.code(), Some(Code::Unavailable));
        }
        assert_eq!(attempts.load(Ordering::SeqCst), 400 + retries);
    }
}

#[tokio::test]
async fn what_is_no_grpc_server_is_told_so() {
    // Scenario: an HTTP/2 server that returns 404, and then a page; a server that hangs up at once. Expected:
    // UNIMPLEMENTED and a protocol error that ask for the gRPC address; a transport error.
    let listener = tokio::net::TcpListener::bind(any()).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let task = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let mut status = 404;
        while let Some(Ok((_, mut respond))) = connection.accept().await {
            let response = http::Response::builder().status(status);
            let response = response.header("content-type", "text/html").body(()).unwrap();
            let mut page = respond.send_response(response, false).unwrap();
            page.send_data("<html></html>".into(), true).unwrap();
            status = 200;
        }
    });
    let client = Client::builder(&url)
        .retry(RetryPolicy::none())
        .connect()
        .await
        .unwrap();
    let error = client.fetch_blocks("d", &[1]).await.unwrap_err();
    assert_eq!(error.code(), Some(Code::Unimplemented));
    assert!(error.to_string().contains("is this the gRPC address?"), "{error}");
    let error = client.fetch_blocks("d", &[1]).await.unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
    let said = error.to_string();
    assert!(
        said.contains("text/html") && said.contains("is this the gRPC address?"),
        "{said}"
    );
    task.abort();

    let listener = tokio::net::TcpListener::bind(any()).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    let client = Client::builder(&url).retry(RetryPolicy::none());
    let client = client.connect_lazy().unwrap();
    let error = client.fetch_blocks("d", &[1]).await.unwrap_err();
    assert!(matches!(error, Error::Transport { .. }), "{error:?}");
}
