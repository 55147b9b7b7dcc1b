//! Connections that never complete a request: half heads, half bodies, one byte a second, idle.

use super::{OPENING_AT_A_TIME, RECONNECT_AFTER, again, each};
use crate::frames::{
    CONTINUATION, END_HEADERS, END_STREAM, FRAME_BYTES_MAX, HEADERS, PREFACE, WINDOW_AT_FIRST, ending,
    grpc_fields, put, put_field_start, put_fields, put_opening, wait_politely,
};
use crate::grpc::{FETCH_STREAM, UNKNOWN_METHOD};
use crate::hold::Hold;
use crate::http1;
use crate::tally::Tally;
use crate::target::Target;
use clap::ValueEnum;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

/// How far a connection gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// To the HTTP port, nothing sent.
    Silent,
    /// Half of the head of a GET.
    HalfHead,
    /// The head of a GET, a byte a second, without end.
    SlowHead,
    /// A whole head of a POST and a few bytes of its body.
    HalfBody,
    /// The same, then a byte of the body a second.
    SlowBody,
    /// One whole GET, then nothing.
    IdleHttp,
    /// Half of HTTP/2's preface.
    HalfPreface,
    /// The preface and settings, a byte a second.
    SlowPreface,
    /// A FetchStream, and the head of another call, of which 16 KiB come at once and then a byte a second, without end.
    SlowHttp2Head,
    /// A whole handshake of HTTP/2, pings answered, no call unless `calls` says so.
    IdleHttp2,
}

impl Kind {
    fn is_for_grpc(self) -> bool {
        matches!(
            self,
            Self::HalfPreface | Self::SlowPreface | Self::SlowHttp2Head | Self::IdleHttp2
        )
    }
}

/// Number of connections and what they do.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Connections in all.
    #[arg(long, default_value_t = 10_000)]
    pub connections: usize,
    /// What they do, in turn, with commas between; all kinds if left out.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub kinds: Vec<Kind>,
    /// Calls of an unknown method, sent at once, before an `idle-http2` connection is idle.
    #[arg(long, default_value_t = 0)]
    pub calls: usize,
    /// Do not reconnect when the daemon closes a connection; otherwise after a second.
    #[arg(long)]
    pub once: bool,
}

/// Runs the case.
///
/// # Errors
/// A task panicked.
pub async fn run(target: &Target, options: &Options, hold: &Hold, tally: &Tally) -> io::Result<()> {
    let opening = Arc::new(Semaphore::new(OPENING_AT_A_TIME));
    let kinds = match &options.kinds[..] {
        [] => Kind::value_variants(),
        kinds => kinds,
    };
    each(options.connections, |number| {
        let kind = kinds[number % kinds.len()];
        let (target, options, hold) = (target.clone(), options.clone(), hold.clone());
        let (tally, opening) = (tally.clone(), Arc::clone(&opening));
        async move {
            let (target, options, hold, tally) = (&target, &options, &hold, &tally);
            let address = if kind.is_for_grpc() {
                target.grpc
            } else {
                target.http
            };
            let reconnect_after = (!options.once).then_some(RECONNECT_AFTER);
            let connect = || async {
                let _permit = opening.acquire().await;
                target.connect(address).await
            };
            let attack = |stream| stay(stream, kind, options.calls, target, hold, tally);
            again(hold, tally, reconnect_after, connect, attack).await;
        }
    })
    .await
}

async fn stay(mut stream: TcpStream, kind: Kind, calls: usize, target: &Target, hold: &Hold, tally: &Tally) {
    let mut opening = Vec::new();
    let mut slow: &[u8] = &[];
    match kind {
        Kind::Silent => {}
        Kind::HalfHead => opening.extend_from_slice(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Half:"),
        Kind::SlowHead => {
            opening.extend_from_slice(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ");
            slow = b"a";
        }
        Kind::HalfBody | Kind::SlowBody => {
            let path = format!("/v1/datasets/{}/blocks:batchFetch", target.dataset);
            let head = format!(
                "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: \
                 1000000\r\n\r\n{{\"indices\": ["
            );
            opening.extend_from_slice(head.as_bytes());
            if kind == Kind::SlowBody {
                slow = b" ";
            }
        }
        Kind::IdleHttp => {
            // The answer of /livez is small for any dataset.
            match hold.unless_ended(http1::get(&mut stream, "/livez")).await {
                None => return,
                Some(Err(error)) => return tally.closed(&ending(&error)),
                Some(Ok(_)) => tally.change(|counts| counts.answers += 1),
            }
        }
        Kind::HalfPreface => opening.extend_from_slice(&PREFACE[..12]),
        Kind::SlowPreface => slow = PREFACE,
        Kind::SlowHttp2Head => {
            put_slow_head(&mut opening);
            slow = b"a";
        }
        Kind::IdleHttp2 => {
            put_opening(&mut opening, WINDOW_AT_FIRST);
            let mut fields = Vec::new();
            put_fields(&mut fields, &grpc_fields(UNKNOWN_METHOD));
            for stream in (1..).step_by(2).take(calls) {
                put(&mut opening, HEADERS, END_HEADERS | END_STREAM, stream, &fields);
            }
            return wait_politely(stream, &opening, hold, tally).await;
        }
    }
    match hold.unless_ended(drip(&mut stream, &opening, slow, tally)).await {
        None => {}
        Some(Ok(())) => tally.closed("end of stream"),
        Some(Err(error)) => tally.closed(&ending(&error)),
    }
}

/// A FetchStream, which may stay open, and the head of another one, up to the first byte of a CONTINUATION frame. Their only field
/// does not end, so that nothing of it can be decoded.
fn put_slow_head(out: &mut Vec<u8>) {
    put_opening(out, WINDOW_AT_FIRST);
    let mut fields = Vec::new();
    put_fields(&mut fields, &grpc_fields(FETCH_STREAM));
    put(out, HEADERS, END_HEADERS, 1, &fields);
    put_field_start(&mut fields, "x-slow", 1 << 20);
    fields.resize(FRAME_BYTES_MAX, b'a');
    put(out, HEADERS, 0, 3, &fields);
    put(out, CONTINUATION, 0, 3, &[b'a'; FRAME_BYTES_MAX]);
    out.truncate(out.len() - FRAME_BYTES_MAX + 1);
}

/// Sends the opening, then one byte of `slow` a second, repeatedly, and reads until the daemon closes.
async fn drip(stream: &mut TcpStream, opening: &[u8], slow: &[u8], tally: &Tally) -> io::Result<()> {
    stream.write_all(opening).await?;
    tally.sent(opening.len());
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    let mut bytes = slow.iter().cycle();
    let mut scrap = [0; 1024];
    loop {
        tokio::select! {
            read = stream.read(&mut scrap) => {
                let length = read?;
                if length == 0 {
                    return Ok(());
                }
                tally.received(length);
                let line = str::from_utf8(&scrap[..length]).unwrap_or_default();
                if let Some(status) = http1::status_of(line) {
                    tally.refused(&format!("HTTP {status}"), None);
                }
            }
            _ = ticks.tick(), if !slow.is_empty() => {
                if let Some(byte) = bytes.next() {
                    stream.write_all(&[*byte]).await?;
                    tally.sent(1);
                }
            }
        }
    }
}
