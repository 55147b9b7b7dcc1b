//! Clients that request large answers and do not read them.

use super::{RECONNECT_AFTER, again, each};
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

/// Read by a slow reader, a second.
const SLOW_BYTES: usize = 1000;
/// How often a creeping window grows.
const CREEP_EVERY: Duration = Duration::from_millis(10);

/// How a client fails to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Manner {
    /// Windows are open, and nothing is read from the socket.
    Nothing,
    /// Windows are open, and 1 KB a second is read.
    Slowly,
    /// The socket is read, pings are answered, and streams have a window of zero.
    ZeroWindow,
    /// The same, but each window grows by one byte every 10 ms.
    CreepingWindow,
}

/// Number of clients and size of their answers.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// gRPC connections.
    #[arg(long, default_value_t = 256)]
    pub connections: usize,
    /// Answers that each asks for.
    #[arg(long, default_value_t = 5)]
    pub answers: u32,
    /// Blocks of each answer.
    #[arg(long, default_value_t = 4096)]
    pub answer_blocks: u64,
    /// How they fail to read.
    #[arg(long, value_enum, default_value = "nothing")]
    pub manner: Manner,
    /// Do not reconnect when the daemon closes a connection; otherwise after a second.
    #[arg(long)]
    pub once: bool,
}

/// Runs the case.
///
/// # Errors
/// A task panicked.
pub async fn run(target: &Target, options: &Options, hold: &Hold, tally: &Tally) -> io::Result<()> {
    each(options.connections, |_| {
        let (target, options, hold, tally) = (target.clone(), options.clone(), hold.clone(), tally.clone());
        async move {
            let (target, options, hold, tally) = (&target, &options, &hold, &tally);
            let reconnect_after = (!options.once).then_some(RECONNECT_AFTER);
            let connect = || target.connect_with(target.grpc, Some(RECEIVE_BYTES));
            again(hold, tally, reconnect_after, connect, |stream| async move {
                if let Some(how) = hold.unless_ended(stall(stream, target, options, tally)).await {
                    tally.closed(&how);
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
        Manner::Nothing | Manner::Slowly => WINDOW_MAX,
        Manner::ZeroWindow | Manner::CreepingWindow => 0,
    };
    let mut out = Vec::new();
    put_opening(&mut out, window);
    let message = fetch_blocks(target, 0..options.answer_blocks.min(target.blocks));
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
        Manner::Nothing => nothing(&stream).await,
        Manner::Slowly => slowly(&mut stream, tally).await,
        Manner::ZeroWindow => politely(&mut stream, &[], tally).await,
        Manner::CreepingWindow => {
            let mut grown = Vec::new();
            for stream in streams {
                put(&mut grown, WINDOW_UPDATE, 0, stream, &1_u32.to_be_bytes());
            }
            politely(&mut stream, &grown, tally).await
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

async fn slowly(stream: &mut TcpStream, tally: &Tally) -> io::Result<String> {
    let mut looks = tokio::time::interval(Duration::from_secs(1));
    let mut scrap = vec![0; SLOW_BYTES];
    loop {
        looks.tick().await;
        match stream.read(&mut scrap).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => tally.received(length),
        }
    }
}

/// Reads all frames and answers those that require it; sends the window updates `grown` again and again.
async fn politely(stream: &mut TcpStream, grown: &[u8], tally: &Tally) -> io::Result<String> {
    let (reader, mut writer) = stream.split();
    let mut reader = tokio::io::BufReader::new(reader);
    let (replies, mut to_write) = tokio::sync::mpsc::channel::<Vec<u8>>(16);
    let write = async {
        let mut ticks = tokio::time::interval(CREEP_EVERY);
        loop {
            tokio::select! {
                _ = ticks.tick(), if !grown.is_empty() => {
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
