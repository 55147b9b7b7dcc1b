//! What clients do to a daemon: one module a case, each with a `run` that ends with its hold.

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

/// A case that has lost a connection opens another after this pause.
const RECONNECT_AFTER: Duration = Duration::from_secs(1);
/// Connections are opened so many at a time, or the kernel's queue of handshakes overflows.
const OPENING_AT_A_TIME: usize = 64;

/// Runs one task a connection and waits for all.
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

/// Does the same with one connection after the other until the hold ends, or only once.
async fn again<Fut: Future<Output = ()>>(hold: &Hold, reconnect: bool, mut once: impl FnMut() -> Fut) {
    loop {
        once().await;
        if !reconnect || !hold.pause(RECONNECT_AFTER).await {
            return;
        }
    }
}
