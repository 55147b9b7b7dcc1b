//! Clients that request large answers and do not read them.

use super::{again, each};
use crate::frames::{
    Reaction, WINDOW_MAX, WINDOW_UPDATE, ending, put, put_call, put_opening, react, read_frame,
};
use crate::grpc::{FETCH_BLOCKS, fetch_blocks};
use crate::hold::Hold;
use crate::tally::{Tally, cause};
use crate::target::Target;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// A small receive buffer, so that unread data stays with the daemon.
const RECEIVE_BYTES: u32 = 16 << 10;
/// How often an unread connection is checked for being open.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// How a client fails to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// Windows are open, and nothing is read from the socket.
    ReadsNothing,
    /// Windows are open, and this many bytes a second are read.
    ReadsSlowly {
        /// Bytes a second.
        bytes: usize,
    },
    /// The socket is read, pings are answered, and streams have a window of zero.
    ZeroWindow,
    /// As `ZeroWindow`, but each window grows by one byte each time.
    CreepingWindow {
        /// How often.
        every: Duration,
    },
}

/// Number of clients and size of their answers.
#[derive(Debug, Clone)]
pub struct Options {
    /// gRPC connections.
    pub connections: usize,
    /// Calls on each.
    pub answers: u32,
    /// Blocks per answer.
    pub blocks: u64,
    /// How they fail to read.
    pub manner: Manner,
    /// Whether a connection that the daemon closes is reopened after a second.
    pub reconnect: bool,
}

impl Default for Options {
    /// 256 connections, five answers of 4096 blocks each, nothing read, with reconnection.
    fn default() -> Self {
        Self {
            connections: 256,
            answers: 5,
            blocks: 4096,
            manner: Manner::ReadsNothing,
            reconnect: true,
        }
    }
}

/// Runs the case.
///
/// # Errors
/// A task panicked.
pub async fn run(target: &Target, options: &Options, hold: &Hold, tally: &Tally) -> io::Result<()> {
    each(options.connections, |_| {
        let (target, options, hold, tally) = (target.clone(), options.clone(), hold.clone(), tally.clone());
        async move {
            again(&hold, options.reconnect, || async {
                let connect = target.connect_with(target.grpc, Some(RECEIVE_BYTES));
                match hold.unless_ended(connect).await {
                    None => {}
                    Some(Err(error)) => tally.connect_failed(&error),
                    Some(Ok(stream)) => {
                        tally.connected();
                        if let Some(how) = hold.unless_ended(stall(stream, &target, &options, &tally)).await {
                            tally.closed(&how);
                        }
                        tally.disconnected();
                    }
                }
            })
            .await;
        }
    })
    .await
}

/// One connection, until the daemon closes it; returns how it ended.
async fn stall(mut stream: TcpStream, target: &Target, options: &Options, tally: &Tally) -> String {
    let window = match options.manner {
        Manner::ReadsNothing | Manner::ReadsSlowly { .. } => WINDOW_MAX,
        Manner::ZeroWindow | Manner::CreepingWindow { .. } => 0,
    };
    let mut out = Vec::new();
    put_opening(&mut out, window);
    let message = fetch_blocks(target, 0..options.blocks.min(target.blocks));
    let streams = (0..options.answers).map(|call| call.saturating_mul(2).saturating_add(1));
    for stream in streams.clone() {
        put_call(&mut out, stream, FETCH_BLOCKS, &message);
    }
    if let Err(error) = stream.write_all(&out).await {
        return cause(&error);
    }
    tally.sent(out.len());
    tally.change(|counts| counts.calls = counts.calls.saturating_add(options.answers.into()));
    let closed = match options.manner {
        Manner::ReadsNothing => nothing(&stream).await,
        Manner::ReadsSlowly { bytes } => slowly(&mut stream, bytes, tally).await,
        Manner::ZeroWindow => politely(&mut stream, None, tally).await,
        Manner::CreepingWindow { every } => {
            let mut grown = Vec::new();
            for stream in streams {
                put(&mut grown, WINDOW_UPDATE, 0, stream, &1_u32.to_be_bytes());
            }
            politely(&mut stream, Some((every, grown)), tally).await
        }
    };
    closed.unwrap_or_else(|error| ending(&error))
}

async fn nothing(stream: &TcpStream) -> io::Result<String> {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    loop {
        looks.tick().await;
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
    }
}

async fn slowly(stream: &mut TcpStream, bytes: usize, tally: &Tally) -> io::Result<String> {
    let mut looks = tokio::time::interval(Duration::from_secs(1));
    let mut scrap = vec![0; bytes];
    loop {
        looks.tick().await;
        match stream.read(&mut scrap).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => tally.received(length),
        }
    }
}

/// Reads all frames and answers those that require it; sends window updates if requested.
async fn politely(
    stream: &mut TcpStream,
    creep: Option<(Duration, Vec<u8>)>,
    tally: &Tally,
) -> io::Result<String> {
    let (reader, mut writer) = stream.split();
    let mut reader = tokio::io::BufReader::new(reader);
    let (replies, mut to_write) = tokio::sync::mpsc::channel::<Vec<u8>>(16);
    let write = async {
        let mut ticks =
            tokio::time::interval(creep.as_ref().map_or(Duration::from_secs(3600), |creep| creep.0));
        loop {
            tokio::select! {
                _ = ticks.tick() => if let Some((_, grown)) = &creep {
                    writer.write_all(grown).await?;
                    tally.sent(grown.len());
                },
                reply = to_write.recv() => match reply {
                    Some(reply) => writer.write_all(&reply).await?,
                    None => return Ok::<String, io::Error>("closed here".to_owned()),
                },
            }
        }
    };
    let read = async {
        loop {
            let (head, payload) = read_frame(&mut reader).await?;
            tally.received(head.length + 9);
            match head.kind {
                // An answer that ends at once is a refusal; its code is compressed and not decoded.
                crate::frames::HEADERS if head.flags & crate::frames::END_STREAM != 0 => {
                    tally.refused("refused", None);
                }
                crate::frames::RST_STREAM => tally.closed("RST_STREAM"),
                _ => {}
            }
            match react(head, &payload) {
                Reaction::None => {}
                Reaction::Send(reply) => drop(replies.send(reply).await),
                Reaction::End(how) => return Ok(how),
            }
        }
    };
    tokio::select! {
        ended = read => ended,
        ended = write => ended,
    }
}
