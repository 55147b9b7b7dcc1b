//! The end of a response that the kernel holds when its connection closes: a client that reads slowly receives it.

use crate::access_log::lines;
use crate::daemon::{Daemon, PATIENCE, Setup, eventually_async};
use crate::data::plain_blocks;
use crate::garbage::{PREFACE, frame};
use crate::tls::{Authority, with_tls};
use crate::wire;
use rustix::process::Signal;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::version;

/// Blocks that sockets hold while nothing is read.
const COUNT: usize = 64;

trait Duplex: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Duplex for T {}

const DATA: u8 = 0;
const END_STREAM: u8 = 1;

fn ping() -> Vec<u8> {
    frame(6, 0, 0, b"are you?")
}

/// The beginning of a connection with windows of 64 MiB, and a call. Nothing acknowledges the server's settings or pings.
pub(crate) fn call(method: &str, message: &impl prost::Message) -> Vec<u8> {
    let literal =
        |name: &[u8], value: &str| [name, &[u8::try_from(value.len()).unwrap()], value.as_bytes()].concat();
    let head = [
        // Static entries of HPACK (RFC 7541 A): method POST, scheme http, authority, path, content-type.
        vec![0x83, 0x86],
        literal(&[1], "localhost"),
        literal(&[4], &format!("/ringfetch.v1.FetchService/{method}")),
        literal(&[15, 16], "application/grpc"),
        literal(b"\0\x02te", "trailers"),
    ];
    let window = (64_u32 << 20).to_be_bytes();
    [
        PREFACE.to_vec(),
        frame(4, 0, 0, &[&[0, 4], &window[..]].concat()),
        frame(8, 0, 0, &window),
        frame(1, 4, 1, &head.concat()),
        frame(DATA, END_STREAM, 1, &wire::framed(&message.encode_to_vec())),
    ]
    .concat()
}

/// The messages in these frames, if the response is whole.
fn messages(mut frames: &[u8]) -> Option<Vec<u8>> {
    let (mut messages, mut is_whole) = (Vec::new(), false);
    while let Some((head, rest)) = frames.split_first_chunk::<9>() {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let (payload, rest) = rest.split_at_checked(usize::try_from(length).unwrap())?;
        if head[3] == DATA {
            messages.extend(payload);
        }
        // The trailers end it.
        is_whole |= head[3] == 1 && head[4] & END_STREAM > 0;
        frames = rest;
    }
    is_whole.then_some(messages)
}

/// A client with a small receive buffer, which has called and reads nothing.
async fn calling(daemon: &Daemon, authority: Option<&Authority>, blocks: usize) -> Box<dyn Duplex> {
    let stream = wire::with_small_buffer(daemon.grpc).await;
    let mut stream: Box<dyn Duplex> = match authority {
        None => Box::new(stream),
        Some(authority) => {
            let connector = authority.connector(&[&version::TLS13], &["h2"]);
            let name = ServerName::from(daemon.grpc.ip());
            Box::new(connector.connect(name, stream).await.unwrap())
        }
    };
    let ranges = wire::ranges("blocks", &[(0, blocks as u64 * 4096)]);
    stream.write_all(&call("FetchRanges", &ranges)).await.unwrap();
    stream.flush().await.unwrap();
    stream
}

async fn answered(daemon: &Daemon, count: u64) {
    eventually_async("the response is written", async || {
        let calls = [("transport", "grpc")];
        (daemon.sum("ringfetch_rpc_requests_total", &calls).await >= count).then_some(())
    })
    .await;
}

/// Why the connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    Drain,
    Timeout(&'static str),
}

