//! FetchStream: many requests at once, responses in any order, and a client that does not read.

use crate::backlog::{Load, batch, slow};
use crate::daemon::{Setup, any_backend, backends, eventually_async, setups};
use crate::data::everything;
use crate::wire;
use bytes::{BufMut as _, Bytes};
use h2::client::{ResponseFuture, SendRequest};
use prost::Message as _;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request;
use ringfetch_proto::v1::fetch_stream_response::Response;
use std::collections::{BTreeMap, BTreeSet};
use tonic::Code;
use tonic_types::{RpcStatusExt as _, StatusExt as _};

#[tokio::test]
async fn five_hundred_requests_are_answered_by_their_ids() {
    // Scenario: 500 requests of all four kinds on one stream, with an unknown dataset and an empty request in
    // the middle, on each backend. Expectation: each id once, with its bytes; the two bad ones get their
    // errors; the rest continues.
    for setup in setups() {
        let (setup, everything) = everything(setup);
        let daemon = setup.start();
        let space = |name: &str| everything.spaces.iter().find(|space| space.name == name).unwrap();
        let (joined, npy) = (space("joined"), space("npy-f32"));
        let small = &everything.objects[3];
        let (mut requests, mut expected) = (Vec::new(), BTreeMap::new());
        for number in 0..500_u64 {
            // Spread over all 64 bits: an odd factor keeps them distinct.
            let id = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let (request, bytes) = match number % 4 {
                _ if number == 250 => (
                    Some(Request::Blocks(wire::blocks("nothing", &[1]))),
                    Err(Code::NotFound),
                ),
                _ if number == 251 => (None, Err(Code::InvalidArgument)),
                0 => {
                    let index = number % 21;
                    let bytes = joined.items[usize::try_from(index).unwrap()].clone();
                    (Some(Request::Blocks(wire::blocks("joined", &[index]))), Ok(bytes))
                }
                1 => {
                    let ids = [number % 61, 60 - number % 61];
                    let of = |id: u64| npy.items[usize::try_from(id).unwrap()].clone();
                    (
                        Some(Request::Vectors(wire::vectors("npy-f32", &ids))),
                        Ok(ids.map(of).concat()),
                    )
                }
                2 => {
                    let offset = usize::try_from(number * 100).unwrap();
                    let range = [(number * 100, 777)];
                    (
                        Some(Request::Ranges(wire::ranges("joined", &range))),
                        Ok(joined.bytes[offset..offset + 777].to_vec()),
                    )
                }
                _ => (
                    Some(Request::Objects(wire::objects("objects", &[small.0]))),
                    Ok(small.1.clone()),
                ),
            };
            requests.push(v1::FetchStreamRequest {
                id,
                request,
                deadline_ms: 0,
            });
            assert!(expected.insert(id, bytes).is_none());
        }
        let mut fetch = daemon.fetch().await;
        let mut answers = wire::stream(&mut fetch, requests).await;
        while let Some(answer) = answers.message().await.unwrap() {
            let expected = expected
                .remove(&answer.id)
                .unwrap_or_else(|| panic!("{} a second time", answer.id));
            let (data, errors) = match answer.response.unwrap() {
                Response::Blocks(answer) => (answer.data, answer.errors),
                Response::Vectors(answer) => (answer.data, answer.errors),
                Response::Ranges(answer) => (answer.data, answer.errors),
                Response::Objects(answer) => (answer.data, answer.errors),
                other @ Response::Scores(_) => panic!("{other:?}"),
                Response::Status(error) => {
                    assert_eq!(Err(Code::from(error.code)), expected, "{error:?}");
                    assert!(
                        !error.message.is_empty()
                            && error.get_details_error_info().is_some()
                            && error.get_details_retry_info().is_none(),
                        "{error:?}"
                    );
                    continue;
                }
            };
            assert!(errors.is_empty(), "{errors:?}");
            assert!(Ok(data.to_vec()) == expected, "wrong bytes for {}", answer.id);
        }
        assert!(expected.is_empty(), "{} are not answered", expected.len());
        daemon.stop().await;
    }
}

