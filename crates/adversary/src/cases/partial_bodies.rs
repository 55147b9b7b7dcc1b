//! Calls whose request is announced, sent in part, and never ended.

use super::each;
use crate::frames::grpc_prefix;
use crate::grpc::{Connection, Ended, ended, how, request};
use crate::hold::Hold;
use crate::tally::Tally;
use crate::target::Target;
use bytes::Bytes;
use h2::SendStream;
use std::future::poll_fn;
use std::io;
use std::time::Instant;
use tokio::task::JoinSet;

/// Sent in parts of this size, so that all calls grow together.
const PART_BYTES: usize = 64 << 10;

/// Number of calls and size of their bodies.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// gRPC connections.
    #[arg(long, default_value_t = 64)]
    pub connections: usize,
    /// Calls on each, at the same time.
    #[arg(long, default_value_t = 200)]
    pub calls: usize,
    /// Bytes of each call that are sent, of 4 MiB announced.
    #[arg(long, default_value_t = (4 << 20) - 1)]
    pub body_bytes: usize,
    /// Announced length of the message.
    #[arg(skip = 4_usize << 20)]
    pub announced_bytes: usize,
}

/// Runs the case.
///
/// # Errors
/// A task panicked.
pub async fn run(target: &Target, options: &Options, hold: &Hold, tally: &Tally) -> io::Result<()> {
    each(options.connections, |_| {
        let (target, options, hold, tally) = (target.clone(), options.clone(), hold.clone(), tally.clone());
        async move {
            let connection = match hold.unless_ended(Connection::open(&target)).await {
                None => return,
                Some(Err(error)) => return tally.connect_failed(&error),
                Some(Ok(connection)) => connection,
            };
            tally.connected();
            let mut calls = JoinSet::new();
            for _ in 0..options.calls {
                let (sender, options, tally) = (connection.sender.clone(), options.clone(), tally.clone());
                calls.spawn(async move {
                    let begun = Instant::now();
                    let called = call(sender, &options, &tally).await;
                    let ended = called.unwrap_or_else(|error| Ended::Broken(how(&error)));
                    ended.count(begun.elapsed(), &tally);
                });
            }
            hold.unless_ended(async { while calls.join_next().await.is_some() {} })
                .await;
            tally.disconnected();
        }
    })
    .await
}

async fn call(
    sender: h2::client::SendRequest<Bytes>,
    options: &Options,
    tally: &Tally,
) -> Result<Ended, h2::Error> {
    let mut sender = sender.ready().await?;
    let (response, mut body) = sender.send_request(request(), false)?;
    tally.change(|counts| counts.calls += 1);
    let send = async {
        put(
            &mut body,
            Bytes::copy_from_slice(&grpc_prefix(options.announced_bytes)),
            tally,
        )
        .await?;
        let part = Bytes::from(vec![0; PART_BYTES]);
        let mut rest = options.body_bytes;
        while rest > 0 {
            let length = rest.min(PART_BYTES);
            put(&mut body, part.slice(..length), tally).await?;
            rest -= length;
        }
        // The body stays open: it neither continues nor ends.
        std::future::pending::<()>().await;
        Ok(())
    };
    tokio::select! {
        ended = ended(response) => ended,
        Err(error) = send => Err(error),
    }
}

/// Sends bytes as the daemon's windows allow.
async fn put(body: &mut SendStream<Bytes>, mut bytes: Bytes, tally: &Tally) -> Result<(), h2::Error> {
    while !bytes.is_empty() {
        body.reserve_capacity(bytes.len());
        let Some(capacity) = poll_fn(|context| body.poll_capacity(context)).await else {
            // The stream has ended; its response says how.
            return std::future::pending().await;
        };
        let part = bytes.split_to(capacity?.min(bytes.len()));
        tally.sent(part.len());
        body.send_data(part, false)?;
    }
    Ok(())
}
