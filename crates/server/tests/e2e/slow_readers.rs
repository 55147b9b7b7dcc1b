//! Clients that read very slowly slow only themselves.

use crate::daemon::{Daemon, PATIENCE, Setup, backends, eventually_async};
use crate::data::plain_blocks;
use crate::last_bytes::call;
use crate::wire::{self, with_small_buffer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const LENGTH: usize = 24 << 20;
/// Two windows, what the kernel buffers for a connection (tcp_wmem's 4 MiB, a small receive buffer), and
/// slack.
const HELD_BYTES_MAX: u64 = 16 << 20;

/// Requests everything, with a small receive buffer, and reads nothing yet.
async fn ask_for_all(daemon: &Daemon) -> TcpStream {
    let mut stream = with_small_buffer(daemon.http).await;
    let request = b"GET /v1/datasets/blocks/bytes HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    stream.write_all(request).await.unwrap();
    stream
}

/// The bytes of a response: a head before a blank line, then these.
fn content(response: &[u8]) -> &[u8] {
    let end = response.windows(4).position(|window| window == b"\r\n\r\n");
    &response[end.unwrap() + 4..]
}

#[tokio::test]
async fn slow_readers_hold_two_windows_each_and_stop_nobody() {
    // Scenario: six clients request 24 MiB and read 1 KiB now and then, while others request blocks.
    // Expectation: each holds at most two windows of 1 MiB, the process stays small, every block is served
    // promptly; a slow reader that continues gets all of its bytes, and those that disconnect leave nothing
    // behind.
    for &backend in backends() {
        let setup = Setup::new(backend).set("limits.connection_bytes", "8MiB");
        let (setup, bytes) = plain_blocks(setup, LENGTH / 4096);
        let daemon = setup.start();
        let mut slow = Vec::new();
        for _ in 0..6 {
            slow.push((ask_for_all(&daemon).await, Vec::new()));
        }
        for round in 0..15 {
            for (stream, got) in &mut slow {
                let mut piece = [0; 1024];
                stream.read_exact(&mut piece).await.unwrap();
                got.extend_from_slice(&piece);
            }
            let served = tokio::time::timeout(PATIENCE, daemon.assert_serves("blocks"));
            served.await.expect("a block is served");
            let held = daemon.status().await.memory_in_use_bytes;
            assert!(
                held <= 6 * (2 << 20) + (1 << 20),
                "{backend}, round {round}: {held} bytes are held"
            );
        }
        let resident = daemon.sum("process_resident_memory_bytes", &[]).await;
        // Mapped pages belong to the page cache, but count as the process's memory.
        let mapped = if backend == "mmap" { LENGTH as u64 } else { 0 };
        assert!(
            resident < mapped + (120 << 20),
            "{backend}: {resident} bytes are resident"
        );

        let (mut stream, mut got) = slow.pop().unwrap();
        stream.read_to_end(&mut got).await.unwrap();
        assert!(content(&got) == bytes, "{backend}: {} bytes", got.len());
        drop((stream, slow));
        eventually_async("nothing is left behind", async || {
            let http = [("transport", "http")];
            let open = daemon.sum("ringfetch_connections", &http).await;
            // One of them is the connection of this request.
            (daemon.status().await.memory_in_use_bytes == 0 && open <= 1).then_some(())
        })
        .await;
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_response_holds_a_few_windows_wherever_its_client_stops() {
    // Scenario: a client with a small receive buffer reads an object of 24 MiB by 16 KiB, over HTTP/1.1 and over gRPC.
    // Expectation: whenever it stops, at most three and four windows of 1 MiB are held: that whose end is yet to be written,
    // the next one, one that hyper has ahead with HTTP/2, and one that is read ahead.
    let setup = Setup::new("pread").set("engine.memory_budget", "96MiB");
    setup.file("objects/long", &vec![7; LENGTH]);
    let daemon = setup
        .set("limits.connection_bytes", "48MiB")
        .dataset(&["name: objects", "kind: objects", "path: objects"])
        .start();
    let head = "GET /v1/datasets/objects/objects/long HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let object = wire::object("objects", "long");
    for (address, request, windows) in [
        (daemon.http, head.as_bytes().to_vec(), 3),
        (daemon.grpc, call("ReadObject", &object), 4),
    ] {
        let mut stream = with_small_buffer(address).await;
        stream.write_all(&request).await.unwrap();
        let (mut piece, mut got) = (vec![0; 16 << 10], 0);
        while got < LENGTH {
            got += stream.read_exact(&mut piece).await.unwrap();
            let held = daemon.status().await.memory_in_use_bytes;
            assert!(held <= windows << 20, "{held} bytes are held after {got}");
        }
        drop(stream);
        daemon.gives_memory_back().await;
    }
    daemon.stop().await;
}

#[tokio::test]
async fn what_nobody_receives_is_not_read() {
    // Scenario: a client requests 24 MiB and reads nothing, while others are served; then it reads to the end.
    // Expectation: what is read for it stops at what its windows and the kernel hold; in the end the response
    // is complete, and each of its bytes was read once.
    for &backend in backends() {
        // What one connection may hold is no bound here.
        let setup = Setup::new(backend)
            .set("engine.memory_budget", "96MiB")
            .set("limits.connection_bytes", "48MiB");
        let (setup, bytes) = plain_blocks(setup, LENGTH / 4096);
        let daemon = setup.start();
        let mut stream = ask_for_all(&daemon).await;
        stream.readable().await.unwrap();
        let read = async |metric| daemon.sum(metric, &[]).await;
        let (mut before, mut still) = (0, 0);
        eventually_async("reads stop", async || {
            let now = read("ringfetch_read_bytes_total").await;
            still = if now > before { 0 } else { still + 1 };
            before = now;
            (before > 0 && still >= 50).then_some(())
        })
        .await;
        for metric in ["ringfetch_read_bytes_total", "ringfetch_device_read_bytes_total"] {
            let held = read(metric).await;
            assert!(held <= HELD_BYTES_MAX, "{backend}: {metric} is {held}");
        }

        let mut got = Vec::new();
        stream.read_to_end(&mut got).await.unwrap();
        assert!(content(&got) == bytes, "{backend}: {} bytes", got.len());
        assert_eq!(
            read("ringfetch_read_bytes_total").await,
            LENGTH as u64,
            "{backend}"
        );
        daemon.stop().await;
    }
}
