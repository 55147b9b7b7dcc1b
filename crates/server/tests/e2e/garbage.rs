//! Bytes that are not requests: they cost their sender a connection, and affect no other client.

use crate::daemon::{Daemon, Setup, any_backend, eventually_async};
use crate::data::{noise, plain_blocks};
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// An empty SETTINGS frame.
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

/// What a confused or hostile client might send.
fn volleys() -> Vec<Vec<u8>> {
    let http1 = |text: &str| text.as_bytes().to_vec();
    let http2 = |frames: &[u8]| [PREFACE, SETTINGS, frames].concat();
    let long = "x".repeat(1 << 20);
    let mut volleys = vec![
        http1("GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        http1("GET /v1/datasets/blocks/blocks/0 HTTP/1.1\r\n"),
        http1("\r\n\r\n\r\n"),
        http1("GET / HTTP/9.9\r\n\r\n"),
        http1("GET  / HTTP/1.1\r\n\r\n"),
        http1(
            "POST /v1/datasets/blocks/blocks:batchFetch HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{",
        ),
        http1(
            "POST /v1/datasets/blocks/blocks:batchFetch HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        ),
        http1(
            "POST /v1/datasets/blocks/blocks:batchFetch HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        ),
        http1("GET /v1/datasets/\u{0}\u{1} HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        http1(&format!("GET /{long} HTTP/1.1\r\nhost: localhost\r\n\r\n")),
        http1(&format!(
            "GET / HTTP/1.1\r\nhost: localhost\r\nlong: {long}\r\n\r\n"
        )),
        http1(&format!(
            "GET / HTTP/1.1\r\nhost: localhost\r\n{}\r\n",
            "a: b\r\n".repeat(10_000)
        )),
        http1(&"GET /v1/datasets HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(200)),
        PREFACE[..10].to_vec(),
        PREFACE.to_vec(),
        http2(&[]),
        // An oversized frame, one of an unknown type, DATA on stream 0, HEADERS that are not HPACK,
        // CONTINUATION out of place, WINDOW_UPDATE of 0, a PRIORITY that depends on itself.
        http2(&[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]),
        http2(&[0, 0, 1, 0xee, 0, 0, 0, 0, 1, 0]),
        http2(&[0, 0, 1, 0, 0, 0, 0, 0, 0, 0]),
        http2(&[&[0, 0, 8, 1, 5, 0, 0, 0, 1], &[0xff; 8][..]].concat()),
        http2(&[0, 0, 1, 9, 4, 0, 0, 0, 1, 0x82]),
        http2(&[0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        http2(&[0, 0, 5, 2, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0]),
        // Rapid reset (CVE-2023-44487): open and reset many streams.
        http2(
            &(0..2000_u32)
                .flat_map(|n| {
                    let id = (2 * n + 1).to_be_bytes();
                    let open = [&[0, 0, 3, 1, 5][..], &id, &[0x82, 0x86, 0x84]].concat();
                    [open, [&[0, 0, 4, 3, 0][..], &id, &[0, 0, 0, 8]].concat()].concat()
                })
                .collect::<Vec<u8>>(),
        ),
        // TLS, to a port without it.
        vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3],
    ];
    volleys.extend((0..20).map(|seed| noise(100 + seed, 1 << (seed % 12))));
    volleys.extend((0..10).map(|seed| http2(&noise(200 + seed, 200))));
    volleys
}

/// Sends everything, and reads whatever is returned meanwhile.
async fn fire(address: SocketAddr, bytes: &[u8]) {
    let Ok(stream) = TcpStream::connect(address).await else {
        panic!("{address} does not accept any more")
    };
    let (mut read, mut write) = stream.into_split();
    let hear = tokio::spawn(async move {
        let mut sink = [0; 4096];
        while matches!(read.read(&mut sink).await, Ok(1..)) {}
    });
    // The daemon may well have closed the connection meanwhile.
    let _refused = write.write_all(bytes).await;
    drop(write);
    hear.await.expect("the other half");
}

/// Open connections on a port, without that of this request.
async fn open(daemon: &Daemon, transport: &str) -> u64 {
    let labels = [("transport", transport)];
    daemon.sum("ringfetch_connections", &labels).await - u64::from(transport == "http")
}

#[tokio::test]
async fn what_is_no_request_has_the_status_that_the_handbook_names() {
    // Scenario: heads that HTTP/1's parser refuses: a version that does not exist, a target, a header and a number of headers
    // beyond the limits. Expectation: 400, and 431 for the others, and the connection is closed.
    let daemon = plain_blocks(Setup::new("pread"), 1).0.start();
    let long = "x".repeat(20_000);
    for (head, status) in [
        ("GET / HTTP/9.9\r\n\r\n".to_owned(), "400"),
        (format!("GET /{long} HTTP/1.1\r\nhost: localhost\r\n\r\n"), "431"),
        (
            format!("GET / HTTP/1.1\r\nhost: localhost\r\nlong: {long}\r\n\r\n"),
            "431",
        ),
        (
            format!(
                "GET / HTTP/1.1\r\nhost: localhost\r\n{}\r\n",
                "a: b\r\n".repeat(200)
            ),
            "431",
        ),
    ] {
        let mut stream = TcpStream::connect(daemon.http).await.expect("a connection");
        stream.write_all(head.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("no reset");
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains("connection: close"),
            "{head:.40}: {answer}"
        );
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_ends_its_connection_and_nothing_else() {
    // Scenario: every port gets every volley, some of them concurrently, and then real requests. Expectation:
    // no panic; real requests are served in between; no connection and no memory is leaked.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let mut daemon = setup.start();
    for volley in volleys() {
        let ports = [daemon.grpc, daemon.http, daemon.admin];
        let [a, b, c] = ports.map(|address| fire(address, &volley));
        tokio::join!(a, b, c);
        assert!(daemon.is_alive());
    }
    daemon.assert_serves("blocks").await;
    for transport in ["grpc", "http", "admin"] {
        eventually_async(&format!("no connection is left on {transport}"), async || {
            (open(&daemon, transport).await == 0).then_some(())
        })
        .await;
    }
    assert_eq!(daemon.status().await.memory_in_use_bytes, 0);
    let fds = daemon.sum("process_open_fds", &[]).await;
    assert!(fds < 60, "{fds} descriptors are open");
    daemon.stop().await;
}

#[tokio::test]
async fn whoever_breaks_the_protocol_is_counted() {
    // Scenario: a request line that is none, a head over its limit, a TLS hello and a frame that is none on the HTTP port;
    // HTTP/1.1 and such a frame on the others; and clients that disconnect within a head or a preface. Expectation: each is
    // counted as closed for `protocol`, except those that disconnect.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 1);
    let daemon = setup.start();
    let long_head = format!(
        "GET / HTTP/1.1\r\nhost: localhost\r\nlong: {}\r\n\r\n",
        "x".repeat(20_000)
    );
    let no_frame = [PREFACE, SETTINGS, &[0, 0, 1, 0, 0, 0, 0, 0, 0, 0]].concat();
    let hello = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3].repeat(10);
    let http1 = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let on_http: &[&[u8]] = &[
        b"GET  / HTTP/1.1\r\n\r\n",
        long_head.as_bytes(),
        &hello,
        &no_frame,
    ];
    let on_grpc: &[&[u8]] = &[http1, &no_frame];
    fire(daemon.http, &http1[..20]).await;
    for (transport, address, breaches) in [
        ("http", daemon.http, on_http),
        ("grpc", daemon.grpc, on_grpc),
        ("admin", daemon.admin, on_grpc),
    ] {
        fire(address, &PREFACE[..10]).await;
        for (number, breach) in (1..).zip(breaches) {
            fire(address, breach).await;
            eventually_async(&format!("{transport}: {number} are counted"), async || {
                (daemon.closed(transport, "protocol").await == number).then_some(())
            })
            .await;
        }
    }
    daemon.assert_serves("blocks").await;
    daemon.stop().await;
}

#[tokio::test]
async fn http_1_on_a_port_without_it_is_told_what_the_port_speaks() {
    // Scenario: a GET, and a POST whose body goes on, in HTTP/1.1 on the gRPC and the admin port; the whole preface of HTTP/2 in
    // pieces. Expectation: a problem that names what the port speaks, and the end of the connection; and no such thing.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 1);
    let daemon = setup.start();
    for address in [daemon.grpc, daemon.admin] {
        let post = format!("POST / HTTP/1.1\r\n\r\n{}", "x".repeat(100_000));
        for request in ["GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n", &post] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
            assert!(answer.contains("http.listen"), "{answer}");
        }
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(&PREFACE[..3]).await.unwrap();
        stream.write_all(&PREFACE[3..]).await.unwrap();
        stream.write_all(SETTINGS).await.unwrap();
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.unwrap();
        // RFC 9113 section 6.5: SETTINGS.
        assert_eq!(head[3], 4, "{head:?}");
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_never_finish_a_request_do_not_hold_the_others() {
    // Scenario: two hundred connections per port that send nothing, half a preface, half a head, or a byte of
    // a body now and then. Expectation: others are served meanwhile; a drain does not wait for them: exit 0
    // long before its timeout.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let mut daemon = setup.set("shutdown.drain_timeout_ms", "600000").start();
    let beginnings: [&[u8]; 5] = [
        b"",
        b"P",
        &PREFACE[..20],
        b"GET /v1/datasets HTTP/1.1\r\nhost: localhost\r\nslow",
        b"GET /v1/datasets HTTP/1.1\r\n",
    ];
    let mut held = Vec::new();
    for address in [daemon.grpc, daemon.http] {
        for number in 0..200 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream
                .write_all(beginnings[number % beginnings.len()])
                .await
                .unwrap();
            held.push(stream);
        }
    }
    for _ in 0..10 {
        for stream in held.iter_mut().skip(3).step_by(5) {
            // For the port that speaks only HTTP/2, this was garbage from the beginning.
            let _hung_up = stream.write_all(b"x").await;
        }
        daemon.assert_serves("blocks").await;
    }
    assert!(open(&daemon, "http").await > 150);
    daemon.signal(rustix::process::Signal::TERM);
    daemon.ends_with(0).await;
    drop(held);
}

/// A frame of HTTP/2 (RFC 9113, 4.1).
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The next frame: its kind, flags and payload.
async fn next_frame(stream: &mut TcpStream) -> (u8, u8, Vec<u8>) {
    let mut start = [0; 9];
    stream.read_exact(&mut start).await.expect("a frame");
    let mut payload =
        vec![0; usize::from(start[0]) << 16 | usize::from(start[1]) << 8 | usize::from(start[2])];
    stream.read_exact(&mut payload).await.unwrap();
    (start[3], start[4], payload)
}

/// The head of a POST to this path, without a content type: literals without indexing, of the static table's :path and
/// :authority (RFC 7541, Appendix A).
pub(crate) fn post(path: &str) -> Vec<u8> {
    [
        // POST, http.
        &[0x83, 0x86, 0x04, u8::try_from(path.len()).unwrap()][..],
        path.as_bytes(),
        &[0x01, 9],
        b"localhost",
    ]
    .concat()
}

#[tokio::test]
async fn a_refusal_that_nobody_reads_the_body_for_resets_nothing() {
    // Scenario: a POST that is no call, on both gRPC ports; its body comes in two parts. Expectation: the response, and
    // no reset of the stream, with which curl loses the response.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 1);
    let daemon = setup.start();
    let (data, headers, reset, ping) = (0, 1, 3, 6);
    let (end_stream, end_headers) = (1, 4);
    for address in [daemon.grpc, daemon.admin] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let begun = frame(headers, end_headers, 1, &post("/"));
        let first = [
            PREFACE,
            SETTINGS,
            &begun,
            &frame(data, 0, 1, b"{"),
            &frame(ping, 0, 0, b"received"),
        ];
        stream.write_all(&first.concat()).await.unwrap();
        let mut answer = Vec::new();
        loop {
            let (kind, flags, payload) = next_frame(&mut stream).await;
            assert_ne!(kind, reset);
            let next = match (kind, &payload[..]) {
                (6, b"received") => frame(data, end_stream, 1, b"}"),
                (6, b"answered") => break,
                (0, part) => {
                    answer.extend_from_slice(part);
                    if flags & end_stream == 0 {
                        continue;
                    }
                    frame(ping, 0, 0, b"answered")
                }
                _ => continue,
            };
            stream.write_all(&next).await.unwrap();
        }
        assert!(String::from_utf8(answer).unwrap().contains("application/grpc"));
    }
    daemon.stop().await;
}

#[tokio::test]
async fn calls_may_be_cancelled_before_the_core_has_looked_at_them() {
    // Scenario: a client cancels as many calls at once as it may have open, as when all their deadlines pass, and what it
    // sent arrives together; connections are checked more often than once a second. Expectation: the connection stays, also
    // once it was checked, with another one that is closed.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 1);
    let daemon = setup
        .set("engine.cores", "1")
        .set("timeouts.handshake_ms", "300")
        .start();
    let head = call("FetchBlocks");
    let (headers, reset, ping, goaway) = (1, 3, 6, 7);
    let (end_headers, cancel) = (4, 8_u32);
    let calls = (0..256).flat_map(|number| {
        let stream = 2 * number + 1;
        let begun = frame(headers, end_headers, stream, &head);
        [begun, frame(reset, 0, stream, &cancel.to_be_bytes())].concat()
    });
    let volley: Vec<u8> = [PREFACE, SETTINGS].concat().into_iter().chain(calls).collect();
    // Not before: what has not begun in 300 ms is closed.
    let mut stream = TcpStream::connect(daemon.grpc).await.unwrap();
    stream.write_all(&volley).await.unwrap();
    for words in [b"are they", b"and now?"] {
        stream.write_all(&frame(ping, 0, 0, words)).await.unwrap();
        loop {
            let (kind, _flags, payload) = next_frame(&mut stream).await;
            assert_ne!(kind, goaway, "{}", String::from_utf8_lossy(&payload));
            if kind == ping {
                assert_eq!(payload, words);
                break;
            }
        }
        let mut silent = TcpStream::connect(daemon.grpc).await.unwrap();
        assert_eq!(silent.read(&mut [0]).await.unwrap(), 0);
    }
    daemon.assert_serves("blocks").await;
    daemon.stop().await;
}

/// The head of a gRPC call.
pub(crate) fn call(method: &str) -> Vec<u8> {
    let content_type = [&[0x0f, 0x10, 16], &b"application/grpc"[..]].concat();
    [
        post(&format!("/ringfetch.v1.FetchService/{method}")),
        content_type,
    ]
    .concat()
}

#[tokio::test]
async fn lists_of_headers_that_never_end_or_are_too_long_end_their_connection() {
    // Scenario: a list of headers that is longer than any that is served, refused as such; one of more than 32 KiB; one that does not
    // end, beside an open stream. Expectation: the first one's connection goes on; the others are closed, for reasons that are counted.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 1);
    let daemon = setup.set("timeouts.head_ms", "300").start();
    let (headers, ping, goaway, continuation) = (1, 6, 7, 9);
    let end_headers = 4;
    let field = [&[0, 1, b'a', 127, 73], &[b'x'; 200][..]].concat();
    let long = [call("FetchStream"), field.repeat(100)].concat();
    let (first, second) = long.split_at(16 << 10);
    let refused = [
        [PREFACE, SETTINGS].concat(),
        frame(headers, 0, 1, first),
        frame(continuation, end_headers, 1, second),
        frame(ping, 0, 0, b"are they"),
    ];
    // Not before: what has not begun in 300 ms is closed.
    let mut stream = TcpStream::connect(daemon.grpc).await.unwrap();
    stream.write_all(&refused.concat()).await.unwrap();
    loop {
        let (kind, flags, payload) = next_frame(&mut stream).await;
        assert_ne!(kind, goaway, "{}", String::from_utf8_lossy(&payload));
        if (kind, flags) == (ping, 1) {
            break;
        }
    }
    // Whole fields in each frame: h2 gives up on one that it cannot decode.
    let fields = field.repeat(75);
    let too_long = [
        frame(headers, 0, 3, &[call("FetchStream"), fields.clone()].concat()),
        frame(continuation, 0, 3, &fields),
        frame(continuation, 0, 3, &fields),
    ];
    stream.write_all(&too_long.concat()).await.unwrap();
    daemon.has_closed("grpc", "flood").await;

    let mut stream = TcpStream::connect(daemon.grpc).await.unwrap();
    let endless = [
        [PREFACE, SETTINGS].concat(),
        frame(headers, end_headers, 1, &call("FetchStream")),
        frame(headers, 0, 3, &call("FetchStream")),
    ];
    stream.write_all(&endless.concat()).await.unwrap();
    daemon.has_closed("grpc", "head").await;
    daemon.assert_serves("blocks").await;
    daemon.stop().await;
}