#[tokio::test]
async fn cancelled_requests_are_answered_once_and_hold_nothing() {
    // Scenario: a busy daemon; a stream sends four requests of 4,096 reads, as many as may be in flight, and
    // cancels them, and also an unused id; repeated until one was cancelled in time. Expectation: each is
    // answered once, with CANCELLED and its reason or with its bytes; the stream continues; reads that were
    // not submitted are never made.
    let daemon = slow(Setup::new("pread"))
        .set("limits.stream_requests_in_flight", "4")
        .start();
    let load = Load::start(&daemon, 2).await;
    let mut fetch = daemon.fetch().await;
    let (requests, received) = tokio::sync::mpsc::unbounded_channel();
    let received = tokio_stream::wrappers::UnboundedReceiverStream::new(received);
    let mut answers = fetch.fetch_stream(received).await.unwrap().into_inner();
    let send = |id, request| {
        requests.send(wire::on_stream(id, request)).unwrap();
    };
    let mut cancelled = 0;
    for round in 0.. {
        let ids = round * 4..round * 4 + 4;
        for id in ids.clone() {
            send(id, Request::Blocks(wire::blocks("slow", &batch())));
        }
        for id in ids.clone().chain([u64::MAX]) {
            send(id, Request::Cancel(v1::Cancel {}));
        }
        let mut open: Vec<u64> = ids.collect();
        while !open.is_empty() {
            let answer = answers.message().await.unwrap().unwrap();
            let place = open.iter().position(|id| *id == answer.id);
            open.remove(place.unwrap_or_else(|| panic!("{} a second time", answer.id)));
            match wire::blocks_of(answer.response) {
                Ok(blocks) => assert_eq!(blocks.data.len(), batch().len() * 512),
                Err(status) if status.code == i32::from(Code::Cancelled) => {
                    assert_eq!(status.get_details_error_info().unwrap().reason, "CANCELLED");
                    cancelled += 1;
                }
                Err(status) => assert_eq!(status.code, i32::from(Code::ResourceExhausted)),
            }
        }
        if cancelled > 0 {
            break;
        }
    }
    send(7, Request::Blocks(wire::blocks("slow", &[0])));
    drop(requests);
    assert_eq!(answers.message().await.unwrap().unwrap().id, 7);
    assert!(answers.message().await.unwrap().is_none());
    load.stop().await;
    eventually_async("everything is given back", async || {
        let queued = daemon.sum("ringfetch_queued_reads", &[]).await;
        (queued == 0 && daemon.status().await.memory_in_use_bytes == 0).then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_its_share_and_no_more() {
    // Scenario: 600 requests of 64 KiB on a stream whose responses are not read, at most 8 of a stream in
    // flight. Expectation: the daemon starts those in flight and those that fit in the windows, then no more;
    // it holds no more memory than that; others are served meanwhile; once the client reads, it gets all 600,
    // complete.
    const REQUESTS: u64 = 600;
    const BYTES: u64 = 64 << 10;
    // 8 in flight; the client's window of 1 MiB holds 16 answers, and the daemon's send buffer of 128 KiB two.
    const TAKEN_MAX: u64 = 8 + 17 + 3;
    for &backend in backends() {
        let (setup, bytes) = crate::data::plain_blocks(Setup::new(backend), 256);
        let daemon = setup.set("limits.stream_requests_in_flight", "8").start();
        let requests = (0..REQUESTS)
            .map(|id| wire::on_stream(id, Request::Ranges(wire::ranges("blocks", &[(id * 1000, BYTES)]))));
        let mut fetch = daemon.fetch().await;
        let mut answers = wire::stream(&mut fetch, requests).await;

        let (mut taken, mut still) = (0, 0);
        eventually_async("the stream stands still", async || {
            let now = daemon.sum("ringfetch_batch_items_count", &[]).await;
            still = if now > taken { 0 } else { still + 1 };
            taken = now;
            (taken > 8 && still >= 20).then_some(())
        })
        .await;
        assert!(taken <= TAKEN_MAX, "{backend}: {taken} requests were taken up");
        let held = daemon.status().await.memory_in_use_bytes;
        // Unaligned ranges need scratch memory next to their data: at most a page more on either side, twice.
        assert!(
            held <= TAKEN_MAX * 2 * (BYTES + 8192),
            "{backend}: {held} bytes are held"
        );
        for _ in 0..20 {
            daemon.assert_serves("blocks").await;
        }

        let mut seen = vec![false; usize::try_from(REQUESTS).unwrap()];
        while let Some(answer) = answers.message().await.unwrap() {
            let Some(Response::Ranges(ranges)) = answer.response else {
                panic!("{answer:?}")
            };
            let from = usize::try_from(answer.id * 1000).unwrap();
            assert!(
                ranges.data == bytes[from..from + 65_536],
                "{backend}: {}",
                answer.id
            );
            seen[usize::try_from(answer.id).unwrap()] = true;
        }
        assert!(seen.iter().all(|seen| *seen));
        daemon.gives_memory_back().await;
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_stream_on_an_old_connection_answers_what_it_has_taken_up() {
    // Scenario: connections may reach an age of 300 ms, and then have 4 s; a client has 16 requests in flight on a stream
    // and sends one more for each answer; the same on other streams, until more than a hundred were answered. Expectation: each
    // stream ends with UNAVAILABLE, the reason, and leave to open another one at once; the daemon has answered all requests that
    // it began.
    let daemon = slow(Setup::new("pread"))
        .set("timeouts.connection_age_ms", "300")
        .set("timeouts.connection_age_grace_ms", "4000")
        .start();
    let indices = &batch()[..16];
    let (mut answered, mut streams) = (0, 0);
    while streams < 2 || answered <= 100 {
        // Again, if this machine was so slow that the connection was too old for a stream.
        let (_fetch, requests, mut answers) = eventually_async("a stream is begun", async || {
            let mut fetch = daemon.fetch().await;
            let (requests, received) = tokio::sync::mpsc::unbounded_channel();
            let received = tokio_stream::wrappers::UnboundedReceiverStream::new(received);
            let answers = fetch.fetch_stream(received).await.ok()?;
            Some((fetch, requests, answers.into_inner()))
        })
        .await;
        streams += 1;
        // Fails once the stream has ended; its status follows.
        let send = |id| {
            let request = Request::Blocks(wire::blocks("slow", indices));
            let _ended = requests.send(wire::on_stream(id, request));
        };
        (0..16).for_each(send);
        let ended = loop {
            match answers.message().await {
                Ok(answer) => {
                    let answer = answer.expect("an answer, or a status");
                    let blocks = wire::blocks_of(answer.response).unwrap();
                    assert_eq!(blocks.data.len(), indices.len() * 512);
                    answered += 1;
                    send(answer.id + 16);
                }
                Err(status) => break status,
            }
        };
        assert_eq!(ended.code(), Code::Unavailable, "{ended:?}");
        let reason = ended.get_details_error_info().map(|info| info.reason);
        assert_eq!(reason.as_deref(), Some("CONNECTION_CLOSING"), "{ended:?}");
        let retry = ended.get_details_retry_info().unwrap().retry_delay;
        assert_eq!(retry, Some(std::time::Duration::ZERO));
    }
    let began = daemon.sum("ringfetch_batch_items_count", &[]).await;
    assert_eq!(began, answered);
    daemon.stop().await;
}

/// A FetchStream whose client decides which bytes are in each frame.
async fn fetch_stream(sender: &SendRequest<Bytes>) -> (ResponseFuture, h2::SendStream<Bytes>) {
    let request = http::Request::post("http://localhost/ringfetch.v1.FetchService/FetchStream")
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    let mut sender = sender.clone().ready().await.unwrap();
    sender.send_request(request.body(()).unwrap(), false).unwrap()
}

#[tokio::test]
async fn what_is_no_request_ends_the_stream_once_those_before_it_are_answered() {
    // Scenario: in one frame three requests, a message that is not protobuf, and one more request. Expectation: the
    // responses to the three, then the status of the message.
    let (setup, bytes) = crate::data::plain_blocks(Setup::new(any_backend()), 4);
    let daemon = setup.start();
    let request = |id| {
        let call = Request::Blocks(wire::blocks("blocks", &[id]));
        wire::framed(&wire::on_stream(id, call).encode_to_vec())
    };
    let sent = [
        request(1),
        request(2),
        request(3),
        wire::framed(&[0xff, 0xff]),
        request(0),
    ]
    .concat();
    let (body, status) = wire::Narrow::connect(daemon.grpc, 1 << 20)
        .await
        .ask(
            "/ringfetch.v1.FetchService/FetchStream",
            &[("content-type", "application/grpc"), ("te", "trailers")],
            sent.into(),
        )
        .await
        .rest()
        .await;
    let mut answered: Vec<_> = wire::messages::<v1::FetchStreamResponse>(&body)
        .into_iter()
        .map(|answer| {
            let from = usize::try_from(answer.id).unwrap() * 4096;
            assert!(wire::blocks_of(answer.response).unwrap().data == bytes[from..from + 4096]);
            answer.id
        })
        .collect();
    answered.sort_unstable();
    assert_eq!(answered, [1, 2, 3], "{status:?}");
    assert_eq!(status.unwrap().code(), Code::InvalidArgument);
    daemon.gives_memory_back().await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_burst_of_small_requests_waits_and_ends_no_connection() {
    // Scenario: four streams on one connection, each with 2,000 requests in one frame each, as gRPC's clients
    // send them; everything that the windows allow is sent before the client reads. Expectation: every
    // request is answered once. (h2 closes a connection on which too many small frames wait, so the window has to
    // stop the client before that.)
    const REQUESTS: u64 = 2000;
    let (setup, bytes) = crate::data::plain_blocks(Setup::new("mmap"), 256);
    let daemon = setup.start();
    let stream = tokio::net::TcpStream::connect(daemon.grpc).await.unwrap();
    let (sender, mut connection) = h2::client::handshake(stream).await.unwrap();
    let mut pings = connection.ping_pong().unwrap();
    let connection = tokio::spawn(connection);
    let mut calls = Vec::new();
    for _ in 0..4 {
        let (response, mut body) = fetch_stream(&sender).await;
        for id in 0..REQUESTS {
            let message = wire::on_stream(id, Request::Blocks(wire::blocks("blocks", &[id % 256])));
            let mut frame = vec![0];
            frame.put_u32(u32::try_from(message.encoded_len()).unwrap());
            message.encode(&mut frame).unwrap();
            body.send_data(Bytes::from(frame), id + 1 == REQUESTS).unwrap();
        }
        calls.push(response);
    }
    // Everything that the windows allow is sent by the first ping, so the daemon has received it once it
    // answers the third.
    for _ in 0..3 {
        pings.ping(h2::Ping::opaque()).await.unwrap();
    }
    let read = calls.into_iter().map(|response| async {
        let mut body = response.await.unwrap().into_body();
        let mut received = Vec::new();
        while let Some(part) = body.data().await {
            let part = part.unwrap();
            received.extend_from_slice(&part);
            body.flow_control().release_capacity(part.len()).unwrap();
        }
        let mut answered = BTreeSet::new();
        for answer in wire::messages::<v1::FetchStreamResponse>(&received) {
            let blocks = wire::blocks_of(answer.response).unwrap();
            let from = usize::try_from(answer.id % 256).unwrap() * 4096;
            assert!(blocks.data == bytes[from..from + 4096], "{}", answer.id);
            assert!(answered.insert(answer.id), "{} a second time", answer.id);
        }
        answered
    });
    for answered in futures_util::future::join_all(read).await {
        assert!(answered.into_iter().eq(0..REQUESTS));
    }
    drop(sender);
    connection.await.unwrap().unwrap();
}

#[tokio::test]
async fn who_sends_bytes_in_frames_of_their_own_is_counted() {
    // Scenario: a client sends its stream byte by byte, each in its own frame, and reads nothing.
    // Expectation: the connection is closed (h2's rule, which bounds the memory of such frames), and counted
    // as a flood.
    let (setup, _) = crate::data::plain_blocks(Setup::new("mmap"), 256);
    let daemon = setup.set("limits.stream_requests_in_flight", "1").start();
    let stream = tokio::net::TcpStream::connect(daemon.grpc).await.unwrap();
    let (sender, connection) = h2::client::Builder::new()
        .initial_window_size(1)
        .handshake::<_, Bytes>(stream)
        .await
        .unwrap();
    let connection = tokio::spawn(connection);
    let message = wire::on_stream(1, Request::Blocks(wire::blocks("blocks", &[1]))).encode_to_vec();
    let mut open = Vec::new();
    for _ in 0..2 {
        let (response, mut body) = fetch_stream(&sender).await;
        for _ in 0..10_000 / message.len() {
            for byte in wire::framed(&message) {
                body.send_data(Bytes::from(vec![byte]), false).unwrap();
            }
        }
        open.push((response, body));
    }
    let ended = connection.await.unwrap().unwrap_err();
    assert_eq!(ended.reason(), Some(h2::Reason::ENHANCE_YOUR_CALM), "{ended}");
    daemon.has_closed("grpc", "flood").await;
    daemon.assert_serves("blocks").await;
}
