//! Responses that HTTP/2 would take and keep: JSON, which is longer than the data it is made of, and those of streams.

use crate::daemon::{Daemon, Setup, any_backend, backends, eventually_async};
use crate::data::{noise, plain_blocks};
use crate::garbage::{PREFACE, frame, post};
use crate::wire::{self, Narrow};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use prost::Message as _;
use ringfetch_proto::v1::fetch_stream_request::Request;
use serde_json::json;
use std::net::SocketAddr;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

const BATCHES: u32 = 24;
const BLOCKS: usize = 180;
const BATCHES_BYTES: u64 = BATCHES as u64 * BLOCKS as u64 * 4096;
const JSON: (&str, &str) = ("accept", "application/json");

/// Sends POSTs on one HTTP/2 connection that allows any number of unread bytes, and reads nothing.
async fn post_unread(
    address: SocketAddr,
    streams: u32,
    path: &str,
    media_type: &str,
    body: &[u8],
) -> TcpStream {
    let (data, headers, settings, window_update) = (0, 1, 4, 8);
    let (end_stream, end_headers) = (1, 4);
    let most = 0x7fff_ffff_u32;
    // SETTINGS_INITIAL_WINDOW_SIZE; a connection begins with 65,535.
    let mut asked = [
        PREFACE,
        &frame(settings, 0, 0, &[&[0, 4][..], &most.to_be_bytes()].concat()),
        &frame(window_update, 0, 0, &(most - 65_535).to_be_bytes()),
    ]
    .concat();
    // Literals without indexing, of the static table's content-type and accept (RFC 7541, Appendix A).
    let length = [u8::try_from(media_type.len()).unwrap()];
    let value = [&length[..], media_type.as_bytes()].concat();
    let head = [&post(path)[..], &[0x0f, 0x10], &value, &[0x0f, 0x04], &value].concat();
    for number in 0..streams {
        let stream = 2 * number + 1;
        asked.extend(frame(headers, end_headers, stream, &head));
        asked.extend(frame(data, end_stream, stream, body));
    }
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&asked).await.unwrap();
    stream
}

