//! Clients that read very slowly slow only themselves.

use crate::daemon::{Setup, backends, eventually_async};
use crate::data::noise;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;

const LENGTH: usize = 24 << 20;

#[tokio::test]
async fn slow_readers_hold_two_windows_each_and_stop_nobody() {
    // Scenario: six clients request 24 MiB and read 1 KiB now and then, while others request blocks.
    // Expectation: each holds at most two windows of 1 MiB, the process stays small, every block is served
    // promptly; a slow reader that continues gets all of its bytes, and those that disconnect leave nothing
    // behind.
    let bytes = noise(90, LENGTH);
    for &backend in backends() {
        let setup = Setup::new(backend).set("limits.connection_bytes", "8MiB");
        setup.file("blocks.bin", &bytes);
        let setup = setup.dataset(&[
            "name: blocks",
            "kind: blocks",
            "block_bytes: 4KiB",
            "path: blocks.bin",
        ]);
        let daemon = setup.start();
        let mut slow = Vec::new();
        for _ in 0..6 {
            let socket = TcpSocket::new_v4().unwrap();
            socket.set_recv_buffer_size(4096).unwrap();
            let mut stream = socket.connect(daemon.http).await.unwrap();
            stream
                .write_all(
                    b"GET /v1/datasets/blocks/bytes HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
                )
                .await
                .unwrap();
            slow.push((stream, Vec::new()));
        }
        let mut longest = Duration::ZERO;
        for round in 0..15 {
            for (stream, got) in &mut slow {
                let mut piece = [0; 1024];
                stream.read_exact(&mut piece).await.unwrap();
                got.extend_from_slice(&piece);
            }
            let begun = Instant::now();
            daemon.assert_serves("blocks").await;
            longest = longest.max(begun.elapsed());
            let held = daemon.status().await.memory_in_use_bytes;
            assert!(
                held <= 6 * (2 << 20) + (1 << 20),
                "{backend}, round {round}: {held} bytes are held"
            );
        }
        assert!(
            longest < Duration::from_secs(5),
            "{backend}: a block took {longest:?}"
        );
        let resident = daemon.scrape().await.sum("process_resident_memory_bytes", &[]);
        // Mapped pages belong to the page cache, but count as the process's memory.
        #[expect(clippy::cast_precision_loss, reason = "megabytes")]
        let mapped = if backend == "mmap" { LENGTH as f64 } else { 0.0 };
        assert!(
            resident - mapped < f64::from(120 << 20),
            "{backend}: {resident} bytes are resident"
        );

        // A head before a blank line, then the bytes.
        let (mut stream, mut got) = slow.pop().unwrap();
        stream.read_to_end(&mut got).await.unwrap();
        let end = got.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
        assert!(got[end..] == bytes, "{backend}: {} bytes", got.len() - end);
        drop((stream, slow));
        eventually_async("nothing is left behind", async || {
            let open = daemon
                .scrape()
                .await
                .sum("ringfetch_connections", &[("transport", "http")]);
            // One of them is the connection of this request.
            (daemon.status().await.memory_in_use_bytes == 0 && open < 1.5).then_some(())
        })
        .await;
        daemon.stop().await;
    }
}
