//! Many callers that ask for the same block at the same moment.

use super::each;
use crate::grpc::{Connection, Ended, blocks_of, fetch_blocks};
use crate::hold::Hold;
use crate::tally::Tally;
use crate::target::Target;
use std::io;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

/// Number of callers and the block they ask for.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Callers.
    #[arg(long, default_value_t = 1000)]
    pub callers: usize,
    /// Connections that they share.
    #[arg(long, default_value_t = 50)]
    pub connections: usize,
    /// The block.
    #[arg(long, default_value_t = 0)]
    pub block: u64,
}

/// Runs the case: connects, then asks once, all at the same moment. Ends when all are answered, or with the
/// hold.
///
/// # Errors
/// A connection is refused, or a task panicked.
pub async fn run(target: &Target, options: &Options, hold: &Hold, tally: &Tally) -> io::Result<()> {
    let mut connections = Vec::new();
    for _ in 0..options.connections.clamp(1, options.callers.max(1)) {
        connections.push(Arc::new(Connection::open(target).await?));
        tally.connected();
    }
    let connections = Arc::new(connections);
    let start = Arc::new(Barrier::new(connections.len()));
    let message = Arc::new(fetch_blocks(target, [options.block]));
    let target = Arc::new(target.clone());
    each(connections.len(), |number| {
        let connection = Arc::clone(&connections[number]);
        // The first ones take the remainder.
        let callers =
            options.callers / connections.len() + usize::from(number < options.callers % connections.len());
        let (start, hold, tally) = (Arc::clone(&start), hold.clone(), tally.clone());
        let (message, target, block) = (Arc::clone(&message), Arc::clone(&target), options.block);
        async move {
            start.wait().await;
            let mut calls = JoinSet::new();
            for _ in 0..callers {
                let (connection, message) = (Arc::clone(&connection), Arc::clone(&message));
                let (target, tally) = (Arc::clone(&target), tally.clone());
                calls.spawn(async move {
                    tally.change(|counts| counts.calls += 1);
                    let begun = Instant::now();
                    let ended = connection.call(&message).await;
                    let after = begun.elapsed();
                    if let Ended::Answered(data) = &ended
                        && !target.is_block(block, &blocks_of(data))
                    {
                        tally.change(|counts| counts.answers_wrong += 1);
                    }
                    ended.count(after, &tally);
                });
            }
            hold.unless_ended(async { while calls.join_next().await.is_some() {} })
                .await;
            tally.disconnected();
        }
    })
    .await
}
