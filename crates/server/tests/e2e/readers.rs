//! Clients that read one dataset of 4 KiB blocks without pause, check every byte, and fail with the first read that fails.

use crate::daemon::{Daemon, eventually_async};
use crate::wire;
use ringfetch_proto::v1::fetch_stream_request::Request;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A dataset as its readers expect it.
pub(crate) struct Known<'a> {
    pub(crate) name: &'a str,
    /// The bytes that it may have: the oldest version first. All have the same length.
    pub(crate) versions: &'a [Vec<u8>],
}

impl Known<'_> {
    fn count(&self) -> u64 {
        (self.versions[0].len() / 4096) as u64
    }

    /// The version that a response is of; a mixture of versions is an error.
    fn version(&self, pieces: &[std::ops::Range<usize>], answer: &[u8]) -> usize {
        let is = |version: &Vec<u8>| {
            let mut rest = answer;
            let same = pieces.iter().all(|piece| {
                let Some((begin, end)) = rest.split_at_checked(piece.len()) else {
                    return false;
                };
                rest = end;
                *begin == version[piece.clone()]
            });
            same && rest.is_empty()
        };
        let found = self.versions.iter().position(is);
        found.unwrap_or_else(|| panic!("{}: wrong bytes, or of two versions", self.name))
    }
}

fn block(index: u64) -> std::ops::Range<usize> {
    let start = usize::try_from(index).expect("an index") * 4096;
    start..start + 4096
}

/// What readers have done, and whether to continue.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    stop: AtomicBool,
    answers: AtomicU64,
    /// Responses of the newest version.
    newest: AtomicU64,
    /// (dataset, version, etag) of every version seen, over any transport.
    etags: Mutex<Vec<(String, usize, String)>>,
}

impl Tally {
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub(crate) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }

    /// Responses of the newest version.
    pub(crate) fn newest(&self) -> u64 {
        self.newest.load(Ordering::Relaxed)
    }

    /// Counts a response of a version, whose etag no other version has.
    fn count(&self, known: &Known<'_>, version: usize, etag: &str) {
        let mut etags = self.etags.lock().expect("the tags seen");
        let of_this = etags.iter().filter(|(name, ..)| name == known.name);
        match of_this
            .clone()
            .find(|(_, other, tag)| (*other == version) != (tag == etag))
        {
            Some(other) => panic!("{}: version {version} has {etag}, and {other:?}", known.name),
            None if !of_this.clone().any(|(_, other, _)| *other == version) => {
                etags.push((known.name.to_owned(), version, etag.to_owned()));
            }
            None => {}
        }
        drop(etags);
        self.answers.fetch_add(1, Ordering::Relaxed);
        if version + 1 == known.versions.len() {
            self.newest.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits for this many more responses.
    pub(crate) async fn more(&self, answers: u64) {
        let enough = self.answers() + answers;
        eventually_async("the readers go on", async || {
            (self.answers() >= enough).then_some(())
        })
        .await;
    }
}

/// One call after the other; never sees an older version again after a newer one.
pub(crate) async fn unary(daemon: &Daemon, known: &Known<'_>, tally: &Tally, salt: u64) {
    let mut fetch = daemon.fetch().await;
    let mut latest = 0;
    for round in 0.. {
        if tally.stopped() {
            return;
        }
        let indices: Vec<u64> = (0..16)
            .map(|item| (item * 31 + round * 7 + salt) % known.count())
            .collect();
        let answer = fetch.fetch_blocks(wire::blocks(known.name, &indices)).await;
        let answer = answer
            .unwrap_or_else(|status| panic!("{}: {status:?}", known.name))
            .into_inner();
        assert!(answer.errors.is_empty(), "{:?}", answer.errors);
        let pieces: Vec<_> = indices.iter().map(|index| block(*index)).collect();
        let version = known.version(&pieces, &answer.data);
        assert!(
            version >= latest,
            "{}: version {version} after {latest}",
            known.name
        );
        latest = version;
        tally.count(known, version, &answer.etag);
    }
}

/// Requests that a stream has in flight.
const PIPELINED: u64 = 32;

/// One stream with many requests in flight. It ends as a client should end it: no more requests, and every
/// response read.
pub(crate) async fn streamed(daemon: &Daemon, known: &Known<'_>, tally: &Tally) {
    let count = known.count();
    let request = |id: u64| {
        wire::on_stream(
            id,
            Request::Blocks(wire::blocks(known.name, &[id % count, id * 13 % count])),
        )
    };
    let (ask, asked) = tokio::sync::mpsc::unbounded_channel();
    let mut ask = Some(ask);
    let mut fetch = daemon.fetch().await;
    for id in 0..PIPELINED {
        ask.iter()
            .for_each(|ask| ask.send(request(id)).expect("a stream"));
    }
    let requests = tokio_stream::wrappers::UnboundedReceiverStream::new(asked);
    let answers = fetch.fetch_stream(requests).await;
    let mut answers = answers.expect("a stream").into_inner();
    let mut next = PIPELINED;
    while let Some(answer) = answers.message().await.expect("a stream") {
        if tally.stopped() {
            ask = None;
        }
        if let Some(ask) = &ask {
            ask.send(request(next)).expect("a stream");
            next += 1;
        }
        let id = answer.id;
        let blocks = wire::blocks_of(answer.response);
        let blocks = blocks.unwrap_or_else(|status| panic!("{}: {status:?}", known.name));
        assert!(blocks.errors.is_empty(), "{:?}", blocks.errors);
        let pieces = [block(id % count), block(id * 13 % count)];
        tally.count(known, known.version(&pieces, &blocks.data), &blocks.etag);
    }
}

/// Long ranges over HTTP/1.1, each of the one version that its ETag names.
pub(crate) async fn ranges(daemon: &Daemon, known: &Known<'_>, tally: &Tally) {
    let http = daemon.http_client();
    let path = format!("/v1/datasets/{}/bytes", known.name);
    let length = (known.versions[0].len() / 2).min(1 << 20);
    for round in 0.. {
        if tally.stopped() {
            return;
        }
        let from = round * 40_961 % (known.versions[0].len() - length);
        let range = format!("bytes={from}-{}", from + length - 1);
        let answer = http.get_with(&path, &[("range", &range)]).await;
        assert_eq!(answer.status, 206, "{answer:?}");
        let piece = from..from + length;
        let version = known.version(std::slice::from_ref(&piece), &answer.body);
        tally.count(known, version, answer.header("etag").trim_matches('"'));
    }
}