/// Waits until so many bytes are read for responses, and then no memory is taken or given back for a while.
async fn stands_still(daemon: &Daemon, read_bytes: u64) {
    let (mut last, mut still) = (0, 0);
    eventually_async("everything is read, and then nothing changes", async || {
        let scrape = daemon.scrape().await;
        let read = scrape.sum("ringfetch_read_bytes_total", &[]);
        let now = read + scrape.sum("ringfetch_memory_in_use_bytes", &[]);
        still = if now == last { still + 1 } else { 0 };
        last = now;
        (read >= read_bytes && still >= 20).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_batch_in_json_holds_its_data_and_little_text() {
    // Scenario: 24 batches of 720 KiB are requested as JSON on one HTTP/2 connection, which nobody reads. Expectation: in
    // the end their data is still counted as memory in use, except for what the kernel holds, and their text takes
    // hardly any.
    let setup = Setup::new(any_backend()).set("engine.memory_budget", "128MiB");
    let (setup, _) = plain_blocks(setup, BLOCKS);
    let daemon = setup.start();
    daemon.assert_serves("blocks").await;
    let before = daemon.resident_mib();
    let indices: Vec<usize> = (0..BLOCKS).collect();
    let body = json!({ "indices": indices }).to_string();
    let path = "/v1/datasets/blocks/blocks:batchFetch";
    let unread = post_unread(daemon.http, BATCHES, path, JSON.1, body.as_bytes()).await;
    stands_still(&daemon, BATCHES_BYTES).await;
    let held = daemon.status().await.memory_in_use_bytes;
    assert!(held >= BATCHES_BYTES / 2, "{held} bytes are in use");
    let grown = daemon.resident_mib() - before;
    // With a page of slack per stream, and what the allocator keeps.
    let most = BATCHES_BYTES / (1 << 20) + 16;
    assert!(
        grown < f64::from(u32::try_from(most).unwrap()),
        "{grown} MiB more are resident"
    );
    drop(unread);
    daemon.gives_memory_back().await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_vector_may_be_longer_as_json_than_all_request_memory() {
    // Scenario: a vector of 2^18 numbers, 5 MB as JSON, where request memory is 3 MiB, over HTTP/1.1; and a batch of it.
    // Expectation: 200 with its numbers, and no failure.
    const DIM: usize = 1 << 18;
    let numbers: Vec<f64> = noise(8, 4 * DIM)
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| f64::from(u32::from_le_bytes(*bytes)) / 7.0)
        .collect();
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    for &backend in backends() {
        let setup = Setup::new(backend)
            .set("limits.request_bytes", "64KiB")
            .set("limits.items_per_request", "256")
            .set("limits.request_memory", "3MiB");
        setup.file("long", &bytes);
        let shape = format!("dim: {DIM}");
        let lines = [
            "name: long",
            "kind: vectors",
            "path: long",
            "layout: raw",
            &shape,
            "dtype: f64",
        ];
        let daemon = setup.dataset(&lines).start();
        let http = daemon.http_client();
        let one = http.get_with("/v1/datasets/long/vectors/0", &[JSON]).await;
        assert_eq!(one.status, 200, "{backend}: {one:?}");
        assert!(one.body == serde_json::to_vec(&numbers).unwrap(), "{backend}");
        let batch = "/v1/datasets/long/vectors:batchFetch";
        let batch = http
            .batch(batch, &json!({ "ids": [0] }), "application/json")
            .await;
        let data = BASE64_STANDARD.decode(batch.json()["data"].as_str().unwrap());
        assert!(data.unwrap() == bytes, "{backend}");
        daemon.gives_memory_back().await;
        daemon.stop().await;
    }
}

#[tokio::test]
async fn what_a_stream_has_answered_and_nobody_reads_is_little() {
    // Scenario: eight FetchStreams on one connection that nobody reads, each with hundreds of requests of 64 KiB, of which
    // one may be in flight. Expectation: besides what the kernel holds, HTTP/2 holds 128 KiB of each, and the frame that
    // goes beyond.
    const STREAMS: u32 = 8;
    const BYTES: u64 = 64 << 10;
    let setup = Setup::new(any_backend()).set("limits.stream_requests_in_flight", "1");
    let (setup, _) = plain_blocks(setup, 16);
    let daemon = setup.start();
    let request = Request::Ranges(wire::ranges("blocks", &[(0, BYTES)]));
    let request = wire::framed(&wire::on_stream(1, request).encode_to_vec());
    // A stream's window.
    let body = request.repeat((16 << 10) / request.len());
    let path = "/ringfetch.v1.FetchService/FetchStream";
    let unread = post_unread(daemon.grpc, STREAMS, path, "application/grpc", &body).await;
    stands_still(&daemon, u64::from(STREAMS) * 4 * BYTES).await;
    let held = daemon.status().await.memory_in_use_bytes;
    // Two in HTTP/2's buffer, the one beyond, that of the next frame, one in flight; and a page each.
    let most = u64::from(STREAMS) * 5 * (BYTES + 4096);
    assert!(held <= most, "{held} bytes are held");
    drop(unread);
    daemon.gives_memory_back().await;
    daemon.stop().await;
}

#[tokio::test]
async fn the_text_between_ranges_is_charged() {
    // Scenario: 300 requests for 64 ranges of a byte on four connections, which nobody reads: some 15 KiB of text each. An address
    // may hold 4 MiB of request memory. Expectation: some are refused with 429, and as many as before are answered when the
    // others have gone.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let daemon = setup
        .set("limits.request_bytes", "1MiB")
        .set("limits.items_per_request", "64")
        .set("limits.request_memory", "12MiB")
        .start();
    let ranges = (0..64)
        .map(|index| format!("{0}-{0}", 2 * index))
        .collect::<Vec<_>>();
    let ranges = format!("bytes={}", ranges.join(","));
    for _ in 0..2 {
        let mut statuses = Vec::new();
        let mut held = Vec::new();
        for _ in 0..4 {
            let mut unread = Vec::new();
            let mut narrow = Narrow::connect(daemon.http, 0).await;
            for _ in 0..75 {
                let path = "/v1/datasets/blocks/bytes";
                let answer = narrow.ask_get_with(path, &[("range", &ranges)]).await;
                statuses.push(answer.head.status.as_u16());
                unread.push(answer);
            }
            held.push((narrow, unread));
        }
        let answered = statuses.iter().take_while(|status| **status == 206).count();
        assert!((100..250).contains(&answered), "{statuses:?}");
        assert!(statuses.contains(&429), "{statuses:?}");
        drop(held);
        eventually_async("their memory is free", async || {
            let open = daemon
                .sum("ringfetch_connections", &[("transport", "http")])
                .await;
            (open <= 1).then_some(())
        })
        .await;
    }
    daemon.stop().await;
}