async fn the_end_arrives(cause: Cause, authority: Option<&Authority>) {
    let (mut setup, bytes) = plain_blocks(Setup::new("pread"), COUNT);
    if let Some(authority) = authority {
        setup = with_tls(setup, &authority.pair("daemon")).set("tls.ports", "grpc");
    }
    if let Cause::Timeout(key) = cause {
        // More than a call needs on a busy machine.
        setup = setup.set(key, "5000");
        if key == "timeouts.idle_ms" {
            // That of a connection that is too old: no request is in flight.
            setup = setup.set("timeouts.connection_age_grace_ms", "1000");
        }
    }
    let mut daemon = setup.start();
    let mut slow = calling(&daemon, authority, COUNT).await;
    answered(&daemon, 1).await;
    let mut other = calling(&daemon, authority, 1).await;
    if cause == Cause::Drain {
        answered(&daemon, 2).await;
        daemon.signal(Signal::TERM);
    }
    let closed = timeout(PATIENCE, other.read_to_end(&mut Vec::new())).await;
    closed.expect("the other connection is closed").unwrap();

    let (mut got, mut piece) = (Vec::new(), vec![0; 4096]);
    loop {
        let read = slow.read(&mut piece).await;
        match read.unwrap_or_else(|error| panic!("{cause:?}: {error} after {} bytes", got.len())) {
            0 => break,
            more => got.extend(&piece[..more]),
        }
        // What clients say while they read, such as that their window grows.
        slow.write_all(&ping()).await.unwrap();
        slow.flush().await.unwrap();
    }
    assert!(
        messages(&got).is_some_and(|messages| messages.ends_with(&bytes)),
        "{cause:?}"
    );
    drop((slow, other));
    if cause == Cause::Drain {
        daemon.ends_with(0).await;
    } else {
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_slow_reader_receives_the_end_of_its_response_from_a_connection_that_closes() {
    // Scenario: an HTTP/2 client, with TLS and without, reads nothing of a response that the daemon has written; the daemon drains,
    // or the connection is too old, or idle. As soon as another connection in that situation is closed, the client reads, and sends
    // pings. Expectation: the response is complete, then comes the end of the stream; a drain ends with exit code 0.
    let authority = Authority::new();
    for authority in [None, Some(&authority)] {
        tokio::join!(
            the_end_arrives(Cause::Drain, authority),
            the_end_arrives(Cause::Timeout("timeouts.connection_age_ms"), authority),
            the_end_arrives(Cause::Timeout("timeouts.idle_ms"), authority),
        );
    }
}

#[tokio::test]
async fn a_drain_that_cuts_off_the_end_of_a_response_is_not_clean() {
    // Scenario: clients read nothing of responses that the daemon has written, over gRPC with and without TLS, and over
    // HTTP/1.1; a drain ends before their connections have begun to close, and after. Expectation: exit code 1, and a line
    // that says why.
    let authority = Authority::new();
    let ends = async |protocol: &str, drain_ms: &str| {
        let authority = (protocol == "tls").then_some(&authority);
        let (mut setup, _) = plain_blocks(Setup::new("pread"), COUNT);
        if let Some(authority) = authority {
            setup = with_tls(setup, &authority.pair("daemon")).set("tls.ports", "grpc");
        }
        let setup = setup.set("shutdown.drain_timeout_ms", drain_ms);
        let mut daemon = setup.set("access_log.path", "access.log").start();
        let _slow: Box<dyn Duplex> = if protocol == "http" {
            let mut stream = wire::with_small_buffer(daemon.http).await;
            let request = b"GET /v1/datasets/blocks/bytes HTTP/1.1\r\nhost: localhost\r\n\r\n";
            stream.write_all(request).await.unwrap();
            Box::new(stream)
        } else {
            calling(&daemon, authority, COUNT).await
        };
        // A scrape would be another connection, which a busy daemon may not have closed when the drain ends.
        eventually_async("the response is written", async || {
            lines(&daemon, "access.log").pop()
        })
        .await;
        daemon.signal(Signal::TERM);
        daemon.ends_with(1).await;
        let passed = format!("shutdown.drain_timeout_ms ({drain_ms}) passed with 1 connections open");
        daemon.logged(&[&passed, "received all of their answers"]);
    };
    for protocol in ["grpc", "tls", "http"] {
        tokio::join!(ends(protocol, "500"), ends(protocol, "4000"));
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_the_end_is_waited_for_as_long_as_for_the_rest() {
    // Scenario: a client reads nothing of a response that the daemon has written; the daemon drains, with a long timeout.
    // Expectation: the connection is closed for `timeouts.send_ms`; exit code 0.
    let (setup, _) = plain_blocks(Setup::new("pread"), COUNT);
    let setup = setup
        .set("timeouts.send_ms", "3000")
        .set("shutdown.drain_timeout_ms", "600000");
    let mut daemon = setup.start();
    let _slow = calling(&daemon, None, COUNT).await;
    answered(&daemon, 1).await;
    daemon.signal(Signal::TERM);
    daemon.ends_with(0).await;
    daemon.logged(&["connections were closed", "send"]);
}
