//! What calls and streams of one client share.

use crate::pool::Pool;
use crate::retry::{RetryPolicy, Tokens};
use tokio::sync::Semaphore;

/// What all clones of a client, and its streams, share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) pool: Pool,
    pub(crate) permits: Semaphore,
    pub(crate) max_in_flight: usize,
    pub(crate) retry: RetryPolicy,
    pub(crate) tokens: Tokens,
    pub(crate) max_answer_bytes: usize,
}
