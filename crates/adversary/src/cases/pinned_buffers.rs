//! Few bytes of which HTTP/2 keeps the whole buffer that they were received in, between frames that are read.

use super::{OPENING_AT_A_TIME, REPLACE_AFTER, again, each};
use crate::frames::{
    DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, WINDOW_AT_FIRST, ending, goaway, grpc_fields, put,
    put_entries, put_fields, put_opening, read_frame,
};
use crate::grpc::{FETCH_STREAM, UNKNOWN_METHOD};
use crate::hold::Hold;
use crate::tally::Tally;
use crate::target::Target;
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Semaphore;

/// Body of a request that nobody serves, so that nothing of it is kept: it fills a receive buffer of h2.
const FILLER_BYTES: usize = 8 << 10;
const SHORT_PATH: &str = "/";
/// A table of 4 KiB has this many entries of it, 38 bytes each.
const ENTRIES_MAX: u32 = 107;

/// What keeps the buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// DATA frames on FetchStreams that are not read, since their client takes no answers.
    Data,
    /// Entries of HPACK's dynamic table: a path in each head. No request stays open.
    Entries,
}

/// Number of connections, and what keeps the buffers.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// gRPC connections.
    #[arg(long, default_value_t = 64)]
    pub connections: usize,
    /// What keeps the buffers.
    #[arg(long, value_enum, default_value = "data")]
    pub kind: Kind,
    /// FetchStreams of each connection.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub streams: u32,
    /// Bytes of each DATA frame on them. They are filled up to their windows.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    pub frame_bytes: u32,
}

/// Runs the case. A connection that is closed is replaced at once.
///
/// # Errors
/// A task panicked.
pub async fn run(target: &Target, options: &Options, hold: &Hold, tally: &Tally) -> io::Result<()> {
    let opening = Arc::new(Semaphore::new(OPENING_AT_A_TIME));
    each(options.connections, |_| {
        let (target, options, hold, tally) = (target.clone(), options.clone(), hold.clone(), tally.clone());
        let opening = Arc::clone(&opening);
        async move {
            let (options, hold, tally) = (&options, &hold, &tally);
            let connect = || async {
                let _permit = opening.acquire().await;
                target.connect(target.grpc).await
            };
            again(hold, tally, Some(REPLACE_AFTER), connect, |stream| async move {
                if let Some(how) = hold.unless_ended(pin(stream, options, tally)).await {
                    tally.closed(&how);
                }
            })
            .await;
        }
    })
    .await
}

/// One connection, until the daemon closes it; returns how it ended.
async fn pin(stream: TcpStream, options: &Options, tally: &Tally) -> String {
    let (reader, writer) = stream.into_split();
    tokio::select! {
        how = read(reader, tally) => how,
        error = write(writer, options, tally) => ending(&error),
    }
}

/// Reads until the end. A request to leave is ignored.
async fn read(reader: OwnedReadHalf, tally: &Tally) -> String {
    let mut reader = BufReader::new(reader);
    loop {
        match read_frame(&mut reader).await {
            Ok((head, payload)) => {
                tally.received(head.length + 9);
                if head.kind == GOAWAY && payload.get(4..8) != Some(&[0; 4]) {
                    return goaway(&payload);
                }
            }
            Err(error) => return ending(&error),
        }
    }
}

/// Sends all that may be sent, and then nothing.
async fn write(mut writer: OwnedWriteHalf, options: &Options, tally: &Tally) -> io::Error {
    let mut frames = Frames::new(options);
    let mut out = frames.opening();
    loop {
        if let Err(error) = writer.write_all(&out).await {
            return error;
        }
        tally.sent(out.len());
        out.clear();
        if !frames.put_next(&mut out) {
            return std::future::pending().await;
        }
        tally.change(|counts| counts.frames_sent += 1);
    }
}

struct Frames {
    options: Options,
    /// The head of a request that nobody serves.
    filler: Vec<u8>,
    /// Pairs so far of a frame or entry that keeps a buffer, and of a request that fills it.
    pairs: u32,
}

impl Frames {
    fn new(options: &Options) -> Self {
        let mut filler = Vec::new();
        match options.kind {
            Kind::Data => put_fields(&mut filler, &grpc_fields(UNKNOWN_METHOD)),
            Kind::Entries => {
                let (path, others): (Vec<_>, Vec<_>) = grpc_fields(SHORT_PATH)
                    .into_iter()
                    .partition(|(name, _)| *name == ":path");
                put_entries(&mut filler, &path);
                put_fields(&mut filler, &others);
            }
        }
        Self {
            options: options.clone(),
            filler,
            pairs: 0,
        }
    }

    fn streams(&self) -> u32 {
        match self.options.kind {
            Kind::Data => self.options.streams.max(1),
            Kind::Entries => 0,
        }
    }

    /// No window for answers, and the streams.
    fn opening(&self) -> Vec<u8> {
        let (mut out, mut head) = (Vec::new(), Vec::new());
        put_opening(&mut out, 0);
        put_fields(&mut head, &grpc_fields(FETCH_STREAM));
        for stream in 0..self.streams() {
            put(&mut out, HEADERS, END_HEADERS, number(stream), &head);
        }
        out
    }

    /// Appends the next pair. `false`: there is no room for more.
    fn put_next(&mut self, out: &mut Vec<u8>) -> bool {
        let (pair, streams) = (self.pairs, self.streams());
        match self.options.kind {
            Kind::Data => {
                let bytes = self.options.frame_bytes.max(1);
                if pair / streams >= WINDOW_AT_FIRST / bytes {
                    return false;
                }
                let payload = vec![0; usize::try_from(bytes).unwrap_or(0)];
                put(out, DATA, 0, number(pair % streams), &payload);
            }
            Kind::Entries if pair == ENTRIES_MAX => return false,
            Kind::Entries => {}
        }
        self.pairs += 1;
        let filler = number(streams + pair);
        put(out, HEADERS, END_HEADERS, filler, &self.filler);
        put(out, DATA, END_STREAM, filler, &[0; FILLER_BYTES]);
        true
    }
}

/// Of a client's stream, counted from 0.
fn number(stream: u32) -> u32 {
    2 * stream + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::list_bytes;
    use crate::tally::wide;

    /// How many pairs there are, and the bytes on the streams.
    fn sent(kind: Kind, streams: u32, frame_bytes: u32) -> (u32, u32) {
        let mut frames = Frames::new(&Options {
            connections: 1,
            kind,
            streams,
            frame_bytes,
        });
        let (mut pairs, mut out) = (0, Vec::new());
        while frames.put_next(&mut out) {
            pairs += 1;
            out.clear();
        }
        (pairs, pairs * frame_bytes)
    }

    #[test]
    fn windows_and_tables_are_filled_and_not_overfilled() {
        // Scenario: frames of a byte on one stream, of 2 KiB on three; entries. Expectation: as many as fit into the windows, and
        // into a table of 4 KiB.
        assert_eq!(sent(Kind::Data, 1, 1), (65_535, 65_535));
        assert_eq!(sent(Kind::Data, 3, 2048), (3 * 31, 3 * 31 * 2048));
        assert_eq!(sent(Kind::Entries, 3, 1).0, ENTRIES_MAX);
        let entry = list_bytes(&[(":path", SHORT_PATH)]);
        assert_eq!(wide(4096 / entry), u64::from(ENTRIES_MAX));
    }
}
