//! State shared by the calls and streams of one client.

use crate::pool::Pool;
use crate::retry::{RetryPolicy, Tokens};
use tokio::sync::Semaphore;

/// State shared by all clones of a client and its streams.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) pool: Pool,
    pub(crate) permits: Semaphore,
    pub(crate) max_in_flight: usize,
    pub(crate) retry: RetryPolicy,
    pub(crate) tokens: Tokens,
    pub(crate) max_answer_bytes: usize,
}
