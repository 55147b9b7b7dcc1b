//! Callers that fetch large answers, one after the other or many at once, and read them. Also the overload of
//! a slow disk: more reads than it can serve.

use super::each;
use crate::grpc::{Connection, Ended, fetch_blocks};
use crate::hold::Hold;
use crate::tally::Tally;
use crate::target::Target;
use http::HeaderValue;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Pause after a refusal, as short as a careless client's.
const AFTER_REFUSAL: Duration = Duration::from_millis(1);

/// Number of callers and size of their answers.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Callers, each with a connection.
    #[arg(long, default_value_t = 8)]
    pub callers: usize,
    /// Calls that each has in flight.
    #[arg(long, default_value_t = 1)]
    pub calls: usize,
    /// Blocks of each answer.
    #[arg(long, default_value_t = 4096)]
    pub answer_blocks: u64,
    /// Blocks at random places, each a read of its own, instead of neighbours.
    #[arg(long)]
    pub scattered: bool,
}

/// Runs the case.
///
/// # Errors
/// A task panicked.
pub async fn run(target: &Target, options: &Options, hold: &Hold, tally: &Tally) -> io::Result<()> {
    each(options.callers, |caller| {
        let (target, options, hold, tally) = (target.clone(), options.clone(), hold.clone(), tally.clone());
        async move {
            while !hold.has_ended() {
                let connection = match hold.unless_ended(Connection::open(&target)).await {
                    None => return,
                    Some(Err(error)) => {
                        tally.connect_failed(&error);
                        hold.pause(super::RECONNECT_AFTER).await;
                        continue;
                    }
                    Some(Ok(connection)) => Arc::new(connection),
                };
                tally.connected();
                let mut calls = JoinSet::new();
                for call in 0..options.calls {
                    let seed = u64::try_from(caller * 65_537 + call).unwrap_or(0);
                    let (connection, target) = (Arc::clone(&connection), target.clone());
                    let (options, hold, tally) = (options.clone(), hold.clone(), tally.clone());
                    calls.spawn(async move {
                        let mut random = fastrand::Rng::with_seed(seed);
                        let blocks = options.answer_blocks.min(target.blocks);
                        let message = || {
                            let first = random.u64(..=target.blocks.saturating_sub(blocks));
                            if options.scattered {
                                fetch_blocks(&target, (0..blocks).map(|_| random.u64(..target.blocks)))
                            } else {
                                fetch_blocks(&target, first..first.saturating_add(blocks))
                            }
                        };
                        let authorization = connection.authorization.as_ref();
                        fetch(&connection, authorization, message, &hold, &tally).await;
                    });
                }
                while calls.join_next().await.is_some() {}
                tally.disconnected();
                hold.pause(AFTER_REFUSAL).await;
            }
        }
    })
    .await
}

/// Makes one call after the other until the connection breaks.
pub(super) async fn fetch(
    connection: &Connection,
    authorization: Option<&HeaderValue>,
    mut message: impl FnMut() -> Vec<u8>,
    hold: &Hold,
    tally: &Tally,
) {
    loop {
        let message = message();
        let begun = Instant::now();
        tally.change(|counts| counts.calls += 1);
        let Some(ended) = hold
            .unless_ended(connection.call_as(authorization, &message))
            .await
        else {
            return;
        };
        ended.count(begun.elapsed(), tally);
        match ended {
            Ended::Answered(_) => {}
            Ended::Refused(_) if hold.pause(AFTER_REFUSAL).await => {}
            Ended::Refused(_) | Ended::Broken(_) => return,
        }
    }
}
