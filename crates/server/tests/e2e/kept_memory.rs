//! The memory that HTTP/2 keeps of requests that were open at once.

use crate::daemon::{Daemon, PATIENCE, Setup, eventually_async};
use crate::data::plain_blocks;
use crate::garbage::{PREFACE, call, frame};
use crate::wire;
use bytes::Bytes;
use h2::client::SendRequest;
use prost::Message as _;
use ringfetch_proto::v1::fetch_stream_request::Request;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream};
use tokio::net::TcpStream;

/// Requests open at once on a connection of [`burst`]: h2 keeps the memory of 256.
const BURST: usize = 150;

/// A connection on which many calls were open at once. They are answered, but for the last one, which it returns.
struct Burst {
    sender: SendRequest<Bytes>,
    connection: tokio::task::JoinHandle<Result<(), h2::Error>>,
    last: (h2::client::ResponseFuture, h2::SendStream<Bytes>),
}

fn served_with_room_for_1024() -> Daemon {
    let (setup, _) = plain_blocks(Setup::new("pread"), 64);
    setup
        .set("limits.request_bytes", "16KiB")
        .set("limits.request_memory", "4MiB")
        // No connection ends because of a request that does.
        .set("timeouts.body_ms", "600000")
        .start()
}

async fn connect(daemon: &Daemon) -> TcpStream {
    let stream = TcpStream::connect(daemon.grpc).await.unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// A connection on which the daemon has received the first byte before the others are sent.
async fn connect_by_a_byte(daemon: &Daemon) -> DuplexStream {
    let mut stream = connect(daemon).await;
    let (near, mut far) = tokio::io::duplex(64 << 10);
    tokio::spawn(async move {
        let first = far.read_u8().await.unwrap();
        stream.write_u8(first).await.unwrap();
        // It sends its settings when it waits for more.
        stream.peek(&mut [0]).await.unwrap();
        let _closed = tokio::io::copy_bidirectional(&mut far, &mut stream).await;
    });
    near
}

async fn burst(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Burst {
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut open = Vec::new();
    for _ in 0..BURST {
        let request = http::Request::post("http://localhost/ringfetch.v1.FetchService/FetchBlocks")
            .header("content-type", "application/grpc");
        let mut sender = sender.clone().ready().await.unwrap();
        open.push(sender.send_request(request.body(()).unwrap(), false).unwrap());
    }
    let last = open.pop().unwrap();
    for call in open {
        finish(call).await;
    }
    Burst {
        sender,
        connection,
        last,
    }
}

/// Sends the message of a call of [`burst`], and reads the answer to its end.
async fn finish((answer, mut body): (h2::client::ResponseFuture, h2::SendStream<Bytes>)) {
    let message = wire::framed(&wire::blocks("blocks", &[1]).encode_to_vec());
    body.send_data(message, true).unwrap();
    let mut answer = answer.await.unwrap().into_body();
    while let Some(data) = answer.data().await {
        answer
            .flow_control()
            .release_capacity(data.unwrap().len())
            .unwrap();
    }
    let end = answer.trailers().await.unwrap().unwrap();
    assert_eq!(end.get("grpc-status").unwrap(), "0");
}

#[tokio::test]
async fn connections_that_keep_memory_of_many_requests_leave_without_a_loss() {
    // Scenario: five connections had 150 calls open at once, with room for 1,024 calls in request memory, and have one left.
    // Expectation: one or two of them are asked to leave, and get their last answer before they close; the others go on.
    let daemon = served_with_room_for_1024();
    let mut bursts = Vec::new();
    for _ in 0..5 {
        bursts.push(burst(connect(&daemon).await).await);
    }
    eventually_async("a connection is to leave", async || {
        (daemon.closed("grpc", "memory").await > 0).then_some(())
    })
    .await;
    let mut connections = Vec::new();
    let mut senders = Vec::new();
    for burst in bursts {
        finish(burst.last).await;
        connections.push(burst.connection);
        senders.push(burst.sender);
    }
    let closed = eventually_async("those that were to leave have closed", async || {
        let closed = connections
            .iter()
            .filter(|connection| connection.is_finished())
            .count();
        (daemon.closed("grpc", "memory").await == closed as u64).then_some(closed)
    })
    .await;
    assert!(closed == 1 || closed == 2, "{closed}");
    for connection in connections {
        if connection.is_finished() {
            connection.await.unwrap().unwrap();
        }
    }
}

#[tokio::test]
async fn connections_that_keep_the_memory_of_requests_and_stay_are_closed() {
    // Scenario: twelve connections that had 150 calls open at once and do not end the last one, with room for 1,024 calls in
    // request memory; the same of connections whose first byte came alone. Expectation: no more than eight stay open, which
    // keep the memory of 2,048; another client is served.
    for is_by_a_byte in [false, true] {
        let daemon = served_with_room_for_1024();
        let mut bursts = Vec::new();
        for _ in 0..12 {
            bursts.push(if is_by_a_byte {
                burst(connect_by_a_byte(&daemon).await).await
            } else {
                burst(connect(&daemon).await).await
            });
            daemon.assert_serves("blocks").await;
        }
        most_are_closed(&daemon, &bursts).await;
    }
}

/// At least four of twelve, but not all.
async fn most_are_closed(daemon: &Daemon, bursts: &[Burst]) {
    let open = eventually_async("four have closed", async || {
        let open = bursts
            .iter()
            .filter(|burst| !burst.connection.is_finished())
            .count();
        (open <= 8).then_some(open)
    })
    .await;
    assert!(open > 0);
    assert!(daemon.closed("grpc", "memory").await >= 4);
}

#[tokio::test]
async fn buffers_that_unread_bytes_keep_are_bounded() {
    // Scenario: with room for 1,024 calls in request memory, a client of whose streams nobody reads the requests, since it takes no
    // answers, sends them small frames between large ones that are read, each of which keeps the 8 KiB that it came in: of one byte to
    // one stream, and of 256 bytes to 32, to the end of their windows. Expectation: the connection is closed after few MiB, instead of
    // 128, and of 16; another client is served.
    for (streams, bytes) in [(1, 1), (32, 256)] {
        let daemon = served_with_room_for_1024();
        let mut stream = connect(&daemon).await;
        let (data, headers, settings) = (0, 1, 4);
        let (end_stream, end_headers) = (1, 4);
        let no_window = [0, 4, 0, 0, 0, 0];
        let mut opening = [PREFACE.to_vec(), frame(settings, 0, 0, &no_window)].concat();
        for stream in 0..streams {
            opening.extend(frame(headers, end_headers, 2 * stream + 1, &call("FetchStream")));
        }
        stream.write_all(&opening).await.unwrap();
        let (mut reads, mut writes) = stream.into_split();
        let sends = async {
            for pair in 0..(streams * (16 << 10) / bytes) {
                let filler = 2 * (streams + pair) + 1;
                let pair = [
                    frame(data, 0, 2 * (pair % streams) + 1, &vec![0; bytes as usize]),
                    frame(headers, end_headers, filler, &call("Unknown")),
                    frame(data, end_stream, filler, &[0; 8 << 10]),
                ];
                if writes.write_all(&pair.concat()).await.is_err() {
                    return true;
                }
            }
            false
        };
        let closes = async {
            let mut bytes = vec![0; 64 << 10];
            while reads.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
        };
        let (is_closed, ()) = tokio::time::timeout(PATIENCE, async { tokio::join!(sends, closes) })
            .await
            .expect("it is closed");
        assert!(is_closed, "it could send everything, {bytes} bytes at a time");
        assert!(daemon.closed("grpc", "memory").await > 0);
        daemon.assert_serves("blocks").await;
        daemon.stop().await;
    }
}

/// A request's body comes in a frame of its own, whose head nothing else has.
async fn send(
    sender: &mut SendRequest<Bytes>,
    request: http::Request<()>,
    body: &'static [u8],
) -> Result<http::Response<h2::RecvStream>, h2::Error> {
    *sender = sender.clone().ready().await?;
    let (response, mut sends) = sender.send_request(request, false)?;
    sends.send_data(Bytes::from_static(body), true)?;
    response.await
}

/// Fills most of an 8 KiB buffer with six requests, since it is never indexed.
fn filler() -> http::HeaderValue {
    let mut filler = http::HeaderValue::try_from("x".repeat(1 << 10)).unwrap();
    filler.set_sensitive(true);
    filler
}

#[tokio::test]
async fn a_body_that_was_passed_over_keeps_no_buffers() {
    // Scenario: with room for 1,024 calls in request memory, a GET with a body, which nobody needs, whose response its client
    // leaves in the window; then 4,000 requests on the same connection, each with a few bytes of body in a frame of their own.
    // Expectation: all of them get a response: of the first one's body nothing is kept.
    let daemon = served_with_room_for_1024();
    let stream = TcpStream::connect(daemon.http).await.unwrap();
    let (mut sender, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let held = http::Request::get("http://localhost/v1/datasets/blocks/bytes").body(());
    let held = send(&mut sender, held.unwrap(), b"{}").await.unwrap();
    assert_eq!(held.status(), 200);
    for number in 0..4000 {
        let request = http::Request::post("http://localhost/v1/nothing").header("filler", filler());
        let response = send(&mut sender, request.body(()).unwrap(), b"{}").await;
        let response = response.unwrap_or_else(|error| panic!("request {number}: {error}"));
        assert_eq!(response.status(), 404);
    }
    drop((held, sender));
    connection.abort();
    daemon.stop().await;
}

#[tokio::test]
async fn a_body_that_nothing_reads_is_charged_until_the_response_is_known() {
    // Scenario: with 4 MiB of request memory, of which one client may have a third, 30 GETs on one connection, whose bodies come
    // after the last head: of 64 KiB, of 2 bytes, and of 2 bytes that are not announced. Expectation: some of the first and the last
    // ones are refused for want of memory, and none of the others.
    let daemon = served_with_room_for_1024();
    for (bytes, is_announced, refuses) in [(64 << 10, true, true), (2, true, false), (2, false, true)] {
        let stream = TcpStream::connect(daemon.http).await.unwrap();
        let (mut sender, connection) = with_room_for_answers(stream).await;
        let mut open = Vec::new();
        for _ in 0..30 {
            let mut request = http::Request::get("http://localhost/v1/datasets/blocks/blocks/1");
            if is_announced {
                request = request.header("content-length", bytes);
            }
            sender = sender.ready().await.unwrap();
            open.push(sender.send_request(request.body(()).unwrap(), false).unwrap());
        }
        for (_, body) in &mut open {
            body.send_data(vec![0; bytes].into(), true).unwrap();
        }
        let mut refused = 0;
        for (response, _) in open {
            let response = response.await.unwrap();
            match response.status().as_u16() {
                200 => {
                    let mut body = response.into_body();
                    while let Some(part) = body.data().await {
                        body.flow_control().release_capacity(part.unwrap().len()).unwrap();
                    }
                }
                429 => refused += 1,
                other => panic!("{other}"),
            }
        }
        assert_eq!(refused > 0, refuses, "{bytes}, {is_announced}: {refused}");
        drop(sender);
        connection.await.unwrap().unwrap();
    }
    daemon.stop().await;
}

#[tokio::test]
async fn an_idle_stream_keeps_no_buffers() {
    // Scenario: with room for 1,024 calls in request memory, a FetchStream on which nothing is sent, and 4,000 small calls on the
    // same connection. Expectation: all of them get a response, and the stream is still open.
    let daemon = served_with_room_for_1024();
    let (mut sender, connection) = h2::client::handshake(connect(&daemon).await).await.unwrap();
    let connection = tokio::spawn(connection);
    let of = |method: &str| {
        let uri = format!("http://localhost/ringfetch.v1.FetchService/{method}");
        let request = http::Request::post(uri).header("content-type", "application/grpc");
        request.header("filler", filler()).body(()).unwrap()
    };
    sender = sender.ready().await.unwrap();
    let (mut idle, _sends) = sender.send_request(of("FetchStream"), false).unwrap();
    for number in 0..4000 {
        // An empty message.
        let response = send(&mut sender, of("FetchBlocks"), &[0; 10]).await;
        response.unwrap_or_else(|error| panic!("call {number}: {error}"));
    }
    let idle = tokio::time::timeout(PATIENCE, &mut idle).await;
    assert!(idle.is_ok_and(|response| response.is_ok()));
    assert_eq!(daemon.closed("grpc", "memory").await, 0);
    drop(sender);
    connection.abort();
    daemon.stop().await;
}

/// A connection on which answers that wait leave room for others.
async fn with_room_for_answers(
    stream: TcpStream,
) -> (SendRequest<Bytes>, tokio::task::JoinHandle<Result<(), h2::Error>>) {
    let mut client = h2::client::Builder::new();
    let client = client.initial_connection_window_size(1 << 20);
    let (sender, connection) = client.handshake(stream).await.unwrap();
    (sender, tokio::spawn(connection))
}

#[tokio::test]
async fn calls_keep_no_buffers_beside_streams_with_a_backlog() {
    // Scenario: with room for 1,024 calls in request memory, three FetchStreams whose client sends 2,000 requests each, more than
    // their windows, and reads a part of the answers now and then; and 3,000 calls on the same connection. Expectation: all of
    // them get a response, and the streams go on.
    let daemon = served_with_room_for_1024();
    let (mut sender, connection) = with_room_for_answers(connect(&daemon).await).await;
    let of = |method: &str| {
        let uri = format!("http://localhost/ringfetch.v1.FetchService/{method}");
        http::Request::post(uri).header("content-type", "application/grpc")
    };
    let mut streams = Vec::new();
    for _ in 0..3 {
        sender = sender.ready().await.unwrap();
        let opened = sender.send_request(of("FetchStream").body(()).unwrap(), false);
        let (response, mut sends) = opened.unwrap();
        for id in 0..2000 {
            let request = wire::on_stream(id, Request::Blocks(wire::blocks("blocks", &[id % 64])));
            sends
                .send_data(wire::framed(&request.encode_to_vec()), false)
                .unwrap();
        }
        streams.push((response.await.unwrap().into_body(), sends));
    }
    for number in 0..3000 {
        let call = of("FetchBlocks").header("filler", filler());
        let call = call.header("more", filler()).body(()).unwrap();
        // An empty message.
        let response = send(&mut sender, call, &[0; 10]).await;
        response.unwrap_or_else(|error| panic!("call {number}: {error}"));
        if number % 100 == 0 {
            for (answers, _) in &mut streams {
                let part = answers.data().await.unwrap().unwrap();
                answers.flow_control().release_capacity(part.len()).unwrap();
            }
        }
    }
    assert_eq!(daemon.closed("grpc", "memory").await, 0);
    drop((streams, sender));
    connection.abort();
    daemon.stop().await;
}

#[tokio::test]
async fn a_stream_keeps_no_buffers_of_another_ones_requests() {
    // Scenario: with room for 1,024 calls in request memory, a FetchStream whose client has sent 200 requests and reads no answers
    // for now, and another one on the same connection, with 23,000 requests of 250 bytes. Expectation: the latter gets all of its
    // answers, then the former.
    let daemon = served_with_room_for_1024();
    let (sender, connection) = with_room_for_answers(connect(&daemon).await).await;
    let unknown = "x".repeat(230);
    let mut streams = Vec::new();
    for (requests, dataset) in [(200, "blocks"), (23_000, &*unknown)] {
        let request = http::Request::post("http://localhost/ringfetch.v1.FetchService/FetchStream")
            .header("content-type", "application/grpc");
        let mut sender = sender.clone().ready().await.unwrap();
        let opened = sender.send_request(request.body(()).unwrap(), false);
        let (response, mut sends) = opened.unwrap();
        for id in 0..requests {
            let request = wire::on_stream(id, Request::Blocks(wire::blocks(dataset, &[id % 64])));
            let message = wire::framed(&request.encode_to_vec());
            sends.send_data(message, id + 1 == requests).unwrap();
        }
        streams.push(response.await.unwrap().into_body());
    }
    while let Some(mut answers) = streams.pop() {
        while let Some(part) = answers.data().await {
            let part = part.unwrap();
            answers.flow_control().release_capacity(part.len()).unwrap();
        }
        let end = answers.trailers().await.unwrap().unwrap();
        assert_eq!(end.get("grpc-status").unwrap(), "0");
    }
    assert_eq!(daemon.closed("grpc", "memory").await, 0);
    drop(sender);
    connection.abort();
    daemon.stop().await;
}

#[tokio::test]
async fn clients_that_acknowledge_no_window_keep_no_more() {
    // Scenario: with room for 1,024 calls in request memory, 70 connections that never acknowledge the daemon's windows, so that each
    // may send 64 KiB of a stream instead of 16, and whose streams nobody reads, since they take no answers. Expectation: some are
    // closed for their memory; another client is served.
    let daemon = served_with_room_for_1024();
    let (data, headers, settings) = (0, 1, 4);
    let end_headers = 4;
    let no_window = [0, 4, 0, 0, 0, 0];
    let mut opening = [PREFACE.to_vec(), frame(settings, 0, 0, &no_window)].concat();
    opening.extend(frame(headers, end_headers, 1, &call("FetchStream")));
    opening.extend(frame(data, 0, 1, &[0; 15_000]).repeat(4));
    let mut held = Vec::new();
    for _ in 0..70 {
        let mut stream = connect(&daemon).await;
        stream.write_all(&opening).await.unwrap();
        held.push(stream);
    }
    daemon.has_closed("grpc", "memory").await;
    daemon.assert_serves("blocks").await;
    drop(held);
    daemon.stop().await;
}

#[tokio::test]
async fn entries_of_the_header_table_that_keep_buffers_are_counted() {
    // Scenario: with room for 1,024 calls in request memory, 16 connections that make 107 calls of an unknown method each, one after the
    // other, whose paths become entries of HPACK's table, and whose bodies fill a buffer each. Then none is open. Expectation: some
    // are closed for the buffers that the entries keep; another client is served.
    let daemon = served_with_room_for_1024();
    let (data, headers) = (0, 1);
    let (end_stream, end_headers) = (1, 4);
    let mut held = Vec::new();
    for _ in 0..16 {
        let mut stream = connect(&daemon).await;
        stream
            .write_all(&[PREFACE, &frame(4, 0, 0, &[])].concat())
            .await
            .unwrap();
        let (mut reads, mut writes) = stream.into_split();
        let drain = tokio::spawn(async move {
            // Until it is closed.
            let _read = tokio::io::copy(&mut reads, &mut tokio::io::sink()).await;
        });
        for call in 0..107 {
            // POST, http, a path that becomes an entry, localhost, application/grpc.
            let mut head = vec![0x83, 0x86, 0x44, 1, b'/', 0x01, 9];
            head.extend(b"localhost");
            head.extend([0x0f, 0x10, 16]);
            head.extend(b"application/grpc");
            let number = 2 * call + 1;
            let begun = frame(headers, end_headers, number, &head);
            let body = frame(data, end_stream, number, &[0; 8192]);
            if writes.write_all(&[begun, body].concat()).await.is_err() {
                break;
            }
        }
        held.push((writes, drain));
    }
    daemon.has_closed("grpc", "memory").await;
    daemon.assert_serves("blocks").await;
    drop(held);
    daemon.stop().await;
}

#[tokio::test]
async fn streams_that_http2_resets_by_itself_are_counted() {
    // Scenario: with room for 1,024 calls in request memory, 16 connections that open one stream, and at once send frames of 550 that
    // they have passed over, each of which is reset: empty data, and priorities that depend on their own stream. Expectation: some are
    // closed for what is kept of them; another client is served.
    let (data, headers, priority, settings) = (0, 1, 2, 4);
    let end_of_both = 5;
    for kind in [data, priority] {
        let daemon = served_with_room_for_1024();
        let mut held = Vec::new();
        for _ in 0..16 {
            let mut opening = [PREFACE.to_vec(), frame(settings, 0, 0, &[])].concat();
            opening.extend(frame(headers, end_of_both, 1101, &call("Unknown")));
            for stream in (1_u32..1101).step_by(2) {
                let dependency = [&stream.to_be_bytes()[..], &[0]].concat();
                let payload = if kind == priority { &dependency[..] } else { &[] };
                opening.extend(frame(kind, 0, stream, payload));
            }
            let mut stream = connect(&daemon).await;
            stream.write_all(&opening).await.unwrap();
            held.push(stream);
        }
        daemon.has_closed("grpc", "memory").await;
        daemon.assert_serves("blocks").await;
        drop(held);
        daemon.stop().await;
    }
}
