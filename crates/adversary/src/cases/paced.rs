//! A reader of single blocks at a steady rate on one connection, measured. On the same connection, as through
//! a proxy, another principal may read as much as it gets.

use super::{all, big_answers};
use crate::grpc::{Connection, Ended, blocks_of, fetch_blocks};
use crate::hold::Hold;
use crate::tally::Tally;
use crate::target::Target;
use crate::victim::{End, Figures, Measured, WRONG};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

/// Rate of the reader, and the other principal.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Requests a second.
    #[arg(long, default_value_t = 1000.0)]
    pub rate: f64,
    /// Token of the other principal; left out, there is none.
    #[arg(long)]
    pub beside_token: Option<String>,
    /// Calls that it has in flight.
    #[arg(long, default_value_t = 64)]
    pub beside_calls: usize,
    /// Blocks of each of its answers, at random places.
    #[arg(long, default_value_t = 64)]
    pub beside_blocks: u64,
}

/// Runs the case; returns what the reader got. The tally counts the other principal.
///
/// # Errors
/// The connection could not be made, or a task panicked.
pub async fn run(target: &Target, options: &Options, hold: &Hold, tally: &Tally) -> io::Result<Figures> {
    let connection = Arc::new(Connection::open(target).await?);
    let target = Arc::new(target.clone());
    let mut others = JoinSet::new();
    if let Some(authorization) = Target::authorization(options.beside_token.as_deref())? {
        for call in 0..options.beside_calls {
            let (connection, target, blocks) = (
                Arc::clone(&connection),
                Arc::clone(&target),
                options.beside_blocks,
            );
            let (hold, tally, authorization) = (hold.clone(), tally.clone(), authorization.clone());
            let mut random = fastrand::Rng::with_seed(u64::try_from(call).unwrap_or(0));
            others.spawn(async move {
                let message = || fetch_blocks(&target, (0..blocks).map(|_| random.u64(..target.blocks)));
                big_answers::fetch(&connection, Some(&authorization), message, &hold, &tally).await;
            });
        }
    }
    let measured = Arc::new(Mutex::new(Measured::new()));
    let mut asked = JoinSet::new();
    let mut random = fastrand::Rng::with_seed(7);
    let mut ticks = tokio::time::interval(Duration::from_secs_f64(1.0 / options.rate));
    // A late tick is a late request, not a missing one.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    while hold.unless_ended(ticks.tick()).await.is_some() {
        let block = random.u64(..target.blocks);
        let message = fetch_blocks(&target, [block]);
        let (connection, measured, target) = (
            Arc::clone(&connection),
            Arc::clone(&measured),
            Arc::clone(&target),
        );
        asked.spawn(async move {
            let begun = Instant::now();
            let ended = connection.call(&message).await;
            let after = begun.elapsed();
            let end = match ended {
                Ended::Answered(data) if target.is_block(block, &blocks_of(&data)) => End::Ok,
                Ended::Answered(_) => End::Failed(WRONG.to_owned()),
                Ended::Refused(code) => End::Refused(code),
                Ended::Broken(how) => End::Failed(how),
            };
            let mut measured = measured.lock().unwrap_or_else(PoisonError::into_inner);
            measured.end(end, after);
        });
        while let Some(ended) = asked.try_join_next() {
            ended.map_err(io::Error::other)?;
        }
    }
    all(&mut asked).await?;
    all(&mut others).await?;
    let measured = std::mem::replace(
        &mut *measured.lock().unwrap_or_else(PoisonError::into_inner),
        Measured::new(),
    );
    Ok(measured.figures(Duration::ZERO))
}
