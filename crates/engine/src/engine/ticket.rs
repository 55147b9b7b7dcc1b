//! The handle of a submitted batch.

use crate::batch::Fetched;
use crate::error::ReadError;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::sync::oneshot;

/// A batch in flight. Dropping it cancels the batch: reads not yet submitted are not made; reads in flight finish and
/// their memory returns to the pool.
#[derive(Debug)]
pub struct Ticket {
    pub(super) answer: Answer,
}

#[derive(Debug)]
pub(super) enum Answer {
    Awaited(oneshot::Receiver<Result<Fetched, ReadError>>),
    /// Answered at submission; `None` once taken.
    Made(Option<Fetched>),
}

impl Future for Ticket {
    type Output = Result<Fetched, ReadError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.answer {
            Answer::Awaited(answer) => Pin::new(answer)
                .poll(cx)
                .map(|answer| answer.unwrap_or(Err(ReadError::ShardFailed))),
            Answer::Made(fetched) => {
                // A task with many requests yields to others, as it does when their replies come from a
                // shard.
                ready!(tokio::task::coop::poll_proceed(cx)).made_progress();
                Poll::Ready(fetched.take().ok_or(ReadError::ShardFailed))
            }
        }
    }
}

impl Ticket {
    /// Blocks the calling thread, for callers without a runtime. Panics inside one: await the ticket there.
    ///
    /// # Errors
    /// As awaiting the ticket.
    pub fn wait(self) -> Result<Fetched, ReadError> {
        match self.answer {
            Answer::Awaited(answer) => answer.blocking_recv().unwrap_or(Err(ReadError::ShardFailed)),
            Answer::Made(fetched) => fetched.ok_or(ReadError::ShardFailed),
        }
    }
}
