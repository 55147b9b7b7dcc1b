//! A daemon that does not run for a while: it was stopped by a signal, or its machine was.

use crate::daemon::{Daemon, PATIENCE, Setup, eventually_async};
use crate::data::plain_blocks;
use crate::tls::{Authority, with_tls};
use crate::wire::{saying, with_small_buffer};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::version;

const BLOCK: &[u8] = b"GET /v1/datasets/blocks/blocks/1 HTTP/1.1\r\nhost: localhost\r\n\r\n";
const POST: &[u8] = b"POST /v1/datasets/blocks/blocks:batchFetch HTTP/1.1\r\nhost: localhost\r\n\
    content-type: application/json\r\ncontent-length: 15\r\n\r\n{\"indices\":[1]}";
const ALL: &[u8] = b"GET /v1/datasets/blocks/bytes HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

fn start(authority: &Authority) -> (Daemon, Vec<u8>) {
    let (mut setup, bytes) = plain_blocks(Setup::new("pread"), 8192);
    setup = with_tls(setup, &authority.pair("daemon")).set("tls.ports", "grpc");
    for limit in ["handshake_ms", "head_ms", "body_ms", "send_ms"] {
        // Longer than it takes until the daemon is stopped, on a busy machine too.
        setup = setup.set(&format!("timeouts.{limit}"), "10000");
    }
    (setup.start(), bytes)
}

#[tokio::test]
async fn time_in_which_the_daemon_does_not_run_counts_for_no_client() {
    // Scenario: connections without a word yet, one of them to a port with TLS, with half a head, with half a body, and with a long
    // response of which some was read. The daemon is stopped for longer than its timeouts: until another one with the same ones has
    // closed a connection that says nothing. Meanwhile the clients do what is theirs. Then it goes on. Expectation: all are
    // answered, and no connection was closed for a timeout.
    let authority = Authority::new();
    let ((daemon, bytes), (other, _)) = (start(&authority), start(&authority));
    let silent = TcpStream::connect(daemon.http).await.unwrap();
    let plain = TcpStream::connect(daemon.grpc).await.unwrap();
    let (half, rest) = (BLOCK.len() / 2, POST.len() - 4);
    let mut late = [
        (silent, BLOCK),
        (saying(daemon.http, &BLOCK[..half]).await, &BLOCK[half..]),
        (saying(daemon.http, &POST[..rest]).await, &POST[rest..]),
    ];
    let mut long = with_small_buffer(daemon.http).await;
    long.write_all(ALL).await.unwrap();
    let mut got = vec![0; 256 << 10];
    long.read_exact(&mut got).await.unwrap();
    eventually_async("all connections are accepted", async || {
        let mut open = 0;
        for transport in ["http", "grpc"] {
            open += daemon
                .sum("ringfetch_connections", &[("transport", transport)])
                .await;
        }
        (open > late.len() as u64 + 1).then_some(())
    })
    .await;

    daemon.signal(Signal::STOP);
    for (stream, words) in &mut late {
        stream.write_all(words).await.unwrap();
    }
    let connector = authority.connector(&[&version::TLS13], &["h2"]);
    let shaken = tokio::spawn(connector.connect(ServerName::from(daemon.grpc.ip()), plain));
    let mut closed = TcpStream::connect(other.http).await.unwrap();
    let mut byte = [0];
    let end = timeout(PATIENCE, closed.read(&mut byte)).await.unwrap();
    assert_eq!(end.unwrap_or(0), 0);
    loop {
        let mut more = [0; 65_536];
        match long.try_read(&mut more) {
            Ok(read) => got.extend(&more[..read]),
            Err(error) => break assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
    }
    daemon.signal(Signal::CONT);

    shaken.await.unwrap().unwrap();
    for (stream, words) in &mut late {
        let mut answer = vec![0; 4096];
        stream.read_exact(&mut answer).await.unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 200 "), "{words:?}");
    }
    long.read_to_end(&mut got).await.unwrap();
    assert!(got.ends_with(&bytes), "{} bytes", got.len());
    assert_eq!(daemon.sum("ringfetch_connections_closed_total", &[]).await, 0);
    daemon.stop().await;
    other.stop().await;
}
