//! What clients do to a daemon: one module per case, each with a `run` that ends with its hold.

pub mod big_answers;
pub mod floods;
pub mod friendly;
pub mod half_open;
pub mod herd;
pub mod paced;
pub mod partial_bodies;
pub mod pinned_buffers;
pub mod stalled;

use crate::hold::Hold;
use crate::tally::Tally;
use std::future::Future;
use std::io;
use std::time::Duration;
use tokio::task::JoinSet;

/// After this pause a case replaces a lost connection.
const RECONNECT_AFTER: Duration = Duration::from_secs(1);
/// The same for attacks that send as much as they can.
const REPLACE_AFTER: Duration = Duration::from_millis(10);
/// Most connections opened at a time; more would overflow the kernel's queue of handshakes.
const OPENING_AT_A_TIME: usize = 64;

/// Runs one task per connection and waits for all.
async fn each<F, Fut>(connections: usize, task: F) -> io::Result<()>
where
    F: Fn(usize) -> Fut,
    Fut: Future<Output = ()> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    for number in 0..connections {
        tasks.spawn(task(number));
    }
    all(&mut tasks).await
}

async fn all(tasks: &mut JoinSet<()>) -> io::Result<()> {
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(io::Error::other)?;
    }
    Ok(())
}

/// Connects, and counts the connection while `attack` has it. Once, or with a pause to reconnect after, until the hold
/// ends.
async fn again<C, Connect, Attack>(
    hold: &Hold,
    tally: &Tally,
    reconnect_after: Option<Duration>,
    connect: impl Fn() -> Connect,
    attack: impl Fn(C) -> Attack,
) where
    Connect: Future<Output = io::Result<C>>,
    Attack: Future<Output = ()>,
{
    loop {
        match hold.unless_ended(connect()).await {
            None => {}
            Some(Err(error)) => tally.connect_failed(&error),
            Some(Ok(connection)) => {
                tally.connected();
                attack(connection).await;
                tally.disconnected();
            }
        }
        match reconnect_after {
            Some(pause) if hold.pause(pause).await => {}
            Some(_) | None => return,
        }
    }
}
