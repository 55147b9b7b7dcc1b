//! What clients do to a daemon: one module per case, each with a `run` that ends with its hold.

pub mod big_answers;
pub mod floods;
pub mod friendly;
pub mod half_open;
pub mod herd;
pub mod paced;
pub mod partial_bodies;
pub mod stalled;

use crate::hold::Hold;
use std::future::Future;
use std::io;
use std::time::Duration;
use tokio::task::JoinSet;

/// After this pause a case replaces a lost connection.
const RECONNECT_AFTER: Duration = Duration::from_secs(1);
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
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(io::Error::other)?;
    }
    Ok(())
}

/// Repeats `once`, each time with a new connection, until the hold ends, or runs it only once.
async fn again<Fut: Future<Output = ()>>(hold: &Hold, reconnect: bool, mut once: impl FnMut() -> Fut) {
    loop {
        once().await;
        if !reconnect || !hold.pause(RECONNECT_AFTER).await {
            return;
        }
    }
}
