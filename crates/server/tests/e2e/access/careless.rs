//! What clients without a credential, and connections with several credentials, may hold.

use super::*;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::select_all;
use futures_util::stream::FuturesUnordered;
use h2::client::{Connection, SendRequest};
use prost::Message as _;
use std::future::poll_fn;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use tokio::net::TcpSocket;
use tonic_types::StatusExt as _;

type Http2 = (SendRequest<Bytes>, Connection<TcpStream, Bytes>);

/// A connection from an address on this host, with a window for each response.
async fn http2(from: u8, to: SocketAddr, window_bytes: u32) -> Http2 {
    let socket = TcpSocket::new_v4().unwrap();
    socket
        .bind((IpAddr::V4(Ipv4Addr::new(127, 0, 0, from)), 0).into())
        .unwrap();
    let stream = socket.connect(to).await.unwrap();
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(window_bytes);
    builder.handshake(stream).await.unwrap()
}

/// Sends a gRPC call of one message; returns its future response.
async fn call(
    sender: &SendRequest<Bytes>,
    token: &str,
    path: &str,
    message: Vec<u8>,
) -> h2::client::ResponseFuture {
    let request = http::Request::post(format!("http://localhost{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("authorization", format!("Bearer {token}"))
        .body(())
        .unwrap();
    let mut sender = sender.clone().ready().await.unwrap();
    let (response, mut body) = sender.send_request(request, false).unwrap();
    body.send_data(wire::framed(&message), true).unwrap();
    response
}

#[tokio::test]
async fn a_connection_has_few_watches() {
    // Scenario: a client without a credential starts five health watches on one connection, and ends one.
    // Expectation: the fifth is refused, with the reason; after that another one is accepted.
    let daemon = served(&lines(&[("a", "first", "*")])).start();
    let mut health = HealthClient::new(channel(daemon.grpc).await);
    let ask = HealthCheckRequest::default;
    let mut watches = Vec::new();
    for _ in 0..4 {
        watches.push(health.watch(ask()).await.unwrap());
    }
    let refused = health.watch(ask()).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(
        refused.get_error_details().error_info().unwrap().reason,
        "TOO_MANY_WATCHES"
    );
    drop(watches.pop());
    let health = &health;
    eventually_async("the place of the watch that ended is free", async || {
        health.clone().watch(ask()).await.ok()
    })
    .await;
}

#[tokio::test]
async fn requests_that_never_end_are_charged_from_their_heads_on() {
    // Scenario: four connections from one address, each with 100 calls of which only the head arrives, of
    // listings and of reads, and 3 MiB of request memory. Expectation: the calls over the share are refused,
    // with a retry hint, and counted; another address is served meanwhile; once the connections are gone, the
    // first address is served too.
    for path in [
        "/ringfetch.v1.DatasetService/ListDatasets",
        "/ringfetch.v1.FetchService/FetchBlocks",
    ] {
        let daemon = served(&lines(&[("a", "first", "*")]))
            .set("limits.request_bytes", "16KiB")
            .set("limits.request_memory", "3MiB")
            .start();
        let mut connections = Vec::new();
        let mut open = Vec::new();
        for _ in 0..4 {
            let (sender, connection) = http2(2, daemon.grpc, 1 << 16).await;
            connections.push(tokio::spawn(connection));
            for _ in 0..100 {
                let request = http::Request::post(format!("http://localhost{path}"))
                    .header("content-type", "application/grpc")
                    .header("authorization", "Bearer first");
                let mut sender = sender.clone().ready().await.unwrap();
                open.push(sender.send_request(request.body(()).unwrap(), false).unwrap());
            }
        }
        let status = first_refusal(&mut open).await;
        assert!(status.get_error_details().retry_info().is_some(), "{status:?}");
        assert_eq!(read(&daemon, "first", "blocks").await, Ok(()), "{path}");
        connections.iter().for_each(tokio::task::JoinHandle::abort);
        let one = wire::blocks("blocks", &[1]).encode_to_vec();
        eventually_async("the address is served again", async || {
            let (sender, connection) = http2(2, daemon.grpc, 1 << 16).await;
            let connection = tokio::spawn(connection);
            let path = "/ringfetch.v1.FetchService/FetchBlocks";
            let answer = call(&sender, "first", path, one.clone()).await.await.ok()?;
            connection.abort();
            (!answer.headers().contains_key("grpc-status")).then_some(())
        })
        .await;
    }
}

/// The refusal of any of these calls for want of memory: the order in which connections send is not that of the calls.
async fn first_refusal(open: &mut [(h2::client::ResponseFuture, h2::SendStream<Bytes>)]) -> Status {
    let answers = open.iter_mut().map(|(answer, _body)| answer);
    let first = timeout(PATIENCE, select_all(answers)).await;
    let (head, ..) = first.expect("an answer");
    let status = Status::from_header_map(head.unwrap().headers()).unwrap();
    assert_eq!(status.code(), Code::ResourceExhausted);
    status
}

#[tokio::test]
async fn small_header_fields_are_charged_what_they_take() {
    // Scenario: a connection with 60 calls of which only the head arrives, whose 400 fields take a byte each on the wire
    // and 104 in memory, and 3 MiB of request memory. Expectation: those over the share are refused.
    let daemon = served(&lines(&[("a", "first", "*")]))
        .set("limits.request_bytes", "16KiB")
        .set("limits.request_memory", "3MiB")
        .start();
    let (sender, connection) = http2(2, daemon.grpc, 1 << 16).await;
    let connection = tokio::spawn(connection);
    let mut open = Vec::new();
    for _ in 0..60 {
        let mut request = http::Request::post("http://localhost/ringfetch.v1.FetchService/FetchBlocks")
            .header("content-type", "application/grpc")
            .header("authorization", "Bearer first");
        for field in 0..400 {
            request = request.header(format!("x{}", field % 80), "v");
        }
        let mut sender = sender.clone().ready().await.unwrap();
        open.push(sender.send_request(request.body(()).unwrap(), false).unwrap());
    }
    first_refusal(&mut open).await;
    connection.abort();
}

#[tokio::test]
async fn refusals_hold_little_while_their_client_reads_nothing() {
    // Scenario: a client without a window for bodies sends 64 requests with a foreign host and long paths.
    // Expectation: each gets a response; eight have a body, which repeats little of the path, and the others
    // only a head.
    let daemon = served(&lines(&[("a", "first", "*")])).start();
    let (sender, connection) = http2(1, daemon.http, 0).await;
    tokio::spawn(connection);
    let mut bodies = Vec::new();
    for _ in 0..64 {
        let uri = format!("http://elsewhere.example/{}", "x".repeat(8000));
        let request = http::Request::get(uri).body(()).unwrap();
        let (response, _) = sender
            .clone()
            .ready()
            .await
            .unwrap()
            .send_request(request, true)
            .unwrap();
        let response = response.await.unwrap();
        assert_eq!(response.status(), 421);
        bodies.push(response.into_body());
    }
    let held: Vec<_> = bodies.iter().filter(|body| !body.is_end_stream()).collect();
    assert_eq!(held.len(), 8);
}

#[tokio::test]
async fn a_refused_call_is_a_grpc_response_however_many_are_open() {
    // Scenario: 16 calls that never end on one connection, then one with an unknown token and five of the health
    // service. Expectation: UNAUTHENTICATED and RESOURCE_EXHAUSTED, each as a response of gRPC's content type: without it,
    // clients report UNKNOWN.
    let daemon = served(&lines(&[("a", "first", "*")])).start();
    let (sender, connection) = http2(1, daemon.grpc, 1 << 16).await;
    tokio::spawn(connection);
    let mut open = Vec::new();
    for _ in 0..16 {
        let request = http::Request::post("http://localhost/ringfetch.v1.FetchService/FetchStream")
            .header("content-type", "application/grpc")
            .header("authorization", "Bearer first");
        let mut sender = sender.clone().ready().await.unwrap();
        open.push(sender.send_request(request.body(()).unwrap(), false).unwrap());
    }
    let fetch = "/ringfetch.v1.FetchService/FetchBlocks";
    let one = wire::blocks("blocks", &[1]).encode_to_vec();
    let refused = call(&sender, "unknown", fetch, one).await.await.unwrap();
    let mut watches = Vec::new();
    for _ in 0..5 {
        let watch = call(&sender, "", "/grpc.health.v1.Health/Watch", Vec::new()).await;
        watches.push(watch.await.unwrap());
    }
    let fifth = watches.pop().unwrap();
    for (code, answer) in [(Code::Unauthenticated, refused), (Code::ResourceExhausted, fifth)] {
        assert_eq!(answer.headers()["content-type"], "application/grpc", "{answer:?}");
        let status = Status::from_header_map(answer.headers()).unwrap();
        assert_eq!(status.code(), code);
        assert!(status.get_error_details().error_info().is_some(), "{status:?}");
    }
}

#[tokio::test]
async fn a_refusal_over_http2_comes_after_the_body_that_nobody_reads() {
    // Scenario: a request with an unknown token and a body of 200 KiB, more than a stream's window; another whose
    // body of 5 MiB is announced. Expectation: 401 for both; the first body is taken whole, so that its stream is not
    // reset, at which curl and others forget the response. The second is not.
    let daemon = served(&lines(&[("a", "first", "*")])).start();
    let (sender, connection) = http2(1, daemon.http, 1 << 16).await;
    tokio::spawn(connection);
    for (announced, is_taken) in [(200 << 10, true), (5 << 20, false)] {
        let request = http::Request::post("http://localhost/v1/datasets/blocks/blocks:batchFetch")
            .header("content-type", "application/json")
            .header("content-length", announced)
            .header("authorization", "Bearer unknown")
            .body(())
            .unwrap();
        let mut sender = sender.clone().ready().await.unwrap();
        let (response, mut body) = sender.send_request(request, false).unwrap();
        let mut left: usize = announced;
        let sending = async {
            while left > 0 {
                body.reserve_capacity(left);
                let granted = poll_fn(|cx| body.poll_capacity(cx)).await;
                let Some(Ok(granted)) = granted else { return false };
                left -= granted;
                body.send_data(Bytes::from(vec![b' '; granted]), left == 0)
                    .unwrap();
            }
            true
        };
        assert_eq!(
            timeout(PATIENCE, sending).await.expect("taken or reset"),
            is_taken
        );
        let response = timeout(PATIENCE, response).await.expect("a response").unwrap();
        assert_eq!(response.status(), 401);
    }
}

#[tokio::test]
async fn long_heads_and_vectors_as_json_are_charged() {
    // Scenario: 256 requests of one address whose bodies never come, each with a header of 12 KiB; and as many for a vector
    // of 128 KiB as JSON, which nobody reads; 4 MiB of request memory. Expectation: most are refused, with a retry hint.
    let setup = served(&lines(&[("a", "first", "*")]));
    setup.file("wide.bin", &vec![0; 1 << 17]);
    let daemon = with_wide(setup, 32768)
        .set("limits.request_bytes", "64KiB")
        .set("limits.request_memory", "4MiB")
        .start();
    let post = http::Request::post("http://localhost/v1/datasets/blocks/blocks:batchFetch")
        .header("content-type", "application/json")
        .header("x-long", "x".repeat(12 << 10));
    let get = http::Request::get("http://localhost/v1/datasets/wide/vectors/0")
        .header("accept", "application/json");
    for (request, is_open) in [(post, true), (get, false)] {
        let request = request.header("authorization", "Bearer first").body(()).unwrap();
        let (mut connections, mut open) = (Vec::new(), Vec::new());
        let mut heads = FuturesUnordered::new();
        for _ in 0..4 {
            let (sender, connection) = http2(2, daemon.http, 0).await;
            connections.push(tokio::spawn(connection));
            for _ in 0..64 {
                let mut sender = sender.clone().ready().await.unwrap();
                let (response, body) = sender.send_request(request.clone(), !is_open).unwrap();
                open.push(body);
                heads.push(response);
            }
        }
        let (mut refused, mut held) = (0, Vec::new());
        // A granted request whose body never comes has no response.
        while refused <= 64 {
            let head = timeout(PATIENCE, heads.next()).await.expect("refusals");
            let head = head.expect("more refusals").unwrap();
            if head.status() != 200 {
                assert!(matches!(head.status().as_u16(), 429 | 503), "{head:?}");
                assert!(head.headers().contains_key("retry-after"), "{head:?}");
                refused += 1;
            }
            held.push(head);
        }
        connections.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

#[tokio::test]
async fn who_shows_no_credential_makes_room_for_who_does() {
    // Scenario: health watches from two addresses, without a credential, take a port's eight connections.
    // Expectation: a principal from a third address is served, on both ports.
    let daemon = served(&lines(&[("a", "first", "*")]))
        .set("limits.connections", "8")
        .start();
    let mut open = Vec::new();
    for from in [2, 3] {
        for _ in 0..4 {
            let (sender, connection) = http2(from, daemon.grpc, 1 << 16).await;
            let connection = tokio::spawn(connection);
            let path = "/grpc.health.v1.Health/Watch";
            let answer = call(&sender, "", path, Vec::new()).await.await.unwrap();
            open.push((sender, connection, answer));
        }
    }
    assert_eq!(read(&daemon, "first", "blocks").await, Ok(()));
}

#[tokio::test]
async fn a_revoked_principals_answer_ends_also_where_another_has_asked_since() {
    // Scenario: on one connection, a client with a small window requests 256 KiB as one principal and a block
    // as another; the line of the first is removed. Expectation: the connection is closed, although its
    // response is unfinished.
    let other = ("b", "second", "*");
    let daemon = served(&lines(&[("a", "first", "*"), other])).start();
    let (sender, connection) = http2(1, daemon.grpc, 1000).await;
    let connection = tokio::spawn(connection);
    let path = "/ringfetch.v1.FetchService/FetchBlocks";
    let all: Vec<u64> = (0..64).collect();
    let first = wire::blocks("blocks", &all).encode_to_vec();
    let first = call(&sender, "first", path, first).await.await.unwrap();
    let second = wire::blocks("blocks", &[1]).encode_to_vec();
    let second = call(&sender, "second", path, second).await.await.unwrap();
    assert_eq!(
        (first.status(), second.status()),
        (http::StatusCode::OK, http::StatusCode::OK)
    );
    rewrite(&daemon, &lines(&[other]));
    let _how = timeout(PATIENCE, connection)
        .await
        .expect("the connection is closed");
    assert_eq!(read(&daemon, "second", "blocks").await, Ok(()));
}

#[tokio::test]
async fn json_of_data_is_no_text_that_is_held() {
    // Scenario: 30 concurrent batches of 256 KiB each in JSON, which is 10 MiB of text, with 3 MiB of
    // request memory. Expectation: all are answered: the text is made from the data while it is sent.
    let daemon = served(&lines(&[("a", "first", "*")]))
        .set("limits.request_bytes", "4KiB")
        .set("limits.items_per_request", "64")
        .set("limits.request_memory", "3MiB")
        .start();
    let body = json!({"indices": (0..64).collect::<Vec<u32>>()}).to_string();
    let headers = [
        ("content-type", "application/json"),
        ("accept", "application/json"),
        ("authorization", "Bearer first"),
    ];
    let path = "/v1/datasets/blocks/blocks:batchFetch";
    let http = daemon.http_client();
    let answers = (0..30).map(|_| http.send(Method::POST, path, &headers, body.clone()));
    for answer in futures_util::future::join_all(answers).await {
        assert_eq!(answer.status, 200, "{answer:?}");
    }
}

/// A request whose response has some 400 KiB of text, and that says nothing about its data.
struct TextRequest {
    is_call: bool,
    path: &'static str,
    body: Vec<u8>,
}

fn text_requests() -> [TextRequest; 4] {
    let past_the_end = vec![1 << 20; 4096];
    let blocks = wire::blocks("blocks", &past_the_end);
    let streamed = wire::on_stream(1, OneOf::Blocks(blocks.clone()));
    let listed = wire::listing("objects");
    let json = json!({"indices": past_the_end}).to_string();
    [
        (
            true,
            "/ringfetch.v1.FetchService/FetchBlocks",
            blocks.encode_to_vec(),
        ),
        (
            true,
            "/ringfetch.v1.FetchService/FetchStream",
            streamed.encode_to_vec(),
        ),
        (
            true,
            "/ringfetch.v1.DatasetService/ListObjects",
            listed.encode_to_vec(),
        ),
        (false, "/v1/datasets/blocks/blocks:batchFetch", json.into_bytes()),
    ]
    .map(|(is_call, path, body)| TextRequest { is_call, path, body })
}

#[tokio::test]
async fn text_of_responses_that_nobody_reads_is_charged() {
    // Scenario: four connections of one address with 64 requests each, whose responses are lists of 4,096 failed
    // items or of objects with long names, and which nobody reads; 4 MiB of request memory. Expectation: what the
    // memory does not hold is refused, with a retry hint, and the daemon grows by little more; another address is
    // served; so is this one once the connections are gone.
    for TextRequest { is_call, path, body } in text_requests() {
        let setup = served(&lines(&[("a", "first", "*")]));
        for object in 0..1000 {
            setup.file(&format!("objects/{}{object}", "x".repeat(200)), b"");
        }
        let daemon = setup
            .set("limits.request_bytes", "64KiB")
            .set("limits.request_memory", "4MiB")
            .start();
        let to = if is_call { daemon.grpc } else { daemon.http };
        assert_eq!(read(&daemon, "first", "blocks").await, Ok(()), "{path}");
        let before = daemon.resident_mib();
        let (mut connections, mut answers) = (Vec::new(), Vec::new());
        for _ in 0..4 {
            let (sender, connection) = http2(2, to, 1).await;
            connections.push(tokio::spawn(connection));
            for _ in 0..64 {
                answers.push(if is_call {
                    call(&sender, "first", path, body.clone()).await
                } else {
                    batch(&sender, path, body.clone()).await
                });
            }
        }
        let (mut refused, mut held) = (0, Vec::new());
        for answer in answers {
            let answer = timeout(PATIENCE, answer).await.expect("a head").unwrap();
            let status = Status::from_header_map(answer.headers());
            if let Some(status) = status {
                assert_eq!(status.code(), Code::ResourceExhausted, "{path}");
                assert!(status.get_error_details().retry_info().is_some(), "{status:?}");
                refused += 1;
            } else if answer.status() != 200 {
                assert!(matches!(answer.status().as_u16(), 429 | 503), "{answer:?}");
                assert!(answer.headers().contains_key("retry-after"), "{answer:?}");
                refused += 1;
            }
            held.push(answer);
        }
        let grown = daemon.resident_mib() - before;
        // Its request memory, HTTP/2's of four connections, and what the allocator keeps; the text is at least 50 MiB.
        assert!(grown < 4.0 + 20.0, "{path}: {grown} MiB, {refused} refused");
        assert_eq!(read(&daemon, "first", "blocks").await, Ok(()), "{path}");
        connections.iter().for_each(tokio::task::JoinHandle::abort);
        drop(held);
        eventually_async("the address is served again", async || {
            let (sender, connection) = http2(2, to, 1).await;
            let connection = tokio::spawn(connection);
            let answer = if is_call {
                call(&sender, "first", path, body.clone()).await
            } else {
                batch(&sender, path, body.clone()).await
            };
            let answer = answer.await.ok()?;
            connection.abort();
            let is_served = answer.status() == 200 && !answer.headers().contains_key("grpc-status");
            is_served.then_some(())
        })
        .await;
    }
}

/// Sends a batch over HTTP/2 that accepts JSON.
async fn batch(sender: &SendRequest<Bytes>, path: &str, body: Vec<u8>) -> h2::client::ResponseFuture {
    let request = http::Request::post(format!("http://localhost{path}"))
        .header("content-type", "application/json")
        .header("accept", "application/json")
        .header("authorization", "Bearer first")
        .body(())
        .unwrap();
    let mut sender = sender.clone().ready().await.unwrap();
    let (response, mut sending) = sender.send_request(request, false).unwrap();
    sending.send_data(Bytes::from(body), true).unwrap();
    response
}
