//! State shared by the calls and streams of one client, and an attempt at a call with it.

use crate::connection::Endpoint;
use crate::error::Error;
use crate::pool::{Avoid, Lease, Pool};
use crate::retry::{Allowance, Turn, by};
use bytes::Bytes;
use h2::SendStream;
use h2::client::ResponseFuture;
use http::Request;
use tokio::sync::Semaphore;

/// State shared by all clones of a client and its streams.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) pool: Pool,
    pub(crate) permits: Semaphore,
    pub(crate) max_in_flight: usize,
    pub(crate) retries: Allowance,
    pub(crate) max_answer_bytes: usize,
}

impl Core {
    /// One attempt at a call, which `exchange` carries out on the least busy connection. What fails there and may be tried
    /// again is avoided by the next attempt, and by other calls for a while. Returns the connection with the outcome.
    ///
    /// # Errors
    /// No connection: nothing was sent.
    pub(crate) async fn attempt<T, F>(
        &self,
        turn: Turn,
        avoid: &mut Avoid,
        head: impl Fn(&Endpoint) -> Request<()>,
        exchange: impl FnOnce(ResponseFuture, SendStream<Bytes>) -> F,
    ) -> Result<(Lease<'_>, Result<T, Error>), Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let Some(begun) = by(turn.deadline, self.pool.call(avoid, head)).await else {
            let first = Error::unreachable("no connection within the call's timeout".to_owned());
            return Err(turn.unsent(first));
        };
        let (lease, response, body) = begun?;
        let outcome = by(turn.deadline, exchange(response, body)).await;
        let outcome = outcome.unwrap_or_else(|| {
            lease.slot.late();
            Err(Error::DeadlineExceeded)
        });
        if let Err(error) = &outcome
            && error.is_retryable()
        {
            avoid.add(lease.slot, error.retry_after());
            // Also if its connection broke: otherwise it would be the least busy for the next call.
            lease.slot.refused(error.retry_after());
        }
        Ok((lease, outcome))
    }
}
